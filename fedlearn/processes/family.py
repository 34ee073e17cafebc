"""A training process and those that it starts: ended together, and not later than the application.

On Linux and macOS they are a process group, and a second process waits beside it: when the
application dies, the kernel closes the pipe between the two. A thread of the training process would
not do, since native code that keeps the interpreter's lock keeps it from every other thread. On
Windows they are a job, which the kernel ends.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import NoReturn, TypeAlias

import psutil

from fedlearn.core.clock import SystemClock
from fedlearn.processes.descendants import MARK, end_marked
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.starting import in_new_group

if sys.platform == "win32":
    from fedlearn.processes.job_object import JobObject

    _Bond: TypeAlias = JobObject
else:
    _Bond: TypeAlias = "subprocess.Popen[bytes]"

#: Seconds that a training process gets to end in order when its application has gone.
END_S = 12.0
#: Seconds after which it is killed, whatever it is at.
_KILL_S = 15.0
_LOOK_S = 0.01

#: Kills a process group some time after its input ends, unless it was told that all is well.
_GUARD = """
import os, signal, sys, time
group, wait_s = int(sys.argv[1]), float(sys.argv[2])
is_well = os.read(0, 1)
until_s = time.monotonic() + wait_s
while not is_well:
    try:
        os.killpg(group, signal.SIGKILL if time.monotonic() > until_s else 0)
    except OSError:
        break  # no process of the group is left
    if time.monotonic() > until_s:
        break
    time.sleep(0.2)
"""


@dataclass(eq=False)
class Family:
    """A training process, started in a new group, and all that it has started.

    The group's number stays theirs while the first process is not waited for.
    """

    process: "subprocess.Popen[bytes]"
    _bond: _Bond

    @classmethod
    def of(cls, process: "subprocess.Popen[bytes]", *, python: str) -> "Family":
        """Bind a process that has just started to this one.

        Args:
            process: It.
            python: An interpreter.

        Raises:
            OSError: There is no memory or process left, or Windows refuses.
        """
        if sys.platform == "win32":
            return cls(process, JobObject(process.pid))
        else:
            guard = subprocess.Popen(  # noqa: S603 - our own words
                [python, "-I", "-S", "-c", _GUARD, str(process.pid), str(_KILL_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                **in_new_group(),
            )
            assert isinstance(guard.stdin, FileIO)  # without a buffer
            # A forked worker of the application that outlives it must not keep the pipe open.
            keep_from_forks(guard.stdin)
            return cls(process, guard)

    def kill(self) -> None:
        """End all of them at once; to be called while the process is not waited for."""
        if sys.platform == "win32":
            self._bond.end()
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Return whether the first process has ended, without waiting for it."""
        if sys.platform == "win32":  # whose handle keeps its number from being another's
            return self.process.poll() is not None
        else:
            try:
                return psutil.Process(self.process.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.Error:  # the application has waited for it
                return True

    def await_end(self) -> None:
        """Return once the first process has ended; it is not waited for."""
        while not self.has_ended():
            SystemClock().sleep(_LOOK_S)

    def release(self) -> None:
        """Let go of what binds them to this process, when all have ended."""
        if sys.platform == "win32":
            self._bond.close()
        else:
            with self._bond as guard, suppress(BrokenPipeError):
                assert guard.stdin is not None  # a pipe
                guard.stdin.write(b".")


def end_family() -> NoReturn:
    """End this training process and all that it has started: its application is gone."""
    end_marked(os.environ.get(MARK, ""), but=[os.getpid()])
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)  # Windows has ended the others with the application
