"""Two coordinators on one PostgreSQL: one dies or stands still, the other goes on."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.core.clock import SystemClock
from tests.addresses import free_addresses
from tests.e2e.survival import ballots
from tests.e2e.survival import test_late_updates as late_updates
from tests.e2e.survival.changes import ADD_TWICE, SEND_LARGE_CHUNKS, SHARE_LOG
from tests.e2e.survival.harness import (
    LARGE,
    RUN,
    Miscounted,
    VotingSite,
    audit,
    reporters,
    stalls,
)
from tests.e2e.survival.network import Proxy
from tests.processes import LONG_S, Change, Process, until

pytestmark = pytest.mark.slow

#: Longer than a machine stands still: a holder that only pauses is not taken over.
_TTL_S = 4.0
#: After the last beat; and the deadline is some time after that.
_TAKEOVER_S, _DEADLINE_S = _TTL_S + 3.4, 16.0

#: So that a model of 4 MB takes some seconds.
_BYTES_PER_S = 1e6
#: A model of 0.6 MB, and a connection on which 512 KiB take longer than a client bears silence.
_SLOW_BALLAST, _SLOW_BYTES_PER_S = 150_000, 48e3


@pytest.fixture
def site(site: VotingSite, postgresql_url: str) -> VotingSite:
    """The same, on PostgreSQL."""
    site.store_url = postgresql_url
    return site


def two(
    site: VotingSite,
    *,
    num_rounds: int,
    changes: Sequence[Change] = (),
    way_to_first: Proxy | None = None,
    **settings: Any,
) -> tuple[Process, Process]:
    """Start a coordinator that leads and one that stands by; clients know both."""
    site.configure(num_rounds=num_rounds, lease_ttl_s=_TTL_S, **settings)
    elsewhere, address = free_addresses(2), site.config.coordinator.address
    if way_to_first is not None:
        way_to_first.target, address = address, way_to_first.address
    # The second comes first: clients that look for a coordinator need not wait for a frozen one.
    site.reconfigure(public_addresses=(elsewhere[0], address))
    first = site.serving()
    keys = ("address", "http_address")
    listening = [f"--set=coordinator.{k}={v}" for k, v in zip(keys, elsewhere, strict=True)]
    second = site.coordinator(*listening, changes=changes)
    until(lambda: second.said("standby") > 0)
    return first, second


def test_a_second_coordinator_takes_over_within_seconds(site: VotingSite) -> None:
    """In the middle of a round: two replies were acknowledged by the one that died."""
    first, second = two(site, num_rounds=2)
    with site.holding(2):
        site.populate()
        until(lambda: site.told(0, "accepted") == {0} == site.told(1, "accepted"))
        with stalls() as stalled:
            first.kill()
            took_s = until(lambda: second.said("leading") > 0)
        assert took_s < _TAKEOVER_S + stalled.seconds
    assert second.wait() == 0, second.tail()
    audit(site)
    assert [site.trained(number) for number in (0, 1)] == [[0, 1]] * 2


@pytest.mark.parametrize("changes", [(), (SHARE_LOG,)], ids=["", "control"])
def test_a_coordinator_that_stood_still_is_fenced_off(
    site: VotingSite, changes: tuple[Change, ...]
) -> None:
    """It wakes past the deadline of the round that it was in; what it does then harms nobody.

    The control: were the log of replies one file for both, the sleeper would close it on top
    of a reply that the other one has acknowledged, and a third would not find that.
    """
    first, second = two(site, num_rounds=1, changes=changes, deadline_s=_DEADLINE_S, min_reports=1)
    clock = SystemClock()
    with site.holding(2):
        with site.holding(1):
            clients = site.populate()
            until(lambda: site.told(0, "accepted") == {0})
            closes_s = clock.now_s() + _DEADLINE_S
            with stalls() as stalled:
                first.send(signal.SIGSTOP)
                took_s = until(lambda: second.said("serving") > 0)
            assert took_s < _TAKEOVER_S + stalled.seconds
            clients[1].kill()
        site.join(1)
        until(lambda: site.told(1, "accepted") == {0})
        second.kill()
        until(lambda: clock.now_s() > closes_s)
        first.send(signal.SIGCONT)
        assert first.wait() == RUN_FAILED
        assert "is coordinated by" in first.tail()
        assert site.rounds() == []
        assert not any("cancelled" in line for line in clients[2].out().splitlines())
        third = site.serving()
    assert third.wait() == 0, third.tail()
    if changes:
        with pytest.raises(Miscounted, match="was told that it counts"):
            audit(site)
        return
    audit(site)
    assert site.trained(1) == [0, 0], "once before it was killed itself, and once after"


def test_a_round_goes_on_soon_after_its_leader_stands_still(site: VotingSite) -> None:
    """Clients hear nothing, and look for the other coordinator: the one that froze ends no call."""
    site.hurries = False
    first, second = two(site, num_rounds=2)
    clock = SystemClock()
    with stalls() as stalled:
        with site.holding(2):
            site.populate()
            until(lambda: site.told(0, "accepted") == {0} == site.told(1, "accepted"))
            first.send(signal.SIGSTOP)
            stopped_s = clock.now_s()
        until(lambda: len(site.rounds()) > 0)
        took_s = clock.now_s() - stopped_s
    assert took_s < _TTL_S + 10.0 + stalled.seconds
    assert second.wait() == 0, second.tail()
    audit(site)


@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_transfer_goes_on_elsewhere_soon_after_its_leader_stands_still(
    site: VotingSite, way: str
) -> None:
    """However large the model: half of it has come, or its update has been sent by half."""
    site.hurries = False
    with Proxy("", bytes_per_s=_BYTES_PER_S, freezes=True).running() as proxy:
        first, second = two(site, num_rounds=1, num_clients=1, way_to_first=proxy)
        counted = proxy.down if way == "download" else proxy.up
        counted.trips_at = 4 * LARGE // 2
        clock = SystemClock()
        (client,) = site.populate()
        with stalls() as stalled:
            until(proxy.tripped.is_set, within_s=40, told=client.tail)
            first.send(signal.SIGSTOP)
            stopped_s = clock.now_s()
            assert site.trained(0) == ([] if way == "download" else [0])
            until(lambda: len(site.rounds()) > 0, told=client.tail)
            took_s = clock.now_s() - stopped_s
    assert took_s < _TTL_S + 10.0 + stalled.seconds
    assert second.wait() == 0, second.tail()
    audit(site)
    assert site.trained(0) == [0]


@pytest.mark.parametrize("changes", [(), (SEND_LARGE_CHUNKS,)], ids=["", "control"])
def test_a_leader_behind_a_slow_connection_is_not_taken_for_dead(
    site: VotingSite, changes: tuple[Change, ...]
) -> None:
    """A model takes longer than a client bears silence; each chunk of it takes less.

    The control: one chunk takes longer, and the client leaves once and again.
    """
    site.configure(num_rounds=1, num_clients=1, ballast=_SLOW_BALLAST, lease_ttl_s=_TTL_S)
    first = site.serving(changes=changes)
    target = site.config.coordinator.address
    with Proxy(target, bytes_per_s=_SLOW_BYTES_PER_S).running() as proxy:
        site.reconfigure(public_addresses=(proxy.address,))
        (client,) = site.populate()
        if changes:
            until(lambda: client.tail().count("has been silent") >= 1, told=client.tail)
            assert site.trained(0) == []
            return
        assert first.wait() == 0, first.tail()
    audit(site)
    assert site.trained(0) == [0]
    assert "silent" not in client.tail()


def check_model(site: VotingSite) -> None:
    """Check each cell: rounds of two and of three, where the third update is of the round before.

    Raises:
        Miscounted: A cell of the model, or a round on record, is another one.
    """
    expected = torch.zeros(ballots.MAX_ROUNDS, ballots.MAX_CLIENTS)
    expected[0, :2] = 1.0 / 2.0
    expected[1, :2] = expected[0, 2] = 1.0 / 3.0
    with site.places.database() as database:
        checkpoint = database.run(RUN).load()
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"]
    if not torch.allclose(votes, expected, rtol=1e-5, atol=0.0):
        raise Miscounted(f"the model has {votes[:3, :4]}")
    counted = [reporters(record) for record in site.rounds()]
    if counted != [[0, 1], [0, 1, 2]]:
        raise Miscounted(f"on record are {counted}")
    if (ages := late_updates.audit(site)) != {0: 4, 1: 1}:
        raise Miscounted(f"the updates are as old as {ages}")


@pytest.mark.parametrize("changes", [(), (ADD_TWICE,)], ids=["", "control"])
def test_late_updates_outlive_a_leader_that_stands_still(
    site: VotingSite, changes: tuple[Change, ...]
) -> None:
    """The second coordinator awaits who is in flight, and that update counts once.

    So does the one that the first has accepted in the round in which it froze: its client is gone.
    Client 1 keeps that round open until the late update is in it.

    The control adds an update twice.
    """
    sections = {
        # A round closes with two of the three that are asked.
        "cohort": {"num_wanted": 2},
        "stragglers": {
            "over_selection": 1.5,
            "min_reports": 1,
            "deadline_s": _DEADLINE_S if changes else LONG_S,
            "below_minimum": "fail",
        },
        "algorithm": {"name": "fedavg", "weight_by_examples": False},
        "late_updates": {"mode": "keep"},
        "staleness": {"staleness_weight": "constant", "max_staleness": 10_000},
    }
    first, second = two(site, num_rounds=2, ballast=1000, sections=sections, changes=changes)
    clock = SystemClock()
    with site.holding(1, round_num=1):
        with site.holding(2):
            clients = late_updates.populate(site)
            until(lambda: site.told(0, "accepted") == {0, 1}, told=first.tail)
            first.send(signal.SIGSTOP)
            stopped_s = clock.now_s()
            clients[0].kill()
            until(lambda: second.said("serving") > 0, told=second.tail)
        with stalls() as stalled:
            until(lambda: site.told(2, "accepted") == {0}, told=clients[2].tail)
            took_s = clock.now_s() - stopped_s
        assert took_s < _TTL_S + 10.0 + stalled.seconds
    assert second.wait() == 0, second.tail()
    first.send(signal.SIGCONT)
    assert first.wait() == RUN_FAILED, first.tail()
    assert "is coordinated by" in first.tail()
    if changes:
        with pytest.raises(Miscounted):
            check_model(site)
        return
    check_model(site)
    # Once: what it trained under the first counts. It may have begun ahead on the next model.
    assert site.trained(2).count(0) == 1
    assert [site.told(number, "accepted") for number in range(3)] == [{0, 1}, {0, 1}, {0}]
