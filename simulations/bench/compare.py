"""Our engine beside Flower's Ray simulation, pfl-research and a bare loop: paired ratios.

    python simulations/bench/compare.py

Every competitor runs the same clients, model, seeds and arithmetic, in turn, several times
over; a ratio compares runs of the same turn, so a machine that slows down slows all. The
weights after one round are compared as well: who computes something else does not count.
(Over many rounds ReLU and max-pool kinks make roundings grow.) Beside the
rates stands the fraction of the machine's own matrix-multiplication limit, the best of those
measured at the beginning of each turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ours import load_workload
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).parent
#: Largest difference of the weights after a round, relative to the largest weight, that still
#: is the same arithmetic in another order.
TOLERANCE = 1e-5
_REQUIREMENTS = {
    "flower": ("torch", "flwr[simulation]==1.41.*"),
    "pfl": ("torch", "pfl[pytorch]==0.6.0"),
}


@dataclass(frozen=True)
class Competitor:
    """One way to run the workload.

    Attributes:
        name: As printed.
        command: Program and its own arguments.
        has_our_cohorts: Whether it trains the same clients; Flower draws its own.
    """

    name: str
    command: tuple[str, ...]
    has_our_cohorts: bool = True


def competitors(arguments: argparse.Namespace) -> list[Competitor]:
    """Return who runs, ours first."""
    peers, procs = Path(arguments.peers_dir), str(arguments.procs)
    ours = (sys.executable, str(HERE / "ours.py"), "--procs", procs)
    pfl = (str(peer_python("pfl", arguments)), str(peers / "peer_pfl.py"), "--procs", procs)
    bare = (sys.executable, str(peers / "peer_naive.py"), "--procs", procs, "--threads", "1")
    flower = (str(peer_python("flower", arguments)), str(peers / "peer_flower.py"))
    everyone = [
        Competitor("fedlearn (auto)", ours),
        Competitor("fedlearn (compiled)", (*ours, "--executor", "compiled")),
        Competitor("fedlearn (sequential)", (*ours, "--executor", "sequential")),
        Competitor("bare loop", bare),
        Competitor("pfl", (*pfl, "--threads", "1")),
        Competitor("flower", flower, has_our_cohorts=False),
    ]
    return [each for each in everyone if each.name not in arguments.without]


def peer_python(name: str, arguments: argparse.Namespace) -> Path:
    """Return the interpreter of a peer's own environment; make it if there is none."""
    given = getattr(arguments, f"{name}_python")
    if given:
        return Path(given)
    folder = Path.home() / ".cache" / "fedlearn" / "bench" / name
    python = folder / "bin" / "python"
    if not python.exists() and name not in arguments.without:
        print(f"making an environment for {name} in {folder} (once, some minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        requirements = [f"torch=={torch.__version__.split('+')[0]}", *_REQUIREMENTS[name][1:]]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
    return python


def run(
    competitor: Competitor, workload: list[str], weights: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run one competitor once and return its JSON line.

    Raises:
        SystemExit: It failed; its standard error is shown.
    """
    environ = dict(os.environ, PEERS_DIR=str(arguments.peers_dir))
    completed = subprocess.run(
        [*competitor.command, *workload, "--save", str(weights)],
        capture_output=True,
        text=True,
        check=False,
        timeout=arguments.timeout_s,
        env=environ,
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise SystemExit(f"{competitor.name} failed:\n{completed.stdout}\n{completed.stderr}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def peak_flop_per_s() -> float:
    """Return the machine's float32 matrix-multiplication rate with all cores, the best of 20."""
    torch.set_num_threads(os.cpu_count() or 1)
    a, b, out = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.empty(2048, 2048)
    best_s = min(_seconds(a, b, out) for _ in range(20))
    return 2.0 * 2048**3 / best_s


def _seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    from time import perf_counter  # noqa: PLC0415, TID251 - a benchmark measures real time

    started = perf_counter()
    torch.mm(a, b, out=out)
    return perf_counter() - started


def flop_per_client(model: str, arguments: argparse.Namespace) -> float:
    """Return the operations of forward and backward passes over a client's examples."""
    workload = load_workload(Path(arguments.peers_dir))
    net, batch = workload.make_model(model, 0), arguments.samples
    features = torch.zeros(batch, *workload.SHAPE[model])
    with FlopCounterMode(display=False) as counter:
        net(features).sum().backward()
    return float(counter.get_total_flops() * int(arguments.epochs))


def distance(left: Path, right: Path) -> float:
    """Return the largest difference of two models' weights, relative to the largest weight.

    Linear weights may be stored either way round, so shapes are not compared.
    """
    a, b = np.load(left), np.load(right)
    flat = [np.concatenate([each[name].ravel() for name in each.files]) for each in (a, b)]
    return float(np.abs(flat[0] - flat[1]).max() / np.abs(flat[1]).max())


def compare(model: str, arguments: argparse.Namespace) -> None:
    """Run everyone in turn on one model and print the table."""
    rates: dict[str, list[float]] = {}
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        apart = _apart(model, Path(folder), arguments)
        for turn in range(arguments.turns):
            peaks.append(peak_flop_per_s())
            for competitor in competitors(arguments):
                workload = _workload(model, arguments.rounds, arguments.warmup, arguments)
                result = run(competitor, workload, Path(folder) / "weights.npz", arguments)
                rates.setdefault(competitor.name, []).append(result["clients_per_s"])
                print(f"  turn {turn + 1} {json.dumps(result)}", file=sys.stderr, flush=True)
    _print_table(model, rates, peaks, apart, flop_per_client(model, arguments))


def _apart(model: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return how far each model is from ours after one round of the same clients."""
    workload, weights = _workload(model, 1, 0, arguments), []
    everyone = [each for each in competitors(arguments) if each.has_our_cohorts]
    for index, competitor in enumerate(everyone):
        weights.append(folder / f"{index}.npz")
        run(competitor, workload, weights[-1], arguments)
    names = [each.name for each in everyone]
    return {name: distance(file, weights[0]) for name, file in zip(names, weights, strict=True)}


def _workload(model: str, rounds: int, warmup: int, arguments: argparse.Namespace) -> list[str]:
    return [
        *("--model", model, "--rounds", str(rounds), "--warmup", str(warmup)),
        *("--cohort", str(arguments.cohort), "--epochs", str(arguments.epochs)),
        *("--clients", str(arguments.clients), "--samples-per-client", str(arguments.samples)),
        *(["--ragged"] if arguments.ragged else []),
    ]


def _print_table(
    model: str,
    rates: Mapping[str, list[float]],
    peaks: list[float],
    apart: Mapping[str, float],
    flop: float,
) -> None:
    print(f"\n{model}: clients/s, paired ratios (median over turns), same maths, matmul limit")
    others = [name for name in ("flower", "pfl", "bare loop") if name in rates]
    header = "".join(f"{'x ' + name:>12}" for name in others)
    print(f"{'':24}{'clients/s':>12}{header}{'% of limit':>12}{'weights differ':>16}")
    for name, values in rates.items():
        ratios = [
            statistics.median(ours / theirs for ours, theirs in zip(values, rates[o], strict=True))
            for o in others
        ]
        share = 100 * statistics.median(values) * flop / max(peaks)
        columns = "".join(f"{ratio:12.2f}" for ratio in ratios)
        verdict = "own cohorts"
        if name in apart:
            verdict = f"{apart[name]:.1e}" + ("" if apart[name] < TOLERANCE else " NOT THE SAME")
        print(f"{name:24}{statistics.median(values):12.1f}{columns}{share:12.1f}{verdict:>16}")


def main() -> None:
    """Parse the arguments and compare on each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp784", "cnn", "cifarcnn"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--procs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--peers-dir", default="../shared/peers")
    parser.add_argument("--flower-python", help="of an environment with flwr[simulation]")
    parser.add_argument("--pfl-python", help="of an environment with pfl[pytorch]")
    parser.add_argument("--without", nargs="*", default=[], help="competitors to leave out")
    arguments = parser.parse_args()
    for model in arguments.models:
        compare(model, arguments)


if __name__ == "__main__":
    main()
