"""Aggregation rules: those that only need a sum over clients, and those that need every update.

A summing rule is a monoid, ``init / accumulate / merge / finalize``. Its memory is constant, and
blocks, worker processes and secure aggregation can do its sums. A rule that needs every update at
once is a single function. Its memory grows with the cohort, and secure aggregation refuses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedlearn.algorithms.lanes import Aggregate, Lanes, LaneSpec, Rows, Updates
from fedlearn.core.cores import run_on_all_cores
from fedlearn.core.features import Inputs
from fedlearn.core.params import Layout
from fedlearn.errors import ConfigError, RoundError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

#: Clean examples of the coordinator as features and labels, or how many to draw from the run's
#: training examples.
RootData: TypeAlias = tuple[Inputs[ArrayLike], ArrayLike] | int

#: Parameters aggregated at a time, few enough that the product stays in the CPU's cache.
_COLUMNS = 1 << 16


class Summable(Protocol):
    """An aggregation state of sums, which :func:`merge` or an all-reduce can merge."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors to add up; they are added to in place."""


StateT = TypeVar("StateT", bound=Summable)


class SumAggregation(Protocol[StateT]):
    """An aggregation rule that adds up blocks of updates in constant memory."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the aggregation weights of clients with these example counts."""

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> StateT:
        """Return the empty state, the identity of :func:`merge`."""

    def accumulate(self, state: StateT, updates: Updates) -> StateT:
        """Add ``updates`` to ``state``. May write to ``state``: use the returned one only."""

    def finalize(self, state: StateT) -> Aggregate:
        """Compute the aggregate. May write to ``state``: do not use it afterwards.

        Raises:
            ValueError: No update was added.
        """


@runtime_checkable
class FullAggregation(Protocol):
    """An aggregation rule that combines all updates of a round at once, such as a median."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the aggregation weights of clients with these example counts."""

    def combine(self, updates: Updates) -> Lanes | Aggregate:
        """Aggregate every lane; return an :class:`Aggregate` if there are metrics to record.

        Args:
            updates: Updates of all clients that count, at least one, in order of arrival. Do not
                write to the rows; :func:`iter_spans` iterates over them in bounded memory.
        """


class RobustAggregation(ABC):
    """Base of the rules against clients that attack; a rule overrides what it needs.

    It is a :class:`FullAggregation`. By default all clients count the same, one update is enough,
    and rounds are independent.
    """

    @abstractmethod
    def combine(self, updates: Updates) -> Lanes | Aggregate:
        """Aggregate every lane; see :meth:`FullAggregation.combine`."""

    @property
    def min_updates(self) -> int:
        """Fewest updates that the rule can combine."""
        return 1

    @property
    def needs_last(self) -> bool:
        """Whether the rule depends on the aggregate of the round before; see :meth:`after`."""
        return False

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(num_examples_B)

    def after(self, last: Lanes) -> "RobustAggregation":
        """Return the rule for the round after the one that gave ``last``; at first it is zero."""
        return self

    @property
    def root_data(self) -> RootData | None:
        """Examples that the coordinator trains on in each round for the rule; ``None``: none."""
        return None

    def with_server_delta(self, delta: Tensor) -> "RobustAggregation":
        """Return the rule that knows the coordinator's own update of the round: shape [P]."""
        return self


Aggregation: TypeAlias = SumAggregation[StateT] | FullAggregation


def combines_all(aggregation: object) -> "TypeIs[FullAggregation]":
    """Return whether a rule combines all updates of a round at once, instead of adding them up."""
    kind: type = type(aggregation)
    return _is_full(kind)


@cache  # comparing a class with a protocol takes long, and each round asks
def _is_full(kind: type) -> bool:
    return issubclass(kind, FullAggregation)


def min_updates(aggregation: object) -> int:
    """Return the fewest updates that a rule can combine; 0 if any number will do."""
    # Not 1: under privacy a round needs no minimum, since that would reveal who took part.
    return aggregation.min_updates if isinstance(aggregation, RobustAggregation) else 0


def needs_last(aggregation: object) -> TypeGuard[RobustAggregation]:
    """Return whether a rule depends on the aggregate of the round before."""
    return isinstance(aggregation, RobustAggregation) and aggregation.needs_last


