"""Semi-synchronous rounds: late updates count in a later round, and deadlines adapt to clients.

A round closes like a synchronous one. A client that has not reported by then continues its task and
gets no other meanwhile; its update counts in the round in which it arrives, weighted by its
staleness. The deadline may be a quantile of the clients' durations in the last rounds. That works
only because late clients report too: otherwise each measured duration would be below the deadline
that it helps to set.
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

#: Seconds from a client's task to its update, grouped by the round in which the update arrived.
Durations: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LateUpdates(Staleness):
    """Settings of semi-synchronous rounds: weights of late updates, and adaptive deadlines.

    References:
        Wu et al., 2021, `SAFA: A Semi-Asynchronous Protocol for Fast Federated Learning with Low
        Overhead <https://arxiv.org/abs/1910.01355>`_ (late updates that are kept).
    """

    deadline_quantile: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        doc(
            "Share of the clients that the deadline waits for, estimated from the durations of "
            "the last rounds, (0, 1]; not set: the deadline is fixed."
        ),
    ]
    deadline_window: Annotated[
        Count, doc("Number of past rounds whose durations set the deadline, >= 1.")
    ]
    least_deadline_s: Annotated[
        NotNegative,
        doc(
            "Shortest adaptive deadline, in seconds, >= 0; the longest one, and that of the "
            "first round, is stragglers.deadline_s."
        ),
    ]

    def deadline_s(
        self, durations: Durations, awaited_s: Sequence[float], *, longest_s: float
    ) -> float:
        """Return the deadline of a round: seconds from the broadcast, at most ``longest_s``.

        It is the ``deadline_quantile`` of the durations. A client that has not replied yet counts
        with the time that it has taken so far.

        Args:
            durations: Durations of the last rounds.
            awaited_s: Seconds since each pending task was sent.
            longest_s: The fixed deadline; may be infinite.

        Example:
            >>> from fedlearn.algorithms.staleness import StalenessWeight
            >>> late = LateUpdates(max_staleness=2, staleness_weight=StalenessWeight.CONSTANT,
            ...                    staleness_exponent=0.0, staleness_hinge=0, deadline_quantile=0.5,
            ...                    deadline_window=2, least_deadline_s=1.0)
            >>> late.deadline_s(((3.0, 2.0), (9.0,)), [4.0], longest_s=60.0)
            3.0
        """
        # Clients that are still out count, too: leaving out the slowest would shrink the deadline.
        known = sorted([*awaited_s, *(each for of_round in durations for each in of_round)])
        if self.deadline_quantile is None or not known:
            return longest_s
        # Quantile 0.55 of 100 values is the 55th, but the product is 55.00000000000001 in floats.
        place = math.ceil(self.deadline_quantile * len(known) - 1e-9) - 1
        return min(longest_s, max(self.least_deadline_s, known[place]))

    def window(self, durations: Durations, latest: Sequence[float]) -> Durations:
        """Append the latest round's durations and drop rounds that leave the window."""
        if self.deadline_quantile is None:
            return ()
        return (*durations, tuple(latest))[-self.deadline_window :]


def durations_tensors(durations: Durations) -> dict[str, Tensor]:
    """Convert durations to checkpoint tensors; without rounds there are none.

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
    """Restore durations from the tensors of :func:`durations_tensors`."""
    if not tensors:
        return ()
    of_rounds = tensors["seconds"].split(tensors["counts"].tolist())
    return tuple(tuple(of_round.tolist()) for of_round in of_rounds)
