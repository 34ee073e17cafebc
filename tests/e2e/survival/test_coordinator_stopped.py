"""Coordinators that are told to stop, lose their database, or are killed at their first start."""

import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.gateway.authority import Authority
from fedlearn.store import runs
from fedlearn.store.lease import Lease, deploy
from fedlearn.store.runs import Database, StoredRun
from tests.e2e.survival.harness import PostgreSQL, VotingSite, audit, stalls
from tests.processes import Crash, until

pytestmark = pytest.mark.slow

#: Configured grace for uploads, and seconds within which the process ends on a busy machine.
_GRACE_S, _LEAVES_S = 2.0, 20.0

#: Seconds for which the database is away.
_AWAY_S = 30.0


def test_a_stop_parks_the_round_within_its_bound(site: VotingSite) -> None:
    """SIGTERM while one client still trains: the next coordinator resumes the same round.

    The clients do not notice, and each trains once.
    """
    site.hurries = False
    site.configure(num_rounds=2, shutdown_grace_s=_GRACE_S)
    first = site.serving()
    with site.holding(2):
        clients = site.populate()
        until(lambda: site.told(0, "accepted") == {0} == site.told(1, "accepted"))
        with stalls() as stalled:
            first.send(signal.SIGTERM)
            took_s = until(lambda: first.said("parked") > 0)
        assert took_s < _GRACE_S + 1.0 + stalled.seconds
        assert first.wait(within_s=_LEAVES_S) == 0
        assert site.rounds() == []
        second = site.serving()
        until(lambda: all(client.said("connected") >= 2 for client in clients))
    assert second.wait() == 0, second.tail()
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3
    assert [record.attempt for record in site.rounds()] == [0, 0]


@pytest.fixture
def own_postgresql() -> Iterator[PostgreSQL]:
    """A server for this test only, since others must not lose theirs."""
    with TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:  # a socket's path must be short
        server = PostgreSQL.make(Path(folder))
        if server is None:
            pytest.skip("no PostgreSQL binaries: install postgresql")
        server.start()
        try:
            yield server
        finally:
            server.stop()


def test_a_database_that_goes_away_in_a_round_is_waited_for(
    site: VotingSite, own_postgresql: PostgreSQL
) -> None:
    """The last replies come meanwhile, and are acknowledged only when the database is back."""
    site.store_url = own_postgresql.url
    site.configure(num_rounds=2)
    coordinator, clock = site.serving(), SystemClock()
    with site.holding(1, 2):
        site.populate()
        until(lambda: site.told(0, "accepted") == {0})
        own_postgresql.stop()
        clock.sleep(2.0)  # the lease runs out
    clock.sleep(_AWAY_S - 2.0)
    assert coordinator.is_running, coordinator.tail()
    assert site.told(1, "accepted") == site.told(2, "accepted") == set()
    own_postgresql.start()
    assert coordinator.wait() == 0, coordinator.tail()
    assert coordinator.said("database_away") >= 1
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3


# ruff: noqa: SLF001 (a coordinator is killed within)
_FIRST_STEPS = [
    Crash("database made, no run", Database.create, "before"),
    Crash("folder made, no file in it", runs._write_config, "before"),
    Crash("files made, no run", runs._write_config, "after"),
    Crash("run made, not deployed", Database.create, "after"),
    Crash("deployed, no lease", deploy, "after"),
    Crash("lease taken, no keys", Lease.try_acquire, "after"),
    Crash("keys made, no gateway", Authority.__init__, "after"),
    Crash("gateway open, no checkpoint", StoredRun.commit, "before"),
]


def test_a_first_start_that_is_killed_at_any_step_is_a_start(site: VotingSite) -> None:
    """Each step is killed once; then a run starts and finishes as usual."""
    site.configure(num_rounds=1)
    for step in _FIRST_STEPS:
        process = site.coordinator(crash=step)
        assert process.wait() is None, f"{step.phase}: {process.tail()}"
        assert process.has_crashed_itself(), f"{step.phase}: {process.tail()}"
    last = site.serving()
    site.populate()
    assert last.wait() == 0, last.tail()
    audit(site)
