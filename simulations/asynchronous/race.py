"""Race synchronous and asynchronous rounds to an accuracy, in virtual time, and draw the picture.

    python simulations/asynchronous/race.py [--data-dir DIR]

Each method is ``experiment.toml`` with overrides. All have sixty clients train at a time, but
semi-synchronous rounds, which ask twenty and let those that are late go on beside the next ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
TARGET = 0.9

#: FedAvg with a server learning rate: that of FedBuff, for all that have one.
_FEDAVG = (
    *("algorithm.name=fedavgm", "algorithm.server_momentum=0.0"),
    "algorithm.server_learning_rate=2.0",
)
_SYNCHRONOUS = (
    *(*_FEDAVG, "algorithm.weight_by_examples=true", "asynchronous.mode=off"),
    *("num_rounds=60", "cohort.num_wanted=46"),
)
_OVER_SELECTED = (*_SYNCHRONOUS, "stragglers.over_selection=1.3", "stragglers.min_reports=1")
#: By name the overrides of each; one more method is one more line.
METHODS: Mapping[str, Sequence[str]] = {
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
        *("late_updates.mode=keep", "late_updates.max_staleness=30"),
    ),
    "FedBuff": (),
    "FedAsync": (
        *("algorithm.name=fedasync", "algorithm.mixing=0.6", "asynchronous.buffer_size=1"),
        *("asynchronous.max_staleness=300", "num_rounds=800", "evaluation.every_rounds=5"),
    ),
    "EASGD, deadline 20 s": (
        *("algorithm.name=easgd", "algorithm.elasticity=0.4", "algorithm.cohort_size=46"),
        *("asynchronous.mode=off", "cohort.num_wanted=46", "stragglers.over_selection=1.3"),
        *("stragglers.min_reports=1", "stragglers.deadline_s=20"),
        *("num_rounds=400", "evaluation.every_rounds=5"),
    ),
}


def curve(overrides: Sequence[str], *, data_dir: Path) -> list[tuple[float, float]]:
    """Return virtual seconds and accuracy after each evaluation of a run."""
    # A switch of the algorithm leaves no key of the other one behind.
    file = (HERE / "experiment.toml").read_text()
    if any(each.startswith("algorithm.name=") for each in overrides):
        file = file.replace("server_learning_rate = 2.0\n", "")
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder, "experiment.toml")
        experiment.write_text(file)
        command = [sys.executable, "-m", "fedlearn", "simulate", str(experiment), "--json"]
        command += ["--runs-dir", folder, "--data-dir", str(data_dir)]
        command += [word for each in overrides for word in ("--set", each)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)} failed:\n{done.stderr[-2000:]}")
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    rounds = [each for each in events if each["event"] == "round" and each["accuracy"] is not None]
    return [(each["virtual_s"], each["accuracy"]) for each in rounds]


def reached_s(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a run first had an accuracy; ``None``: never."""
    return next((at_s for at_s, accuracy in points if accuracy >= target), None)


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Draw the accuracies over virtual time, whose scale is logarithmic."""
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
    axes.axhline(TARGET, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="virtual time (s)", ylabel="test accuracy", ylim=(0.7, 0.93))
    axes.grid(visible=True, color="#dddddd")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run all methods, print when each had the accuracy, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get("FEDLEARN_DATA_DIR", "../shared/data")
    )
    data_dir = Path(parser.parse_args().data_dir).absolute()
    curves = dict[str, list[tuple[float, float]]]()
    for name, overrides in METHODS.items():
        curves[name] = curve(overrides, data_dir=data_dir)
        at_s, best = reached_s(curves[name], TARGET), max(each for _, each in curves[name])
        told = "never" if at_s is None else f"{at_s:.0f} s"
        print(f"{name}: {TARGET} after {told}, best {best:.4f}", flush=True)
    draw(curves, HERE / "race.png")


if __name__ == "__main__":
    main()
