"""The client runtime in this process, with a scripted server over real gRPC."""

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import structlog
import torch
from safetensors.torch import load
from structlog.testing import capture_logs
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.client import runtime
from fedlearn.client.backoff import Reconnection
from fedlearn.client.conditions import Conditions, Device, Facts
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import Connection, RuntimeOptions
from fedlearn.client.policy import Policy, PrivacyPolicy, SecureAggregationPolicy
from fedlearn.client.runtime import Runtime
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Request,
    SecureStageRequest,
    SecureTermsRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import DeploymentError
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import Identity, Invitation
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client_state import ClientState, MaskedStep
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.keys import verify
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan, build_notice, hash_notice
from fedlearn.secagg.releases import PastRelease, PastReleases
from fedlearn.secagg.server import open_session
from fedlearn.secagg.session import Session
from fedlearn.session.history import History, HistoryFile
from fedlearn.session.secure import SessionState
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply

WAIT_S = 60.0  # exceeded only by a hang
#: The settings of the requests below.
HONORED = ("epochs", "batch_size", "learning_rate")
EVALUATE = EvaluateRequest(round_num=0, tensors={"weight": torch.zeros(3)})


class ScriptedGateway:
    """Answers one client as the test scripts it; listens on its own loopback port."""

    def __init__(self) -> None:
        self.run_id = "run"
        self.run_ids: list[str] = []  # of a service of many runs
        self.heard: queue.Queue[wire_pb2.FromClient] = queue.Queue()
        self.uploads: queue.Queue[tuple[wire_pb2.Envelope, bytes]] = queue.Queue()
        self.blobs: dict[bytes, bytes] = {}
        self.offsets: list[int] = []
        self.fetched: list[bytes] = []  # the digests requested at these offsets
        self.cut_downloads_after: int | None = None
        self.come_back_s: list[float] = []  # for the next connections, instead of a session
        self.announced: list[str] = []  # addresses in the welcome
        self._pushed: queue.Queue[wire_pb2.FromCoordinator | None] = queue.Queue()
        self._server = grpc.server(ThreadPoolExecutor(16))
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {  # Any: of several calls
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, wire_pb2.FromClient.FromString, _bytes
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                self._download, wire_pb2.DownloadRequest.FromString, _bytes
            ),
            "Upload": grpc.stream_stream_rpc_method_handler(
                self._upload, wire_pb2.UploadPart.FromString, _bytes
            ),
        }
        enrol = grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: wire_pb2.EnrolReply(client_id=3),
            wire_pb2.EnrolRequest.FromString,
            _bytes,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(wire.GATEWAY, handlers),
                grpc.method_handlers_generic_handler(wire.ENROLMENT, {"Enrol": enrol}),
            )
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """End every call."""
        self._pushed.put(None)
        self._server.stop(grace=0).wait()

    def end_session(self) -> None:
        """End the session from this side."""
        self._pushed.put(None)

    def push(self, **what: Any) -> None:  # Any: one of the kinds of messages
        self._pushed.put(wire_pb2.FromCoordinator(**what))

    def offer(
        self,
        request: Request,
        *,
        run_id: str = "run",
        round_num: int = 0,
        inline: bool = True,
        max_reply_bytes: int = 1 << 24,
        study: str = "",
    ) -> bytes:
        """Push a task; returns the digest of its request."""
        data = encode(request)
        digest = compute_digest(data)
        self.blobs[digest] = data
        task = wire_pb2.Task(
            key=key(request, round_num, run_id),
            digest=digest,
            num_bytes=len(data),
            data=data if inline else b"",
            remaining_s=60.0,
            max_reply_bytes=max_reply_bytes,
            max_inline_bytes=wire.MAX_INLINE_BYTES,
            study=study,
        )
        self.push(task=task)
        return digest

    def send_ahead(self, request: Request, *, round_num: int, last_round_num: int = 9) -> None:
        """Announce a model to prefetch."""
        data = encode(request)
        self.blobs[compute_digest(data)] = data
        ahead = wire_pb2.Task(
            key=key(request, round_num),
            digest=compute_digest(data),
            num_bytes=len(data),
            max_reply_bytes=1 << 24,
            max_inline_bytes=wire.MAX_INLINE_BYTES,
            last_round_num=last_round_num,
        )
        self.push(ahead=ahead)

    def settle(self, request: Request, *, round_num: int = 0) -> None:
        """Accept a reply."""
        accepted = wire_pb2.Receipt(key=key(request, round_num), verdict=wire_pb2.Receipt.ACCEPTED)
        self.push(receipt=accepted)

    def hear(self, kind: str) -> Any:  # Any: one of the kinds of messages
        """Return the next message of this kind, skipping others."""
        while True:
            message = self.heard.get(timeout=WAIT_S)
            if message.WhichOneof("what") == kind:
                return getattr(message, kind)

    def _session(
        self, messages: Iterator[wire_pb2.FromClient], context: grpc.ServicerContext
    ) -> Iterator[wire_pb2.FromCoordinator]:
        if self.come_back_s:
            told = ((wire.COME_BACK_METADATA, str(self.come_back_s.pop(0))),)
            context.set_trailing_metadata(told)
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self._pushed = pushed = queue.Queue[wire_pb2.FromCoordinator | None]()
        welcome = wire_pb2.Welcome(
            protocol=wire.PROTOCOL,
            client_id=3,
            run_id=self.run_id,
            run_ids=self.run_ids,
            addresses=self.announced,
        )
        yield wire_pb2.FromCoordinator(welcome=welcome)

        def listen() -> None:
            try:
                for message in messages:
                    self.heard.put(message)
            except grpc.RpcError:
                pass
            pushed.put(None)

        threading.Thread(target=listen, daemon=True).start()
        while (message := pushed.get()) is not None:
            yield message

    def _download(
        self, request: wire_pb2.DownloadRequest, context: grpc.ServicerContext
    ) -> Iterator[wire_pb2.Chunk]:
        self.offsets.append(request.offset)
        self.fetched.append(request.digest)
        data = self.blobs[request.digest]
        for start in range(request.offset, len(data), 1000):
            if self.cut_downloads_after is not None and start >= self.cut_downloads_after:
                self.cut_downloads_after = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield wire_pb2.Chunk(data=data[start : start + 1000])

    def _upload(
        self, parts: Iterator[wire_pb2.UploadPart], context: grpc.ServicerContext
    ) -> Iterator[wire_pb2.UploadStatus]:
        envelope = next(parts).envelope
        yield wire_pb2.UploadStatus(offset=0)
        data = b"".join(part.data for part in parts)
        self.uploads.put((envelope, data))
        receipt = wire_pb2.Receipt(key=envelope.key, verdict=wire_pb2.Receipt.ACCEPTED)
        yield wire_pb2.UploadStatus(receipt=receipt)


def _bytes(message: Any) -> bytes:  # Any: one of the kinds of messages
    data: bytes = message.SerializeToString()
    return data


def key(request: Request, round_num: int, run_id: str = "run") -> wire_pb2.TaskKey:
    return wire_pb2.TaskKey(run_id=run_id, kind=request.kind, round_num=round_num)


def train_request(*, size: int = 3, epochs: int = 1, noise: float | None = None) -> TrainRequest:
    """Return a request; with ``noise``, updates get local noise with this multiplier."""
    local = LocalSgd(epochs=epochs, batch_size=1, learning_rate=0.1)
    noised = [] if noise is None else [NoisedUpdates(clip_norm=1.0, noise_multiplier=noise)]
    return TrainRequest(
        round_num=0,
        attempt=0,
        tensors={"weight": torch.zeros(size)},
        order=("weight",),
        settings=settings_of(local, noised),
        seed=1,
    )


