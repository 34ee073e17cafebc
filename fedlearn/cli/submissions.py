"""The commands for the queue of a service of many runs.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from fedlearn.cli.options import (
    SERVICE_TOML,
    AsOperator,
    CoordinatorAddress,
    DataDir,
    Json,
    MaybeService,
    Overrides,
    examples,
)

app = typer.Typer()

QueuedName: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, as `fedlearn queue` lists it.")
]


@app.command(
    epilog=examples(
        "submit experiment.toml --name tumours-1",
        "submit experiment.toml --name tumours-2 --after tumours-1 --set client.epochs=3",
        "submit tumours.toml --name tumours-3 --after tumours-2 --from tumours-2",
        "submit tumours.toml --study tumours",
        "submit urgent.toml --priority 10 --config /etc/fedlearn/service.toml",
        "submit tumours.toml --study tumours --as ann.toml",
    )
)
def submit(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml", help="The configuration of the run.")
    ],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run; without it, one is drawn.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-1000, max=1000, metavar="N", help="Higher ones start first.")
    ] = 0,
    after: Annotated[
        str, typer.Option(metavar="RUN", help="Start only when this run of the queue is done.")
    ] = "",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="RUN|FILE",
            help="Start from the last model of a run, from that after a round (RUN@ROUND), or from "
            "a file of weights (.safetensors).",
        ),
    ] = "",
    study: Annotated[
        str,
        typer.Option(metavar="STUDY", help="The study of the run; only its clients take part."),
    ] = "",
    overrides: Overrides = None,
    config: MaybeService = None,
    data_dir: DataDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Queue a run on a service, which starts it when its turn has come.

    The experiment is checked completely and its own code is imported, which must stay where it is.
    Where clients are served and runs are recorded is the service's: the experiment leaves it out.
    From another machine, its bundle and a file of weights travel; other code and files that it
    names are those of the coordinator's machine.
    """
    from fedlearn.cli.desk import find_operator_file

    is_here = SERVICE_TOML.exists()
    path = find_operator_file(who, coordinator, here=config or data_dir, is_here=is_here)
    if path is not None:
        from fedlearn.config.reading import read_text
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.shipping import SubmitRun
        from fedlearn.deployment.travelling import TravellingBundle, find_bundle, join_files
        from fedlearn.rounds.scheduling import WEIGHTS_SUFFIX

        toml, changed = read_text(experiment), tuple(overrides or ())
        bundle = find_bundle(experiment, toml, changed)
        weights = Path(start) if start.endswith(WEIGHTS_SUFFIX) else None
        order = SubmitRun(
            file=experiment.name,
            toml=toml,
            overrides=changed,
            name=name,
            study=study,
            priority=priority,
            after=after,
            start=start if weights is None else weights.name,
            bundle=None if bundle is None else TravellingBundle.of(bundle),
        )
        content = join_files(weights, bundle)
        (queued,), _ = RemoteDesk.open(path, address=coordinator).exchange(order, content=content)
        typer.echo(f"{queued['run']} is queued: {queued['waits_for'] or 'it starts'}")
        return
    from fedlearn.cli.desk import open_operator
    from fedlearn.config import load, load_service
    from fedlearn.deployment.submission import SubmitOptions, submit
    from fedlearn.rounds.scheduling import explain_waits, parse_start
    from fedlearn.store.queue import RunQueue

    named = () if name is None else (f"name={json.dumps(name)}",)
    file = config or SERVICE_TOML
    service, tree = load_service(file), load(experiment, overrides=[*(overrides or ()), *named])
    with open_operator(file, is_service=True, begins=True, data_dir=data_dir) as operator:
        queue = RunQueue(operator.database, operator.clock)
        run = submit(
            queue,
            tree,
            service,
            options=SubmitOptions(
                priority=priority, after=after, start_from=parse_start(start), study=study
            ),
            data_dir=operator.places.addresses.data_dir,
        )
        waits = explain_waits(queue.list())
    typer.echo(f"{run.name} is queued: {waits.get(run.name, 'it starts')}")


