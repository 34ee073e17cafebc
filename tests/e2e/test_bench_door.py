"""The benchmark of the door runs, and its figures are possible ones; how fast is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "simulations" / "bench" / "door.py"

pytestmark = pytest.mark.slow


def figures(folder: Path, *options: str) -> dict[str, dict[str, float]]:
    """Return what the benchmark measures, by part and by name."""
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--dir", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(completed.stdout):
        found.setdefault(row["part"], {})[row["what"]] = row["value"]
    return found


def test_every_part_measures_something(tmp_path: Path) -> None:
    """Small: 20 clients, 4 MB models, and one round that counts beside one SuperNode."""
    found = figures(
        tmp_path,
        *("--clients", "20", "--rounds", "2", "--idle-s", "0.5", "--nodes", "1"),
        *("--message-rounds", "5", "--flower-rounds", "1", "--memory-mb", "4"),
        *("--memory-clients", "3", "--upload-mb", "4", "--turns", "2"),
    )
    connected, messages, memory, upload = (
        found[part] for part in ("connected", "messages", "memory", "upload")
    )
    assert connected["clients"] == 20
    assert connected["memory for one idle client, kB"] > 0
    assert 0 < connected["overhead of a round with all, s"] < 60
    assert connected["updates a second"] > 1
    assert messages["answers a second, 1 clients"] > 1
    assert messages["answers a second, SuperLink with 1 SuperNodes"] > 0
    assert messages["ratio"] == pytest.approx(
        messages["answers a second, 1 clients"]
        / messages["answers a second, SuperLink with 1 SuperNodes"]
    )
    assert memory["model, MB"] == 4.0
    assert memory["idle memory, MB, the model included"] > 50
    assert memory["highest memory over idle, models"] > 1
    for tls in ("TLS", "no TLS"):
        assert upload[f"the door, {tls}, MB/s"] > 0
        assert upload[f"plain gRPC stream, {tls}, MB/s"] > 0
        assert upload[f"the door, % of the stream, {tls}"] > 0
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
