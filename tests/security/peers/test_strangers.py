"""Peers that reach a port but are not clients: refused and counted, and the round continues."""

import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from select import select

import grpc
import pytest
import structlog

from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConnectionRefused, EnrolmentRefused
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.telemetry import Snapshot, Telemetry
from fedlearn.identity.identity import Identity
from fedlearn.transport import wire_pb2
from fedlearn.transport.grpc_client import Credentials, GatewaySession, enrol
from tests.security.peers.harness import (
    HANDSHAKE_S,
    HELLO,
    IMPATIENT,
    PREFACE,
    WAIT_S,
    Peer,
    Site,
    address_of,
    client_hello,
    http2,
    is_ended,
    tls_context,
)


def connected(stack: ExitStack, address: str, num: int = 1) -> list[socket.socket]:
    target = address_of(address)
    return [stack.enter_context(socket.create_connection(target)) for _ in range(num)]


async def hang_up(session: GatewaySession) -> None:
    """Leave without another message."""


def test_an_expired_certificate_is_refused_before_anything_is_said(
    site: Site, tmp_path: Path
) -> None:
    """The certificate is of the server's own authority, and was valid once."""
    honest, identity = site.enrolled("honest"), Identity.create()
    past = Authority(tmp_path / "authority", host_names=(), now=lambda: "2020-01-01T00:00:00Z")
    assert past.ca_pem == site.authority.ca_pem
    csr = identity.csr_pem("clinic-a")
    for days, error in ((1, ConnectionError), (36500, ConnectionRefused)):  # second: the control
        certificate = past.sign(csr, name="clinic-a", client_id=1, valid_days=days)
        peer = site.peer("clinic-a", identity, certificate, client_id=1)
        with pytest.raises(error):
            site.in_session(peer, hang_up)
        site.train(honest)
    assert site.refused("unknown") == 1
    counters = site.gateway.counters
    assert counters.connections > counters.authenticated == counters.sessions == 2


def test_an_invitations_certificate_opens_enrolment_and_nothing_else(site: Site) -> None:
    """Also after the token was used. Control: the certificate that the token was redeemed for."""
    honest, invited = site.enrolled("honest"), site.create_invitation("clinic-a")
    credentials, identity = Credentials.of(invited), Identity.create()
    assert credentials is not None
    guest = Peer("clinic-a", identity, client_id=1, credentials=credentials)
    say = wire_pb2.FromClient(hello=HELLO).SerializeToString()

    with pytest.raises(EnrolmentRefused, match="no invitation"):
        site.run(enrol(site.gateway.address, replace(invited, token=b"guess"), identity))
    with pytest.raises(EnrolmentRefused, match="chain of identity keys"):
        site.run(enrol(site.gateway.address, replace(invited, token=b""), identity))
    certificate, number = site.run(enrol(site.gateway.address, invited, identity))
    for method in ("Session", "Download", "Upload"):
        assert site.raw(method, guest, say)[1] == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(EnrolmentRefused, match="has been used"):
        site.run(enrol(site.gateway.address, invited, Identity.create()))
    site.in_session(site.peer("clinic-a", identity, certificate, client_id=number), hang_up)
    site.train(honest)


def test_an_enrolment_of_any_size_is_not_read_at_the_gateway(site: Site) -> None:
    """Its own port accepts 16 KiB per message, while the clients' port accepts large replies."""
    invited = site.create_invitation("clinic-a")
    with pytest.raises(EnrolmentRefused, match="an enrolment of"):
        site.run(
            enrol(site.gateway.address, replace(invited, token=bytes(1 << 15)), Identity.create())
        )
    assert site.refused("malformed") == 1


def test_a_session_ends_when_its_certificate_expires(site: Site) -> None:
    """TLS checks a certificate only once, when the connection is made."""
    peer = site.enrolled("clinic-a")

    async def stay(session: GatewaySession) -> object:
        site.clock.ahead_s = 400 * 86400.0
        return await session.receive()

    with pytest.raises(ConnectionRefused, match="expired"):
        site.in_session(peer, stay)
    with pytest.raises(ConnectionRefused, match="expired"):
        site.in_session(peer, hang_up)
    assert site.refused("expired") == 1
    site.clock.ahead_s = 0.0
    site.in_session(peer, hang_up)
    assert site.refused("expired") == 1


