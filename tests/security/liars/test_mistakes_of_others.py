"""Mistakes that were found by running other implementations: each with the tests that exclude it.

What is shown elsewhere stands in the table; what wants the whole client, or an attack that works
where the guard is missing, follows below.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Failure, Reply, SecureReply
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.client import SecureClient, pair_keys
from fedlearn.secagg.client_state import Advertised, ClientState, Shared
from fedlearn.secagg.fixed_point import LaneRole, Words
from fedlearn.secagg.messages import Advert, MaskedVector, Packets, SignedTerms
from fedlearn.secagg.session import Session, Stage, advert_text, terms_text
from fedlearn.secagg.terms import Contribution, Terms, from_words
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.transport.base import as_reply
from fedlearn.transport.memory import MemoryChannel
from tests.security.liars.harness import (
    PARAMS,
    RUN,
    Stand,
    answer_of,
    plan_for,
    require_nothing,
)
from tests.security.liars.lies import LIES

TESTS = Path(__file__).parents[2]
SECAGG = "security/test_secagg.py"
LIARS = "security/liars/test_lying_coordinator.py"
DOOR = "security/liars/test_lying_coordinator_grpc.py"
HERE = "security/liars/test_mistakes_of_others.py"

#: By mistake, in which file which tests exclude it.
MISTAKES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "pair keys folded to 32 bits into a Mersenne twister": (
        (HERE, "test_keys_that_agree_in_a_32_bit_fold_make_other_masks"),
        (SECAGG, "test_masks_come_from_whole_keys"),
        ("unit/secagg/test_masking.py", "test_every_bit_of_a_key_matters"),
    ),
    "32-bit self-mask": (
        (HERE, "test_keys_that_agree_in_a_32_bit_fold_make_other_masks"),
        (SECAGG, "test_the_self_seed_has_256_bits"),
    ),
    "key adverts not authenticated": (
        (HERE, "test_a_server_that_invents_the_neighbours_reads_an_update_unless_keys_are_pinned"),
        (SECAGG, "test_a_roster_with_invented_neighbours_is_refused"),
        (LIARS, "test_a_lie_ends_the_session_for_whom_it_is_told_to"),
    ),
    "an id in both the survivor and the dropout list releases both secrets": (
        (LIARS, "test_no_order_of_questions_gets_both_secrets_of_a_client"),
        (SECAGG, "test_a_share_of_one_secret_is_released_of_each_owner_never_of_both"),
        (SECAGG, "test_two_sets_of_survivors_never_both_get_a_quorum"),
    ),
    "a server-chosen threshold of 1 accepted": (
        (SECAGG, "test_a_threshold_of_one_cannot_be_said"),
        (SECAGG, "test_terms_that_the_client_does_not_accept_are_refused"),
        (LIARS, "test_a_lie_ends_the_session_for_whom_it_is_told_to"),
    ),
    "a modulus of 2 accepted": (
        (SECAGG, "test_a_modulus_too_small_for_the_sum_cannot_be_said"),
        (LIARS, "test_a_lie_ends_the_session_for_whom_it_is_told_to"),
    ),
    "example counts and metrics sent in the clear": (
        (HERE, "test_replies_tell_neither_examples_nor_loss"),
        (DOOR, "test_a_client_that_requires_secure_aggregation_does_not_tell_its_examples"),
        (SECAGG, "test_weights_and_metrics_travel_inside_the_sum"),
    ),
    "a client that drops in set-up counted as dead later, crashing the rest": (
        (HERE, "test_whoever_is_lost_in_set_up_is_not_asked_about_later"),
        (SECAGG, "test_a_client_that_is_lost_in_set_up_is_no_dropped_one_later"),
    ),
    "int64 upload": (
        (HERE, "test_an_upload_has_four_bytes_a_number_and_a_fixed_rest"),
        (SECAGG, "test_an_upload_is_no_larger_than_its_packed_vector"),
    ),
    "one scalar mask added to every coordinate": (
        (SECAGG, "test_a_mask_differs_at_every_coordinate"),
        ("unit/secagg/test_masking.py", "test_a_mask_is_no_constant_and_lanes_have_their_own"),
    ),
    "one homomorphic key shared by all clients": (
        (SECAGG, "test_every_pair_has_its_own_key"),
        ("unit/secagg/test_keys.py", "test_every_pair_session_and_purpose_has_its_own_key"),
    ),
    "the same mask reused when a round is retried": (
        (HERE, "test_a_retried_round_is_masked_anew"),
        (SECAGG, "test_no_mask_is_used_again_when_a_round_is_retried"),
    ),
}
#: Lies of the harness that stand for a mistake; see the table.
LIES_OF_MISTAKES = {"only invented neighbours", "a threshold of one", "a modulus of two bits"}

#: Six clients, of whom four must be left: t = q = 4.
PLAN = plan_for(6, corruption=0.1, dropout=0.34)
VICTIM = ClientId(2)
EVERYONE = [ClientId(each) for each in range(6)]


def test_each_mistake_has_tests_that_exist() -> None:
    """A test that is renamed is missed here."""
    modules = {path: (TESTS / path).read_text() for row in MISTAKES.values() for path, _ in row}
    tests = {
        path: re.findall(r"^def (test_\w+)\(", text, re.MULTILINE) for path, text in modules.items()
    }
    for mistake, row in MISTAKES.items():
        for path, name in row:
            assert name in tests[path], mistake


def test_the_lies_of_the_table_are_told() -> None:
    """As those of a test over all lies."""
    assert {lie.name for lie in LIES} >= LIES_OF_MISTAKES


def folded(key: bytes) -> int:
    """Return the exclusive or of a key's eight words, as other implementations seed with it."""
    return int(np.bitwise_xor.reduce(np.frombuffer(key, "<u4")))


