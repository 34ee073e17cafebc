"""Sums are exact for all dropouts that leave a quorum; with more dropouts nothing is released."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import messages
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.fixed_point import LaneRole, build_vector_lane, build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms, propose
from tests.rehearsal import Cast, Post, Rehearsal, Way, rehearse
from tests.rosters import signatures_of

CURIOUS, ACTIVE = Adversary.HONEST_BUT_CURIOUS, Adversary.ACTIVE_SERVER
RUN, REQUEST, SIZE, MAX_WEIGHT = bytes(16), bytes(32), 5, 50
POLICY = TermsPolicy(
    adversary=CURIOUS,
    allow_sparse=True,
    corruption=0.0,
    sigma_bits=1,
    min_cohort=2,
    max_cohort=100,
    max_clip=1.0,
    max_weight=MAX_WEIGHT,
    max_upload_bytes=1 << 20,
    max_releases_per_round=1,
    max_draw_factor=2.0,
)
#: Ids from a larger population, so that ids and positions differ.
IDS = [ClientId(3 + 7 * i) for i in range(20)]
CASTS = {n: Cast.of(IDS[:n], policy=POLICY, num_threads=1) for n in range(2, 15)}

Drops = Mapping[ClientId, Stage]


def terms_for(n: int, *, adversary: Adversary, num_dropped: int) -> Terms:
    assumptions = Assumptions(
        adversary=adversary,
        topology=Topology.COMPLETE,
        corruption=0.0,
        dropout=num_dropped / n,
        sigma_bits=1,
        eta_bits=1,
    )
    lanes = (  # on the same grid for every n
        build_weight_lane(max_weight=MAX_WEIGHT, num_clients=n),
        build_vector_lane(
            "delta",
            size=SIZE,
            bound=1.0,
            modulus_bits=32,
            num_clients=len(IDS),
            weighted=True,
        ),
        build_vector_lane(
            "control",
            size=2,
            bound=0.25,
            modulus_bits=16,
            num_clients=len(IDS),
            weighted=False,
        ),
        build_vector_lane(
            "loss",
            size=1,
            bound=8.0,
            modulus_bits=32,
            num_clients=len(IDS),
            weighted=True,
            role=LaneRole.METRIC,
        ),
    )
    return propose(
        derive(n, assumptions=assumptions),
        run_id=RUN,
        round_num=0,
        attempt=0,
        request_hash=REQUEST,
        max_weight=MAX_WEIGHT,
        lanes=lanes,
    )


def contributions(n: int, *, seed: int) -> dict[ClientId, Contribution]:
    """Return values on the grid of their lanes, so that they are not rounded.

    A weight of W makes the factor 1; the control lane is not weighted at all.
    """
    rng = np.random.default_rng(seed)
    lanes = {lane.name: lane for lane in terms_for(2, adversary=CURIOUS, num_dropped=0).lanes}
    return {
        client_id: Contribution(
            values={
                name: rng.integers(-lane.max_level, lane.max_level, lane.size) * lane.step
                for name, lane in lanes.items()
                if lane.role is not LaneRole.WEIGHT
            },
            weight=MAX_WEIGHT,
            request_hash=REQUEST,
        )
        for client_id in IDS[:n]
    }


def losing(drops: Drops) -> Post:
    """Return a post that loses all replies of each dropped client from its stage on."""
    stages = list(Stage)

    def post(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        gone = client_id in drops and stages.index(stage) >= stages.index(drops[client_id])
        return None if gone and way is Way.UP else data

    return post


def run(
    terms: Terms, drops: Drops, *, seed: int = 0
) -> tuple[Rehearsal, dict[ClientId, Contribution]]:
    n = terms.num_clients
    given = contributions(n, seed=seed)
    result = rehearse(
        terms,
        cast=CASTS[n],
        contributions=given,
        states=dict.fromkeys(CASTS[n].clients, ClientState.fresh(RUN)),
        post=losing(drops),
        num_threads=1,
    )
    return result, given


def check(terms: Terms, drops: Drops, *, seed: int = 0) -> None:
    """Check that the sum is exactly that of the clients that sent a vector."""
    result, given = run(terms, drops, seed=seed)
    lost = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK)
    expected = [i for i in given if drops.get(i) not in lost]
    outcome = result.outcome
    assert list(outcome.survivors) == expected
    assert outcome.total.weight == MAX_WEIGHT * len(expected)
    for lane in terms.lanes:
        if lane.role is not LaneRole.WEIGHT:
            wanted = np.sum([given[i].values[lane.name] for i in expected], axis=0)
            levels = np.rint(wanted / lane.step)
            got = outcome.total.sums[lane.name] / lane.step
            assert np.abs(got - levels).max() < 1e-3, lane.name  # in whole levels, so it is exact


def patterns(n: int, num_dropped: int) -> Iterator[Drops]:
    """Yield every choice of ``num_dropped`` clients, each lost at any of the five stages."""
    for who in combinations(IDS[:n], num_dropped):
        for when in product(Stage, repeat=num_dropped):
            yield dict(zip(who, when, strict=True))


def every(largest: int) -> list[tuple[Adversary, int, int]]:
    """Return, for both adversaries, each n with the most dropouts that leave t clients."""
    found = []
    for n in range(2, largest + 1):
        found.append((CURIOUS, n, n - 2))
        found.append((ACTIVE, n, n - (n + 1) // 2 - 1))
    return found


def holds_for_all(adversary: Adversary, n: int, most: int) -> None:
    """Check all patterns of up to ``most`` dropouts."""
    terms = terms_for(n, adversary=adversary, num_dropped=most)
    assert terms.threshold <= n - most
    for num_dropped in range(most + 1):
        for drops in patterns(n, num_dropped):
            check(terms, drops)


@pytest.mark.parametrize(
    ("adversary", "n", "most"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] == 4 else ()) for case in every(4)],
)
def test_every_pattern_that_leaves_the_quorum_gives_the_exact_sum(
    adversary: Adversary, n: int, most: int
) -> None:
    holds_for_all(adversary, n, most)


def leaves_a_quorum(terms: Terms, drops: Drops) -> bool:
    """Return whether enough clients are left at each stage, by the definition of the protocol."""
    lost = Counter(drops.values())
    listed = terms.num_clients - lost[Stage.ADVERTISE]
    shared = listed - lost[Stage.SHARE]
    survivors = shared - lost[Stage.MASK]
    confirmed = survivors - lost[Stage.CONFIRM]
    released = confirmed - lost[Stage.UNMASK]
    is_signed = terms.adversary is CURIOUS or confirmed >= terms.quorum
    return survivors >= terms.min_survivors and is_signed and released >= terms.threshold


@pytest.mark.parametrize("adversary", Adversary)
@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_a_sum_is_released_if_and_only_if_a_quorum_is_left(adversary: Adversary, n: int) -> None:
    """Lose any number of clients, at every multiset of stages; a seed draws which clients."""
    most = n - 2 if adversary is CURIOUS else n - (n + 1) // 2 - 1
    terms = terms_for(n, adversary=adversary, num_dropped=most)
    found = Counter[bool]()
    for when in combinations_with_replacement((None, *Stage), n):
        order = Seed(0).derive(*map(str, when)).numpy().permutation(n)
        drops = {IDS[i]: at for i, at in zip(order.tolist(), when, strict=True) if at is not None}
        found[leaves_a_quorum(terms, drops)] += 1
        if leaves_a_quorum(terms, drops):
            check(terms, drops)
        else:
            with pytest.raises(AggregationAborted):
                run(terms, drops)
    assert min(found[True], found[False]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("adversary", Adversary)
def test_every_pattern_with_one_more_aborts_and_releases_nothing(adversary: Adversary) -> None:
    """Of four clients one may drop out; two that are lost at any stages leave too few."""
    terms = terms_for(4, adversary=adversary, num_dropped=1)
    terms = replace(terms, threshold=3)
    for drops in patterns(4, 2):
        late = [stage for stage in drops.values() if stage is Stage.CONFIRM]
        if adversary is CURIOUS and late:
            continue  # this adversary has no such stage
        with pytest.raises(AggregationAborted):
            run(terms, drops)
    check(terms, {})


@settings(max_examples=25)
@given(st.data())
def test_random_drop_outs_on_larger_graphs_give_the_exact_sum(data: st.DataObject) -> None:
    """In complete and sparse graphs; in a sparse one, some client may lose too many holders."""
    n = data.draw(st.integers(7, 14))
    adversary = data.draw(st.sampled_from(list(Adversary)))
    most = (n - 1) // 3
    terms = terms_for(n, adversary=adversary, num_dropped=most)
    if data.draw(st.booleans()):
        terms = replace(
            terms, topology=Topology.SPARSE, num_neighbors=4, threshold=2 + adversary.value
        )
    who = data.draw(st.lists(st.sampled_from(IDS[:n]), max_size=most, unique=True))
    drops = {i: data.draw(st.sampled_from(list(Stage))) for i in who}
    try:
        check(terms, drops, seed=data.draw(st.integers(0, 1000)))
    except AggregationAborted:
        assert terms.topology is Topology.SPARSE
        assert drops


@settings(max_examples=200)
@given(st.binary(max_size=400), st.integers(0, 9))
def test_any_bytes_are_a_message_or_an_error(body: bytes, kind: int) -> None:
    """A decoded message encodes to the same bytes again."""
    data = b"FLSA" + bytes((messages.VERSION, kind)) + body
    try:
        message = messages.decode(data)
    except ProtocolError:
        return
    assert messages.encode(message) == data


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_read_whole_or_refused(data: st.DataObject) -> None:
    """Real terms and lists are cut, extended, or have one byte changed."""
    terms = terms_for(3, adversary=ACTIVE, num_dropped=0)
    ids = (ClientId(1), ClientId(4))
    kinds: list[messages.Message] = [
        messages.SignedTerms(terms=terms, signature=bytes(64)),
        messages.Survivors(ranks=b"\x05"),
        signatures_of(dict.fromkeys(ids, bytes(64)), ids),
        messages.Packets(packets=dict.fromkeys(ids, bytes(messages.PACKET_BYTES))),
    ]
    encoded = messages.encode(data.draw(st.sampled_from(kinds)))
    assert messages.encode(messages.decode(encoded)) == encoded
    at = data.draw(st.integers(0, len(encoded) - 1))
    for damaged in (
        encoded[:at],
        encoded + bytes(1),
        encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :],
    ):
        try:
            message = messages.decode(damaged)
        except ProtocolError:
            continue
        assert messages.encode(message) == damaged


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_state_or_an_error(body: bytes) -> None:
    header = ClientState.fresh(bytes(16)).to_bytes()[:5]
    try:
        state = ClientState.from_bytes(header + body)
    except ProtocolError:
        return
    assert isinstance(state, ClientState)
