"""Each sampler against its paper, written again in plain NumPy, and the probabilities it claims."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedlearn as fl
from fedlearn.algorithms.inclusion import draw_systematically, inclusion_probabilities
from fedlearn.algorithms.informed_sampling import (
    NO_PROPERTIES,
    ClientProperties,
    InformedSampler,
    ObservedRound,
    SamplerState,
)
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.errors import CohortTooSmall

OORT = fl.OortSampler(
    exploration=0.9,
    exploration_decay=0.9,
    least_exploration=0.2,
    pace=0.3,
    pacer_step=0.1,
    pacer_window=3,
    straggler_penalty=2.0,
    cutoff=0.95,
)
STRATIFIED = fl.StratifiedSampler(by="x", allocation=fl.StrataAllocation.PROPORTIONAL)
SAMPLERS: list[InformedSampler] = [
    fl.SizeSampler(),
    fl.PowerOfChoiceSampler(candidates_per_client=2.0),
    OORT,
    fl.F3astSampler(smoothing=0.1),
    STRATIFIED,
]


@dataclass(frozen=True)
class Known:
    """Properties from tables."""

    sizes: Sequence[int] = ()
    names: Sequence[str] = ()

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray([self.sizes[each] for each in client_ids], np.int64)

    def groups(self, client_ids: NDArray[np.int64], *, by: str) -> Sequence[str]:
        return [self.names[each] for each in client_ids]


def clients(num: int) -> list[ClientId]:
    return [ClientId(each) for each in range(num)]


def draw(
    sampler: InformedSampler,
    num: int,
    *,
    cohort_size: int,
    round_num: int = 0,
    state: SamplerState | None = None,
    properties: ClientProperties = NO_PROPERTIES,
) -> tuple[ClientId, ...]:
    return sampler.sample(
        clients(num),
        cohort_size=cohort_size,
        round_num=round_num,
        attempt=0,
        seed=fl.Seed(5),
        state=sampler.init() if state is None else state,
        properties=properties,
    )


def observed(round_num: int, rows: Sequence[Participation]) -> ObservedRound:
    participations = Participations.of(rows)
    return ObservedRound(round_num=round_num, is_aggregated=True, participations=participations)


def report(client_id: int, loss: float, *, num: int = 1, took_s: float = 1.0) -> Participation:
    return Participation(ClientId(client_id), Status.REPORTED, took_s, num, loss)


# ---- All of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_a_cohort_has_the_size_that_was_asked_for_and_no_client_twice(
    sampler: InformedSampler,
) -> None:
    """With any state, and the same arguments give the same cohort."""
    state, rng = sampler.init(), np.random.default_rng(0)
    properties = Known(sizes=[1, 2, 3, 4, 5, 0, 70], names="aaabbcc")
    for round_num in range(12):
        size = 1 + round_num % 7
        found = [
            draw(
                sampler,
                7,
                cohort_size=size,
                round_num=round_num,
                state=state,
                properties=properties,
            )
            for _ in range(2)
        ]
        assert found[0] == found[1]
        assert len(set(found[0])) == size
        assert set(found[0]) <= set(range(7))
        rows = [report(each, rng.random(), num=3, took_s=rng.random()) for each in found[0]]
        late = rows[0]._replace(status=Status.LATE, loss=math.nan, num_examples=0)
        state = sampler.observe(state, observed(round_num, [late, *rows[1:]]))
    with pytest.raises(CohortTooSmall):
        draw(sampler, 7, cohort_size=8, state=state, properties=properties)


# ---- Inclusion probabilities ----------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9), st.data())
def test_probabilities_are_proportional_below_one_and_sum_to_the_cohort(
    weights: list[float], data: st.DataObject
) -> None:
    num = data.draw(st.integers(1, len(weights)))
    found = inclusion_probabilities(np.asarray(weights), num_drawn=num)
    assert math.isclose(found.sum(), num)
    assert (found <= 1.0).all()
    shares = found[found < 1.0] / np.asarray(weights)[found < 1.0]
    assert np.allclose(shares, shares[:1])
    # Nobody is certain whose share would not be.
    certain = found == 1.0
    if len(shares):
        assert (shares[0] * np.asarray(weights)[certain] >= 1.0 - 1e-9).all()


def test_a_systematic_draw_has_the_probabilities_in_any_order() -> None:
    """Exactly: over a grid of starting points, each client's share is its probability."""
    probabilities = inclusion_probabilities(np.array([1.0, 2, 3, 4, 20]), num_drawn=3)
    rng, num_starts = np.random.default_rng(3), 1000
    for _ in range(5):
        order, counts = rng.permutation(5), np.zeros(5)
        for start in (np.arange(num_starts) + 0.5) / num_starts:
            chosen = draw_systematically(probabilities, order, start=start)
            assert len(set(chosen.tolist())) == len(chosen) == 3
            counts[chosen] += 1
        assert np.abs(counts / num_starts - probabilities).max() <= 2 / num_starts


# ---- By size --------------------------------------------------------------------------------


