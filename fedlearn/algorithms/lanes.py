"""The format of a client's update: named vectors, called lanes, which the strategy declares.

Every update has the lane :data:`DELTA`, local model minus global model. An algorithm may add
others, such as the control variates of SCAFFOLD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout

#: One row for each of B clients: a tensor [B, n], or B separate tensors [n].
Rows: TypeAlias = Tensor | Sequence[Tensor]


def stack_rows(rows: Rows) -> Tensor:
    """Return rows as one tensor [B, n]; separate rows are copied.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> fl.stack_rows([torch.zeros(3), torch.ones(3)])
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """
    return rows if isinstance(rows, Tensor) else torch.stack(list(rows))


#: One vector for each lane, by name, in the layout's order: shape [n] each.
Lanes: TypeAlias = Mapping[str, Tensor]


class Over(StrEnum):
    """The extent of a lane or of a client's memory: its numbers run along this.

    ``ALL`` is every element of the model, ``TRAINABLE`` every trainable parameter. ``TENSORS`` is
    one number per trainable tensor, such as a count of its gradients.

    Example:
        >>> from torch import nn
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Layout
        >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> def size(over):
        ...     return fl.LaneSpec(name="x", over=over, weighted=False, bound=None).size(layout)
        >>> {over.value: size(over) for over in fl.Over}
        {'all': 14, 'trainable': 10, 'tensors': 4}
    """

    ALL = "all"
    TRAINABLE = "trainable"
    TENSORS = "tensors"


@dataclass(frozen=True, kw_only=True)
class LaneSpec:
    """Declaration of one lane.

    Attributes:
        name: Unique among the lanes of a strategy.
        over: The model's elements that it runs along, or its number of values.
        weighted: Whether a client's values count by its aggregation weight; otherwise all clients
            count the same.
        bound: Largest L2 norm of one client's values, > 0. ``None``: unbounded, so that secure
            aggregation cannot sum it. The bound of :data:`DELTA` is configured with the session.
        example_bound: Largest L2 norm of what one of a client's examples adds to its values, > 0;
            ``None``: they are no sum over examples, so that privacy cannot hide a single one.
        bound_remedy: What gives it a bound, for the error where it has none.

    Raises:
        ValueError: The size or a bound is not positive.

    Example:
        >>> from torch import nn
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Layout
        >>> lane = fl.LaneSpec(name="gradient", over=fl.Over.TRAINABLE, weighted=True, bound=1.0)
        >>> lane.size(Layout.of(nn.Linear(3, 2)))
        8
    """

    name: str
    over: Over | int
    weighted: bool
    bound: float | None
    example_bound: float | None = None
    bound_remedy: str = field(default="give its LaneSpec a bound", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.over, int) and self.over < 1:
            raise ValueError(f"lane {self.name!r} has {self.over} numbers; give at least one")
        for what in ("bound", "example_bound"):
            value = getattr(self, what)
            if value is not None and not value > 0.0:
                raise ValueError(
                    f"lane {self.name!r} has the {what} {value}; give a number above 0"
                )

    def size(self, layout: Layout) -> int:
        """Return the number of values in the lane for models of ``layout``."""
        return size_of(self.over, layout)


def size_of(over: Over | int, layout: Layout) -> int:
    """Return the number of values in an extent for models of ``layout``."""
    match over:
        case Over.ALL:
            return layout.size
        case Over.TRAINABLE:
            return layout.num_trainable
        case Over.TENSORS:
            return len(layout.trainable)
        case int(size):
            return size


def describe_misfit(lanes: Lanes, specs: Sequence[LaneSpec], layout: Layout) -> str | None:
    """Describe how lanes differ from their declaration; ``None`` if they fit."""
    if lanes.keys() != {spec.name for spec in specs}:
        wrong = sorted(lanes.keys() ^ {spec.name for spec in specs})[:3]
        return f"it has missing or extra lanes: {wrong}"
    for spec in specs:
        lane, size = lanes[spec.name], spec.size(layout)
        if lane.shape != (size,):
            return f"lane {spec.name!r} has shape {tuple(lane.shape)}, not ({size},)"
        if lane.dtype != layout.dtype:
            return f"lane {spec.name!r} is {lane.dtype}, but the model is {layout.dtype}"
    return None


#: Local model minus global model: parameters, then statistics. Compared by identity
#: (``lane is DELTA``), so never make a copy.
DELTA = LaneSpec(name="delta", over=Over.ALL, weighted=True, bound=None)


def list_model_lanes(layout: Layout) -> tuple[LaneSpec, ...]:
    """List the lanes along the model: the delta, or none for a query, which has no model."""
    return (DELTA,) if layout.specs else ()


@dataclass(frozen=True, eq=False)
class Updates:
    """The contributions of B clients, validated.

    Attributes:
        client_ids: Ids of the clients, in the order of the rows.
        weights_B: Aggregation weights, > 0: shape [B], the dtype of the rows.
        lanes: By lane, one row for each client.
        based_on: For each update, the round whose model it was trained from. Its staleness is the
            round that takes it minus this one.
        num_trained: Number of trainable elements of each delta, which come first. Running
            statistics follow; no norm includes them. ``None``: all elements train.
        shapes: Shapes of the trained tensors, in the order in which they form the delta; ``None``:
            unknown.
        metrics_B: For an aggregation that sees each update: the ``loss`` of each client's training
            and its ``num_examples``, shape [B] and float64 each. A loss that is not known is NaN.
            If clients add noise they send no loss, and 1 example each. Empty in transforms.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> deltas = {"delta": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}
        >>> updates = fl.Updates([7, 9], weights_B=torch.ones(2), lanes=deltas, based_on=[0, 0])
        >>> updates.lanes["delta"][1]  # the update of client 9
        tensor([4., 5., 6.])
    """

    client_ids: Sequence[ClientId]
    weights_B: Tensor
    lanes: Mapping[str, Rows]
    based_on: Sequence[int]
    num_trained: int | None = None
    shapes: Sequence[tuple[int, ...]] | None = None
    metrics_B: Mapping[str, Tensor] = field(default_factory=dict)

    def sort_by_client(self) -> "Updates":
        """Return the updates in the order of ids: that of arrival depends on where a run is.

        There are no :attr:`metrics_B`.
        """
        order = sorted(range(len(self.client_ids)), key=lambda row: self.client_ids[row])
        return replace(
            self,
            client_ids=[self.client_ids[row] for row in order],
            weights_B=self.weights_B[order],
            lanes={name: [rows[row] for row in order] for name, rows in self.lanes.items()},
            based_on=[self.based_on[row] for row in order],
            metrics_B={},
        )

    def delta_parts(self) -> tuple[Tensor, Tensor]:
        """Split the deltas into trainable parameters [B, Q] and running statistics [B, P - Q]."""
        deltas_BP = stack_rows(self.lanes[DELTA.name])
        num_elements = deltas_BP.shape[1]
        num_trained = num_elements if self.num_trained is None else self.num_trained
        trained, statistics = deltas_BP.split([num_trained, num_elements - num_trained], dim=1)
        return trained, statistics


#: Names in :attr:`Updates.metrics_B`.
METRICS = ("loss", "num_examples")


class TrainMetrics(NamedTuple):
    """The clients' training in a round, for a strategy that needs it.

    Attributes:
        loss: Mean training loss of the reports, weighted by examples. NaN if no client measured
            one. Under secure aggregation it is the mean that the sum reveals.
        num_examples: Number of examples of all reports.

    Example:
        >>> import fedlearn as fl
        >>> fl.TrainMetrics(loss=0.5, num_examples=1200).loss
        0.5
    """

    loss: float
    num_examples: int


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The aggregated updates of a round.

    Attributes:
        lanes: By lane, the aggregated vector: the mean over clients, or another rule's result.
        num_clients: Number of clients in the aggregate, >= 1.
        num_clipped: Number of updates that were scaled down to the bounds of a secure sum, or by
            the clip that is the strategy's last transform. ``None``: nothing is clipped, or the
            count is unknown or would leak information.
        num_capped: Number of clients whose loss or number of examples was above the bounds of a
            secure sum; ``None``: as above.
        train: The clients' training, if the strategy says that it
            ``needs_train_metrics``; else ``None``.
        metrics: Figures to record with the round, by name, such as how many clients a rule left
            out.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> mean = fl.Aggregate(lanes={"delta": torch.tensor([0.5, -0.5])}, num_clients=3)
        >>> mean.lanes["delta"], mean.num_clients
        (tensor([ 0.5000, -0.5000]), 3)
    """

    lanes: Lanes
    num_clients: int
    num_clipped: int | None = None
    num_capped: int | None = None
    train: TrainMetrics | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
