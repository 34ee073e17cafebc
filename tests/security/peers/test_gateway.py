"""Hostile peers at the server: they are refused and counted, and the round continues."""

import asyncio
import socket
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
import structlog
import torch

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId, Reply, TrainRequest
from fedlearn.errors import ConnectionRefused, EnrolmentRefused, StoreUnavailable
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.exchanges import Exchanges, LiveQuestion
from fedlearn.gateway.questions import Judgment, ReplyState
from fedlearn.gateway.server import Gateway
from fedlearn.gateway.upload_store import ClosingRecord, Draft, GroupWriter, ReplyLog, WriteResult
from fedlearn.identity.identity import SERVER_NAME, Identity
from fedlearn.identity.registry import EnrolledClient
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.base import ask_once
from fedlearn.transport.content import encode_enrolment
from fedlearn.transport.grpc_client import GatewayConnection, GatewaySession, enrol
from tests.security.peers.harness import (
    HELLO,
    IMPATIENT,
    ROUND_S,
    SETTINGS,
    WAIT_S,
    Peer,
    Site,
    envelope,
    reply,
    request_of,
)


class Round:
    """One exchange that runs on a thread."""

    def __init__(self, gateway: Gateway, *peers: Peer, request: TrainRequest | None = None) -> None:
        self.arrived: Queue[tuple[int, Reply]] = Queue()
        self.outcome: Future[int] = Future()
        cohort = [ClientId(peer.client_id) for peer in peers]
        channel = gateway.channel()

        def run() -> None:
            num, requests = 0, dict.fromkeys(cohort, request or request_of(0))
            try:
                arrivals = ask_once(channel, requests, deadline_s=60.0)
                for num, arrival in enumerate(arrivals, start=1):
                    self.arrived.put((arrival.client_id, arrival.reply))
                    if num == len(cohort):
                        break
            except Exception as error:  # noqa: BLE001 - raised again by ``outcome.result``
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(num)

        threading.Thread(target=run, daemon=True).start()


def as_result(signed: wire_pb2.Envelope, data: bytes) -> wire_pb2.FromClient:
    return wire_pb2.FromClient(result=wire_pb2.Result(envelope=signed, data=data))


async def heard_task(session: GatewaySession) -> wire_pb2.Task:
    return (await heard(session, "task")).task


async def heard_receipt(session: GatewaySession) -> wire_pb2.Receipt:
    return (await heard(session, "receipt")).receipt


async def heard(session: GatewaySession, kind: str) -> wire_pb2.FromCoordinator:
    """Return the next message, which must be of that kind."""
    message = await session.receive()
    assert message is not None
    assert message.WhichOneof("what") == kind
    return message


async def answer_honestly(session: GatewaySession, peer: Peer) -> wire_pb2.Receipt:
    task, data = await heard_task(session), reply()
    await session.send(as_result(envelope(task.key, data, peer), data))
    return await heard_receipt(session)


async def hang_up(session: GatewaySession) -> None:
    """Leave without another message."""