def test_clients_are_asked_by_their_sizes_and_equal_weights_are_unbiased() -> None:
    """The mean of the cohort's values estimates the mean over all, weighted by examples."""
    sizes = np.array([5, 10, 15, 20, 25, 0])  # the last is not known, and counts as 15
    known = np.where(sizes > 0, sizes, 15)
    counts, num_rounds = np.zeros(6), 6000
    for round_num in range(num_rounds):
        cohort = draw(
            fl.SizeSampler(),
            6,
            cohort_size=2,
            round_num=round_num,
            properties=Known(sizes.tolist()),
        )
        counts[list(cohort)] += 1
    rates, expected = counts / num_rounds, 2 * known / known.sum()
    deviation = np.sqrt(expected * (1 - expected) / num_rounds)
    assert (np.abs(rates - expected) < 4 * deviation).all()
    values = np.arange(6.0)
    assert math.isclose(rates @ values / 2, known @ values / known.sum(), rel_tol=0.02)


# ---- Power-of-choice ------------------------------------------------------------------------


def test_the_highest_losses_among_random_candidates_are_asked() -> None:
    """With all as candidates always the highest; with some, as often as counting says."""
    sampler = fl.PowerOfChoiceSampler(candidates_per_client=2.0)
    rows = [report(each, 1.0 - each / 10) for each in range(8)]  # client k has rank k
    state = sampler.observe(sampler.init(), observed(0, rows))
    assert set(draw(sampler, 8, cohort_size=4, state=state)) == {0, 1, 2, 3}
    size, num, num_candidates, num_rounds = 2, 8, 4, 5000
    counts = Counter[int]()
    for round_num in range(num_rounds):
        counts.update(draw(sampler, num, cohort_size=size, round_num=round_num, state=state))
    for rank in range(num):
        # A candidate is asked if fewer than m of the better ones are candidates as well.
        ways = sum(
            math.comb(rank, better) * math.comb(num - rank - 1, num_candidates - 1 - better)
            for better in range(size)
        )
        expected = ways / math.comb(num, num_candidates)
        deviation = math.sqrt(max(expected * (1 - expected), 1e-9) / num_rounds)
        assert abs(counts[rank] / num_rounds - expected) < 4 * deviation + 1e-12


def test_a_client_whose_loss_is_not_known_comes_first() -> None:
    """So that all are asked before any is asked twice."""
    sampler = fl.PowerOfChoiceSampler(candidates_per_client=9.0)
    state, asked = sampler.init(), list[int]()
    for round_num in range(4):
        cohort = draw(sampler, 8, cohort_size=2, round_num=round_num, state=state)
        asked += cohort
        rows = [report(each, 99.0) for each in cohort]
        state = sampler.observe(state, observed(round_num, rows))
    assert sorted(asked) == list(range(8))


# ---- Oort -----------------------------------------------------------------------------------


@dataclass
class OortByHand:
    """Algorithm 1 of the paper, one client after another, with the sampler's parameters."""

    explored: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    pace: float = OORT.pace
    history: list[float] = field(default_factory=list)

    def observe(self, round_num: int, rows: Sequence[Participation]) -> None:
        total = 0.0
        for row in rows:
            if row.status is Status.REPORTED:
                utility = row.num_examples * row.loss
                self.explored[row.client_id] = utility, row.duration_s, round_num + 1
                total += utility
        self.history.append(total)
        window = OORT.pacer_window
        if len(self.history) >= 2 * window and len(self.history) % window == 0:
            before, after = self.history[-2 * window : -window], self.history[-window:]
            if sum(before) > sum(after):
                self.pace = min(1.0, self.pace + OORT.pacer_step)

    def scores(self, round_num: int) -> dict[int, float]:
        utilities = sorted(each[0] for each in self.explored.values())
        durations = [each[1] for each in self.explored.values()]
        high, low = float(np.percentile(utilities, 95)), utilities[0]
        preferred_s = float(np.percentile(durations, 100 * self.pace))
        found = {}
        for client_id, (utility, took_s, last) in self.explored.items():
            score = (min(utility, high) - low) / (high - low)
            score += math.sqrt(0.1 * math.log(round_num + 1) / last)
            if preferred_s < took_s:
                score *= (preferred_s / took_s) ** OORT.straggler_penalty
            found[client_id] = score
        return found


def test_oort_scores_clients_as_algorithm_1_does() -> None:
    """Over rounds of random reports, with the pacer."""
    rng, state, by_hand = np.random.default_rng(7), OORT.init(), OortByHand()
    paces = set[float]()
    for round_num in range(24):
        chosen = rng.choice(10, 4, replace=False).tolist()
        rows = [
            report(each, 3.0 * rng.random() * 0.9**round_num, num=1 + each, took_s=rng.random())
            for each in chosen
        ]
        rows[0] = rows[0]._replace(status=Status.FAILED, loss=math.nan, num_examples=0)
        state = OORT.observe(state, observed(round_num, rows))
        by_hand.observe(round_num, rows)
        paces.add(by_hand.pace)
        ids = np.asarray(sorted(by_hand.explored), np.int64)
        expected = by_hand.scores(round_num + 1)
        found = OORT.scores(state, ids, round_num=round_num + 1)
        np.testing.assert_allclose(found, [expected[each] for each in ids.tolist()], rtol=1e-12)
        assert math.isclose(float(state["pace"]), by_hand.pace)
    assert len(paces) > 2  # the pacer was at work


