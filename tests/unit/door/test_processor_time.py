"""Processor time of the door: its own threads count, and nothing that is computed beside them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlearn.core.clock import thread_processor_s
from fedlearn.door.processor_time import ProcessorTime

_BURNT_S = 0.2


def burn() -> None:
    """Take processor time in the thread that calls."""
    thread = threading.get_native_id()
    end_s = thread_processor_s(thread) + _BURNT_S
    while thread_processor_s(thread) < end_s:
        pass


@contextmanager
def thread(name: str) -> Iterator[Callable[[], None]]:
    """Give a way to burn in a thread that the kernel knows by a name; it lives meanwhile."""
    begin, burnt, is_named = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    is_over = False

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        is_named.set()
        while begin.acquire() and not is_over:
            burn()
            burnt.release()

    def wait_for_it() -> None:
        begin.release()
        burnt.acquire()

    running = threading.Thread(target=run)
    running.start()
    is_named.wait()
    try:
        yield wait_for_it
    finally:
        is_over = True
        begin.release()
        running.join()


def test_the_loop_and_grpc_count_and_what_is_computed_beside_them_does_not() -> None:
    with thread("event_engine") as grpc, thread("evaluation") as evaluation:
        spent = ProcessorTime()
        evaluation()
        assert spent.passed_s() < 0.5 * _BURNT_S
        burn()
        assert spent.passed_s() == pytest.approx(_BURNT_S, rel=0.5)
        grpc()
        assert spent.passed_s() == pytest.approx(_BURNT_S, rel=0.5)
        assert spent.passed_s() < 0.5 * _BURNT_S


def test_threads_that_come_and_go_count_from_when_they_are_found() -> None:
    """All that such a one has taken; one that has ended takes nothing with it."""
    with thread("event_engine"):
        spent = ProcessorTime()
        with thread("event_engine") as newcomer:
            newcomer()
            assert spent.passed_s() < 0.5 * _BURNT_S
            spent.find_threads()
            assert spent.passed_s() == pytest.approx(_BURNT_S, rel=0.5)
        assert 0.0 <= spent.passed_s() < 0.5 * _BURNT_S


def test_where_threads_cannot_be_told_apart_all_that_the_process_takes_counts(
    tmp_path: Path,
) -> None:
    spent = ProcessorTime(tmp_path / "no such folder")
    with thread("evaluation") as evaluation:
        evaluation()
        assert spent.passed_s() >= 0.9 * _BURNT_S