def test_an_invited_client_enrols_connects_and_takes_part(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    assert site.refused("unknown") == 0
    round_ = Round(site.gateway, peer)
    receipt = site.in_session(peer, lambda session: answer_honestly(session, peer))
    assert receipt.verdict == wire_pb2.Receipt.ACCEPTED
    assert round_.outcome.result(WAIT_S) == 1
    assert site.gateway.counters.enrolled == 1
    assert site.gateway.counters.connections == site.gateway.counters.authenticated == 1


def test_a_peer_without_a_certificate_or_with_another_authoritys_is_refused(
    site: Site, tmp_path: Path
) -> None:
    identity = Identity.create()
    other = Authority(tmp_path / "other", host_names=())
    forged = other.sign(identity.csr_pem("clinic-a"), name="clinic-a", client_id=0, valid_days=1)
    for certificate in (b"", forged):
        peer = site.peer("clinic-a", identity, certificate, client_id=0)
        with pytest.raises(ConnectionError):
            site.in_session(peer, hang_up)
    counters = site.gateway.counters
    assert counters.connections >= 2
    assert counters.authenticated == counters.sessions == 0


def test_a_certificate_that_the_registry_does_not_know_is_refused(site: Site) -> None:
    identity = Identity.create()
    stray = site.authority.sign(identity.csr_pem("x"), name="x", client_id=0, valid_days=1)
    peer = site.peer("x", identity, stray, client_id=0)
    with pytest.raises(ConnectionRefused, match="not enrolled"):
        site.in_session(peer, hang_up)
    assert site.refused("unknown") == 1


@pytest.mark.slow
def test_refusals_are_in_the_log_as_a_number(tmp_path: Path) -> None:
    """A revoked client may call as often as it likes; the log has one line from time to time."""
    with structlog.testing.capture_logs() as logs, Site(tmp_path) as site:
        peer = site.enrolled("clinic-a")
        site.registry.revoke("clinic-a")
        site.wait_until(lambda: refuses(site, peer))
        num_calls = site.refused("revoked") + 30
        for _ in range(30):
            assert refuses(site, peer)
        assert site.refused("revoked") == num_calls

        def lines() -> list[MutableMapping[str, Any]]:  # Any: values of log entries
            return [entry for entry in logs if entry.get("cause") == "revoked"]

        site.clock.jump_s = 60.0
        site.wait_until(lambda: sum(entry["num_calls"] for entry in lines()) == num_calls)
    assert len(lines()) < num_calls / 3
    assert lines()[0]["last_peer"] == "clinic-a", "by name: it is known"


def refuses(site: Site, peer: Peer) -> bool:
    """Return whether the server refuses this client's session permanently."""
    return site.raw("Session", peer, half_close=True)[1] == grpc.StatusCode.UNAUTHENTICATED


class AwayRegistry(FreshRegistry):
    """A registry whose database can be made unavailable."""

    is_away = False

    def revision(self) -> int:
        if self.is_away:
            raise StoreUnavailable("the database is away")
        return super().revision()


@pytest.mark.slow
def test_a_client_is_no_stranger_because_the_registry_cannot_be_read(tmp_path: Path) -> None:
    """The client is asked to retry later; a final refusal would make its user look for a fault."""
    registry = AwayRegistry(SystemClock())
    with Site(tmp_path, registry=registry) as site:
        stranger = site.enrolled("clinic-a")
        peer = site.enrolled("clinic-a")  # with new keys, so the first certificate is not enrolled
        registry.is_away = True
        site.open()
        for each in (peer, stranger):
            _, code = site.raw("Session", each, half_close=True)
            assert code == grpc.StatusCode.UNAVAILABLE
        registry.is_away = False
        site.in_session(peer, hang_up)
        with pytest.raises(ConnectionRefused, match="not enrolled"):
            site.in_session(stranger, hang_up)
        registry.is_away = True
        site.in_session(peer, hang_up)  # the server still knows its clients


def test_revoking_ends_the_live_session_and_refuses_the_next(site: Site) -> None:
    """Within two seconds; the best of three counts, since the machine may pause."""
    clock = SystemClock()

    def seconds_until_cut(name: str) -> float:
        async def stay(session: GatewaySession) -> object:
            site.registry.revoke(name)
            return await session.receive()

        peer = site.enrolled(name)
        started_s = clock.now_s()
        with pytest.raises(ConnectionRefused, match="revoked"):
            site.in_session(peer, stay)
        elapsed_s = clock.now_s() - started_s
        refused = site.refused("revoked")
        for method in ("Session", "Upload", "Download"):
            assert site.raw(method, peer)[1] == grpc.StatusCode.UNAUTHENTICATED
        assert site.refused("revoked") == refused + 3
        return elapsed_s

    assert any(seconds_until_cut(name) < 2.0 for name in ("clinic-a", "clinic-b", "clinic-c"))


@pytest.mark.slow
def test_a_client_that_is_revoked_between_its_call_and_its_hello_is_not_heard(site: Site) -> None:
    """Its call was admitted before. Control: a client that is not revoked stays until it leaves."""
    site.open(replace(SETTINGS, handshake_timeout_s=WAIT_S))
    hello = wire_pb2.FromClient(hello=HELLO).SerializeToString()
    peer = site.enrolled("clinic-a")
    assert site.raw("Session", peer, hello, half_close=True)[1] == grpc.StatusCode.OK
    num_known = site.gateway.counters.authenticated

    def revoked() -> None:
        site.wait_until(lambda: site.gateway.counters.authenticated > num_known)
        site.registry.revoke("clinic-a")
        site.wait_until(lambda: refuses(site, peer))

    assert site.raw("Session", peer, hello, first=revoked)[1] == grpc.StatusCode.UNAUTHENTICATED


def test_a_token_works_once_and_only_for_whoever_holds_the_keys(site: Site) -> None:
    invitation, identity = site.create_invitation("clinic-a"), Identity.create()
    address = site.gateway.enrolment_address
    thief = Identity.create()
    site.run(enrol(address, invitation, identity))
    with pytest.raises(EnrolmentRefused, match="has been used"):
        site.run(enrol(address, invitation, thief))
    with pytest.raises(EnrolmentRefused, match="no invitation"):
        site.run(enrol(address, replace(invitation, token=b"guessed"), thief))
    with pytest.raises(EnrolmentRefused, match="too long"):
        site.run(enrol(address, replace(invitation, token=b"x" * 1000), thief))
    assert site.refused("enrolment") == 3
    assert len(site.registry.clients()) == 1


def test_an_enrolment_with_anothers_identity_key_is_refused(site: Site) -> None:
    invitation, thief = site.create_invitation("clinic-b"), Identity.create()
    victim = Identity.create().public_key
    csr_pem = thief.csr_pem("clinic-b")
    request = wire_pb2.EnrolRequest(
        name="clinic-b",
        token=invitation.token,
        csr_pem=csr_pem,
        identity_key=victim,
        identity_signature=thief.sign(encode_enrolment(invitation.token, csr_pem)),
    )

    async def ask() -> grpc.StatusCode:
        tls = grpc.ssl_channel_credentials(site.authority.ca_pem)
        options = [("grpc.ssl_target_name_override", SERVER_NAME)]
        address = site.gateway.enrolment_address
        async with grpc.aio.secure_channel(address, tls, options) as channel:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                f"/{wire.ENROLMENT}/Enrol"
            )
            return await method(request.SerializeToString()).code()

    assert site.run(ask()) == grpc.StatusCode.PERMISSION_DENIED
    assert not site.registry.clients()


