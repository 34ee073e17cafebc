r"""Server learning rates that change from round to round: steps, a cosine, and a warm-up.

============================ ==========================================================
symbol                       here
============================ ==========================================================
:math:`r`                    ``round_num`` in the state: server steps so far, from 0
:math:`\gamma, s`            ``server_rate_decay``, ``server_decay_rounds``
:math:`R`                    ``server_cosine_rounds``
:math:`W`                    ``server_warmup_rounds``
============================ ==========================================================
"""

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import Gt, Le, doc
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.recipes import Algorithm, ByExamples, Local
from fedlearn.algorithms.server_optimizers import (
    OptimizerState,
    ServerMomentum,
    ServerOptimizer,
    ServerRate,
    ServerSgd,
)
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, Ranged, Whole

_ROUND = "round_num"

RateDecay: TypeAlias = Annotated[
    float, Gt(0), Le(1), doc("Factor on the server's learning rate at each decay, (0, 1].")
]
DecayRounds: TypeAlias = Annotated[Count, doc("Rounds from one decay to the next, >= 1.")]
CosineRounds: TypeAlias = Annotated[
    Count | None,
    doc(
        "Rounds in which the server's learning rate falls to zero along a cosine, >= 1; not set: "
        "no cosine decay."
    ),
]
WarmupRounds: TypeAlias = Annotated[
    Whole, doc("Rounds at the start in which the server's learning rate rises, >= 0.")
]


@dataclass(frozen=True, kw_only=True)
class ScheduledServer(Ranged):
    r"""Multiplies the learning rate of another server optimizer by a factor of the round.

    The factor is :math:`\gamma^{\lfloor r / s \rfloor}`, or with a cosine
    :math:`(1 + \cos(\pi \min(r, R) / R)) / 2`, times :math:`\min(1, (r + 1) / W)`.

    Attributes:
        inner: Any server optimizer. Its step is scaled, without running statistics.
        server_rate_decay: See :func:`ScheduledFedAvg`, as for the others.

    Raises:
        ValueError: A number is out of range, or there are two schedules.

    Example:
        >>> import fedlearn as fl
        >>> sgd = fl.ServerSgd(learning_rate=1.0, momentum=0.0)
        >>> halved = fl.ScheduledServer(inner=sgd, server_rate_decay=0.5, server_decay_rounds=2)
        >>> [halved.factor(round_num) for round_num in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]

    References:
        Loshchilov and Hutter, 2017, `SGDR: Stochastic Gradient Descent with Warm Restarts
        <https://arxiv.org/abs/1608.03983>`_ (cosine). Schedules of the server's rate: Reddi et al.,
        2021, `Adaptive Federated Optimization <https://arxiv.org/abs/2003.00295>`_, appendix D.
    """

    inner: ServerOptimizer
    server_rate_decay: RateDecay = 1.0  # the neutral elements
    server_decay_rounds: DecayRounds = 1
    server_cosine_rounds: CosineRounds = None
    server_warmup_rounds: WarmupRounds = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_cosine_rounds is not None and self.server_rate_decay != 1.0:
            raise ValueError(
                f"server_rate_decay is {self.server_rate_decay}, but server_cosine_rounds is "
                "another schedule; give one of them"
            )

    def factor(self, round_num: int) -> float:
        """Return the factor on the learning rate in a round, from 0."""
        factor = self.server_rate_decay ** (round_num // self.server_decay_rounds)
        if self.server_cosine_rounds is not None:
            progress = min(round_num, self.server_cosine_rounds) / self.server_cosine_rounds
            factor = (1.0 + math.cos(math.pi * progress)) / 2.0
        if round_num < self.server_warmup_rounds:
            factor *= (round_num + 1) / self.server_warmup_rounds
        return factor

    def init(self, params: Params) -> OptimizerState:
        """Return the inner optimizer's state, and round 0."""
        return {**self.inner.init(params), _ROUND: torch.tensor(0)}

    def step(
        self, params: Params, delta_P: Tensor, state: OptimizerState
    ) -> tuple[Params, OptimizerState]:
        """Take the inner optimizer's step, scaled."""
        own = {name: value for name, value in state.items() if name != _ROUND}
        moved, inner_state = self.inner.step(params, delta_P, own)
        factor = self.factor(int(state[_ROUND]))
        state = {**inner_state, _ROUND: state[_ROUND] + 1}
        if factor == 1.0:  # the inner step, to the last bit
            return moved, state
        last, vector = params.layout.num_trainable, moved.vector.clone()
        vector[:last] = torch.lerp(params.vector[:last], moved.vector[:last], factor)
        return params.with_vector(vector), state


@explain_calls
def ScheduledFedAvg(
    local: Local,
    *,
    server_learning_rate: ServerRate,
    server_momentum: ServerMomentum = 0.0,
    server_rate_decay: RateDecay = 1.0,
    server_decay_rounds: DecayRounds = 1,
    server_cosine_rounds: CosineRounds = None,
    server_warmup_rounds: WarmupRounds = 0,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """FedAvgM with a schedule of the server's learning rate.

    For other server optimizers, wrap them: ``replace(algorithm, server_optimizer=
    ScheduledServer(inner=algorithm.server_optimizer, ...))``.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.ScheduledFedAvg(
        ...     local, server_learning_rate=1.0, server_cosine_rounds=100
        ... ).server_optimizer.factor(50)
        0.5

    References:
        As :class:`ScheduledServer`. Without a schedule it is FedAvgM.
    """
    server = ScheduledServer(
        inner=ServerSgd(learning_rate=server_learning_rate, momentum=server_momentum),
        server_rate_decay=server_rate_decay,
        server_decay_rounds=server_decay_rounds,
        server_cosine_rounds=server_cosine_rounds,
        server_warmup_rounds=server_warmup_rounds,
    )
    mean = WeightedMean(by_examples=weight_by_examples)
    return Algorithm(local=local, aggregation=mean, server_optimizer=server)
