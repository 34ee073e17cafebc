"""From a configuration to objects: the only registry of names."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedlearn import config as cf
from fedlearn.algorithms import recipes
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
from fedlearn.errors import ConfigError, DataError
from fedlearn.simulation import behaviour as devices
from fedlearn.simulation import models, sources
from fedlearn.simulation.federated_data import FederatedData, partitioned
from fedlearn.simulation.parquet import Columns, ParquetPopulation, read_parquet
from fedlearn.simulation.partition import ByIds, Dirichlet, Iid, Partitioner, Shards
from fedlearn.simulation.population import BootstrapPopulation, PooledPopulation

#: Most bytes of decoded Parquet row groups to keep in memory.
_PARQUET_CACHE_BYTES = 256 << 20


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
    return around(
        config,
        make_model=model_factory(config.model, data),
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
        ConfigError: More clients are asked in a round than there are.
        DataError: Bandwidth traces are missing.
    """
    if config.centralized:
        return _pooled(config, make_model, objective, data, algorithm)
    policy, population = config.straggler_policy(), data.population.num_clients
    if policy.num_asked > population:
        raise ConfigError(
            f"cohort.num_wanted: {policy.num_asked} clients are asked in a round, but the data "
            f"have {population}; lower cohort.num_wanted or stragglers.over_selection"
        )
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
    """Return the clients and the test set that ``config.data`` names."""
    seed, data = Seed(config.seed).derive("data"), config.data
    match data:
        case cf.DigitsData():
            return _divided(sources.digits(test_fraction=data.test_fraction, seed=seed), data, seed)
        case cf.MnistByWriterData():
            folder = data_dir if data.path is None else Path(data.path).parent
            examples = sources.mnist_by_writer(folder, flat=False)
            return partitioned(examples, _by_groups(examples), seed=seed)
        case cf.NpzData():
            return _divided(_npz(data, seed), data, seed)
        case cf.ParquetData():
            return _parquet(data)
        case cf.PythonData():
            made = call(data.factory, data.args)
            if isinstance(made, FederatedData):
                return made
            if isinstance(made, sources.TrainTest):
                return _divided(made, data, seed)
            raise ConfigError(
                f"data.factory: {data.factory} returned {type(made).__name__}; it must return "
                "FederatedData or TrainTest"
            )


def _divided(
    examples: sources.TrainTest,
    data: cf.DigitsData | cf.NpzData | cf.PythonData,
    seed: Seed,
) -> FederatedData:
    division, seed = data.partition, seed.derive("partition")
    match division:
        case cf.IidPartition():
            partition: Partitioner = Iid(num_clients=division.num_clients)
        case cf.DirichletPartition():
            partition = Dirichlet(
                num_clients=division.num_clients,
                alpha=division.alpha,
                min_examples=division.min_examples,
            )
        case cf.ShardsPartition():
            partition = Shards(
                num_clients=division.num_clients, shards_per_client=division.shards_per_client
            )
        case cf.NaturalPartition():
            partition = _by_groups(examples)
        case cf.BootstrapPartition():
            population = BootstrapPopulation(
                features=examples.train.features,
                labels=examples.train.labels,
                num_classes=examples.train.num_classes,
                num_clients=division.num_clients,
                examples_per_client=division.examples_per_client,
                seed=seed,
            )
            return FederatedData(population=population, test=examples.test)
    return partitioned(examples, partition, seed=seed)


def _by_groups(examples: sources.TrainTest) -> ByIds:
    if examples.train.groups is None:
        raise DataError(
            "data.partition.kind is natural, but the examples do not say whose they are; "
            "give them groups, or take another partition"
        )
    return ByIds(examples.train.groups)


def _npz(data: cf.NpzData, seed: Seed) -> sources.TrainTest:
    path = Path(data.path)
    labels = sources.read_npz(path, names=[data.labels])[data.labels]
    num_classes = None if labels.dtype.kind == "f" else int(labels.max(initial=0)) + 1
    read = partial(
        sources.npz, path, mask=None, feature_shape=None, scale=1.0, num_classes=num_classes
    )
    train = read(features=data.features, labels=data.labels, groups=data.groups)
    if data.test_features is not None and data.test_labels is not None:
        test = read(features=data.test_features, labels=data.test_labels, groups=None)
        return sources.TrainTest(train=train, test=test)
    assert data.test_fraction is not None  # the configuration requires one kind of test set
    return train.split(fraction=data.test_fraction, seed=seed)


