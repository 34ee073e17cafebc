"""Correlated noise: what is released, what one user can change, and how lost turns are handled."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.cohorts import CyclicCohorts
from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.strategy import State
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, StoreError
from fedlearn.privacy.banded_matrix import BandedMatrix, find_optimal
from fedlearn.privacy.banded_noise import BandedMean, BandedUpdates, PrivateCyclicSampler
from fedlearn.privacy.bounded_sum import BoundedLane, BoundedSum, Noise, NoisyMean
from fedlearn.privacy.secret import DiscreteGaussianNoise, ReproducibleStreams
from tests.unit.privacy.test_banded_matrix import explicit

PLAIN = FedAvg(LocalSgd(epochs=1, batch_size=8, learning_rate=0.5), weight_by_examples=False)
SIZE, BOUND, EXPECTED = 20_000, 0.3, 5
NOISE = DiscreteGaussianNoise(ReproducibleStreams(Seed(3)))


class Silence:
    """A noise source of zeros, so that releases are exact."""

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        """Return zeros."""
        return torch.zeros(size, dtype=torch.float64)


def updates(diagonals: tuple[int, ...], *, multiplier: float = 1.0) -> BandedUpdates:
    summed = BoundedSum(bounds={"delta": BOUND}, multipliers={"delta": multiplier}, largest=9)
    return BandedUpdates(PLAIN, summed, BandedMatrix(diagonals))


@dataclass
class Rounds:
    """Consecutive releases of one lane, starting from a state."""

    strategy: BandedUpdates
    params: Params
    noise: Noise = NOISE
    num_lost: int = 0
    state: State = field(default_factory=dict)

    @classmethod
    def begun(
        cls, diagonals: tuple[int, ...], *, size: int = SIZE, noise: Noise = NOISE
    ) -> "Rounds":
        """Return an instance before its first round."""
        strategy, params = updates(diagonals), Params.of(nn.Linear(size, 1, bias=False))
        return cls(strategy, params, noise, 0, strategy.init(params))

    @property
    def lane(self) -> BoundedLane:
        """The lane's bound and size."""
        return BoundedLane(BOUND, self.params.layout.size)

    def release(self, levels: Tensor, *, round_num: int) -> Tensor:
        """Release a sum of levels, and return the result in levels."""
        released, self.state = BandedMean(
            expected=EXPECTED, noise=self.noise, num_lost=self.num_lost
        )(
            Aggregate(lanes={DELTA.name: levels}, num_clients=3),
            strategy=self.strategy,
            layout=self.params.layout,
            state=self.state,
            round_num=round_num,
            attempt=0,
        )
        assert released.num_clients == EXPECTED
        assert released.lanes[DELTA.name].dtype is torch.float32
        return released.lanes[DELTA.name].double() * EXPECTED / self.lane.step


def sums(num_rounds: int, *, size: int = SIZE) -> list[Tensor]:
    """Return sums of levels as a few clients would make them."""
    rng = Seed(4).numpy()
    return [
        torch.from_numpy(rng.integers(-9000, 9000, size).astype(float)) for _ in range(num_rounds)
    ]


# ---- What is released ---------------------------------------------------------------------


def errors(diagonals: tuple[int, ...], *, num_rounds: int) -> NDArray[np.float64]:
    """Return the released noise, relative to that of a whole column: shape [rounds, P]."""
    rounds = Rounds.begun(diagonals)
    found = [
        (rounds.release(levels.clone(), round_num=each) - levels).numpy()
        for each, levels in enumerate(sums(num_rounds))
    ]
    sigma = rounds.strategy.summed.sigma(DELTA.name, rounds.lane) * math.hypot(*diagonals)
    return np.stack(found) / sigma


def has_covariance(errors_TP: NDArray[np.float64], expected_TT: NDArray[np.float64]) -> bool:
    """Tell whether all entries match the matrix within 5 standard deviations."""
    found = errors_TP @ errors_TP.T / errors_TP.shape[1]
    variances = np.diag(expected_TT)
    deviations = np.sqrt((expected_TT**2 + np.outer(variances, variances)) / errors_TP.shape[1])
    return bool((np.abs(found - expected_TT) < 5.0 * deviations).all())


