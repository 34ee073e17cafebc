"""A certificate is renewed by joining again, in place: real processes of `fedlearn join`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedlearn.client.home import Enrolment, Home
from fedlearn.core.messages import TrainReply
from fedlearn.testing import FakeCoordinator
from fedlearn.transport.grpc_client import enrol
from fedlearn.transport.identity import Identity, Invitation

WAIT_S = 120.0
MODEL = {"weight": torch.zeros(4)}

#: Counts its trainings in its state.
SOURCE = """
from fedlearn.client import LocalResult

class Trainer:
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


@contextmanager
def joined(invitation: Path, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run `fedlearn join` until the block ends."""
    command = [sys.executable, "-m", "fedlearn", "join", str(invitation)]
    options = ["--task", f"{folder / 'trainer.py'}:Trainer", "--home", str(folder / "home")]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=WAIT_S)  # before the pipe is closed, which it still writes to


def trained(coordinator: FakeCoordinator) -> float:
    """Return how many trainings the laptop's state has seen, this one included."""
    coordinator.wait_for(1, timeout_s=WAIT_S)
    reply = coordinator.train(MODEL, {"epochs": 1}, deadline_s=WAIT_S)["laptop"]
    assert isinstance(reply, TrainReply)
    return reply.metrics["finished"]


def enrolment(folder: Path) -> Enrolment:
    found = Home(folder / "home").enrolment()
    assert found is not None
    return found


@pytest.mark.slow
def test_joining_with_a_new_invitation_renews_in_place(tmp_path: Path) -> None:
    """New keys and a new certificate; the client's number and its state are those of before."""
    (tmp_path / "trainer.py").write_text(SOURCE)
    with FakeCoordinator() as coordinator:
        other = Invitation.load(coordinator.invite("other"))
        asyncio.run(enrol(other.enrolment_addresses[0], other, Identity.create()))
        first = coordinator.invite("laptop").rename(tmp_path / "first.invitation")
        with joined(first, tmp_path) as process:
            assert trained(coordinator) == 1.0
        assert process.returncode == 0
        before = enrolment(tmp_path)
        second = coordinator.invite("laptop")
        with joined(second, tmp_path) as process:
            assert trained(coordinator) == 2.0
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "enrolled"
        after = enrolment(tmp_path)
        assert (before.client_id, after.client_id) == (1, 1)
        assert after.identity.public_key != before.identity.public_key
        assert after.certificate_pem != before.certificate_pem
        assert after.is_with(Invitation.load(second))
        with joined(first, tmp_path) as process:  # an old one changes nothing
            assert trained(coordinator) == 3.0
            assert process.stdout is not None
            assert process.stdout.readline().startswith("connected")
        assert enrolment(tmp_path).certificate_pem == after.certificate_pem
