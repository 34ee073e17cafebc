"""Cases of the shelf: client drift and server steps. References are written from the papers."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedlearn.algorithms.fedexp import FedExP
from fedlearn.algorithms.recipes import FedAvg
from tests.parity.shelf import COHORTS, SGD, Case, shares, train, weighted


def fedexp(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2301.09604, with client weights; epsilon is 1e-3."""
    for round_num, cohort in enumerate(COHORTS):
        p = shares(cohort)
        deltas = [x - train(x, client, round_num)[0] for client in cohort]
        mean = weighted(p, deltas)
        squares = sum(share * delta.dot(delta) for share, delta in zip(p, deltas, strict=True))
        step = max(1.0, float(squares / (2 * (mean.dot(mean) + 1e-3))))
        x = x - step * mean
        yield x


CASES: Mapping[str, Case] = {
    "fedexp": Case(
        FedExP(SGD, epsilon=1e-3),
        fedexp,
        control=FedAvg(SGD),
        protected=FedExP(SGD, epsilon=1e-3, square_norm_bound=81.0, weight_by_examples=False),
        refused="lane 'square_norm' .*has no bound",
    ),
}