@pytest.mark.parametrize(
    "diagonals", [(1,), (8, 5), find_optimal(bands=4, num_rounds=20).diagonals]
)
def test_the_noise_that_arrives_has_the_covariance_of_the_inverse(
    diagonals: tuple[int, ...],
) -> None:
    """For all pairs of the first rounds; the test would detect a factor of 2/3 or 3/2."""
    found, inverse = errors(diagonals, num_rounds=7), np.linalg.inv(explicit(diagonals, 7))
    expected = inverse @ inverse.T
    assert has_covariance(found, expected)
    assert not has_covariance(found * 2.0 / 3.0, expected)
    assert not has_covariance(found * 1.5, expected)
    is_correlated = len(diagonals) > 1
    assert has_covariance(found, np.diag(np.diag(expected))) is not is_correlated


def test_a_sum_of_rounds_has_less_noise_than_they_have() -> None:
    """As the matrix predicts for prefix sums."""
    diagonals = find_optimal(bands=8, num_rounds=8).diagonals
    prefixes = errors(diagonals, num_rounds=8).cumsum(axis=0)
    found = math.sqrt(float((prefixes**2).mean())) * math.hypot(*diagonals)
    assert found == pytest.approx(BandedMatrix(diagonals).error(8), rel=0.02)
    assert found < 0.75 * BandedMatrix((1,)).error(8)


def test_one_band_releases_what_the_mode_without_bands_does() -> None:
    """From the same noise, bit for bit."""
    rounds = Rounds.begun((1,), size=500)
    plain = NoisyMean(expected=EXPECTED, noise=NOISE)
    for each, levels in enumerate(sums(3, size=500)):
        layout = rounds.params.layout
        released, _ = plain(
            Aggregate(lanes={DELTA.name: levels.clone()}, num_clients=3),
            strategy=rounds.strategy,
            layout=layout,
            state={},
            round_num=each,
            attempt=0,
        )
        expected = released.lanes[DELTA.name].double() * EXPECTED / rounds.lane.step
        assert torch.equal(rounds.release(levels, round_num=each), expected)


def test_without_noise_the_sums_come_back() -> None:
    """The state holds the latest sums exactly; the inputs are not modified."""
    rounds, given = Rounds.begun((1024, 600, 500), size=50, noise=Silence()), sums(6, size=50)
    for each, levels in enumerate(given):
        before = {name: value.clone() for name, value in rounds.state.items()}
        held = rounds.state
        found = rounds.release(levels, round_num=each)
        assert torch.allclose(found, levels, rtol=1e-6, atol=1e-2)
        assert all(torch.equal(value, held[name]) for name, value in before.items())
    assert torch.equal(rounds.state["banded_sums"], torch.stack(given[:3:-1]))


def test_a_lost_turn_is_one_of_nobody_and_what_was_before_goes_on() -> None:
    """Two turns are lost after three rounds; releases before and after them are compared."""
    rounds, given = Rounds.begun((1024, 600, 500, 400, 300), size=50), sums(5, size=50)
    of_nobody = torch.zeros(50, dtype=torch.float64)
    for each, levels in enumerate(given[:3]):
        rounds.release(levels, round_num=each)
    before = rounds.state["banded_estimates"]
    rounds.num_lost = 2
    released = rounds.release(given[3], round_num=3)
    expected = torch.stack([given[3], of_nobody, of_nobody, given[2]])
    assert torch.equal(rounds.state["banded_sums"], expected)
    estimates = rounds.state["banded_estimates"]
    assert torch.equal(estimates[1:], torch.stack([of_nobody, of_nobody, before[0]]))
    assert torch.allclose(estimates[0], released, rtol=1e-6, atol=1e-2)
    rounds.release(given[4], round_num=4)
    expected = torch.stack([given[4], given[3], of_nobody, of_nobody])
    assert torch.equal(rounds.state["banded_sums"], expected)


def test_a_state_goes_on_with_its_own_diagonals() -> None:
    """Another machine may compute others: a column mixed from both would have a larger norm."""
    mine, other = (Rounds.begun(each, size=50) for each in [(1024, 600), (1024, 601)])
    given = sums(3, size=50)
    for each, levels in enumerate(given[:2]):
        mine.release(levels, round_num=each)
    other.state = mine.state
    expected = mine.release(given[2], round_num=2)
    assert torch.equal(other.release(given[2], round_num=2), expected)


# ---- What one user can change -------------------------------------------------------------

GROUPS = 5


