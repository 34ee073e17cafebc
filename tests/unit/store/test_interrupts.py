"""Ctrl-C during a write waits until the write has ended."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.store.interrupts import defer_interrupts
from fedlearn.store.runs import Database, sqlite_url


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """Record SIGTERM, and let SIGINT raise KeyboardInterrupt."""
    terminations = list[int]()
    before = [
        (signal.SIGTERM, signal.signal(signal.SIGTERM, lambda each, _: terminations.append(each))),
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)),
    ]
    yield terminations
    for number, handler in before:
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end(heard: list[int]) -> None:
    with defer_interrupts():
        signal.raise_signal(signal.SIGTERM)
        assert not heard
    assert heard == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)  # the handlers are restored
    assert len(heard) == 2


def test_a_second_one_of_its_kind_does_not_wait(heard: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012 (the order counts)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert not heard
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second Ctrl-C waited")


def test_blocks_may_be_nested_and_may_raise(heard: list[int]) -> None:
    with pytest.raises(LookupError), defer_interrupts():  # noqa: PT012 (the order counts)
        with defer_interrupts():
            signal.raise_signal(signal.SIGTERM)
        assert not heard
        raise LookupError
    assert heard == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_the_handlers_alone() -> None:
    before, within = signal.getsignal(signal.SIGINT), []

    def write() -> None:
        with defer_interrupts():
            within.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert within == [before]


def test_what_is_written_as_ctrl_c_comes_is_committed(tmp_path: Path) -> None:
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path) as database:
        with pytest.raises(KeyboardInterrupt), database.writing() as session:  # noqa: PT012
            session.connection().exec_driver_sql("create table found (number integer)")
            signal.raise_signal(signal.SIGINT)
            session.connection().exec_driver_sql("insert into found values (7)")
        with database.reading() as session:
            assert session.connection().exec_driver_sql("select * from found").scalar() == 7
