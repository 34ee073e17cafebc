"""Deployed runs, and which of several coordinators runs them.

The holder of a run's lease adds one to ``beat`` every few seconds. Whoever waits takes over,
with the next ``epoch``, once the beat has stood still for ``ttl_s`` of its own monotonic
clock: no two machines' clocks are ever compared. Every write of the holder checks the epoch
in its own transaction, so one that was taken over, and does not know, changes nothing. One that
stopped inside such a transaction loses its connection to the database.

Whatever reads or writes raises :class:`~fedlearn.errors.StoreError` if the database cannot be read
or written.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import cast

import structlog
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from fedlearn.core.clock import Clock
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, Fenced, StoreError, StoreUnavailable
from fedlearn.rounds.journal import Control, DeployedRun
from fedlearn.store.runs import Database, new_run_id, run_id_of
from fedlearn.store.schema import DeploymentRow, RunRow, as_record

_DEPLOY_LOCK = 7_306_087_430
_RENEWALS_PER_TTL = 4

log = structlog.get_logger()


def deploy(database: Database, name: str) -> DeployedRun:
    """Return the deployment of the run called ``name``, which there is; make it one if need be."""
    with database.writing(lock=_DEPLOY_LOCK) as session:
        run_id = run_id_of(session, name)
        row = session.get(DeploymentRow, run_id)
        if row is None:
            begun = {"control": "run", "holder": "", "epoch": 0, "beat": 0, "status": {}}
            row = DeploymentRow(run_id=run_id, uuid=new_run_id(), **begun)
            session.add(row)
        return _deployment(row, name=name)


def deployment(database: Database, name: str) -> DeployedRun:
    """Return the deployment of the run called ``name``.

    Raises:
        DeploymentError: No such run is deployed; the message suggests the nearest name.
    """
    found = {each.name: each for each in deployments(database)}
    if name not in found:
        hint = did_you_mean(name, found)
        raise DeploymentError(
            f"no run called {name!r} is deployed; {hint}`fedlearn coordinator` deploys one"
        )
    return found[name]


def deployments(database: Database) -> list[DeployedRun]:
    """Return all deployed runs, oldest first."""
    with database.reading() as session:
        rows = session.execute(
            select(DeploymentRow, RunRow.name)
            .join(RunRow, RunRow.id == DeploymentRow.run_id)
            .order_by(RunRow.id)
        )
        return [_deployment(row, name=name) for row, name in rows]


def set_control(database: Database, name: str, control: Control) -> None:
    """Say what is wanted of a deployed run; its holder hears of it with the next renewal.

    Raises:
        DeploymentError: No such run is deployed.
    """
    deployment(database, name)  # there is one, and it stays
    with database.writing() as session:
        this = DeploymentRow.run_id == run_id_of(session, name)
        session.execute(update(DeploymentRow).where(this).values(control=control))


class Lease:
    """The right to run one deployed run, held by one coordinator at a time.

    The holder calls :meth:`renew` every :attr:`renew_every_s` seconds, from any one thread.

    Attributes:
        holder: Who asks; of no other process, nor of this one before a restart.
        ttl_s: How long a holder may be silent.
        renew_every_s: How often the holder renews, and a waiter looks.
    """

    def __init__(
        self, database: Database, name: str, *, holder: str, ttl_s: float, clock: Clock
    ) -> None:
        self.name = name
        self.holder = holder
        self.ttl_s = ttl_s
        self.renew_every_s = ttl_s / _RENEWALS_PER_TTL
        self._database = database
        self._clock = clock
        self._epoch: int | None = None
        self._held_until_s = float("-inf")
        self._seen: tuple[int, int] | None = None  # epoch and beat of the present holder
        self._seen_s = 0.0

    def acquire(self, *, is_stopped: Callable[[], bool]) -> bool:
        """Wait until the lease is ours; return whether it is, ``False`` once stopped.

        A database that is away is waited for.

        Raises:
            DeploymentError: The run is not deployed.
        """
        while not is_stopped():
            try:
                if self.try_acquire():
                    return True
            except StoreUnavailable as error:
                log.warning("the database is away", run=self.name, error=str(error))
            self._clock.sleep(self.renew_every_s)
        return False

    def try_acquire(self) -> bool:
        """Take the lease if it is free, or its holder silent for ``ttl_s``; do not wait.

        Raises:
            DeploymentError: The run is not deployed.
            StoreUnavailable: The database is away. The present holder cannot renew either,
                so its silence is measured anew.
        """
        try:
            now_s = self._clock.now_s()
            found = deployment(self._database, self.name)
            state = found.epoch, found.beat
            if self._seen != state:
                self._seen, self._seen_s = state, self._clock.now_s()
            is_free = found.holder in {"", self.holder}
            is_silent = now_s - self._seen_s >= self.ttl_s
            return (is_free or is_silent) and self._take(found, is_silent=is_silent)
        except StoreUnavailable:
            self._seen = None
            raise

    def renew(self, status: Mapping[str, object]) -> Control:
        """Say that the holder lives, and how it does; return what the operator wants.

        Args:
            status: JSON values only.

        Raises:
            Fenced: Another coordinator has taken over, or the lease was never ours.
            StoreError: The database cannot be written; the lease runs on meanwhile.
        """
        sent_s = self._clock.now_s()
        with self._database.writing() as session:
            control = session.scalar(
                update(DeploymentRow)
                .where(*self._ours())
                .values(beat=DeploymentRow.beat + 1, status=status)
                .returning(DeploymentRow.control)
            )
            if control is None:
                raise self._fenced(session)
        self._extend(sent_s)
        return cast(Control, control)

    def release(self) -> None:
        """Let another coordinator take over at once; nothing if one has, or it was never ours.

        If the database cannot be written, others wait for ``ttl_s``.
        """
        self._held_until_s = float("-inf")
        if self._epoch is None:
            return
        with self._database.writing() as session:
            session.execute(update(DeploymentRow).where(*self._ours()).values(holder=""))
        self._epoch = None

    def is_held(self) -> bool:
        """Whether no other coordinator can have taken over by now; asks nobody.

        A quarter of ``ttl_s`` early, for clocks that run at different rates.
        """
        return self._clock.now_s() < self._held_until_s

    def guard(self, session: Session) -> None:
        """Check the epoch, which stays the same until the end of the transaction.

        This is the :data:`fedlearn.store.runs.Guard` of everything the holder writes.

        Raises:
            Fenced: Another coordinator has taken over, or the lease was never ours.
        """
        ours = select(DeploymentRow.epoch).where(*self._ours()).with_for_update(read=True)
        if session.scalar(ours) is None:
            raise self._fenced(session)

    def _take(self, found: DeployedRun, *, is_silent: bool) -> bool:
        """Take over from the state that was ``found``, unless it has changed.

        A silent holder may have stopped inside a transaction that has the row: it is not waited
        for.
        """
        sent_s = self._clock.now_s()
        with (
            self._database.writing() as session,
            self._database.ending_blockers(session) if is_silent else nullcontext(),
        ):
            taken = session.scalar(
                update(DeploymentRow)
                .where(
                    DeploymentRow.uuid == found.run_id,
                    DeploymentRow.epoch == found.epoch,
                    DeploymentRow.beat == found.beat,
                    DeploymentRow.holder == found.holder,
                )
                .values(epoch=found.epoch + 1, beat=found.beat + 1, holder=self.holder)
                .returning(DeploymentRow.epoch)
            )
            if taken is None:
                return False
        self._epoch = taken
        self._extend(sent_s)
        if is_silent:
            self._end_writes_of_the_silent()
        return True

    def _end_writes_of_the_silent(self) -> None:
        """Free what the last holder locked without the lease's row: contacts, say."""
        try:
            self._database.end_stalled_sessions(still_s=self.ttl_s)
        except StoreError as error:  # each write that waits for them fails, and is tried again
            log.warning("standing_sessions_unknown", run=self.name, error=str(error))

    def _extend(self, sent_s: float) -> None:
        """Count from before the renewal was sent: others count from when they saw it."""
        self._held_until_s = sent_s + self.ttl_s * (1 - 1 / _RENEWALS_PER_TTL)

    def _ours(self) -> tuple[ColumnElement[bool], ...]:
        run_id = select(RunRow.id).where(RunRow.name == self.name).scalar_subquery()
        epoch = -1 if self._epoch is None else self._epoch  # no row has an epoch below 0
        return DeploymentRow.run_id == run_id, DeploymentRow.epoch == epoch

    def _fenced(self, session: Session) -> Fenced:
        self._held_until_s = float("-inf")
        found = session.execute(
            select(DeploymentRow.holder, DeploymentRow.epoch)
            .join(RunRow, RunRow.id == DeploymentRow.run_id)
            .where(RunRow.name == self.name)
        ).one_or_none()
        holder, epoch = ("nobody", 0) if found is None else found
        return Fenced(
            f"run {self.name!r} is coordinated by {holder or 'nobody'} (epoch {epoch}), not by "
            f"{self.holder} (epoch {self._epoch}); end this coordinator, or let it wait its turn"
        )


def _deployment(row: DeploymentRow, *, name: str) -> DeployedRun:
    return as_record(row, DeployedRun, name=name, run_id=row.uuid)
