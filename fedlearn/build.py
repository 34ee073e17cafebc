"""From a configuration to objects: the only registry of names."""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fedlearn import config as cf
from fedlearn.algorithms import recipes
from fedlearn.algorithms.aggregators import WeightedMean
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    MeanSquaredError,
    Objective,
)
from fedlearn.algorithms.sampling import CohortSampler, PoissonSampler, UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.randomness import Seed
from fedlearn.door.eligibility import Requirements
from fedlearn.errors import ConfigError
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation import behaviour as devices
from fedlearn.simulation import models, sources
from fedlearn.simulation.federated_data import (
    Bootstrap,
    Division,
    FederatedData,
    Natural,
    from_npz,
    from_parquet,
    partitioned,
)
from fedlearn.simulation.partition import Dirichlet, Iid, Shards
from fedlearn.simulation.population import PooledPopulation


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The pieces of a simulated run, before they are given workers and a store.

    Attributes:
        make_model: Builds the network; called in every process.
        objective: Loss and metrics.
        data: Clients and test set.
        algorithm: Local update, aggregator, server optimiser.
        sampler: Who is asked.
        policy: When a round closes.
        behaviour: What the devices do.
        config: Everything else: rounds, evaluation, engine, store.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    data: FederatedData
    algorithm: recipes.Algorithm
    sampler: CohortSampler
    policy: StragglerPolicy
    behaviour: devices.ClientBehaviour
    config: cf.Config

    @property
    def seed(self) -> Seed:
        """The seed of everything random in the run."""
        return Seed(self.config.seed)

    @property
    def secure(self) -> SecurePlan | None:
        """What sessions of secure aggregation ask; ``None``: it is off."""
        return secure_plan(self.config, self.policy, self.algorithm.aggregator)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The pieces of a deployed run, before they are given a channel and a store.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics of the central evaluation.
        test: What the model is measured on centrally; ``None``: the coordinator has no data,
            and the clients measure it.
        algorithm: Local update, aggregator, server optimiser.
        sampler: Who is asked.
        policy: When a round closes, in real seconds.
        requirements: Which clients may be asked.
        config: Everything else: rounds, evaluation, addresses, store.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    test: sources.Examples | None
    algorithm: recipes.Algorithm
    sampler: CohortSampler
    policy: StragglerPolicy
    requirements: Requirements
    config: cf.Config

    @property
    def seed(self) -> Seed:
        """The seed of everything random in the run that need not be secret."""
        return Seed(self.config.seed)

    @property
    def secure(self) -> SecurePlan | None:
        """What sessions of secure aggregation ask; ``None``: it is off."""
        return secure_plan(self.config, self.policy, self.algorithm.aggregator)


def secure_plan(
    config: cf.Config, policy: StragglerPolicy, aggregator: object
) -> SecurePlan | None:
    """Return what sessions of secure aggregation ask; ``None``: it is off.

    Raises:
        ConfigError: Nothing satisfies the assumptions, a sum could overflow, or the algorithm needs
            more than the sum.
    """
    section = config.secure_aggregation
    if not section.is_on:
        return None
    if not isinstance(aggregator, WeightedMean):
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", but {type(aggregator).__name__} must '
            "see each update, and the coordinator learns their sum alone; aggregate by a weighted "
            'mean, or set the mode to "off"'
        )
    plan = section.plan(
        policy.num_asked, min_reports=policy.min_reports, by_examples=aggregator.by_examples
    )
    plan.explain()  # raises where a sum could overflow
    return plan


def _require_simulable(config: cf.Config) -> None:
    section, transport = config.secure_aggregation, config.engine.transport
    if section.is_on and transport == "engine" and section.simulate_as == "protocol":
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", but engine.transport is "engine", which '
            'has no client sessions; set engine.transport to "memory" to run the protocol itself, '
            'or secure_aggregation.simulate_as to "modular_sum" to round alike without masks'
        )


