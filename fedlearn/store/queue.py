"""The queue of runs in the database, shared by operators' commands and the service.

Every transition locks the run's row and checks its state, so that of two processes one succeeds and
the other gets an error that says why.
"""

from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.files import explain_disk_errors, sync_folder, write_durably
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.identity.audit import Action
from fedlearn.identity.bundles import Bundle
from fedlearn.identity.roles import EVERYTHING, Studies
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueuedRun, QueueState, Submission
from fedlearn.store.bundles import describe_bundle, store_bundle
from fedlearn.store.queue_rows import NAMES_LOCK, NameTaken, lock_row, queue_again
from fedlearn.store.runs import Database, Guard, allow_writes, check_run_name
from fedlearn.store.schema import DeploymentRow, QueueRow, RunRow, build_record, build_row
from fedlearn.store.studies import require_open_study

#: Why a run ended that its operator cancelled.
CANCELLED_BY_OPERATOR = "cancelled by the operator"

#: Name of the copy of the weights that a run starts from.
WEIGHTS_FILE = "weights.safetensors"

_REMEDIES = {
    QueueState.QUEUED: "`fedlearn cancel` removes it from the queue",
    QueueState.RUNNING: "`fedlearn cancel` ends it",
    QueueState.DONE: "`fedlearn extend` adds rounds",
    QueueState.FAILED: "`fedlearn retry` queues it again",
    QueueState.CANCELLED: "`fedlearn retry` queues it again",
}


