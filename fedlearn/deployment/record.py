"""The record of a deployed run: created once, then found by every later coordinator."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fedlearn import assembly
from fedlearn.algorithms.pending_tasks import PendingTask
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.assembly.plan import require_fitting_model
from fedlearn.config import Config
from fedlearn.config.tables import TABLES, Use
from fedlearn.core.clock import Clock
from fedlearn.core.json_values import iterate_leaves
from fedlearn.core.messages import ClientId
from fedlearn.deployment.live_status import LiveStatus
from fedlearn.errors import ConfigError, StoreError, StoreUnavailable
from fedlearn.experiment.recorded import config_of
from fedlearn.experiment.simulate import new_record
from fedlearn.rounds.journal import RoundJournal
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunRecord, RunStatus, RunStore
from fedlearn.rounds.run import ResumedRound
from fedlearn.rounds.secure import MaskedSumStore
from fedlearn.store.lease import deploy
from fedlearn.store.patience import Patience
from fedlearn.store.queue_rows import require_name
from fedlearn.store.runs import Database

#: Another coordinator may be creating the run right now: how often to retry, and after how long.
_ATTEMPTS, _AGAIN_S = 20, 0.5


def ensure_deployed(
    database: Database,
    components: assembly.Deployment,
    *,
    name: str,
    clock: Clock,
    from_queue: bool = False,
) -> None:
    """Create and deploy the run called ``name`` if it does not exist yet.

    Args:
        database: The database of the run.
        components: The run's parts.
        name: Name of the run.
        clock: Used to wait while another coordinator creates it.
        from_queue: Whether a service runs it, out of the queue.

    Raises:
        ConfigError: The run exists with another configuration, or with one that cannot be read; or
            it is new, and does not fit its model.
        StoreError: The run cannot be created. Without ``from_queue``, the queue may have a run of
            that name; with it, the run may have been cancelled.
    """
    with database.reading() as session:  # before the attempts, since waiting does not help
        require_name(session, name, from_queue=from_queue)
    is_new = all(record.name != name for record in database.runs())
    if is_new and not from_queue:  # a submission was checked before it was queued
        require_fitting_model(components)
    for attempt in range(_ATTEMPTS):
        if any(record.name == name for record in database.runs()):
            break
        try:
            record = replace(new_record(components, extra={}), name=name)
            database.create(record, from_queue=from_queue)
        except StoreUnavailable:
            raise
        except StoreError:
            if attempt == _ATTEMPTS - 1:
                raise
            clock.sleep(_AGAIN_S)
    deploy(database, name)
    _require_same(components.config, database.run(name).record)


def _require_same(config: Config, record: RunRecord) -> None:
    # `{}` is left out: an empty table means the same as none.
    begun, now = (
        {key: value for key, value in iterate_leaves(each.model_dump(mode="json")) if value != {}}
        for each in (config_of(record).resolve(num_clients=None), config)
    )
    differ = {key for key in begun | now if begun.get(key) != now.get(key)}
    if changed := sorted(key for key in differ if Use.RESTART not in TABLES[key.partition(".")[0]]):
        changes = "; ".join(
            f"{k}: {_format_value(begun, k)} then, {_format_value(now, k)} now" for k in changed[:5]
        )
        more = f"; and {len(changed) - 5} more" if changed[5:] else ""
        raise ConfigError(
            f"run {record.name!r} was started with another configuration: {changes}{more}; restore "
            "the old values, or give the new run its own name (key `name`)"
        )


def _format_value(leaves: Mapping[str, object], key: str) -> str:
    return json.dumps(leaves[key], ensure_ascii=False) if key in leaves else "not set"


def resume_round(
    journal: RoundJournal,
    status: RunStatus,
    policy: StragglerPolicy,
    *,
    restarts: bool,
    takes_late_updates: bool,
    now_unix_s: float,
) -> ResumedRound | None:
    """Find where to continue the round that an earlier process opened and did not finish.

    A run that failed because too few clients reported gets a fresh group of attempts. A synchronous
    round continues at the first attempt of its group, because replaying the logged replies of each
    attempt gives the same outcome again. The log of a semi-synchronous round spans its attempts,
    so the round continues with the last one, and clients of earlier attempts are still in flight.

    Args:
        journal: The run's open rounds.
        status: Status of the run, as the earlier process left it.
        policy: How often a round is retried.
        restarts: Whether replies to the earlier process are lost, so that a new attempt begins:
            with secure aggregation, over Flower, and where cohorts take turns.
        takes_late_updates: Whether rounds are semi-synchronous.
        now_unix_s: Current time in seconds since 1970.

    Raises:
        StoreError: The journal cannot be read.
    """
    last = journal.last()
    if last is None:
        return None
    if restarts:
        return ResumedRound(round_num=last.round_num, attempt=last.attempt + 1)
    retries = policy.max_retries if policy.below_minimum is BelowMinimum.RETRY else 0
    # Attempts are numbered through: group g has the attempts from g · (retries + 1) on.
    group = last.attempt // (retries + 1) + (status is RunStatus.FAILED)
    first = group * (retries + 1)
    if not takes_late_updates:
        return ResumedRound(round_num=last.round_num, attempt=first)
    attempt = max(first, last.attempt)
    if attempt == 0:  # no earlier attempt has clients in flight
        return ResumedRound(round_num=last.round_num, attempt=0)
    cohort = last.cohort if attempt == last.attempt else ()
    pending = dict[ClientId, PendingTask]()
    for opened in (journal.find(last.round_num, each) for each in range(last.attempt + 1)):
        if opened is None or opened.attempt == attempt:
            continue
        for place, client_id in enumerate(opened.cohort):
            pending.pop(client_id, None)  # it had failed, and this attempt asked it again
            pending[client_id] = PendingTask(
                client_id=client_id,
                based_on=opened.round_num,
                attempt=opened.attempt,
                place=place,
                # Relative to the resumed round's opening, so negative.
                sent_s=opened.opened_unix_s - now_unix_s,
            )
    return ResumedRound(
        round_num=last.round_num,
        attempt=attempt,
        cohort=cohort,
        pending=tuple(each for each in pending.values() if each.client_id not in cohort),
    )


@dataclass(frozen=True, kw_only=True)
class ReportingStore:
    """A store that reports each round once it is durable, and at most once.

    A process that is killed right after the commit never reports that round, but the store has it.

    Attributes:
        store: The underlying store.
        report: Called with each finished round, in order.
    """

    store: RunStore
    report: Callable[[RoundRecord], None]
    _unreported: list[RoundRecord] = field(default_factory=list)

    def append(self, record: RoundRecord) -> None:
        """Add the record of a finished round."""
        self.store.append(record)
        self._unreported.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable, and report the records."""
        self.store.commit(checkpoint)
        # Removed before it is reported: a report that raises is not repeated.
        while self._unreported:
            self.report(self._unreported.pop(0))

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
        self.store.finish(status, error=error)


