"""Formats the clients, invitations and rounds of a deployment as tables and as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status
from fedlearn.core.quantities import format_duration, format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.history import headline
from fedlearn.experiment.layout import table_text
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.rosters import KnownKey

KEY_HEADER = ("id", "name", "identity key", "rotations")

_OF_ROUNDS = tuple(status.value for status in Status)
_DAY_S = 86400.0
_SOON_DAYS = 30


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


def rounds_table(rounds: Iterable[Mapping[str, Any]]) -> str:  # Any: JSON
    """Format rounds that :func:`~fedlearn.deployment.descriptions.describe_round` describes."""
    header = ("round", "accuracy", "loss", *_OF_ROUNDS, "took", "outcome")
    return table_text([header, *map(_round_row, rounds)])


def format_missed(rounds: Iterable[Mapping[str, Any]]) -> str:  # Any: JSON
    """Format the clients that did not report, by round and with the reasons, as a table."""
    rows = [
        (
            str(each["round"]),
            replace_unprintable(client["name"] or "") or f"client {client['client_id']}",
            _format_ending(client["status"], client["reason"]),
        )
        for each in rounds
        for client in each["clients"]
    ]
    return table_text([("round", "client", "was"), *rows])


def client_text(client_id: ClientId, names: Mapping[ClientId, str]) -> str:
    """Return the name of a client, or its id if it has no name."""
    return replace_unprintable(names.get(client_id, "")) or f"client {client_id}"


def format_status(ended: Participation) -> str:
    """Describe the status of a client that did not report, with the reason of a failure."""
    return _format_ending(ended.status.value, ended.reason)


def _format_ending(status: str, reason: str) -> str:
    if status == Status.FAILED:
        return f"failed: {replace_unprintable(reason) or 'no reason given'}"
    return status


def _round_row(each: Mapping[str, Any]) -> tuple[str, ...]:  # Any: JSON
    retried = f", {each['retries']} retries" if each["retries"] else ""
    return (
        str(each["round"]),
        format_number(headline(each["metrics"], "accuracy")),
        format_number(headline(each["metrics"], "loss")),
        *(str(each[status]) for status in _OF_ROUNDS),
        format_duration(math.nan if each["seconds"] is None else each["seconds"]),
        f"{each['outcome']}{retried}",
    )


# ---- The queue ----------------------------------------------------------------------------


def queue_table(runs: Sequence[Mapping[str, Any]]) -> str:  # Any: JSON
    """Format the queue in the order of submission, with what each run waits for or ended of."""
    header = ("run", "state", "study", "priority", "submitted", "by", "waits for, or why it ended")
    rows = [
        (
            replace_unprintable(run["run"]),
            run["state"],
            run["study"] or "-",
            str(run["priority"]),
            run["submitted_utc"],
            replace_unprintable(run["submitted_by"]),
            replace_unprintable(run["waits_for"] or run["reason"]) or "-",
        )
        for run in runs
    ]
    return table_text([header, *rows])


def trainers_table(rounds: Iterable[Mapping[str, Any]]) -> str:
    """Lay out what each client ran, one line for each of its trainers, the earliest first."""
    found = dict[tuple[str, str], list[int]]()
    for each in rounds:
        for name, trainer in each["trainers"].items():
            found.setdefault((name, trainer), []).append(each["round"])
    rows = [
        (
            replace_unprintable(name),
            f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else str(numbers[0]),
            str(len(numbers)),
            replace_unprintable(trainer),
        )
        for (name, trainer), numbers in sorted(found.items(), key=lambda each: each[1][0])
    ]
    return table_text([("client", "rounds", "replies", "trainer"), *rows])
