"""The durable record of every run: a database for records, files for tensors.

A commit first writes the checkpoint's file. Then one transaction adds the checkpoint's row together
with all rounds since the last commit. So after a crash at any moment, the database holds exactly
the rounds up to its last checkpoint, and every checkpoint in it is a complete file. At worst, a
crash leaves a file without a row, which the next commit removes.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Self, TypeAlias

from sqlalchemy import URL, Engine, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import ExecutableOption

from fedlearn.core.files import sync_folder, write_durably
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.core.words import did_you_mean
from fedlearn.errors import Fenced, NoSpace, StoreError, StoreUnavailable, UnknownRun
from fedlearn.identity.actors import Actor, local_operator
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.roles import ALL_STUDIES, Studies
from fedlearn.rounds.records import ALIAS, Checkpoint, RoundRecord, RunRecord, RunStatus
from fedlearn.store.audit import append_entry
from fedlearn.store.blockers import end_blockers, end_stalled_sessions
from fedlearn.store.checkpoints import CheckpointFile, read_checkpoint, write_checkpoint
from fedlearn.store.engine import (
    explain_errors,
    migrate,
    open_engine,
    require_schema,
    serialize_transactions,
)
from fedlearn.store.holding import hold_run, is_held
from fedlearn.store.interrupts import defer_interrupts
from fedlearn.store.names import memorable_names
from fedlearn.store.queue_rows import (
    NAMES_LOCK,
    NameTaken,
    delete_from_queue,
    queue_again,
    require_deletable,
    require_name,
)
from fedlearn.store.reach import build_restrictions, restrict
from fedlearn.store.retention import DEFAULT_RETENTION
from fedlearn.store.rounds import (
    RoundSummary,
    count_by_client,
    insert_rounds,
    read_failing,
    read_missed,
    read_rounds,
    summarize_rounds,
)
from fedlearn.store.schema import (
    CheckpointRow,
    DeploymentRow,
    MetricRow,
    OpenRoundRow,
    ParticipationRow,
    RoundRow,
    RunRow,
    TrainerRow,
    build_record,
    build_row,
)

if TYPE_CHECKING:  # commands that list runs must not wait for torch to import
    from torch import Tensor

    from fedlearn.core.client_metrics import ClientMetrics
    from fedlearn.core.randomness import Seed
    from fedlearn.identity.audit_checks import LogCheckpoint
    from fedlearn.identity.signing import SigningKey

#: Called first in every transaction that writes; raises if this process may not write.
Guard: TypeAlias = Callable[[Session], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # also a folder name
_RUN_ID_BYTES = 16

#: Name of the file with the configuration, in the folder of a run.
CONFIG_FILE = "config.json"
#: Name of the folder with what single clients measured, in the folder of a run.
_CLIENTS = "clients"


def sqlite_url(path: Path) -> str:
    """Return the URL of the SQLite database in the file ``path``."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def allow_writes(_: Session) -> None:
    """Allow every write: the :data:`Guard` of a run that is not deployed."""


