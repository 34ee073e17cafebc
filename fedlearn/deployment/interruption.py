"""Why a coordinator shall stop what it waits for: a signal, its operator, another coordinator."""

import signal
import threading
from queue import SimpleQueue
from types import FrameType
from typing import Self

from fedlearn.errors import FedlearnError, Parked

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """A reason to stop that any thread may give, once; the run loop looks for it.

    Example:
        >>> interruption = Interruption()
        >>> interruption.check()
        >>> interruption.give(Parked("told to stop"))
        >>> interruption.is_given()
        True
    """

    def __init__(self) -> None:
        self._given = threading.Event()
        self._lock = threading.Lock()
        self._reason: FedlearnError | None = None

    def give(self, reason: FedlearnError) -> None:
        """Give the error that ends the run in this process; the first one counts."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self._given.set()

    def is_given(self) -> bool:
        """Return whether there is a reason to stop."""
        return self._given.is_set()

    def check(self) -> None:
        """Raise the reason, if there is one.

        Raises:
            FedlearnError: The reason.
        """
        if self._reason is not None:
            raise self._reason

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass, or raise the reason as soon as there is one.

        Raises:
            FedlearnError: The reason.
        """
        self._given.wait(seconds)
        self.check()


class StopSignals:
    """While it is entered, SIGTERM and Ctrl-C park the run instead of ending the process.

    A handler of Python's runs between two instructions of the main thread, which may hold
    any lock: so it only puts a note on a queue, and a thread does what the note says.

    Args:
        interruption: Given :class:`~fedlearn.errors.Parked`.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._notes: SimpleQueue[int] = SimpleQueue()  # its put may interrupt itself
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._before = {number: signal.getsignal(number) for number in _WATCHED}

    def __enter__(self) -> Self:
        """Begin to watch; in the main thread only."""
        for number in _WATCHED:
            signal.signal(number, self._note)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._notes.put(0)
        self._watcher.join()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._notes.put(number)

    def _watch(self) -> None:
        while number := self._notes.get():
            name = signal.Signals(number).name
            self._interruption.give(
                Parked(f"{name}: the round is parked; start the coordinator again to go on")
            )
