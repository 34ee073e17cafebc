"""The durable record of every run: SQLAlchemy for what is counted, files for tensors.

A commit writes the checkpoint's file first, then one transaction adds its row together
with all rounds since the last commit. So whatever the moment of a crash, the database
holds the rounds up to its last checkpoint and none beyond, and every checkpoint it names
is a complete file; at worst a file is left that no row names, and the next commit
removes it.
"""

import difflib
import fcntl
import json
import os
import re
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Self, cast

import numpy as np
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from numpy.typing import NDArray
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    delete,
    event,
    insert,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session
from torch import Tensor

from fedlearn.coordinator.checkpoints import (
    CheckpointFile,
    read_checkpoint,
    sync_folder,
    write_checkpoint,
    write_durably,
)
from fedlearn.coordinator.names import memorable_names
from fedlearn.coordinator.records import Checkpoint, RoundRecord, RunRecord, RunStatus
from fedlearn.coordinator.store_schema import (
    Base,
    CheckpointRow,
    MetricRow,
    ParticipationRow,
    RoundRow,
    RunRow,
    plain,
)
from fedlearn.core.collecting import Participation, Participations
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import NewerStore, StoreError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # also a folder name
_KEPT_CHECKPOINTS = 2
_BATCH_ROWS = 500
_LOCK_WAIT_S = 30.0
_MIGRATION_LOCK = 7_306_087_429  # PostgreSQL's advisory locks are named by a number
_REMEDIES = {
    "SQLITE_BUSY": "another process is writing for long: let it finish",
    "SQLITE_NOTADB": "the file is something else: move it away, or name another",
    "SQLITE_READONLY": "make the file and its folder writable, or name another",
    "SQLITE_CANTOPEN": "its folder must exist and be writable",
    "SQLITE_FULL": "the disk is full: free some space",
    "SQLITE_IOERR": "the disk is full or failing: free some space, or check it",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, or move it away",
}


def sqlite_url(path: Path) -> str:
    """Return the URL of the SQLite database in the file ``path``."""
    return URL.create("sqlite", database=str(path)).render_as_string()


class _NameTaken(StoreError):
    """Another run of the store, or a folder beside it, has this name."""


