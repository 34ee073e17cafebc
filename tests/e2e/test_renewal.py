"""A client renews its certificate by joining again: real processes of `fedlearn join`."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.core.messages import TrainReply
from fedlearn.identity.identity import Identity, Invitation
from fedlearn.testing import FakeCoordinator
from fedlearn.transport.grpc_client import enrol
from tests.processes import LONG_S, Launcher, Process

MODEL = {"weight": torch.zeros(4)}

#: A trainer that counts its trainings in its state.
SOURCE = """
from fedlearn.client import LocalResult

class Trainer:
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        finished = context.state.get("finished", 0) + next(iter(tensors.values())).new_ones(())
        return LocalResult(
            tensors=tensors,
            num_examples=1,
            metrics={"finished": float(finished)},
            state={"finished": finished},
        )

    def evaluate(self, tensors, *, control): ...
"""


@dataclass(frozen=True)
class Laptop:
    """A folder with a trainer, in which processes of `fedlearn join` run."""

    launcher: Launcher
    folder: Path

    @contextmanager
    def joined(self, invitation: Path, name: str) -> Iterator[Process]:
        """Run one until the block ends; names of its log files start with ``name``."""
        command = ["join", str(invitation), "--task", "trainer.py:Trainer", "--home", "home"]
        process = self.launcher.launch(self.folder / f"{name}.log", *command, environ=os.environ)
        try:
            yield process
            process.send(signal.SIGTERM)
            assert process.wait() == 0, process.tail()
        finally:
            process.close()


def trained(coordinator: FakeCoordinator) -> float:
    """Let the laptop train once; return the number of trainings that its state has counted."""
    coordinator.wait_for(1, timeout_s=LONG_S)
    reply = coordinator.train(MODEL, {"epochs": 1}, deadline_s=LONG_S)["laptop"]
    assert isinstance(reply, TrainReply)
    return reply.metrics["finished"]


def enrolment(folder: Path) -> Enrolment:
    found = Home(folder / "home").keys.load_enrolment()
    assert found is not None
    return found


@pytest.mark.slow
def test_joining_with_a_new_invitation_renews_in_place(launcher: Launcher, tmp_path: Path) -> None:
    """Keys and certificate are new; the client's id and its state stay."""
    (tmp_path / "trainer.py").write_text(SOURCE)
    laptop = Laptop(launcher, tmp_path)
    with FakeCoordinator() as coordinator:
        other = Invitation.load(coordinator.invite("other"))
        asyncio.run(enrol(other.token_addresses[0], other, Identity.create()))
        first = coordinator.invite("laptop").rename(tmp_path / "first.invitation")
        with laptop.joined(first, "first"):
            assert trained(coordinator) == 1.0
        before = enrolment(tmp_path)
        second = coordinator.invite("laptop")
        with laptop.joined(second, "second") as process:
            assert trained(coordinator) == 2.0
            assert process.out().startswith("enrolled\n")
        after = enrolment(tmp_path)
        assert (before.client_id, after.client_id) == (1, 1)
        assert after.identity.public_key != before.identity.public_key
        assert after.certificate_pem != before.certificate_pem
        assert after.has_redeemed(Invitation.load(second))
        with laptop.joined(first, "old") as process:  # an old one changes nothing
            assert trained(coordinator) == 3.0
            assert process.out().startswith("connected")
        assert enrolment(tmp_path).certificate_pem == after.certificate_pem
