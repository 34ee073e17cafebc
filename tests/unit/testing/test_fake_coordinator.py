"""The coordinator for users' tests, itself tested with clients over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_names, settings_of
from fedlearn.core.messages import ClientId, EvaluateReply, Failure, TrainReply
from fedlearn.errors import ConnectionRefused, DeploymentError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.identity.identity import Identity, Invitation
from fedlearn.session.session import ClientSession
from fedlearn.testing import FakeCoordinator
from fedlearn.testing.fixtures import fake_coordinator as fake_coordinator  # noqa: PLC0414
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, GatewaySession, enrol

SETTINGS = settings_of(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))
NUM_EXAMPLES = 20


def network() -> nn.Module:
    return nn.Linear(4, 3)


def standard_trainer() -> TorchTrainer:
    features = torch.randn(NUM_EXAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TorchTrainer.of(network, features, torch.arange(NUM_EXAMPLES) % 3, device="cpu")


@asynccontextmanager
async def joined(path: Path) -> AsyncIterator[tuple[GatewaySession, Identity, int]]:
    """Yield the session, identity and id of a client that has enrolled and is connected."""
    invitation, identity = Invitation.load(path), Identity.create()
    address = invitation.token_addresses[0]
    certificate_pem, client_id = await enrol(address, invitation, identity)
    credentials = Credentials(
        ca_pem=invitation.ca_pem,
        certificate_pem=certificate_pem,
        tls_key_pem=identity.tls_key_pem,
    )
    hello = wire_pb2.Hello(
        protocol=wire.PROTOCOL,
        eligibility=wire_pb2.Eligibility(num_examples=NUM_EXAMPLES, device="cpu"),
    )
    async with (
        GatewayConnection(invitation.addresses[0], credentials) as connection,
        connection.session(hello) as session,
    ):
        yield session, identity, client_id


async def answer_one(
    session: GatewaySession, identity: Identity, client_id: int, trainer: LocalTrainer
) -> None:
    """Do one task, as the client runtime would."""
    message = await session.receive()
    assert message is not None
    task = message.task
    handler = ClientSession(ClientId(client_id), trainer)
    reply, _ = await asyncio.to_thread(handler.handle, task.data, b"")
    digest = compute_digest(reply)
    signed = encode_signed_reply(task.key, client_id=client_id, digest=digest)
    envelope = wire_pb2.Envelope(
        key=task.key, digest=digest, num_bytes=len(reply), signature=identity.sign(signed)
    )
    result = wire_pb2.Result(envelope=envelope, data=reply)
    await session.send(wire_pb2.FromClient(result=result))


async def one_exchange(
    coordinator: FakeCoordinator,
    model: nn.Module,
    *,
    evaluate: bool,
    trainer: LocalTrainer | None = None,
) -> dict[str, TrainReply | Failure] | dict[str, EvaluateReply | Failure]:
    async with joined(coordinator.invite("clinic-a")) as client:
        await asyncio.to_thread(coordinator.wait_for, 1)
        assert coordinator.list_clients() == ["clinic-a"]
        if evaluate:
            asked = asyncio.create_task(asyncio.to_thread(coordinator.evaluate, model))
            await answer_one(*client, trainer or standard_trainer())
            return await asked
        trained = asyncio.create_task(asyncio.to_thread(coordinator.train, model, SETTINGS))
        await answer_one(*client, trainer or standard_trainer())
        return await trained


def test_a_client_trains_as_it_is_asked() -> None:
    """The request names the client, and travels over mutual TLS and through the wire format."""
    with FakeCoordinator() as coordinator:
        replies = asyncio.run(one_exchange(coordinator, network(), evaluate=False))
    reply = replies["clinic-a"]
    assert isinstance(reply, TrainReply)
    assert reply.num_examples == NUM_EXAMPLES
    assert reply.lanes.keys() == {"delta"}
    assert reply.lanes["delta"].shape == (4 * 3 + 3,), "weight and bias"


@dataclass(frozen=True)
class Spoiling:
    """A trainer that spoils its results with ``spoil``."""

    spoil: Callable[[LocalResult], Any]  # Any: also values that no trainer may return
    honors = settings_names()

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        result: LocalResult = self.spoil(standard_trainer().train(tensors, context=context))
        return result

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        measured = standard_trainer().evaluate(tensors, control=control)
        return replace(measured, num_examples=0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: replace(r, tensors={"weight": r.tensors["weight"]}), "no tensor 'bias'"),
        (lambda r: replace(r, tensors={n: v.int() for n, v in r.tensors.items()}), "torch.int32"),
        (lambda r: replace(r, tensors={n: v / 0 for n, v in r.tensors.items()}), "not finite"),
        (lambda r: replace(r, num_examples=0), "num_examples is 0"),
        (lambda r: replace(r, metrics={"auc": "high"}), "the metric 'auc' is str"),
        (lambda r: r.tensors, "not a LocalResult"),
    ],
)
def test_what_a_coordinator_would_refuse_is_refused(
    spoil: Callable[[LocalResult], Any], words: str
) -> None:
    """An application's test thus fails before its first real round would."""
    with FakeCoordinator() as coordinator:
        exchange = one_exchange(coordinator, network(), evaluate=False, trainer=Spoiling(spoil))
        reply = asyncio.run(exchange)["clinic-a"]
    assert isinstance(reply, Failure)
    assert words in reply.reason


