"""Simulation, client and commands with the standard library of macOS and of Windows.

See :mod:`tests.elsewhere.sitecustomize` for what is emulated and what is not.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import fedlearn
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import TrainReply
from fedlearn.testing import FakeCoordinator
from tests.processes import Launcher

ELSEWHERE = Path(__file__).parents[1] / "elsewhere"
ROOT = Path(fedlearn.__file__).parents[1]
SYSTEMS = pytest.mark.parametrize("system", ["darwin", "win32"])
LONG_S = 300.0

#: Prints which names a module of fedlearn, and one of another package, can see.
LOOKS = """
import json
program = '''
seen = []
for name in {names!r}:
    module, _, attribute = name.partition(".")
    try:
        seen.append(hasattr(__import__(module, globals()), attribute))
    except ImportError:
        seen.append(False)
'''
scopes = [dict(__name__="fedlearn.anything"), dict(__name__="other")]
for scope in scopes:
    exec(program, scope)
print(json.dumps([scope["seen"] for scope in scopes]))
"""

SIMULATION = """
from hashlib import sha256
import numpy as np
import torch
from torch import nn
import fedlearn as fl

def make_model():
    return nn.Linear(64, 10)

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 64)), rng.integers(0, 10, 400)
    clients = fl.Dirichlet(num_clients=8, alpha=0.5, min_examples=5)
    data = fl.from_arrays(x, y, partition=clients, test_fraction=0.2, seed=0)
    algorithm = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=16, learning_rate=0.3))
    run = fl.simulate(make_model, data, algorithm, num_rounds=2, engine={"num_workers": 2})
    model = torch.cat([each.detach().flatten() for each in run.load_model().parameters()])
    print(sha256(model.numpy().tobytes()).hexdigest())
"""

#: Prints a line for each command: its exit code and its output.
COMMANDS = """
import contextlib, io, json, sys
from fedlearn.cli.app import main

for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    print(json.dumps({"code": code, "said": said.getvalue()}))
"""

TRAINER = """
from fedlearn.client import LocalEvaluation, LocalResult

class Trainer:
    num_examples = 5
    device = "cpu"
    honors = ("epochs",)

    def train(self, tensors, *, context):
        context.control.check()
        changed = {name: value + 1 for name, value in tensors.items()}
        return LocalResult(tensors=changed, num_examples=5, metrics={"loss": 0.5}, state={})

    def evaluate(self, tensors, *, control):
        return LocalEvaluation(num_examples=5, metrics={"loss": 0.5})
"""

APPLICATION = """
import sys
from fedlearn.client import Agent
home, trainer, invitation = sys.argv[1:]
with Agent(home, trainer=trainer, invitation=invitation) as agent:
    agent.give_consent()
    input()
    print(agent.status().num_accepted, agent.revoke_consent(wait=60), flush=True)
agent.forget()
"""


def there(system: str) -> dict[str, str]:
    """Return the environment of a process that sees another system's standard library."""
    paths = os.pathsep.join([str(ELSEWHERE), str(ROOT)])
    named = {"PYTHONPATH": paths, "FEDLEARN_TEST_PLATFORM": system}
    return {**os.environ, **named, "OMP_NUM_THREADS": "1"}


