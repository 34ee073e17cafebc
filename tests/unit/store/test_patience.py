"""A database that is away for a while costs that while and nothing else."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import structlog
from structlog.testing import capture_logs

from fedlearn.core.clock import VirtualClock
from fedlearn.errors import StoreError, StoreUnavailable
from fedlearn.rounds.journal import MemoryJournal, OpenRound
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus
from fedlearn.store.patience import PatientJournal, PatientStore, patient

LOG = structlog.get_logger()


class Outage:
    """A store, and any operation, that fails until a moment of its clock."""

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
    """Soon at first, then every 5 s at the most; said once, and once when it is back."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=30.0)
    with capture_logs() as logs:
        found = patient(lambda: outage.do("x"), clock=clock, give_up_s=60.0, log=LOG)
    assert found == "x"
    pauses = [later - earlier for earlier, later in pairwise(outage.tried_s)]
    assert pauses[0] < 0.5
    assert max(pauses) == 5.0
    assert clock.now_s() < 35.0
    assert [each["log_level"] for each in logs] == ["warning", "info"]


def test_patience_ends() -> None:
    """With the error of the last attempt, made when the time is up."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=1e9)
    with pytest.raises(StoreUnavailable, match="connection refused"):
        patient(lambda: outage.do("x"), clock=clock, give_up_s=60.0, log=LOG)
    assert outage.tried_s[-1] == pytest.approx(60.0)


def test_other_errors_are_not_waited_for() -> None:
    """A disk that is broken does not mend itself."""

    def fail() -> None:
        raise StoreError("the disk is broken")

    clock = VirtualClock()
    with pytest.raises(StoreError, match="disk"):
        patient(fail, clock=clock, give_up_s=60.0, log=LOG)
    assert clock.now_s() == 0.0


def test_a_run_and_its_journal_wait_for_their_database() -> None:
    """Each operation by itself."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=10.0)
    store = PatientStore(store=outage, clock=clock, give_up_s=60.0, log=LOG)
    store.commit(Checkpoint(round_num=4, tensors={}, values={}))
    store.finish(RunStatus.DONE, error="")
    assert outage.done == ["commit 4", "finish done "]


class AwayJournal(MemoryJournal):
    """A journal in a database that is away at first."""

    def __init__(self, away: Callable[[], object]) -> None:
        super().__init__()
        self._away = away

    def open(self, opened: OpenRound) -> None:
        self._away()
        super().open(opened)


def test_a_round_is_opened_once_the_database_is_back() -> None:
    """And found, and forgotten."""
    clock = VirtualClock()
    outage = Outage(clock, until_s=10.0)
    journal = PatientJournal(
        journal=AwayJournal(lambda: outage.do("open")), clock=clock, give_up_s=60.0, log=LOG
    )
    opened = OpenRound(round_num=0, attempt=0, cohort=(), opened_unix_s=0.0)
    journal.open(opened)
    assert clock.now_s() >= 10.0
    assert journal.find(0, 0) == opened
    assert journal.last() == opened
    journal.forget(before_round=1)
    assert journal.last() is None