def _parquet(data: cf.ParquetData) -> FederatedData:
    if data.client_column is None:
        raise ConfigError(
            "data.client_column: Parquet files are streamed by client; name the column that "
            "says whose a row is"
        )
    columns = Columns.of_file(
        Path(data.path),
        client=data.client_column,
        label=data.label_column,
        features=None if data.feature_columns == "all" else data.feature_columns,
    )
    test = read_parquet(Path(data.test_path), columns=columns)
    population = ParquetPopulation(
        Path(data.path),
        columns=columns,
        num_classes=test.num_classes,
        cache_bytes=_PARQUET_CACHE_BYTES,
    )
    return FederatedData(population=population, test=test)


def model_factory(model: cf.Model, data: FederatedData) -> Callable[[], nn.Module]:
    """Return a function that builds the network, shaped for ``data``."""
    shape, num_outputs = data.feature_shape, data.test.num_classes or 1
    match model:
        case cf.MlpModel():
            return partial(models.mlp, shape, hidden=model.hidden, num_outputs=num_outputs)
        case cf.LogisticModel():
            return partial(models.logistic, shape, num_outputs=num_outputs)
        case cf.CnnModel():
            return partial(models.cnn, shape, num_outputs=num_outputs)
        case cf.PythonModel():
            return partial(_user_model, model)


def _user_model(model: cf.PythonModel) -> nn.Module:
    made = call(model.factory, model.args)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model.factory: {model.factory} returned {type(made).__name__}, not a torch module"
        )
    return made


def objective(loss: cf.Loss) -> Objective:
    """Return what is minimised."""
    match loss:
        case cf.PythonLoss():
            return CustomLoss(call(loss.factory, loss.args))
        case cf.StandardLoss(kind="cross_entropy"):
            return CrossEntropy()
        case cf.StandardLoss(kind="bce_with_logits"):
            return BinaryCrossEntropy()
        case cf.StandardLoss():
            return MeanSquaredError()


def algorithm(config: cf.Config) -> recipes.Algorithm:
    """Return the algorithm with its local update."""
    client, named = config.client, config.algorithm
    local = LocalSgd(
        epochs=client.epochs,
        batch_size=None if client.batch_size == "all" else client.batch_size,
        learning_rate=client.learning_rate,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        shuffle=client.shuffle,
        keep_momentum=client.keep_momentum,
    )
    fields = named.model_dump(exclude={"name"})
    recipe: Mapping[str, Callable[..., recipes.Algorithm]] = {
        "fedavg": recipes.FedAvg,
        "fedsgd": recipes.FedAvg,  # the configuration makes sure of E = 1 and full batches
        "fedprox": recipes.FedProx,
        "fedavgm": recipes.FedAvgM,
        "fedadagrad": recipes.FedAdagrad,
        "fedadam": recipes.FedAdam,
        "fedyogi": recipes.FedYogi,
    }
    return recipe[named.name](local, **fields)


def sampler(cohort: cf.Cohort) -> CohortSampler:
    """Return who chooses the cohorts."""
    match cohort:
        case cf.PoissonCohort():
            return PoissonSampler(cap=cohort.cap)
        case cf.UniformCohort():
            return UniformSampler()


def behaviour(section: cf.Devices, *, data_dir: Path) -> devices.ClientBehaviour:
    """Return what the simulated devices do."""
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
            folder = data_dir if section.path is None else Path(section.path).parent
            return sources.bandwidth_traces(folder)
        case cf.LognormalBandwidth():
            return devices.LognormalBandwidth(
                median_mbit_per_s=section.median_mbit_per_s, sigma=section.sigma
            )


def call(factory: str, args: Mapping[str, object]) -> Any:  # Any: the user's own function
    """Return what a function named in a configuration returns.

    Args:
        factory: ``module:function`` or ``path/to/file.py:function``.
        args: Its keyword arguments.

    Raises:
        ConfigError: It cannot be imported, there is no such function, or it does not take
            the arguments.
    """
    place, _, name = factory.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
        function = getattr(module, name)
    except (ImportError, OSError, SyntaxError, AttributeError) as error:
        raise ConfigError(f"{factory}: cannot be imported: {error}") from error
    try:
        return function(**args)
    except TypeError as error:
        raise ConfigError(f"{factory}: called with {sorted(args)}: {error}") from error


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
