"""A coordinator that lies in each message in turn, and clients that cheat.

The liar holds the coordinator's own key, so its messages are validly signed. Each lie must end the
session for the client that receives it, before anything useful to the liar has left that client.
Each lie has its control next to it: the same session without it.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted, FedlearnError, PolicyViolation, ProtocolError
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.client import SecureClient, derive_pair_keys
from fedlearn.secagg.client_state import AdvertisedStep, ClientState, SharedStep
from fedlearn.secagg.fixed_point import Lane, LaneRole, Words, build_vector_lane, build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import (
    Advert,
    MaskedVector,
    Message,
    Packets,
    Roster,
    ShareRelease,
    Shares,
    Signatures,
    SignedTerms,
    Survivors,
)
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import open_session
from fedlearn.secagg.session import Stage, build_terms_text
from fedlearn.secagg.terms import Contribution, Terms, decode_sum, encode_contribution, propose
from tests.rehearsal import Cast, Post, Rehearsal, Way, deliver, rehearse
from tests.rosters import roster_for, signatures_in, signatures_of, survivors_of
from tests.security.liars.harness import spoiled

# Any: the honest message of the stage at which the lie is told.
Lie = Callable[[Any], Message | bytes]

RUN, REQUEST = b"r" * 16, b"q" * 32
N, SIZE, MAX_WEIGHT = 7, 40, 50
IDS = [ClientId(10 * i) for i in range(1, N + 1)]
VICTIM, OTHER, THIRD = IDS[2], IDS[4], IDS[6]
ACTIVE, CURIOUS = Adversary.ACTIVE_SERVER, Adversary.HONEST_BUT_CURIOUS

POLICY = TermsPolicy(
    adversary=ACTIVE,
    allow_sparse=False,
    corruption=1 / 7,
    sigma_bits=40,
    min_cohort=5,
    max_cohort=20,
    max_clip=1.0,
    max_weight=MAX_WEIGHT,
    max_upload_bytes=1000,
    max_releases_per_round=1,
    max_draw_factor=2.0,
)
CAST = Cast.of(IDS, policy=POLICY, num_threads=1)


def lanes(
    *, bound: float = 1.0, max_weight: int = MAX_WEIGHT, size: int = SIZE
) -> tuple[Lane, ...]:
    return (
        build_weight_lane(max_weight=max_weight, num_clients=N),
        build_vector_lane(
            "delta",
            size=size,
            bound=bound,
            modulus_bits=32,
            num_clients=21,  # the most that any terms in this file invite
            weighted=True,
        ),
    )


def make_terms(adversary: Adversary = ACTIVE) -> Terms:
    """Return terms for seven clients, one corrupted, two dropped: t = q = 5, at least 5 survive."""
    assumptions = Assumptions(
        adversary=adversary,
        topology=Topology.COMPLETE,
        corruption=1 / 7,
        dropout=2 / 7,
        sigma_bits=40,
        eta_bits=30,
    )
    return propose(
        derive(N, assumptions=assumptions),
        run_id=RUN,
        round_num=3,
        attempt=0,
        request_hash=REQUEST,
        max_weight=MAX_WEIGHT,
        lanes=lanes(),
    )


TERMS = make_terms()
FRESH = dict.fromkeys(IDS, ClientState.fresh(RUN))


def contribution(client_id: ClientId) -> Contribution:
    values = np.random.default_rng(client_id).uniform(-1, 1, SIZE).astype(np.float32)
    return Contribution(values={"delta": values}, weight=client_id // 2, request_hash=REQUEST)


def run(
    post: Post = deliver,
    *,
    terms: Terms = TERMS,
    cast: Cast = CAST,
    states: Mapping[ClientId, ClientState] = FRESH,
) -> Rehearsal:
    return rehearse(
        terms,
        cast=cast,
        contributions={client_id: contribution(client_id) for client_id in cast.clients},
        states=states,
        post=post,
        num_threads=1,
    )


def mean_of(result: Rehearsal, terms: Terms = TERMS) -> float:
    """Return the distance of the mean from that of the survivors in the clear."""
    given = [contribution(client_id) for client_id in result.outcome.survivors]
    weights = np.array([one.weight for one in given], np.float64)
    wanted = np.average([one.values["delta"] for one in given], axis=0, weights=weights)
    total = result.outcome.total
    assert total.weight == weights.sum()
    return float(np.abs(total.weighted_sum(terms.lanes[1]) / total.weight - wanted).max())


def sign(terms: Terms) -> SignedTerms:
    return SignedTerms(terms=terms, signature=CAST.signer.sign(build_terms_text(terms)))


@dataclass
class Liar:
    """A post that replaces one client's message at one stage, and records all messages."""

    stage: Stage
    way: Way
    lie: Lie
    victim: ClientId = VICTIM

    def __post_init__(self) -> None:
        self.told = 0
        self.heard: dict[tuple[ClientId, Stage], bytes] = {}

    def __call__(self, stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        if way is Way.UP:
            self.heard[client_id, stage] = data
        if (stage, way, client_id) != (self.stage, self.way, self.victim):
            return data
        self.told += 1
        told = self.lie(messages.decode(data))
        return told if isinstance(told, bytes) else messages.encode(told)


def require_refusal(stage: Stage, lie: Lie, *, terms: Terms = TERMS) -> FedlearnError:
    """Send the victim a lie; check that it refuses and says nothing more, and return its error.

    The others continue to a correct sum, which includes the victim if its vector was in already.
    """
    liar = Liar(stage, Way.DOWN, lie)
    result = run(liar, terms=terms)
    assert liar.told == 1
    assert (VICTIM, stage) not in liar.heard, "the victim answered the lie"
    order = list(Stage)
    said = [order.index(after) for client, after in liar.heard if client == VICTIM]
    assert all(at < order.index(stage) for at in said)
    assert list(result.refusals) == [VICTIM]
    assert result.states[VICTIM].step is None, "its secrets are forgotten"
    assert mean_of(result, terms) < 1e-4
    return result.refusals[VICTIM]


def test_an_honest_session_goes_through() -> None:
    """The control of every lie below."""
    for terms in (TERMS, make_terms(CURIOUS)):
        cast = CAST if terms is TERMS else curious_cast()
        result = run(terms=terms, cast=cast)
        assert result.refusals == {}
        assert list(result.outcome.survivors) == IDS
        assert mean_of(result, terms) < 1e-4


def curious_cast() -> Cast:
    return Cast.of(IDS, policy=replace(POLICY, adversary=CURIOUS), num_threads=1)


# --- R0: the terms --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("adversary", {"adversary": CURIOUS}),
        ("allow_sparse", {"topology": Topology.SPARSE, "num_neighbors": 4}),
        ("threshold", {"threshold": 4}),
        ("threshold", {"threshold": 2}),
        ("quorum", {"quorum": 4}),
        ("min_cohort", {"min_survivors": 4}),
        ("max_clip", {"lanes": lanes(bound=1.01)}),
        ("max_weight", {"max_weight": 51, "lanes": lanes(max_weight=51)}),
        ("max_upload_bytes", {"lanes": lanes(size=400)}),
        ("max_cohort", {"num_clients": 21, "num_neighbors": 20, "threshold": 20, "quorum": 20}),
    ],
)
def test_terms_that_the_client_does_not_accept_are_refused(
    rule: str, changes: dict[str, Any]
) -> None:
    """The coordinator itself signed them; the refusal names the rule of the client's policy."""
    made = replace(TERMS, **changes)
    error = require_refusal(Stage.ADVERTISE, lambda _: sign(made))
    assert isinstance(error, PolicyViolation)
    assert error.rule == rule
    assert f"`{rule}`" in str(error)


