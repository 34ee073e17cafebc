"""Reproduce published figures: run a folder's algorithms with several seeds and compare.

    python simulations/published.py FOLDER ... [--short] [--seeds N] [--only RUN] [--data-dir DIR]

A folder has ``experiment.toml`` and ``claim.json``; simulations/README.md describes its keys. It
prints a table, adds each run to ``results.json`` in the folder as soon as it is done, and draws all
that are there as ``figure.png``; with ``--short`` they are called ``short.json`` and ``short.png``.
Seeds that are in the file already are not run again; delete it to run all.
"""

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from fedlearn.algorithms.local_parts import find_local_names
from fedlearn.algorithms.personal_models import build_personal_model, has_personal_update
from fedlearn.assembly import build_simulation
from fedlearn.config import Config, load, resolve_addresses
from fedlearn.config.own_functions import import_function
from fedlearn.core.clock import SystemClock
from fedlearn.core.params import Params
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site
from fedlearn.simulation.fine_tuning import SimulatedFineTuning
from fedlearn.simulation.sources import Examples
from fedlearn.training.resident import Precision, ResidentModel

HERE = Path(__file__).parent
#: By run and figure, the value of each seed.
Results = dict[str, dict[str, list[float]]]


def run_once(folder: Path, claim: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, float]:
    """Run ``experiment.toml`` with overrides; return the last metrics and those of the clients.

    ``best_accuracy`` is the largest of all rounds, and ``accuracy_N`` that after round N.
    """
    with tempfile.TemporaryDirectory() as runs_dir:
        overrides = (*overrides, f"store.runs_dir={runs_dir}")
        config = load(folder / "experiment.toml", overrides=overrides)
        addresses = resolve_addresses(config, environ=os.environ)
        with redirect_stdout(StringIO()) as printed:
            printer = choose_printer(printed, as_json=False)
            run = run_config(config, Site(addresses, os.environ, SystemClock(), printer))
        figures = dict(run.history[-1].metrics)
        accuracies = {
            record.round_num + 1: record.metrics["accuracy"]
            for record in run.history
            if "accuracy" in record.metrics
        }
        figures |= {f"accuracy_{num_rounds}": value for num_rounds, value in accuracies.items()}
        if accuracies:
            figures["best_accuracy"] = max(accuracies.values())
        if "client_tests" in claim:
            place, _, name = claim["client_tests"].rpartition(":")
            tests = import_function("client_tests", f"{folder / place}:{name}")()
            figures |= measure_clients(run, config, tests)
    return figures


def measure_clients(run: Run, config: Config, tests: Sequence[Examples]) -> dict[str, float]:
    """Measure the last model, and each client's own, on the clients' held-out examples.

    With ``evaluation.fine_tune_epochs`` a client's own model is fine-tuned first.

    Returns:
        ``client_N`` and ``personal_N`` for each client, and their means by examples, ``clients``
        and ``personal``.
    """
    data_dir = resolve_addresses(config, environ=os.environ).data_dir
    built = build_simulation(config, data_dir=data_dir)
    objective, algorithm = built.objective, built.algorithm
    model = run.load_model(best=False)
    params, tensors = Params.of(model), dict(model.state_dict())
    trained = [spec.name for spec in params.layout.trainable]
    keeps = has_personal_update(algorithm.local)
    resident = ResidentModel(
        built.make_model, objective, device=torch.device("cpu"), precision=Precision.FLOAT32
    )
    fine_tuning = built.fine_tuning and SimulatedFineTuning(
        model=resident, population=built.population, tuning=built.fine_tuning
    )

    def accuracy(network: nn.Module, test: Examples) -> float:
        with torch.no_grad():
            outputs = network(test.features)
        return float(objective.metrics(outputs, test.labels)["accuracy"].double().mean())

    # Loading into `model` would change `tensors`, which are views of it.
    personal = copy.deepcopy(model)
    figures, sizes = dict[str, float](), [len(test.labels) for test in tests]
    for client_id, test in enumerate(tests):
        own = build_personal_model(
            tensors,
            run.client_state(client_id),
            local_names=find_local_names(model, algorithm.keep_local),
            trained_names=trained,
            local=algorithm.local if keeps else None,
        )
        figures[f"client_{client_id}"] = accuracy(model, test)
        personal.load_state_dict(own)
        if fine_tuning:
            tuned = fine_tuning.tune(
                Params.of(personal), client_id=client_id, round_num=config.num_rounds
            )
            personal.load_state_dict(tuned.to_tensors())
        figures[f"personal_{client_id}"] = accuracy(personal, test)
    for kind, name in (("client", "clients"), ("personal", "personal")):
        total = sum(size * figures[f"{kind}_{i}"] for i, size in enumerate(sizes))
        figures[name] = total / sum(sizes)
    return figures


def reproduce(folder: Path, arguments: argparse.Namespace) -> None:
    """Run one folder, print its table, and keep the results."""
    claim = json.loads((folder / "claim.json").read_text())
    missing = [each for each in claim["needs"] if not (arguments.data_dir / each).exists()]
    if missing:
        print(f"{folder.name}: skipped, {arguments.data_dir} has no {', '.join(missing)}")
        return
    short = claim["short"] if arguments.short else []
    for run in claim["runs"].values():  # an error in the last must not cost the time of the others
        load(folder / "experiment.toml", overrides=(*run["overrides"], *short))
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
        for seed in range(min(map(len, found.values()), default=0), arguments.seeds):
            figures = run_once(folder, claim, (*run["overrides"], *short, f"seed={seed}"))
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