class Database:
    """All runs of one database, and the folder with their files.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     runs_dir = Path(folder)
        ...     with Database.open(sqlite_url(runs_dir / "runs.db"), runs_dir=runs_dir) as database:
        ...         database.runs()
        []
    """

    def __init__(self, engine: Engine, *, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, runs_dir: Path) -> Self:
        """Open a database; create it or migrate it to this version's schema if need be.

        Args:
            url: ``sqlite:///FILE`` (see :func:`sqlite_url`; ``?timeout=5`` waits 5 s for
                other writers, else 30) or ``postgresql+psycopg://USER:PASSWORD@HOST/NAME``.
            runs_dir: Folder that holds a folder for each run; created if it is missing.

        Raises:
            NewerStore: A later version of fedlearn has migrated it.
            StoreError: The URL is not one of those, its driver is not installed, or the
                database cannot be reached, read or written.
        """
        engine = _engine(url)
        try:
            with _explained(engine):
                runs_dir.mkdir(parents=True, exist_ok=True)
                _migrate(engine)
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, runs_dir=runs_dir)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        """Return the database itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def create(self, record: RunRecord) -> "StoredRun":
        """Add a run under its own name, with a folder and its ``config.json``.

        Raises:
            StoreError: The name is taken or cannot name a folder, or the run cannot be
                written; nothing of it is left.
        """
        if not _NAME.fullmatch(record.name):
            raise StoreError(
                f"a run cannot be called {record.name!r}: use up to 64 letters, digits, "
                "'-', '_' and '.', beginning with a letter or a digit"
            )
        with (
            _explained(self._engine),
            _new_folder(self.runs_dir / record.name) as folder,
            _writing(self._engine) as session,
        ):
            run_id = _insert_run(session, record=record)
            _write_config(folder, config=record.config)
        return StoredRun(self._engine, run_id=run_id, name=record.name, runs_dir=self.runs_dir)

    def create_named(self, record: RunRecord, *, seed: Seed) -> "StoredRun":
        """Add a run under the first free of :func:`memorable_names` of ``seed``.

        Any number of processes may do so at once: the database decides who has a name.

        Raises:
            StoreError: The run cannot be written; nothing of it is left.
        """
        for name in memorable_names(seed):
            with suppress(_NameTaken):
                return self.create(replace(record, name=name))
        raise AssertionError("there are names without end")

    def run(self, name: str) -> "StoredRun":
        """Return the run called ``name``.

        Raises:
            StoreError: There is none; the message suggests the nearest name.
        """
        with _explained(self._engine), _reading(self._engine) as session:
            run_id = session.scalar(select(RunRow.id).where(RunRow.name == name))
            if run_id is None:
                raise _unknown_run(name, known=session.scalars(select(RunRow.name)))
        return StoredRun(self._engine, run_id=run_id, name=name, runs_dir=self.runs_dir)

    def runs(self) -> list[RunRecord]:
        """Return all runs, oldest first.

        Raises:
            StoreError: The database cannot be read.
        """
        with _explained(self._engine), _reading(self._engine) as session:
            return [_run_record(row) for row in session.scalars(select(RunRow).order_by(RunRow.id))]


class StoredRun:
    """One run of a :class:`Database`: a :class:`fedlearn.coordinator.records.RunStore`.

    Attributes:
        name: As in its record.
        path: Its folder: ``config.json`` and ``checkpoints/``.
    """

    def __init__(self, engine: Engine, *, run_id: int, name: str, runs_dir: Path) -> None:
        self.name = name
        self.path = runs_dir / name
        self._engine = engine
        self._run_id = run_id
        self._buffer: list[RoundRecord] = []

    @property
    def record(self) -> RunRecord:
        """The run as the database has it now."""
        with _explained(self._engine), _reading(self._engine) as session:
            return _run_record(session.get_one(RunRow, self._run_id))

    def append(self, record: RoundRecord) -> None:
        """Take the record of a finished round; durable with the next :meth:`commit`."""
        self._buffer.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable, together, before returning.

        The last two checkpoints are kept; a second one of the same round takes the
        place of the first.

        Raises:
            StoreError: It could not be written (full disk, database gone), or another
                process runs the same run. The last commit still stands and the records
                are kept for another attempt.
            ValueError: A record is of a round that the checkpoint has not finished.
        """
        for record in self._buffer:
            if record.round_num >= checkpoint.round_num:
                raise ValueError(
                    f"round {record.round_num} is not finished by a checkpoint of "
                    f"{checkpoint.round_num} rounds; commit the state after the round"
                )
        with self._committing():
            folder = self.path / "checkpoints"
            file = write_checkpoint(checkpoint, folder=folder)
            with _writing(self._engine) as session:
                self._insert_rounds(session.connection())
                kept = self._replace_checkpoints(session, file=file)
        self._buffer = []
        _remove_all_but(kept, folder=folder)

    def load(self) -> Checkpoint | None:
        """Return the last committed checkpoint, or ``None`` before the first.

        Raises:
            CorruptCheckpoint: Its bytes are not those that were committed.
            NewerStore: A later version of fedlearn wrote it.
            StoreError: The database or the file cannot be read.
        """
        files = self.checkpoints()
        if not files:
            return None
        back = f"go on from the one before it: `fedlearn resume {self.name} --from-previous`"
        remedy = back if len(files) > 1 else "no earlier one is kept: start the run again"
        return read_checkpoint(files[-1], remedy=remedy)

    def load_best(self) -> dict[str, Tensor]:
        """Return the best model's tensors by their names in the model, else the last ones.

        Raises:
            CorruptCheckpoint: As :meth:`load`.
            NewerStore: As :meth:`load`.
            StoreError: As :meth:`load`, or the run has no checkpoint yet.
        """
        checkpoint = self.load()
        if checkpoint is None:
            raise StoreError(
                f"run {self.name!r} has no checkpoint yet; train it: `fedlearn resume {self.name}`"
            )
        return _under("best/", checkpoint=checkpoint) or _under("params/", checkpoint=checkpoint)

    def rewind(self) -> Checkpoint:
        """Go back to the checkpoint before the last and return it; forget what came after.

        Raises:
            CorruptCheckpoint: That one is damaged too; nothing is forgotten.
            NewerStore: A later version of fedlearn wrote it; nothing is forgotten.
            StoreError: There is none, or the database cannot be written.
        """
        files = self.checkpoints()
        if len(files) < _KEPT_CHECKPOINTS:
            raise StoreError(
                f"run {self.name!r} has no earlier checkpoint to go back to; start it again"
            )
        checkpoint = read_checkpoint(files[-2], remedy="no earlier one is kept: start again")
        with _explained(self._engine), _writing(self._engine) as session:
            for name in ("metrics", "participations", "rounds"):
                table = Base.metadata.tables[name]
                later = table.c.round_num >= checkpoint.round_num
                session.execute(delete(table).where(table.c.run_id == self._run_id, later))
            self._drop_checkpoint(session, round_num=files[-1].round_num)
        self._buffer = []
        return checkpoint

    def checkpoints(self) -> list[CheckpointFile]:
        """Return the checkpoints that are kept, oldest first.

        Raises:
            StoreError: The database cannot be read.
        """
        with _explained(self._engine), _reading(self._engine) as session:
            rows = session.scalars(
                select(CheckpointRow)
                .where(CheckpointRow.run_id == self._run_id)
                .order_by(CheckpointRow.round_num)
            )
            return [
                CheckpointFile(
                    round_num=row.round_num,
                    path=self.path / "checkpoints" / row.file,
                    sha256=row.sha256,
                    num_bytes=row.num_bytes,
                )
                for row in rows
            ]

    def rounds(self) -> list[RoundRecord]:
        """Return the record of every committed round, in order.

        Raises:
            StoreError: The database cannot be read.
        """
        with _explained(self._engine), _reading(self._engine) as session:
            participations = self._participations(session)
            metrics = self._metrics(session)
            rows = session.scalars(
                select(RoundRow).where(RoundRow.run_id == self._run_id).order_by(RoundRow.round_num)
            )
            return [
                RoundRecord(
                    round_num=row.round_num,
                    attempt=row.attempt,
                    outcome=row.outcome,
                    participations=Participations.of(participations[row.round_num]),
                    train_loss=row.train_loss,
                    duration_s=row.duration_s,
                    virtual_s=row.virtual_s,
                    seconds=row.seconds,
                    metrics=metrics[row.round_num],
                )
                for row in rows
            ]

    def set_running(self) -> None:
        """Record that the run goes on.

        Raises:
            StoreError: The database cannot be written.
        """
        self.finish(RunStatus.RUNNING, error="")

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended.

        Raises:
            StoreError: The database cannot be written.
        """
        with _explained(self._engine), _writing(self._engine) as session:
            session.execute(
                update(RunRow).where(RunRow.id == self._run_id).values(status=status, error=error)
            )

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Add to the errors of a commit where the run stands and how to go on."""
        try:
            with _explained(self._engine):
                yield
        except StoreError as error:
            raise StoreError(f"{error}; {self._standing()}") from error

    def _standing(self) -> str:
        resume = f"go on with `fedlearn resume {self.name}` once that is done"
        try:
            files = self.checkpoints()
        except StoreError:
            return f"what was committed before still stands; {resume}"
        if not files:
            return f"nothing of run {self.name!r} was committed before; {resume}"
        return f"the last commit, after round {files[-1].round_num}, still stands; {resume}"

    def _insert_rounds(self, connection: Connection) -> None:
        """Insert all records: three bulk statements without an object a row."""
        records, run_id = self._buffer, self._run_id
        _insert_all(
            connection,
            "rounds",
            (
                {
                    "run_id": run_id,
                    "round_num": record.round_num,
                    "attempt": record.attempt,
                    "outcome": record.outcome,
                    "train_loss": record.train_loss,
                    "duration_s": record.duration_s,
                    "virtual_s": record.virtual_s,
                    "seconds": record.seconds,
                }
                for record in records
            ),
        )
        _insert_participations(connection, run_id, records)
        _insert_all(
            connection,
            "metrics",
            (
                {"run_id": run_id, "round_num": record.round_num, "name": name, "value": value}
                for record in records
                for name, value in record.metrics.items()
            ),
        )

    def _replace_checkpoints(self, session: Session, *, file: CheckpointFile) -> set[str]:
        """Add the row of ``file``, drop those that need not be kept; return the files kept."""
        self._drop_checkpoint(session, round_num=file.round_num)
        session.add(
            CheckpointRow(
                run_id=self._run_id,
                round_num=file.round_num,
                file=file.path.name,
                sha256=file.sha256,
                num_bytes=file.num_bytes,
            )
        )
        rows = session.scalars(
            select(CheckpointRow)
            .where(CheckpointRow.run_id == self._run_id)
            .order_by(CheckpointRow.round_num.desc())
        ).all()
        for row in rows[_KEPT_CHECKPOINTS:]:
            session.delete(row)
        return {row.file for row in rows[:_KEPT_CHECKPOINTS]}

    def _drop_checkpoint(self, session: Session, *, round_num: int) -> None:
        mine = CheckpointRow.run_id == self._run_id
        session.execute(delete(CheckpointRow).where(mine, CheckpointRow.round_num == round_num))

    def _participations(self, session: Session) -> defaultdict[int, list[Participation]]:
        row = ParticipationRow
        found: defaultdict[int, list[Participation]] = defaultdict(list)
        for round_num, client_id, status, duration_s, num_examples, loss, reason in session.execute(
            select(
                row.round_num,
                row.client_id,
                row.status,
                row.duration_s,
                row.num_examples,
                row.loss,
                row.reason,
            )
            .where(row.run_id == self._run_id)
            .order_by(row.round_num, row.position)
        ):
            found[round_num].append(
                Participation(ClientId(client_id), status, duration_s, num_examples, loss, reason)
            )
        return found

    def _metrics(self, session: Session) -> defaultdict[int, dict[str, float]]:
        found: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for round_num, name, value in session.execute(
            select(MetricRow.round_num, MetricRow.name, MetricRow.value).where(
                MetricRow.run_id == self._run_id
            )
        ):
            found[round_num][name] = value
        return found


