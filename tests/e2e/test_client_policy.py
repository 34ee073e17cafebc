"""``fedlearn join`` with a configuration file: what it refuses, and where it reports that."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import Failure, TrainReply
from fedlearn.testing import FakeCoordinator
from tests.processes import LONG_S, Launcher, Process

SETTINGS = settings_of(fl.LocalSgd(epochs=3, batch_size=10, learning_rate=0.1))
TRAINER = """
import torch
from torch import nn
from fedlearn.client import TorchTrainer


def trainer():
    return TorchTrainer.of(lambda: nn.Linear(4, 3), torch.randn(12, 4), torch.randint(0, 3, (12,)))
"""

pytestmark = pytest.mark.slow


@contextmanager
def joined(
    launcher: Launcher, folder: Path, coordinator: FakeCoordinator, *options: str
) -> Iterator[Process]:
    """Run ``fedlearn join`` until the block ends."""
    (folder / "trainer.py").write_text(TRAINER)
    invitation = coordinator.invite("clinic-a")
    arguments = ("join", str(invitation), "--task", "trainer.py:trainer", "--home", "home")
    process = launcher.launch(folder / "joined.log", *arguments, *options, environ=os.environ)
    try:
        coordinator.wait_for(1, timeout_s=LONG_S)
        yield process
        process.send(signal.SIGTERM)
        process.wait()
    finally:
        process.close()


def lines(process: Process, event: str) -> list[dict[str, Any]]:  # Any: of JSON
    return [each for each in process.log() if each["message"] == event]


@pytest.mark.parametrize(
    ("text", "options", "rule"),
    [
        ("[policy]\nmax_epochs = 2", (), "max_epochs"),
        ("[policy]\nmax_epochs = 3", (), None),
        ("", ("--require-secure-aggregation",), "secure_aggregation.required"),
        (
            "[policy.secure_aggregation]\nrequired = false",
            ("--require-secure-aggregation",),
            "secure_aggregation.required",
        ),
        ("[policy.secure_aggregation]\nrequired = true", (), "secure_aggregation.required"),
    ],
)
def test_what_a_client_refuses_is_in_its_file_and_its_log(
    launcher: Launcher, tmp_path: Path, text: str, options: tuple[str, ...], rule: str | None
) -> None:
    """The control is the second case. The option takes precedence over the file."""
    (tmp_path / "client.toml").write_text(text)
    own = ("--config", "client.toml", *options)
    with FakeCoordinator() as coordinator, joined(launcher, tmp_path, coordinator, *own) as process:
        reply = coordinator.train(nn.Linear(4, 3), SETTINGS, deadline_s=LONG_S)["clinic-a"]
    (start,) = lines(process, "policy_in_force")
    assert start["policy"]["secure_aggregation"]["required"] == (rule is not None and "req" in rule)
    if rule is None:
        assert isinstance(reply, TrainReply)
        assert lines(process, "refused_by_policy") == []
        return
    assert isinstance(reply, Failure)
    assert f"`{rule}`" in reply.reason
    (line,) = lines(process, "refused_by_policy")
    assert (line["level"], line["rule"], line["round_num"]) == ("warning", rule, 0)
    assert f"round 1: policy: {reply.reason}" in process.out()
