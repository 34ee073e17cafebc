"""The benchmark of pace steering runs, and clients come as the door has told them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "simulations" / "bench" / "pace.py"

pytestmark = pytest.mark.slow


def figures(*options: str) -> dict[str, dict[str, Any]]:  # Any: JSON of the benchmark
    """Return what the benchmark measures, steered and not."""
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    rows = [json.loads(line) for line in completed.stdout.splitlines()]
    return {row["kind"]: row for row in rows}


def test_of_a_rush_everybody_is_told_when_to_come() -> None:
    """More at once than gRPC keeps by itself, and nobody comes in vain."""
    found = figures("--insecure", "--clients=1200", "--seconds=7", "--only=steered")["steered"]
    assert found["in_vain"] == 0
    assert sum(found["came"]) >= 1200, "some clients never came"
