"""Is our engine faster than Flower's simulation, pfl-research and a bare loop?

    python simulations/bench/compare.py --peers-dir ../shared/peers

Every competitor runs the same clients, model, seeds and arithmetic, as a whole program, in turn.
The weights after one round are compared as well, to make sure that all compute the same. (Over many
rounds, kinks of ReLU and max-pool amplify rounding errors.) The scripts that drive the peers are
not part of this repository. ``--private`` compares rounds with central differential privacy, ours
and pfl-research's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import HERE, Row, in_turn, options, parse, part, ratio, report, run_program, timed
from parts.ours import load_workload
from torch.utils.flop_counter import FlopCounterMode

#: Largest difference of the weights after a round, relative to the largest weight, that another
#: order of the same arithmetic explains.
TOLERANCE = 1e-5
_REQUIREMENTS = {"flower": "flwr[simulation]==1.41.*", "pfl": "pfl[pytorch]==0.6.0"}
_LIMIT = "matmul limit"


@dataclass(frozen=True)
class Competitor:
    """One way to run the workload.

    Attributes:
        name: Name in the table.
        command: Program and its own arguments.
        has_our_cohorts: Whether it trains the same clients as we do; Flower draws its own.
    """

    name: str
    command: tuple[str, ...]
    has_our_cohorts: bool = True


def competitors(arguments: argparse.Namespace) -> list[Competitor]:
    """List the competitors, ours first."""
    peers, procs = arguments.peers_dir, ("--procs", str(arguments.procs))
    ours, one = (*part("ours"), *procs), ("--threads", "1")
    if arguments.private:
        pfl = (peer_python("pfl", arguments), str(HERE / "parts" / "private_pfl.py"), *procs, *one)
        everyone = [Competitor("fedlearn", (*ours, "--private")), Competitor("pfl", pfl)]
    else:
        pfl = (peer_python("pfl", arguments), str(peers / "peer_pfl.py"), *procs, *one)
        bare = (sys.executable, str(peers / "peer_naive.py"), *procs, *one)
        flower = (peer_python("flower", arguments), str(peers / "peer_flower.py"))
        everyone = [
            Competitor("fedlearn", ours),
            Competitor("fedlearn (compiled)", (*ours, "--executor", "compiled")),
            Competitor("fedlearn (sequential)", (*ours, "--executor", "sequential")),
            Competitor("bare loop", bare),
            Competitor("pfl", pfl),
            Competitor("flower", flower, has_our_cohorts=False),
        ]
    return [each for each in everyone if each.name not in arguments.without]


def peer_python(name: str, arguments: argparse.Namespace) -> str:
    """Return the interpreter of a peer's environment, which is created if it does not exist."""
    given = getattr(arguments, f"{name}_python")
    if given or name in arguments.without:
        return given or ""
    folder = Path.home() / ".cache" / "fedlearn" / "bench" / name
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"creating an environment for {name} in {folder} (once, takes minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        requirements = [f"torch=={torch.__version__.split('+')[0]}", _REQUIREMENTS[name]]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
    return str(python)


