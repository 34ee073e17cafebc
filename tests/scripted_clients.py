"""Scripted clients of a real gateway on the loopback, and exchanges in threads of their own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import MappingProxyType
from typing import TypeVar

import torch

from fedlearn.core.clock import RealClock, SystemClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import (
    ClientId,
    Reply,
    Request,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ConnectionRefused, Parked
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.server import Gateway, GatewayChannel, GatewaySettings, RunTerms
from fedlearn.identity.identity import Identity
from fedlearn.identity.registry import EnrolledClient
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.base import ask_once
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import (
    GatewayConnection,
    GatewaySession,
)

T = TypeVar("T")

RUN_ID = "0123456789abcdef0123456789abcdef"
WAIT_S = 60.0  # exceeded only by a hang
NEVER = 3600.0

SETTINGS = GatewaySettings(address="127.0.0.1:0", stall_timeout_s=WAIT_S, recovery_grace_s=1.0)

Receipt = wire_pb2.Receipt
Told = wire_pb2.FromCoordinator


def train_request(round_num: int = 0, *, size: int = 4, attempt: int = 0) -> TrainRequest:
    tensors = {"weight": torch.arange(size, dtype=torch.float32)}
    return TrainRequest(
        round_num=round_num,
        attempt=attempt,
        tensors=tensors,
        order=tuple(tensors),
        settings={},
        seed=0,
    )


def train_reply(value: float, *, round_num: int = 0, size: int = 4) -> TrainReply:
    lanes = {"delta": torch.full((size,), value)}
    return TrainReply(round_num=round_num, lanes=lanes, num_examples=1, metrics={})


def value_of(reply: Reply) -> float:
    assert isinstance(reply, TrainReply)
    return float(reply.lanes["delta"][0])


def envelope(
    task: wire_pb2.Task, data: bytes, *, client_id: int, identity: Identity
) -> wire_pb2.Envelope:
    digest = compute_digest(data)
    signature = identity.sign(encode_signed_reply(task.key, client_id=client_id, digest=digest))
    return wire_pb2.Envelope(key=task.key, digest=digest, num_bytes=len(data), signature=signature)


@dataclass
class Member:
    """A scripted client: it connects and records the messages that it receives."""

    name: str
    client_id: int
    identity: Identity
    loop: LoopThread
    told: "Queue[Told | None]" = field(default_factory=Queue)
    address: str = ""
    session: GatewaySession | None = None
    _running: Future[None] | None = None
    _leave: asyncio.Event | None = None

    def connect(
        self,
        gateway: Gateway,
        *,
        held: Sequence[wire_pb2.TaskKey] = (),
        device: str = "cpu",
        num_examples: int = 0,
        only_looks: bool = False,
        takes_ahead: bool = False,
        takes_many_runs: bool = True,
        takes_bundles: bool = False,
        max_concurrent_runs: int = 0,
    ) -> "Member":
        welcomed: Future[None] = Future()
        self.address, self.told = gateway.address, Queue()
        hello = wire_pb2.Hello(
            protocol=wire.PROTOCOL,
            software="fedlearn of the tests",
            held=held,
            eligibility=wire_pb2.Eligibility(
                device=device,
                num_examples=num_examples,
                takes_ahead=takes_ahead,
                max_concurrent_runs=max_concurrent_runs,
            ),
            only_looks=only_looks,
            takes_many_runs=takes_many_runs,
            takes_bundles=takes_bundles,
        )
        self._running = self.loop.call(self._run(welcomed, hello))
        welcomed.result(WAIT_S)
        return self

    def disconnect(self) -> None:
        assert self._running is not None
        assert self._leave is not None
        self.loop.post(self._leave.set)
        self._running.result(WAIT_S)

    def hear(self) -> Told | None:
        return self.told.get(timeout=WAIT_S)

    def hear_task(self) -> wire_pb2.Task:
        told = self.hear()
        assert told is not None
        assert told.WhichOneof("what") == "task", told
        return told.task

    def hear_receipt(self) -> wire_pb2.Receipt:
        told = self.hear()
        assert told is not None
        assert told.WhichOneof("what") == "receipt", told
        return told.receipt

    def say(self, message: wire_pb2.FromClient) -> None:
        assert self.session is not None
        self.loop.call(self.session.send(message)).result(WAIT_S)

    def answer(self, task: wire_pb2.Task, reply: Reply | bytes) -> None:
        data = reply if isinstance(reply, bytes) else encode(reply)
        signed = envelope(task, data, client_id=self.client_id, identity=self.identity)
        self.say(wire_pb2.FromClient(result=wire_pb2.Result(envelope=signed, data=data)))

    def downloaded(self, task: wire_pb2.Task, path: Path) -> bytes:
        path.write_bytes(b"")
        self.use(
            lambda connection: connection.download(task.digest, num_bytes=task.num_bytes, path=path)
        ).result(WAIT_S)
        return path.read_bytes()

    def upload(self, task: wire_pb2.Task, path: Path) -> Future[wire_pb2.Receipt]:
        data = path.read_bytes()
        signed = envelope(task, data, client_id=self.client_id, identity=self.identity)
        return self.use(lambda connection: connection.upload(signed, path))

    def use(self, call: Callable[[GatewayConnection], Awaitable[T]]) -> "Future[T]":
        async def used() -> T:
            async with GatewayConnection(self.address, None, name=self.name) as connection:
                return await call(connection)

        return self.loop.call(used())

    async def _run(self, welcomed: Future[None], hello: wire_pb2.Hello) -> None:
        self._leave = asyncio.Event()
        leave = asyncio.create_task(self._leave.wait())
        try:
            async with (
                GatewayConnection(self.address, None, name=self.name) as connection,
                connection.session(hello) as self.session,
            ):
                welcomed.set_result(None)
                listening = asyncio.create_task(self._listen(self.session))
                await asyncio.wait({leave, listening}, return_when="FIRST_COMPLETED")
                listening.cancel()
                await asyncio.wait({listening})
        except (ConnectionError, ConnectionRefused) as error:
            if not welcomed.done():
                welcomed.set_exception(error)
        finally:
            leave.cancel()

    async def _listen(self, session: GatewaySession) -> None:
        heard = self.told  # of this session only
        try:
            while (told := await session.receive()) is not None:
                heard.put(told)
        except (ConnectionError, ConnectionRefused):
            pass
        heard.put(None)


@dataclass
class Site:
    """A server and its clients."""

    folder: Path
    loop: LoopThread
    registry: FreshRegistry
    gateways: list[Gateway] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    is_leader: bool = True

    def open(
        self,
        settings: GatewaySettings = SETTINGS,
        *,
        clock: RealClock | None = None,
        pace: Pace | None = None,
        beat_s: float = 0.0,
        run_ids: Sequence[str] = (RUN_ID,),
    ) -> Gateway:
        gateway = Gateway(
            settings,
            registry=self.registry,
            runs=[self.terms(run_id) for run_id in run_ids],
            authority=None,
            is_leader=lambda: self.is_leader,
            clock=clock or SystemClock(),
            pace=pace,
            beat_s=beat_s,
        )
        gateway.start()
        self.gateways.append(gateway)
        return gateway

    def terms(self, run_id: str, *, fewest: int = 1, priority: int = 0) -> RunTerms:
        return RunTerms(
            run_id=run_id,
            uploads_dir=self.folder if run_id == RUN_ID else self.folder / run_id,
            eligible=lambda _, told: told.device != "toaster",
            is_leader=lambda: self.is_leader,
            fewest=fewest,
            priority=priority,
        )

    def shut(self, gateway: Gateway, *, grace_s: float = 0.0) -> None:
        """Stop a gateway; without a grace, what it says last may not arrive."""
        self.gateways.remove(gateway)
        gateway.stop(grace_s=grace_s)

    def enrol(self, name: str, *, tags: Sequence[str] = ()) -> Member:
        identity = Identity.create()
        token = self.registry.invite(name, tags=tags, valid_s=60.0)
        client: EnrolledClient = self.registry.redeem(
            name,
            token,
            identity_key=identity.public_key,
            certify=lambda client_id: (b"", f"{client_id:064x}", "2999-01-01T00:00:00Z"),
        )
        member = Member(name, client.client_id, identity, self.loop)
        self.members.append(member)
        return member

    def connected(self, gateway: Gateway, num: int) -> list[Member]:
        return [self.enrol(f"client-{len(self.members)}").connect(gateway) for _ in range(num)]


class Collecting:
    """Runs an exchange in a thread, and hands replies to the test one at a time."""

    def __init__(
        self,
        channel: GatewayChannel,
        members: list[Member],
        request: Request | Mapping[int, Request],
        *,
        deadline_s: float = NEVER,
        enough: int | None = None,
        refused: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.refused = refused
        self.arrived: Queue[tuple[int, Reply]] = Queue()
        self.outcome: Future[int] = Future()
        self._go_on = threading.Semaphore(0)
        requests = {
            ClientId(member.client_id): request[member.client_id]
            if isinstance(request, Mapping)
            else request
            for member in members
        }
        self._thread = threading.Thread(
            target=self._run, args=(channel, requests, deadline_s, enough), daemon=True
        )
        self._thread.start()

    def _run(
        self,
        channel: GatewayChannel,
        requests: dict[ClientId, Request],
        deadline_s: float,
        enough: int | None,
    ) -> None:
        num = 0
        try:
            for arrival in ask_once(channel, requests, deadline_s=deadline_s):
                num += 1
                if arrival.client_id in self.refused:
                    arrival.refuse(self.refused[arrival.client_id])
                self.arrived.put((arrival.client_id, arrival.reply))
                self._go_on.acquire()
                if num == enough:
                    break
        except Parked as parked:
            self.outcome.set_exception(parked)
        else:
            self.outcome.set_result(num)

    def next(self) -> tuple[int, Reply]:
        """Return the next reply that arrived; it is consumed only by :meth:`consume`."""
        return self.arrived.get(timeout=WAIT_S)

    def consume(self) -> None:
        self._go_on.release()

    def take(self) -> tuple[int, Reply]:
        arrived = self.next()
        self.consume()
        return arrived

    def end(self) -> int:
        return self.outcome.result(WAIT_S)

    def goes_on(self) -> bool:
        """Return whether the exchange is still open after it has checked its clock again."""
        done, _ = wait([self.outcome], timeout=0.5)
        return not done
