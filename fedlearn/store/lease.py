"""Deployed runs, and which of several coordinators runs them.

The holder of a run's lease adds one to ``beat`` every few seconds. Whoever waits takes over,
with the next ``epoch``, once the beat has stood still for ``ttl_s`` of its own monotonic
clock: no two machines' clocks are ever compared. Every write of the holder checks the epoch
in its own transaction, so one that was taken over, and does not know, changes nothing.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import cast

import structlog
from sqlalchemy import ColumnElement, CursorResult, Result, select, update
from sqlalchemy.orm import Session

from fedlearn.core.clock import Clock
from fedlearn.errors import DeploymentError, Fenced, StoreUnavailable
from fedlearn.rounds.journal import Control, Deployment
from fedlearn.store.engine import one_at_a_time
from fedlearn.store.runs import Database, new_run_id, unknown_run
from fedlearn.store.schema import DeploymentRow, RunRow

_DEPLOY_LOCK = 7_306_087_430
_RENEWALS_PER_TTL = 4

log = structlog.get_logger()


def deploy(database: Database, name: str) -> Deployment:
    """Return the deployment of the run called ``name``; make it one if it is not yet.

    Raises:
        StoreError: There is no such run, or the database cannot be written.
    """
    with database.writing() as session:
        one_at_a_time(session, _DEPLOY_LOCK)
        run_id = session.scalar(select(RunRow.id).where(RunRow.name == name))
        if run_id is None:
            raise unknown_run(name, known=session.scalars(select(RunRow.name)))
        row = session.get(DeploymentRow, run_id)
        if row is None:
            row = DeploymentRow(
                run_id=run_id,
                uuid=new_run_id(),
                control="run",
                holder="",
                epoch=0,
                beat=0,
                status={},
            )
            session.add(row)
        return _deployment(row, name=name)


def deployment(database: Database, name: str) -> Deployment:
    """Return the deployment of the run called ``name``.

    Raises:
        DeploymentError: No such run is deployed; the message suggests the nearest name.
        StoreError: The database cannot be read.
    """
    found = {each.name: each for each in deployments(database)}
    if name not in found:
        raise _not_deployed(name, known=list(found))
    return found[name]


def deployments(database: Database) -> list[Deployment]:
    """Return all deployed runs, oldest first.

    Raises:
        StoreError: The database cannot be read.
    """
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
        StoreError: The database cannot be written.
    """
    with database.writing() as session:
        changed = session.execute(
            update(DeploymentRow)
            .where(DeploymentRow.run_id.in_(select(RunRow.id).where(RunRow.name == name)))
            .values(control=control)
        )
        if _num_rows(changed) == 0:
            known = session.scalars(
                select(RunRow.name).join(DeploymentRow, RunRow.id == DeploymentRow.run_id)
            )
            raise _not_deployed(name, known=list(known))


class Lease:
    """The right to run one deployed run, held by one coordinator at a time.

    The holder calls :meth:`renew` every :attr:`renew_every_s` seconds, from any one thread.

    Attributes:
        name: Of the run.
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
            StoreError: The database cannot be read or written.
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
            StoreError: The database cannot be read or written.
        """
        try:
            now_s = self._clock.now_s()
            found = deployment(self._database, self.name)
            state = found.epoch, found.beat
            if self._seen != state:
                self._seen, self._seen_s = state, self._clock.now_s()
            is_free = found.holder in {"", self.holder}
            is_silent = now_s - self._seen_s >= self.ttl_s
            return (is_free or is_silent) and self._take(found)
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

        Raises:
            StoreError: The database cannot be written: others wait for ``ttl_s``.
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

    def _take(self, found: Deployment) -> bool:
        """Take over from the state that was ``found``, unless it has changed."""
        sent_s = self._clock.now_s()
        with self._database.writing() as session:
            changed = session.execute(
                update(DeploymentRow)
                .where(
                    DeploymentRow.uuid == found.run_id,
                    DeploymentRow.epoch == found.epoch,
                    DeploymentRow.beat == found.beat,
                    DeploymentRow.holder == found.holder,
                )
                .values(epoch=found.epoch + 1, beat=found.beat + 1, holder=self.holder)
            )
            if _num_rows(changed) == 0:
                return False
        self._epoch = found.epoch + 1
        self._extend(sent_s)
        return True

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


def _deployment(row: DeploymentRow, *, name: str) -> Deployment:
    return Deployment(
        name=name,
        run_id=row.uuid,
        control=cast(Control, row.control),
        holder=row.holder,
        epoch=row.epoch,
        beat=row.beat,
        status=row.status,
    )


def _not_deployed(name: str, *, known: list[str]) -> DeploymentError:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return DeploymentError(
        f"no run called {name!r} is deployed; {hint}`fedlearn coordinator` deploys one"
    )


def _num_rows(result: Result[tuple[()]]) -> int:
    """Return how many rows an UPDATE has changed."""
    return cast("CursorResult[tuple[()]]", result).rowcount
