"""A simulation on a GPU matches the CPU's up to rounding."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlearn.cli.app import main

#: After a few rounds in float32, since a GPU sums in another order.
CLOSE = 2e-3

pytestmark = pytest.mark.usefixtures("surroundings")

OWN = ("coordinator.training.share=0.1", "coordinator.training.batch_size=16")
SECURE = ("secure_aggregation.mode=complete", "secure_aggregation.clip_norm=5")
NOISE = ("privacy.clip_norm=1", "privacy.noise_multiplier=1", "privacy.target_delta=1e-5")

ALIKE = {
    "plain": (),
    "kept": ("algorithm.name=scaffold", "algorithm.num_clients=1000"),
    "adaptive": ("algorithm.name=fedadam",),
    "all updates": ("algorithm.name=fedmedian",),
    "momentum": ("client.momentum=0.9", "client.keep_momentum=true", "client.learning_rate=0.01"),
    "sessions": ("engine.transport=memory",),
    "by client": ("evaluation.clients=5",),
    "rounded": (*SECURE, "secure_aggregation.simulate_as=modular_sum"),
    "masked": (*SECURE, "engine.transport=memory"),
    "coordinator": (
        *OWN,
        "coordinator.training.num_steps=3",
        "coordinator.training.every_rounds=1",
    ),
    "distilled": (*OWN, "coordinator.training.distil_steps=2"),
}

NOISED = {
    "central": (*NOISE, "privacy.mode=central"),
    "following": (*NOISE, "privacy.mode=central", "privacy.clip_quantile=0.5"),
    "banded": (*NOISE, "privacy.mode=central", "privacy.bands=2", "cohort.sampling=cyclic"),
    "distributed": (
        *(*NOISE, "privacy.mode=distributed", "secure_aggregation.mode=complete"),
        "secure_aggregation.simulate_as=modular_sum",
    ),
    "local": (*NOISE, "privacy.mode=local"),
    "example": (*NOISE, "privacy.mode=example"),
}


def read_output(*words: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    """Run a command; return its JSON lines."""
    code = main([*words, "--json", "--runs-dir=runs"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def simulate(*sets: str, rounds: int = 2) -> list[str]:
    return ["simulate", f"--rounds={rounds}", *(f"--set={each}" for each in sets)]


@pytest.mark.parametrize("sets", ALIKE.values(), ids=list(ALIKE))
def test_a_run_is_that_of_the_cpu(
    sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Including all state of strategies and clients, which is on the GPU too."""
    found, expected = (
        read_output(*simulate(f"engine.device={device}", *sets), capsys=capsys)
        for device in ("cuda", "cpu")
    )
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=CLOSE)


@pytest.mark.parametrize("sets", NOISED.values(), ids=list(NOISED))
def test_a_run_with_noise_comes_to_its_end(
    sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise is drawn on the CPU, and added on the device of the sums."""
    last = read_output(*simulate("engine.device=cuda", *sets), capsys=capsys)[-1]
    assert math.isfinite(last["loss"])


@pytest.mark.parametrize("sets", [ALIKE["kept"], ALIKE["adaptive"]], ids=["kept", "adaptive"])
def test_a_run_goes_on_from_a_checkpoint(
    sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint written from the GPU is loaded back to it."""
    every = ("engine.device=cuda", "store.checkpoint_every_s=0.001", *sets)
    words = [*simulate(*every, rounds=3), "--name=mine"]
    first = read_output(*words, capsys=capsys)[-1]
    again = read_output("resume", "mine", "--from-previous", capsys=capsys)[-1]
    assert again["loss"] == pytest.approx(first["loss"], abs=CLOSE)


def test_auto_takes_the_gpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line of output and the record name it."""
    first = read_output(*simulate(), capsys=capsys)[0]
    assert "device cuda, 1 worker" in json.dumps(first)


def lines(*command: str) -> list[dict[str, float]]:
    """Run a command and return the JSON lines on its standard output."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("processes", [1, 2])
def test_torchrun_gives_each_process_a_gpu(
    processes: int, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """NCCL reduces the sums, or there is one process; rank 0's values travel through gloo."""
    if processes == 2:
        request.getfixturevalue("two_gpus")
    words = simulate("engine.device=cuda", *ALIKE["kept"])
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    found = lines(*torchrun, "-m", "fedlearn", *words, "--json", "--runs-dir=runs")
    expected = read_output(*words, capsys=capsys)
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=CLOSE)


def test_more_processes_than_gpus_are_refused() -> None:
    """Each rank reports so before it waits for the others."""
    count = torch.cuda.device_count() + 1
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "fedlearn", *simulate("engine.device=cuda")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert f"torchrun has started {count} processes on this machine" in done.stderr
    assert not Path("fedlearn-runs").exists()


def test_more_processes_than_gpus_may_compute_on_the_cpu() -> None:
    """A process that is to compute on the CPU takes no GPU."""
    count = torch.cuda.device_count() + 1
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    words = [*simulate("engine.device=cpu"), "--json", "--runs-dir=runs"]
    found = lines(*torchrun, "-m", "fedlearn", *words)
    assert math.isfinite(found[-1]["loss"])