class Database:
    """All runs of one database, and the folder with their files.

    Attributes:
        runs_dir: The folder.
        actor: Who acts through this object, for the audit log; by default the user of this process.

    Args:
        check_act: Called in the transaction of each act of ``actor``; raises if the actor may not
            do it, so that nothing of the act is stored.

    Every method that accesses the database raises :class:`~fedlearn.errors.StoreError` if it cannot
    be read or written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     runs_dir = Path(folder)
        ...     with Database.open(sqlite_url(runs_dir / "runs.db"), runs_dir=runs_dir) as database:
        ...         database.runs()
        []
    """

    def __init__(
        self,
        engine: Engine,
        *,
        runs_dir: Path,
        actor: Actor | None = None,
        check_act: Guard = allow_writes,
        restrictions: Sequence[ExecutableOption] = (),
    ) -> None:
        self.runs_dir = runs_dir
        self.actor = local_operator() if actor is None else actor
        self._engine = engine
        self._check_act = check_act
        self._restrictions = restrictions

    def acting_as(self, actor: Actor, *, check_act: Guard = allow_writes) -> "Database":
        """Return the same database for another actor; close only one of the two."""
        return Database(self._engine, runs_dir=self.runs_dir, actor=actor, check_act=check_act)

    def restrict_to(self, studies: Studies) -> "Database":
        """Return the same database with what belongs to ``studies`` only, to read."""
        if ALL_STUDIES in studies.names:
            return self
        return Database(
            self._engine,
            runs_dir=self.runs_dir,
            actor=self.actor,
            check_act=self._check_act,
            restrictions=build_restrictions(studies),
        )

    def check_act(self, session: Session) -> None:
        """Check that the actor may act now, before files are written in the same transaction."""
        self._check_act(session)

    def record_act(
        self,
        session: Session,
        action: Action,
        *,
        subject: str,
        details: Mapping[str, object] | None = None,
    ) -> AuditEntry:
        """Add the actor's act to the audit log, as the last statement of its transaction.

        What the actor may do is checked here, since no act goes without an entry.
        """
        self._check_act(session)
        return append_entry(session, action, self.actor, subject=subject, details=details or {})

    @contextmanager
    def writing(self, *, lock: int | None = None) -> Iterator[Session]:
        """Open a transaction that may write; it is committed unless the block raises.

        Ctrl-C and SIGTERM are deferred until it has ended.

        Args:
            lock: Lock number; transactions with the same one run one after another.

        Raises:
            StoreError: The database refuses; nothing was written.
            StoreUnavailable: The database is unreachable. If the connection was lost during the
                commit, the transaction may have been committed.
        """
        assert not self._restrictions, "what is seen in some studies only is not written"
        engine = self._engine.execution_options(writes=True)
        with (
            self.explain_errors(),
            defer_interrupts(),
            Session(engine) as session,
            # Innermost, so that its commit, too, runs with signals deferred and errors explained.
            session.begin(),
        ):
            if lock is not None:
                serialize_transactions(session.connection(), lock)
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a transaction in which every statement sees the same commit."""
        engine = self._engine
        if engine.dialect.name == "postgresql":
            # PostgreSQL's default shows each statement a newer commit. SQLite keeps one snapshot
            # anyway.
            engine = engine.execution_options(isolation_level="REPEATABLE READ")
        with self.explain_errors(), Session(engine) as session:
            if self._restrictions:
                restrict(session, self._restrictions)
            yield session

    @property
    def is_shared(self) -> bool:
        """Whether a coordinator on another machine can take over from one on this machine."""
        return self._engine.dialect.name != "sqlite"

    def end_blockers(self, session: Session) -> AbstractContextManager[None]:
        """End stalled sessions that block ``session``, while the block runs."""
        return end_blockers(self._engine, session)

    def end_stalled_sessions(self, *, still_s: float) -> None:
        """End sessions whose client stopped in the middle of a write at least ``still_s`` ago."""
        end_stalled_sessions(self._engine, still_s=still_s)

    def explain_errors(self) -> AbstractContextManager[None]:
        """Convert errors of the driver and the disk into StoreErrors with a remedy."""
        return explain_errors(self._engine)

    @classmethod
    def open(cls, url: str, *, runs_dir: Path) -> Self:
        """Open a database; create it or migrate it to this version's schema if needed.

        Args:
            url: ``sqlite:///FILE`` (see :func:`sqlite_url`; it waits 30 s for other writers, or
                5 s with ``?timeout=5``) or ``postgresql+psycopg://USER:PASSWORD@HOST/NAME``.
            runs_dir: Folder that holds a folder for each run; created if it is missing.

        Raises:
            NewerStore: A later version of fedlearn has migrated the database.
            StoreError: The URL has another form, its driver is not installed, or the database
                cannot be reached, read or written.
        """
        database = cls(open_engine(url), runs_dir=runs_dir)
        try:
            with database.explain_errors():
                runs_dir.mkdir(parents=True, exist_ok=True)
                migrate(database._engine)
        except StoreError:
            database.close()
            raise
        return database

    @classmethod
    def open_to_read(cls, url: str, *, runs_dir: Path) -> Self:
        """Open an existing database; the connection itself refuses every write.

        Raises:
            NewerStore: A later version of fedlearn has migrated the database.
            StoreError: As in :meth:`open`, or there is no store, or one of an earlier version.
        """
        return cls._open_existing(url, runs_dir=runs_dir, only_reads=True)

    @classmethod
    def open_as_it_is(cls, url: str, *, runs_dir: Path) -> Self:
        """Open an existing database to write, without migrating it.

        Raises:
            NewerStore: A later version of fedlearn has migrated the database.
            StoreError: As in :meth:`open_to_read`.
        """
        return cls._open_existing(url, runs_dir=runs_dir, only_reads=False)

    @classmethod
    def _open_existing(cls, url: str, *, runs_dir: Path, only_reads: bool) -> Self:
        database = cls(open_engine(url, only_reads=only_reads), runs_dir=runs_dir)
        try:
            with database.explain_errors():
                require_schema(database._engine)
        except StoreError:
            database.close()
            raise
        return database

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, record: RunRecord, *, from_queue: bool = False) -> "StoredRun":
        """Add a run under its own name, with a folder and its ``config.json``.

        Args:
            record: The run.
            from_queue: Whether it is a run of the queue, which is running there. No other process
                can create a run of that name.

        Raises:
            StoreError: The name is taken or cannot name a folder, or the run cannot be written, or
                is not running in the queue. Nothing is left behind that would block another
                attempt.
        """
        check_run_name(record.name)
        with self.writing(lock=NAMES_LOCK) as session:
            queued = require_name(session, record.name, from_queue=from_queue)
            if queued is not None:
                record = replace(record, study=queued.study, start_from=queued.start_from)
            # Insert the row first: until the transaction ends, no other process can create a run
            # of this name, nor its folder.
            run_id = _insert_run(session, record=record)
            with _new_folder(self.runs_dir / record.name) as folder:
                _write_config(folder, config=record.config)
                details: dict[str, object] = {
                    "config_hash": record.config_hash,
                    "num_rounds": record.num_rounds,
                    **({"study": record.study} if record.study else {}),
                    **({"start_from": record.start_from} if record.start_from else {}),
                }
                self.record_act(session, Action.RUN_STARTED, subject=record.name, details=details)
        return StoredRun(self, run_id=run_id, name=record.name, guard=allow_writes)

    def create_named(self, record: RunRecord, *, seed: "Seed") -> "StoredRun":
        """Add a run under the first free name of :func:`memorable_names` for ``seed``.

        Safe to call from many processes at once: the database decides which of them gets a name.

        Raises:
            StoreError: The run cannot be written; nothing of it is left behind.
        """
        for name in memorable_names(seed):
            with suppress(NameTaken):
                return self.create(replace(record, name=name))
        raise AssertionError("there are names without end")

    def adopt(self, record: RunRecord, files: Sequence[CheckpointFile]) -> "StoredRun":
        """Add a run whose folder exists already, with the checkpoints in it.

        Raises:
            RunHeld: A process is running the run.
            StoreError: The name is taken, or the run cannot be written.
        """
        with hold_run(self.runs_dir / record.name), self.writing(lock=NAMES_LOCK) as session:
            require_name(session, record.name, from_queue=False)
            run_id = _insert_run(session, record=record)
            for file in files:
                session.add(build_row(CheckpointRow, file, run_id=run_id, file=file.path.name))
            session.flush()
            self.record_act(session, Action.RUN_ADOPTED, subject=record.name)
        return StoredRun(self, run_id=run_id, name=record.name, guard=allow_writes)

    def run(self, name: str, *, guard: Guard = allow_writes) -> "StoredRun":
        """Return the run called ``name``; pass the lease's guard to write to a deployed run.

        Raises:
            UnknownRun: There is no such run; the message suggests the nearest name.
        """
        with self.reading() as session:
            return StoredRun(self, run_id=find_run_id(session, name), name=name, guard=guard)

    def runs(self) -> list[RunRecord]:
        """Return all runs, oldest first."""
        with self.reading() as session:
            deployed = set(session.scalars(select(DeploymentRow.run_id)))
            rows = session.scalars(select(RunRow).order_by(RunRow.id))
            return [
                build_run_record(row, self.runs_dir, is_deployed=row.id in deployed) for row in rows
            ]

    def orphans(self) -> list[str]:
        """Return the names of run folders that have no record in the database."""
        known = {record.name for record in self.runs()}
        folders = sorted(path.parent for path in self.runs_dir.glob(f"*/{CONFIG_FILE}"))
        return [folder.name for folder in folders if folder.name not in known]


class StoredRun:
    """One run of a :class:`Database`: a :class:`fedlearn.rounds.records.RunStore`.

    Every method that accesses the database raises :class:`~fedlearn.errors.StoreError` if it cannot
    be read or written. Methods that write for a deployed run's coordinator also raise
    :class:`~fedlearn.errors.Fenced` after a takeover.

    Attributes:
        path: The run's folder, with ``config.json``, ``checkpoints/`` and ``clients/``.
        database: The database with the run.
        retention: Rule for which checkpoints a commit keeps.
    """

    def __init__(self, database: Database, *, run_id: int, name: str, guard: Guard) -> None:
        self.name = name
        self.path = database.runs_dir / name
        self.database = database
        self.retention = DEFAULT_RETENTION
        self._run_id = run_id
        self._guard = guard
        self._buffer: list[RoundRecord] = []
        #: What clients measured since the last commit; only the last evaluation is kept.
        self._clients: ClientMetrics | None = None
        #: SHA-256 of the checkpoint and number of records of a commit with unknown outcome.
        self._uncertain_commit: tuple[str, int] | None = None

    @property
    def record(self) -> RunRecord:
        """The current record of the run."""
        with self.database.reading() as session:
            is_deployed = session.get(DeploymentRow, self._run_id) is not None
            row = session.get_one(RunRow, self._run_id)
            return build_run_record(row, self.database.runs_dir, is_deployed=is_deployed)

    @property
    def key(self) -> int:
        """Its key in the database."""
        return self._run_id

    def hold(self) -> AbstractContextManager[None]:
        """Lock the run for this process while it runs: see :func:`fedlearn.store.holding.hold_run`.

        Raises:
            RunHeld: Another process holds it.
        """
        return hold_run(self.path)

    def append(self, record: RoundRecord) -> None:
        """Buffer the record of a finished round; the next :meth:`commit` makes it durable.

        Of what single clients measured, only the last evaluation is kept.
        """
        if record.clients is not None:
            self._clients = record.clients
            record = replace(record, clients=None)
        self._buffer.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable, together, before returning.

        :attr:`retention` decides which older checkpoints are kept; a second checkpoint of the same
        round replaces the first.

        Raises:
            StoreError: The commit could not be written (full disk), or another process runs the
                same run. The last commit still stands, and the records are kept for another
                attempt.
            StoreUnavailable: The database is unreachable. The next attempt finds out whether the
                commit succeeded, and adds what is missing.
            ValueError: A record is of a round that the checkpoint has not finished.
        """
        for record in self._buffer:
            if record.round_num >= checkpoint.round_num:
                raise ValueError(
                    f"round {record.round_num} is not finished by a checkpoint of "
                    f"{checkpoint.round_num} rounds; commit the state after the round"
                )
        with self._explain_failed_commit():
            folder = self.path / "checkpoints"
            # 1. The file first: a row must never name a file that does not exist.
            file = write_checkpoint(checkpoint, folder=folder)
            with self._writing() as session:
                # 2. Rows, in one transaction. What an attempt with unknown outcome has stored is
                # not stored again.
                self._drop_known_records(session)
                # Set before the commit: if the connection breaks, only the database knows whether
                # it succeeded.
                self._uncertain_commit = file.sha256, len(self._buffer)
                insert_rounds(session.connection(), self._run_id, self._buffer)
                best_round = checkpoint.values.get("best_round")
                num_rounds_before = max(
                    (row.round_num for row in self._checkpoint_rows(session)), default=0
                )
                kept, num_rounds = self._replace_checkpoints(
                    session, file=file, best_round=best_round if isinstance(best_round, int) else 0
                )
                # List the files while the guard holds, so that the list has no file of a
                # coordinator that takes over later.
                found = list(folder.iterdir())
                # Likewise, so that a coordinator that was replaced writes no file.
                measured_after = self._write_clients()
        self._buffer, self._uncertain_commit, self._clients = [], None, None
        # 3. Old files last, once no committed row names them.
        _remove_all_but(kept, found=found)
        uncommitted = {*range(num_rounds_before + 1, checkpoint.round_num + 1)} - {measured_after}
        self._remove_clients(num_rounds, uncommitted=uncommitted)

    def client_metrics(self) -> "ClientMetrics | None":
        """Return what single clients measured at the last evaluation; ``None`` if there is nothing.

        Raises:
            StoreError: The file is damaged, or cannot be read.
        """
        from fedlearn.store.client_files import read_clients  # noqa: PLC0415 (it takes numpy)

        files = self.checkpoints()
        if not files:
            return None
        return read_clients(self.path / _CLIENTS, num_rounds=files[-1].round_num)

    def _write_clients(self) -> int | None:
        """Write what clients measured since the last commit, and return after how many rounds."""
        if self._clients is None:
            return None
        from fedlearn.store.client_files import write_clients  # noqa: PLC0415 (see above)

        write_clients(self._clients, folder=self.path / _CLIENTS)
        return self._clients.measured_after

    def _remove_clients(
        self, checkpoints: Collection[int], *, uncommitted: Collection[int]
    ) -> None:
        folder = self.path / _CLIENTS
        if folder.exists():
            from fedlearn.store.client_files import remove_clients  # noqa: PLC0415 (see above)

            remove_clients(folder, checkpoints=checkpoints, uncommitted=uncommitted)

    def load(self) -> Checkpoint | None:
        """Return the last committed checkpoint, or ``None`` before the first.

        Raises:
            StoreError: It is missing or damaged, a later version of fedlearn wrote it, or it cannot
                be read.
        """
        files = self.checkpoints()
        if not files:
            return None
        back = f"continue from the one before it: `{self._resume} --from-previous`"
        remedy = back if len(files) > 1 else "there is no earlier one: start the run again"
        return read_checkpoint(files[-1], remedy=remedy)

    def state_tensors(self) -> "dict[str, Tensor]":
        """Return the strategy's state in the last checkpoint.

        Raises:
            StoreError: As in :meth:`weights`.
        """
        return self._require_checkpoint().select_tensors("server/")

    def client_tensors(self) -> "dict[str, Tensor]":
        """Return the tensors of the last checkpoint that hold client state.

        Raises:
            StoreError: As in :meth:`weights`.
        """
        return self._require_checkpoint().select_tensors("clients/")

    def _require_checkpoint(self, num_rounds: int | None = None) -> Checkpoint:
        checkpoint = self.load() if num_rounds is None else self._load_earlier(num_rounds)
        if checkpoint is None:
            raise StoreError(f"run {self.name!r} has no checkpoint yet; train it: `{self._resume}`")
        return checkpoint

    def _load_earlier(self, num_rounds: int) -> Checkpoint:
        files = {each.round_num: each for each in self.checkpoints()}
        if num_rounds not in files:
            kept = ", ".join(map(str, files)) or "none"
            raise StoreError(
                f"run {self.name!r} has no checkpoint after round {num_rounds}; it has: {kept} "
                "(keys `store.keep_last` and `store.keep_every` say which are kept)"
            )
        return read_checkpoint(files[num_rounds], remedy="choose another round")

    def weights(self, *, best: bool) -> "dict[str, Tensor]":
        """Return a model's tensors by name: the best model, if one was measured, or the last.

        Tied tensors appear under each of their names, as in ``Module.state_dict()``.

        Raises:
            StoreError: As in :meth:`load`, or the run has no checkpoint yet, or no model.
        """
        return self.load_weights(best=best)[1]

    def load_weights(
        self, *, best: bool, num_rounds: int | None = None
    ) -> "tuple[int, dict[str, Tensor]]":
        """Return the finished rounds of the model that :meth:`weights` returns, and its tensors.

        With ``num_rounds``, it is the model after so many rounds.

        Raises:
            StoreError: As in :meth:`weights`, or there is no checkpoint after ``num_rounds``.
        """
        if not self.record.has_model:
            raise StoreError(
                f"run {self.name!r} is a query, which has no model; its result is what Run.state() "
                "returns and `fedlearn export` writes"
            )
        checkpoint = self._require_checkpoint(num_rounds)
        found = checkpoint.select_tensors("best/") if best else {}
        finished = checkpoint.values.get("best_round") if found else checkpoint.round_num
        found = found or checkpoint.select_tensors("params/")
        for key, name in checkpoint.values.items():
            if key.startswith(ALIAS) and isinstance(name, str):
                found[key.removeprefix(ALIAS)] = found[name].clone()  # a file has no shared memory
        return int(finished or 0), found

    def rewind(self, *, to: int | None = None) -> Checkpoint:
        """Go back to an earlier checkpoint, discard everything after it, and return it.

        Clients of a deployed run may still hold or send updates to the discarded model. So clients
        see a new run from then on: it gets another ``run_id``, and its open rounds are closed.

        Args:
            to: Number of finished rounds at the checkpoint; ``None`` for the checkpoint before the
                last.

        Raises:
            StoreError: There is no such checkpoint, it cannot be read either, as in :meth:`load`,
                or the database cannot be written; nothing is discarded.
        """
        files = self.checkpoints()
        earlier = files[:-1]
        if not earlier:
            raise StoreError(
                f"run {self.name!r} has no earlier checkpoint to go back to; start it again"
            )
        found = [each for each in earlier if each.round_num == to] if to is not None else earlier
        if not found:
            kept = ", ".join(str(each.round_num) for each in earlier)
            raise StoreError(
                f"run {self.name!r} has {files[-1].round_num} rounds and no earlier checkpoint "
                f"after {to}; there are earlier ones after {kept} (see store.keep_last, "
                "store.keep_every and store.keep_best)"
            )
        others = [str(each.round_num) for each in earlier if each is not found[-1]]
        remedy = "there is no earlier one: start the run again"
        if others:
            remedy = f"there are others after {', '.join(others)} rounds: `fedlearn rollback`"
        checkpoint = read_checkpoint(found[-1], remedy=remedy)
        with self._writing() as session:
            # Rounds last: the others refer to them.
            for row in (MetricRow, ParticipationRow, TrainerRow, RoundRow):
                later = row.round_num >= checkpoint.round_num
                session.execute(delete(row).where(row.run_id == self._run_id, later))
            session.execute(
                delete(CheckpointRow).where(
                    CheckpointRow.run_id == self._run_id,
                    CheckpointRow.round_num > checkpoint.round_num,
                )
            )
            session.execute(
                update(RunRow)
                .where(RunRow.id == self._run_id)
                .values(status=RunStatus.RUNNING, error="")
            )
            self._renew(session)
            self._record_act(
                session,
                Action.RUN_ROLLED_BACK,
                to_rounds=checkpoint.round_num,
                from_rounds=files[-1].round_num,
            )
        self._buffer, self._uncertain_commit = [], None
        return checkpoint

    def renew(self) -> None:
        """Give the run a new id for clients, as needed after restoring it from a backup."""
        with self._writing() as session:
            self._renew(session)
            self._record_act(session, Action.RUN_RESTORED)

    def _record_act(self, session: Session, action: Action, **details: object) -> AuditEntry:
        return self.database.record_act(session, action, subject=self.name, details=details)

    def _renew(self, session: Session) -> None:
        session.execute(delete(OpenRoundRow).where(OpenRoundRow.run_id == self._run_id))
        session.execute(
            update(DeploymentRow)
            .where(DeploymentRow.run_id == self._run_id)
            .values(uuid=new_run_id())
        )

    def checkpoints(self) -> list[CheckpointFile]:
        """Return the checkpoints that are kept, oldest first."""
        with self.database.reading() as session:
            rows = self._checkpoint_rows(session)
            return [
                build_record(row, CheckpointFile, path=self.path / "checkpoints" / row.file)
                for row in rows
            ]

    def rounds(self) -> list[RoundRecord]:
        """Return the record of every committed round, in order."""
        with self.database.reading() as session:
            return read_rounds(session, self._run_id)

    def round_summaries(self, last: int) -> list[RoundSummary]:
        """Return the ``last`` committed rounds, in order, with counts by status."""
        with self.database.reading() as session:
            return summarize_rounds(session, self._run_id, last=last)

    def load_missed(self, *, first: int) -> dict[int, list[Participation]]:
        """Return the missed participations by round, from ``first`` on, in arrival order."""
        with self.database.reading() as session:
            return read_missed(session, self._run_id, first=first)

    def counts_by_client(self) -> dict[ClientId, dict[Status, int]]:
        """Count each client's participations by status, for all clients that were ever asked."""
        with self.database.reading() as session:
            return count_by_client(session, self._run_id)

    def load_failing(self) -> dict[ClientId, tuple[int, str]]:
        """Return the number of failures since each client's last report, and the latest reason.

        Failures are counted once a round. Rounds in which no client reported do not count.
        """
        with self.database.reading() as session:
            return read_failing(session, self._run_id)

    def save_trainers(self, trainers: Mapping[tuple[int, ClientId], str]) -> None:
        """Record what clients ran, by round and client, replacing what was recorded before."""
        if not trainers:
            return
        row, rounds = TrainerRow, {number for number, _ in trainers}
        values = [
            {"run_id": self._run_id, "round_num": number, "client_id": client, "trainer": trainer}
            for (number, client), trainer in trainers.items()
        ]
        with self._writing() as session:
            known = session.execute(
                select(row.round_num, row.client_id).where(
                    row.run_id == self._run_id, row.round_num.in_(rounds)
                )
            )
            for number, client in known:
                if (number, ClientId(client)) in trainers:
                    session.execute(
                        delete(row).where(
                            row.run_id == self._run_id,
                            row.round_num == number,
                            row.client_id == client,
                        )
                    )
            session.execute(insert(row), values)

    def load_trainers(self) -> dict[tuple[int, ClientId], str]:
        """Return what clients ran, by round and client."""
        row = TrainerRow
        mine = select(row.round_num, row.client_id, row.trainer).where(row.run_id == self._run_id)
        with self.database.reading() as session:
            found = session.execute(mine.order_by(row.round_num, row.client_id))
            return {(number, ClientId(client)): trainer for number, client, trainer in found}

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended, or that it is running again."""
        with self._writing() as session:
            row = session.get_one(RunRow, self._run_id)
            # A new run is marked as running, too; its start has been recorded.
            is_new = row.status is RunStatus.RUNNING and not self._checkpoint_rows(session)
            row.status, row.error = status, error
            session.flush()
            if status is not RunStatus.RUNNING:
                self._record_act(session, Action.RUN_ENDED, status=status.value)
            elif not is_new:
                self._record_act(session, Action.RUN_RESUMED)

    def extend(self, num_rounds: int) -> None:
        """Set the number of rounds; a run that was done can then be resumed.

        A run of the queue that was done is queued again. Any process may call this, even while
        another one runs the run.
        """
        with self.database.writing() as session:
            queue_again(session, self.name)
            row = session.get_one(RunRow, self._run_id)
            before, row.num_rounds = row.num_rounds, num_rounds
            if row.status is RunStatus.DONE:
                is_deployed = session.get(DeploymentRow, self._run_id) is not None
                row.status = RunStatus.RUNNING if is_deployed else RunStatus.INTERRUPTED
            session.flush()
            self._record_act(session, Action.RUN_EXTENDED, from_rounds=before, to_rounds=num_rounds)

    def record_export(self) -> None:
        """Record in the audit log that the result of a query was written to a file."""
        with self.database.writing() as session:
            self._record_act(session, Action.RELEASE_EXPORTED)

    def begin_deletion(self, files: Sequence[Mapping[str, object]]) -> None:
        """Record in the audit log that these files of the run are about to be removed.

        Raises:
            StoreError: The queue still needs the run.
        """
        with self._writing() as session:
            require_deletable(session, self.name)
            self._record_act(session, Action.RUN_DELETION_BEGAN, files=files)

    def delete(
        self, key: "SigningKey", details: Mapping[str, object]
    ) -> "tuple[AuditEntry, LogCheckpoint]":
        """Delete all records of the run; return the entry about it, and a checkpoint at it.

        What outlives a run stays: privacy charges, releases, clients and the audit log. Its files
        must be gone already.

        Args:
            key: Signs the checkpoint.
            details: More about the deletion, for the entry.
        """
        from fedlearn.store.audit_checkpoints import sign_checkpoint  # noqa: PLC0415 (cryptography)

        kinds = (
            MetricRow,
            ParticipationRow,
            TrainerRow,
            RoundRow,
            CheckpointRow,
            OpenRoundRow,
            DeploymentRow,
        )
        with self._writing() as session:
            counts = dict[str, int]()
            for kind in kinds:  # those that refer to others first
                mine = kind.run_id == self._run_id
                count = select(func.count()).select_from(kind).where(mine)
                counts[kind.__tablename__] = session.scalar(count) or 0
                session.execute(delete(kind).where(mine))
            session.execute(delete(RunRow).where(RunRow.id == self._run_id))
            delete_from_queue(session, self.name)
            entry = self._record_act(session, Action.RUN_DELETED, records=counts, **details)
            checkpoint = sign_checkpoint(session, key)
            assert checkpoint is not None  # the log has the entry
            return entry, checkpoint

    @contextmanager
    def _explain_failed_commit(self) -> Iterator[None]:
        """Add the last commit and the command to resume to the errors of a commit."""
        try:
            with self.database.explain_errors():
                yield
        except NoSpace as error:
            raise NoSpace(f"{error}; {self._describe_last_commit()}") from error
        except (Fenced, StoreUnavailable):
            raise  # the last commit is unknown: another coordinator or the database decides it
        except StoreError as error:
            raise StoreError(f"{error}; {self._describe_last_commit()}") from error

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        with self.database.writing() as session:
            self._guard(session)
            yield session

    def _drop_known_records(self, session: Session) -> None:
        if self._uncertain_commit is None:
            return
        sha256, num_records = self._uncertain_commit
        if any(row.sha256 == sha256 for row in self._checkpoint_rows(session)):
            del self._buffer[:num_records]
        self._uncertain_commit = None

    @property
    def _resume(self) -> str:
        is_deployed = self._guard is not allow_writes
        return "fedlearn coordinator FILE" if is_deployed else f"fedlearn resume {self.name}"

    def _describe_last_commit(self) -> str:
        resume = f"then continue with `{self._resume}`"
        try:
            files = self.checkpoints()
        except StoreError:
            return f"earlier commits are not affected; {resume}"
        if not files:
            return f"run {self.name!r} has no earlier commit; {resume}"
        return f"the last commit, after round {files[-1].round_num}, is not affected; {resume}"

    def _replace_checkpoints(
        self, session: Session, *, file: CheckpointFile, best_round: int
    ) -> tuple[set[str], list[int]]:
        """Add the row of ``file`` and apply the retention rule.

        Returns the names of the files to keep, and the numbers of finished rounds in them.
        """
        self._drop_checkpoint(session, round_num=file.round_num)
        session.add(build_row(CheckpointRow, file, run_id=self._run_id, file=file.path.name))
        rows = self._checkpoint_rows(session)
        kept = self.retention.select([row.round_num for row in rows], best_round=best_round)
        for row in rows:
            if row.round_num not in kept:
                session.delete(row)
        return {row.file for row in rows if row.round_num in kept}, sorted(kept)

    def _checkpoint_rows(self, session: Session) -> Sequence[CheckpointRow]:
        mine = select(CheckpointRow).where(CheckpointRow.run_id == self._run_id)
        return session.scalars(mine.order_by(CheckpointRow.round_num)).all()

    def _drop_checkpoint(self, session: Session, *, round_num: int) -> None:
        mine = CheckpointRow.run_id == self._run_id
        session.execute(delete(CheckpointRow).where(mine, CheckpointRow.round_num == round_num))


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Create the folder of a run that has its row; remove it again if the block fails."""
    try:
        path.mkdir()
    except FileExistsError as error:
        # Left by a process that was killed while it created a run: the folder is used, not
        # refused.
        if not _is_unfinished(path):
            raise NameTaken(
                f"{path} exists already; choose another name for the run, or move it away"
            ) from error
    with ExitStack() as undo:
        # Registered before the block runs, and dropped if it succeeds.
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        yield path
        undo.pop_all()


