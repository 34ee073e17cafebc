"""Recurring runs in the database: which experiments are queued again, and when they are next due.

Only the service queues them, under its lease. One transaction queues the run and moves the time at
which the schedule is next due, so a service that is killed queues none twice. A schedule that was
due several times while no service ran is queued once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.recurrence import Recurrence
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.identity.audit import Action
from fedlearn.identity.bundles import Bundle
from fedlearn.rounds.scheduling import Submission
from fedlearn.store.bundles import describe_bundle, remove_bundle, store_bundle
from fedlearn.store.queue import RunQueue
from fedlearn.store.queue_rows import NAMES_LOCK, NameTaken
from fedlearn.store.runs import check_run_name
from fedlearn.store.schema import QueueRow, ScheduleRow, build_record
from fedlearn.store.studies import require_open_study

#: Longest name of a schedule: those of its runs have a number, too.
_MAX_NAME = 56


@dataclass(frozen=True, kw_only=True)
class RunSchedule:
    """An experiment that is queued again and again.

    Attributes:
        name: Its name; its runs are called ``NAME-1``, ``NAME-2`` and so on.
        cron: When it is due, by cron's syntax.
        timezone: Time zone of that.
        study: Name of the study of its runs; empty: none.
        priority: Their priority.
        config: Their resolved configuration tree, JSON values only.
        created_by: Who created it: :attr:`fedlearn.identity.actors.Actor.label`.
        created_utc: When, ISO 8601.
        due_unix_s: When it is next due, in seconds since 1970.
        num_runs: Number of the last run.
        last_run: Name of that; empty: there was none yet.
    """

    name: str
    cron: str
    timezone: str
    study: str
    priority: int
    config: Mapping[str, object]
    created_by: str
    created_utc: str
    due_unix_s: float
    num_runs: int
    last_run: str


class ScheduleStore:
    """The schedules of a service's database; each change is in the audit log.

    Every method raises :class:`~fedlearn.errors.StoreError` if the database cannot be read or
    written.

    Attributes:
        queue: The queue of the same database, with the guard of the service's lease if this is the
            service.
    """

    def __init__(self, queue: RunQueue, clock: WallClock) -> None:
        self.queue = queue
        self._database = queue.database
        self._clock = clock

    def create(
        self, draft: Submission, recurrence: Recurrence, *, bundle: Bundle | None = None
    ) -> RunSchedule:
        """Create a schedule of runs like ``draft``, under its name.

        Args:
            draft: A run of it.
            recurrence: When one is queued.
            bundle: The bundle that their clients run, if the configuration has the digest.

        Raises:
            DeploymentError: There is one of that name, or the study is closed.
        """
        check_run_name(draft.name, noun="schedule")
        if len(draft.name) > _MAX_NAME:
            raise DeploymentError(f"--name is longer than {_MAX_NAME} characters; shorten it")
        now_unix_s = self._clock.unix_s()
        with self._database.writing(lock=NAMES_LOCK) as session:
            if session.get(ScheduleRow, draft.name) is not None:
                raise DeploymentError(
                    f"there is a schedule called {draft.name!r} already; choose another name "
                    f"(--name), or remove it (`fedlearn unschedule {draft.name}`)"
                )
            if draft.study:
                require_open_study(session, draft.study)
            row = ScheduleRow(
                name=draft.name,
                cron=recurrence.cron,
                timezone=recurrence.timezone,
                study=draft.study,
                priority=draft.priority,
                config=draft.config,
                created_by=self._database.actor.label,
                created_utc=utc(now_unix_s),
                due_unix_s=recurrence.find_next(now_unix_s),
                num_runs=0,
                last_run="",
            )
            session.add(row)
            session.flush()
            if bundle is not None:
                store_bundle(self._database, session, bundle)
            facts = {"cron": row.cron, "timezone": row.timezone, "study": row.study}
            about = describe_bundle(row.config, bundle)
            self._record(session, Action.SCHEDULE_CREATED, row.name, **facts, **about)
            return build_record(row, RunSchedule)

    def list_all(self) -> list[RunSchedule]:
        """Return all schedules, in the order of their names."""
        with self._database.reading() as session:
            rows = session.scalars(select(ScheduleRow).order_by(ScheduleRow.name))
            return [build_record(row, RunSchedule) for row in rows]

    def remove(self, name: str) -> None:
        """Remove a schedule; runs that it has queued stay.

        Raises:
            DeploymentError: There is none of that name.
        """
        with self._database.writing(lock=NAMES_LOCK) as session:
            row = session.get(ScheduleRow, name)
            if row is None:
                hint = did_you_mean(name, session.scalars(select(ScheduleRow.name)))
                raise DeploymentError(
                    f"there is no schedule called {name!r}; {hint}`fedlearn schedules` lists them "
                    "all"
                )
            config = row.config
            session.delete(row)
            session.flush()
            self._record(session, Action.SCHEDULE_REMOVED, name)
        remove_bundle(self._database, config)

    def queue_due(self) -> list[str]:
        """Queue a run of each schedule that is due, and return what was done, one line each.

        A schedule whose last run is not over is skipped, and so is one whose run is refused; both
        are recorded. It is then due at its next time.

        Raises:
            ConfigError: The package for cron's syntax is not installed.
            Fenced: Another process has taken over.
        """
        now_unix_s = self._clock.unix_s()
        is_due = select(ScheduleRow).where(ScheduleRow.due_unix_s <= now_unix_s)
        with self._database.reading() as session:
            if session.scalars(is_due).first() is None:
                return []
        with self._database.writing(lock=NAMES_LOCK) as session:
            self.queue.guard(session)
            rows = session.scalars(is_due.order_by(ScheduleRow.due_unix_s, ScheduleRow.name))
            return [self._queue_one(session, row, now_unix_s) for row in rows.all()]

    def _queue_one(self, session: Session, row: ScheduleRow, now_unix_s: float) -> str:
        due_utc = utc(row.due_unix_s)
        recurrence = Recurrence(cron=row.cron, timezone=row.timezone)
        row.due_unix_s = recurrence.find_next(now_unix_s)
        last = select(QueueRow.state).where(QueueRow.name == row.last_run)
        state = session.scalar(last)
        if state is not None and not state.is_over:
            return self._skip(session, row, f"{row.last_run} is {state}", due_utc)
        try:
            name = self._submit(session, row)
        except (DeploymentError, StoreError) as error:
            return self._skip(session, row, str(error), due_utc)
        return f"{row.name}: queued {name}"

    def _submit(self, session: Session, row: ScheduleRow) -> str:
        while True:
            row.num_runs += 1
            name = f"{row.name}-{row.num_runs}"
            submission = Submission(
                name=name,
                config={**row.config, "name": name},
                priority=row.priority,
                start_from={},
                study=row.study,
            )
            try:
                self.queue.submit_in(session, submission, schedule=row.name)
            except NameTaken:  # somebody has chosen that name; the next one may be free
                continue
            row.last_run = name
            return name

    def _skip(self, session: Session, row: ScheduleRow, reason: str, due_utc: str) -> str:
        session.flush()
        facts = {"reason": reason, "due_utc": due_utc}
        self._record(session, Action.SCHEDULE_SKIPPED, row.name, **facts)
        return f"{row.name}: skipped, since {reason}"

    def _record(self, session: Session, action: Action, name: str, **facts: object) -> None:
        self._database.record_act(session, action, subject=name, details=facts)
