"""The pool of processes: results, deaths, interruption, and what cannot be sent."""

import os
import signal
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.errors import EngineError
from fedlearn.processes.pool import WorkerDied, run_in_pool
from tests.processes import until


def double(number: int) -> tuple[int, str, int]:
    return 2 * number, os.environ.get("SHARE", ""), os.getpid()


def set_share(share: str) -> None:
    os.environ["SHARE"] = share


def die_until_marked(folder: Path, number: int) -> int:
    """Die at the first start of each task, and always at that of task 0."""
    mark = folder / str(number)
    if number == 0 or not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for_interrupt(folder: Path, number: int) -> int:
    try:
        (folder / f"begun-{number}").write_text(str(os.getpid()))
        SystemClock().sleep(60)
    except KeyboardInterrupt:
        (folder / f"interrupted-{number}").touch()
        raise
    return number


def leave() -> None:
    sys.exit("no")


def test_each_process_is_started_once_and_prepared() -> None:
    """Seven tasks on two processes: all results come back, from two processes."""
    prepare = [partial(set_share, "a"), partial(set_share, "b")]
    found = dict(run_in_pool(double, range(7), prepare=prepare))
    results = [each for _, each in sorted(found.items()) if not isinstance(each, WorkerDied)]
    assert [number for number, _, _ in results] == [0, 2, 4, 6, 8, 10, 12]
    assert {share for _, share, _ in results} <= {"a", "b"}
    assert len({pid for _, _, pid in results}) <= 2
    assert os.environ.get("SHARE") is None


def test_a_death_costs_only_the_task_it_was_on(tmp_path: Path) -> None:
    """Tasks whose process dies once run again; one whose process always dies is given up."""
    function = partial(die_until_marked, tmp_path)
    found = dict(run_in_pool(function, range(3), prepare=[int]))
    assert (found[1], found[2]) == (1, 2)
    assert isinstance(found[0], WorkerDied)
    assert "signal 9" in str(found[0])


def test_closing_the_pool_interrupts_its_tasks(tmp_path: Path) -> None:
    """A task gets KeyboardInterrupt, so that a run can record it; its process ends."""
    function = partial(wait_for_interrupt, tmp_path)
    interrupt_when(tmp_path / "begun-0")
    with (
        closing(run_in_pool(function, range(2), prepare=[int])) as pool,
        pytest.raises(KeyboardInterrupt),
    ):
        next(pool)
    assert (tmp_path / "interrupted-0").exists()
    assert not (tmp_path / "begun-1").exists()
    assert not psutil.pid_exists(int((tmp_path / "begun-0").read_text()))


def interrupt_when(path: Path) -> None:
    """Interrupt this process as Ctrl-C does, once there is a file."""

    def interrupt() -> None:
        until(path.exists)
        until(lambda: bool(path.read_text()))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_what_does_not_start_or_cannot_be_sent_is_refused_with_the_remedy() -> None:
    with pytest.raises(EngineError, match=r"did not start.*exit code 1.*__main__"):
        list(run_in_pool(double, [1], prepare=[leave]))
    with pytest.raises(EngineError, match=r"cannot be sent.*top of a module.*one job"):
        list(run_in_pool(lambda number: number, [1], prepare=[int]))
