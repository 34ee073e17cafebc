"""What one attempt at a round has collected, and what staleness makes of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.flight import Asked
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.staleness import Staleness
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.collecting import Participation, Status
from fedlearn.core.reported import WeightedMeans


class Counted(NamedTuple):
    """An update in the aggregate: the task of its client, and how long that took."""

    asked: Asked
    num_examples: int
    duration_s: float


class Tally:
    """What one attempt at a round has collected so far: client by client, but no updates.

    Args:
        round_num: Of the round.
        staleness: How staleness weighs; ``None``: all updates are based on this round's model.

    Attributes:
        rows: One for each settled client, in the order of settling.
        counted: The updates in the aggregate, in the order in which they were added.
        metrics: What clients measured in training.
    """

    def __init__(self, round_num: int, staleness: Staleness | None) -> None:
        self.round_num = round_num
        self.rows = list[Participation]()
        self.counted = list[Counted]()
        self.metrics = WeightedMeans()
        self._staleness = staleness

    def age(self, asked: Asked) -> int:
        """Return how many rounds older the model is that a client was sent."""
        return self.round_num - asked.based_on

    def factors(self, some: Sequence[Asked]) -> NDArray[np.float64]:
        """Return by what staleness multiplies the weights of some updates: shape [B]."""
        ages = np.asarray([self.age(each) for each in some], np.int64)
        return np.ones(len(ages)) if self._staleness is None else self._staleness.weights(ages)

    def settle(self, asked: Asked, status: Status, *, reason: str = "") -> None:
        """Add a row without an update, with the duration that the task has."""
        self.rows.append(Participation(asked.client_id, status, asked.duration_s, reason=reason))

    def add(self, row: Participation, asked: Asked) -> None:
        """Add the row of a client whose update counts."""
        self.rows.append(row)
        self.counted.append(Counted(asked, row.num_examples, row.duration_s))

    def ages(self) -> dict[int, int]:
        """Return how many updates have which staleness; nothing in a synchronous round."""
        if self._staleness is None:
            return {}
        return dict(sorted(Counter(self.age(each.asked) for each in self.counted).items()))

    def damp(
        self, aggregate: Aggregate, strategy: Strategy, *, weigh: Callable[[Tensor], Tensor]
    ) -> Aggregate:
        """Shorten the aggregate, in place, by how stale its updates are, and return it.

        A mean over weights that staleness has lowered is as long as if no update were stale.
        Multiplied by the sum of these weights over that of the unlowered ones it is FedBuff's: a
        buffer of stale updates is a short step.

        Args:
            aggregate: Of the updates, over weights that were multiplied by :meth:`factors`.
            strategy: Its weighted lanes are multiplied.
            weigh: Returns the weights of updates by their numbers of examples: shape [B].
        """
        if self._staleness is None:
            return aggregate
        num_examples_B = torch.tensor([each.num_examples for each in self.counted]).double()
        weights_B = weigh(num_examples_B)
        factors_B = torch.from_numpy(self.factors([each.asked for each in self.counted]))
        factor = float((weights_B * factors_B).sum() / weights_B.sum())
        if factor != 1.0:
            for spec in strategy.lanes:
                if spec.weighted:
                    aggregate.lanes[spec.name].mul_(factor)
        return aggregate
