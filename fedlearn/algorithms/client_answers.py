"""The aggregation of a query whose result shows each client's answer next to their sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, Lanes, LaneSpec, Updates, stack_rows
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, NoModel

_IDS, _OF_EACH = "client_ids", "of_each/"


@dataclass(frozen=True)
class ClientAnswers(FullAggregation):
    """Computes the mean of the answers, and keeps the answer of each client.

    Attributes:
        mean: The mean.
        specs: The lanes of an answer.
    """

    mean: WeightedMean
    specs: tuple[LaneSpec, ...]

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the weights of the mean."""
        return self.mean.weigh(num_examples_B)

    def combine(self, updates: Updates) -> Aggregate:
        """Average, and stack the answers in the order of the clients' ids."""
        updates = updates.sort_by_client()
        empty = self.mean.init(self.specs, Layout.of(NoModel()), device=updates.weights_B.device)
        found = self.mean.finalize(self.mean.accumulate(empty, updates))
        of_each = {
            f"{_OF_EACH}{spec.name}": stack_rows(updates.lanes[spec.name]) for spec in self.specs
        }
        ids = torch.tensor(list(updates.client_ids))
        return Aggregate({**found.lanes, _IDS: ids, **of_each}, found.num_clients)


def answers_in(
    aggregate: Aggregate, shapes: Mapping[str, tuple[int, ...]]
) -> dict[ClientId, Lanes]:
    """Return the answer of each client from what :class:`ClientAnswers` has aggregated.

    Args:
        aggregate: The aggregate.
        shapes: Shape of each tensor of an answer, by name.
    """
    return {
        ClientId(client_id): {
            name: aggregate.lanes[f"{_OF_EACH}{name}"][row].view(shape)
            for name, shape in shapes.items()
        }
        for row, client_id in enumerate(aggregate.lanes[_IDS].tolist())
    }
