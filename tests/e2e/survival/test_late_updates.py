"""A semi-synchronous coordinator is killed: a late update counts once, in a later round.

As in :mod:`tests.e2e.survival.test_asynchronous`, an update of client k that is based on round r
votes in ``votes[r, k]``. If a round takes n updates, each counts 1 / n there.
"""

import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from fedlearn.core.participations import Status
from fedlearn.rounds.records import RunStatus
from fedlearn.store.runs import StoredRun
from tests.e2e.survival.changes import FORGET_REPLIES
from tests.e2e.survival.harness import RUN, Miscounted, VotingSite, check_durations
from tests.e2e.survival.test_asynchronous import PHASES
from tests.processes import Change, Process, until

pytestmark = pytest.mark.slow

NUM_CLIENTS, SLOW = 3, 2
#: Phases around the points at which an update counts and a round is durable.
SOME_PHASES = ("logged, no receipt", "folded", "before the server step", "before the commit")


def configure(
    site: VotingSite,
    *,
    num_rounds: int,
    deadline_s: float,
    stragglers: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Configure a run that asks all three clients, and whose rounds close at a deadline."""
    usual = {"over_selection": 1.0, "min_reports": 1, "below_minimum": "fail"}
    site.configure(
        num_rounds=num_rounds,
        ballast=1000,
        sections={
            "stragglers": {**usual, "deadline_s": deadline_s, **stragglers},
            "algorithm": {"name": "fedavg", "weight_by_examples": False},
            "late_updates": {"mode": "keep"},
            "staleness": {"staleness_weight": "constant", "max_staleness": 10_000},
        },
    )


def audit(site: VotingSite, *, num_clients: int = NUM_CLIENTS) -> Counter[int]:
    """Check that each recorded update is in the model exactly once; count them by staleness.

    Raises:
        Miscounted: An update is there twice or not at all, was acknowledged but does not count, or
            has a negative duration.
    """
    with site.places.open_database() as database:
        run = database.run(RUN)
        status, records, checkpoint = run.record.status, run.rounds(), run.load()
    if status is not RunStatus.DONE:
        raise Miscounted(f"the run is {status}")
    check_durations(records)
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"]
    for number in range(num_clients):
        shares = [
            1.0 / record.count(Status.REPORTED)
            for record in records
            for each in record.participations
            if (each.client_id, each.status) == (number, Status.REPORTED)
        ]
        found = [value for value in votes[:, number].tolist() if value]
        if sorted(found) != pytest.approx(sorted(shares), rel=1e-5):
            raise Miscounted(f"client {number}: {sorted(found)}, on record {sorted(shares)}")
        if lost := {told for told in site.told(number, "accepted") if not votes[told, number]}:
            raise Miscounted(f"client {number} was told that those of {lost} count")
    ages = Counter[int]()
    for record in records:
        ages.update(record.staleness)
    return ages


def populate(site: VotingSite, *, num_clients: int = NUM_CLIENTS) -> list[Process]:
    for number in range(num_clients):
        site.enrol(number)
    return [site.join(number) for number in range(num_clients)]


def test_who_is_late_counts_in_a_later_round(site: VotingSite) -> None:
    """Nothing is killed. The slow client delays only the round in which it was asked."""
    configure(site, num_rounds=40, deadline_s=1.0)
    coordinator = site.serving()
    with site.holding(SLOW):
        populate(site)
        until(lambda: len(site.rounds()) >= 2)
    assert coordinator.wait() == 0, coordinator.tail()
    ages = audit(site)
    assert sum(count for age, count in ages.items() if age) >= 1
    first, second = site.rounds()[:2]
    assert first.count(Status.LATE) == 1
    assert len(second.participations) == 2, "who is awaited is not asked"
    assert second.duration_s < first.duration_s


def test_a_kill_loses_no_late_update(site: VotingSite) -> None:
    """The next coordinator also waits for the late client, and its update counts once."""
    phases = [each for each in PHASES if each.phase in SOME_PHASES]
    assert len(phases) == len(SOME_PHASES)
    configure(site, num_rounds=40, deadline_s=2.0)
    clients, committed = list[Process](), site.rounds()
    with site.holding(SLOW):
        for phase in [replace(each, armed_by=StoredRun.commit) for each in phases]:
            process = site.serving(crash=phase)
            clients = clients or populate(site)
            assert process.wait() is None, f"{phase.phase}: it went on\n{process.tail()}"
            assert process.has_crashed_itself(), f"{phase.phase}: {process.tail()}"
            latest = site.rounds()
            assert latest[: len(committed)] == committed, phase.phase
            committed = latest
    last = site.coordinator()
    assert last.wait() == 0, last.tail()
    ages = audit(site)
    assert sum(count for age, count in ages.items() if age) >= 1


def restart_all(site: VotingSite, *changes: Change) -> Process:
    """Kill a coordinator that has acknowledged one update, and its client; start another."""
    configure(site, num_rounds=1, deadline_s=5.0)
    first = site.serving()
    with site.holding(1, SLOW):
        clients = populate(site)
        until(lambda: site.told(0, "accepted") == {0})
        first.kill()
    clients[0].kill()
    return site.serving(changes=changes)


def test_what_was_acknowledged_counts_although_its_client_is_gone(site: VotingSite) -> None:
    """It counts once."""
    second = restart_all(site)
    assert second.wait() == 0, second.tail()
    audit(site)
    assert site.rounds()[0].count(Status.REPORTED) == NUM_CLIENTS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_in_a_second_attempt_keeps_what_was_accepted_in_it(
    site: VotingSite, number: signal.Signals
) -> None:
    """The round must not close with only the clients of the first attempt."""
    numbers = range(5)
    retried = {"min_reports": 3, "below_minimum": "retry", "max_retries": 50}
    configure(site, num_rounds=2, deadline_s=3.0, stragglers=retried)
    first = site.serving()
    with site.holding(*numbers):
        populate(site, num_clients=5)
        until(lambda: sum(bool(site.trained(each)) for each in numbers) == 3)
        later = [each for each in numbers if not site.trained(each)]
        until(lambda: all(site.trained(each) for each in numbers))
        for each in later:
            (site.stage / f"hold-{each}").unlink()
        until(lambda: all(site.told(each, "accepted") == {0} for each in later))
        first.send(number)
        first.wait()
    second = site.serving()
    assert second.wait() == 0, second.tail()
    audit(site, num_clients=5)
    closed = site.rounds()[0]
    assert closed.attempt >= 1
    assert closed.count(Status.REPORTED) == 5


def test_the_books_show_what_a_forgetful_coordinator_would_do(site: VotingSite) -> None:
    """The control of the audit."""
    second = restart_all(site, FORGET_REPLIES)
    assert second.wait() == 0, second.tail()
    with pytest.raises(Miscounted, match="was told that those of"):
        audit(site)
