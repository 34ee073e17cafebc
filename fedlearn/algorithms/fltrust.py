r"""FLTrust: the coordinator trains on a few examples of its own, and trusts similar updates.

==================== ==========================================
symbol               here
==================== ==========================================
:math:`D_0`          the root examples, ``root``
:math:`g_0`          ``server_delta``, what one client with the root examples would send
:math:`g_i`          the ``delta`` of client i
:math:`TS_i`         its trust score
:math:`\alpha`       learning rate of the server optimizer
==================== ==========================================

.. math::

    TS_i = \mathrm{ReLU}(\cos(g_i, g_0)), \qquad
    g = \frac{1}{\sum_j TS_j} \sum_i TS_i \frac{\|g_0\|}{\|g_i\|} g_i, \qquad
    w \leftarrow w + \alpha g .

Angles and norms are those of the trainable parameters. Running statistics and other lanes are
averaged by the trust scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Protocol

import torch
from annotated_types import doc
from numpy.typing import ArrayLike
from torch import Tensor

from fedlearn.algorithms.aggregations import (
    RobustAggregation,
    RootData,
    add_weighted,
    iter_spans,
)
from fedlearn.algorithms.distances import combine_rows
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, Rows, Updates
from fedlearn.algorithms.strategy import State, StepResult, Strategy, StrategyWrapper
from fedlearn.core.features import Inputs
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import RoundError

#: Root examples that are drawn if no number is given, as in the paper.
_USUAL_NUMBER = 100
#: Names in the state of :class:`RootTraining`.
_DELTA, _ROUNDS = "root/delta", "root/rounds"


@dataclass(frozen=True, kw_only=True)
class FLTrust(Ranged, RobustAggregation):
    """The mean of the updates, scaled to the norm of the server's own and weighted by trust.

    The server trains on its root examples in each round as a client would, without state from
    earlier rounds. A client whose update has no positive cosine with the server's does not count.
    If none does, the model stays. All honest clients count alike, whatever their numbers of
    examples. The round's record has ``num_left_out``.

    Attributes:
        root: Features and labels of the root examples, which must be clean; ``None``: they are
            drawn from the training examples of the run, before any attack.
        server_delta: The server's update of this round; :class:`RootTraining` adds it.

    Raises:
        ValueError: Both root examples and their number are given.

    Example:
        >>> import fedlearn as fl
        >>> rule = fl.FLTrust(root=(torch.randn(20, 3), torch.zeros(20).long()))
        >>> rows = {"delta": torch.tensor([[3.0, 0.0], [0.0, 0.5], [-1.0, -1.0]])}
        >>> updates = fl.Updates([0, 1, 2], torch.ones(3), rows, based_on=[0, 0, 0])
        >>> found = rule.with_server_delta(torch.tensor([1.0, 1.0])).combine(updates)
        >>> found.lanes["delta"], found.metrics
        (tensor([0.7071, 0.7071]), {'num_left_out': 1.0})

    References:
        Cao, Fang, Liu and Gong, 2021, `FLTrust: Byzantine-robust Federated Learning via Trust
        Bootstrapping <https://arxiv.org/abs/2012.13995>`_, algorithm 2.
    """

    root: tuple[Inputs[ArrayLike], ArrayLike] | None = field(
        default=None, compare=False, repr=False
    )
    num_root_examples: Annotated[
        Count | None,
        doc(
            "Number of root examples to draw from the training examples, >= 1; not set: 100, or "
            "those that are given."
        ),
    ] = None
    server_delta: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is not None and self.num_root_examples is not None:
            raise ValueError(
                f"num_root_examples is {self.num_root_examples}, but root examples are given, and "
                "all of them are used; leave one of the two out"
            )

    @property
    def root_data(self) -> RootData:
        """The root examples, or how many to draw."""
        return self.num_root_examples or _USUAL_NUMBER if self.root is None else self.root

    def with_server_delta(self, delta: Tensor) -> "FLTrust":
        """Return the rule that compares with this update."""
        return replace(self, server_delta=delta)

    def combine(self, updates: Updates) -> Aggregate:
        """Return the trusted mean.

        Raises:
            RoundError: There is no update of the server.
        """
        if self.server_delta is None:
            raise RoundError(
                "FLTrust has no update of the server; use it in fl.simulate or a configuration, "
                "which train on the root examples, or wrap the strategy in RootTraining"
            )
        rows, num_trained = updates.lanes[DELTA.name], updates.num_trained
        trained = [row[:num_trained] for row in rows]
        cosines_B, ratios_B = _compare(trained, self.server_delta[:num_trained])
        trust_B = cosines_B.clamp(min=0.0)  # ReLU
        num_trusted = int((trust_B > 0.0).sum())
        shares_B = trust_B / trust_B.sum() if num_trusted else trust_B
        lanes = combine_rows(updates, shares_B.tolist())
        total = lanes[DELTA.name][:num_trained].zero_()
        add_weighted(total, trained, total.new_tensor((shares_B * ratios_B).tolist()))
        left_out = float(len(rows) - num_trusted)
        return Aggregate(lanes, max(1, num_trusted), metrics={"num_left_out": left_out})


def _compare(rows: Rows, server_Q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' cosines with the server's update, and its norm over theirs: [B] each."""
    products, squares = (
        torch.zeros(len(rows) + 1, dtype=torch.float64, device=server_Q.device) for _ in range(2)
    )
    for _, values in iter_spans([server_Q, *rows]):
        wide = values.double()
        products += wide @ wide[0]
        squares += wide.square().sum(1)
    norms = squares.sqrt()
    # An update of zeros has no direction: it divides by infinity, so that it counts for nothing.
    norms_B = torch.where(norms[1:] > 0.0, norms[1:], torch.inf)
    cosines_B = products[1:] / norms_B / norms[0].clamp(min=torch.finfo(torch.float64).tiny)
    return cosines_B, norms[0] / norms_B


