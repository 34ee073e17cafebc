"""Processor time of the server's own threads: the event loop, and gRPC's, which encrypt.

Other work of the process, such as evaluating or training a model, must not count as a cost of its
clients.
"""

import threading
from contextlib import suppress
from pathlib import Path

from fedlearn.core.clock import process_processor_s, thread_processor_s

#: gRPC's name for the threads that do handshakes, encrypt and move bytes.
_GRPC_THREAD = "event_engine"


class ProcessorTime:
    """Measures the calling thread and gRPC's threads; created and used on the event loop's thread.

    Where threads cannot be told apart (on systems other than Linux, or if no thread has gRPC's
    name), it measures the whole process.

    Args:
        tasks: Linux's folder of this process's threads.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._loop = threading.get_native_id()
        self._grpc = set[int]()
        self._seen_s = dict[int, float]()
        self._process_s = 0.0
        self.find_threads()
        self.measure_s()

    def find_threads(self) -> None:
        """Look for threads that gRPC has started since; takes 0.1 ms or more."""
        named = self._tasks.glob("*/comm")
        self._grpc = {int(each.parent.name) for each in named if _read_name(each) == _GRPC_THREAD}

    def measure_s(self) -> float:
        """Return the processor time since the last call, or since creation."""
        threads_s = dict[int, float]()
        for thread in (self._loop, *self._grpc):
            with suppress(OSError):  # the thread has ended
                threads_s[thread] = thread_processor_s(thread)
        # A new thread counts from its start. One that has ended drops out, instead of lowering the
        # sum.
        passed_s = sum(now - self._seen_s.get(each, 0.0) for each, now in threads_s.items())
        before_s, self._process_s = self._process_s, process_processor_s()
        self._seen_s = threads_s
        return passed_s if self._grpc else self._process_s - before_s


def _read_name(path: Path) -> str:
    """Return a thread's name; empty if it has ended."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
