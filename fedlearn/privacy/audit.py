r"""Empirical privacy audit: a lower bound on ε from an attack on planted canaries in one run.

A *canary* is a made-up client. Canaries come in pairs, and a fair coin decides which one of a pair
is in: in each round it contributes its own direction, with the norm of the clip. The other one
contributes nothing or, where the guarantee is about replaced users, the opposite direction. The
attacker sees the releases, knows everything about the other clients (here they contribute nothing),
and guesses for each pair which canary was in.

No two directions share a coordinate, so the pairs are independent trials. If noise hides one canary
like a Gaussian at distance :math:`\mu`, it hides a pair, two orthogonal contributions, like one at
distance :math:`\sqrt 2 \mu`. The best guess is then right with probability
:math:`\Phi(\mu / \sqrt 2)`. So the number of right guesses bounds :math:`\mu`, and with it ε, from
below.

References:
    Canaries that are clients: Andrew et al., 2023, `One-shot Empirical Privacy Estimation for
    Federated Learning <https://arxiv.org/abs/2302.03098>`_. A bound by way of the Gaussian: Nasr et
    al., 2023, `Tight Auditing of Differentially Private Machine Learning
    <https://arxiv.org/abs/2302.07956>`_.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, binom, norm
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, Aggregate, Updates, stack_rows
from fedlearn.algorithms.strategy import State, StepResult, StrategyWrapper
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.noise import SecretStream
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.privacy.gaussian import gaussian_epsilon

#: Key of the state in which an audited strategy adds up the releases.
SEEN = "audit_seen"
_ROUND = "audit_round"
#: Norm of a canary's contribution before it is clipped.
_LOUD = 1e9


def lower_bound(
    *, target_delta: float, num_pairs: int, num_correct: int, confidence: float
) -> float:
    """Return the lower bound on ε that an attack's number of right guesses proves.

    It is the ε of the largest Gaussian noise that the guesses rule out.

    Args:
        target_delta: δ, in (0, 1).
        num_pairs: Pairs of canaries, one guess each.
        num_correct: Guesses that were right.
        confidence: Probability that the bound holds, below 1 (Clopper and Pearson, 1934).

    Example:
        >>> counts = {"num_pairs": 1000, "target_delta": 1e-5, "confidence": 0.95}
        >>> round(lower_bound(num_correct=640, **counts), 1)
        1.6
        >>> lower_bound(num_correct=500, **counts)
        0.0
    """
    if num_correct == 0:
        return 0.0
    # Clopper-Pearson: the lower confidence bound of the rate of right guesses.
    rate = float(beta.ppf(1.0 - confidence, num_correct, num_pairs - num_correct + 1))
    # Right with probability Φ(μ / √2), solved for μ.
    distance = math.sqrt(2.0) * float(norm.ppf(rate))
    return gaussian_epsilon(distance, target_delta) if distance > 0.0 else 0.0


def power(
    claimed: float, *, distance: float, target_delta: float, num_pairs: int, confidence: float
) -> float:
    """Return the power of the audit: the probability that it refutes a run's claimed ε.

    Args:
        claimed: ε that the run claims.
        distance: A canary's contribution in standard deviations of the noise actually added.
        target_delta: See :func:`lower_bound`.
        num_pairs: See :func:`lower_bound`.
        confidence: See :func:`lower_bound`.
    """
    few, enough = -1, num_pairs + 1
    while enough - few > 1:
        # Bisection for the fewest right guesses whose bound exceeds the claim: the bound grows with
        # them.
        middle = (few + enough) // 2
        found = lower_bound(
            target_delta=target_delta,
            num_pairs=num_pairs,
            num_correct=middle,
            confidence=confidence,
        )
        few, enough = (few, middle) if found > claimed else (middle, enough)
    return float(binom.sf(enough - 1, num_pairs, norm.cdf(distance / math.sqrt(2.0))))


@dataclass(frozen=True)
class Canaries:
    """Pairs of made-up clients: the first two, the next two, and so on.

    Attributes:
        is_in: Whether each canary is in, exactly one of each pair: shape [m].
        seed: Seed of their directions.
        opposite: Whether the other canary of a pair contributes the opposite direction instead of
            nothing.
    """

    is_in: NDArray[np.bool_]
    seed: Seed
    opposite: bool

    @classmethod
    def draw(cls, *, num_pairs: int, opposite: bool) -> "Canaries":
        """Draw ``num_pairs`` pairs with secret coins and directions."""
        *coins, seed = SecretStream.fresh().words(np.uint64, num_pairs + 1).tolist()
        firsts = np.array([coin % 2 == 1 for coin in coins])
        # A seed has 63 bits.
        return cls(np.stack([firsts, ~firsts], 1).ravel(), Seed(seed >> 1), opposite)

    def contributions(self, canaries: Sequence[int], size: int) -> Tensor:
        """Return the contributions of these canaries before clipping: shape [K, size].

        The direction of a canary is every m-th coordinate, with random signs. So no two canaries
        share a coordinate, and together they cover all.
        """
        signs, rows = self._signs(size).float(), torch.zeros(len(canaries), size)
        for row, canary in zip(rows, canaries, strict=True):
            own = slice(canary, None, len(self.is_in))
            length = _LOUD if self.is_in[canary] else -_LOUD if self.opposite else 0.0
            row[own] = signs[own] * (length / math.sqrt(len(row[own])))
        return rows

    def scores(self, seen: Tensor) -> NDArray[np.float64]:
        """Return each canary's score, the projection of ``seen`` on its direction: shape [m]."""
        count, size = len(self.is_in), len(seen)
        products = (seen.double() * self._signs(size)).numpy()
        owners = np.arange(size) % count
        sums = np.bincount(owners, weights=products, minlength=count)
        return np.asarray(sums / np.sqrt(np.bincount(owners, minlength=count)))

    def num_correct(self, scores: NDArray[np.float64]) -> int:
        """Return the number of pairs in which the canary that was in has the higher score."""
        pairs, is_in = scores.reshape(-1, 2), self.is_in.reshape(-1, 2)
        return int(((pairs[:, 0] > pairs[:, 1]) == is_in[:, 0]).sum())

    def distance(self, scores: NDArray[np.float64]) -> float:
        """Return the distance between the mean scores of canaries in and out, in deviations."""
        both = scores[self.is_in], scores[~self.is_in]
        spread = math.sqrt(sum(float(kind.var(ddof=1)) for kind in both) / 2.0)
        return float(both[0].mean() - both[1].mean()) / max(spread, 1e-12)

    def _signs(self, size: int) -> Tensor:
        values = self.seed.derive("canaries").numpy().integers(0, 2, size) * 2.0 - 1.0
        return torch.from_numpy(values)


