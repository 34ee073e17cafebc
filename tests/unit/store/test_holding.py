"""Locks on runs: one process holds a run at a time, until it exits."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.locks import open_lock, take_lock
from fedlearn.errors import RunHeld
from fedlearn.rounds.records import RunStatus
from fedlearn.store.holding import hold_run, is_held
from fedlearn.store.lease import deploy
from fedlearn.store.runs import Database, StoredRun
from tests.records import RUN


@pytest.fixture
def run(database: Database) -> StoredRun:
    """A new run."""
    return database.create(RUN)


@contextmanager
def another_process_holds(folder: Path) -> Iterator[int]:
    """Yield the id of a process that holds a run until it is killed."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        with hold_run(folder):
            os.write(tell, b".")
            signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_a_run_is_held_by_one_process_until_that_is_killed(tmp_path: Path) -> None:
    """The error names the process that holds it; after kill -9 there is nothing to clean up."""
    with another_process_holds(tmp_path) as child:
        assert is_held(tmp_path)
        with (
            pytest.raises(RunHeld, match=rf"process {child} on .*stop it first"),
            hold_run(tmp_path),
        ):
            pass
    assert is_held(tmp_path) is False
    with hold_run(tmp_path):
        assert is_held(tmp_path)


def test_a_run_is_held_once_in_a_process(tmp_path: Path) -> None:
    """Two threads would overwrite each other's data as two processes would."""
    with hold_run(tmp_path), pytest.raises(RunHeld), hold_run(tmp_path):
        pass


def test_a_run_that_nobody_ever_held_is_nobodys_to_judge(tmp_path: Path) -> None:
    """Its folder may belong to another machine. The check creates no files."""
    assert is_held(tmp_path) is None
    assert is_held(tmp_path / "elsewhere") is None
    assert list(tmp_path.iterdir()) == []


def test_who_looks_does_not_keep_who_begins_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check takes the lock briefly; a start, or another check, waits for it."""
    for begin in (hold_run(tmp_path), nullcontext()):
        with hold_run(tmp_path):
            pass
        looking = open_lock(tmp_path / "lock")
        assert take_lock(looking)
        monkeypatch.setattr(SystemClock, "sleep", lambda *_, file=looking: file.close())
        with begin as holds:
            assert is_held(tmp_path) is not isinstance(begin, nullcontext), holds


def statuses(run: StoredRun) -> list[RunStatus]:
    """Return the status of a store's only run, read directly and from the list of runs."""
    return [run.record.status, *(each.status for each in run.database.runs())]


def test_a_run_whose_process_is_gone_is_lost(run: StoredRun) -> None:
    """Read directly and from the list. A run that has ended keeps its status."""
    assert statuses(run) == [RunStatus.RUNNING] * 2
    with another_process_holds(run.path):
        assert statuses(run) == [RunStatus.RUNNING] * 2
    assert statuses(run) == [RunStatus.LOST] * 2
    for status in (RunStatus.DONE, RunStatus.FAILED, RunStatus.INTERRUPTED):
        run.finish(status, error="")
        assert statuses(run) == [status] * 2


def test_a_deployed_run_is_running_without_a_coordinator(database: Database) -> None:
    """Its lease, not a lock, determines its coordinator."""
    deployed = database.create(replace(RUN, name="deployed"))
    deploy(database, "deployed")
    assert deployed.record.status is RunStatus.RUNNING