@pytest.mark.slow
def test_whoever_does_not_finish_a_handshake_is_cut_off(site: Site, tmp_path: Path) -> None:
    """Peers that stop before, within or after their first message, or after TLS; on both ports."""
    honest = site.enrolled("honest")
    site.open(IMPATIENT)
    context = tls_context(honest, tmp_path)
    hello = client_hello(context)
    with ExitStack() as stack:
        waiting = []
        for address in (site.gateway.address, site.gateway.enrolment_address):
            for first in (b"", hello[:1], hello[:100], hello):
                (stream,) = connected(stack, address)
                stream.sendall(first)
                waiting.append(stream)
        (plain,) = connected(stack, site.gateway.address)
        waiting.append(stack.enter_context(context.wrap_socket(plain)))  # TLS without HTTP/2
        site.train(honest)
        assert all(is_ended(stream, timeout_s=10 * HANDSHAKE_S) for stream in waiting)
    counters = site.gateway.counters
    site.wait_until(lambda: counters.connections == 4 + 1 + 1)
    assert counters.enrolment_connections == 4
    assert counters.authenticated == counters.sessions == 1


@pytest.mark.slow
def test_a_handshake_that_comes_byte_by_byte_is_cut_off(site: Site, tmp_path: Path) -> None:
    """The time limit is for the whole handshake, not for the time between two bytes."""
    hello, clock = client_hello(tls_context(None, tmp_path)), SystemClock()
    site.open(IMPATIENT)
    with ExitStack() as stack:
        (stream,) = connected(stack, site.gateway.address)
        began_s, num_sent = clock.now_s(), 0
        try:
            for num_sent in range(len(hello)):
                stream.sendall(hello[num_sent : num_sent + 1])
                if is_ended(stream, timeout_s=0.02):
                    break
        except OSError:
            pass
        assert num_sent < len(hello) - 1
        assert clock.now_s() - began_s < 10 * HANDSHAKE_S


@pytest.mark.slow
def test_a_stranger_cannot_stay_on_the_enrolment_port(site: Site, tmp_path: Path) -> None:
    """The port asks for no certificate, so a peer that is silent after TLS would keep its place."""
    stays = tls_context(None, tmp_path)
    site.open(IMPATIENT)
    with http2(site.gateway.enrolment_address, stays) as stream:
        assert is_ended(stream, timeout_s=10 * HANDSHAKE_S)
    site.enrolled("honest")


@pytest.mark.slow
def test_only_so_many_connections_are_taken(site: Site) -> None:
    """Further connections are closed at once at no cost; later ones find room again."""
    honest = site.enrolled("honest")
    site.open(replace(IMPATIENT, max_connected=1, max_handshakes=19))
    with ExitStack() as stack:
        streams = connected(stack, site.gateway.address, 200)
        opened = set(streams)
        while len(opened) > 50:  # until most of them are closed
            ended, _, _ = select(opened, [], [], WAIT_S)
            assert ended
            opened.difference_update(ended)
        assert site.gateway.counters.connections <= 20
        assert all(is_ended(stream) for stream in streams)
        site.wait_until(lambda: finds_room(site, honest))
        site.train(honest)