@dataclass(frozen=True)
class CanaryUpdates:
    """Replaces each update by a canary's contribution, whose norm exceeds any clip norm.

    Attributes:
        canaries: All clients.
    """

    takes_blocks: ClassVar[bool] = True

    canaries: Canaries

    def __call__(self, updates: Updates) -> Updates:
        """Return the canaries' updates, for the same clients."""
        delta = stack_rows(updates.lanes[DELTA.name])
        rows = self.canaries.contributions(updates.client_ids, delta.shape[1]).to(delta)
        return replace(updates, lanes={**updates.lanes, DELTA.name: rows})


@dataclass(frozen=True)
class OwnNumbers:
    """Keeps the coordinates of an update to which the canaries of its client contribute.

    The sum over clients then holds, for each canary, what an attacker sees in the single update.

    Attributes:
        canaries: All canaries.
        per_client: Number of canaries that each client holds.
    """

    takes_blocks: ClassVar[bool] = True

    canaries: Canaries
    per_client: int

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with zeros in all other coordinates."""
        rows = stack_rows(updates.lanes[DELTA.name]).clone()
        holders = torch.arange(rows.shape[1]) % len(self.canaries.is_in) // self.per_client
        for row, client_id in zip(rows, updates.client_ids, strict=True):
            row.mul_((holders == client_id).to(row))
        return replace(updates, lanes={**updates.lanes, DELTA.name: rows})


@dataclass(frozen=True)
class CanaryStrategy(StrategyWrapper):
    """A strategy whose clients are canaries.

    Attributes:
        inner: The wrapped strategy.
        canaries: All clients.
    """

    canaries: Canaries

    @property
    def transforms(self) -> Sequence[Transform]:
        """The replacement by canaries, then the inner strategy's transforms."""
        return (CanaryUpdates(self.canaries), *self.inner.transforms)


@dataclass(frozen=True)
class SingleUpdateStrategy(StrategyWrapper):
    """A strategy in which the attacker sees single updates, with the noise that clients add.

    Attributes:
        inner: The wrapped strategy.
        selection: The selection of coordinates that each update keeps.
    """

    selection: OwnNumbers

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's transforms, then the selection of coordinates."""
        return (*self.inner.transforms, self.selection)


@dataclass(frozen=True)
class ReleaseRecorder(StrategyWrapper):
    """A strategy that adds up its releases, for the attacker to score.

    Attributes:
        inner: The wrapped strategy.
        weights_Tm: Weight of each round's release for each canary: T rounds, m canaries.
    """

    weights_Tm: NDArray[np.float64]

    own = frozenset({SEEN, _ROUND})

    def init(self, params: Params) -> State:
        """Return the inner strategy's state with an empty sum of releases."""
        seen = torch.zeros_like(params.vector)
        return {**self.inner.init(params), SEEN: seen, _ROUND: torch.tensor(0)}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step, and add the release to the weighted sum."""
        stepped = super().step(params, aggregate, state)
        released, round_num = aggregate.lanes[DELTA.name], int(state[_ROUND])
        weights_m = torch.from_numpy(self.weights_Tm[round_num]).to(released)
        weights = weights_m[torch.arange(len(released)) % len(weights_m)]
        after = {SEEN: state[SEEN] + weights * released, _ROUND: torch.tensor(round_num + 1)}
        return replace(stepped, state={**stepped.state, **after})
