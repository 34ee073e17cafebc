"""Run every aggregation rule against every attack; print a table and draw a picture.

    python simulations/robustness/matrix.py [--seeds N] [--rounds N] [--only RULE] [--out FOLDER]

Each cell is ``experiment.toml`` with overrides: the mean accuracy over the seeds, on the test set.
Each row is added to ``results.json`` as soon as it is done, and the picture shows all rows there.
For the backdoor the last column also has the share of test images with the trigger that the model
takes for the target class.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

import fedlearn as fl
from fedlearn.config import load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site

HERE = Path(__file__).parent
#: Overrides by name; to add a rule or an attack, add an entry.
RULES: Mapping[str, Sequence[str]] = {
    "mean": ("aggregation={}",),
    "norm bound": ('aggregation={rule="norm_bound", clip_norm=1.0}',),
    "median": ('aggregation={rule="median"}',),
    "trimmed mean": (),
    "Krum": ('aggregation={rule="krum", num_malicious=4}',),
    "Multi-Krum": ('aggregation={rule="krum", num_malicious=4, num_selected=12}',),
    "Bulyan": ('aggregation={rule="bulyan", num_malicious=4}',),
    "geometric median": ('aggregation={rule="geometric_median", num_iterations=8}',),
    "centered clipping": (
        'aggregation={rule="centered_clipping", clip_radius=1.0, num_iterations=3}',
    ),
    "FLTrust": ('aggregation={rule="fltrust", num_root_examples=100}',),
    "buckets of 2, median": ('aggregation={rule="median", bucket_size=2}',),
}
_TARGET = fl.Backdoor(target_label=0, trigger_size=2, trigger_value=1.0)
ATTACKS: Mapping[str, Sequence[str]] = {
    "none": ("attack={}",),
    "sign flip": (),
    "Gaussian": ('attack={kind="gaussian", num_attackers=4, noise_std=1.0}',),
    "label flip": ('attack={kind="label_flip", num_attackers=4}',),
    "replacement": ('attack={kind="model_replacement", num_attackers=4, scale=10.0}',),
    "little is enough": ('attack={kind="little_is_enough", num_attackers=4, num_deviations=1.5}',),
    "min-max": ('attack={kind="min_max", num_attackers=4}',),
    "backdoor": (
        'attack={kind="backdoor", num_attackers=4, target_label=0, trigger_size=2, scale=4.0}',
    ),
}
#: Name of the column with the backdoor's success.
_SUCCESS = "backdoor success"


def run_cell(overrides: Sequence[str], runs_dir: str) -> tuple[float, float]:
    """Run one experiment; return accuracy and the backdoor's success."""
    config = load(HERE / "experiment.toml", overrides=(*overrides, f"store.runs_dir={runs_dir}"))
    addresses = resolve_addresses(config, environ=os.environ)
    with redirect_stdout(StringIO()) as printed:
        printer = choose_printer(printed, as_json=False)
        run = run_config(config, Site(addresses, os.environ, SystemClock(), printer))
    test = config.data.load_clients(seed=config.seed, data_dir=addresses.data_dir).test
    assert isinstance(test.features, torch.Tensor)
    others = test.features[test.labels != _TARGET.target_label]
    with torch.no_grad():
        predicted = run.load_model().eval()(_TARGET.stamp(others)).argmax(dim=1)
    success = float((predicted == _TARGET.target_label).double().mean())
    return run.history[-1].metrics["accuracy"], success


def run_matrix(
    rules: Sequence[str], kept: Path, *, num_seeds: int, num_rounds: int
) -> dict[str, dict[str, float]]:
    """Run the cells of some rules; return the figures of all that were kept, by rule and attack."""
    found: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory() as runs_dir:
        for rule in rules:
            row, rule_overrides = dict[str, float](), RULES[rule]
            for attack, attack_overrides in ATTACKS.items():
                cells = [
                    run_cell(
                        (
                            *(*rule_overrides, *attack_overrides),
                            *(f"seed={seed}", f"num_rounds={num_rounds}"),
                        ),
                        runs_dir,
                    )
                    for seed in range(num_seeds)
                ]
                row[attack] = fmean(accuracy for accuracy, _ in cells)
                if attack == "backdoor":
                    row[_SUCCESS] = fmean(success for _, success in cells)
            print("| " + " | ".join([rule, *(f"{each:.2f}" for each in row.values())]) + " |")
            found[rule] = {each: round(value, 4) for each, value in row.items()}
            found = {each: found[each] for each in RULES if each in found}
            kept.write_text(json.dumps(found, indent=2) + "\n")
    return found


def draw(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw the matrix, dark where the model is good or the backdoor fails."""
    columns = list(next(iter(found.values())))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    good = [[1 - row[c] if c == _SUCCESS else row[c] for c in columns] for row in found.values()]
    axes.imshow(good, cmap="YlGn", vmin=0.0, vmax=1.0, aspect="auto")
    for y, row in enumerate(found.values()):
        for x, column in enumerate(columns):
            colour = "white" if good[y][x] > 0.7 else "black"
            axes.text(x, y, f"{row[column]:.2f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(found)), list(found))
    axes.set_title("Accuracy with 4 of 20 clients attacking; dark is good")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", action="append", choices=RULES, metavar="RULE")
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    columns = [*ATTACKS, _SUCCESS]
    print("| " + " | ".join(["", *columns]) + " |")
    print("|" + " --- |" * (len(columns) + 1))
    found = run_matrix(
        arguments.only or list(RULES),
        arguments.out / "results.json",
        num_seeds=arguments.seeds,
        num_rounds=arguments.rounds,
    )
    draw(found, arguments.out / "matrix.png")


if __name__ == "__main__":
    main()
