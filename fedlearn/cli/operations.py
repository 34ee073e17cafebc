"""What each command about a deployment does; what takes long to import is imported here."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

from fedlearn.cli.commands import FollowedProgress
from fedlearn.config import load
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId
from fedlearn.core.words import printable
from fedlearn.deployment.operator import Operator, expires_in_days
from fedlearn.deployment.places import Places
from fedlearn.deployment.starter import write_client_starter, write_starter
from fedlearn.errors import ConfigError
from fedlearn.experiment.comparison import duration_text, headline, number_text
from fedlearn.experiment.progress import progress_to
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.registry import EnrolledClient, InvitationRecord
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import deployment
from fedlearn.store.rounds import RoundSummary

_SOON_DAYS = 30


def do_init(file: Path) -> None:
    """Write the configuration and say what to type next."""
    write_starter(file)
    _print(f"{file}: read it, then `fedlearn coordinator {file}`")


def do_init_client(file: Path) -> None:
    """Write a client's configuration and say what to type next."""
    write_client_starter(file)
    _print(f"{file}: read it, then `fedlearn join FILE --task … --config {file}`")


def do_coordinator(
    file: Path,
    *,
    overrides: Sequence[str],
    data_dir: Path | None,
    insecure: bool,
    serve_on: bool,
    from_previous: bool,
    restored: bool,
    as_json: bool,
) -> None:
    """Coordinate; the progress prints the rounds."""
    from fedlearn.deployment.coordinator import Start, coordinate  # noqa: PLC0415 (it loads gRPC)

    start = Start.RESTORED if restored else Start.WHERE_IT_IS
    places = Places.of(load(file, overrides=overrides), environ=os.environ, data_dir=data_dir)
    again = shlex.join(["fedlearn", "coordinator", str(file)])
    followed = FollowedProgress(
        progress_to(sys.stdout, as_json=as_json), runs_dir=None, resume=again
    )
    with followed as progress:
        coordinate(
            places,
            insecure=insecure,
            serve_on=serve_on,
            start=Start.FROM_PREVIOUS if from_previous else start,
            progress=progress,
        )


def do_demo(*, rounds: int, keep: Path | None) -> None:
    """Run the demo; it prints its progress."""
    from fedlearn.deployment.demo import demo  # noqa: PLC0415 (only this command needs it)

    demo(num_rounds=rounds, keep=keep, out=sys.stdout, environ=os.environ)


def do_invite(
    name: str, *, tags: Sequence[str], output: Path | None, insecure: bool, config: Path
) -> None:
    """Write an invitation and say what to do with it."""
    path = output or Path(f"{name}.invitation")
    with _operator(config) as operator:
        invitation = operator.invite(name, tags=tags, path=path, insecure=insecure)
    _print(f"{path}: hand it to {name} over a channel you trust; it works once")
    _print(f"it ends at {invitation.expires_utc}; `fedlearn join {path} --task …` uses it")


def do_revoke(name: str, *, config: Path) -> None:
    """Revoke a client and say what that did."""
    with _operator(config) as operator:
        client = operator.revoke(name)
    if client is None:
        _print(f"the invitation of {name} has ended; it never joined")
    else:
        _print(f"{name} (client {client.client_id}) is refused from now on")


def do_roster(output: Path | None, *, config: Path) -> None:
    """Write a roster and print what people compare."""
    path = output or Path("clients.roster")
    with _operator(config) as operator:
        roster = operator.roster(path)
    rows = [
        (str(client_id), printable(entry.name), fingerprint(entry.key), str(entry.num_rotations))
        for client_id, entry in sorted(roster.clients.items())
    ]
    _table(("id", "name", "identity key", "rotations"), rows)
    _print(f"{path}: have each client's user compare its line with `fedlearn pins NAME` there,")
    _print("then hand it to all; `fedlearn join FILE --roster` believes these keys and no others")


def do_rotate(client: str) -> None:
    """Note that a client shall have new keys and say when that happens."""
    from fedlearn.deployment.known_keys import client_home  # noqa: PLC0415 (it loads gRPC)

    home = client_home(client, environ=os.environ)
    enrolment = home.ask_rotation()
    key = fingerprint(enrolment.identity.public_key)
    _print(f"{enrolment.invitation.name}: the keys with {key} will be replaced when the client")
    _print("connects; one that runs does so at once, or when its secure aggregation is over")


def do_pins(client: str, *, forget: int | None, as_json: bool) -> None:
    """Print whom a client believes, or accept another key of one."""
    from fedlearn.deployment.known_keys import (  # noqa: PLC0415 (it loads gRPC)
        client_home,
        forget_pin,
        known_keys,
    )

    home = client_home(client, environ=os.environ)
    if forget is not None:
        forget_pin(home, ClientId(forget))
        _print(f"the key of client {forget} is forgotten: the next one seen of it is pinned")
        return
    enrolment, pins = known_keys(home)
    own, others = enrolment.lineage, sorted(pins.clients.items())
    rows = [(int(enrolment.client_id), enrolment.invitation.name, own.key, own.num_rotations)]
    rows += [(int(each), pin.name, pin.key, pin.num_rotations) for each, pin in others]
    if as_json:
        for number, name, key, rotations in rows:
            values = {"client_id": number, "name": name, "identity_key": key.hex()}
            more = {"fingerprint": fingerprint(key), "num_rotations": rotations}
            _print(json.dumps(values | more))
        return
    source = "the roster" if pins.roster else "the coordinator"
    _table(
        ("id", "name", "identity key", "rotations", "from"),
        [
            (
                str(number),
                printable(name) or "-",
                fingerprint(key),
                str(rotations),
                source if place else "this client",
            )
            for place, (number, name, key, rotations) in enumerate(rows)
        ],
    )


