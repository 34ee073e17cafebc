"""``fedlearn demo`` shows a whole deployment: real processes, real training."""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from fedlearn.deployment.demo import DemoProcesses, _follow_rounds


@pytest.mark.slow
def test_the_demo_reaches_the_accuracy_of_the_simulation(tmp_path: Path) -> None:
    """Five client processes hold the digits, and no process is left afterwards."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
    done = subprocess.run(
        [sys.executable, "-m", "fedlearn", "demo", "--rounds", "8", "--keep", "demo"],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        timeout=600,
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


def test_a_coordinator_that_has_ended_is_heard_to_its_last_line(tmp_path: Path) -> None:
    """Its process may end while its output is still being read, which is not an error."""
    line = '{"event": "round", "round": 1, "rounds": 1, "accuracy": 0.5, '
    line += '"reported": 5, "late": 0, "failed": 0}'
    program = f"import os\nif os.fork():\n    os._exit(0)\nos.system('sleep 1')\nprint('{line}')"
    stage = DemoProcesses(tmp_path, StringIO(), {})
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as coordinator:
        stage._running["coordinator"] = coordinator  # noqa: SLF001 (it is no fedlearn process)
        assert _follow_rounds(coordinator, stage) == 0.5
