r"""IFCA: several models, of which each client trains the one that fits its examples best.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`k`                  ``num_clusters``
:math:`\theta_0`           the global model
:math:`\theta_j`           ``cluster_j`` in the state and the broadcast
:math:`\hat j`             the memory ``cluster``, and its lane ``chosen`` as one of k ones
:math:`\tilde\theta_i`     the client's local model
========================== ==========================================

A client chooses :math:`\hat j = \arg\min_j F_i(\theta_j)` and trains :math:`\theta_{\hat j}`. The
server moves each model by the weighted mean of the updates of those who chose it:

.. math::

    \theta_j \leftarrow \theta_j + \sum_{i : \hat j_i = j} p_i (\tilde\theta_i - \theta_j)
    \Big/ \sum_{i : \hat j_i = j} p_i .

Both sums are means of lanes, to which a client adds zeros for the models that it did not choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.cluster_models import CLUSTER, OneOfSeveral, name_models, use_own
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, LaneSpec, Over
from fedlearn.algorithms.local import (
    MODEL,
    Memory,
    Moment,
    Tensors,
    require_update,
    unsqueeze_like,
)
from fedlearn.algorithms.recipes import ByExamples, FedAvg, Local
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Positive, Ranged

_CHOSEN = "chosen"

NumClusters: TypeAlias = Annotated[Count, doc("Number of models, >= 1; 1 is FedAvg.")]
InitialSpread: TypeAlias = Annotated[
    Positive,
    doc("Standard deviation of the noise that makes the initial models differ, > 0."),
]
InitialSeed: TypeAlias = Annotated[int, doc("Seed of that noise.")]
UpdateBound: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Largest L2 norm of a client's update of a model but the first, and of a model's step, "
        "> 0. Secure aggregation and privacy need it; not set: no limit."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ChosenCluster(Ranged, OneOfSeveral):
    """Trains the model with the lowest loss, which costs an epoch of gradients for each model.

    Attributes:
        inner: Any local update.
        num_clusters: See :func:`IFCA`, as for the other.
    """

    asks_gradients: ClassVar[bool] = True

    num_clusters: NumClusters
    update_bound: UpdateBound

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner update's, the update of each model but the first, and the choice."""
        updates = [
            LaneSpec(
                name=name,
                over=Over.TRAINABLE,
                weighted=True,
                bound=self.update_bound,
                bound_remedy="set algorithm.update_bound",
            )
            for name in name_models(self.num_clusters)
        ]
        chosen = LaneSpec(name=_CHOSEN, over=self.num_clusters, weighted=True, bound=1.0)
        return (*self.inner.lanes, *updates, chosen)

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Choose a model and begin there."""
        models = [broadcast[name] for name in (MODEL, *name_models(self.num_clusters))]
        losses_jK = [
            moment.gradient_at(
                [each.expand_as(value) for each, value in zip(model, x, strict=True)]
            ).losses_K
            for model in models
        ]
        choice_K = torch.stack(losses_jK).argmin(dim=0)
        self.begin_at(models, choice_K, x, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Send the update in the lane of the chosen model, and zeros in the others."""
        own = use_own(broadcast, memory)
        lanes = dict(self.inner.report(x, memory, broadcast=own, moment=moment))
        choice_K = memory[CLUSTER][0][:, 0].round().long()
        for number, name in enumerate(name_models(self.num_clusters), start=1):
            is_chosen_K = choice_K == number
            lanes[name] = [
                torch.where(unsqueeze_like(is_chosen_K, value), value - start, 0.0)
                for value, start in zip(x, own[MODEL], strict=True)
            ]
        for value, first in zip(x, broadcast[MODEL], strict=True):
            # The delta is that of the first model; statistics, which all models share, go with it.
            value.copy_(torch.where(unsqueeze_like(choice_K == 0, value), value, first))
        return {**lanes, _CHOSEN: [F.one_hot(choice_K, self.num_clusters).to(x[0])]}