def _engine(url: str) -> Engine:
    parsed = _checked_url(url)
    if parsed.get_backend_name() == "postgresql":
        try:
            return create_engine(parsed, pool_pre_ping=True)  # the server may restart in a run
        except ImportError as error:
            raise StoreError(
                "PostgreSQL's driver is not installed; run `pip install 'fedlearn[postgresql]'`"
            ) from error
    patience = {} if "timeout" in parsed.query else {"timeout": _LOCK_WAIT_S}
    engine = create_engine(parsed, connect_args=patience)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _checked_url(url: str) -> URL:
    """Parse ``url``; what is wrong with it is said without a password that may be in it."""
    usage = "write `sqlite:///FILE` or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"the store's URL is not one; {usage}") from error
    if parsed.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise StoreError(f"no store is kept by {parsed.drivername!r}; {usage}")
    if parsed.drivername == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise StoreError(f"a store outlives the process, {parsed!r} would not; {usage}")
    return parsed


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the transactions are ours: see _begin_sqlite
    connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for the writer
    # A checkpoint's file is deleted once its row is: NORMAL could bring the row back.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # A writer that begins as a reader fails, instead of waiting, if another was faster.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _writing(engine: Engine) -> Iterator[Session]:
    with Session(engine.execution_options(writes=True)) as session, session.begin():
        yield session


