"""Rotation of a client's keys: on disk, and with a real enrolment server."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fedlearn.client import keyring, rotation
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.client.live_session import credentials_of, session_at
from fedlearn.client.rotation import KeyRotation
from fedlearn.core.clock import VirtualClock
from fedlearn.core.files import write_private
from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ConnectionRefused, DeploymentError
from fedlearn.identity.identity import IDENTITY_FILE, Identity, Invitation, expires_unix_s
from fedlearn.identity.lineage import MAX_SUCCESSIONS, Lineage
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from fedlearn.secagg.client_state import AdvertisedStep, ClientState
from fedlearn.secagg.fixed_point import build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Advert
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.terms import Terms
from fedlearn.session.pins import Pins
from fedlearn.session.secure import SessionState
from fedlearn.testing import FakeCoordinator
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.grpc_client import enrol

DAY_S = 86_400.0
KEY = b"c" * 32
TERMS = Terms(
    run_id=bytes(16),
    round_num=2,
    attempt=1,
    request_hash=bytes(32),
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    num_clients=3,
    num_neighbors=2,
    threshold=2,
    quorum=2,
    min_survivors=2,
    sigma_bits=40,
    max_weight=9,
    lanes=(build_weight_lane(max_weight=9, num_clients=3),),
)
ADVERT = Advert(
    client_id=ClientId(0),
    packet_key=bytes(32),
    mask_key=bytes(32),
    nonce=bytes(16),
    signature=bytes(64),
)


def invitation(token: bytes, *, name: str = "laptop", ca_pem: bytes = b"authority") -> Invitation:
    return Invitation(
        name=name,
        addresses=("127.0.0.1:1",),
        enrolment_addresses=("127.0.0.1:2",),
        ca_pem=ca_pem,
        token=token,
        expires_utc="2030-01-01T00:00:00Z",
        coordinator_key=KEY,
    )


def enrolled(home: Home, given: Invitation, *, client_id: int = 3) -> Enrolment:
    home.keys.load_next_identity()
    return home.keys.enrol(given, certificate_pem=b"PEM", client_id=ClientId(client_id))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "client")


# -- on disk ------------------------------------------------------------------------------


def test_rotated_keys_follow_from_those_before(home: Home) -> None:
    """Client id, invitation and redeemed tokens are kept; the request to rotate is removed."""
    first = enrolled(home, invitation(b"1"))
    assert first.lineage == Lineage(first.identity.public_key)
    assert home.keys.request_rotation().identity.public_key == first.identity.public_key
    assert home.keys.wants_rotation(first)
    second = home.keys.rotate(first, certificate_pem=b"second")
    assert not home.keys.wants_rotation(second)
    assert (second.client_id, second.certificate_pem) == (3, b"second")
    assert second.has_redeemed(invitation(b"1"))
    assert second.lineage.key_after(0) == first.identity.public_key
    assert second.lineage.key == second.identity.public_key
    second.lineage.check(ClientId(3))


def test_a_note_about_earlier_keys_counts_for_nothing(home: Home) -> None:
    """As after a crash between replacing the keys and removing the request."""
    first = enrolled(home, invitation(b"1"))
    home.keys.request_rotation()
    note = (home.folder / "rotate").read_bytes()
    second = home.keys.rotate(first, certificate_pem=b"second")
    (home.folder / "rotate").write_bytes(note)
    assert not home.keys.wants_rotation(second)


def test_a_client_that_is_not_enrolled_has_nothing_to_rotate(home: Home) -> None:
    """Nor does a client whose chain of keys has its maximal length."""
    with pytest.raises(DeploymentError, match="is not enrolled"):
        home.keys.request_rotation()
    current = enrolled(home, invitation(b"1"))
    for _ in range(MAX_SUCCESSIONS):
        current = home.keys.rotate(current, certificate_pem=b"PEM")
    with pytest.raises(DeploymentError, match="replaced its keys 64 times"):
        home.keys.request_rotation()
    home.keys.load_next_identity()
    assert home.keys.build_next_lineage(invitation(b"2")).num_rotations == 0


def test_a_new_invitation_of_the_same_deployment_goes_on_with_the_chain(home: Home) -> None:
    """Otherwise other clients would not recognize a client that enrolled again."""
    first = enrolled(home, invitation(b"1"))
    second = enrolled(home, invitation(b"2"))
    assert second.lineage.first_key == first.identity.public_key
    second.lineage.check(ClientId(3))


@pytest.mark.parametrize(
    ("given", "client_id"),
    [
        (invitation(b"2", ca_pem=b"another"), 3),
        (invitation(b"2", name="other"), 3),
        (invitation(b"2"), 4),
    ],
)
def test_elsewhere_or_as_another_a_chain_begins_anew(
    home: Home, given: Invitation, client_id: int
) -> None:
    """A chain of keys belongs to one client of one deployment."""
    enrolled(home, invitation(b"1"))
    assert enrolled(home, given, client_id=client_id).lineage.num_rotations == 0


def test_a_lineage_of_another_key_is_damage(home: Home) -> None:
    """For example after files were copied from another client's folder."""
    enrolled(home, invitation(b"1"))
    (home.folder / "identity" / IDENTITY_FILE).write_bytes(Identity.create().pem)
    with pytest.raises(DeploymentError, match="is damaged"):
        home.keys.load_enrolment()


