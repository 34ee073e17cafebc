"""Reproduce published figures: run a folder's algorithms with several seeds and compare.

    python simulations/published.py FOLDER ... [--short] [--seeds N] [--only RUN] [--data-dir DIR]

A folder has ``experiment.toml`` and ``claim.json``; simulations/README.md describes its keys. It
prints a table, adds each run to ``results.json`` in the folder as soon as it is done, and draws all
that are there as ``figure.png``; with ``--short`` they are called ``short.json`` and ``short.png``.
Seeds that are in the file already are not run again; delete it to run all.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedlearn.config import load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site

HERE = Path(__file__).parent
#: By run and figure, the value of each seed.
Results = dict[str, dict[str, list[float]]]


def run_once(folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Run ``experiment.toml`` with overrides; return what it measured, by figure."""
    with tempfile.TemporaryDirectory() as runs_dir:
        overrides = (*overrides, f"store.runs_dir={runs_dir}")
        config = load(folder / "experiment.toml", overrides=overrides)
        addresses = resolve_addresses(config, environ=os.environ)
        with redirect_stdout(StringIO()) as printed:
            printer = choose_printer(printed, as_json=False)
            run = run_config(config, Site(addresses, os.environ, SystemClock(), printer))
        return list_figures(run)


def list_figures(run: Run) -> dict[str, float]:
    """Return the last metrics of a run, those after other rounds, and those of its clients.

    ``best_accuracy`` is the largest of all rounds, and ``accuracy_N`` that after round N. If
    clients were evaluated, ``client_N`` and ``personal_N`` are the accuracies of the global model
    and of client N's own, and ``clients`` and ``personal`` their means by examples.
    """
    figures = dict(run.history[-1].metrics)
    accuracies = {
        record.round_num + 1: record.metrics["accuracy"]
        for record in run.history
        if "accuracy" in record.metrics
    }
    figures |= {f"accuracy_{num_rounds}": value for num_rounds, value in accuracies.items()}
    if accuracies:
        figures["best_accuracy"] = max(accuracies.values())
    if "clients/accuracy_mean" in figures:
        clients = run.clients
        own = "personal_accuracy" if "personal_accuracy" in clients.metrics else "accuracy"
        for one, mean, metric in (("client", "clients", "accuracy"), ("personal", "personal", own)):
            values = clients.metrics[metric]
            figures |= {f"{one}_{client_id}": float(each) for client_id, each in enumerate(values)}
            figures[mean] = float(np.average(values, weights=clients.num_examples))
    return figures


def reproduce(folder: Path, arguments: argparse.Namespace) -> None:
    """Run one folder, print its table, and keep the results."""
    claim = json.loads((folder / "claim.json").read_text())
    missing = [each for each in claim["needs"] if not (arguments.data_dir / each).exists()]
    if missing:
        print(f"{folder.name}: skipped, {arguments.data_dir} has no {', '.join(missing)}")
        return
    short = claim["short"] if arguments.short else []
    seeds = list_seeds(claim, arguments.seeds)
    for run in claim["runs"].values():  # an error in the last must not cost the time of the others
        for seed in seeds:
            load(folder / "experiment.toml", overrides=(*run["overrides"], *short, *seed))
    kept = folder / ("short.json" if arguments.short else "results.json")
    picture = folder / ("short.png" if arguments.short else "figure.png")
    print(f"{folder.name}: mean ± standard deviation of {arguments.seeds} seeds", end="")
    print(" (published, difference)\n")
    print("| " + " | ".join(["", *claim["figures"].values()]) + " |")
    print("|" + " --- |" * (1 + len(claim["figures"])))
    for name, run in claim["runs"].items():
        if arguments.only and name not in arguments.only:
            continue
        results: Results = json.loads(kept.read_text()) if kept.exists() else {}
        found = results.get(name, {})
        for seed in seeds[min(map(len, found.values()), default=0) :]:
            figures = run_once(folder, (*run["overrides"], *short, *seed))
            found = {
                each: [*found.get(each, []), figures[each]]
                for each in claim["figures"]
                if each in figures
            }
            results = {**results, name: found}
            results = {each: results[each] for each in claim["runs"] if each in results}
            kept.write_text(json.dumps(results, indent=2) + "\n")
            draw(claim, results, picture)
        published = run.get("published", {})
        cells = [format_cell(found.get(each), published.get(each)) for each in claim["figures"]]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)


def list_seeds(claim: Mapping[str, Any], num_seeds: int) -> list[list[str]]:
    """Return the overrides of each seed: the run's own, and what the claim counts with it."""
    also: dict[str, int] = claim.get("first_seeds", {})
    return [
        [f"seed={seed}", *(f"{key}={first + seed}" for key, first in also.items())]
        for seed in range(num_seeds)
    ]


def format_cell(ours: Sequence[float] | None, theirs: float | None) -> str:
    """Format our mean and deviation, and how far they are from the published value."""
    if ours is None:
        return "-"
    cell = f"{fmean(ours):.3f} ± {pstdev(ours):.3f}"
    return cell if theirs is None else f"{cell} ({theirs:.3f}, {fmean(ours) - theirs:+.3f})"


def draw(claim: Mapping[str, Any], results: Results, path: Path) -> None:
    """Draw the first figure of all runs: each seed, their mean, and the published value."""
    figure, title = next(iter(claim["figures"].items()))
    picture = Figure(figsize=(7, 1.2 + 0.4 * len(results)), layout="constrained")
    axes = picture.subplots()
    seeds = [(each, y) for y, run in enumerate(results.values()) for each in run[figure]]
    means = [(fmean(run[figure]), y) for y, run in enumerate(results.values())]
    theirs = [
        (claim["runs"][name]["published"][figure], y)
        for y, name in enumerate(results)
        if figure in claim["runs"][name].get("published", {})
    ]
    axes.plot(*zip(*seeds, strict=True), "o", color="C0", alpha=0.4, label="each seed")
    axes.plot(*zip(*means, strict=True), "|", color="C0", markersize=20, label="mean")
    if theirs:
        axes.plot(*zip(*theirs, strict=True), "D", color="C1", label="published")
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.legend()
    picture.savefig(path, dpi=120)


def main() -> None:
    """Run the folders named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="FOLDER")
    parser.add_argument("--short", action="store_true", help="with the claim's `short` overrides")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], metavar="RUN")
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get("FEDLEARN_DATA_DIR", "../shared/data")
    )
    arguments = parser.parse_args()
    # The data modules of the folders read it.
    os.environ["FEDLEARN_DATA_DIR"] = str(Path(arguments.data_dir).resolve())
    for name in arguments.names:
        reproduce(HERE / Path(name).name, arguments)


if __name__ == "__main__":
    main()
