"""Recipes for well-known algorithms: FedAvg, FedProx, FedAdam and others.

A recipe is a function that returns an :class:`Algorithm`: a local update, an aggregation and a
server optimizer. An algorithm that does not fit this form has its own
:class:`~fedlearn.algorithms.strategy.Strategy`, such as
:class:`~fedlearn.algorithms.scaffold.ScaffoldAveraging`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.aggregations import Aggregation, WeightedMean, needs_last
from fedlearn.algorithms.asynchronous import Asynchrony, Buffered
from fedlearn.algorithms.elastic_averaging import ElasticAveraging, ElasticForce
from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, require_update
from fedlearn.algorithms.median import CoordinateMedian
from fedlearn.algorithms.proximal import Proximal, Pull
from fedlearn.algorithms.scaffold import ControlVariates, ScaffoldAveraging
from fedlearn.algorithms.server_optimizers import (
    Adaptivity,
    DeltaDecay,
    SecondMoment,
    ServerAdaptive,
    ServerMomentum,
    ServerOptimizer,
    ServerRate,
    ServerSgd,
    SquareDecay,
)
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.calls import explain_calls
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, NotNegative, Positive, Whole

Local: TypeAlias = Annotated[LocalUpdate, doc("What clients do.")]
ByExamples: TypeAlias = Annotated[
    bool,
    doc("Weight a client by its number of examples; otherwise all weigh the same."),
]


@dataclass(frozen=True, kw_only=True)
class Algorithm(Strategy):
    """A strategy composed of a local update, an aggregation and a server optimizer.

    Raises:
        TypeError: ``local`` is not a local update.

    Example:
        >>> import fedlearn as fl
        >>> algorithm = fl.Algorithm(
        ...     local=fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1),
        ...     aggregation=fl.CoordinateMedian(),
        ...     server_optimizer=fl.ServerSgd(learning_rate=1.0, momentum=0.9),
        ... )
        >>> [lane.name for lane in algorithm.lanes]  # what clients send
        ['delta']
    """

    local: LocalUpdate
    aggregation: Aggregation[Any]  # Any: each rule has its own type of state
    server_optimizer: ServerOptimizer
    transforms: Sequence[Transform] = ()

    def __post_init__(self) -> None:
        require_update(self.local, name="local")

    def init(self, params: Params) -> State:
        """Return the optimizer's state, and the last aggregate if the aggregation needs it."""
        state = self.server_optimizer.init(params)
        if not needs_last(self.aggregation):
            return state
        layout, like = params.layout, params.vector
        return {**state, **{_LAST + e.name: like.new_zeros(e.size(layout)) for e in self.lanes}}

    def at(self, state: State) -> "Algorithm":
        """Return the algorithm whose aggregation knows the last aggregate, if it needs it."""
        if not needs_last(self.aggregation):
            return self
        last = {each.name: state[_LAST + each.name] for each in self.lanes}
        return replace(self, aggregation=self.aggregation.after(last))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the optimizer's step with the aggregated delta."""
        lanes = aggregate.lanes
        after, state = self.server_optimizer.step(params, lanes[DELTA.name], state)
        if needs_last(self.aggregation):
            state = {**state, **{_LAST + name: lane for name, lane in lanes.items()}}
        return StepResult(after, state)


#: Prefix of the last aggregate's lanes in the state of an algorithm.
_LAST = "last "


@explain_calls
def FedAvg(local: Local, *, weight_by_examples: ByExamples = True) -> Algorithm:
    """Federated averaging: the new model is the mean of the local ones.

    Example:
        >>> import fedlearn as fl
        >>> algorithm = fl.FedAvg(fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1))
        >>> algorithm.aggregation
        WeightedMean(by_examples=True)

    References:
        McMahan et al., 2017, `Communication-Efficient Learning of Deep Networks from
        Decentralized Data <https://arxiv.org/abs/1602.05629>`_, algorithm 1.
    """
    return _averaging(local, _AS_IT_IS, by_examples=weight_by_examples)


