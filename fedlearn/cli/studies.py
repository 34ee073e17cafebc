"""The commands for studies, and for the consent of a client's owner.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedlearn.cli.deployed import ClientFolder
from fedlearn.cli.options import (
    SERVICE_TOML,
    AsOperator,
    CoordinatorAddress,
    Json,
    MaybeService,
    examples,
)

if TYPE_CHECKING:
    from fedlearn.deployment.orders import Line

app = typer.Typer()
study_app = typer.Typer(help="Create studies, invite clients to them, and see what they spent.")
app.add_typer(study_app, name="study")

StudyName: TypeAlias = Annotated[
    str, typer.Argument(metavar="STUDY", help="Name of a study, as `fedlearn study list` lists it.")
]
Clients: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="CLIENT...", help="Names of clients.")
]


@study_app.command(
    epilog=examples(
        "study create tumours --epsilon 8 --delta 1e-5 --data wards --data clinics",
        'study create devices --description "Keyboards, no budget"',
    )
)
def create(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="Name of the new study.")],
    *,
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="ε", help="Largest ε of all its releases about one data set."),
    ] = None,
    delta: Annotated[float | None, typer.Option(metavar="δ", help="The δ of that ε.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of a data set; may be repeated."),
    ] = None,
    description: Annotated[
        str, typer.Option(metavar="TEXT", help="What it is about, for people.")
    ] = "",
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Create a study: a set of clients and a privacy budget that its runs share."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.study_orders import CreateStudy

    order = CreateStudy(
        study=name,
        description=description,
        epsilon=epsilon,
        target_delta=delta,
        data=tuple(dict.fromkeys(data or ())),
    )
    with open_desk(
        config, default=SERVICE_TOML, who=who, coordinator=coordinator, begins=True
    ) as desk:
        list(desk.carry_out(order))
    typer.echo(f"{name} is created; `fedlearn study invite {name} CLIENT...` invites clients")


@study_app.command("list")
def list_studies(
    *,
    as_json: Json = False,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List all studies."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.study_orders import ListStudies
    from fedlearn.experiment.layout import table_text
    from fedlearn.store.studies import Consent

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        found = list(desk.carry_out(ListStudies()))
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
    elif found:
        header = ("study", "state", "clients", "consent", "budget", "data", "description")
        rows = [
            (
                each["name"],
                "closed" if each["closed_utc"] else "open",
                str(len(each["members"])),
                str(sum(member["consent"] == Consent.GIVEN for member in each["members"])),
                _format_budget(each),
                ", ".join(each["data"]) or "any",
                replace_unprintable(each["description"]) or "-",
            )
            for each in found
        ]
        typer.echo(table_text([header, *rows]))
    else:
        typer.echo("no studies yet; `fedlearn study create` makes one")


@study_app.command(epilog="Example: fedlearn study show tumours")
def show(
    study: StudyName,
    *,
    as_json: Json = False,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Print a study: its clients and their consent, its runs, and the privacy that it spent."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.study_orders import ShowStudy
    from fedlearn.experiment.layout import facts_text

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(ShowStudy(study=study))
    if as_json:
        typer.echo(json.dumps(found))
        return
    closed = found["closed_utc"]
    facts = [
        ("study", f"{study} (closed at {closed})" if closed else study),
        ("about", replace_unprintable(found["description"])),
        ("created", f"{found['created_utc']} by {replace_unprintable(found['created_by'])}"),
        ("budget", _format_budget(found)),
        ("data", ", ".join(found["data"]) or "any"),
        *(("spent", f"{name}: ε {epsilon:.4g}") for name, epsilon in found["spent"].items()),
        *(("client", f"{each['client']}: {_format_consent(each)}") for each in found["members"]),
        *(("run", f"{run}: {state}") for run, state in found["runs"].items()),
    ]
    typer.echo(facts_text(facts, width=None))


@study_app.command(epilog="Example: fedlearn study invite tumours clinic-a clinic-b")
def invite(
    study: StudyName,
    clients: Clients,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Invite clients to a study; each takes part once its owner consents."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.study_orders import InviteToStudy

    order = InviteToStudy(study=study, clients=tuple(clients))
    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        list(desk.carry_out(order))
    typer.echo(f"invited to {study}: {', '.join(clients)}")
    typer.echo(f"each site consents with `fedlearn consent {study} CLIENT`, or in its policy")


@study_app.command(epilog="Example: fedlearn study remove tumours clinic-b")
def remove(
    study: StudyName,
    clients: Clients,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Remove clients from a study; they are asked for none of its tasks any more."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.study_orders import RemoveFromStudy

    order = RemoveFromStudy(study=study, clients=tuple(clients))
    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        list(desk.carry_out(order))
    typer.echo(f"removed from {study}: {', '.join(clients)}")


@study_app.command(epilog="Example: fedlearn study close tumours")
def close(
    study: StudyName,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Close a study whose runs are over: it has no further ones, and its records stay."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.study_orders import CloseStudy

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        list(desk.carry_out(CloseStudy(study=study)))
    typer.echo(f"{study} is closed")


@app.command(epilog=examples("consent tumours clinic-a", "consent tumours clinic-a --withdraw"))
def consent(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")],
    client: ClientFolder,
    *,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Withdraw the consent: work for the study ends.")
    ] = False,
) -> None:
    """Consent to a study, on the client's machine; the client may be running.

    It then takes part in the study's runs, if the coordinator's operator has invited it.
    """
    import os

    from fedlearn.deployment.known_keys import find_client_home

    home = find_client_home(client, environ=os.environ)
    home.set_study_consent(study, granted=not withdraw)
    words = "takes no part in" if withdraw else "takes part in"
    typer.echo(f"{client} {words} {study}; a client that runs tells it within a second")


def _format_consent(member: "Line") -> str:
    if not member["consent_utc"]:
        return "invited, has not consented yet"
    return f"consent {member['consent']} {member['consent_utc']}"


def _format_budget(study: "Line") -> str:
    if study["epsilon"] is None:
        return "none"
    return f"ε {study['epsilon']:g} at δ {study['target_delta']:g} per data set"