def patch_bytes(old: bytes, new: bytes) -> Lie:
    """Return a lie that replaces bytes of the terms and signs the result."""

    def lie(message: Message) -> bytes:
        assert isinstance(message, SignedTerms)
        data = message.terms.to_bytes()
        assert data.count(old) == 1
        changed = data.replace(old, new)
        signature = CAST.signer.sign(keys.build_signed_text(b"terms", changed))
        return messages.encode(message)[: messages.HEADER_BYTES] + signature + changed

    return lie


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def test_a_threshold_of_one_cannot_be_said() -> None:
    """One share would reveal a secret. n, k, t, q and min_survivors follow each other in bytes."""
    before = numbers(N, N - 1, 5, 5, 5)
    error = require_refusal(Stage.ADVERTISE, patch_bytes(before, numbers(N, N - 1, 1, 5, 5)))
    assert isinstance(error, ProtocolError)
    assert "threshold is 1" in str(error)
    error = require_refusal(Stage.ADVERTISE, patch_bytes(before, numbers(N, N - 1, 5, 5, 1)))
    assert "min_survivors is 1" in str(error), "a sum of one is that client's own"


@pytest.mark.parametrize("modulus_bits", [1, 2, 16])
def test_a_modulus_too_small_for_the_sum_cannot_be_said(modulus_bits: int) -> None:
    """Modulo 2 a sum of large numbers is only a parity; modulo 2**16 the levels overflow."""
    lane = TERMS.lanes[1]
    before = struct.pack("<QBB", lane.max_level, lane.modulus_bits, 1)
    after = struct.pack("<QBB", lane.max_level, modulus_bits, 1)
    error = require_refusal(Stage.ADVERTISE, patch_bytes(before, after))
    assert isinstance(error, ProtocolError)
    assert "modulus" in str(error) or "overflow" in str(error)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda m: replace(m, signature=bytes(64)), "not signed by the pinned coordinator"),
        (
            lambda m: replace(m, terms=replace(m.terms, round_num=4)),
            "not signed by the pinned coordinator",
        ),
        (lambda _: sign(replace(TERMS, run_id=bytes(16))), "another run"),
        (
            lambda m: SignedTerms(
                terms=m.terms, signature=keys.create_signer()[0].sign(build_terms_text(m.terms))
            ),
            "not signed by the pinned coordinator",
        ),
    ],
)
def test_terms_of_anybody_else_are_refused(lie: Lie, reason: str) -> None:
    error = require_refusal(Stage.ADVERTISE, lie)
    assert isinstance(error, AggregationAborted)
    assert reason in error.reason


def test_clients_that_are_told_different_terms_do_not_understand_each_other() -> None:
    """The victim accepts other terms, which its policy allows, but its advert is then useless."""
    other = sign(replace(TERMS, attempt=1))
    liar = Liar(Stage.ADVERTISE, Way.DOWN, lambda _: other)
    result = run(liar)
    assert "not signed by it for this session" in str(result.refusals[VICTIM])
    assert VICTIM not in result.outcome.survivors
    # If the coordinator accepts it all the same, the other clients notice.
    adverts = adverts_of({i: other if i == VICTIM else sign(TERMS) for i in IDS}, cast=CAST)
    for client_id, (advert, state) in adverts.items():
        assert advert.client_id == client_id
        roster = told(client_id, (one for one, _ in adverts.values()))
        with pytest.raises(AggregationAborted, match="not signed by it for this session"):
            share(CAST.clients[client_id], roster, state)


def adverts_of(
    terms: Mapping[ClientId, SignedTerms], *, cast: Cast
) -> dict[ClientId, tuple[Advert, ClientState]]:
    return {i: cast.clients[i].advertise(terms[i], FRESH[i]) for i in terms}


def share(client: SecureClient, roster: Roster, state: ClientState) -> tuple[Shares, ClientState]:
    assert isinstance(state.step, AdvertisedStep)
    return client.share(roster, state, state.step)


# --- R1: the roster -------------------------------------------------------------------------


