"""The bound of an audit: never above the truth but for its confidence, and canaries that sing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.privacy.audit import Canaries, CanaryUpdates, guesses, lower_bound, p_value
from fedlearn.privacy.bounded_sum import BoundedSum

LAYOUT = Layout.of(nn.Linear(30, 10))


def bound(num_correct: int, *, num_guesses: int = 100, target_delta: float = 1e-5) -> float:
    """Return the lower bound of 300 canaries at 95 %."""
    return lower_bound(
        target_delta=target_delta,
        num_canaries=300,
        num_guesses=num_guesses,
        num_correct=num_correct,
        confidence=0.95,
    )


def at_least(trials: int, rate: float, count: int) -> float:
    """Return P[binomial >= count], added up."""
    return math.fsum(
        math.comb(trials, n) * rate**n * (1.0 - rate) ** (trials - n)
        for n in range(count, trials + 1)
    )


@given(
    epsilon=st.floats(0.0, 4.0),
    num_guesses=st.integers(1, 40),
    share=st.floats(0.0, 1.0),
    target_delta=st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_the_probability_is_that_of_the_theorem(
    epsilon: float, num_guesses: int, share: float, target_delta: float
) -> None:
    """Added up term by term, by Python's own numbers."""
    num_correct, rate = round(share * num_guesses), 1.0 / (1.0 + math.exp(-epsilon))
    beta = at_least(num_guesses, rate, num_correct)
    excess = [
        (at_least(num_guesses, rate, num_correct - i) - beta) / i for i in range(1, num_correct + 1)
    ]
    expected = min(1.0, beta + 2.0 * 50 * target_delta * max(excess, default=0.0))
    found = p_value(
        epsilon,
        target_delta=target_delta,
        num_canaries=50,
        num_guesses=num_guesses,
        num_correct=num_correct,
    )
    assert found == pytest.approx(expected, abs=1e-9)


def test_more_right_guesses_prove_more_and_a_larger_delta_less() -> None:
    found = [bound(count) for count in (50, 60, 80, 100)]
    assert found == sorted(found)
    assert found[0] == 0.0 < found[1]
    # All of r guesses right: the largest ε at which that has probability 1/20.
    rate = 0.05 ** (1 / 100)
    assert bound(100, target_delta=0.0) == pytest.approx(math.log(rate / (1 - rate)), abs=1e-3)
    assert bound(100, target_delta=1e-3) < bound(100)
    assert bound(0, num_guesses=0) == 0.0


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_an_attack_on_randomized_response_proves_no_more_than_is_true(epsilon: float) -> None:
    """The best attack there is, 400 times: above the truth in a twentieth, and seldom far below."""
    rng, rate = Seed(7).numpy(), 1.0 / (1.0 + math.exp(-epsilon))
    found = np.array(
        [bound(int(count), target_delta=0.0) for count in rng.binomial(100, rate, size=400)]
    )
    assert (found > epsilon).mean() <= 0.05 + 3.0 * math.sqrt(0.05 * 0.95 / 400)
    assert np.median(found) > epsilon - 1.0


def test_canaries_that_are_in_contribute_all_they_may_and_the_others_nothing() -> None:
    """Whatever they have trained."""
    canaries = Canaries(first=10, is_in=np.array([True, False, True]), seed=Seed(3))
    summed = BoundedSum(bounds={"delta": 0.5}, multipliers={"delta": 1.0}, largest=9)
    rows = torch.from_numpy(Seed(4).numpy().standard_normal((4, LAYOUT.size))).float()
    before = rows.clone()
    ids = [ClientId(each) for each in (10, 7, 11, 12)]
    state = summed.init([DELTA], LAYOUT, device=torch.device("cpu"))
    updates = CanaryUpdates(canaries)(Updates(ids, torch.ones(4), {"delta": rows}, [0] * 4))
    state = summed.accumulate(state, updates)
    lane = state.lanes["delta"]
    total = state.total.sums["delta"] * lane.step
    directions = [canaries.direction(ClientId(each), LAYOUT.size) for each in (10, 12)]
    expected = 0.5 * (directions[0] + directions[1])
    assert torch.allclose(total.float(), expected, atol=1e-4)
    assert torch.equal(rows, before), "the rows are their owner's"
    assert [float(each.norm()) for each in directions] == pytest.approx([1.0, 1.0], rel=1e-5)
    scores = canaries.scores(total)
    assert scores[0] > 0.4 < scores[2]
    assert abs(scores[1]) < 0.2
    assert guesses(scores, count=2).tolist() in ([0, 2], [2, 0])


def test_coins_and_directions_are_nobodys() -> None:
    """Each audit draws its own, about half of them in."""
    first, second = (Canaries.drawn(first=5, count=400) for _ in range(2))
    assert first.seed != second.seed
    assert (first.is_in != second.is_in).any()
    assert 140 < first.is_in.sum() < 260