def deployment(config: cf.Config, *, data_dir: Path) -> Deployment:
    """Return the pieces that ``config`` names for a coordinator.

    Args:
        config: The resolved tree; its devices and engine describe a simulation and count for
            nothing here.
        data_dir: Where data sets lie that the configuration names without a path.

    Raises:
        ConfigError: A factory cannot be imported, or pieces do not fit together.
        DataError: Data are missing.
    """
    if config.centralized:
        raise ConfigError(
            "centralized is true, but a coordinator has no pooled examples; remove it, or run "
            "`fedlearn simulate`"
        )
    has_data = not isinstance(config.data, cf.NoData)
    data = federated_data(config, data_dir=data_dir) if has_data else None
    if data is not None:
        _require_fitting(config.loss, data.test)
    minimised = objective(config.loss)
    _require_watched(config.early_stopping, minimised)
    policy, chosen = config.straggler_policy(), algorithm(config)
    secure_plan(config, policy, chosen.aggregator)
    return Deployment(
        make_model=model_factory(config, data),
        objective=minimised,
        test=None if data is None else data.test,
        algorithm=chosen,
        sampler=sampler(config.cohort),
        policy=policy,
        requirements=Requirements(**config.coordinator.eligibility.model_dump()),
        config=config,
    )


def simulation(config: cf.Config, *, data_dir: Path) -> Simulation:
    """Return the pieces that ``config`` names.

    Args:
        config: The resolved tree.
        data_dir: Where data sets lie that the configuration names without a path.

    Raises:
        ConfigError: A factory cannot be imported, or pieces do not fit together.
        DataError: Data are missing or cannot be trained on.
    """
    data = federated_data(config, data_dir=data_dir)
    _require_fitting(config.loss, data.test)
    return around(
        config,
        make_model=model_factory(config, data),
        objective=objective(config.loss),
        data=data,
        algorithm=algorithm(config),
        data_dir=data_dir,
    )


def around(
    config: cf.Config,
    *,
    make_model: Callable[[], nn.Module],
    objective: Objective,
    data: FederatedData,
    algorithm: recipes.Algorithm,
    data_dir: Path,
) -> Simulation:
    """Return a simulation of a given model, data and algorithm; ``config`` says the rest.

    Raises:
        ConfigError: More clients are asked in a round than there are, the run is to stop by an
            accuracy that the objective does not measure, or secure aggregation cannot hold.
        DataError: Bandwidth traces are missing.
    """
    _require_watched(config.early_stopping, objective)
    _require_simulable(config)
    if config.centralized:
        return _pooled(config, make_model, objective, data, algorithm)
    policy, population = config.straggler_policy(), data.population.num_clients
    if policy.num_asked > population:
        raise ConfigError(
            f"cohort.num_wanted: {policy.num_asked} clients are asked in a round, but the data "
            f"have {population}; lower cohort.num_wanted or stragglers.over_selection"
        )
    secure_plan(config, policy, algorithm.aggregator)
    return Simulation(
        make_model=make_model,
        objective=objective,
        data=data,
        algorithm=algorithm,
        sampler=sampler(config.cohort),
        policy=policy,
        behaviour=behaviour(config.devices, data_dir=data_dir),
        config=config,
    )


