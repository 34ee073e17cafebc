"""File access at explicit offsets, safe for several threads and forked processes."""

import os
import sys
import threading
from io import FileIO


class PositionedFile:
    """An open file that is read and written at explicit offsets, without a shared position.

    Windows has no pread and pwrite: a lock serializes the threads of one process there.

    Args:
        descriptor: Descriptor of the open file; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = FileIO(descriptor, "r+")  # on Windows this also turns off text mode
        self._turn = threading.Lock()

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        """Read up to ``num_bytes`` from ``offset``; none at the end of the file.

        Raises:
            OSError: The disk fails.
        """
        if sys.platform == "win32":
            with self._turn:
                self._file.seek(offset)
                return self._file.read(num_bytes)
        else:
            return os.pread(self._file.fileno(), num_bytes, offset)

    def read_into(self, octets: memoryview, offset: int) -> None:
        """Fill ``octets`` with the bytes from ``offset`` on.

        Raises:
            EOFError: The file ends too early.
            OSError: The disk fails.
        """
        while octets:
            if sys.platform == "win32":
                with self._turn:
                    self._file.seek(offset)
                    num_read = self._file.readinto(octets)
            else:
                # It may read less than asked for.
                num_read = os.preadv(self._file.fileno(), [octets], offset)
            if not num_read:
                raise EOFError(f"the file ends at {offset}, {len(octets)} bytes too early")
            octets, offset = octets[num_read:], offset + num_read

    def write_at(self, content: bytes | memoryview, offset: int) -> None:
        """Write all of ``content`` at ``offset``.

        Raises:
            OSError: The disk is full or fails; a part may have been written.
        """
        rest = memoryview(content)
        while rest:
            if sys.platform == "win32":
                with self._turn:
                    self._file.seek(offset)
                    num_written = self._file.write(rest)
            else:
                # It may write only a part, as on a disk that is almost full.
                num_written = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[num_written:], offset + num_written

    def truncate(self, num_bytes: int) -> None:
        """Shorten the file to ``num_bytes``; raises OSError if the disk fails."""
        self._file.truncate(num_bytes)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
