"""The benchmark of secure aggregation runs and its figures are possible; speed is not tested."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "simulations" / "bench" / "secagg.py"
SMALL = ("--clients", "10", "--size", "2000", "--dropped", "1", "--turns", "5")

pytestmark = pytest.mark.slow


def output(*options: str) -> str:
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def figures(*options: str) -> dict[str, dict[str, float]]:
    """Return what the benchmark measures, by part and by name."""
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(output("--json", *SMALL, *options)):
        found.setdefault(row["part"], {})[row["what"].strip()] = row["value"]
    return found


def test_every_part_measures_something() -> None:
    """Flower is left out, and no figure needs it."""
    found = figures("--without-flower")
    assert set(found) == {"fold", "clock", "client", "server", "upload"}
    assert found["fold"]["GB/s of masks on a core"] > 0
    assert 0 < found["fold"]["% of the bound"] < 200
    assert found["client"]["fedlearn, ms"] > found["client"]["mask, ms"] > 0
    assert found["server"]["fedlearn, s"] > found["server"]["unmask, s"] > 0
    assert 1.0 < found["upload"]["times the packed vector"] < 2.0
    assert "times as fast as Flower" not in found["fold"]


def test_flowers_functions_do_the_same_work() -> None:
    """They recover the secrets from their shares, and send twice as many bytes."""
    found = figures("--flower-server-turns", "1")
    for part in ("fold", "clock", "client", "server"):
        assert found[part]["times as fast as Flower"] > 0
    assert found["upload"]["Flower, times 4 d"] > 2.0


def test_curves_stand_beside_their_formulas(tmp_path: Path) -> None:
    """The upload is predicted to a few bytes; a complete graph and a sparse one."""
    path = tmp_path / "curves.csv"
    sizes = ("--curve-clients", "10", "120", "--curve-sizes", "1000", "5000")
    printed = output("--curves", "--csv", str(path), *sizes)
    assert "mask_setup" in printed
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n"], row["d"]) for row in rows] == [
        ("10", "1000"),
        ("10", "5000"),
        ("120", "1000"),
        ("120", "5000"),
    ]
    assert int(rows[0]["k"]) == 9
    assert int(rows[2]["k"]) < 119
    for row in rows:
        assert float(row["client"]) > 0
        assert float(row["server"]) > 0
        assert float(row["upload ratio"]) == pytest.approx(1.0, abs=0.01)
