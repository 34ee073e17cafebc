"""A run spread over processes that torchrun has started."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedlearn.cli.app import main
from tests.addresses import free_addresses
from tests.processes import Launcher, json_lines


def start_command(*command: str, folder: Path) -> "subprocess.Popen[str]":
    """Start a command in a folder, from which it can import modules."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_end(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Wait until a command has ended; return the JSON lines on its standard output."""
    with process:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def alone(launcher: Launcher, *arguments: str, folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Run fedlearn in one process and return the JSON lines on its standard output."""
    with closing(launcher.launch(folder / arguments[0], *arguments, environ=os.environ)) as process:
        assert process.wait() == 0, process.tail()
        return json_lines(process.out())


@pytest.mark.slow
def test_torchrun_runs_the_same_simulation_once(launcher: Launcher, tmp_path: Path) -> None:
    """Two processes print and store one run, with the figures of a single process."""
    simulate = ("simulate", "--rounds", "4", "--json", "--runs-dir", "runs")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one = alone(launcher, *simulate, folder=tmp_path)
    spread = wait_for_end(start_command(*torchrun, "-m", "fedlearn", *simulate, folder=tmp_path))
    assert [line["event"] for line in spread] == [line["event"] for line in one]
    assert spread[-1]["accuracy"] == one[-1]["accuracy"]
    assert spread[-1]["loss"] == pytest.approx(one[-1]["loss"], abs=1e-5)
    assert len(alone(launcher, "runs", "--json", "--runs-dir", "runs", folder=tmp_path)) == 2


@pytest.mark.slow
def test_torchrun_shares_a_training_of_the_coordinator(launcher: Launcher, tmp_path: Path) -> None:
    """As on two machines: progress is shown once, one model is written, and no other files.

    Only the process that writes the model shuts its interpreter down. In the other, a thread that
    still runs would abort the shutdown, and with it a training that has succeeded.
    """
    training = {"num_steps": 20, "report_every": 10, "batch_size": 32, "share": 0.5}
    sets = [f"coordinator.training.{key}={value}" for key, value in training.items()]
    words = [word for each in sets for word in ("--set", each)]
    train = ("train", "--json", "--runs-dir", "runs", *words, "--output")
    single = alone(launcher, *train, "alone.safetensors", folder=tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, pathlib\n"
        "if rank := os.environ.get('RANK'):\n"
        "    atexit.register(pathlib.Path(f'ended-{rank}').touch)\n"
    )
    (head,) = free_addresses(1)
    torchrun = (
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", head, "--rdzv-id", "1"),
    )
    spread = ("spread.safetensors", "--set", "coordinator.training.replicate=2")
    machines = [
        start_command(*torchrun, "-m", "fedlearn", *train, *spread, folder=tmp_path)
        for _ in range(2)
    ]
    together = [line for machine in machines for line in wait_for_end(machine)]
    assert [path.name for path in tmp_path.glob("ended-*")] == ["ended-0"]
    assert [line.get("step_num") for line in together] == [10, 20, None]
    assert together[-1]["loss"] == pytest.approx(single[-1]["loss"], abs=1e-4)
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "spread"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=1e-4)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.usefixtures("surroundings")
def test_a_mesh_of_another_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the processes wait for each other."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("coordinator.training.num_steps=2", "coordinator.training.replicate=3")
    sets = [word for each in words for word in ("--set", each)]
    assert main(["train", *sets, "--set", "coordinator.training.batch_size=3"]) != 0
    said = capsys.readouterr().err
    assert "the mesh replicate 3 needs 3 processes, but torchrun has started 2" in said
