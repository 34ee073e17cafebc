"""When synchronous rounds close: see the how-to on stragglers."""

import math
from dataclasses import dataclass

from tests.oracle.configuration import Configuration

#: Fewest clients in a secure sum of four, where 1/10 may collude and 3/10 may drop out.
LEAST_SUMMED = 3
#: Clients in each group of the rotation.
GROUP = 3


@dataclass(frozen=True)
class Policy:
    """How many clients a round asks, how long it waits, and whether too few reports end it."""

    num_wanted: int
    cohort_size: int
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
    """Return how many reports a round waits for."""
    return GROUP if c.privacy == "banded" else POLICIES[c.stragglers].num_wanted
