"""One command shows a whole deployment: real processes, real training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_reaches_the_accuracy_of_the_simulation(tmp_path: Path) -> None:
    """On digits that five client processes hold; nothing runs on afterwards."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
    done = subprocess.run(
        [sys.executable, "-m", "fedlearn", "demo", "--rounds", "8", "--keep", "demo"],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(
        re.findall(r"accuracy of (the deployed run|its simulation) +([0-9.]+)", done.stdout)
    )
    deployed, simulated = float(found["the deployed run"]), float(found["its simulation"])
    assert simulated > 0.9
    assert abs(deployed - simulated) < 0.03
    assert len(re.findall(r"^round \d+/8: ", done.stdout, re.MULTILINE)) == 8
    running = subprocess.run(
        ["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert running.stdout == ""
