"""Asynchronous federated learning: rounds that are buffers of updates.

A fixed number of clients train at all times. When one replies, another is sent the newest model.
The server steps whenever its buffer of updates is full, even if they started from older models.
The recipes are :func:`~fedlearn.algorithms.recipes.FedBuff` and, with a buffer of one update,
:func:`~fedlearn.algorithms.recipes.FedAsync`.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.algorithms.staleness import Staleness
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.core.ranges import Count


@dataclass(frozen=True, kw_only=True)
class Asynchrony(Staleness):
    """Settings of an asynchronous run: buffer size, concurrency and staleness.

    Raises:
        ValueError: A number is out of range, or more clients would be in flight than can count.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> asynchrony = fl.Asynchrony(
        ...     buffer_size=10, concurrency=20, max_staleness=4, staleness_exponent=0.5,
        ...     staleness_weight=fl.StalenessWeight.POLYNOMIAL, staleness_hinge=0,
        ... )
        >>> asynchrony.weights(np.array([0, 3]))  # by staleness
        array([1. , 0.5])
    """

    buffer_size: Annotated[
        Count, doc("Updates in a buffer, >= 1: the server steps when the buffer is full.")
    ]
    concurrency: Annotated[
        Count, doc("Clients that train at the same time, 1 to (max_staleness + 1) x buffer_size.")
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency > self.num_counting:
            raise ValueError(
                f"concurrency is {self.concurrency}, but with max_staleness {self.max_staleness} "
                f"and buffer_size {self.buffer_size} the updates of at most {self.num_counting} "
                "clients can count; lower it, or raise max_staleness"
            )

    @property
    def num_counting(self) -> int:
        """Most updates of the current model that can count.

        They must fit into the buffers of the next ``max_staleness + 1`` rounds: after that, the
        remaining ones are too stale.
        """
        return (self.max_staleness + 1) * self.buffer_size


@dataclass(frozen=True)
class Buffered:
    """A strategy that runs asynchronously.

    Attributes:
        strategy: The federated algorithm.
        asynchrony: When the server steps, and how staleness weighs updates.

    Raises:
        ValueError: The strategy is valid in synchronous rounds only.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> asynchrony = fl.FedBuff(local, buffer_size=9, concurrency=9, max_staleness=4).asynchrony
        >>> fl.Buffered(fl.FedMedian(local), asynchrony).strategy.aggregation
        CoordinateMedian()
    """

    strategy: Strategy
    asynchrony: Asynchrony

    def __post_init__(self) -> None:
        require_asynchronous(self.strategy)


def require_asynchronous(strategy: Strategy) -> None:
    """Raise ValueError, with the reason, if a strategy is valid in synchronous rounds only."""
    if strategy.needs_same_round:
        while isinstance(strategy, StrategyWrapper) and strategy.inner.needs_same_round:
            strategy = strategy.inner  # name the one that has the reason
        raise ValueError(
            f"{type(strategy).__name__} cannot be asynchronous: {strategy.needs_same_round}; use "
            "an algorithm whose step is a function of the mean update, such as FedAvg or FedAdam"
        )