def told(client_id: ClientId, adverts: Iterable[Advert], terms: Terms = TERMS) -> Roster:
    return roster_for(client_id, terms, adverts, directory=CAST.clients[VICTIM].directory)


def change_advert(client_id: ClientId, change: Callable[[Advert], Advert]) -> Lie:
    def lie(message: Message) -> Message:
        assert isinstance(message, Roster)
        return told(
            VICTIM,
            (
                change(advert) if advert.client_id == client_id else advert
                for advert in message.adverts
            ),
        )

    return lie


def invent(advert: Advert) -> Advert:
    """Return an advert with keys that the liar made, signed by an identity that it made."""
    signer, _ = keys.create_signer()
    fresh = replace(
        advert,
        packet_key=keys.KeyAgreement(SecretBytes.generate(32)).public_key,
        mask_key=keys.KeyAgreement(SecretBytes.generate(32)).public_key,
    )
    text = keys.build_signed_text(b"advert", TERMS.session, fresh.encode_signed_part())
    return replace(fresh, signature=signer.sign(text))


def unknown(message: Message) -> Message:
    assert isinstance(message, Roster)
    stranger = invent(replace(message.adverts[-1], client_id=ClientId(999)))
    return told(VICTIM, (*message.adverts[:-1], stranger))


def cut(*, keep: int) -> Lie:
    def lie(message: Message) -> Message:
        assert isinstance(message, Roster)
        return told(VICTIM, message.adverts[:keep])

    return lie


def crowd(message: Message) -> Message:
    assert isinstance(message, Roster)
    more = (replace(message.adverts[-1], client_id=ClientId(1000 + i)) for i in range(3))
    return told(VICTIM, (*message.adverts, *more))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (change_advert(OTHER, invent), f"advert of client {OTHER} is not signed"),
        (change_advert(OTHER, lambda a: replace(a, mask_key=bytes(32))), "is not signed"),
        (change_advert(OTHER, lambda a: replace(a, nonce=bytes(16))), "is not signed"),
        (unknown, "client 999 is not in the pinned directory"),
        (change_advert(VICTIM, invent), "own advert is missing or altered"),
        (cut(keep=2), "2 clients in the roster, min_survivors is 5"),
        (cut(keep=4), "4 clients in the roster, min_survivors is 5"),
        (crowd, "10 clients in the roster, more than the"),
    ],
)
def test_a_roster_with_invented_neighbors_is_refused(lie: Lie, reason: str) -> None:
    """Otherwise the liar could agree on masks with the victim itself, and remove them."""
    error = require_refusal(Stage.SHARE, lie)
    assert isinstance(error, AggregationAborted)
    assert reason in error.reason


def test_a_roster_without_the_victim_is_refused() -> None:
    def lie(message: Message) -> Message:
        assert isinstance(message, Roster)
        return told(VICTIM, (a for a in message.adverts if a.client_id != VICTIM))

    assert "own advert is missing" in str(require_refusal(Stage.SHARE, lie))


def test_a_client_that_stands_twice_in_a_roster_is_no_message() -> None:
    def lie(message: Message) -> Message:
        assert isinstance(message, Roster)
        return told(VICTIM, (*message.adverts[:-1], message.adverts[-2]))

    assert "strictly ascending" in str(require_refusal(Stage.SHARE, lie))


def test_adverts_of_an_earlier_session_are_refused() -> None:
    """Even adverts of the same round: with another attempt the terms have another hash."""
    earlier = adverts_of(dict.fromkeys(IDS, sign(replace(TERMS, attempt=1))), cast=CAST)

    def lie(message: Message) -> Message:
        assert isinstance(message, Roster)
        return told(
            VICTIM,
            (a if a.client_id == VICTIM else earlier[a.client_id][0] for a in message.adverts),
        )

    assert "not signed by it for this session" in str(require_refusal(Stage.SHARE, lie))


def test_clients_that_are_shown_different_rosters_do_not_understand_each_other() -> None:
    """Both rosters are real, but one lacks a client, so sessions and hence packet keys differ."""
    paused = until(Stage.SHARE)
    whole = paused.down[VICTIM]
    assert isinstance(whole, Roster)
    part = told(VICTIM, (a for a in whole.adverts if a.client_id != THIRD))
    down: dict[ClientId, Message] = {**paused.down, VICTIM: part}
    shares: dict[ClientId, Shares] = {}
    for i, message in down.items():
        reply, paused.states[i] = answer(i, message, paused.states[i])
        assert isinstance(reply, Shares)
        shares[i] = reply
    assert shares[VICTIM].session != shares[OTHER].session == shares[THIRD].session
    packets = {
        i: shares[i].packets[[j for j in IDS if j != i].index(VICTIM)]
        for i in IDS
        if i not in (VICTIM, THIRD)
    }
    with pytest.raises(AggregationAborted, match="cannot be decrypted"):
        answer(VICTIM, Packets(packets=packets), paused.states[VICTIM])


# --- R2: the packets ------------------------------------------------------------------------


def change_packets(
    change: Callable[[dict[ClientId, bytes]], object],
) -> Lie:
    def lie(message: Message) -> Message:
        assert isinstance(message, Packets)
        packets = dict(message.packets)
        change(packets)
        return Packets(packets=packets)

    return lie


def swap(packets: dict[ClientId, bytes]) -> None:
    packets[OTHER], packets[THIRD] = packets[THIRD], packets[OTHER]


def flip(packets: dict[ClientId, bytes]) -> None:
    packets[OTHER] = packets[OTHER][:5] + bytes([packets[OTHER][5] ^ 1]) + packets[OTHER][6:]


