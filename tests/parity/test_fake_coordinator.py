"""A fake coordinator refuses what a coordinator's rounds refuse, with the same messages.

Each false answer is sent twice: to a real coordinator's round, over a gRPC server, and to the fake
one. The verdict for the client and the coordinator's record must be the same, and match the table.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import nn

from fedlearn.algorithms.collector import GlobalModel, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.errors import ConnectionRefused, EnrolmentRefused, OtherProtocol
from fedlearn.identity.identity import Identity
from fedlearn.rounds.evaluation import ChannelEvaluator
from fedlearn.rounds.plain import PlainCollector
from fedlearn.testing import FakeCoordinator, LocalGateway
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, enrol
from tests.security.peers.harness import HELLO, Peer, envelope, result, told

WAIT_S = 60.0
STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))
MODEL = nn.Linear(2, 2)
SIZE = 6

T = TypeVar("T")


class Side(Protocol):
    """A coordinator that asks one client once, and returns how it recorded the answer."""

    def train(self) -> str: ...

    def evaluate(self) -> bool: ...


@dataclass
class Rounds:
    """A coordinator that runs rounds."""

    gateway: LocalGateway

    def train(self) -> str:
        channel = self.gateway.gateway.channel()
        policy = StragglerPolicy(
            num_wanted=1,
            over_selection=1.0,
            deadline_s=WAIT_S,
            min_reports=1,
            below_minimum=BelowMinimum.FAIL,
            max_retries=0,
        )
        request = RoundRequest(
            round_num=0,
            attempt=0,
            params=Params.of(MODEL),
            strategy=STRATEGY,
            broadcast={},
            seed=0,
        )
        collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
        (row,) = collect_from(collector, channel.available(), request).participations
        return "" if row.status is Status.REPORTED else row.reason

    def evaluate(self) -> bool:
        channel = self.gateway.gateway.channel()
        evaluator = ChannelEvaluator(
            channel=channel,
            cohort=lambda _: channel.available(),
            directions={},
            deadline_s=WAIT_S,
            strategy=STRATEGY,
        )
        return bool(evaluator.evaluate(GlobalModel(params=Params.of(MODEL), round_num=0)).metrics)


@dataclass
class Fake:
    """A fake coordinator."""

    gateway: FakeCoordinator

    def train(self) -> str:
        (reply,) = self.gateway.train(MODEL, STRATEGY, deadline_s=WAIT_S).values()
        return reply.reason if isinstance(reply, Failure) else ""

    def evaluate(self) -> bool:
        (reply,) = self.gateway.evaluate(MODEL, deadline_s=WAIT_S).values()
        return isinstance(reply, EvaluateReply)


def real(folder: Path) -> AbstractContextManager[LocalGateway]:
    return LocalGateway(folder)


def fake(_: Path) -> AbstractContextManager[LocalGateway]:
    return FakeCoordinator()


def side_of(gateway: LocalGateway) -> Side:
    return Fake(gateway) if isinstance(gateway, FakeCoordinator) else Rounds(gateway)


async def enrolled(gateway: LocalGateway, name: str) -> Peer:
    identity, invitation = Identity.create(), gateway.create_invitation(name)
    certificate, client_id = await enrol(gateway.gateway.address, invitation, identity)
    credentials = Credentials(
        ca_pem=gateway.authority.ca_pem,
        certificate_pem=certificate,
        tls_key_pem=identity.tls_key_pem,
    )
    return Peer(name, identity, client_id, credentials)


#: Creates what a client sends for a task.
Tell = Callable[[wire_pb2.Task, Peer], Sequence[wire_pb2.FromClient]]


@dataclass(frozen=True)
class Lie:
    """A false answer.

    Attributes:
        name: Name in words.
        tell: Creates what is sent.
        reason: Part of the reason in the receipt.
        is_answer: Whether it settles the question, as the client's failure. Otherwise the
            coordinator still waits for the client, which then answers honestly.
    """

    name: str
    tell: Tell
    reason: str
    is_answer: bool = True


def honest_reply(task: wire_pb2.Task) -> TrainReply | EvaluateReply:
    asked = decode(task.data)
    if isinstance(asked, EvaluateRequest):
        return EvaluateReply(round_num=asked.round_num, num_examples=5, metrics={"loss": 1.0})
    assert isinstance(asked, TrainRequest)
    return TrainReply(
        round_num=asked.round_num,
        lanes={"delta": torch.zeros(SIZE)},
        num_examples=5,
        metrics={"loss": 1.0},
    )


def honest(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
    return [result(task.key, encode(honest_reply(task)), peer)]


def saying(make: Callable[[wire_pb2.Task], Reply | bytes]) -> Tell:
    """Sign and send what ``make`` returns."""

    def tell(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
        made = make(task)
        return [result(task.key, made if isinstance(made, bytes) else encode(made), peer)]

    return tell


def changed(**changes: Any) -> Tell:  # Any: fields of a reply
    return saying(lambda task: replace(honest_reply(task), **changes))


def delta(vector: torch.Tensor) -> Tell:
    return changed(lanes={"delta": vector})


def seal(change: Callable[[wire_pb2.Envelope], object], *, data: bytes | None = None) -> Tell:
    """Change the envelope of an honest reply, or its bytes."""

    def tell(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
        reply = encode(honest_reply(task))
        about = envelope(task.key, reply, peer)
        change(about)
        sent = wire_pb2.Result(envelope=about, data=reply if data is None else data)
        return [wire_pb2.FromClient(result=sent)]

    return tell


def of_another_client(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
    return [result(task.key, encode(honest_reply(task)), peer, client_id=peer.client_id + 1)]


def of_another(**fields: Any) -> Tell:  # Any: fields of a key
    def tell(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
        key = wire_pb2.TaskKey()
        key.CopyFrom(task.key)
        for name, value in fields.items():
            setattr(key, name, value)
        return [result(key, encode(honest_reply(task)), peer)]

    return tell


def garble(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def large(task: wire_pb2.Task, peer: Peer) -> Sequence[wire_pb2.FromClient]:
    data = encode(honest_reply(task))
    digest = compute_digest(data)
    signed = encode_signed_reply(task.key, client_id=peer.client_id, digest=digest)
    about = wire_pb2.Envelope(
        key=task.key,
        digest=digest,
        num_bytes=task.max_reply_bytes + 1,
        signature=peer.identity.sign(signed),
    )
    return [wire_pb2.FromClient(result=wire_pb2.Result(envelope=about, data=data))]


CAUSE = "probably because training diverged: lower client.learning_rate"
NAN = f"the delta is not finite or exceeds 1e+20, {CAUSE}"
NORM = f"the norm of the delta exceeds 1e+08 (updates.max_norm), {CAUSE}"
#: False answers to a training request, with the reasons for refusing them.
LIES = [
    Lie("no message", saying(lambda _: b"not a message"), "the message begins with b'no'"),
    Lie("half a message", saying(lambda task: encode(honest_reply(task))[:-9]), ""),
    Lie(
        "a request",
        saying(lambda task: bytes(task.data)),
        "TrainRequest is not a reply",
    ),
    Lie(
        "an evaluation",
        saying(lambda _: EvaluateReply(round_num=0, num_examples=1, metrics={})),
        "EvaluateReply is not a reply to a training request",
    ),
    Lie("another round", changed(round_num=7), "reply to round 7 in round 0"),
    Lie("no lane", changed(lanes={}), "it has missing or extra lanes: ['delta']"),
    Lie(
        "an unknown lane",
        changed(lanes={"delta": torch.zeros(SIZE), "control": torch.zeros(SIZE)}),
        "it has missing or extra lanes: ['control']",
    ),
    Lie("a short vector", delta(torch.zeros(SIZE - 1)), "lane 'delta' has shape (5,), not (6,)"),
    Lie("a matrix", delta(torch.zeros(2, 3)), "lane 'delta' has shape (2, 3), not (6,)"),
    Lie(
        "another dtype",
        delta(torch.zeros(SIZE, dtype=torch.float64)),
        "lane 'delta' is torch.float64, but the model is torch.float32",
    ),
    Lie("a NaN", delta(torch.full((SIZE,), torch.nan)), NAN),
    Lie("infinity", delta(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf])), NAN),
    Lie("too large a number", delta(torch.full((SIZE,), 1e30)), NAN),
    Lie("too long a vector", delta(torch.full((SIZE,), 1e8)), NORM),
    Lie("no examples", changed(num_examples=0), "num_examples 0 is not in 1..100000000"),
    Lie(
        "a debt of examples",
        changed(num_examples=-5),
        "num_examples is not an integer in [0, 2**63)",
    ),
    Lie("a billion examples", changed(num_examples=10**9), "num_examples 1000000000 is not in"),
    Lie(
        "no signature",
        seal(lambda about: about.ClearField("signature")),
        "the signature is not by this client's identity key",
        is_answer=False,
    ),
    Lie(
        "the signature of another client",
        of_another_client,
        "the signature is not by this client's identity key",
        is_answer=False,
    ),
    Lie(
        "a digest of something else",
        seal(lambda _: None, data=b"x" * len(encode(Failure("x")))),
        "bytes",
        is_answer=False,
    ),
    Lie(
        "no digest",
        seal(lambda about: about.ClearField("digest")),
        "0 bytes are not a digest",
        is_answer=False,
    ),
    Lie("too large a reply", large, "at most", is_answer=False),
    Lie(
        "a reply of another run",
        of_another(run_id="f" * 32),
        "it belongs to another run",
        is_answer=False,
    ),
]


@dataclass(frozen=True)
class Heard:
    """The outcome of a false answer.

    Attributes:
        verdicts: Verdicts that the client received, in order, with their reasons.
        made_of_it: Why the coordinator does not count the client; empty: it does.
    """

    verdicts: Sequence[tuple[str, str]]
    made_of_it: str


def outcome(gateway: LocalGateway, tells: Sequence[Tell], ask: Callable[[], T]) -> tuple[Any, T]:
    """Send answers to one question in order; return the receipts, and the coordinator's result."""

    async def lied() -> tuple[list[tuple[str, str]], T]:
        peer = await enrolled(gateway, "clinic-a")
        async with (
            GatewayConnection(gateway.gateway.address, peer.credentials) as connection,
            connection.session(HELLO) as session,
        ):
            await asyncio.to_thread(gateway.wait_for, 1)
            with ThreadPoolExecutor(1) as thread:
                asked = asyncio.get_running_loop().run_in_executor(thread, ask)
                task, receipts = (await told(session, "task")).task, []
                for tell in tells:
                    for message in tell(task, peer):
                        await session.send(message)
                    receipt = (await told(session, "receipt")).receipt
                    verdict = wire_pb2.Receipt.Verdict.Name(receipt.verdict)
                    receipts.append((verdict, receipt.reason))
                return receipts, await asked

    return asyncio.run(asyncio.wait_for(lied(), WAIT_S))


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_in_a_training_is_refused_by_both_alike(lie: Lie, tmp_path: Path) -> None:
    """The client gets the reason; it has failed, or may still answer honestly."""
    heard = []
    for opened in (real(tmp_path), fake(tmp_path)):
        with opened as gateway:
            tells = [lie.tell] if lie.is_answer else [lie.tell, honest]
            receipts, made_of_it = outcome(gateway, tells, side_of(gateway).train)
        heard.append(Heard(receipts, made_of_it))
    assert heard[0] == heard[1]
    (verdict, reason), *after = heard[0].verdicts
    assert verdict == "REFUSED"
    assert lie.reason in reason
    if lie.is_answer:
        assert heard[0].made_of_it == reason
        assert after == []
    else:
        assert heard[0].made_of_it == ""
        assert after == [("ACCEPTED", "")]