@dataclass(frozen=True)
class Process:
    """One process of a run: it opens rounds, the last of which may never be committed.

    Attributes:
        num_rounds: Rounds that it releases.
        num_lost: How many of these are not committed.
        num_ahead: Charges made in advance and not taken back.
    """

    num_rounds: int
    num_lost: int
    num_ahead: int


PROCESSES = st.lists(
    st.builds(
        lambda num_rounds, lost, ahead: Process(num_rounds, min(lost, num_rounds), ahead),
        st.integers(1, 8),
        st.integers(0, 4),
        st.sampled_from([0, 0, 1, 3, 7]),
    ),
    min_size=1,
    max_size=5,
)


@dataclass
class Told:
    """The charges of a run's processes, and the cohort of each charge."""

    num_charges: int = 0
    asked: list[tuple[int, Sequence[ClientId]]] = field(default_factory=list)

    def play(
        self,
        processes: Sequence[Process],
        *,
        diagonals: tuple[int, ...],
        user: int,
        forgetful: bool,
    ) -> Iterator[float]:
        """Yield how far the user moves each released row, in levels."""
        # With one more diagonal the state holds everything that a row is made of.
        rounds, committed = Rounds.begun((*diagonals, 0), size=1, noise=Silence()), 0
        for process in processes:
            state, num_finished = rounds.state, committed
            rounds.num_lost = 0 if forgetful else self.num_charges - num_finished
            sampler = PrivateCyclicSampler(CyclicCohorts(23, 4, 5), rounds.num_lost)
            for each in range(process.num_rounds):
                round_num = num_finished + each
                cohort = sampler.sample(
                    cast("Sequence[ClientId]", range(23)),
                    cohort_size=5,
                    round_num=round_num,
                    attempt=0,
                    seed=Seed(1),
                )
                self.asked.append((self.num_charges, cohort))
                self.num_charges += 1
                levels = torch.full((1,), 1e6 * (user in cohort), dtype=torch.float64)
                if forgetful:
                    rounds.state = {**rounds.state, "banded_turn": torch.tensor(round_num)}
                rounds.release(levels, round_num=round_num)
                seen = rounds.state["banded_estimates"][: len(diagonals), 0].tolist()
                yield sum(c * x for c, x in zip(diagonals, seen, strict=True))
                if each + process.num_lost < process.num_rounds:
                    state, committed = rounds.state, round_num + 1
            self.num_charges += process.num_ahead
            rounds.state = state


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(processes=PROCESSES, user=st.integers(0, 22), bands=st.integers(1, GROUPS))
def test_no_user_moves_all_that_was_seen_by_more_than_is_accounted_for(
    processes: list[Process], user: int, bands: int
) -> None:
    """At most the root of ⌈charges / G⌉ columns, whether or not lost rounds were observed."""
    diagonals, told = find_optimal(bands=bands, num_rounds=40).diagonals, Told()
    rows = list(told.play(processes, diagonals=diagonals, user=user, forgetful=False))
    participations = CyclicCohorts(23, 4, 5).participations(told.num_charges)
    assert math.hypot(*rows) <= 1e6 * math.hypot(*diagonals) * math.sqrt(participations) + 1.0
    turns = [turn for turn, cohort in told.asked if user in cohort]
    assert all(after - before >= GROUPS for before, after in itertools.pairwise(turns))


def test_a_run_that_forgot_what_it_lost_would_be_noticed() -> None:
    """Its users would be asked again too soon, and rows of one column be released twice."""
    diagonals = find_optimal(bands=5, num_rounds=40).diagonals
    crashing = [Process(num_rounds=2, num_lost=2, num_ahead=0)] * 5

    def worst(*, forgetful: bool) -> float:
        moved = [
            Told().play(crashing, diagonals=diagonals, user=user, forgetful=forgetful)
            for user in range(23)
        ]
        return max(math.hypot(*rows) for rows in moved)

    participations = CyclicCohorts(23, 4, 5).participations(5 * 2)
    accounted = 1e6 * math.hypot(*diagonals) * math.sqrt(participations)
    assert worst(forgetful=False) <= accounted + 1.0
    assert worst(forgetful=True) > 1.1 * accounted


