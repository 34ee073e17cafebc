r"""Server optimizers: compute the next global model from the aggregated delta.

The aggregate :math:`\Delta` is local minus global, so it is *added*: :math:`-\Delta` is the
pseudo-gradient. Only the layout's trainable prefix passes through the optimizer; floating-point
statistics (BatchNorm) move by their mean delta, since dividing a running variance by the root of
its own second moment has no meaning and can make it negative.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.core.params import Params
from fedlearn.core.ranges import BelowOne, Positive, Ranged

OptimizerState = Mapping[str, Tensor]

ServerRate: TypeAlias = Annotated[Positive, doc("Server step size, > 0.")]
ServerMomentum: TypeAlias = Annotated[BelowOne, doc("Server momentum, [0, 1).")]
DeltaDecay: TypeAlias = Annotated[BelowOne, doc("Decay of the mean delta, [0, 1).")]
SquareDecay: TypeAlias = Annotated[BelowOne, doc("Decay of the squared delta, [0, 1).")]
Adaptivity: TypeAlias = Annotated[
    Positive, doc("Adaptivity, > 0: the smaller, the more the step adapts.")
]


class ServerOptimizer(Protocol):
    """The server's optimizer: a pair of pure functions, like ``optax.GradientTransformation``.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Params
        >>> class HalfSteps:
        ...     def init(self, params):
        ...         return {}
        ...     def step(self, params, delta_P, state):
        ...         return params.with_vector(params.vector + 0.5 * delta_P), state
        >>> params = Params.of(torch.nn.Linear(1, 1)).with_vector(torch.zeros(2))
        >>> HalfSteps().step(params, torch.tensor([1.0, 2.0]), {})[0].vector
        tensor([0.5000, 1.0000])
    """

    def init(self, params: Params) -> OptimizerState:
        """Return the state before the first round; its tensors go into checkpoints."""

    def step(
        self, params: Params, delta_P: Tensor, state: OptimizerState
    ) -> tuple[Params, OptimizerState]:
        """Compute the next model and state; must not write to its arguments."""


def _apply(params: Params, delta_P: Tensor, update: Tensor) -> Params:
    split = params.layout.num_trainable
    if split == params.layout.size:
        return params.with_vector(params.vector + update)
    # Statistics move by the mean delta; the trainable prefix is overwritten below.
    vector = params.vector + delta_P
    torch.add(params.vector[:split], update, out=vector[:split])
    return params.with_vector(vector)


@dataclass(frozen=True, kw_only=True)
class ServerSgd(Ranged):
    r"""Momentum SGD on the pseudo-gradient: FedAvg at rate 1 and momentum 0, else FedAvgM.

    :math:`v \leftarrow \beta v + \Delta,\; x \leftarrow x + \eta v`.

    :math:`\eta` is the learning rate, :math:`\beta` the momentum.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Params
        >>> params = Params.of(torch.nn.Linear(1, 1)).with_vector(torch.zeros(2))
        >>> optimizer = fl.ServerSgd(learning_rate=0.5, momentum=0.0)
        >>> optimizer.step(params, torch.tensor([1.0, 2.0]), optimizer.init(params))[0].vector
        tensor([0.5000, 1.0000])

    References:
        Hsu, Qi and Brown, 2019, `Measuring the Effects of Non-Identical Data Distribution
        for Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_ (FedAvgM).
    """

    learning_rate: ServerRate
    momentum: ServerMomentum

    def init(self, params: Params) -> OptimizerState:
        """Return a zero velocity, or nothing without momentum."""
        if self.momentum == 0.0:
            return {}
        return {"velocity": torch.zeros_like(params.vector[: params.layout.num_trainable])}

    def step(
        self, params: Params, delta_P: Tensor, state: OptimizerState
    ) -> tuple[Params, OptimizerState]:
        """Return ``params + learning_rate * velocity`` and the velocity."""
        velocity = delta_P[: params.layout.num_trainable]
        if self.momentum != 0.0:
            # A new tensor: a step must not write to its arguments.
            velocity = state["velocity"] * self.momentum + velocity
            state = {"velocity": velocity}
        # At rate 1 the product would only copy the velocity: one more model in memory.
        update = velocity if self.learning_rate == 1.0 else velocity * self.learning_rate
        return _apply(params, delta_P, update), state


class SecondMoment(StrEnum):
    """How an adaptive server optimizer tracks the squared delta.

    Example:
        >>> import fedlearn as fl
        >>> [each.value for each in fl.SecondMoment]
        ['adagrad', 'adam', 'yogi']
    """

    ADAGRAD = "adagrad"
    ADAM = "adam"
    YOGI = "yogi"


@dataclass(frozen=True, kw_only=True)
class ServerAdaptive(Ranged):
    r"""FedAdagrad, FedAdam and FedYogi (Reddi et al., algorithm 2).

    :math:`m \leftarrow \beta_1 m + (1-\beta_1)\Delta`, then by ``second_moment``
    :math:`v \leftarrow v + \Delta^2` (Adagrad),
    :math:`\beta_2 v + (1-\beta_2)\Delta^2` (Adam), or
    :math:`v - (1-\beta_2)\Delta^2\,\mathrm{sign}(v-\Delta^2)` (Yogi), and
    :math:`x \leftarrow x + \eta\, m / (\sqrt{v} + \tau)`. As in the paper there is no bias
    correction, and :math:`v` starts at :math:`\tau^2`. :math:`\eta` is the learning rate.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Params
        >>> params = Params.of(torch.nn.Linear(1, 1)).with_vector(torch.zeros(2))
        >>> how = {"learning_rate": 0.1, "beta_1": 0.0, "beta_2": 0.0, "tau": 1.0}
        >>> adam = fl.ServerAdaptive(second_moment=fl.SecondMoment.ADAM, **how)
        >>> adam.step(params, torch.tensor([1.0, 4.0]), adam.init(params))[0].vector
        tensor([0.0500, 0.0800])

    References:
        Reddi et al., 2021, `Adaptive Federated Optimization
        <https://arxiv.org/abs/2003.00295>`_, algorithm 2.
    """

    second_moment: Annotated[SecondMoment, doc("Which of the three optimizers.")]
    learning_rate: ServerRate
    beta_1: DeltaDecay
    beta_2: SquareDecay
    tau: Adaptivity

    def init(self, params: Params) -> OptimizerState:
        """Return a zero first moment and a second moment of tau squared."""
        prefix = params.vector[: params.layout.num_trainable]
        return {
            "first_moment": torch.zeros_like(prefix),
            "second_moment": torch.full_like(prefix, self.tau**2),
        }

    def step(
        self, params: Params, delta_P: Tensor, state: OptimizerState
    ) -> tuple[Params, OptimizerState]:
        """Return the next model and both moments."""
        delta = delta_P[: params.layout.num_trainable]
        first = self.beta_1 * state["first_moment"] + (1.0 - self.beta_1) * delta
        # No bias correction, unlike torch's Adam: the paper starts v at tau**2 instead.
        second = self._second(state["second_moment"], delta.square())
        update = self.learning_rate * first / (second.sqrt() + self.tau)
        state = {"first_moment": first, "second_moment": second}
        return _apply(params, delta_P, update), state

    def _second(self, moment: Tensor, square: Tensor) -> Tensor:
        match self.second_moment:
            case SecondMoment.ADAGRAD:
                return moment + square
            case SecondMoment.ADAM:
                return self.beta_2 * moment + (1.0 - self.beta_2) * square
            case SecondMoment.YOGI:
                return moment - (1.0 - self.beta_2) * square * torch.sign(moment - square)