@dataclass
class Stepper:
    """Trains in steps that the test releases; records the step at which it began.

    Its state counts the tasks that it has finished, and each step adds 1 to the model.
    """

    num_steps: int = 3
    is_free: threading.Event = field(default_factory=threading.Event)
    begun: "queue.Queue[int]" = field(default_factory=queue.Queue)
    honors: Collection[str] = HONORED

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        first = int(context.control.load().get("step", torch.tensor(0)))
        self.begun.put(first)
        step = first
        while step < self.num_steps:
            while not self.is_free.wait(0.01):
                context.control.check()
            context.control.check()
            context.control.save({"step": torch.tensor(step + 1)})
            if step == 0:
                self.is_free.clear()  # before the step is reported
            context.control.report(fraction=(step + 1) / self.num_steps, loss=1.0)
            step += 1
        finished = context.state.get("finished", torch.tensor(0)) + 1
        return LocalResult(
            tensors={name: value + self.num_steps for name, value in tensors.items()},
            num_examples=5,
            metrics={"loss": 1.0},
            state={"finished": finished},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        self.begun.put(0)
        while not self.is_free.wait(0.01):
            control.check()
        return LocalEvaluation(num_examples=5, metrics={"loss": 1.0})


class Quick:
    """A trainer without data that finishes at once."""

    honors = HONORED

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        finished = context.state.get("finished", torch.tensor(0)) + 1
        return LocalResult(
            tensors=tensors, num_examples=1, metrics={}, state={"finished": finished}
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={"loss": 1.0})


class Broken(Quick):
    """Fails like a trainer for another model."""

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise KeyError("0.weight")


class Client:
    """A runtime in a thread, with its events."""

    def __init__(self, home: Home, trainer: Any, **settings: Any) -> None:  # Any: as of Runtime
        self.events: queue.Queue[AgentEvent] = queue.Queue()
        options = RuntimeOptions(home=home.folder, trainer="", **settings)
        self.runtime = Runtime(options, trainer, on_event=self.events.put)
        self._told: Facts | None = None
        self._passed: list[AgentEvent] = []
        self._loop: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
        thread = ThreadPoolExecutor(1)
        self.future = thread.submit(asyncio.run, self._run())
        thread.shutdown(wait=False)

    async def _run(self) -> bool:
        self._loop.put(asyncio.get_running_loop())
        telling = asyncio.create_task(self._keep_telling())
        try:
            return await self.runtime.run()
        finally:
            telling.cancel()

    async def _keep_telling(self) -> None:
        while True:
            if self._told is not None:
                self.runtime.update_facts(self._told)
            await asyncio.sleep(0.5)

    def call(self, function: Callable[..., None], *args: object) -> None:
        loop = self._loop.get(timeout=WAIT_S)
        self._loop.put(loop)
        loop.call_soon_threadsafe(function, *args)

    def update_facts(self, facts: Facts) -> None:
        """Report these facts from now on, repeatedly, as an application does."""

        def update_facts() -> None:
            self._told = facts
            self.runtime.update_facts(facts)

        self.call(update_facts)

    def wait_for(self, kind: EventKind) -> AgentEvent:
        while True:
            event = self.events.get(timeout=WAIT_S)
            if event.kind is kind:
                return event
            self._passed.append(event)

    def others(self) -> list[AgentEvent]:
        """Return the events that no call has waited for."""
        return self._passed + [self.events.get() for _ in range(self.events.qsize())]

    def stop(self) -> None:
        if not self.future.done():
            self.call(self.runtime.stop)
        self.future.result(timeout=WAIT_S)


@contextmanager
def client(home: Home, trainer: Any, **options: Any) -> Iterator[Client]:  # Any: as of Runtime
    running = Client(home, trainer, **options)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway()
    yield gateway
    gateway.close()


@pytest.fixture
def home(tmp_path: Path, gateway: ScriptedGateway) -> Home:
    """The folder of an enrolled client that has given consent."""
    home = Home(tmp_path / "client")
    home.set_consent(granted=True)
    home.keys.load_next_identity()
    home.keys.enrol(invitation_to(gateway), certificate_pem=b"", client_id=ClientId(3))
    return home


def invitation_to(gateway: ScriptedGateway) -> Invitation:
    return Invitation(
        name="laptop",
        addresses=(gateway.address,),
        enrolment_addresses=(gateway.address,),
        ca_pem=b"",
        token=b"token",
        expires_utc="2030-01-01T00:00:00Z",
    )


def finished(home: Home) -> int:
    """Return the number of finished tasks according to the client's state."""
    state = home.load_state("run")
    return int(load(state)["finished"]) if state else 0


def test_a_task_is_answered_signed_and_settled(home: Home, gateway: ScriptedGateway) -> None:
    """The reply is signed and bound to its task; a receipt settles it."""
    request = train_request()
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request)
        result = gateway.hear("result")
        reply = decode(result.data)
        assert isinstance(reply, TrainReply)
        envelope = result.envelope
        assert envelope.key == key(request, 0)
        assert envelope.digest == compute_digest(result.data)
        identity = home.keys.load_enrolment()
        assert identity is not None
        signed = encode_signed_reply(envelope.key, client_id=3, digest=envelope.digest)
        assert verify(identity.identity.public_key, envelope.signature, signed)
        assert not verify(Identity.create().public_key, envelope.signature, signed)
        gateway.settle(request)
        accepted = running.wait_for(EventKind.ACCEPTED)
        assert (accepted.run_id, accepted.round_num) == ("run", 0)
    assert finished(home) == 1
    assert home.recover() == []


@pytest.mark.parametrize("verdict", ["ACCEPTED", "LATE", "REFUSED"])
def test_a_receipt_that_comes_twice_is_told_once(
    home: Home, gateway: ScriptedGateway, verdict: str
) -> None:
    """As after a lost connection: the coordinator answers both the held and the sent reply.

    A receipt for the next task's reply is reported again.
    """
    request = train_request()
    with structlog.testing.capture_logs() as logs, client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        for round_num in range(2):
            gateway.offer(request, round_num=round_num)
            gateway.hear("result")
            for _ in range(2):
                gateway.push(receipt=wire_pb2.Receipt(key=key(request, round_num), verdict=verdict))
            assert running.wait_for(EventKind[verdict]).round_num == round_num
        gateway.offer(request, round_num=2)  # its reply shows that all before was received
        gateway.hear("result")
    assert [event.kind for event in running.others()].count(EventKind[verdict]) == 0
    assert [line["round_num"] for line in logs if line["event"] == "reply_settled"] == [0, 1]


def test_a_large_task_is_downloaded_and_its_reply_uploaded(
    home: Home, gateway: ScriptedGateway
) -> None:
    """In separate calls next to the session, in chunks."""
    request = train_request(size=100_000)
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        digest = gateway.offer(request, inline=False)
        envelope, data = gateway.uploads.get(timeout=WAIT_S)
        assert envelope.digest == compute_digest(data)
        assert isinstance(decode(data), TrainReply)
        running.wait_for(EventKind.ACCEPTED)
    assert gateway.offsets == [0]
    assert digest in gateway.blobs


def test_a_cut_download_goes_on_where_it_stopped(home: Home, gateway: ScriptedGateway) -> None:
    """In the next session, where the coordinator offers the task again."""
    request = train_request(size=10_000)
    gateway.cut_downloads_after = 5000
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request, inline=False)
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request, inline=False)
        assert isinstance(decode(gateway.hear("result").data), TrainReply)
    assert gateway.offsets == [0, 5000]


def test_an_evaluation_leaves_the_state_alone(home: Home, gateway: ScriptedGateway) -> None:
    """An evaluation is a task like any other, but does not change the state."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(EVALUATE)
        assert isinstance(decode(gateway.hear("result").data), EvaluateReply)
    assert home.load_state("run") == b""


def test_an_evaluation_is_told_as_one_of_the_round_before_it(
    home: Home, gateway: ScriptedGateway
) -> None:
    """The model after the fifth round has index 4; before the first round there is no index."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(EVALUATE, round_num=5)
        assert running.wait_for(EventKind.EVALUATING).round_num == 4
        assert running.wait_for(EventKind.UPLOADING).round_num == 4
        gateway.settle(EVALUATE, round_num=5)
        assert running.wait_for(EventKind.ACCEPTED).round_num == 4
        gateway.offer(EVALUATE, round_num=0)
        assert running.wait_for(EventKind.EVALUATING).round_num is None
        assert EventKind.TRAINING not in {event.kind for event in running.others()}


