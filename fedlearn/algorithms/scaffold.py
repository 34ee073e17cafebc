r"""SCAFFOLD: control variates correct the drift of clients whose data differ.

========================= ===========================================
symbol                    here
========================= ===========================================
:math:`x, y_i`            global parameters, a client's
:math:`c, c_i`            ``control`` of the server and of a client
:math:`\eta_l, \eta_g`    ``learning_rate``, ``server_learning_rate``
:math:`K`                 ``num_steps``
:math:`N, S`              ``num_clients``, the clients that reported
========================= ===========================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.effective_steps import count_effective_steps
from fedlearn.algorithms.lanes import Aggregate, Lanes, LaneSpec, Over
from fedlearn.algorithms.local import (
    Affine,
    LocalSgd,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    require_constant_rate,
)
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, Positive, Ranged

_CONTROL, _COUNTS, _CHANGE = "control", "num_gradients", "change"


@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalUpdateWrapper):
    r"""SGD along :math:`g - c_i + c`; afterwards :math:`c_i` becomes the mean of the gradients.

    Option II of the paper: :math:`c_i^+ = c_i - c + (x - y_i) / (K \eta_l)`. In steps in which a
    tensor had no gradient, it did not move; these count as gradients of zero. Weight decay is part
    of the gradient.

    With momentum, the corrected gradient enters the velocity, so that the first gradients of a
    round move the model farthest. :math:`c_i` becomes their mean with these weights, since
    :math:`K` is replaced by the sum :math:`\|a\|_1` of the weights, as in
    :mod:`~fedlearn.algorithms.fednova`. (NIID-Bench leaves the correction out of the velocity and
    divides by :math:`K`. Its clients drift even at a minimum, since the velocity begins at zero.)

    Attributes:
        inner: SGD at a constant rate, whose velocity, if any, begins at zero in each round.
        control_bound: Largest L2 norm of a change of :math:`c_i`, for secure aggregation; a longer
            one is scaled down to it. ``None``: no bound.

    Raises:
        ValueError: The inner update has other steps, or the bound is not positive.
    """

    takes_flat: ClassVar[bool] = True
    needs_constant_rate: ClassVar[str] = "SCAFFOLD"

    control_bound: float | None

    def __post_init__(self) -> None:
        # `type`, not isinstance: a subclass may step in another way.
        if type(self.inner) is not LocalSgd or self.inner.keep_momentum:
            raise ValueError(
                f"SCAFFOLD needs SGD steps at a constant rate, not {self.inner!r}; give a LocalSgd "
                "without schedule, and with keep_momentum false"
            )
        _ = self.lanes  # LaneSpec raises ValueError for an invalid bound

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The change of the client's control variate."""
        own = LaneSpec(
            name=_CONTROL,
            over=Over.TRAINABLE,
            weighted=False,
            bound=self.control_bound,
            bound_remedy="set algorithm.control_bound",
        )
        return (own,)

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, the control variate, its change, and each tensor's gradients."""
        return {
            **self.inner.memory,
            _CONTROL: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            _CHANGE: MemorySpec(over=Over.TRAINABLE, is_kept=False),
            _COUNTS: MemorySpec(over=Over.TENSORS, is_kept=False),
        }

    def affine(self, moment: Moment) -> Affine | None:
        """Return the step in affine form; raises ValueError as :meth:`step` does."""
        require_constant_rate(moment, who=self.needs_constant_rate)
        found = self._sgd.affine(moment)
        return None if found is None else found._replace(shift=self._sgd.learning_rate)

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Subtract :math:`c` from :math:`c_i`."""
        # Until the report, so that a step adds one vector instead of two.
        torch._foreach_sub_(list(memory[_CONTROL]), list(broadcast[_CONTROL]))

    def drift(self, memory: Memory, *, broadcast: Memory) -> Tensors:
        """Return :math:`c_i - c`."""
        return memory[_CONTROL]

    def count_steps(self, memory: Memory, *, num_steps: Tensor) -> None:
        """Count a gradient of each tensor in each step."""
        for count_K1 in memory[_COUNTS]:
            count_K1.add_(num_steps[:, None])

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step along the corrected gradient.

        Raises:
            ValueError: A wrapper around this one has changed the rate.
        """
        require_constant_rate(moment, who=self.needs_constant_rate)
        # Only tensors that have a gradient in this step are passed, so this counts their gradients.
        torch._foreach_add_(list(memory[_COUNTS]), 1.0)
        directions = add_scaled(grads, memory[_CONTROL], factor=-1.0)
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Update the client's control variate, and return its change."""
        count = partial(count_effective_steps, momentum=self._sgd.momentum)
        num_steps = count(moment.num_steps_K)
        changes, broadcast_values = list[Tensor](), (broadcast["model"], broadcast[_CONTROL])
        for y, x_0, c, own, change, count_K1 in zip(
            x,
            *broadcast_values,
            *(memory[each] for each in (_CONTROL, _CHANGE, _COUNTS)),
            strict=True,
        ):
            shape = (-1, *[1] * (y.dim() - 1))
            missed = 1.0 - count(count_K1[:, 0]) / num_steps
            # Option II: c_i^+ - c_i = (x - y_i) / (K * eta_l) - c
            steps = (num_steps * self._sgd.learning_rate).view(shape)
            torch.sub(x_0, y, out=change)
            torch.addcdiv(-c, change, steps, out=change)
            # A step without a gradient did not move x by c_i - c either, so add that share back.
            if missed.any():
                change.sub_(missed.to(y).view(shape) * own)
            changes.append(change)
        changes = self._scale_to_bound(changes)
        for own, c, change in zip(memory[_CONTROL], broadcast[_CONTROL], changes, strict=True):
            own.add_(c).add_(change)
        return {_CONTROL: changes}

    @property
    def _sgd(self) -> LocalSgd:
        assert isinstance(self.inner, LocalSgd)  # checked in __post_init__
        return self.inner

    def _scale_to_bound(self, changes: list[Tensor]) -> list[Tensor]:
        # The client scales the change itself and applies what it sends. If the secure sum clipped
        # it afterwards, the server's control variate would no longer be the mean of the clients'.
        if self.control_bound is None:
            return changes
        squares_K = sum(each.flatten(1).square().sum(1) for each in changes)
        assert isinstance(squares_K, Tensor)  # not the int 0: a model has parameters
        # A little below the bound, so that rounding does not make it longer.
        scale_K = ((1.0 - 1e-6) * self.control_bound / squares_K.sqrt()).clamp(max=1.0)
        return [each * scale_K.view(-1, *[1] * (each.dim() - 1)) for each in changes]


