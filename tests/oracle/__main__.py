"""The long walk: ``python -m tests.oracle --configurations 2000``.

Each configuration runs through fedlearn and through the reference. A disagreement is printed with
the smallest configuration found that still has it, and the command that repeats it. A walk is a
function of its seed: ``--seed S --skip K`` continues a walk that was stopped after K.
"""

import argparse
import itertools
import os
import sys
from collections import Counter
from tempfile import TemporaryDirectory

import torch

from tests.oracle.configuration import Configuration
from tests.oracle.covering import walk
from tests.oracle.faults import FAULTS, find_disagreement
from tests.oracle.walk import judge, shrink


def main() -> int:
    """Return 1 if fedlearn and the reference disagree, or a fault goes unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--configurations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="of the walk; drawn if left out")
    parser.add_argument("--skip", type=int, default=0, help="configurations that are done already")
    parser.add_argument("--only", help="one configuration: its options as JSON")
    parser.add_argument("--faults", action="store_true", help="print which faults the walk catches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        if options.faults:
            return _faults()
        if options.only is not None:
            return _only(Configuration.from_json(options.only))
        seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
        return _long(seed, skip=options.skip, num=options.configurations)


def _only(c: Configuration) -> int:
    verdict = judge(c)
    _say(verdict.kind, *verdict.problems)
    return verdict.kind == "disagrees"


def _long(seed: int, *, skip: int, num: int) -> int:
    _say(f"seed {seed}")
    counts = Counter[str]()
    for number, c in enumerate(itertools.islice(walk(seed), skip, num), start=skip):
        verdict = judge(c)
        counts[verdict.kind] += 1
        if verdict.kind == "disagrees":
            _say(f"configuration {number} disagrees:", *verdict.problems)
            _say(f"  smallest: python -m tests.oracle --only '{shrink(c).to_json()}'")
        if number % 100 == 99:
            _say(f"{number + 1} done: {dict(counts)}; go on with --seed {seed} --skip {number + 1}")
    _say(f"{sum(counts.values())} configurations: {dict(counts)}")
    return counts["disagrees"] > 0


def _faults() -> int:
    is_missed = False
    for fault in FAULTS:
        found = find_disagreement(fault)
        is_missed |= found is None
        _say(f"{fault.name}: {'MISSED' if found is None else found.to_json()}")
    return is_missed


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
