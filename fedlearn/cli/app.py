"""The commands for simulations and for the records of runs, and the entry point.

Each command imports what it needs when it runs: importing torch takes a second, and
``fedlearn --help`` a quarter of one.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click import Command

from fedlearn.cli import (
    bundles,
    dashboard,
    deployed,
    models,
    operators,
    parallel,
    records,
    studies,
    submissions,
)
from fedlearn.cli.failures import OUTPUT_CLOSED, RUN_FAILED, report_error
from fedlearn.cli.options import (
    AsOperator,
    CoordinatorAddress,
    DataDir,
    DeploymentFile,
    ExperimentFile,
    Force,
    FromPrevious,
    Json,
    Output,
    Overrides,
    RunArgument,
    RunsDir,
    examples,
    find_deployment_file,
)
from fedlearn.core.log_format import LOG_FORMAT_VARIABLE, LogFormat
from fedlearn.core.logs import adopt_log_format, configure_logs
from fedlearn.errors import ConfigError
from fedlearn.transport.grpc_environment import prepare_for_grpc

if TYPE_CHECKING:
    from fedlearn.experiment.site import Site

# If rich is installed, typer escapes "[required]" for rich's markup. The markup is off here, so the
# help would show the backslash.
typer.core.HAS_RICH = False

_EPILOG = """\b
On built-in data, each in less than a minute:
  fedlearn simulate
  fedlearn demo

\b
Exit codes: 0 done, 2 bad configuration or input, 3 a run failed,
4 the privacy budget is spent, 130 interrupted, 141 standard output was closed.
--debug, anywhere, or FEDLEARN_DEBUG=1 shows tracebacks.
--log-format text or json, anywhere, or FEDLEARN_LOG_FORMAT chooses how the log is written.