def _is_unfinished(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    # The pattern below also matches the temporary file of an atomic write.
    inside = [path.relative_to(folder) for path in folder.rglob("*")]
    return all(path == Path("checkpoints") or path.match("*config.json*") for path in inside)


def _write_config(folder: Path, *, config: Mapping[str, object]) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    content = json.dumps(config, indent=2).encode() + b"\n"
    write_durably(folder / CONFIG_FILE, content, raises=StoreError)
    sync_folder(folder.parent)


def _insert_run(session: Session, *, record: RunRecord) -> int:
    row = build_row(RunRow, record)
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        raise NameTaken(
            f"there is a run called {record.name!r} already; choose another name"
        ) from error
    return row.id


def build_run_record(row: RunRow, runs_dir: Path, *, is_deployed: bool) -> RunRecord:
    """Convert a row to a record; a running run whose process is gone gets the status LOST.

    A deployed run has no such lock; its lease says which coordinator runs it.
    """
    record = build_record(row, RunRecord, is_deployed=is_deployed)
    if record.status is RunStatus.RUNNING and is_held(runs_dir / record.name) is False:
        return replace(record, status=RunStatus.LOST)
    return record


def check_run_name(name: str, *, noun: str = "run") -> None:
    """Refuse a name that cannot name a folder.

    Raises:
        StoreError: It is not up to 64 letters, digits, ``-``, ``_`` and ``.``.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"a {noun} cannot be called {name!r}: use up to 64 letters, digits, "
            "'-', '_' and '.', beginning with a letter or a digit"
        )
    if sys.platform == "win32" and _is_refused_by_windows(name):
        raise StoreError(
            f"a {noun} cannot be called {name!r} on Windows: no file can have that name; "
            "choose another one"
        )


def _is_refused_by_windows(name: str) -> bool:
    return PureWindowsPath(name).is_reserved() or name.endswith(".")


def new_run_id() -> str:
    """Generate a unique id under which clients know a deployed run."""
    return SecretBytes.generate(_RUN_ID_BYTES).reveal().hex()


def find_run_id(session: Session, name: str) -> int:
    """Return the database key of the run called ``name``.

    Raises:
        UnknownRun: There is no such run; the message suggests the nearest name.
    """
    run_id = session.scalar(select(RunRow.id).where(RunRow.name == name))
    if run_id is None:
        hint = did_you_mean(name, session.scalars(select(RunRow.name)))
        raise UnknownRun(f"there is no run called {name!r}; {hint}`fedlearn runs` lists them all")
    return run_id


def _remove_all_but(kept: set[str], *, found: Iterable[Path]) -> None:
    """Remove older checkpoints and files that a crash has left behind."""
    for path in found:
        if path.name not in kept:
            with suppress(OSError):  # it only wastes space, and the next commit tries again
                path.unlink()
