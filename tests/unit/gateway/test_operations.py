"""Operators at a real gateway: whose certificate opens which door, and what is recorded."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from fedlearn.core.clock import SystemClock
from fedlearn.deployment.operator_file import OperatorFile
from fedlearn.deployment.remote import RemoteDesk, renew
from fedlearn.deployment.run_orders import ListQueue
from fedlearn.errors import ConfigError, ConnectionRefused, DeploymentError, NotPermitted
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.operations import MAX_COMMAND_BYTES, OperatorAccess
from fedlearn.identity.identity import Identity, validity_unix_s
from fedlearn.identity.operators import CommandAnswer, OperatorRecord
from fedlearn.identity.profiles import Profile
from fedlearn.identity.roles import Grant, Role
from fedlearn.store.audit import read_entries
from fedlearn.store.engine import open_engine
from fedlearn.store.operators import StoredOperators
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import Base
from fedlearn.store.studies import NewStudy, StudyStore
from fedlearn.testing.local_gateway import LocalGateway
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.grpc_client import ComeBackLater, Credentials, GatewayConnection, enrol

T = TypeVar("T")
HELLO = wire_pb2.Hello(protocol=wire.PROTOCOL, software="test")


class ShiftedClock(SystemClock):
    """A real clock whose time of day can be moved."""

    ahead_s = 0.0

    def unix_s(self) -> float:
        return super().unix_s() + self.ahead_s


@dataclass
class Given:
    """Commands that were let in; they are only written down.

    Attributes:
        holds: If set, commands wait for it.
    """

    commands: list[tuple[str, bytes, str]] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    holds: threading.Event | None = None

    files: list[bytes] = field(default_factory=list)

    def expect_file(self, who: OperatorRecord, order: bytes, origin: str) -> None:
        if order == b"not permitted":
            raise NotPermitted(f"{who.name} may not send files from {origin}")

    def carry_out(
        self, who: OperatorRecord, order: bytes, origin: str, file: Path | None
    ) -> CommandAnswer:
        self.commands.append((who.name, order, origin))
        if file is not None:
            self.files.append(file.read_bytes())
            return CommandAnswer(b"{}", self.files[-1][::-1])
        self.begun.release()
        if self.holds is not None:
            self.holds.wait(60.0)
        if order == b"wrong":
            raise ConfigError("num_rounds is wrong")
        if order == b'{"command":"queue"}':
            return CommandAnswer(b"{}\n")
        if order == b"exit":
            raise SystemExit(3)
        return CommandAnswer(order * 2)


@dataclass
class Door:
    """A gateway for operators."""

    gateway: LocalGateway
    operators: StoredOperators
    database: Database
    clock: ShiftedClock
    given: Given
    loop: LoopThread
    identities: dict[str, Identity] = field(default_factory=dict)

    def invite(self, name: str) -> Credentials:
        """Return what an invitation holds besides the token."""
        pem, key = self.gateway.authority.certify_invitation(
            name, valid_s=60.0, profile=Profile.OPERATOR_INVITATION
        )
        return self.show(pem, key)

    def show(self, certificate_pem: bytes, key_pem: bytes) -> Credentials:
        ca_pem = self.gateway.authority.ca_pem
        return Credentials(ca_pem=ca_pem, certificate_pem=certificate_pem, tls_key_pem=key_pem)

    def join(
        self, name: str, token: bytes = b"", *, showing: Credentials | None = None
    ) -> Credentials:
        """Let an operator join; without a token, it is invited first."""
        grants = [Grant(Role.VIEWER, "a")]
        token = token or self.operators.invite(name, grants=grants, valid_s=60.0)
        identity = self.identities[name] = Identity.create()
        request = wire_pb2.OperatorJoinRequest(
            name=name, token=token, csr_pem=identity.csr_pem(name)
        )
        reply = self.call(showing or self.invite(name), lambda each: each.join_operators(request))
        return self.show(reply.certificate_pem, identity.tls_key_pem)

    def give(self, showing: Credentials, order: bytes = b"look", version: int = 1) -> bytes:
        command = wire_pb2.OperatorCommand(version=version, order=order)
        lines, _, ending = self.call(showing, lambda each: each.give(command))
        return f"{ending.error}: {ending.message}".encode() if ending.error else lines

    def call(self, showing: Credentials, what: Callable[[GatewayConnection], Awaitable[T]]) -> T:
        async def called() -> T:
            async with GatewayConnection(self.gateway.gateway.address, showing) as connection:
                return await what(connection)

        return self.loop.call(called()).result(60.0)

    def refusals(self) -> list[tuple[str, str]]:
        with self.database.reading() as session:
            found = [each for each in read_entries(session) if each.action == "operator.refused"]
        assert all(each.origin.startswith("ipv4:127.0.0.1:") for each in found)
        return [(each.actor, each.details) for each in found]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    clock = ShiftedClock()
    engine = open_engine(sqlite_url(tmp_path / "runs.db"))
    Base.metadata.create_all(engine)  # ten times faster than running the migrations
    with Database(engine, runs_dir=tmp_path) as database:
        StudyStore(database, clock).create(NewStudy(name="a"))
        operators, given = StoredOperators(database, clock), Given()
        access = OperatorAccess(registry=operators, orders=given, incoming=tmp_path / "incoming")
        with LocalGateway(tmp_path / "gateway", clock=clock, operators=access) as gateway:
            loop = LoopThread("operators")
            yield Door(gateway, operators, database, clock, given, loop)
            loop.stop()


def test_an_operator_joins_and_gives_commands_under_its_name(door: Door) -> None:
    """Errors come back with their class; an exit inside a command ends nothing."""
    ann = door.join("ann")
    assert door.give(ann) == b"looklook"
    name, order, origin = door.given.commands[0]
    assert (name, order) == ("ann", b"look")
    assert origin.startswith("ipv4:127.0.0.1:")
    assert door.give(ann, b"wrong") == b"ConfigError: num_rounds is wrong"
    assert b"SystemExit" in door.give(ann, b"exit")
    large = bytes(wire.CHUNK_BYTES // 4 + 1) * 1
    assert door.give(ann, large) == large * 2
    assert door.refusals() == []


def test_no_certificate_opens_the_door_of_another_kind(door: Door, tmp_path: Path) -> None:
    """Controls: each opens its own."""
    ann, invited = door.join("ann"), door.invite("bob")
    invitation = door.gateway.create_invitation("clinic-a")
    identity = Identity.create()
    enrolled = door.loop.call(enrol(door.gateway.gateway.address, invitation, identity))
    pem, _ = enrolled.result(60.0)
    client = door.show(pem, identity.tls_key_pem)
    client_invitation = Credentials.of(invitation)
    assert client_invitation is not None
    for credentials in (client, client_invitation, invited):
        with pytest.raises(ConnectionRefused, match="only an operator's certificate"):
            door.give(credentials)
    for credentials in (client, client_invitation):
        with pytest.raises(ConnectionRefused, match="join with the invitation of an operator"):
            door.join("bob", showing=credentials)
    with pytest.raises(ConnectionRefused, match="renews itself alone"):
        door.join("bob", showing=ann)

    async def connect(connection: GatewayConnection) -> int:
        async with connection.session(HELLO) as session:
            return session.welcome.client_id

    assert door.call(client, connect) == 0
    for credentials in (ann, invited):
        with pytest.raises(ConnectionRefused, match="not enrolled"):
            door.call(credentials, connect)
        with pytest.raises(ConnectionRefused, match="with which no client enrols"):
            door.call(credentials, lambda each: each.enrol(wire_pb2.EnrolRequest(name="x")))
    assert door.give(ann) == b"looklook"
    assert [name for name, _, _ in door.given.commands] == ["ann"]


@pytest.mark.parametrize("fault", ["revoked", "expired", "older", "forgotten"])
def test_a_certificate_that_was_good_is_refused_and_the_refusal_recorded(
    door: Door, fault: str
) -> None:
    """Control: it was good."""
    ann = door.join("ann")
    assert door.give(ann) == b"looklook"
    if fault == "revoked":
        door.operators.revoke("ann")
    elif fault == "expired":
        door.clock.ahead_s = 366 * 86_400.0
    elif fault == "older":  # a copy of the old file, after the operator has joined again
        door.join("ann")
    else:  # the database is from a backup
        other = LocalGateway(door.gateway.folder, clock=door.clock)
        pem = other.authority.sign_operator(
            (identity := Identity.create()).csr_pem("zoe"), name="zoe", valid_days=1
        )
        ann, fault = door.show(pem, identity.tls_key_pem), "no operator zoe"
    with pytest.raises(ConnectionRefused, match=fault):
        door.give(ann)
    (actor, details) = door.refusals()[-1]
    assert actor == ("operator:zoe" if "zoe" in fault else "operator:ann")
    assert fault in details
    assert len(door.given.commands) == 1


def test_a_stolen_invitation_is_worth_nothing_without_its_token(door: Door) -> None:
    """Nor with the token of somebody else."""
    door.operators.invite("ann", grants=[Grant(Role.ADMIN, "*")], valid_s=60.0)
    bobs = door.operators.invite("bob", grants=[Grant(Role.VIEWER, "a")], valid_s=60.0)
    for token in (b"guess", bobs):
        with pytest.raises(ConnectionRefused, match="no invitation with this token"):
            door.join("ann", token)
    door.join("bob", bobs)
    with pytest.raises(ConnectionRefused, match="has been used"):
        door.join("bob", bobs)


def operator_file(door: Door, path: Path) -> OperatorFile:
    """Let ann join, and write her file."""
    ann = door.join("ann")
    assert ann.certificate_pem is not None
    file = OperatorFile(
        name="ann",
        coordinator=(door.gateway.gateway.address,),
        authority=ann.ca_pem.decode(),
        certificate=ann.certificate_pem.decode(),
        identity=door.identities["ann"].pem.decode(),
    )
    file.save(path)
    return file


def test_an_operator_renews_its_certificate_with_other_keys(door: Door, tmp_path: Path) -> None:
    """Also after a lost answer. A copy of the file before is worthless."""
    path = tmp_path / "ann.toml"
    before = operator_file(door, path)
    renewed = renew(path, address=None)
    assert renewed.identity != before.identity
    assert OperatorFile.load(path) == renewed
    assert list(RemoteDesk.open(path, address=None).carry_out(ListQueue())) != []
    copy = tmp_path / "copy.toml"
    before.save(copy)
    with pytest.raises(ConnectionRefused, match="this is an older certificate"):
        renew(copy, address=None)
    actor, details = door.refusals()[-1]
    assert actor == "operator:ann"
    assert "older certificate" in details
    # The answer to the renewal was lost: only the file with the new keys has been written.
    renewed.model_copy(update={"certificate": ""}).save(tmp_path / "copy.toml.renewing")
    again = renew(copy, address=None)
    assert again.identity == renewed.identity
    assert not (tmp_path / "copy.toml.renewing").exists()
    assert list(RemoteDesk.open(copy, address=None).carry_out(ListQueue())) != []
    door.operators.revoke("ann")
    with pytest.raises(ConnectionRefused, match="was revoked"):
        renew(copy, address=None)


def test_a_certificate_renews_itself_alone(door: Door) -> None:
    """Not another operator's, and not by an invitation's token or a client's certificate."""
    ann, bob = door.join("ann"), door.join("bob")
    token = door.operators.invite("carol", grants=[Grant(Role.ADMIN, "*")], valid_s=60.0)
    for showing, name, given in ((ann, "bob", b""), (ann, "carol", token), (bob, "ann", b"")):
        identity = Identity.create()
        request = wire_pb2.OperatorJoinRequest(
            name=name, token=given, csr_pem=identity.csr_pem(name)
        )
        with pytest.raises(ConnectionRefused, match="renews itself alone"):
            door.call(showing, partial(GatewayConnection.join_operators, request=request))
    assert door.give(ann) == door.give(bob) == b"looklook"