def _pooled(
    config: cf.Config,
    make_model: Callable[[], nn.Module],
    objective: Objective,
    data: FederatedData,
    algorithm: recipes.Algorithm,
) -> Simulation:
    """Return centralised training: one client that holds all examples and always reports."""
    alone = StragglerPolicy(
        num_wanted=1,
        over_selection=1.0,
        deadline_s=math.inf,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    return Simulation(
        make_model=make_model,
        objective=objective,
        data=FederatedData(population=PooledPopulation(data.population), test=data.test),
        algorithm=algorithm,
        sampler=UniformSampler(),
        policy=alone,
        behaviour=devices.Instant(),
        config=config,
    )


def federated_data(config: cf.Config, *, data_dir: Path) -> FederatedData:
    """Return the clients and the test set that ``config.data`` names.

    Raises:
        ConfigError: The data cannot be divided as the configuration says, or a factory
            cannot be imported or returns something else.
        DataError: Data are missing or cannot be trained on.
    """
    seed, data = Seed(config.seed).derive("data"), config.data
    match data:
        case cf.DigitsData():
            digits = sources.digits(test_fraction=data.test_fraction, seed=seed)
            return partitioned(digits, division(data.partition), seed=seed)
        case cf.MnistByWriterData():
            path = data_dir / "mnist.npz" if data.path is None else Path(data.path)
            return partitioned(sources.mnist_by_writer(path), Natural(), seed=seed)
        case cf.NpzData():
            return _npz(data, config.seed)
        case cf.ParquetData():
            return _parquet(data)
        case cf.PythonData():
            return _python(data, seed)
        case cf.NoData():
            raise ConfigError(
                'data.source is "none", which is for a coordinator whose clients have all the '
                "data; name the data to simulate, as with --set data.source=digits"
            )


def division(section: cf.Partition) -> Division:
    """Return how the examples become clients."""
    match section:
        case cf.IidPartition():
            return Iid(num_clients=section.num_clients)
        case cf.DirichletPartition():
            return Dirichlet(
                num_clients=section.num_clients,
                alpha=section.alpha,
                min_examples=section.min_examples,
            )
        case cf.ShardsPartition():
            return Shards(
                num_clients=section.num_clients, shards_per_client=section.shards_per_client
            )
        case cf.NaturalPartition():
            return Natural()
        case cf.BootstrapPartition():
            return Bootstrap(
                num_clients=section.num_clients, examples_per_client=section.examples_per_client
            )


def _npz(data: cf.NpzData, seed: int) -> FederatedData:
    if data.test_features is not None and data.test_labels is not None:
        test: tuple[str, str] | float = (data.test_features, data.test_labels)
    else:
        assert data.test_fraction is not None  # the configuration requires one kind of test set
        test = data.test_fraction
    return from_npz(
        data.path,
        features=data.features,
        labels=data.labels,
        groups=data.groups,
        test=test,
        partition=division(data.partition),
        seed=seed,
    )


def _parquet(data: cf.ParquetData) -> FederatedData:
    if not isinstance(data.partition, cf.NaturalPartition):
        raise ConfigError(
            f'data.partition.kind is "{data.partition.kind}", but streaming Parquet is divided by '
            'its client column; set it to "natural" and name data.client_column'
        )
    assert data.client_column is not None  # the configuration requires it of a natural partition
    return from_parquet(
        data.path,
        test_path=data.test_path,
        client=data.client_column,
        label=data.label_column,
        features=None if data.feature_columns == "all" else data.feature_columns,
    )


def _python(data: cf.PythonData, seed: Seed) -> FederatedData:
    made = user_call("data.factory", data.factory, data.args)()
    if isinstance(made, sources.TrainTest):
        return partitioned(made, division(data.partition), seed=seed)
    if not isinstance(made, FederatedData):
        raise ConfigError(
            f"data.factory: {data.factory} returned {type(made).__name__}; it must return "
            "FederatedData or TrainTest"
        )
    if not isinstance(data.partition, cf.NaturalPartition):
        raise ConfigError(
            f'data.partition.kind is "{data.partition.kind}", but {data.factory} returned '
            "FederatedData, which is divided already; remove data.partition, or return TrainTest"
        )
    return made


def model_factory(config: cf.Config, data: FederatedData | None) -> Callable[[], nn.Module]:
    """Return a function that builds the network, shaped for ``data``, if there are any.

    Raises:
        ConfigError: The network cannot take the data, or a factory cannot be imported or
            does not take its arguments.
    """
    model = config.model
    if isinstance(model, cf.PythonModel):
        make = user_call("model.factory", model.factory, model.args)
        return partial(_user_model, model.factory, make)
    assert data is not None  # the configuration requires a model of the user's without data
    _require_float_features(model, data.test)
    shape, num_outputs = data.feature_shape, _num_outputs(config.loss, data.test)
    match model:
        case cf.MlpModel():
            return models.Mlp(feature_shape=shape, hidden=model.hidden, num_outputs=num_outputs)
        case cf.LogisticModel():
            return models.Logistic(feature_shape=shape, num_outputs=num_outputs)
        case cf.CnnModel():
            return models.Cnn(feature_shape=shape, num_outputs=num_outputs)


def _user_model(factory: str, make: Callable[[], object]) -> nn.Module:
    made = make()
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model.factory: {factory} returned {type(made).__name__}, not a torch module"
        )
    return made


