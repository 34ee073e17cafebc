"""Builds the network, loss, metrics and algorithm of a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

import psutil
import torch
from torch import Tensor

from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.query import QueryStrategy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.config.training import (
    LossSection,
    MetricSection,
    ModelSection,
    NoModelSection,
    PythonModelSection,
)
from fedlearn.config.tree import Config
from fedlearn.core.features import name_inputs
from fedlearn.core.model_factory import ModelFactory
from fedlearn.errors import ConfigError
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.sources import Examples

#: Fewest copies of a model in memory: the global one, a client's, and the sum of the updates.
_COPIES = 3


class _Training(TypedDict):
    make_model: ModelFactory
    objective: Objective
    metrics: Mapping[str, Metric]
    algorithm: Strategy


def build_training(config: Config, data: FederatedData | None) -> _Training:
    """Build the network, loss, metrics and algorithm, as arguments of :class:`Components`."""
    if data is not None and config.has_model:
        _require_fitting(config.loss, data.test)
    return {
        "make_model": build_model_factory(config, data),
        "objective": config.loss.build(),
        "metrics": build_metrics(config.metrics),
        "algorithm": give_bounds(build_algorithm(config), config),
    }


def build_model_factory(config: Config, data: FederatedData | None) -> ModelFactory:
    """Return the factory of the network, shaped for ``data`` if there are any.

    Raises:
        ConfigError: The network cannot take the data, or a custom factory cannot be imported or
            called.
    """
    model, shaped = config.model, dict[str, object]()
    if not isinstance(model, PythonModelSection | NoModelSection):
        assert data is not None  # the configuration requires a custom model without data
        _require_one_input(model, data.test)
        outputs = _num_outputs(config.loss, data.test)
        shaped = {"feature_shape": data.feature_shape, "num_outputs": outputs}
    made = ModelFactory.of(model.build(**shaped))
    if shaped:
        _require_memory(made, model)
    return made


def _require_memory(make_model: ModelFactory, model: ModelSection) -> None:
    """Refuse a model too large for this machine, before the kernel kills the process."""
    with torch.device("meta"):  # shapes without memory
        parameters = list(make_model().parameters())
    needed = _COPIES * sum(each.nbytes for each in parameters)
    there = psutil.virtual_memory().total
    if needed > there:
        largest = max(parameters, key=torch.Tensor.numel)
        size = sum(each.numel() for each in parameters)
        raise ConfigError(
            f"model: it would have {size:.3g} parameters, {list(largest.shape)} in the largest "
            f"layer, and {_COPIES} copies of them take {needed / 2**30:.3g} GiB, but this machine "
            f"has {there / 2**30:.3g}; make it smaller (model.kind is {model.kind!r}), or correct "
            "the labels: it has an output for each class up to the largest"
        )


def _require_one_input(model: ModelSection, test: Examples) -> None:
    inputs, remedy = name_inputs(test.features), '(model.kind = "python")'
    if not isinstance(test.features, Tensor):
        raise ConfigError(
            f'model.kind: "{model.kind}" takes one tensor, but the features are '
            f"{', '.join(inputs)}; use a model whose forward takes them {remedy}"
        )


def _num_outputs(loss: LossSection, test: Examples) -> int:
    values = test.labels.shape[1:].numel()
    if loss.kind in ("bce_with_logits", "mse") or test.num_classes is None:
        return values
    if values > 1:
        raise ConfigError(
            "model.kind: the networks that come with fedlearn classify an example as a whole, but "
            f"its labels have shape {list(test.labels.shape[1:])}; use your own model (model.kind "
            '= "python")'
        )
    return test.num_classes


def _require_fitting(loss: LossSection, test: Examples) -> None:
    if loss.kind == "cross_entropy" and test.num_classes is None:
        raise ConfigError(
            f'loss.kind: "cross_entropy" needs classes, but the labels are {test.labels.dtype}; '
            'make them integers, or use "mse"'
        )
    if loss.kind == "bce_with_logits":
        _require_binary(test)


def _require_binary(test: Examples) -> None:
    low, high = (float(extreme) for extreme in test.labels.aminmax())
    # The number of classes counts those of the training labels, too.
    largest = high if test.num_classes is None else test.num_classes - 1
    if test.labels.shape[1:].numel() != 1 or low < 0 or largest > 1:
        raise ConfigError(
            'loss.kind: "bce_with_logits" needs one label per example in 0..1, but labels have '
            f"shape {list(test.labels.shape[1:])} and lie in {low:g}..{largest:g}; use "
            '"cross_entropy" for classes or "mse" for numbers'
        )


def require_query_without_model(strategy: Strategy, config: Config) -> None:
    """Check that there is a model, unless the algorithm is a query.

    Raises:
        ConfigError: There is a model and the algorithm is a query, or neither.
    """
    is_query = isinstance(strategy, QueryStrategy)
    if is_query and config.has_model:
        raise ConfigError(
            f'model.kind is "{config.model.kind}", but {type(strategy.local).__name__} is a query, '
            'which has no model; set model.kind to "none"'
        )
    if not is_query and not config.has_model:
        raise ConfigError(
            f'model.kind is "none", but the algorithm {config.algorithm.name!r} trains a model; '
            "choose a model, or name a query in algorithm.name"
        )


def give_bounds(strategy: Strategy, config: Config) -> Strategy:
    """Give the answers to a query that have no bound that of privacy, if it is on."""
    if isinstance(strategy, QueryStrategy) and config.privacy.is_on:
        return replace(strategy, clip_norm=config.privacy.clip_norm)
    return strategy


def build_metrics(sections: Mapping[str, MetricSection]) -> dict[str, Metric]:
    """Build the metrics that have a factory, by name.

    Raises:
        ConfigError: A factory cannot be imported or called, or does not return a metric.
    """
    return {name: each.metric(name) for name, each in sections.items() if each.factory is not None}


def build_algorithm(config: Config) -> Strategy:
    """Build the algorithm with its local update.

    Raises:
        ConfigError: Its settings do not fit together, or a custom strategy cannot be imported or
            lacks something, or is a query although there is a model, or the reverse.
    """
    try:
        strategy = config.algorithm.strategy(config.client.local_update())
        require_query_without_model(strategy, config)
        strategy = config.compression.apply(config.aggregation.apply(strategy))
        strategy = config.download_compression.apply(strategy)
        patterns = config.algorithm.keep_local
        return KeepLocal(strategy, tuple(patterns)) if patterns else strategy
    except ValueError as error:
        raise ConfigError(f'algorithm.name is "{config.algorithm.name}": {error}') from error
