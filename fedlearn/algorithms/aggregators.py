"""From many client deltas to one: aggregation as a monoid.

``init / accumulate / merge / finalize``. From this one choice follow constant memory
while replies stream in, whole blocks at a time in a simulation, an all-reduce over worker
processes, and hierarchical aggregation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedlearn.core.collecting import Block
from fedlearn.core.cores import on_all_cores
from fedlearn.core.params import Layout


class Summable(Protocol):
    """A state whose merge is a sum, so that an all-reduce merges it over processes."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that are added up, in place."""


#: Parameters aggregated at a time: the product of so many stays in the cache.
_COLUMNS = 1 << 16

StateT = TypeVar("StateT")


class Aggregator(Protocol[StateT]):
    """Folds blocks of client deltas into one aggregate."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the aggregation weights of clients with these example counts."""

    def init(self, layout: Layout, *, device: torch.device) -> StateT:
        """Return the empty state, the identity of :meth:`merge`."""

    def accumulate(self, state: StateT, block: Block) -> StateT:
        """Return ``state`` with ``block`` folded in. Consumes ``state``: use the result."""

    def merge(self, left: StateT, right: StateT) -> StateT:
        """Return the state of both sets of clients. Consumes both."""

    def finalize(self, state: StateT) -> Tensor:
        """Return the aggregated delta, shape [P]; the state may be used up by this.

        Raises:
            ValueError: Nothing was folded in.
        """


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """The state of a weighted mean: a sum of deltas and the sum of its weights.

    Attributes:
        total_P: Sum of weight x delta: shape [P].
        weight: Sum of weights: shape [], float64.
    """

    total_P: Tensor
    weight: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that an all-reduce adds up."""
        return (self.total_P, self.weight)


@dataclass(frozen=True)
class WeightedMean:
    """Mean of deltas, weighted by their number of examples or not. Memory: one model.

    Attributes:
        by_examples: Weight a client by its number of examples (FedAvg); otherwise each
            client counts the same.

    Example:
        >>> from torch import nn
        >>> mean, layout = WeightedMean(by_examples=True), Layout.of(nn.Linear(1, 1))
        >>> block = Block(torch.tensor([[1.0, 1.0], [4.0, 4.0]]), torch.tensor([2.0, 1.0]))
        >>> state = mean.accumulate(mean.init(layout, device=torch.device("cpu")), block)
        >>> mean.finalize(state)
        tensor([2., 2.])

    References:
        McMahan et al., 2017, `Communication-Efficient Learning of Deep Networks from
        Decentralized Data <https://arxiv.org/abs/1602.05629>`_, algorithm 1.
    """

    by_examples: bool

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the example counts, or ones."""
        return num_examples_B if self.by_examples else torch.ones_like(num_examples_B)

    def init(self, layout: Layout, *, device: torch.device) -> WeightedSum:
        """Return an empty sum."""
        return WeightedSum(
            torch.zeros(layout.size, dtype=layout.dtype, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def accumulate(self, state: WeightedSum, block: Block) -> WeightedSum:
        """Add the weighted rows of ``block``.

        Their sum is rounded before it is added, so that folding a block in and merging its own
        sum are the same to the last bit.
        """
        deltas_BP = block.deltas_BP
        if isinstance(deltas_BP, Tensor):
            state.total_P.add_(torch.mv(deltas_BP.t(), block.weights_B))
        else:
            _add_rows(state.total_P, deltas_BP, block.weights_B.tolist())
        return WeightedSum(state.total_P, state.weight.add_(block.weights_B.sum()))

    def merge(self, left: WeightedSum, right: WeightedSum) -> WeightedSum:
        """Return the sum of both."""
        return WeightedSum(left.total_P.add_(right.total_P), left.weight.add_(right.weight))

    def finalize(self, state: WeightedSum) -> Tensor:
        """Return the sum divided by the sum of weights, in the sum's place."""
        weight = float(state.weight)
        if weight <= 0.0:
            raise ValueError("no client was folded in, so there is no mean")
        return state.total_P.div_(weight)


def _add_rows(total_P: Tensor, rows_BP: Sequence[Tensor], weights_B: Sequence[float]) -> None:
    """Add rows that lie apart; the total is read and written once for all of them.

    Each element is summed in the same order on any number of cores.
    """

    def add(part: slice) -> None:
        memory = total_P.new_empty(min(_COLUMNS, part.stop - part.start))
        split = [row_P[part].split(_COLUMNS) for row_P in rows_BP]
        for total, *deltas in zip(total_P[part].split(_COLUMNS), *split, strict=True):
            product = torch.mul(deltas[0], weights_B[0], out=memory[: total.numel()])
            for delta, weight in zip(deltas[1:], weights_B[1:], strict=True):
                product.add_(delta, alpha=weight)
            total.add_(product)

    on_all_cores(total_P.numel(), add)