def _require_float_features(model: cf.Model, test: sources.Examples) -> None:
    if not test.features.is_floating_point():
        raise ConfigError(
            f'model.kind: "{model.kind}" computes with floats, but the features are '
            f"{test.features.dtype}; make them floats, or bring a model that takes integers "
            '(model.kind = "python")'
        )


def _num_outputs(loss: cf.Loss, test: sources.Examples) -> int:
    """Return how many outputs a network has an example."""
    values = test.labels.shape[1:].numel()
    if loss.kind in ("bce_with_logits", "mse") or test.num_classes is None:
        return values
    if values > 1:
        raise ConfigError(
            f"model.kind: the networks that come with fedlearn classify an example as a whole, "
            f"but its labels have shape {list(test.labels.shape[1:])}; bring a model of your own "
            '(model.kind = "python")'
        )
    return test.num_classes


def _require_fitting(loss: cf.Loss, test: sources.Examples) -> None:
    """Refuse a loss that these labels have no meaning for."""
    if loss.kind == "cross_entropy" and test.num_classes is None:
        raise ConfigError(
            f'loss.kind: "cross_entropy" needs classes, but the labels are {test.labels.dtype}; '
            'make them integers, or use "mse"'
        )
    if loss.kind == "bce_with_logits":
        _require_binary(test)


def _require_binary(test: sources.Examples) -> None:
    low, high = (float(extreme) for extreme in test.labels.aminmax())
    largest = high if test.num_classes is None else test.num_classes - 1  # in training too
    if test.labels.shape[1:].numel() != 1 or low < 0 or largest > 1:
        raise ConfigError(
            'loss.kind: "bce_with_logits" needs one label an example in 0..1, but labels have '
            f"shape {list(test.labels.shape[1:])} and lie in {low:g}..{largest:g}; "
            'use "cross_entropy" for classes or "mse" for numbers'
        )


def measures_accuracy(objective: Objective) -> bool:
    """Return whether an objective's metrics include the accuracy."""
    return isinstance(objective, CrossEntropy | BinaryCrossEntropy)


def _require_watched(stopping: cf.EarlyStoppingSection, objective: Objective) -> None:
    stops = stopping.patience_rounds is not None or stopping.target is not None
    by_accuracy = measures_accuracy(objective) and stopping.metric != "loss"
    if by_accuracy and stopping.target is not None and stopping.target > 1.0:
        raise ConfigError(
            f"early_stopping.target is {stopping.target}, but an accuracy is at most 1; give a "
            "fraction such as 0.95"
        )
    if stops and stopping.metric == "accuracy" and not measures_accuracy(objective):
        raise ConfigError(
            f'early_stopping.metric is "accuracy", but {type(objective).__name__} measures none; '
            'set it to "loss"'
        )


def objective(loss: cf.Loss) -> Objective:
    """Return what is minimised.

    Raises:
        ConfigError: A factory cannot be imported, does not take its arguments, or does not
            return a function.
    """
    match loss:
        case cf.PythonLoss():
            return CustomLoss(_user_loss(loss))
        case cf.StandardLoss(kind="cross_entropy"):
            return CrossEntropy()
        case cf.StandardLoss(kind="bce_with_logits"):
            return BinaryCrossEntropy()
        case cf.StandardLoss():
            return MeanSquaredError()


def _user_loss(loss: cf.PythonLoss) -> Callable[[Tensor, Tensor], Tensor]:
    made = user_call("loss.factory", loss.factory, loss.args)()
    if not callable(made):
        raise ConfigError(
            f"loss.factory: {loss.factory} returned {type(made).__name__}; it must return a "
            "function from outputs and labels to one loss an example"
        )
    function: Callable[[Tensor, Tensor], Tensor] = made
    return function


