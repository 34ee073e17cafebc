"""Federated statistics: number of examples, examples of each label, mean and variance.

============================== =================
symbol                         name
============================== =================
n                              ``count``
n_k, examples of label k       ``label_counts``
c, a point near the mean       ``center``
d = Σ (x - c)                  ``deviations``
s = Σ (x - c)²                 ``squares``
x̄ = c + d / n                  ``mean``
σ² = s / n - (d / n)²          ``variance``
============================== =================
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.query import Query, SumSpec
from fedlearn.algorithms.strategy import State
from fedlearn.core.features import Features, require_single_input
from fedlearn.core.ranges import Count, Positive, Ranged


@dataclass(frozen=True, kw_only=True)
class Moments(Ranged, Query):
    """Asks for the number of examples, mean and variance of the features, and label counts.

    The values are those of the clients of the last round, so let a round take all clients. One
    round is enough. A second one subtracts the first one's mean, which keeps the digits of a
    variance that is far smaller than the squared mean.

    Secure aggregation and privacy need ``max_examples`` and ``max_norm``, which bound what one
    client adds. With privacy, the result has noise in proportion to them.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import fedlearn as fl
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0], [6.0]]), torch.tensor([0, 1, 0, 0])
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(num_clients=2), test=(x, y), seed=0)
        >>> query = fl.Moments(num_features=1, num_labels=2)
        >>> with TemporaryDirectory() as folder:
        ...     run = fl.simulate(
        ...         None, data, query, num_rounds=1, cohort={"num_wanted": 2},
        ...         store={"runs_dir": folder},
        ...     )
        ...     found = run.state()
        run ...
        >>> found["mean"].tolist(), found["variance"].tolist(), found["label_counts"].tolist()
        ([3.0], [3.5], [3.0, 1.0])

    References:
        Chan, Golub and LeVeque, 1983, `Algorithms for Computing the Sample Variance
        <https://doi.org/10.1080/00031305.1983.10483115>`_.
    """

    num_features: Annotated[Count, doc("Numbers in an example's features, >= 1.")]
    num_labels: Annotated[
        Count | None,
        doc("Labels are 0 to this number minus 1, >= 1; not set: labels are not counted."),
    ] = None
    max_examples: Annotated[
        Positive | None, doc("Most examples of a client, for secure sums and privacy, > 0.")
    ] = None
    max_norm: Annotated[
        Positive | None,
        doc("Largest L2 norm of an example's features, for secure sums and privacy, > 0."),
    ] = None

    @property
    def sums(self) -> Mapping[str, SumSpec]:
        """The counts, and the two sums over features."""
        n, r, shape = self.max_examples, self.max_norm, (self.num_features,)
        bounds = (None, None) if n is None or r is None else (n * r, n * r * r)
        found = {
            "count": SumSpec(bound=n),
            "deviations": SumSpec(shape=shape, bound=bounds[0]),
            "squares": SumSpec(shape=shape, bound=bounds[1]),
        }
        if self.num_labels is not None:
            found["label_counts"] = SumSpec(shape=(self.num_labels,), bound=n)
        return found

    def init(self) -> State:
        """Return zeros as the first mean."""
        return {"mean": torch.zeros(self.num_features, dtype=torch.float64)}

    def broadcast(self, state: State) -> Lanes:
        """Broadcast the mean of the round before."""
        return {"center": state["mean"]}

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        """Compute the client's sums."""
        x = require_single_input(features).double().flatten(1) - broadcast["center"]
        found = {
            "count": torch.tensor(len(x)),
            "deviations": x.sum(dim=0),
            "squares": x.square().sum(dim=0),
        }
        if self.num_labels is not None:
            found["label_counts"] = torch.bincount(labels.flatten(), minlength=self.num_labels)
        return found

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        """Compute the statistics; noise cannot make a count smaller than 1 or a variance < 0."""
        n = sums["count"].clamp(min=1.0)
        shift = sums["deviations"] / n
        found = {
            "count": n,
            "mean": state["mean"] + shift,
            "variance": (sums["squares"] / n - shift.square()).clamp(min=0.0),
        }
        if self.num_labels is not None:
            found["label_counts"] = sums["label_counts"]
        return found, {"count": float(n)}
