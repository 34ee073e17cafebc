"""Kill a training process together with its children, at the latest when the application dies.

On Linux and macOS they form a process group, watched by a small guard process: when the
application dies, the kernel closes the pipe between application and guard, and the guard kills the
group. A watchdog thread inside the training process would not do, because native code that holds
the GIL would block it. On Windows they form a job object, which the kernel terminates.
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

#: Seconds that a training process gets to shut down cleanly after its application has died.
END_S = 12.0
#: Seconds after which the guard kills it, whatever it is doing.
_KILL_S = 15.0
_LOOK_S = 0.01

#: The guard: kills a process group some time after its stdin closes, unless it reads a byte first.
# Signal 0 reaches no process; it only asks whether the group still has one.
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
    """A training process, started in a new process group, and all its descendants.

    Until the training process is reaped (waited for), the kernel does not reuse its group id, so
    signals to the group cannot reach unrelated processes.
    """

    process: "subprocess.Popen[bytes]"
    _bond: _Bond

    @classmethod
    def of(cls, process: "subprocess.Popen[bytes]", *, python: str) -> "Family":
        """Tie the lifetime of a process that has just started to this one.

        Args:
            process: The training process.
            python: The Python interpreter that runs the guard.

        Raises:
            OSError: The system is out of memory or processes, or Windows refuses.
        """
        if sys.platform == "win32":
            return cls(process, JobObject(process.pid))
        else:
            # -I -S: start fast, and import nothing of the user's.
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
        """Kill the whole family; call this only before the training process is reaped."""
        if sys.platform == "win32":
            self._bond.end()
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Check whether the training process has exited, without reaping it."""
        if sys.platform == "win32":  # the open handle keeps its pid from being reused
            return self.process.poll() is not None
        else:
            try:
                return psutil.Process(self.process.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.Error:  # the application has reaped it
                return True

    def await_end(self) -> None:
        """Block until the training process has exited, without reaping it."""
        while not self.has_ended():
            SystemClock().sleep(_LOOK_S)

    def release(self) -> None:
        """Dismiss the guard, or close the job, once all of the family have exited."""
        if sys.platform == "win32":
            self._bond.close()
        else:
            with self._bond as guard, suppress(BrokenPipeError):
                assert guard.stdin is not None  # a pipe
                guard.stdin.write(b".")


def end_family() -> NoReturn:
    """Kill this training process and all its descendants, because its application is gone."""
    # First those that have left the group; the group's end includes this process.
    end_marked(os.environ.get(MARK, ""), but=[os.getpid()])
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)  # Windows has killed the others when the application died
