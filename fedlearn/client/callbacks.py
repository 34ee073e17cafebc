"""The application's own code: its callbacks and its probes, which may fail or take their time."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Caller:
    """Makes calls one at a time on a thread of its own, which keeps no application from ending.

    A call that fails is reported as the failure of any thread is (:func:`threading.excepthook`);
    the calls after it are made all the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._start()

    def call(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after those before it; returns at once."""
        self._calls.put(function)

    def close(self) -> None:
        """End the thread after the calls that were asked for; returns at once."""
        self._calls.put(None)

    def _start(self) -> None:
        # A daemon: the interpreter does not wait for a call that hangs.
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        has_failed = True
        try:
            while (function := self._calls.get()) is not None:
                function()
            has_failed = False
        finally:
            if has_failed:
                self._start()
