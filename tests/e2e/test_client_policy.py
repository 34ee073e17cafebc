"""``fedlearn join`` under its own file: what it refuses, where it says so."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedlearn as fl
from fedlearn.core.messages import Failure, TrainReply
from fedlearn.testing import FakeCoordinator

LONG_S = 180.0
SETTINGS = fl.LocalSgd(epochs=3, batch_size=10, learning_rate=0.1).settings()
TRAINER = """
import torch
from torch import nn
from fedlearn.client import TorchTrainer


def trainer():
    return TorchTrainer.of(lambda: nn.Linear(4, 3), torch.randn(12, 4), torch.randint(0, 3, (12,)))
"""

pytestmark = pytest.mark.slow


@dataclass
class Joined:
    """What a client's process has written when it is over."""

    told: str = ""
    log: str = ""

    def lines(self, event: str) -> list[Mapping[str, Any]]:  # Any: of JSON
        found = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [each for each in found if each["event"] == event]


@contextmanager
def joined(folder: Path, coordinator: FakeCoordinator, *options: str) -> Iterator[Joined]:
    """Run ``fedlearn join`` until the block ends."""
    (folder / "trainer.py").write_text(TRAINER)
    invitation = coordinator.invite("clinic-a")
    arguments = ("join", str(invitation), "--task", "trainer.py:trainer", "--home", "home")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlearn", *arguments, *options],
        cwd=folder,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = Joined()
    try:
        coordinator.wait_for(1, timeout_s=LONG_S)
        yield said
        process.terminate()
        said.told, said.log = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
        process.communicate()


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
    tmp_path: Path, text: str, options: tuple[str, ...], rule: str | None
) -> None:
    """Control: the second case. The option wins over the file."""
    (tmp_path / "client.toml").write_text(text)
    own = ("--config", "client.toml", *options)
    with FakeCoordinator() as coordinator, joined(tmp_path, coordinator, *own) as said:
        reply = coordinator.train(nn.Linear(4, 3), SETTINGS, deadline_s=LONG_S)["clinic-a"]
    (start,) = said.lines("policy_in_force")
    assert start["policy"]["secure_aggregation"]["required"] == (rule is not None and "req" in rule)
    if rule is None:
        assert isinstance(reply, TrainReply)
        assert said.lines("refused_by_policy") == []
        return
    assert isinstance(reply, Failure)
    assert f"`{rule}`" in reply.reason
    (line,) = said.lines("refused_by_policy")
    assert (line["level"], line["rule"], line["round_num"]) == ("warning", rule, 0)
    assert f"round 1: policy: {reply.reason}" in said.told
