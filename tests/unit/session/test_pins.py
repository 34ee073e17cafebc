"""Pinned identity keys of other clients: what changes them, and where they are stored."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, PolicyViolation, ProtocolError
from fedlearn.identity.lineage import Lineage, fingerprint
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from fedlearn.secagg import keys
from fedlearn.session.pins import PinFile, Pins

A, B = ClientId(1), ClientId(2)
OLD, OLD_KEY = keys.create_signer()
NEW, NEW_KEY = keys.create_signer()
_, OTHER_KEY = keys.create_signer()
CHAIN = Lineage(OLD_KEY).extend(NEW_KEY, client_id=A, old=OLD, new=NEW).to_bytes()
SEEN = Pins().follow({A: OLD_KEY, B: OTHER_KEY})
ROSTER = IdentityRoster(
    coordinator_key=b"c" * 32,
    clients={A: KnownKey(name="clinic-a", key=OLD_KEY, num_rotations=0)},
)


@pytest.fixture
def file(tmp_path: Path) -> PinFile:
    return PinFile(path=tmp_path / "pins.json", coordinator_key=b"c" * 32)


def test_who_is_seen_first_is_pinned_and_stays() -> None:
    """It stays so while others are introduced; a lineage at first sight is pinned at its end."""
    assert SEEN.keys == {A: OLD_KEY, B: OTHER_KEY}
    assert SEEN.follow({A: OLD_KEY}) == SEEN
    assert Pins().follow({A: CHAIN}).clients[A] == KnownKey(key=NEW_KEY, num_rotations=1)


def test_a_chain_moves_a_pin() -> None:
    """From then on the owner's old key is refused."""
    moved = SEEN.follow({A: CHAIN})
    assert moved.clients[A] == KnownKey(key=NEW_KEY, num_rotations=1)
    assert moved.clients[B] == SEEN.clients[B]
    with pytest.raises(PolicyViolation, match=r"client 1, .*older than the pinned one"):
        moved.follow({A: OLD_KEY})


def test_another_key_is_refused_with_what_the_user_may_do() -> None:
    """The error names the rule, the client, both fingerprints and the remedy."""
    with pytest.raises(PolicyViolation) as raised:
        SEEN.follow({B: OTHER_KEY, A: OTHER_KEY})
    violation = raised.value
    assert violation.rule == "pinned identity keys"
    assert f"another key of client 1, {fingerprint(OTHER_KEY)}: no chain" in violation.asked
    assert fingerprint(OLD_KEY) in violation.limit
    assert "fedlearn pins FOLDER --forget 1" in violation.limit


def test_a_chain_of_another_client_is_refused() -> None:
    """Even if it begins with the pinned key."""
    swapped = replace(SEEN, clients={**SEEN.clients, B: SEEN.clients[A]})
    with pytest.raises(PolicyViolation, match="not signed by both keys as client 2's"):
        swapped.follow({B: CHAIN})


def test_a_forgotten_client_is_pinned_anew() -> None:
    """Forgetting a client that is not pinned is an error: a typing error would go unnoticed."""
    forgotten = SEEN.forget(A)
    assert forgotten.follow({A: OTHER_KEY}).keys[A] == OTHER_KEY
    with pytest.raises(DeploymentError, match="no key of client 9 is pinned; pinned are: 1, 2"):
        SEEN.forget(ClientId(9))


def test_a_roster_admits_its_clients_alone_and_their_successors() -> None:
    """They are matched by name, and only another roster admits another client."""
    pins = Pins.of(ROSTER)
    assert pins.follow({A: CHAIN}).clients[A] == KnownKey(
        key=NEW_KEY, num_rotations=1, name="clinic-a"
    )
    with pytest.raises(PolicyViolation, match="client 2, which is not in the roster"):
        pins.follow({A: OLD_KEY, B: OTHER_KEY})
    with pytest.raises(PolicyViolation, match=r"client 1 \(clinic-a\).* accept them: a new roster"):
        pins.follow({A: OTHER_KEY})


def test_pins_survive_as_bytes() -> None:
    """The bytes are part of a client's state; bytes of another version are refused."""
    moved = SEEN.follow({A: CHAIN})
    assert Pins.from_bytes(moved.to_bytes()) == moved
    assert Pins.from_bytes(b"") == Pins()
    with pytest.raises(ProtocolError, match="another version"):
        Pins.from_bytes(moved.to_bytes()[:-1])


def test_pins_survive_in_a_private_file(file: PinFile) -> None:
    """The roster and the names are stored as well; without a file there are no pins."""
    assert file.read() == Pins()
    for pins in (SEEN, Pins.of(ROSTER).follow({A: CHAIN})):
        file.write(pins)
        assert file.read() == pins
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_pins_of_another_coordinator_count_for_nothing(file: PinFile) -> None:
    """Its numbers stand for other clients; control: pins of the same coordinator count."""
    file.write(SEEN)
    assert replace(file, coordinator_key=b"d" * 32).read() == Pins()
    assert file.read() == SEEN


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 2}',
        json.dumps({"coordinator_key": "63" * 32, "roster": "", "clients": {}}),
        json.dumps({"format": 1, "coordinator_key": "63" * 32}),
        json.dumps({"format": 1, "coordinator_key": "63" * 32, "roster": "", "clients": {"x": 1}}),
    ],
)
def test_a_damaged_file_is_not_taken_for_none(file: PinFile, content: str) -> None:
    """Otherwise an attacker who damages the file would choose the keys."""
    file.path.write_text(content)
    with pytest.raises(DeploymentError, match="does not hold pinned keys"):
        file.read()
