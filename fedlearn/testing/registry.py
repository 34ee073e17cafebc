"""A registry of clients for tests: the store's own, in a file that lies in memory."""

import shutil
import tempfile
import weakref
from pathlib import Path

from fedlearn.core.clock import WallClock
from fedlearn.store.engine import open_engine
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import Base

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where fsync costs nothing


class FreshRegistry(StoredRegistry):
    """An empty registry; its file goes with it."""

    def __init__(self, clock: WallClock) -> None:
        place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        folder = Path(tempfile.mkdtemp(prefix="fedlearn-registry-", dir=place))
        engine = open_engine(sqlite_url(folder / "store.db"))
        Base.metadata.create_all(engine)  # ten times as fast as the migrations
        super().__init__(Database(engine, runs_dir=folder), clock)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        weakref.finalize(self, engine.dispose)
