"""Applications with an agent, its training process and a real gateway."""

import asyncio
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlearn.client.agent import Agent, AgentStatus
from fedlearn.client.backoff import Backoff
from fedlearn.client.conditions import Conditions, Probes
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import Resources
from fedlearn.client.policy import Policy
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId, Failure, TrainReply
from fedlearn.errors import DeploymentError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.identity.identity import Invitation
from fedlearn.testing import FakeCoordinator
from fedlearn.testing.local_gateway import ANYWHERE
from fedlearn.transport.grpc_client import enrol

WAIT_S = 120.0
#: Deadline of a training that is meant to fail; long enough for it to start.
SHORT_S = 12.0
CLOCK = SystemClock()
MODEL = {"weight": torch.zeros(4)}

#: Trains in steps of a hundredth of a second until there is a file ``free`` next to it.
SOURCE = """
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from fedlearn.client import LocalEvaluation, LocalResult, TorchTrainer
from fedlearn.errors import Cancelled, DataError

HERE = Path(__file__).parent

class Trainer:
    num_examples = 5
    device = "cpu"

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        if (HERE / "crash").exists():
            os._exit(9)
        step = int(context.control.load().get("step", torch.tensor(0)))
        (HERE / "threads").write_text(f"{torch.get_num_threads()} {os.nice(0)}")
        (HERE / f"begun-at-{step}").touch()
        while not (HERE / "free").exists():
            stop_here(context.control)
            step += 1
            context.control.save({"step": torch.tensor(step)})
            context.control.report(fraction=0.5, loss=0.25)
            time.sleep(0.01)
        finished = context.state.get("finished", torch.tensor(0.0)) + 1
        return LocalResult(
            tensors={name: value + 1 for name, value in tensors.items()},
            num_examples=5,
            metrics={"loss": 0.25, "finished": float(finished)},
            state={"finished": finished},
        )

    def evaluate(self, tensors, *, control):
        (HERE / "evaluating").touch()
        while not (HERE / "free").exists():
            stop_here(control)
            time.sleep(0.01)
        return LocalEvaluation(num_examples=5, metrics={"loss": 1.0})

def stop_here(control):
    try:
        control.check()
    except Cancelled:
        (HERE / "stopped-at-a-batch").touch()
        raise

def hospital(num_patients):
    labels = torch.zeros(num_patients, dtype=torch.int64)
    return TorchTrainer.of(lambda: nn.Linear(2, 2), torch.zeros(num_patients, 2), labels)

def small():
    return hospital(6)

def large():
    return hospital(7)

class Deaf(Trainer):
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        (HERE / "begun-at-0").touch()
        time.sleep(3600)

class Prefetching(Trainer):
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        if not (HERE / "worker").exists():
            fork = multiprocessing.get_context("fork")
            worker = fork.Process(target=work_on)  # no daemon: Python would wait for its end
            worker.start()
            (HERE / "worker").write_text(str(worker.pid))
        return super().train(tensors, context=context)

class Escaping(Trainer):
    def train(self, tensors, *, context):
        if not (HERE / "worker").exists():  # in a session of its own, and soon without a parent
            script = "setsid sh -c 'echo $$ > worker.new; mv worker.new worker; exec sleep 3600' &"
            subprocess.run(["sh", "-c", script], cwd=HERE, check=True)
            while not (HERE / "worker").exists():
                time.sleep(0.01)
        return super().train(tensors, context=context)

class Keeping(Trainer):
    # sleeps in native code that lets no other thread run
    def train(self, tensors, *, context):
        import ctypes
        (HERE / "keeping").touch()
        ctypes.PyDLL(None).sleep(600)

def work_on():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)

def slow():
    (HERE / "making").touch()
    time.sleep(3600)

def exits():
    sys.exit(0)

def without_data():
    raise DataError("PART is not set")

def without_library():
    import no_such_library
"""


