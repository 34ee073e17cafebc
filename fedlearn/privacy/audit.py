r"""What an attacker finds out about canaries: a lower bound on ε, from one run.

A *canary* is a client that is made up. By a fair coin of its own it is in, and then contributes a
direction of its own, as long as the clip norm, whenever it is asked; or it is out, and contributes
nothing. Who sees the releases guesses for some of the canaries that they were in. Under
(ε, δ)-differential privacy no attacker can be right too often, whatever it does, so one who is
right more often shows that ε is not what it is said to be. The attacker may know all about the
other clients, and take away what they contribute: here they contribute nothing.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`m, r, v`           ``num_canaries``, ``num_guesses``, ``num_correct``
:math:`\beta`             one minus ``confidence``
========================= ==================================================

References:
    Steinke, Nasr and Jagielski, 2023, `Privacy Auditing with One (1) Training Run
    <https://arxiv.org/abs/2305.08846>`_, theorem 5.2. Canaries that are clients, with random
    directions: Andrew et al., 2023, `One-shot Empirical Privacy Estimation for Federated Learning
    <https://arxiv.org/abs/2302.03098>`_.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, Aggregate, Updates, matrix
from fedlearn.algorithms.strategy import State, Stepped, Wrapped
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.messages import ClientId
from fedlearn.core.noise import SecretStream
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed

#: The state in which an audited strategy adds up what was released.
SEEN = "audit_seen"
#: Numbers of all directions together that are held at once.
_LARGEST_MATRIX = 5e7
#: The length of what a canary contributes, before it is clipped.
_LOUD = 1e9
#: The bisection of ε ends at this width.
_WIDTH = 1e-4


def p_value(
    epsilon: float, *, target_delta: float, num_canaries: int, num_guesses: int, num_correct: int
) -> float:
    r"""Return how probable so many correct guesses are at most under (ε, δ)-differential privacy.

    :math:`P[V \ge v] \le \beta + 2 m \delta \max_{1 \le i \le v} \frac{1}{i} P[v > B \ge v - i]`,
    where :math:`B` is binomial of r trials at :math:`e^\varepsilon / (1 + e^\varepsilon)` and
    :math:`\beta = P[B \ge v]`.

    Args:
        epsilon: ε >= 0.
        target_delta: δ.
        num_canaries: m, of which each is in by a fair coin.
        num_guesses: r <= m; of the others nothing is said.
        num_correct: v <= r.
    """
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    counts = np.arange(num_correct)
    below = np.cumsum(binom.pmf(counts, num_guesses, rate)[::-1])  # P[v > B >= v - i], i = 1..v
    excess = float(np.max(below / np.arange(1, num_correct + 1))) if num_correct else 0.0
    beta = float(binom.sf(num_correct - 1, num_guesses, rate))
    return min(1.0, beta + 2.0 * num_canaries * target_delta * excess)


def lower_bound(
    *,
    target_delta: float,
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    confidence: float,
) -> float:
    """Return the largest ε that so many correct guesses rule out; 0.0: they rule out none.

    Example:
        >>> counts = {"num_canaries": 300, "num_guesses": 100, "target_delta": 1e-5}
        >>> round(lower_bound(num_correct=100, confidence=0.95, **counts), 1)
        3.5
        >>> lower_bound(num_correct=52, confidence=0.95, **counts)
        0.0
    """

    def is_ruled_out(epsilon: float) -> bool:
        found = p_value(
            epsilon,
            target_delta=target_delta,
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_correct=num_correct,
        )
        return found <= 1.0 - confidence

    if not is_ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_ruled_out(high):
        low, high = high, 2.0 * high
    while high - low > _WIDTH:
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Canaries:
    """Clients that are made up, with the numbers behind those of the real ones.

    Attributes:
        first: The number of the first one.
        is_in: By canary, whether it is in: shape [m].
        seed: Of their directions.
    """

    first: int
    is_in: NDArray[np.bool_]
    seed: Seed

    @classmethod
    def drawn(cls, *, first: int, count: int) -> "Canaries":
        """Return so many, whose coins and directions nobody can tell."""
        *coins, seed = SecretStream.fresh().words(np.uint64, count + 1).tolist()
        return cls(first, np.array([coin % 2 == 1 for coin in coins]), Seed(seed >> 1))

    def has(self, client_id: ClientId) -> bool:
        """Return whether a client is a canary that is in."""
        return client_id >= self.first and bool(self.is_in[client_id - self.first])

    def direction(self, client_id: ClientId, size: int) -> Tensor:
        """Return a canary's own direction: a unit vector, [size]."""
        rng = self.seed.derive("canary", client_id).numpy()
        values = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
        unit: Tensor = values / values.norm()
        return unit

    def scores(self, seen: Tensor) -> NDArray[np.float64]:
        """Return by canary how much of its direction is in what was seen, [size]: shape [m].

        In few dimensions the others' directions are in the way, and are taken away.
        """
        size, count = len(seen), len(self.is_in)
        numbers = [ClientId(self.first + place) for place in range(count)]
        if 2 * count > size or count * size > _LARGEST_MATRIX:
            return np.array([float(self.direction(n, size) @ seen.float()) for n in numbers])
        directions_MP = torch.stack([self.direction(n, size) for n in numbers]).double()
        products_MM = directions_MP @ directions_MP.t()
        parts_M: Tensor = torch.linalg.solve(products_MM, directions_MP @ seen.double())
        return np.asarray(parts_M)


@dataclass(frozen=True)
class CanaryUpdates:
    """Has canaries alone contribute to the model: a transform, of all that follow it.

    Attributes:
        canaries: Those that are in contribute their direction, longer than any clip; all others
            nothing, as if they were not there, or somebody had taken it away.
    """

    takes_blocks: ClassVar[bool] = True

    canaries: Canaries

    def __call__(self, updates: Updates) -> Updates:
        """Return other updates, of the same clients."""
        rows = torch.zeros_like(matrix(updates.lanes[DELTA.name]))
        for row, client_id in zip(rows, updates.client_ids, strict=True):
            if self.canaries.has(client_id):
                row.copy_(_LOUD * self.canaries.direction(client_id, len(row)))
        return replace(updates, lanes={**updates.lanes, DELTA.name: rows})


@dataclass(frozen=True)
class Watched(Wrapped):
    """A strategy with canaries among its clients, whose releases somebody adds up.

    Attributes:
        inner: The strategy otherwise.
        canaries: Those of its clients that are made up.
    """

    canaries: Canaries

    own = frozenset({SEEN})

    @property
    def transforms(self) -> Sequence[Transform]:
        """The canaries', then those of the inner strategy."""
        return (CanaryUpdates(self.canaries), *self.inner.transforms)

    def init(self, params: Params) -> State:
        """Return the inner strategy's state, and nothing seen."""
        return {**self.inner.init(params), SEEN: torch.zeros_like(params.vector)}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> Stepped:
        """Take the inner strategy's step, and look at what was released."""
        stepped = super().step(params, aggregate, state)
        seen = state[SEEN] + aggregate.lanes[DELTA.name]
        return replace(stepped, state={**stepped.state, SEEN: seen})


def guesses(scores: Sequence[float] | NDArray[np.float64], *, count: int) -> NDArray[np.int64]:
    """Return the canaries of which an attacker says that they were in: those of highest score."""
    return np.argsort(-np.asarray(scores), kind="stable")[:count]
