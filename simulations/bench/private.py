"""Central differential privacy beside the plain simulation: round by round.

    python simulations/bench/private.py
    python simulations/bench/private.py --level example [--without-noise]
    python simulations/bench/private.py --beside pfl

Whole rounds on both sides, with store, validation and progress, on the same clients; the private
side clips, sums integers, draws discrete Gaussian noise and charges its ledger on top. The two are
let through by turns, one round each; the median ratio of neighbouring rounds stands in the table,
in seconds: 1.3 is what it should not exceed.

With `--level example` the private side is that of single examples, whose gradients are clipped and
have noise in each step. Without noise none is drawn or added, and all else is done as with it: the
clip, and sums that are cut to the grid of the noise. That should not exceed 2.

Beside pfl-research, both are private: whole programs by turns, and the median ratio of their rates.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from compare import Competitor, peer_python, run
from gate import Gated
from sequential import pair

HERE = Path(__file__).parent
#: Rounds before those that count: both sides touch their memory for the first time.
_WARMUP = 3


def ratios(model: str, arguments: argparse.Namespace) -> list[float]:
    """Return the private side's seconds over the plain one's, per pair of rounds."""
    num_rounds = _WARMUP + arguments.rounds
    command = [
        *(sys.executable, str(HERE / "ours.py"), "--model", model, "--warmup", "0"),
        *("--rounds", str(num_rounds + 1), "--cohort", str(arguments.cohort)),
        *("--procs", str(arguments.procs), "--executor", arguments.executor),
        *("--level", arguments.level),
    ]
    quiet = ["--without-noise"] if arguments.without_noise else []
    environ = {**os.environ, "PEERS_DIR": str(arguments.peers_dir)}
    programs: list[Gated] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, more in (("private", ["--private", *quiet]), ("plain", [])):
                programs.append(
                    Gated((*command, *more), name=name, folder=Path(folder), environ=environ)
                )
            rounds = [pair(programs, turn) for turn in range(num_rounds)]
        finally:
            for program in programs:
                program.close()
    return [private_s / plain_s for private_s, plain_s in rounds[_WARMUP:]]


def beside_pfl(model: str, arguments: argparse.Namespace) -> list[float]:
    """Return by turn our rate over pfl-research's, of private rounds both."""
    python = str(peer_python("pfl", arguments))
    competitors = [
        Competitor("fedlearn", (sys.executable, str(HERE / "ours.py"), "--private")),
        Competitor("pfl", (python, str(HERE / "private_pfl.py"), "--threads", "1")),
    ]
    workload = ["--model", model, "--rounds", str(arguments.rounds)]
    workload += ["--cohort", str(arguments.cohort), "--procs", str(arguments.procs)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            ours, theirs = (
                run(each, workload, Path(folder) / "weights.npz", arguments)["clients_per_s"]
                for each in competitors
            )
            found.append(ours / theirs)
    return found


def main() -> None:
    """Parse the arguments and print a line a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp784", "cnn"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--peers-dir", default="../shared/peers", type=Path)
    parser.add_argument("--level", choices=["client", "example"], default="client")
    parser.add_argument("--without-noise", action="store_true", help="with --level example")
    parser.add_argument("--beside", choices=["plain", "pfl"], default="plain")
    parser.add_argument("--turns", type=int, default=5, help="of whole programs, beside pfl")
    parser.add_argument("--pfl-python", help="of an environment with pfl[pytorch]")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    arguments = parser.parse_args()
    arguments.peers_dir, arguments.without = arguments.peers_dir.resolve(), []
    name, measure = "x " + arguments.beside, ratios if arguments.beside == "plain" else beside_pfl
    print(f"{'':10}{name:>12}{'quartiles':>16}{'pairs':>8}")
    for model in arguments.models:
        found = measure(model, arguments)
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{model:10}{middle:12.2f}{f'{low:.2f} to {high:.2f}':>16}{len(found):8}", flush=True)


if __name__ == "__main__":
    main()
