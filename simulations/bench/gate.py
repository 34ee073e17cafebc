"""Rounds of two programs by turns: each waits at the start of a round until it is let go.

A machine that others use is a different machine every few seconds, and programs that run one after
the other meet different ones. Here each is stopped, with all its processes, while another has a
round, so that all meet the same.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fedlearn.core.clock import SystemClock

_GATE = "BENCH_GATE"


def gated(workload: ModuleType) -> ModuleType:
    """Make the workload's sampling, with which a round begins, wait to be let through.

    Only in the first process of a program, and only where the environment names a gate.
    """
    address = os.environ.get(_GATE)
    if address is None or os.environ.get("RANK", "0") != "0":
        return workload
    sample, pid, links = workload.sample, os.getpid(), list[socket.socket]()

    def waiting(*arguments: Any) -> Any:  # as the workload's own
        if os.getpid() == pid:  # not a fork
            if not links:  # only now, since a program may only start others that have the rounds
                links.append(socket.socket(socket.AF_UNIX))
                links[0].connect(address)
            links[0].sendall(b"?")
            links[0].recv(1)
        return sample(*arguments)

    vars(workload)["sample"] = waiting
    return workload


class Gated:
    """A program that is let through round by round, and stopped between rounds.

    Args:
        command: The program and its arguments.
        name: Of its files in ``folder``.
        folder: For the socket and the standard error.
        environ: Its environment.

    Raises:
        SystemExit: It ended before its first round; its standard error is shown.
    """

    def __init__(
        self, command: Sequence[str], *, name: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self._clock, self._errors = SystemClock(), folder / f"{name}.err"
        listener = socket.socket(socket.AF_UNIX)
        address = str(folder / f"{name}.sock")
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(1.0)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                env={**environ, _GATE: address},
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self._link = self._connected(listener)
        self._wait()

    def round_s(self) -> float:
        """Let the program have a round and return the seconds that it took."""
        started_s = self._clock.now_s()
        os.killpg(self._process.pid, signal.SIGCONT)
        self._link.sendall(b"!")
        self._wait()
        return self._clock.now_s() - started_s

    def close(self) -> None:
        """End the program and all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()

    def _connected(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise SystemExit(self._errors.read_text()) from None
            else:
                link.setblocking(True)
                return link

    def _wait(self) -> None:
        """Return once the program is at the start of a round, and stopped."""
        if not self._link.recv(1):
            raise SystemExit(self._errors.read_text())
        os.killpg(self._process.pid, signal.SIGSTOP)
