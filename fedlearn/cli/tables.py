"""What a deployment has, as tables and as JSON: its clients, invitations and rounds."""

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from fedlearn.core.clock import utc
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId
from fedlearn.core.words import printable
from fedlearn.experiment.comparison import aligned, duration_text, headline, json_text, number_text
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.registry import EnrolledClient, InvitationRecord
from fedlearn.identity.rosters import KnownKey
from fedlearn.store.rounds import RoundSummary

KEY_HEADER = ("id", "name", "identity key", "rotations")

_OF_CLIENT = (
    *("client_id", "name", "status", "tags"),
    *("enrolled_utc", "certificate_expires_utc", "fingerprint"),
)
_DAY_S = 86400.0
_SOON_DAYS = 30


def members(
    clients: Iterable[EnrolledClient], invited: Iterable[InvitationRecord]
) -> list[dict[str, Any]]:  # Any: JSON values
    """Return all clients, then those that are invited, as JSON values: all have all keys."""
    nothing = dict.fromkeys((*_OF_CLIENT, "invitation_expires_utc"))
    enrolled = [nothing | {key: getattr(each, key) for key in _OF_CLIENT} for each in clients]
    waiting = [
        nothing
        | {"name": each.name, "status": "invited", "tags": each.tags}
        | {"invitation_expires_utc": utc(each.expires_unix_s)}
        for each in invited
    ]
    return enrolled + waiting


def members_table(members: Iterable[Mapping[str, Any]], *, now_unix_s: float) -> str:  # Any: JSON
    """Return a table of :func:`members`."""
    rows = [_member_row(each, now_unix_s=now_unix_s) for each in members]
    return aligned([("id", "name", "status", "tags", "enrolled", "certificate"), *rows])


def _member_row(member: Mapping[str, Any], *, now_unix_s: float) -> tuple[str, ...]:  # Any: JSON
    is_invited = member["client_id"] is None
    ends = member["invitation_expires_utc" if is_invited else "certificate_expires_utc"]
    days = (datetime.fromisoformat(ends).timestamp() - now_unix_s) / _DAY_S
    if is_invited:
        enrolled = f"invitation {'ends' if days > 0 else 'ended'} {ends}"
        certificate = "-"
    else:
        enrolled = member["enrolled_utc"]
        soon = f"{ends}, in {math.ceil(days)} days" if days < _SOON_DAYS else ends
        certificate = soon if days > 0 else f"ended {ends}"
    return (
        "-" if is_invited else str(member["client_id"]),
        printable(member["name"]),
        member["status"],
        printable(" ".join(member["tags"])) or "-",
        enrolled,
        certificate,
    )


def key_row(client_id: ClientId, known: KnownKey) -> tuple[str, ...]:
    """Return a row under :data:`KEY_HEADER`."""
    name = printable(known.name) or "-"
    return str(client_id), name, fingerprint(known.key), str(known.num_rotations)


def rounds_table(rounds: Iterable[RoundSummary]) -> str:
    """Return a table of rounds."""
    header = ("round", "accuracy", "loss", "reported", "late", "failed", "took", "outcome")
    return aligned([header, *map(_round_row, rounds)])


def round_line(each: RoundSummary) -> str:
    """Return a round as a JSON object; what is not finite is null."""
    values: dict[str, object] = {
        "round": each.round_num + 1,
        "outcome": each.outcome.value,
        "retries": each.attempt,
        "reported": each.counts[Status.REPORTED],
        "late": each.counts[Status.LATE],
        "failed": each.counts[Status.FAILED],
        "train_loss": each.train_loss,
        "duration_s": each.duration_s,
        "seconds": each.seconds,
        "metrics": each.metrics,
        "train_metrics": each.train_metrics,
    }
    return json_text(values)


def _round_row(each: RoundSummary) -> tuple[str, ...]:
    retried = f", {each.attempt} retries" if each.attempt else ""
    return (
        str(each.round_num + 1),
        number_text(headline(each.metrics, "accuracy")),
        number_text(headline(each.metrics, "loss")),
        *(str(each.counts[status]) for status in Status),
        duration_text(each.seconds),
        f"{each.outcome.value}{retried}",
    )