Spoil = Callable[[wire_pb2.Envelope, bytes], tuple[wire_pb2.Envelope, bytes]]


def with_fields(signed: wire_pb2.Envelope, **fields: object) -> wire_pb2.Envelope:
    spoiled = wire_pb2.Envelope.FromString(signed.SerializeToString())
    for name, value in fields.items():
        setattr(spoiled, name, value)
    return spoiled


@pytest.mark.parametrize(
    ("cause", "spoil"),
    [
        ("signature", lambda signed, data: (with_fields(signed, signature=bytes(64)), data)),
        ("signature", lambda signed, data: (with_fields(signed, signature=b""), data)),
        ("signature", lambda signed, data: (with_fields(signed, digest=bytes(32)), data)),
        ("digest", lambda signed, data: (signed, bytes(len(data)))),
        ("size", lambda signed, data: (signed, data + b"more")),
        ("size", lambda signed, data: (with_fields(signed, num_bytes=1 << 40), data)),
    ],
)
def test_a_forged_reply_is_refused_and_the_honest_one_still_counts(
    site: Site, cause: str, spoil: Spoil
) -> None:
    peer = site.enrolled("clinic-a")
    round_ = Round(site.gateway, peer)

    async def forge(session: GatewaySession) -> list[int]:
        task, data = await heard_task(session), reply()
        honest = envelope(task.key, data, peer)
        await session.send(as_result(*spoil(honest, data)))
        verdicts = [(await heard_receipt(session)).verdict]
        await session.send(as_result(honest, data))
        return [*verdicts, (await heard_receipt(session)).verdict]

    verdicts = site.in_session(peer, forge)
    assert verdicts == [wire_pb2.Receipt.REFUSED, wire_pb2.Receipt.ACCEPTED]
    assert site.refused(cause) == 1
    assert round_.outcome.result(WAIT_S) == 1