@pytest.mark.slow
@pytest.mark.parametrize("opened", [real, fake])
def test_a_reply_of_another_version_ends_the_session(
    opened: Callable[[Path], AbstractContextManager[LocalGateway]], tmp_path: Path
) -> None:
    """Its client's next reply could not be understood either."""
    other = saying(lambda task: garble(encode(honest_reply(task)), 2))
    with (
        opened(tmp_path) as gateway,
        pytest.raises(OtherProtocol, match="message version 251, this side speaks"),
    ):
        outcome(gateway, [other], side_of(gateway).train)


@pytest.mark.parametrize("opened", [real, fake])
def test_the_truth_is_accepted_by_both_and_a_second_upload_changes_nothing(
    opened: Callable[[Path], AbstractContextManager[LocalGateway]], tmp_path: Path
) -> None:
    """The control of the table. A second upload counts only once."""
    with opened(tmp_path) as gateway:
        other = changed(num_examples=7)
        receipts, made_of_it = outcome(gateway, [honest, other], side_of(gateway).train)
    assert receipts == [("ACCEPTED", "")] * 2
    assert made_of_it == ""


@pytest.mark.parametrize("opened", [real, fake])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda _: TrainReply(round_num=0, lanes={}, num_examples=1, metrics={}),
            "TrainReply does",
        ),
        (
            lambda _: EvaluateReply(round_num=3, num_examples=1, metrics={}),
            "EvaluateReply does not",
        ),
        (lambda _: b"nothing", "the message begins with b'no'"),
    ],
)
def test_a_lie_in_an_evaluation_is_refused_by_both(
    opened: Callable[[Path], AbstractContextManager[LocalGateway]],
    make: Callable[[wire_pb2.Task], Reply | bytes],
    reason: str,
    tmp_path: Path,
) -> None:
    """It is not an evaluation of that round."""
    with opened(tmp_path) as gateway:
        receipts, counts = outcome(gateway, [saying(make)], side_of(gateway).evaluate)
    ((verdict, words),) = receipts
    assert verdict == "REFUSED"
    assert reason in words
    assert not counts


