"""A client's deadline starts when it is asked, however long the opening of its round takes.

Evaluation, a pause, and waiting for clients all take time, while the exchange stays open.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from fedlearn.algorithms.informed_sampling import NO_STATE, SamplerState, SamplingDraw
from fedlearn.algorithms.recipes import FedAvg, FedBuff
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.transport.flower.grid_channel import GridChannel
from tests.parity import test_flower as flower
from tests.parity.test_late_updates import LATE

NUM_ROUNDS = 6
#: Devices take one to six seconds: in buffers no client is late, in cohorts some are.
DEADLINES_S = {True: 10.0, False: 3.5}


@dataclass(frozen=True)
class Waiting:
    """A draw of at most ``most`` clients, before which time passes."""

    draw: SamplingDraw
    clock: VirtualClock
    before_s: float
    most: int

    def __call__(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        self.clock.sleep(self.before_s)
        return self.draw(
            min(num, self.most), round_num=round_num, attempt=attempt, busy=busy, state=state
        )


def count_reports(*, is_buffered: bool, evaluated_s: float = 0.0, drawn_s: float = 0.0) -> int:
    """Count the updates in rounds, if time passes between rounds or before each draw."""
    plain = flower.over_flower(FedAvg(flower.LOCAL))
    assert isinstance(plain, PlainCollector)
    channel = plain.channel
    assert isinstance(channel, GridChannel)
    clock = channel.clock
    assert isinstance(clock, VirtualClock)
    policy = replace(flower.POLICY, num_wanted=2, deadline_s=DEADLINES_S[is_buffered])
    collector: PlainCollector
    if is_buffered:
        # The grid of these tests has no thread that looks for replies, so none may be in flight.
        num = 1 if drawn_s else 4
        limits = FedBuff(flower.LOCAL, buffer_size=2, concurrency=num, max_staleness=9).asynchrony
        collector = PlainCollector(channel=channel, policy=policy, round_mode=limits, slab_bytes=0)
    else:
        policy = replace(policy, num_wanted=4)
        collector = PlainCollector(channel=channel, policy=policy, round_mode=LATE, slab_bytes=0)
    opening = SampledOpening(sampler=UniformSampler(), available=collector.available, seed=Seed(5))
    draw = Waiting(opening.draw, clock, drawn_s, most=1 if is_buffered and drawn_s else 4)
    plan = RoundPlan(
        draw=draw,
        policy=policy,
        collector=collector,
        strategy=FedAvg(flower.LOCAL),
        seed=Seed(5),
        is_retried=not is_buffered,
    )
    torch.manual_seed(0)
    state, num = plan.init(Params.of(flower.make_model())), 0
    for _ in range(NUM_ROUNDS):
        state, collected, _ = run_round(state, plan, attempt=0)
        num += collected.count(Status.REPORTED)
        clock.sleep(evaluated_s)
    collector.close()
    return num


@pytest.mark.slow
@pytest.mark.parametrize("is_buffered", [True, False], ids=["asynchronous", "semi-synchronous"])
@pytest.mark.parametrize("spent", ["evaluated_s", "drawn_s"])
def test_nobody_is_late_by_what_was_waited_for_before(spent: str, *, is_buffered: bool) -> None:
    """As many report as if no time passes."""
    found = count_reports(is_buffered=is_buffered, **{spent: 100.0})
    assert found >= count_reports(is_buffered=is_buffered) >= 2 * NUM_ROUNDS
