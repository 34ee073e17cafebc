"""Builds the coordinator's own training task, and picks the examples it trains on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.assembly.components import ALONE, Components
from fedlearn.assembly.training import build_training
from fedlearn.config.data import NoDataSection
from fedlearn.config.tree import Config
from fedlearn.core.features import list_tensors
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Task
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.pooled import PooledExamples, set_aside
from fedlearn.simulation.population import Population
from fedlearn.training.input_dtypes import InputCast
from fedlearn.training.keyed_dropout import preserve_generator


def build_server_task(components: Components) -> Task:
    """Build the coordinator's own training task.

    Raises:
        ConfigError: It does not train, or batches cannot be cut as configured.
    """
    section, seed = (
        components.config.coordinator.training,
        components.seed.derive("server training"),
    )
    order = seed.derive("order")
    if section.files:
        stream = section.stream(order)
    else:
        assert components.own is not None  # there is a task only if the coordinator trains
        examples = PooledExamples(components.own, torch.device("cpu"), _input_dtypes(components))
        stream = Shuffled(examples, seed=order)
    return Task(
        make_model=components.make_model,
        objective=components.objective,
        stream=stream,
        plan=section.plan(seed),
        num_readers=section.num_readers,
    )


def _input_dtypes(components: Components) -> Sequence[torch.dtype] | None:
    """Return the dtypes to which the coordinator's own examples are cast for the model.

    ``None``: they need no cast.
    """
    assert components.own is not None  # as above
    # All clients have the same dtypes, so one is enough.
    features = components.own.load(np.zeros(1, np.int64)).features
    if all(each.dtype in (torch.float32, torch.bool) for each in list_tensors(features)):
        return None
    with preserve_generator(torch.default_generator):
        model = components.make_model()
    return InputCast(model, Layout.of(model)).dtypes(features)


def build_standalone(config: Config, *, data_dir: Path) -> Components:
    """Build the components for the coordinator's own training outside a run, without clients.

    Args:
        config: The resolved configuration; the settings of rounds and clients are ignored.
        data_dir: Directory of data sets that the configuration names without a path.

    Raises:
        ConfigError: There are no data, or the components do not fit together.
        DataError: Data are missing or cannot be trained on.
    """
    has_data = not isinstance(config.data, NoDataSection)
    data = config.data.load_clients(seed=config.seed, data_dir=data_dir) if has_data else None
    return Components(
        **build_training(config, data),
        test=None if data is None else data.stored_test,
        sampler=UniformSampler(),
        policy=ALONE,
        config=config,
        own=find_own_population(config, data, is_needed=True),
    )


def find_own_population(
    config: Config, data: FederatedData | None, *, is_needed: bool = False
) -> Population | None:
    """Return the clients whose examples the coordinator has, where it simulates no clients."""
    section = config.coordinator.training
    if section.files or not (section.is_on or is_needed):
        return None
    if data is None:
        raise ConfigError(
            'the coordinator trains by itself (coordinator.training), but data.source is "none"; '
            "name its data in the table data, or in coordinator.training.files"
        )
    own, _ = set_aside(data.population, share=section.share, seed=_set_aside_seed(config))
    return own


def split_data(config: Config, data: FederatedData) -> tuple[FederatedData, Population]:
    """Split the data into the clients to simulate and those whose examples the coordinator has."""
    section = config.coordinator.training
    seed, tests = _set_aside_seed(config), data.client_tests
    aside, others = set_aside(data.population, share=section.share, seed=seed)
    if tests is not None:
        _, tests = set_aside(tests, share=section.share, seed=seed)
    if not others.num_clients:
        raise ConfigError(
            f"coordinator.training.share is {section.share}, which leaves none of "
            f"{data.population.num_clients} clients to simulate; lower it (0.02, say), or name "
            "the coordinator's own data in coordinator.training.files"
        )
    return replace(data, test=data.stored_test, population=others, client_tests=tests), aside


def _set_aside_seed(config: Config) -> Seed:
    return Seed(config.seed).derive("set aside")
