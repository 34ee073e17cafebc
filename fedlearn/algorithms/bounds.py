"""What one update may come to before it is refused: how long it is, how much it weighs."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from fedlearn.core.ranges import Ranged


@dataclass(frozen=True, kw_only=True)
class UpdateBounds(Ranged):
    """Bounds of updates in the clear; one beyond them is refused, and its client fails.

    They keep one client that is broken from ruining the model. Against clients that attack within
    them, there are rules that need every update, such as
    :class:`~fedlearn.algorithms.median.CoordinateMedian`.

    Attributes:
        max_norm: Largest Euclidean norm of each vector of an update, such as its delta, above 0
            and at most 1e18.
        max_examples: Most examples that a client may say it has trained on, 1 to 1e9.
    """

    max_norm: Annotated[float, Gt(0), Le(1e18)]  # the square of a larger one is no float32
    max_examples: Annotated[int, Ge(1), Le(10**9)]

    def too_long(self, lane: str) -> str:
        """Return why a client failed whose vector of a lane is too long."""
        return f"the norm of the {lane} exceeds {self.max_norm:g} (updates.max_norm)"

    def too_heavy(self, num_examples: int) -> str:
        """Return why a client failed that says it has trained on so many examples."""
        return (
            f"num_examples {num_examples} is not in 1..{self.max_examples} (updates.max_examples)"
        )


#: What holds where nobody says otherwise, and no honest update meets: at 1e8 numbers of float32
#: are 8 apart, so nothing that was trained in it gets there; and a device that trains on 10,000
#: examples a second would take three hours for one epoch of so many.
GENEROUS = UpdateBounds(max_norm=1e8, max_examples=10**8)
