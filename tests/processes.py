"""Processes that a test starts, watches, freezes and kills, forked from a warm launcher."""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fedlearn.core.clock import SystemClock

#: Enough for anything that happens at all, even on a busy machine.
LONG_S = 300.0

_PR_SET_PDEATHSIG = 1

_ROOT = Path(__file__).parents[1]
_PID_BYTES = 20
_LOOK_S = 0.02
#: Relative to the duration of a check: opening a database takes as long as the shortest pause.
_PAUSE = 5.0

#: A function or method, of the product or of a test. Any: all parameters and results.
Function = Callable[..., Any]


def until(
    holds: Callable[[], bool], *, within_s: float = LONG_S, told: Callable[[], str] = str
) -> float:
    """Wait until ``holds``; return how many seconds that took.

    Args:
        holds: The condition to wait for.
        within_s: The longest time to wait.
        told: Returns the error message if the time runs out.
    """
    clock = SystemClock()
    began_s = looked_s = clock.now_s()
    while not holds():
        now_s = clock.now_s()
        assert now_s - began_s < within_s, f"not within {within_s:g} s: {told()}"
        clock.sleep(max(_LOOK_S, _PAUSE * (now_s - looked_s)))
        looked_s = clock.now_s()
    return clock.now_s() - began_s


def name_of(function: Function) -> str:
    """Return the name under which the launcher finds a function of a module or a class."""
    return f"{function.__module__}:{function.__qualname__}"


