"""Why a coordinator shall stop what it waits for: a signal, its operator, another coordinator."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from fedlearn.core.clock import SystemClock
from fedlearn.errors import FedlearnError, Parked

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class Interruption(SystemClock):
    """A reason to stop that any thread may give, once; the run loop looks for it.

    It is a clock as well, whose sleep ends early where there is a reason.

    Args:
        alive: Told, each time that the run loop looks or sleeps, for how many seconds it will sleep
            now: as long as it does so, it goes on.
    """

    def __init__(self, alive: Callable[[float], None] = lambda _: None) -> None:
        self._alive = alive
        self._given = threading.Event()
        self._lock = threading.Lock()
        self._reason: FedlearnError | None = None

    def give(self, reason: FedlearnError) -> None:
        """Give the error that ends the run in this process; the first one counts."""
        with self._lock:
            self._reason = self._reason or reason
        self._given.set()

    def is_given(self) -> bool:
        """Whether there is a reason to stop."""
        return self._given.is_set()

    def check(self) -> None:
        """Raise the reason, if there is one; for the run loop's thread."""
        self._alive(0.0)
        if self._reason is not None:
            raise self._reason

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass, or raise the reason as soon as there is one; likewise."""
        self._alive(seconds)
        self._given.wait(seconds)
        self.check()


@contextmanager
def stop_signals(interruption: Interruption) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C park the run instead of ending the process; in the main thread only.

    A handler of Python's runs between two instructions of the main thread, which may hold
    any lock: so it only puts a note on a queue, and a thread does what the note says.
    """
    notes = SimpleQueue[int]()  # its put may interrupt itself

    def watch() -> None:
        while number := notes.get():
            name = signal.Signals(number).name
            interruption.give(
                Parked(f"{name}: the round is parked; start the coordinator again to go on")
            )

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    before = {each: signal.signal(each, lambda number, _: notes.put(number)) for each in _WATCHED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        notes.put(0)
        watcher.join()