async def say_to(gateway: LocalGateway, credentials: Credentials, hello: wire_pb2.Hello) -> str:
    """Return the error that a client gets if it is not let in."""
    try:
        async with (
            GatewayConnection(gateway.gateway.address, credentials) as connection,
            connection.session(hello) as session,
        ):
            await session.receive()
    except (ConnectionRefused, ConnectionError) as error:
        return str(error)
    return ""


async def revoked(gateway: LocalGateway, _: Path) -> str:
    peer = await enrolled(gateway, "clinic-a")
    gateway.registry.revoke("clinic-a")
    return await say_to(gateway, peer.credentials, HELLO)


async def of_another_authority(gateway: LocalGateway, folder: Path) -> str:
    peer = await enrolled(gateway, "clinic-a")
    with LocalGateway(folder / "other") as other:
        foreign = await enrolled(other, "clinic-a")
    return await say_to(
        gateway, replace(foreign.credentials, ca_pem=peer.credentials.ca_pem), HELLO
    )


async def of_another_version(gateway: LocalGateway, _: Path) -> str:
    peer = await enrolled(gateway, "clinic-a")
    async with GatewayConnection(gateway.gateway.address, peer.credentials) as connection:
        with connection._call("Session") as call, pytest.raises(OtherProtocol) as refused:  # noqa: SLF001 - a client only ever sends its own protocol version
            await connection._greet(call, HELLO, 1)  # noqa: SLF001
    return str(refused.value)


