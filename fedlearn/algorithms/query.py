"""Queries: rounds that ask clients for sums over their examples, and train no model.

A :class:`Query` is one class. The coordinator calls :meth:`Query.broadcast` and
:meth:`Query.conclude`, each client calls :meth:`Query.answer`. Client, transport, aggregation,
secure sums, privacy and checkpoints are those of a training: :class:`QueryStrategy` makes a query a
strategy whose model has no parameters and whose updates have no delta.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NoReturn

from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.client_answers import ClientAnswers, answers_in
from fedlearn.algorithms.lanes import Aggregate, Lanes, LaneSpec
from fedlearn.algorithms.local import Broadcasts, LocalWork, Memory, MemorySpec, Moment, Tensors
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.features import Features
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.errors import CallError

#: A client reads its examples once, all together.
_ONE_PASS = LocalWork(epochs=1, batch_size=None, shuffle=False)


@dataclass(frozen=True, kw_only=True)
class SumSpec:
    """Declares one tensor that every client answers, and how the answers are added up.

    Attributes:
        shape: Its shape; ``()``: one number.
        bound: Largest L2 norm of one client's answer, > 0; a longer one is scaled down to it in a
            secure sum and for privacy. ``None``: privacy takes ``privacy.clip_norm``, and secure
            aggregation refuses the query.
        by_examples: Whether the result is the mean over clients, weighted by their numbers of
            examples, instead of the sum.
        example_bound: Largest L2 norm of what one example adds to the answer, > 0, if the answer
            is a sum over examples: then ``privacy.unit = "example"`` can hide a single one. The
            query must see to it, for any example. ``None``: the answer is no such sum.

    Example:
        >>> import fedlearn as fl
        >>> fl.SumSpec(shape=(10,), bound=500.0)
        SumSpec(shape=(10,), bound=500.0, by_examples=False, example_bound=None)
    """

    shape: tuple[int, ...] = ()
    bound: float | None = None
    by_examples: bool = False
    example_bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question to clients about their examples; no model is trained.

    To write one, inherit from this class as a frozen dataclass whose fields are plain values, since
    they are sent to clients. Define :attr:`sums`, :meth:`answer` and :meth:`conclude`. A query of
    several rounds, such as a bisection, also defines :meth:`init` and :meth:`broadcast`.

    Example:
        >>> from dataclasses import dataclass
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> import fedlearn as fl
        >>> @dataclass(frozen=True, kw_only=True)
        ... class LabelCounts(fl.Query):
        ...     num_classes: int
        ...     @property
        ...     def sums(self):
        ...         return {"counts": fl.SumSpec(shape=(self.num_classes,))}
        ...     def answer(self, features, labels, *, broadcast):
        ...         return {"counts": torch.bincount(labels, minlength=self.num_classes)}
        ...     def conclude(self, sums, state, *, num_clients):
        ...         return sums, {"largest_class": sums["counts"].max()}
        >>> x, y = torch.eye(10), torch.arange(10) % 2
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(num_clients=3), test=(x, y), seed=0)
        >>> with TemporaryDirectory() as folder:
        ...     run = fl.simulate(
        ...         None, data, LabelCounts(num_classes=2), num_rounds=1,
        ...         cohort={"num_wanted": 3}, store={"runs_dir": folder},
        ...     )
        ...     run.state()["counts"]
        run ...
        tensor([5., 5.], dtype=torch.float64)
    """

    per_client: Annotated[
        bool,
        doc(
            "Whether the result shows the answer of each client, next to the sums. Secure "
            "aggregation and privacy refuse this, and so does a client whose policy does not allow "
            "it."
        ),
    ] = False

    @property
    def sums(self) -> Mapping[str, SumSpec]:
        """The tensors that clients answer, by name."""
        raise NotImplementedError

    def init(self) -> State:
        """Return the state before the first round; empty by default."""
        return {}

    def broadcast(self, state: State) -> Lanes:
        """Return the tensors to send to the clients of this round, of any shape; none by default.

        They are public: every client of the round receives them.
        """
        return {}

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        """Compute a client's answer from all of its examples.

        Args:
            features: The client's features, [n, ...] each.
            labels: Its labels: [n, ...].
            broadcast: The tensors of :meth:`broadcast`.

        Returns:
            The tensors that :attr:`sums` declares, by name. They are sent in float64.
        """
        raise NotImplementedError

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        """Compute the next state from the sums over a round's clients, and metrics to record.

        Args:
            sums: By name, the sum over clients, or the mean by examples, in the declared shape and
                float64. With privacy it has noise.
            state: The state before the round; do not write to it.
            num_clients: Number of clients in the sums. With privacy it is the expected number.

        Returns:
            The state, which is saved in checkpoints and is the run's result after the last round,
            and the metrics.
        """
        raise NotImplementedError

    def conclude_clients(self, answers: Mapping[ClientId, Lanes], state: State) -> State:
        """Add to the state what the result shows of each client, if :attr:`per_client` is true.

        Args:
            answers: The answer of each client of the round, in the order of their ids, float64.
            state: The state that :meth:`conclude` has just returned; do not write to it.
        """
        raise NotImplementedError

    # The rest makes a query a `LocalUpdate`, so that it is sent to clients as one is.

    @property
    def work(self) -> LocalWork:
        """One pass over all examples."""
        return _ONE_PASS

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """One lane for each of :attr:`sums`."""
        return [
            LaneSpec(
                name=name,
                over=math.prod(spec.shape),
                weighted=spec.by_examples,
                bound=spec.bound,
                example_bound=spec.example_bound,
                bound_remedy="give its SumSpec a bound",
            )
            for name, spec in self.sums.items()
        ]

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """None: clients keep nothing between rounds."""
        return {}

    @property
    def broadcasts(self) -> Broadcasts:
        """None: the tensors of :meth:`broadcast` may have any shape."""
        return {}

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Refuse: see :meth:`step`."""
        self._refuse()

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Refuse, since there is no model to train.

        Raises:
            ValueError: Always.
        """
        self._refuse()

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Refuse: see :meth:`step`."""
        self._refuse()

    def personal(self, x: Tensors, memory: Memory) -> Tensors | None:
        """Return ``None``: there is no model."""
        return None

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} is a query, which trains no model; give the client a "
            "QueryTrainer instead of a trainer with a model"
        )


@dataclass(frozen=True)
class QueryStrategy(Strategy):
    """The strategy of a query: it adds up the answers, and leaves the empty model as it is.

    Attributes:
        query: The query.
        clip_norm: Bound of the answers that declare none; ``None``: they have none.

    Raises:
        CallError: The query declares no sums, or one that is not a :class:`SumSpec`.
    """

    query: Query
    clip_norm: float | None = None

    #: An answer depends on what its round broadcast.
    needs_same_round = "each answer belongs to the question of its round"
    #: A sum of squares may be large, so only what float32 cannot hold is refused.
    bounds = UpdateBounds(max_norm=1e18, max_examples=10**9)

    def __post_init__(self) -> None:
        specs, who = self.query.sums, type(self.query).__name__
        if not specs:
            raise CallError(f"{who}.sums is empty; declare at least one tensor to add up")
        for name, spec in specs.items():
            if not isinstance(spec, SumSpec):
                raise CallError(
                    f"{who}.sums has {name!r} as {type(spec).__name__}; give fl.SumSpec(shape=...)"
                )
        if self.query.per_client and type(self.query).conclude_clients is Query.conclude_clients:
            raise CallError(
                f"{who}.per_client is true, but {who} has no conclude_clients; define it, or leave "
                "per_client out"
            )
        _ = self.lanes  # raises ValueError

    @property
    def local(self) -> Query:
        """The query."""
        return self.query

    @property
    def aggregation(self) -> WeightedMean | ClientAnswers:
        """The mean of the answers, by examples if a sum asks for it."""
        specs = self.query.sums.values()
        mean = WeightedMean(by_examples=any(spec.by_examples for spec in specs))
        return ClientAnswers(mean, tuple(self.lanes)) if self.query.per_client else mean

    @property
    def has_own_aggregate(self) -> bool:
        """Whether the aggregate has the answers of single clients, too."""
        return self.query.per_client

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The query's lanes; there is no delta."""
        return [
            replace(lane, bound=self.clip_norm) if lane.bound is None else lane
            for lane in self.query.lanes
        ]

    def init(self, params: Params) -> State:
        """Return the query's first state."""
        return self.query.init()

    def broadcast(self, state: State) -> Lanes:
        """Return the query's broadcast."""
        return self.query.broadcast(state)

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Let the query conclude from the sums; the model stays as it is."""
        sums = {}
        for name, spec in self.query.sums.items():
            mean = aggregate.lanes[name].view(spec.shape)
            sums[name] = mean if spec.by_examples else mean * aggregate.num_clients
        state, metrics = self.query.conclude(sums, state, num_clients=aggregate.num_clients)
        if self.query.per_client:
            shapes = {name: spec.shape for name, spec in self.query.sums.items()}
            state = self.query.conclude_clients(answers_in(aggregate, shapes), state)
        return StepResult(params, state, metrics)