@contextmanager
def _reading(engine: Engine) -> Iterator[Session]:
    """Open a transaction in which every statement sees the same commit."""
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(engine) as session:
        yield session


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    """Turn errors of the database's driver and of the disk into errors with a remedy."""
    try:
        yield
    except DBAPIError as error:
        what = " ".join(str(error.orig).split())  # PostgreSQL's take several lines
        raise StoreError(f"{engine.url!r}: {what}; {_remedy(error)}") from error
    except OSError as error:
        raise StoreError(
            f"{error.filename}: {error.strerror}; free some space, or make it writable"
        ) from error


def _remedy(error: DBAPIError) -> str:
    if isinstance(error, IntegrityError):
        return "another process writes the same run: stop one of them"
    code = getattr(error.orig, "sqlite_errorname", None)  # only errors of the library have one
    if code is None:
        return "check that the server runs and that the URL names a database this user may write"
    family = "_".join(code.split("_")[:2])
    return _REMEDIES.get(family, f"SQLite calls this {code}")


def _migrate(engine: Engine) -> None:
    """Bring the schema to this version's; processes that do so at once wait for each other."""
    scripts = ScriptDirectory.from_config(_alembic())
    with _only_process(engine):
        with engine.connect() as connection:
            revision = MigrationContext.configure(connection).get_current_revision()
        if revision == scripts.get_current_head():
            return
        known = {script.revision for script in scripts.walk_revisions()}
        if revision is not None and revision not in known:
            raise NewerStore(
                f"{engine.url!r} has schema revision {revision!r}, this version of fedlearn "
                f"knows up to {scripts.get_current_head()!r}; upgrade fedlearn "
                "(`pip install --upgrade fedlearn`)"
            )
        with engine.execution_options(writes=True).begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            command.upgrade(_alembic(connection=connection), "head")


