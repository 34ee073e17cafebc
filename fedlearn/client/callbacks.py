"""The application's own code: its callbacks and its probes, which may fail or take their time."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from fedlearn.client.conditions import Facts, Probes
from fedlearn.core.clock import Clock

#: Seconds between two questions to the probes, at least.
_ASK_S = 1.0
#: Seconds for which an answer holds while the next one is awaited.
_HOLDS_S = 10.0


class Caller:
    """Makes calls one at a time on a thread of its own, which keeps no application from ending.

    A call that fails is reported as the failure of any thread is (:func:`threading.excepthook`);
    the calls after it are made all the same.

    Args:
        name: The thread's.
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


class LatestFacts:
    """What the application's probes have found lately.

    Args:
        probes: The application's.
        caller: Asks them.
        clock: Says how old an answer is.
    """

    def __init__(self, probes: Probes, *, caller: Caller, clock: Clock) -> None:
        self._probes, self._caller, self._clock = probes, caller, clock
        self._found = (clock.now_s(), Facts())
        self._is_asking, self._next_s = False, clock.now_s()

    def now(self) -> Facts:
        """Return the latest answer, unless it is too old; never waits for the next."""
        now_s = self._clock.now_s()
        if not self._is_asking and now_s >= self._next_s:
            self._is_asking, self._next_s = True, now_s + _ASK_S
            self._caller.call(self._ask)
        found_s, facts = self._found
        return facts if now_s - found_s <= _HOLDS_S else Facts()

    def _ask(self) -> None:
        try:
            facts = self._probes.facts()
            self._found = (self._clock.now_s(), facts)
        finally:
            self._is_asking = False