def output(system: str, *arguments: str, cwd: Path) -> str:
    """Run a Python program there, which must succeed; return its output."""
    done = run(system, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(system: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        env=there(system),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("system", "lacks"),
    [
        ("darwin", {"os.posix_fadvise", "os.fdatasync", "os.pidfd_open", "os.sched_getaffinity"}),
        (
            "win32",
            {
                "os.posix_fadvise",
                "os.fdatasync",
                "os.pidfd_open",
                "os.sched_getaffinity",
                "os.fork",
                "os.pread",
                "signal.SIGKILL",
                "select.poll",
                "fcntl.flock",
                "resource.getrlimit",
            },
        ),
        ("", set()),
    ],
)
def test_fedlearn_sees_what_a_system_has_and_others_see_linux(
    system: str, lacks: set[str], tmp_path: Path
) -> None:
    """According to typeshed. Control: without a system named, fedlearn sees Linux too."""
    names = sorted(
        {"os.posix_fadvise", "os.fdatasync", "os.pidfd_open", "os.sched_getaffinity", "os.fork"}
        | {"os.pread", "signal.SIGKILL", "select.poll", "fcntl.flock", "resource.getrlimit"}
        | {"os.replace", "signal.SIGTERM"}
    )
    ours, others = json.loads(output(system, "-c", LOOKS.format(names=names), cwd=tmp_path))
    assert {name for name, is_seen in zip(names, ours, strict=True) if not is_seen} == lacks
    assert all(others)


@pytest.fixture(scope="module")
def digest_here(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the simulation's model on this system, where workers are forks."""
    script = tmp_path_factory.mktemp("here") / "script.py"
    script.write_text(SIMULATION)
    stem = script.with_name("simulation")
    with closing(launcher.launch(stem, script=script, environ=os.environ)) as process:
        assert process.wait() == 0, process.tail()
        return process.out().splitlines()[-1]


@pytest.mark.slow
@SYSTEMS
def test_workers_that_are_started_anew_give_the_same_model(
    system: str, digest_here: str, tmp_path: Path
) -> None:
    """To the bit. The script has the usual guard for starting processes."""
    (tmp_path / "script.py").write_text(SIMULATION)
    assert output(system, "script.py", cwd=tmp_path).splitlines()[-1] == digest_here


@pytest.mark.slow
def test_a_script_without_a_guard_and_what_cannot_be_sent_are_told_so(tmp_path: Path) -> None:
    """The error says what to do."""
    bare = SIMULATION.replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "bare.py").write_text(bare)
    assert "under `if __name__" in run("win32", "bare.py", cwd=tmp_path).stderr
    hidden = SIMULATION.replace("fl.simulate(make_model", "fl.simulate(lambda: nn.Linear(64, 10)")
    (tmp_path / "hidden.py").write_text(hidden)
    done = run("win32", "hidden.py", cwd=tmp_path)
    assert "cannot be sent to its workers" in done.stderr
    assert "leave engine.num_workers out" in done.stderr


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.mark.slow
@SYSTEMS
def test_an_application_takes_part_and_withdraws(
    system: str, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """From its invitation to its withdrawal, after which no files are left."""
    trainer, home = tmp_path / "trainer.py", tmp_path / "home"
    trainer.write_text(TRAINER)
    arguments = [str(home), f"{trainer}:Trainer", str(coordinator.invite("laptop"))]
    (tmp_path / "application.py").write_text(APPLICATION)
    with subprocess.Popen(
        [sys.executable, "application.py", *arguments],
        env=there(system),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            coordinator.wait_for(1, timeout_s=LONG_S)
            import torch  # noqa: PLC0415 - the rest of this file does without

            answers = coordinator.train({"weight": torch.zeros(4)}, {"epochs": 1}, deadline_s=60.0)
            assert isinstance(answers["laptop"], TrainReply), answers
            until_s = SystemClock().now_s() + 1.0
            while SystemClock().now_s() < until_s:
                SystemClock().sleep(0.1)  # for the receipt
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().split() == ["1", "True"]
            assert process.wait(LONG_S) == 0
        finally:
            process.kill()
    assert not home.exists()


@pytest.mark.slow
@SYSTEMS
def test_commands_work_and_a_coordinator_says_where_it_runs(system: str, tmp_path: Path) -> None:
    """A simulation, its record, and a starter configuration, all in one interpreter."""
    few = ("--set", "num_rounds=2", "--set", "engine.num_workers=1", "--name", "some")
    commands = [["simulate", *few], ["runs"], ["show", "some"], ["init"]]
    commands += [["coordinator"], ["demo"]] if system == "win32" else [["invite", "a"]]
    done = output(system, "-c", COMMANDS, json.dumps(commands), cwd=tmp_path)
    simulate, runs, show, init, *last = (json.loads(line) for line in done.splitlines())
    assert [each["code"] for each in (simulate, runs, show, init)] == [0, 0, 0, 0]
    assert "some" in runs["said"]
    assert "accuracy" in show["said"]
    if system == "win32":
        for refused in last:
            assert refused["code"] != 0
            assert (
                "a coordinator runs only on Linux and macOS, but this is win32" in refused["said"]
            )
    else:
        assert last[0]["code"] == 0
        assert "invitation" in last[0]["said"]
