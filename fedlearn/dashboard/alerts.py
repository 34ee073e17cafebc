"""Derives from the store what needs an operator's attention.

Each function that yields alerts looks at one kind of trouble, and takes the facts as arguments.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from fedlearn.core.clock import RealClock, utc
from fedlearn.core.quantities import format_duration
from fedlearn.deployment.live_status import Phase
from fedlearn.identity.registry import EnrolledClient
from fedlearn.rounds.journal import DeployedRun, OpenRound
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.rounds.scheduling import QueuedRun, QueueState
from fedlearn.store.client_list import list_expiring, read_names
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import list_deployments
from fedlearn.store.queue import RunQueue
from fedlearn.store.run_totals import read_latest, read_totals
from fedlearn.store.runs import Database, allow_writes

#: A round is late after this many times the mean of all rounds, but not before ``_LATE_S``.
_LATE_TIMES: Final = 5.0
_LATE_S: Final = 600.0
#: Attempts that failed at the same round.
_MANY_ATTEMPTS: Final = 3
#: Failures in a row of a client.
_MANY_FAILURES: Final = 3
#: Share of a privacy budget.
_NEARLY_SPENT: Final = 0.9
#: Clients renew a certificate four months before its end; a month before, something keeps them.
_CERTIFICATE_S: Final = 30 * 86_400.0
_FULL_SHARE, _FULL_BYTES = 0.05, 2e9
_MOST_NAMED: Final = 5
_NOT_AT_WORK = (Phase.PAUSED, Phase.DONE)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something that needs attention.

    Attributes:
        level: ``failed`` if something has ended or is about to, else ``late``.
        title: What it is about.
        detail: What happened, and what can be done; text in backticks is code.
        path: Parts of the path of the page that shows more.
    """

    level: Literal["failed", "late"]
    title: str
    detail: str
    path: Sequence[str]


def find_alerts(
    database: Database, clock: RealClock, *, is_alive: Mapping[str, bool]
) -> list[Alert]:
    """Return what needs attention in the database.

    Args:
        database: The store.
        clock: Says how late rounds and certificates are.
        is_alive: Whether a coordinator is at work on a deployed run, by name.

    Raises:
        StoreError: The database cannot be read.
    """
    queued = {each.name: each for each in RunQueue(database, clock).list()}
    found = [*find_failures(queued.values())]
    for deployed in list_deployments(database):
        record = database.run(deployed.name).record
        state = queued[deployed.name].state if deployed.name in queued else None
        if record.status is RunStatus.DONE or state not in (None, QueueState.RUNNING):
            continue
        found += find_run_alerts(deployed, record, is_alive=is_alive[deployed.name])
        found += _find_live_alerts(database, clock, deployed, record)
    ending = list_expiring(database, before_utc=utc(clock.unix_s() + _CERTIFICATE_S))
    found += find_certificate_alerts(ending, now_unix_s=clock.unix_s())
    return found


def _find_live_alerts(
    database: Database, clock: RealClock, deployed: DeployedRun, record: RunRecord
) -> Iterator[Alert]:
    """Yield the alerts that need more than the run's own rows."""
    totals = read_totals(database, record.name)
    mean_s = totals.seconds / totals.num_finished if totals.num_finished else 0.0
    open_round = StoredJournal(database, record.name, guard=allow_writes).last()
    yield from find_slow_round(deployed, open_round, mean_s=mean_s, now_unix_s=clock.unix_s())
    spent = read_latest(database, record.name).get("epsilon")
    yield from find_spent_budget(record, spent=None if spent is None else spent.value)
    failing = deployed.status.get("failing")
    numbers = [int(each) for each in failing] if isinstance(failing, Mapping) else []
    yield from find_failing_clients(deployed, read_names(database, numbers) if numbers else {})


def find_failures(queue: Iterable[QueuedRun]) -> Iterator[Alert]:
    """Yield the runs of the queue that failed."""
    for run in queue:
        if run.state is QueueState.FAILED:
            remedy = f"`fedlearn retry {run.name}` continues after its last checkpoint"
            detail = f"{run.reason or 'no reason given'}; {remedy}"
            yield Alert(level="failed", title=f"{run.name} failed", detail=detail, path=["queue"])


def find_run_alerts(deployed: DeployedRun, record: RunRecord, *, is_alive: bool) -> Iterator[Alert]:
    """Yield what the row of a run that is not over says: failed, nobody at work, few clients."""
    name, status, path = record.name, deployed.status, ["runs", record.name]
    if record.status is RunStatus.FAILED and not is_alive:
        yield Alert(level="failed", title=f"{name} failed", detail=record.error, path=path)
        return
    if not is_alive:
        if deployed.control != "pause":
            detail = "its round waits; start a coordinator, or look at why it ended"
            yield Alert(level="late", title=f"{name} has no coordinator", detail=detail, path=path)
        return
    needed, eligible = status.get("needed", 0), status.get("eligible", 0)
    is_waiting = status.get("phase") == Phase.WAITING
    if is_waiting and isinstance(needed, int) and isinstance(eligible, int) and eligible < needed:
        detail = (
            f"it needs {needed} eligible clients; {status.get('connected', 0)} are connected, "
            f"{eligible} of them eligible"
        )
        yield Alert(level="late", title=f"{name} has too few clients", detail=detail, path=path)
    if refused := status.get("other_version"):
        assert isinstance(refused, Sequence)
        detail = f"{_name_some([each['name'] for each in refused])}; upgrade their fedlearn"
        title = f"{name} refuses clients of another version"
        yield Alert(level="late", title=title, detail=detail, path=path)


