"""A run with a bundle asks only clients that run it, and counts no reply of other code."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Failure
from fedlearn.gateway.exchanges import OfferedBundle
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.server import Gateway
from fedlearn.gateway.upload_store import Draft, LoggedReply, OpeningRecord, ReplyLog
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply
from tests.processes import until
from tests.scripted_clients import RUN_ID, Collecting, Member, Site, train_reply, train_request

SHA256 = sha256(b"a bundle").digest()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    loop = LoopThread("clients")
    site = Site(tmp_path / "spool", loop, FreshRegistry(SystemClock()))
    yield site
    for gateway in site.gateways:
        gateway.stop(grace_s=0.0)
    loop.stop()


@pytest.fixture
def gateway(site: Site, tmp_path: Path) -> Gateway:
    """A gateway with one run, which has a bundle."""
    path = tmp_path / "trainer.bundle"
    path.write_bytes(b"a bundle")
    opened = site.open(run_ids=())
    opened.open_run(replace(site.terms(RUN_ID), bundle=OfferedBundle.of(path)))
    return opened


def _report(member: Member, *, runs: bool, reason: str = "") -> None:
    reports = [wire_pb2.BundleReport(sha256=SHA256, runs=runs, reason=reason)]
    member.say(wire_pb2.FromClient(eligibility=wire_pb2.Eligibility(bundles=reports)))


def _answer(member: Member, task: wire_pb2.Task, trainer: str, *, signed: str) -> None:
    data = encode(train_reply(1.0))
    digest = compute_digest(data)
    content = encode_signed_reply(
        task.key, client_id=member.client_id, digest=digest, trainer=signed
    )
    envelope = wire_pb2.Envelope(
        key=task.key,
        digest=digest,
        num_bytes=len(data),
        signature=member.identity.sign(content),
        trainer=trainer,
    )
    member.say(wire_pb2.FromClient(result=wire_pb2.Result(envelope=envelope, data=data)))


def test_only_clients_that_run_the_bundle_are_asked(
    site: Site, gateway: Gateway, tmp_path: Path
) -> None:
    """It is announced and downloaded by everyone; the others' reasons are in the status."""
    channel = gateway.channel()
    willing, unwilling = (
        site.enrol(name).connect(gateway, takes_bundles=True) for name in ("a", "b")
    )
    for member in (willing, unwilling):
        told = member.hear()
        assert told is not None
        notice = told.bundle
        assert (notice.run_id, notice.sha256) == (RUN_ID, SHA256)
        task = wire_pb2.Task(digest=notice.digest, num_bytes=notice.num_bytes)
        assert member.downloaded(task, tmp_path / "downloaded") == b"a bundle"
    assert channel.available() == ()
    _report(unwilling, runs=False, reason="the owner has refused it")
    _report(willing, runs=True)
    channel.wait_for(1, lambda: None)
    assert list(channel.available()) == [willing.client_id]
    assert gateway.status()["without_bundle"] == {"b": "the owner has refused it"}


def test_only_clients_of_the_study_are_told_its_bundle(site: Site, tmp_path: Path) -> None:
    """One that is invited later is told then, once."""
    (tmp_path / "trainer.bundle").write_bytes(b"a bundle")
    bundle, members = OfferedBundle.of(tmp_path / "trainer.bundle"), {"a"}
    gateway = site.open(run_ids=())
    gateway.open_run(replace(site.terms(RUN_ID), bundle=bundle, concerns=members.__contains__))
    told, later = (site.enrol(name).connect(gateway, takes_bundles=True) for name in ("a", "b"))
    heard = told.hear()
    assert heard is not None
    assert heard.bundle.sha256 == SHA256
    gateway.reconsider_clients()
    assert later.told.empty()
    members.add("b")
    gateway.reconsider_clients()
    heard = later.hear()
    assert heard is not None
    assert heard.bundle.sha256 == SHA256
    assert told.told.empty()


def test_a_client_without_a_trainer_is_asked_by_no_run_without_a_bundle(site: Site) -> None:
    """The status says why. Control: it is asked once it reports that it has one."""
    gateway = site.open()
    channel = gateway.channel()
    member = site.enrol("a").connect(gateway)
    assert list(channel.available()) == [member.client_id]
    only = wire_pb2.Eligibility(runs_only_bundles=True)
    member.say(wire_pb2.FromClient(eligibility=only))
    until(lambda: channel.available() == ())
    why = "it runs only bundles, and this run ships none"
    assert gateway.status()["without_bundle"] == {"a": why}
    member.say(wire_pb2.FromClient(eligibility=wire_pb2.Eligibility()))
    until(lambda: bool(channel.available()))
    assert gateway.status()["without_bundle"] == {}


@pytest.mark.parametrize("trainer", ["bundle", "site:" + "0" * 64, ""])
def test_a_reply_of_other_code_is_a_failure(site: Site, gateway: Gateway, trainer: str) -> None:
    """With the reason. Control: one of the bundle counts, and what ran is known."""
    channel = gateway.channel()
    member = site.enrol("a").connect(gateway)
    _report(member, runs=True)
    channel.wait_for(1, lambda: None)
    collecting = Collecting(channel, [member], train_request())
    task = member.hear_task()
    assert task.bundle == SHA256
    right = f"bundle:{SHA256.hex()}"
    ran = right if trainer == "bundle" else trainer
    _answer(member, task, ran, signed=ran)
    _, reply = collecting.next()
    assert isinstance(reply, Failure) == (ran != right)
    if isinstance(reply, Failure):
        assert right in reply.reason
    assert channel.take_trainers() == ({(0, member.client_id): ran} if ran else {})
    assert channel.take_trainers() == {}


def test_what_ran_is_signed(site: Site, gateway: Gateway) -> None:
    """Nobody between client and coordinator can change it."""
    channel = gateway.channel()
    member = site.enrol("a").connect(gateway)
    _report(member, runs=True)
    channel.wait_for(1, lambda: None)
    Collecting(channel, [member], train_request())
    task = member.hear_task()
    _answer(member, task, f"bundle:{SHA256.hex()}", signed="")
    assert "signature" in member.hear_receipt().reason


@pytest.mark.parametrize("trainer", ["", "site:" + "0" * 64])
def test_a_log_keeps_what_ran(tmp_path: Path, trainer: str) -> None:
    """A process that reopens it finds the same reply."""
    opened = OpeningRecord(run_id=RUN_ID, opened_unix_s=1.0)
    reply = LoggedReply(ClientId(1), 0.5, compute_digest(b"hello"), 5, trainer=trainer)
    first = ReplyLog(tmp_path / "log", opened=opened, durable=True)
    (logged,) = first.append([Draft(reply, b"hello")])
    first.close(None)
    second = ReplyLog(tmp_path / "log", opened=opened, durable=True)
    (found,) = second.replies
    assert found == logged
    assert found.trainer == trainer
    assert bytes(second.read(found)) == b"hello"
    second.close(None)
