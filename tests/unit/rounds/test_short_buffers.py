"""A buffer that no available client can fill, because some were late, closes with what it has."""

import math
from dataclasses import replace

import pytest
import torch

from fedlearn.algorithms.collector import CollectedRound
from fedlearn.algorithms.recipes import FedAvg, FedBuff
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.core.clock import VirtualClock
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.transport.flower.grid_channel import GridChannel
from tests.parity import test_flower as flower

NUM_CLIENTS = len(flower.SIZES)
#: Far longer than any round here should wait, in seconds.
FOR_EVER = 1000


class Stuck(Exception):
    """Raised if a round waits for clients that never connect."""


def ran(*, deadline_s: float, buffer_size: int = NUM_CLIENTS) -> tuple[ServerState, CollectedRound]:
    """Run one round of all clients, whose devices take one to six seconds."""
    plain = flower.over_flower(FedAvg(flower.LOCAL))
    assert isinstance(plain, PlainCollector)
    channel = plain.channel
    assert isinstance(channel, GridChannel)
    clock = channel.clock
    assert isinstance(clock, VirtualClock)

    def wait() -> None:
        clock.sleep(0.5)
        if clock.now_s() > FOR_EVER:
            raise Stuck

    policy = replace(flower.POLICY, num_wanted=buffer_size, deadline_s=deadline_s)
    limits = FedBuff(
        flower.LOCAL, buffer_size=buffer_size, concurrency=buffer_size, max_staleness=9
    ).asynchrony
    collector = PlainCollector(
        channel=channel, policy=policy, round_mode=limits, slab_bytes=0, wait=wait
    )
    opening = SampledOpening(sampler=UniformSampler(), available=collector.available, seed=Seed(5))
    plan = RoundPlan(
        draw=opening.draw,
        policy=policy,
        collector=collector,
        strategy=FedAvg(flower.LOCAL),
        seed=Seed(5),
        is_retried=False,
    )
    torch.manual_seed(0)
    state = plan.init(Params.of(flower.make_model()))
    state, collected, _ = run_round(state, plan, attempt=0)
    collector.close()
    return state, collected


def test_a_round_of_which_some_are_late_closes_with_the_others() -> None:
    """One deadline after the last of them; the model then includes the updates that arrived."""
    state, collected = ran(deadline_s=3.5)
    num_late = collected.count(Status.LATE)
    assert 0 < num_late < NUM_CLIENTS
    assert collected.count(Status.REPORTED) == NUM_CLIENTS - num_late
    assert sum(collected.staleness.values()) == NUM_CLIENTS - num_late
    assert state.round_num == 1
    assert collected.duration_s < 3 * 3.5


def test_a_round_of_which_all_are_late_ends_without_a_step() -> None:
    """It counts as a round with too few reports, so the policy decides what follows."""
    state, collected = ran(deadline_s=0.5)
    assert collected.count(Status.LATE) == NUM_CLIENTS
    assert collected.aggregate is None
    assert state.round_num == 0


@pytest.mark.parametrize("deadline_s", [50.0, math.inf])
def test_a_round_of_which_nobody_is_late_waits_for_others(deadline_s: float) -> None:
    """Control: clients that have not connected yet are waited for without limit."""
    with pytest.raises(Stuck):
        ran(deadline_s=deadline_s, buffer_size=NUM_CLIENTS + 1)
