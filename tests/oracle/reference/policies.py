"""When synchronous rounds close: see the how-to on stragglers."""

import math
from dataclasses import dataclass

from tests.oracle.configuration import Configuration

#: Fewest clients in a secure sum of four, of whom a tenth may collude and three tenths drop out.
LEAST_SUMMED = 3
#: Clients in each of the groups that take turns.
GROUP = 3


@dataclass(frozen=True)
class Policy:
    """How many clients a round asks, how long it waits, and what becomes of too few reports."""

    num_wanted: int
    num_asked: int
    deadline_s: float
    min_reports: int
    below_minimum: str = "retry"
    max_retries: int = 200


POLICIES = {
    "wait": Policy(4, 4, math.inf, 2),
    "some": Policy(4, 4, 0.9, 1),
    "oversample": Policy(3, 5, math.inf, 2),
    "retry": Policy(4, 4, 0.9, 3),
    "skip": Policy(4, 4, 0.9, 3, "skip"),
}


def num_wanted(c: Configuration) -> int:
    """Return how many reports a round is to have."""
    return GROUP if c.privacy == "banded" else POLICIES[c.stragglers].num_wanted
