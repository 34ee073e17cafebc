"""The commands for the registry of models, and for the deletion of runs.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.cli.options import (
    AsOperator,
    CoordinatorAddress,
    Json,
    MaybeConfig,
    Output,
    RunArgument,
    RunsDir,
    examples,
)
from fedlearn.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from fedlearn.deployment.orders import Line

app = typer.Typer()
models_app = typer.Typer(help="List, check and tag the released models of runs.")
app.add_typer(models_app, name="models", invoke_without_command=True)

ReleaseArgument: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="RELEASE", help="A tag, or at least 6 characters of a release's id."),
]
TagArgument: TypeAlias = Annotated[str, typer.Argument(metavar="TAG", help="A tag: champion.")]


@models_app.callback(epilog=examples("models", "models tag 3f2a90c1 champion"))
def models(
    context: typer.Context,
    *,
    as_json: Json = False,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the released models of runs; `fedlearn export` adds one."""
    if context.invoked_subcommand is not None:
        if as_json or any(each is not None for each in (config, runs_dir, who, coordinator)):
            raise ConfigError(f"put the options after `models {context.invoked_subcommand}`")
        return
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import open_records, terminal_width
    from fedlearn.core.json_values import format_json
    from fedlearn.core.quantities import format_number
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.descriptions import describe_release
    from fedlearn.experiment.layout import table_text
    from fedlearn.identity.releases import SHORT
    from fedlearn.store.releases import ReleaseStore

    path = find_operator_file(who, coordinator, here=config or runs_dir, is_here=True)
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import ListModels

        found = list(RemoteDesk.open(path, address=coordinator).carry_out(ListModels()))
    else:
        with open_records(config, runs_dir=runs_dir) as (database, _):
            found = [describe_release(each) for each in ReleaseStore(database).list_all()]
    if as_json:
        for each in found:
            typer.echo(format_json(each))
    elif found:
        header = ("release", "tags", "run", "rounds", "accuracy", "epsilon", "released")
        rows = [
            (
                each["release"][:SHORT],
                ", ".join(each["tags"]),
                replace_unprintable(each["statement"]["run"]),
                str(each["statement"]["num_rounds"]),
                format_number(each["statement"]["metrics"].get("accuracy")),
                format_number((each["statement"]["privacy"] or {}).get("epsilon")),
                each["created_utc"],
            )
            for each in found
        ]
        typer.echo(table_text([header, *rows], width=terminal_width()))
    else:
        typer.echo("no releases yet; `fedlearn export RUN` makes one")


