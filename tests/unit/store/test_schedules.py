"""Recurring runs: due once whatever the service does, and skipped with a record."""

from dataclasses import dataclass, replace
from datetime import datetime

import pytest

from fedlearn.core.clock import VirtualClock, WallClock
from fedlearn.core.recurrence import Recurrence
from fedlearn.errors import ConfigError, DeploymentError, Fenced
from fedlearn.identity.audit import Action
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.audit import read_entries
from fedlearn.store.lease import SERVICE_LEASE, Lease, ensure_service
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database
from fedlearn.store.schedules import ScheduleStore
from fedlearn.store.studies import NewStudy, StudyStore

NIGHTLY = Recurrence(cron="0 2 * * *", timezone="UTC")
DRAFT = Submission(name="nightly", config={"num_rounds": 3}, start_from={}, priority=4)


@dataclass
class Hand(WallClock):
    """A wall clock that a test sets."""

    utc: str = "2026-03-01T12:00:00+00:00"

    def unix_s(self) -> float:
        return datetime.fromisoformat(self.utc).timestamp()


def build(database: Database, clock: Hand) -> tuple[RunQueue, ScheduleStore]:
    queue = RunQueue(database, clock)
    return queue, ScheduleStore(queue, clock)


def skips(database: Database) -> list[str]:
    with database.reading() as session:
        entries = list(read_entries(session))
    return [each.details for each in entries if each.action == Action.SCHEDULE_SKIPPED]


def test_a_missed_time_runs_once_and_never_twice(database: Database) -> None:
    """The service was down for three nights; after a crash, another look queues nothing more."""
    clock = Hand()
    queue, schedules = build(database, clock)
    schedules.create(DRAFT, NIGHTLY)
    assert schedules.queue_due() == []
    clock.utc = "2026-03-04T09:00:00+00:00"
    assert schedules.queue_due() == ["nightly: queued nightly-1"]
    assert schedules.queue_due() == []
    [run] = queue.list()
    assert (run.name, run.config["name"], run.priority) == ("nightly-1", "nightly-1", 4)
    clock.utc = "2026-03-05T01:59:59+00:00"
    assert schedules.queue_due() == []


def test_a_run_that_is_still_at_work_is_not_joined_by_another(database: Database) -> None:
    clock = Hand()
    queue, schedules = build(database, clock)
    schedules.create(DRAFT, NIGHTLY)
    clock.utc = "2026-03-02T02:00:00+00:00"
    schedules.queue_due()
    queue.start("nightly-1")
    clock.utc = "2026-03-03T02:00:00+00:00"
    assert schedules.queue_due() == ["nightly: skipped, since nightly-1 is running"]
    assert schedules.queue_due() == []
    [skip] = skips(database)
    assert '"due_utc":"2026-03-03T02:00:00Z"' in skip
    queue.finish("nightly-1", QueueState.FAILED, reason="lost power")
    clock.utc = "2026-03-04T02:00:00+00:00"
    assert schedules.queue_due() == ["nightly: queued nightly-2"]


def test_a_name_that_is_taken_is_passed_over(database: Database) -> None:
    clock = Hand(utc="2026-03-02T01:00:00+00:00")
    queue, schedules = build(database, clock)
    schedules.create(DRAFT, NIGHTLY)
    queue.submit(replace(DRAFT, name="nightly-1"))
    clock.utc = "2026-03-02T02:00:00+00:00"
    assert schedules.queue_due() == ["nightly: queued nightly-2"]


def test_runs_of_a_closed_study_are_skipped(database: Database) -> None:
    clock = Hand()
    queue, schedules = build(database, clock)
    studies = StudyStore(database, clock)
    studies.create(NewStudy(name="tumours"))
    schedules.create(replace(DRAFT, study="tumours"), NIGHTLY)
    studies.close("tumours")
    clock.utc = "2026-03-02T02:00:00+00:00"
    [told] = schedules.queue_due()
    assert "the study tumours was closed" in told
    assert queue.list() == []
    assert len(skips(database)) == 1


def test_a_service_that_was_replaced_queues_nothing(database: Database) -> None:
    clock = Hand()
    _, schedules = build(database, clock)
    schedules.create(DRAFT, NIGHTLY)
    ensure_service(database, "clinics")
    leases = [
        Lease(database, "clinics", holder=each, ttl_s=0.0, clock=VirtualClock(), kind=SERVICE_LEASE)
        for each in ("old", "new")
    ]
    assert leases[0].try_acquire()
    leases[0].release()
    assert leases[1].try_acquire()
    clock.utc = "2026-03-02T02:00:00+00:00"
    fenced = ScheduleStore(RunQueue(database, clock, guard=leases[0].guard), clock)
    with pytest.raises(Fenced):
        fenced.queue_due()
    assert schedules.queue_due() == ["nightly: queued nightly-1"]


def test_schedules_are_listed_and_removed(database: Database) -> None:
    clock = Hand()
    queue, schedules = build(database, clock)
    schedules.create(DRAFT, NIGHTLY)
    with pytest.raises(DeploymentError, match="a schedule called 'nightly' already"):
        schedules.create(DRAFT, NIGHTLY)
    [found] = schedules.list_all()
    assert (found.cron, found.last_run, found.num_runs) == ("0 2 * * *", "", 0)
    with pytest.raises(DeploymentError, match="did you mean 'nightly'"):
        schedules.remove("nightl")
    schedules.remove("nightly")
    clock.utc = "2026-03-09T12:00:00+00:00"
    assert (schedules.queue_due(), queue.list()) == ([], [])


@pytest.mark.parametrize(
    ("after", "times"),
    [
        # Summer time begins: 2:30 does not exist, and is due when it would have been.
        ("2026-03-28T12:00:00+00:00", ["2026-03-29T01:00:00", "2026-03-30T00:30:00"]),
        # It ends: 2:30 comes twice, and is due once.
        ("2026-10-24T12:00:00+00:00", ["2026-10-25T00:30:00", "2026-10-26T01:30:00"]),
    ],
)
def test_changes_of_daylight_saving_time_neither_lose_nor_repeat_a_run(
    after: str, times: list[str]
) -> None:
    recurrence = Recurrence(cron="30 2 * * *", timezone="Europe/Berlin")
    unix_s = datetime.fromisoformat(after).timestamp()
    for expected in times:
        unix_s = recurrence.find_next(unix_s)
        assert unix_s == datetime.fromisoformat(f"{expected}+00:00").timestamp()


@pytest.mark.parametrize(
    ("cron", "timezone", "told"),
    [
        ("0 2 * *", "UTC", "give five fields"),
        ("61 2 * * *", "UTC", "Bad minute"),
        ("0 0 30 2 *", "UTC", "never due"),
        ("0 2 * * *", "Europe/Berlim", "there is no such time zone"),
        ("0 2 * * *", "../etc", "there is no such time zone"),
    ],
)
def test_what_is_never_due_is_refused(cron: str, timezone: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Recurrence(cron=cron, timezone=timezone)