\b
Environment: FEDLEARN_STORE_URL, FEDLEARN_RUNS_DIR, FEDLEARN_DATA_DIR, FEDLEARN_OPERATOR.
"""

_LOG_FORMAT_OPTION = "--log-format"

app = typer.Typer(
    name="fedlearn",
    help="Federated learning on PyTorch: simulate, deploy, inspect and compare runs.",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode=None,  # plain help: the same everywhere, and rich is not imported for it
    pretty_exceptions_enable=False,  # main reports errors
)


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
    epilog=examples(
        "simulate",
        "simulate experiment.toml --set client.epochs=3 --set algorithm.name=fedprox",
        "simulate --rounds 50 --workers 2 --name first-try",
        "simulate --json | jq .accuracy",
    )
)
def simulate(
    *,
    experiment: ExperimentFile = None,
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
    from fedlearn.cli.environment import build_site, stop_on_sigterm, track_progress
    from fedlearn.config import load
    from fedlearn.experiment.simulate import run_config

    settings = {
        "name": None if name is None else json.dumps(name),  # quoted: it may look like a number
        "engine.num_workers": workers,
        "num_rounds": rounds,
        "centralized": "true" if centralized else None,
    }
    given = (f"{key}={value}" for key, value in settings.items() if value is not None)
    config = load(experiment, overrides=[*(overrides or ()), *given])
    adopt_log_format(LogFormat(config.telemetry.log_format))
    with stop_on_sigterm(), track_progress(as_json=as_json) as progress:
        run_config(config, build_site(config, progress, runs_dir=runs_dir, data_dir=data_dir))


@app.command(
    epilog=examples(
        "statistics plan.toml",
        "statistics plan.toml --set secure_aggregation.mode=complete --name ages",
        "statistics plan.toml --json | jq .rows",
    )
)
def statistics(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.toml", help="The tables, and the statistics to compute."),
    ],
    *,
    overrides: Overrides = None,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run; without it, one is drawn.")
    ] = None,
) -> None:
    """Compute statistics over simulated clients' tables, without pooling them.

    Prints a table; progress goes to standard error. `fedlearn coordinator` serves the same plan to
    real clients.
    """
    from fedlearn.cli.environment import build_site, stop_on_sigterm, track_progress
    from fedlearn.config import load
    from fedlearn.config.data import NoDataSection
    from fedlearn.config.tables import has_plan
    from fedlearn.errors import ConfigError
    from fedlearn.experiment.simulate import run_config

    given = () if name is None else (f"name={json.dumps(name)}",)
    config = load(plan, overrides=[*(overrides or ()), *given])
    if not has_plan(config.model_dump()):
        raise ConfigError(
            f"{plan}: there are no statistics; list them as [[statistics]], or run an experiment: "
            f"`fedlearn simulate {plan}`"
        )
    if isinstance(config.data, NoDataSection):
        raise ConfigError(
            f'{plan}: data.source is "none", since the clients have the tables; serve the plan to '
            f"them: `fedlearn coordinator {plan}`"
        )
    with (
        stop_on_sigterm(),
        track_progress(as_json=as_json, stream=sys.stderr) as progress,
    ):
        here = build_site(config, progress, runs_dir=runs_dir, data_dir=data_dir)
        found = run_config(config, here).statistics()
    assert found is not None  # the run is done
    typer.echo(found.to_json() if as_json else str(found))


@app.command(
    epilog=examples("check experiment.toml", "check --set cohort.num_wanted=20 > experiment.toml")
)
def check(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
) -> None:
    """Print a configuration as it would run; run nothing."""
    if experiment is not None and deployed.is_service(experiment):
        deployed.check_service(experiment, overrides or ())
        return
    from fedlearn.assembly import (
        build_algorithm,
        build_deployment,
        build_secure_plan,
        load_roster_draw,
    )
    from fedlearn.assembly.plan import require_fitting_model
    from fedlearn.cli.environment import build_site
    from fedlearn.config import load, render
    from fedlearn.config.data import NoDataSection
    from fedlearn.experiment.layout import table_text
    from fedlearn.experiment.privacy import build_components
    from fedlearn.experiment.simulate import resolve_config

    config = load(experiment, overrides=overrides or ())
    # Secure aggregation comes first: it also applies to a deployment whose other settings cannot
    # be simulated.
    served, facts = config.resolve(num_clients=None), list[tuple[str, str]]()
    if config.privacy.is_on:  # the noise depends on the clients, so the run must be built
        components = build_components(
            config, data_dir=build_site(config, data_dir=data_dir).addresses.data_dir
        )
        plan, privacy = components.secure, components.privacy
        assert privacy is not None
        typer.echo(f"# {privacy.mode_text}")
        noise = f"{privacy.noise_multiplier:.4g} times the clip, {privacy.noise_text}"
        facts += [("noise", noise)]
    else:
        plan = build_secure_plan(served, served.straggler_policy(), build_algorithm(served))
    if plan is not None:
        facts += plan.explain()
    if plan is not None and (draw := load_roster_draw(served)) is not None:
        facts += [draw.explain(plan.parameters)]
    for line in table_text(facts).splitlines():
        typer.echo(f"# {line}")
    here = build_site(config, data_dir=data_dir)
    if isinstance(config.data, NoDataSection):  # it cannot be simulated, only deployed
        require_fitting_model(build_deployment(config, data_dir=here.addresses.data_dir))
        notes: Sequence[str] = ("a deployment: the coordinator has no data, the clients evaluate",)
    else:
        notes = resolve_config(config, here).notes
    for note in notes:
        typer.echo(f"# {note}")
    typer.echo(render(config).removesuffix("\n"))


@app.command(
    epilog=examples(
        "budget experiment.toml",
        "budget experiment.toml --set privacy.epsilon=2 --output budget.png",
    )
)
def budget(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
    output: Output = None,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print what a configuration's privacy costs by round; run nothing.

    With privacy.epsilon, it finds the noise that is needed; with privacy.noise_multiplier,
    the epsilon that results. Earlier rounds that were charged to the same clients count.
    """
    from fedlearn.cli.environment import build_site, has_runs
    from fedlearn.config import load
    from fedlearn.core.json_values import format_json
    from fedlearn.errors import ConfigError
    from fedlearn.experiment.privacy import build_components, load_earlier_charges

    config = load(experiment, overrides=overrides or ())
    if not config.privacy.is_on:
        raise ConfigError('privacy.mode is "off", so there is no budget; set it to "central"')
    here = build_site(config, runs_dir=runs_dir, data_dir=data_dir)
    components = build_components(config, data_dir=here.addresses.data_dir)
    before = {}
    if has_runs(here):
        with here.database() as database:
            before = load_earlier_charges(components, database)
    from fedlearn.experiment.budget import draw_forecast, forecast_privacy

    found = forecast_privacy(components, before=before)
    typer.echo(format_json(found.facts()) if as_json else found.render())
    if output is not None:
        draw_forecast(found, output)


