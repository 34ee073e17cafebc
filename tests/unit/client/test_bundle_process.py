"""What the code of a bundle can do in its process, and what it cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlearn.client.bundle_messages import decode_message, encode_message
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_runner import BundleRunner, find_lacking
from fedlearn.client.bundle_store import Approval, BundleStore
from fedlearn.client.bundle_trainer import BundleTrainer
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import BundleEnded, BundleFailed, BundleRefused, Cancelled, ProtocolError
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalResult,
    NullControl,
    TaskControl,
    TrainContext,
)
from tests.bundles import build

CODE = """
import os, signal, socket, torch
from pathlib import Path
from fedlearn.client import LocalEvaluation, LocalResult


class Trainer:
    honors = ("extra",)
    num_examples = 7

    def train(self, tensors, *, context):
        words = str(context.extra["code"])
        exec(words, {"context": context, **globals()})
        context.control.report(fraction=1.0, loss=0.5)
        context.control.save({"step": torch.ones(1)})
        new = {name: each + 1 for name, each in tensors.items()}
        state = {"seen": context.state.get("seen", torch.zeros(1)) + 1}
        return LocalResult(tensors=new, num_examples=7, metrics={"loss": 0.5}, state=state)

    def evaluate(self, tensors, *, control):
        return LocalEvaluation(num_examples=7, metrics={"loss": 0.25})
"""

pytestmark = pytest.mark.slow

LIMITS = BundlePolicy(
    max_memory_bytes=1 << 30, max_wall_s=120.0, max_cpu_s=120.0, max_processes=100, num_cores=1
)


class Recording(NullControl):
    """Records what a training reports and saves."""

    def __init__(self) -> None:
        self.reports = list[float]()
        self.saved: Mapping[str, torch.Tensor] = {}

    def report(self, *, fraction: float, loss: float) -> None:
        self.reports.append(fraction)

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.saved = tensors


class CancelledSoon(NullControl):
    """Cancels the training when it is looked at for the first time."""

    def check(self) -> None:
        raise Cancelled("enough")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[BundleRunner]:
    home = tmp_path / "home"
    (home / "identity").mkdir(parents=True)
    (home / "identity" / "identity.pem").write_text("secret")
    runner = BundleRunner(home, LIMITS, num_threads=1)
    yield runner
    runner.close()


def approve(runner: BundleRunner, folder: Path, version: str = "1.0") -> str:
    """Store and approve a bundle, and return its digest."""
    store = BundleStore(runner.home / "bundles")
    digest = store.add(build(folder, code=CODE, version=version).content).digest
    store.decide(digest, Approval.APPROVED, reason="", clock=SystemClock())
    return digest


def find_trainer(runner: BundleRunner, digest: str) -> BundleTrainer:
    """Return the trainer that a run's task gets, and end that task."""
    with runner.lend(digest, run_id="run") as trainer:
        return trainer


def train(
    trainer: BundleTrainer, code: str = "pass", control: TaskControl = UNATTENDED
) -> LocalResult:
    context = TrainContext(
        client_id=ClientId(1),
        round_num=0,
        settings={},
        seed=Seed(0),
        state={"seen": torch.ones(1)},
        control=control,
        extra={"code": code},
    )
    return trainer.train({"w": torch.zeros(2)}, context=context)


