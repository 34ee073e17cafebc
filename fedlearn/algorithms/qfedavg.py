r"""q-FedAvg: clients with a large loss count more, so that accuracies become more alike.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`F_k(w^t)`           loss of the global model on the client's examples
:math:`q`                  ``fairness``
:math:`L`                  ``1 / step_size``
:math:`-\Delta_k`          the ``delta`` that a client sends
:math:`h_k`                the lane ``normalizer``
========================== ==========================================

.. math::

    \Delta w_k = L (w^t - \bar w_k), \qquad \Delta_k = F_k^q(w^t) \Delta w_k, \qquad
    h_k = q F_k^{q - 1}(w^t) \|\Delta w_k\|^2 + L F_k^q(w^t),

.. math:: w^{t + 1} = w^t - \sum_k \Delta_k \Big/ \sum_k h_k .
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec
from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    add_scaled,
    flatten_rows,
    require_update,
)
from fedlearn.algorithms.recipes import Local
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import NotNegative, Positive, Ranged

_NORMALIZER = "normalizer"
#: Keeps powers of a loss finite, as in the authors' code.
_LEAST_LOSS = 1e-10

Fairness: TypeAlias = Annotated[
    NotNegative, doc("How much more clients with a large loss count, >= 0; 0: all the same.")
]
StepSize: TypeAlias = Annotated[
    Positive, doc("Inverse of the loss's smoothness, > 0; the paper takes the learning rate.")
]
NormalizerBound: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Largest normalizer of a client that counts, > 0. Secure aggregation and privacy need it; "
        "not set: no limit."
    ),
]


@dataclass(frozen=True, kw_only=True)
class FairUpdate(Ranged, LocalUpdateWrapper):
    """Sends the update times a power of the loss, and its part of the normalizer.

    Attributes:
        inner: Any local update.
        fairness: See :func:`QFedAvg`, as for the others.
    """

    asks_gradients: ClassVar[bool] = True

    fairness: Fairness
    step_size: StepSize
    normalizer_bound: NormalizerBound

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner update's, and the normalizer."""
        own = LaneSpec(
            name=_NORMALIZER,
            over=1,
            weighted=True,
            bound=self.normalizer_bound,
            bound_remedy="set algorithm.normalizer_bound",
        )
        return (*self.inner.lanes, own)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Scale the update in place, and return the normalizer."""
        lanes = self.inner.report(x, memory, broadcast=broadcast, moment=moment)
        model = [each.expand_as(value) for each, value in zip(broadcast[MODEL], x, strict=True)]
        losses_K, _ = moment.gradient_at(model)  # F_k(w^t)
        losses_K = losses_K.clamp(min=_LEAST_LOSS)
        q, smoothness = self.fairness, 1.0 / self.step_size
        moves = add_scaled(x, model, factor=-1.0)
        squares_K = flatten_rows(moves).square().sum(1) * smoothness**2
        power_K = losses_K**q
        normalizer_K = q * losses_K ** (q - 1.0) * squares_K + smoothness * power_K
        for value, start, move in zip(x, model, moves, strict=True):
            scale_K = (smoothness * power_K).view(-1, *[1] * (value.dim() - 1))
            value.copy_(start + scale_K * move)
        return {**lanes, _NORMALIZER: [normalizer_K[:, None]]}


@dataclass(frozen=True, kw_only=True)
class FairAveraging(Ranged, Strategy):
    """The sum of the scaled updates over the sum of the normalizers; :func:`QFedAvg` makes it.

    Statistics such as BatchNorm's move by their mean.

    Attributes:
        local: Local training that sends scaled updates.
    """

    local: FairUpdate

    @property
    def aggregation(self) -> WeightedMean:
        """The unweighted mean, of which :meth:`step` takes a ratio."""
        return WeightedMean(by_examples=False)

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Move by the mean scaled update over the mean normalizer."""
        delta_P, last = aggregate.lanes[DELTA.name], params.layout.num_trainable
        normalizer = aggregate.lanes[_NORMALIZER]
        moved = torch.cat([delta_P[:last] / normalizer, delta_P[last:]])
        metrics = {_NORMALIZER: float(normalizer)}
        return StepResult(params.with_vector(params.vector + moved), {}, metrics)


@explain_calls
def QFedAvg(
    local: Local,
    *,
    fairness: Fairness,
    step_size: StepSize,
    normalizer_bound: NormalizerBound = None,
) -> FairAveraging:
    """q-FedAvg: an average in which clients with a large loss count more.

    A client computes the loss of the global model on its examples, which takes one more epoch.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> [lane.name for lane in fl.QFedAvg(local, fairness=1.0, step_size=0.1).lanes]
        ['delta', 'normalizer']

    References:
        Li, Sanjabi, Beirami and Smith, 2020, `Fair Resource Allocation in Federated Learning
        <https://arxiv.org/abs/1905.10497>`_, algorithm 2. With q = 0 it is FedAvg with equal
        weights.
    """
    require_update(local, name="local")
    fair = FairUpdate(
        inner=local, fairness=fairness, step_size=step_size, normalizer_bound=normalizer_bound
    )
    return FairAveraging(local=fair)