class RunQueue:
    """The runs that were submitted to the service of a database, in every state.

    Every method raises :class:`~fedlearn.errors.StoreError` if the database cannot be read or
    written, and :class:`~fedlearn.errors.DeploymentError` if the queue has no such run or its state
    does not allow the change. :meth:`start` and :meth:`finish` are the service's, which passes the
    guard of its lease; they also raise :class:`~fedlearn.errors.Fenced` after a takeover, and may
    be repeated after a crash; so does :meth:`pin_weights`. All other methods may be called by any
    process.

    Attributes:
        database: The service's database.
        guard: Checks in each of the service's transactions that it still holds the lease.
        studies: Studies whose runs an error may describe.
    """

    def __init__(
        self,
        database: Database,
        clock: WallClock,
        *,
        guard: Guard = allow_writes,
        studies: Studies = EVERYTHING,
    ) -> None:
        self.database = database
        self._clock = clock
        self.guard = guard
        self.studies = studies

    def submit(
        self, submission: Submission, *, weights: bytes = b"", bundle: Bundle | None = None
    ) -> QueuedRun:
        """Queue a run; its name is then reserved.

        Args:
            submission: The run.
            weights: The safetensors file that it starts from, if ``start_from`` has its digest.
            bundle: The bundle that its clients run, if its configuration has the digest.

        Raises:
            DeploymentError: ``after`` or ``start_from`` names a run that does not exist, or there
                is no such study, or it is closed.
            StoreError: The name is taken, or cannot name a run.
        """
        with self.database.writing(lock=NAMES_LOCK) as session:
            return self.submit_in(session, submission, weights=weights, bundle=bundle)

    def submit_in(
        self,
        session: Session,
        submission: Submission,
        *,
        weights: bytes = b"",
        bundle: Bundle | None = None,
        schedule: str = "",
    ) -> QueuedRun:
        """Queue a run in a transaction that holds :data:`~fedlearn.store.queue_rows.NAMES_LOCK`.

        See :meth:`submit`; ``schedule`` is the name of the schedule that queues it, if one does.
        """
        check_run_name(submission.name)
        _require_free(session, submission.name, self.studies)
        if submission.study:
            require_open_study(session, submission.study)
        queued = set(session.scalars(select(QueueRow.name)))
        if submission.after:
            _require_known(submission.after, queued, where="in the queue", option="--after")
        if source := submission.start_from.get("run", ""):
            runs = queued.union(session.scalars(select(RunRow.name)))
            _require_known(source, runs, where="in this database", option="--from")
        new = {"reason": "", "started_utc": "", "ended_utc": ""}
        row = build_row(
            QueueRow,
            submission,
            state=QueueState.QUEUED,
            submitted_by=self.database.actor.label,
            submitted_utc=self._now_utc(),
            **new,
        )
        session.add(row)
        session.flush()  # it gives the row its id
        if weights:
            self._write_weights(session, row, weights)
        if bundle is not None:
            store_bundle(self.database, session, bundle)
        facts = {"priority": row.priority, "after": row.after}
        if row.study:
            facts["study"] = row.study
        if row.start_from:
            facts["start_from"] = row.start_from
        if schedule:
            facts["schedule"] = schedule
        facts |= describe_bundle(row.config, bundle)
        self._record(session, Action.RUN_QUEUED, row, **facts)
        return build_record(row, QueuedRun)

    def list(self) -> list[QueuedRun]:
        """Return all runs of the queue, in the order of submission."""
        with self.database.reading() as session:
            rows = session.scalars(select(QueueRow).order_by(QueueRow.id))
            return [build_record(row, QueuedRun) for row in rows]

    def find(self, name: str) -> QueuedRun:
        """Return the run called ``name``; the error suggests the nearest name."""
        with self.database.reading() as session:
            row = session.scalar(select(QueueRow).where(QueueRow.name == name))
            return _refuse_unknown(session, name) if row is None else build_record(row, QueuedRun)

    def require_running(self, name: str) -> None:
        """Raise an error, with what can be done about it, unless the run is running."""
        state = self.find(name).state
        if state is not QueueState.RUNNING:
            raise DeploymentError(f"{name} is {state}; {_REMEDIES[state]}")

    def cancel(self, name: str) -> QueuedRun:
        """Cancel a run that is not over, and return it.

        A queued run is cancelled at once. A running one is aborted: it is ``running`` until the
        service has ended it.
        """
        with self.database.writing() as session:
            row = _lock(session, name)
            if row.state.is_over:
                raise DeploymentError(f"{name} is {row.state}, so there is nothing to cancel")
            if row.state is QueueState.QUEUED or not _set_control(session, name, "abort"):
                # A running one without a deployment has begun nothing, and never will: see
                # `Database.create` and `deploy`, which look at the state.
                self._end(row, QueueState.CANCELLED, CANCELLED_BY_OPERATOR)
            self._record(session, Action.RUN_CANCELLED, row)
            return build_record(row, QueuedRun)

    def retry(self, name: str) -> QueuedRun:
        """Queue a failed or cancelled run again, at its old place, and return it.

        It resumes at its last checkpoint.
        """
        with self.database.writing() as session:
            row = _lock(session, name)
            if row.state not in (QueueState.FAILED, QueueState.CANCELLED):
                raise DeploymentError(
                    f"{name} is {row.state}, neither failed nor cancelled; {_REMEDIES[row.state]}"
                )
            _require_study_open(session, row)
            row.state, row.reason, row.ended_utc = QueueState.QUEUED, "", ""
            self._record(session, Action.RUN_RETRIED, row)
            return build_record(row, QueuedRun)

    def extend(self, name: str, num_rounds: int) -> QueuedRun:
        """Raise the total number of rounds of a run to ``num_rounds``, and return it.

        A run that is done is queued again; all others keep their state.
        """
        with self.database.writing() as session:
            row = _lock(session, name)
            _require_study_open(session, row)
            run = session.scalar(select(RunRow).where(RunRow.name == name))
            before = row.config["num_rounds"] if run is None else run.num_rounds
            if num_rounds <= before:
                raise DeploymentError(
                    f"{name} has {before} rounds already; give more than that (--rounds)"
                )
            if run is None and row.state is QueueState.RUNNING:
                # The service has read the configuration, and creates the run from it any moment.
                raise DeploymentError(f"{name} is just starting; extend it again in a moment")
            queue_again(session, name)
            if run is None:
                row.config = {**row.config, "num_rounds": num_rounds}
            else:  # whose configuration stays that of its beginning, as in its record
                run.num_rounds = num_rounds
                if run.status is RunStatus.DONE:
                    run.status = RunStatus.RUNNING
            self._record(
                session,
                Action.RUN_EXTENDED,
                row,
                from_rounds=before,
                to_rounds=num_rounds,
            )
            return build_record(row, QueuedRun)

    def start(self, name: str) -> QueuedRun:
        """Record that the service starts a queued run, and return it.

        A run that is running or over stays as it is: it may have been cancelled meanwhile.
        """
        with self.database.writing() as session:
            self.guard(session)
            row = _lock(session, name)
            if row.state is QueueState.QUEUED:
                row.state, row.started_utc = QueueState.RUNNING, self._now_utc()
                # It may have been cancelled in an earlier life; a pause still holds.
                _set_control(session, name, "run", instead_of="abort")
            return build_record(row, QueuedRun)

    def pin_weights(self, name: str, start_from: Mapping[str, str], weights: bytes) -> None:
        """Copy the weights that a running run starts from, unless it was done before.

        Args:
            name: Name of the run.
            start_from: Where they come from, with their digest.
            weights: The safetensors file.
        """
        with self.database.writing() as session:
            self.guard(session)
            row = _lock(session, name)
            if "sha256" not in row.start_from:
                row.start_from = start_from
                self._write_weights(session, row, weights)

    def read_weights(self, run: QueuedRun) -> bytes:
        """Read the copy of the weights that a run starts from.

        Raises:
            StoreError: It is missing, or is not what was copied.
        """
        path = weights_folder(self.database.runs_dir, run.name) / WEIGHTS_FILE
        with explain_disk_errors(path, raises=StoreError, doing="read"):
            content = path.read_bytes()
        if sha256(content).hexdigest() != run.start_from["sha256"]:
            raise StoreError(
                f"{path} was changed: its SHA-256 is not {run.start_from['sha256']}; restore it "
                "from a backup, or submit the run again under another name"
            )
        return content

    def finish(self, name: str, state: QueueState, *, reason: str) -> QueuedRun:
        """Record how a running run ended, and return it; no-op if it is not running any more.

        A run that was extended after its last round is queued again instead of ``done``.

        Args:
            name: Name of the run.
            state: ``DONE``, ``FAILED`` or ``CANCELLED``.
            reason: Why it failed or was cancelled; empty otherwise.
        """
        assert state.is_over
        with self.database.writing() as session:
            self.guard(session)
            row = _lock(session, name)
            if row.state is not QueueState.RUNNING:
                return build_record(row, QueuedRun)
            status = session.scalar(select(RunRow.status).where(RunRow.name == name))
            if state is QueueState.DONE and status is not RunStatus.DONE:
                row.state = QueueState.QUEUED
            else:
                self._end(row, state, reason)
            return build_record(row, QueuedRun)

    def _write_weights(self, session: Session, row: QueueRow, weights: bytes) -> None:
        self.database.check_act(session)
        # Inside the transaction that writes the digest: a row that has one has its file, too.
        folder = weights_folder(self.database.runs_dir, row.name)
        with explain_disk_errors(folder, raises=StoreError):
            folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / WEIGHTS_FILE, weights, raises=StoreError)
        with explain_disk_errors(folder, raises=StoreError):
            sync_folder(folder.parent)

    def _record(self, session: Session, action: Action, row: QueueRow, **facts: object) -> None:
        session.flush()
        self.database.record_act(session, action, subject=row.name, details=facts)

    def _end(self, row: QueueRow, state: QueueState, reason: str) -> None:
        row.state, row.reason, row.ended_utc = state, reason, self._now_utc()

    def _now_utc(self) -> str:
        return utc(self._clock.unix_s())