def test_consent_that_is_revoked_leaves_pins_and_a_new_enrolment_too(home: Home) -> None:
    """Only removing the folder makes the client trust the first keys that it sees again."""
    pins = Pins().follow({ClientId(1): bytes(32)})
    home.keys.pin_file(enrolled(home, invitation(b"1"))).write(pins)
    home.erase()
    again = enrolled(home, invitation(b"2"))
    assert home.keys.pin_file(again).read() == pins
    home.forget()
    assert home.keys.pin_file(again).read() == Pins()


# -- rosters ----------------------------------------------------------------------------------


def roster(*entries: tuple[int, bytes, int], coordinator_key: bytes = KEY) -> IdentityRoster:
    return IdentityRoster(
        coordinator_key=coordinator_key,
        clients={
            ClientId(number): KnownKey(name=f"clinic-{number}", key=key, num_rotations=place)
            for number, key, place in entries
        },
    )


def take(home: Home, given: IdentityRoster, enrolment: Enrolment) -> None:
    file = home.keys.pin_file(enrolment)
    file.take(given, client_id=enrolment.client_id, lineage=enrolment.lineage)


def test_a_roster_is_taken_over_once(home: Home) -> None:
    """The same file at the next start undoes no later changes; another one replaces all pins."""
    enrolment = enrolled(home, invitation(b"1"))
    given, other = roster((1, b"a" * 32, 0)), roster((1, b"b" * 32, 0))
    take(home, given, enrolment)
    file = home.keys.pin_file(enrolment)
    assert file.read() == Pins.of(given)
    moved = file.read().forget(ClientId(1))
    file.write(moved)
    take(home, given, enrolment)
    assert file.read() == moved
    take(home, other, enrolment)
    assert file.read() == Pins.of(other)


def test_a_roster_must_know_this_client_by_its_own_key(home: Home) -> None:
    """Or by an earlier key. Control: a roster from before it joined does not contain it."""
    first = enrolled(home, invitation(b"1"))
    second = home.keys.rotate(first, certificate_pem=b"PEM")
    take(home, roster((3, first.identity.public_key, 0)), second)
    take(home, roster((1, b"a" * 32, 0)), second)
    with pytest.raises(DeploymentError, match="trust another key as this client"):
        take(home, roster((3, b"x" * 32, 0)), second)
    with pytest.raises(DeploymentError, match="belongs to another coordinator"):
        take(home, roster(coordinator_key=b"d" * 32), second)


# -- at the enrolment port --------------------------------------------------------------------