@explain_calls
def FedAvgM(
    local: Local,
    *,
    server_learning_rate: ServerRate,
    server_momentum: ServerMomentum,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """Federated averaging with a server learning rate and server momentum.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.FedAvgM(local, server_learning_rate=1.0, server_momentum=0.9).server_optimizer
        ServerSgd(learning_rate=1.0, momentum=0.9)

    References:
        Hsu, Qi and Brown, 2019, `Measuring the Effects of Non-Identical Data Distribution
        for Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_.
    """
    optimizer = ServerSgd(learning_rate=server_learning_rate, momentum=server_momentum)
    return _averaging(local, optimizer, by_examples=weight_by_examples)


@explain_calls
def FedSGD(*, learning_rate: float, weight_by_examples: ByExamples = True) -> Algorithm:
    """Federated SGD: one step with the mean of the clients' full-batch gradients.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> num_examples = np.array([10, 1000])  # of two clients
        >>> fl.FedSGD(learning_rate=0.1).local.num_steps(num_examples)
        array([1, 1])

    References:
        McMahan et al., 2017, `Communication-Efficient Learning of Deep Networks from
        Decentralized Data <https://arxiv.org/abs/1602.05629>`_, section 2 (E = 1, B = infinity).
    """
    # All examples in one batch: their order does not matter, so none is drawn.
    gradient_step = LocalSgd(epochs=1, batch_size=None, learning_rate=learning_rate, shuffle=False)
    return FedAvg(gradient_step, weight_by_examples=weight_by_examples)


@explain_calls
def FedProx(local: Local, *, proximal: Pull, weight_by_examples: ByExamples = True) -> Algorithm:
    """FedProx: FedAvg with a pull of strength ``proximal`` (mu) towards the global model.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.FedProx(local, proximal=0.01).local.proximal
        0.01

    References:
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_, algorithm 2. With mu = 0 it is FedAvg.
    """
    # With mu = 0 leave the wrapper out: FedProx is then FedAvg to the last bit.
    pulled = Proximal(inner=local, proximal=proximal) if proximal else local
    return FedAvg(pulled, weight_by_examples=weight_by_examples)


@explain_calls
def FedMedian(local: Local) -> Algorithm:
    """FedAvg with the coordinate-wise median in place of the mean.

    Example:
        >>> import fedlearn as fl
        >>> fl.FedMedian(fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)).aggregation
        CoordinateMedian()

    References:
        Yin et al., 2018, `Byzantine-Robust Distributed Learning: Towards Optimal Statistical
        Rates <https://arxiv.org/abs/1803.01498>`_, algorithm 1.
    """
    return Algorithm(local=local, aggregation=CoordinateMedian(), server_optimizer=_AS_IT_IS)


@explain_calls
def FedAdagrad(
    local: Local,
    *,
    server_learning_rate: ServerRate,
    beta_1: DeltaDecay,
    tau: Adaptivity,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """FedAdagrad: the second moment is the sum of squared deltas.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> adagrad = fl.FedAdagrad(local, server_learning_rate=0.1, beta_1=0.9, tau=1e-3)
        >>> adagrad.server_optimizer.second_moment
        <SecondMoment.ADAGRAD: 'adagrad'>
    """
    optimizer = ServerAdaptive(
        second_moment=SecondMoment.ADAGRAD,
        learning_rate=server_learning_rate,
        beta_1=beta_1,
        # Adagrad sums squares and has no decay.
        beta_2=0.0,
        tau=tau,
    )
    return _averaging(local, optimizer, by_examples=weight_by_examples)


@explain_calls
def FedAdam(
    local: Local,
    *,
    server_learning_rate: ServerRate,
    beta_1: DeltaDecay,
    beta_2: SquareDecay,
    tau: Adaptivity,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """FedAdam: the second moment is an exponential moving average of squared deltas.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> adam = fl.FedAdam(local, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
        >>> adam.server_optimizer.second_moment
        <SecondMoment.ADAM: 'adam'>
    """
    optimizer = ServerAdaptive(
        second_moment=SecondMoment.ADAM,
        learning_rate=server_learning_rate,
        beta_1=beta_1,
        beta_2=beta_2,
        tau=tau,
    )
    return _averaging(local, optimizer, by_examples=weight_by_examples)


@explain_calls
def FedYogi(
    local: Local,
    *,
    server_learning_rate: ServerRate,
    beta_1: DeltaDecay,
    beta_2: SquareDecay,
    tau: Adaptivity,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """FedYogi: the second moment changes additively, so it decreases more slowly than FedAdam's.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> yogi = fl.FedYogi(local, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
        >>> yogi.server_optimizer.second_moment
        <SecondMoment.YOGI: 'yogi'>
    """
    optimizer = ServerAdaptive(
        second_moment=SecondMoment.YOGI,
        learning_rate=server_learning_rate,
        beta_1=beta_1,
        beta_2=beta_2,
        tau=tau,
    )
    return _averaging(local, optimizer, by_examples=weight_by_examples)


@explain_calls
def Scaffold(
    local: Local,
    *,
    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")],
    server_learning_rate: Annotated[Positive, doc("Server step size, > 0.")],
    control_bound: Annotated[
        Positive | None,
        doc(
            "Largest L2 norm of the change in a client's control variate, > 0; a longer change "
            "is scaled down to it. Secure aggregation needs it; not set: no limit."
        ),
    ] = None,
) -> ScaffoldAveraging:
    """SCAFFOLD with option II for the clients' control variates.

    Raises:
        ValueError: ``local`` is not a :class:`LocalSgd`, it keeps its momentum between rounds, or a
            number is not in its range.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.Scaffold(local, num_clients=100, server_learning_rate=1.0)
        >>> [lane.name for lane in algorithm.lanes]  # what clients send
        ['delta', 'control']

    References:
        Karimireddy et al., 2020, `SCAFFOLD: Stochastic Controlled Averaging for Federated
        Learning <https://arxiv.org/abs/1910.06378>`_, algorithm 1.
    """
    require_update(local, name="local")
    return ScaffoldAveraging(
        local=ControlVariates(inner=local, control_bound=control_bound),
        num_clients=num_clients,
        server_learning_rate=server_learning_rate,
    )


@explain_calls
def EASGD(
    local: Local,
    *,
    elasticity: Annotated[
        NotNegative, doc("Strength of the force, >= 0; with 0 clients train alone.")
    ],
    cohort_size: Annotated[Count, doc("Most clients that report in a round, >= 1.")],
) -> ElasticAveraging:
    """Elastic averaging SGD: synchronous or, with one client per round, round robin.

    Raises:
        ValueError: ``local`` is not SGD at a constant rate, or the force is too strong; see
            :class:`ElasticAveraging`.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.EASGD(local, elasticity=0.1, cohort_size=5).max_reports
        5

    References:
        Zhang, Choromanska and LeCun, 2015, `Deep Learning with Elastic Averaging SGD
        <https://arxiv.org/abs/1412.6651>`_, equations 1 and 2, and algorithm 1.
    """
    require_update(local, name="local")
    force = ElasticForce(inner=local, elasticity=elasticity)
    return ElasticAveraging(local=force, cohort_size=cohort_size)


@explain_calls
def FedBuff(
    local: Local,
    *,
    buffer_size: Count,
    concurrency: Count,
    max_staleness: Whole,
    staleness_weight: StalenessWeight = StalenessWeight.POLYNOMIAL,
    staleness_exponent: NotNegative = 0.5,
    staleness_hinge: Whole = 0,
    server_learning_rate: ServerRate = 1.0,
    server_momentum: ServerMomentum = 0.0,
    weight_by_examples: ByExamples = False,
) -> Buffered:
    r"""FedBuff: :math:`x \leftarrow x + \frac{\eta_g}{K} \sum_i s(\tau_i) \Delta_i`.

    Buffers and staleness are those of :class:`Asynchrony`.

    Raises:
        ValueError: As :class:`Asynchrony`.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.FedBuff(local, buffer_size=10, concurrency=20, max_staleness=4)
        >>> algorithm.asynchrony.buffer_size
        10

    References:
        Nguyen et al., 2022, `Federated Learning with Buffered Asynchronous Aggregation
        <https://arxiv.org/abs/2106.06639>`_, algorithm 1.
    """
    strategy = FedAvgM(
        local,
        server_learning_rate=server_learning_rate,
        server_momentum=server_momentum,
        weight_by_examples=weight_by_examples,
    )
    asynchrony = Asynchrony(
        buffer_size=buffer_size,
        concurrency=concurrency,
        max_staleness=max_staleness,
        staleness_weight=StalenessWeight(staleness_weight),
        staleness_exponent=staleness_exponent,
        staleness_hinge=staleness_hinge,
    )
    return Buffered(strategy, asynchrony)


@explain_calls
def FedAsync(
    local: Local,
    *,
    mixing: Annotated[
        Positive, doc("Weight of an update that is not stale, > 0; below 1 in the paper.")
    ],
    concurrency: Count,
    max_staleness: Whole,
    staleness_weight: StalenessWeight = StalenessWeight.POLYNOMIAL,
    staleness_exponent: NotNegative = 0.5,
    staleness_hinge: Whole = 0,
    proximal: Pull = 0.0,
) -> Buffered:
    r"""FedAsync: each update is a step, :math:`x \leftarrow x + \alpha s(\tau) \Delta`.

    Buffers and staleness are those of :class:`Asynchrony`.

    Raises:
        ValueError: As :class:`Asynchrony`.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.FedAsync(local, mixing=0.6, concurrency=4, max_staleness=9)
        >>> algorithm.asynchrony.buffer_size
        1

    References:
        Xie, Koyejo and Gupta, 2019, `Asynchronous Federated Optimization
        <https://arxiv.org/abs/1903.03934>`_, algorithm 1. The paper mixes models; here the update
        is added, as in FedBuff. For an update that is not stale both are the same.
    """
    # In the mean of a single update, its weight cancels.
    pulled = FedProx(local, proximal=proximal, weight_by_examples=False)
    server = ServerSgd(learning_rate=mixing, momentum=0.0)
    return Buffered(
        replace(pulled, server_optimizer=server),
        Asynchrony(
            buffer_size=1,
            concurrency=concurrency,
            max_staleness=max_staleness,
            staleness_weight=StalenessWeight(staleness_weight),
            staleness_exponent=staleness_exponent,
            staleness_hinge=staleness_hinge,
        ),
    )


#: x <- x + delta: the server takes the mean as its new model.
_AS_IT_IS = ServerSgd(learning_rate=1.0, momentum=0.0)


def _averaging(local: LocalUpdate, optimizer: ServerOptimizer, *, by_examples: bool) -> Algorithm:
    mean = WeightedMean(by_examples=by_examples)
    return Algorithm(local=local, aggregation=mean, server_optimizer=optimizer)
