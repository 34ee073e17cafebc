"""The rule for which checkpoints of a run are kept."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, doc

from fedlearn.core.ranges import Ranged, Whole


@dataclass(frozen=True, kw_only=True)
class Retention(Ranged):
    """A rule for which checkpoints are kept; the next commit removes all others.

    Example:
        >>> retention = Retention(keep_last=2, keep_every=4, keep_best=True)
        >>> sorted(retention.select(range(12), best_round=5))
        [4, 5, 8, 10, 11]
    """

    keep_last: Annotated[
        int,
        Ge(2),
        doc(
            "Number of latest checkpoints to keep, >= 2: the last but one is the fallback if the "
            "last is damaged."
        ),
    ]
    keep_every: Annotated[
        Whole, doc("Also keep a checkpoint every this many rounds, >= 0; 0: no such checkpoints.")
    ]
    keep_best: Annotated[
        bool,
        doc("Whether to keep the checkpoint of the best round as well, by the watched metric."),
    ]

    def select(self, rounds: Collection[int], *, best_round: int) -> set[int]:
        """Select the checkpoints to keep, each given by its number of finished rounds."""
        kept = set(sorted(rounds)[-self.keep_last :])
        if self.keep_every:
            # 0 is a multiple of everything, but the initial model is not worth a file.
            kept |= {each for each in rounds if each and each % self.keep_every == 0}
        return kept | ({best_round} & set(rounds) if self.keep_best else set())


#: The default rule.
DEFAULT_RETENTION = Retention(keep_last=2, keep_every=0, keep_best=False)
