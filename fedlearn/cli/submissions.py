"""The commands for the queue of a service of many runs.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedlearn.cli.options import SERVICE_TOML, DataDir, Json, Overrides, examples

if TYPE_CHECKING:
    from fedlearn.store.queue import RunQueue

app = typer.Typer()

ServiceFile: TypeAlias = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The service's configuration.")
]
QueuedName: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, as `fedlearn queue` lists it.")
]


@app.command(
    epilog=examples(
        "submit experiment.toml --name tumours-1",
        "submit experiment.toml --name tumours-2 --after tumours-1 --set client.epochs=3",
        "submit urgent.toml --priority 10 --config /etc/fedlearn/service.toml",
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
    overrides: Overrides = None,
    config: ServiceFile = SERVICE_TOML,
    data_dir: DataDir = None,
) -> None:
    """Queue a run on a service, which starts it when its turn has come.

    The experiment is checked completely and its own code is imported, which must stay where it is.
    Where clients are served and runs are recorded is the service's: the experiment leaves it out.
    """
    from fedlearn.config import load, load_service
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.places import Places
    from fedlearn.deployment.submission import submit
    from fedlearn.rounds.scheduling import explain_waits
    from fedlearn.store.queue import RunQueue

    named = () if name is None else (f"name={json.dumps(name)}",)
    service, tree = load_service(config), load(experiment, overrides=[*(overrides or ()), *named])
    places = Places.of(service, environ=os.environ, data_dir=data_dir)
    with places.open_database() as database:
        queue = RunQueue(database, SystemClock())
        run = submit(
            queue,
            tree,
            service,
            priority=priority,
            after=after,
            data_dir=places.addresses.data_dir,
        )
        waits = explain_waits(queue.list())
    typer.echo(f"{run.name} is queued: {waits.get(run.name, 'it starts')}")


@app.command()
def queue(*, as_json: Json = False, config: ServiceFile = SERVICE_TOML) -> None:
    """List the runs of a service's queue, and what each one waits for."""
    from fedlearn.cli.tables import describe_queued, queue_table
    from fedlearn.rounds.scheduling import explain_waits

    with _open_queue(config) as queue:
        runs = queue.list()
    waits = explain_waits(runs)
    if as_json:
        for run in runs:
            typer.echo(json.dumps(describe_queued(run, waits)))
    elif runs:
        typer.echo(queue_table(runs, waits))
    else:
        typer.echo("the queue is empty; `fedlearn submit` queues a run")


@app.command(epilog="Example: fedlearn cancel calm-otter-17")
def cancel(run: QueuedName, *, config: ServiceFile = SERVICE_TOML) -> None:
    """Take a run out of the queue, or end it if it is running; it keeps its committed rounds."""
    with _open_queue(config) as queue:
        found = queue.cancel(run)
    is_over = found.state.is_over
    typer.echo(f"{run} is {'cancelled' if is_over else 'being ended'}; `fedlearn retry` undoes it")


@app.command(epilog="Example: fedlearn retry calm-otter-17")
def retry(run: QueuedName, *, config: ServiceFile = SERVICE_TOML) -> None:
    """Queue a run again that failed or was cancelled; it continues after its last checkpoint."""
    from fedlearn.rounds.scheduling import explain_waits

    with _open_queue(config) as queue:
        queue.retry(run)
        waits = explain_waits(queue.list())
    typer.echo(f"{run} is queued again: {waits.get(run, 'it starts')}")


@contextmanager
def _open_queue(config: Path) -> Iterator["RunQueue"]:
    """Open the queue of the service that a configuration file describes."""
    from fedlearn.config import load_service
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.places import Places
    from fedlearn.store.queue import RunQueue

    with Places.of(load_service(config), environ=os.environ).open_database() as database:
        yield RunQueue(database, SystemClock())
