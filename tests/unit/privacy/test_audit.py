"""The audit's bound exceeds the truth no more often than claimed, and canaries have an effect."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.privacy.audit import Canaries, CanaryUpdates, OwnNumbers, lower_bound, power
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.privacy.gaussian import gaussian_epsilon

LAYOUT = Layout.of(nn.Linear(30, 10))


def bound(num_correct: int, *, confidence: float = 0.95) -> float:
    """Return the lower bound of 1,000 pairs."""
    return lower_bound(
        target_delta=1e-5, num_pairs=1000, num_correct=num_correct, confidence=confidence
    )


@pytest.mark.parametrize("distance", [0.1, 0.25, 1.0])
def test_the_best_attack_on_a_gaussian_proves_no_more_than_is_true(distance: float) -> None:
    """Of 500 audits a twentieth exceed the truth, and few fall far below it."""
    rng, truth = Seed(7).numpy(), gaussian_epsilon(distance, 1e-5)
    scores = rng.standard_normal((500, 1000)) * math.sqrt(2.0) + distance
    found = np.array([bound(int(count)) for count in (scores > 0.0).sum(1)])
    assert (found > truth).mean() <= 0.05 + 3.0 * math.sqrt(0.05 * 0.95 / 500)
    assert np.median(found) > 0.85 * truth - 0.3


def test_more_right_guesses_prove_more_and_more_confidence_less() -> None:
    found = [bound(count) for count in (0, 500, 560, 700, 1000)]
    assert found == sorted(found)
    assert found[1] == 0.0 < found[2]
    assert bound(700, confidence=0.999) < bound(700)


def test_half_of_the_noise_is_refuted_for_a_claim_of_one() -> None:
    """The odds are those of a thousand trials; the true claim stands."""
    distance = 0.268
    claimed = gaussian_epsilon(distance, 1e-5)
    assert claimed == pytest.approx(1.0, abs=0.05)
    rng = Seed(3).numpy()
    for share, expected in ((1.0, 0.05), (0.5, 0.97), (1 / 3, 1.0)):
        rate = norm.cdf(distance / share / math.sqrt(2.0))
        refuted = [bound(int(count)) > claimed for count in rng.binomial(1000, rate, size=300)]
        odds = power(
            claimed,
            distance=distance / share,
            target_delta=1e-5,
            num_pairs=1000,
            confidence=0.95,
        )
        assert odds == pytest.approx(np.mean(refuted), abs=0.05)
        assert odds == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("opposite", [False, True])
def test_canaries_that_are_in_contribute_all_they_may(opposite: bool) -> None:  # noqa: FBT001 - a parameter
    """Whatever they trained; canaries that are out contribute nothing, or the opposite."""
    is_in = np.array([True, False, False, True])
    canaries = Canaries(is_in=is_in, seed=Seed(3), opposite=opposite)
    summed = BoundedSum(bounds={"delta": 0.5}, multipliers={"delta": 1.0}, largest=9)
    rows = torch.from_numpy(Seed(4).numpy().standard_normal((4, LAYOUT.size))).float()
    before = rows.clone()
    ids = [ClientId(each) for each in (2, 0, 1, 3)]
    state = summed.init([DELTA], LAYOUT, device=torch.device("cpu"))
    updates = CanaryUpdates(canaries)(Updates(ids, torch.ones(4), {"delta": rows}, [0] * 4))
    state = summed.accumulate(state, updates)
    total = state.total.sums["delta"] * state.lanes["delta"].step
    assert torch.equal(rows, before), "the rows are their owner's"
    scores = canaries.scores(total)
    others = -0.5 if opposite else 0.0
    assert scores == pytest.approx(np.where(is_in, 0.5, others), abs=1e-3)
    assert canaries.num_correct(scores) == 2
    assert canaries.num_correct(-scores) == 0


def test_directions_share_no_coordinate_and_cover_all() -> None:
    """So missing noise is noticed at any coordinate, and canaries are independent."""
    canaries = Canaries.draw(num_pairs=20, opposite=False)
    everybody = Canaries(is_in=np.ones(40, bool), seed=canaries.seed, opposite=False)
    rows = everybody.contributions(range(40), LAYOUT.size)
    directions = rows / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(directions @ directions.T, torch.eye(40), atol=1e-6)
    assert bool((directions != 0).any(0).all())


def test_coins_and_directions_are_nobodys() -> None:
    """Each audit draws its own; of each pair one canary is in, about half the time the first."""
    first, second = (Canaries.draw(num_pairs=400, opposite=False) for _ in range(2))
    assert first.seed != second.seed
    assert (first.is_in != second.is_in).any()
    assert (first.is_in.reshape(-1, 2).sum(1) == 1).all()
    assert 140 < first.is_in[::2].sum() < 260


def test_of_a_single_update_the_numbers_of_its_own_canaries_are_kept() -> None:
    """The sum over clients then has, for each canary, its score in its own client's update."""
    canaries = Canaries.draw(num_pairs=10, opposite=False)
    rows = torch.from_numpy(Seed(4).numpy().standard_normal((4, LAYOUT.size))).float()
    ids = [ClientId(each) for each in (2, 0, 1, 3)]
    before = Updates(ids, torch.ones(4), {"delta": rows}, [0] * 4)
    kept = OwnNumbers(canaries, per_client=5)(before)
    scores = canaries.scores(torch.as_tensor(kept.lanes["delta"]).sum(0))
    alone = np.stack([canaries.scores(row) for row in rows])
    expected = np.concatenate([alone[ids.index(ClientId(n))][5 * n : 5 * n + 5] for n in range(4)])
    assert scores == pytest.approx(expected, abs=1e-5)
