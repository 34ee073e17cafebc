"""What a client contributes to a round: named lanes, which the strategy declares once.

Every contribution has the lane :data:`DELTA`, local model minus global model; an algorithm may add
others, such as the control variates of SCAFFOLD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor

from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout

#: One row a client: shape [B, n], or B rows of shape [n], each where it lies.
Rows: TypeAlias = Tensor | Sequence[Tensor]


def matrix(rows: Rows) -> Tensor:
    """Return rows as one tensor, copied where they lie apart: shape [B, n]."""
    return rows if isinstance(rows, Tensor) else torch.stack(list(rows))


#: By lane one vector, in the layout's order: shape [n] each.
Lanes: TypeAlias = Mapping[str, Tensor]


class Over(StrEnum):
    """What a lane or a memory has a number for each element of.

    ``TENSORS`` is one number for each tensor that trains, such as a count of its gradients.
    """

    ALL = "all"
    TRAINABLE = "trainable"
    TENSORS = "tensors"


@dataclass(frozen=True, kw_only=True)
class LaneSpec:
    """One lane of a contribution.

    Attributes:
        name: Unique among the lanes of a strategy.
        over: The model's tensors that it runs along, or how many numbers it has.
        weighted: Whether a client counts by its aggregation weight; otherwise all count the same.
        bound: Largest L2 norm of one client's values, > 0; ``None``: there is none, so the lane
            is not for secure aggregation. That of :data:`DELTA` is configured with the session.

    Raises:
        ValueError: The size or the bound is not positive.
    """

    name: str
    over: Over | int
    weighted: bool
    bound: float | None

    def __post_init__(self) -> None:
        if isinstance(self.over, int) and self.over < 1:
            raise ValueError(f"lane {self.name!r} has {self.over} numbers; it has at least one")
        if self.bound is not None and not self.bound > 0.0:
            raise ValueError(f"lane {self.name!r} has the bound {self.bound}; it is above 0")

    def size(self, layout: Layout) -> int:
        """Return how many numbers the lane has for models of ``layout``."""
        return size_of(self.over, layout)


def size_of(over: Over | int, layout: Layout) -> int:
    """Return how many numbers that is for models of ``layout``."""
    match over:
        case Over.ALL:
            return layout.size
        case Over.TRAINABLE:
            return layout.num_trainable
        case Over.TENSORS:
            return len(layout.trainable)
        case int(size):
            return size


def misfit(lanes: Lanes, specs: Sequence[LaneSpec], layout: Layout) -> str | None:
    """Return in what lanes are not those declared, of models of ``layout``; ``None``: they are."""
    if lanes.keys() != {spec.name for spec in specs}:
        wrong = sorted(lanes.keys() ^ {spec.name for spec in specs})[:3]
        return f"it lacks or adds lanes: {wrong}"
    for spec in specs:
        lane, size = lanes[spec.name], spec.size(layout)
        if lane.shape != (size,):
            return f"lane {spec.name!r} has shape {tuple(lane.shape)}, not ({size},)"
        if lane.dtype != layout.dtype:
            return f"lane {spec.name!r} is {lane.dtype}, the model {layout.dtype}"
    return None


#: Local model minus global model: parameters, then statistics.
DELTA = LaneSpec(name="delta", over=Over.ALL, weighted=True, bound=None)


@dataclass(frozen=True, eq=False)
class Updates:
    """The contributions of B clients, validated.

    Attributes:
        client_ids: Whose, in the order of the rows.
        weights_B: Aggregation weights, > 0: shape [B], the dtype of the rows.
        lanes: By lane one row a client.
        based_on: Of each, the round whose model it was trained from: the staleness of an update is
            the round that takes it less this one.
        num_trained: Elements of each delta that train: the first ones. Running statistics follow,
            which no norm counts. ``None``: all elements train.
    """

    client_ids: Sequence[ClientId]
    weights_B: Tensor
    lanes: Mapping[str, Rows]
    based_on: Sequence[int]
    num_trained: int | None = None

    def delta_parts(self) -> tuple[Tensor, Tensor]:
        """Return the deltas of what trains [B, Q], and of running statistics [B, P - Q]."""
        deltas_BP = matrix(self.lanes[DELTA.name])
        num_elements = deltas_BP.shape[1]
        num_trained = num_elements if self.num_trained is None else self.num_trained
        trained, statistics = deltas_BP.split([num_trained, num_elements - num_trained], dim=1)
        return trained, statistics


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What the contributions of a round come to.

    Attributes:
        lanes: By lane the aggregated vector: the mean over clients, or what the rule makes of them.
        num_clients: How many contributed, >= 1.
        num_clipped: How many of them were scaled down to the bounds of a secure sum, or by the
            clip that is the strategy's last transform; ``None``: there is no clip, or the count is
            not known or must not be.
        num_capped: How many of them had a loss or a number of examples above the bounds of a
            secure sum; ``None``: as above.
    """

    lanes: Lanes
    num_clients: int
    num_clipped: int | None = None
    num_capped: int | None = None