class Application:
    """An application: a folder, a trainer, and a queue of progress events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.trainer = folder / "trainer.py"
        self.trainer.write_text(SOURCE)
        self.invitation = folder / "nobodys.invitation"  # for a trainer that is never built
        self.invitation.touch()
        self.events: queue.Queue[AgentEvent] = queue.Queue()

    def agent(self, invitation: Path, **options: Any) -> Agent:  # Any: as of Agent
        settings: dict[str, Any] = {"trainer": f"{self.trainer}:Trainer", **options}
        return Agent(self.home, invitation=invitation, on_progress=self.events.put, **settings)

    def starting(self) -> str:
        """Return the lines of a script that start an agent and wait for its process."""
        trainer = f"{self.trainer}:slow"
        return f"""
from fedlearn.client import Agent
agent = Agent({str(self.home)!r}, trainer={trainer!r}, invitation={str(self.invitation)!r})
agent.give_consent()
agent.start()
while not agent.status().pid:
    pass
"""

    def wait_for(self, kind: EventKind) -> AgentEvent:
        while True:
            event = self.events.get(timeout=WAIT_S)
            if event.kind is kind:
                return event

    def free(self) -> None:
        (self.folder / "free").touch()

    def stopped_unix_s(self) -> float:
        """Return when the trainer was told to stop at a batch; infinity if it was killed."""
        stopped = self.folder / "stopped-at-a-batch"
        return stopped.stat().st_mtime if stopped.exists() else math.inf

    def begun(self) -> list[int]:
        """Return the steps at which trainings started."""
        return sorted(int(path.name[9:]) for path in self.folder.glob("begun-at-*"))


@pytest.fixture
def application(tmp_path: Path) -> Application:
    return Application(tmp_path)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@contextmanager
def taking_part(
    application: Application,
    coordinator: FakeCoordinator,
    **options: Any,  # Any: as of Agent
) -> Iterator[Agent]:
    """Run an agent with consent; the block starts when it may be sent tasks."""
    with application.agent(coordinator.invite("laptop"), **options) as agent:
        agent.give_consent()
        coordinator.wait_for(1, timeout_s=WAIT_S)
        yield agent


@contextmanager
def training(
    coordinator: FakeCoordinator, *, deadline_s: float = WAIT_S
) -> Iterator["Future[dict[str, TrainReply | Failure]]"]:
    """Let the connected clients train, in the background."""
    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(coordinator.train, MODEL, {"epochs": 1}, deadline_s=deadline_s)


def eventually(is_so: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    until_s = CLOCK.now_s() + WAIT_S
    while not is_so():
        assert CLOCK.now_s() < until_s, "it did not happen"
        CLOCK.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pid_of(agent: Agent) -> int:
    status: AgentStatus = agent.status()
    assert status.pid is not None
    return status.pid


@pytest.mark.slow
def test_an_application_takes_part_after_consent_and_not_before(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Starting is fast, progress is reported on another thread, and the update arrives."""
    agent = application.agent(coordinator.invite("laptop"), resources=Resources(niceness=5))
    fastest_s = math.inf
    for _ in range(5):  # at least one should not be slowed by other processes
        agent.stop()
        begin_s = CLOCK.now_s()
        agent.start()
        fastest_s = min(fastest_s, CLOCK.now_s() - begin_s)
    assert fastest_s < 0.2
    try:
        assert not agent.status().is_running
        assert coordinator.counters()["connections"] == 0
        agent.give_consent()
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator) as replies:
            progress = application.wait_for(EventKind.PROGRESS)
            assert (progress.round_num, progress.fraction, progress.loss) == (0, 0.5, 0.25)
            application.free()
        reply = replies.result()["laptop"]
        assert isinstance(reply, TrainReply)
        assert reply.lanes["delta"].tolist() == [1.0] * 4
        application.wait_for(EventKind.ACCEPTED)
        eventually(lambda: agent.status().num_accepted == 1)
        threads, niceness = (application.folder / "threads").read_text().split()
        assert (int(threads), int(niceness)) == (1, os.nice(0) + 5)
    finally:
        agent.stop()
    assert not agent.status().is_running