def starve(packets: dict[ClientId, bytes]) -> None:
    for client_id in [i for i in IDS if i in packets][:3]:
        del packets[client_id]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap, "cannot be decrypted"),
        (flip, f"the packet of client {OTHER} cannot be decrypted"),
        (starve, "3 neighbors shared, too few for the threshold 5"),
        (
            lambda p: p.update({ClientId(999): bytes(92)}),
            "client 999 sent a packet but is not a neighbor",
        ),
        (
            lambda p: p.update({VICTIM: bytes(92)}),
            f"client {VICTIM} sent a packet but is not a neighbor",
        ),
    ],
)
def test_packets_that_are_not_those_of_the_neighbors_are_refused(
    change: Callable[[dict[ClientId, bytes]], object], reason: str
) -> None:
    error = require_refusal(Stage.MASK, change_packets(change))
    assert isinstance(error, AggregationAborted)
    assert reason in error.reason


def test_packets_of_another_session_do_not_open() -> None:
    kept: dict[ClientId, bytes] = {}

    def keep(message: Message) -> Message:
        assert isinstance(message, Packets)
        kept.update(message.packets)
        return message

    run(Liar(Stage.MASK, Way.DOWN, keep))
    error = require_refusal(Stage.MASK, change_packets(lambda p: p.update({OTHER: kept[OTHER]})))
    assert "cannot be decrypted" in str(error)


def test_masks_are_only_made_for_the_request_that_the_terms_name() -> None:
    """A coordinator cannot have an update for one model summed as an update for another."""

    def other(client_id: ClientId) -> Contribution:
        return replace(contribution(client_id), request_hash=bytes(32))

    with pytest.raises(AggregationAborted, match="0 clients are left"):
        rehearse(
            TERMS,
            cast=CAST,
            contributions={i: other(i) for i in IDS},
            states=FRESH,
            post=deliver,
            num_threads=1,
        )


# --- R3: the survivors ----------------------------------------------------------------------


def survivors(ids: Iterable[ClientId]) -> Lie:
    return lambda _: survivors_of(ids, IDS)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (survivors(IDS[:4]), "4 survivors, min_survivors is 5"),
        (survivors([VICTIM]), "1 survivors, min_survivors is 5"),
        (survivors(i for i in IDS if i != VICTIM), "not among the survivors"),
        (lambda _: Survivors(ranks=b"\xff"), "bits beyond the 7 in the roster"),
        (lambda _: Survivors(ranks=b"\x7f\0"), "2 bytes, not the 1 of 7 bits"),
        (survivors([]), "not among the survivors"),
    ],
)
def test_survivors_that_cannot_be_the_honest_ones_are_not_signed(lie: Lie, reason: str) -> None:
    error = require_refusal(Stage.CONFIRM, lie)
    assert isinstance(error, AggregationAborted)
    assert reason in error.reason


def test_survivors_among_whom_the_victim_stands_alone_are_not_signed() -> None:
    """In a sparse graph the liar claims that all but one of the victim's neighbors dropped.

    There are enough survivors, but far away: the victim's value would be in a sum of two.
    """
    terms = replace(
        TERMS,
        topology=Topology.SPARSE,
        num_neighbors=4,
        threshold=3,
        min_survivors=3,
        adversary=CURIOUS,
    )
    lax = replace(POLICY, adversary=CURIOUS, allow_sparse=True, corruption=0.0, min_cohort=3)
    cast = Cast.of(IDS, policy=lax, num_threads=1)
    near: list[ClientId] = []

    def remember(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        if (stage, way, client_id) == (Stage.SHARE, Way.DOWN, VICTIM):
            roster = messages.decode(data)
            assert isinstance(roster, Roster)
            near.extend(a.client_id for a in roster.adverts if a.client_id != VICTIM)
        if (stage, way, client_id) == (Stage.UNMASK, Way.DOWN, VICTIM):
            far = [i for i in IDS if i not in near]
            return messages.encode(survivors_of(sorted([*far, near[0]]), IDS))
        return data

    result = run(remember, terms=terms, cast=cast)
    assert "1 of this client's holders survive, the threshold is 3" in str(result.refusals[VICTIM])
    assert run(terms=terms, cast=cast).refusals == {}


def test_a_survivor_whose_packet_was_withheld_is_found() -> None:
    """It masks with the victim, but the victim does not mask with it."""
    liar = Liar(Stage.MASK, Way.DOWN, change_packets(lambda p: p.pop(OTHER)))
    with pytest.raises(AggregationAborted) as caught:
        run(liar)
    assert caught.value.stage == Stage.UNMASK
    assert (VICTIM, Stage.MASK) in liar.heard, "five packets of six are enough to go on"
    assert (VICTIM, Stage.CONFIRM) not in liar.heard


def test_a_client_signs_one_set_of_survivors_in_a_session() -> None:
    """A second list is refused, whatever it contains; so is the first one when it is sent again."""
    client, state = CAST.clients[VICTIM], until(Stage.CONFIRM).states[VICTIM]
    honest = survivors_of(IDS, IDS)
    _, signed = client.handle(honest, state, contribute=lambda _: contribution(VICTIM))
    for ids in (IDS, IDS[:6]):
        again = survivors_of(ids, IDS)
        with pytest.raises(ProtocolError, match="answered once"):
            client.handle(again, signed, contribute=lambda _: contribution(VICTIM))


@dataclass
class Paused:
    """An honest session before one stage: the server's stage, its messages, the clients' states."""

    server: Any
    down: Mapping[ClientId, Message]
    states: dict[ClientId, ClientState]


def until(stage: Stage, *, terms: Terms = TERMS) -> Paused:
    """Run an honest session up to ``stage``."""
    states = dict(FRESH)

    def ask(server: Any, down: Mapping[ClientId, Message]) -> Any:
        for i, message in down.items():
            reply, states[i] = answer(i, message, states[i])
            server.receive(i, reply)
        return server.close()

    signed, server = open_session(
        terms, signer=CAST.signer, directory=CAST.clients[VICTIM].directory
    )
    down: Mapping[ClientId, Message] = dict.fromkeys(IDS, signed)
    for at in Stage:
        if at is stage:
            break
        message, server = ask(server, down)
        down = message if isinstance(message, Mapping) else dict.fromkeys(IDS, message)
    return Paused(server, down, states)


def answer(
    client_id: ClientId, message: Message, state: ClientState
) -> tuple[Message, ClientState]:
    return CAST.clients[client_id].handle(
        message, state, contribute=lambda _: contribution(client_id)
    )


# --- R4: the release ------------------------------------------------------------------------


def change_signatures(
    change: Callable[[dict[ClientId, bytes]], object],
) -> Lie:
    def lie(message: Message) -> Message:
        assert isinstance(message, Signatures)
        signatures = signatures_in(message, IDS)
        change(signatures)
        return signatures_of(signatures, IDS)

    return lie


def fill(signatures: dict[ClientId, bytes]) -> None:
    signatures[OTHER] = bytes(64)


def borrow(signatures: dict[ClientId, bytes]) -> None:
    signatures[THIRD] = signatures[OTHER]


def thin(signatures: dict[ClientId, bytes]) -> None:
    for client_id in list(signatures)[2:]:
        del signatures[client_id]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fill, f"client {OTHER} did not sign these survivors"),
        (borrow, f"client {THIRD} did not sign these survivors"),
        (thin, "2 survivors confirmed the survivors, the quorum is 5"),
        (dict.clear, "0 survivors confirmed the survivors, the quorum is 5"),
    ],
)
def test_nothing_is_released_without_a_quorum_of_true_signatures(
    change: Callable[[dict[ClientId, bytes]], object], reason: str
) -> None:
    error = require_refusal(Stage.UNMASK, change_signatures(change))
    assert isinstance(error, AggregationAborted)
    assert reason in error.reason


