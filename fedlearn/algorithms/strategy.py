"""The seam of algorithms: what clients do, how it is combined, what the server makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from fedlearn.algorithms.aggregations import Aggregation
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, LaneSpec
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params

#: What a strategy keeps from round to round, by name; its tensors go into checkpoints.
State: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Stepped:
    """What a round makes of the model: the next one, a state, and metrics for its record."""

    params: Params
    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)


class Strategy(Protocol):
    """A federated algorithm: frozen, its state passed in and returned.

    Inherit from it and define :meth:`step`; ``local`` and ``aggregation`` are a dataclass's fields,
    and so may ``transforms`` be.
    """

    # Read-only to whoever holds a strategy. At run time they are not there, since a property
    # would stand in the way of a dataclass's field.
    if TYPE_CHECKING:

        @property
        def local(self) -> LocalUpdate:
            """What clients do."""

        @property
        def aggregation(self) -> Aggregation[Any]:  # Any: its state is its own business
            """How their updates are combined."""

        @property
        def transforms(self) -> Sequence[Transform]:
            """What is done to an update before it leaves its client; nothing."""
            return ()

        @property
        def bounds(self) -> UpdateBounds | None:
            """What one update may come to in the clear; ``None``: its own rule bounds it."""
            return GENEROUS

        @property
        def needs_same_round(self) -> str:
            """Why all updates of a step must be based on one model; empty: they need not."""
            return ""

        @property
        def max_reports(self) -> int | None:
            """Most clients that may report in a round; ``None``: any number."""
            return None

    else:
        transforms = ()
        bounds = GENEROUS
        needs_same_round = ""
        max_reports = None

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """What a client contributes: the delta, and what the local update reports."""
        return (DELTA, *self.local.lanes)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return what each client does: one object, :attr:`local`, unless clients differ."""
        return [self.local] * len(client_ids)

    def init(self, params: Params) -> State:
        """Return the state before the first round; nothing."""
        return {}

    def begin(self, params: Params) -> "Stepped":
        """Return the model and state before the first round; the model as it is, and :meth:`init`.

        A strategy that has the coordinator train the model first returns that model. Metrics of it
        stand in the record of the first round.
        """
        return Stepped(params, self.init(params))

    def at(self, state: State) -> "Strategy":
        """Return the strategy of the round that begins with this state; itself.

        One whose clients or aggregation depend on the state returns another one, with the same
        lanes.
        """
        return self

    def tell(self, state: State) -> Lanes:
        """Return what clients are told beside the model, one vector each; nothing.

        Each is of one number a trainable parameter, in the layout's order.
        """
        return {}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> Stepped:
        """Return the next model and state; writes to none of its arguments."""
        ...

    def without_clients(self, params: Params, state: State) -> State:
        """Return the state after all clients have lost what they keep; unchanged.

        A strategy resets what has to agree with the clients, such as the mean of what they keep.
        """
        return state


@dataclass(frozen=True)
class Wrapped(Strategy):
    """A strategy around another: it is that one, but for what it defines itself.

    Attributes:
        inner: The other one.
        own: Names of what is this one's in the state; the other one does not see it.
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
    def aggregation(self) -> Aggregation[Any]:  # Any: its state is its own business
        """The inner strategy's."""
        return self.inner.aggregation

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's."""
        return self.inner.transforms

    @property
    def bounds(self) -> UpdateBounds | None:
        """The inner strategy's."""
        return self.inner.bounds

    @property
    def needs_same_round(self) -> str:
        """The inner strategy's."""
        return self.inner.needs_same_round

    @property
    def max_reports(self) -> int | None:
        """The inner strategy's."""
        return self.inner.max_reports

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner strategy's."""
        return self.inner.lanes

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return what each client does in the inner strategy."""
        return self.inner.locals_for(client_ids)

    def init(self, params: Params) -> State:
        """Return the inner strategy's state."""
        return self.inner.init(params)

    def begin(self, params: Params) -> Stepped:
        """Return what the inner strategy begins with; what is this one's own is added."""
        begun = self.inner.begin(params)
        return replace(begun, state={**self.init(begun.params), **begun.state})

    def without_clients(self, params: Params, state: State) -> State:
        """Return the inner strategy's, and what is this one's own unchanged."""
        inner = self.inner.without_clients(params, self.inner_state(state))
        return {**{name: state[name] for name in self.own & state.keys()}, **inner}

    def at(self, state: State) -> Strategy:
        """Return this around the inner strategy of the round."""
        inner = self.inner.at(self.inner_state(state))
        return self if inner is self.inner else replace(self, inner=inner)

    def tell(self, state: State) -> Lanes:
        """Tell what the inner strategy does."""
        return self.inner.tell(self.inner_state(state))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> Stepped:
        """Take the inner strategy's step; what is this one's own stays."""
        stepped = self.inner.step(params, aggregate, self.inner_state(state))
        return replace(stepped, state={**stepped.state, **{name: state[name] for name in self.own}})


@dataclass(frozen=True)
class Bounded(Wrapped):
    """A strategy with bounds of its own for updates.

    Attributes:
        inner: The strategy otherwise.
        own_bounds: What one update may come to in the clear.
    """

    own_bounds: UpdateBounds

    @property
    def bounds(self) -> UpdateBounds:
        """This one's."""
        return self.own_bounds
