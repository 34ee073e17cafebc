"""A client registry for tests: the real one, on a temporary database in memory where possible."""

import shutil
import tempfile
import weakref
from functools import cache
from pathlib import Path

from fedlearn.core.clock import WallClock
from fedlearn.store.engine import open_engine
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import Base

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - fsync costs nothing there


class FreshRegistry(StoredRegistry):
    """An empty registry, whose temporary files are removed when it is garbage-collected."""

    def __init__(self, clock: WallClock) -> None:
        folder = _new_folder()
        (folder / "store.db").write_bytes(_empty_database())
        engine = open_engine(sqlite_url(folder / "store.db"))
        super().__init__(Database(engine, runs_dir=folder), clock)
        # The finalizer registered last runs first: the engine closes its files before they are
        # removed.
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        weakref.finalize(self, engine.dispose)


@cache
def _empty_database() -> bytes:
    """Return the file of a database without rows, which is faster to copy than to create."""
    folder = _new_folder()
    try:
        engine = open_engine(sqlite_url(folder / "store.db"))
        Base.metadata.create_all(engine)
        engine.dispose()  # which moves the write-ahead log into the file
        return (folder / "store.db").read_bytes()
    finally:
        shutil.rmtree(folder)


def _new_folder() -> Path:
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="fedlearn-registry-", dir=place))