@app.command()
def queue(
    *,
    as_json: Json = False,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the runs of a service's queue, and what each one waits for."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.cli.tables import queue_table
    from fedlearn.deployment.run_orders import ListQueue

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        runs = list(desk.carry_out(ListQueue()))
    if as_json:
        for run in runs:
            typer.echo(json.dumps(run))
    elif runs:
        typer.echo(queue_table(runs))
    else:
        typer.echo("the queue is empty; `fedlearn submit` queues a run")


@app.command(epilog="Example: fedlearn cancel calm-otter-17")
def cancel(
    run: QueuedName,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Take a run out of the queue, or end it if it is running; it keeps its committed rounds."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.run_orders import CancelRun

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(CancelRun(run=run))
    said = "cancelled" if found["is_over"] else "being ended"
    typer.echo(f"{run} is {said}; `fedlearn retry` undoes it")


@app.command(epilog="Example: fedlearn retry calm-otter-17")
def retry(
    run: QueuedName,
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Queue a run again that failed or was cancelled; it continues after its last checkpoint."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.run_orders import RetryRun

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        (found,) = desk.carry_out(RetryRun(run=run))
    typer.echo(f"{run} is queued again: {found['waits_for'] or 'it starts'}")


@app.command(
    epilog=examples(
        'schedule experiment.toml --name nightly --cron "0 2 * * *" --timezone Europe/Berlin',
        'schedule counts.toml --name weekly --cron "30 6 * * MON" --study tumours',
    )
)
def schedule(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml", help="The configuration of the runs.")
    ],
    *,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the schedule; its runs are NAME-1, NAME-2.")
    ],
    cron: Annotated[
        str,
        typer.Option(
            metavar="TIMES",
            help="Minute, hour, day of month, month and day of week: cron's syntax.",
        ),
    ],
    timezone: Annotated[
        str, typer.Option(metavar="ZONE", help="The time zone of these times.")
    ] = "UTC",
    study: Annotated[str, typer.Option(metavar="STUDY", help="The study of the runs.")] = "",
    priority: Annotated[
        int, typer.Option(min=-1000, max=1000, metavar="N", help="Higher ones start first.")
    ] = 0,
    overrides: Overrides = None,
    config: MaybeService = None,
    data_dir: DataDir = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Queue a run again and again; the service does it when the time has come.

    A time that is missed while no service runs counts once. While a run of the schedule is queued
    or running, no other one is queued.
    """
    from fedlearn.cli.desk import find_operator_file
    from fedlearn.core.clock import utc

    is_here = SERVICE_TOML.exists()
    path = find_operator_file(who, coordinator, here=config or data_dir, is_here=is_here)
    if path is not None:
        from fedlearn.config.reading import read_text
        from fedlearn.deployment.remote import RemoteDesk
        from fedlearn.deployment.shipping import ScheduleRuns
        from fedlearn.deployment.travelling import TravellingBundle, find_bundle, join_files

        toml, changed = read_text(experiment), tuple(overrides or ())
        bundle = find_bundle(experiment, toml, changed)
        order = ScheduleRuns(
            file=experiment.name,
            toml=toml,
            overrides=changed,
            name=name,
            study=study,
            priority=priority,
            cron=cron,
            timezone=timezone,
            bundle=None if bundle is None else TravellingBundle.of(bundle),
        )
        desk, content = RemoteDesk.open(path, address=coordinator), join_files(None, bundle)
        (made,), _ = desk.exchange(order, content=content)
        typer.echo(f"{name} is first due at {utc(made['due_unix_s'])}")
        return
    from fedlearn.cli.desk import open_operator
    from fedlearn.config import load, load_service
    from fedlearn.core.recurrence import Recurrence
    from fedlearn.deployment import submission
    from fedlearn.store.queue import RunQueue

    recurrence = Recurrence(cron=cron, timezone=timezone)
    named = f"name={json.dumps(name)}"
    file = config or SERVICE_TOML
    service, tree = load_service(file), load(experiment, overrides=[*(overrides or ()), named])
    with open_operator(file, is_service=True, begins=True, data_dir=data_dir) as operator:
        created = submission.schedule(
            RunQueue(operator.database, operator.clock),
            tree,
            service,
            recurrence=recurrence,
            options=submission.SubmitOptions(priority=priority, study=study),
            data_dir=operator.places.addresses.data_dir,
        )
    typer.echo(f"{name} is first due at {utc(created.due_unix_s)}")


@app.command()
def schedules(
    *,
    as_json: Json = False,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """List the runs that are queued again and again, and when each is next due."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.core.clock import utc
    from fedlearn.deployment.shipping import ListSchedules
    from fedlearn.experiment.layout import table_text

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        found = list(desk.carry_out(ListSchedules()))
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
    elif found:
        header = ("schedule", "cron", "time zone", "study", "next due", "last run")
        rows = [
            (
                each["name"],
                each["cron"],
                each["timezone"],
                each["study"] or "-",
                utc(each["due_unix_s"]),
                each["last_run"] or "-",
            )
            for each in found
        ]
        typer.echo(table_text([header, *rows]))
    else:
        typer.echo("no schedules; `fedlearn schedule` makes one")


@app.command(epilog="Example: fedlearn unschedule nightly")
def unschedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a schedule.")],
    *,
    config: MaybeService = None,
    who: AsOperator = None,
    coordinator: CoordinatorAddress = None,
) -> None:
    """Remove a schedule; the runs that it has queued stay."""
    from fedlearn.cli.desk import open_desk
    from fedlearn.deployment.shipping import Unschedule

    with open_desk(config, default=SERVICE_TOML, who=who, coordinator=coordinator) as desk:
        list(desk.carry_out(Unschedule(name=name)))
    typer.echo(f"{name} is removed; `fedlearn cancel` ends a run of it")