@pytest.mark.slow
def test_revoking_consent_stops_and_erases_and_consent_may_be_given_again(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """The training stops at a batch, and its process is gone when the call returns."""
    with taking_part(application, coordinator) as agent:
        with training(coordinator, deadline_s=SHORT_S) as replies:
            application.wait_for(EventKind.PROGRESS)
            pid, begin_unix_s = pid_of(agent), CLOCK.unix_s()
            assert agent.revoke_consent(wait=WAIT_S)
            assert application.stopped_unix_s() - begin_unix_s < 5.0
            assert not is_alive(pid)
        assert replies.result() == {}
        left = sorted(path.name for path in application.home.iterdir())
        assert left == ["consent", "identity", "lock"]
        assert not agent.status().has_consent
        agent.give_consent()
        coordinator.wait_for(1, timeout_s=WAIT_S)
        agent.forget()
        assert not application.home.exists()


@pytest.mark.slow
def test_revoking_consent_stops_an_evaluation(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Within one batch, like a training."""
    with taking_part(application, coordinator) as agent, ThreadPoolExecutor(1) as executor:
        replies = executor.submit(coordinator.evaluate, MODEL, deadline_s=SHORT_S)
        eventually((application.folder / "evaluating").exists)
        pid, begin_unix_s = pid_of(agent), CLOCK.unix_s()
        assert asyncio.run(agent.revoke_consent_async())
        assert application.stopped_unix_s() - begin_unix_s < 5.0
        assert not is_alive(pid)
        assert replies.result() == {}


@pytest.mark.slow
def test_a_coordinator_chooses_by_what_a_torch_trainer_says_of_its_data(tmp_path: Path) -> None:
    """With one patient too few, a hospital is connected but not asked."""
    requirements = Requirements(min_examples=7, devices=("cpu",))
    with FakeCoordinator(requirements=requirements) as coordinator, ExitStack() as stack:
        for name in ("small", "large"):
            (tmp_path / name).mkdir()
            application = Application(tmp_path / name)
            trainer = f"{application.trainer}:{name}"
            agent = application.agent(coordinator.invite(name), trainer=trainer)
            agent.give_consent()
            stack.enter_context(agent)
            application.wait_for(EventKind.CONNECTED)
        coordinator.wait_for(1, timeout_s=WAIT_S)
        assert coordinator.list_clients() == ["large"]


@pytest.mark.slow
def test_a_killed_training_process_comes_back_and_goes_on(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """From the checkpoint inside the task; its state counts the task once."""
    with taking_part(application, coordinator) as agent:
        with training(coordinator) as replies:
            application.wait_for(EventKind.PROGRESS)
            eventually(lambda: any(application.home.glob("tasks/*/checkpoint")))
            os.kill(pid_of(agent), signal.SIGKILL)
            assert "exit code -9" in application.wait_for(EventKind.CRASHED).message
            eventually(lambda: len(application.begun()) == 2)
            application.free()
        reply = replies.result()["laptop"]
        assert isinstance(reply, TrainReply)
        assert reply.metrics["finished"] == 1.0
        assert application.begun()[1] > 0


@pytest.mark.slow
def test_an_agent_that_is_stopped_and_started_delivers_once(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Like an application that is closed and opened again in the middle of a round."""
    invitation = coordinator.invite("laptop")
    agent = application.agent(invitation)
    with agent:
        agent.give_consent()
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator) as replies:
            application.wait_for(EventKind.PROGRESS)
            eventually(lambda: any(application.home.glob("tasks/*/checkpoint")))
            agent.stop()
            application.free()
            with application.agent(invitation):
                reply = replies.result(timeout=WAIT_S)["laptop"]
                application.wait_for(EventKind.ACCEPTED)
    assert isinstance(reply, TrainReply)
    assert application.begun()[1] > 0
    assert not list((application.home / "spool").iterdir())


@pytest.mark.slow
def test_a_worker_ends_with_a_training_process_that_is_killed(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """It does not delay the agent's notice of the end, and does not keep the folder locked."""
    trainer = f"{application.trainer}:Prefetching"
    with taking_part(application, coordinator, trainer=trainer) as agent:
        with training(coordinator, deadline_s=4 * SHORT_S):
            application.wait_for(EventKind.PROGRESS)
            worker = int((application.folder / "worker").read_text())
            try:
                os.kill(pid_of(agent), signal.SIGKILL)
                assert "exit code -9" in application.wait_for(EventKind.CRASHED).message
                eventually(lambda: not is_alive(worker))
                application.wait_for(EventKind.CONNECTED)
                assert agent.revoke_consent(wait=WAIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        assert not any(application.home.glob("tasks/*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Prefetching", "Escaping"])
def test_a_worker_ends_with_the_training_process_that_ends_in_order(
    application: Application,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Even if it is no daemon and ignores SIGTERM, or has left the group; nothing waits for it."""
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    trainer = f"{application.trainer}:{name}"
    with (
        taking_part(application, coordinator, trainer=trainer) as agent,
        training(coordinator, deadline_s=SHORT_S),
    ):
        application.wait_for(EventKind.PROGRESS)
        worker = int((application.folder / "worker").read_text())
        assert b"GRPC_ENABLE_FORK_SUPPORT=false" in Path(f"/proc/{worker}/environ").read_bytes()
        assert agent.stop(wait=10.0)  # a batch takes a moment, the worker an hour
        try:
            eventually(lambda: not is_alive(worker))
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_a_task_that_crashes_its_process_ends_as_a_failure(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """At once: the task is not retried on the device, and the round does not wait."""
    (application.folder / "crash").touch()
    with taking_part(application, coordinator), training(coordinator) as replies:
        reply = replies.result()["laptop"]
    assert isinstance(reply, Failure)
    assert reply.reason == "the training process ended during this task (exit code 9)"


@pytest.mark.slow
def test_the_application_knows_when_the_device_is_in_use(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Training stops after the batch, and continues from there when the user has left.

    It also continues, in the same process, when the application changes the conditions; then it
    obeys a new policy.
    """
    is_idle = threading.Event()
    agent = application.agent(
        coordinator.invite("laptop"),
        conditions=Conditions(idle=True),
        probes=Probes(idle=is_idle.is_set),
    )
    with agent:
        agent.give_consent()
        assert application.wait_for(EventKind.WAITING).message.startswith("idle")
        is_idle.set()
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator) as replies:
            application.wait_for(EventKind.PROGRESS)
            is_idle.clear()
            assert application.wait_for(EventKind.CANCELLED).message == "conditions"
            application.wait_for(EventKind.DISCONNECTED)
            assert not agent.status().is_connected
            pid = pid_of(agent)
            agent.change(conditions=Conditions())
            application.wait_for(EventKind.PROGRESS)
            application.free()
        assert isinstance(replies.result()["laptop"], TrainReply)
        assert application.begun()[1] > 0
        agent.change(policy=Policy(max_epochs=0))
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator) as replies:
            event = application.wait_for(EventKind.POLICY)
        assert "asked epochs = 1, allowed at most 0" in event.message
        assert isinstance(replies.result()["laptop"], Failure)
        assert pid_of(agent) == pid


@pytest.mark.slow
def test_an_agent_that_was_sent_away_comes_back_when_it_is_woken(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    """From any thread. Otherwise it stays away for as long as a full coordinator has asked."""
    coordinator.open(replace(ANYWHERE, max_connected=1, come_back_s=3000.0), run_id="f" * 32)
    applications = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        applications.append(Application(tmp_path / name))
    first, second = (
        each.agent(coordinator.invite(each.folder.name), trainer=f"{each.trainer}:small")
        for each in applications
    )
    with first, second:
        first.give_consent()
        applications[0].wait_for(EventKind.CONNECTED)
        second.give_consent()
        farewell = applications[1].wait_for(EventKind.DISCONNECTED).message
        assert farewell == "the coordinator has enough clients for now"
        first.stop(wait=WAIT_S)
        assert not second.status().is_connected
        waking = threading.Thread(target=second.wake)
        waking.start()
        waking.join()
        applications[1].wait_for(EventKind.CONNECTED)


@pytest.mark.slow
def test_training_that_does_not_listen_is_ended(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Its process is killed, within a bound."""
    trainer = f"{application.trainer}:Deaf"
    with (
        taking_part(application, coordinator, trainer=trainer) as agent,
        training(coordinator, deadline_s=SHORT_S),
    ):
        eventually(lambda: application.begun() == [0])
        pid, begin_s = pid_of(agent), CLOCK.now_s()
        assert not agent.stop()
        assert is_alive(pid)
        assert agent.stop(wait=30.0)
        assert CLOCK.now_s() - begin_s < 30.0
        assert not is_alive(pid)
        assert application.stopped_unix_s() == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Prefetching", "Escaping"])
def test_no_training_process_outlives_its_application(
    application: Application, coordinator: FakeCoordinator, name: str
) -> None:
    """Nor does one of its workers, even if the application is killed without warning."""
    invitation = coordinator.invite("laptop")
    script = f"""
from fedlearn.client import Agent
agent = Agent({str(application.home)!r}, trainer={f"{application.trainer}:{name}"!r},
              invitation={str(invitation)!r})
agent.give_consent()
agent.start()
while not agent.status().pid:
    pass
print(agent.status().pid, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator, deadline_s=SHORT_S):
            eventually(lambda: bool(application.begun()))
            worker = int((application.folder / "worker").read_text())
            process.kill()
            eventually(lambda: not is_alive(pid))
            eventually(lambda: not is_alive(worker))


@pytest.mark.slow
def test_an_invitation_that_is_refused_is_not_tried_for_ever(
    application: Application, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """The event has the reason, and the process ends."""
    invitation = coordinator.invite("laptop")
    with application.agent(invitation) as agent:
        agent.give_consent()
        coordinator.wait_for(1, timeout_s=WAIT_S)
    (tmp_path / "other").mkdir()
    stolen = Application(tmp_path / "other")
    with stolen.agent(invitation) as thief:
        thief.give_consent()
        assert stolen.wait_for(EventKind.FAILED).message
        eventually(lambda: not thief.status().is_running)


@contextmanager
def something_between() -> Iterator[tuple[str, "queue.Queue[None]"]]:
    """Answer without TLS, like a hotel's network; yields the address and a queue of visits."""
    visits: queue.Queue[None] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                stream, _ = server.accept()
                with stream:
                    if not stream.recv(1024):
                        return
                    stream.sendall(b"HTTP/1.1 302 Found\r\n\r\n")
                    visits.put(None)

        address: tuple[str, int] = server.getsockname()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(serve)
            try:
                yield f"127.0.0.1:{address[1]}", visits
            finally:
                socket.create_connection(address).close()


@pytest.mark.slow
@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_an_offline_client_is_quiet(
    application: Application,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    verbosity: str | None,
) -> None:
    """Also on standard error, unless the application's environment enables gRPC's logs."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    home, invitation = Home(application.home), coordinator.invite("laptop")
    invited, identity = Invitation.load(invitation), home.keys.load_next_identity()
    certificate_pem, client_id = asyncio.run(enrol(invited.token_addresses[0], invited, identity))
    with something_between() as (address, visits):
        moved = replace(invited, addresses=(address,))
        home.keys.enrol(moved, certificate_pem=certificate_pem, client_id=ClientId(client_id))
        with application.agent(invitation) as agent:
            agent.give_consent()
            application.wait_for(EventKind.OFFLINE)
            for _ in range(2):
                visits.get(timeout=WAIT_S)
    assert ("Handshake failed" in capfd.readouterr().err) is (verbosity is not None)
    assert "GRPC_VERBOSITY" not in os.environ or verbosity is not None


def has_thread(name: str) -> bool:
    return any(thread.name.startswith(name) for thread in threading.enumerate())


@pytest.mark.slow
def test_a_callback_that_fails_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread reports the exception, and the next event is still delivered."""
    reported: queue.Queue[threading.ExceptHookArgs] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", reported.put)
    heard: queue.Queue[str] = queue.Queue()

    def careless(event: AgentEvent) -> None:
        heard.put(threading.current_thread().name)
        raise RuntimeError("the application's own")

    with Agent(tmp_path / "home", trainer=f"{__file__}:Application", on_progress=careless) as agent:
        agent.give_consent()
        assert heard.get(timeout=WAIT_S).startswith("fedlearn-progress")
        last = agent.status().last
        assert last is not None
        assert "is not enrolled; pass the invitation" in last.message
        agent.give_consent()
        assert heard.get(timeout=WAIT_S)
    assert {reported.get(timeout=WAIT_S).exc_type for _ in range(2)} == {RuntimeError}
    eventually(lambda: not has_thread("fedlearn-progress"))  # so that no report reaches other tests


@pytest.mark.slow
def test_a_probe_that_fails_is_reported_and_asked_again(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as the training process runs."""
    reported: queue.Queue[threading.ExceptHookArgs] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", reported.put)

    def broken() -> bool:
        raise RuntimeError("the application's own")

    home, trainer = Home(application.home), f"{application.trainer}:slow"
    home.set_consent(granted=True)
    with Agent(
        home.folder,
        trainer=trainer,
        invitation=application.invitation,
        probes=Probes(idle=broken),
    ):
        assert {reported.get(timeout=WAIT_S).exc_type for _ in range(2)} == {RuntimeError}
    eventually(lambda: not has_thread("fedlearn-probes"))  # so that no report reaches other tests


@pytest.mark.slow
def test_a_revocation_that_cannot_be_kept_is_obeyed_all_the_same(application: Application) -> None:
    """The training process ends and all state is erased; then the application gets the error."""
    home = Home(application.home)
    home.set_consent(granted=True)
    with application.agent(application.invitation, trainer=f"{application.trainer}:slow") as agent:
        eventually((application.folder / "making").exists)
        pid, state = pid_of(agent), home.folder / "state"
        state.mkdir()
        (home.folder / "consent").unlink()
        (home.folder / "consent" / "in the way").mkdir(parents=True)
        with pytest.raises(DeploymentError, match="cannot remove"):
            agent.revoke_consent(wait=WAIT_S)
        assert not is_alive(pid)
        assert not state.exists()
        (home.folder / "consent" / "in the way").rmdir()
        (home.folder / "consent").rmdir()
        home.set_consent(granted=True)
        assert not agent.status().has_consent


@pytest.mark.slow
def test_consent_that_cannot_be_read_is_none_and_may_be_given_again(tmp_path: Path) -> None:
    """The agent waits for consent."""
    consent = tmp_path / "home" / "consent"
    consent.mkdir(parents=True)
    heard: queue.Queue[AgentEvent] = queue.Queue()
    trainer = f"{__file__}:Application"
    with Agent(tmp_path / "home", trainer=trainer, on_progress=heard.put) as agent:
        assert not agent.status().has_consent
        consent.rmdir()
        agent.give_consent()
        assert "is not enrolled" in heard.get(timeout=WAIT_S).message


@contextmanager
def kill_while_it_keeps_the_interpreter(
    application: Application, coordinator: FakeCoordinator
) -> Iterator[int]:
    """Kill an application whose trainer is inside native code; yields the trainer's process."""
    script = f"""
import time
from fedlearn.client import Agent
agent = Agent({str(application.home)!r}, trainer={f"{application.trainer}:Keeping"!r},
              invitation={str(coordinator.invite("laptop"))!r})
agent.give_consent()
agent.start()
while not agent.status().pid:
    time.sleep(0.01)
print(agent.status().pid, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        coordinator.wait_for(1, timeout_s=WAIT_S)
        with training(coordinator, deadline_s=SHORT_S):
            eventually((application.folder / "keeping").exists)
            process.kill()
            process.wait()
            assert is_alive(pid)
            try:
                yield pid
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_native_code_that_keeps_the_interpreter_does_not_outlive_its_application(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """Even though no other thread of its process can run."""
    with kill_while_it_keeps_the_interpreter(application, coordinator) as pid:
        eventually(lambda: not is_alive(pid))


@pytest.mark.slow
def test_consent_is_withdrawn_although_an_orphan_keeps_the_folder(
    application: Application, coordinator: FakeCoordinator
) -> None:
    """The next agent of the application ends the orphan at once."""
    with kill_while_it_keeps_the_interpreter(application, coordinator) as pid:
        agent = application.agent(coordinator.invite("again"))
        assert agent.revoke_consent(wait=WAIT_S)
        assert not is_alive(pid)
        assert not any(application.home.glob("tasks/*"))


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_an_application_that_is_killed_takes_a_process_with_it_that_still_starts(
    application: Application, *, forks: bool
) -> None:
    """Even if a forked worker of the application survives. Ctrl-C reaches only the application."""
    script = f"""
import os, time
{application.starting()}
worker = os.fork() if {forks} else 0
if {forks} and not worker:
    time.sleep(3600)
print(agent.status().pid, worker, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid, worker = map(int, process.stdout.readline().split())
        try:
            assert os.getpgid(pid) != os.getpgid(process.pid)
            eventually((application.folder / "making").exists)
            process.kill()
            eventually(lambda: not is_alive(pid))
            assert not forks or is_alive(worker)
        finally:
            if worker:
                os.kill(worker, signal.SIGKILL)
            process.kill()


@pytest.mark.slow
def test_an_application_that_is_killed_takes_a_process_with_it_that_still_imports(
    application: Application,
) -> None:
    """Importing torch takes seconds, here an hour; the process must notice the end meanwhile."""
    torch = application.folder / "torch"
    torch.mkdir()
    here = f"open({str(application.folder / 'making')!r}, 'w').close()"
    (torch / "__init__.py").write_text(f"import time\n{here}\ntime.sleep(3600)\n")
    script = f"""
import sys, time
sys.path.insert(0, {str(application.folder)!r})
{application.starting()}
print(agent.status().pid, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            eventually((application.folder / "making").exists)
            process.kill()
            eventually(lambda: not is_alive(pid))
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_what_leads_nowhere_is_told_before_there_is_a_process(application: Application) -> None:
    """When the application creates its agent."""
    application.invitation.unlink()
    with pytest.raises(DeploymentError, match=r"there is no invitation .*nobodys\.invitation"):
        application.agent(application.invitation)
    with pytest.raises(DeploymentError, match=r"trainer\.py has no class or function Trainr; did"):
        Agent(application.home, trainer=f"{application.trainer}:Trainr")


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(application: Application) -> None:
    """The training process imports the script, but must not start another agent or give consent."""
    script = application.folder / "script.py"
    script.write_text(f"""
from fedlearn.client import Agent
class Trainer:
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context): ...
    def evaluate(self, tensors, *, control): ...
agent = Agent({str(application.home)!r}, trainer=__file__ + ":Trainer",
              invitation={str(application.invitation)!r},
              on_progress=lambda event: print(event.message, flush=True))
agent.give_consent()
agent.start()
input()
""")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert "under `if __name__ == '__main__':`" in process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_forked_worker_is_told_that_the_agent_is_anothers(application: Application) -> None:
    """It cannot start it, give or revoke consent, or end the parent's training process."""
    script = f"""
import os
from fedlearn.errors import DeploymentError
{application.starting()}
if not os.fork():
    agent.stop()
    for use in (agent.start, agent.give_consent, agent.revoke_consent, agent.status):
        try:
            use()
        except DeploymentError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
print(agent.status().is_running, flush=True)
agent.stop()
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    *told, is_running = found.stdout.splitlines()
    assert len(told) == 4
    assert all("start it after the fork" in line for line in told)
    assert is_running == "True"


@pytest.mark.slow
def test_an_end_that_nobody_asked_for_is_a_crash(
    application: Application, capfd: pytest.CaptureFixture[str]
) -> None:
    """For any exit code; nothing is printed to the application's standard output."""
    with application.agent(application.invitation, trainer=f"{application.trainer}:exits") as agent:
        agent.give_consent()
        assert application.wait_for(EventKind.CRASHED).message == "exit code 0"
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_waking_an_agent_starts_a_process_that_has_crashed_again(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example after a missing file has been added."""
    monkeypatch.setattr(Backoff, "next_s", lambda _: 3600.0)
    with application.agent(application.invitation, trainer=f"{application.trainer}:exits") as agent:
        agent.give_consent()
        application.wait_for(EventKind.CRASHED)
        agent.wake()
        application.wait_for(EventKind.CRASHED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("without_data", "PART is not set"),
        ("without_library", "ModuleNotFoundError at {file}:{line}, in without_library"),
    ],
)
def test_the_application_hears_why_the_trainer_cannot_be_made(
    application: Application, trainer: str, words: str
) -> None:
    """A fedlearn error with its message, and no retry; any other with its type and location."""
    line = len(SOURCE.splitlines())
    trainer_name = f"{application.trainer}:{trainer}"
    with application.agent(application.invitation, trainer=trainer_name) as agent:
        agent.give_consent()
        event = application.events.get(timeout=WAIT_S)
        assert words.format(file=application.trainer, line=line) in event.message
        assert event.is_final or trainer != "without_data"
