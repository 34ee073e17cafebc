r"""The number of distinct values over all clients, by linear counting.

Values are hashed into buckets, and each client says which buckets it has values in. A sum over
clients tells the empty buckets of all of them:

=========================================== ==========================
symbol                                      here
=========================================== ==========================
m                                           ``num_buckets``
V                                           share of empty buckets
:math:`\hat{n} = -m \ln V`                  ``distinct``
:math:`\sqrt{m (e^t - t - 1)}, t = n / m`   its standard error
=========================================== ==========================

References:
    Whang, Vander-Zanden and Taylor, 1990, `A Linear-Time Probabilistic Counting Algorithm for
    Database Applications <https://doi.org/10.1145/78922.78925>`_.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Le, doc
from torch import Tensor

from fedlearn.algorithms.strategy import State
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count
from fedlearn.statistics.schema import ClientTable, Schema
from fedlearn.statistics.statistic import Z_95, ResultRow, Statistic

_MAX_BUCKETS = 1 << 20
#: All clients hash alike.
_SEED = Seed(0)


@dataclass(frozen=True, kw_only=True)
class DistinctValues(Statistic):
    """Estimated number of distinct values of each column, over all clients."""

    kind: ClassVar[str] = "distinct"
    needs_no_noise = "noise would fill the empty buckets that it counts"

    num_buckets: Annotated[
        Count,
        Le(_MAX_BUCKETS),
        doc(
            "Buckets of values, 1 to 1,048,576. With as many as there are values, the standard "
            "error is 85 % of the root of their number."
        ),
    ] = 4096

    def size(self, schema: Schema) -> int:
        """One number for each bucket of each column."""
        return self.num_buckets * len(self.columns)

    def row_norm(self, schema: Schema) -> float:
        """A row is in one bucket of each column."""
        return math.sqrt(len(self.columns))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Mark the buckets that have values."""
        marks = torch.zeros(len(self.columns), self.num_buckets, dtype=torch.float64)
        for of_column, name in zip(marks, self.columns, strict=True):
            values = table.columns[name]
            present = values[~schema[name].is_missing(values)]
            buckets = _hash(present) % np.uint64(self.num_buckets)
            of_column[torch.from_numpy(buckets.astype(np.int64))] = 1.0
        return marks.reshape(-1)

    def step(self, sums: Tensor, state: State, *, schema: Schema, round_num: int) -> State:
        """Count the buckets with values; which ones they are would reveal values."""
        return {"sums": self._count(sums[None])[0]}

    def show_clients(self, sums: Tensor, state: State, *, schema: Schema) -> Tensor:
        """Count the buckets of each client."""
        return self._count(sums)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield ``distinct`` of each column, with the 95 % interval of the estimate."""
        for name, num_marked in zip(self.columns, state["sums"].tolist(), strict=True):
            yield self._row(name, num_marked)

    def _row(self, column: str, num_marked: float) -> ResultRow:
        empty = ResultRow(statistic=self.kind, column=column, item="distinct", value=None)
        if num_marked == self.num_buckets:
            return replace(empty, note="all buckets have values; raise num_buckets")
        estimate = -self.num_buckets * math.log1p(-num_marked / self.num_buckets)
        load = estimate / self.num_buckets
        spread = Z_95 * math.sqrt(self.num_buckets * (math.expm1(load) - load))
        return replace(
            empty,
            value=float(round(estimate)),
            low=max(num_marked, estimate - spread),
            high=estimate + spread,
        )

    def _count(self, sums: Tensor) -> Tensor:
        marked = sums.reshape(-1, len(self.columns), self.num_buckets) > 0.5  # noqa: PLR2004 - secure sums round
        return marked.sum(dim=2).double()


def _hash(values: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Hash each value: numbers or categories [n], or texts, bytes [n, width]."""
    if values.is_floating_point():
        bits = (values.double() + 0.0).numpy().view(np.int64)  # -0.0 equals 0.0
        return _SEED.hash(bits)
    parts = values.reshape(len(values), -1).numpy().astype(np.int64)
    return _SEED.hash(*parts.T)