def algorithm(config: cf.Config) -> recipes.Algorithm:
    """Return the algorithm with its local update.

    Raises:
        ConfigError: FedSGD is to take more than a plain gradient step.
    """
    client, named = config.client, config.algorithm
    if isinstance(named, cf.FedSgdAlgorithm):
        return _fed_sgd(client, named)
    local = LocalSgd(
        epochs=client.epochs,
        batch_size=None if client.batch_size == "all" else client.batch_size,
        learning_rate=client.learning_rate,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        shuffle=client.shuffle,
        keep_momentum=client.keep_momentum,
    )
    recipe: Mapping[str, Callable[..., recipes.Algorithm]] = {
        "fedavg": recipes.FedAvg,
        "fedprox": recipes.FedProx,
        "fedavgm": recipes.FedAvgM,
        "fedadagrad": recipes.FedAdagrad,
        "fedadam": recipes.FedAdam,
        "fedyogi": recipes.FedYogi,
    }
    return recipe[named.name](local, **named.model_dump(exclude={"name"}))


def _fed_sgd(client: cf.ClientSection, named: cf.FedSgdAlgorithm) -> recipes.Algorithm:
    # The configuration makes sure of one epoch and full batches, where the order is nothing.
    for name in ("momentum", "weight_decay"):
        if getattr(client, name):
            raise ConfigError(
                f"client.{name} is {getattr(client, name)}, but FedSGD takes one plain gradient "
                'step; set it to 0, or use "fedavg" with client.epochs = 1 and '
                'client.batch_size = "all"'
            )
    return recipes.FedSGD(
        learning_rate=client.learning_rate, weight_by_examples=named.weight_by_examples
    )


def sampler(cohort: cf.Cohort) -> CohortSampler:
    """Return who chooses the cohorts."""
    match cohort:
        case cf.PoissonCohort():
            return PoissonSampler(cap=cohort.cap)
        case cf.UniformCohort():
            return UniformSampler()


def behaviour(section: cf.Devices, *, data_dir: Path) -> devices.ClientBehaviour:
    """Return what the simulated devices do.

    Raises:
        DataError: Bandwidth traces are missing or damaged.
    """
    match section:
        case cf.IdealDevices():
            return devices.Instant()
        case cf.LognormalDevices():
            return devices.Behaviour(
                speed=devices.LognormalSpeed(
                    median_ms_per_example=section.median_ms_per_example,
                    sigma=section.speed_sigma,
                ),
                bandwidth=_bandwidth(section.bandwidth, data_dir),
                dropout=devices.Dropout(rate=section.dropout_rate),
                round_jitter_sigma=section.round_jitter_sigma,
            )


def _bandwidth(section: cf.Bandwidth, data_dir: Path) -> devices.Bandwidth:
    match section:
        case cf.TracesBandwidth():
            default = data_dir / "bandwidth_traces.npz"
            return sources.bandwidth_traces(default if section.path is None else Path(section.path))
        case cf.LognormalBandwidth():
            return devices.LognormalBandwidth(
                median_mbit_per_s=section.median_mbit_per_s, sigma=section.sigma
            )


def user_call(
    key: str, factory: str, args: Mapping[str, object]
) -> Callable[[], Any]:  # Any: the user's own function
    """Return the call of a function that the configuration names; it is not called yet.

    What the function raises when it is called is the user's own and stays as it is.

    Args:
        key: Where the configuration names it.
        factory: ``module:function`` or ``/path/to/file.py:function``.
        args: Its keyword arguments.

    Raises:
        ConfigError: It cannot be imported, there is no such function, or it does not take
            the arguments.
    """
    place, _, name = factory.rpartition(":")
    try:
        module = (
            _file_module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{key}: {factory} cannot be imported: {error}; install the module, or name its file "
            f"as path/to/file.py:{name}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: there is no function {name} in {place}; correct the name")
    _require_arguments(function, args, where=f"{key}: {factory}")
    return partial(function, **args)


def _require_arguments(
    function: Callable[..., object], args: Mapping[str, object], *, where: str
) -> None:
    try:
        inspect.signature(function).bind(**args)
    except ValueError:  # functions written in C need not tell what they take
        return
    except TypeError as error:
        raise ConfigError(
            f"{where} does not take the arguments {sorted(args)}: {error}; correct args"
        ) from error


def _file_module(path: Path) -> ModuleType:
    """Import a file, once in a process as any module."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    name = f"{path.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a name that ends in .py is a Python file's
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as import does
        raise
    return module
