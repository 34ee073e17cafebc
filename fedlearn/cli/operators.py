"""The commands about operators: who may give commands from other machines.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedlearn.cli.options import (
    SERVICE_TOML,
    AsOperator,
    CoordinatorAddress,
    Json,
    MaybeService,
    Output,
    examples,
)
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:
    from fedlearn.cli.desk import AnyDesk
    from fedlearn.deployment.order import Order
    from fedlearn.deployment.orders import Line

app = typer.Typer(
    help="Let people give commands from other machines, in roles.", no_args_is_help=True
)

OperatorName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the operator.")
]
RoleOption: TypeAlias = Annotated[
    str, typer.Option("--role", metavar="ROLE", help="viewer, researcher, site-admin or admin.")
]
StudyOption: TypeAlias = Annotated[
    str, typer.Option("--study", metavar="STUDY", help="Where the role holds; *: everywhere.")
]


@app.command(
    epilog=examples(
        "operator invite ann --role researcher --study tumours",
        "operator invite bob --role admin -o bob.operator",
    )
)
def invite(
    name: OperatorName,
    *,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="viewer, researcher, site-admin or admin; may be left out to give an operator "
            "another certificate.",
        ),
    ] = None,
    study: StudyOption = "*",
    output: Output = None,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Write an invitation, with which one operator can join, once."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.people_orders import InviteOperator

    path = output or Path(f"{name}.operator")
    order = InviteOperator(name=name, role=role, study=study)
    with open_desk(
        config, default=SERVICE_TOML, who=who, coordinator=coordinator, begins=True
    ) as desk:
        expires_utc = write_invitation(desk, order, path)
    typer.echo(f"{path}: hand it to {name} over a channel you trust; it works once")
    typer.echo(f"it ends at {expires_utc}; `fedlearn operator join {path}` uses it")


def write_invitation(desk: "AnyDesk", order: "Order", path: Path) -> str:
    """Carry out an order that invites, write the invitation, and return when it expires."""
    from fedlearn.core.files import require_writable, write_private

    # Before the order, which ends earlier invitations of that name.
    if path.exists():
        raise DeploymentError(f"{path} exists already; name another file with --output")
    require_writable(path, raises=DeploymentError)
    (line,) = desk.carry_out(order)
    write_private(path, line["invitation"].encode())
    return str(line["expires_utc"])


@app.command(
    epilog=examples("operator join ann.operator", "operator join ann.operator -o ann.toml")
)
def join(
    invitation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The invitation from an admin.")
    ],
    *,
    output: Output = None,
) -> None:
    """Make an operator's keys on this machine, and get their certificate.

    They are written to operator.toml in your configuration folder, which commands find by
    themselves, or to --output, which --as names.
    """
    from fedlearn.deployment.operator_file import default_path
    from fedlearn.deployment.remote import join

    path = output or default_path(os.environ)
    file = join(invitation, path)
    typer.echo(f"{path}: you are {file.name}; keep it secret")


@app.command(epilog=examples("operator renew", "operator renew --as ann.toml"))
def renew(*, who: AsOperator = None, coordinator: CoordinatorAddress = None) -> None:
    """Replace your keys and their certificate before it expires; you keep your roles.

    Copies of the old file are worthless afterwards.
    """
    from fedlearn.cli.desk import require_operator_file
    from fedlearn.core.clock import utc
    from fedlearn.deployment.remote import renew
    from fedlearn.identity.identity import expires_unix_s

    path = require_operator_file(who)
    file = renew(path, address=coordinator)
    end_utc = utc(expires_unix_s(file.certificate.encode("ascii")))
    typer.echo(f"{path}: the certificate of {file.name} lasts until {end_utc}")


@app.command("list")
def list_operators(
    *,
    as_json: Json = False,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the operators with their roles."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.people_orders import ListOperators
    from fedlearn.experiment.layout import table_text

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        found = list(desk.carry_out(ListOperators()))
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
        return
    if not found:
        typer.echo("no operators yet; `fedlearn operator invite NAME --role ROLE` invites one")
        return
    header = ("name", "status", "roles", "certificate ends", "added by", "added")
    rows = [
        (
            each["name"],
            each["status"],
            _format_roles(each) or "-",
            each["certificate_expires_utc"] or "-",
            replace_unprintable(each["added_by"]),
            each["added_utc"],
        )
        for each in found
    ]
    typer.echo(table_text([header, *rows]))


@app.command(epilog=examples("operator grant ann --role viewer --study tumours"))
def grant(
    name: OperatorName,
    *,
    role: RoleOption,
    study: StudyOption = "*",
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Give an operator a role."""
    from fedlearn.deployment.people_orders import GrantRole

    order = GrantRole(name=name, role=role, study=study)
    found = _change(order, config, who=who, coordinator=coordinator)
    typer.echo(f"{name} is {_format_roles(found)}")


@app.command(
    "revoke-grant", epilog=examples("operator revoke-grant ann --role viewer --study tumours")
)
def revoke_grant(
    name: OperatorName,
    *,
    role: RoleOption,
    study: StudyOption = "*",
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Take a role from an operator."""
    from fedlearn.deployment.people_orders import RevokeRole

    order = RevokeRole(name=name, role=role, study=study)
    found = _change(order, config, who=who, coordinator=coordinator)
    typer.echo(f"{name} is {_format_roles(found) or 'without a role'}")


@app.command(epilog=examples("operator revoke ann"))
def revoke(
    name: OperatorName,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Refuse an operator from now on, and end its roles and its invitation."""
    from fedlearn.deployment.people_orders import RevokeOperator

    _change(RevokeOperator(name=name), config, who=who, coordinator=coordinator)
    typer.echo(f"{name} is refused from now on")


def _change(
    order: "Order", config: Path | None, *, who: Path | None, coordinator: str | None
) -> "Line":
    """Carry out an order that changes an operator, and return its description."""
    from fedlearn.cli.desk import open_desk

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(order)
    return found


def _format_roles(operator: "Line") -> str:
    return ", ".join(f"{each['role']} in {each['study']}" for each in operator["roles"])
