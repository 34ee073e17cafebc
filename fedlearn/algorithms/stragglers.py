"""The straggler policy: when a round closes, and what happens if too few clients reported."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, doc

from fedlearn.core.ranges import Count, Ranged, Whole


class BelowMinimum(StrEnum):
    """What happens to a round with fewer reports than its minimum."""

    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy(Ranged):
    """How a round deals with slow and failing clients: over-selection, deadline and minimum.

    A round asks ``ceil(num_wanted * over_selection)`` clients and closes at the first of:
    ``num_wanted`` usable reports, every client settled, or ``deadline_s`` after the
    broadcast. Clients that report later are recorded as late. ``late_updates.mode`` decides whether
    their updates are dropped or count in a later round.

    References:
        Bonawitz et al., 2019, `Towards Federated Learning at Scale: System Design
        <https://arxiv.org/abs/1902.01046>`_, section 2.2 (130 % over-selection).

    Example:
        >>> StragglerPolicy(num_wanted=10, over_selection=1.3, deadline_s=60.0, min_reports=5,
        ...                 below_minimum=BelowMinimum.RETRY, max_retries=3).cohort_size
        13
    """

    num_wanted: Annotated[Count, doc("Reports that close a round.")]
    over_selection: Annotated[
        float, Ge(1), doc("Clients asked per wanted report, >= 1; rounded up to whole clients.")
    ]
    deadline_s: Annotated[float, doc("Seconds from the broadcast to the cut-off; may be infinite.")]
    min_reports: Annotated[
        int,
        doc(
            "Fewest reports that make a round; with 0, for aggregations that allow it, any number "
            "does."
        ),
    ]
    below_minimum: Annotated[
        BelowMinimum,
        doc(
            "What a round below its minimum does: ask a new cohort, keep the model, or fail the "
            "run."
        ),
    ]
    max_retries: Annotated[
        Whole, doc("Attempts of a round after its first, >= 0; then the run fails.")
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_reports <= self.num_wanted:
            raise ValueError(
                f"min_reports is {self.min_reports}; give a number in 0..num_wanted "
                f"({self.num_wanted})"
            )
        if not self.deadline_s > 0.0:
            raise ValueError(f"deadline_s is {self.deadline_s}; give a number above 0")

    @property
    def cohort_size(self) -> int:
        """Number of clients asked in a round."""
        # 50 x 1.1 is 55.00000000000001 in floats, and must ask 55 clients.
        return math.ceil(self.num_wanted * self.over_selection - 1e-9)