@app.command(epilog=examples("audit experiment.toml", "audit experiment.toml --canaries 1000"))
def audit(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    canaries: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of made-up clients or examples: more give a sharper bound."
        ),
    ] = 2000,
    confidence: Annotated[
        float, typer.Option(metavar="P", help="Confidence of the bound, below 1.")
    ] = 0.95,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Attack a configuration's privacy: run it with canaries and guess which took part.

    Canaries are made-up clients or examples. Prints the lower bound on epsilon that the guesses
    prove, next to the claim, and how likely the attack would have caught less noise. Keeps
    nothing and charges no budget. Exit code 3: the claim is refuted.
    """
    from fedlearn.cli.environment import build_site
    from fedlearn.config import load
    from fedlearn.core.json_values import format_json
    from fedlearn.experiment.audit import audit as audited
    from fedlearn.experiment.progress import choose_printer

    config = load(experiment, overrides=overrides or ())
    with Path(os.devnull).open("w") as nowhere:
        here = build_site(config, choose_printer(nowhere, as_json=True), data_dir=data_dir)
        found = audited(config, here, num_canaries=canaries, confidence=confidence)
    typer.echo(format_json(found.facts()) if as_json else found.render())
    if found.is_refuted:
        raise typer.Exit(RUN_FAILED)


data_app = typer.Typer(help="Look at the data of a configuration.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command(
    epilog=examples(
        "data inspect experiment.toml",
        "data inspect --set data.partition.alpha=0.1 --picture clients.png",
    )
)
def inspect(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw clients and labels as a PNG, too."),
    ] = None,
    max_clients: Annotated[
        int | None,
        typer.Option(
            "--max-clients",
            min=1,
            metavar="N",
            help="Number of clients whose examples are read, evenly spread; without it, all, or "
            "1,000 virtual ones.",
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Print how a configuration's clients differ in examples and labels; train nothing.

    With --json, a line for each client whose examples were read, then one with the summary.
    """
    from fedlearn.cli.environment import build_site, terminal_width
    from fedlearn.config import load
    from fedlearn.core.json_values import format_json
    from fedlearn.experiment.figures import write_png
    from fedlearn.experiment.inspection import draw_inspection, render_inspection

    config = load(experiment, overrides=overrides or ())
    directory = build_site(config, data_dir=data_dir).addresses.data_dir
    data = config.data.load_clients(seed=config.seed, data_dir=directory)
    found = data.inspect(max_clients=max_clients)
    if as_json:
        for place in range(len(found.client_ids)):
            typer.echo(format_json(found.client_figures(place)))
        typer.echo(format_json(found.figures()))
    else:
        typer.echo(render_inspection(found, width=terminal_width()))
    if picture is not None:
        write_png(draw_inspection(found), picture)


@app.command(epilog=examples("runs", "runs --adopt", "runs --as ann.toml"))
def runs(
    *,
    as_json: Json = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="First recover runs that have a folder but no database record.",
        ),
    ] = False,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List all runs."""
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import build_site, has_runs, terminal_width
    from fedlearn.cli.overview import runs_table
    from fedlearn.core.json_values import format_json

    here = build_site(runs_dir=runs_dir)
    path = find_operator_file(who, coordinator, here=runs_dir, is_here=has_runs(here))
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import ListRuns

        if adopt:
            raise ConfigError("--adopt is for runs on this machine; leave it out")
        found = list(RemoteDesk.open(path, address=coordinator).carry_out(ListRuns()))
    else:
        found = _list_runs(here, adopt=adopt)
    if as_json:
        for each in found:
            typer.echo(format_json(each))
    elif found:
        typer.echo(runs_table(found, width=terminal_width()))
    elif path is not None:
        typer.echo("no runs at the coordinator that you may see; `fedlearn submit` queues one")
    else:
        typer.echo(f"no runs in {here.addresses.runs_dir} yet; `fedlearn simulate` makes one")


def _list_runs(here: "Site", *, adopt: bool) -> list[dict[str, Any]]:  # Any: JSON
    """Describe the runs of this machine, and say on standard error what was or may be recovered."""
    from fedlearn.cli.environment import has_runs, require_runs
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.descriptions import describe_runs
    from fedlearn.store.queue import RunQueue

    if adopt:
        from fedlearn.experiment.adoption import adopt_all

        with require_runs(here).database() as database:
            for each in adopt_all(database):
                typer.echo(each.text(), err=True)
    if not has_runs(here):
        return []
    with here.database() as database:
        if lost := [] if adopt else database.orphans():
            notice = f"{len(lost)} more have a folder but no record: `fedlearn runs --adopt`"
            typer.echo(notice, err=True)
        histories = [
            (each, database.run(each.name).round_summaries(each.num_rounds))
            for each in database.runs()
        ]
        return list(describe_runs(histories, RunQueue(database, SystemClock()).list()))


@app.command(epilog=examples("show calm-otter-17", "show calm-otter-17 --clients"))
def show(
    run: RunArgument,
    *,
    clients: Annotated[
        bool,
        typer.Option(
            "--clients", help="Print what each client measured at the last evaluation, worst first."
        ),
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Print everything about a run."""
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.cli.environment import build_site, has_runs, open_runs, terminal_width
    from fedlearn.cli.overview import clients_lines, clients_table, format_facts, run_page
    from fedlearn.core.json_values import format_json
    from fedlearn.deployment.descriptions import describe_run

    is_here = has_runs(build_site(runs_dir=runs_dir))
    path = find_operator_file(who, coordinator, here=runs_dir, is_here=is_here)
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import ShowRun

        if clients:
            raise ConfigError("--clients is for runs on this machine; leave it out")
        (facts,) = RemoteDesk.open(path, address=coordinator).carry_out(ShowRun(run=run))
        width = terminal_width()
        typer.echo(format_json(facts) if as_json else format_facts(facts, width=width))
        return
    with open_runs([run], runs_dir=runs_dir) as [found]:
        if clients:
            measured, width = found.clients, terminal_width()
            lines = clients_lines(measured) if as_json else clients_table(measured, width=width)
            typer.echo(lines)
            return
        page = run_page(found, width=terminal_width())
        typer.echo(format_json(describe_run(found)) if as_json else page)


