"""Print a table of the shelf's algorithms, in Markdown: size, cost, and differences.

    python -m tests.parity.shelf_table [NAME ...]

The rows are the cases of ``test_shelf.py``. The differences are the largest of any parameter from
an independent float64 reference, in six ways of running three rounds. The cost is the processor
time per client of an MLP with 64, 200 and 10 units on 50 examples, relative to FedAvg's. Executors
are chosen by ``auto``, so an algorithm that rules out the fused executor costs more than its
arithmetic. Each takes turns with FedAvg, and the median over the turns is printed.
"""

import argparse
import ast
import inspect
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.fltrust import RootTraining
from fedlearn.experiment.progress import PlainProgress
from fedlearn.transport.grpc_environment import prepare_for_grpc
from tests.parity import shelf
from tests.parity.test_shelf import CASES, differences_of_two_workers

WAYS = ("auto", "sequential", "vmap", "memory", "two workers", "gRPC")
NUM_CLIENTS, COHORT, EXAMPLES = 400, 50, 50
#: Rounds that touch memory for the first time.
WARMUP = 5


# ---- Size -------------------------------------------------------------------------------------


def find_export(case: str) -> Any | None:  # Any: a recipe, or a class
    """Return what ``fl`` exports under the name of a case; ``None``: it is a rule of a test.

    Example:
        >>> find_export("fednova, momentum") is fl.FedNova
        True
    """
    name = _letters(case.split(",", maxsplit=1)[0])
    return next((getattr(fl, each) for each in fl.__all__ if _letters(each) == name), None)


def _letters(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


def count_lines(source: str) -> int:
    """Count the lines of a source without blank ones and docstrings.

    Example:
        >>> count_lines(inspect.getsource(count_lines))
        10
    """
    said = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                said.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        bool(line.strip()) for at, line in enumerate(source.splitlines(), 1) if at not in said
    )


def size_of(export: Any) -> int:  # Any: as found
    """The lines of the export's file, or of the export alone if the file has several."""
    module = export.__module__
    others = [each for each in fl.__all__ if getattr(fl, each).__module__ == module]
    of = import_module(module) if len(others) == 1 else inspect.unwrap(export)
    return count_lines(inspect.getsource(of))


# ---- Cost -------------------------------------------------------------------------------------


def make_model(*, has_norm: bool = False) -> nn.Module:
    """The layers of the shelf's models, wider, so that its algorithms find the names they need."""
    norm = [nn.BatchNorm1d(200)] if has_norm else []
    return nn.Sequential(nn.Linear(64, 200), *norm, nn.Tanh(), nn.Linear(200, 10))


@dataclass(frozen=True)
class Watch:
    """Notes the processor time of this process after each round."""

    seconds: list[float] = field(default_factory=list)

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        """Note it."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.seconds.append(used.ru_utime + used.ru_stime)


def measure(
    strategy: fl.Strategy, data: fl.FederatedData, make: shelf.Make, *, num_rounds: int
) -> tuple[float, str]:
    """Simulate; return the median processor time of a round, and the executor that trained it."""
    known: Any = strategy  # Any: a dataclass, of which some have this field
    if hasattr(strategy, "num_clients"):
        known = replace(known, num_clients=NUM_CLIENTS)
    watch = Watch()
    with TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        run = fl.simulate(
            make,
            data,
            known,
            num_rounds=WARMUP + num_rounds,
            cohort={"num_wanted": COHORT},
            engine={"num_workers": 1, "device": "cpu"},
            evaluation={"every_rounds": 0, "clients": 0},
            store={"runs_dir": folder, "checkpoint_every_s": 3600.0},
            callbacks=[watch],
            progress=PlainProgress(nowhere),
        )
        settings: Any = run.record.config["engine"]  # Any: JSON
    return float(np.median(np.diff(watch.seconds)[WARMUP - 1 :])), settings["executor"]


def draw_data() -> fl.FederatedData:
    """Clients of 50 examples."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(NUM_CLIENTS * EXAMPLES, 64, generator=generator).numpy()
    labels = torch.randint(0, 10, (NUM_CLIENTS * EXAMPLES,), generator=generator).numpy()
    partition = fl.Iid(num_clients=NUM_CLIENTS)
    test = (features[:100], labels[:100])
    return fl.from_arrays(features, labels, partition=partition, test=test, seed=0)


def compare_cost(case: shelf.Case, *, turns: int, num_rounds: int) -> tuple[float, str]:
    """Return processor time per client, times FedAvg's, and the executor."""
    data = draw_data()
    has_norm = any(isinstance(each, nn.BatchNorm1d) for each in case.make().modules())
    make = partial(make_model, has_norm=has_norm)
    ratios, executor = list[float](), ""
    for _ in range(turns):
        plain, _ = measure(fl.FedAvg(shelf.SGD), data, make, num_rounds=num_rounds)
        seconds, executor = measure(case.strategy, data, make, num_rounds=num_rounds)
        ratios.append(seconds / plain)
    return float(np.median(ratios)), executor


# ---- The table --------------------------------------------------------------------------------


def find_differences(name: str, folder: Path, two_workers: Callable[[], float]) -> dict[str, float]:
    """Return the worst difference of a case in each way."""
    case = CASES[name]
    ways = {kind.value: engine for kind, engine in shelf.engines(case.strategy, case.make).items()}
    cache_dir = folder / "cache"
    ways["auto"] = shelf.choose_engine(case.strategy, case.make, cache_dir=cache_dir)
    return {
        **{way: shelf.difference_of_engine(case, engine) for way, engine in ways.items()},
        "memory": shelf.difference_in_memory(case),
        "two workers": two_workers(),
        "gRPC": shelf.difference_over_grpc(case, folder / "grpc"),
    }


def iter_rows(names: Sequence[str], *, turns: int, num_rounds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| " + " | ".join(["Algorithm", "Lines", "Executor", "Cost", *WAYS]) + " |"
    yield "| --- " + "| ---: | --- " + "| ---: " * (1 + len(WAYS)) + "|"
    workers = differences_of_two_workers()
    for name in names:
        export = find_export(name)
        size = "-" if export is None else str(size_of(export))
        with TemporaryDirectory() as folder:
            found = find_differences(name, Path(folder), partial(workers.__getitem__, name))
        executor, cost = "-", "-"
        # FLTrust's own training is bound to the model of its case.
        if turns and not isinstance(CASES[name].strategy, RootTraining):
            times, executor = compare_cost(CASES[name], turns=turns, num_rounds=num_rounds)
            cost = f"{times:.2f}"
        cells = [name, size, executor, cost, *(f"{found[way]:.0e}" for way in WAYS)]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a case; all by default")
    parser.add_argument(
        "--turns", type=int, default=3, help="turns that medians are over; 0: no costs"
    )
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds of a turn")
    arguments = parser.parse_args()
    if unknown := [each for each in arguments.names if each not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    prepare_for_grpc(os.environ, verbosity="ERROR")
    torch.set_num_threads(1)
    names = arguments.names or list(CASES)
    for line in iter_rows(names, turns=arguments.turns, num_rounds=arguments.rounds):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