async def twice_with_one_invitation(gateway: LocalGateway, _: Path) -> str:
    invitation, address = gateway.create_invitation("clinic-a"), gateway.gateway.address
    await enrol(address, invitation, Identity.create())
    with pytest.raises(EnrolmentRefused) as refused:
        await enrol(address, invitation, Identity.create())
    return str(refused.value)


@pytest.mark.parametrize("opened", [real, fake])
@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (revoked, "this client was revoked"),
        (of_another_authority, "UNAVAILABLE"),
        (of_another_version, "the client speaks protocol 1"),
        (twice_with_one_invitation, "used"),
    ],
)
def test_strangers_are_not_let_in_by_either(
    opened: Callable[[Path], AbstractContextManager[LocalGateway]],
    stranger: Callable[[LocalGateway, Path], Any],
    words: str,
    tmp_path: Path,
) -> None:
    """Revoked, certified by another authority, of another version, or with a used invitation."""
    with opened(tmp_path) as gateway:
        assert words in asyncio.run(asyncio.wait_for(stranger(gateway, tmp_path), WAIT_S))


def test_settings_say_which_lanes_a_reply_has() -> None:
    """For a standard update, the settings alone define which lanes a reply must have."""
    from_settings: Mapping[str, Any] = settings_of(STRATEGY.local)
    with FakeCoordinator() as coordinator:
        receipts, reply = outcome(
            coordinator,
            [changed(lanes={"delta": torch.zeros(SIZE), "control": torch.zeros(SIZE)})],
            lambda: coordinator.train(MODEL, from_settings)["clinic-a"],
        )
    assert isinstance(reply, Failure)
    assert receipts == [("REFUSED", "it has missing or extra lanes: ['control']")]
