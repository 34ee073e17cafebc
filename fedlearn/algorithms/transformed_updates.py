"""A strategy around any other, whose clients change their updates before they send them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.algorithms.transforms import Transform
from fedlearn.errors import ConfigError


@dataclass(frozen=True)
class TransformedUpdates(StrategyWrapper):
    """A strategy whose clients change their updates, such as by a clip or compression.

    Attributes:
        inner: The wrapped strategy.
        further: The transforms, in the order in which clients apply them, after those of ``inner``.

    Raises:
        ConfigError: ``further`` is no sequence of transforms.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> fl.TransformedUpdates(fl.FedNova(local), [fl.Quantized(bits=8)]).transforms
        (Quantized(error_feedback=False, bits=8, num_per_scale=None),)
    """

    further: Sequence[Transform]

    def __post_init__(self) -> None:
        given: object = self.further
        if not isinstance(given, Sequence) or not all(map(callable, given)):
            raise ConfigError(
                f"TransformedUpdates(): further is {self.further!r}, not a sequence of transforms; "
                "write fl.TransformedUpdates(algorithm, [fl.TopK(fraction=0.1)])"
            )
        object.__setattr__(self, "further", tuple(self.further))  # comparable, and nobody's list

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's transforms, then the further ones."""
        return (*self.inner.transforms, *self.further)
