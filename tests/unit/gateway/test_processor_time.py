"""Processor time of the server: only its own threads count, not other threads of the process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlearn.core.clock import thread_processor_s
from fedlearn.gateway.processor_time import ProcessorTime

_BURNT_S = 0.2


def burn() -> None:
    """Use processor time in the calling thread."""
    thread = threading.get_native_id()
    end_s = thread_processor_s(thread) + _BURNT_S
    while thread_processor_s(thread) < end_s:
        pass


@contextmanager
def thread(name: str) -> Iterator[Callable[[], None]]:
    """Yield a function that burns time in another thread with this kernel name."""
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
        assert spent.measure_s() < 0.5 * _BURNT_S
        burn()
        assert spent.measure_s() == pytest.approx(_BURNT_S, rel=0.5)
        grpc()
        assert spent.measure_s() == pytest.approx(_BURNT_S, rel=0.5)
        assert spent.measure_s() < 0.5 * _BURNT_S


def test_threads_that_come_and_go_count_from_when_they_are_found() -> None:
    """Then all of its time counts; a thread that ends does not reduce the total."""
    with thread("event_engine"):
        spent = ProcessorTime()
        with thread("event_engine") as newcomer:
            newcomer()
            assert spent.measure_s() < 0.5 * _BURNT_S
            spent.find_threads()
            assert spent.measure_s() == pytest.approx(_BURNT_S, rel=0.5)
        assert 0.0 <= spent.measure_s() < 0.5 * _BURNT_S


def test_where_threads_cannot_be_told_apart_all_that_the_process_takes_counts(
    tmp_path: Path,
) -> None:
    spent = ProcessorTime(tmp_path / "no such folder")
    with thread("evaluation") as evaluation:
        evaluation()
        assert spent.measure_s() >= 0.9 * _BURNT_S