def _alembic(**attributes: object) -> Config:
    config = Config(attributes=attributes)
    config.set_main_option("script_location", "fedlearn.coordinator:migrations")
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _only_process(engine: Engine) -> Iterator[None]:
    """Hold a lock on the folder of an SQLite file: its first switch to WAL does not wait."""
    if engine.dialect.name != "sqlite":
        yield
        return
    folder = Path(str(engine.url.database)).parent
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Create the folder of a run; it goes again unless the block succeeds."""
    with ExitStack() as undo:
        try:
            path.mkdir()
        except FileExistsError as error:
            raise _NameTaken(
                f"{path} exists already; choose another name for the run, or move it away"
            ) from error
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        yield path
        undo.pop_all()


def _write_config(folder: Path, *, config: Mapping[str, object]) -> None:
    (folder / "checkpoints").mkdir()
    write_durably(folder / "config.json", content=json.dumps(config, indent=2).encode() + b"\n")
    sync_folder(folder.parent)


def _insert_run(session: Session, *, record: RunRecord) -> int:
    row = RunRow(
        name=record.name,
        status=record.status,
        error=record.error,
        created_utc=record.created_utc,
        num_rounds=record.num_rounds,
        config=record.config,
        config_hash=record.config_hash,
        versions=record.versions,
    )
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        raise _NameTaken(
            f"there is a run called {record.name!r} already; choose another name"
        ) from error
    return row.id


def _run_record(row: RunRow) -> RunRecord:
    return RunRecord(
        name=row.name,
        status=row.status,
        error=row.error,
        created_utc=row.created_utc,
        num_rounds=row.num_rounds,
        config=row.config,
        config_hash=row.config_hash,
        versions=row.versions,
    )


def _unknown_run(name: str, *, known: Iterable[str]) -> StoreError:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return StoreError(f"there is no run called {name!r}; {hint}`fedlearn runs` lists them all")


def _insert_all(connection: Connection, table: str, rows: Iterable[dict[str, object]]) -> None:
    """Insert in small batches: all at once, so many dicts set off the garbage collector."""
    statement = insert(Base.metadata.tables[table])
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH_ROWS)):
        connection.execute(statement, batch)


def _insert_participations(
    connection: Connection, run_id: int, records: Iterable[RoundRecord]
) -> None:
    """Insert a row a client: most of what is written, so past SQLAlchemy's per-value work.

    The values are those that the columns' types would bind.
    """
    columns = ", ".join(column.name for column in ParticipationRow.__table__.columns)
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    marks = ", ".join([mark] * len(ParticipationRow.__table__.columns))
    rows = chain.from_iterable(_participation_rows(run_id, record) for record in records)
    statement = f"INSERT INTO participations ({columns}) VALUES ({marks})"  # noqa: S608 - names of our own columns
    while batch := list(islice(rows, _BATCH_ROWS)):
        connection.exec_driver_sql(statement, batch)


def _participation_rows(run_id: int, record: RoundRecord) -> Iterable[tuple[object, ...]]:
    """Return the rows of one round, put together by ``zip`` alone."""
    each = record.participations
    reasons = [""] * len(each)
    for place, reason in each.reasons.items():
        reasons[place] = plain(reason)
    return zip(
        repeat(run_id),
        repeat(record.round_num),
        range(len(each)),
        each.client_ids.tolist(),
        each.codes.tolist(),
        _with_nulls(each.durations_s),
        each.num_examples.tolist(),
        _with_nulls(each.losses),
        reasons,
        strict=False,  # the repeated ones have no end
    )


def _with_nulls(column: NDArray[np.float64]) -> list[float | None]:
    """Return the numbers, ``None`` for NaN."""
    missing = np.isnan(column)
    if not missing.any():
        return cast("list[float | None]", column.tolist())
    return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - NaN


def _remove_all_but(kept: set[str], *, folder: Path) -> None:
    """Remove older checkpoints, and what a crash has left behind."""
    for path in folder.iterdir():
        if path.name not in kept:
            with suppress(OSError):  # it takes space and nothing else; the next commit tries again
                path.unlink()


def _under(prefix: str, *, checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
