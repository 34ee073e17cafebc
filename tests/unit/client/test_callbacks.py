"""The application's own code fails, hangs and takes its time."""

import subprocess
import sys
import threading
from queue import SimpleQueue
from threading import Event, ExceptHookArgs

import pytest

from fedlearn.client.callbacks import Caller, LatestFacts
from fedlearn.client.conditions import Facts, Probes
from fedlearn.core.clock import VirtualClock

WAIT_S = 60.0


def test_a_call_that_fails_does_not_keep_the_next_from_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its failure is the application's, which hears of it as of that of any of its threads."""
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
    """The interpreter ends without it."""
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


class SlowProbe:
    """Answers when it may."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[None] = SimpleQueue()
        self.may_answer = Event()

    def __call__(self) -> bool:
        self.asked.put(None)
        assert self.may_answer.wait(WAIT_S)
        return True


def test_an_answer_holds_while_the_next_is_awaited() -> None:
    """Conditions do not flap because a probe is slow; but one that hangs says nothing."""
    clock, probe, caller = VirtualClock(), SlowProbe(), Caller("test")
    facts = LatestFacts(Probes(idle=probe), caller=caller, clock=clock)
    assert facts.now() == Facts()
    probe.asked.get(timeout=WAIT_S)
    probe.may_answer.set()
    answered = Event()
    caller.call(answered.set)
    assert answered.wait(WAIT_S)
    probe.may_answer.clear()

    clock.sleep(2.0)
    assert facts.now() == Facts(idle=True)
    probe.asked.get(timeout=WAIT_S)
    assert facts.now() == Facts(idle=True)
    clock.sleep(20.0)
    assert facts.now() == Facts()
    probe.may_answer.set()
    caller.close()


def test_probes_are_asked_once_a_second() -> None:
    """However often it is looked, as at every event of a training."""
    clock, probe, caller = VirtualClock(), SlowProbe(), Caller("test")
    probe.may_answer.set()
    facts = LatestFacts(Probes(idle=probe), caller=caller, clock=clock)
    for _ in range(20):
        facts.now()
        answered = Event()
        caller.call(answered.set)
        assert answered.wait(WAIT_S)
        clock.sleep(0.25)
    assert probe.asked.qsize() == 5
    caller.close()
