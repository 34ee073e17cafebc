r"""FedExP: the server steps farther along the mean update, the more the clients' updates disagree.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`\Delta_i`           a client's ``delta``, negated
:math:`\|\Delta_i\|^2`     the lane ``square_norm``
:math:`\bar\Delta`         the aggregated ``delta``, negated
:math:`\epsilon`           ``epsilon``
:math:`\eta_g`             the metric ``server_learning_rate``
========================== ==========================================
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
    require_update,
)
from fedlearn.algorithms.recipes import ByExamples, Local
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Positive, Ranged

_SQUARE = "square_norm"

Epsilon: TypeAlias = Annotated[
    Positive, doc("Keeps the server's step finite when updates cancel, > 0.")
]
SquareBound: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Largest squared L2 norm of an update that counts, > 0, such as the square of the clip "
        "norm. Secure aggregation and privacy need it; not set: no limit."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReportedNorm(LocalUpdateWrapper):
    """Reports the squared L2 norm of the update, without running statistics.

    Attributes:
        inner: Any local update.
        square_norm_bound: See :func:`FedExP`.

    Raises:
        ValueError: The bound is not positive.
    """

    takes_flat: ClassVar[bool] = True

    square_norm_bound: float | None

    def __post_init__(self) -> None:
        _ = self.lanes  # LaneSpec raises ValueError for an invalid bound

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner update's, and the squared norm."""
        own = LaneSpec(
            name=_SQUARE,
            over=1,
            weighted=True,
            bound=self.square_norm_bound,
            bound_remedy="set algorithm.square_norm_bound",
        )
        return (*self.inner.lanes, own)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Return the inner update's report, and the squared norm of what it sends."""
        lanes = self.inner.report(x, memory, broadcast=broadcast, moment=moment)
        pairs = zip(x, broadcast[MODEL], strict=True)
        squares = [(y - start).flatten(1).square().sum(1, keepdim=True) for y, start in pairs]
        return {**lanes, _SQUARE: [torch.cat(squares, dim=1).sum(1, keepdim=True)]}


@dataclass(frozen=True, kw_only=True)
class ExtrapolatedAveraging(Ranged, Strategy):
    r"""FedAvg with an adaptive server step; :func:`FedExP` makes it.

    :math:`\eta_g = \max(1, \sum_i p_i \|\Delta_i\|^2 / (2 (\|\bar\Delta\|^2 + \epsilon)))`,
    :math:`x \leftarrow x - \eta_g \bar\Delta`.

    Attributes:
        local: Local training that reports the norm of its update.
        aggregation: The mean of the updates and of their squared norms.
        epsilon: See :func:`FedExP`.
    """

    local: ReportedNorm
    aggregation: WeightedMean
    epsilon: Epsilon

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Step along the mean update, and record the server's learning rate."""
        delta_P = aggregate.lanes[DELTA.name]
        delta_Q = delta_P[: params.layout.num_trainable]
        norm = float(torch.linalg.vector_norm(delta_Q, dtype=torch.float64))
        rate = float(aggregate.lanes[_SQUARE]) / (2.0 * (norm**2 + self.epsilon))
        # Below 1 the mean itself is the better step, as in the paper.
        rate = max(1.0, rate)
        moved, _ = ServerSgd(learning_rate=rate, momentum=0.0).step(params, delta_P, {})
        return StepResult(moved, {}, {"server_learning_rate": rate})


@explain_calls
def FedExP(
    local: Local,
    *,
    epsilon: Epsilon,
    square_norm_bound: SquareBound = None,
    weight_by_examples: ByExamples = True,
) -> ExtrapolatedAveraging:
    """FedExP: FedAvg whose server step grows when clients' updates disagree.

    The paper evaluates the mean of the last two models, since single ones may oscillate. Here the
    last model is evaluated.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> [lane.name for lane in fl.FedExP(local, epsilon=1e-3).lanes]  # what clients send
        ['delta', 'square_norm']

    References:
        Jhunjhunwala, Wang and Joshi, 2023, `FedExP: Speeding Up Federated Averaging via
        Extrapolation <https://arxiv.org/abs/2301.09604>`_, algorithm 1. With one client it is
        FedAvg.
    """
    require_update(local, name="local")
    return ExtrapolatedAveraging(
        local=ReportedNorm(inner=local, square_norm_bound=square_norm_bound),
        aggregation=WeightedMean(by_examples=weight_by_examples),
        epsilon=epsilon,
    )
