"""Race synchronous and asynchronous rounds to a target accuracy in virtual time, and plot them.

    python simulations/asynchronous/race.py [asynchronous | slow_students] [--data-dir DIR]

Each method is the ``experiment.toml`` of that folder with overrides. In all of them sixty clients
train at a time, except for semi-synchronous rounds, where late clients continue during later
rounds.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib import colormaps
from matplotlib.figure import Figure

SIMULATIONS = Path(__file__).parents[1]
#: Virtual seconds and the metrics after each evaluation of a run.
Curve: TypeAlias = Sequence[tuple[float, Mapping[str, float]]]

#: FedAvg with FedBuff's server learning rate.
_FEDAVG = (
    *("algorithm.name=fedavgm", "algorithm.server_momentum=0.0"),
    "algorithm.server_learning_rate=2.0",
)
#: Resets the tables of the file that are about buffers.
_NO_BUFFERS = ('asynchronous={mode="off"}', "staleness={}")
_SYNCHRONOUS = (
    *(*_FEDAVG, "algorithm.weight_by_examples=true", *_NO_BUFFERS),
    *("num_rounds=60", "cohort.num_wanted=46"),
)
_OVER_SELECTED = (*_SYNCHRONOUS, "stragglers.over_selection=1.3", "stragglers.min_reports=1")
#: Overrides by name of the method; to add a method, add an entry.
ASYNCHRONOUS: Mapping[str, Sequence[str]] = {
    "synchronous, waits for all 60": (*_SYNCHRONOUS, "cohort.num_wanted=60"),
    "synchronous, first 46 of 60": _OVER_SELECTED,
    "synchronous, deadline 60 s": (*_OVER_SELECTED, "stragglers.deadline_s=60"),
    "synchronous, deadline 20 s": (*_OVER_SELECTED, "stragglers.deadline_s=20"),
    "synchronous, deadline 10 s": (
        *(*_OVER_SELECTED, "stragglers.deadline_s=10", "num_rounds=120"),
    ),
    "semi-synchronous, deadline 10 s": (
        *_OVER_SELECTED,
        *("cohort.num_wanted=15", "stragglers.deadline_s=10", "num_rounds=150"),
        *("late_updates.mode=keep", "staleness.max_staleness=30"),
    ),
    "FedBuff": (),
    "FedAsync": (
        *("algorithm.name=fedasync", "algorithm.mixing=0.6", "asynchronous.buffer_size=1"),
        *("staleness.max_staleness=300", "num_rounds=800", "evaluation.every_rounds=5"),
    ),
    "EASGD, deadline 20 s": (
        *("algorithm.name=easgd", "algorithm.elasticity=0.4", "algorithm.cohort_size=46"),
        *(*_NO_BUFFERS, "cohort.num_wanted=46", "stragglers.over_selection=1.3"),
        *("stragglers.min_reports=1", "stragglers.deadline_s=20"),
        *("num_rounds=400", "evaluation.every_rounds=5"),
    ),
}

_ALL = (*_SYNCHRONOUS, "cohort.num_wanted=60", "stragglers.min_reports=1")
SLOW_STUDENTS: Mapping[str, Sequence[str]] = {
    "synchronous, waits for all 60": _ALL,
    "synchronous, first 54 of 60": (
        *_OVER_SELECTED,
        *("cohort.num_wanted=54", "stragglers.over_selection=1.111"),
    ),
    "synchronous, first 46 of 60": _OVER_SELECTED,
    "synchronous, first 30 of 60": (
        *_OVER_SELECTED,
        *("cohort.num_wanted=30", "stragglers.over_selection=2.0", "num_rounds=120"),
    ),
    "synchronous, deadline 480 s": (*_ALL, "stragglers.deadline_s=480", "num_rounds=50"),
    "synchronous, deadline 360 s": (*_ALL, "stragglers.deadline_s=360"),
    "synchronous, deadline 240 s": (*_ALL, "stragglers.deadline_s=240", "num_rounds=100"),
    "synchronous, deadline 120 s": (*_ALL, "stragglers.deadline_s=120", "num_rounds=200"),
    "synchronous, deadline 60 s": (*_ALL, "stragglers.deadline_s=60", "num_rounds=200"),
    "synchronous, deadline 20 s": (
        *(*_ALL, "stragglers.deadline_s=20", "num_rounds=500", "evaluation.every_rounds=2"),
    ),
    "semi-synchronous, deadline 20 s": (
        *_OVER_SELECTED,
        *("cohort.num_wanted=15", "stragglers.deadline_s=20", "num_rounds=300"),
        *("late_updates.mode=keep", "staleness.max_staleness=100"),
    ),
    "FedBuff": (),
    "FedAsync": (
        *("algorithm.name=fedasync", "algorithm.mixing=0.6", "asynchronous.buffer_size=1"),
        *("staleness.max_staleness=800", "num_rounds=2800", "evaluation.every_rounds=10"),
    ),
    "EASGD, deadline 480 s": (
        *("algorithm.name=easgd", "algorithm.elasticity=0.4", "algorithm.cohort_size=46"),
        *(*_NO_BUFFERS, "cohort.num_wanted=46", "stragglers.over_selection=1.3"),
        *("stragglers.min_reports=1", "stragglers.deadline_s=480"),
        *("num_rounds=100", "evaluation.every_rounds=5"),
    ),
}


@dataclass(frozen=True)
class Race:
    """Methods to compare, and the accuracy that they race to.

    Attributes:
        methods: Overrides by name of the method.
        targets: Value to reach, by metric.
        num_smoothed: Number of consecutive evaluations whose mean must reach the target. A method
            that is evaluated often could otherwise reach it early by chance.
        lowest: Lower end of the plot's accuracy axis.
    """

    methods: Mapping[str, Sequence[str]]
    targets: Mapping[str, float]
    num_smoothed: int
    lowest: float


RACES: Mapping[str, Race] = {
    "asynchronous": Race(ASYNCHRONOUS, {"accuracy": 0.9}, num_smoothed=1, lowest=0.7),
    "slow_students": Race(
        SLOW_STUDENTS, {"accuracy": 0.905, "students": 0.881}, num_smoothed=5, lowest=0.75
    ),
}


def curve(folder: Path, overrides: Sequence[str], *, data_dir: Path) -> Curve:
    """Run the experiment in ``folder`` and return its evaluations."""
    # Another algorithm would refuse this key of the file.
    file = (folder / "experiment.toml").read_text()
    if any(each.startswith("algorithm.name=") for each in overrides):
        file = file.replace("server_learning_rate = 2.0\n", "")
    with tempfile.TemporaryDirectory() as runs_dir:
        for path in folder.glob("*.py"):
            shutil.copy(path, runs_dir)
        experiment = Path(runs_dir, "experiment.toml")
        experiment.write_text(file)
        command = [sys.executable, "-m", "fedlearn", "simulate", str(experiment), "--json"]
        command += ["--runs-dir", runs_dir, "--data-dir", str(data_dir)]
        command += [word for each in overrides for word in ("--set", each)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)} failed:\n{done.stderr[-2000:]}")
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    rounds = [each for each in events if each["event"] == "round" and each["accuracy"] is not None]
    return [(each["virtual_s"], each["metrics"]) for each in rounds]


def smoothed(points: Curve, metric: str, num_smoothed: int) -> list[tuple[float, float]]:
    """Return virtual seconds and the moving mean of a metric over ``num_smoothed`` evaluations."""
    values = [metrics[metric] for _, metrics in points]
    ends = range(num_smoothed, len(points) + 1)
    return [(points[end - 1][0], fmean(values[end - num_smoothed : end])) for end in ends]


def told(points: Sequence[tuple[float, float]], target: float) -> str:
    """Describe when a run first reached a value, and its best value."""
    at_s = next((at_s for at_s, value in points if value >= target), None)
    reached = f"never, in {points[-1][0]:.0f} s" if at_s is None else f"after {at_s:.0f} s"
    return f"{target} {reached}, best {max(value for _, value in points):.4f}"


def draw(race: Race, curves: Mapping[str, Curve], path: Path) -> None:
    """Plot the metrics over virtual time, on a logarithmic scale; synchronous rounds are dashed."""
    figure = Figure(figsize=(10, 5 * len(race.targets)), dpi=100, layout="constrained")
    panels = figure.subplots(len(race.targets), squeeze=False)[:, 0]
    for axes, (metric, target) in zip(panels, race.targets.items(), strict=True):
        axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
        for name, points in curves.items():
            line = smoothed(points, metric, race.num_smoothed)
            style = "--" if name.startswith("synchronous") else "-"
            axes.plot(*zip(*line, strict=True), style, label=name, linewidth=1.5)
        axes.axhline(target, color="#888888", linewidth=0.8, linestyle="--")
        label = "test accuracy" if metric == "accuracy" else f"test accuracy on {metric}' digits"
        axes.set(xscale="log", xlabel="virtual time (s)", ylabel=label, ylim=(race.lowest, 0.93))
        axes.grid(visible=True, color="#dddddd")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run all methods, print when each reached the accuracy, and plot them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("race", nargs="?", choices=RACES, default="asynchronous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get("FEDLEARN_DATA_DIR", "../shared/data")
    )
    arguments = parser.parse_args()
    data_dir, race = Path(arguments.data_dir).absolute(), RACES[arguments.race]
    folder, curves = SIMULATIONS / arguments.race, dict[str, Curve]()
    for name, overrides in race.methods.items():
        with_seed = (*overrides, f"seed={arguments.seed}")
        points = curves[name] = curve(folder, with_seed, data_dir=data_dir)
        for metric, target in race.targets.items():
            line = smoothed(points, metric, race.num_smoothed)
            print(f"{name}: {metric} {told(line, target)}", flush=True)
    draw(race, curves, folder / "race.png")


if __name__ == "__main__":
    main()
