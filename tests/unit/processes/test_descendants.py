"""Descendant processes are found by a mark in their environment, wherever they were moved."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedlearn.processes.descendants import MARK, end_marked, fresh_mark
from tests.processes import LONG_S

#: Starts its own session, leaves its parent, and says who it is.
LOST = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def start_orphan(mark: str | None) -> Iterator[tuple[int, int]]:
    """Start a process whose parent has exited; yield its pid and its descriptor."""
    environ = {name: value for name, value in os.environ.items() if name != MARK}
    marked = environ if mark is None else environ | {MARK: mark}
    with subprocess.Popen([sys.executable, "-c", LOST], env=marked, stdout=subprocess.PIPE) as it:
        assert it.stdout is not None
        pid = int(it.stdout.readline())
        descriptor = os.pidfd_open(pid)
        try:
            yield pid, descriptor
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(descriptor: int, *, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def test_all_with_a_mark_end_and_no_others() -> None:
    """Processes with another mark, with none, or excluded by the caller survive."""
    mark = fresh_mark()
    with (
        start_orphan(mark) as (_, one),
        start_orphan(mark) as (_, two),
        start_orphan(mark) as (kept, three),
        start_orphan(fresh_mark()) as (_, other),
        start_orphan(None) as (_, unmarked),
    ):
        end_marked(mark, but=[kept])
        assert has_ended(one, within_s=LONG_S)
        assert has_ended(two, within_s=LONG_S)
        for each in (three, other, unmarked):
            assert not has_ended(each, within_s=0.0)
        end_marked(mark)
        assert has_ended(three, within_s=LONG_S)