@pytest.mark.parametrize("breaks", ["trainer", "policy", "size"])
def test_a_failure_is_told_with_its_round_and_counts_for_nothing(
    home: Home, gateway: ScriptedGateway, breaks: str
) -> None:
    """The coordinator accepts it like a result. Control: the evaluation after it counts."""
    request = train_request(epochs=9)
    trainer = Broken() if breaks == "trainer" else Quick()
    policy = Policy(max_epochs=1 if breaks == "policy" else 9)
    with client(home, trainer, policy=policy) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request, round_num=2, max_reply_bytes=10 if breaks == "size" else 1 << 24)
        kind = EventKind.POLICY if breaks == "policy" else EventKind.FAILED
        told = running.wait_for(kind)
        assert told.round_num == 2
        if breaks == "trainer":
            assert told.message.startswith(f"{__file__}:")
            assert told.message.endswith("in train: KeyError: '0.weight'")
        assert isinstance(decode(gateway.hear("result").data), Failure)
        gateway.settle(request, round_num=2)
        gateway.offer(EVALUATE, round_num=9)
        gateway.hear("result")
        gateway.settle(EVALUATE, round_num=9)
        assert running.wait_for(EventKind.ACCEPTED).round_num == 8, "the first that counts"
    replies = {EventKind.UPLOADING, EventKind.ACCEPTED}
    passed = [event for event in running.others() if event.kind in replies]
    assert [event.kind for event in passed] == [EventKind.UPLOADING], "of the evaluation alone"


def test_a_reply_waits_for_the_coordinator_and_for_a_restart(
    home: Home, gateway: ScriptedGateway
) -> None:
    """The same bytes are sent again, and the task is not trained twice."""
    request, trainer = train_request(), Quick()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request)
        first = gateway.hear("result")
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        assert gateway.hear("hello").held == [key(request, 0)]
        gateway.offer(request)
        assert gateway.hear("result") == first
        gateway.settle(request)
        running.wait_for(EventKind.ACCEPTED)
    assert finished(home) == 1


def test_a_reply_to_one_run_waits_while_the_client_works_for_another(
    home: Home, gateway: ScriptedGateway
) -> None:
    """As after a restart of a service, which serves the first run again later."""
    request, gateway.run_ids = train_request(), ["run", "other"]
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request)
        first = gateway.hear("result")
        gateway.offer(request, run_id="other")
        gateway.hear("result")
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        held = gateway.hear("hello").held
        assert held == [key(request, 0), key(request, 0, "other")]
        assert gateway.hear("result") == first
        gateway.offer(request)
        gateway.settle(request)
        running.wait_for(EventKind.ACCEPTED)
    assert finished(home) == 1


@dataclass
class Turns(Quick):
    """Trains until released; records the round of each model that it starts on."""

    begun: "queue.Queue[int]" = field(default_factory=queue.Queue)
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        self.begun.put(context.round_num)
        while not self.go.acquire(timeout=0.01):
            context.control.check()
        return super().train(tensors, context=context)


def in_round(round_num: int, *, size: int = 3) -> TrainRequest:
    return replace(train_request(size=size), round_num=round_num)