def test_two_sets_of_survivors_never_both_get_a_quorum() -> None:
    """The liar tells three clients that OTHER dropped, and the rest that it did not.

    Neither set gets enough signatures, so the liar gets neither of OTHER's secrets.
    """
    paused = until(Stage.CONFIRM)
    without = survivors_of([i for i in IDS if i != OTHER], IDS)
    down = {i: (without if i in IDS[:3] else paused.down[i]) for i in IDS}
    signatures: dict[ClientId, bytes] = {}
    for i, message in down.items():
        reply, paused.states[i] = answer(i, message, paused.states[i])
        assert isinstance(reply, messages.SurvivorSignature)
        signatures[i] = reply.signature
    for i in IDS:
        same = {j: signatures[j] for j in IDS if down[j] == down[i]}
        for offered in (same, {**same, THIRD: signatures[THIRD], IDS[0]: signatures[IDS[0]]}):
            with pytest.raises(
                AggregationAborted, match=r"quorum|did not sign|not among the survivors"
            ):
                answer(i, signatures_of(offered, IDS), paused.states[i])


def test_shares_are_released_once_in_a_session() -> None:
    """The same request gets the same shares again; a session that is started again gets none."""
    paused = until(Stage.UNMASK)
    said, after = answer(VICTIM, paused.down[VICTIM], paused.states[VICTIM])
    again, unchanged = answer(VICTIM, paused.down[VICTIM], after)
    assert messages.encode(again) == messages.encode(said)
    assert unchanged is after
    with pytest.raises(AggregationAborted, match="quorum"):
        answer(VICTIM, signatures_of({}, IDS), after)
    with pytest.raises(AggregationAborted, match="has released its shares"):
        answer(VICTIM, survivors_of(IDS[:-1], IDS), after)
    restarted = ClientState.from_bytes(after.to_bytes())
    with pytest.raises(PolicyViolation, match="one release a session"):
        answer(VICTIM, sign(TERMS), restarted)
    with pytest.raises(PolicyViolation, match="one release a session"):
        answer(VICTIM, sign(replace(TERMS, round_num=2)), restarted)
    with pytest.raises(PolicyViolation, match="max_releases_per_round"):
        answer(VICTIM, sign(replace(TERMS, attempt=1)), restarted)
    answer(VICTIM, sign(replace(TERMS, round_num=4)), restarted)


def test_an_attempt_that_released_nothing_may_be_tried_again() -> None:
    """A coordinator that crashed before the last stage retries, with fresh keys."""
    paused = until(Stage.UNMASK)
    states = {i: ClientState.from_bytes(s.to_bytes()) for i, s in paused.states.items()}
    retried = replace(TERMS, attempt=1)
    assert mean_of(run(terms=retried, states=states), retried) < 1e-4