@dataclass(frozen=True, kw_only=True)
class ScaffoldAveraging(Ranged, Strategy):
    r"""SCAFFOLD with option II; :func:`~fedlearn.algorithms.recipes.Scaffold` makes it.

    :math:`x \leftarrow x + \eta_g \overline{\Delta y}`,
    :math:`c \leftarrow c + \frac{|S|}{N} \overline{\Delta c}`.

    Attributes:
        local: SGD with the correction.
        num_clients: Clients in the population, >= 1.
        server_learning_rate: Server step size, > 0.

    References:
        Karimireddy et al., 2020, `SCAFFOLD: Stochastic Controlled Averaging for Federated
        Learning <https://arxiv.org/abs/1910.06378>`_, algorithm 1. As there, each client counts
        the same.
    """

    local: ControlVariates
    num_clients: Count
    server_learning_rate: Positive

    @property
    def aggregation(self) -> WeightedMean:
        """The unweighted mean: each client counts the same."""
        return WeightedMean(by_examples=False)

    @property
    def needs_same_round(self) -> str:
        """Control variates are gradients at the model of their round."""
        return (
            "the server's control variate is the mean of the clients' gradients at one model, but "
            "each would be taken at the model that its client was sent"
        )

    @property
    def _server(self) -> ServerSgd:
        return ServerSgd(learning_rate=self.server_learning_rate, momentum=0.0)

    def init(self, params: Params) -> State:
        """Return a control variate of zero."""
        return {_CONTROL: params.vector.new_zeros(params.layout.num_trainable)}

    def without_clients(self, params: Params, state: State) -> State:
        """Return a control variate of zero: the mean of the clients', which start from zero."""
        return self.init(params)

    def broadcast(self, state: State) -> Lanes:
        """Broadcast the server's control variate."""
        return {_CONTROL: state[_CONTROL]}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Return the next model and control variate.

        Raises:
            ValueError: More clients contributed than the population has.
        """
        moved, _ = self._server.step(params, aggregate.lanes["delta"], {})
        share = aggregate.num_clients / self.num_clients
        if share > 1.0:
            raise ValueError(
                f"num_clients is {self.num_clients}, but {aggregate.num_clients} clients "
                "contributed; set it to the number of clients in the population"
            )
        # c <- c + |S| / N * mean of the changes; clients that were not asked changed nothing.
        control: Tensor = state[_CONTROL] + share * aggregate.lanes[_CONTROL]
        return StepResult(moved, {_CONTROL: control})
