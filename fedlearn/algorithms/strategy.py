"""The interface of a federated algorithm: local training, aggregation, and the server's step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from fedlearn.algorithms.aggregations import Aggregation
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, LaneSpec
from fedlearn.algorithms.local import Broadcasts, LocalUpdate
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params

#: State of a strategy from round to round, by name; its tensors go into checkpoints.
State: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of a server step: the next model and state, and metrics to record.

    Example:
        >>> from torch import nn
        >>> import fedlearn as fl
        >>> from fedlearn.core.params import Params
        >>> params = Params.of(nn.Linear(3, 2))
        >>> fl.StepResult(params, state={}, metrics={"server_loss": 0.5}).params.vector.shape
        torch.Size([8])
    """

    params: Params
    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)


class Strategy(Protocol):
    """A federated algorithm: frozen, its state passed in and returned.

    To write one, inherit from this class as a frozen dataclass, declare the fields ``local`` and
    ``aggregation``, perhaps ``transforms``, and define :meth:`step`.

    Example:
        >>> from dataclasses import dataclass
        >>> import fedlearn as fl
        >>> @dataclass(frozen=True)
        ... class HalfSteps(fl.Strategy):
        ...     local: fl.LocalUpdate
        ...     aggregation: fl.WeightedMean
        ...     def step(self, params, aggregate, state):
        ...         moved = params.vector + 0.5 * aggregate.lanes["delta"]
        ...         return fl.StepResult(params.with_vector(moved), state)
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> strategy = HalfSteps(local, fl.WeightedMean(by_examples=True))
        >>> [lane.name for lane in strategy.lanes]  # what clients send
        ['delta']
    """

    # For type checkers these are read-only properties. At run time they must not exist, since a
    # property in the base class would clash with a dataclass field of the same name.
    if TYPE_CHECKING:

        @property
        def local(self) -> LocalUpdate:
            """The clients' local training."""

        @property
        def aggregation(self) -> Aggregation[Any]:  # Any: each rule has its own type of state
            """The rule that combines clients' updates."""

        @property
        def transforms(self) -> Sequence[Transform]:
            """Transforms of an update before it leaves its client; none by default."""
            return ()

        @property
        def keep_local(self) -> Sequence[str]:
            """Patterns of the tensors that each client keeps for itself; none by default.

            See :class:`~fedlearn.algorithms.local_parts.KeepLocal`.
            """
            return ()

        @property
        def download(self) -> Compressor | None:
            """How the model is compressed that clients download; by default it is sent whole.

            See :class:`~fedlearn.algorithms.download_compression.CompressedDownload`.
            """
            return None

        @property
        def bounds(self) -> UpdateBounds | None:
            """Bounds on an unmasked update; ``None``: the rule bounds it itself, as by clipping."""
            return GENEROUS

        @property
        def needs_same_round(self) -> str:
            """Why all updates of a step must come from one model; empty if they need not."""
            return ""

        @property
        def needs_train_metrics(self) -> str:
            """What :meth:`step` computes from the clients' losses; empty: nothing.

            They are then in ``aggregate.train``. Privacy refuses such a strategy, since losses
            have no noise.
            """
            return ""

        @property
        def has_own_aggregate(self) -> bool:
            """Whether the aggregation returns other lanes than clients send."""
            return False

        @property
        def max_reports(self) -> int | None:
            """Most clients that may report in a round; ``None``: any number."""
            return None

    else:
        transforms = ()
        keep_local = ()
        download = None
        bounds = GENEROUS
        needs_same_round = ""
        needs_train_metrics = ""
        has_own_aggregate = False
        max_reports = None

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """Lanes of an update: the delta, and those that the local update reports."""
        return (DELTA, *self.local.lanes)

    @property
    def broadcasts(self) -> Broadcasts:
        """Declarations of what :meth:`broadcast` returns: those of the local update."""
        return self.local.broadcasts

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return the local update of each client; by default :attr:`local` for all of them."""
        return [self.local] * len(client_ids)

    def init(self, params: Params) -> State:
        """Return the state before the first round; empty by default."""
        return {}

    def begin(self, params: Params) -> "StepResult":
        """Return the model and state before the first round.

        By default these are ``params`` and :meth:`init`. A strategy may train the model on the
        coordinator first and return that model. The metrics are recorded with the first round.
        """
        return StepResult(params, self.init(params))

    def at(self, state: State) -> "Strategy":
        """Return the strategy for the round that begins with this state; itself by default.

        A strategy whose local update or aggregation depends on the state returns another one, with
        the same lanes.
        """
        return self

    def broadcast(self, state: State) -> Lanes:
        """Return the vectors to broadcast together with the model, by name; none by default.

        Each has the extent that :attr:`broadcasts` declares. Without a declaration it has one
        number per trainable parameter, in the layout's order. They are computed from the state, and
        so from what was released: a broadcast costs no privacy.
        """
        return {}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Compute the next model and state; must not write to its arguments."""
        ...

    def without_clients(self, params: Params, state: State) -> State:
        """Return the state after all clients have lost their client state; unchanged by default.

        A strategy resets whatever must agree with the clients, such as the mean of their states.
        """
        return state