@models_app.command(epilog=examples("models show champion", "models show champion -o README.md"))
def show(
    release: ReleaseArgument,
    *,
    output: Output = None,
    as_json: Json = False,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print the model card of a release, or with --json its signed statement."""
    from fedlearn.cli.environment import open_records
    from fedlearn.core.files import write_durably
    from fedlearn.core.json_values import format_json
    from fedlearn.deployment.descriptions import describe_release
    from fedlearn.experiment.model_card import render_card
    from fedlearn.store.releases import ReleaseStore

    with open_records(config, runs_dir=runs_dir) as (database, _):
        found = ReleaseStore(database).find(release)
    text = format_json(describe_release(found)) + "\n" if as_json else render_card(found.signed)
    if output is None:
        typer.echo(text.removesuffix("\n"))
    else:
        write_durably(output, text.encode(), raises=StoreError)
        typer.echo(str(output))


@models_app.command(epilog=examples("models verify", "models verify champion"))
def verify(
    releases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RELEASE...]", help="Tags or ids; without any, all releases."),
    ] = None,
    *,
    public_key: Annotated[
        str | None,
        typer.Option(
            "--public-key",
            metavar="HEX",
            help="The key that must have signed; without it, the signing key of this deployment.",
        ),
    ] = None,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
) -> None:
    """Check signatures and files of releases.

    Exit code 3: one was changed.
    """
    from fedlearn.cli.environment import open_records
    from fedlearn.experiment.releases import find_public_key, verify_release
    from fedlearn.store.releases import ReleaseStore

    num_wrong = 0
    with open_records(config, runs_dir=runs_dir) as (database, keys_folder):
        store = ReleaseStore(database)
        found = [store.find(each) for each in releases] if releases else store.list_all()
        key = public_key or (find_public_key(keys_folder) if found else "")
        for each in found:
            try:
                verify_release(each, database, public_key=key)
            except StoreError as error:
                num_wrong += 1
                typer.echo(str(error))
    typer.echo(f"{len(found)} releases checked, {num_wrong} wrong")
    if num_wrong:
        raise typer.Exit(RUN_FAILED)


@models_app.command(epilog=examples("models tag 3f2a90c1 champion"))
def tag(
    release: ReleaseArgument,
    tag: TagArgument,
    *,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Let a tag name this release; it leaves the one that it named before."""
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import open_records
    from fedlearn.deployment.descriptions import describe_release
    from fedlearn.identity.releases import SHORT
    from fedlearn.store.releases import ReleaseStore

    path = find_operator_file(who, coordinator, here=config or runs_dir, is_here=True)
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import TagModel

        order = TagModel(release=release, tag=tag)
        (found,) = RemoteDesk.open(path, address=coordinator).carry_out(order)
    else:
        with open_records(config, runs_dir=runs_dir) as (database, _):
            found = describe_release(ReleaseStore(database).tag(release, tag))
    run, num_rounds = found["statement"]["run"], found["statement"]["num_rounds"]
    typer.echo(f"{tag} is now {found['release'][:SHORT]}, {run} after {num_rounds} rounds")


@models_app.command(epilog=examples("models untag champion"))
def untag(
    tag: TagArgument,
    *,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Remove a tag; its release stays."""
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import open_records
    from fedlearn.store.releases import ReleaseStore

    path = find_operator_file(who, coordinator, here=config or runs_dir, is_here=True)
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import UntagModel

        list(RemoteDesk.open(path, address=coordinator).carry_out(UntagModel(tag=tag)))
    else:
        with open_records(config, runs_dir=runs_dir) as (database, _):
            ReleaseStore(database).untag(tag)
    typer.echo(f"{tag} names no release any more")


@models_app.command(epilog=examples("models remove 3f2a90c1", "models remove --keep-last 3"))
def remove(
    releases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RELEASE...]", help="Ids of releases without a tag."),
    ] = None,
    *,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            min=0,
            metavar="N",
            help="Remove all but the last N of each run and those with a tag.",
        ),
    ] = None,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
) -> None:
    """Remove releases with their files; those with a tag stay."""
    from fedlearn.cli.environment import open_records
    from fedlearn.store.releases import ReleaseStore, select_removable

    if (keep_last is None) == (not releases):
        raise ConfigError("name the releases to remove, or give --keep-last N; one of the two")
    with open_records(config, runs_dir=runs_dir) as (database, _):
        store = ReleaseStore(database)
        if keep_last is None:
            due = [store.find(each) for each in releases or ()]
        else:
            due = select_removable(store.list_all(), keep_last=keep_last)
        store.remove([each.signed.id for each in due], even_tagged=False)
    for each in due:
        typer.echo(f"removed {each.short_id}, {each.run} after {each.num_rounds} rounds")
    typer.echo(f"{len(due)} releases removed")


@app.command(epilog=examples("delete calm-otter-17", "delete calm-otter-17 --yes"))
def delete(
    run: RunArgument,
    *,
    with_releases: Annotated[
        bool,
        typer.Option("--with-releases", help="Remove its models from the registry as well."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without it, only print what would be deleted.")
    ] = False,
    output: Output = None,
    config: MaybeConfig = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Delete a run: its checkpoints, the updates of its clients, and its records.

    Writes a certificate with the digest of each file, signed, which is also in the audit log.
    Privacy that was charged stays charged. Backups are not touched.
    """
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.core.clock import SystemClock
    from fedlearn.core.files import require_writable, write_durably
    from fedlearn.deployment.deletion import delete_run, format_certificate, plan_deletion

    path = output or Path(f"{run}.deletion.json")
    if yes:
        require_writable(path, raises=StoreError)
    file = find_operator_file(who, coordinator, here=config or runs_dir, is_here=True)
    if file is not None:
        from fedlearn.deployment.record_orders import DeleteRun
        from fedlearn.deployment.remote import RemoteDesk

        order = DeleteRun(run=run, with_releases=with_releases, is_certain=yes)
        (found,) = RemoteDesk.open(file, address=coordinator).carry_out(order)
    else:
        from fedlearn.cli.environment import open_records

        with open_records(config, runs_dir=runs_dir) as (database, _):
            if yes:
                found = delete_run(
                    database, run, with_releases=with_releases, clock=SystemClock()
                ).values()
            else:
                found = plan_deletion(database, run).values()
    if not yes:
        typer.echo(_describe_plan(run, found, with_releases=with_releases))
        return
    write_durably(path, format_certificate(found).encode(), raises=StoreError)
    typer.echo(f"{run} is deleted; the certificate is {path}")


def _describe_plan(run: str, plan: "Line", *, with_releases: bool) -> str:
    fate = "will be removed, too" if with_releases else "stay; --with-releases removes them"
    size = f"{len(plan['files'])} files, {plan['num_bytes'] / 1e6:.1f} MB"
    lines = [
        f"{run}: {size}, and all records would be deleted for good",
        *(f"  {path}" for path in plan["files"]),
    ]
    if plan["num_releases"]:
        lines.append(f"{plan['num_releases']} releases in the registry {fate}")
    return "\n".join([*lines, f"`fedlearn delete {run} --yes` does it"])
