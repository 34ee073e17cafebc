"""Lock files: held by one process at a time, and by none once that process is gone.

The kernel holds the lock and releases it when the process ends, however it ends. Windows locks the
first byte of the file and lets no other process read it, so a note about the holder comes after it.
"""

from io import FileIO
from pathlib import Path

from filelock import lock_descriptor


def open_lock(path: Path) -> FileIO:
    """Open a lock file, creating it if it is missing; closing it releases the lock.

    Raises:
        OSError: It cannot be opened.
    """
    return FileIO(path, "a+")


def take_lock(file: FileIO) -> bool:
    """Return whether the lock is now held through ``file``; never waits.

    Raises:
        OSError: The file system knows no locks.
    """
    return lock_descriptor(file.fileno(), blocking=False)


def wait_for_lock(file: FileIO) -> None:
    """Return once the lock is held through ``file``; raises as :func:`take_lock`."""
    lock_descriptor(file.fileno())


def write_note(file: FileIO, note: str) -> None:
    """Write one line about the holder into a lock file that this process holds.

    Raises:
        OSError: It cannot be written.
    """
    file.truncate(0)
    file.write(f"\n{note}\n".encode())


def read_note(path: Path) -> str:
    """Return what the last holder of a lock wrote; empty if nothing.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(1)
        return file.read().decode(errors="replace").strip()
