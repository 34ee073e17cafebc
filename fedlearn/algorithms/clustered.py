r"""Clustered federated learning: clusters whose clients' updates contradict each other are split.

============================ ==========================================
symbol                       here
============================ ==========================================
:math:`\Delta\theta_i`       the ``delta`` of client i
:math:`\varepsilon_1`        ``largest_mean``
:math:`\varepsilon_2`        ``least_update``
:math:`\alpha_{ij}`          cosine of the updates of two clients
:math:`c_1, c_2`             the halves of a cluster
============================ ==========================================

Each cluster has a model, and starts as FedAvg of all. It is split once its mean update is small
although a client's own is not,

.. math::

    \Big\| \sum_{i \in c} p_i \Delta\theta_i \Big\| < \varepsilon_1 \quad \text{and} \quad
    \max_{i \in c} \|\Delta\theta_i\| > \varepsilon_2,

into the halves with :math:`\min \max_{i \in c_1, j \in c_2} \alpha_{ij}`. That is single linkage:
the most similar clients are joined until two groups are left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, iter_spans
from fedlearn.algorithms.cluster_models import CLUSTER, OneOfSeveral, name_models, use_own
from fedlearn.algorithms.distances import combine_rows
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, Updates
from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdate,
    Memory,
    Moment,
    Tensors,
    require_update,
)
from fedlearn.algorithms.recipes import ByExamples, Local
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, NotNegative, Positive, Ranged, Whole

_CLIENTS, _PARENTS = "clients", "parents"
#: Lane of the mean of all updates, of which statistics are used; prefixes of the halves' means.
_ALL, _STAYS, _LEAVES = "all", "stays_", "leaves_"
#: A client that was never seen: in the first cluster, as if it had missed all splits.
_NEW = (0, 1)
_TINY = np.finfo(np.float64).tiny

MaxClusters: TypeAlias = Annotated[
    Count, doc("Most clusters, >= 1: all their models are broadcast.")
]
LargestMean: TypeAlias = Annotated[
    Positive, doc("Norm below which the mean update of a cluster is small, > 0.")
]
LeastUpdate: TypeAlias = Annotated[
    NotNegative, doc("Norm above which a client's own update is not small, >= 0.")
]


@dataclass(frozen=True, kw_only=True)
class InCluster(Ranged, OneOfSeveral):
    """Trains the model of the client's cluster, and keeps it as it received it.

    Attributes:
        inner: Any local update.
        cluster: Number of the cluster, from 0.
    """

    cluster: Whole

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin at the model of the cluster."""
        name = f"{CLUSTER}_{self.cluster}" if self.cluster else MODEL
        choice_K = torch.zeros(len(x[0]), dtype=torch.int64, device=x[0].device)
        self.begin_at([broadcast[name]], choice_K, x, memory, broadcast=broadcast, moment=moment)
        memory[CLUSTER][0].fill_(self.cluster)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Send the update of the cluster's model, as if it were the global one's."""
        own = use_own(broadcast, memory)
        lanes = self.inner.report(x, memory, broadcast=own, moment=moment)
        if self.cluster:
            for value, start, first in zip(x, own[MODEL], broadcast[MODEL], strict=True):
                value.sub_(start).add_(first)
        return lanes


@dataclass(frozen=True, kw_only=True)
class ClusterMeans(FullAggregation):
    """Averages the updates of each cluster, after splitting it if its updates contradict.

    It returns a mean for each cluster as ``cluster_j``, the first as ``delta``; for a new cluster
    j the mean updates of both halves as ``stays_j`` and ``leaves_j``; and the parents of all
    clusters. The three rows of ``clients`` are ids, clusters, and how many clusters there were.

    Attributes:
        strategy: The strategy.
        state: Its state in this round.
    """

    strategy: "ClusteredAveraging"
    state: State

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the example counts, or ones."""
        by_examples = self.strategy.weight_by_examples
        return num_examples_B if by_examples else torch.ones_like(num_examples_B)

    def combine(self, updates: Updates) -> Aggregate:
        """Assign the clients that missed a split, split clusters, and average."""
        updates, parents = updates.sort_by_client(), self.state[_PARENTS].tolist()
        known = _read_clients(self.state)
        before = [known.get(each, _NEW) for each in updates.client_ids]
        clusters = [self._follow_splits(updates, row, *each) for row, each in enumerate(before)]
        num_known = [len(parents)] * len(before)
        # A client that moves has trained the model of its former cluster, so it does not count.
        counted = [row for row, each in enumerate(before) if clusters[row] == each[0]]
        products_BB, lanes = _multiply(updates), dict[str, Tensor]()
        for cluster in sorted({clusters[row] for row in counted}):
            rows = [row for row in counted if clusters[row] == cluster]
            number = len(parents)
            halves = self._split(updates, rows, products_BB, has_room=number < self._most)
            for name, half in zip((cluster, number), halves, strict=False):
                lanes[_name(name)] = _average(updates, half)
            if len(halves) > 1:
                parents.append(cluster)
                stays, leaves = (_average(updates, half) for half in halves)
                lanes |= {f"{_STAYS}{number}": stays, f"{_LEAVES}{number}": leaves}
                for row in rows:
                    num_known[row] = number + 1
                    clusters[row] = number if row in halves[1] else cluster
        lanes[_CLIENTS] = torch.tensor([list(updates.client_ids), clusters, num_known])
        lanes[_PARENTS] = torch.tensor(parents)
        if counted:
            lanes[_ALL] = _average(updates, counted)
        return Aggregate(lanes, max(1, len(counted)), metrics={"num_clusters": len(parents)})

    @property
    def _most(self) -> int:
        return self.strategy.max_clusters

    def _follow_splits(self, updates: Updates, row: int, cluster: int, num_known: int) -> int:
        """Return the cluster of a client after the splits that it has missed."""
        update = updates.lanes[DELTA.name][row][: updates.num_trained].double()
        parents = self.state[_PARENTS].tolist()
        for number in range(num_known, len(parents)):
            if parents[number] == cluster:
                stays, leaves = (
                    self.state[f"{prefix}{number}"].double() for prefix in (_STAYS, _LEAVES)
                )
                if update @ leaves / leaves.norm() > update @ stays / stays.norm():
                    cluster = number
        return cluster

    def _split(
        self,
        updates: Updates,
        rows: Sequence[int],
        products_BB: NDArray[np.float64],
        *,
        has_room: bool,
    ) -> list[Sequence[int]]:
        """Return the halves of a cluster, the larger one first, or the cluster as it is."""
        products = products_BB[np.ix_(rows, rows)]
        weights = updates.weights_B[list(rows)].double().cpu().numpy()
        weights = weights / weights.sum()
        norms = np.sqrt(products.diagonal())
        mean_norm = np.sqrt(max(0.0, weights @ products @ weights))
        is_mean_small = mean_norm < self.strategy.largest_mean
        if not (has_room and len(rows) > 1 and is_mean_small):
            return [rows]
        if norms.max() <= self.strategy.least_update:
            return [rows]
        in_second = bipartition(products / np.maximum(np.outer(norms, norms), _TINY))
        halves = [
            [row for row, is_in in zip(rows, in_second, strict=True) if is_in == half]
            for half in (False, True)
        ]
        return sorted(halves, key=len, reverse=True)


