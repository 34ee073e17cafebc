"""The coordinator's heartbeat: it receives operators' commands, and a run ends without it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.deployment.heartbeat import Heartbeat
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import Aborted, StoreError
from fedlearn.store.lease import Lease, deploy, find_deployment, set_control
from fedlearn.store.runs import Database, sqlite_url
from tests.records import RUN

WAIT_S = 60.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A store with one deployed run."""
    url = sqlite_url(tmp_path / "runs.db")
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        deploy(database, RUN.name)
        yield database


class Told:
    """The status for operators; raises an exception at one beat."""

    def __init__(self, *, num_good: int | None = None) -> None:
        self.num_beats = 0
        self._num_good = num_good

    def __call__(self) -> Mapping[str, object]:
        self.num_beats += 1
        if self.num_beats - 1 == self._num_good:
            raise ZeroDivisionError("a defect")
        return {"beats": self.num_beats}


def a_heart(
    database: Database,
    told: Told,
    interruption: Interruption,
    alive: Callable[[], None] = lambda: None,
) -> Heartbeat:
    lease = Lease(database, RUN.name, holder="a", ttl_s=0.2, clock=SystemClock())
    assert lease.try_acquire()
    return Heartbeat(
        lease,
        status=told,
        paused=threading.Event(),
        interruption=interruption,
        alive=alive,
        clock=SystemClock(),
    )


def test_a_heart_beats_until_it_is_left_with_a_last_word(database: Database) -> None:
    """The last beat does not interrupt the run."""
    told, interruption = Told(), Interruption()
    with a_heart(database, told, interruption):
        assert told.num_beats == 1
    assert find_deployment(database, RUN.name).status == {"beats": told.num_beats}
    assert told.num_beats > 1
    assert not interruption.is_given()


def test_an_operator_who_aborts_is_heard(database: Database) -> None:
    """The run is interrupted at the next beat."""
    interruption = Interruption()
    with a_heart(database, Told(), interruption):
        set_control(database, RUN.name, "abort")
        with pytest.raises(Aborted):
            interruption.sleep(WAIT_S)


def test_a_heart_that_dies_ends_the_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without heartbeat, the lease would expire and operators would not be heard."""
    died = list[type[BaseException]]()
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
    interruption = Interruption()
    with (
        a_heart(database, Told(num_good=2), interruption),
        pytest.raises(StoreError, match=r"lease of 'calm-otter-17'.*start the coordinator"),
    ):
        interruption.sleep(WAIT_S)
    assert died == [ZeroDivisionError]