def children_of(pid: int) -> list[int]:
    """Return a process's children, oldest first."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for each in tasks for child in each.read_text().split())


def open_files_below(folder: Path) -> list[str]:
    """Return the paths of the files below ``folder`` that this process has open.

    To count all of its files would count those that other threads and garbage collection close.
    """
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return [name for name in names if name.startswith(str(folder))]


def _is_guard(pid: int) -> bool:
    """Return whether a process is the guard that ends an orphaned training process."""
    return b"-S" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it exits.

    Args:
        parent: Id of the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited before the kernel was told
        os._exit(1)


@dataclass(frozen=True)
class Change:
    """A function that a process replaces by a changed one.

    Attributes:
        function: The function; every module that imported it sees the change.
        by: Returns the replacement, given the function.
    """

    function: Function
    by: Function


@dataclass(frozen=True)
class Crash:
    """The point where a process kills or freezes itself.

    Attributes:
        phase: Description of the point.
        function: The function around whose call it happens.
        when: ``before`` or ``after`` the call.
        nth: Number of the call, counted from 1.
        by: The signal that it sends itself.
        armed_by: Calls count from the first return of this function; ``None``: from the start.
    """

    phase: str
    function: Function
    when: Literal["before", "after"]
    nth: int = 1
    by: signal.Signals = signal.SIGKILL
    armed_by: Function | None = None


@dataclass(frozen=True)
class Process:
    """A process that the launcher has started, identified by a descriptor that is never reused.

    Attributes:
        pid: Its process id.
        stem: Path of its files without suffix: ``.out``, ``.err``, ``.exit``, ``.crash``.
        is_client: Whether it is ``fedlearn join``, which trains in a second process. Signals that
            kill or freeze one of the two reach both.
        descriptor: Descriptor of the process, so that signals cannot reach another one.
    """

    pid: int
    stem: Path
    descriptor: int
    is_client: bool

    @property
    def is_running(self) -> bool:
        return not select.select([self.descriptor], [], [], 0.0)[0]

    @property
    def training(self) -> int:
        """The id of the process that trains for a client."""
        (found,) = (each for each in children_of(self.pid) if not _is_guard(each))
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal; freezing and continuing also reach a client's training."""
        signal.pidfd_send_signal(self.descriptor, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._send_training(number)

    def _send_training(self, number: signal.Signals) -> None:
        for each in children_of(self.pid) if self.is_client else []:
            with suppress(ProcessLookupError):
                os.killpg(each, number)

    def kill(self) -> None:
        """Kill the process, and return when it has exited."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGSTOP)  # it must not see its training process exit
            self._send_training(signal.SIGKILL)
            self.send(signal.SIGKILL)
        self.wait()

    def wait(self, *, within_s: float = LONG_S) -> int | None:
        """Return its exit code once it has exited; ``None`` if it was killed."""
        ended = select.select([self.descriptor], [], [], within_s)[0]
        exit_file = self.stem.with_suffix(".exit")
        assert ended, f"{self.stem.name} runs on, {exit_file.exists()=}\n{self._stacks()}"
        return int(exit_file.read_text()) if exit_file.exists() else None

    def _stacks(self) -> str:
        """Kill the process, and return its output, which ends with the stacks of its threads."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
            self.send(signal.SIGABRT)
        select.select([self.descriptor], [], [], 10.0)
        return f"{self.out()[-3000:]}\n{self.err()[-12_000:]}"

    def close(self) -> None:
        self.kill()
        os.close(self.descriptor)

    def has_crashed_itself(self) -> bool:
        return self.stem.with_suffix(".crash").exists()

    def out(self) -> str:
        """Return its standard output."""
        return self.stem.with_suffix(".out").read_text()

    def err(self) -> str:
        """Return its standard error, which holds its log."""
        return self.stem.with_suffix(".err").read_text()

    def log(self) -> list[dict[str, Any]]:
        """Return its log records."""
        return json_lines(self.err())

    def said(self, event: str) -> int:
        """Return how often it logged ``event``."""
        return sum(line["message"] == event for line in self.log())

    def wait_for_lines(self, num: int) -> None:
        """Wait until it has printed ``num`` lines on standard output."""
        until(lambda: self.out().count("\n") >= num, told=self.tail)

    def tail(self) -> str:
        """Return the last part of its output and log."""
        return f"{self.out()[-3000:]}\n{self.err()[-3000:]}"


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in lines of text; the last line may be incomplete."""
    return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]


@dataclass(frozen=True)
class Launcher:
    """Starts processes; see :mod:`tests.launcher`.

    Attributes:
        path: Path of the launcher's socket.
    """

    path: Path

    @classmethod
    def shared(cls, folder: Path, *, owner: int) -> "Launcher":
        """Return the launcher of a test run; the first caller starts it, which takes seconds.

        Args:
            folder: Folder of the test run, whose processes share the launcher.
            owner: The process with which the launcher and all that it started exit.
        """
        path = folder / "launcher"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                subprocess.run(
                    [sys.executable, "-m", "tests.launcher", path, str(owner)],
                    cwd=_ROOT,
                    stdin=subprocess.DEVNULL,
                    check=True,
                )
        return cls(path)

    def launch(
        self,
        stem: Path,
        *arguments: str,
        environ: Mapping[str, str],
        cwd: Path | None = None,
        script: Path | None = None,
        crash: Crash | None = None,
        changes: Sequence[Change] = (),
    ) -> Process:
        """Start ``fedlearn``, or a script, with ``arguments``.

        Args:
            stem: Path of its files, without suffix.
            arguments: Arguments of the command or the script.
            environ: Its environment.
            cwd: Its working directory; ``None``: the folder of its files.
            script: A Python file to run; ``None``: the command ``fedlearn``.
            crash: The point where it kills or freezes itself.
            changes: How it differs from the product.
        """
        request = _request(stem, arguments, environ, cwd=cwd or stem.parent, script=script) | {
            "crash": None if crash is None else _told(crash, stem),
            "changes": [(name_of(each.function), name_of(each.by)) for each in changes],
        }
        return self._started(request, stem, is_client=arguments[:1] == ("join",))

    def run(
        self, script: Path | str, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a Python script to its end, with a time limit, so that a hanging one fails its test.

        Args:
            script: Its path, or its text.
            arguments: Arguments of the script.
            environ: Its environment; ``None``: this process's.
        """
        with TemporaryDirectory() as folder:
            stem = Path(folder, "script")
            if isinstance(script, str):
                stem.with_suffix(".py").write_text(script)
                script = stem.with_suffix(".py")
            environ = os.environ if environ is None else environ
            request = _request(stem, arguments, environ, cwd=Path.cwd(), script=script)
            with closing(self._started(request, stem)) as process:
                code = process.wait()
                killed = -signal.SIGKILL if code is None else code
                return subprocess.CompletedProcess(
                    [str(script), *arguments], killed, process.out(), process.err()
                )

    def _started(
        self, request: Mapping[str, object], stem: Path, *, is_client: bool = False
    ) -> Process:
        for end in (".out", ".err"):
            stem.with_suffix(end).touch()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            pid, (descriptor,), _, _ = socket.recv_fds(connection, _PID_BYTES, 1)
        return Process(int(pid), stem, descriptor, is_client)


def _request(
    stem: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    script: Path | None = None,
) -> dict[str, object]:
    """Build a launcher's request for a script, or else for the command."""
    return {
        "script": None if script is None else str(script),
        "arguments": arguments,
        "cwd": str(cwd),
        "env": dict(environ),
        "out": str(stem.with_suffix(".out")),
        "err": str(stem.with_suffix(".err")),
        "exit": str(stem.with_suffix(".exit")),
        "crash": None,
        "changes": [],
    }


def _told(crash: Crash, stem: Path) -> dict[str, object]:
    """Return a crash in the form of a launcher's request."""
    return {
        "function": name_of(crash.function),
        "when": crash.when,
        "nth": crash.nth,
        "by": crash.by,
        "mark": str(stem.with_suffix(".crash")),
        "armed_by": None if crash.armed_by is None else name_of(crash.armed_by),
    }
