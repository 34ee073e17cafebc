"""A strategy around any other, whose clients compress their updates."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.algorithms.transforms import Transform


@dataclass(frozen=True)
class CompressedUpdates(StrategyWrapper):
    """A strategy whose clients compress their updates.

    Attributes:
        inner: The wrapped strategy.
        compressor: How they do it.
    """

    compressor: Compressor

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's transforms, then compression."""
        return (*self.inner.transforms, self.compressor)
