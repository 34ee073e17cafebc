"""The masked sum of a round as a file beside the run, until its clients have opened it."""

from dataclasses import dataclass
from pathlib import Path

from fedlearn.core.files import disk_errors, write_durably
from fedlearn.errors import StoreError
from fedlearn.store.patience import Patience


@dataclass(frozen=True, kw_only=True)
class MaskedSumFile:
    """A :class:`fedlearn.rounds.secure.MaskedSumStore` on disk; it waits for space.

    Attributes:
        path: The file; its folder exists.
        patiently: Tries again while the disk is full.
    """

    path: Path
    patiently: Patience

    def read(self) -> bytes:
        """Return what was kept last; empty if there is nothing; StoreError if it is unreadable."""
        with disk_errors(self.path, raises=StoreError, doing="read"):
            return self.path.read_bytes() if self.path.exists() else b""

    def keep(self, data: bytes) -> None:
        """Keep a sum durably, mode 0600, in place of the last; StoreError if it cannot be."""
        self.patiently(lambda: write_durably(self.path, data, raises=StoreError, mode=0o600))

    def clear(self) -> None:
        """Forget it; StoreError if it cannot be removed."""
        with disk_errors(self.path, raises=StoreError, doing="remove"):
            self.path.unlink(missing_ok=True)
