"""Two coordinators on one PostgreSQL: one is killed or frozen, the other takes over."""

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

#: Longer than stalls of the machine, so that a holder that only pauses is not taken over.
_TTL_S = 4.0
#: Longest time from the last beat until the takeover, and a deadline some time after that. A
#: client that does not notice the silence needs a minute.
_TAKEOVER_S, _DEADLINE_S = _TTL_S + 10.0, 20.0
#: The same until the round has ended.
_GOES_ON_S = _TTL_S + 25.0

#: Slow enough that a model of 4 MB takes some seconds.
_BYTES_PER_S = 1e6
#: A model of 0.6 MB, and a connection on which 512 KiB take longer than a client's patience.
_SLOW_BALLAST, _SLOW_BYTES_PER_S = 150_000, 48e3


@pytest.fixture
def site(site: VotingSite, postgresql_url: str) -> VotingSite:
    """The deployment, on PostgreSQL."""
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
    """Start a leading coordinator and a standby; clients know both addresses."""
    site.configure(num_rounds=num_rounds, lease_ttl_s=_TTL_S, **settings)
    elsewhere, address = free_addresses(2), site.config.coordinator.address
    if way_to_first is not None:
        way_to_first.target, address = address, way_to_first.address
    # The standby's address comes first, so that clients need not wait for a frozen leader.
    site.reconfigure(public_addresses=(elsewhere[0], address))
    first = site.serving()
    keys = ("address", "http_address")
    listening = [f"--set=coordinator.{k}={v}" for k, v in zip(keys, elsewhere, strict=True)]
    second = site.coordinator(*listening, changes=changes)
    until(lambda: second.said("standby") > 0)
    return first, second


def test_a_second_coordinator_takes_over_within_seconds(site: VotingSite) -> None:
    """In the middle of a round, after the killed one has acknowledged two replies."""
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
    """It wakes after the deadline of its round, and what it does then must not lose a reply.

    The control: if both shared one log of replies, the first would truncate a reply that the
    second has acknowledged, and a third coordinator would not find it.
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
    """A frozen leader closes no call, so clients must notice its silence and reconnect."""
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
    assert took_s < _GOES_ON_S + stalled.seconds
    assert second.wait() == 0, second.tail()
    audit(site)


@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_transfer_goes_on_elsewhere_soon_after_its_leader_stands_still(
    site: VotingSite, way: str
) -> None:
    """Also for large models: half of the model has arrived, or half of the update was sent."""
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
    assert took_s < _GOES_ON_S + stalled.seconds
    assert second.wait() == 0, second.tail()
    audit(site)
    assert site.trained(0) == [0]


@pytest.mark.parametrize("changes", [(), (SEND_LARGE_CHUNKS,)], ids=["", "control"])
def test_a_leader_behind_a_slow_connection_is_not_taken_for_dead(
    site: VotingSite, changes: tuple[Change, ...]
) -> None:
    """A model takes longer than a client tolerates silence, but each chunk takes less.

    The control: with larger chunks, the client keeps disconnecting.
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
    """Check the votes: a round of two updates, then one of three, of which one is a round late.

    Raises:
        Miscounted: A cell of the model, or a recorded round, is wrong.
    """
    expected = torch.zeros(ballots.MAX_ROUNDS, ballots.MAX_CLIENTS)
    expected[0, :2] = 1.0 / 2.0
    expected[1, :2] = expected[0, 2] = 1.0 / 3.0
    with site.places.open_database() as database:
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
    """The second coordinator waits for the client in flight, and that update counts once.

    So does the update that the first accepted in the round in which it froze, although its client
    is gone. Client 1 keeps that round open until the late update is in it.

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
        assert took_s < _GOES_ON_S + stalled.seconds
    assert second.wait() == 0, second.tail()
    first.send(signal.SIGCONT)
    assert first.wait() == RUN_FAILED, first.tail()
    assert "is coordinated by" in first.tail()
    if changes:
        with pytest.raises(Miscounted):
            check_model(site)
        return
    check_model(site)
    # Once, since the training under the first counts. It may also have prefetched the next model.
    assert site.trained(2).count(0) == 1
    assert [site.told(number, "accepted") for number in range(3)] == [{0, 1}, {0, 1}, {0}]
