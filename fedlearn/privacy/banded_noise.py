r"""Banded matrix factorization: noise correlated over rounds, and users that take turns.

It needs no secret sampling. Users are in G groups, which are sampled in turn. With a matrix C of
b <= G diagonals (:mod:`fedlearn.privacy.banded_matrix`), a round releases one row of
:math:`C x + z`: a combination of the exact sums x of the last b rounds, with discrete Gaussian
noise. Everything else is computed from these rows alone, in floating point:
:math:`\hat{x} = C^{-1}(C x + z) = x + C^{-1} z`.

**Turns.** Each time that a cohort is drawn is a turn, whether its round is committed or lost. A
turn's number is the number of charges that the run made before it, so it is never too low. A turn
lost in a crash counts as a turn without clients: its sum is gone, and the numbers computed from it
may or may not have been seen. Either way, in each G turns a user adds at most one column of C, or
part of one, to rows that no other column of that user reaches.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`c_0 .. c_{b-1}`    ``matrix.diagonals``, then in the strategy's state
:math:`x, \hat{x}`        ``_SUMS``, ``_ESTIMATES``, in levels
:math:`z`                 noise of ``noise_multiplier`` times a column's norm
========================= ==================================================

References:
    Choquette-Choo et al., 2023, `(Amplified) Banded Matrix Factorization: A unified approach to
    private training <https://arxiv.org/abs/2306.08153>`_ (the sensitivity of banded matrices).
    Kairouz et al., 2021, `Practical and Private (Deep) Learning without Sampling or Shuffling
    <https://arxiv.org/abs/2103.00039>`_ (DP-FTRL).
    Denisov, McMahan, Rush, Smith and Thakurta, 2022, `Improved Differential Privacy for SGD via
    Optimal Private Linear Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_
    (updates may depend on what was released before).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlearn.algorithms.cohorts import CyclicCohorts
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.sampling import whose_turn
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.noise import MAX_SIGMA
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, StoreError
from fedlearn.privacy.banded_matrix import BandedMatrix
from fedlearn.privacy.bounded_sum import EXACT, BoundedUpdates, Noise

_DIAGONALS, _TURN = "banded_diagonals", "banded_turn"
_SUMS, _ESTIMATES = "banded_sums", "banded_estimates"


@dataclass(frozen=True)
class PrivateCyclicSampler:
    """Draws the group whose turn it is: all of its available clients.

    Attributes:
        cohorts: The groups.
        num_lost: Turns of the run that were lost in crashes.
    """

    cohorts: CyclicCohorts
    num_lost: int

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,  # noqa: ARG002 - a group is asked as a whole
        round_num: int,
        attempt: int,  # noqa: ARG002 - turns are counted over all attempts
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the group, which may be empty.

        Raises:
            ConfigError: More clients are available than were accounted for.
        """
        if len(available) > self.cohorts.population:
            raise ConfigError(
                f"privacy.num_users is {self.cohorts.population}, but {len(available)} clients are "
                "available; revoke some, or start another run"
            )
        num_groups, turn = self.cohorts.num_groups, round_num + self.num_lost
        return whose_turn(available, num_groups=num_groups, turn=turn, seed=seed)


@dataclass(frozen=True)
class BandedUpdates(BoundedUpdates):
    """A strategy that bounds each client's contribution and keeps the noise history in its state.

    The state holds the exact sums of the last b - 1 rounds, without noise, and the noisy estimates
    that were released: 16 bytes per round and number of a contribution.

    Attributes:
        inner: The wrapped strategy.
        summed: The bounded sum of a round.
        matrix: The matrix C that correlates noise.
    """

    matrix: BandedMatrix

    own = frozenset({_DIAGONALS, _TURN, _SUMS, _ESTIMATES})

    def init(self, params: Params) -> State:
        """Return the inner strategy's state with an empty noise history.

        The diagonals are part of the state: the search for them may end differently on another
        machine, and a resumed run must continue with the same matrix.
        """
        device, diagonals = params.vector.device, self.matrix.diagonals
        size = sum(lane.size(params.layout) for lane in self.lanes)
        past = torch.zeros(len(diagonals) - 1, size, dtype=torch.float64, device=device)
        return {
            **self.inner.init(params),
            _DIAGONALS: torch.tensor(diagonals),
            _TURN: torch.tensor(0),
            _SUMS: past,
            _ESTIMATES: past.clone(),
        }

    def require_exact(self, layout: Layout) -> None:
        """Raise ValueError if rows for models of ``layout`` are too large for exact float64."""
        matrix, largest = self.matrix, self.summed.largest
        for name, lane in self.summed.lanes(self.lanes, layout).items():
            reach = matrix.reach * largest * lane.levels
            # The other half of the exact range is for the noise.
            if reach > EXACT / 2.0 or self.summed.sigma(name, lane) * matrix.norm > MAX_SIGMA:
                raise ValueError(
                    f"sums of {largest} clients over {len(matrix.diagonals)} rounds with "
                    f"{self.summed.multipliers[name]:g} times the noise of their bound exceed "
                    "exact integers; lower privacy.bands or the noise, or ask fewer clients"
                )


