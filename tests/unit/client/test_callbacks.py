"""Callbacks of the application that fail or hang."""

import subprocess
import sys
import threading
from queue import SimpleQueue
from threading import ExceptHookArgs

import pytest

from fedlearn.client.callbacks import Caller

WAIT_S = 60.0


def test_a_call_that_fails_does_not_keep_the_next_from_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure reaches ``threading.excepthook``, like that of any thread of the application."""
    reported: SimpleQueue[ExceptHookArgs] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", reported.put)
    heard: SimpleQueue[int] = SimpleQueue()
    caller = Caller("test")
    caller.call(lambda: heard.put(1 // 0))
    caller.call(lambda: heard.put(2))
    assert heard.get(timeout=WAIT_S) == 2
    assert reported.get(timeout=WAIT_S).exc_type is ZeroDivisionError
    caller.close()


def test_a_call_that_hangs_does_not_keep_the_application() -> None:
    """The interpreter exits without waiting for the call."""
    script = (
        "from threading import Event\n"
        "from fedlearn.client.callbacks import Caller\n"
        "begun = Event()\n"
        "caller = Caller('test')\n"
        "caller.call(begun.set)\n"
        "caller.call(Event().wait)\n"
        "begun.wait()\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], timeout=WAIT_S, check=False).returncode == 0
    )