def test_a_reply_of_another_client_cannot_be_replayed(site: Site) -> None:
    honest, thief = site.enrolled("clinic-a"), site.enrolled("clinic-b")
    Round(site.gateway, honest, thief)
    data = reply()

    async def replay(session: GatewaySession) -> wire_pb2.Receipt:
        stolen = envelope((await heard_task(session)).key, data, honest)
        await session.send(as_result(stolen, data))
        return await heard_receipt(session)

    assert site.in_session(thief, replay).verdict == wire_pb2.Receipt.REFUSED
    assert site.refused("signature") == 1


@pytest.mark.parametrize(
    ("cause", "field_name", "value"), [("other_run", "run_id", "another"), ("", "round_num", 7)]
)
def test_a_reply_to_another_task_does_not_count(
    site: Site, cause: str, field_name: str, value: object
) -> None:
    peer = site.enrolled("clinic-a")
    Round(site.gateway, peer)
    data = reply()

    async def confuse(session: GatewaySession) -> wire_pb2.Receipt:
        task = await heard_task(session)
        other = wire_pb2.Task.FromString(task.SerializeToString())
        setattr(other.key, field_name, value)
        await session.send(as_result(envelope(other.key, data, peer), data))
        if cause:
            assert (await heard_receipt(session)).verdict == wire_pb2.Receipt.REFUSED
        await session.send(as_result(envelope(task.key, data, peer), data))
        return await heard_receipt(session)

    assert site.in_session(peer, confuse).verdict == wire_pb2.Receipt.ACCEPTED
    assert site.gateway.counters.replies_logged == 1
    assert sum(site.gateway.counters.refused.values()) == bool(cause)


def test_a_reply_of_a_client_that_was_not_asked_is_refused(site: Site) -> None:
    asked, other = site.enrolled("clinic-a"), site.enrolled("clinic-b")
    round_ = Round(site.gateway, asked)
    data = reply()

    async def intrude(task: wire_pb2.Task) -> wire_pb2.Receipt:
        async with (
            GatewayConnection(site.gateway.address, other.credentials) as connection,
            connection.session(HELLO) as session,
        ):
            await session.send(as_result(envelope(task.key, data, other), data))
            return await heard_receipt(session)

    async def take_part(session: GatewaySession) -> tuple[int, int]:
        task = await heard_task(session)
        intruder = await intrude(task)
        await session.send(as_result(envelope(task.key, data, asked), data))
        return intruder.verdict, (await heard_receipt(session)).verdict

    assert site.in_session(asked, take_part) == (
        wire_pb2.Receipt.REFUSED,
        wire_pb2.Receipt.ACCEPTED,
    )
    assert site.refused("not_asked") == 1
    assert round_.outcome.result(WAIT_S) == 1