def do_clients(*, config: Path, as_json: bool) -> None:
    """Print all clients, then those that are invited."""
    with _operator(config) as operator:
        found, invited = operator.clients(), operator.open_invitations()
    if as_json:
        for values in chain(map(_client_values, found), map(_invited_values, invited)):
            _print(json.dumps(values))
    elif found or invited:
        now_s = SystemClock().unix_s()
        rows = [_client_row(client, now_unix_s=now_s) for client in found]
        rows += [_invited_row(invitation, now_unix_s=now_s) for invitation in invited]
        _table(("id", "name", "status", "tags", "enrolled", "certificate"), rows)
    else:
        _print("no clients yet; `fedlearn invite NAME` invites one")


def do_rounds(*, last: int, config: Path, as_json: bool) -> None:
    """Print the latest rounds."""
    with _operator(config) as operator:
        found = operator.rounds(last)
    if as_json:
        for each in found:
            _print(json.dumps(_round_values(each), allow_nan=False))
    elif found:
        header = ("round", "accuracy", "loss", "reported", "late", "failed", "took", "outcome")
        _table(header, [_round_row(each) for each in found])
    else:
        _print("no round is finished yet; `fedlearn why` tells what the run waits for")


def do_control(wanted: Literal["run", "pause", "abort"], *, config: Path) -> None:
    """Tell the coordinator and say whether one heard it; a run that is done hears nothing."""
    with _operator(config) as operator:
        name = deployment(operator.database, operator.places.run_name).name
        if operator.database.run(name).record.status is RunStatus.DONE:
            verb = "resume" if wanted == "run" else wanted
            _print(f"{name} is done; nothing to {verb}")
            return
        is_heard = operator.control(wanted)
    said = {
        "run": f"{name} goes on",
        "pause": f"{name} pauses when its round is finished",
        "abort": f"{name} is being ended",
    }
    late = "no coordinator is alive: the next one will know"
    _print(said[wanted] if is_heard else late)


def do_why(*, config: Path, as_json: bool) -> None:
    """Print what the run waits for."""
    with _operator(config) as operator:
        explanation = operator.why()
    if as_json:
        _print(json.dumps(explanation.values()))
    else:
        for line in explanation.lines():
            _print(printable(line))


def do_join(
    invitation: Path,
    *,
    task: str | None,
    home: Path | None,
    config: Path | None,
    require_secure_aggregation: bool,
    roster: Path | None,
    check: bool,
) -> None:
    """Be a client, or only look whether one could be."""
    from fedlearn.deployment.join import check_before, join  # noqa: PLC0415 (it loads gRPC)

    if check:
        check_before(invitation, task=task, home=home, config=config)
        return
    if task is None:
        raise ConfigError(
            "--task is missing: name the trainer, as module:Class or path/to/file.py:Class"
        )
    join(
        invitation,
        task=task,
        home=home,
        config=config,
        require_secure_aggregation=require_secure_aggregation,
        roster=roster,
    )


@contextmanager
def _operator(config: Path) -> Iterator[Operator]:
    """Open the deployment; where nothing was deployed, no database is made."""
    if not config.exists():
        raise ConfigError(
            f"{config}: there is no such file; name the coordinator's configuration with "
            "--config, or write one: `fedlearn init`"
        )
    places = Places.of(load(config, overrides=()), environ=os.environ)
    with places.database() as database:
        yield Operator(places, database, SystemClock())


def _client_values(client: EnrolledClient) -> dict[str, object]:
    return {
        "client_id": client.client_id,
        "name": client.name,
        "status": client.status,
        "tags": list(client.tags),
        "enrolled_utc": client.enrolled_utc,
        "certificate_expires_utc": client.certificate_expires_utc,
        "fingerprint": client.fingerprint,
        "invitation_expires_utc": None,
    }


def _invited_values(invitation: InvitationRecord) -> dict[str, object]:
    return {
        "client_id": None,
        "name": invitation.name,
        "status": "invited",
        "tags": list(invitation.tags),
        "enrolled_utc": None,
        "certificate_expires_utc": None,
        "fingerprint": None,
        "invitation_expires_utc": utc(invitation.expires_unix_s),
    }


def _client_row(client: EnrolledClient, *, now_unix_s: float) -> tuple[str, ...]:
    days = expires_in_days(client, now_unix_s=now_unix_s)
    ends = client.certificate_expires_utc
    if days <= 0:
        ends = f"ended {ends}"
    elif days < _SOON_DAYS:
        ends = f"{ends}, in {math.ceil(days)} days"
    return (
        str(client.client_id),
        printable(client.name),
        client.status,
        printable(" ".join(client.tags)) or "-",
        client.enrolled_utc,
        ends,
    )


def _invited_row(invitation: InvitationRecord, *, now_unix_s: float) -> tuple[str, ...]:
    verb = "ends" if invitation.expires_unix_s > now_unix_s else "ended"
    return (
        "-",
        printable(invitation.name),
        "invited",
        printable(" ".join(invitation.tags)) or "-",
        f"invitation {verb} {utc(invitation.expires_unix_s)}",
        "-",
    )


def _round_values(each: RoundSummary) -> dict[str, object]:
    return {
        "round": each.round_num + 1,
        "outcome": each.outcome.value,
        "retries": each.attempt,
        "reported": each.counts[Status.REPORTED],
        "late": each.counts[Status.LATE],
        "failed": each.counts[Status.FAILED],
        "train_loss": _finite(each.train_loss),
        "duration_s": _finite(each.duration_s),
        "seconds": _finite(each.seconds),
        "metrics": {name: _finite(value) for name, value in each.metrics.items()},
    }


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        _print("  ".join(cells).rstrip())


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 (standard output is for results)