class TrainsOnRoot(Protocol):
    """Trains a model on the root examples as a client would."""

    def __call__(
        self, params: Params, strategy: Strategy, *, broadcast: Lanes, round_num: int
    ) -> Tensor:
        """Return the update: local model minus ``params``, shape [P].

        Args:
            params: The global model.
            strategy: The strategy of the round, whose local update trains.
            broadcast: What clients receive together with the model.
            round_num: Index of the round, from 0.
        """


@dataclass(frozen=True)
class RootTraining(StrategyWrapper):
    """A strategy whose coordinator trains on root examples, for a rule such as :class:`FLTrust`.

    It trains at the end of each round, for the next one. The update is part of the state, so a
    resumed run continues with it.

    Attributes:
        train: Trains on the root examples.
        server_delta: The update of this round; ``None``: before the first.
    """

    train: TrainsOnRoot
    server_delta: Tensor | None = field(default=None, compare=False, repr=False)

    own: ClassVar[frozenset[str]] = frozenset({_DELTA, _ROUNDS})

    @property
    def aggregation(self) -> RobustAggregation:
        """The inner rule, which knows the server's update."""
        rule = self.inner.aggregation
        assert isinstance(rule, RobustAggregation)  # no other rule has root data
        return rule if self.server_delta is None else rule.with_server_delta(self.server_delta)

    def init(self, params: Params) -> State:
        """Return the state before any training: no update."""
        rounds = torch.zeros((), dtype=torch.int64)
        own = {_DELTA: torch.zeros_like(params.vector), _ROUNDS: rounds}
        return {**self.inner.init(params), **own}

    def begin(self, params: Params) -> StepResult:
        """Begin the inner strategy, and train for the first round."""
        begun = super().begin(params)
        return replace(begun, state={**begun.state, **self._train(begun.params, begun.state, 0)})

    def at(self, state: State) -> Strategy:
        """Return the strategy whose rule knows the server's update of the round."""
        inner = self.inner.at(self.inner_state(state))
        return replace(self, inner=inner, server_delta=state[_DELTA])

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step, and train for the next round."""
        stepped = super().step(params, aggregate, state)
        own = self._train(stepped.params, stepped.state, int(state[_ROUNDS]) + 1)
        return replace(stepped, state={**stepped.state, **own})

    def _train(self, params: Params, state: State, round_num: int) -> Mapping[str, Tensor]:
        state = self.inner_state(state)
        strategy = self.inner.at(state)
        delta = self.train(
            params, strategy, broadcast=strategy.broadcast(state), round_num=round_num
        )
        if not bool(delta.isfinite().all()):
            raise RoundError(
                f"round {round_num}: training on the root examples diverged; lower "
                "client.learning_rate"
            )
        return {_DELTA: delta, _ROUNDS: torch.tensor(round_num, dtype=torch.int64)}
