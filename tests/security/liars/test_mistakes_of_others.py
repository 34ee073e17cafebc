"""Mistakes of other implementations that take a whole client, or a working attack, to show.

The others are in ``test_secagg.py``, under the same heading.
"""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, SecureReply
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.client import SecureClient, derive_pair_keys
from fedlearn.secagg.client_state import AdvertisedStep, ClientState, SharedStep
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.messages import Advert, MaskedVector, Packets, SignedTerms
from fedlearn.secagg.session import Session, Stage, build_advert_text, build_terms_text
from fedlearn.secagg.terms import Contribution, Terms, decode_sum
from fedlearn.simulation.secure import SimulatedIdentities
from tests.security.liars.harness import (
    PARAMS,
    RUN,
    Stand,
    plan_for,
)

#: Six clients, of which at least four must survive: t = q = 4.
PLAN = plan_for(6, corruption=0.1, dropout=0.34)
VICTIM = ClientId(2)
EVERYONE = [ClientId(each) for each in range(6)]


def folded(key: bytes) -> int:
    """Return the XOR of a key's eight words, with which other implementations seed a generator."""
    return int(np.bitwise_xor.reduce(np.frombuffer(key, "<u4")))


def twister(key: bytes) -> NDArray[np.int64]:
    return np.random.Generator(np.random.MT19937(folded(key))).integers(0, 1 << 32, 16)


def test_keys_that_agree_in_a_32_bit_fold_make_other_masks() -> None:
    """Both for pairs and for a client's own mask: the whole key seeds the keystream.

    Control: a Mersenne twister that is seeded with the fold gives both keys the same mask.
    """
    key = SecretBytes.generate(keys.KEY_BYTES).reveal()
    words = list(np.frombuffer(key, "<u4"))
    words[0], words[5] = words[0] ^ 0xDEADBEEF, words[5] ^ 0xDEADBEEF
    other = np.array(words, "<u4").tobytes()
    assert key != other
    assert np.array_equal(twister(key), twister(other))
    pairs = [SecretBytes(each) for each in (key, other)]
    selves = [keys.derive_self_mask_key(e, session=bytes(32), client_id=VICTIM) for e in pairs]
    for one, another in (pairs, selves):
        assert not np.array_equal(
            masking.expand_keystream(one, 64), masking.expand_keystream(another, 64)
        )


# --- Adverts --------------------------------------------------------------------------------


