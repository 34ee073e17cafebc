"""Run each benchmark briefly, to see that it works.

    python simulations/bench/check.py [SCRIPT ...]

Each script runs in a fork of this process, and so do the programs that it starts, so that
imports, most of a short run, are paid once.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import harness  # first: it prepares gRPC before anything imports it
from forks import Nursery

import fedlearn.experiment.simulate
import fedlearn.gateway.server
import fedlearn.testing
import fedlearn.training.local_data  # noqa: F401 (as the others: for the forks)

HERE = Path(__file__).parent
_NO_BENCHMARKS = {"check.py", "forks.py", "harness.py"}


def run(script: str, errors: int) -> None:
    """Run one script in this process, with its standard error in the file ``errors``."""
    os.dup2(errors, 2)
    harness.start_program = Nursery().start
    sys.argv = [script, "--check"]
    runpy.run_path(script, run_name="__main__")


def works(script: Path) -> bool:
    """Run one script in a fork; print its errors if it fails."""
    with tempfile.TemporaryFile() as errors:
        process = multiprocessing.get_context("fork").Process(
            target=run, args=(str(script), errors.fileno())
        )
        process.start()
        process.join()
        if process.exitcode:
            errors.seek(0)
            print(f"{errors.read().decode()}\n{script} failed", flush=True)
    return process.exitcode == 0


def main() -> None:
    """Check the scripts named, or all."""
    everything = sorted(path for path in HERE.glob("*.py") if path.name not in _NO_BENCHMARKS)
    scripts = [Path(each) for each in sys.argv[1:]] or everything
    failed = [script for script in scripts if not works(script)]
    raise SystemExit(len(failed))


if __name__ == "__main__":
    main()
