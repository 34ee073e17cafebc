"""Lock files, each held by one process at a time.

The kernel holds the lock and releases it when the process ends, even after a crash. On Windows, the
first byte of the file is locked and other processes cannot read it, so a note about the holder
starts after it.
"""

from io import FileIO
from pathlib import Path

from filelock import lock_descriptor


def open_lock(path: Path) -> FileIO:
    """Open a lock file, creating it if it is missing; closing it releases the lock.

    Raises:
        OSError: The file cannot be opened.
    """
    # Append: opening must not truncate the note of the process that holds the lock.
    return FileIO(path, "a+")


def take_lock(file: FileIO) -> bool:
    """Try to take the lock without waiting; return whether ``file`` now holds it.

    Raises:
        OSError: The file system does not support locks.
    """
    return lock_descriptor(file.fileno(), blocking=False)


def wait_for_lock(file: FileIO) -> None:
    """Wait for the lock and take it; raises as :func:`take_lock`."""
    lock_descriptor(file.fileno())


def write_note(file: FileIO, note: str) -> None:
    """Write one line about the holder into a lock file that this process holds.

    Raises:
        OSError: The note cannot be written.
    """
    # The note starts after the first byte, which is locked on Windows.
    file.truncate(0)
    file.write(f"\n{note}\n".encode())


def read_note(path: Path) -> str:
    """Return the note of a lock's last holder; empty if there is none.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(1)
        return file.read().decode(errors="replace").strip()
