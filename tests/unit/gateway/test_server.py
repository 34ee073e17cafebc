"""The server with real gRPC on the loopback: it sends tasks, takes replies, returns receipts."""

import asyncio
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue

import grpc
import numpy as np
import pytest

from fedlearn.core.clock import RealClock, SystemClock, VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    SecureReply,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.core.positioned import PositionedFile
from fedlearn.errors import ConfigError, DeploymentError, Parked, StoreError
from fedlearn.gateway import channel as gateway_channel
from fedlearn.gateway import server as gateway_server
from fedlearn.gateway.channel import GatewayExchange
from fedlearn.gateway.connections import ServerSession, Sessions
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.server import Gateway, GatewayChannel, GatewaySettings, RunTerms
from fedlearn.gateway.upload_store import ClosingRecord, Draft, LoggedReply, PartialUpload, ReplyLog
from fedlearn.identity.identity import Identity
from fedlearn.identity.registry import Contact
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.base import ask_once
from fedlearn.transport.content import compute_digest
from fedlearn.transport.grpc_client import (
    NAME_METADATA,
    ComeBackLater,
)
from tests.processes import open_files_below
from tests.scripted_clients import (
    NEVER,
    RUN_ID,
    SETTINGS,
    WAIT_S,
    Collecting,
    Member,
    Receipt,
    Site,
    envelope,
    train_reply,
    train_request,
    value_of,
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    loop = LoopThread("clients")
    site = Site(tmp_path / "spool", loop, FreshRegistry(SystemClock()))
    yield site
    for gateway in site.gateways:
        gateway.stop(grace_s=0.0)
    loop.stop()


def test_a_task_goes_out_and_its_reply_comes_in_and_gets_a_receipt(site: Site) -> None:
    gateway = site.open()
    members = site.connected(gateway, 3)
    channel = gateway.channel()
    assert channel.available() == (0, 1, 2)
    exchange = Collecting(channel, members, train_request(size=1000))
    for member in members:
        task = member.hear_task()
        assert isinstance(decode(task.data), TrainRequest)
        assert task.key.run_id == RUN_ID
        member.answer(task, train_reply(float(member.client_id)))
    arrived = dict(exchange.take() for _ in members)
    assert {client_id: value_of(reply) for client_id, reply in arrived.items()} == {
        0: 0.0,
        1: 1.0,
        2: 2.0,
    }
    assert exchange.end() == 3
    assert [member.hear_receipt().verdict for member in members] == [Receipt.ACCEPTED] * 3
    assert gateway.counters.replies_accepted == 3


def test_a_reply_is_accepted_only_once_it_is_consumed(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request())
    member.answer(member.hear_task(), train_reply(1.0))
    exchange.next()
    assert gateway.counters.replies_logged == 1
    assert gateway.counters.replies_accepted == 0
    exchange.consume()
    assert member.hear_receipt().verdict == Receipt.ACCEPTED


def test_a_reply_that_does_not_count_is_refused_with_the_reason_after_a_restart_too(
    site: Site,
) -> None:
    """Control: a reply that counts, and one in which the client itself reports a failure."""
    gateway = site.open()
    members = site.connected(gateway, 4)
    why = "the delta is not finite"
    exchange = Collecting(gateway.channel(), members, train_request(), refused={1: why})
    tasks = [member.hear_task() for member in members]
    replies: list[bytes | Reply] = [
        train_reply(1.0),
        train_reply(2.0),
        Failure("battery low"),
        b"no reply at all",
    ]
    told = []
    for member, task, reply in zip(members, tasks, replies, strict=True):
        member.answer(task, reply)
        exchange.take()
        told.append(member.hear_receipt())
    assert exchange.end() == 4
    assert [each.verdict for each in told[:3]] == [
        Receipt.ACCEPTED,
        Receipt.REFUSED,
        Receipt.ACCEPTED,
    ]
    assert told[1].reason == why
    assert (told[3].verdict, "not" in told[3].reason) == (Receipt.REFUSED, True)
    assert gateway.counters.replies_accepted == 2
    assert gateway.counters.refused == {"unusable": 2}
    site.shut(gateway)
    again = site.open()
    for member, task, before in zip(members, tasks, told, strict=True):
        member.connect(again, held=[task.key])
        after = member.hear_receipt()
        assert (after.verdict, after.reason) == (before.verdict, before.reason)


def test_a_client_that_is_set_aside_is_not_available_until_it_connects_anew(site: Site) -> None:
    gateway = site.open()
    bad, good = site.connected(gateway, 2)
    channel = gateway.channel()
    channel.set_aside(ClientId(bad.client_id))
    channel.set_aside(ClientId(99))  # not connected
    assert channel.available() == (good.client_id,)
    bad.say(wire_pb2.FromClient(eligibility=wire_pb2.Eligibility(device="cuda")))
    wait_until(lambda: gateway.counters.messages == 1)
    assert channel.available() == (good.client_id,)
    assert channel.num_set_aside() == gateway.status()["set_aside"] == 1
    assert gateway.status()["clients_set_aside"] == [bad.client_id]
    assert gateway.find_names([ClientId(bad.client_id), ClientId(99)]) == {
        bad.client_id: bad.name,
        99: "",
    }
    bad.connect(gateway)
    assert channel.available() == (bad.client_id, good.client_id)
    assert channel.num_set_aside() == 0


def late_and_silent(
    site: Site, channel: GatewayChannel
) -> tuple[list[Member], list[wire_pb2.Task]]:
    """Run an exchange with enough replies: one counts, one is late, and one never comes."""
    members = site.connected(site.gateways[-1], 3)
    exchange = Collecting(channel, members, train_request(size=1_000_000), enough=1)
    tasks = [member.hear_task() for member in members]
    members[0].answer(tasks[0], Failure("battery low"))
    exchange.next()
    members[1].answer(tasks[1], Failure("battery low"))
    wait_until(lambda: site.gateways[-1].counters.replies_logged == 2)
    exchange.consume()
    exchange.end()
    return members, tasks


def test_nobody_is_late_or_called_off_before_a_crash_cannot_undo_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, durable, close = site.open().channel(), threading.Event(), ReplyLog.close

    def slowly(log: ReplyLog, closed: ClosingRecord | None) -> None:
        assert durable.wait(WAIT_S)
        close(log, closed)

    with monkeypatch.context() as patch:
        patch.setattr(ReplyLog, "close", slowly)
        (_, late, silent), tasks = late_and_silent(site, channel)
        (tmp_path / "reply").write_bytes(encode(train_reply(1.0)))
        upload = silent.upload(tasks[2], tmp_path / "reply")
        Collecting(channel, [late, silent], train_request(1))
        assert late.hear_task().key.round_num == 1  # and received nothing before
        assert silent.hear_task().key.round_num == 1
        assert not wait([upload], 0.3).done
        durable.set()
    assert upload.result(WAIT_S).verdict == Receipt.LATE
    assert late.hear_receipt().verdict == Receipt.LATE
    told = silent.hear()
    assert told is not None
    assert told.cancel.key == tasks[2].key


def test_an_upload_waits_no_longer_for_a_verdict_than_for_anything_else(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, close = threading.Event(), ReplyLog.close
    channel = site.open(replace(SETTINGS, stall_timeout_s=0.5)).channel()

    def slowly(log: ReplyLog, closed: ClosingRecord | None) -> None:
        assert durable.wait(WAIT_S)
        close(log, closed)

    with monkeypatch.context() as patch:
        patch.setattr(ReplyLog, "close", slowly)
        (_, _, silent), tasks = late_and_silent(site, channel)
        (tmp_path / "reply").write_bytes(encode(train_reply(1.0)))
        with pytest.raises(ConnectionError, match=r"UNAVAILABLE.*no verdict"):
            silent.upload(tasks[2], tmp_path / "reply").result(WAIT_S)
        durable.set()


def test_where_the_end_of_an_exchange_is_not_stored_verdicts_wait_for_the_commit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, close = site.open().channel(), ReplyLog.close

    def in_vain(log: ReplyLog, closed: ClosingRecord | None) -> None:
        close(log, None)
        raise OSError(errno.ENOSPC, f"No space left on device for {closed}")

    with monkeypatch.context() as patch:
        patch.setattr(ReplyLog, "close", in_vain)
        (_, late, silent), tasks = late_and_silent(site, channel)
        Collecting(channel, [late, silent], train_request(1))
        silent.answer(tasks[2], train_reply(1.0))
        for member in (late, silent):
            assert member.hear_task().key.round_num == 1
    assert late.told.empty()
    channel.forget(before_round=1)
    for member in (late, silent):
        assert member.hear_receipt().verdict == Receipt.LATE


def test_a_client_that_connects_during_the_exchange_is_asked(site: Site) -> None:
    gateway = site.open()
    member = site.enrol("late-riser")
    exchange = Collecting(gateway.channel(), [member], train_request())
    member.connect(gateway)
    member.answer(member.hear_task(), train_reply(1.0))
    exchange.take()
    assert exchange.end() == 1


def test_an_exchange_ends_at_its_deadline_without_those_who_are_silent(site: Site) -> None:
    clock = VirtualClock()
    gateway = site.open(clock=clock)
    quick, silent = site.connected(gateway, 2)
    exchange = Collecting(gateway.channel(), [quick, silent], train_request(), deadline_s=NEVER)
    quick.answer(quick.hear_task(), train_reply(1.0))
    task = silent.hear_task()
    assert task.remaining_s == NEVER
    exchange.take()
    clock.sleep(NEVER - 0.5)
    assert exchange.goes_on()
    clock.sleep(0.5)
    assert exchange.end() == 1
    told = silent.hear()
    assert told is not None
    assert told.cancel.key == task.key
    for _ in ("first", "again, as after a connection that was cut before the receipt"):
        silent.answer(task, train_reply(2.0))
        assert silent.hear_receipt().verdict == Receipt.LATE
        assert gateway.counters.replies_late == 1


def test_whoever_is_not_needed_any_more_is_called_off_and_its_reply_is_late(site: Site) -> None:
    gateway = site.open()
    members = site.connected(gateway, 3)
    exchange = Collecting(gateway.channel(), members, train_request(), enough=1)
    tasks = [member.hear_task() for member in members]
    members[0].answer(tasks[0], train_reply(0.0))
    exchange.next()
    members[1].answer(tasks[1], train_reply(1.0))  # logged but not consumed
    wait_until(lambda: gateway.counters.replies_logged == 2)
    exchange.consume()
    assert exchange.end() == 1
    assert members[0].hear_receipt().verdict == Receipt.ACCEPTED
    assert members[1].hear_receipt().verdict == Receipt.LATE
    told = members[2].hear()
    assert told is not None
    assert "enough" in told.cancel.reason


def test_whoever_was_away_when_the_exchange_closed_hears_so_on_return(site: Site) -> None:
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    exchange = Collecting(gateway.channel(), [first, second], train_request(), enough=1)
    task = second.hear_task()
    second.disconnect()
    wait_until(lambda: phase_of(gateway, second) == "gone")
    first.answer(first.hear_task(), train_reply(1.0))
    exchange.take()
    exchange.end()
    second.connect(gateway, held=[task.key])
    assert second.hear_receipt().verdict == Receipt.LATE
    told = second.hear()
    assert told is not None
    assert told.cancel.key == task.key


def test_the_same_reply_again_gets_the_same_receipt_and_counts_once(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request())
    task = member.hear_task()
    for _ in range(3):
        member.answer(task, train_reply(1.0))
    exchange.take()
    assert exchange.end() == 1
    member.answer(task, train_reply(1.0))
    assert [member.hear_receipt().verdict for _ in range(2)] == [Receipt.ACCEPTED] * 2
    assert gateway.counters.replies_accepted == 1
    member.disconnect()
    member.connect(gateway, held=[task.key])
    assert member.hear_receipt().verdict == Receipt.ACCEPTED


def test_a_large_request_is_downloaded_and_a_large_reply_uploaded(
    site: Site, tmp_path: Path
) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    request = train_request(size=1_000_000)
    exchange = Collecting(gateway.channel(), [member], request)
    task = member.hear_task()
    assert not task.data
    path = tmp_path / "request"
    path.write_bytes(b"")
    member.use(
        lambda connection: connection.download(task.digest, num_bytes=task.num_bytes, path=path)
    ).result(WAIT_S)
    assert path.read_bytes() == encode(request)
    assert phase_of(gateway, member) == "downloading"
    path.write_bytes(encode(train_reply(7.0, size=1_000_000)))
    receipt = member.upload(task, path)
    assert value_of(exchange.next()[1]) == 7.0
    assert not receipt.done()
    exchange.consume()
    assert receipt.result(WAIT_S).verdict == Receipt.ACCEPTED
    assert member.upload(task, path).result(WAIT_S).verdict == Receipt.ACCEPTED
    assert exchange.end() == 1


def test_a_request_that_is_asked_again_leaves_its_downloads_alone(site: Site) -> None:
    """Another question with the same bytes replaces the file without changing its content."""
    gateway = site.open()
    members = site.connected(gateway, 3)
    exchange = gateway.channel().open(deadline_s=math.inf)
    requests = [train_request(size=1_000_000) for _ in range(2)]
    exchange.ask(asked(members[:1], requests[0]), number=0)
    members[0].hear_task()
    (path,) = site.folder.rglob("requests/*")
    with path.open("rb") as downloading:
        exchange.ask(asked(members[1:2], requests[1]), number=1)
        members[1].hear_task()
        assert os.fstat(downloading.fileno()).st_ino != path.stat().st_ino
        assert downloading.read() == path.read_bytes() == encode(requests[0])
    exchange.close()


def test_a_request_whose_file_was_cut_off_is_asked_for_again(site: Site, tmp_path: Path) -> None:
    """Otherwise its client would wait forever."""
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = gateway.channel().open(deadline_s=math.inf)
    exchange.ask(asked([member], train_request(size=1_000_000)), number=0)
    task = member.hear_task()
    (file,) = site.folder.rglob("requests/*")
    os.truncate(file, 1000)
    path = tmp_path / "request"
    path.write_bytes(b"")
    download = member.use(
        lambda connection: connection.download(task.digest, num_bytes=task.num_bytes, path=path)
    )
    with pytest.raises(ConnectionError, match="no such exchange is open"):
        download.result(WAIT_S)
    exchange.close()


def test_a_model_that_is_sent_ahead_is_downloaded_beside_the_task_in_work(
    site: Site, tmp_path: Path
) -> None:
    """Only clients that take models ahead may download it; it is no task and may be called off."""
    gateway = site.open()
    taker = site.enrol("taker").connect(gateway, takes_ahead=True)
    other = site.enrol("other").connect(gateway)
    channel = gateway.channel()
    exchange = Collecting(channel, [taker, other], train_request())
    task = taker.hear_task()
    other.hear_task()
    newer = train_request(1, size=1_000_000)
    channel.send_prefetch([ClientId(0), ClientId(1)], newer, last_round_num=4)
    told = taker.hear()
    assert told is not None
    ahead = told.ahead
    assert (ahead.key.round_num, ahead.last_round_num, ahead.data) == (1, 4, b"")
    assert taker.downloaded(ahead, tmp_path / "request") == encode(newer)
    assert phase_of(gateway, taker) == "connected"
    with pytest.raises(ConnectionError, match="this client has no such task"):
        other.downloaded(ahead, tmp_path / "theirs")
    assert gateway.counters.sent_ahead == 1
    taker.answer(ahead, train_reply(7.0, round_num=1))  # a reply to no task
    taker.answer(task, train_reply(5.0))
    assert value_of(exchange.take()[1]) == 5.0
    assert taker.hear_receipt().key == task.key
    channel.cancel_prefetches()
    told = taker.hear()
    assert told is not None
    assert told.cancel.key == ahead.key
    assert other.told.empty()
    site.shut(gateway)


def test_no_file_of_a_model_sent_ahead_is_left_once_it_is_called_off(site: Site) -> None:
    """Until then the file is kept, whatever else is asked."""
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    channel = gateway.channel()
    channel.send_prefetch([ClientId(0)], train_request(1, size=1_000_000), last_round_num=4)
    for num_left in (2, 1):
        exchange = Collecting(channel, [member], train_request(size=1_000_000 + num_left))
        member.answer(member.hear_task(), train_reply(5.0))
        exchange.take()
        exchange.end()
        assert member.hear_receipt().verdict == Receipt.ACCEPTED
        assert len(requests_on_disk(site)) == num_left
        channel.cancel_prefetches()


def requests_on_disk(site: Site) -> list[str]:
    return [path.name for path in (site.folder / "passing").glob("*/requests/*")]


def test_a_cohort_downloads_one_model_and_each_client_has_its_own_message(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a client that reconnects. Control: another model is another file."""
    gateway = site.open()
    members = site.connected(gateway, 3)
    asked = SecureTrainRequest(message=b"", train=train_request(size=1_000_000))
    own = {member.client_id: b"packets %d" % member.client_id for member in members}
    requests = {i: replace(asked, message=message) for i, message in own.items()}
    requests[2] = replace(requests[2], train=train_request(size=1_000_001))
    encoded: list[Request | Reply] = []

    def counting(message: Request | Reply) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(gateway_channel, "encode", counting)
    exchange = Collecting(gateway.channel(), members, requests)
    tasks = {member.client_id: member.hear_task() for member in members}
    assert {i: task.personal for i, task in tasks.items()} == own
    assert tasks[0].digest == tasks[1].digest != tasks[2].digest
    assert len(encoded) == 2
    assert sorted(requests_on_disk(site)) == sorted({t.digest.hex() for t in tasks.values()})
    members[1].disconnect()
    members[1].connect(gateway)
    assert members[1].hear_task().personal == own[1]
    for member in members:
        task = tasks[member.client_id]
        content = member.downloaded(task, tmp_path / member.name)
        found = decode(content, personal=task.personal)
        assert encode(found) == encode(requests[member.client_id])
        member.answer(task, SecureReply(round_num=0, message=b"masked"))
    assert len([exchange.take() for _ in members]) == exchange.end() == 3


def test_a_personal_part_that_does_not_fit_into_a_task_asks_nobody(site: Site) -> None:
    """Control: the largest part that fits is sent."""
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    channel, train = gateway.channel(), train_request()
    too_large = SecureTrainRequest(message=bytes(wire.MAX_PERSONAL_BYTES + 1), train=train)
    with pytest.raises(ConfigError, match=r'ask fewer clients .* or set .* to "sparse"'):
        list(ask_once(channel, {ClientId(member.client_id): too_large}, deadline_s=NEVER))
    assert member.told.empty()
    largest = SecureTrainRequest(
        message=bytes(wire.MAX_PERSONAL_BYTES), train=train_request(size=60_000)
    )
    exchange = Collecting(channel, [member], largest)
    task = member.hear_task()
    assert task.data
    assert len(task.personal) == wire.MAX_PERSONAL_BYTES
    member.answer(task, SecureReply(round_num=0, message=b"masked"))
    exchange.take()
    assert exchange.end() == 1


async def upload_parts(
    member: Member,
    signed: wire_pb2.Envelope,
    data: bytes,
    *,
    then_stall: bool = False,
    half_until: asyncio.Event | None = None,
) -> tuple[int, grpc.StatusCode]:
    """Send part of an upload and stop; return the server's offset and status code."""
    async with grpc.aio.insecure_channel(member.address) as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{wire.GATEWAY}/Upload"
        )
        call = method(metadata=((NAME_METADATA, member.name),))
        await call.write(wire_pb2.UploadPart(envelope=signed).SerializeToString())
        first: object = await call.read()
        assert isinstance(first, bytes)
        status = wire_pb2.UploadStatus.FromString(first)
        for begin in range(0, len(data), wire.CHUNK_BYTES):
            part = wire_pb2.UploadPart(data=data[begin : begin + wire.CHUNK_BYTES])
            await call.write(part.SerializeToString())
            if half_until is not None:
                await half_until.wait()
        if not then_stall:
            await call.done_writing()
            with suppress(grpc.aio.AioRpcError):  # the status code is returned below
                await call.read()
        return status.offset, await call.code()


@pytest.mark.parametrize("restarts", [False, True])
def test_an_upload_that_was_cut_goes_on_where_it_ended(
    site: Site, tmp_path: Path, *, restarts: bool
) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    request = train_request(size=1_000_000)
    exchange = Collecting(gateway.channel(check=park_when(site)), [member], request)
    task = member.hear_task()
    path = tmp_path / "reply"
    path.write_bytes(encode(train_reply(7.0, size=1_000_000)))
    data = path.read_bytes()
    signed = envelope(task, data, client_id=0, identity=member.identity)
    half = wire.CHUNK_BYTES + 12345
    begun = member.loop.call(upload_parts(member, signed, data[:half]))
    assert begun.result(WAIT_S) == (0, grpc.StatusCode.ABORTED)
    if restarts:
        park(site)
        with pytest.raises(Parked):
            exchange.end()
        site.shut(gateway)
        gateway = site.open()
        member.connect(gateway, held=[task.key])
        exchange = Collecting(gateway.channel(), [member], request)
        assert member.hear_task().key == task.key
    again = member.loop.call(upload_parts(member, signed, data[half:]))
    assert value_of(exchange.take()[1]) == 7.0
    assert again.result(WAIT_S) == (half, grpc.StatusCode.OK)
    assert exchange.end() == 1
    assert gateway.counters.uploads_resumed == 1


def test_an_upload_that_is_parked_is_told_at_once_to_come_again(site: Site, tmp_path: Path) -> None:
    """One upload waits for its verdict and one is still in progress; the disk is not blamed."""
    gateway = site.open()
    first, waiting, halfway = site.connected(gateway, 3)
    members, request = [first, waiting, halfway], train_request(size=1_000_000)
    exchange = Collecting(gateway.channel(check=park_when(site)), members, request)
    path, parked = tmp_path / "reply", asyncio.Event()
    path.write_bytes(encode(train_reply(7.0, size=1_000_000)))
    first.answer(first.hear_task(), Failure("battery low"))
    exchange.next()
    told = waiting.upload(waiting.hear_task(), path)
    wait_until(lambda: gateway.counters.replies_logged == 2)
    signed = envelope(
        halfway.hear_task(),
        path.read_bytes(),
        client_id=halfway.client_id,
        identity=halfway.identity,
    )
    last = halfway.loop.call(upload_parts(halfway, signed, path.read_bytes(), half_until=parked))
    wait_until(lambda: gateway.counters.uploads == 2)
    park(site)
    exchange.consume()
    with pytest.raises(Parked):
        exchange.end()
    with pytest.raises(ConnectionError, match=r"UNAVAILABLE.*no such exchange"):
        told.result(WAIT_S)
    halfway.loop.post(parked.set)
    assert last.result(WAIT_S) == (0, grpc.StatusCode.UNAVAILABLE)


def test_a_stalled_upload_does_not_hold_up_the_deadline(site: Site, tmp_path: Path) -> None:
    clock = VirtualClock()
    gateway = site.open(replace(SETTINGS, stall_timeout_s=1.0), clock=clock)
    quick, stalled = site.connected(gateway, 2)
    exchange = Collecting(
        gateway.channel(), [quick, stalled], train_request(size=1_000_000), deadline_s=NEVER
    )
    task = stalled.hear_task()
    data = encode(train_reply(1.0, size=1_000_000))
    signed = envelope(task, data, client_id=stalled.client_id, identity=stalled.identity)
    stalling = stalled.loop.call(upload_parts(stalled, signed, data[:1000], then_stall=True))
    assert stalling.result(WAIT_S)[1] == grpc.StatusCode.DEADLINE_EXCEEDED
    quick.answer(quick.hear_task(), train_reply(1.0))
    exchange.take()
    assert exchange.goes_on()
    clock.sleep(NEVER)
    assert exchange.end() == 1
    assert gateway.counters.stalled == 1


def test_a_restart_yields_what_was_logged_first_and_waits_for_the_rest(site: Site) -> None:
    gateway = site.open()
    members = site.connected(gateway, 3)
    exchange = Collecting(gateway.channel(check=park_when(site)), members, train_request())
    tasks = [member.hear_task() for member in members]
    members[1].answer(tasks[1], train_reply(1.0))
    assert exchange.take()[0] == 1
    assert members[1].hear_receipt().verdict == Receipt.ACCEPTED
    members[0].answer(tasks[0], train_reply(0.0))
    exchange.next()  # logged but not consumed when the coordinator stops
    park(site)
    exchange.consume()
    with pytest.raises(Parked):
        exchange.end()
    site.shut(gateway)

    gateway = site.open()
    for member, task in zip(members, tasks, strict=True):
        member.connect(gateway, held=[task.key])
    exchange = Collecting(gateway.channel(), members, train_request())
    assert [exchange.take()[0] for _ in range(2)] == [1, 0]
    task = members[2].hear_task()
    assert task.key == tasks[2].key
    members[2].answer(task, train_reply(2.0))
    assert exchange.take()[0] == 2
    assert exchange.end() == 3
    assert members[0].hear_receipt().verdict == Receipt.ACCEPTED


def test_a_closed_exchange_is_read_again_as_it_was(site: Site) -> None:
    clock = VirtualClock()
    gateway = site.open(clock=clock)
    members = site.connected(gateway, 2)
    exchange = Collecting(gateway.channel(), members, train_request(), deadline_s=60.0)
    members[0].answer(members[0].hear_task(), train_reply(5.0))
    exchange.take()
    clock.sleep(60.0)
    assert exchange.end() == 1
    site.shut(gateway)
    gateway = site.open()
    again = Collecting(gateway.channel(), members, train_request(), deadline_s=NEVER)
    assert value_of(again.take()[1]) == 5.0
    assert again.end() == 1  # without waiting for the late client


@dataclass
class LaterClock(VirtualClock):
    """The clock of a process that started ``later_s`` seconds after the first one."""

    later_s: float = 0.0

    def unix_s(self) -> float:
        return super().unix_s() + self.later_s


@pytest.mark.parametrize(("later_s", "remaining_s"), [(10.0, 50.0), (3600.0, 30.0)])
def test_after_a_restart_the_deadline_stands_and_clients_have_a_grace(
    site: Site, later_s: float, remaining_s: float
) -> None:
    gateway = site.open(clock=VirtualClock())
    (member,) = site.connected(gateway, 1)
    parked = Collecting(
        gateway.channel(check=park_when(site)), [member], train_request(), deadline_s=60.0
    )
    member.hear_task()
    park(site)
    with pytest.raises(Parked):
        parked.end()
    site.shut(gateway)
    clock = LaterClock(later_s=later_s)
    gateway = site.open(replace(SETTINGS, recovery_grace_s=30.0), clock=clock)
    member.connect(gateway)
    exchange = Collecting(gateway.channel(), [member], train_request(), deadline_s=60.0)
    assert member.hear_task().remaining_s == remaining_s
    assert exchange_of(gateway)["elapsed_s"] == later_s
    assert exchange.goes_on()
    clock.sleep(remaining_s)
    assert exchange.end() == 0


def test_clients_have_a_grace_to_return_to_questions_that_an_earlier_process_asked(
    site: Site,
) -> None:
    """Also without a deadline. New questions have no grace period."""
    gateway = site.open(clock=VirtualClock())
    (member,) = site.connected(gateway, 1)
    first = gateway.channel().open(deadline_s=math.inf)
    first.ask(asked([member], train_request()), number=0)
    assert first.grace_until_s() == 0.0
    site.shut(gateway)
    clock = LaterClock(later_s=3600.0)
    gateway = site.open(replace(SETTINGS, recovery_grace_s=30.0), clock=clock)
    again = gateway.channel().open(deadline_s=math.inf)
    assert again.grace_until_s() == 0.0
    again.ask(asked([member], train_request()), number=0)
    assert again.grace_until_s() == 30.0


def asked(members: list[Member], request: Request) -> dict[ClientId, Request]:
    return {ClientId(member.client_id): request for member in members}


def read(exchange: GatewayExchange) -> tuple[int, float]:
    """Return the client and the value of an exchange's next reply."""
    arrival = exchange.next(until_s=WAIT_S)
    assert arrival is not None
    return arrival.client_id, value_of(arrival.reply)


def test_an_exchange_is_asked_again_while_it_is_open(site: Site) -> None:
    """Both clients that have replied and others; each question has its own key."""
    gateway = site.open()
    first, second, third = site.connected(gateway, 3)
    exchange = gateway.channel().open(deadline_s=NEVER)
    exchange.ask(asked([first, second], train_request()))
    task, slow = first.hear_task(), second.hear_task()
    first.answer(task, train_reply(1.0))
    assert read(exchange) == (0, 1.0)
    exchange.ask(asked([first, third], train_request(round_num=1)))
    assert first.hear_receipt().verdict == Receipt.ACCEPTED  # before the next task
    again, other = first.hear_task(), third.hear_task()
    assert (again.key.round_num, again.key) == (1, other.key)
    third.answer(other, train_reply(3.0, round_num=1))
    assert read(exchange) == (2, 3.0)
    second.answer(slow, train_reply(2.0))
    assert read(exchange) == (1, 2.0)
    first.answer(again, train_reply(4.0, round_num=1))
    assert read(exchange) == (0, 4.0)
    assert exchange.next(until_s=math.inf) is None
    exchange.ask(asked([second], train_request(round_num=1)))  # the same round again
    assert second.hear_receipt().verdict == Receipt.ACCEPTED
    more = second.hear_task()
    assert (more.key.round_num, more.key.exchange) == (1, 1)
    second.answer(more, train_reply(5.0, round_num=1))
    assert read(exchange) == (1, 5.0)
    exchange.close()
    for member in (first, second, third):
        assert member.hear_receipt().verdict == Receipt.ACCEPTED
    assert gateway.counters.replies_accepted == 5


def test_a_client_whose_task_is_open_is_not_asked_again(site: Site) -> None:
    """The whole call is refused. Control: once its reply was returned, it can be asked."""
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    exchange = gateway.channel().open(deadline_s=NEVER)
    exchange.ask(asked([first], train_request()))
    task = first.hear_task()
    both = asked([first, second], train_request(round_num=1))
    first.answer(task, train_reply(1.0))
    wait_until(lambda: gateway.counters.replies_logged == 1)
    with pytest.raises(ValueError, match="client 0 is asked again before its reply"):
        exchange.ask(both)
    assert read(exchange) == (0, 1.0)
    exchange.ask(both)
    assert first.hear_receipt().verdict == Receipt.ACCEPTED
    assert first.hear_task().key == second.hear_task().key
    exchange.close()


def test_closing_an_exchange_makes_all_that_was_not_read_late(site: Site) -> None:
    """This holds for all of its questions; clients that still work are called off."""
    gateway = site.open()
    first, second, third = site.connected(gateway, 3)
    exchange = gateway.channel().open(deadline_s=NEVER)
    exchange.ask(asked([first, second], train_request()))
    task, silent = first.hear_task(), second.hear_task()
    first.answer(task, train_reply(1.0))
    assert read(exchange) == (0, 1.0)
    exchange.ask(asked([first, third], train_request(round_num=1)))
    assert first.hear_receipt().verdict == Receipt.ACCEPTED
    again, other = first.hear_task(), third.hear_task()
    first.answer(again, train_reply(2.0, round_num=1))
    wait_until(lambda: gateway.counters.replies_logged == 2)
    exchange.close()
    assert exchange.next(until_s=WAIT_S) is None
    with pytest.raises(ValueError, match="closed; open another one"):
        exchange.ask(asked([first], train_request(round_num=2)))
    assert first.hear_receipt().verdict == Receipt.LATE
    for member, its in ((second, silent), (third, other)):
        told = member.hear()
        assert told is not None
        assert told.cancel.key == its.key
        member.answer(its, train_reply(2.0, round_num=its.key.round_num))
        assert member.hear_receipt().verdict == Receipt.LATE
    assert gateway.counters.replies_late == 3


def test_waiting_for_a_reply_ends_when_it_is_told_to(site: Site) -> None:
    """The exchange stays open until its deadline; later tasks get the time that is left."""
    clock = VirtualClock()
    gateway = site.open(clock=clock)
    first, second = site.connected(gateway, 2)
    exchange = gateway.channel().open(deadline_s=60.0)
    exchange.ask(asked([first], train_request()))
    task = first.hear_task()
    assert exchange.next(until_s=0.0) is None
    clock.sleep(20.0)
    assert exchange.next(until_s=20.0) is None
    exchange.ask(asked([second], train_request()))
    assert second.hear_task().remaining_s == 40.0
    first.answer(task, train_reply(1.0))
    wait_until(lambda: gateway.counters.replies_logged == 1)
    arrival = exchange.next(until_s=20.0)
    assert arrival is not None
    assert arrival.elapsed_s == 20.0
    clock.sleep(40.0)
    assert exchange.next(until_s=math.inf) is None
    exchange.close()


def test_both_questions_of_an_exchange_are_seen_and_fetched(site: Site, tmp_path: Path) -> None:
    """A request stays on disk as long as its question is open."""
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    exchange = gateway.channel().open(deadline_s=NEVER)
    exchange.ask(asked([first], train_request(size=1_000_000)))
    exchange.ask(asked([second], train_request(round_num=1, size=1_000_000)))
    tasks = first.hear_task(), second.hear_task()
    assert len(requests_on_disk(site)) == 2
    for round_num, (member, task) in enumerate(zip((first, second), tasks, strict=True)):
        request = train_request(round_num=round_num, size=1_000_000)
        assert member.downloaded(task, tmp_path / "request") == encode(request)
        assert phase_of(gateway, member) == "downloading"
    assert exchange_of(gateway)["phases"] == {"downloading": 2}
    exchange.close()


def test_a_restart_finds_the_replies_to_each_question_that_is_put_again(site: Site) -> None:
    """Both consumed replies and one that was only logged; it waits for the others."""
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    exchange = gateway.channel(check=park_when(site)).open(deadline_s=NEVER)
    exchange.ask(asked([first, second], train_request()))
    task, slow = first.hear_task(), second.hear_task()
    first.answer(task, train_reply(1.0))
    assert read(exchange) == (0, 1.0)
    exchange.ask(asked([first], train_request()))
    assert first.hear_receipt().verdict == Receipt.ACCEPTED
    again = first.hear_task()
    first.answer(again, train_reply(2.0))
    wait_until(lambda: gateway.counters.replies_logged == 2)
    park(site)
    with pytest.raises(Parked):
        exchange.next(until_s=WAIT_S)
    exchange.close()  # set aside, so no client is late
    site.shut(gateway)

    gateway = site.open()
    for member, key in ((first, again.key), (second, slow.key)):
        member.connect(gateway, held=[key])
    exchange = gateway.channel().open(deadline_s=NEVER)
    exchange.ask(asked([first, second], train_request()))
    assert read(exchange) == (0, 1.0)
    exchange.ask(asked([first], train_request()))
    assert read(exchange) == (0, 2.0)
    assert second.hear_task().key == slow.key
    second.answer(slow, train_reply(3.0))
    assert read(exchange) == (1, 3.0)
    assert first.hear_receipt().verdict == Receipt.ACCEPTED
    exchange.close()
    assert second.hear_receipt().verdict == Receipt.ACCEPTED


def test_replies_wait_until_they_are_read_whether_they_are_durable_or_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a slow disk has not stored them yet."""
    gateway, durable, append = site.open(), threading.Event(), ReplyLog.append
    members, channel = site.connected(gateway, 2), gateway.channel()
    assert channel.num_waiting() == 0
    exchange = channel.open(deadline_s=NEVER)
    exchange.ask(asked(members, train_request()))

    def slowly(log: ReplyLog, drafts: Sequence[Draft]) -> list[LoggedReply | OSError]:
        assert durable.wait(WAIT_S)
        return append(log, drafts)

    with monkeypatch.context() as patch:
        patch.setattr(ReplyLog, "append", slowly)
        for member in members:
            member.answer(member.hear_task(), train_reply(1.0))
        wait_until(lambda: channel.num_waiting() == 2)
        assert gateway.counters.replies_logged == 0
        durable.set()
    wait_until(lambda: gateway.counters.replies_logged == 2)
    assert channel.num_waiting() == 2
    read(exchange)
    assert channel.num_waiting() == 1
    read(exchange)
    assert channel.num_waiting() == 0
    exchange.close()


def test_a_reply_that_could_not_be_stored_does_not_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.open()
    (member,), channel = site.connected(gateway, 1), gateway.channel()
    exchange = channel.open(deadline_s=NEVER)
    exchange.ask(asked([member], train_request()))

    def full(_: ReplyLog, drafts: Sequence[Draft]) -> list[LoggedReply | OSError]:
        return [OSError(errno.ENOSPC, "No space left on device")] * len(drafts)

    monkeypatch.setattr(ReplyLog, "append", full)
    member.answer(member.hear_task(), train_reply(1.0))
    wait_until(lambda: gateway.counters.disk_full == 1)
    assert channel.num_waiting() == 0
    exchange.close()


def test_what_an_earlier_process_has_logged_waits_as_well(site: Site) -> None:
    gateway = site.open()
    members = site.connected(gateway, 2)
    exchange = gateway.channel(check=park_when(site)).open(deadline_s=NEVER)
    exchange.ask(asked(members, train_request()))
    for member in members:
        member.answer(member.hear_task(), train_reply(1.0))
    wait_until(lambda: gateway.counters.replies_logged == 2)
    park(site)
    with pytest.raises(Parked):
        exchange.next(until_s=WAIT_S)
    site.shut(gateway)

    channel = site.open().channel()
    exchange = channel.open(deadline_s=NEVER)
    exchange.ask(asked(members, train_request()))
    assert channel.num_waiting() == 2
    read(exchange)
    assert channel.num_waiting() == 1
    exchange.close()


def test_what_a_client_took_is_what_it_took_whenever_a_restart_finds_its_reply(site: Site) -> None:
    """An hour without a coordinator neither adds to the client's time nor reduces it."""
    clock = VirtualClock()
    gateway = site.open(clock=clock)
    (member,) = site.connected(gateway, 1)
    exchange = gateway.channel(check=park_when(site)).open(deadline_s=math.inf)
    exchange.ask(asked([member], train_request()), number=0)
    task = member.hear_task()
    clock.sleep(5.0)
    member.answer(task, train_reply(1.0))
    wait_until(lambda: gateway.counters.replies_logged == 1)
    park(site)
    with pytest.raises(Parked):
        exchange.next(until_s=WAIT_S)
    site.shut(gateway)
    clock.sleep(3600.0)
    exchange = site.open(clock=clock).channel().open(deadline_s=math.inf)
    exchange.ask(asked([member], train_request()), number=0)
    arrival = exchange.next(until_s=WAIT_S)
    assert arrival is not None
    assert arrival.duration_s(0.0) == pytest.approx(5.0)


def test_an_exchange_that_was_put_aside_goes_on_in_the_same_process(site: Site) -> None:
    """All of its questions keep their keys."""
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    channel = gateway.channel(check=park_when(site))
    keys = []
    for _ in range(2):
        exchange = channel.open(deadline_s=NEVER)
        exchange.ask(asked([first], train_request()))
        exchange.ask(asked([second], train_request()))
        keys.append((first.hear_task().key, second.hear_task().key))
        park(site)
        with pytest.raises(Parked):
            exchange.next(until_s=WAIT_S)
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[0][1]


def test_a_question_that_all_have_answered_is_closed_when_another_is_put(site: Site) -> None:
    """So a long exchange does not keep a file open per question. An unanswered one stays open."""
    gateway = site.open()
    first, second = site.connected(gateway, 2)
    channel = gateway.channel()
    exchange = channel.open(deadline_s=NEVER)
    exchange.ask(asked([second], train_request()))
    second.hear_task()
    for round_num in range(1, 4):
        exchange.ask(asked([first], train_request(round_num)))
        first.answer(first.hear_task(), train_reply(1.0, round_num=round_num))
        assert read(exchange) == (0, 1.0)
        channel.forget(before_round=round_num + 1)
        exchange.ask({})
        assert first.hear_receipt().verdict == Receipt.ACCEPTED
    folders = sorted(path.name for path in (site.folder / "replies").iterdir())
    assert folders == ["TrainRequest-000000-0-0", "TrainRequest-000003-0-0"]
    exchange.close()


def test_receipts_outlive_a_restart(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request())
    task = member.hear_task()
    member.answer(task, train_reply(5.0))
    exchange.take()
    exchange.end()
    site.shut(gateway)
    gateway = site.open()
    member.connect(gateway, held=[task.key])
    assert member.hear_receipt().verdict == Receipt.ACCEPTED


def test_forgetting_keeps_the_last_round_and_those_to_come(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    channel = gateway.channel()
    for round_num in range(4):
        exchange = Collecting(channel, [member], train_request(round_num))
        member.answer(member.hear_task(), train_reply(5.0, round_num=round_num))
        exchange.take()
        exchange.end()
        assert member.hear_receipt().verdict == Receipt.ACCEPTED
    channel.forget(before_round=3)
    left = sorted(path.name for path in (site.folder / "replies").iterdir())
    assert left == ["TrainRequest-000002-0-0", "TrainRequest-000003-0-0"]


def test_rounds_are_forgotten_in_the_order_of_numbers(site: Site) -> None:
    """Round 1,000,000 comes before round 999,999 as text. A folder without a round is old."""
    channel = site.open().channel()
    names = [f"TrainRequest-{n:06d}-0-0" for n in (999_998, 999_999, 1_000_000)]
    for name in [*names, "TrainRequest"]:
        (site.folder / "replies" / name).mkdir(parents=True)
    channel.forget(before_round=1_000_000)
    assert sorted(path.name for path in (site.folder / "replies").iterdir()) == sorted(names[1:])


def test_only_a_leader_calls_a_reply_accepted(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request())
    task = member.hear_task()
    site.is_leader = False
    member.answer(task, train_reply(1.0))
    exchange.take()
    assert exchange.end() == 1
    with pytest.raises(ComeBackLater, match="on standby") as told:
        site.enrol("another").connect(gateway)
    assert 0.5 <= told.value.after_s < 2.5
    assert member.told.empty()
    site.is_leader = True
    assert member.hear_receipt().verdict == Receipt.ACCEPTED


def test_only_exchanges_that_were_held_wait_for_a_leader_to_be_answered(site: Site) -> None:
    """Otherwise a client could invent any number of exchanges."""
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request(round_num=5))
    task = member.hear_task()
    member.answer(task, Failure("battery low"))
    exchange.take()
    exchange.end()
    assert member.hear_receipt().verdict == Receipt.ACCEPTED
    site.is_leader = False
    made_up = wire_pb2.Task()
    made_up.CopyFrom(task)
    made_up.key.round_num = 4
    for each in (made_up, task):
        member.answer(each, Failure("battery low"))
    wait_until(lambda: gateway.counters.messages >= 3)
    site.is_leader = True
    assert member.hear_receipt().key == task.key


def test_evaluations_leave_nothing_on_the_disk(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    request = EvaluateRequest(round_num=3, tensors=train_request().tensors)
    exchange = Collecting(gateway.channel(), [member], request)
    reply = EvaluateReply(round_num=3, num_examples=2, metrics={"loss": 0.5})
    member.answer(member.hear_task(), reply)
    arrived = exchange.take()[1]
    assert isinstance(arrived, EvaluateReply)
    assert arrived.metrics == reply.metrics
    assert exchange.end() == 1
    assert member.hear_receipt().verdict == Receipt.ACCEPTED
    wait_until(lambda: not list((site.folder / "passing").glob("*/EvaluateRequest-*")))
    assert not list((site.folder / "replies").glob("*"))


def test_a_model_is_measured_in_the_attempt_that_has_made_it(site: Site) -> None:
    """A reply about the model of a repeated attempt belongs to another exchange."""
    (member,) = site.connected(site.open(), 1)
    channel = site.gateways[0].channel()
    attempts = []
    for request in (
        EvaluateRequest(round_num=3, tensors=train_request().tensors),
        train_request(3, attempt=2),
        EvaluateRequest(round_num=4, tensors=train_request().tensors),
        EvaluateRequest(round_num=5, tensors=train_request().tensors),
    ):
        exchange = Collecting(channel, [member], request)
        task = member.hear_task()
        attempts.append(task.key.attempt)
        member.answer(task, Failure("battery low"))
        exchange.take()
        exchange.end()
        assert member.hear_receipt().verdict == Receipt.ACCEPTED
    assert attempts == [0, 2, 2, 0]


def test_a_coordinator_that_was_taken_over_takes_no_request_away(
    site: Site, tmp_path: Path
) -> None:
    old, new = site.open(), site.open()
    (member,) = site.connected(new, 1)
    Collecting(new.channel(), [member], train_request(size=1_000_000))
    task = member.hear_task()
    other = EvaluateRequest(round_num=1, tensors=train_request(size=2_000_000).tensors)
    Collecting(old.channel(), [member], other)
    wait_until(lambda: old.status()["exchange"] is not None)
    assert len(member.downloaded(task, tmp_path / "request")) == task.num_bytes
    site.open()  # a third one, which takes over, removes what both left
    assert not requests_on_disk(site)
    with pytest.raises(ConnectionError, match=r"UNAVAILABLE.*try again later"):
        member.downloaded(task, tmp_path / "again")


@pytest.mark.parametrize("beat_s", [0.0, 2.0])
def test_a_download_comes_in_chunks_that_keep_no_beat_waiting_for_long(
    site: Site, beat_s: float
) -> None:
    """Without beats, chunks are larger. In both cases the download is complete from any offset."""
    gateway = site.open(beat_s=beat_s)
    (member,) = site.connected(gateway, 1)
    request = train_request(size=500_000)
    Collecting(gateway.channel(), [member], request)
    content, task = encode(request), member.hear_task()

    async def chunks(offset: int) -> list[bytes]:
        async with grpc.aio.insecure_channel(member.address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{wire.GATEWAY}/Download"
            )
            call = method(metadata=((NAME_METADATA, member.name),))
            asked = wire_pb2.DownloadRequest(digest=task.digest, offset=offset)
            await call.write(asked.SerializeToString())
            found = list[bytes]()
            while isinstance(message := await call.read(), bytes):
                found.append(wire_pb2.Chunk.FromString(message).data)
            return found

    for offset in (0, 12_345):
        found = member.loop.call(chunks(offset)).result(WAIT_S)
        assert b"".join(found) == content[offset:]
        assert {len(each) for each in found[:-1]} == {wire.download_chunk_bytes(beat_s)}


def test_a_client_that_is_revoked_gets_no_more_of_a_request(site: Site) -> None:
    gateway = site.open()
    member, watched = site.enrol("downloads"), site.enrol("watched").connect(gateway)
    member.address = gateway.address  # it has no session to cut
    request = train_request(size=5_000_000)
    Collecting(gateway.channel(), [member], request)
    wait_until(lambda: gateway.status()["exchange"] is not None)
    revoked = asyncio.Event()

    async def downloaded() -> tuple[int, grpc.StatusCode]:
        asked = wire_pb2.DownloadRequest(digest=compute_digest(encode(request)))
        # With an adaptive window, the whole request could already be in flight.
        fixed = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(member.address, fixed) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{wire.GATEWAY}/Download"
            )
            call = method(metadata=((NAME_METADATA, member.name),))
            await call.write(asked.SerializeToString())
            num_chunks = 0
            with suppress(grpc.aio.AioRpcError):
                while isinstance(await call.read(), bytes):
                    num_chunks += 1
                    await revoked.wait()
            return num_chunks, await call.code()

    downloading = member.loop.call(downloaded())
    wait_until(lambda: gateway.counters.downloads == 1)
    site.registry.revoke(member.name)
    site.registry.revoke(watched.name)
    assert watched.hear() is None
    member.loop.post(revoked.set)
    num_chunks, code = downloading.result(WAIT_S)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert num_chunks < 20


def test_a_client_that_is_revoked_within_an_upload_is_heard_no_further(site: Site) -> None:
    """Not even the bytes that would complete it. Control: the same parts are a reply above."""
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(), [member], train_request(size=1_000_000))
    data = encode(train_reply(7.0, size=1_000_000))[: wire.CHUNK_BYTES + 1]
    signed = envelope(member.hear_task(), data, client_id=0, identity=member.identity)
    revoked = asyncio.Event()
    uploading = member.loop.call(upload_parts(member, signed, data, half_until=revoked))
    wait_until(lambda: gateway.counters.uploads == 1)
    site.registry.revoke(member.name)
    assert member.hear() is None
    member.loop.post(revoked.set)
    assert uploading.result(WAIT_S) == (0, grpc.StatusCode.UNAUTHENTICATED)
    assert exchange.take()[1] == Failure("this client was revoked")


def test_a_round_does_not_wait_for_a_client_that_is_revoked(site: Site) -> None:
    """Nor does the next process that opens it. What a client sent before counts."""
    gateway = site.open()
    members = site.connected(gateway, 2)
    collecting = Collecting(gateway.channel(), members, train_request())
    members[1].answer(members[1].hear_task(), train_reply(7.0))
    for member in members:
        site.registry.revoke(member.name)
    failed = (0, Failure("this client was revoked"))
    assert collecting.take()[0] == 1
    assert collecting.next() == failed
    site.shut(gateway)
    again = Collecting(site.open().channel(), members, train_request())
    assert again.take()[0] == 1
    assert again.take() == failed
    assert again.end() == 2


def test_a_download_that_is_called_off_closes_no_file_that_is_still_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    Collecting(gateway.channel(), [member], train_request(size=1_000_000))
    task = member.hear_task()
    begun, read = Queue[int](), Queue[int]()
    go_on, closed = threading.Event(), threading.Event()
    read_at, close = PositionedFile.read_at, PositionedFile.close

    def slowly(file: PositionedFile, num_bytes: int, offset: int) -> bytes:
        begun.put(file.fileno())
        read.put(file.fileno())
        assert go_on.wait(WAIT_S)
        return read_at(file, num_bytes, offset)

    def noting(file: PositionedFile) -> None:
        if file.fileno() in read.queue:
            closed.set()
        close(file)

    async def call_off() -> None:
        async with grpc.aio.insecure_channel(member.address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{wire.GATEWAY}/Download"
            )
            call = method(metadata=((NAME_METADATA, member.name),))
            asked = wire_pb2.DownloadRequest(digest=task.digest)
            await call.write(asked.SerializeToString())
            await asyncio.to_thread(begun.get, timeout=WAIT_S)
            call.cancel()

    with monkeypatch.context() as patch:
        patch.setattr(PositionedFile, "read_at", slowly)
        patch.setattr(PositionedFile, "close", noting)
        member.loop.call(call_off()).result(WAIT_S)
        assert not closed.wait(0.5)
        go_on.set()
        assert closed.wait(WAIT_S)


def test_a_gateway_that_stops_closes_no_file_that_is_still_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop cancels all waiting tasks, but a write in a thread continues."""
    monkeypatch.setattr(gateway_server, "_STOP_S", 0.0)
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    Collecting(gateway.channel(), [member], train_request(size=1_000_000))
    data = encode(train_reply(7.0, size=1_000_000))
    signed = envelope(member.hear_task(), data, client_id=0, identity=member.identity)
    write, close, stop = PartialUpload.write, PartialUpload.close, LoopThread.stop
    begun, stopping, go_on, closed = (threading.Event() for _ in range(4))
    written: Future[int] = Future()

    def slowly(upload: PartialUpload, *chunks: bytes | memoryview) -> None:
        if chunks and not begun.is_set():
            begun.set()
            assert go_on.wait(WAIT_S)
            try:
                write(upload, *chunks)
            except ValueError as error:
                written.set_exception(error)
            else:
                written.set_result(upload.offset)

    def noting(upload: PartialUpload) -> None:
        closed.set()
        close(upload)

    def telling(loop: LoopThread) -> None:
        stopping.set()
        stop(loop)

    monkeypatch.setattr(PartialUpload, "write", slowly)
    monkeypatch.setattr(PartialUpload, "close", noting)
    monkeypatch.setattr(LoopThread, "stop", telling)
    member.loop.call(upload_parts(member, signed, data))
    assert begun.wait(WAIT_S)
    shutting = threading.Thread(target=site.shut, args=(gateway,))
    shutting.start()
    assert stopping.wait(WAIT_S)
    assert not closed.wait(1.0)
    go_on.set()
    assert written.result(WAIT_S) > 0
    shutting.join(WAIT_S)
    assert closed.is_set()


def test_two_exchanges_of_a_kind_have_two_keys(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    channel = gateway.channel()
    keys = []
    for _ in range(2):
        exchange = Collecting(channel, [member], train_request())
        task = member.hear_task()
        keys.append(task.key.exchange)
        member.answer(task, Failure("battery low"))
        assert exchange.take()[1] == Failure("battery low")
        exchange.end()
        assert member.hear_receipt().verdict == Receipt.ACCEPTED
    assert keys == [0, 1]


def test_clients_are_available_while_they_are_connected_and_eligible(site: Site) -> None:
    gateway = site.open()
    channel = gateway.channel()
    first, second = site.connected(gateway, 2)
    third = site.enrol("toaster").connect(gateway, device="toaster")
    assert channel.available() == (0, 1)
    assert gateway.status()["connected"] == 3
    third.say(wire_pb2.FromClient(eligibility=wire_pb2.Eligibility(device="cpu")))
    channel.wait_for(3, never)
    second.disconnect()
    wait_until(lambda: channel.available() == (0, third.client_id))
    with pytest.raises(Parked):
        channel.wait_for(3, parking)
    assert first.told.empty()


def test_a_sampler_knows_tags_and_reported_numbers_of_examples(site: Site) -> None:
    """Nothing of a client that is not enrolled, and no number of one that is not connected."""
    gateway = site.open()
    first = site.enrol("first", tags=["country=ch", "site=a=b"])
    second, third = site.enrol("second", tags=["country=fr"]), site.enrol("third")
    first.connect(gateway, num_examples=250)
    second.connect(gateway, num_examples=2**64 - 1)
    ids = np.asarray([third.client_id, first.client_id, second.client_id, 99], np.int64)
    assert gateway.num_examples(ids).tolist() == [0, 250, 2**40, 0]
    wait_until(lambda: gateway.groups(ids, by="country") == ["", "ch", "fr", ""])
    assert gateway.groups(ids, by="site") == ["", "a=b", "", ""]


@pytest.mark.slow
def test_who_is_connected_and_what_clients_say_is_written_down(site: Site) -> None:
    """A client that left keeps its record. A huge number is no error. A look is not recorded."""
    gateway = site.open()
    first, second, looker = (site.enrol(name) for name in ("first", "second", "looker"))
    first.connect(gateway, num_examples=250)
    second.connect(gateway, num_examples=2**64 - 1)
    looker.connect(gateway, only_looks=True)
    wait_until(lambda: len(site.registry.contacts()) == 2)
    found = {each.client_id: each for each in site.registry.contacts()}
    assert found.keys() == {first.client_id, second.client_id}
    contact = found[ClientId(first.client_id)]
    assert contact.is_connected
    assert (contact.software, contact.num_examples) == ("fedlearn of the tests", 250)
    assert contact.seen_utc >= "2026"
    first.disconnect()
    wait_until(lambda: [each.is_connected for each in site.registry.contacts()] == [False, True])
    assert site.registry.contacts()[0].num_examples == 250


def test_after_a_crash_only_those_who_come_back_are_connected(site: Site) -> None:
    """A server that does not lead writes nothing; an orderly stop marks all as disconnected."""
    gone = Contact(
        client_id=ClientId(7),
        is_connected=True,
        seen_utc="2026-01-02T03:04:05Z",
        software="",
        num_examples=0,
    )
    site.registry.keep_contacts([gone], are_all=False)
    site.is_leader = False
    gateway = site.open()
    assert site.registry.contacts() == [gone]
    site.is_leader = True
    (member,) = site.connected(gateway, 1)
    wait_until(lambda: len(site.registry.contacts()) == 2)
    assert [each.is_connected for each in site.registry.contacts()] == [True, False]
    assert site.registry.contacts()[1].seen_utc == gone.seen_utc
    site.shut(gateway)
    assert not any(each.is_connected for each in site.registry.contacts())
    member.disconnect()


def test_a_new_session_takes_the_place_of_the_old_one(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    again = Member(member.name, member.client_id, member.identity, member.loop).connect(gateway)
    assert member.hear() is None
    assert gateway.status()["connected"] == 1
    exchange = Collecting(gateway.channel(), [again], train_request())
    again.answer(again.hear_task(), train_reply(1.0))
    exchange.take()
    assert exchange.end() == 1


def test_more_clients_than_the_gateway_holds_come_back_later(site: Site) -> None:
    gateway = site.open(replace(SETTINGS, max_connected=2, come_back_s=10.0))
    site.connected(gateway, 2)
    surplus = site.enrol("surplus").connect(gateway)
    told = surplus.hear()
    assert told is not None
    assert 10.0 <= told.come_back.after_s <= 12.0
    assert surplus.hear() is None
    assert gateway.channel().available() == (0, 1)


def test_a_client_too_many_costs_no_look_at_all_that_are_there() -> None:
    clock, looked = VirtualClock(), list[ClientId]()
    sessions = Sessions(
        settings=replace(SETTINGS, max_connected=1000, come_back_s=60.0),
        counters=GatewayCounters(),
        clock=clock,
        pace=Pace(clock, share=0.5),
    )

    def is_needed(client_id: ClientId) -> bool:
        looked.append(client_id)
        return client_id == 0

    sessions.is_needed = is_needed
    registry = FreshRegistry(clock)
    client = registry.redeem(
        "client",
        registry.invite("client", tags=(), valid_s=60.0),
        identity_key=Identity.create().public_key,
        certify=lambda _: (b"", "", "2999-01-01T00:00:00Z"),
    )

    def enters(number: int) -> bool:
        newcomer = replace(client, client_id=ClientId(number))
        return sessions.enter(ServerSession(newcomer, wire_pb2.Hello(), since_s=clock.now_s()))

    assert all(enters(number) for number in range(1000))
    assert not enters(1000)
    assert looked == [1000]  # all have been connected for less than their minimum
    clock.sleep(60.0)
    assert enters(1001)
    assert looked[1:] == [0, 1]
    assert sessions.find(ClientId(1)) is None


def test_a_client_whose_reply_is_awaited_is_let_in_whoever_is_there(site: Site) -> None:
    gateway = site.open(replace(SETTINGS, max_connected=1, come_back_s=NEVER))
    site.connected(gateway, 1)
    needed = site.enrol("needed")
    exchange = Collecting(gateway.channel(), [needed], train_request())
    wait_until(lambda: gateway.status()["exchange"] is not None)
    needed.connect(gateway)
    needed.answer(needed.hear_task(), train_reply(1.0))
    exchange.take()
    assert exchange.end() == 1


def test_nobody_is_sent_away_while_a_crashed_exchange_waits_for_its_cohort(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    exchange = Collecting(gateway.channel(check=park_when(site)), [member], train_request())
    key = member.hear_task().key
    park(site)
    with pytest.raises(Parked):
        exchange.end()
    site.shut(gateway)
    gateway = site.open(replace(SETTINGS, max_connected=1, come_back_s=NEVER))
    site.connected(gateway, 2)
    member.connect(gateway)
    Collecting(gateway.channel(), [member], train_request(), deadline_s=60.0)
    assert member.hear_task().key == key


class DefectiveRegistry(FreshRegistry):
    """A registry that raises an unexpected error once it is broken."""

    is_broken = False

    def revision(self) -> int:
        if self.is_broken:
            raise ZeroDivisionError("a defect")
        return super().revision()


def test_a_gateway_that_goes_blind_says_so(site: Site) -> None:
    """Else revoked clients would still be served. Control: a stopped server reports nothing."""
    registry = DefectiveRegistry(SystemClock())
    site.registry = registry
    told = Queue[StoreError]()
    stopped = site.open()
    stopped.on_polling_failure(told.put)
    site.shut(stopped)
    site.open().on_polling_failure(told.put)
    registry.is_broken = True
    error = told.get(timeout=WAIT_S)
    assert "which clients are revoked (ZeroDivisionError" in str(error)
    assert told.empty()


def test_stopping_asks_clients_to_come_back(site: Site) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)
    site.shut(gateway, grace_s=WAIT_S)
    told = member.hear()
    assert told is not None
    assert 0.0 < told.come_back.after_s <= 2.5  # half a second and up to two more
    assert member.hear() is None


class Steady(Pace):
    """A pace whose event loop is never late, however busy the machine is."""

    def record_lateness(self, *, late_s: float) -> None:
        """Ignore the delay."""
        del late_s
        super().record_lateness(late_s=0.0)


def make_pace(clock: RealClock, *, rate_per_s: float) -> Pace:
    """Return a pace with measurements that give this rate."""
    pace = Steady(clock, share=0.5)
    pace.record_cost(cpu_s=0.5 * 100 / rate_per_s, num_check_ins=100)
    assert pace.rate_per_s == pytest.approx(rate_per_s)
    return pace


def test_clients_come_back_as_many_a_second_as_the_coordinator_can_take(site: Site) -> None:
    """Each gets its own time; a third of the rate is left for other clients."""
    gateway = site.open(pace=make_pace(SystemClock(), rate_per_s=3.0))
    gateway.set_num_wanted(8)
    members = site.connected(gateway, 8)
    site.shut(gateway, grace_s=WAIT_S)
    told = [each for each in (member.hear() for member in members) if each is not None]
    after_s = sorted(each.come_back.after_s for each in told)
    assert len(set(after_s)) == 8
    assert 0.5 < after_s[0] < 3.0
    assert 3.0 < after_s[-1] < 6.0


def told_to_wait(member: Member, gateway: Gateway) -> float | None:
    """Let a client connect; return how long it should stay away, if it is sent away."""
    try:
        member.connect(gateway)
    except ComeBackLater as later:
        return later.after_s
    return None


def test_who_comes_too_soon_comes_again_unless_it_is_needed(site: Site) -> None:
    """A client is needed by an open round, or by one that waits for more clients."""
    gateway = site.open(pace=make_pace(SystemClock(), rate_per_s=1.0))
    needed, *others = [site.enrol(f"client-{number}") for number in range(12)]
    Collecting(gateway.channel(), [needed], train_request())
    wait_until(lambda: gateway.status()["exchange"] is not None)
    after_s = [each for each in (told_to_wait(other, gateway) for other in others) if each]
    assert len(after_s) >= 5
    assert 0.5 < min(after_s) < max(after_s) < 20.0
    assert gateway.counters.paced == len(after_s)
    needed.connect(gateway)
    needed.hear_task()
    gateway.set_num_wanted(12)
    late = site.enrol("late").connect(gateway)
    assert late.client_id in gateway.channel().available()


def test_who_comes_again_before_its_time_takes_no_second_place(site: Site) -> None:
    """Nor is its time postponed further and further."""
    gateway = site.open(pace=make_pace(SystemClock(), rate_per_s=1.0))
    impatient = site.enrol("impatient")
    after_s = [each for each in (told_to_wait(impatient, gateway) for _ in range(15)) if each]
    assert len(after_s) >= 6
    assert max(after_s) < 4.0


def test_the_status_says_how_far_each_client_is(site: Site) -> None:
    gateway = site.open()
    asked, connected, training = site.enrol("asked"), *site.connected(gateway, 2)
    Collecting(gateway.channel(), [asked, connected, training], train_request(), deadline_s=60.0)
    connected.hear_task()
    key = training.hear_task().key
    progress = wire_pb2.Progress(key=key, phase=wire_pb2.Progress.TRAINING)
    training.say(wire_pb2.FromClient(progress=progress))
    wait_until(lambda: phase_of(gateway, training) == "training")
    assert phase_of(gateway, connected) == "connected"
    assert phase_of(gateway, asked) == "asked"


def test_without_certificates_the_gateway_opens_on_the_loopback_only(site: Site) -> None:
    gateway = Gateway(
        GatewaySettings(address="0.0.0.0:0"),
        registry=site.registry,
        runs=[
            RunTerms(
                run_id=RUN_ID,
                uploads_dir=site.folder,
                eligible=lambda *_: True,
                is_leader=lambda: True,
            )
        ],
        authority=None,
        is_leader=lambda: True,
        clock=SystemClock(),
    )
    with pytest.raises(DeploymentError, match="loopback"):
        gateway.start()


def test_a_port_that_is_taken_is_named(site: Site) -> None:
    taken = site.open().address
    gateway = Gateway(
        GatewaySettings(address=taken),
        registry=site.registry,
        runs=[
            RunTerms(
                run_id=RUN_ID,
                uploads_dir=site.folder / "other",
                eligible=lambda *_: True,
                is_leader=lambda: True,
            )
        ],
        authority=None,
        is_leader=lambda: True,
        clock=SystemClock(),
    )
    with pytest.raises(DeploymentError, match=taken):
        gateway.start()


def test_a_full_disk_refuses_a_reply_that_comes_again_later(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.open()
    small, large = site.connected(gateway, 2)
    exchange = Collecting(gateway.channel(), [small, large], train_request(size=1_000_000))
    task = small.hear_task()
    path = tmp_path / "reply"
    path.write_bytes(encode(train_reply(2.0, size=1_000_000)))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        small.answer(task, train_reply(1.0))
        assert small.hear() is None  # its session has ended, and it should try again
        with pytest.raises(ConnectionError, match=r"RESOURCE_EXHAUSTED.*try again"):
            large.upload(task, path).result(WAIT_S)
    small.connect(gateway)
    small.answer(small.hear_task(), train_reply(1.0))
    assert exchange.take()[0] == small.client_id
    assert small.hear_receipt().verdict == Receipt.ACCEPTED
    again = large.upload(task, path)
    assert value_of(exchange.take()[1]) == 2.0
    assert again.result(WAIT_S).verdict == Receipt.ACCEPTED
    assert exchange.end() == 2
    assert gateway.counters.disk_full == 2


def test_what_a_round_waits_for_space_for_its_request_is_no_time_of_its_clients(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.open(clock=VirtualClock())
    (member,) = site.connected(gateway, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        request = train_request(size=1_000_000)
        Collecting(gateway.channel(), [member], request, deadline_s=60.0)
        wait_until(lambda: gateway.counters.disk_full > 2)
        assert open_files_below(site.folder) == []
    assert member.hear_task().remaining_s == 60.0


def test_a_round_that_waits_for_space_is_counted_and_begins_once_there_is_some(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.open()
    (member,) = site.connected(gateway, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        exchange = Collecting(gateway.channel(), [member], train_request())
        wait_until(lambda: gateway.counters.disk_full > 1)
    member.answer(member.hear_task(), train_reply(1.0))
    assert exchange.take()[0] == member.client_id
    assert exchange.end() == 1


def exchange_of(gateway: Gateway) -> Mapping[str, object]:
    exchange = gateway.status()["exchange"]
    assert isinstance(exchange, dict)
    return exchange


def phase_of(gateway: Gateway, member: Member) -> object:
    clients = gateway.status()["clients"]
    assert isinstance(clients, dict)
    return clients[str(member.client_id)]["phase"]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has made the condition true."""
    waited, clock = threading.Event(), SystemClock()
    end_s = clock.now_s() + WAIT_S
    while not condition():
        assert clock.now_s() < end_s
        waited.wait(0.01)


def never() -> None:
    """A check that never stops the exchange."""


def parking() -> None:
    raise Parked("told to stop")


def park_when(site: Site) -> Callable[[], None]:
    """Return a check that parks once :func:`park` was called."""

    def check() -> None:
        if (site.folder / "park").exists():
            (site.folder / "park").unlink()
            raise Parked("told to stop")

    return check


def park(site: Site) -> None:
    (site.folder / "park").touch()
