"""The output of ``fedlearn join``, and its ``--check`` of a client's configuration file."""

import io
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.cli.failures import BAD_INPUT, RUN_FAILED
from fedlearn.client.backoff import Backoff
from fedlearn.config import ClientConfig
from fedlearn.core.messages import EvaluateReply, Failure
from fedlearn.deployment import join as join_module
from fedlearn.deployment.check_client import check_device
from fedlearn.errors import DeploymentError
from fedlearn.testing import FakeCoordinator
from tests.processes import LONG_S, Launcher, Process, until


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
        (
            '[policy.bundles]\ndata = ["/nowhere"]',
            "BAD  config: policy.bundles.data: /nowhere: missing, or not readable;",
        ),
    ],
)
def test_the_file_is_looked_at_before_the_network(tmp_path: Path, text: str, line: str) -> None:
    """An error in the file does not stop the other checks."""
    file, out = tmp_path / "client.toml", io.StringIO()
    file.write_text(text)

    def check(invitation: Path) -> None:
        check_device(invitation, task=None, home=tmp_path / "home", config=file, out=out)

    with FakeCoordinator() as coordinator:
        if not line.startswith("BAD"):
            check(coordinator.invite("clinic-a"))
        else:
            with pytest.raises(DeploymentError, match="cannot take part yet: config;"):
                check(coordinator.invite("clinic-a"))
    assert out.getvalue().startswith(line.format(file=file))
    assert "TLS: its certificate" in out.getvalue()


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore ``sys.path`` after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("own_path")
def test_a_trainer_beside_the_user_is_found_before_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the working directory, as when joining. Control: a missing module is reported."""
    monkeypatch.chdir(tmp_path)
    Path("fedlearn_test_beside.py").write_text(TRAINER)
    out = io.StringIO()
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("clinic-a")

        def check(task: str) -> None:
            check_device(invitation, task=task, home=tmp_path / "home", config=None, out=out)

        check("fedlearn_test_beside:trainer")
        with pytest.raises(DeploymentError, match="cannot take part yet: data;"):
            check("fedlearn_test_nowhere:trainer")
    assert "there is no module fedlearn_test_nowhere" in out.getvalue()


def test_without_a_file_nothing_is_said_of_it(tmp_path: Path) -> None:
    """Without a file the defaults hold, so there is nothing to report."""
    out = io.StringIO()
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("clinic-a")
        check_device(invitation, task=None, home=tmp_path / "home", config=None, out=out)
    assert "config" not in out.getvalue()


TRAINER = """import os
import time
import torch
from torch import nn
from fedlearn.client import TorchTrainer

class Trainer(TorchTrainer):
    def train(self, tensors, *, context):
        raise RuntimeError("no tape in the drive")

class Deaf(TorchTrainer):
    def train(self, tensors, *, context):
        time.sleep(3600)

def trainer(kind=Trainer):
    return kind.of(lambda: nn.Linear(4, 3), torch.randn(12, 4), torch.arange(12) % 3)

def deaf():
    return trainer(Deaf)

def unset():
    return os.environ["FEDLEARN_NO_SUCH_VARIABLE"]
"""
SETTINGS = settings_of(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))


@contextmanager
def joined(
    launcher: Launcher, folder: Path, coordinator: FakeCoordinator, name: str
) -> Iterator[Process]:
    """Run ``fedlearn join`` with a trainer until the block ends."""
    (folder / "trainer.py").write_text(TRAINER)
    process = launcher.launch(
        folder / "joined.log",
        *("join", str(coordinator.invite("clinic-a")), "--home", "home"),
        *("--task", f"{folder / 'trainer.py'}:{name}"),
        environ=os.environ,
    )
    try:
        yield process
    finally:
        process.close()


@pytest.mark.slow
def test_a_failure_and_an_evaluation_are_printed_as_what_they_are(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The failure names the trainer's line, the evaluation the round before it.

    The run's id stands before its rounds, once.
    """
    with (
        FakeCoordinator() as coordinator,
        joined(launcher, tmp_path, coordinator, "trainer") as client,
    ):
        coordinator.wait_for(1, timeout_s=LONG_S)
        trained = coordinator.train(nn.Linear(4, 3), SETTINGS, deadline_s=LONG_S)["clinic-a"]
        evaluated = coordinator.evaluate(nn.Linear(4, 3))["clinic-a"]
        client.send(signal.SIGTERM)
        assert client.wait() == 0, client.tail()
        printed = client.out()
    assert trained == Failure("RuntimeError")
    assert isinstance(evaluated, EvaluateReply)
    place = f"{tmp_path / 'trainer.py'}:9, in train"
    lines = [line for line in printed.splitlines() if line.startswith(("round", "run"))]
    assert re.fullmatch(r"run [0-9a-f]{32}", lines.pop(0))
    assert lines[:2] == [
        "round 1: training",
        f"round 1: failed: {place}: RuntimeError: no tape in the drive",
    ]
    assert lines[2:4] == ["round 1: evaluating", "round 1: uploading"]
    assert "round 2" not in printed