@dataclass(frozen=True, kw_only=True)
class BandedMean:
    """Releases sums of levels with noise that later rounds cancel in part.

    Attributes:
        expected: The public denominator.
        noise: Source of the noise.
        num_lost: Turns of the run that were lost in crashes.

    Guarantees:
        Releases are computed from integers with discrete Gaussian noise, whose standard deviation
        is ``noise_multiplier`` times the L2 norm of what one user's participation adds to all of
        them.
    """

    expected: float
    noise: Noise
    num_lost: int

    def __call__(
        self,
        aggregate: Aggregate,
        *,
        strategy: Strategy,
        layout: Layout,
        state: State,
        round_num: int,
        attempt: int,
    ) -> tuple[Aggregate, State]:
        """Return the noisy means over the expected number of clients, and the next state.

        Args:
            aggregate: Sums of levels.
            strategy: Strategy of the round, a :class:`BandedUpdates`.
            layout: Layout of the model.
            state: State of the strategy.
            round_num: Round index, from 0.
            attempt: Retry number of the round, from 0.

        Raises:
            StoreError: The ledger has fewer charges than the run has had turns.
        """
        assert isinstance(strategy, BandedUpdates)  # a plan makes both
        first, *others = (int(each) for each in state[_DIAGONALS])
        turn = round_num + self.num_lost
        num_lost = turn - int(state[_TURN])
        if num_lost < 0:
            raise StoreError(
                f"the privacy ledger has {turn} charges of this run, but its model has had "
                f"{int(state[_TURN])} turns: the ledger was rolled back or replaced; restore it"
            )
        sums = _skip_turns(state[_SUMS], num_lost)
        estimates = _skip_turns(state[_ESTIMATES], num_lost)
        summed, norm = strategy.summed, math.hypot(first, *others)
        lanes = summed.lanes(strategy.lanes, layout)
        exact = torch.cat([aggregate.lanes[name] for name in lanes])
        # A new tensor: the history below needs `exact` without noise.
        row = first * exact
        for diagonal, before in zip(others, sums, strict=True):
            row.add_(before, alpha=diagonal)  # integers, and exact
        parts = dict(zip(lanes, row.split([lane.size for lane in lanes.values()]), strict=True))
        for name, part in parts.items():
            labels = (name, round_num, attempt)
            # Relative to a column's norm: a participation adds one column of C to the rows.
            sigma = summed.sigma(name, lanes[name]) * norm
            noise = self.noise.draw(sigma, len(part), labels=labels)
            part.add_(noise.to(part.device))
        # From here on, everything is computed from numbers that already have noise, so floating
        # point does no harm. Products are rounded before they are added (no fused multiply-add), so
        # that the result does not depend on the number of threads.
        # Solve C x̂ = row for the newest entry: (row - c_1 x̂_{t-1} - … - c_{b-1} x̂_{t-b+1}) /
        # c_0.
        product = torch.empty_like(row)
        for diagonal, before in zip(others, estimates, strict=True):
            row.sub_(torch.mul(before, diagonal, out=product))
        row.div_(first)
        means = {
            name: (part * (lanes[name].step / self.expected)).to(layout.dtype)
            for name, part in parts.items()
        }
        after = {
            _TURN: torch.tensor(turn + 1),
            _SUMS: _append_turn(sums, exact),
            _ESTIMATES: _append_turn(estimates, row),
        }
        released = Aggregate(lanes=means, num_clients=max(1, round(self.expected)))
        return released, {**state, **after}


def _skip_turns(past: Tensor, num_turns: int) -> Tensor:
    """Advance the noise history by ``num_turns`` empty turns (most recent first)."""
    if num_turns == 0:
        return past
    later = torch.zeros_like(past)
    later[num_turns:] = past[: max(0, len(past) - num_turns)]
    return later


def _append_turn(past: Tensor, last: Tensor) -> Tensor:
    return torch.cat([last[None], past[:-1]]) if len(past) else past