def test_an_approved_bundle_trains_without_network_keys_and_files(
    runner: BundleRunner, tmp_path: Path
) -> None:
    """The same code trains, reports and saves; what isolation forbids raises an error there."""
    trainer = find_trainer(runner, approve(runner, tmp_path / "a"))
    if trainer.process.missing is not None:
        pytest.skip(trainer.process.missing)
    control = Recording()
    result = train(trainer, control=control)
    assert torch.equal(result.tensors["w"], torch.ones(2))
    assert torch.equal(result.state["seen"], torch.full((1,), 2.0))
    assert (control.reports, set(control.saved)) == ([1.0], {"step"})
    assert trainer.evaluate({"w": torch.zeros(2)}, control=UNATTENDED).metrics == {"loss": 0.25}
    assert (trainer.num_examples, list(trainer.honors)) == (7, ["extra"])
    key = runner.home / "identity" / "identity.pem"
    assert key.read_text() == "secret"
    for code, error in {
        "socket.create_connection(('127.0.0.1', 9))": "Network is unreachable",
        f"open({str(key)!r})": "No such file",
        f"open({str(tmp_path / 'a' / 'trainer.py')!r})": "No such file",
        f"open({str(Path(torch.__file__).parent / 'new.py')!r}, 'w')": "Read-only",
        f"os.kill({os.getpid()}, 0)": "No such process",
        "os.kill(-1, signal.SIGKILL)": "No such process",
    }.items():
        with pytest.raises(BundleFailed, match=error):
            train(trainer, code)
    with pytest.raises(Cancelled):
        train(trainer, "while True: context.control.check()", CancelledSoon())
    assert train(trainer).num_examples == 7, "the process still works"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os._exit(0)", "ended itself"),
        ("os.abort()", "ended itself"),
        ("while True: pass", "processor time"),
        ("kept = [torch.ones(1 << 22) for _ in range(1 << 20)]", "memory"),
        ("while True: os.fork() or signal.pause()", "processes|memory"),
    ],
)
def test_a_bundle_that_exceeds_a_limit_is_ended(
    runner: BundleRunner, tmp_path: Path, code: str, why: str
) -> None:
    """With all its descendants; the next task gets a new process."""
    digest = approve(runner, tmp_path / "a")
    trainer = find_trainer(runner, digest)
    if "fork" in code and trainer.process.missing is not None:
        pytest.skip("only a namespace ends with all its processes")
    if why == "processor time":  # another limit may take longer to reach
        trainer.process.policy = replace(LIMITS, max_cpu_s=1.0)
    with pytest.raises((BundleEnded, BundleFailed), match=f"{why}|not enough memory"):
        train(trainer, code)
    if not trainer.process.is_alive:
        assert trainer.process.family() == []
        assert find_trainer(runner, digest) is not trainer
    assert train(find_trainer(runner, digest)).num_examples == 7


def test_only_what_is_approved_gets_a_process(runner: BundleRunner, tmp_path: Path) -> None:
    """Each time: a decision, and a change on disk, count for the next task."""
    digest = approve(runner, tmp_path / "a")
    store = BundleStore(runner.home / "bundles")
    trainer = find_trainer(runner, digest)
    assert find_trainer(runner, digest) is trainer
    store.decide(digest, Approval.REFUSED, reason="names", clock=SystemClock())
    with pytest.raises(BundleRefused, match="refused the bundle: names"):
        find_trainer(runner, digest)
    store.decide(digest, Approval.APPROVED, reason="", clock=SystemClock())
    (runner.home / "bundles" / f"{digest}.bundle").write_bytes(b"other code")
    with pytest.raises(BundleRefused, match="changed or damaged"):
        find_trainer(runner, digest)


def test_data_that_vanish_stop_a_bundle_before_its_task(
    runner: BundleRunner, tmp_path: Path
) -> None:
    """The coordinator hears that, and not where they were. Control: they are back."""
    digest, data = approve(runner, tmp_path / "a"), tmp_path / "mounted"
    runner.policy = replace(runner.policy, data=(str(data),))
    said = runner.explain_refusal(digest)
    assert "policy.bundles.data are missing" in said
    assert str(data) not in said
    data.mkdir()
    assert runner.explain_refusal(digest) == ""


def test_the_processes_of_two_bundles_are_kept(runner: BundleRunner, tmp_path: Path) -> None:
    """A third one ends that which was used longest ago, and a refusal ends that of its bundle."""
    first, second, third = (approve(runner, tmp_path / each, each) for each in ("a", "b", "c"))
    trainers = {each: find_trainer(runner, each) for each in (first, second)}
    assert find_trainer(runner, first) is trainers[first]
    find_trainer(runner, third)
    assert [each.process.is_alive for each in trainers.values()] == [True, False]
    store = BundleStore(runner.home / "bundles")
    store.decide(first, Approval.REFUSED, reason="", clock=SystemClock())
    assert runner.explain_refusal(first)
    assert not trainers[first].process.is_alive