def wait_for(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    ends_s = clock.now_s() + WAIT_S
    while not condition():
        assert clock.now_s() < ends_s
        clock.sleep(0.01)


def begin(gateway: ScriptedGateway, trainer: Turns, running: Client) -> None:
    """Let a client start on the model of round 0 and wait until ``trainer`` is released."""
    running.wait_for(EventKind.CONNECTED)
    gateway.offer(in_round(0))
    assert trainer.begun.get(timeout=WAIT_S) == 0


def overlap(home: Home, gateway: ScriptedGateway, trainer: Turns, running: Client) -> None:
    """Let a client finish round 0 and start on the prefetched model of round 1."""
    begin(gateway, trainer, running)
    gateway.send_ahead(in_round(1, size=5000), round_num=1)
    wait_for(lambda: gateway.offsets == [0])  # while round 0 is in training
    assert finished(home) == 0
    trainer.go.release()
    assert trainer.begun.get(timeout=WAIT_S) == 1
    assert finished(home) == 1
    assert gateway.hear("result").envelope.key.round_num == 0
    gateway.settle(in_round(0))
    running.wait_for(EventKind.ACCEPTED)


def test_the_next_model_is_fetched_in_training_and_begun_before_it_is_asked(
    home: Home, gateway: ScriptedGateway
) -> None:
    """The next task gets the result of the older model, and the reply names that model's round."""
    trainer = Turns()
    with client(home, trainer) as running:
        overlap(home, gateway, trainer, running)
        gateway.offer(in_round(2, size=5000), round_num=2, inline=False)
        while (progress := gateway.hear("progress")).key.round_num != 2:
            pass
        assert progress.phase == wire_pb2.Progress.TRAINING
        trainer.go.release()
        result = gateway.hear("result")
        gateway.settle(in_round(2), round_num=2)
        running.wait_for(EventKind.ACCEPTED)
    reply = decode(result.data)
    assert isinstance(reply, TrainReply)
    assert (result.envelope.key.round_num, reply.round_num) == (2, 1)
    assert gateway.offsets == [0]  # the model of round 2 was never fetched
    assert finished(home) == 2
    assert home.num_tasks_today(SystemClock().unix_s(), without="run") == 2


def test_work_ahead_dies_with_its_process_and_the_question_is_answered_from_its_own_model(
    home: Home, gateway: ScriptedGateway
) -> None:
    """It was not acknowledged; no model is trained twice."""
    trainer = Turns()
    with client(home, trainer) as running:
        overlap(home, gateway, trainer, running)
    assert (home.folder / "tasks" / "run").exists()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        assert not (home.folder / "tasks" / "run").exists()
        gateway.offer(in_round(2), round_num=2)
        assert trainer.begun.get(timeout=WAIT_S) == 2
        trainer.go.release()
        result = gateway.hear("result")
    reply = decode(result.data)
    assert isinstance(reply, TrainReply)
    assert reply.round_num == 2
    assert finished(home) == 2


def test_a_model_that_was_fetched_ahead_is_not_fetched_again_for_its_question(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Here the task comes during the download, while no training runs."""
    trainer = Turns()
    with client(home, trainer) as running:
        begin(gateway, trainer, running)
        gateway.cut_downloads_after = 3000
        gateway.send_ahead(in_round(1, size=5000), round_num=1)
        wait_for(lambda: gateway.cut_downloads_after is None)
        trainer.go.release()
        gateway.hear("result")
        gateway.settle(in_round(0))
        gateway.offer(in_round(1, size=5000), round_num=1, inline=False)
        assert trainer.begun.get(timeout=WAIT_S) == 1
        trainer.go.release()
        running.wait_for(EventKind.UPLOADING)
    assert gateway.offsets[0] == 0
    assert gateway.offsets[1] == 3000


def test_a_newer_model_that_is_told_of_costs_no_second_fetch_of_the_one_that_is_here(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Training starts on the model already fetched, before the next one replaces it."""
    trainer = Turns()
    with client(home, trainer) as running:
        begin(gateway, trainer, running)
        gateway.send_ahead(in_round(1, size=5000), round_num=1)
        wait_for(lambda: len(gateway.fetched) == 1)
        gateway.send_ahead(in_round(2, size=5000), round_num=2)
        gateway.push(
            receipt=wire_pb2.Receipt(key=key(in_round(9), 9), verdict=wire_pb2.Receipt.LATE)
        )
        running.wait_for(EventKind.LATE)  # so it has received round 2 as well
        trainer.go.release()
        assert trainer.begun.get(timeout=WAIT_S) == 1
        assert gateway.fetched.count(compute_digest(encode(in_round(1, size=5000)))) == 1


@pytest.mark.parametrize(
    "policy", [Policy(train_ahead=False), Policy(max_tasks_per_day=0), Policy(max_tasks_per_day=1)]
)
def test_what_the_policy_does_not_allow_is_not_begun_ahead(
    home: Home, gateway: ScriptedGateway, policy: Policy
) -> None:
    """It is not reported as a refusal either, since there was no task."""
    trainer = Turns()
    trainer.go.release()
    with client(home, trainer, policy=policy) as running:
        running.wait_for(EventKind.CONNECTED)
        assert gateway.hear("hello").eligibility.takes_ahead == policy.train_ahead
        gateway.offer(in_round(0))
        gateway.hear("result")
        gateway.send_ahead(in_round(1), round_num=1)
        gateway.offer(EVALUATE, round_num=1)  # sent later, and answered
        gateway.hear("result")
    refusals = [each for each in running.others() if each.kind is EventKind.POLICY]
    assert len(refusals) == (policy.max_tasks_per_day == 0)
    assert trainer.begun.qsize() == (policy.max_tasks_per_day != 0)


def test_a_failure_of_work_ahead_is_no_answer(home: Home, gateway: ScriptedGateway) -> None:
    """Without a task there is no reply; the later task itself is answered with a failure."""
    with client(home, Broken()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.send_ahead(in_round(1), round_num=1)
        assert running.wait_for(EventKind.FAILED).round_num == 1
        gateway.offer(in_round(2), round_num=2)
        result = gateway.hear("result")
    assert result.envelope.key.round_num == 2
    assert isinstance(decode(result.data), Failure)


def test_training_goes_on_without_a_connection(home: Home, gateway: ScriptedGateway) -> None:
    """The reply is delivered in the next session."""
    trainer = Stepper()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        trainer.begun.get(timeout=WAIT_S)
        gateway.end_session()
        running.wait_for(EventKind.CONNECTED)
        trainer.num_steps = 1
        trainer.is_free.set()
        assert isinstance(decode(gateway.hear("result").data), TrainReply)
        assert trainer.begun.empty()


def test_a_cancelled_task_ends_within_a_batch(home: Home, gateway: ScriptedGateway) -> None:
    """It leaves nothing behind, and the next task is accepted."""
    trainer = Stepper()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert trainer.begun.get(timeout=WAIT_S) == 0
        gateway.push(cancel=wire_pb2.Cancel(key=key(train_request(), 0), reason="round closed"))
        assert running.wait_for(EventKind.CANCELLED).message == "round closed"
        trainer.num_steps = 1
        trainer.is_free.set()
        gateway.offer(train_request(), round_num=1)
        result = gateway.hear("result")
        assert result.envelope.key.round_num == 1
    assert finished(home) == 1


def test_a_study_that_the_owner_leaves_ends_its_work(home: Home, gateway: ScriptedGateway) -> None:
    """The coordinator hears of each decision, and tasks of other studies are refused."""
    home.set_study_consent("other", granted=True)
    trainer = Stepper()
    with client(home, trainer, policy=Policy(studies=("tumours",))) as running:
        assert gateway.hear("hello").eligibility.studies == ["other", "tumours"]
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request(), study="tumours")
        assert trainer.begun.get(timeout=WAIT_S) == 0
        home.set_study_consent("tumours", granted=False)  # the owner overrules the policy
        assert "left the study tumours" in running.wait_for(EventKind.CANCELLED).message
        trainer.is_free.set()
        assert gateway.hear("hello").eligibility.studies == ["other"]
        gateway.offer(train_request(), study="tumours")
        assert "policy.studies" in running.wait_for(EventKind.POLICY).message
        assert isinstance(decode(gateway.hear("result").data), Failure)
    assert finished(home) == 0


def test_a_study_has_a_name_that_can_be_a_files(home: Home) -> None:
    with pytest.raises(DeploymentError, match="is no study"):
        home.set_study_consent("../pins", granted=True)


def test_stopping_keeps_the_checkpoint_and_the_next_start_goes_on(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Training resumes after the last step in the checkpoint."""
    trainer = Stepper()
    trainer.is_free.set()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert trainer.begun.get(timeout=WAIT_S) == 0
        running.wait_for(EventKind.PROGRESS)
    trainer.is_free.set()
    with client(home, trainer) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert trainer.begun.get(timeout=WAIT_S) == 1
        assert isinstance(decode(gateway.hear("result").data), TrainReply)
    assert finished(home) == 1


def test_a_condition_that_breaks_ends_the_batch_and_one_that_holds_resumes(
    home: Home, gateway: ScriptedGateway
) -> None:
    """In between, the client is disconnected."""
    trainer = Stepper()
    trainer.is_free.set()
    conditions = Conditions(on_power=True)
    with client(home, trainer, conditions=conditions) as running:
        running.update_facts(Facts(on_power=True))
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert trainer.begun.get(timeout=WAIT_S) == 0
        running.wait_for(EventKind.PROGRESS)
        running.update_facts(Facts(on_power=False))
        assert running.wait_for(EventKind.WAITING).message == "on_power"
        assert running.wait_for(EventKind.CANCELLED).message == "conditions"
        trainer.is_free.set()
        running.update_facts(Facts(on_power=True))
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert trainer.begun.get(timeout=WAIT_S) == 1
        assert isinstance(decode(gateway.hear("result").data), TrainReply)


def test_a_required_condition_that_is_unknown_does_not_hold(
    home: Home, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not connect, and the event names the condition."""
    monkeypatch.setenv("PATH", "")  # no program to ask the system
    with client(home, Quick(), conditions=Conditions(unmetered=True)) as running:
        assert running.wait_for(EventKind.WAITING).message == "unmetered (unknown)"
        running.update_facts(Facts(unmetered=True))
        running.wait_for(EventKind.CONNECTED)
        assert gateway.hear("hello").eligibility.unmetered


SIGNER, COORDINATOR_KEY = keys.derive_identity(
    SecretBytes(bytes(32)), label=b"scripted coordinator", ids=()
)


class Rule(NamedTuple):
    """A rule of the policy, a request that it refuses, and the rule relaxed enough to allow it."""

    name: str
    asked: str
    limit: str
    strict: Policy
    request: Request
    relaxed: Policy


def secure(**changes: Any) -> Policy:  # Any: of the fields
    """Return a policy that allows the sessions below, except for ``changes``."""
    allowed = {"corruption": 0.0, "min_cohort": 2}
    return Policy(secure_aggregation=SecureAggregationPolicy(**{**allowed, **changes}))


def advert(
    *,
    num_clients: int = 3,
    adversary: Adversary = Adversary.HONEST_BUT_CURIOUS,
    topology: Topology = Topology.COMPLETE,
    threshold: int | None = None,
    epochs: int = 3,
    attempt: int = 0,
    noise_multiplier: float | None = None,
) -> SecureTermsRequest:
    """Return the first message of a session."""
    assumed = Assumptions(
        adversary=adversary,
        topology=topology,
        corruption=0.0,
        dropout=0.0,
        sigma_bits=40,
        eta_bits=30,
    )
    plan = SecurePlan(
        parameters=derive(num_clients, assumptions=assumed),
        min_survivors=3,
        clip_norm=2.0,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=noise_multiplier is None,
        modulus_bits=32,
        noise_multiplier=noise_multiplier,
    )
    layout = Params.of(torch.nn.Linear(2, 1)).layout
    train = train_request(epochs=epochs)
    notice = build_notice(train)
    terms = plan.terms(
        layout, run_id=bytes(16), round_num=0, attempt=attempt, request_hash=hash_notice(notice)
    )
    terms = replace(terms, threshold=threshold or terms.threshold)
    signed, _ = open_session(terms, signer=SIGNER, directory={})
    return SecureTermsRequest(
        round_num=0, attempt=attempt, message=messages.encode(signed), notice=notice
    )


def noised(**changes: Any) -> Policy:  # Any: of the fields
    """Return a policy that accepts only sessions with noise, except for ``changes``."""
    privacy = PrivacyPolicy(**{"mode": "distributed", **changes})
    return replace(secure(adversary=CURIOUS), privacy=privacy)


def local(**changes: Any) -> Policy:  # Any: of the fields
    """Return a policy that accepts only updates with local noise, except for ``changes``."""
    return Policy(privacy=PrivacyPolicy(**{"mode": "local", **changes}))


def advert_to_evaluate() -> SecureTermsRequest:
    """Return the first message of an evaluation session."""
    assumed = Assumptions(
        adversary=Adversary.HONEST_BUT_CURIOUS,
        topology=Topology.COMPLETE,
        corruption=0.0,
        dropout=0.0,
        sigma_bits=40,
        eta_bits=30,
    )
    plan = EvaluationPlan(
        parameters=derive(3, assumptions=assumed), measures=("loss",), max_loss=10.0
    )
    notice = build_notice(EVALUATION)
    terms = plan.terms(run_id=bytes(16), round_num=0, request_hash=hash_notice(notice))
    signed, _ = open_session(terms, signer=SIGNER, directory={})
    return SecureTermsRequest(
        round_num=0, attempt=0, message=messages.encode(signed), notice=notice
    )


CURIOUS = "honest-but-curious"
EVALUATION = EvaluateRequest(round_num=0, tensors={})
TRAINING = train_request(epochs=3)
SPARSE = advert(num_clients=100, topology=Topology.SPARSE)
TWO, ANY = Policy(max_epochs=2), Policy(max_epochs=3)
NONE, ONE = Policy(max_tasks_per_day=0), Policy(max_tasks_per_day=1)

RULES = [
    Rule("max_epochs", "epochs = 3", "at most 2", TWO, TRAINING, ANY),
    Rule("max_tasks_per_day", "training 1 within 24 hours", "at most 0", NONE, TRAINING, ONE),
    Rule("evaluate", "an evaluation", "none", Policy(evaluate=False), EVALUATION, Policy()),
    Rule(
        "evaluate",
        "an evaluation",
        "none",
        replace(secure(adversary=CURIOUS), evaluate=False),
        advert_to_evaluate(),
        secure(adversary=CURIOUS, required=True),
    ),
    Rule(
        "max_evaluations_per_day",
        "evaluation 1 within 24 hours",
        "at most 0",
        Policy(max_evaluations_per_day=0),
        EVALUATION,
        Policy(max_evaluations_per_day=1),
    ),
    Rule(
        "max_evaluations_per_day",
        "evaluation 1 within 24 hours",
        "at most 0",
        replace(secure(adversary=CURIOUS), max_evaluations_per_day=0),
        advert_to_evaluate(),
        replace(secure(adversary=CURIOUS), max_evaluations_per_day=1),
    ),
    Rule(
        "secure_aggregation.required",
        "an update that the coordinator could read",
        "only secure aggregation",
        secure(required=True),
        TRAINING,
        secure(required=False),
    ),
    Rule(
        "secure_aggregation.required",
        "an evaluation that the coordinator could read",
        "only secure aggregation",
        secure(required=True),
        EVALUATION,
        secure(required=False),
    ),
    Rule(
        "max_epochs",
        "epochs = 3",
        "at most 2",
        replace(secure(adversary=CURIOUS), max_epochs=2),
        advert(),
        replace(secure(adversary=CURIOUS), max_epochs=3),
    ),
    Rule(
        "max_tasks_per_day",
        "training 1 within 24 hours",
        "at most 0",
        replace(secure(adversary=CURIOUS), max_tasks_per_day=0),
        advert(),
        replace(secure(adversary=CURIOUS), max_tasks_per_day=1),
    ),
    Rule(
        "privacy.mode",
        "an update that the coordinator could read",
        "only a sum to which each client adds noise",
        noised(),
        TRAINING,
        Policy(),
    ),
    Rule(
        "privacy.mode",
        "an evaluation that the coordinator could read",
        "only a sum to which each client adds noise",
        noised(),
        EVALUATION,
        Policy(),
    ),
    Rule(
        "privacy.mode",
        "a sum without noise, of 'parameters'",
        "noise of each client, in all that it sends",
        noised(),
        advert(),
        secure(adversary=CURIOUS),
    ),
    Rule(  # two of three clients add up to the noise
        "privacy.min_noise_share",
        "2.12132",
        "at least 2.2",
        noised(min_noise_share=2.2),
        advert(noise_multiplier=3.0),
        noised(min_noise_share=2.12),
    ),
    Rule(
        "privacy.max_epsilon_per_day",
        "3.09764",
        "at most 3",
        noised(max_epsilon_per_day=3.0),
        advert(noise_multiplier=3.0),
        noised(max_epsilon_per_day=3.1),
    ),
    Rule(
        "privacy.mode",
        "an update without noise",
        "only an update with enough of its own noise",
        local(),
        TRAINING,
        Policy(),
    ),
    Rule(
        "privacy.mode",
        "an evaluation that the coordinator could read",
        "only an update with enough of its own noise",
        local(),
        EVALUATION,
        Policy(),
    ),
    Rule(
        "privacy.mode",
        "a sum to which each client adds a share of the noise, or none",
        "only an update with enough of its own noise",
        local(),
        advert(noise_multiplier=3.0),
        noised(),
    ),
    Rule(
        "privacy.min_noise_share",
        "3",
        "at least 3.1",
        local(min_noise_share=3.1),
        train_request(noise=3.0),
        local(min_noise_share=3.0),
    ),
    Rule(  # the same total noise as the fewest clients of the session above
        "privacy.max_epsilon_per_day",
        "3.09764",
        "at most 3",
        local(max_epsilon_per_day=3.0),
        train_request(noise=3.0),
        local(max_epsilon_per_day=3.1),
    ),
    Rule("adversary", CURIOUS, "active-server", secure(), advert(), secure(adversary=CURIOUS)),
    Rule(
        "allow_sparse",
        "a sparse graph",
        "a complete one",
        secure(adversary=CURIOUS, allow_sparse=False),
        SPARSE,
        secure(adversary=CURIOUS),
    ),
    Rule(
        "threshold",
        "2",
        "at least 26",
        secure(adversary=CURIOUS, corruption=0.25),
        advert(num_clients=100),
        secure(adversary=CURIOUS, corruption=0.0),
    ),
    Rule(
        "quorum",
        "6",
        "at least 7",
        secure(corruption=0.3),
        advert(num_clients=10, adversary=Adversary.ACTIVE_SERVER, threshold=10),
        secure(corruption=0.0),
    ),
    Rule(
        "min_cohort",
        "3",
        "at least 4",
        secure(adversary=CURIOUS, min_cohort=4),
        advert(num_clients=5),
        secure(adversary=CURIOUS, min_cohort=3),
    ),
    Rule(
        "max_cohort",
        "5",
        "at most 4",
        secure(adversary=CURIOUS, max_cohort=4),
        advert(num_clients=5),
        secure(adversary=CURIOUS, max_cohort=5),
    ),
    Rule(
        "max_clip",
        "2",
        "at most 1",
        secure(adversary=CURIOUS, max_clip=1.0),
        advert(),
        secure(adversary=CURIOUS, max_clip=2.0),
    ),
    Rule(
        "max_upload_bytes",
        "30",
        "at most 29",
        secure(adversary=CURIOUS, max_upload_bytes=29),
        advert(),
        secure(adversary=CURIOUS, max_upload_bytes=30),
    ),
]


@pytest.fixture
def secure_home(tmp_path: Path, gateway: ScriptedGateway) -> Home:
    """Like ``home``, with the coordinator's key in the invitation."""
    home = Home(tmp_path / "client")
    home.set_consent(granted=True)
    home.keys.load_next_identity()
    invitation = replace(invitation_to(gateway), coordinator_key=COORDINATOR_KEY)
    home.keys.enrol(invitation, certificate_pem=b"", client_id=ClientId(3))
    return home


def select_refusals(
    logs: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:  # Any: of log lines
    return [each for each in logs if each["event"] == "refused_by_policy"]


@pytest.mark.parametrize(
    "rule", RULES, ids=[f"{type(each.request).__name__}-{each.name}" for each in RULES]
)
def test_what_is_below_the_floor_is_refused_by_name(
    secure_home: Home, gateway: ScriptedGateway, rule: Rule
) -> None:
    """The rule appears in the client's log, and the application and the coordinator receive it."""
    with (
        structlog.testing.capture_logs() as logs,
        client(secure_home, Quick(), policy=rule.strict) as running,
    ):
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(rule.request, round_num=7)
        told = running.wait_for(EventKind.POLICY)
        reply = decode(gateway.hear("result").data)
    (line,) = select_refusals(logs)
    assert (line["log_level"], line["round_num"]) == ("warning", 7)
    assert (line["rule"], line["asked"], line["limit"]) == (rule.name, rule.asked, rule.limit)
    assert not [each for each in logs if each["event"] == "request_failed"]
    words = f"`{rule.name}`: asked {rule.asked}, allowed {rule.limit}"
    assert words in told.message
    assert told.round_num == (6 if isinstance(rule.request, EvaluateRequest) else 7)
    assert isinstance(reply, Failure)
    assert words in reply.reason


@pytest.mark.parametrize(
    "rule", RULES, ids=[f"{type(each.request).__name__}-{each.name}" for each in RULES]
)
def test_the_same_is_taken_where_the_rule_allows_it(
    secure_home: Home, gateway: ScriptedGateway, rule: Rule
) -> None:
    """Control for the test above."""
    with (
        structlog.testing.capture_logs() as logs,
        client(secure_home, Quick(), policy=rule.relaxed) as running,
    ):
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(rule.request, round_num=7)
        assert not isinstance(decode(gateway.hear("result").data), Failure)
    assert select_refusals(logs) == []


@pytest.mark.parametrize("request_", [TRAINING, EVALUATION], ids=["train", "evaluate"])
@pytest.mark.parametrize(
    ("key", "policy", "is_refused"),
    [
        (COORDINATOR_KEY, Policy(), True),
        (COORDINATOR_KEY, secure(stays_required=False), False),
        (bytes(32), Policy(), False),
    ],
    ids=["bound", "its user says otherwise", "to another coordinator"],
)
def test_who_has_sent_masked_updates_sends_no_readable_ones(
    *,
    secure_home: Home,
    gateway: ScriptedGateway,
    key: bytes,
    policy: Policy,
    is_refused: bool,
    request_: Request,
) -> None:
    """Not to the same coordinator, in any run, unless the user's policy allows it again."""
    HistoryFile(path=secure_home.folder / "history.json", coordinator_key=key).write(
        History(is_bound=True)
    )
    with (
        structlog.testing.capture_logs() as logs,
        client(secure_home, Quick(), policy=policy) as running,
    ):
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request_)
        reply = decode(gateway.hear("result").data)
    assert isinstance(reply, Failure) == is_refused
    rules = [each["rule"] for each in select_refusals(logs)]
    assert rules == ["secure_aggregation.stays_required"] * is_refused


def test_evaluations_are_counted_by_the_day(home: Home, gateway: ScriptedGateway) -> None:
    with client(home, Quick(), policy=Policy(max_evaluations_per_day=2)) as running:
        running.wait_for(EventKind.CONNECTED)
        replies = []
        for number in range(3):
            gateway.offer(EVALUATION, round_num=number)
            replies.append(decode(gateway.hear("result").data))
            gateway.settle(EVALUATION, round_num=number)
    *taken, last = replies
    assert not any(isinstance(reply, Failure) for reply in taken)
    assert isinstance(last, Failure)
    assert "max_evaluations_per_day" in last.reason


@pytest.mark.parametrize(("age_s", "is_kept"), [(90_000.0, False), (80_000.0, True)])
def test_what_is_held_of_an_abandoned_session_is_erased_after_a_day(
    secure_home: Home,
    gateway: ScriptedGateway,
    age_s: float,
    is_kept: bool,  # noqa: FBT001 - a case
) -> None:
    """After that, neither a thief of the disk nor the coordinator can get its secrets."""
    held = SecretBytes.generate(72)
    terms = messages.decode(advert().message)
    assert isinstance(terms, messages.SignedTerms)
    step = MaskedStep(Session(terms.terms, bytes(32), 0, (), (), {}), {ClientId(1): held})
    state = SessionState(
        trainer={}, session=ClientState.fresh(bytes(16)).with_step(step)
    ).to_bytes()
    path = secure_home.folder / "state" / "run"
    path.parent.mkdir()
    path.write_bytes(state)
    then = SystemClock().unix_s() - age_s
    os.utime(path, (then, then))
    with client(secure_home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
    assert (held.reveal() in path.read_bytes()) == is_kept


@pytest.mark.parametrize(("limit", "is_refused"), [(1, True), (2, False)])
def test_a_second_release_in_a_round_is_as_the_policy_says(
    secure_home: Home,
    gateway: ScriptedGateway,
    limit: int,
    is_refused: bool,  # noqa: FBT001 - a case
) -> None:
    """The client remembers the first release across restarts and other runs."""
    once = PastRelease(
        run_id=bytes(16),
        is_evaluation=False,
        round_num=0,
        attempt=0,
        session=bytes(32),
        num_releases=1,
        survivors=(ClientId(1),),
    )
    enrolment = secure_home.keys.load_enrolment()
    assert enrolment is not None
    file = secure_home.keys.history_file(enrolment)
    file.write(History(releases=PastReleases((once,))))
    policy = secure(adversary=CURIOUS, max_releases_per_round=limit)
    with (
        structlog.testing.capture_logs() as logs,
        client(secure_home, Quick(), policy=policy) as running,
    ):
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(advert(attempt=1))
        assert isinstance(decode(gateway.hear("result").data), Failure) == is_refused
    assert [each["rule"] for each in select_refusals(logs)] == [
        "max_releases_per_round"
    ] * is_refused


def test_a_notice_of_another_training_than_the_terms_name_is_refused(
    secure_home: Home, gateway: ScriptedGateway
) -> None:
    """The announced settings must be those of the training. Control: the tests above."""
    told, other = advert(epochs=3), advert(epochs=2)
    with client(secure_home, Quick(), policy=secure(adversary=CURIOUS)) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(replace(told, notice=other.notice))
        assert decode(gateway.hear("result").data) == Failure("ProtocolError")


def test_what_is_announced_as_another_kind_is_judged_as_what_it_is(
    home: Home, gateway: ScriptedGateway
) -> None:
    """It is also counted as such, or a coordinator could declare trainings as evaluations."""
    key_ = key(EVALUATION, 0)
    with client(home, Quick(), policy=Policy(max_tasks_per_day=1)) as running:
        running.wait_for(EventKind.CONNECTED)
        for attempt, expected in enumerate((TrainReply, Failure)):
            data = encode(train_request())
            task = wire_pb2.Task(
                key=wire_pb2.TaskKey(run_id="run", kind=key_.kind, attempt=attempt),
                digest=compute_digest(data),
                num_bytes=len(data),
                data=data,
                max_inline_bytes=wire.MAX_INLINE_BYTES,
            )
            gateway.push(task=task)
            assert isinstance(decode(gateway.hear("result").data), expected)


def test_without_the_coordinators_key_the_remedy_is_said_to_both(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Both the user and the operator see it. Control: without secure aggregation it trains."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(SecureStageRequest(round_num=0, attempt=0, message=b"terms"))
        failure = decode(gateway.hear("result").data)
        assert isinstance(failure, Failure)
        assert "was enrolled without the coordinator's key" in failure.reason
        assert "invite it again" in failure.reason
        assert failure.reason in running.wait_for(EventKind.FAILED).message
        gateway.offer(train_request(), round_num=1)
        assert isinstance(decode(gateway.hear("result").data), TrainReply)


def test_a_run_whose_id_is_no_files_name_is_refused(home: Home, gateway: ScriptedGateway) -> None:
    """The id becomes a file name on this device. Control: any other test."""
    gateway.run_id = "../identity"
    with client(home, Quick()) as running:
        assert "'../identity'" in running.wait_for(EventKind.REFUSED).message
        assert not [each for each in running.others() if each.kind is EventKind.CONNECTED]


class Sized(Quick):
    """Reports its number of examples."""

    num_examples = 7


def test_who_may_be_read_in_a_sum_alone_keeps_its_size(
    home: Home, gateway: ScriptedGateway
) -> None:
    """If only sums may be read, it does not report it either; by default it does."""
    for policy, told in ((Policy(), 7), (secure(required=True), 0), (noised(), 0), (local(), 0)):
        with client(home, Sized(), policy=policy) as running:
            running.wait_for(EventKind.CONNECTED)
            assert gateway.hear("hello").eligibility.num_examples == told


def test_the_whole_policy_is_logged_once_at_the_start(home: Home) -> None:
    """Including settings at their defaults."""
    policy = secure(required=True, max_clip=7.0)
    with (
        structlog.testing.capture_logs() as logs,
        client(home, Quick(), policy=policy, conditions=Conditions(on_power=True)) as running,
    ):
        running.call(lambda: None)
    (line,) = [each for each in logs if each["event"] == "policy_in_force"]
    assert line["policy"] == asdict(policy)
    assert line["policy"]["secure_aggregation"]["max_clip"] == 7.0
    assert line["conditions"]["on_power"]


def test_trainings_beyond_the_days_number_are_refused(home: Home, gateway: ScriptedGateway) -> None:
    """Control: the first one is accepted."""
    with client(home, Quick(), policy=Policy(max_tasks_per_day=1)) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert isinstance(decode(gateway.hear("result").data), TrainReply)
        gateway.offer(train_request(), round_num=1)
        assert isinstance(decode(gateway.hear("result").data), Failure)


def test_a_training_that_is_withdrawn_counts(home: Home, gateway: ScriptedGateway) -> None:
    """Otherwise a coordinator that withdraws late could keep the device working all day."""
    trainer = Stepper()
    with client(home, trainer, policy=Policy(max_tasks_per_day=1)) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        trainer.begun.get(timeout=WAIT_S)
        gateway.push(cancel=wire_pb2.Cancel(key=key(train_request(), 0), reason="round closed"))
        running.wait_for(EventKind.CANCELLED)
        gateway.offer(train_request(), round_num=1)
        assert "`max_tasks_per_day`" in running.wait_for(EventKind.POLICY).message


def test_a_training_that_goes_on_is_not_refused_for_having_begun(
    home: Home, gateway: ScriptedGateway
) -> None:
    """It counts once. Control: the next one is refused."""
    trainer = Stepper()
    with client(home, trainer, policy=Policy(max_tasks_per_day=1)) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        trainer.begun.get(timeout=WAIT_S)
    trainer.num_steps = 1
    trainer.is_free.set()
    with client(home, trainer, policy=Policy(max_tasks_per_day=1)) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        assert isinstance(decode(gateway.hear("result").data), TrainReply)
        gateway.offer(train_request(), round_num=1)
        assert isinstance(decode(gateway.hear("result").data), Failure)


def test_the_days_privacy_of_updates_adds_up(home: Home, gateway: ScriptedGateway) -> None:
    """An interrupted training counts once.

    Two updates with a noise multiplier of 3 spend ε = 4.6 at δ = 1e-6.
    """
    request, trainer = train_request(noise=3.0), Stepper()
    policy = local(max_epsilon_per_day=4.7)
    with client(home, trainer, policy=policy) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(request)
        trainer.begun.get(timeout=WAIT_S)
    with client(home, Quick(), policy=policy) as running:
        running.wait_for(EventKind.CONNECTED)
        for round_num in range(2):
            gateway.offer(request, round_num=round_num)
            assert isinstance(decode(gateway.hear("result").data), TrainReply)
        gateway.offer(request, round_num=2)
        assert "`privacy.max_epsilon_per_day`" in running.wait_for(EventKind.POLICY).message


def test_what_is_remembered_of_a_run_goes_with_the_next_run(
    home: Home, gateway: ScriptedGateway
) -> None:
    """The state may contain user data. Control: it is kept within the same run."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        gateway.hear("result")
        gateway.end_session()
        running.wait_for(EventKind.CONNECTED)
        assert finished(home) == 1
        gateway.run_id = "next"
        gateway.end_session()
        running.wait_for(EventKind.CONNECTED)
        assert home.load_state("run") == b""


def test_a_reply_that_is_too_large_is_a_failure(home: Home, gateway: ScriptedGateway) -> None:
    """It is not sent, and the state is unchanged."""
    data = encode(train_request())
    task = wire_pb2.Task(
        key=key(train_request(), 0),
        digest=compute_digest(data),
        num_bytes=len(data),
        data=data,
        max_reply_bytes=10,
        max_inline_bytes=1000,
    )
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(task=task)
        reply = decode(gateway.hear("result").data)
        assert isinstance(reply, Failure)
        assert "at most 10" in reply.reason
    assert home.load_state("run") == b""


def test_a_request_with_other_bytes_than_announced_is_a_failure(
    home: Home, gateway: ScriptedGateway
) -> None:
    data = encode(train_request())
    task = wire_pb2.Task(
        key=key(train_request(), 0),
        digest=b"\0" * 32,
        num_bytes=len(data),
        data=data,
        max_inline_bytes=1000,
    )
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(task=task)
        assert decode(gateway.hear("result").data) == Failure("ProtocolError")


def test_a_request_that_would_fill_the_disk_is_a_failure(
    home: Home, gateway: ScriptedGateway
) -> None:
    """It is not downloaded at all."""
    task = wire_pb2.Task(
        key=key(train_request(), 0), digest=bytes(32), num_bytes=1 << 60, max_inline_bytes=1000
    )
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(task=task)
        assert "free some space" in running.wait_for(EventKind.FAILED).message
        assert decode(gateway.hear("result").data) == Failure("DeploymentError")
    assert gateway.offsets == []


def test_a_run_id_that_is_a_path_ends_the_session(home: Home, gateway: ScriptedGateway) -> None:
    """The id would become a path."""
    task = wire_pb2.Task(key=wire_pb2.TaskKey(run_id="../../etc", kind="TrainRequest"))
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(task=task)
        assert "run id" in running.wait_for(EventKind.REFUSED).message


def test_a_reply_that_cannot_be_read_is_dropped_and_its_task_answered_anew(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Otherwise the coordinator would wait for a reply that the client claims to hold."""
    request = train_request()
    task = wire_pb2.Task(key=key(request, 0), max_inline_bytes=wire.MAX_INLINE_BYTES)
    held = home.hold(OpenTask.of(task, now_unix_s=0.0), reply=b"reply", state=None)
    held.path.unlink()
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        until_s = SystemClock().now_s() + WAIT_S
        while held.path.parent.exists():
            assert SystemClock().now_s() < until_s
            SystemClock().sleep(0.01)
        gateway.offer(request)
        assert isinstance(decode(gateway.hear("result").data), TrainReply)


def test_a_reply_that_is_withdrawn_as_it_is_sent_is_no_error(
    home: Home, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round had enough replies at the moment when this one was stored."""
    hold, is_heard = Home.hold, threading.Event()

    def withdrawn(
        self: Home, task: OpenTask, *, reply: bytes, state: bytes | None, trainer: str
    ) -> HeldReply:
        held = hold(self, task, reply=reply, state=state, trainer=trainer)
        if task.key.round_num == 0:
            gateway.push(cancel=wire_pb2.Cancel(key=key(train_request(), 0), reason="enough"))
            # Once this receipt is reported, the client has received the cancellation too.
            late = wire_pb2.Receipt(key=key(train_request(), 7), verdict=wire_pb2.Receipt.LATE)
            gateway.push(receipt=late)
            assert is_heard.wait(WAIT_S)
        return held

    monkeypatch.setattr(Home, "hold", withdrawn)
    with capture_logs() as logs, client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.offer(train_request())
        running.wait_for(EventKind.LATE)
        is_heard.set()
        running.wait_for(EventKind.UPLOADING)
        gateway.offer(train_request(), round_num=1)
        assert gateway.hear("result").envelope.key.round_num == 1
    events = [each["event"] for each in logs]
    assert "reply_dropped" in events
    assert "reply_unreadable" not in events


def test_a_task_that_kills_the_process_is_given_up(home: Home, gateway: ScriptedGateway) -> None:
    """After three crashes, so that the device can continue with the next round."""
    request = train_request()
    data = encode(request)
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(cancel=wire_pb2.Cancel(key=key(request, 0), reason="not yet"))
        task = wire_pb2.Task(key=key(request, 0), digest=compute_digest(data), num_bytes=len(data))
        home.open_task(OpenTask.of(task, now_unix_s=0.0))
        for _ in range(3):
            home.task("run").begin_work()
        gateway.offer(request)
        reply = decode(gateway.hear("result").data)
        assert isinstance(reply, Failure)
        assert "crashed 3 times" in reply.reason
        assert running.wait_for(EventKind.FAILED).message == reply.reason


def test_a_client_that_is_sent_away_stays_away(home: Home, gateway: ScriptedGateway) -> None:
    """For the requested time; the user sees the reason."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        begin_s = SystemClock().now_s()
        gateway.push(come_back=wire_pb2.ComeBack(after_s=1.5, reason="the run is done"))
        assert running.wait_for(EventKind.DISCONNECTED).message == "the run is done"
        running.wait_for(EventKind.CONNECTED)
        assert SystemClock().now_s() - begin_s >= 1.4


def test_no_coordinator_sends_a_client_away_for_ever(home: Home, gateway: ScriptedGateway) -> None:
    """The client has its own limit."""
    connection = Connection(reconnection=Reconnection(max_absence_s=0.6))
    with client(home, Quick(), connection=connection) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(come_back=wire_pb2.ComeBack(after_s=1e9))
        running.wait_for(EventKind.CONNECTED)


def test_a_coordinator_that_serves_nobody_now_says_when_to_come_back(
    home: Home, gateway: ScriptedGateway
) -> None:
    """The client waits as long as asked, up to its own limit."""
    gateway.come_back_s = [0.7, 1e9]
    connection = Connection(reconnection=Reconnection(max_absence_s=0.9))
    with capture_logs() as logs, client(home, Quick(), connection=connection) as running:
        running.wait_for(EventKind.OFFLINE)
        running.wait_for(EventKind.CONNECTED)
    pauses = [(log["asked_s"], log["pause_s"]) for log in logs if log["event"] == "pause"]
    assert pauses == [(0.7, 0.7), (1e9, 0.9)]


def test_waking_a_client_ends_an_absence_and_the_next_one_is_as_long_as_asked(
    home: Home, gateway: ScriptedGateway
) -> None:
    """Waking a connected client has no effect on a later absence."""
    with client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        gateway.push(come_back=wire_pb2.ComeBack(after_s=3000.0))
        running.wait_for(EventKind.DISCONNECTED)
        running.call(running.runtime.wake)
        running.wait_for(EventKind.CONNECTED)
        running.call(running.runtime.wake)
        begin_s = SystemClock().now_s()
        gateway.push(come_back=wire_pb2.ComeBack(after_s=1.0))
        running.wait_for(EventKind.CONNECTED)
        assert SystemClock().now_s() - begin_s >= 0.9


def test_waking_a_client_ends_an_attempt_that_nobody_answers(
    tmp_path: Path, gateway: ScriptedGateway
) -> None:
    """As after a change of network: the next address is tried at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        addresses = (f"{host}:{port}", gateway.address)
        home = Home(tmp_path / "client")
        home.set_consent(granted=True)
        home.keys.load_next_identity()
        invitation = replace(invitation_to(gateway), addresses=addresses)
        home.keys.enrol(invitation, certificate_pem=b"", client_id=ClientId(3))
        with client(home, Quick()) as running:
            stream, _ = silent.accept()  # the server never answers
            with stream:
                begin_s = SystemClock().now_s()
                running.call(running.runtime.wake)
                assert running.wait_for(EventKind.CONNECTED).message == gateway.address
                assert SystemClock().now_s() - begin_s < 15.0  # gRPC itself waits 20 s


def test_an_address_that_refuses_costs_no_pause_where_there_is_another(
    tmp_path: Path, gateway: ScriptedGateway
) -> None:
    """As when the first of two coordinators is a standby."""
    closed = socket.create_server(("127.0.0.1", 0))
    host, port = closed.getsockname()
    closed.close()
    home = Home(tmp_path / "client")
    home.set_consent(granted=True)
    home.keys.load_next_identity()
    invitation = replace(invitation_to(gateway), addresses=(f"{host}:{port}", gateway.address))
    home.keys.enrol(invitation, certificate_pem=b"", client_id=ClientId(3))
    with capture_logs() as logs, client(home, Quick()) as running:
        running.wait_for(EventKind.CONNECTED)
        assert not [each for each in logs if each["event"] == "pause"]
        gateway.end_session()
        running.wait_for(EventKind.DISCONNECTED)
        running.wait_for(EventKind.CONNECTED)
        assert len([each for each in logs if each["event"] == "pause"]) == 1


@pytest.mark.parametrize("request_", [train_request(), EVALUATE], ids=["training", "evaluation"])
def test_revoking_consent_ends_the_runtime_and_erases_its_state(
    home: Home, gateway: ScriptedGateway, request_: Request
) -> None:
    """Within one batch and one second, during training or evaluation."""
    trainer = Stepper()
    running = Client(home, trainer)
    running.wait_for(EventKind.CONNECTED)
    gateway.offer(request_)
    trainer.begun.get(timeout=WAIT_S)
    home.set_consent(granted=False)
    assert running.future.result(timeout=WAIT_S)
    running.stop()
    assert sorted(path.name for path in home.folder.iterdir()) == ["consent", "identity", "lock"]


def test_nothing_runs_without_consent(home: Home) -> None:
    home.set_consent(granted=False)
    running = Client(home, Quick())
    with pytest.raises(DeploymentError, match="no consent"):
        running.future.result(timeout=WAIT_S)


def test_a_new_invitation_enrols(tmp_path: Path, gateway: ScriptedGateway) -> None:
    """Only once; at the next start the client is enrolled already."""
    home, file = Home(tmp_path / "client"), tmp_path / "laptop.invitation"
    home.set_consent(granted=True)
    invitation_to(gateway).save(file)
    with client(home, Quick(), invitation=file) as running:
        running.wait_for(EventKind.ENROLLED)
        running.wait_for(EventKind.CONNECTED)
    enrolment = home.keys.load_enrolment()
    assert enrolment is not None
    assert enrolment.client_id == 3
    with client(home, Quick(), invitation=file) as running:
        assert running.events.get(timeout=WAIT_S).kind is EventKind.CONNECTED


@pytest.mark.parametrize(("end", "is_told"), [("2020", True), ("2030", False)])
def test_an_invitation_that_is_over_is_told_where_nobody_answers(
    tmp_path: Path, gateway: ScriptedGateway, end: str, *, is_told: bool
) -> None:
    """If its certificate has expired too, TLS fails without giving a reason."""
    home, file = Home(tmp_path / "client"), tmp_path / "laptop.invitation"
    home.set_consent(granted=True)
    replace(invitation_to(gateway), expires_utc=f"{end}-01-01T00:00:00Z").save(file)
    gateway.close()
    with client(home, Quick(), invitation=file) as running:
        message = running.wait_for(EventKind.OFFLINE).message
    assert ("ask the operator for a new one" in message) is is_told


def test_a_client_follows_a_coordinator_that_moves(home: Home, gateway: ScriptedGateway) -> None:
    """To an announced address, next to invalid and unreachable ones, and also after a restart."""
    new = ScriptedGateway()
    gateway.announced = ["nonsense", "fl.example.org:443", new.address]
    with client(home, Quick()) as running:
        assert running.wait_for(EventKind.CONNECTED).message == gateway.address
        gateway.end_session()
        while running.wait_for(EventKind.CONNECTED).message != new.address:
            gateway.end_session()
    gateway.close()
    assert list_known_addresses(home) == (new.address, gateway.address)
    with client(home, Quick()) as running:
        assert running.wait_for(EventKind.CONNECTED).message == new.address
    new.close()


def test_a_client_takes_an_address_from_its_user(home: Home, gateway: ScriptedGateway) -> None:
    """It is tried before the known ones, and kept together with them for the next start."""
    moved = ScriptedGateway()
    gateway.close()
    with client(home, Quick(), connection=Connection(addresses=(moved.address,))) as running:
        assert running.wait_for(EventKind.CONNECTED).message == moved.address
    assert list_known_addresses(home) == (moved.address, gateway.address)
    with client(home, Quick()) as running:
        assert running.wait_for(EventKind.CONNECTED).message == moved.address
    moved.close()


def list_known_addresses(home: Home) -> tuple[str, ...]:
    enrolment = home.keys.load_enrolment()
    assert enrolment is not None
    return enrolment.invitation.addresses


class Mute(Device):
    """A device without facts other than those the application reports."""

    def found(self) -> Facts:
        return Facts()


def test_a_certificate_that_ends_soon_is_an_event_with_the_remedy(
    tmp_path: Path, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, although it is checked every second. Control: a certificate with months left."""
    monkeypatch.setattr(runtime, "Device", Mute)
    last_year = utc(SystemClock().unix_s() - 300 * 86_400.0)
    authority = Authority(tmp_path / "authority", host_names=(), now=lambda: last_year)
    for days in (310, 665):
        home = Home(tmp_path / f"client-{days}")
        home.set_consent(granted=True)
        csr_pem = home.keys.load_next_identity().csr_pem("laptop")
        certificate_pem = authority.sign(csr_pem, name="laptop", client_id=3, valid_days=days)
        home.keys.enrol(
            invitation_to(gateway), certificate_pem=certificate_pem, client_id=ClientId(3)
        )
        with client(home, Stepper()) as running:
            running.wait_for(EventKind.CONNECTED)
            for on_power in (True, False):  # each is reported after a check
                running.update_facts(Facts(on_power=on_power))
                while gateway.hear("eligibility").on_power is not on_power:
                    pass
        advice = [each.message for each in running.others() if each.kind is EventKind.EXPIRING]
        assert len(advice) == (days == 310)
        assert all("fedlearn invite laptop" in each for each in advice)


def test_a_client_that_is_not_enrolled_says_so(tmp_path: Path) -> None:
    """Instead of waiting forever."""
    home = Home(tmp_path / "client")
    home.set_consent(granted=True)
    running = Client(home, Quick())
    with pytest.raises(DeploymentError, match="not enrolled"):
        running.future.result(timeout=WAIT_S)
