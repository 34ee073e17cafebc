"""The commands about a deployment: its coordinator, its clients, and what operators do.

As in :mod:`fedlearn.cli.app`, what takes long to import is imported by the command that runs.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedlearn.cli.options import (
    COORDINATOR_TOML,
    ConfigFile,
    DataDir,
    Insecure,
    Json,
    Output,
    Overrides,
)

app = typer.Typer()


@app.command(epilog="Example: fedlearn init && fedlearn coordinator coordinator.toml")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = (
        COORDINATOR_TOML
    ),
) -> None:
    """Write a commented configuration of a coordinator."""
    from fedlearn.cli import operations

    operations.do_init(file)


@app.command(
    epilog="""\b
Examples:
  fedlearn coordinator coordinator.toml
  fedlearn coordinator coordinator.toml --set num_rounds=50 --serve-on
"""
)
def coordinator(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The configuration; `fedlearn init` writes one.")
    ] = COORDINATOR_TOML,
    *,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    insecure: Insecure = False,
    serve_on: Annotated[
        bool,
        typer.Option(
            "--serve-on",
            help="Stay when the run is done, and tell clients to come back later.",
        ),
    ] = False,
    from_previous: Annotated[
        bool,
        typer.Option("--from-previous", help="Drop the last checkpoint first: it is damaged."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Coordinate a deployed run: serve its clients until it is done or told to stop.

    It goes on where it was stopped or killed, inside a round too. SIGTERM parks the round.
    """
    from fedlearn.cli import operations

    operations.do_coordinator(
        file,
        overrides=overrides or (),
        data_dir=data_dir,
        insecure=insecure,
        serve_on=serve_on,
        from_previous=from_previous,
        as_json=as_json,
    )


@app.command(epilog="Example: fedlearn demo --rounds 5")
def demo(
    *,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of the run.")] = 10,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to keep it all in; without it, a temporary one."),
    ] = None,
) -> None:
    """Run a coordinator and five clients on this machine, beside the simulation of the same."""
    from fedlearn.cli import operations

    operations.do_demo(rounds=rounds, keep=keep)


@app.command(
    epilog="""\b
Examples:
  fedlearn invite clinic-a
  fedlearn invite clinic-b --tag country=ch --tag kind=hospital -o b.invitation
"""
)
def invite(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client; unique.")],
    *,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="KEY=VALUE", help="A tag of the client; may be repeated."),
    ] = None,
    output: Output = None,
    insecure: Insecure = False,
    config: ConfigFile = COORDINATOR_TOML,
) -> None:
    """Write the file with which one client may join; it works once."""
    from fedlearn.cli import operations

    operations.do_invite(name, tags=tags or (), output=output, insecure=insecure, config=config)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client.")],
    *,
    config: ConfigFile = COORDINATOR_TOML,
) -> None:
    """Refuse a client from now on, and end an invitation that it has not used."""
    from fedlearn.cli import operations

    operations.do_revoke(name, config=config)


@app.command()
def clients(*, as_json: Json = False, config: ConfigFile = COORDINATOR_TOML) -> None:
    """List the enrolled clients."""
    from fedlearn.cli import operations

    operations.do_clients(config=config, as_json=as_json)


@app.command()
def rounds(
    *,
    last: Annotated[int, typer.Option(min=1, metavar="N", help="So many rounds, the latest.")] = 20,
    as_json: Json = False,
    config: ConfigFile = COORDINATOR_TOML,
) -> None:
    """List the latest rounds of the deployed run."""
    from fedlearn.cli import operations

    operations.do_rounds(last=last, config=config, as_json=as_json)


@app.command()
def pause(*, config: ConfigFile = COORDINATOR_TOML) -> None:
    """Let the deployed run finish its round, then wait for `fedlearn resume`."""
    control(config, "pause")


@app.command()
def abort(*, config: ConfigFile = COORDINATOR_TOML) -> None:
    """End the deployed run as failed; what is committed stays."""
    control(config, "abort")


@app.command()
def why(*, as_json: Json = False, config: ConfigFile = COORDINATOR_TOML) -> None:
    """Tell what the deployed run is waiting for, client by client."""
    from fedlearn.cli import operations

    operations.do_why(config=config, as_json=as_json)


@app.command(
    epilog="""\b
Examples:
  fedlearn join clinic-a.invitation --task trainer.py:Trainer
  fedlearn join clinic-a.invitation --task my_package.training:Trainer --home /var/lib/fedlearn
  fedlearn join clinic-a.invitation --check
"""
)
def join(
    invitation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The invitation from the coordinator's operator.")
    ],
    *,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="The trainer, or path/to/file.py:Class; it is called without arguments.",
            show_default=False,
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the client's keys and state; without it, one named after the client.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Look at address, TLS, clock, data and disk; join nothing."),
    ] = False,
) -> None:
    """Take part in a deployed run as a client, until interrupted.

    Typing this command is the consent to train on this machine's data.
    """
    from fedlearn.cli import operations

    operations.do_join(invitation, task=task, home=home, check=check)


def control(config: Path, wanted: Literal["run", "pause", "abort"]) -> None:
    """Tell the coordinator of ``config`` to run, pause or abort."""
    from fedlearn.cli import operations

    operations.do_control(wanted, config=config)
