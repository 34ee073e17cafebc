"""Records shared by tests of several folders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.runs import Database, Guard, allow_writes, sqlite_url

#: A run that has started and has no round yet.
RUN = RunRecord(
    name="calm-otter-17",
    status=RunStatus.RUNNING,
    error="",
    created_utc="2026-01-02T03:04:05Z",
    num_rounds=20,
    config={},
    config_hash="",
    versions={},
)


@contextmanager
def journals_in(
    folder: Path, *, guard: Guard = allow_writes
) -> Iterator[Callable[[], StoredJournal]]:
    """Yield a function that makes empty journals, each in its own run."""
    with Database.open(sqlite_url(folder / "journals.db"), runs_dir=folder / "runs") as database:
        numbers = count()

        def empty() -> StoredJournal:
            run = replace(RUN, name=f"calm-otter-{next(numbers)}")
            database.create(run)
            return StoredJournal(database, run.name, guard=guard)

        yield empty
