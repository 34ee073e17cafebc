"""Starts processes of fedlearn, each a fork of this one: the imports are paid once.

It reads one request a line, JSON, and answers with the process's number. A process may be
told to kill itself before or after the n-th call of a function, or to misbehave in a way
that a test must notice; the product itself knows nothing of either.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from fedlearn.cli.app import main
from fedlearn.core.clock import SystemClock

_PR_SET_PDEATHSIG = 1

#: What the commands import when they run, which takes seconds.
_HEAVY = (
    "fedlearn.cli.operations",
    "fedlearn.deployment.coordinator",
    "fedlearn.deployment.join",
    "psycopg",
    "sklearn.datasets",
)


def serve() -> None:
    """Answer requests until the input ends; children end with this process."""
    for name in _HEAVY:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is left behind as a zombie
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run(request)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


def run(request: dict[str, Any]) -> None:
    """Become the process that is asked for; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    streams = (("/dev/null", os.O_RDONLY), *((request[each], None) for each in ("out", "err")))
    for number, (path, flags) in enumerate(streams):
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, append if flags is None else flags, 0o600), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "LD_PRELOAD" in os.environ:  # it takes effect in a program that is loaded
        again = [sys.executable, "-m", "fedlearn", *request["arguments"]]
        os.execv(sys.executable, again)  # noqa: S606 (ourselves)
    for sabotage in request["sabotages"]:
        replace(*SABOTAGES[sabotage])
    if request["crash"] is not None:
        crash_at(**request["crash"])
    sys.argv = ["fedlearn", *request["arguments"]]
    code = main(request["arguments"])
    Path(request["exit"]).write_text(str(code))
    sys.exit(code)


def crash_at(target: str, when: str, nth: int, mark: str, by: int, *, is_armed: bool) -> None:
    """Have this process kill itself, or stand still, around the ``nth`` call of ``target``.

    Args:
        target: ``module:function`` or ``module:Class.method``.
        when: ``before`` or ``after`` the call.
        nth: Counted from 1.
        mark: A file that tells that it happened.
        by: The signal that it sends itself; stopped by it, it goes on where it was.
        is_armed: Whether calls count from the start; otherwise after this process's first
            commit, so that what it recovered first is behind it.
    """
    calls, armed = 0, is_armed or target.endswith(":StoredRun.commit")

    def die() -> None:
        Path(mark).write_text(target)
        os.kill(os.getpid(), by)
        if by == signal.SIGKILL:
            signal.pause()

    def crashing(function: Any) -> Any:
        @wraps(function)
        def crash(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += armed
            is_here = armed and calls == nth
            if is_here and when == "before":
                die()
            result = function(*arguments, **named)
            if is_here and when == "after":
                die()
            return result

        return crash

    def arming(commit: Any) -> Any:
        @wraps(commit)
        def arm(*arguments: Any, **named: Any) -> None:
            nonlocal armed
            commit(*arguments, **named)
            armed = True

        return arm

    replace(target, crashing)
    if not armed:
        replace("fedlearn.store.runs:StoredRun.commit", arming)


def located(target: str) -> tuple[Any, str]:
    """Return what has the function, and under which name."""
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    return holder, name


def replace(target: str, change: Callable[[Any], Any]) -> None:
    """Put ``change`` of a function in the place of it."""
    holder, name = located(target)
    setattr(holder, name, change(getattr(holder, name)))


def forget_replies(recovered: Any) -> Any:
    """Lose at a start what was acknowledged before."""
    return lambda _: None


def count_twice(logged: Any) -> Any:
    """Count every reply that was logged before a start once more."""

    def twice(self: Any, live: Any) -> Iterator[Any]:
        for reply in logged(self, live):
            yield reply
            if reply in live.log.replies:
                yield reply

    return twice


def share_log(_: Any) -> Any:
    """Go on in the very file of the coordinator that was taken over."""
    return lambda log, *, num_bytes: os.truncate(log, num_bytes)


def dawdle(remaining_s: Any) -> Any:
    """Close rounds three seconds after their deadline."""
    return lambda *arguments, **named: remaining_s(*arguments, **named) + 3.0


def linger(load: Any) -> Any:
    """Open the door two seconds before the round."""

    def late(self: Any) -> Any:
        SystemClock().sleep(2.0)
        return load(self)

    return late


def hurry(_: Any) -> Any:
    """Look for the coordinator several times a second; a client's patience is not the test's."""
    return lambda backoff: 0.3 * backoff.jitter()


def note_adverts(receive: Any) -> Any:
    """Write down which keys the coordinator of secure aggregation has taken, and when."""

    def noting(self: Any, client_id: int, advert: Any) -> None:
        receive(self, client_id, advert)
        fresh = (each.hex() for each in (advert.packet_key, advert.mask_key, advert.nonce))
        note("adverts", self.terms.round_num, self.terms.attempt, client_id, *fresh)

    return noting


def note_releases(release: Any) -> Any:
    """Write down for which survivors a client has released shares, and when."""

    def noting(self: Any, message: Any, state: Any, step: Any) -> Any:
        released = release(self, message, state, step)
        terms = step.session.terms
        note(f"released-{self.client_id}", terms.round_num, terms.attempt, *step.survivors)
        return released

    return noting


def note(name: str, *values: object) -> None:
    """Add a line to a file on the stage."""
    with (Path(os.environ["SURVIVAL_STAGE"]) / name).open("a") as stream:
        stream.write(" ".join(map(str, values)) + "\n")


#: Ways to behave differently: what is changed, and how.
SABOTAGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "forget replies": ("fedlearn.door.spool:_recovered", forget_replies),
    "count twice": ("fedlearn.door.channel:DoorChannel._logged", count_twice),
    "share the log": ("fedlearn.door.spool:_make_own", share_log),
    "hurry": ("fedlearn.client.backoff:Backoff.next_s", hurry),
    "note adverts": ("fedlearn.secagg.server:Advertising.receive", note_adverts),
    "note releases": ("fedlearn.secagg.client:SecureClient.release", note_releases),
    "linger": ("fedlearn.store.runs:StoredRun.load", linger),
    "dawdle": ("fedlearn.door.channel:DoorChannel._remaining_s", dawdle),
}

if __name__ == "__main__":
    serve()