def test_an_evaluation_of_nothing_is_refused() -> None:
    with FakeCoordinator() as coordinator:
        trainer = Spoiling(lambda result: result)
        exchange = one_exchange(coordinator, network(), evaluate=True, trainer=trainer)
        reply = asyncio.run(exchange)["clinic-a"]
    assert isinstance(reply, Failure)
    assert "num_examples is 0" in reply.reason


def test_a_client_evaluates() -> None:
    """Over the same gateway, by another kind of request."""
    with FakeCoordinator() as coordinator:
        replies = asyncio.run(one_exchange(coordinator, network(), evaluate=True))
    reply = replies["clinic-a"]
    assert isinstance(reply, EvaluateReply)
    assert reply.metrics["accuracy"] >= 0.0


def test_a_client_that_is_not_eligible_is_not_asked() -> None:
    """It is connected; waiting for it reports which client is missing."""

    async def waits(coordinator: FakeCoordinator) -> None:
        async with joined(coordinator.invite("clinic-a")):
            with pytest.raises(DeploymentError, match="0 of 1 clients connected within"):
                await asyncio.to_thread(coordinator.wait_for, 1, timeout_s=0.5)

    too_many = Requirements(min_examples=NUM_EXAMPLES + 1)
    with FakeCoordinator(requirements=too_many) as coordinator:
        asyncio.run(waits(coordinator))


def test_asking_nobody_is_an_error() -> None:
    """Not an empty list of replies, in which a test would look for a client."""
    with FakeCoordinator() as coordinator:
        with pytest.raises(DeploymentError, match="no client is connected; call `wait_for`"):
            coordinator.train(network(), SETTINGS)
        with pytest.raises(DeploymentError, match="no client is connected"):
            coordinator.evaluate(network())


def test_nothing_is_left_behind() -> None:
    """No folder remains, and no port stays open."""
    with FakeCoordinator() as coordinator:
        path, address = coordinator.invite("clinic-a"), coordinator.address
        assert path.exists()
    assert not path.parent.exists()

    async def raise_refusal() -> None:
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.close()

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(raise_refusal())


def test_a_coordinator_that_goes_away_comes_back_where_it_was(
    fake_coordinator: FakeCoordinator,
) -> None:
    """With its known clients, in the same run; while it is away no call is answered."""

    async def tries() -> None:
        invitation = fake_coordinator.invite("clinic-a")
        async with joined(invitation) as (session, _, client_id):
            run_id = session.welcome.run_id
        address, run_ids = fake_coordinator.address, {run_id, fake_coordinator.run_id}
        with fake_coordinator.outage():
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address.split(":"))
            assert fake_coordinator.list_clients() == []
            with pytest.raises(DeploymentError, match="this coordinator is stopped"):
                fake_coordinator.train(network(), SETTINGS)
        assert fake_coordinator.address == address
        async with joined(fake_coordinator.invite("clinic-a")) as (session, _, again):
            assert again == client_id
            run_ids.add(session.welcome.run_id)
            fake_coordinator.wait_for(1)
        assert run_ids == {run_id}

    asyncio.run(tries())


def test_who_is_revoked_is_refused_and_counted() -> None:
    """Although its certificate has not changed."""

    async def tries(coordinator: FakeCoordinator) -> None:
        async with joined(coordinator.invite("clinic-a")) as (session, _, _):
            coordinator.revoke("clinic-a")
            assert coordinator.list_clients() == []
            with pytest.raises(ConnectionRefused, match="revoked"):
                await session.receive()

    with FakeCoordinator() as coordinator:
        asyncio.run(tries(coordinator))
        assert coordinator.counters()["sessions"] == 1
