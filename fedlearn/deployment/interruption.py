"""Interrupt a coordinator's run loop on a signal, an operator's command, or a takeover."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from fedlearn.core.clock import SystemClock
from fedlearn.errors import FedlearnError, Parked

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class Interruption(SystemClock):
    """A reason to stop that any thread may give; the run loop checks for it.

    It is also a clock, whose sleep ends early when a reason is given.

    Args:
        alive: Called each time that the run loop checks or sleeps, with the seconds that it is
            about to sleep. The calls show that the loop is alive.
    """

    def __init__(self, alive: Callable[[float], None] = lambda _: None) -> None:
        self._alive = alive
        self._given = threading.Event()
        self._lock = threading.Lock()
        self._reason: FedlearnError | None = None

    def give(self, reason: FedlearnError) -> None:
        """Set the error that ends the run in this process; only the first one counts."""
        with self._lock:
            self._reason = self._reason or reason
        # After the reason: a sleeper that this wakes must find it.
        self._given.set()

    def is_given(self) -> bool:
        """Whether there is a reason to stop."""
        return self._given.is_set()

    def check(self) -> None:
        """Raise the reason, if there is one; call it from the run loop's thread only."""
        self._alive(0.0)
        if self._reason is not None:
            raise self._reason

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, or raise the reason as soon as there is one; run loop only."""
        self._alive(seconds)
        self._given.wait(seconds)
        self.check()


@contextmanager
def stop_signals(interruption: Interruption) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C park the run instead of ending the process; in the main thread only.

    Python runs a signal handler between two instructions of the main thread, which may hold any
    lock. So the handler only puts the signal on a queue, and another thread acts on it.
    """
    notes = SimpleQueue[int]()  # its put is reentrant, so a handler may interrupt another put

    def watch() -> None:
        while number := notes.get():
            name = signal.Signals(number).name
            interruption.give(
                Parked(f"{name}: the round is parked; start the coordinator again to resume it")
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