def find_root_data(aggregation: object) -> RootData | None:
    """Return the examples that the coordinator trains on for a rule; ``None``: it needs none."""
    return aggregation.root_data if isinstance(aggregation, RobustAggregation) else None


def combine(aggregation: FullAggregation, updates: Updates) -> Aggregate:
    """Combine all updates of a round.

    Raises:
        RoundError: There are fewer updates than the rule needs.
    """
    count, needed = len(updates.client_ids), min_updates(aggregation)
    if count < needed:
        raise RoundError(
            f"{aggregation} needs {needed} updates, but the round has {count}; raise "
            f"stragglers.min_reports to {needed}, or defend against fewer clients"
        )
    combined = aggregation.combine(updates)
    if isinstance(combined, Aggregate):
        return combined
    return Aggregate(lanes=combined, num_clients=count)


def weights(aggregation: Aggregation[StateT], num_examples_B: Tensor) -> Tensor:
    """Compute and check clients' aggregation weights; raises ValueError unless all are > 0."""
    weights_B = aggregation.weigh(num_examples_B).to(num_examples_B)
    # Written so that NaN fails, too.
    are_positive = weights_B.numel() == 0 or float(weights_B.min()) > 0.0
    if weights_B.shape != num_examples_B.shape or not are_positive:
        raise ValueError(
            f"{type(aggregation).__name__}.weigh returned {weights_B.tolist()} for clients of "
            f"{num_examples_B.tolist()} examples; return one number above 0 per client"
        )
    return weights_B


def merge(left: StateT, right: StateT) -> StateT:
    """Merge the states of two sets of clients into ``left``, in place, and return it."""
    for mine, theirs in zip(left.tensors(), right.tensors(), strict=True):
        mine.add_(theirs)
    return left


