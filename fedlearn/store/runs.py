"""The durable record of every run: SQLAlchemy for what is counted, files for tensors.

A commit writes the checkpoint's file first, then one transaction adds its row together
with all rounds since the last commit. So whatever the moment of a crash, the database
holds the rounds up to its last checkpoint and none beyond, and every checkpoint it names
is a complete file; at worst a file is left that no row names, and the next commit
removes it.
"""

import difflib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeAlias

from sqlalchemy import URL, Engine, delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from torch import Tensor

from fedlearn.core.files import sync_folder, write_durably
from fedlearn.core.randomness import SecretBytes, Seed
from fedlearn.errors import Fenced, NoSpace, StoreError, StoreUnavailable
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunRecord, RunStatus
from fedlearn.store.checkpoints import (
    CheckpointFile,
    read_checkpoint,
    write_checkpoint,
)
from fedlearn.store.engine import explained, migrate, open_engine, reading, writing
from fedlearn.store.names import memorable_names
from fedlearn.store.rounds import (
    RoundSummary,
    insert_rounds,
    read_rounds,
    summarise_rounds,
)
from fedlearn.store.schema import (
    Base,
    CheckpointRow,
    DeploymentRow,
    OpenRoundRow,
    RunRow,
)

#: Called first in every transaction that writes; raises if the writer may not.
Guard: TypeAlias = Callable[[Session], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # also a folder name
_KEPT_CHECKPOINTS = 2
_RUN_ID_BYTES = 16


def sqlite_url(path: Path) -> str:
    """Return the URL of the SQLite database in the file ``path``."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def unguarded(_: Session) -> None:
    """Let everybody write: the :data:`Guard` of a run that is not deployed."""


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

    def writing(self) -> AbstractContextManager[Session]:
        """Open a transaction that may write; see :func:`store_engine.writing`."""
        return writing(self._engine)

    def reading(self) -> AbstractContextManager[Session]:
        """Open a transaction that reads one state; see :func:`store_engine.reading`."""
        return reading(self._engine)

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
        engine = open_engine(url)
        try:
            with explained(engine):
                runs_dir.mkdir(parents=True, exist_ok=True)
                migrate(engine)
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
                written; nothing of it is left that another attempt would stumble over.
        """
        if not _NAME.fullmatch(record.name):
            raise StoreError(
                f"a run cannot be called {record.name!r}: use up to 64 letters, digits, "
                "'-', '_' and '.', beginning with a letter or a digit"
            )
        with writing(self._engine) as session:
            # The row comes first: until the transaction ends, nobody else makes this folder.
            run_id = _insert_run(session, record=record)
            with _new_folder(self.runs_dir / record.name) as folder:
                _write_config(folder, config=record.config)
        return StoredRun(
            self._engine,
            run_id=run_id,
            name=record.name,
            runs_dir=self.runs_dir,
            guard=unguarded,
        )

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

    def run(self, name: str, *, guard: Guard = unguarded) -> "StoredRun":
        """Return the run called ``name``.

        Args:
            name: Of the run.
            guard: Checks in each transaction that this process may write; a deployed run
                has its lease's (:mod:`fedlearn.store.lease`).

        Raises:
            StoreError: There is none; the message suggests the nearest name.
        """
        with reading(self._engine) as session:
            run_id = session.scalar(select(RunRow.id).where(RunRow.name == name))
            if run_id is None:
                raise unknown_run(name, known=session.scalars(select(RunRow.name)))
        return StoredRun(
            self._engine, run_id=run_id, name=name, runs_dir=self.runs_dir, guard=guard
        )

    def runs(self) -> list[RunRecord]:
        """Return all runs, oldest first.

        Raises:
            StoreError: The database cannot be read.
        """
        with reading(self._engine) as session:
            deployed = set(session.scalars(select(DeploymentRow.run_id)))
            rows = session.scalars(select(RunRow).order_by(RunRow.id))
            return [_run_record(row, is_deployed=row.id in deployed) for row in rows]


class StoredRun:
    """One run of a :class:`Database`: a :class:`fedlearn.rounds.records.RunStore`.

    Attributes:
        name: As in its record.
        path: Its folder: ``config.json`` and ``checkpoints/``.
    """

    def __init__(
        self, engine: Engine, *, run_id: int, name: str, runs_dir: Path, guard: Guard
    ) -> None:
        self.name = name
        self.path = runs_dir / name
        self._engine = engine
        self._run_id = run_id
        self._guard = guard
        self._buffer: list[RoundRecord] = []
        #: Checkpoint and number of records of a commit of which no answer came.
        self._attempted: tuple[str, int] | None = None

    @property
    def record(self) -> RunRecord:
        """The run as the database has it now."""
        with reading(self._engine) as session:
            is_deployed = session.get(DeploymentRow, self._run_id) is not None
            return _run_record(session.get_one(RunRow, self._run_id), is_deployed=is_deployed)

    def append(self, record: RoundRecord) -> None:
        """Take the record of a finished round; durable with the next :meth:`commit`."""
        self._buffer.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable, together, before returning.

        The last two checkpoints are kept; a second one of the same round takes the
        place of the first.

        Raises:
            StoreError: It could not be written (full disk), or another process runs the
                same run. The last commit still stands and the records are kept for
                another attempt.
            StoreUnavailable: The database is away. Whether the commit stands is seen by the
                next attempt, which adds what is missing.
            Fenced: Another coordinator has taken the run over.
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
            with self._writing() as session:
                self._drop_committed(session)
                self._attempted = file.sha256, len(self._buffer)
                insert_rounds(session.connection(), self._run_id, self._buffer)
                kept = self._replace_checkpoints(session, file=file)
                # Listed while the guard holds: whoever takes over writes its files after that.
                found = list(folder.iterdir())
        self._buffer, self._attempted = [], None
        _remove_all_but(kept, found=found)

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
        back = f"go on from the one before it: `{self._resume} --from-previous`"
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
            raise StoreError(f"run {self.name!r} has no checkpoint yet; train it: `{self._resume}`")
        return _under("best/", checkpoint=checkpoint) or _under("params/", checkpoint=checkpoint)

    def rewind(self) -> Checkpoint:
        """Go back to the checkpoint before the last and return it; forget what came after.

        What clients of a deployed run still hold or work on may answer the model that is
        dropped. So from here on it is another run to them: it has another ``run_id``, and no
        round of it is open.

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
        with self._writing() as session:
            for name in ("metrics", "participations", "rounds"):
                table = Base.metadata.tables[name]
                later = table.c.round_num >= checkpoint.round_num
                session.execute(delete(table).where(table.c.run_id == self._run_id, later))
            self._drop_checkpoint(session, round_num=files[-1].round_num)
            self._renew(session)
        self._buffer, self._attempted = [], None
        return checkpoint

    def renew(self) -> None:
        """Be another run to the clients, as one that is restored from a backup must be.

        They may have answered rounds since that are about to be repeated with another model.

        Raises:
            StoreError: The database cannot be written.
        """
        with self._writing() as session:
            self._renew(session)

    def _renew(self, session: Session) -> None:
        session.execute(delete(OpenRoundRow).where(OpenRoundRow.run_id == self._run_id))
        session.execute(
            update(DeploymentRow)
            .where(DeploymentRow.run_id == self._run_id)
            .values(uuid=new_run_id())
        )

    def checkpoints(self) -> list[CheckpointFile]:
        """Return the checkpoints that are kept, oldest first.

        Raises:
            StoreError: The database cannot be read.
        """
        with reading(self._engine) as session:
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
        with reading(self._engine) as session:
            return read_rounds(session, self._run_id)

    def round_summaries(self, last: int) -> list[RoundSummary]:
        """Return the ``last`` committed rounds, in order, with counts by status.

        Raises:
            StoreError: The database cannot be read.
        """
        with reading(self._engine) as session:
            return summarise_rounds(session, self._run_id, last=last)

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
        with self._writing() as session:
            session.execute(
                update(RunRow).where(RunRow.id == self._run_id).values(status=status, error=error)
            )

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Add to the errors of a commit where the run stands and how to go on."""
        try:
            with explained(self._engine):
                yield
        except NoSpace as error:
            raise NoSpace(f"{error}; {self._standing()}") from error
        except (Fenced, StoreUnavailable):
            raise  # what is committed is the other coordinator's to say, or the database's
        except StoreError as error:
            raise StoreError(f"{error}; {self._standing()}") from error

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        with writing(self._engine) as session:
            self._guard(session)
            yield session

    def _drop_committed(self, session: Session) -> None:
        """Drop the records that an attempt without an answer has committed after all."""
        if self._attempted is None:
            return
        sha256, num_records = self._attempted
        mine = CheckpointRow.run_id == self._run_id
        committed = select(CheckpointRow.file).where(mine, CheckpointRow.sha256 == sha256)
        if session.scalar(committed) is not None:
            del self._buffer[:num_records]
        self._attempted = None

    @property
    def _resume(self) -> str:
        """The command that goes on with the run."""
        is_deployed = self._guard is not unguarded
        return "fedlearn coordinator FILE" if is_deployed else f"fedlearn resume {self.name}"

    def _standing(self) -> str:
        resume = f"go on with `{self._resume}` once that is done"
        try:
            files = self.checkpoints()
        except StoreError:
            return f"what was committed before still stands; {resume}"
        if not files:
            return f"nothing of run {self.name!r} was committed before; {resume}"
        return f"the last commit, after round {files[-1].round_num}, still stands; {resume}"

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


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Create the folder of a run that has its row; it goes again unless the block succeeds."""
    try:
        path.mkdir()
    except FileExistsError as error:
        if not _is_unfinished(path):
            raise _NameTaken(
                f"{path} exists already; choose another name for the run, or move it away"
            ) from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        yield path
        undo.pop_all()


def _is_unfinished(folder: Path) -> bool:
    """Whether a folder is what a process that was killed while it made a run has left behind."""
    if not folder.is_dir():
        return False
    inside = [path.relative_to(folder) for path in folder.rglob("*")]
    return all(path == Path("checkpoints") or path.match("*config.json*") for path in inside)


def _write_config(folder: Path, *, config: Mapping[str, object]) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    content = json.dumps(config, indent=2).encode() + b"\n"
    write_durably(folder / "config.json", content, raises=StoreError)
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


def _run_record(row: RunRow, *, is_deployed: bool) -> RunRecord:
    return RunRecord(
        name=row.name,
        status=row.status,
        error=row.error,
        created_utc=row.created_utc,
        num_rounds=row.num_rounds,
        config=row.config,
        config_hash=row.config_hash,
        versions=row.versions,
        is_deployed=is_deployed,
    )


def new_run_id() -> str:
    """Return what names a deployed run to clients: no other run has or had it."""
    return SecretBytes.generate(_RUN_ID_BYTES).reveal().hex()


def unknown_run(name: str, *, known: Iterable[str]) -> StoreError:
    """Return the error for a name that no run has; suggests the nearest of ``known``."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return StoreError(f"there is no run called {name!r}; {hint}`fedlearn runs` lists them all")


def _remove_all_but(kept: set[str], *, found: Iterable[Path]) -> None:
    """Remove older checkpoints, and what a crash has left behind."""
    for path in found:
        if path.name not in kept:
            with suppress(OSError):  # it takes space and nothing else; the next commit tries again
                path.unlink()


def _under(prefix: str, *, checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
