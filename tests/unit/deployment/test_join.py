"""What ``fedlearn join`` prints, and what ``--check`` says of a client's own file."""

import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import EvaluateReply, Failure
from fedlearn.deployment.join import check_before, join
from fedlearn.errors import DeploymentError
from fedlearn.testing import FakeCoordinator


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[policy]\nmax_epochs = 3", "ok   config: {file} can be used\n"),
        (
            "[policy.secure_aggregation]\nmin_cohort = 3",
            "warn config: {file}: policy.secure_aggregation.min_cohort is 3, below 4: two",
        ),
        (
            "[policy]\nmax_epoch = 3",
            "BAD  config: {file}:2: policy.max_epoch: unknown key; did you mean policy.max_epochs?",
        ),
    ],
)
def test_the_file_is_looked_at_before_the_network(tmp_path: Path, text: str, line: str) -> None:
    """What is wrong with it does not keep the rest from being looked at."""
    file, out = tmp_path / "client.toml", io.StringIO()
    file.write_text(text)

    def check(invitation: Path) -> None:
        check_before(invitation, task=None, home=tmp_path / "home", config=file, out=out)

    with FakeCoordinator() as coordinator:
        if not line.startswith("BAD"):
            check(coordinator.invite("clinic-a"))
        else:
            with pytest.raises(DeploymentError, match="cannot take part yet: config;"):
                check(coordinator.invite("clinic-a"))
    assert out.getvalue().startswith(line.format(file=file))
    assert "TLS: its certificate" in out.getvalue()


@pytest.mark.usefixtures("own_path")
def test_a_trainer_beside_the_user_is_found_before_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is by joining; one that is nowhere is not."""
    monkeypatch.chdir(tmp_path)
    Path("fedlearn_test_beside.py").write_text(TRAINER)
    out = io.StringIO()
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("clinic-a")

        def check(task: str) -> None:
            check_before(invitation, task=task, home=tmp_path / "home", config=None, out=out)

        check("fedlearn_test_beside:trainer")
        with pytest.raises(DeploymentError, match="cannot take part yet: data;"):
            check("fedlearn_test_nowhere:trainer")
    assert "there is no module fedlearn_test_nowhere" in out.getvalue()


def test_without_a_file_nothing_is_said_of_it(tmp_path: Path) -> None:
    """The defaults are fine."""
    out = io.StringIO()
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("clinic-a")
        check_before(invitation, task=None, home=tmp_path / "home", config=None, out=out)
    assert "config" not in out.getvalue()


TRAINER = """import os
import torch
from torch import nn
from fedlearn.client import TorchTrainer

class Trainer(TorchTrainer):
    def train(self, tensors, *, context):
        raise RuntimeError("no tape in the drive")

def trainer():
    return Trainer.of(lambda: nn.Linear(4, 3), torch.randn(12, 4), torch.arange(12) % 3)

def unset():
    return os.environ["FEDLEARN_NO_SUCH_VARIABLE"]
"""


def take_part(folder: Path, invitation: Path, name: str) -> str:
    """Join until somebody stops this process; return what was printed."""
    (folder / "trainer.py").write_text(TRAINER)
    out = io.StringIO()
    join(
        invitation,
        task=f"{folder / 'trainer.py'}:{name}",
        home=folder / "home",
        config=None,
        require_secure_aggregation=False,
        out=out,
    )
    return out.getvalue()


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what joining adds to where modules are found."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("own_path")
def test_a_failure_and_an_evaluation_are_printed_as_what_they_are(tmp_path: Path) -> None:
    """By the trainer's line, and by the round that was finished."""
    settings = settings_of(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))
    with FakeCoordinator() as coordinator, ThreadPoolExecutor(1) as thread:

        def ask() -> tuple[object, object]:
            try:
                coordinator.wait_for(1, timeout_s=60.0)
                trained = coordinator.train(nn.Linear(4, 3), settings)["clinic-a"]
                return trained, coordinator.evaluate(nn.Linear(4, 3))["clinic-a"]
            finally:
                if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    os.kill(os.getpid(), signal.SIGTERM)

        invitation = coordinator.invite("clinic-a")
        asked = thread.submit(ask)
        printed = take_part(tmp_path, invitation, "trainer")
        trained, evaluated = asked.result(timeout=60.0)
    assert trained == Failure("RuntimeError")
    assert isinstance(evaluated, EvaluateReply)
    place = f"{tmp_path / 'trainer.py'}:8, in train"
    lines = [line for line in printed.splitlines() if line.startswith("round")]
    assert lines[:2] == [
        "round 1: training",
        f"round 1: failed: {place}: RuntimeError: no tape in the drive",
    ]
    assert lines[2:4] == ["round 1: evaluating", "round 1: uploading"]
    assert "round 2" not in printed


@pytest.mark.usefixtures("own_path")
def test_a_trainer_that_cannot_be_made_is_named_by_its_line(tmp_path: Path) -> None:
    """Not as something unexpected."""
    with (
        FakeCoordinator() as coordinator,
        pytest.raises(DeploymentError, match=r"trainer.py:14, in unset: KeyError: 'FEDLEARN_NO_"),
    ):
        take_part(tmp_path, coordinator.invite("clinic-a"), "unset")