@dataclass
class Impostor:
    """A coordinator that plays all neighbors of one client, with keys that it made itself.

    Attributes:
        terms: Terms of the session.
    """

    terms: Terms
    signers: dict[ClientId, keys.Signer] = field(default_factory=dict)
    public: dict[ClientId, bytes] = field(default_factory=dict)
    packet: dict[ClientId, SecretBytes] = field(default_factory=dict)
    mask: dict[ClientId, SecretBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in EVERYONE:
            self.signers[each], self.public[each] = keys.create_signer()
            self.packet[each], self.mask[each] = (SecretBytes.generate(32) for _ in range(2))

    def advert(self, client_id: ClientId) -> Advert:
        unsigned = Advert(
            client_id=client_id,
            packet_key=keys.KeyAgreement(self.packet[client_id]).public_key,
            mask_key=keys.KeyAgreement(self.mask[client_id]).public_key,
            nonce=bytes(16),
            signature=b"",
        )
        text = build_advert_text(self.terms, unsigned.encode_signed_part())
        return replace(unsigned, signature=self.signers[client_id].sign(text))

    def update_of(
        self, client: SecureClient, signed: SignedTerms, given: Contribution
    ) -> NDArray[np.float64]:
        """Read one client's update, as the party that plays all its neighbors can.

        Raises:
            AggregationAborted: The client notices.
        """
        advert, state = client.advertise(signed, ClientState.fresh(RUN))
        adverts = [advert if i == VICTIM else self.advert(i) for i in EVERYONE]
        directory = {**self.public, VICTIM: client.directory[VICTIM]}
        session, tree = Session.of(self.terms, adverts, directory=directory)
        step = state.step
        assert isinstance(step, AdvertisedStep)
        shares, state = client.share(session.roster_for(VICTIM, tree=tree), state, step)
        seed = self._seed(session, shares.packets)
        shared = state.step
        assert isinstance(shared, SharedStep)
        told = Packets(packets=self._packets(session))
        vector, _ = client.mask(told, state, shared, contribution=given)
        return self._unmasked(session, vector, seed)

    def _way(self, session: Session, sender: ClientId, to: ClientId) -> SecretBytes:
        mine = sender if to == VICTIM else to
        agreement, theirs = keys.KeyAgreement(self.packet[mine]), session.by_id[VICTIM].packet_key
        agreed = agreement.agree(theirs, owner=VICTIM)
        return keys.derive_packet_key(agreed, session=session.id, way=(sender, to))

    def _seed(self, session: Session, packets: tuple[bytes, ...]) -> SecretBytes:
        points, held = [], []
        for to, packet in zip(session.neighbors(VICTIM), packets, strict=True):
            key, way = self._way(session, VICTIM, to), (VICTIM, to)
            plain = keys.unseal(key, packet, session=session.id, way=way)
            pair = messages.open_packet(plain, point=session.points[to], sender=VICTIM)
            points.append(session.points[to])
            held.append(shamir.from_bytes(pair.reveal()[: shamir.SHARE_BYTES]).reshape(-1))
        enough = self.terms.threshold
        (seed,) = shamir.combine(np.array([points[:enough]]), np.stack(held[:enough])[None])
        assert seed is not None
        return seed

    def _packets(self, session: Session) -> dict[ClientId, bytes]:
        plain = messages.build_packet(
            session.points[VICTIM], SecretBytes(bytes(messages.PAIR_BYTES))
        )
        return {
            i: keys.seal(self._way(session, i, VICTIM), plain, session=session.id, way=(i, VICTIM))
            for i in session.neighbors(VICTIM)
        }

    def _unmasked(
        self, session: Session, vector: MaskedVector, seed: SecretBytes
    ) -> NDArray[np.float64]:
        words = masking.zeros(self.terms.lanes)
        masking.add_packed(words, vector.packed, lanes=self.terms.lanes)
        for each in session.neighbors(VICTIM):
            agreement = keys.KeyAgreement(self.mask[each])
            masking.fold(
                words, derive_pair_keys(agreement, each, [VICTIM], session=session), num_threads=1
            )
        own = keys.derive_self_mask_key(seed, session=session.id, client_id=VICTIM)
        masking.fold(words, masking.MaskKeys(plus=[], minus=[own]), num_threads=1)
        total = decode_sum(self.terms, words, num_clients=1)
        (lane,) = [lane for lane in self.terms.lanes if lane.role is LaneRole.VECTOR]
        return total.weighted_sum(lane) / total.weight


def test_a_server_that_invents_the_neighbors_reads_an_update_unless_keys_are_pinned() -> None:
    """Against a client that takes keys from the server, the attack reads the update to one step.

    A client that uses its own directory notices before it has shared anything.
    """
    identities = SimulatedIdentities(len(EVERYONE), PLAN)
    terms = PLAN.terms(PARAMS.layout, run_id=RUN, round_num=0, attempt=0, request_hash=bytes(32))
    signature = identities.coordinator[0].sign(build_terms_text(terms))
    signed, liar = SignedTerms(terms=terms, signature=signature), Impostor(terms)
    lanes = {lane.name: lane for lane in terms.lanes if lane.role is not LaneRole.WEIGHT}
    update = np.random.default_rng(0).uniform(-1, 1, PARAMS.layout.size)
    values = {name: np.ones(lane.size) for name, lane in lanes.items()}
    (name,) = [name for name, lane in lanes.items() if lane.role is LaneRole.VECTOR]
    given = Contribution(values=values | {name: update}, weight=7, request_hash=bytes(32))
    pinned = identities.client(VICTIM)
    with pytest.raises(AggregationAborted, match="is not signed by it for this session"):
        liar.update_of(pinned, signed, given)
    trusting = replace(pinned, directory={**liar.public, VICTIM: identities[VICTIM]})
    read = liar.update_of(trusting, signed, given)
    assert np.abs(read - update).max() <= lanes[name].step * PLAN.max_examples / 7


# --- What is seen on the wire ---------------------------------------------------------------


def test_replies_tell_neither_examples_nor_loss() -> None:
    """Six clients with different examples and losses send replies of the same fields and sizes."""
    stand = Stand.in_memory(victim=VICTIM, plan=PLAN)
    collected = stand.collect(round_num=0)
    assert [each.name for each in fields(SecureReply)] == ["round_num", "message"]
    for stage in Stage:
        said = [reply for (_, at), reply in stand.liar.replies.items() if at is stage]
        assert len(said) >= PLAN.parameters.threshold
        assert len({len(encode(reply)) for reply in said}) == 1
    rows = list(collected.participations)
    assert len({row.num_examples for row in rows}) == len({row.loss for row in rows}) == 1
