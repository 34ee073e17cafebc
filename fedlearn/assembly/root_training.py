"""Lets the coordinator train on root examples, if the aggregation rule compares with them."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import RootData, find_root_data
from fedlearn.algorithms.fltrust import RootTraining
from fedlearn.algorithms.local import iter_updates
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.settings import own_classes
from fedlearn.assembly.components import Components, ComponentsT
from fedlearn.core.features import Features, map_inputs
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.pooled import PooledExamples
from fedlearn.simulation.population import Population
from fedlearn.simulation.sessions import trainers_on
from fedlearn.simulation.sources import tensor_of
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.root_trainer import RootTrainer
from fedlearn.training.trainer import LocalTrainer


def add_root_training(
    components: ComponentsT,
    population: Population | None,
    *,
    make_trainer: MakeTrainer | None = None,
) -> ComponentsT:
    """Add the coordinator's training on root examples, if the aggregation rule needs it.

    Args:
        components: The components of the run.
        population: Clean training examples to draw from; ``None``: the coordinator has none.
        make_trainer: Makes a trainer from features and labels; ``None``: fedlearn's own.

    Raises:
        ConfigError: There are too few examples, or the coordinator cannot train as clients do.
    """
    data = find_root_data(components.algorithm.aggregation)
    if data is None:
        return components
    rule = type(components.algorithm.aggregation).__name__
    if components.algorithm.keep_local:
        raise ConfigError(
            f"{rule} compares clients with the coordinator's own training, but keep_local is "
            f"{list(components.algorithm.keep_local)}, parts that the coordinator does not have; "
            "leave keep_local out, or choose another rule"
        )
    is_own = any(isinstance(each, OwnTraining) for each in iter_updates(components.algorithm.local))
    if is_own and make_trainer is None:
        raise ConfigError(
            f"{rule} lets the coordinator train as clients do, but client.optimizer is "
            '"own", which only the clients know; give another client.optimizer, or choose another '
            "rule"
        )
    features, labels = _load_root_examples(data, population, seed=components.seed, rule=rule)

    @cache
    def trainer_on(device: torch.device) -> LocalTrainer:
        make = make_trainer or _make_trainers(components, device)
        return make(features, labels)

    seed = components.seed.derive("root training")
    train = RootTrainer(trainer_on, seed, components.by_round)
    return replace(components, algorithm=RootTraining(components.algorithm, train))


def _make_trainers(components: Components, device: torch.device) -> MakeTrainer:
    with preserve_generator(torch.default_generator):
        model = ResidentModel(
            components.make_model, components.objective, device=device, precision=Precision.FLOAT32
        )
    return trainers_on(model, local_updates=own_classes([components.algorithm.local]))


def _load_root_examples(
    data: RootData, population: Population | None, *, seed: Seed, rule: str
) -> tuple[Features, Tensor]:
    """Return the given examples, or draw some from the population."""
    if not isinstance(data, int):
        features, labels = data
        as_tensor = partial(tensor_of, what="the root examples")
        return map_inputs(as_tensor, features), as_tensor(labels)
    if population is None:
        raise ConfigError(
            f'{rule} trains on examples of the coordinator, but data.source is "none"; name its '
            "data in the table data, or give a function in aggregation.root"
        )
    pooled = PooledExamples(population, torch.device("cpu"))
    if data > len(pooled):
        raise ConfigError(
            f"aggregation.num_root_examples is {data}, but the data have {len(pooled)} training "
            "examples; lower it"
        )
    drawn = seed.derive("root examples").numpy().choice(len(pooled), data, replace=False)
    return pooled.batch(np.sort(drawn), key=0)