def find_slow_round(
    deployed: DeployedRun, open_round: OpenRound | None, *, mean_s: float, now_unix_s: float
) -> Iterator[Alert]:
    """Yield a round that takes far longer than the others, or that is tried again and again.

    Args:
        deployed: The run.
        open_round: Its latest attempt at a round; ``None`` before the first.
        mean_s: Mean seconds of its rounds.
        now_unix_s: Now, in seconds since 1970.
    """
    status, path = deployed.status, ["runs", deployed.name]
    is_open = open_round is not None and open_round.round_num == status.get("round")
    if open_round is None or not is_open or status.get("phase") in _NOT_AT_WORK:
        return
    title = f"{deployed.name} makes no progress"
    if open_round.attempt >= _MANY_ATTEMPTS:
        detail = (
            f"round {open_round.round_num + 1} is tried for the {open_round.attempt + 1}th time"
        )
        yield Alert(level="late", title=title, detail=detail, path=path)
        return
    deadline_s = status.get("deadline_s")
    allowed_s = max(_LATE_S, _LATE_TIMES * mean_s)
    if isinstance(deadline_s, int | float):
        allowed_s = max(allowed_s, 2 * deadline_s)
    late_s = now_unix_s - open_round.opened_unix_s
    if late_s > allowed_s:
        usual = f"; its rounds took {format_duration(mean_s)} on average" if mean_s else ""
        since = f"round {open_round.round_num + 1} is open for {format_duration(late_s)}"
        yield Alert(level="late", title=title, detail=since + usual, path=path)


def find_failing_clients(deployed: DeployedRun, names: Mapping[int, str]) -> Iterator[Alert]:
    """Yield the clients of a run that fail again and again, in one alert."""
    failing = deployed.status.get("failing")
    if not isinstance(failing, Mapping):
        return
    often = {
        names.get(int(number), f"client {number}"): how
        for number, how in failing.items()
        if how["in_a_row"] >= _MANY_FAILURES
    }
    if often:
        name, how = max(often.items(), key=lambda each: int(each[1]["in_a_row"]))
        detail = (
            f"{_name_some(list(often))}; {name} {how['in_a_row']} times in a row: "
            f"{how['reason'] or 'no reason given'}"
        )
        title = f"Clients of {deployed.name} keep failing"
        yield Alert(level="late", title=title, detail=detail, path=["runs", deployed.name])


def find_spent_budget(record: RunRecord, *, spent: float | None) -> Iterator[Alert]:
    """Yield a run that has nearly spent its privacy budget; ``spent`` is ε so far."""
    privacy = record.config.get("privacy")
    budget = privacy.get("epsilon") if isinstance(privacy, Mapping) else None
    if spent is None or not isinstance(budget, int | float):
        return
    if spent >= _NEARLY_SPENT * budget:
        title = f"{record.name} has nearly spent its privacy budget"
        detail = f"ε {spent:.3g} of {budget:.3g}; it ends when the next round cannot be paid"
        yield Alert(level="late", title=title, detail=detail, path=["budgets"])


def find_certificate_alerts(
    clients: Sequence[EnrolledClient], *, now_unix_s: float
) -> Iterator[Alert]:
    """Yield the certificates of ``clients``, which end soon or have ended, in up to two alerts."""
    now_utc = utc(now_unix_s)
    ended = [each for each in clients if each.certificate_expires_utc <= now_utc]
    soon = [each for each in clients if each.certificate_expires_utc > now_utc]
    if ended:
        title = f"{_count(ended, 'certificate')} of clients ended"
        detail = f"{_name_some([each.name for each in ended])}; invite them again to replace theirs"
        yield Alert(level="failed", title=title, detail=detail, path=["clients"])
    if soon:
        first = datetime.fromisoformat(soon[0].certificate_expires_utc).astimezone(UTC)
        title = f"{_count(soon, 'certificate')} of clients will soon end"
        detail = (
            f"{_name_some([each.name for each in soon])}; the first on {first:%Y-%m-%d}. Clients "
            "renew theirs when they connect, so these were away or could not"
        )
        yield Alert(level="late", title=title, detail=detail, path=["clients"])


def find_disk_alerts(folder: Path) -> Iterator[Alert]:
    """Yield the disk with ``folder`` if it is nearly full."""
    usage = shutil.disk_usage(folder)
    if usage.free < min(_FULL_BYTES, _FULL_SHARE * usage.total):
        detail = (
            f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.0f} are free at {folder}; "
            "`fedlearn delete` and `fedlearn models remove` make room"
        )
        yield Alert(level="failed", title="The disk is nearly full", detail=detail, path=[])


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items):,} {noun}{'' if len(items) == 1 else 's'}"


def _name_some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    shown = ", ".join(names[:_MOST_NAMED])
    return shown if more <= 0 else f"{shown} and {more:,} more"
