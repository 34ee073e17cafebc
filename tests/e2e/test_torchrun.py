"""torchrun spreads a run over processes that it has started itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def lines(*command: str, folder: Path) -> list[dict[str, object]]:
    """Run a command and return the JSON lines on its standard output."""
    completed = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


@pytest.mark.slow
def test_torchrun_runs_the_same_simulation_once(tmp_path: Path) -> None:
    """Two processes print and store one run, with the figures of a single process."""
    simulate = ("-m", "fedlearn", "simulate", "--rounds", "4", "--json", "--runs-dir", "runs")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone = lines(*simulate, folder=tmp_path)
    spread = lines(*torchrun, *simulate, folder=tmp_path)
    assert [line["event"] for line in spread] == [line["event"] for line in alone]
    assert spread[-1]["accuracy"] == alone[-1]["accuracy"]
    assert spread[-1]["loss"] == pytest.approx(alone[-1]["loss"], abs=1e-5)
    runs = lines("-m", "fedlearn", "runs", "--json", "--runs-dir", "runs", folder=tmp_path)
    assert len(runs) == 2
