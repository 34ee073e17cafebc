"""The commands about a deployment: its coordinator, its clients, and what operators do.

As in :mod:`fedlearn.cli.app`, what takes long to import is imported by the command that runs.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from fedlearn.cli.options import (
    CLIENT_TOML,
    COORDINATOR_TOML,
    ConfigFile,
    DataDir,
    Insecure,
    Json,
    Output,
    Overrides,
)

app = typer.Typer()

ClientFolder: TypeAlias = Annotated[
    str, typer.Argument(metavar="FOLDER|NAME", help="The client's folder, or its name.")
]


@app.command(
    epilog="""\b
Examples:
  fedlearn init && fedlearn coordinator coordinator.toml
  fedlearn init --client
"""
)
def init(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="The file to write; without it, coordinator.toml or client.toml.",
            show_default=False,
        ),
    ] = None,
    *,
    client: Annotated[
        bool,
        typer.Option("--client", help="Of a client: what it refuses, and when it may train."),
    ] = False,
) -> None:
    """Write a commented configuration of a coordinator, or of a client."""
    from fedlearn.cli import operations

    if client:
        operations.do_init_client(file or CLIENT_TOML)
    else:
        operations.do_init(file or COORDINATOR_TOML)


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
    restored: Annotated[
        bool,
        typer.Option("--restored", help="All comes from a backup: drop what clients sent since."),
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
        restored=restored,
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


@app.command(
    epilog="""\b
Examples:
  fedlearn roster
  fedlearn roster -o deployment.roster
"""
)
def roster(*, output: Output = None, config: ConfigFile = COORDINATOR_TOML) -> None:
    """Write the identity keys of all clients, for their users to compare and to pin.

    Without it, clients believe the keys that the coordinator tells them first.
    """
    from fedlearn.cli import operations

    operations.do_roster(output, config=config)


@app.command()
def clients(*, as_json: Json = False, config: ConfigFile = COORDINATOR_TOML) -> None:
    """List the enrolled clients, and who is invited and has not joined."""
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
  fedlearn join clinic-a.invitation --task trainer.py:Trainer --config client.toml
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
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What this client refuses and when it may train; `fedlearn init --client` writes "
            "one. Without it, the defaults.",
            show_default=False,
        ),
    ] = None,
    require_secure_aggregation: Annotated[
        bool,
        typer.Option(
            "--require-secure-aggregation",
            help="Refuse to send an update that the coordinator could read.",
        ),
    ] = False,
    roster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Identity keys of the other clients, from `fedlearn roster`: these are believed "
            "in secure aggregation and no others. Without it, those that the coordinator tells.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Look at address, TLS, clock, data, disk and --config; join nothing.",
        ),
    ] = False,
) -> None:
    """Take part in a deployed run as a client, until interrupted.

    Typing this command is the consent to train on this machine's data.
    """
    from fedlearn.cli import operations

    operations.do_join(
        invitation,
        task=task,
        home=home,
        config=config,
        require_secure_aggregation=require_secure_aggregation,
        roster=roster,
        check=check,
    )


@app.command(
    epilog="""\b
Examples:
  fedlearn rotate clinic-a
  fedlearn rotate /var/lib/fedlearn
"""
)
def rotate(client: ClientFolder) -> None:
    """Replace a client's keys and certificate, on its machine; the client may be running.

    The old identity key signs the new one, so other clients go on with it. For a key that
    somebody else may have, use `fedlearn revoke` and a new invitation instead.
    """
    from fedlearn.cli import operations

    operations.do_rotate(client)


@app.command(
    epilog="""\b
Examples:
  fedlearn pins clinic-a
  fedlearn pins clinic-a --forget 3
"""
)
def pins(
    client: ClientFolder,
    *,
    forget: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            min=0,
            help="Accept the next key of this client, whose old one is lost: ask its owner first. "
            "The client must not run meanwhile.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the identity keys that a client believes in secure aggregation, its own first."""
    from fedlearn.cli import operations

    operations.do_pins(client, forget=forget, as_json=as_json)


def control(config: Path, wanted: Literal["run", "pause", "abort"]) -> None:
    """Tell the coordinator of ``config`` to run, pause or abort."""
    from fedlearn.cli import operations

    operations.do_control(wanted, config=config)
