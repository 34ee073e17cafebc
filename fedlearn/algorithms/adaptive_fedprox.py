r"""FedProx whose pull follows the training loss.

================== ===========================================================
symbol             here
================== ===========================================================
:math:`\mu`        ``proximal`` at first, then ``mu`` in the state
:math:`0.1`        ``proximal_step``
:math:`5`          ``patience``
================== ===========================================================
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.local import require_update
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.recipes import ByExamples, Local
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, NotNegative, Ranged

_MU, _LOSS, _FALLS = "mu", "last_loss", "num_falls"

FirstPull: TypeAlias = Annotated[
    NotNegative, doc("Pull towards the global model in the first round, >= 0.")
]
PullStep: TypeAlias = Annotated[NotNegative, doc("Change of the pull, >= 0; 0: it is constant.")]
Patience: TypeAlias = Annotated[
    Count, doc("Rounds in a row in which the loss falls before the pull does, >= 1.")
]


@dataclass(frozen=True, kw_only=True)
class AdaptiveAveraging(Ranged, Strategy):
    r"""FedAvg that changes :math:`\mu` of its clients; :func:`AdaptiveFedProx` makes it.

    Attributes:
        local: Local training with the pull; its strength is that of the round.
        aggregation: The mean of the updates.
        proximal_step: See :func:`AdaptiveFedProx`, as for the others.
    """

    local: Proximal
    aggregation: WeightedMean
    proximal_step: PullStep
    patience: Patience

    @property
    def needs_train_metrics(self) -> str:
        """The pull."""
        return "FedProx's pull"

    def init(self, params: Params) -> State:
        """Return the first pull, and a loss that is lower than none."""
        double = torch.float64
        return {
            _MU: torch.tensor(self.local.proximal, dtype=double),
            _LOSS: torch.tensor(math.nan, dtype=double),
            _FALLS: torch.tensor(0),
        }

    def at(self, state: State) -> Strategy:
        """Return the strategy with the pull of the round."""
        return replace(self, local=replace(self.local, proximal=float(state[_MU])))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take FedAvg's step, and change the pull by the mean training loss."""
        server = ServerSgd(learning_rate=1.0, momentum=0.0)
        moved, _ = server.step(params, aggregate.lanes[DELTA.name], {})
        assert aggregate.train is not None  # as `needs_train_metrics` asks
        loss, last = aggregate.train.loss, float(state[_LOSS])
        mu, num_falls = float(state[_MU]), int(state[_FALLS])
        if math.isnan(loss):  # no client measured it: as if the round had not been
            return StepResult(moved, state, {_MU: mu})
        # Comparisons with NaN, the loss before the first round, are false.
        num_falls = num_falls + 1 if loss < last else 0
        if loss > last:
            mu += self.proximal_step
        elif num_falls == self.patience:
            mu, num_falls = max(0.0, mu - self.proximal_step), 0
        new = {
            _MU: torch.full_like(state[_MU], mu),
            _LOSS: torch.full_like(state[_LOSS], loss),
            _FALLS: torch.full_like(state[_FALLS], num_falls),
        }
        return StepResult(moved, new, {_MU: mu})


@explain_calls
def AdaptiveFedProx(
    local: Local,
    *,
    proximal: FirstPull,
    proximal_step: PullStep = 0.1,
    patience: Patience = 5,
    weight_by_examples: ByExamples = True,
) -> AdaptiveAveraging:
    """FedProx whose pull rises when the training loss does, and falls when that keeps falling.

    The paper starts at 0 for data that are alike and at 1 for data that differ. Its loss is that of
    the global model on all clients; here it is the mean over the steps of the clients that
    reported, which costs nothing. Privacy refuses it, since the losses have no noise.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.AdaptiveFedProx(local, proximal=1.0).patience
        5

    References:
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_, section 5.3.2. With a step of 0 it is FedProx.
    """
    require_update(local, name="local")
    return AdaptiveAveraging(
        local=Proximal(inner=local, proximal=proximal),
        aggregation=WeightedMean(by_examples=weight_by_examples),
        proximal_step=proximal_step,
        patience=patience,
    )
