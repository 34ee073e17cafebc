"""The commands as a user types them: arguments, options and their help texts.

Everything heavy is behind :mod:`fedlearn.cli.commands`, which each command imports when it
runs: torch and what needs it take a second, and ``fedlearn --help`` is there in a quarter.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from fedlearn.cli import deployed
from fedlearn.cli.failures import Reporter
from fedlearn.cli.logs import configure_logs
from fedlearn.cli.options import (
    COORDINATOR_TOML,
    ConfigFile,
    DataDir,
    Json,
    Output,
    Overrides,
    RunArgument,
    RunsDir,
)
from fedlearn.transport.grpc_environment import prepare_for_grpc

# Where rich is installed, typer escapes "[required]" for its markup, which is off here: without
# this, help shows the backslash.
typer.core.HAS_RICH = False

_EPILOG = """\b
On data that come with it, each in less than a minute:
  fedlearn simulate
  fedlearn demo

\b
Exit codes: 0 done, 2 bad configuration or input, 3 a run failed,
130 interrupted.
--debug, anywhere, or FEDLEARN_DEBUG=1 shows tracebacks.

\b
Environment: FEDLEARN_STORE_URL, FEDLEARN_RUNS_DIR, FEDLEARN_DATA_DIR.
"""

app = typer.Typer(
    name="fedlearn",
    help="Federated learning on PyTorch: simulate, deploy, look at the runs, compare them.",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode=None,  # plain help: the same everywhere, and rich is not imported for it
    pretty_exceptions_enable=False,  # main tells of errors
)

Experiment: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="EXPERIMENT.toml",
        help="The configuration; without it, the main job on the digits.",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer's signature)
    if wanted:
        typer.echo(f"fedlearn {version('fedlearn')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 (its callback does it)
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog="""\b
Examples:
  fedlearn simulate
  fedlearn simulate experiment.toml --set client.epochs=3 --set algorithm.name=fedprox
  fedlearn simulate --rounds 50 --workers 2 --name first-try
  fedlearn simulate --json | jq .accuracy
"""
)
def simulate(
    *,
    experiment: Experiment = None,
    overrides: Overrides = None,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run; without it, one is drawn.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that train.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rounds of the run.")
    ] = None,
    centralized: Annotated[
        bool,
        typer.Option("--centralized", help="Train the same model on the pooled data instead."),
    ] = False,
) -> None:
    """Run a federated simulation and record it."""
    from fedlearn.cli import commands

    settings = _settings(name=name, workers=workers, rounds=rounds, centralized=centralized)
    commands.do_simulate(
        experiment,
        overrides=[*(overrides or ()), *settings],
        places=commands.Places(runs_dir=runs_dir, data_dir=data_dir),
        as_json=as_json,
    )


def _settings(
    *, name: str | None, workers: int | None, rounds: int | None, centralized: bool
) -> Iterator[str]:
    """Yield the override that each option stands for."""
    if name is not None:
        yield f"name={json.dumps(name)}"  # quoted, since a name may look like a number
    if workers is not None:
        yield f"engine.num_workers={workers}"
    if rounds is not None:
        yield f"num_rounds={rounds}"
    if centralized:
        yield "centralized=true"


@app.command(
    epilog="""\b
Examples:
  fedlearn check experiment.toml
  fedlearn check --set cohort.num_wanted=20 > experiment.toml
"""
)
def check(
    *,
    experiment: Experiment = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
) -> None:
    """Print a configuration as it would run; run nothing."""
    from fedlearn.cli import commands

    places = commands.Places(runs_dir=None, data_dir=data_dir)
    commands.do_check(experiment, overrides=overrides or (), places=places)


@app.command()
def runs(*, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List all runs."""
    from fedlearn.cli import commands

    commands.do_runs(places=commands.Places(runs_dir=runs_dir), as_json=as_json)


@app.command()
def show(run: RunArgument, *, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Print all about a run."""
    from fedlearn.cli import commands

    commands.do_show(run, places=commands.Places(runs_dir=runs_dir), as_json=as_json)


@app.command(epilog="Example: fedlearn compare calm-otter-17 brisk-heron-42 --target 0.9")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The first run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The second run.")],
    *,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE", help="Metric both race to; without it, the worse of their bests."
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print two runs side by side."""
    from fedlearn.cli import commands

    commands.do_compare((a, b), target=target, places=commands.Places(runs_dir=runs_dir))


@app.command(
    epilog="""\b
Examples:
  fedlearn resume calm-otter-17
  fedlearn resume
"""
)
def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Name of a simulated run; without it, the deployed run that is paused.",
            show_default=False,
        ),
    ] = None,
    *,
    config: ConfigFile = COORDINATOR_TOML,
    from_previous: Annotated[
        bool,
        typer.Option("--from-previous", help="Drop the last checkpoint first: it is damaged."),
    ] = False,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
) -> None:
    """Go on with a run that was interrupted, or with the deployed run that is paused.

    A simulated run was killed, interrupted or failed; it goes on from its last commit, and
    ends as if nothing had happened.
    """
    if run is None:
        deployed.control(config, "run")
        return
    from fedlearn.cli import commands

    places = commands.Places(runs_dir=runs_dir, data_dir=data_dir)
    commands.do_resume(run, places=places, as_json=as_json, from_previous=from_previous)


@app.command(epilog="Example: fedlearn plot calm-otter-17 brisk-heron-42 --output both.png")
def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="One run, or several.")],
    *,
    output: Output = None,
    runs_dir: RunsDir = None,
) -> None:
    """Draw the curves of runs as PNG."""
    from fedlearn.cli import commands

    commands.do_plot(runs, output=output, places=commands.Places(runs_dir=runs_dir))


@app.command()
def report(run: RunArgument, *, output: Output = None, runs_dir: RunsDir = None) -> None:
    """Write one HTML file about a run."""
    from fedlearn.cli import commands

    commands.do_report(run, output=output, places=commands.Places(runs_dir=runs_dir))


@app.command(epilog="Example: fedlearn export calm-otter-17 --output model.safetensors")
def export(
    run: RunArgument,
    *,
    output: Output = None,
    last: Annotated[
        bool, typer.Option("--last", help="The last weights instead of the best.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there already.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a run's weights as safetensors."""
    from fedlearn.cli import commands

    places = commands.Places(runs_dir=runs_dir)
    commands.do_export(run, output=output, last=last, force=force, places=places)


app.add_typer(deployed.app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: What follows the program's name; ``None`` takes the process's.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    reporter = _reporter(given, os.environ)
    configure_logs(debug=reporter.debug, quiet=reporter.rank > 0)
    prepare_for_grpc(os.environ, verbosity="ERROR")  # or every stranger at a port writes a line
    command = typer.main.get_command(app)
    try:
        with _only_rank_0_speaks(reporter.rank):
            code = command.main(
                args=[each for each in given if each != "--debug"],
                prog_name="fedlearn",
                standalone_mode=False,
            )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the boundary: one of three)
        return reporter.report(error)
    return code if isinstance(code, int) else 0


def _reporter(arguments: Sequence[str], environ: Mapping[str, str]) -> Reporter:
    """Read what failures are told by: also where the arguments cannot be parsed."""
    debug = "--debug" in arguments or environ.get("FEDLEARN_DEBUG", "0") not in ("", "0")
    rank = int(environ.get("RANK", "0"))
    return Reporter(as_json="--json" in arguments and rank == 0, debug=debug, rank=rank)


@contextlib.contextmanager
def _only_rank_0_speaks(rank: int) -> Iterator[None]:
    """Discard what the other workers of torchrun print."""
    if rank == 0:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
