"""The commands of a deployment, for its coordinator, its clients and its operators.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.cli.options import (
    CLIENT_TOML,
    COORDINATOR_TOML,
    AsOperator,
    CoordinatorAddress,
    DataDir,
    DeploymentFile,
    FromPrevious,
    Insecure,
    Json,
    OfService,
    Output,
    Overrides,
    Restored,
    examples,
    find_deployment_file,
)
from fedlearn.errors import ConfigError

if TYPE_CHECKING:
    pass

app = typer.Typer()

ClientFolder: TypeAlias = Annotated[
    str, typer.Argument(metavar="FOLDER|NAME", help="The client's folder, or its name.")
]


@app.command(epilog=examples("init && fedlearn coordinator coordinator.toml", "init --client"))
def init(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="The file to write; without it, coordinator.toml or client.toml.",
        ),
    ] = None,
    *,
    client: Annotated[
        bool,
        typer.Option(
            "--client",
            help="Write a client's configuration instead: what it refuses, and when it may train.",
        ),
    ] = False,
) -> None:
    """Write a commented configuration of a coordinator, or of a client."""
    from fedlearn.deployment.starter import write_starter

    path = file or (CLIENT_TOML if client else COORDINATOR_TOML)
    write_starter(path, of_client=client)
    uses = f"join FILE --task … --config {path}" if client else f"coordinator {path}"
    typer.echo(f"{path}: read it, then `fedlearn {uses}`")


@app.command(
    epilog=examples(
        "coordinator coordinator.toml",
        "coordinator coordinator.toml --set num_rounds=50 --serve-on",
    )
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
            help="Keep running after the last round, and ask clients to come back later.",
        ),
    ] = False,
    from_previous: FromPrevious = False,
    restored: Restored = False,
    as_json: Json = False,
) -> None:
    """Coordinate a deployed run: serve its clients until it is done or stopped.

    A run that was stopped or killed continues where it was, even inside a round. SIGTERM parks
    the round.
    """
    from fedlearn.cli.environment import track_progress
    from fedlearn.config import load
    from fedlearn.core.log_format import LogFormat
    from fedlearn.core.logs import adopt_log_format
    from fedlearn.core.tracing import tracing
    from fedlearn.deployment.coordinator import coordinate
    from fedlearn.deployment.hosted_run import Start
    from fedlearn.deployment.places import Places

    start = Start.RESTORED if restored else Start.WHERE_IT_IS
    config = load(file, overrides=overrides or ())
    adopt_log_format(LogFormat(config.telemetry.log_format))
    places = Places.of(config, environ=os.environ, data_dir=data_dir)
    again = shlex.join(["fedlearn", "coordinator", str(file)])
    traces = tracing(
        config.telemetry.build_trace_settings(), role="coordinator", environ=os.environ
    )
    with traces, track_progress(as_json=as_json, resume=again) as progress:
        coordinate(
            config,
            places,
            insecure=insecure,
            serve_on=serve_on,
            start=Start.FROM_PREVIOUS if from_previous else start,
            progress=progress,
        )


@app.command(epilog=examples("serve service.toml"))
def serve(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The service's configuration: name, service, coordinator, store."
        ),
    ] = Path("service.toml"),
    *,
    data_dir: DataDir = None,
    insecure: Insecure = False,
    restored: Restored = False,
    as_json: Json = False,
) -> None:
    """Serve clients, and have the runs that `fedlearn submit` queues at work.

    Runs continue where they were after a stop or a kill, even inside a round. SIGTERM parks their
    rounds.
    """
    from fedlearn.config.serving import load_service
    from fedlearn.core.log_format import LogFormat
    from fedlearn.core.logs import adopt_log_format
    from fedlearn.core.tracing import tracing
    from fedlearn.deployment.places import Places
    from fedlearn.deployment.service import serve as serve_runs
    from fedlearn.experiment.progress import JsonProgress, PlainProgress, RunProgress

    config = load_service(file)
    adopt_log_format(LogFormat(config.telemetry.log_format))
    places = Places.of(config, environ=os.environ, data_dir=data_dir)

    def progress_of(name: str) -> RunProgress:
        if as_json:
            return JsonProgress(sys.stdout)
        return PlainProgress(sys.stdout, label=f"{name}: ")

    traces = config.telemetry.build_trace_settings()
    with tracing(traces, role="service", environ=os.environ):
        serve_runs(places, config, insecure=insecure, is_restored=restored, progress_of=progress_of)


@app.command(epilog="Example: fedlearn demo --rounds 5")
def demo(
    *,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of the run.")] = 10,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for all files; without it, a temporary one."),
    ] = None,
) -> None:
    """Run a coordinator and five clients on this machine, and compare them with a simulation."""
    from fedlearn.deployment.demo import run_demo

    run_demo(num_rounds=rounds, keep=keep, out=sys.stdout, environ=os.environ)


@app.command(
    epilog=examples(
        "invite clinic-a", "invite clinic-b --tag country=ch --tag kind=hospital -o b.invitation"
    )
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
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Write an invitation, with which one client can join, once."""
    from fedlearn.cli.desk import find_operator_file, open_operator

    path = output or Path(f"{name}.invitation")
    here = find_deployment_file()
    file = find_operator_file(who, coordinator, here=config, is_here=here.exists())
    if file is None:
        with open_operator(config or here, is_service=False, begins=True) as operator:
            invited = operator.invite(name, tags=tags or (), path=path, insecure=insecure)
        expires_utc = invited.expires_utc
    else:
        from fedlearn.cli.operators import write_invitation
        from fedlearn.deployment.people_orders import InviteClient
        from fedlearn.deployment.remote import RemoteDesk

        if insecure:
            raise ConfigError("--insecure is for a coordinator on this machine; leave it out")
        order = InviteClient(name=name, tags=tuple(tags or ()))
        desk = RemoteDesk.open(file, address=coordinator)
        expires_utc = write_invitation(desk, order, path)
    typer.echo(f"{path}: hand it to {name} over a channel you trust; it works once")
    typer.echo(f"it ends at {expires_utc}; `fedlearn join {path}` uses it")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client.")],
    *,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Refuse a client from now on, and cancel its invitation if it is unused."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.people_orders import RevokeClient

    with open_desk(config, default=None, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(RevokeClient(name=name))
    if found["client_id"] is None:
        typer.echo(f"the invitation of {name} has ended; it never joined")
    else:
        typer.echo(f"{name} (client {found['client_id']}) is refused from now on")


@app.command(epilog=examples("roster", "roster -o deployment.roster"))
def roster(*, output: Output = None, config: DeploymentFile = None) -> None:
    """Write the identity keys of all clients, for their users to compare and to pin.

    Without it, clients trust the keys that the coordinator sends first.
    """
    from fedlearn.cli.desk import open_operator
    from fedlearn.cli.tables import KEY_HEADER, key_row
    from fedlearn.experiment.layout import table_text

    path = output or Path("clients.roster")
    with open_operator(config or find_deployment_file(), is_service=False) as operator:
        clients = operator.roster(path).clients
    typer.echo(table_text([KEY_HEADER, *(key_row(*each) for each in sorted(clients.items()))]))
    typer.echo(f"{path}: have each client's user compare its line with `fedlearn pins NAME` there,")
    typer.echo(
        "then hand it to all; `fedlearn join FILE --roster` believes these keys and no others, and "
        f'takes part in rounds that it draws: set secure_aggregation.roster to "{path}"'
    )


@app.command()
def clients(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Count the rounds of this run of a service; without it, of all."
        ),
    ] = None,
    *,
    as_json: Json = False,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the enrolled clients with their rounds, and the open invitations."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.cli.tables import members_table
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.people_orders import ListClients

    with open_desk(config, default=None, who=who, coordinator=coordinator) as desk:
        found = list(desk.carry_out(ListClients(run=run)))
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
    elif found:
        typer.echo(members_table(found, now_unix_s=SystemClock().unix_s()))
    else:
        typer.echo("no clients yet; `fedlearn invite NAME` invites one")


