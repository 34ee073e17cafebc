"""What secure aggregation alone gives away: two sums whose cohorts differ by one client."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlearn import assembly
from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.lanes import DELTA
from fedlearn.assembly.choices import resolve
from fedlearn.assembly.simulated_plan import assemble
from fedlearn.config import load
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.rounds.round import RoundPlan

#: The victim, and a second client of the attacker, which takes the victim's place.
VICTIM, ATTACKER, OTHERS = 0, 6, (1, 2, 3, 4, 5)
CLIP = 0.5

SECURE = (
    "secure_aggregation.mode=complete",
    "secure_aggregation.clip_norm=0.5",
    "algorithm.weight_by_examples=false",
)
NOISY = (
    "privacy.mode=distributed",
    "privacy.clip_norm=0.5",
    "privacy.noise_multiplier=1.0",
    "privacy.target_delta=1e-3",
)


def rounds(*overrides: str) -> tuple[RoundPlan, RoundRequest]:
    """Return rounds of real sessions with all seven clients' data, and the request of one round."""
    config = load(
        None,
        overrides=[
            *overrides,
            "data.partition.num_clients=7",
            "cohort.num_wanted=6",
            "stragglers.over_selection=1",
            "devices.kind=ideal",
            "engine.transport=memory",
            "client.batch_size=all",  # so that the update is the same in every round
        ],
    )
    components = assembly.build_simulation(config, data_dir=Path())
    resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
    plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
    state = plan.round.init(params)
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=state.params,
        strategy=plan.round.strategy,
        broadcast={},
        seed=plan.round.seed.value,
        client_states=state.client_states,
    )
    return plan.round, request


def sum_of(plan: RoundPlan, request: RoundRequest, *cohort: int) -> Tensor:
    """Return the sum of a cohort's updates that the coordinator learns."""
    collected = collect_from(plan.collector, [ClientId(each) for each in cohort], request)
    aggregate, expected = collected.aggregate, len(cohort)
    assert aggregate is not None
    if plan.release is not None:
        aggregate, _ = plan.release(
            aggregate,
            strategy=plan.strategy,
            layout=request.params.layout,
            state={},
            round_num=request.round_num,
            attempt=0,
        )
    return aggregate.lanes[DELTA.name].double() * expected


def estimate_update(*overrides: str) -> Tensor:
    """Return the attacker's estimate of the victim's update."""
    plan, request = rounds(*overrides)
    with_victim = sum_of(plan, request, VICTIM, *OTHERS)
    without = sum_of(plan, replace(request, round_num=1), *OTHERS, ATTACKER)
    return with_victim - without + update_of(ATTACKER)


def update_of(client_id: int) -> Tensor:
    """Return one client's update, clipped."""
    plan, request = rounds("algorithm.weight_by_examples=false", "stragglers.min_reports=1")
    update = sum_of(plan, request, client_id)
    return update * min(1.0, CLIP / float(update.norm()))


def likeness(found: Tensor) -> float:
    return float(torch.cosine_similarity(found, update_of(VICTIM), dim=0))


def test_two_sums_give_a_client_away() -> None:
    """They reveal its update to five digits, although both sums are over six clients."""
    found = estimate_update(*SECURE)
    assert likeness(found) > 0.99999


@pytest.mark.slow
def test_with_noise_of_the_clients_they_do_not() -> None:
    """The estimate is noise; a similarity of a tenth would be seven standard deviations."""
    found = estimate_update(*NOISY)
    assert abs(likeness(found)) < 0.1
    assert float(found.norm()) > 10 * CLIP
