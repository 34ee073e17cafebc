"""Describes clients, runs and rounds as JSON values, for ``--json`` and for operators elsewhere."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from fedlearn.core.clock import utc
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status
from fedlearn.experiment.clients import load_names
from fedlearn.experiment.history import RoundMetrics, best_point, series
from fedlearn.experiment.run import Run
from fedlearn.experiment.summary import summarize
from fedlearn.identity.operators import OperatorRecord
from fedlearn.identity.registry import Contact, EnrolledClient, InvitationRecord
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.rounds.scheduling import QueuedRun, QueueState
from fedlearn.store.releases import StoredRelease
from fedlearn.store.rounds import RoundSummary

#: A run and its rounds, without their participations.
Brief: TypeAlias = tuple[RunRecord, Sequence[RoundMetrics]]

_OF_CLIENT = (
    *("client_id", "name", "status", "tags"),
    *("enrolled_utc", "certificate_expires_utc", "fingerprint"),
)
_OF_CONTACT = ("connected", "seen_utc", "software", "num_examples")
_OF_ROUNDS = tuple(status.value for status in Status)
#: Limit on clients that did not report.
_MISSED_OBJECTS = 1000


def describe_members(
    clients: Iterable[EnrolledClient],
    invited: Iterable[InvitationRecord],
    *,
    contacts: Mapping[ClientId, Contact],
    counts: Mapping[ClientId, Mapping[Status, int]],
) -> list[dict[str, Any]]:  # Any: JSON values
    """Describe enrolled clients, then open invitations, as JSON values with the same keys."""
    nothing = dict.fromkeys((*_OF_CLIENT, *_OF_CONTACT, *_OF_ROUNDS, "invitation_expires_utc"))
    never = dict.fromkeys(Status, 0)
    enrolled = [
        nothing
        | {key: getattr(each, key) for key in _OF_CLIENT}
        | _contact_values(contacts.get(each.client_id))
        | {status.value: n for status, n in counts.get(each.client_id, never).items()}
        for each in clients
    ]
    waiting = [
        nothing
        | {"name": each.name, "status": "invited", "tags": each.tags}
        | {"invitation_expires_utc": utc(each.expires_unix_s)}
        for each in invited
    ]
    return enrolled + waiting


def _contact_values(contact: Contact | None) -> dict[str, object]:
    if contact is None:
        return {"connected": False}
    return {
        "connected": contact.is_connected,
        "seen_utc": contact.seen_utc,
        "software": contact.software,
        "num_examples": contact.num_examples or None,
    }


def describe_missed(
    missed: Iterable[Participation], names: Mapping[ClientId, str]
) -> list[dict[str, object]]:
    """Describe the clients of a round that did not report, with the reasons, as JSON values."""
    return [
        {
            "client_id": each.client_id,
            "name": names.get(each.client_id),
            "status": each.status.value,
            "reason": each.reason,
        }
        for each in missed
    ]


def describe_queued(run: QueuedRun, waits: Mapping[str, str]) -> dict[str, object]:
    """Describe a run of the queue as JSON values, with what it waits for."""
    return {
        "run": run.name,
        "state": run.state.value,
        "study": run.study or None,
        "priority": run.priority,
        "after": run.after or None,
        "waits_for": waits.get(run.name),
        "reason": run.reason,
        "submitted_by": run.submitted_by,
        "submitted_utc": run.submitted_utc,
        "started_utc": run.started_utc or None,
        "ended_utc": run.ended_utc or None,
    }


def describe_round(each: RoundSummary) -> dict[str, object]:
    """Describe a finished round."""
    return {
        "round": each.round_num + 1,
        "outcome": each.outcome.value,
        "retries": each.attempt,
        "reported": each.counts[Status.REPORTED],
        "late": each.counts[Status.LATE],
        "failed": each.counts[Status.FAILED],
        "stale": each.counts[Status.STALE],
        "staleness": each.staleness,
        "train_loss": each.train_loss,
        "duration_s": each.duration_s,
        "seconds": each.seconds,
        "metrics": each.metrics,
        "train_metrics": each.train_metrics,
    }


def describe_runs(
    histories: Sequence[Brief], queued: Sequence[QueuedRun]
) -> Iterator[dict[str, Any]]:  # Any: JSON values
    """Describe runs in a few values each; those of the queue that have not started come last."""
    states = {each.name: each.state for each in queued}
    for history in histories:
        described = _describe_briefly(history)
        if states.get(history[0].name) is QueueState.QUEUED:  # it waits to continue
            described["status"] = QueueState.QUEUED.value
        yield described
    begun = {record.name for record, _ in histories}
    for each in queued:
        if each.name not in begun:
            yield {
                "run": each.name,
                "status": each.state.value,
                "rounds": 0,
                "num_rounds": each.config["num_rounds"],
                "best_accuracy": None,
                "created_utc": each.submitted_utc,
            }


def _describe_briefly(history: Brief) -> dict[str, Any]:  # Any: JSON values
    record, rounds = history
    return {
        "run": record.name,
        "status": record.status.value,
        "rounds": len(rounds),
        "num_rounds": record.num_rounds,
        "best_accuracy": _best_accuracy(history),
        "created_utc": record.created_utc,
    }


def _best_accuracy(history: Brief) -> float | None:
    best = best_point(series(history[1], "accuracy"), "max")
    return None if best is None else best.value


def describe_run(run: Run) -> dict[str, Any]:  # Any: JSON values
    """Describe everything about a run.

    Clients that did not report are limited to the latest.
    """
    record, rounds = run.record, run.history
    summary, spent = summarize(record, rounds), run.privacy
    best, counts = summary.best, summary.counts
    found = best and {
        "metric": best.metric,
        "value": best.point.value,
        "rounds": best.point.num_finished,
    }
    checkpoints = [
        {"rounds": f.round_num, "path": str(f.path), "sha256": f.sha256, "bytes": f.num_bytes}
        for f in run.stored.checkpoints()
    ]
    statistics = run.statistics()
    names, latest = load_names(run.stored), deque[dict[str, object]](maxlen=_MISSED_OBJECTS)
    for each in rounds:
        values = describe_missed(find_missed(each), names)
        latest.extend({"round": each.round_num + 1} | value for value in values)
    return _describe_briefly((record, rounds)) | {
        "error": record.error,
        "study": record.study,
        "start_from": record.start_from,
        "best": found,
        "metrics": summary.metrics,
        "data_names": asdict(run.data_names),
        "participation": {**counts._asdict(), "clients": summary.num_clients},
        "failures": dict(summary.reasons),
        "missed": list(latest),
        "staleness": {each.round_num + 1: each.staleness for each in rounds if each.staleness},
        "skipped_rounds": summary.num_skipped,
        "privacy": spent and asdict(spent),
        **({} if statistics is None else {"statistics": json.loads(statistics.to_json())}),
        "retries": summary.num_retries,
        "virtual_s": summary.virtual_s,
        "seconds": summary.seconds,
        "checkpoints": checkpoints,
        "path": str(run.path),
        "config": record.config,
        "config_hash": record.config_hash,
        "versions": record.versions,
    }


def find_missed(record: RoundRecord) -> list[Participation]:
    """Return the participations of a round that are not reports."""
    if record.count(Status.REPORTED) == len(record.participations):
        return []
    return [each for each in record.participations if each.status is not Status.REPORTED]


def describe_release(release: StoredRelease) -> dict[str, Any]:  # Any: JSON values
    """Describe a released model, with its signed statement."""
    return {
        "release": release.signed.id,
        "tags": list(release.tags),
        "created_utc": release.created_utc,
        "path": str(release.path),
        "public_key": release.signed.public_key,
        "signature": release.signed.signature,
        "statement": release.signed.facts,
    }


def describe_operator(operator: OperatorRecord) -> dict[str, object]:
    """Describe an operator with its roles."""
    return {
        "name": operator.name,
        "status": operator.status,
        "roles": [{"role": each.role.value, "study": each.study} for each in operator.grants],
        "certificate_expires_utc": operator.certificate_expires_utc or None,
        "fingerprint": operator.fingerprint or None,
        "added_by": operator.added_by,
        "added_utc": operator.added_utc,
    }