@app.command()
def rounds(
    run: OfService = None,
    *,
    last: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of rounds to list, the latest ones.")
    ] = 20,
    clients: Annotated[
        bool,
        typer.Option("--clients", help="Also list the clients that did not report, and why."),
    ] = False,
    trainers: Annotated[
        bool,
        typer.Option("--trainers", help="Also list the code that clients say they ran."),
    ] = False,
    as_json: Json = False,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the latest rounds of the deployed run."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.cli.tables import format_missed, rounds_table, trainers_table
    from fedlearn.deployment.run_orders import ListRounds

    order = ListRounds(run=run, last=last, clients=clients, trainers=trainers)
    with open_desk(config, default=None, who=who, coordinator=coordinator) as desk:
        found = list(desk.carry_out(order))
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
    elif found:
        typer.echo(rounds_table(found))
        if clients and any(each["clients"] for each in found):
            typer.echo(f"\n{format_missed(found)}")
        elif clients:
            typer.echo("\nevery client reported in them")
        if trainers:
            typer.echo(f"\n{trainers_table(found)}")
    else:
        typer.echo("no round is finished yet; `fedlearn why` shows what the run waits for")


@app.command()
def pause(
    run: OfService = None,
    *,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Let the deployed run finish its round, then wait for `fedlearn resume`."""
    control(config, "pause", run=run, who=who, coordinator=coordinator)


@app.command()
def abort(
    run: OfService = None,
    *,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """End the deployed run as failed, and keep its committed rounds."""
    control(config, "abort", run=run, who=who, coordinator=coordinator)


@app.command()
def why(
    run: OfService = None,
    *,
    as_json: Json = False,
    config: DeploymentFile = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Show what the deployed run is waiting for, client by client."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.run_orders import ExplainRun

    with open_desk(config, default=None, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(ExplainRun(run=run))
    if as_json:
        typer.echo(json.dumps(found["values"]))
    else:
        for line in found["lines"]:
            typer.echo(replace_unprintable(line))


@app.command(
    epilog=examples(
        "join clinic-a.invitation --task trainer.py:Trainer",
        "join clinic-a.invitation --task my_package.training:Trainer --home /var/lib/fedlearn",
        "join clinic-a.invitation --task trainer.py:Trainer --config client.toml",
        "join clinic-a.invitation --task trainer.py:Trainer --workers 4",
        "join clinic-a.invitation --config client.toml  # runs only approved bundles",
        "join clinic-a.invitation --check",
    )
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
            help="The trainer, or path/to/file.py:Class; it is called without arguments. Without "
            "it, the client takes part only in runs that ship a bundle.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the client's keys and state; without it, one named after the client.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What this client refuses and when it may train; `fedlearn init --client` writes "
            "one. Without it, the defaults.",
        ),
    ] = None,
    require_secure_aggregation: Annotated[
        bool,
        typer.Option(
            "--require-secure-aggregation",
            help="Refuse to send an update that the coordinator could read.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that share each training; without it, as --config says, or one.",
        ),
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Identity keys of the other clients, from `fedlearn roster`: secure aggregation "
            "trusts only these. Without it, it trusts the keys that the coordinator sends "
            "first.",
        ),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="New address of a coordinator that has moved; may be repeated. It is stored, and "
            "tried before the known addresses.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the address, TLS, clock, data, disk and --config, without joining.",
        ),
    ] = False,
) -> None:
    """Take part in a deployed run as a client, until interrupted.

    Typing this command is the consent to train on this machine's data.
    """
    from fedlearn.config import load_client
    from fedlearn.core.log_format import LogFormat
    from fedlearn.core.logs import adopt_log_format
    from fedlearn.deployment.join import join

    if check:
        from fedlearn.deployment.check_client import check_device

        check_device(invitation, task=task, home=home, config=config, addresses=address or ())
        return
    settings = load_client(config).override(
        num_workers=workers, require_secure_aggregation=require_secure_aggregation
    )
    adopt_log_format(LogFormat(settings.telemetry.log_format))
    ended_in_order = join(
        invitation,
        task=task,
        home=home,
        config=settings,
        roster=roster,
        addresses=address or (),
    )
    if not ended_in_order:
        raise typer.Exit(RUN_FAILED)


@app.command(epilog=examples("rotate clinic-a", "rotate /var/lib/fedlearn"))
def rotate(client: ClientFolder) -> None:
    """Replace a client's keys and certificate, on its machine; the client may be running.

    The old identity key signs the new one, so other clients accept it. If a key may have been
    stolen, use `fedlearn revoke` and a new invitation instead.
    """
    from fedlearn.deployment.known_keys import find_client_home
    from fedlearn.identity.lineage import fingerprint

    home = find_client_home(client, environ=os.environ)
    enrolment = home.keys.request_rotation()
    key = fingerprint(enrolment.identity.public_key)
    typer.echo(f"{enrolment.invitation.name}: the keys with {key} will be replaced when the client")
    typer.echo("connects; one that runs does so at once, or when its secure aggregation is over")


@app.command(epilog=examples("pins clinic-a", "pins clinic-a --forget 3"))
def pins(
    client: ClientFolder,
    *,
    forget: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            min=0,
            help="Accept a new key from this client, whose old one is lost; ask its owner first. "
            "Stop the client first.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the identity keys that a client trusts in secure aggregation, its own first."""
    from fedlearn.cli.tables import KEY_HEADER, key_row
    from fedlearn.core.messages import ClientId
    from fedlearn.deployment.known_keys import find_client_home, forget_pin, load_known_keys
    from fedlearn.experiment.layout import table_text
    from fedlearn.identity.lineage import fingerprint
    from fedlearn.identity.rosters import KnownKey

    home = find_client_home(client, environ=os.environ)
    if forget is not None:
        forget_pin(home, ClientId(forget))
        typer.echo(f"the key of client {forget} is forgotten: the next one seen of it is pinned")
        return
    enrolment, pins = load_known_keys(home)
    name, lineage = enrolment.invitation.name, enrolment.lineage
    own = KnownKey(name=name, key=lineage.key, num_rotations=lineage.num_rotations)
    keys = [(enrolment.client_id, own), *sorted(pins.clients.items())]
    if as_json:
        for number, known in keys:
            values = {"client_id": number, "name": known.name, "identity_key": known.key.hex()}
            more = {"fingerprint": fingerprint(known.key), "num_rotations": known.num_rotations}
            typer.echo(json.dumps(values | more))
        return
    source = "the roster" if pins.roster else "the coordinator"
    places = ["this client", *[source] * len(pins.clients)]
    rows = [(*key_row(*each), place) for each, place in zip(keys, places, strict=True)]
    typer.echo(table_text([(*KEY_HEADER, "from"), *rows]))


def control(
    config: Path | None,
    wanted: Literal["resume", "pause", "abort"],
    *,
    run: str | None,
    who: Path | None,
    coordinator: str | None,
) -> None:
    """Ask a coordinator to resume, pause or abort a run, unless it is done.

    ``run`` is one of a service, by default the only one at work.
    """
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.run_orders import AbortRun, PauseRun, ResumeRun

    kinds = {"resume": ResumeRun, "pause": PauseRun, "abort": AbortRun}
    with open_desk(config, default=None, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(kinds[wanted](run=run))
    name = found["run"]
    if found["is_done"]:
        typer.echo(f"{name} is done; nothing to {wanted}")
        return
    said = {
        "resume": f"{name} continues",
        "pause": f"{name} pauses when its round is finished",
        "abort": f"{name} is being ended",
    }
    late = "no coordinator is alive: the next one will know"
    typer.echo(said[wanted] if found["is_heard"] else late)


def check_service(config: Path, overrides: Sequence[str]) -> None:
    """Print the configuration of a service of many runs, for ``fedlearn check``."""
    from fedlearn.config import load_service, render

    if overrides:
        raise ConfigError(f"--set: {config} is the file of a service, which is changed in the file")
    typer.echo(render(load_service(config)).removesuffix("\n"))


def is_service(config: Path) -> bool:
    """Whether a configuration file is that of a service of many runs; it may be missing."""
    from fedlearn.config.reading import read

    return config.exists() and "service" in read(config)[0]