@pytest.mark.slow
def test_a_trainer_that_cannot_be_made_is_named_by_its_line(
    launcher: Launcher, tmp_path: Path
) -> None:
    """It counts as bad input, not as an unexpected error, and is not retried."""
    with (
        FakeCoordinator() as coordinator,
        joined(launcher, tmp_path, coordinator, "unset") as client,
    ):
        assert client.wait() == BAD_INPUT, client.tail()
        (line,) = client.err().splitlines()
    assert line.startswith(f"fedlearn: {tmp_path / 'trainer.py'}:22, in unset: KeyError: 'FEDLEARN")


class Restoring(io.StringIO):
    """Standard output; once a failed start is printed, it makes the program available again."""

    def __init__(self, program: Path) -> None:
        super().__init__()
        self.program = program

    def write(self, text: str) -> int:
        if "it cannot be started" in text:
            self.program.rename(self.program.with_name("python"))
        return super().write(text)


@pytest.mark.slow
@pytest.mark.linux
def test_a_client_outlives_a_moment_in_which_it_cannot_start_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is short of memory kills a training, and soon has some again.

    The first process that cannot be started ends the command.
    """
    python = tmp_path / "python"
    # The guard next to the training process uses the same Python, and must have started.
    python.write_text(f"""#!{sys.executable}
import os, socket, sys, time
if "-c" in sys.argv:
    open({str(tmp_path / "guarded")!r}, "w").close()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
while not os.path.exists({str(tmp_path / "guarded")!r}):
    time.sleep(0.01)
if not os.path.exists({str(tmp_path / "crashed")!r}):
    open({str(tmp_path / "crashed")!r}, "w").close()
    os.rename({str(python)!r}, {str(tmp_path / "gone")!r})
    os._exit(7)
link = socket.socket(fileno=int(sys.argv[-1]))
link.sendall(b'{{"kind": "failed", "message": "it was started", "is_final": true}}\\n')
""")
    python.chmod(0o700)
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    monkeypatch.setattr(join_module, "find_interpreter", lambda: str(python))
    out = Restoring(tmp_path / "gone")
    with FakeCoordinator() as coordinator:
        start = partial(
            join_module.join,
            coordinator.invite("clinic-a"),
            task="trainer:it",
            home=tmp_path / "home",
            config=ClientConfig(),
            out=out,
        )
        with pytest.raises(DeploymentError, match="it was started"):
            start()
        crash, no_start = out.getvalue().splitlines()
        assert crash == "crashed: exit code 7"
        assert no_start.startswith("crashed: it cannot be started: ")
        python.unlink()
        with pytest.raises(DeploymentError, match=r"cannot be started: .*No such file"):
            start()


def state_of(pid: int) -> str:
    """Return the letter of a process's state in /proc; ``T`` means stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_the_terminal_and_the_kernel_end_both_processes(launcher: Launcher, tmp_path: Path) -> None:
    """Ctrl-Z stops both; a training that ignores SIGTERM is ended; SIGKILL of one ends both."""
    with FakeCoordinator() as coordinator, ThreadPoolExecutor(1) as thread:
        with joined(launcher, tmp_path, coordinator, "deaf") as client:
            coordinator.wait_for(1, timeout_s=LONG_S)
            thread.submit(coordinator.train, nn.Linear(4, 3), SETTINGS, deadline_s=1.0)
            until(lambda: "round 1: training" in client.out(), told=client.tail)
            signal.pidfd_send_signal(client.descriptor, signal.SIGTSTP)
            until(lambda: state_of(client.training) == "T" == state_of(client.pid))
            signal.pidfd_send_signal(client.descriptor, signal.SIGCONT)
            until(lambda: state_of(client.training) != "T" != state_of(client.pid))
            client.send(signal.SIGTERM)
            assert client.wait() == RUN_FAILED, client.tail()
        with joined(launcher, tmp_path, coordinator, "trainer") as client:
            coordinator.wait_for(1, timeout_s=LONG_S)
            training = os.pidfd_open(client.training)
            signal.pidfd_send_signal(client.descriptor, signal.SIGKILL)
            assert select.select([training], [], [], LONG_S)[0], "it trains on"
            os.close(training)
