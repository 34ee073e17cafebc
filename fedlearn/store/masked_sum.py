"""Keep a round's masked sum in a file of the run's folder until clients help to unmask it."""

from dataclasses import dataclass
from pathlib import Path

from fedlearn.core.files import explain_disk_errors, write_durably
from fedlearn.errors import StoreError
from fedlearn.store.patience import Patience


@dataclass(frozen=True, kw_only=True)
class MaskedSumFile:
    """A :class:`fedlearn.rounds.secure.MaskedSumStore` on disk; it waits for free space.

    Attributes:
        path: The file; its folder must exist.
        patiently: Retries while the disk is full.
    """

    path: Path
    patiently: Patience

    def read(self) -> bytes:
        """Return the stored sum; empty if there is none; StoreError if it is unreadable."""
        with explain_disk_errors(self.path, raises=StoreError, doing="read"):
            return self.path.read_bytes() if self.path.exists() else b""

    def save(self, data: bytes) -> None:
        """Write a sum durably, mode 0600, replacing the last one; StoreError if that fails."""
        self.patiently(lambda: write_durably(self.path, data, raises=StoreError, mode=0o600))

    def clear(self) -> None:
        """Remove the stored sum; StoreError if it cannot be removed."""
        with explain_disk_errors(self.path, raises=StoreError, doing="remove"):
            self.path.unlink(missing_ok=True)