@dataclass(frozen=True, kw_only=True)
class SumAfterTrainers:
    """A :class:`MaskedSumStore` that records what the clients ran before it saves their sum.

    A coordinator that restarts continues with the sum, and does not read the replies in it again.
    """

    store: MaskedSumStore
    save_trainers: Callable[[], None]

    def read(self) -> bytes:
        """Return the stored sum; empty if there is none."""
        return self.store.read()

    def save(self, data: bytes) -> None:
        """Record what the clients ran, and store a sum durably."""
        self.save_trainers()
        self.store.save(data)

    def clear(self) -> None:
        """Delete the stored sum."""
        self.store.clear()


@dataclass(frozen=True, kw_only=True)
class CleanupStore:
    """A store that waits for its database and cleans up the journal and replies after a commit.

    ``save_trainers`` records what clients ran. ``forget`` removes the replies to rounds before a
    given number; ``run_id`` is the run's id as clients see it.
    """

    store: RunStore
    patiently: Patience
    journal: RoundJournal
    save_trainers: Callable[[], None]
    forget: Callable[[int], None]
    live_status: LiveStatus
    run_id: str

    def append(self, record: RoundRecord) -> None:
        """Add the record of a finished round."""
        self.live_status.record_round(record)
        self.store.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable."""
        named = checkpoint.with_client_run(self.run_id)
        # Before the commit, after which nobody reads these replies again.
        self.save_trainers()
        # The commit before the cleanup. After a crash in between, the journal and the replies are
        # merely superfluous; the other way round, a round would be lost.
        self.patiently(lambda: self.store.commit(named))
        self.journal.forget(checkpoint.round_num)
        self.forget(checkpoint.round_num)
        self.live_status.round_times.finish()

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
        self.patiently(lambda: self.store.finish(status, error=error))