@dataclass(frozen=True, kw_only=True)
class ClusterAveraging(Ranged, Strategy):
    """Averages the updates of each model; :func:`IFCA` makes it.

    The global model is the first one. Statistics such as BatchNorm's are the same for all models,
    and move by their mean over all clients. The round's record has the share of each model, as
    ``cluster_0_share``.

    Attributes:
        local: Local training that chooses a model.
        weight_by_examples: See :func:`IFCA`, as for the others.
    """

    local: ChosenCluster
    weight_by_examples: bool
    initial_spread: InitialSpread
    initial_seed: int

    @property
    def aggregation(self) -> WeightedMean:
        """The mean, of which :meth:`step` takes ratios."""
        return WeightedMean(by_examples=self.weight_by_examples)

    def init(self, params: Params) -> State:
        """Return all models but the first: the initial one with noise."""
        first_Q = params.vector[: params.layout.num_trainable]
        state, seed = {}, Seed(self.initial_seed)
        for name in name_models(self.local.num_clusters):
            noise_Q = torch.randn(len(first_Q), generator=seed.derive(name).torch())
            state[name] = first_Q + self.initial_spread * noise_Q.to(first_Q)
        return state

    def broadcast(self, state: State) -> Lanes:
        """Return all models but the first."""
        return {name: state[name] for name in name_models(self.local.num_clusters)}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Move each model by the mean update of those who chose it."""
        lanes, last = aggregate.lanes, params.layout.num_trainable
        delta_P, shares_k = lanes[DELTA.name], lanes[_CHOSEN]
        shares = [float(share) for share in shares_k]
        first_Q = self._average(delta_P[:last], shares[0])
        moved = params.vector + torch.cat([first_Q, delta_P[last:]])
        names = name_models(self.local.num_clusters)
        others = {
            name: state[name] + self._average(lanes[name], share)
            for name, share in zip(names, shares[1:], strict=True)
        }
        metrics = {f"{CLUSTER}_{number}_share": share for number, share in enumerate(shares)}
        return StepResult(params.with_vector(moved), others, metrics)

    def _average(self, sum_Q: Tensor, share: float) -> Tensor:
        """Divide a sum of updates by their share; nobody chose a model without a share."""
        if share <= 0.0:
            return torch.zeros_like(sum_Q)
        mean_Q, bound = sum_Q / share, self.local.update_bound
        if bound is None:
            return mean_Q
        # A mean of bounded updates is bounded. With noise for privacy, a small share is not exact,
        # so that the ratio could be of any size.
        return mean_Q * min(1.0, bound / max(float(mean_Q.norm()), bound))


@explain_calls
def IFCA(
    local: Local,
    *,
    num_clusters: NumClusters,
    initial_spread: InitialSpread = 0.1,
    initial_seed: InitialSeed = 0,
    update_bound: UpdateBound = None,
    weight_by_examples: ByExamples = True,
) -> Strategy:
    """IFCA: several models, of which each client trains the one with the lowest loss.

    All models are broadcast, so a client receives and sends ``num_clusters`` times as much.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> [lane.name for lane in fl.IFCA(local, num_clusters=3).lanes]
        ['delta', 'cluster_1', 'cluster_2', 'chosen']

    References:
        Ghosh, Chung, Yin and Ramchandran, 2020, `An Efficient Framework for Clustered Federated
        Learning <https://arxiv.org/abs/2006.04088>`_, algorithm 1 with model averaging. With one
        model it is FedAvg.
    """
    require_update(local, name="local")
    if num_clusters == 1:
        return FedAvg(local, weight_by_examples=weight_by_examples)
    return ClusterAveraging(
        local=ChosenCluster(inner=local, num_clusters=num_clusters, update_bound=update_bound),
        weight_by_examples=weight_by_examples,
        initial_spread=initial_spread,
        initial_seed=initial_seed,
    )
