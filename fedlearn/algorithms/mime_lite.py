r"""MIME-lite: clients step along the server's momentum, which does not change in a round.

========================== =================================================
symbol                     here
========================== =================================================
:math:`x, y_i`             global parameters, a client's
:math:`s`                  ``momentum`` of the server, broadcast
:math:`\beta`              ``server_momentum``
:math:`\nabla f_i(x)`      the lane ``full_gradient``
========================== =================================================

With momentum as base optimizer, each local step and then the server compute

.. math::
    y_i \leftarrow y_i - \eta \big((1 - \beta) \nabla f_i(y_i; \zeta) + \beta s\big), \quad
    s \leftarrow (1 - \beta) \sum_i p_i \nabla f_i(x) + \beta s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, LaneSpec, Over
from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    require_update,
)
from fedlearn.algorithms.recipes import ByExamples, Local
from fedlearn.algorithms.server_optimizers import ServerMomentum, ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Positive, Ranged

_GRADIENT, _MOMENTUM = "full_gradient", "momentum"

GradientBound: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Largest L2 norm of a client's full gradient that counts, > 0. Secure aggregation and "
        "privacy need it; not set: no limit."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServerMomentumSteps(Ranged, LocalUpdateWrapper):
    """Mixes the server's momentum into each gradient, and sends the full gradient at the model.

    Attributes:
        inner: Any local update, such as plain SGD.
        server_momentum: See :func:`MimeLite`, as for ``full_gradient_bound``.

    Raises:
        ValueError: A number is not in its range.
    """

    asks_gradients: ClassVar[bool] = True

    server_momentum: ServerMomentum
    full_gradient_bound: GradientBound

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner update's, and the full gradient."""
        own = LaneSpec(
            name=_GRADIENT,
            over=Over.TRAINABLE,
            weighted=True,
            bound=self.full_gradient_bound,
            bound_remedy="set algorithm.full_gradient_bound",
        )
        return (*self.inner.lanes, own)

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, and the full gradient until the end of the round."""
        return {**self.inner.memory, _GRADIENT: MemorySpec(over=Over.TRAINABLE, is_kept=False)}

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Compute the full gradient at the global model, and begin the inner update."""
        model = [each.expand_as(value) for each, value in zip(broadcast[MODEL], x, strict=True)]
        torch._foreach_copy_(list(memory[_GRADIENT]), list(moment.gradient_at(model).grads))
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step along the mixture; the momentum stays as it is."""
        beta = self.server_momentum
        own = list(torch._foreach_mul(list(grads), 1.0 - beta))  # noqa: SLF001 - as torch.optim does
        directions = add_scaled(own, broadcast[_MOMENTUM], factor=beta)
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Return the inner update's report, and the full gradient."""
        lanes = self.inner.report(x, memory, broadcast=broadcast, moment=moment)
        return {**lanes, _GRADIENT: memory[_GRADIENT]}


@dataclass(frozen=True, kw_only=True)
class MimeAveraging(Strategy):
    """FedAvg that also updates the server's momentum; :func:`MimeLite` makes it.

    Attributes:
        local: Local training along the server's momentum.
        aggregation: The mean of the updates and of the full gradients.
    """

    local: ServerMomentumSteps
    aggregation: WeightedMean

    @property
    def needs_same_round(self) -> str:
        """The momentum is made of gradients at the models of the rounds."""
        return (
            "the server's momentum is a mean of gradients at one model, but each would be taken "
            "at the model that its client was sent"
        )

    def init(self, params: Params) -> State:
        """Return a momentum of zero."""
        return {_MOMENTUM: params.vector.new_zeros(params.layout.num_trainable)}

    def broadcast(self, state: State) -> Lanes:
        """Broadcast the momentum."""
        return {_MOMENTUM: state[_MOMENTUM]}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Return the mean model, and the momentum with the mean of the full gradients."""
        server, beta = ServerSgd(learning_rate=1.0, momentum=0.0), self.local.server_momentum
        moved, _ = server.step(params, aggregate.lanes[DELTA.name], {})
        momentum = (1.0 - beta) * aggregate.lanes[_GRADIENT] + beta * state[_MOMENTUM]
        return StepResult(moved, {_MOMENTUM: momentum})


@explain_calls
def MimeLite(
    local: Local,
    *,
    server_momentum: ServerMomentum,
    full_gradient_bound: GradientBound = None,
    weight_by_examples: ByExamples = True,
) -> MimeAveraging:
    """MIME-lite: FedAvg whose clients follow a momentum that the server computes.

    A client computes its full gradient before the first step, which costs one epoch without steps
    and doubles the update that it sends.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> mime = fl.MimeLite(local, server_momentum=0.9)
        >>> [lane.name for lane in mime.lanes]  # what clients send
        ['delta', 'full_gradient']

    References:
        Karimireddy et al., 2020, `Mime: Mimicking Centralized Stochastic Algorithms in Federated
        Learning <https://arxiv.org/abs/2008.03606>`_, algorithm 1 (MimeLite) with the momentum of
        table 1. With a momentum of 0 it is FedAvg.
    """
    require_update(local, name="local")
    return MimeAveraging(
        local=ServerMomentumSteps(
            inner=local, server_momentum=server_momentum, full_gradient_bound=full_gradient_bound
        ),
        aggregation=WeightedMean(by_examples=weight_by_examples),
    )
