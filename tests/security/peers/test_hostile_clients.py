"""Enrolled clients that misbehave: each harms only itself, and the round continues."""

import asyncio
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.errors import EnrolmentRefused
from fedlearn.gateway import enrolment
from fedlearn.identity.identity import Identity
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.base import ask_once
from fedlearn.transport.grpc_client import GatewayConnection, GatewaySession, enrol
from tests.security.peers.harness import (
    DATA,
    END_STREAM,
    GOAWAY,
    HELLO,
    IMPATIENT,
    RST_STREAM,
    RUN_ID,
    SETTINGS,
    WAIT_S,
    Peer,
    Site,
    call_headers,
    envelope,
    frame,
    frames_until_refused,
    http2,
    reply,
    request_of,
    result,
    tls_context,
    told,
)

SESSION, UPLOAD, DOWNLOAD = "Session", "Upload", "Download"


def encode_message(**what: object) -> bytes:
    """Encode a message of a session."""
    message = wire_pb2.FromClient()
    for name, value in what.items():
        assert isinstance(value, wire_pb2.Hello | wire_pb2.Eligibility | wire_pb2.Progress)
        getattr(message, name).CopyFrom(value)
    return message.SerializeToString()


async def hang_up(session: GatewaySession) -> None:
    """Leave without another message."""


# Tokens.


def test_one_of_many_who_redeem_a_token_at_once_is_enrolled(tmp_path: Path) -> None:
    """With a deployment's registry, which is called from many threads."""
    url = sqlite_url(tmp_path / "runs.db")
    with (
        Database.open(url, runs_dir=tmp_path) as database,
        Site(tmp_path, registry=StoredRegistry(database, SystemClock())) as site,
        ThreadPoolExecutor(8) as threads,
    ):
        invitation = site.create_invitation("clinic-a")

        def redeem(_: int) -> bool:
            try:
                site.run(enrol(site.gateway.enrolment_address, invitation, Identity.create()))
            except EnrolmentRefused:
                return False
            return True

        assert sum(threads.map(redeem, range(8))) == 1
        assert len(site.registry.clients()) == 1
        assert site.refused("enrolment") == 7


def test_a_token_is_its_clients_until_it_ends(site: Site) -> None:
    """Another name, an expired token and a revoked client are refused."""
    address, identity = site.gateway.enrolment_address, Identity.create()
    invitation = site.create_invitation("clinic-a")
    for name in ("clinic-b", "Clinic-A", "clinic-a\0", "../clinic-a", "\u202eclinic-a"):
        with pytest.raises(EnrolmentRefused):
            site.run(enrol(address, replace(invitation, name=name), Identity.create()))
    late = site.create_invitation("late", valid_s=60.0)
    site.clock.ahead_s = 61.0
    with pytest.raises(EnrolmentRefused, match="expired at"):
        site.run(enrol(address, late, Identity.create()))
    site.clock.ahead_s = 0.0
    site.run(enrol(address, invitation, identity))
    site.run(enrol(address, invitation, identity))  # a lost answer: the same keys may ask again
    site.registry.revoke("clinic-a")
    with pytest.raises(EnrolmentRefused):
        site.run(enrol(address, invitation, identity))
    (client,) = site.registry.clients()
    assert (client.name, client.status) == ("clinic-a", "revoked")
    assert site.refused("enrolment") == 7


