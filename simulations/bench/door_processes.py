"""Processes of the door's benchmark: those that answer a line with a line, and what they cost."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlearn.transport.grpc_environment import prepare_for_grpc

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

#: Seconds between two looks at a process whose highest memory is wanted.
_LOOK_S = 0.02


def raise_file_limit() -> int:
    """Allow this process and its children as many open files as the system lets them have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@dataclass(frozen=True)
class Memory:
    """Memory of a process, MB.

    Attributes:
        rss: Resident, all of it.
        anon: Of it, what is in no file.
        file: Of it, pages of files; the kernel can drop them.
    """

    rss: float
    anon: float
    file: float

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(self.rss - other.rss, self.anon - other.anon, self.file - other.file)


@dataclass
class Peak:
    """The highest memory of a process while it is watched; each figure has its own time.

    Attributes:
        memory: So far.
    """

    memory: Memory = field(default_factory=lambda: Memory(0.0, 0.0, 0.0))

    def see(self, now: Memory) -> None:
        """Note the memory of a moment."""
        seen = self.memory
        self.memory = Memory(
            max(seen.rss, now.rss), max(seen.anon, now.anon), max(seen.file, now.file)
        )


@dataclass(frozen=True)
class Process:
    """A Python script that answers each JSON line on its standard input with one.

    Attributes:
        popen: The process.
        greeting: Its first line.
    """

    popen: "subprocess.Popen[str]"
    greeting: dict[str, Any]  # Any: JSON of a script of ours

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Tell it what to do and return its answer.

        Raises:
            SystemExit: It has ended; what it wrote stands on standard error.
        """
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.popen.stdin.flush()
        return _answer(self.popen)

    def memory(self) -> Memory:
        """Return what it uses now."""
        values = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        )
        rss, anon, file, shared = (
            float(values[name].split()[0]) * 1024 / 1e6
            for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")
        )
        return Memory(rss, anon, file + shared)

    def cpu_s(self) -> float:
        """Return the processor time it has used, in seconds."""
        # The name in parentheses may hold spaces.
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """Watch its memory inside the context."""
        peak, is_over = Peak(self.memory()), threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK_S):
                peak.see(self.memory())

        # The kernel's own peak misses nothing; what it is made of has to be looked at.
        Path(f"/proc/{self.popen.pid}/clear_refs").write_text("5")
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield peak
        finally:
            is_over.set()
            watcher.join()
            peak.see(Memory(self._kernels_peak(), 0.0, 0.0))

    def _kernels_peak(self) -> float:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _environ() -> dict[str, str]:
    # As in the files in ``server/``, threads share their free memory.
    environ = os.environ | {"MALLOC_ARENA_MAX": "2"}
    prepare_for_grpc(environ, verbosity="ERROR")  # or each client that leaves writes a line
    return environ


@contextmanager
def started(script: str, *arguments: str) -> Iterator[Process]:
    """Run a script beside this one until the context is left.

    Raises:
        SystemExit: It has ended before its first line.
    """
    popen = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environ(),
        text=True,
    )
    try:
        yield Process(popen, _answer(popen))
    finally:
        assert popen.stdin is not None
        popen.stdin.close()
        try:
            popen.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        assert popen.stdout is not None
        popen.stdout.close()


def _answer(popen: "subprocess.Popen[str]") -> dict[str, Any]:
    assert popen.stdout is not None
    line = popen.stdout.readline()
    if not line:
        raise SystemExit(f"a process of the benchmark has ended: {popen.args!r}")
    answer: dict[str, Any] = json.loads(line)
    return answer