def clients_per_s(
    competitor: Competitor, workload: list[str], weights: Path, arguments: argparse.Namespace
) -> float:
    """Run one competitor once and return its rate.

    Raises:
        SystemExit: It failed; its output is shown.
    """
    with tempfile.TemporaryFile() as errors:
        written = run_program(
            [*competitor.command, *workload, "--save", str(weights)],
            os.environ | {"PEERS_DIR": str(arguments.peers_dir), "PYTHONPATH": str(HERE)},
            errors=errors.fileno(),
            timeout_s=arguments.timeout_s,
            check=False,  # its errors are shown below
        )
        errors.seek(0)
        told = errors.read().decode()
    lines = [line for line in written.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise SystemExit(f"{competitor.name} failed:\n{written}\n{told}")
    result: dict[str, Any] = json.loads(lines[-1])  # Any: JSON of the peers
    return float(result["clients_per_s"])


def peak_flop_per_s(num_products: int) -> float:
    """Return the machine's float32 rate with all cores, of the fastest of some matrix products."""
    torch.set_num_threads(os.cpu_count() or 1)
    a, b, out = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.empty(2048, 2048)
    return 2.0 * 2048**3 / min(timed(lambda: torch.mm(a, b, out=out)) for _ in range(num_products))


def flop_per_client(model: str, arguments: argparse.Namespace) -> float:
    """Count the operations of forward and backward passes over a client's examples."""
    workload = load_workload(arguments.peers_dir)
    net = workload.make_model(model, 0)
    features = torch.zeros(arguments.samples, *workload.SHAPE[model])
    with FlopCounterMode(display=False) as counter:
        net(features).sum().backward()
    return float(counter.get_total_flops() * int(arguments.epochs))


def distance(left: Path, right: Path) -> float:
    """Return the largest difference of two models' weights, relative to the largest weight.

    A peer may store linear weights in another shape, so shapes are not compared.
    """
    a, b = np.load(left), np.load(right)
    flat = [np.concatenate([each[name].ravel() for name in each.files]) for each in (a, b)]
    return float(np.abs(flat[0] - flat[1]).max() / np.abs(flat[1]).max())


def compare(model: str, arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Run all competitors in turn on one model."""
    everyone = competitors(arguments)
    workload = _workload(model, arguments.rounds, arguments.warmup, arguments)
    rates = in_turn(
        {
            _LIMIT: partial(peak_flop_per_s, arguments.products),
            **{
                each.name: partial(clients_per_s, each, workload, folder / "w.npz", arguments)
                for each in everyone
            },
        },
        turns=arguments.turns,
    )
    peak, flop = max(rates.pop(_LIMIT)), flop_per_client(model, arguments)
    for name, found in rates.items():
        yield Row(model, f"{name}, clients/s", statistics.median(found))
        yield Row(model, f"  {_LIMIT}, %", 100 * statistics.median(found) * flop / peak)
        for other in ("flower", "pfl", "bare loop"):
            if name.startswith("fedlearn") and other in rates:
                yield Row(model, f"  times {other}", ratio(found, rates[other]))
    if arguments.private:  # each draws its own noise, so weights differ
        return
    workload = _workload(model, 1, 0, arguments)
    first, *others = [each for each in everyone if each.has_our_cohorts]
    clients_per_s(first, workload, folder / "ours.npz", arguments)
    for each in others:
        clients_per_s(each, workload, folder / "theirs.npz", arguments)
        apart = distance(folder / "theirs.npz", folder / "ours.npz")
        yield Row(model, f"{each.name}, weights differ by", apart, at_most=TOLERANCE)


def _workload(model: str, rounds: int, warmup: int, arguments: argparse.Namespace) -> list[str]:
    return [
        *("--model", model, "--rounds", str(rounds), "--warmup", str(warmup)),
        *("--cohort", str(arguments.cohort), "--epochs", str(arguments.epochs)),
        *("--clients", str(arguments.clients), "--samples-per-client", str(arguments.samples)),
        *(["--ragged"] if arguments.ragged else []),
    ]


def main() -> None:
    """Compare on each model."""
    parser = options(__doc__, turns=3)
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp784", "cnn", "cifarcnn"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--products", type=int, default=20, help="matrix products for the limit")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--private", action="store_true", help="compare ours and pfl, with noise")
    parser.add_argument("--procs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--peers-dir", type=Path, default=Path("../shared/peers"))
    parser.add_argument("--flower-python", help="interpreter with flwr[simulation]")
    parser.add_argument("--pfl-python", help="interpreter with pfl[pytorch]")
    parser.add_argument("--without", nargs="*", default=[], help="competitors to leave out")
    without = ["flower", "pfl", "fedlearn (compiled)", "fedlearn (sequential)"]
    small = {"models": ["mlp"], "turns": 1, "rounds": 2, "procs": 1, "without": without}
    small |= {"clients": 50, "cohort": 5, "products": 2}
    arguments = parse(parser, check=small)
    arguments.peers_dir = arguments.peers_dir.resolve()
    if arguments.check and not arguments.peers_dir.exists():
        print(f"skipped: {arguments.peers_dir} does not exist")
        return
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            report(compare(model, arguments, Path(folder)), arguments)


if __name__ == "__main__":
    main()