@app.command(epilog="Example: fedlearn compare calm-otter-17 brisk-heron-42 --target 0.9")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The first run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The second run.")],
    *,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE",
            help="Value of the metric that both runs race to; without it, the worse of their best "
            "values.",
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print two runs side by side."""
    from fedlearn.cli.environment import open_runs, terminal_width
    from fedlearn.experiment.comparison import compare

    with open_runs([a, b], runs_dir=runs_dir) as runs:
        first, second = ((run.record, run.history) for run in runs)
        spent = runs[0].privacy, runs[1].privacy
    compared = compare(first, second, target=target, spent=spent)
    typer.echo(compared.render(width=terminal_width()).removesuffix("\n"))


@app.command(
    epilog=examples("sweep sweep.toml", "sweep sweep.toml --jobs 4", "sweep sweep.toml --show")
)
def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="SWEEP.toml", help="What varies, and how many seeds."),
    ],
    *,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at once; without it, one for each core."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what was found so far; run nothing.")
    ] = False,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
) -> None:
    """Run variants of an experiment with several seeds, and compare them.

    The same command continues a sweep that was interrupted or killed, and adds new variants and
    seeds. The results are in the sweep's folder, too. Exit code 3: a run failed.
    """
    from fedlearn.cli.environment import build_site, stop_on_sigterm, terminal_width
    from fedlearn.config.sweep import load_sweep
    from fedlearn.core.json_values import format_json
    from fedlearn.experiment.sweep_results import load_sweep_results

    settings = load_sweep(file)
    name = settings.name or file.stem
    if show:
        results = load_sweep_results(build_site(runs_dir=runs_dir).addresses, name)
    else:
        from fedlearn.experiment.sweep import (
            plan_file,
            print_json_report,
            print_report,
            run_sweep,
        )

        if jobs is not None:
            settings = settings.model_copy(update={"jobs": jobs})
        with stop_on_sigterm():
            plan = plan_file(settings, file, runs_dir=runs_dir, data_dir=data_dir)
            report = print_json_report if as_json else print_report
            results = run_sweep(plan, report=report)
    typer.echo(format_json(results.facts()) if as_json else results.render(width=terminal_width()))
    if results.failed and not show:
        raise typer.Exit(RUN_FAILED)


@app.command(epilog=examples("resume calm-otter-17", "resume"))
def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Name of a simulated run, or with a service's --config of a run of the service; "
            "without it, the deployed run that is paused.",
        ),
    ] = None,
    *,
    config: DeploymentFile = None,
    from_previous: FromPrevious = False,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Resume a run that was interrupted, or the deployed run that is paused.

    A simulated run that was killed, interrupted or failed continues from its last commit, and
    ends as if it had never stopped.
    """
    from fedlearn.cli.desk import find_operator_file

    path = find_operator_file(who, coordinator, here=config or runs_dir or data_dir, is_here=True)
    is_elsewhere = path is not None
    if run is None or is_elsewhere or deployed.is_service(config or find_deployment_file()):
        deployed.control(config, "resume", run=run, who=who, coordinator=coordinator)
        return
    from fedlearn.cli.environment import build_site, require_runs, stop_on_sigterm, track_progress
    from fedlearn.experiment.simulate import resume

    with stop_on_sigterm(), track_progress(as_json=as_json) as progress:
        here = require_runs(build_site(None, progress, runs_dir=runs_dir, data_dir=data_dir))
        resume(run, here, from_previous=from_previous)


