"""Apps shaped like Flower's examples, to be run by the migration guide and by Flower itself."""

import importlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedlearn.core.clock import VirtualClock
from fedlearn.core.randomness import Seed
from tests.grid import StockGrid

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "how-to" / "migrate-from-flower.md"
QUICKSTART, SHAPES = HERE / "quickstart", HERE / "flower_apps"
NUM_NODES, NUM_ROUNDS = 2, 1


def files_in(guide: str) -> dict[str, str]:
    """Return the files that a guide tells its reader to write, by name."""
    named = r"`([a-z_]+\.(?:py|toml))`[^`\n]*:\n\n```[a-z]+\n(.*?)```"
    return dict(re.findall(named, guide, re.DOTALL))


def migrate(app: Path, package: str, half: int, *, more: Mapping[str, str] | None = None) -> Path:
    """Change an app's server half (0) or client half (1) as the guide says, and return its folder.

    Args:
        app: The app's folder, which is modified.
        package: The app's package in that folder.
        half: The part of the guide.
        more: Files that replace the guide's.
    """
    files = files_in(GUIDE.read_text().split("## Keep your ServerApp", maxsplit=1)[half])
    project = app / "pyproject.toml"
    lines = project.read_text().splitlines()
    for line in files.pop("pyproject.toml").splitlines():
        name, has_value, value = line.partition(" = ")
        if has_value:
            lines = [each for each in lines if not each.startswith(f"{name} =")]
            table = "components" if name.endswith("app") else "config"
            value = value.replace("quickstart.", f"{package}.")
            lines.insert(lines.index(f"[tool.flwr.app.{table}]") + 1, f"{name} = {value}")
    project.write_text("\n".join(lines))
    for name, text in {**files, **(more or {})}.items():
        (app / package / name).write_text(text)
    return app


def with_tables(config: str, changes: str) -> str:
    """Replace the tables of a configuration by those of ``changes`` with the same root table."""
    roots = re.findall(r"(?m)^\[(\w+)", changes)
    blocks = re.split(r"(?m)^(?=\[)", config)
    return (
        "".join([each for each in blocks if each[1:].split("]")[0].split(".")[0] not in roots])
        + changes
    )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An app, and how to migrate its ServerApp to fedlearn.

    Attributes:
        name: Name of the run.
        module: Module of the ClientApp, with its package.
        folder: Folder of the app.
        is_list: Whether the model is a list of arrays, which has its own section in the guide.
        overrides: Overrides of the run's configuration.
        run_config: Flower's run config, which the ClientApp reads.
        train_config: The ``config`` of train messages, which the ClientApp reads.
        accuracy: Name of its accuracy metric.
    """

    name: str
    module: str
    folder: Path = SHAPES
    is_list: bool = False
    overrides: str = ""
    run_config: UserConfig = field(default_factory=dict)
    train_config: Mapping[str, float] = field(default_factory=dict)
    accuracy: str = "accuracy"

    @property
    def package(self) -> str:
        """The app's package."""
        return self.module.split(".")[0]

    def migrated(self, folder: Path) -> Path:
        """Copy the app and change its server half as the guide says."""
        app = shutil.copytree(
            self.folder, folder / self.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        project = app / "pyproject.toml"
        project.write_text(project.read_text().replace("NAME", self.name))
        guide, more = GUIDE.read_text(), dict[str, str]()
        if self.is_list:
            (tables,) = re.findall(r"take the place.*?```text\n(.*?)```", guide, re.DOTALL)
            more["run.toml"] = with_tables(files_in(guide)["run.toml"], tables)
        return migrate(app, self.package, 0, more=more)

    def make_model(self) -> nn.Module:
        """Build the model that a run starts from."""
        torch.manual_seed(Seed(0).derive("model").value)
        made: nn.Module
        if self.is_list:
            scope: dict[str, Any] = {}  # Any: whatever a program defines
            exec(files_in(GUIDE.read_text())["model.py"], scope)  # noqa: S102 - our own page
            made = scope["make_model"](4, 3 if self.name == "sklearn" else 1)
        elif self.name == "tabular":
            made = importlib.import_module(self.module).make_model()
        else:
            made = importlib.import_module("quickstart.task").Net()
        return made

    def stock_accuracy(self) -> float:
        """Run Flower's own FedAvg over the same nodes in this process; return the accuracy."""
        app: ClientApp = importlib.import_module(self.module).app
        grid = StockGrid(
            VirtualClock(),
            app,
            nodes={10 + each: each for each in range(NUM_NODES)},
            node_config={"num-partitions": NUM_NODES},
            run_config=self.run_config,
        )
        state = self.make_model().state_dict()
        arrays = [value.numpy() for value in state.values()]
        result = FedAvg().start(
            grid=cast("Grid", grid),  # it has all methods that a strategy calls
            initial_arrays=ArrayRecord(arrays) if self.is_list else ArrayRecord(state),
            num_rounds=NUM_ROUNDS,
            train_config=ConfigRecord({**self.train_config}),
        )
        accuracy = result.evaluate_metrics_clientapp[NUM_ROUNDS][self.accuracy]
        assert isinstance(accuracy, float)
        return accuracy


ALL = (
    Shape(
        name="pytorch",
        module="quickstart.client_app",
        folder=QUICKSTART,
        run_config={"local-epochs": 1, "batch-size": 16},
        train_config={"lr": 0.1},
        accuracy="eval_acc",
    ),
    Shape(name="sklearn", module="shapes.sklearn_app", is_list=True),
    Shape(
        name="numpy",
        module="shapes.numpy_app",
        is_list=True,
        overrides="model.args.num_classes=1",
    ),
    Shape(
        name="tabular",
        module="shapes.tabular_app",
        overrides="model.factory=shapes.tabular_app:make_model;metrics={accuracy={direction='max'}};"
        "early_stopping.metric=accuracy",
    ),
)
