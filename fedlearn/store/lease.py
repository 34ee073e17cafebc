"""Deployed runs and services, and the lease that decides which of several coordinators has one.

A service runs the queue of its database; it has a lease, and so has each of its runs. The holder of
a lease increments ``beat`` every few seconds. A waiting coordinator takes over,
with the next ``epoch``, once the beat has not changed for ``ttl_s`` on the waiter's own monotonic
clock; clocks of different machines are never compared. Every write of the holder checks the epoch
in its own transaction, so a holder that was replaced without noticing changes nothing. If it is
stalled inside such a transaction, its database session is ended.

Who takes over a service knows that its earlier holder is gone. It need not wait for the leases of
that holder's runs: it is their heir.

Every function that accesses the database raises :class:`~fedlearn.errors.StoreError` if it cannot
be read or written.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import structlog
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from fedlearn.core.clock import Clock
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, Fenced, StoreError, StoreUnavailable
from fedlearn.identity.audit import Action
from fedlearn.rounds.journal import Control, DeployedRun, LeaseState, Service
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.queue_rows import lock_row
from fedlearn.store.runs import Database, check_run_name, find_run_id, new_run_id
from fedlearn.store.schema import DeploymentRow, RunRow, ServiceRow, build_record

_DEPLOY_LOCK = 7_306_087_430
_RENEWALS_PER_TTL = 4
_NEVER_HELD = {"control": "run", "holder": "", "epoch": 0, "beat": 0, "status": {}}

_ACTIONS: Mapping[Control, Action] = {
    "run": Action.RUN_RESUMED,
    "pause": Action.RUN_PAUSED,
    "abort": Action.RUN_ABORTED,
}

log = structlog.get_logger()


def deploy(database: Database, name: str) -> DeployedRun:
    """Deploy the existing run called ``name``, unless it is deployed already."""
    with database.writing(lock=_DEPLOY_LOCK) as session:
        run_id = find_run_id(session, name)
        row = session.get(DeploymentRow, run_id)
        if row is None:
            row = DeploymentRow(run_id=run_id, uuid=new_run_id(), **_NEVER_HELD)
            # A run of the queue that was cancelled while it started. The lock keeps a cancellation
            # from missing the row that is added here.
            queued = lock_row(session, name)
            if queued is not None and queued.state is QueueState.CANCELLED:
                row.control = "abort"
            session.add(row)
            session.flush()
            database.record_act(session, Action.RUN_DEPLOYED, subject=name)
        return _build_deployed_run(row, name=name)


def find_deployment(database: Database, name: str) -> DeployedRun:
    """Return the deployment of the run called ``name``.

    Raises:
        DeploymentError: No such run is deployed; the message suggests the nearest name.
    """
    found = {each.name: each for each in list_deployments(database)}
    if name not in found:
        hint = did_you_mean(name, found)
        raise DeploymentError(
            f"no run called {name!r} is deployed; {hint}`fedlearn coordinator` deploys one"
        )
    return found[name]


def list_deployments(database: Database) -> list[DeployedRun]:
    """Return all deployed runs, oldest first."""
    with database.reading() as session:
        rows = session.execute(
            select(DeploymentRow, RunRow.name)
            .join(RunRow, RunRow.id == DeploymentRow.run_id)
            .order_by(RunRow.id)
        )
        return [_build_deployed_run(row, name=name) for row, name in rows]


def set_control(database: Database, name: str, control: Control) -> None:
    """Send a command to a deployed run; its holder receives it with the next renewal.

    Raises:
        DeploymentError: No such run is deployed.
    """
    find_deployment(database, name)  # raises if there is none; deployments are never removed
    with database.writing() as session:
        this = DeploymentRow.run_id == find_run_id(session, name)
        session.execute(update(DeploymentRow).where(this).values(control=control))
        database.record_act(session, _ACTIONS[control], subject=name)


def ensure_service(database: Database, name: str) -> Service:
    """Return the service of this database; create it under ``name`` if there is none.

    Raises:
        DeploymentError: The database belongs to a service of another name, or no service can have
            this name.
    """
    check_run_name(name, noun="service")
    with database.writing(lock=_DEPLOY_LOCK) as session:
        row = session.scalar(select(ServiceRow))
        if row is None:
            row = ServiceRow(name=name, uuid=new_run_id(), **_NEVER_HELD)
            session.add(row)
        elif row.name != name:
            # The queue and the clients are those of the database, so two services would share them.
            raise DeploymentError(
                f"this database belongs to the service {row.name!r}, not to {name!r}; use that "
                "name, or another database (store.url)"
            )
        return build_record(row, Service)


def find_service(database: Database, name: str) -> Service:
    """Return the service called ``name``.

    Raises:
        DeploymentError: There is no such service; the message suggests the nearest name.
    """
    with database.reading() as session:
        found = {
            row.name: build_record(row, Service) for row in session.scalars(select(ServiceRow))
        }
    if name not in found:
        hint = did_you_mean(name, found)
        raise DeploymentError(
            f"there is no service called {name!r}; {hint}`fedlearn serve` starts one"
        )
    return found[name]


@dataclass(frozen=True)
class LeaseKind:
    """What a lease is for: one run, or a whole service.

    Attributes:
        noun: The word for it in messages.
        row: Its table.
        find: Returns the state of the row with this name.
        match: Builds the condition that selects the row with this name.
        led: How the audit log calls taking the lease.
    """

    noun: str
    row: type[DeploymentRow] | type[ServiceRow]
    find: Callable[[Database, str], LeaseState]
    match: Callable[[str], ColumnElement[bool]]
    led: Action


def _match_run(name: str) -> ColumnElement[bool]:
    run_id = select(RunRow.id).where(RunRow.name == name).scalar_subquery()
    return DeploymentRow.run_id == run_id


def _match_service(name: str) -> ColumnElement[bool]:
    return ServiceRow.name == name


RUN_LEASE = LeaseKind("run", DeploymentRow, find_deployment, _match_run, Action.RUN_LED)
SERVICE_LEASE = LeaseKind("service", ServiceRow, find_service, _match_service, Action.SERVICE_LED)


class Lease:
    """The right to run one deployed run or service, held by one coordinator at a time.

    The holder calls :meth:`renew` every :attr:`renew_every_s` seconds, from any one thread.

    Attributes:
        name: Name of the run or the service.
        holder: Name of this process, unique also across restarts.
        ttl_s: Seconds that a holder may be silent before another coordinator takes over.
        renew_every_s: Seconds between two renewals of the holder, or two attempts of a waiter.
        predecessor: The holder that this process took the lease from; empty if it was free.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        holder: str,
        ttl_s: float,
        clock: Clock,
        kind: LeaseKind = RUN_LEASE,
        heir_of: str = "",
    ) -> None:
        """Prepare to take the lease of ``kind`` called ``name``.

        Args:
            database: The database with its row.
            name: Name of the run or the service.
            holder: Name of this process, unique also across restarts.
            ttl_s: Seconds that a holder may be silent before another coordinator takes over.
            clock: Monotonic time.
            kind: Whether it is the lease of a run or of a service.
            heir_of: A holder that is known to be gone, whose lease is taken at once: for a run,
                the :attr:`predecessor` of its service's lease. Empty: none.
        """
        self.name = name
        self.holder = holder
        self.ttl_s = ttl_s
        self.renew_every_s = ttl_s / _RENEWALS_PER_TTL
        self.predecessor = ""
        self._database = database
        self._clock = clock
        self._kind = kind
        self._heir_of = heir_of
        self._epoch: int | None = None
        self._held_until_s = float("-inf")
        self._seen: tuple[int, int] | None = None  # epoch and beat of the present holder
        self._seen_s = 0.0

    def acquire(self, *, is_stopped: Callable[[], bool]) -> bool:
        """Wait for the lease; return whether we have it, ``False`` if stopped before.

        It also waits while the database is unreachable.

        Raises:
            DeploymentError: The run is not deployed, or there is no such service.
        """
        while not is_stopped():
            try:
                if self.try_acquire():
                    return True
            except StoreUnavailable as error:
                log.warning("the database is away", error=str(error), **self._log_name)
            self._clock.sleep(self.renew_every_s)
        return False

    def try_acquire(self) -> bool:
        """Take the lease if it is free or its holder was silent for ``ttl_s``; do not wait.

        Raises:
            DeploymentError: The run is not deployed, or there is no such service.
            StoreUnavailable: The database is unreachable. The current holder cannot renew either,
                so its silence is measured from the start again.
        """
        try:
            # Taken before the query, and `_seen_s` after it: a slow query makes a holder look less
            # silent, never more.
            now_s = self._clock.now_s()
            found = self._kind.find(self._database, self.name)
            state = found.epoch, found.beat
            if self._seen != state:
                self._seen, self._seen_s = state, self._clock.now_s()
            # Our own name: an earlier attempt was committed, but its answer was lost.
            is_free = found.holder in {"", self.holder}
            is_inherited = bool(self._heir_of) and found.holder == self._heir_of
            is_silent = is_inherited or now_s - self._seen_s >= self.ttl_s
            return (is_free or is_silent) and self._take_if_unchanged(found, is_silent=is_silent)
        except StoreUnavailable:
            self._seen = None
            raise

    def renew(self, status: Mapping[str, object]) -> Control:
        """Renew the lease and publish the holder's status; return the operator's command.

        Args:
            status: The status for operators, JSON values only.

        Raises:
            Fenced: Another coordinator has taken over, or the lease was never ours.
            StoreError: The database cannot be written; the lease's time keeps running.
        """
        sent_s = self._clock.now_s()
        with self._database.writing() as session:
            control = session.scalar(
                update(self._kind.row)
                .where(*self._match_own_lease())
                .values(beat=self._kind.row.beat + 1, status=status)
                .returning(self._kind.row.control)
            )
            if control is None:
                raise self._build_fenced(session)
        self._extend(sent_s)
        return cast(Control, control)

    def release(self) -> None:
        """Release the lease, so that another coordinator can take over at once.

        Does nothing if another one already has, or the lease was never ours. If the database cannot
        be written, others wait for ``ttl_s``.
        """
        self._held_until_s = float("-inf")
        if self._epoch is None:
            return
        with self._database.writing() as session:
            session.execute(
                update(self._kind.row).where(*self._match_own_lease()).values(holder="")
            )
        self._epoch = None

    def is_held(self) -> bool:
        """Check, without a query, that no other coordinator can have taken over yet.

        It turns false a quarter of ``ttl_s`` early, since clocks may run at different rates.
        """
        return self._clock.now_s() < self._held_until_s

    def guard(self, session: Session) -> None:
        """Check the epoch, which stays the same until the end of the transaction.

        This is the :data:`fedlearn.store.runs.Guard` of everything the holder writes.

        Raises:
            Fenced: Another coordinator has taken over, or the lease was never ours.
        """
        ours = (
            # A shared row lock: a takeover has to wait until this transaction ends.
            select(self._kind.row.epoch).where(*self._match_own_lease()).with_for_update(read=True)
        )
        if session.scalar(ours) is None:
            raise self._build_fenced(session)

    def _take_if_unchanged(self, found: LeaseState, *, is_silent: bool) -> bool:
        """Take the lease if its state is still as ``found``.

        A silent holder may be stalled inside a transaction that locks the row; its session is ended
        instead of waited for.
        """
        row = self._kind.row
        # Before the write is sent: see `_extend`.
        sent_s = self._clock.now_s()
        with (
            self._database.writing() as session,
            self._database.end_blockers(session) if is_silent else nullcontext(),
        ):
            taken = session.scalar(
                update(row)
                .where(
                    # Compare and set: of several waiters, one updates the row, the others find no
                    # match.
                    self._kind.match(self.name),
                    row.epoch == found.epoch,
                    row.beat == found.beat,
                    row.holder == found.holder,
                )
                .values(epoch=found.epoch + 1, beat=found.beat + 1, holder=self.holder)
                .returning(row.epoch)
            )
            if taken is None:
                return False
            details = {"epoch": taken, "holder": self.holder, "before": found.holder}
            self._database.record_act(session, self._kind.led, subject=self.name, details=details)
        self._epoch = taken
        self.predecessor = found.holder
        self._extend(sent_s)
        if is_silent:
            self._end_silent_writes()
        return True

    def _end_silent_writes(self) -> None:
        """End transactions of the last holder that lock other rows than the lease's: contacts."""
        try:
            self._database.end_stalled_sessions(still_s=self.ttl_s)
        except StoreError as error:  # a write that waits for these locks fails and is retried
            log.warning("standing_sessions_unknown", error=str(error), **self._log_name)

    def _extend(self, sent_s: float) -> None:
        # From before the renewal was sent: a waiter counts from seeing it, which is later.
        self._held_until_s = sent_s + self.ttl_s * (1 - 1 / _RENEWALS_PER_TTL)

    def _match_own_lease(self) -> tuple[ColumnElement[bool], ...]:
        epoch = -1 if self._epoch is None else self._epoch  # no row has an epoch below 0
        return self._kind.match(self.name), self._kind.row.epoch == epoch

    def _build_fenced(self, session: Session) -> Fenced:
        self._held_until_s = float("-inf")
        row = self._kind.row
        found = session.execute(
            select(row.holder, row.epoch).where(self._kind.match(self.name))
        ).one_or_none()
        holder, epoch = ("", 0) if found is None else found
        return Fenced(
            f"{self._kind.noun} {self.name!r} is coordinated by {holder or 'no process'} (epoch "
            f"{epoch}), not by {self.holder} (epoch {self._epoch}); stop this coordinator, or "
            "start it as a standby"
        )

    @property
    def _log_name(self) -> dict[str, str]:
        return {self._kind.noun: self.name}


def _build_deployed_run(row: DeploymentRow, *, name: str) -> DeployedRun:
    return build_record(row, DeployedRun, name=name, run_id=row.uuid)
