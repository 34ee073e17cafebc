"""One federated round. Start reading here.

::

    sample -> broadcast ... collect -> aggregate -> server step
                  |            ^
                  v            |
              client: train locally

:mod:`fedlearn.rounds.run` evaluates and persists after a round. Everything below is a
function of the state, the plan and what the collector returns, so a simulation and a
deployment differ in the collector alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from fedlearn.algorithms.aggregators import Aggregator
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.algorithms.server_optimizers import ServerOptimizer
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import Collected, Collector, RoundRequest, Status
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """All of the model that passes from one round to the next.

    Attributes:
        round_num: Index of the next round, from 0.
        params: Global model.
        optimizer_state: State of the server optimiser.
    """

    round_num: int
    params: Params
    optimizer_state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RoundPlan(Generic[StateT]):
    """The pieces of a round; built once by :mod:`fedlearn.build`.

    Attributes:
        sampler: Who is asked.
        policy: When the round closes.
        collector: How they are asked.
        local: What they do.
        aggregator: How their deltas are combined; the collector's own.
        server_optimizer: What the aggregate does to the model.
        seed: Public seed of everything reproducible.
    """

    sampler: CohortSampler
    policy: StragglerPolicy
    collector: Collector[StateT]
    local: LocalSgd
    aggregator: Aggregator[StateT]
    server_optimizer: ServerOptimizer
    seed: Seed

    def init(self, params: Params) -> ServerState:
        """Return the state before the first round."""
        return ServerState(
            round_num=0, params=params, optimizer_state=self.server_optimizer.init(params)
        )


def run_round(
    state: ServerState, plan: RoundPlan[StateT], *, attempt: int
) -> tuple[ServerState, Collected[StateT]]:
    """Run one round and return the next state and what was collected.

    Args:
        state: Before the round.
        plan: The pieces.
        attempt: 0, or how often this round was tried before; another attempt asks others.

    Returns:
        The state after the round, and what was collected. Below the minimum of reports the
        state is the one that came in, its ``round_num`` included: nothing is released.

    Raises:
        CohortTooSmall: Fewer clients are available than are asked.
    """
    cohort = plan.sampler.sample(
        plan.collector.available(),
        num_asked=plan.policy.num_asked,
        round_num=state.round_num,
        attempt=attempt,
        seed=plan.seed,
    )
    request = RoundRequest(
        round_num=state.round_num,
        attempt=attempt,
        params=state.params,
        settings=plan.local.settings(),
        seed=plan.seed.value,
    )
    collected = plan.collector.collect(cohort, request)
    if collected.count(Status.REPORTED) < plan.policy.min_reports:
        return state, collected
    delta_P = plan.aggregator.finalize(collected.aggregate)
    params, optimizer_state = plan.server_optimizer.step(
        state.params, delta_P, state.optimizer_state
    )
    next_state = replace(
        state, round_num=state.round_num + 1, params=params, optimizer_state=optimizer_state
    )
    return next_state, collected
