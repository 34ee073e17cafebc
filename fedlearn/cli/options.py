"""Arguments and options that several commands share, with their help texts."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

RunArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, as `fedlearn runs` lists it.")
]
OfService: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Name of a run of a service; without it, the only one at work.",
    ),
]
ExperimentFile: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="EXPERIMENT.toml",
        help="The configuration; without it, the main job on the digits.",
    ),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the configuration, such as client.epochs=3; may be repeated.",
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line on standard output.")
]
RunsDir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--runs-dir", metavar="DIR", help="Directory of the runs."),
]
DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Directory of the data sets."),
]
Output: TypeAlias = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
DeploymentFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The coordinator's configuration; without it, coordinator.toml or service.toml.",
    ),
]
AsOperator: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--as",
        metavar="FILE",
        help="Give the command to a coordinator elsewhere, as the operator of this file; without "
        "it, FEDLEARN_OPERATOR, or the one in the home if there is no deployment here.",
    ),
]
CoordinatorAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Address of that coordinator; without it, those in the operator's file.",
    ),
]
MaybeService: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The service's configuration; without it, service.toml."
    ),
]
MaybeConfig: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The coordinator's configuration; without it, coordinator.toml or service.toml, "
        "if there is one.",
    ),
]
Insecure: TypeAlias = Annotated[
    bool,
    typer.Option("--insecure", help="Use no encryption, for tests on the loopback address only."),
]
Restored: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--restored",
        help="The database was restored from a backup: drop the updates that clients have sent "
        "since.",
    ),
]
FromPrevious: TypeAlias = Annotated[
    bool,
    typer.Option("--from-previous", help="Drop the last checkpoint first, because it is damaged."),
]


def examples(*commands: str) -> str:
    """Format the examples at the end of a command's help, one a line."""
    return "\n".join(["\b", "Examples:", *(f"  fedlearn {each}" for each in commands)])


#: Where the commands about a deployment look for its configuration.
COORDINATOR_TOML = Path("coordinator.toml")
#: Where the commands about a service of many runs look for its configuration.
SERVICE_TOML = Path("service.toml")
#: Where a client's own configuration is written, unless told otherwise.
CLIENT_TOML = Path("client.toml")


def find_deployment_file() -> Path:
    """Return where commands about any deployment look for its configuration.

    It is that of a service only if there is no other.
    """
    is_service = SERVICE_TOML.exists() and not COORDINATOR_TOML.exists()
    return SERVICE_TOML if is_service else COORDINATOR_TOML
