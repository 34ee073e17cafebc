"""The commands for the coordinator's own training: ``train`` and ``memory``.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlearn.cli.options import (
    DataDir,
    ExperimentFile,
    Force,
    Json,
    Output,
    Overrides,
    RunsDir,
    examples,
)
from fedlearn.errors import ConfigError

app = typer.Typer()

#: Overrides for commands without rounds, so that a cohort larger than the population is no error.
_NO_CLIENT_IS_ASKED = ("cohort.num_wanted=auto", "stragglers.min_reports=half")


@app.command(
    epilog=examples(
        "train experiment.toml --set coordinator.training.num_steps=1000",
        "train experiment.toml --set coordinator.training.replicate=2",
        "train experiment.toml --output model.safetensors",
        "train experiment.toml --weights base.safetensors --evaluate-every 100 --patience 5",
    )
    + "\n\n\b\nOver several processes or machines: torchrun ... -m fedlearn train EXPERIMENT.toml"
)
def train(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    output: Output = None,
    as_json: Json = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the training's files here, so that it can be extended; without it, they are "
            "in the runs directory and are removed at the end.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A safetensors file with the initial weights; without it, the model's own.",
        ),
    ] = None,
    evaluate_every: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Steps between evaluations on the test set; the best model is written. 0: no "
            "evaluations, and the last model is written.",
        ),
    ] = 0,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="End the training after N evaluations without improvement; without it, never.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Train the model in the coordinator, without clients, and write its weights.

    The table coordinator.training sets the steps, data and processes. The same command resumes
    an interrupted training from its last checkpoint. early_stopping.metric decides which model
    is best; early_stopping.target also ends the training.
    """
    from safetensors.torch import save

    from fedlearn.cli.environment import build_site
    from fedlearn.config import load
    from fedlearn.core.files import require_writable, write_durably
    from fedlearn.core.json_values import format_json
    from fedlearn.errors import StoreError
    from fedlearn.experiment.train import Request, train_alone
    from fedlearn.experiment.training_progress import training_progress
    from fedlearn.parallel.worker import end

    config = load(experiment, overrides=[*(overrides or ()), *_NO_CLIENT_IS_ASKED])
    config = config.resolve(num_clients=config.num_partitioned)
    here = build_site(config, runs_dir=runs_dir, data_dir=data_dir)
    path = output or Path("model.safetensors")
    # Only rank 0 writes. Check that it can before hours of training, not after them.
    if here.environ.get("RANK", "0") == "0":
        require_writable(path, raises=StoreError)
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already; give --force to replace it")
    report = training_progress(sys.stdout, as_json=as_json)
    request = Request(
        folder=folder, weights=weights, evaluate_every=evaluate_every, patience=patience
    )
    trained = train_alone(config, here, request, report=report)
    if trained is None:
        end()  # rank 0 has it
    write_durably(path, save(dict(trained.state.model)), raises=StoreError)
    found = {"steps": trained.state.step_num, **trained.metrics, "path": str(path)}
    if as_json:
        typer.echo(format_json({"event": "trained", **found}))
    else:
        typer.echo(", ".join(f"{name} {value}" for name, value in found.items()))


@app.command(
    epilog=examples(
        "memory experiment.toml",
        "memory experiment.toml --set coordinator.training.recompute=true",
        "memory --parameters 7e9 --bytes 2 --set coordinator.training.shard=8",
    )
)
def memory(
    *,
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    parameters: Annotated[
        float | None,
        typer.Option(metavar="N", help="Number of parameters, such as 7e9, instead of a model."),
    ] = None,
    num_bytes: Annotated[
        int,
        typer.Option(
            "--bytes", min=1, metavar="B", help="Bytes of each parameter, with --parameters."
        ),
    ] = 4,
    as_json: Json = False,
    output: Output = None,
    data_dir: DataDir = None,
) -> None:
    """Print the memory that a training of the coordinator needs, by process; train nothing.

    The table coordinator.training sets the batch, optimizer, precision and mesh. Activations are
    counted on tensors without data. With --output, also draws them as PNG.
    """
    from fedlearn.cli.environment import build_site
    from fedlearn.config import load
    from fedlearn.core.json_values import format_json
    from fedlearn.experiment.memory import draw_forecast, forecast_memory, forecast_memory_by_size

    config = load(experiment, overrides=[*(overrides or ()), *_NO_CLIENT_IS_ASKED])
    config = config.resolve(num_clients=config.num_partitioned)
    if parameters is None:
        found = forecast_memory(config, build_site(config, data_dir=data_dir))
    else:
        found = forecast_memory_by_size(parameters, num_bytes, config)
    typer.echo(format_json(found.facts()) if as_json else found.render())
    if output is not None:
        draw_forecast(found, output)
