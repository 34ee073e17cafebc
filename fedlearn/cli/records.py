"""The command for the audit log: what was done, and proof that the record is whole.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.cli.options import (
    AsOperator,
    CoordinatorAddress,
    Json,
    MaybeConfig,
    Output,
    RunsDir,
    examples,
)
from fedlearn.errors import ConfigError

if TYPE_CHECKING:
    from fedlearn.deployment.audit_log import AuditFilter
    from fedlearn.identity.audit_checks import ChainReport

app = typer.Typer()

_Text: TypeAlias = str | None
#: Most problems that are printed.
_MOST_PROBLEMS = 20


@app.command(
    "audit-log",
    epilog=examples(
        "audit-log --action client --since 2026-01-31",
        "audit-log --json > log.jsonl",
        "audit-log --checkpoint --output checkpoint.json",
        "audit-log --verify --kept checkpoint.json",
        "audit-log --verify --log log.jsonl --kept checkpoint.json",
    ),
)
def audit_log(
    *,
    since: Annotated[
        _Text, typer.Option(metavar="TIME", help="List entries from this time on, in UTC.")
    ] = None,
    action: Annotated[
        _Text,
        typer.Option(metavar="NAME", help="List one action, such as client.revoked, or client."),
    ] = None,
    actor: Annotated[
        _Text, typer.Option(metavar="NAME", help="List what one actor did, or one kind of actor.")
    ] = None,
    checkpoint: Annotated[
        bool,
        typer.Option("--checkpoint", help="Sign the newest entry, and print what a site can keep."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check that no entry was changed, removed or moved."),
    ] = False,
    kept: Annotated[
        list[Path] | None,
        typer.Option(
            "--kept",
            metavar="FILE",
            help="With --verify: a checkpoint that was kept elsewhere; may be repeated.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="FILE", help="With --verify: an exported log, not the database's."
        ),
    ] = None,
    output: Output = None,
    as_json: Json = False,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List who did what and when, sign it, or verify that the record is whole.

    Exit code 3: the log was changed.
    """
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import open_records
    from fedlearn.deployment import audit_log as logs

    wanted = logs.AuditFilter.parse(since=since or "", action=action or "", actor=actor or "")
    _require_consistent(
        listing=any((since, action, actor)),
        checkpoint=checkpoint,
        verify=verify,
        given={"--kept": bool(kept), "--log": log is not None, "--output": output is not None},
    )
    if log is not None:
        _report(logs.verify_export(log, kept or ()), num_kept=len(kept or ()), as_json=as_json)
        return
    path = find_operator_file(who, coordinator, here=config or runs_dir, is_here=True)
    if path is not None:
        _list_elsewhere(
            path, coordinator, wanted, is_listing=not (verify or checkpoint), as_json=as_json
        )
        return
    with open_records(config, runs_dir=runs_dir) as (database, folder):
        if verify:
            found = logs.verify_log(database, folder, kept or ())
            _report(found, num_kept=len(kept or ()), as_json=as_json)
        elif checkpoint:
            signed = logs.take_checkpoint(database, folder)
            if output is None:
                typer.echo(signed.to_json().removesuffix("\n"))
            else:
                signed.save(output)
                typer.echo(
                    f"{output}: give it to the sites; it vouches for entry 0 to {signed.position}"
                )
        else:
            entries = (each.values() for each in logs.list_entries(database, wanted))
            _list(entries, as_json=as_json)


@app.command("rotate-signing-key", epilog=examples("rotate-signing-key"))
def rotate_signing_key(*, config: MaybeConfig = None, runs_dir: RunsDir = None) -> None:
    """Replace the key that signs checkpoints of the audit log and releases of models.

    The old key signs the new one, so what either has signed can still be checked. A running
    coordinator takes the new key by itself. If the old key may have been stolen, tell the sites.
    """
    from fedlearn.cli.environment import open_records
    from fedlearn.deployment import audit_log as logs

    with open_records(config, runs_dir=runs_dir) as (database, folder):
        new = logs.rotate_signing_key(database, folder)
    typer.echo(f"the signing key is now {new}")
    typer.echo("give the sites a checkpoint of it: `fedlearn audit-log --checkpoint`")


def _require_consistent(
    *, listing: bool, checkpoint: bool, verify: bool, given: dict[str, bool]
) -> None:
    """Refuse options that would have no effect."""
    if listing + checkpoint + verify > 1:
        raise ConfigError(
            "choose one: list entries (--since, --action, --actor), --checkpoint, or --verify"
        )
    for option, needed in (("--kept", verify), ("--log", verify), ("--output", checkpoint)):
        if given[option] and not needed:
            purpose = "--checkpoint" if option == "--output" else "--verify"
            raise ConfigError(f"{option} has no effect without {purpose}; add it")


def _list_elsewhere(
    path: Path, coordinator: str | None, wanted: "AuditFilter", *, is_listing: bool, as_json: bool
) -> None:
    """List the entries of a coordinator elsewhere."""
    from fedlearn.deployment.people_orders import ReadAuditLog
    from fedlearn.deployment.remote import RemoteDesk

    if not is_listing:
        raise ConfigError(
            "--verify and --checkpoint need the database and the key; export the log with --json, "
            "and verify the file: --verify --log FILE --kept FILE"
        )
    order = ReadAuditLog(since=wanted.since_utc, action=wanted.action, actor=wanted.actor)
    _list(RemoteDesk.open(path, address=coordinator).carry_out(order), as_json=as_json)


def _list(entries: "Iterator[dict[str, Any]]", *, as_json: bool) -> None:  # Any: JSON
    from fedlearn.cli.environment import terminal_width
    from fedlearn.core.canonical_json import encode_canonical
    from fedlearn.core.words import replace_unprintable
    from fedlearn.experiment.layout import table_text

    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    rows = [
        tuple(
            map(
                replace_unprintable,
                (
                    str(entry["position"]),
                    *(entry[name] for name in ("at_utc", "actor", "origin", "action", "subject")),
                    encode_canonical(entry["details"]).decode(),
                ),
            )
        )
        for entry in entries
    ]
    if not rows:
        typer.echo("no such entries in the audit log")
        return
    header = ("entry", "time", "actor", "from", "action", "subject", "details")
    typer.echo(table_text([header, *rows], width=terminal_width()))


def _report(found: "ChainReport", *, num_kept: int, as_json: bool) -> None:
    """Print the result of a check; exit with code 3 if it found problems."""
    if as_json:
        newest = None if found.newest is None else found.newest.values()
        values = {"entries": found.num_entries, "checkpoints": found.num_checkpoints}
        typer.echo(json.dumps({**values, "newest": newest, "problems": found.problems}))
    else:
        for problem in found.problems[:_MOST_PROBLEMS]:
            typer.echo(problem)
        if (more := len(found.problems) - _MOST_PROBLEMS) > 0:
            typer.echo(f"and {more} more")
        checked = f"{found.num_entries} entries, {found.num_checkpoints} checkpoints"
        end = "the log was changed" if found.problems else "the log is whole"
        typer.echo(f"{checked}: {end}")
        if not found.problems and not num_kept:
            typer.echo("a checkpoint that was kept elsewhere would show more: --kept FILE")
    if found.problems:
        raise typer.Exit(RUN_FAILED)
