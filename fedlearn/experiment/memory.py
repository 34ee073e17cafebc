"""Predicts the memory of the coordinator's own training: ``fedlearn memory``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedlearn import assembly
from fedlearn.assembly import build_server_task
from fedlearn.config import Config
from fedlearn.core.quantities import format_size
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.experiment.figures import RUN_COLORS, label_axes, new_figure, write_png
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.site import Site
from fedlearn.parallel.live_tensors import bytes_of
from fedlearn.parallel.memory import KINDS, Counted, Memory, predict, without_data

_MIB = 2**20


@dataclass(frozen=True)
class MemoryForecast:
    """The memory that the processes of a training need.

    Attributes:
        mesh: The mesh of processes, in words.
        stages: Memory of one process of each pipeline stage; the others of a stage need as much.
        storage: Bytes of all parameters.
    """

    mesh: str
    stages: Sequence[Memory]
    storage: int

    def facts(self) -> dict[str, object]:
        """Return the prediction as JSON values, in bytes."""
        stages = [{"stage": at, **asdict(each)} for at, each in enumerate(self.stages)]
        return {"mesh": self.mesh, "storage": self.storage, "stages": stages}

    def render(self) -> str:
        """Format the prediction as a table."""
        names = [*KINDS, "update", "peak"]
        rows = [("stage", *(name.replace("_", " ") for name in names))]
        for at, each in enumerate(self.stages):
            sizes = [getattr(each, name) for name in names]
            rows.append((str(at), *("?" if size is None else format_size(size) for size in sizes)))
        hosts = [
            f"stage {at}: {format_size(each.host)} of these in the host's memory"
            for at, each in enumerate(self.stages)
            if each.offloaded
        ]
        text = f"the model's parameters: {format_size(self.storage)}; a process of {self.mesh}:"
        return "\n".join([text, "", table_text(rows, values_right=True), *hosts])


def forecast_memory(config: Config, site: Site) -> MemoryForecast:
    """Predict the memory of the coordinator's own training, as configured.

    Raises:
        ConfigError: The model cannot be split as configured, or traced without data.
        DataError: Data are missing.
    """
    task = build_server_task(assembly.build_standalone(config, data_dir=site.addresses.data_dir))
    task = replace(task, make_model=without_data(task.make_model))
    task.require_fitting()
    features, labels = task.stream.batch(range(1))
    stages = predict(
        task.make_model, task.plan, features=features, labels=labels, objective=task.objective
    )
    storage = bytes_of(task.make_model().parameters())
    return MemoryForecast(str(task.plan.spread.mesh), stages, storage)


def forecast_memory_by_size(
    num_parameters: float, bytes_per_parameter: int, config: Config
) -> MemoryForecast:
    """Predict the memory of training a model from its number of parameters alone.

    Raises:
        ConfigError: The number of parameters or of bytes is not positive.
    """
    try:
        counted = Counted(
            num_parameters=round(num_parameters), bytes_per_parameter=bytes_per_parameter
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    plan = config.coordinator.training.plan(Seed(0))
    mesh = plan.spread.mesh
    found = counted.memory(optimizer=plan.optimizer, mesh=mesh)
    return MemoryForecast(str(mesh), [found], counted.storage)


def draw_forecast(forecast: MemoryForecast, path: Path) -> None:
    """Draw a PNG with one bar per stage, divided by kind of memory; an existing file is replaced.

    Raises:
        StoreError: The file cannot be written.
    """
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    places = [f"stage {at}" for at in range(len(forecast.stages))]
    bottoms = [0.0] * len(places)
    for name, color in zip(KINDS, RUN_COLORS, strict=False):
        sizes = [(getattr(each, name) or 0) / _MIB for each in forecast.stages]
        axes.bar(places, sizes, bottom=bottoms, label=name.replace("_", " "), color=color)
        bottoms = [below + size for below, size in zip(bottoms, sizes, strict=True)]
    label_axes(axes, f"Memory of each process: {forecast.mesh}", "", "MiB")
    write_png(figure, path)