@pytest.mark.parametrize("adversary", Adversary)
def test_a_share_of_one_secret_is_released_of_each_owner_never_of_both(
    adversary: Adversary,
) -> None:
    """No message of the protocol could ask for both: only survivors are ever named."""
    terms = make_terms(adversary)
    cast = CAST if adversary is ACTIVE else curious_cast()
    dropped = IDS[0]

    def lose(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        heard.setdefault((client_id, stage), data) if way is Way.UP else None
        return None if (stage, way, client_id) == (Stage.MASK, Way.UP, dropped) else data

    heard: dict[tuple[ClientId, Stage], bytes] = {}
    result = run(lose, terms=terms, cast=cast)
    assert result.outcome.survivors == tuple(i for i in IDS if i != dropped)
    release = messages.decode(heard[VICTIM, Stage.UNMASK])
    assert isinstance(release, ShareRelease)
    assert set(release.shares) == set(IDS)
    assert all(len(share.reveal()) == shamir.SHARE_BYTES for share in release.shares.values())
    assert [f.name for f in fields(Survivors)] == ["ranks"]
    assert [f.name for f in fields(ShareRelease)] == ["session", "shares"]


def test_a_vector_that_comes_late_stays_masked() -> None:
    """A liar with the mask key of the client, as if it had dropped, still lacks the self-mask."""
    late: dict[ClientId, bytes] = {}

    def keep(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        if (stage, way, client_id) == (Stage.MASK, Way.UP, VICTIM):
            late[client_id] = data
            return None
        return data

    assert VICTIM not in run(keep).outcome.survivors
    paused = until(Stage.MASK)
    step = paused.states[VICTIM].step
    assert isinstance(step, SharedStep)
    reply, _ = answer(VICTIM, paused.down[VICTIM], paused.states[VICTIM])
    assert isinstance(reply, MaskedVector)
    words = masking.zeros(TERMS.lanes)
    masking.add_packed(words, reply.packed, lanes=TERMS.lanes)
    others = [i for i in IDS if i != VICTIM]
    agreement = keys.KeyAgreement(step.mask_secret)
    pairs = derive_pair_keys(agreement, VICTIM, others, session=step.session)
    masking.fold(words, pairs.inverse(), num_threads=1)
    with pytest.raises(ValueError, match="a mask is left"):
        decode_sum(TERMS, words, num_clients=1)
    own = keys.derive_self_mask_key(step.seed, session=step.session.id, client_id=VICTIM)
    masking.fold(words, masking.MaskKeys(plus=[], minus=[own]), num_threads=1)
    total = decode_sum(TERMS, words, num_clients=1)  # control: the self-mask was what hid it
    assert total.weight == contribution(VICTIM).weight


@pytest.mark.parametrize("stage", Stage)
def test_a_message_out_of_turn_is_not_answered(stage: Stage) -> None:
    """All messages but the next one are refused; only new terms may start again at any time."""
    state = until(stage).states[VICTIM]
    for other in Stage:
        if other in (stage, Stage.ADVERTISE):
            continue
        message = until(other).down[VICTIM]
        with pytest.raises(ProtocolError, match="is out of order"):
            answer(VICTIM, message, state)


def test_a_message_of_a_client_is_no_message_of_the_coordinator() -> None:
    state = until(Stage.SHARE).states[VICTIM]
    step = state.step
    assert isinstance(step, AdvertisedStep)
    with pytest.raises(ProtocolError, match="Advert is out of order"):
        answer(VICTIM, step.advert, state)


# --- Mistakes of others ---------------------------------------------------------------------


def test_the_self_seed_has_256_bits() -> None:
    seeds = [until(Stage.MASK).states[VICTIM].step for _ in range(2)]
    values = [step.seed for step in seeds if isinstance(step, SharedStep)]
    assert [len(value.reveal()) for value in values] == [32, 32]
    assert values[0] != values[1]


def test_every_pair_has_its_own_key() -> None:
    """No two pairs share a key, so a client that colludes with the liar knows only its own."""
    step = {i: state.step for i, state in until(Stage.MASK).states.items()}
    found = []
    for one, other in combinations(IDS, 2):
        of_one, of_other = step[one], step[other]
        assert isinstance(of_one, SharedStep)
        assert isinstance(of_other, SharedStep)
        session = of_one.session
        left = derive_pair_keys(
            keys.KeyAgreement(of_one.mask_secret), one, [other], session=session
        )
        right = derive_pair_keys(
            keys.KeyAgreement(of_other.mask_secret), other, [one], session=session
        )
        assert [k.reveal() for k in left.plus] == [k.reveal() for k in right.minus]
        found.append(left.plus[0].reveal())
    assert len(set(found)) == len(found) == N * (N - 1) // 2


def upload(client_id: ClientId, paused: Paused) -> tuple[Words, ...]:
    reply, _ = answer(client_id, paused.down[client_id], paused.states[client_id])
    assert isinstance(reply, MaskedVector)
    words = masking.zeros(TERMS.lanes)
    masking.add_packed(words, reply.packed, lanes=TERMS.lanes)
    return words


def test_no_mask_is_used_again_when_a_round_is_retried() -> None:
    """Even under the same terms: adverts have fresh keys, so the session differs."""
    first, again = until(Stage.MASK), until(Stage.MASK)
    retried = until(Stage.MASK, terms=replace(TERMS, attempt=1))
    vectors = [upload(VICTIM, paused) for paused in (first, again, retried)]
    for one, other in combinations(vectors, 2):
        assert len(np.unique((one[1] - other[1]) // 4)) == SIZE
        assert abs(int(one[0][0]) - int(other[0][0])) > 1 << 20
    # Control: the same state of one session gives the same masks, and only rounding differs.
    same = upload(VICTIM, first)
    assert np.abs((same[1] - vectors[0][1]).astype(np.int32)).max() <= 1
    assert same[0][0] == vectors[0][0]


def test_weights_and_metrics_travel_inside_the_sum() -> None:
    """No message from a client has a field with its values in the clear; its weight is masked."""
    named = {kind.__name__: [f.name for f in fields(kind)] for kind in (Shares, MaskedVector)}
    assert named == {
        "Shares": ["session", "commitment", "packets"],
        "MaskedVector": ["session", "packed"],
    }
    weights = {int(upload(VICTIM, until(Stage.MASK))[0][0]) for _ in range(3)}
    assert len(weights) == 3
    assert min(weights) > 1 << 40


def test_an_upload_is_no_larger_than_its_packed_vector() -> None:
    """Other implementations send int64 per number. For 100,000 numbers the rest is below 4 %."""
    size = 100_000
    lane = build_vector_lane(
        "delta",
        size=size,
        bound=1.0,
        modulus_bits=32,
        num_clients=100,
        weighted=True,
    )
    assert lane.modulus_bits == 32
    words = masking.zeros([lane])
    vector = MaskedVector(session=bytes(32), packed=masking.pack([lane], words))
    total = len(messages.encode(vector))
    total += (
        152
        + 64
        + len(
            messages.encode(
                Shares(session=bytes(32), commitment=bytes(32), packets=(bytes(92),) * 99)
            )
        )
    )
    total += len(
        messages.encode(
            ShareRelease(
                session=bytes(32),
                shares={ClientId(i): SecretBytes(bytes(36)) for i in range(100)},
            )
        )
    )
    assert total <= 1.04 * 4 * size
    assert len(messages.encode(vector)) <= 1.001 * 4 * size


@pytest.mark.parametrize("lost", [Stage.ADVERTISE, Stage.SHARE])
def test_a_client_that_is_lost_in_set_up_is_no_dropped_one_later(lost: Stage) -> None:
    """No client masks with it, so its key is not needed and no mask of it is left."""

    def lose(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        return None if (stage, client_id) == (lost, OTHER) and way is Way.UP else data

    result = run(lose)
    assert result.refusals == {}
    assert OTHER not in result.outcome.survivors
    assert mean_of(result) < 1e-4


# --- Clients that cheat ---------------------------------------------------------------------


def cheating(stage: Stage, lie: Lie) -> Rehearsal:
    return run(Liar(stage, Way.UP, lie, victim=OTHER))


@pytest.mark.parametrize(
    ("stage", "lie", "reason"),
    [
        (Stage.ADVERTISE, lambda a: replace(a, client_id=VICTIM), "sent the advert of"),
        (Stage.ADVERTISE, lambda a: replace(a, mask_key=bytes(32)), "is not signed by it"),
        (Stage.ADVERTISE, lambda _: b"FLSA" + bytes([messages.VERSION]), "ends 1 bytes early"),
        (Stage.ADVERTISE, lambda _: Survivors(ranks=b""), "Survivors, not Advert"),
        (Stage.SHARE, lambda s: replace(s, session=bytes(32)), "another session"),
        (Stage.SHARE, lambda s: replace(s, packets=s.packets[:-1]), "5 packets to 6 neighbors"),
        (Stage.SHARE, lambda s: messages.encode(s)[:-1], "1 bytes early"),
        (Stage.MASK, lambda v: replace(v, session=bytes(32)), "another session"),
        (Stage.MASK, lambda v: replace(v, packed=v.packed[:-1]), "that the terms require"),
        (Stage.MASK, lambda v: replace(v, packed=bytes(v.packed) * 1000), "that the terms require"),
        (Stage.CONFIRM, lambda s: replace(s, signature=bytes(64)), "did not sign"),
        (Stage.UNMASK, lambda r: replace(r, session=bytes(32)), "another session"),
        (Stage.UNMASK, lambda r: replace(r, shares={}), "released shares of 0 clients"),
        (
            Stage.UNMASK,
            lambda r: replace(r, shares={**r.shares, ClientId(999): SecretBytes(bytes(36))}),
            "released shares of 8 clients",
        ),
    ],
)
def test_a_reply_that_cannot_be_used_is_that_clients_failure(
    stage: Stage, lie: Lie, reason: str
) -> None:
    """The others continue to an exact sum."""
    result = cheating(stage, lie)
    assert isinstance(result.refusals[OTHER], ProtocolError)
    assert reason in str(result.refusals[OTHER])
    assert mean_of(result) < 1e-4


def test_a_well_signed_advert_with_a_weak_key_is_refused() -> None:
    paused = until(Stage.ADVERTISE)
    for client_id in (VICTIM, OTHER):
        advert, _ = answer(client_id, paused.down[client_id], paused.states[client_id])
        assert isinstance(advert, Advert)
        if client_id == VICTIM:
            paused.server.receive(client_id, advert)  # control
            continue
        weak = replace(advert, mask_key=bytes(32))
        text = keys.build_signed_text(b"advert", TERMS.session, weak.encode_signed_part())
        weak = replace(weak, signature=CAST.clients[client_id].signer.sign(text))
        with pytest.raises(ProtocolError, match="low order"):
            paused.server.receive(client_id, weak)


@pytest.mark.parametrize("stage", Stage)
def test_a_reply_counts_once(stage: Stage) -> None:
    """Replies from clients outside the stage do not count at all."""
    paused = until(stage)
    reply, _ = answer(VICTIM, paused.down[VICTIM], paused.states[VICTIM])
    paused.server.receive(VICTIM, reply)
    with pytest.raises(ProtocolError, match="has answered this stage already"):
        paused.server.receive(VICTIM, reply)
    with pytest.raises(ProtocolError, match=r"does not take part|sent the advert of"):
        paused.server.receive(ClientId(999), reply)
    assert paused.server.num_received == 1


def test_one_holder_with_false_shares_is_found_and_left_out() -> None:
    result = cheating(
        Stage.UNMASK,
        lambda r: replace(r, shares={i: spoiled(share) for i, share in r.shares.items()}),
    )
    assert result.outcome.suspects == {OTHER}
    assert mean_of(result) < 1e-4
    assert run().outcome.suspects == frozenset()


def test_a_false_share_of_one_owner_is_found_as_well() -> None:
    result = cheating(
        Stage.UNMASK, lambda r: replace(r, shares={**r.shares, VICTIM: spoiled(r.shares[VICTIM])})
    )
    assert result.outcome.suspects <= {OTHER}
    assert mean_of(result) < 1e-4


def test_too_many_false_shares_abort() -> None:
    """Two of seven lie, with t = 5: leaving out any single holder does not help."""

    def spoil_two(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes:
        if stage is not Stage.UNMASK or way is not Way.UP or client_id not in IDS[:2]:
            return data
        release = messages.decode(data)
        assert isinstance(release, ShareRelease)
        limb = IDS.index(client_id)
        false = {i: spoiled(share, limb=limb) for i, share in release.shares.items()}
        return messages.encode(replace(release, shares=false))

    with pytest.raises(AggregationAborted, match="or more than 1 of 7 holders did"):
        run(spoil_two)


@pytest.mark.slow
@pytest.mark.parametrize("num_liars", [2, 6])
def test_half_of_the_spare_holders_may_lie_and_are_named(num_liars: int) -> None:
    """Six of 30 with t = 17, each lying about every client; this once failed with two."""
    ids = [ClientId(each) for each in range(1, 31)]
    cast = Cast.of(ids, policy=replace(POLICY, max_cohort=30, corruption=0.1), num_threads=1)
    terms = propose(
        derive(
            30,
            assumptions=Assumptions(
                adversary=ACTIVE,
                topology=Topology.COMPLETE,
                corruption=0.1,
                dropout=0.3,
                sigma_bits=40,
                eta_bits=30,
            ),
        ),
        run_id=RUN,
        round_num=3,
        attempt=0,
        request_hash=REQUEST,
        max_weight=0,
        lanes=(
            build_vector_lane(
                "delta", size=4, bound=1.0, modulus_bits=32, num_clients=30, weighted=False
            ),
        ),
    )
    liars = set(ids[::4][:num_liars])

    def lie(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes:
        if stage is not Stage.UNMASK or way is not Way.UP or client_id not in liars:
            return data
        release = messages.decode(data)
        assert isinstance(release, ShareRelease)
        false = {i: spoiled(share, limb=int(i) % 9) for i, share in release.shares.items()}
        return messages.encode(replace(release, shares=false))

    one = Contribution(values={"delta": np.full(4, 0.5)}, weight=0, request_hash=REQUEST)
    result = rehearse(
        terms,
        cast=cast,
        contributions=dict.fromkeys(ids, one),
        states=dict.fromkeys(ids, ClientState.fresh(RUN)),
        post=lie,
        num_threads=1,
    )
    assert terms.threshold == 17
    assert result.outcome.suspects == liars
    assert float(np.abs(result.outcome.total.sums["delta"] - 15.0).max()) < 1e-4


def test_shares_that_are_none_of_the_field_are_refused_by_name() -> None:
    """Each share has one encoding: p would be a second one of 0."""
    other = (shamir.PRIME).to_bytes(4, "little") * shamir.NUM_LIMBS
    result = cheating(
        Stage.UNMASK,
        lambda r: replace(r, shares={**r.shares, VICTIM: SecretBytes(other)}),
    )
    assert "not below p" in str(result.refusals[OTHER])
    assert result.outcome.suspects == frozenset()


def test_a_commitment_to_another_seed_aborts() -> None:
    """Its self-mask could not be verified, so nothing is released."""
    with pytest.raises(AggregationAborted, match=f"shares of client {OTHER} do not give"):
        cheating(Stage.SHARE, lambda s: replace(s, commitment=bytes(32)))


def test_shares_of_another_secret_abort() -> None:
    """The shares are properly sealed, but of another secret than the advertised key's."""
    paused = until(Stage.SHARE)
    state = paused.states[OTHER]
    assert isinstance(state.step, AdvertisedStep)
    false = replace(state.step, mask_secret=SecretBytes.generate(32))
    replies = {
        i: answer(i, paused.down[i], paused.states[i] if i != OTHER else state.with_step(false))
        for i in IDS
    }
    for i, (reply, after) in replies.items():
        paused.server.receive(i, reply)
        paused.states[i] = after
    packets, server = paused.server.close()
    for i in IDS:
        if i == OTHER:
            continue  # it drops out, so its mask key is needed
        reply, paused.states[i] = answer(i, packets[i], paused.states[i])
        server.receive(i, reply)
    told, server = server.close()
    for i in server.survivors:
        reply, paused.states[i] = answer(i, told, paused.states[i])
        server.receive(i, reply)
    signatures, server = server.close()
    for i in server.survivors:
        reply, paused.states[i] = answer(i, signatures, paused.states[i])
        server.receive(i, reply)
    assert not server.is_enough, "there are t shares of each, and one secret is not found"
    with pytest.raises(AggregationAborted, match=f"shares of client {OTHER} do not give"):
        server.close(num_threads=1)


def test_a_garbage_packet_stops_those_it_was_sent_to() -> None:
    """They name the sender, so that it can be left out of the next attempt."""
    with pytest.raises(AggregationAborted):
        cheating(Stage.SHARE, lambda s: replace(s, packets=(bytes(92),) * len(s.packets)))
    one = cheating(Stage.SHARE, lambda s: replace(s, packets=(bytes(92), *s.packets[1:])))
    (client_id,) = one.refusals
    assert client_id == IDS[0]
    assert f"the packet of client {OTHER} cannot be decrypted" in str(one.refusals[client_id])
    assert mean_of(one) < 1e-4


def test_an_unmasked_sum_that_nobody_can_reach_is_not_released() -> None:
    """A vector of noise is noticed; one within bounds is not, as masking gives no integrity."""
    noise = bytes(np.random.default_rng(0).integers(0, 256, TERMS.num_bytes, np.uint8))
    with pytest.raises(AggregationAborted, match="a mask is left in it"):
        cheating(Stage.MASK, lambda v: replace(v, packed=noise))


# --- Nothing secret is shown ----------------------------------------------------------------


def test_secrets_are_in_no_representation() -> None:
    paused = until(Stage.MASK)
    step = paused.states[VICTIM].step
    assert isinstance(step, SharedStep)
    shown = repr(step) + repr(paused.states[VICTIM]) + repr(until(Stage.UNMASK).states[VICTIM])
    for secret in (step.seed, step.mask_secret, *step.opening.values()):
        assert repr(secret.reveal())[2:-1] not in shown
        assert secret.reveal().hex() not in shown
    last = until(Stage.UNMASK)
    release, _ = answer(VICTIM, last.down[VICTIM], last.states[VICTIM])
    assert "SecretBytes(36 bytes)" in repr(release)


def test_a_lane_that_was_never_agreed_is_not_summed() -> None:
    wrong = Contribution(values={"other": np.zeros(SIZE)}, weight=1, request_hash=REQUEST)
    with pytest.raises(ValueError, match="values for"):
        encode_contribution(TERMS, wrong, rounding_key=bytes(32))
    assert all(lane.role is not LaneRole.METRIC for lane in TERMS.lanes)
