"""Processor time of the door's own threads: the event loop's, and gRPC's, which encrypt.

What the process computes beside them, as when it evaluates or trains a model, is no cost of the
door's clients.
"""

import threading
from contextlib import suppress
from pathlib import Path

from fedlearn.core.clock import process_processor_s, thread_processor_s

#: What gRPC calls the threads in which it shakes hands, encrypts and moves bytes.
_GRPC_THREAD = "event_engine"


class ProcessorTime:
    """What the calling thread and gRPC's have taken; made and used in the thread of the loop.

    Where threads cannot be told apart (on another system than Linux, or none has gRPC's name), it
    is what the whole process has taken.

    Args:
        tasks: The folder of this process's threads, as Linux has it.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._loop = threading.get_native_id()
        self._grpc = set[int]()
        self._seen_s = dict[int, float]()
        self._process_s = 0.0
        self.find_threads()
        self.passed_s()

    def find_threads(self) -> None:
        """Look for threads that gRPC has started meanwhile, a tenth of a millisecond or more."""
        named = self._tasks.glob("*/comm")
        self._grpc = {int(each.parent.name) for each in named if _name(each) == _GRPC_THREAD}

    def passed_s(self) -> float:
        """Return the processor time since the last call, or since this was made."""
        threads_s = dict[int, float]()
        for thread in (self._loop, *self._grpc):
            with suppress(OSError):  # it has ended
                threads_s[thread] = thread_processor_s(thread)
        passed_s = sum(now - self._seen_s.get(each, 0.0) for each, now in threads_s.items())
        before_s, self._process_s = self._process_s, process_processor_s()
        self._seen_s = threads_s
        return passed_s if self._grpc else self._process_s - before_s


def _name(path: Path) -> str:
    """Return what a thread is called; one that has ended, nothing."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
