"""Formats the clients, invitations and rounds of a deployment as tables and as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from fedlearn.core.clock import utc
from fedlearn.core.json_values import format_json
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status
from fedlearn.core.quantities import format_duration, format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.history import headline
from fedlearn.experiment.layout import table_text
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.registry import Contact, EnrolledClient, InvitationRecord
from fedlearn.identity.rosters import KnownKey
from fedlearn.rounds.scheduling import QueuedRun
from fedlearn.store.rounds import RoundSummary

KEY_HEADER = ("id", "name", "identity key", "rotations")

_OF_CLIENT = (
    *("client_id", "name", "status", "tags"),
    *("enrolled_utc", "certificate_expires_utc", "fingerprint"),
)
_OF_CONTACT = ("connected", "seen_utc", "software", "num_examples")
_OF_ROUNDS = tuple(status.value for status in Status)
_DAY_S = 86400.0
_SOON_DAYS = 30


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


def members_table(members: Iterable[Mapping[str, Any]], *, now_unix_s: float) -> str:  # Any: JSON
    """Format the output of :func:`describe_members` as a table."""
    rows = [_member_row(each, now_unix_s=now_unix_s) for each in members]
    header = ("id", "name", "status", "tags", "last seen", "software", "examples", *_OF_ROUNDS)
    return table_text([(*header, "enrolled", "certificate"), *rows])


def _member_row(member: Mapping[str, Any], *, now_unix_s: float) -> tuple[str, ...]:  # Any: JSON
    is_invited = member["client_id"] is None
    ends = member["invitation_expires_utc" if is_invited else "certificate_expires_utc"]
    days = (datetime.fromisoformat(ends).timestamp() - now_unix_s) / _DAY_S
    seen = "connected" if member["connected"] else member["seen_utc"]
    if is_invited:
        enrolled = f"invitation {'ends' if days > 0 else 'ended'} {ends}"
        certificate = "-"
    else:
        enrolled = member["enrolled_utc"]
        soon = f"{ends}, in {math.ceil(days)} days" if days < _SOON_DAYS else ends
        certificate = soon if days > 0 else f"ended {ends}"
    return (
        "-" if is_invited else str(member["client_id"]),
        replace_unprintable(member["name"]),
        member["status"],
        replace_unprintable(" ".join(member["tags"])) or "-",
        seen or ("-" if is_invited else "never"),
        replace_unprintable(member["software"] or "-"),
        *(_number(member[key]) for key in ("num_examples", *_OF_ROUNDS)),
        enrolled,
        certificate,
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def key_row(client_id: ClientId, known: KnownKey) -> tuple[str, ...]:
    """Format a client's identity key as a row under :data:`KEY_HEADER`."""
    name = replace_unprintable(known.name) or "-"
    return str(client_id), name, fingerprint(known.key), str(known.num_rotations)


def rounds_table(rounds: Iterable[RoundSummary]) -> str:
    """Format rounds as a table."""
    header = ("round", "accuracy", "loss", *_OF_ROUNDS, "took", "outcome")
    return table_text([header, *map(_round_row, rounds)])


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


def format_missed(
    missed: Mapping[int, Iterable[Participation]], names: Mapping[ClientId, str]
) -> str:
    """Format the clients that did not report, by round and with the reasons, as a table."""
    rows = [
        (str(round_num + 1), client_text(each.client_id, names), format_status(each))
        for round_num, ended in missed.items()
        for each in ended
    ]
    return table_text([("round", "client", "was"), *rows])


def client_text(client_id: ClientId, names: Mapping[ClientId, str]) -> str:
    """Return the name of a client, or its id if it has no name."""
    return replace_unprintable(names.get(client_id, "")) or f"client {client_id}"


def format_status(ended: Participation) -> str:
    """Describe the status of a client that did not report, with the reason of a failure."""
    if ended.status is Status.FAILED:
        return f"failed: {replace_unprintable(ended.reason) or 'no reason given'}"
    return ended.status.value


def round_line(each: RoundSummary, **more: object) -> str:
    """Format a round, and ``more``, as a JSON object; values that are not finite are null."""
    values: dict[str, object] = {
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
    return format_json(values | more)


def _round_row(each: RoundSummary) -> tuple[str, ...]:
    retried = f", {each.attempt} retries" if each.attempt else ""
    return (
        str(each.round_num + 1),
        format_number(headline(each.metrics, "accuracy")),
        format_number(headline(each.metrics, "loss")),
        *(str(each.counts[status]) for status in Status),
        format_duration(each.seconds),
        f"{each.outcome.value}{retried}",
    )


# ---- The queue ----------------------------------------------------------------------------


def describe_queued(run: QueuedRun, waits: Mapping[str, str]) -> dict[str, object]:
    """Describe a run of the queue as JSON values, with what it waits for."""
    return {
        "run": run.name,
        "state": run.state.value,
        "priority": run.priority,
        "after": run.after or None,
        "waits_for": waits.get(run.name),
        "reason": run.reason,
        "submitted_by": run.submitted_by,
        "submitted_utc": run.submitted_utc,
        "started_utc": run.started_utc or None,
        "ended_utc": run.ended_utc or None,
    }


def queue_table(runs: Sequence[QueuedRun], waits: Mapping[str, str]) -> str:
    """Format the queue in the order of submission, with what each run waits for or ended of."""
    header = ("run", "state", "priority", "submitted", "by", "waits for, or why it ended")
    rows = [
        (
            run.name,
            run.state.value,
            str(run.priority),
            run.submitted_utc,
            replace_unprintable(run.submitted_by),
            replace_unprintable(waits.get(run.name) or run.reason) or "-",
        )
        for run in runs
    ]
    return table_text([header, *rows])
