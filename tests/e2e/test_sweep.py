"""A sweep whose processes are killed ends with the numbers of one that nobody disturbed."""

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedlearn.cli.app import main
from tests.processes import Launcher, Process, children_of, json_lines, until

NUM_RUNS, NUM_ROUNDS = 4, 40

pytestmark = pytest.mark.slow


def write_sweep(folder: Path) -> None:
    """Write a folder of CSV files, an experiment on them, and a sweep with a variant that samples.

    Every round is committed, and a row of one file is left out.
    """
    (folder / "sites").mkdir()
    for number, name in enumerate(("aachen", "berlin", "celle")):
        rows = [f"{20 + 7 * k % 60},{'fm'[k % 2]},{'yes' if k % 3 else 'no'}" for k in range(30)]
        rows[number] = f"{number + 40},f,yes"
        Path(folder, "sites", f"{name}.csv").write_text("\n".join(["age,sex,ill", *rows]) + "\n")
    with Path(folder, "sites", "celle.csv").open("a") as file:
        file.write(",m,yes\n")
    (folder / "experiment.toml").write_text(
        f"num_rounds = {NUM_ROUNDS}\n"
        "[data]\n"
        'source = "csv"\npath = "sites"\nlabel_column = "ill"\none_hot = ["sex"]\n'
        'missing = "drop"\nstandardize = true\ntest_fraction = 0.3\n'
        "[store]\ncheckpoint_every_s = 0.0\n"
        "[client]\nlearning_rate = 0.1\nbatch_size = 4\n"
        "[evaluation]\nclients = 3\n"
    )
    (folder / "sweep.toml").write_text(
        'experiment = "experiment.toml"\nseeds = 2\njobs = 2\n'
        "[variants.all]\n[variants.two]\ncohort.num_wanted = 2\n"
        'algorithm = { name = "fedadam", server_learning_rate = 0.05 }\n'
    )


def start(launcher: Launcher, folder: Path, number: int) -> Process:
    command = ("sweep", "sweep.toml", "--runs-dir", "runs", "--json")
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return launcher.launch(folder / f"sweep-{number}", *command, environ=environ, cwd=folder)


def workers_of(process: Process) -> list[int]:
    """Return the processes of the pool, without the one that tracks their resources."""
    found = children_of(process.pid)
    return [each for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def count_committed(runs_dir: Path) -> int:
    """Return the sum of the runs' last committed rounds."""
    last = dict[str, int]()
    for path in runs_dir.glob("sweep-*/checkpoints/round-*.safetensors"):
        found = re.match(r"round-(\d+)", path.name)
        assert found is not None
        last[path.parts[-3]] = max(last.get(path.parts[-3], 0), int(found[1]))
    return sum(last.values())


def numbers_in(runs_dir: Path) -> tuple[Any, Any, Any]:
    """Return all that a sweep found out."""
    facts = json.loads((runs_dir / "sweep" / "results.json").read_text())
    return facts["variants"], facts["comparisons"], facts["clients"]


def wait_for_rounds(sweep: Process, runs_dir: Path, num: int) -> None:
    def is_there() -> bool:
        assert sweep.is_running, sweep.tail()
        return count_committed(runs_dir) >= num

    until(is_there, told=sweep.tail)


def is_gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{each}/exe").exists() for each in pids)


def test_a_sweep_that_is_killed_again_and_again_ends_with_the_same_numbers(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sweep(tmp_path)
    runs_dir = tmp_path / "runs"

    # A worker dies in the middle of its run, and then its parent in the middle of another.
    first = start(launcher, tmp_path, 1)
    wait_for_rounds(first, runs_dir, 10)
    os.kill(workers_of(first)[0], signal.SIGKILL)
    wait_for_rounds(first, runs_dir, count_committed(runs_dir) + 40)
    left = workers_of(first)
    first.kill()
    until(lambda: is_gone(left))  # a pool does not outlive its sweep

    # All processes die at once.
    second = start(launcher, tmp_path, 2)
    wait_for_rounds(second, runs_dir, count_committed(runs_dir) + 10)
    for each in [*workers_of(second), second.pid]:
        os.kill(each, signal.SIGKILL)
    second.close()
    assert count_committed(runs_dir) < NUM_RUNS * NUM_ROUNDS

    # The parent dies as soon as it has workers.
    third = start(launcher, tmp_path, 3)
    until(lambda: bool(workers_of(third)), told=third.tail)
    left = workers_of(third)
    third.kill()
    until(lambda: is_gone(left))

    # A run whose worker was killed went on in another.
    assert not any(line.get("error") for each in (first, second) for line in json_lines(each.out()))
    last = start(launcher, tmp_path, 4)
    assert last.wait() == 0, last.tail()
    assert last.said("rows_left_out") == 1, last.tail()

    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "sweep.toml", "--runs-dir", "undisturbed", "--jobs", "1"]) == 0
    assert numbers_in(runs_dir) == numbers_in(tmp_path / "undisturbed")
    assert count_committed(runs_dir) == NUM_RUNS * NUM_ROUNDS
