"""Memory and processor time of another process, read from Linux's /proc."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Seconds between two samples of the memory of a watched process.
_LOOK_S = 0.02


@dataclass(frozen=True)
class Memory:
    """Memory of a process, MB.

    Attributes:
        rss: All resident memory.
        anon: The part that no file backs.
        file: The part that is pages of files, which the kernel can drop, or shared memory.
    """

    rss: float
    anon: float
    file: float

    @classmethod
    def of(cls, pid: int) -> "Memory":
        """Read the memory that a process uses now."""
        status = Path(f"/proc/{pid}/status").read_text()
        rss, anon, file, shared = (
            _mb(status, name) for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")
        )
        return cls(rss, anon, file + shared)

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(self.rss - other.rss, self.anon - other.anon, self.file - other.file)


@dataclass
class Peak:
    """The peak memory of a process while it is watched; each figure may peak at another time.

    Attributes:
        memory: The peak so far.
    """

    memory: Memory = field(default_factory=lambda: Memory(0.0, 0.0, 0.0))

    def see(self, now: Memory) -> None:
        """Raise the peak to a sample, where that is higher."""
        seen = self.memory
        self.memory = Memory(
            max(seen.rss, now.rss), max(seen.anon, now.anon), max(seen.file, now.file)
        )


@contextmanager
def watched(pid: int) -> Iterator[Peak]:
    """Watch the memory of a process inside the context."""
    peak, is_over = Peak(Memory.of(pid)), threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_S):
            peak.see(Memory.of(pid))

    # Writing 5 resets VmHWM, the kernel's exact peak. It has no split by kind, so that is sampled.
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()
        peak.see(Memory(_mb(Path(f"/proc/{pid}/status").read_text(), "VmHWM"), 0.0, 0.0))


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    # The process name in parentheses may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S


def _mb(status: str, name: str) -> float:
    return float(status.partition(f"{name}:")[2].split()[0]) * 1024 / 1e6