@app.command(epilog="Example: fedlearn rollback calm-otter-17 --to 40")
def rollback(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")],
    *,
    to: Annotated[int, typer.Option("--to", min=0, metavar="ROUND", help="Round to go back to.")],
    runs_dir: RunsDir = None,
) -> None:
    """Go back to an earlier checkpoint of a run, and forget the rounds after it.

    `store.keep_last`, `store.keep_every` and `store.keep_best` say which checkpoints are kept.
    Stop the coordinator of a deployed run first; its clients drop their pending updates. Privacy
    that was charged stays charged.
    """
    from fedlearn.cli.environment import build_site, require_runs
    from fedlearn.deployment.rollback import roll_back

    here = require_runs(build_site(runs_dir=runs_dir))
    with here.database() as database:
        roll_back(database, run, to=to, clock=here.clock)
        is_deployed = database.run(run).record.is_deployed
    again = "fedlearn coordinator" if is_deployed else f"fedlearn resume {run}"
    typer.echo(f"{run} is back after {to} rounds; `{again}` continues from there")


@app.command(epilog="Example: fedlearn extend calm-otter-17 --rounds 40")
def extend(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")],
    *,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, metavar="N", help="Total number of rounds.")
    ],
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Give a run more rounds than it started with.

    A running run, simulated or deployed, reads the new number before its last round. A finished run
    continues when you start it again. The configuration does not change. A run that stopped early,
    or whose privacy budget does not cover the rounds, is refused.
    """
    from fedlearn.cli.desk import find_operator_file

    path = find_operator_file(who, coordinator, here=runs_dir or data_dir, is_here=True)
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.run_orders import ExtendRun

        order = ExtendRun(run=run, rounds=rounds)
        (changed,) = RemoteDesk.open(path, address=coordinator).carry_out(order)
        typer.echo(f"{run} now has {changed['num_rounds']} rounds; the service continues it")
        return
    from fedlearn.cli.environment import build_site, require_runs
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.extension import extend, extend_queued
    from fedlearn.rounds.records import RunStatus
    from fedlearn.store.queue import RunQueue

    here = require_runs(build_site(runs_dir=runs_dir, data_dir=data_dir))
    clock = SystemClock()
    with here.database() as database:
        if extend_queued(database, run, num_rounds=rounds, clock=clock):
            typer.echo(f"{run} now has {rounds} rounds; it is in the queue")
            return
        of_service = run in {each.name for each in RunQueue(database, clock).list()}
        found = extend(
            database, run, num_rounds=rounds, data_dir=here.addresses.data_dir, clock=here.clock
        )
    again = f"fedlearn resume {run}"
    if found.is_deployed:
        again = "fedlearn serve" if of_service else "fedlearn coordinator"
    continuation = f"a running process continues by itself; otherwise `{again}` continues it"
    if found.status is not RunStatus.RUNNING:
        continuation = f"`{again}` continues it"
    typer.echo(f"{run} now has {found.num_rounds} rounds; {continuation}")


@app.command(epilog="Example: fedlearn plot calm-otter-17 brisk-heron-42 --output both.png")
def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="One or several runs.")],
    *,
    output: Output = None,
    runs_dir: RunsDir = None,
) -> None:
    """Draw the curves of runs as PNG."""
    from fedlearn.cli.environment import open_runs
    from fedlearn.experiment.plot import plot

    with open_runs(runs, runs_dir=runs_dir) as found:
        target = found[0].path / "curves.png" if len(found) == 1 else Path("curves.png")
        histories = [(run.record, run.history) for run in found]
        typer.echo(str(plot(histories, output or target)))


@app.command()
def report(run: RunArgument, *, output: Output = None, runs_dir: RunsDir = None) -> None:
    """Write a report about a run as one HTML file."""
    from fedlearn.cli.environment import open_runs

    with open_runs([run], runs_dir=runs_dir) as [found]:
        typer.echo(str(found.report(output)))


@app.command(epilog="Example: fedlearn export calm-otter-17 --output model.safetensors")
def export(
    run: RunArgument,
    *,
    output: Output = None,
    last: Annotated[
        bool, typer.Option("--last", help="Write the last weights instead of the best.")
    ] = False,
    force: Force = False,
    runs_dir: RunsDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Write a run's weights, or the result of a query, as safetensors.

    Weights are also recorded in the registry of models, signed: see `fedlearn models`.
    """
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.core.files import require_writable, write_durably
    from fedlearn.errors import ConfigError, StoreError

    path = output or Path(f"{run}.safetensors")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; give --force to replace it")
    require_writable(path, raises=StoreError)
    file = find_operator_file(who, coordinator, here=runs_dir, is_here=True)
    if file is not None:
        from fedlearn.deployment.record_orders import ExportRun
        from fedlearn.deployment.remote import RemoteDesk

        order = ExportRun(run=run, last=last)
        (line,), content = RemoteDesk.open(file, address=coordinator).exchange(order)
        name = line["release"]
    else:
        from fedlearn.cli.environment import open_runs
        from fedlearn.experiment.releases import export_run

        with open_runs([run], runs_dir=runs_dir) as [found]:
            content, release = export_run(found, best=not last)
        name = None if release is None else release.short_id
    write_durably(path, content, raises=StoreError)
    if name is not None:
        typer.echo(f"recorded as release {name}: `fedlearn models show {name}`", err=True)
    typer.echo(str(path))


