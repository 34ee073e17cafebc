"""The environment of a run on this machine: directories, variables, clock and progress."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlearn.config.addresses import Addresses
from fedlearn.core.clock import Clock
from fedlearn.experiment.progress import RunProgress
from fedlearn.store.runs import Database, StoredRun, sqlite_url


@dataclass(frozen=True)
class Site:
    """The environment of a run on this machine.

    Attributes:
        addresses: Locations of the store, the runs and the data.
        environ: The environment variables.
        clock: Real time.
        progress: Shows the progress of the run.
    """

    addresses: Addresses
    environ: Mapping[str, str]
    clock: Clock
    progress: RunProgress

    @property
    def cache_dir(self) -> Path:
        """Directory of fedlearn's caches for this user, by the XDG convention."""
        base = self.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "fedlearn"

    def database(self) -> Database:
        """Open the store."""
        return open_database(self.addresses)


def open_database(addresses: Addresses) -> Database:
    """Open the store at ``addresses``.

    Raises:
        StoreError: It cannot be opened.
    """
    url = addresses.store_url or sqlite_url(addresses.runs_dir / "fedlearn.db")
    return Database.open(url, runs_dir=addresses.runs_dir)


def folder_of(given: str | None, *, runs_dir: Path) -> Path:
    """Return the coordinator's folder: ``given`` by its configuration, or next to ``runs_dir``."""
    return runs_dir.parent / "coordinator" if given is None else Path(given)


def keys_folder_of(folder: Path) -> Path:
    """Return the folder of the keys in the coordinator's folder."""
    return folder / "authority"


def folder_of_run(stored: StoredRun) -> Path:
    """Return the coordinator's folder of a run, by its recorded configuration."""
    section = stored.record.config.get("coordinator")
    given = section.get("folder") if isinstance(section, Mapping) else None
    return folder_of(given, runs_dir=stored.database.runs_dir)
