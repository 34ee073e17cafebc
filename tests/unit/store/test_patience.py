"""A database outage delays a run but does not end it."""

from itertools import pairwise
from pathlib import Path

import pytest
import structlog
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fedlearn.core.clock import VirtualClock
from fedlearn.deployment.live_status import LiveStatus
from fedlearn.deployment.record import CleanupStore
from fedlearn.errors import StoreError, StoreUnavailable
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus
from fedlearn.store.patience import Patience, PatientJournal
from tests.records import journals_in


def patience(clock: VirtualClock) -> Patience:
    return Patience(clock=clock, give_up_s=60.0, log=structlog.get_logger())


class Outage:
    """A store whose operations fail until a time of its clock."""

    def __init__(self, clock: VirtualClock, *, until_s: float) -> None:
        self.clock = clock
        self.until_s = until_s
        self.tried_s: list[float] = []
        self.done: list[str] = []

    def do(self, what: str) -> str:
        self.tried_s.append(self.clock.now_s())
        if self.clock.now_s() < self.until_s:
            raise StoreUnavailable("connection refused")
        self.done.append(what)
        return what

    def append(self, record: RoundRecord) -> None:
        raise NotImplementedError

    def commit(self, checkpoint: Checkpoint) -> None:
        self.do(f"commit {checkpoint.round_num}")

    def finish(self, status: RunStatus, *, error: str) -> None:
        self.do(f"finish {status} {error}")


def test_an_operation_is_tried_until_the_database_is_back() -> None:
    """Soon at first, then every 5 s; logged once, and once more when the database is back."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=30.0)
    with capture_logs() as logs:
        found = patience(clock)(lambda: outage.do("x"))
    assert found == "x"
    pauses = [later - earlier for earlier, later in pairwise(outage.tried_s)]
    assert pauses[0] < 0.5
    assert max(pauses) == 5.0
    assert clock.now_s() < 35.0
    assert [each["log_level"] for each in logs] == ["warning", "info"]


def test_patience_ends() -> None:
    """It raises the error of the last attempt, made when the time is up."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=1e9)
    with pytest.raises(StoreUnavailable, match="connection refused"):
        patience(clock)(lambda: outage.do("x"))
    assert outage.tried_s[-1] == pytest.approx(60.0)


def test_other_errors_are_not_waited_for() -> None:
    """A broken disk does not repair itself."""

    def fail() -> None:
        raise StoreError("the disk is broken")

    clock = VirtualClock()
    with pytest.raises(StoreError, match="disk"):
        patience(clock)(fail)
    assert clock.now_s() == 0.0


def test_a_run_waits_for_its_database(tmp_path: Path) -> None:
    """Each operation is retried by itself."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=10.0)
    with journals_in(tmp_path) as empty:
        store = CleanupStore(
            store=outage,
            patiently=patience(clock),
            journal=empty(),
            save_trainers=lambda: None,
            forget=lambda _: None,
            live_status=LiveStatus(),
            run_id="0" * 32,
        )
        store.commit(Checkpoint(round_num=4, tensors={}, values={}))
        store.finish(RunStatus.DONE, error="")
    assert outage.done == ["commit 4", "finish done "]


def test_a_round_is_opened_once_the_database_is_back(tmp_path: Path) -> None:
    """Finding and forgetting a round work too."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=10.0)

    def guard(_: Session) -> None:
        outage.do("write")

    with journals_in(tmp_path, guard=guard) as empty:
        require_opened(PatientJournal(journal=empty(), patiently=patience(clock)))
    assert outage.tried_s[0] < 10.0 <= clock.now_s()


def require_opened(journal: RoundJournal) -> None:
    opened = OpenRound(round_num=0, attempt=0, cohort=(), opened_unix_s=0.0)
    journal.open(opened)
    assert journal.find(0, 0) == opened
    assert journal.last() == opened
    journal.forget(before_round=1)
    assert journal.last() is None