def test_oort_explores_less_and_less_and_then_draws_by_score() -> None:
    """Frequencies of single draws, above the cut-off only."""
    sampler = fl.OortSampler(
        exploration=0.8,
        exploration_decay=0.5,
        least_exploration=0.0,
        pace=1.0,
        pacer_step=0.0,
        pacer_window=3,
        straggler_penalty=0.0,
        cutoff=0.5,
    )
    rows = [report(each, 1.0 + each) for each in range(6)]
    state = sampler.observe(sampler.init(), observed(0, rows))
    news = [
        sum(each >= 6 for each in draw(sampler, 60, cohort_size=6, round_num=number, state=state))
        for number in range(12)
    ]
    assert news[0] in {4, 5}
    assert sum(news[1:4]) < 8
    assert news[8:] == [0] * 4
    scores = sampler.scores(state, np.arange(6), round_num=40)
    admitted = scores >= 0.5 * scores.max()
    counts = Counter[int]()
    num_rounds = 3000
    for attempt in range(num_rounds):
        counts[
            sampler.sample(
                clients(6),
                cohort_size=1,
                round_num=40,
                attempt=attempt,
                seed=fl.Seed(1),
                state=state,
                properties=NO_PROPERTIES,
            )[0]
        ] += 1
    expected = np.where(admitted, scores, 0.0) / scores[admitted].sum()
    rates = np.asarray([counts[each] / num_rounds for each in range(6)])
    assert np.abs(rates - expected).max() < 4 * math.sqrt(0.25 / num_rounds)
    assert not admitted.all()


# ---- F3AST ----------------------------------------------------------------------------------


def test_f3ast_asks_those_first_that_took_part_least() -> None:
    """Against a loop over clients, with clients that come and go."""
    sampler, rng = fl.F3astSampler(smoothing=0.2), np.random.default_rng(2)
    state, rates = sampler.init(), np.zeros(9)
    for round_num in range(40):
        there = [ClientId(each) for each in range(9) if each < 3 or rng.random() < 0.4]
        cohort = sampler.sample(
            there,
            cohort_size=3,
            round_num=round_num,
            attempt=0,
            seed=fl.Seed(0),
            state=state,
            properties=NO_PROPERTIES,
        )
        others = [rates[each] for each in there if each not in cohort]
        assert not others or max(rates[list(cohort)]) <= min(others) + 1e-12
        state = sampler.observe(state, observed(round_num, [report(each, 1.0) for each in cohort]))
        for each in range(9):
            rates[each] = 0.8 * rates[each] + (0.2 if each in cohort else 0.0)


def test_f3ast_covers_a_population_that_is_always_there() -> None:
    """Each client is asked once before any is asked again, round after round."""
    sampler = fl.F3astSampler(smoothing=0.1)
    state, counts = sampler.init(), Counter[int]()
    for round_num in range(40):
        cohort = draw(sampler, 12, cohort_size=3, round_num=round_num, state=state)
        counts.update(cohort)
        state = sampler.observe(state, observed(round_num, [report(each, 1.0) for each in cohort]))
        assert max(counts.values()) - min(counts[each] for each in range(12)) <= 1


# ---- Stratified -----------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", list(fl.StrataAllocation))
def test_each_group_has_its_share_of_every_cohort(allocation: fl.StrataAllocation) -> None:
    """Rounded up or down, and right on average; so is each client's probability."""
    names, size, num_rounds = "aaaaaaabbbbc", 4, 3000
    sampler = fl.StratifiedSampler(by="x", allocation=allocation)
    sizes = Counter(names)
    share = {  # of a cohort; the group c has one client, so it gives up a third of a place
        fl.StrataAllocation.PROPORTIONAL: {each: size * sizes[each] / 12 for each in "abc"},
        fl.StrataAllocation.EQUAL: {"a": 1.5, "b": 1.5, "c": 1.0},
    }[allocation]
    counts = Counter[int]()
    for round_num in range(num_rounds):
        cohort = draw(
            sampler, 12, cohort_size=size, round_num=round_num, properties=Known(names=names)
        )
        counts.update(cohort)
        for name, number in Counter(names[each] for each in cohort).items():
            assert math.floor(share[name] - 1e-9) <= number <= math.ceil(share[name] + 1e-9)
    for client_id, name in enumerate(names):
        expected = share[name] / sizes[name]
        deviation = math.sqrt(expected * (1 - expected) / num_rounds)
        assert abs(counts[client_id] / num_rounds - expected) < 4 * deviation + 1e-12