def bipartition(similarities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Split into two groups with the smallest largest similarity between them.

    Returns:
        Whether each is in the second group; the first element is in the first one.

    Example:
        >>> bipartition(np.asarray([[1.0, -0.5, 0.9], [-0.5, 1.0, 0.1], [0.9, 0.1, 1.0]]))
        array([False,  True, False])
    """
    groups, num_groups = np.arange(len(similarities)), len(similarities)
    firsts, seconds = np.triu_indices(len(similarities), k=1)
    # Join the most similar ones until two groups are left: single linkage.
    for at in np.argsort(-similarities[firsts, seconds], kind="stable"):
        one, other = groups[firsts[at]], groups[seconds[at]]
        if one != other and num_groups > 2:  # noqa: PLR2004 - two groups
            groups[groups == other] = one
            num_groups -= 1
    is_second: NDArray[np.bool_] = groups != groups[0]
    return is_second


@dataclass(frozen=True, kw_only=True)
class ClusteredAveraging(Ranged, Strategy):
    """Averages the updates of each cluster; :func:`ClusteredFL` makes it.

    The global model is that of the first cluster, where a client begins. A client that was not in
    the round of a split, or that is new, joins the half whose mean update was more similar to its
    own, when it next takes part; in that round its update does not count. Statistics such as
    BatchNorm's are the same for all clusters. The round's record has ``num_clusters``.

    Attributes:
        local: Local training of a client in the first cluster.
        weight_by_examples: See :func:`ClusteredFL`, as for the others.
        state: The state of the round; empty before the first.
    """

    local: InCluster
    weight_by_examples: bool
    max_clusters: MaxClusters
    largest_mean: LargestMean
    least_update: LeastUpdate
    state: State = field(default_factory=dict, compare=False, repr=False)

    @property
    def aggregation(self) -> ClusterMeans:
        """The means of the round's clusters."""
        return ClusterMeans(strategy=self, state=self.state)

    @property
    def has_own_aggregate(self) -> bool:
        """True: there is a mean for each cluster."""
        return True

    def init(self, params: Params) -> State:
        """Return one cluster without any client; the models of others are not used yet."""
        first_Q = params.vector[: params.layout.num_trainable]
        return {
            **{name: first_Q.clone() for name in name_models(self.max_clusters)},
            _CLIENTS: torch.zeros((3, 0), dtype=torch.int64),
            _PARENTS: torch.zeros(1, dtype=torch.int64),
        }

    def at(self, state: State) -> "ClusteredAveraging":
        """Return the strategy that knows the clusters."""
        return replace(self, state=state)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return the local update of each client's cluster."""
        known = _read_clients(self.state) if self.state else {}
        in_cluster = {0: self.local}
        for cluster, _ in known.values():
            in_cluster.setdefault(cluster, replace(self.local, cluster=cluster))
        return [in_cluster[known.get(each, _NEW)[0]] for each in client_ids]

    def broadcast(self, state: State) -> Lanes:
        """Return the models of all clusters but the first."""
        return {name: state[name] for name in name_models(self.max_clusters)}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Move the model of each cluster; a new one begins at its parent's."""
        lanes, last = aggregate.lanes, params.layout.num_trainable
        parents, num_before = lanes[_PARENTS], len(state[_PARENTS])
        models = {_name(0): params.vector[:last]}
        models |= {name: state[name] for name in name_models(num_before)}
        for number in range(num_before, len(parents)):
            models[_name(number)] = models[_name(int(parents[number]))]
        moved = {
            name: model + lanes[name][:last] if name in lanes else model
            for name, model in models.items()
        }
        first_Q, statistics = moved.pop(_name(0)), params.vector[last:]
        if _ALL in lanes:
            statistics = statistics + lanes[_ALL][last:]
        directions = {
            name: lane[:last] for name, lane in lanes.items() if name.startswith((_STAYS, _LEAVES))
        }
        clients = _read_clients(state) | _read_clients(lanes)
        rows = [[each, *clients[each]] for each in sorted(clients)]
        after = {
            **state,
            **moved,
            **directions,
            _CLIENTS: torch.tensor(rows).T.contiguous(),
            _PARENTS: parents,
        }
        return StepResult(params.with_vector(torch.cat([first_Q, statistics])), after)


def _name(cluster: int) -> str:
    """Return the name of a cluster's model in the state, the broadcast and the aggregate."""
    return f"{CLUSTER}_{cluster}" if cluster else DELTA.name


def _read_clients(tensors: Mapping[str, Tensor]) -> dict[ClientId, tuple[int, int]]:
    """Return each client's cluster, and how many clusters there were when it was assigned."""
    return {ClientId(row[0]): (row[1], row[2]) for row in tensors[_CLIENTS].T.tolist()}


def _multiply(updates: Updates) -> NDArray[np.float64]:
    """Compute the inner products of all pairs of deltas, without statistics: [B, B]."""
    rows = updates.lanes[DELTA.name]
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for _, values in iter_spans([row[: updates.num_trained] for row in rows]):
        wide = values.double()
        products.addmm_(wide, wide.t())
    return products.cpu().numpy()


def _average(updates: Updates, rows: Sequence[int]) -> Tensor:
    """Return the weighted mean of some deltas."""
    weights_B = torch.zeros_like(updates.weights_B)
    weights_B[list(rows)] = updates.weights_B[list(rows)]
    return combine_rows(updates, (weights_B / weights_B.sum()).tolist())[DELTA.name]


@explain_calls
def ClusteredFL(
    local: Local,
    *,
    max_clusters: MaxClusters,
    largest_mean: LargestMean,
    least_update: LeastUpdate,
    weight_by_examples: ByExamples = True,
) -> ClusteredAveraging:
    """Clustered FL: splits clusters of clients whose updates contradict each other.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> clustered = fl.ClusteredFL(local, max_clusters=4, largest_mean=0.4, least_update=1.6)
        >>> [lane.name for lane in clustered.lanes]  # of the model of the client's cluster
        ['delta']

    Raises:
        ValueError: The local update sends more than a delta.

    References:
        Sattler, Müller and Samek, 2020, `Clustered Federated Learning: Model-Agnostic Distributed
        Multi-Task Optimization under Privacy Constraints <https://arxiv.org/abs/1910.01991>`_,
        algorithms 1 and 3, without the check of the gap between the halves. With one cluster it
        is FedAvg.
    """
    require_update(local, name="local")
    if local.lanes:
        raise ValueError(
            f"{type(local).__name__} sends {local.lanes[0].name!r} besides the delta, which "
            "clusters would not average; use another local update"
        )
    return ClusteredAveraging(
        local=InCluster(inner=local, cluster=0),
        weight_by_examples=weight_by_examples,
        max_clusters=max_clusters,
        largest_mean=largest_mean,
        least_update=least_update,
    )