def test_an_expired_certificate_says_what_to_do(door: Door, tmp_path: Path) -> None:
    """Before anything is sent; in the last third of its time there is a warning."""
    path = tmp_path / "ann.toml"
    file = operator_file(door, path)
    begin_unix_s, end_unix_s = validity_unix_s(file.certificate.encode())
    with capture_logs() as lines:
        file.require_valid(path, now_unix_s=begin_unix_s + 1.0)
        assert lines == []
        file.require_valid(path, now_unix_s=end_unix_s - 1.0)
    assert [each["event"] for each in lines] == ["certificate_ends"]
    with pytest.raises(DeploymentError, match=r"cannot be renewed; ask an admin .*operator join"):
        file.require_valid(path, now_unix_s=end_unix_s)


def test_a_certificate_of_another_authority_is_not_heard(door: Door, tmp_path: Path) -> None:
    other = LocalGateway(tmp_path / "elsewhere").authority
    identity = Identity.create()
    pem = other.sign_operator(identity.csr_pem("ann"), name="ann", valid_days=1)
    door.join("ann")
    with pytest.raises((ConnectionError, ConnectionRefused)):
        door.give(door.show(pem, identity.tls_key_pem))
    assert door.given.commands == []


def test_a_flood_of_commands_is_refused_without_filling_the_log(door: Door) -> None:
    """One that is too large or of another version is refused, too."""
    ann = door.join("ann")
    with pytest.raises(ConnectionRefused, match="at most"):
        door.give(ann, bytes(MAX_COMMAND_BYTES + 1))
    with pytest.raises(ConnectionRefused, match="commands of version 2"):
        door.give(ann, version=2)
    door.operators.revoke("ann")
    refused = 0
    for _ in range(30):
        try:
            door.give(ann)
        except ConnectionRefused:
            refused += 1
        except ComeBackLater:
            break
    else:
        pytest.fail("the flood had no end")
    assert len(door.refusals()) == refused
    assert door.given.commands == []