@pytest.fixture
def few_files() -> Iterator[int]:
    """Let the process open only 400 files while the server starts; connecting needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    yield 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_both_ports_together_take_half_of_the_files(tmp_path: Path, few_files: int) -> None:
    """The other half is for the run: its database, uploads and checkpoints."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Site(tmp_path) as site, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * few_files + 200, hard), hard))
        streams = []
        for address in (site.gateway.address, site.gateway.enrolment_address):
            streams += connected(stack, address, few_files // 2 + 50)
        site.wait_until(lambda: num_open(streams) <= few_files // 2)
        counters = site.gateway.counters
        assert 0 < counters.enrolment_connections < counters.connections
        assert counters.connections + counters.enrolment_connections <= few_files // 2


def num_open(streams: Sequence[socket.socket]) -> int:
    return sum(not is_ended(stream, timeout_s=0.001) for stream in streams)


def finds_room(site: Site, peer: Peer) -> bool:
    """Return whether a peer gets in: a place is free shortly after its connection is closed."""
    try:
        site.in_session(peer, hang_up)
    except ConnectionError:
        return False
    return True


NOISE = Seed(0).numpy().bytes(1 << 16)
GARBAGE = {
    "noise": NOISE,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2 without tls": PREFACE + bytes(100),
    "a record of TLS that lies": b"\x16\x03\x01\xff\xff" + NOISE[:1000],
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
    "zeros": bytes(1 << 16),
}


def test_garbage_is_cut_off_on_both_ports(site: Site) -> None:
    honest, num_streams = site.enrolled("honest"), 10 * len(GARBAGE)
    site.open(IMPATIENT)
    with ExitStack() as stack:
        streams = []
        for address in (site.gateway.address, site.gateway.enrolment_address):
            for content in GARBAGE.values():
                for stream in connected(stack, address, 10):
                    stream.sendall(content)
                    streams.append(stream)
        site.train(honest)
        assert all(is_ended(stream, timeout_s=10 * HANDSHAKE_S) for stream in streams)
    assert site.gateway.counters.connections == num_streams + 1
    assert site.gateway.counters.enrolment_connections == num_streams
    assert site.gateway.counters.sessions == 1


def test_strangers_are_in_the_log_as_a_number(tmp_path: Path) -> None:
    """There is one line from time to time, for any number of connections."""
    with structlog.testing.capture_logs() as logs, Site(tmp_path) as site, ExitStack() as stack:
        connected(stack, site.gateway.address, 30)
        site.wait_until(lambda: site.gateway.counters.connections == 30)
        site.clock.jump_s = 60.0
        site.wait_until(lambda: any(entry["event"] == "strangers" for entry in logs))
    (line,) = [entry for entry in logs if entry["event"] == "strangers"]
    assert line["num_connections"] == line["num_so_far"] == 30


# The HTTP port.


#: Much less time than a connection may take for a whole request.
OLDEST_S = 5.0


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    with Telemetry(
        "127.0.0.1:0", lambda: Snapshot(run="clinics"), find_stuck_part=lambda: ""
    ) as telemetry:
        yield telemetry


def is_alive(telemetry: Telemetry) -> bool:
    with socket.create_connection(address_of(telemetry.address), timeout=WAIT_S) as stream:
        stream.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return stream.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"NOISE " + NOISE, b"400"),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /" + b"x" * (1 << 16) + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (1 << 12) + b"\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n", b"200"),
    ],
)
def test_garbage_on_the_http_port_gets_an_answer_and_no_more(
    telemetry: Telemetry, sent: bytes, answer: bytes
) -> None:
    with socket.create_connection(address_of(telemetry.address), timeout=WAIT_S) as stream:
        stream.sendall(sent)
        assert stream.recv(100).split()[1] == answer
    assert is_alive(telemetry)


def test_many_who_say_nothing_on_the_http_port_make_room_for_who_does(
    telemetry: Telemetry,
) -> None:
    """The oldest connections are closed: a supervisor without an answer would stop the process."""
    with ExitStack() as stack:
        streams = connected(stack, telemetry.address, 300)
        for stream in streams[::2]:
            stream.sendall(b"GET /livez HTTP/1.1\r\nslow: l")
        assert is_alive(telemetry)
        assert is_ended(streams[0], timeout_s=OLDEST_S)
        assert is_ended(streams[1], timeout_s=OLDEST_S)
        num_open = sum(not is_ended(stream, timeout_s=0.001) for stream in streams)
        assert 0 < num_open <= 128
        assert is_alive(telemetry)