def weights_folder(runs_dir: Path, name: str) -> Path:
    """Return the folder with the weights that the run called ``name`` starts from."""
    return runs_dir / ".starts" / name  # no run can have a name that begins with a dot


def _require_free(session: Session, name: str, studies: Studies) -> None:
    row = session.scalar(select(QueueRow).where(QueueRow.name == name))
    if row is not None and studies.covers(row.study):
        raise NameTaken(
            f"the queue has a run called {name!r}, which is {row.state}; {_REMEDIES[row.state]}, "
            "or choose another name (--name)"
        )
    is_known = session.scalar(select(RunRow.id).where(RunRow.name == name)) is not None
    if row is not None or is_known:
        raise NameTaken(f"there is a run called {name!r} already; choose another name (--name)")


def _require_known(name: str, known: Collection[str], *, where: str, option: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise DeploymentError(f"{option} {name}: there is no such run {where}; {hint}".rstrip("; "))


def _lock(session: Session, name: str) -> QueueRow:
    row = lock_row(session, name)
    return _refuse_unknown(session, name) if row is None else row


def _require_study_open(session: Session, row: QueueRow) -> None:
    if row.study:
        require_open_study(session, row.study)


def _refuse_unknown(session: Session, name: str) -> NoReturn:
    hint = did_you_mean(name, session.scalars(select(QueueRow.name)))
    raise DeploymentError(
        f"the queue has no run called {name!r}; {hint}`fedlearn queue` lists them all"
    )


def _set_control(session: Session, name: str, control: str, *, instead_of: str = "") -> bool:
    """Send a command to a run's deployment; return whether it was sent.

    It is not sent if there is no deployment, or if the last command is not ``instead_of``.
    """
    run_id = select(RunRow.id).where(RunRow.name == name).scalar_subquery()
    changed = update(DeploymentRow).where(DeploymentRow.run_id == run_id).values(control=control)
    if instead_of:
        changed = changed.where(DeploymentRow.control == instead_of)
    return session.scalar(changed.returning(DeploymentRow.run_id)) is not None
