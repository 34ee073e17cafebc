"""Our sequential executor, the fall-back for any model, beside a bare loop: round by round.

    python simulations/bench/sequential.py

Whole rounds on both sides, ours with store, validation and progress; the same clients, model and
arithmetic, and as many processes. The two are let through by turns, one round each, so the ratio
of two neighbouring rounds is that of two programs and not of two moments; the median of them
stands in the table. What it should not fall below is 0.95.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gate import Gated

HERE = Path(__file__).parent
#: Rounds before those that count: both sides touch their memory for the first time.
_WARMUP = 2


def ratios(model: str, arguments: argparse.Namespace) -> list[float]:
    """Return the bare loop's seconds over ours, per pair of rounds: above 1 we are faster."""
    num_rounds = _WARMUP + arguments.rounds
    workload = [
        *("--model", model, "--rounds", str(num_rounds + 1), "--warmup", "0"),
        *("--cohort", str(arguments.cohort), "--procs", str(arguments.procs)),
    ]
    ours = (str(HERE / "ours.py"), *workload, "--executor", arguments.executor)
    bare = (str(HERE / "bare.py"), *workload, "--threads", "1")
    environ = {**os.environ, "PEERS_DIR": str(Path(arguments.peers_dir).resolve())}
    programs: list[Gated] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, command in (("ours", ours), ("bare", bare)):
                programs.append(
                    Gated(
                        (sys.executable, *command), name=name, folder=Path(folder), environ=environ
                    )
                )
            rounds = [pair(programs, turn) for turn in range(num_rounds)]
        finally:
            for program in programs:
                program.close()
    return [bare_s / ours_s for ours_s, bare_s in rounds[_WARMUP:]]


def pair(programs: Sequence[Gated], turn: int) -> tuple[float, float]:
    """Return the seconds of a round of each; who begins alternates."""
    ours, bare = programs
    if turn % 2:
        bare_s = bare.round_s()
        return ours.round_s(), bare_s
    ours_s = ours.round_s()
    return ours_s, bare.round_s()


def main() -> None:
    """Parse the arguments and print a line a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp784", "cnn", "cifarcnn"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--procs", type=int, default=os.cpu_count())
    parser.add_argument("--executor", default="sequential")
    parser.add_argument("--peers-dir", default="../shared/peers")
    arguments = parser.parse_args()
    print(f"{'':10}{'x bare loop':>12}{'quartiles':>16}{'rounds':>8}")
    for model in arguments.models:
        found = ratios(model, arguments)
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{model:10}{middle:12.2f}{f'{low:.2f} to {high:.2f}':>16}{len(found):8}", flush=True)


if __name__ == "__main__":
    main()
