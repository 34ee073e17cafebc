"""Bucketing: average the updates in random groups before a robust rule combines them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import (
    FullAggregation,
    RobustAggregation,
    RootData,
    find_root_data,
    min_updates,
    needs_last,
)
from fedlearn.algorithms.distances import combine_rows
from fedlearn.algorithms.lanes import Aggregate, Lanes, Updates
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Ranged


@dataclass(frozen=True, kw_only=True)
class Bucketing(Ranged, RobustAggregation):
    """Averages the updates of random buckets, which differ less, and combines the averages.

    Robust rules take clients with unusual data for attackers. Averages of a few clients are more
    alike. But an attacker spoils its whole bucket, so the inner rule must withstand as many
    buckets as there are attackers. Buckets are drawn again in each round, from a public seed.

    Attributes:
        inner: The rule that combines the buckets. What it counts, such as ``num_left_out``, is
            buckets.
        seed: Seed of the buckets.

    Example:
        >>> import fedlearn as fl
        >>> fl.Bucketing(inner=fl.Krum(num_malicious=2), bucket_size=2).min_updates
        13

    References:
        Karimireddy, He and Jaggi, 2022, `Byzantine-Robust Learning on Heterogeneous Datasets via
        Bucketing <https://arxiv.org/abs/2006.09365>`_, algorithm 1.
    """

    inner: FullAggregation
    bucket_size: Annotated[Count, doc("Updates in a bucket, >= 1; 1 is the rule alone.")]
    seed: int = 0

    @property
    def min_updates(self) -> int:
        """The number of updates that makes enough buckets."""
        return self.bucket_size * (min_updates(self.inner) - 1) + 1

    @property
    def needs_last(self) -> bool:
        """Whether the inner rule does."""
        return needs_last(self.inner)

    def after(self, last: Lanes) -> "Bucketing":
        """Return buckets around the inner rule of the round."""
        return replace(self, inner=self.inner.after(last)) if needs_last(self.inner) else self

    @property
    def root_data(self) -> RootData | None:
        """The inner rule's."""
        return find_root_data(self.inner)

    def with_server_delta(self, delta: Tensor) -> "Bucketing":
        """Return buckets around the inner rule that knows the coordinator's update."""
        assert isinstance(self.inner, RobustAggregation)  # no other rule has root data
        return replace(self, inner=self.inner.with_server_delta(delta))

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the inner rule's weights."""
        return self.inner.weigh(num_examples_B)

    def combine(self, updates: Updates) -> Lanes | Aggregate:
        """Average the updates of each bucket, by their weights; combine the averages."""
        if self.bucket_size == 1:
            return self.inner.combine(updates)
        ids_B = np.asarray(updates.client_ids, np.int64)
        # By id, not by place: the order of arrival depends on where the run takes place.
        hashes_B = Seed(self.seed).derive("buckets", max(updates.based_on)).hash(ids_B)
        order, size = np.argsort(hashes_B), self.bucket_size
        buckets = [order[start : start + size] for start in range(0, len(order), size)]
        return self.inner.combine(_average(updates, buckets))


def _average(updates: Updates, buckets: Sequence[NDArray[np.int64]]) -> Updates:
    """Return one update for each bucket of rows: their weighted mean, and the sum of weights."""
    means, weights = list[Lanes](), list[Tensor]()
    for bucket in buckets:
        places = bucket.tolist()
        some = {name: [rows[row] for row in places] for name, rows in updates.lanes.items()}
        own = updates.weights_B[places]
        weights.append(own.sum())
        shares = (own / own.sum()).tolist()
        means.append(combine_rows(replace(updates, lanes=some), shares))
    return Updates(
        client_ids=[updates.client_ids[bucket[0]] for bucket in buckets],
        weights_B=torch.stack(weights),
        lanes={name: [mean[name] for mean in means] for name in updates.lanes},
        based_on=[updates.based_on[bucket[0]] for bucket in buckets],
        num_trained=updates.num_trained,
    )
