"""One round in virtual time: who arrives when, and whom the round still needs.

A round closes with the last report it wants. Which are usable is known only after training, so
clients train in waves: those that would close the round if all were sound, then, for each that
was not, the next to arrive.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import STATUSES, Participations, Status

#: Outcome of a client that was trained: its update counts, is refused, or training raised an error.
REPORTED, REFUSED, RAISED = 1, 2, 3
#: Its client vanished before it reported.
DROPPED = 4
_PENDING, _TOO_LATE = 0, 5
_FAILED = (REFUSED, RAISED, DROPPED)

#: Why a client that vanished in the middle of a round failed.
DROPPED_OUT = "dropped out before reporting"

#: The status code of each outcome.
_STATUSES = (Status.LATE, Status.REPORTED, *[Status.FAILED] * 3, Status.LATE)
_CODES = np.asarray([STATUSES.index(status) for status in _STATUSES])


@dataclass(frozen=True, eq=False)
class Timeline:
    """The clients of a cohort in order of arrival, and what is known of each.

    Attributes:
        client_ids: In order of arrival: shape [n].
        num_examples: Of each: shape [n].
        durations_s: Seconds from the broadcast to each arrival: shape [n], ascending.
        outcome: What is known of each: shape [n].
        losses: Training losses of those that reported: shape [n].
        reasons: Why clients failed that were trained, by place.
    """

    client_ids: NDArray[np.int64]
    num_examples: NDArray[np.int64]
    durations_s: NDArray[np.float64]
    outcome: NDArray[np.int64]
    losses: NDArray[np.float64]
    reasons: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        client_ids: NDArray[np.int64],
        *,
        num_examples: NDArray[np.int64],
        durations_s: NDArray[np.float64],
        drops: NDArray[np.bool_],
        policy: StragglerPolicy,
    ) -> Self:
        """Return the timeline before anyone was trained; arguments in order of arrival."""
        is_late = ~(durations_s <= policy.deadline_s) | ~np.isfinite(durations_s)
        outcome = np.select([is_late, drops], [_TOO_LATE, DROPPED], _PENDING)
        losses = np.full(len(client_ids), math.nan)
        return cls(client_ids, num_examples, durations_s, outcome, losses)

    def next_wave(self, num_wanted: int) -> NDArray[np.int64]:
        """Return the indices of the clients to train now; none when the round is closed."""
        num_missing = num_wanted - int((self.outcome == REPORTED).sum())
        return np.flatnonzero(self.outcome == _PENDING)[:num_missing]

    def after(
        self,
        wave: NDArray[np.int64],
        *,
        losses: NDArray[np.float64],
        num_examples: NDArray[np.int64],
        verdicts: NDArray[np.int64],
        reasons: Mapping[int, str],
    ) -> Self:
        """Return the timeline with a wave trained.

        Args:
            wave: Places of the clients: shape [m].
            losses: Their mean training losses: shape [m].
            num_examples: Examples that each has trained on: shape [m].
            verdicts: Such as :data:`REPORTED`: shape [m].
            reasons: Why clients failed, by place in the wave.
        """
        outcome, known = self.outcome.copy(), self.losses.copy()
        counts = self.num_examples.copy()
        outcome[wave] = verdicts
        known[wave] = np.where(verdicts == REPORTED, losses, math.nan)
        counts[wave] = num_examples
        failed = {int(wave[place]): reason for place, reason in reasons.items()}
        return replace(
            self,
            outcome=outcome,
            losses=known,
            num_examples=counts,
            reasons={**self.reasons, **failed},
        )

    def closed_s(self, policy: StragglerPolicy) -> float:
        """Return when the round closed: seconds after the broadcast."""
        if (closing := self._closing(policy)) is not None:
            return float(self.durations_s[closing])
        settled_s = self.durations_s[self.outcome != _TOO_LATE]
        if len(settled_s) < len(self.outcome) and math.isfinite(policy.deadline_s):
            return policy.deadline_s
        return float(settled_s[-1]) if len(settled_s) else 0.0

    def participations(self, policy: StragglerPolicy) -> Participations:
        """Return what became of each client, in order of arrival.

        A client that would have failed after the close of the round is merely late.
        """
        outcome = self.outcome.copy()
        if (closing := self._closing(policy)) is not None:
            outcome[closing + 1 :] = _TOO_LATE
        failed = np.flatnonzero(np.isin(outcome, _FAILED)).tolist()
        return Participations(
            self.client_ids,
            _CODES[outcome],
            self.durations_s,
            np.where(outcome == REPORTED, self.num_examples, 0),
            self.losses,
            {place: self.reasons.get(place, DROPPED_OUT) for place in failed},
        )

    def _closing(self, policy: StragglerPolicy) -> int | None:
        """Return the index of the report that closed the round, if one did."""
        reported = np.flatnonzero(self.outcome == REPORTED)
        return int(reported[-1]) if len(reported) == policy.num_wanted else None
