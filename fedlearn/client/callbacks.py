"""Call the application's callbacks and probes, which may raise or block."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Caller:
    """Makes queued calls one at a time on a daemon thread.

    A call that raises is reported like an exception in any thread (:func:`threading.excepthook`),
    and the calls after it are still made.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._start()

    def call(self, function: Callable[[], object]) -> None:
        """Queue a call of ``function``; returns at once."""
        self._calls.put(function)

    def close(self) -> None:
        """End the thread after the queued calls; returns at once."""
        self._calls.put(None)

    def _start(self) -> None:
        # A daemon, so that a call that hangs does not keep the interpreter from exiting.
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        # No `except`: the exception must reach `threading.excepthook`, which ends this thread.
        has_failed = True
        try:
            while (function := self._calls.get()) is not None:
                function()
            has_failed = False
        finally:
            if has_failed:  # the exception ends this thread, so another one makes the next calls
                self._start()