def twister(key: bytes) -> NDArray[np.int64]:
    return np.random.Generator(np.random.MT19937(folded(key))).integers(0, 1 << 32, 16)


def test_keys_that_agree_in_a_32_bit_fold_make_other_masks() -> None:
    """Of pairs and of a client itself: both kinds of key seed the one keystream there is.

    The control: a twister that is seeded with the fold gives both keys one mask.
    """
    key = SecretBytes.generate(keys.KEY_BYTES).reveal()
    words = list(np.frombuffer(key, "<u4"))
    words[0], words[5] = words[0] ^ 0xDEADBEEF, words[5] ^ 0xDEADBEEF
    other = np.array(words, "<u4").tobytes()
    assert key != other
    assert np.array_equal(twister(key), twister(other))
    pairs = [SecretBytes(each) for each in (key, other)]
    selves = [keys.self_mask_key(e, session=bytes(32), client_id=VICTIM) for e in pairs]
    for one, another in (pairs, selves):
        assert not np.array_equal(masking.keystream(one, 64), masking.keystream(another, 64))


# --- Adverts --------------------------------------------------------------------------------


@dataclass
class Impostor:
    """A coordinator that plays all neighbours of one client: it has made all their keys.

    Attributes:
        terms: Of the session.
    """

    terms: Terms
    signers: dict[ClientId, keys.Signer] = field(default_factory=dict)
    public: dict[ClientId, bytes] = field(default_factory=dict)
    packet: dict[ClientId, SecretBytes] = field(default_factory=dict)
    mask: dict[ClientId, SecretBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in EVERYONE:
            self.signers[each], self.public[each] = keys.fresh_signer()
            self.packet[each], self.mask[each] = (SecretBytes.generate(32) for _ in range(2))

    def advert(self, client_id: ClientId) -> Advert:
        unsigned = Advert(
            client_id=client_id,
            packet_key=keys.KeyAgreement(self.packet[client_id]).public_key,
            mask_key=keys.KeyAgreement(self.mask[client_id]).public_key,
            nonce=bytes(16),
            signature=b"",
        )
        text = advert_text(self.terms, unsigned.unsigned())
        return replace(unsigned, signature=self.signers[client_id].sign(text))

    def update_of(
        self, client: SecureClient, signed: SignedTerms, given: Contribution
    ) -> NDArray[np.float64]:
        """Return one client's update, read by whoever plays its neighbours.

        Raises:
            AggregationAborted: The client notices.
        """
        advert, state = client.advertise(signed, ClientState.fresh(RUN))
        adverts = [advert if i == VICTIM else self.advert(i) for i in EVERYONE]
        directory = {**self.public, VICTIM: client.directory[VICTIM]}
        session, tree = Session.of(self.terms, adverts, directory=directory)
        step = state.step
        assert isinstance(step, Advertised)
        shares, state = client.share(session.roster_for(VICTIM, tree=tree), state, step)
        seed = self._seed(session, shares.packets)
        shared = state.step
        assert isinstance(shared, Shared)
        told = Packets(packets=self._packets(session))
        vector, _ = client.mask(told, state, shared, contribution=given)
        return self._unmasked(session, vector, seed)

    def _way(self, session: Session, sender: ClientId, to: ClientId) -> SecretBytes:
        mine = sender if to == VICTIM else to
        agreement, theirs = keys.KeyAgreement(self.packet[mine]), session.by_id[VICTIM].packet_key
        agreed = agreement.agree(theirs, owner=VICTIM)
        return keys.packet_key(agreed, session=session.id, way=(sender, to))

    def _seed(self, session: Session, packets: tuple[bytes, ...]) -> SecretBytes:
        points, held = [], []
        for to, packet in zip(session.neighbours(VICTIM), packets, strict=True):
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
        plain = messages.packet_of(session.points[VICTIM], SecretBytes(bytes(messages.PAIR_BYTES)))
        return {
            i: keys.seal(self._way(session, i, VICTIM), plain, session=session.id, way=(i, VICTIM))
            for i in session.neighbours(VICTIM)
        }

    def _unmasked(
        self, session: Session, vector: MaskedVector, seed: SecretBytes
    ) -> NDArray[np.float64]:
        words = masking.zeros(self.terms.lanes)
        masking.add_packed(words, vector.packed, lanes=self.terms.lanes)
        for each in session.neighbours(VICTIM):
            agreement = keys.KeyAgreement(self.mask[each])
            masking.fold(
                words, pair_keys(agreement, each, [VICTIM], session=session), num_threads=1
            )
        own = keys.self_mask_key(seed, session=session.id, client_id=VICTIM)
        masking.fold(words, masking.MaskKeys(plus=[], minus=[own]), num_threads=1)
        total = from_words(self.terms, words, num_clients=1)
        (lane,) = [lane for lane in self.terms.lanes if lane.role is LaneRole.VECTOR]
        return total.weighted_sum(lane) / total.weight


def test_a_server_that_invents_the_neighbours_reads_an_update_unless_keys_are_pinned() -> None:
    """The attack works, to the step of fixed point, on a client that takes keys from the server.

    One that goes by its own directory notices before it has shared anything.
    """
    identities = SimulatedIdentities(len(EVERYONE), PLAN)
    terms = PLAN.terms(PARAMS.layout, run_id=RUN, round_num=0, attempt=0, request_hash=bytes(32))
    signature = identities.coordinator[0].sign(terms_text(terms))
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
    """Six clients with as many examples and losses: what they say differs in no field or size."""
    stand = Stand.in_memory(victim=VICTIM, plan=PLAN)
    collected = stand.collect(round_num=0)
    assert [each.name for each in fields(SecureReply)] == ["round_num", "message"]
    for stage in Stage:
        said = [reply for (_, at), reply in stand.liar.replies.items() if at is stage]
        assert len(said) >= PLAN.parameters.threshold
        assert len({len(encode(reply)) for reply in said}) == 1
    rows = list(collected.participations)
    assert len({row.num_examples for row in rows}) == len({row.loss for row in rows}) == 1


@pytest.mark.parametrize("lost", [Stage.ADVERTISE, Stage.SHARE])
def test_whoever_is_lost_in_set_up_is_not_asked_about_later(lost: Stage) -> None:
    """Nobody's release has a share of it; one that is lost in training has its mask key released.

    The control: an honest release has shares of all six.
    """

    def sabotage(client_id: ClientId, stage: Stage, reply: SecureReply) -> Reply | None:
        if reply.round_num == 0:
            return None
        gone = (client_id, stage) in ((EVERYONE[0], lost), (EVERYONE[4], Stage.MASK))
        return Failure("the battery is low") if gone else None

    stand = Stand.in_memory(victim=VICTIM, plan=PLAN, sabotage=sabotage)
    for round_num, survivors, owners in ((0, range(6), 6), (1, (1, 2, 3, 5), 5)):
        assert stand.require_exact(stand.collect(round_num=round_num)) == list(survivors)
        release = answer_of(stand.liar.replies[VICTIM, Stage.UNMASK])
        assert isinstance(release, messages.Release)
        assert len(release.shares) == owners


def test_an_upload_has_four_bytes_a_number_and_a_fixed_rest() -> None:
    """32 bits of modulus; all metrics, the message's head and the codec take a fixed few bytes."""
    stand = Stand.in_memory(victim=VICTIM, plan=PLAN)
    stand.collect(round_num=0)
    reply = stand.liar.replies[VICTIM, Stage.MASK]
    vector = answer_of(reply)
    assert isinstance(vector, MaskedVector)
    metrics = [lane for lane in PLAN.lanes(PARAMS.layout) if lane.role is not LaneRole.VECTOR]
    rest = sum(lane.num_bytes for lane in metrics)
    assert len(vector.packed) == 4 * PARAMS.layout.size + rest
    assert rest + len(encode(reply)) - len(vector.packed) < 300


def test_a_retried_round_is_masked_anew() -> None:
    """The same update of the same client in the same round, sent twice: the difference is noise.

    The control: one state that is answered from twice has one mask; only the rounding differs.
    """

    def sabotage(client_id: ClientId, stage: Stage, _: SecureReply) -> Reply | None:
        is_lost = len(sent) < 2 and stage is Stage.CONFIRM and client_id < 3
        return Failure("the battery is low") if is_lost else None

    sent: list[Words] = []
    stand = Stand.in_memory(victim=VICTIM, plan=PLAN, sabotage=sabotage)
    one, other = answered_twice(stand)
    assert np.abs((one - other).view(np.int32)).max() <= 1
    for attempt in (0, 1):
        require_nothing(stand.collect(round_num=0, attempt=attempt))
        sent.append(vector_in(stand.liar.replies[VICTIM, Stage.MASK]))
    assert stand.require_exact(stand.collect(round_num=0, attempt=2)) == EVERYONE
    sent.append(vector_in(stand.liar.replies[VICTIM, Stage.MASK]))
    for one, other in pairwise(sent):
        levels = (one - other).view(np.int32)
        assert len(np.unique(levels)) == PARAMS.layout.size
        assert np.abs(levels).min() > 1


def answered_twice(stand: Stand) -> list[Words]:
    """Return the vectors of a client that answers from one state twice, which none must do."""
    channel, kept = stand.liar.channel, list[Reply]()
    assert isinstance(channel, MemoryChannel)
    honest = channel.handlers

    def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
        kept.append(as_reply(honest[VICTIM](data, state)[0]))
        return honest[VICTIM](data, state)

    channel.handlers = {**honest, VICTIM: handle}
    collected = stand.collect(round_num=1)
    channel.handlers = honest
    require_nothing(collected)
    vectors = [reply for reply in kept if isinstance(answer_of(reply), MaskedVector)]
    return [vector_in(reply) for reply in (*vectors, stand.liar.replies[VICTIM, Stage.MASK])]


def vector_in(reply: Reply) -> Words:
    """Return the masked parameters of a reply."""
    message = answer_of(reply)
    assert isinstance(message, MaskedVector)
    lanes = PLAN.lanes(PARAMS.layout)
    words = masking.zeros(lanes)
    masking.add_packed(words, message.packed, lanes=lanes)
    return words[0]