def send(door: Door, showing: Credentials, order: bytes, content: bytes, num_bytes: int) -> bytes:
    """Give a command with a file that is said to have this size; return the answer's file."""
    command = wire_pb2.OperatorCommand(version=1, order=order, file_bytes=num_bytes)
    reply = door.call(showing, lambda each: each.give(command, content=content))
    if reply.ending.error:
        raise DeploymentError(f"{reply.ending.error}: {reply.ending.message}")
    return reply.file


def test_a_file_travels_with_a_command_and_another_one_with_its_answer(
    door: Door, tmp_path: Path
) -> None:
    """In parts. Nothing of it stays in the end."""
    ann, content = door.join("ann"), bytes(range(256)) * (wire.CHUNK_BYTES // 100)
    assert send(door, ann, b"look", content, len(content)) == content[::-1]
    assert door.given.files == [content]
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_file_that_may_not_come_is_not_received(door: Door, tmp_path: Path) -> None:
    """Its operator is told why, though it still sends. Also one of another size than it says."""
    ann, content = door.join("ann"), bytes(32 << 20)
    with pytest.raises(DeploymentError, match="NotPermitted: ann may not send files"):
        send(door, ann, b"not permitted", content, len(content))
    with pytest.raises(DeploymentError, match=f"at most {wire.MAX_FILE_BYTES} are taken"):
        send(door, ann, b"look", content, wire.MAX_FILE_BYTES + 1)
    for num_bytes in (10, 30):
        with pytest.raises(ConnectionRefused, match=f"not the {num_bytes} that it has"):
            send(door, ann, b"look", bytes(20), num_bytes)
    assert door.given.files == []
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_fifth_command_of_an_operator_at_once_is_refused(door: Door) -> None:
    ann, bob, released = door.join("ann"), door.join("bob"), threading.Event()
    door.given.holds = released
    with ThreadPoolExecutor(6) as pool:
        try:
            waiting = [pool.submit(door.give, ann) for _ in range(5)]
            done, _ = wait(waiting, timeout=60.0, return_when=FIRST_COMPLETED)
            (refused,) = done
            with pytest.raises(ComeBackLater, match="4 commands at work"):
                refused.result()
            of_bob = pool.submit(door.give, bob)
        finally:
            released.set()
        assert of_bob.result() == b"looklook"
        assert [each.result() for each in waiting if each is not refused] == [b"looklook"] * 4


def test_a_gateway_that_no_operator_may_reach_has_no_such_service(tmp_path: Path) -> None:
    with LocalGateway(tmp_path) as gateway:
        identity = Identity.create()
        pem = gateway.authority.sign_operator(identity.csr_pem("ann"), name="ann", valid_days=1)
        ca_pem = gateway.authority.ca_pem
        showing = Credentials(ca_pem=ca_pem, certificate_pem=pem, tls_key_pem=identity.tls_key_pem)

        async def give() -> None:
            async with GatewayConnection(gateway.gateway.address, showing) as connection:
                await connection.give(wire_pb2.OperatorCommand(version=1))

        with pytest.raises(ConnectionRefused):
            asyncio.run(give())