@dataclass
class Client:
    """An enrolled client of a real enrolment server, with its key rotation."""

    coordinator: FakeCoordinator
    home: Home
    clock: VirtualClock = field(default_factory=VirtualClock)
    events: list[AgentEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = Invitation.load(self.coordinator.invite("laptop"))
        identity = self.home.keys.load_next_identity()
        address = given.token_addresses[0]
        certificate_pem, client_id = asyncio.run(enrol(address, given, identity))
        self.home.keys.enrol(given, certificate_pem=certificate_pem, client_id=ClientId(client_id))
        self.rotation = KeyRotation(self.home, clock=self.clock, on_event=self.events.append)

    @property
    def enrolment(self) -> Enrolment:
        found = self.home.keys.load_enrolment()
        assert found is not None
        return found

    def is_due(self, *, is_connected: bool = True) -> bool:
        return self.rotation.is_due(self.enrolment, is_connected=is_connected)

    def rotate(self, enrolment: Enrolment | None = None) -> Enrolment:
        return asyncio.run(self.rotation.carry_out(enrolment or self.enrolment))

    def connect(self, enrolment: Enrolment) -> int:
        """Connect, and return the client id in the coordinator's welcome."""

        async def greet() -> int:
            hello = wire_pb2.Hello(protocol=wire.PROTOCOL)
            async with session_at(self.coordinator.address, enrolment, hello) as live:
                return live.session.welcome.client_id

        return asyncio.run(greet())


@pytest.fixture
def client(home: Home) -> Iterator[Client]:
    with FakeCoordinator() as coordinator:
        yield Client(coordinator, home)


def test_the_coordinator_takes_keys_that_the_old_one_signed(client: Client) -> None:
    """It accepts only the new certificate from then on, and the client id is the same."""
    before = client.enrolment
    assert not client.is_due()
    client.home.keys.request_rotation()
    assert client.is_due()
    after = client.rotate()
    assert not client.is_due()
    assert client.enrolment.identity.public_key == after.identity.public_key
    assert client.connect(after) == before.client_id
    with pytest.raises(ConnectionRefused, match="not enrolled"):
        client.connect(before)
    assert [event.kind for event in client.events] == [EventKind.ENROLLED]


def test_an_answer_that_was_lost_is_asked_for_again(client: Client) -> None:
    """The coordinator has the new keys and refuses the old ones, but the client does not know."""
    client.home.keys.request_rotation()
    before, identity = client.enrolment, client.home.keys.load_next_identity()
    address = before.invitation.token_addresses[0]
    lineage = before.extend_lineage(identity).to_bytes()
    shown = credentials_of(before)
    asyncio.run(enrol(address, before.invitation, identity, lineage=lineage, credentials=shown))
    with pytest.raises(ConnectionRefused):
        client.connect(before)
    after = client.rotate()
    assert after.identity.public_key == identity.public_key
    assert client.connect(after) == before.client_id


def test_a_coordinator_that_is_away_leaves_the_old_keys(client: Client) -> None:
    """A connected client tries again later, a disconnected one at once."""
    client.home.keys.request_rotation()
    gone = replace(
        client.enrolment,
        invitation=replace(client.enrolment.invitation, addresses=("127.0.0.1:1",)),
    )
    assert client.rotate(gone) is gone
    assert not client.is_due()
    assert client.is_due(is_connected=False)
    client.clock.sleep(601.0)
    assert client.is_due()


def test_a_revoked_client_keeps_its_keys_and_is_told(client: Client) -> None:
    """The client reports it once, and does not ask again."""
    client.home.keys.request_rotation()
    client.coordinator.revoke("laptop")
    before = client.enrolment
    assert client.rotate() is not None
    assert client.enrolment.identity.public_key == before.identity.public_key
    assert not client.is_due()
    (event,) = client.events
    assert event.kind is EventKind.REFUSED
    assert "revoked" in event.message


def test_a_certificate_renews_itself_before_it_ends(client: Client) -> None:
    """Client id, name and keys stay. It renews only once, although the clock stays ahead."""
    before = client.enrolment
    assert not client.is_due()
    client.clock.elapsed_s = expires_unix_s(before.certificate_pem) - 100 * DAY_S
    assert client.is_due()
    after = client.rotate()
    assert not client.is_due()
    assert client.enrolment.certificate_pem == after.certificate_pem
    assert after.certificate_pem != before.certificate_pem
    assert (after.client_id, after.lineage) == (before.client_id, before.lineage)
    assert client.connect(after) == before.client_id
    assert "certificate until 20" in client.events[0].message
    (registered,) = client.coordinator.registry.clients()
    assert (registered.name, registered.lineage) == ("laptop", before.lineage.to_bytes())
    client.clock.sleep(3600.0)
    assert client.is_due()
    client.coordinator.revoke("laptop")
    assert client.rotate().certificate_pem == after.certificate_pem
    assert "revoked" in client.events[-1].message
    assert not client.is_due()


@pytest.mark.parametrize("step", ["asked", "granted", "written"])
def test_a_renewal_survives_a_kill_at_any_step(
    client: Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before the coordinator grants it, before its answer arrives, and after it was written."""
    before = client.enrolment
    client.clock.elapsed_s = expires_unix_s(before.certificate_pem) - DAY_S

    class Killed(Exception):
        """Simulates that the process ends here."""

    async def enrol_and_die(*args: Any, **options: Any) -> tuple[bytes, int]:
        if step == "granted":
            await enrol(*args, **options)
        raise Killed

    def write_and_die(path: Path, content: bytes) -> None:
        write_private(path, content)
        raise Killed

    with monkeypatch.context() as patched:
        if step == "written":
            patched.setattr(keyring, "write_private", write_and_die)
        else:
            patched.setattr(rotation, "enrol", enrol_and_die)
        with pytest.raises(Killed):
            client.rotate()
    is_old = client.enrolment.certificate_pem == before.certificate_pem
    assert is_old is (step != "written")
    client.rotation = KeyRotation(client.home, clock=client.clock, on_event=client.events.append)
    assert client.is_due(is_connected=False)  # the clock is still ahead
    after = client.rotate()
    assert after.certificate_pem != before.certificate_pem
    assert client.connect(client.enrolment) == before.client_id


def test_keys_that_are_asked_for_come_before_a_renewal(client: Client) -> None:
    """New keys come with a new certificate, and the coordinator may have them already."""
    client.clock.elapsed_s = expires_unix_s(client.enrolment.certificate_pem) - DAY_S
    client.home.keys.request_rotation()
    assert client.rotate().lineage.num_rotations == 1
    assert not client.is_due()


def test_a_chain_from_another_key_is_refused(client: Client) -> None:
    """As from someone who uses the client's name, or from a copy of an old folder."""
    mine = client.enrolment.identity
    identity = Identity(identity_key=Identity.create().identity_key, tls_key=mine.tls_key)
    stranger = replace(client.enrolment, identity=identity, lineage=Lineage(identity.public_key))
    client.home.keys.request_rotation()
    client.rotate(stranger)
    assert "is not signed by the registered one" in client.events[0].message


def test_a_session_under_way_is_given_time_to_end(client: Client) -> None:
    """In any run: a session uses the old key. If it never ends, the rotation happens anyway."""
    client.home.keys.request_rotation()
    secret = SecretBytes.generate(32)
    fresh = ClientState.fresh(bytes(16))
    begun = fresh.with_step(AdvertisedStep(TERMS, ADVERT, secret, secret))
    path = client.home.folder / "state" / "run"
    path.parent.mkdir()
    (path.parent / "another").write_bytes(SessionState(trainer={}, session=fresh).to_bytes())
    path.write_bytes(SessionState(trainer={}, session=begun).to_bytes())
    assert not client.is_due()
    assert not client.is_due(is_connected=False)
    path.write_bytes(SessionState(trainer={}, session=fresh).to_bytes())
    assert client.is_due()
    path.write_bytes(SessionState(trainer={}, session=begun).to_bytes())
    client.clock.sleep(601.0)
    assert client.is_due()
