"""Mix several data sets by weight: choose how many of the examples come from each."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features, list_tensors, name_inputs, rebuild_inputs
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.parallel.streams import LastUsed, Stream, passes

Batch = tuple[Features, Tensor]

_BLOCK = 1024
# Bounds the length of a block, which has room for one example of the rarest stream.
_LEAST_SHARE = Fraction(1, 1 << 20)


class Mixture:
    """A stream that mixes the examples of several streams in proportion to their weights.

    Positions are divided into blocks. At the end of each block, stream i has supplied the share w_i
    of all examples so far, rounded up or down. Within a block, a permutation assigns places to
    streams. Each stream is read in its own order and starts over after a full pass, so a small data
    set with a large weight is seen more often (:func:`count_passes`).

    Args:
        streams: At least one stream; all have the same inputs, shapes and dtypes.
        weights: One for each stream, > 0; they need not sum to 1.
        seed: Seed of the permutations.

    Attributes:
        streams: The streams.
        block_length: Number of positions in a block.

    Raises:
        DataError: There is no stream, or not exactly one weight for each; a weight is not finite,
            not above zero, or below a millionth of their sum; the streams differ in an input, a
            shape or a dtype; or a stream cannot be read.

    Example:
        >>> from fedlearn.parallel.streams import Shuffled
        >>> from fedlearn.training.local_data import TensorData
        >>> many, few = torch.zeros(9000), torch.ones(10)
        >>> streams = [
        ...     Shuffled(TensorData(rows, rows, device=rows.device), seed=Seed(0))
        ...     for rows in (many, few)
        ... ]
        >>> mixture = Mixture(streams, weights=[3, 1], seed=Seed(0))
        >>> _, labels = mixture.batch(range(10240))
        >>> int(labels.sum())
        2560
    """

    def __init__(self, streams: Sequence[Stream], *, weights: Sequence[float], seed: Seed) -> None:
        self.streams, self._seed = tuple(streams), seed
        self._shares = _compute_shares(weights, num_streams=len(self.streams))
        # A block has room for an example of each stream. Otherwise, by rounding, a stream's total
        # might be lower after a block than before it.
        self.block_length = max(_BLOCK, math.ceil(1 / min(self._shares)))
        self._blocks = LastUsed(self._block)
        _require_alike(self.streams)

    def __len__(self) -> int:
        return sum(map(len, self.streams))

    def batch(self, positions: range) -> Batch:
        """Return the examples at these positions."""
        parts = [
            stream.batch(part) if part else None
            for stream, part in zip(self.streams, self.parts(positions), strict=True)
        ]
        return self.assemble(parts, positions=positions)

    def parts(self, positions: range) -> list[range]:
        """Return the positions of each stream that supply these positions; a range may be empty."""
        starts, stops = self._count_supplied(positions.start), self._count_supplied(positions.stop)
        return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def assemble(self, parts: Sequence[Batch | None], *, positions: range) -> Batch:
        """Assemble a batch from the examples that the streams supply for these positions.

        Args:
            parts: Each stream's examples at its :meth:`parts`; ``None`` for an empty range.
            positions: The positions of the batch.
        """
        owners = self._find_owners(positions)
        given = [(np.flatnonzero(owners == i), part) for i, part in enumerate(parts) if part]
        if len(given) == 1:
            return given[0][1]
        # The inverse permutation: row order[i] of the concatenation belongs at place i.
        order = np.argsort(np.concatenate([places for places, _ in given]))
        rows = torch.from_numpy(order)
        inputs = zip(*(list_tensors(features) for _, (features, _) in given), strict=True)
        features = [torch.cat(each).index_select(0, rows) for each in inputs]
        labels = torch.cat([labels for _, (_, labels) in given]).index_select(0, rows)
        return rebuild_inputs(features, like=given[0][1][0]), labels

    def _count_supplied(self, position: int) -> list[int]:
        """Return the number of examples that each stream supplies before a position."""
        block, place = divmod(position, self.block_length)
        before = _round_shares(self._shares, block * self.block_length)
        if not place:
            return before
        inside = np.bincount(self._blocks[block][:place], minlength=len(before))
        return [a + int(b) for a, b in zip(before, inside, strict=True)]

    def _block(self, number: int) -> NDArray[np.int64]:
        """Return the index of the stream that supplies each place of a block."""
        ends = [_round_shares(self._shares, (number + each) * self.block_length) for each in (0, 1)]
        owners = np.repeat(np.arange(len(self._shares)), np.subtract(ends[1], ends[0]))
        return self._seed.derive("block", number).numpy().permutation(owners)

    def _find_owners(self, positions: range) -> NDArray[np.int64]:
        length = self.block_length
        return np.concatenate(
            [self._blocks[number][places] for number, places in passes(positions, length)]
        )


def count_passes(
    lengths: Sequence[int], *, weights: Sequence[float], num_examples: int
) -> list[float]:
    """Return the number of passes over each data set of a mixture: w_i T / n_i.

    Args:
        lengths: Number of examples, or tokens, of each data set, n_i.
        weights: Weights, as for :class:`Mixture`; divided by their sum they are w_i.
        num_examples: Total number of examples to train on, T.

    Raises:
        DataError: The weights are not those of a :class:`Mixture`.

    Example:
        >>> common_crawl, others = count_passes([410, 89], weights=[0.6, 0.4], num_examples=300)
        >>> f"{common_crawl:.2f}"
        '0.44'

    References:
        Brown et al., 2020, `Language Models are Few-Shot Learners
        <https://arxiv.org/abs/2005.14165>`_ (Table 2.2).
    """
    shares = _compute_shares(weights, num_streams=len(lengths))
    pairs = zip(shares, lengths, strict=True)
    return [float(share * num_examples / length) for share, length in pairs]


def _compute_shares(weights: Sequence[float], *, num_streams: int) -> list[Fraction]:
    if not weights or len(weights) != num_streams:
        raise DataError(
            f"{len(weights)} weights for {num_streams} data sets; give one weight per data set, "
            "for at least one data set"
        )
    for place, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(
                f"weight {place} is {weight}; give a finite one above zero, or leave the data set "
                "out"
            )
    # Exact fractions, so that every process rounds alike at any position.
    exact = [Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    for weight, share in zip(weights, shares, strict=True):
        if share < _LEAST_SHARE:
            raise DataError(
                f"the weight {weight} is {float(share):.1e} of all, below {float(_LEAST_SHARE):.1e}"
                "; raise it, or leave the data set out"
            )
    return shares


def _round_shares(shares: Sequence[Fraction], total: int) -> list[int]:
    """Split ``total`` in these shares into whole numbers, each rounded up or down.

    Uses the method of largest remainders (Hamilton's method).
    """
    whole = [math.floor(share * total) for share in shares]
    rest = [share * total - floor for share, floor in zip(shares, whole, strict=True)]
    # Ties go to the lower index, so that every process rounds alike.
    up = sorted(range(len(shares)), key=lambda i: (-rest[i], i))[: total - sum(whole)]
    return [count + (i in up) for i, count in enumerate(whole)]


def _require_alike(streams: Sequence[Stream]) -> None:
    forms = [_describe_form(*stream.batch(range(1))) for stream in streams]
    for place, form in enumerate(forms):
        if form != forms[0]:
            raise DataError(
                f"data set {place} has {form}, data set 0 {forms[0]}; mixed data sets must have "
                "the same inputs, shapes and dtypes: change columns or convert them"
            )


def _describe_form(features: Features, labels: Tensor) -> str:
    tensors = name_inputs(features) | {"labels": labels}
    each = [f"{name} {list(value.shape[1:])} {value.dtype}" for name, value in tensors.items()]
    return ", ".join(each)