def test_runs_at_the_same_time_have_processes_of_their_own(
    runner: BundleRunner, tmp_path: Path
) -> None:
    """None is ended while it works; afterwards, two are kept."""
    digest = approve(runner, tmp_path / "a")
    with ExitStack() as at_work:
        trainers = [at_work.enter_context(runner.lend(digest, run_id=each)) for each in "abc"]
        assert len({each.process for each in trainers}) == 3
        assert [train(each).num_examples for each in trainers] == [7, 7, 7]
    assert sum(each.process.is_alive for each in trainers) == 2


#: A machine whose kernel allows no further namespaces, as most containers are.
FORBIDDEN = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
IN_CONTAINER = """
import sys
from pathlib import Path
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_runner import BundleRunner
from fedlearn.deployment.approving import try_isolation

home, digest, isolation = Path(sys.argv[1]), *sys.argv[2:]
policy = BundlePolicy(isolation=isolation, num_cores=1)
runner = BundleRunner(home, policy, num_threads=1)
print("->", try_isolation(home, policy))
print("->", runner.explain_refusal(digest) or "runs")
if isolation != "required":
    with runner.lend(digest, run_id="run") as trainer:
        print("->", trainer.process.missing)
    runner.close()
"""


@pytest.mark.parametrize("isolation", ["required", "where possible"])
def test_where_namespaces_are_forbidden_the_policy_decides(
    runner: BundleRunner, tmp_path: Path, isolation: str
) -> None:
    """The owner and the coordinator read why; nothing that a bundle wrote stays on the disk."""
    digest = approve(runner, tmp_path / "a")
    (tmp_path / "in_container.py").write_text(IN_CONTAINER)
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, str(tmp_path / "in_container.py"), str(runner.home), digest]
    found = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", FORBIDDEN, *command, isolation],
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        check=False,
        capture_output=True,
        text=True,
    )
    if "unshare failed" in found.stderr:
        pytest.skip(found.stderr)
    assert found.returncode == 0, found.stderr
    missing = "the system does not allow user namespaces (user.max_user_namespaces is reached)"
    lines = found.stdout.splitlines()  # among those of the log
    told, refusal, *ran = (each[3:] for each in lines if each.startswith("-> "))
    assert told == missing
    if isolation == "required":
        assert refusal.startswith(f"bundles cannot be isolated on this machine: {missing}; allow")
    else:
        assert (refusal, ran) == ("runs", [missing])
    assert list((tmp_path / "temporary").iterdir()) == []


def test_requirements_are_named_and_not_installed(tmp_path: Path) -> None:
    """With the command that would. Control: the installed version."""
    pin = " --hash=sha256:" + "a" * 64
    lacking = find_lacking(
        build(tmp_path / "a", requirements=f"torch==0.1{pin}\nno-such==1.0{pin}")
    )
    assert f"torch==0.1 ({torch.__version__})" in lacking
    assert "pip install no-such==1.0 torch==0.1" in lacking
    public = torch.__version__.partition("+")[0]
    assert find_lacking(build(tmp_path / "b", requirements=f"torch=={public}{pin}")) == ""
    elsewhere = f"no-such==1.0 ; sys_platform == 'cp/m'{pin}"
    assert find_lacking(build(tmp_path / "c", requirements=elsewhere)) == ""


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xff\xff\xff", b"\0\0\0\2[]" + bytes(8), b"\0\0\0\2{}x"]
)
def test_malformed_messages_of_a_bundle_are_refused(data: bytes) -> None:
    """Control: a message as it should be."""
    values, tensors = decode_message(encode_message({"what": "save"}, {"a": torch.ones(2)}))
    assert values == {"what": "save"}
    assert torch.equal(tensors["a"], torch.ones(2))
    with pytest.raises(ProtocolError):
        decode_message(data)
