"""What surrounds a run on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlearn.config.addresses import Addresses
from fedlearn.core.clock import Clock
from fedlearn.experiment.progress import Progress
from fedlearn.store.runs import Database, sqlite_url


@dataclass(frozen=True)
class Site:
    """What surrounds a run on this machine.

    Attributes:
        addresses: Where the store, the runs and the data are.
        environ: The environment variables.
        clock: Real time.
        progress: Who is told.
    """

    addresses: Addresses
    environ: Mapping[str, str]
    clock: Clock
    progress: Progress

    @property
    def cache_dir(self) -> Path:
        """Where this user's caches are, by the XDG convention."""
        base = self.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "fedlearn"

    def database(self) -> Database:
        """Open the store."""
        return open_database(self.addresses)


def open_database(addresses: Addresses) -> Database:
    """Open the store of the runs that are kept at ``addresses``.

    Raises:
        StoreError: It cannot be opened.
    """
    url = addresses.store_url or sqlite_url(addresses.runs_dir / "fedlearn.db")
    return Database.open(url, runs_dir=addresses.runs_dir)
