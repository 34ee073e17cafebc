"""Configuration of the coordinator's own training: its data, optimizer and processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedlearn.config.components import (
    DeclaredSection,
    build_component,
    find_problem,
    kind,
    kinds,
    with_keys_of,
)
from fedlearn.config.section import Columns, PathText, Problem, Section
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Positive, Whole
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.mixtures import Mixture
from fedlearn.parallel.optimizers import AdamKin, Lars, MakesOptimizer, Rate, Sgd
from fedlearn.parallel.plan import Spread, TrainingPlan
from fedlearn.parallel.streams import Stream
from fedlearn.parallel.table_stream import TableFiles


@with_keys_of(TableFiles, given=("path", "feature_columns", "window_bytes"), label_column="label")
class FilesSection(Section):
    """Parquet or Arrow files that the coordinator trains on; they may be larger than memory."""

    path: PathText = Field(description="A file, or a directory of them.")
    feature_columns: Columns | Literal["all"] = Field(
        "all", description='Columns with the features, as data.feature_columns; "all": the others.'
    )
    weight: Positive = Field(
        1.0,
        description="Share of the examples that come from here, relative to the weights of other "
        "files, > 0.",
    )

    def table(self) -> TableFiles:
        """Return the files."""
        columns = None if self.feature_columns == "all" else self.feature_columns
        path = Path(self.path)
        return build_component(
            TableFiles, self, path=path, feature_columns=columns, window_bytes=_WINDOW_BYTES
        )


_ROUND_STEPS = 10
#: Size of the window within which examples are shuffled.
_WINDOW_BYTES = 256 << 20


class ServerTrainingSection(DeclaredSection):
    """The coordinator's own training, in addition to that of its clients."""

    optimizer: str = Field(description="Optimizer of the coordinator's own training.")
    every_rounds: Whole = Field(
        0, description="Rounds from one training of the coordinator to the next, >= 0; 0: none."
    )
    round_steps: Count = Field(_ROUND_STEPS, description="Steps of such a training, >= 1.")
    distil_steps: Whole = Field(
        0,
        description="Steps after each round that distil the clients' models into the global "
        "model, on the coordinator's examples (FedDF), >= 0; 0: none.",
    )
    share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description="Share of the clients in the table data whose examples the coordinator has, "
        "(0, 1]; a simulation sets them aside, so they do not train as clients.",
    )
    files: dict[str, FilesSection] = Field(
        {},
        description="Parquet or Arrow files to train on instead of the table data, by a name of "
        "your choice; several are mixed by their weights.",
    )
    num_readers: Whole = Field(
        0,
        description="Processes of each rank that prefetch batches, >= 0; 0: the rank reads them "
        "itself.",
    )
    checkpoint_every: Whole = Field(
        0,
        description="Steps between two checkpoints of a training, from which it resumes after a "
        "crash, >= 0; 0: it starts again.",
    )
    report_every: Count = Field(100, description="Steps between two reports, >= 1.")
    max_restarts: Whole = Field(
        3, description="How often the training's processes are restarted after a crash, >= 0."
    )

    @property
    def is_on(self) -> bool:
        """Whether the coordinator trains at all."""
        return self.has_steps or self.distil_steps > 0

    @property
    def has_steps(self) -> bool:
        """Whether it trains on labeled examples, before the first round or between rounds."""
        return bool(self.model_dump()["num_steps"]) or self.every_rounds > 0

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the plan refuses, keys without effect, and decay without an end."""
        yield from find_problem(lambda: self.plan(Seed(0)))
        values = self.model_dump()
        if self.every_rounds and values["decay"] != "none":
            text = (
                f'is "{values["decay"]}", which ends with num_steps, but every_rounds is '
                f'{self.every_rounds}; set it to "none"'
            )
            yield Problem(("decay", "every_rounds"), text)
        if self.distil_steps and values["decay"] != "none":
            text = (
                f'is "{values["decay"]}", which ends with num_steps, but each round takes '
                f'{self.distil_steps} distil_steps by the same rate; set it to "none"'
            )
            yield Problem(("decay", "distil_steps"), text)
        if values["final"] and values["decay"] == "none":
            text = f'is {values["final"]}, but decay is "none"; set decay, or leave it out'
            yield Problem(("final", "decay"), text)
        if values["scaling"] != "linear" and values["base_batch_size"] is None:
            text = (
                f'is "{values["scaling"]}", but no base_batch_size says from which batch the rate '
                "grows; give it, or leave scaling out"
            )
            yield Problem(("scaling",), text)
        if self.round_steps != _ROUND_STEPS and not self.every_rounds:
            text = f"is {self.round_steps}, but every_rounds is 0; set it, or leave round_steps out"
            yield Problem(("round_steps", "every_rounds"), text)
        if self.files and self.share != 1.0:
            text = (
                f"is {self.share}, but files are given to train on instead; remove one of the two"
            )
            yield Problem(("share", "files"), text)

    def plan(self, seed: Seed) -> TrainingPlan:
        """Build the training plan; raises ConfigError or ValueError if values contradict."""
        spread = build_component(Spread, self, mesh=build_component(Mesh, self))
        return build_component(
            TrainingPlan,
            self,
            optimizer=self._build_optimizer(),
            rate=build_component(Rate, self),
            spread=spread,
            seed=seed,
        )

    def stream(self, seed: Seed) -> Stream:
        """Open the files as one stream of examples, mixed by their weights.

        Raises:
            DataError: A file cannot be read, or the files differ in their columns.
        """
        streams = [
            section.table().stream(seed=seed.derive(name)) for name, section in self.files.items()
        ]
        if len(streams) == 1:
            return streams[0]
        weights = [section.weight for section in self.files.values()]
        return Mixture(streams, weights=weights, seed=seed.derive("mixture"))

    def _build_optimizer(self) -> MakesOptimizer:
        if self.optimizer == "sgd":
            return build_component(Sgd, self)
        if self.optimizer == "lars":
            return build_component(Lars, self)
        return build_component(AdamKin, self, decoupled=self.optimizer == "adamw")


_SHARED = (TrainingPlan, Rate, Spread, Mesh)

SERVER_TRAININGS = kinds(
    "optimizer",
    ServerTrainingSection,
    kind(
        "sgd",
        "Stochastic gradient descent.",
        Sgd,
        *_SHARED,
        learning_rate=0.1,
        batch_size=64,
        num_steps=0,
    ),
    kind(
        "adamw adam",
        "Adam, or AdamW.",
        AdamKin,
        *_SHARED,
        learning_rate=0.001,
        batch_size=64,
        num_steps=0,
    ),
    kind(
        "lars",
        "Layer-wise adaptive rates, for large batches.",
        Lars,
        *_SHARED,
        learning_rate=1.0,
        batch_size=64,
        num_steps=0,
    ),
    given=(
        *("decoupled", "seed", "mesh", "rate", "spread"),
        *("initial_loss_scale", "bucket_mbytes"),
    ),
)
