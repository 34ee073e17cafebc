"""Algorithms by name: which pieces make FedAvg, FedProx, FedAdam and the rest.

A recipe is a function that returns an :class:`Algorithm`; there is no class hierarchy of
algorithms, since each is a local update, an aggregator and a server optimiser.
"""

from dataclasses import dataclass, replace

from fedlearn.algorithms.aggregators import WeightedMean
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.server_optimizers import (
    SecondMoment,
    ServerAdaptive,
    ServerOptimizer,
    ServerSgd,
)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A federated algorithm as its three pieces.

    Attributes:
        local: What clients do.
        aggregator: How their deltas are combined.
        server_optimizer: What the aggregate does to the global model.
    """

    local: LocalSgd
    aggregator: WeightedMean
    server_optimizer: ServerOptimizer


def FedAvg(local: LocalSgd, *, weight_by_examples: bool = True) -> Algorithm:
    """Return federated averaging: the new model is the mean of the local ones.

    Args:
        local: What clients do.
        weight_by_examples: As in the paper; otherwise each client counts the same.

    References:
        McMahan et al., 2017, `Communication-Efficient Learning of Deep Networks from
        Decentralized Data <https://arxiv.org/abs/1602.05629>`_, algorithm 1.
    """
    return FedAvgM(
        local,
        server_learning_rate=1.0,
        server_momentum=0.0,
        weight_by_examples=weight_by_examples,
    )


def FedAvgM(
    local: LocalSgd,
    *,
    server_learning_rate: float,
    server_momentum: float,
    weight_by_examples: bool = True,
) -> Algorithm:
    """Return federated averaging with a server learning rate and server momentum.

    References:
        Hsu, Qi and Brown, 2019, `Measuring the Effects of Non-Identical Data Distribution
        for Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_.
    """
    return Algorithm(
        local=local,
        aggregator=WeightedMean(by_examples=weight_by_examples),
        server_optimizer=ServerSgd(learning_rate=server_learning_rate, momentum=server_momentum),
    )


def FedSGD(*, learning_rate: float, weight_by_examples: bool = True) -> Algorithm:
    """Return federated SGD: one step by the mean of the clients' full-batch gradients.

    References:
        McMahan et al., 2017, as above, section 2 (E = 1, B = infinity).
    """
    gradient_step = LocalSgd(epochs=1, batch_size=None, learning_rate=learning_rate, shuffle=False)
    return FedAvg(gradient_step, weight_by_examples=weight_by_examples)


def FedProx(local: LocalSgd, *, proximal: float, weight_by_examples: bool = True) -> Algorithm:
    """Return FedProx: FedAvg with a pull of ``proximal`` (mu) towards the global model.

    References:
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_, algorithm 2. With mu = 0 it is FedAvg.
    """
    return FedAvg(replace(local, proximal=proximal), weight_by_examples=weight_by_examples)


def FedAdaptive(
    local: LocalSgd,
    *,
    second_moment: SecondMoment,
    server_learning_rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    weight_by_examples: bool = True,
) -> Algorithm:
    """Return FedAdagrad, FedAdam or FedYogi, by ``second_moment``.

    References:
        Reddi et al., 2021, `Adaptive Federated Optimization
        <https://arxiv.org/abs/2003.00295>`_, algorithm 2.
    """
    return Algorithm(
        local=local,
        aggregator=WeightedMean(by_examples=weight_by_examples),
        server_optimizer=ServerAdaptive(
            second_moment=second_moment,
            learning_rate=server_learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            tau=tau,
        ),
    )


def FedAdagrad(
    local: LocalSgd,
    *,
    server_learning_rate: float,
    beta_1: float,
    tau: float,
    weight_by_examples: bool = True,
) -> Algorithm:
    """Return FedAdagrad: the second moment is the sum of squared deltas."""
    return FedAdaptive(
        local,
        second_moment=SecondMoment.ADAGRAD,
        server_learning_rate=server_learning_rate,
        beta_1=beta_1,
        beta_2=0.0,
        tau=tau,
        weight_by_examples=weight_by_examples,
    )


def FedAdam(
    local: LocalSgd,
    *,
    server_learning_rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    weight_by_examples: bool = True,
) -> Algorithm:
    """Return FedAdam: the second moment is an exponential mean of squared deltas."""
    return FedAdaptive(
        local,
        second_moment=SecondMoment.ADAM,
        server_learning_rate=server_learning_rate,
        beta_1=beta_1,
        beta_2=beta_2,
        tau=tau,
        weight_by_examples=weight_by_examples,
    )


def FedYogi(
    local: LocalSgd,
    *,
    server_learning_rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    weight_by_examples: bool = True,
) -> Algorithm:
    """Return FedYogi: the second moment moves additively, so it forgets more slowly."""
    return FedAdaptive(
        local,
        second_moment=SecondMoment.YOGI,
        server_learning_rate=server_learning_rate,
        beta_1=beta_1,
        beta_2=beta_2,
        tau=tau,
        weight_by_examples=weight_by_examples,
    )