@pytest.mark.parametrize(
    ("first", "code", "cause"),
    [
        ([], grpc.StatusCode.DEADLINE_EXCEEDED, "handshake"),
        ([b"\xff\xff garbage"], grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        (
            [wire_pb2.FromClient(progress=wire_pb2.Progress()).SerializeToString()],
            grpc.StatusCode.INVALID_ARGUMENT,
            "handshake",
        ),
        (
            [
                wire_pb2.FromClient(
                    hello=wire_pb2.Hello(protocol=wire.PROTOCOL + 1)
                ).SerializeToString()
            ],
            grpc.StatusCode.FAILED_PRECONDITION,
            "protocol",
        ),
    ],
)
def test_a_session_that_does_not_begin_with_hello_is_ended(
    site: Site, first: list[bytes], code: grpc.StatusCode, cause: str
) -> None:
    peer = site.enrolled("clinic-a")
    if not first:
        site.open(IMPATIENT)
    assert site.raw("Session", peer, *first) == ([], code)
    assert site.refused(cause) == 1


def test_garbage_and_giants_end_only_the_session_that_they_came_in(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    hello = wire_pb2.FromClient(hello=HELLO).SerializeToString()
    came, code = site.raw("Session", peer, hello, b"\xff\xff garbage")
    assert (len(came), code) == (1, grpc.StatusCode.INVALID_ARGUMENT)
    chatty = wire_pb2.Eligibility(device="x" * 100_000)
    talk = wire_pb2.FromClient(eligibility=chatty).SerializeToString()
    assert site.raw("Session", peer, hello, talk)[1] == grpc.StatusCode.INVALID_ARGUMENT
    _, code = site.raw("Session", peer, hello, bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    round_ = Round(site.gateway, peer)
    site.in_session(peer, lambda session: answer_honestly(session, peer))
    assert round_.outcome.result(WAIT_S) == 1


def test_a_client_that_does_not_read_is_dropped_and_blocks_nobody(site: Site) -> None:
    """A round that waited for it until it stalls would take longer than allowed."""
    deaf, honest = site.enrolled("deaf"), site.enrolled("honest")
    tls = grpc.ssl_channel_credentials(
        deaf.credentials.ca_pem, deaf.credentials.tls_key_pem, deaf.credentials.certificate_pem
    )
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    request = replace(request_of(0), tensors={"weight": torch.zeros(50_000)})  # sent in the task

    async def listen_to_nothing() -> tuple[grpc.aio.Channel, object]:
        channel = grpc.aio.secure_channel(site.gateway.address, tls, options)
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{wire.GATEWAY}/Session"
        )
        call = start()
        await call.write(wire_pb2.FromClient(hello=HELLO).SerializeToString())
        return channel, call

    async def answer_always(connected: asyncio.Event) -> None:
        async with (
            GatewayConnection(site.gateway.address, honest.credentials) as connection,
            connection.session(HELLO) as session,
        ):
            connected.set()
            data = reply()
            while (told := await session.receive()) is not None:
                if told.WhichOneof("what") == "task":
                    await session.send(as_result(envelope(told.task.key, data, honest), data))

    connected = asyncio.Event()
    answering = site.loop.call(answer_always(connected))
    site.run(connected.wait())
    deaf_channel, _ = site.run(listen_to_nothing())
    channel, clock, num_rounds = site.gateway.channel(), SystemClock(), 0
    channel.wait_for(2, lambda: None)
    while not site.gateway.counters.sessions_dropped:
        started_s = clock.now_s()
        requests = dict.fromkeys([ClientId(0), ClientId(1)], request)
        for arrival in ask_once(channel, requests, deadline_s=WAIT_S):
            assert arrival.client_id == honest.client_id
            break
        assert clock.now_s() - started_s < ROUND_S < SETTINGS.stall_timeout_s
        num_rounds += 1
        assert num_rounds < 500
    assert channel.available() == (honest.client_id,)
    answering.cancel()
    site.run(deaf_channel.close())


def test_garbage_on_the_port_is_not_a_session(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    host, _, port = site.gateway.address.rpartition(":")
    half_open = [socket.create_connection((host, int(port))) for _ in range(200)]
    for stream in half_open[:100]:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
    round_ = Round(site.gateway, peer)
    site.in_session(peer, lambda session: answer_honestly(session, peer))
    assert round_.outcome.result(WAIT_S) == 1
    assert site.gateway.counters.sessions == 1
    for stream in half_open:
        stream.close()


@pytest.mark.slow
def test_a_flood_of_messages_is_slowed_down(site: Site) -> None:
    site.open(replace(SETTINGS, max_messages_per_s=50.0))
    peer = site.enrolled("clinic-a")
    round_ = Round(site.gateway, peer)

    async def flood(session: GatewaySession) -> wire_pb2.Receipt:
        for _ in range(220):  # more than twice the burst that is let through
            await session.send(wire_pb2.FromClient(progress=wire_pb2.Progress()))
        return await answer_honestly(session, peer)

    assert site.in_session(peer, flood).verdict == wire_pb2.Receipt.ACCEPTED
    assert site.gateway.counters.throttled > 0
    assert round_.outcome.result(WAIT_S) == 1


def test_uploads_are_held_to_their_envelope(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    Round(site.gateway, peer)
    task = site.in_session(peer, heard_task)
    data = reply()
    honest = envelope(task.key, data, peer)

    def verdict(signed: wire_pb2.Envelope, *chunks: bytes) -> int:
        parts = [wire_pb2.UploadPart(envelope=signed)]
        parts += [wire_pb2.UploadPart(data=chunk) for chunk in chunks]
        came, _ = site.raw("Upload", peer, *(part.SerializeToString() for part in parts))
        status = wire_pb2.UploadStatus.FromString(came[-1])
        return status.receipt.verdict

    assert verdict(honest, data + b"more") == wire_pb2.Receipt.REFUSED
    assert verdict(honest, b"") == wire_pb2.Receipt.REFUSED
    assert verdict(honest, bytes(len(data))) == wire_pb2.Receipt.REFUSED
    assert verdict(with_fields(honest, signature=bytes(64))) == wire_pb2.Receipt.REFUSED
    assert verdict(with_fields(honest, num_bytes=1 << 50)) == wire_pb2.Receipt.REFUSED
    assert not list((site.folder / "spool").rglob("*.part"))
    assert verdict(honest, data[:100], data[100:]) == wire_pb2.Receipt.ACCEPTED
    assert site.refused("size") == 3
    assert site.refused("digest") == site.refused("signature") == 1


@pytest.mark.parametrize("disk_s", [0, 0.3])
def test_an_upload_is_late_when_the_round_closes_as_it_begins(
    site: Site, monkeypatch: pytest.MonkeyPatch, disk_s: float
) -> None:
    """The client hears so once that is durable, and may stay connected for the next round."""
    peer = site.enrolled("clinic-a")
    put = GroupWriter.put

    def slowly(
        writer: GroupWriter,
        log: ReplyLog,
        what: Draft | ClosingRecord | None,
        done: Callable[[WriteResult], None],
    ) -> None:
        def told(outcome: WriteResult) -> None:
            asyncio.get_running_loop().call_later(disk_s, done, outcome)

        put(writer, log, what, done if isinstance(what, Draft) else told)

    monkeypatch.setattr(GroupWriter, "put", slowly)
    opened, admit, live = Exchanges.open, Exchanges.admit, list[LiveQuestion]()

    def keep_open(exchanges: Exchanges, exchange: LiveQuestion) -> None:
        live.append(exchange)
        opened(exchanges, exchange)

    def closing(
        exchanges: Exchanges, client: EnrolledClient, signed: wire_pb2.Envelope
    ) -> Judgment:
        judgment = admit(exchanges, client, signed)
        if judgment is ReplyState.OPEN:
            asyncio.get_running_loop().call_soon(partial(exchanges.close, live[0], by_itself=True))
        return judgment

    monkeypatch.setattr(Exchanges, "open", keep_open)
    monkeypatch.setattr(Exchanges, "admit", closing)
    Round(site.gateway, peer)
    task = site.in_session(peer, heard_task)
    data = reply()
    signed = wire_pb2.UploadPart(envelope=envelope(task.key, data, peer))
    part = wire_pb2.UploadPart(data=data)
    came, _ = site.raw("Upload", peer, signed.SerializeToString(), part.SerializeToString())
    receipt = wire_pb2.UploadStatus.FromString(came[-1]).receipt
    assert receipt.verdict == wire_pb2.Receipt.LATE


def test_only_what_a_client_is_asked_can_be_downloaded(site: Site) -> None:
    asked, other = site.enrolled("clinic-a"), site.enrolled("clinic-b")
    Round(site.gateway, asked)
    task = site.in_session(asked, heard_task)
    download = wire_pb2.DownloadRequest(digest=task.digest).SerializeToString()

    def got(peer: Peer, request: bytes) -> object:
        came, code = site.raw("Download", peer, request)
        if code != grpc.StatusCode.OK:
            return code
        return b"".join(wire_pb2.Chunk.FromString(data).data for data in came)

    assert got(asked, download) == task.data
    assert got(other, download) == grpc.StatusCode.NOT_FOUND
    assert got(asked, b"\xff\xff") == grpc.StatusCode.INVALID_ARGUMENT
    beyond = wire_pb2.DownloadRequest(digest=task.digest, offset=1 << 62).SerializeToString()
    assert got(asked, beyond) == b""


@pytest.mark.slow
def test_a_client_moves_three_things_at_once_at_the_most(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    site.open(replace(SETTINGS, stall_timeout_s=4.0))  # all five connect before the first stalls
    with ThreadPoolExecutor(5) as threads:
        codes = [code for _, code in threads.map(lambda _: site.raw("Upload", peer), range(5))]
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 2
    assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 3  # stalled: they sent nothing
    assert site.refused("transfers") == 2