app.add_typer(parallel.app)
app.add_typer(deployed.app)
app.add_typer(studies.app)
app.add_typer(submissions.app)
app.add_typer(bundles.app)
app.add_typer(records.app)
app.add_typer(operators.app, name="operator")
app.add_typer(models.app)
app.add_typer(dashboard.app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on ``arguments``, or the process's own, and return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    rank = int(os.environ.get("RANK", "0"))
    debug = "--debug" in given or os.environ.get("FEDLEARN_DEBUG", "0") not in ("", "0")
    level = logging.DEBUG if debug else logging.INFO
    configure_logs(level=level, quiet=rank > 0)
    command = _build_command()
    try:
        # These options are removed here, so that they may stand before or after the command.
        given = [each for each in given if each != "--debug"]
        log_format, rest = _take_log_format(given, os.environ)
        if log_format is not LogFormat.AUTO:
            configure_logs(level=level, quiet=rank > 0, log_format=log_format)
        # At gRPC's default verbosity, every stray connection to a port would log a line; its lines
        # are no JSON.
        is_json = log_format is LogFormat.JSON
        prepare_for_grpc(os.environ, verbosity="NONE" if is_json else "ERROR")
        with _only_rank_0_speaks(rank):
            code = command.main(
                args=list(rest),
                prog_name="fedlearn",
                # Otherwise typer would print errors and exit by itself.
                standalone_mode=False,
            )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the boundary: one of three)
        # The error may be in the arguments, so --json is looked up without parsing them.
        return report_error(error, as_json="--json" in given, debug=debug, rank=rank)
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return OUTPUT_CLOSED  # typer turns a broken pipe into SystemExit; there is no reader left
    return code if isinstance(code, int) else 0


@cache
def _build_command() -> Command:
    """Build the command line from the functions, once for a process that runs many commands."""
    return typer.main.get_command(app)


def _take_log_format(
    given: Sequence[str], environ: Mapping[str, str]
) -> tuple[LogFormat, Sequence[str]]:
    """Return the format of the log that the arguments or the environment name, and the rest."""
    place, name, rest = LOG_FORMAT_VARIABLE, environ.get(LOG_FORMAT_VARIABLE) or "auto", given
    for index, each in enumerate(given):
        option, has_value, value = each.partition("=")
        if option == _LOG_FORMAT_OPTION:
            end = index + (1 if has_value else 2)
            place, name = option, value if has_value else "".join(given[index + 1 : end])
            rest = [*given[:index], *given[end:]]
            break
    if name not in list(LogFormat):
        raise ConfigError(f"{place}: is {name!r}; choose one of {', '.join(LogFormat)}")
    return LogFormat(name), rest


@contextlib.contextmanager
def _only_rank_0_speaks(rank: int) -> Iterator[None]:
    """Discard what the other workers of torchrun print."""
    if rank == 0:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
