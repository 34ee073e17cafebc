"""Whatever a coordinator builds from honest chains, no client follows it to an abandoned key."""

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from fedlearn.core.messages import ClientId
from fedlearn.errors import PolicyViolation, ProtocolError
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.rosters import KnownKey
from fedlearn.secagg import keys
from fedlearn.session.pins import Pins

CLIENT, NUM_KEYS = ClientId(7), 6
_IDENTITIES = [keys.create_signer() for _ in range(NUM_KEYS)]
_FORKED = keys.create_signer()
KEYS = [key for _, key in _IDENTITIES]


def _lineage() -> Lineage:
    lineage = Lineage(KEYS[0])
    for (old, _), (new, key) in pairwise(_IDENTITIES):
        lineage = lineage.extend(key, client_id=CLIENT, old=old, new=new)
    return lineage


LINEAGE = _lineage()
PLACES = st.integers(0, NUM_KEYS - 1)


def upto(num_rotations: int) -> Lineage:
    return Lineage(LINEAGE.first_key, LINEAGE.successions[:num_rotations])


def pins_at(place: int) -> Pins:
    return Pins(clients={CLIENT: KnownKey(key=KEYS[place], num_rotations=place)})


def is_refused(pins: Pins, data: bytes) -> bool:
    try:
        pins.follow({CLIENT: data})
    except PolicyViolation as violation:
        return "client 7" in violation.asked
    return False


@given(pinned=PLACES, told=PLACES)
def test_a_chain_is_followed_forward_and_never_back(pinned: int, told: int) -> None:
    """For every pinned key and every length of the honest chain."""
    data = upto(told).to_bytes()
    assert is_refused(pins_at(pinned), data) == (told < pinned)
    if told >= pinned:
        after = pins_at(pinned).follow({CLIENT: data})
        assert after.clients[CLIENT] == KnownKey(key=KEYS[told], num_rotations=told)


@given(pinned=st.integers(0, NUM_KEYS - 2), flipped=st.data())
def test_no_altered_byte_passes(pinned: int, flipped: st.DataObject) -> None:
    """Wherever the byte is, before the pinned key or after it."""
    data = bytearray(LINEAGE.to_bytes())
    place = flipped.draw(st.integers(0, len(data) - 1))
    data[place] ^= flipped.draw(st.integers(1, 255))
    assert is_refused(pins_at(pinned), bytes(data))
    assert is_refused(Pins(), bytes(data))  # it is not pinned at first sight either


@given(pinned=st.integers(0, NUM_KEYS - 2), order=st.permutations(range(NUM_KEYS - 1)))
def test_no_other_order_passes(pinned: int, order: list[int]) -> None:
    """A chain with a missing statement is refused as well."""
    assume(order != sorted(order))
    shuffled = Lineage(KEYS[0], tuple(LINEAGE.successions[place] for place in order))
    assert is_refused(pins_at(pinned), shuffled.to_bytes())
    missing = Lineage(KEYS[0], LINEAGE.successions[1:])
    assert is_refused(pins_at(pinned), missing.to_bytes())


@given(fork=st.integers(0, NUM_KEYS - 2), pinned=PLACES)
def test_a_fork_leads_nobody_from_one_branch_to_the_other(fork: int, pinned: int) -> None:
    """If the owner signed two successors of one key, a client on one branch stays there."""
    old, _ = _IDENTITIES[fork]
    new, key = _FORKED
    other = upto(fork).extend(key, client_id=CLIENT, old=old, new=new)
    other.check(CLIENT)
    assert is_refused(pins_at(pinned), other.to_bytes()) == (pinned > fork)


@given(begin=st.integers(1, NUM_KEYS - 1), pinned=PLACES)
def test_a_chain_that_begins_later_is_another(begin: int, pinned: int) -> None:
    """Positions count from the first key, so a part of a chain proves nothing."""
    part = Lineage(KEYS[begin], LINEAGE.successions[begin:])
    assert is_refused(pins_at(pinned), part.to_bytes())


@given(data=st.binary(max_size=400))
def test_bytes_of_no_chain_raise_nothing_else(data: bytes) -> None:
    """Only a key by itself is a valid chain of random bytes."""
    try:
        Lineage.from_bytes(data).check(CLIENT)
    except ProtocolError:
        assert is_refused(Pins(), data)
    else:
        assert len(data) == keys.KEY_BYTES
