"""When synchronous rounds close: see the how-to on stragglers."""

import math
from dataclasses import dataclass


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