@dataclass(frozen=True, eq=False)
class LaneSums:
    """The state of a weighted mean: sums over clients, and the numbers that divide them.

    Attributes:
        sums: By lane, the sum of values or of weight times values: shape [n] each.
        weighted: Names of the lanes that are multiplied by a client's weight.
        weight: Sum of weights: shape [], float64.
        num_clients: Number of clients: shape [], float64.
    """

    sums: Mapping[str, Tensor]
    weighted: frozenset[str]
    weight: Tensor
    num_clients: Tensor

    @classmethod
    def empty(
        cls,
        lanes: Sequence[LaneSpec],
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "LaneSums":
        """Return the state before any client is added: zeros."""
        return cls(
            sums={
                lane.name: torch.zeros(lane.size(layout), dtype=dtype, device=device)
                for lane in lanes
            },
            weighted=frozenset(lane.name for lane in lanes if lane.weighted),
            weight=torch.zeros((), dtype=torch.float64, device=device),
            num_clients=torch.zeros((), dtype=torch.float64, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that an all-reduce adds up."""
        return (*self.sums.values(), self.weight, self.num_clients)

    def count_clients(self, weights_B: Tensor) -> "LaneSums":
        """Count the clients whose values were just added, in place."""
        # Scalars are float64: float32 stops counting at 2**24 examples.
        self.weight.add_(weights_B.sum())
        self.num_clients.add_(weights_B.numel())
        return self

    def means(self) -> Aggregate:
        """Divide the sums in place and return the means; raises ValueError without any client."""
        weight, num_clients = float(self.weight), round(float(self.num_clients))
        if weight <= 0.0:
            raise ValueError("no client was added, so there is no mean")
        for name, total in self.sums.items():
            total.div_(weight if name in self.weighted else num_clients)
        return Aggregate(lanes=self.sums, num_clients=num_clients)


@dataclass(frozen=True)
class WeightedMean:
    """Mean of each lane, optionally weighted by the number of examples. Memory: one update.

    Attributes:
        by_examples: Weight a client by its number of examples; otherwise all count the same.

    Example:
        >>> from torch import nn
        >>> from fedlearn.algorithms.lanes import DELTA
        >>> mean, layout = WeightedMean(by_examples=True), Layout.of(nn.Linear(1, 1))
        >>> rows = {"delta": torch.tensor([[1.0, 1.0], [4.0, 4.0]])}
        >>> state = mean.init([DELTA], layout, device=torch.device("cpu"))
        >>> updates = Updates([0, 1], torch.tensor([2.0, 1.0]), rows, based_on=[0, 0])
        >>> state = mean.accumulate(state, updates)
        >>> mean.finalize(state).lanes["delta"]
        tensor([2., 2.])

    References:
        McMahan et al., 2017, `Communication-Efficient Learning of Deep Networks from
        Decentralized Data <https://arxiv.org/abs/1602.05629>`_, algorithm 1.
    """

    by_examples: bool

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the example counts, or ones."""
        return num_examples_B if self.by_examples else torch.ones_like(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        """Return an empty sum."""
        return LaneSums.empty(lanes, layout, dtype=layout.dtype, device=device)

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        """Add the weighted rows of ``updates``."""
        # The sum of a block is rounded before it is added to the total. So adding a block here and
        # merging the block's own sum, as worker processes do, agree to the last bit.
        weights_B = updates.weights_B
        for name, total in state.sums.items():
            is_weighted = name in state.weighted
            factors_B = weights_B if is_weighted else torch.ones_like(weights_B)
            add_weighted(total, updates.lanes[name], factors_B)
        return state.count_clients(weights_B)

    def finalize(self, state: LaneSums) -> Aggregate:
        """Return each sum divided by the sum of weights, or by the number of clients."""
        return state.means()


def require_weighted_mean(aggregation: object) -> WeightedMean:
    """Return the aggregation if secure aggregation can compute it, else raise ConfigError.

    Clients weigh their own updates and the masked sum adds them up, so no method of the rule runs.
    Clients accept no other weights from a coordinator: a rule that gives weight 1 for 17 examples
    and almost 0 for any other number would single out one client's update.

    Raises:
        ConfigError: It is not :class:`WeightedMean` itself.

    Example:
        >>> require_weighted_mean(WeightedMean(by_examples=True))
        WeightedMean(by_examples=True)
    """
    name = type(aggregation).__name__
    # Not isinstance: methods of a subclass would not be called.
    if type(aggregation) is WeightedMean:
        return aggregation
    if combines_all(aggregation):
        problem = f"{name} must see each update, but the coordinator learns only their sum"
    else:
        problem = (
            f"{name} is not WeightedMean itself: secure aggregation weights clients by examples "
            "or equally and sums masked updates, so its own methods would not be called"
        )
    raise ConfigError(
        f"{problem}; leave aggregation.rule out (in Python, aggregate by fl.WeightedMean): clients "
        "clip their updates to secure_aggregation.clip_norm; or switch secure aggregation off"
    )


def iter_spans(rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over B rows of n numbers in bounded memory: yield column slices and values [B, span].

    Example:
        >>> [(part.start, values.tolist()) for part, values in iter_spans([torch.ones(2)])]
        [(0, [[1.0, 1.0]])]
    """
    size = rows[0].numel()
    for begin in range(0, size, _COLUMNS):
        part = slice(begin, min(begin + _COLUMNS, size))
        yield part, torch.stack([row[part] for row in rows])


def add_weighted(total_P: Tensor, rows_BP: Rows, weights_B: Tensor) -> None:
    """Add weighted rows to a total; the order of addition is the same on any number of cores."""
    if isinstance(rows_BP, Tensor):
        total_P.add_(torch.mv(rows_BP.t(), weights_B))
        return
    first, *others = weights_B.tolist()

    def add(part: slice) -> None:  # reads and writes the total once, not once per row
        memory = total_P.new_empty(min(_COLUMNS, part.stop - part.start))
        split = [row_P[part].split(_COLUMNS) for row_P in rows_BP]
        for total, *deltas in zip(total_P[part].split(_COLUMNS), *split, strict=True):
            # Sum the rows first and add them to the total once: see `accumulate`.
            product = torch.mul(deltas[0], first, out=memory[: total.numel()])
            for delta, weight in zip(deltas[1:], others, strict=True):
                product.add_(delta, alpha=weight)
            total.add_(product)

    run_on_all_cores(total_P.numel(), add)