@pytest.mark.slow
def test_whoever_guesses_tokens_is_slowed_down(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds' worth of guesses is checked; the rest is refused unread.

    The rate is so low that even a slow machine guesses faster.
    """
    honest = site.enrolled("honest")
    monkeypatch.setattr(enrolment, "_MAX_PER_S", 5.0)
    site.open()
    stolen = replace(site.create_invitation("clinic-a"), token=b"guess")

    async def guess() -> type[Exception]:
        try:
            await enrol(site.gateway.enrolment_address, stolen, Identity.create())
        except (EnrolmentRefused, ConnectionError) as error:
            return type(error)
        raise AssertionError("guessed")

    async def guess_on() -> None:
        for _ in range(15):
            await asyncio.gather(*(guess() for _ in range(20)))

    began_s = site.clock.now_s()
    guessing = site.loop.call(guess_on())
    site.wait_until(lambda: site.refused("rate") > 10)
    site.train(honest)
    guessing.result(WAIT_S)
    elapsed_s = site.clock.now_s() - began_s
    assert site.refused("enrolment") + site.refused("rate") == 300
    assert 10 <= site.refused("enrolment") <= 10 + 5.0 * elapsed_s
    assert len(site.registry.clients()) == 1


# Replays.


def test_an_upload_of_a_round_is_of_no_use_in_another(site: Site) -> None:
    """Unchanged it belongs to the old round, counted once; under another key it is a forgery."""
    peer = site.enrolled("clinic-a")
    cohort = [ClientId(peer.client_id)]

    async def first(session: GatewaySession) -> wire_pb2.Task:
        task = (await told(session, "task")).task
        await session.send(result(task.key, reply(0), peer))
        assert (await told(session, "receipt")).receipt.verdict == wire_pb2.Receipt.ACCEPTED
        return task

    channel = site.gateway.channel()
    with ThreadPoolExecutor(1) as thread:

        def collect(round_num: int) -> int:
            request = request_of(round_num)
            arrivals = ask_once(channel, dict.fromkeys(cohort, request), deadline_s=WAIT_S)
            return len(list(arrivals))

        round_0 = thread.submit(collect, 0)
        old = site.in_session(peer, first).key
        assert round_0.result(WAIT_S) == 1
        old_envelope = envelope(old, reply(0), peer)
        round_1 = thread.submit(collect, 1)

        async def replay(session: GatewaySession) -> list[int]:
            new = (await told(session, "task")).task.key
            relabeled = wire_pb2.Envelope(
                key=new,
                digest=old_envelope.digest,
                num_bytes=old_envelope.num_bytes,
                signature=old_envelope.signature,
            )
            verdicts = list[int]()
            for sent in (old_envelope, relabeled, envelope(new, reply(1), peer)):
                data = reply(1) if sent.key == new and sent is not relabeled else reply(0)
                message = wire_pb2.FromClient(result=wire_pb2.Result(envelope=sent, data=data))
                await session.send(message)
                verdicts.append((await told(session, "receipt")).receipt.verdict)
            return verdicts

        verdicts = site.in_session(peer, replay)
        assert round_1.result(WAIT_S) == 1
    accepted, refused = wire_pb2.Receipt.ACCEPTED, wire_pb2.Receipt.REFUSED
    assert verdicts == [accepted, refused, accepted]
    assert site.refused("signature") == 1
    assert site.gateway.counters.replies_logged == site.gateway.counters.replies_accepted == 2


def test_an_upload_of_a_run_is_of_no_use_in_another(site: Site) -> None:
    """Two runs of one deployment have the same authority, clients and keys."""
    peer = site.enrolled("clinic-a")
    site.train(peer)
    old = wire_pb2.TaskKey(run_id=RUN_ID, kind="TrainRequest")
    site.open(run_id="f" * 32)
    channel = site.gateway.channel()
    with ThreadPoolExecutor(1) as thread:
        requests = {ClientId(peer.client_id): request_of(0)}
        collected = thread.submit(lambda: len(list(ask_once(channel, requests, deadline_s=WAIT_S))))

        async def replay(session: GatewaySession) -> list[str]:
            task = (await told(session, "task")).task
            stolen = envelope(old, reply(0), peer)
            relabeled = wire_pb2.Envelope.FromString(stolen.SerializeToString())
            relabeled.key.CopyFrom(task.key)
            reasons = []
            for sent in (stolen, relabeled):
                whole = wire_pb2.Result(envelope=sent, data=reply(0))
                await session.send(wire_pb2.FromClient(result=whole))
                reasons.append((await told(session, "receipt")).receipt.reason)
            await session.send(result(task.key, reply(0), peer))
            await told(session, "receipt")
            return reasons

        reasons = site.in_session(peer, replay)
        assert collected.result(WAIT_S) == 1
    assert reasons[0] == "it belongs to another run"
    assert "signature" in reasons[1]
    assert (site.refused("other_run"), site.refused("signature")) == (1, 1)


def test_a_client_cannot_sign_for_another(site: Site) -> None:
    """It signs with its own key under the other's id, but the connection decides who it is."""
    thief, honest = site.enrolled("thief"), site.enrolled("honest")
    cohort = [ClientId(peer.client_id) for peer in (thief, honest)]
    channel = site.gateway.channel()
    with ThreadPoolExecutor(1) as thread:
        requests = dict.fromkeys(cohort, request_of(0))
        collected = thread.submit(
            lambda: [each.client_id for each in ask_once(channel, requests, deadline_s=WAIT_S)]
        )

        async def forge(session: GatewaySession) -> tuple[int, int]:
            key = (await told(session, "task")).task.key
            await session.send(result(key, reply(0), thief, client_id=honest.client_id))
            forged = (await told(session, "receipt")).receipt.verdict
            await session.send(result(key, reply(0), thief))
            return forged, (await told(session, "receipt")).receipt.verdict

        verdicts = site.in_session(thief, forge)

        async def take_part(session: GatewaySession) -> None:
            key = (await told(session, "task")).task.key
            await session.send(result(key, reply(0), honest))
            await told(session, "receipt")

        site.in_session(honest, take_part)
        assert collected.result(WAIT_S) == cohort
    assert verdicts == (wire_pb2.Receipt.REFUSED, wire_pb2.Receipt.ACCEPTED)
    assert site.refused("signature") == 1


# Names and numbers that a peer may choose freely.


KEYS = [
    wire_pb2.TaskKey(run_id="../../..", kind="TrainRequest"),
    wire_pb2.TaskKey(kind="../../../../tmp/evil"),
    wire_pb2.TaskKey(kind="/etc/passwd"),
    wire_pb2.TaskKey(kind="TrainRequest/../x", round_num=2**64 - 1),
    wire_pb2.TaskKey(kind="\0", attempt=2**32 - 1, exchange=2**32 - 1),
    wire_pb2.TaskKey(kind="x" * 200_000),
    wire_pb2.TaskKey(),
]


def test_a_key_is_no_path(site: Site) -> None:
    """Neither in a session, nor in an upload, nor among the tasks that a client says it holds."""
    peer = site.enrolled("clinic-a")
    site.train(peer)
    before = everything(site.folder)
    for key in KEYS:
        key.run_id = key.run_id or RUN_ID
        site.run(speak_of(key, site.gateway.address, peer))
        signed = wire_pb2.UploadPart(envelope=envelope(key, b"data", peer)).SerializeToString()
        came, code = site.raw(UPLOAD, peer, signed)
        receipts = [wire_pb2.UploadStatus.FromString(each).receipt.verdict for each in came]
        assert receipts == [wire_pb2.Receipt.REFUSED] or code == grpc.StatusCode.UNAVAILABLE
    assert everything(site.folder) == before
    site.train(peer)


async def speak_of(key: wire_pb2.TaskKey, address: str, peer: Peer) -> None:
    held = [key] if len(key.kind) < 100 else []  # a hello has its own size limit
    hello = wire_pb2.Hello(protocol=wire.PROTOCOL, held=held)
    async with (
        GatewayConnection(address, peer.credentials) as connection,
        connection.session(hello) as session,
    ):
        await session.send(result(key, b"data", peer))
        await session.send(wire_pb2.FromClient(progress=wire_pb2.Progress()))


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_hash_that_does_not_exist_is_not_found(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    for digest in (b"", bytes(31), bytes(32), bytes(33), bytes(wire.CHUNK_BYTES)):
        request = wire_pb2.DownloadRequest(digest=digest).SerializeToString()
        came, code = site.raw(DOWNLOAD, peer, request)
        assert (came, code) == ([], grpc.StatusCode.NOT_FOUND)
    site.train(peer)


GIANTS = {
    "software": encode_message(
        hello=wire_pb2.Hello(protocol=wire.PROTOCOL, software="x" * 500_000)
    ),
    "held": encode_message(
        hello=wire_pb2.Hello(protocol=wire.PROTOCOL, held=[wire_pb2.TaskKey()] * 200_000)
    ),
    "device": encode_message(eligibility=wire_pb2.Eligibility(device="x" * 500_000)),
    "kind": encode_message(progress=wire_pb2.Progress(key=wire_pb2.TaskKey(kind="x" * 500_000))),
    "a field that nobody knows": b"\xfa\x3e" + b"\xa0\xc2\x1e" + bytes(500_000),
    "groups in groups": b"\x0b" * 100_000,
    "a length beyond the message": b"\x0a\xff\xff\xff\xff\x0f",
    "text that is none": b"\x0a\x04\x12\x02\xff\xfe",
}


def test_giant_and_broken_messages_end_their_session(site: Site) -> None:
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    hello = wire_pb2.FromClient(hello=HELLO).SerializeToString()
    for name, giant in GIANTS.items():
        for messages in ([giant], [hello, giant]):
            _, code = site.raw(SESSION, peer, *messages)
            assert code == grpc.StatusCode.INVALID_ARGUMENT, name
    assert site.refused("malformed") == 2 * len(GIANTS)
    site.train(honest)


def test_a_message_beyond_the_bound_is_not_even_read(site: Site) -> None:
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    for method in (SESSION, UPLOAD, DOWNLOAD):
        _, code = site.raw(method, peer, bytes(wire.MAX_MESSAGE_BYTES + 1))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert site.gateway.counters.bytes_in == 0
    site.train(honest)


def test_numbers_at_their_ends_are_numbers(site: Site) -> None:
    peer = site.enrolled("clinic-a")
    most = 2**64 - 1
    eligibility = wire_pb2.Eligibility(num_examples=most, device="\0" * 1000)
    key = wire_pb2.TaskKey(round_num=most, attempt=2**32 - 1, exchange=2**32 - 1)

    async def speak(session: GatewaySession) -> None:
        await session.send(wire_pb2.FromClient(eligibility=eligibility))
        progress = wire_pb2.Progress(key=key)
        await session.send(wire_pb2.FromClient(progress=progress))
        signed = wire_pb2.Envelope(key=key, digest=b"", num_bytes=most, signature=b"")
        await session.send(wire_pb2.FromClient(result=wire_pb2.Result(envelope=signed)))
        assert (await told(session, "receipt")).receipt.verdict == wire_pb2.Receipt.REFUSED

    site.in_session(peer, speak)
    site.train(peer)


# Uploads that are cut short, or too long.


def test_an_upload_that_ends_too_early_goes_on_later(site: Site) -> None:
    """Bytes received before an early end are kept; too many bytes make the upload start over."""
    peer = site.enrolled("clinic-a")
    channel, data = site.gateway.channel(), reply(0)
    with ThreadPoolExecutor(1) as thread:
        requests = {ClientId(peer.client_id): request_of(0)}
        collected = thread.submit(lambda: len(list(ask_once(channel, requests, deadline_s=WAIT_S))))

        async def heard(session: GatewaySession) -> wire_pb2.TaskKey:
            return (await told(session, "task")).task.key

        key = site.in_session(peer, heard)
        first = wire_pb2.UploadPart(envelope=envelope(key, data, peer)).SerializeToString()

        def send(*chunks: bytes) -> tuple[wire_pb2.UploadStatus, grpc.StatusCode]:
            parts = [wire_pb2.UploadPart(data=each).SerializeToString() for each in chunks]
            came, code = site.raw(UPLOAD, peer, first, *parts, half_close=True)
            return wire_pb2.UploadStatus.FromString(came[-1]), code

        assert send(data[:10]) == (wire_pb2.UploadStatus(offset=0), grpc.StatusCode.ABORTED)
        assert send() == (wire_pb2.UploadStatus(offset=10), grpc.StatusCode.ABORTED)
        too_much, _ = send(data)
        assert too_much.receipt.verdict == wire_pb2.Receipt.REFUSED
        assert send(data[:10])[0].offset == 0
        giant, code = send(bytes(wire.MAX_MESSAGE_BYTES))
        assert (giant.offset, code) == (10, grpc.StatusCode.RESOURCE_EXHAUSTED)
        whole, code = send(data[10:11], data[11:])
        assert whole.receipt.verdict == wire_pb2.Receipt.ACCEPTED
        assert collected.result(WAIT_S) == 1
    assert site.refused("size") == 1


# Too many, too fast, too slow.


def test_a_thousand_streams_on_one_connection(site: Site, tmp_path: Path) -> None:
    """The peer ignores the limit it was sent; the streams beyond it are reset unseen."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    with http2(site.gateway.address, tls_context(peer, tmp_path)) as stream:
        with suppress(OSError):  # the server cut the connection
            for number in range(1000):
                stream.sendall(call_headers(SESSION, stream=2 * number + 1))
        site.train(honest)
        counts = frames_until_refused(stream)
        assert counts[RST_STREAM] + counts[GOAWAY] > 0
    assert site.refused("handshake") <= 32
    assert site.gateway.counters.sessions == 1


@pytest.mark.slow
def test_a_thousand_sessions_over_many_connections(site: Site, tmp_path: Path) -> None:
    """32 calls of a client are served, however many connections it has."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    context = tls_context(peer, tmp_path)
    streams = [http2(site.gateway.address, context) for _ in range(125)]
    opened = [each.__enter__() for each in streams]
    for stream in opened:
        stream.sendall(b"".join(call_headers(SESSION, stream=2 * n + 1) for n in range(8)))
    site.wait_until(lambda: site.refused("calls") >= 1000 - 32)
    site.train(honest)
    assert site.gateway.counters.sessions == 1
    for each in streams:
        each.__exit__(None, None, None)


@pytest.mark.slow
def test_calls_that_are_begun_and_reset_at_once(site: Site, tmp_path: Path) -> None:
    """The rapid-reset attack: each stream is over before the limit on streams applies."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    with http2(site.gateway.address, tls_context(peer, tmp_path)) as stream:
        try:
            for number in range(20_000):
                opened = call_headers(SESSION, stream=2 * number + 1)
                reset = frame(RST_STREAM, stream=2 * number + 1, payload=struct.pack(">I", 8))
                stream.sendall(opened + reset)
        except OSError:  # the server cut the connection
            pass
        site.train(honest)


def test_frames_that_no_peer_may_send(site: Site, tmp_path: Path) -> None:
    """Endless headers, a giant frame, overflowing windows, garbage after the preface."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    context = tls_context(peer, tmp_path)
    continued = frame(1, stream=1, payload=b"\0\x01a\x01b") + b"".join(
        frame(9, stream=1, payload=b"\0\x01a\x7f" + b"b" * 127) for _ in range(2000)
    )
    windows = frame(8, payload=struct.pack(">I", 2**31 - 1)) * 2
    settings = frame(4, payload=struct.pack(">HI", 1, 0xFFFFFFFF)) * 5000
    for content in (continued, b"\xff\xff\xff\x00" + bytes(5), windows, settings, bytes(50_000)):
        with http2(site.gateway.address, context) as stream:
            try:
                stream.sendall(content)
                stream.sendall(frame(DATA, flags=END_STREAM, stream=7))
            except OSError:
                pass
            site.train(honest)


@pytest.mark.slow
def test_a_session_that_comes_byte_by_byte_holds_up_nobody(site: Site, tmp_path: Path) -> None:
    """A hello that never ends times out; half a message later on delays only its own session."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")
    site.open(IMPATIENT)
    hello = wire_pb2.FromClient(hello=HELLO).SerializeToString()
    message = b"\0" + struct.pack(">I", len(hello)) + hello
    with http2(site.gateway.address, tls_context(peer, tmp_path)) as stream:
        stream.sendall(call_headers(SESSION, stream=1))
        for byte in message[:-1]:
            stream.sendall(frame(DATA, stream=1, payload=bytes([byte])))
        site.wait_until(lambda: site.refused("handshake") == 1)
        stream.sendall(call_headers(SESSION, stream=3))
        stream.sendall(frame(DATA, stream=3, payload=message + b"\0\0\0\x10"))
        site.wait_until(lambda: site.gateway.counters.sessions == 1)
        site.train(honest)
    assert site.gateway.counters.sessions == 2


def test_a_flood_is_read_at_its_pace(site: Site) -> None:
    """The rest waits in the peer's own buffers, and in its connection's flow-control window."""
    flooder, honest = site.enrolled("flooder"), site.enrolled("honest")
    big = wire_pb2.Result(envelope=wire_pb2.Envelope(), data=bytes(wire.CHUNK_BYTES))

    async def flood(session: GatewaySession) -> None:
        for _ in range(1000):
            await session.send(wire_pb2.FromClient(result=big))

    async def run() -> None:
        async with (
            GatewayConnection(site.gateway.address, flooder.credentials) as connection,
            connection.session(HELLO) as session,
        ):
            await flood(session)

    flooding = site.loop.call(run())
    site.wait_until(lambda: site.gateway.counters.throttled > 0)
    began_s, messages = site.clock.now_s(), site.gateway.counters.messages
    site.train(honest)
    site.train(honest)
    messages = site.gateway.counters.messages - messages  # counted before the time is read
    elapsed_s = site.clock.now_s() - began_s
    assert messages <= SETTINGS.max_messages_per_s * elapsed_s + 4
    assert not flooding.done()
    flooding.cancel()


def test_a_client_that_comes_and_goes_without_end_is_one_client(site: Site) -> None:
    """Each of its sessions replaces the last one."""
    peer, honest = site.enrolled("clinic-a"), site.enrolled("honest")

    async def come_and_go() -> None:
        async with GatewayConnection(site.gateway.address, peer.credentials) as connection:
            while True:
                async with connection.session(HELLO):
                    pass

    coming = site.loop.call(come_and_go())
    site.wait_until(lambda: site.gateway.counters.sessions > 50)
    site.train(honest)
    coming.cancel()
    site.wait_until(lambda: site.gateway.status()["connected"] in (0, 1))