@dataclass(frozen=True)
class StrategyWrapper(Strategy):
    """A strategy that wraps another and overrides parts of it.

    Attributes:
        inner: The wrapped strategy, which supplies everything that is not overridden.
        own: Names of the wrapper's own state, which the inner strategy does not see.

    Example:
        >>> from dataclasses import replace
        >>> import fedlearn as fl
        >>> class WithNorm(fl.StrategyWrapper):
        ...     def step(self, params, aggregate, state):
        ...         norm = aggregate.lanes["delta"].norm().item()
        ...         return replace(super().step(params, aggregate, state), metrics={"norm": norm})
        >>> WithNorm(fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))).aggregation
        WeightedMean(by_examples=True)
    """

    inner: Strategy

    own: ClassVar[frozenset[str]] = frozenset()

    def inner_state(self, state: State) -> State:
        """Return the state as the inner strategy sees it."""
        return {name: value for name, value in state.items() if name not in self.own}

    @property
    def local(self) -> LocalUpdate:
        """The inner strategy's."""
        return self.inner.local

    @property
    def aggregation(self) -> Aggregation[Any]:  # Any: each rule has its own type of state
        """The inner strategy's."""
        return self.inner.aggregation

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's."""
        return self.inner.transforms

    @property
    def keep_local(self) -> Sequence[str]:
        """The inner strategy's."""
        return self.inner.keep_local

    @property
    def download(self) -> Compressor | None:
        """The inner strategy's."""
        return self.inner.download

    @property
    def bounds(self) -> UpdateBounds | None:
        """The inner strategy's."""
        return self.inner.bounds

    @property
    def needs_same_round(self) -> str:
        """The inner strategy's."""
        return self.inner.needs_same_round

    @property
    def needs_train_metrics(self) -> str:
        """The inner strategy's."""
        return self.inner.needs_train_metrics

    @property
    def has_own_aggregate(self) -> bool:
        """The inner strategy's."""
        return self.inner.has_own_aggregate

    @property
    def max_reports(self) -> int | None:
        """The inner strategy's."""
        return self.inner.max_reports

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner strategy's."""
        return self.inner.lanes

    @property
    def broadcasts(self) -> Broadcasts:
        """The inner strategy's."""
        return self.inner.broadcasts

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return the inner strategy's local update of each client."""
        return self.inner.locals_for(client_ids)

    def init(self, params: Params) -> State:
        """Return the inner strategy's state."""
        return self.inner.init(params)

    def begin(self, params: Params) -> StepResult:
        """Begin the inner strategy, and add the wrapper's own state."""
        begun = self.inner.begin(params)
        # `self.init` runs the inner strategy's init a second time; the state that `begin` returned
        # wins.
        return replace(begun, state={**self.init(begun.params), **begun.state})

    def without_clients(self, params: Params, state: State) -> State:
        """Reset the inner strategy's state; the wrapper's own state is unchanged."""
        inner = self.inner.without_clients(params, self.inner_state(state))
        return {**{name: state[name] for name in self.own & state.keys()}, **inner}

    def at(self, state: State) -> Strategy:
        """Return the wrapper around the inner strategy of the round."""
        inner = self.inner.at(self.inner_state(state))
        # The same object if nothing changed: `run_round` then need not store the state of the
        # round.
        return self if inner is self.inner else replace(self, inner=inner)

    def broadcast(self, state: State) -> Lanes:
        """Return the inner strategy's broadcast."""
        return self.inner.broadcast(self.inner_state(state))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step; the wrapper's own state is unchanged."""
        stepped = self.inner.step(params, aggregate, self.inner_state(state))
        return replace(stepped, state={**stepped.state, **{name: state[name] for name in self.own}})


@dataclass(frozen=True)
class Bounded(StrategyWrapper):
    """Replaces the bounds on updates of a strategy.

    Attributes:
        inner: The wrapped strategy.
        own_bounds: Bounds on an unmasked update.
    """

    own_bounds: UpdateBounds

    @property
    def bounds(self) -> UpdateBounds:
        """The bounds of this wrapper."""
        return self.own_bounds
