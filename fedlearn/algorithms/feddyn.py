r"""FedDyn: each client's regularizer changes so that all agree on the minimum of the mean loss.

====================================== ==========================================
symbol                                 here
====================================== ==========================================
:math:`\theta^{t-1}, \theta_k`         global parameters, a client's
:math:`\alpha`                         ``alpha``
:math:`-\nabla L_k(\theta_k)/\alpha`   ``drift`` of a client: the sum of its updates
:math:`-h/\alpha`                      ``drift`` of the server
:math:`m, P_t`                         ``num_clients``, the clients that reported
====================================== ==========================================

Both vectors are stored divided by :math:`-\alpha`. They are then sums of updates, and a change of
one needs no multiplication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Aggregate, Over
from fedlearn.algorithms.local import (
    MODEL,
    Affine,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    find_affine_step,
    require_update,
)
from fedlearn.algorithms.recipes import Local
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, Positive, Ranged

_DRIFT = "drift"

Alpha: TypeAlias = Annotated[Positive, doc("Strength of the regularizer, > 0.")]
NumClients: TypeAlias = Annotated[Count, doc("Clients in the population, >= 1.")]


@dataclass(frozen=True, kw_only=True)
class DynamicRegularizer(Ranged, LocalUpdateWrapper):
    r"""Adds :math:`\alpha (x - x_0) - \nabla L_k` to each gradient, and updates :math:`\nabla L_k`.

    Afterwards :math:`\nabla L_k \leftarrow \nabla L_k - \alpha (\theta_k - \theta^{t-1})`, which is
    the gradient of the client's loss if it has trained to the end.

    Attributes:
        inner: Any local update.
        alpha: See :func:`FedDyn`.
    """

    takes_flat: ClassVar[bool] = True

    alpha: Alpha

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, and the sum of the client's updates."""
        return {**self.inner.memory, _DRIFT: MemorySpec(over=Over.TRAINABLE, is_kept=True)}

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's affine step with the regularizer, if it has one."""
        inner = find_affine_step(self.inner)
        # An affine step has room for one drift.
        if inner is None or (rule := inner(moment)) is None or rule.shift:
            return None
        force = rule.scale * self.alpha
        return rule._replace(keep=rule.keep + force, shift=force)

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin the inner update, and subtract the global model from the sum of updates."""
        # Until the report, so that a step adds one vector instead of two.
        torch._foreach_sub_(list(memory[_DRIFT]), list(broadcast[MODEL]))
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)

    def drift(self, memory: Memory, *, broadcast: Memory) -> Tensors:
        r"""Return :math:`-\nabla L_k / \alpha - \theta^{t-1}`."""
        return memory[_DRIFT]

    def count_steps(self, memory: Memory, *, num_steps: Tensor) -> None:
        """Do nothing: the memory does not depend on the number of steps."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step by the gradients of the regularized loss."""
        force = add_scaled(x, memory[_DRIFT], factor=1.0)
        directions = add_scaled(grads, force, factor=self.alpha)
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Add the update to the client's sum, and return the inner update's report."""
        torch._foreach_add_(list(memory[_DRIFT]), list(x))  # the global model is subtracted
        return self.inner.report(x, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class DynamicAveraging(Ranged, Strategy):
    r"""The server's part of FedDyn; :func:`FedDyn` makes it.

    :math:`h \leftarrow h - \frac{\alpha}{m} \sum_{k \in P_t} (\theta_k - \theta^{t-1})`,
    :math:`\theta^t = \frac{1}{|P_t|} \sum_{k \in P_t} \theta_k - h / \alpha`.

    Attributes:
        local: Local training with the regularizer.
        num_clients: See :func:`FedDyn`.
    """

    local: DynamicRegularizer
    num_clients: NumClients

    @property
    def aggregation(self) -> WeightedMean:
        """The unweighted mean: each client counts the same."""
        return WeightedMean(by_examples=False)

    @property
    def needs_same_round(self) -> str:
        """The server's vector is the mean of the clients', all taken at the same model."""
        return (
            "the server's regularizer is the mean of the clients', each of which must change by "
            "what it counts for, but an update based on an older model counts for less"
        )

    def init(self, params: Params) -> State:
        """Return the server's vector, zero."""
        return {_DRIFT: params.vector.new_zeros(params.layout.num_trainable)}

    def without_clients(self, params: Params, state: State) -> State:
        """Return a vector of zero: the mean of the clients', which start from zero."""
        return self.init(params)

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Return the next model and the server's vector.

        Raises:
            ValueError: More clients contributed than the population has.
        """
        share = aggregate.num_clients / self.num_clients
        if share > 1.0:
            raise ValueError(
                f"num_clients is {self.num_clients}, but {aggregate.num_clients} clients "
                "contributed; set it to the number of clients in the population"
            )
        delta_P, last = aggregate.lanes[DELTA.name], params.layout.num_trainable
        drift_Q = state[_DRIFT] + share * delta_P[:last]
        vector = params.vector + delta_P
        vector[:last] += drift_Q
        return StepResult(params.with_vector(vector), {_DRIFT: drift_Q})


@explain_calls
def FedDyn(local: Local, *, alpha: Alpha, num_clients: NumClients) -> DynamicAveraging:
    """FedDyn: a regularizer that clients keep, so that data that differ cause no drift.

    Secure aggregation and privacy accept it. If they clip an update, the client's regularizer
    changes by more than the server's, so choose a clip norm that few updates reach.

    Raises:
        ValueError: A number is not in its range.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> list(fl.FedDyn(local, alpha=0.1, num_clients=100).local.memory)  # what clients keep
        ['drift']

    References:
        Acar et al., 2021, `Federated Learning Based on Dynamic Regularization
        <https://arxiv.org/abs/2111.04263>`_, algorithm 1. As there, each client counts the same.
    """
    require_update(local, name="local")
    return DynamicAveraging(
        local=DynamicRegularizer(inner=local, alpha=alpha), num_clients=num_clients
    )
