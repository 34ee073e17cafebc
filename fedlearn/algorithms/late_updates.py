"""Semi-synchronous rounds: late updates count in a later round, and deadlines follow durations.

A round asks a cohort and closes as any does. Who has not answered by then goes on, is not asked
again meanwhile, and counts in the round in which it answers, by its staleness. The deadline may be
a quantile of the durations that clients took in the last rounds, which can be known only where late
clients are heard of: else every duration would lie below the deadline that it sets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import Gt, Le, doc
from torch import Tensor

from fedlearn.algorithms.staleness import Staleness
from fedlearn.core.ranges import Count, NotNegative

#: Seconds that clients took from being asked to their updates, by the round in which these came.
Durations: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LateUpdates(Staleness):
    """What becomes of updates that miss the close of their round, and when rounds close.

    References:
        Wu et al., 2021, `SAFA: A Semi-Asynchronous Protocol for Fast Federated Learning with Low
        Overhead <https://arxiv.org/abs/1910.01355>`_ (late updates that are kept).
    """

    deadline_quantile: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        doc(
            "Share of the clients, (0, 1], that the deadline waits for, by the durations of the "
            "last rounds; not set: the deadline is fixed."
        ),
    ]
    deadline_window: Annotated[Count, doc("Rounds whose durations are looked at, >= 1.")]
    least_deadline_s: Annotated[
        NotNegative,
        doc(
            "Shortest deadline that durations set, >= 0 seconds; the longest one, which is also "
            "that of the first round, is the fixed one."
        ),
    ]

    def deadline_s(
        self, durations: Durations, awaited_s: Sequence[float], *, longest_s: float
    ) -> float:
        """Return the deadline of a round: seconds from the broadcast, at most ``longest_s``.

        The smallest duration that so large a share of the clients does not exceed. Of one that has
        not answered yet the time that it has taken so far stands for its duration.

        Args:
            durations: Of the last rounds.
            awaited_s: How long ago those were asked that are awaited yet.
            longest_s: The fixed deadline; may be infinite.

        Example:
            >>> from fedlearn.algorithms.staleness import StalenessWeight
            >>> late = LateUpdates(max_staleness=2, staleness_weight=StalenessWeight.CONSTANT,
            ...                    staleness_exponent=0.0, staleness_hinge=0, deadline_quantile=0.5,
            ...                    deadline_window=2, least_deadline_s=1.0)
            >>> late.deadline_s(((3.0, 2.0), (9.0,)), [4.0], longest_s=60.0)
            3.0
        """
        known = sorted([*awaited_s, *(each for of_round in durations for each in of_round)])
        if self.deadline_quantile is None or not known:
            return longest_s
        # A quantile such as 0.9 of 10 is the 9th, not what rounding makes of 9.000000000000002.
        place = math.ceil(self.deadline_quantile * len(known) - 1e-9) - 1
        return min(longest_s, max(self.least_deadline_s, known[place]))

    def window(self, durations: Durations, latest: Sequence[float]) -> Durations:
        """Return the durations of the last rounds, those of the latest one included."""
        if self.deadline_quantile is None:
            return ()
        return (*durations, tuple(latest))[-self.deadline_window :]


def durations_tensors(durations: Durations) -> dict[str, Tensor]:
    """Return durations for a checkpoint; none without a round.

    Example:
        >>> durations_from(durations_tensors(((2.0, 1.5), (), (3.0,))))
        ((2.0, 1.5), (), (3.0,))
    """
    if not durations:
        return {}
    flat = [each for of_round in durations for each in of_round]
    return {
        "seconds": torch.tensor(flat, dtype=torch.float64),
        "counts": torch.tensor([len(of_round) for of_round in durations]),
    }


def durations_from(tensors: Mapping[str, Tensor]) -> Durations:
    """Return what :func:`durations_tensors` was given."""
    if not tensors:
        return ()
    of_rounds = tensors["seconds"].split(tensors["counts"].tolist())
    return tuple(tuple(of_round.tolist()) for of_round in of_rounds)