@pytest.mark.parametrize("bands", [1, 3, 5])
def test_the_sensitivity_is_the_worst_of_all_patterns(bands: int) -> None:
    """Users may skip turns, and their parts may add up or cancel; shorter distances are worse."""
    num_rounds, diagonals = 15, find_optimal(bands=bands, num_rounds=15).diagonals
    matrix = explicit(diagonals, num_rounds)

    def worst(separation: int) -> float:
        turns = [
            [turn for turn in range(first, num_rounds, separation) if turn not in left_out]
            for first in range(separation)
            for left_out in [set(), {first}, {first + separation}]
        ]
        return max(
            float(np.linalg.norm(matrix[:, taken] @ signs[: len(taken)]))
            for taken in turns
            for signs in [np.ones(num_rounds), (-1.0) ** np.arange(num_rounds)]
        )

    participations = CyclicCohorts(23, 4, 5).participations(num_rounds)
    assert worst(GROUPS) == pytest.approx(math.sqrt(participations) * math.hypot(*diagonals))
    if bands > 1:
        columns = math.sqrt(-(-num_rounds // (bands - 1)))
        assert worst(bands - 1) > 1.02 * columns * math.hypot(*diagonals)


# ---- Which users are asked ----------------------------------------------------------------


@pytest.mark.parametrize(("population", "expected"), [(60, 15), (23, 4), (10, 5), (9, 1)])
def test_everybody_is_asked_once_in_as_many_rounds_as_there_are_groups(
    population: int, expected: int
) -> None:
    """Group sizes differ by at most one, and do not depend on which users are available."""
    groups = population // expected
    cohorts = CyclicCohorts(population, expected, -(-population // groups))
    sampler = PrivateCyclicSampler(cohorts, num_lost=0)

    def asked(available: Sequence[int], round_num: int) -> Sequence[int]:
        return sampler.sample(
            cast("Sequence[ClientId]", available),
            cohort_size=1,
            round_num=round_num,
            attempt=0,
            seed=Seed(7),
        )

    of_all = [asked(range(population), each) for each in range(2 * groups)]
    assert sorted(user for cohort in of_all[:groups] for user in cohort) == list(range(population))
    assert of_all[:groups] == of_all[groups:]
    assert max(map(len, of_all)) == cohorts.largest
    assert max(map(len, of_all)) - min(map(len, of_all)) <= 1
    odd = range(1, population, 2)
    for each, cohort in enumerate(of_all):
        assert list(asked(odd, each)) == [user for user in cohort if user % 2]
    with pytest.raises(ConfigError, match=rf"num_users is {population}, but {population + 1}"):
        asked(range(population + 1), 0)


def test_groups_differ_by_the_seed() -> None:
    """Runs with the same seed are repetitions, runs with two seeds are not."""
    sampler = PrivateCyclicSampler(CyclicCohorts(60, 15, 15), num_lost=0)
    at = {"cohort_size": 15, "round_num": 0, "attempt": 0}
    available = cast("Sequence[ClientId]", range(60))
    first, again, other = (sampler.sample(available, seed=Seed(s), **at) for s in (1, 1, 2))
    assert first == again != other


# ---- Invalid combinations -----------------------------------------------------------------


def test_a_ledger_that_was_taken_back_is_refused() -> None:
    """Otherwise turns would be taken twice."""
    rounds, given = Rounds.begun((4, 3), size=5), sums(1, size=5)
    for each in range(3):
        rounds.release(given[0], round_num=each)
    rounds.num_lost = -1
    with pytest.raises(StoreError, match=r"2 charges of this run, but its model has had 3 turns"):
        rounds.release(given[0], round_num=3)


@pytest.mark.parametrize(
    ("diagonals", "multiplier", "largest", "fits"),
    [
        ((1024, 700), 1.0, 1 << 20, True),
        ((1024, 700), 1.0, 1 << 23, False),
        ((1,), 1.0, 1 << 23, True),
        ((1024, 700), 1000.0, 9, True),
        ((1024, 700), 2000.0, 9, False),
        ((1,), 2000.0, 9, True),
    ],
)
def test_rows_beyond_exact_integers_are_refused(
    diagonals: tuple[int, ...], multiplier: float, largest: int, *, fits: bool
) -> None:
    """A row sums several rounds, so it leaves less room than a single round."""
    summed = BoundedSum(bounds={"delta": 1.0}, multipliers={"delta": multiplier}, largest=largest)
    strategy = BandedUpdates(PLAIN, summed, BandedMatrix(diagonals))
    layout = Params.of(nn.Linear(5, 1)).layout
    if fits:
        strategy.require_exact(layout)
    else:
        with pytest.raises(ValueError, match=r"exceed exact integers; lower privacy.bands"):
            strategy.require_exact(layout)
