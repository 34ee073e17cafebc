r"""FedNova: clients that take more steps do not pull the model towards their own minimum.

========================== ===================================================
symbol                     here
========================== ===================================================
:math:`x, y_i`             global parameters, a client's
:math:`\tau_i`             ``num_steps_K``
:math:`\|a_i\|_1`          the lane ``effective_steps``
:math:`d_i`                a client's ``delta`` over the learning rate, negated
:math:`\tau_{eff}`         the metric ``effective_steps``
:math:`p_i`                the weight of a client
:math:`\rho, \eta\mu`      ``momentum``, ``pull``
========================== ===================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.effective_steps import count_effective_steps
from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec
from fedlearn.algorithms.local import (
    MODEL,
    Affine,
    LocalSgd,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    iter_updates,
    require_constant_rate,
    require_update,
)
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.recipes import ByExamples, Local
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Positive

_STEPS = "effective_steps"

StepsBound: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Largest number of steps of a client that counts, > 0. Secure aggregation and privacy "
        "need it; not set: no limit."
    ),
]


@dataclass(frozen=True, kw_only=True)
class NormalizedUpdate(LocalUpdateWrapper):
    r"""Sends the update divided by the effective steps, and their number.

    Attributes:
        inner: SGD at a constant rate, perhaps with FedProx's proximal term. Momentum must not be
            kept between rounds.
        effective_steps_bound: See :func:`FedNova`.

    Raises:
        ValueError: The inner update is another, or the bound is not positive.
    """

    takes_flat: ClassVar[bool] = True
    needs_constant_rate: ClassVar[str] = "FedNova"

    effective_steps_bound: float | None

    def __post_init__(self) -> None:
        sgd, *pulls = iter_updates(self.inner)
        # `type`, not isinstance: a subclass may step in another way.
        if (
            type(sgd) is not LocalSgd
            or sgd.keep_momentum
            or any(type(each) is not Proximal for each in pulls)
        ):
            raise ValueError(
                "FedNova must know how far each gradient moves a client, but the local update is "
                f"{self.inner!r}; give a LocalSgd without keep_momentum or schedule, or Proximal "
                "around one"
            )
        if self._pull >= 1.0:
            raise ValueError(
                f"learning_rate times proximal is {self._pull:g}, so a step goes beyond the global "
                "model; let it be below 1"
            )
        _ = self.lanes  # LaneSpec raises ValueError for an invalid bound

    @property
    def _sgd(self) -> LocalSgd:
        sgd = next(iter_updates(self.inner))
        assert isinstance(sgd, LocalSgd)  # checked in __post_init__
        return sgd

    @property
    def _pull(self) -> float:
        pulls = (each.proximal for each in iter_updates(self.inner) if isinstance(each, Proximal))
        return self._sgd.learning_rate * sum(pulls)

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The number of effective steps."""
        own = LaneSpec(
            name=_STEPS,
            over=1,
            weighted=True,
            bound=self.effective_steps_bound,
            bound_remedy="set algorithm.effective_steps_bound",
        )
        return (own,)

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's affine step; raises ValueError as :meth:`step` does."""
        require_constant_rate(moment, who=self.needs_constant_rate)
        return super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step.

        Raises:
            ValueError: A wrapper around this one has changed the rate.
        """
        require_constant_rate(moment, who=self.needs_constant_rate)
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Divide the update by the effective steps, in place, and return their number."""
        momentum, pull = self._sgd.momentum, self._pull
        norms_K = count_effective_steps(moment.num_steps_K, momentum=momentum, pull=pull)
        for y, start in zip(x, broadcast[MODEL], strict=True):
            shape = (-1, *[1] * (y.dim() - 1))
            y.sub_(start).div_(norms_K.view(shape)).add_(start)
        return {_STEPS: [norms_K[:, None]]}


@dataclass(frozen=True, kw_only=True)
class NormalizedAveraging(Strategy):
    r"""Normalized averaging; :func:`FedNova` makes it.

    :math:`x \leftarrow x - \tau_{eff} \sum_i p_i \eta d_i` with
    :math:`\tau_{eff} = \sum_i p_i \|a_i\|_1`.

    Attributes:
        local: SGD that sends normalized updates.
        aggregation: The mean of the updates and of the effective steps.
    """

    local: NormalizedUpdate
    aggregation: WeightedMean

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Step along the mean of normalized updates as far as clients went on average."""
        # Every client takes at least one step, so only the noise of privacy gives a mean below 1.
        steps = max(1.0, float(aggregate.lanes[_STEPS]))
        server = ServerSgd(learning_rate=steps, momentum=0.0)
        moved, _ = server.step(params, aggregate.lanes[DELTA.name], {})
        return StepResult(moved, {}, {_STEPS: steps})


@explain_calls
def FedNova(
    local: Local,
    *,
    effective_steps_bound: StepsBound = None,
    weight_by_examples: ByExamples = True,
) -> NormalizedAveraging:
    """FedNova: FedAvg of updates per step, for clients that take different numbers of steps.

    Raises:
        ValueError: ``local`` is not SGD at a constant rate, with or without a proximal term; or the
            bound is not positive.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1, momentum=0.9)
        >>> [lane.name for lane in fl.FedNova(local).lanes]  # what clients send
        ['delta', 'effective_steps']

    References:
        Wang et al., 2020, `Tackling the Objective Inconsistency Problem in Heterogeneous Federated
        Optimization <https://arxiv.org/abs/2007.07481>`_, equation 7. If all clients take the same
        number of steps it is FedAvg.
    """
    require_update(local, name="local")
    return NormalizedAveraging(
        local=NormalizedUpdate(inner=local, effective_steps_bound=effective_steps_bound),
        aggregation=WeightedMean(by_examples=weight_by_examples),
    )
