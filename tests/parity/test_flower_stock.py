"""With Flower's own records between the two sides, the model equals that of fedlearn's messages."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as StockFedAvg
from flwr.serverapp.strategy import FedProx as StockFedProx
from torch import nn

from fedlearn.algorithms.extra_settings import WithExtra
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.recipes import FedAdam, FedAvg, FedProx
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Strategy
from fedlearn.client.flower import client_app
from fedlearn.client.policy import Policy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.plain import PlainCollector
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext
from fedlearn.transport.flower import StockChannel, StockRecords
from tests.grid import LocalGrid, StockGrid
from tests.parity.test_flower import (
    LOCAL,
    NUM_ROUNDS,
    OBJECTIVE,
    POLICY,
    SIZES,
    MortalGrid,
    in_memory,
    make_model,
    population,
    run,
)

#: Seed for both sides; the app of another project gets it in its config.
SEED = 5


def make_client_trainer(client_id: int, make: Callable[[], nn.Module] = make_model) -> TorchTrainer:
    rows = population().load(np.asarray([client_id]))
    index = torch.from_numpy(rows.rows)
    features, labels = require_single_input(rows.features)[index], rows.labels[index]
    return TorchTrainer.of(make, features, labels, objective=OBJECTIVE, device="cpu")


def foreign_app(local: LocalUpdate, make: Callable[[], nn.Module] = make_model) -> ClientApp:
    """Create an app that follows the convention of Flower's strategies, with our training."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client_id = int(context.node_config["partition-id"])
        config = message.content.config_records["config"]
        round_num, seed = config["server-round"], config["seed"]
        assert isinstance(round_num, int)
        assert isinstance(seed, int)
        result = make_client_trainer(client_id, make).train(
            message.content.array_records["arrays"].to_torch_state_dict(),
            context=TrainContext(
                client_id=ClientId(client_id),
                round_num=round_num - 1,
                settings=settings_of(local),
                seed=Seed(seed),
                state={},
            ),
        )
        metrics = MetricRecord({"num-examples": result.num_examples})
        arrays = ArrayRecord(dict(result.tensors))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


class SpreadGrid(MortalGrid):
    """Nodes that take as long as their devices."""

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        _, reply = LocalGrid.answered(self, client, message)
        round_num = message.content.config_records["config"]["server-round"]
        assert isinstance(round_num, int)
        return self._latency_s(client, round_num - 1), reply


def over_foreign_apps(
    local: LocalUpdate, make: Callable[[], nn.Module] = make_model
) -> PlainCollector:
    """Create a collector of nodes whose ids are the numbers of their parts."""
    nodes = {client: client for client in range(len(SIZES))}
    grid = SpreadGrid(VirtualClock(), foreign_app(local, make), nodes=nodes)
    channel = StockChannel(
        grid=grid,
        clock=grid.clock,
        patience_s=60.0,
        start=lambda work: work(),
        records=StockRecords.of(make(), evaluate_config={}),
    )
    return PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)


ADAPTIVE = partial(FedAdam, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)


@pytest.mark.parametrize("recipe", [FedAvg, ADAPTIVE], ids=["fedavg", "fedadam"])
def test_an_app_of_flowers_gives_the_same_model_bit_for_bit(
    recipe: "partial[Strategy]",
) -> None:
    """As a fedlearn client with the same arithmetic and the same order of arrival."""
    local = replace(LOCAL, momentum=0.9)
    expected, order = run(recipe(local), in_memory(recipe(local)))
    found, found_order = run(
        WithExtra.around(recipe(OwnTraining()), {"seed": SEED}), over_foreign_apps(local)
    )
    assert found_order == order
    assert torch.equal(found.vector, expected.vector)


def frozen_model() -> nn.Module:
    """Build the usual network with a first layer that does not train."""
    module = make_model()
    next(each for each in module.modules() if isinstance(each, nn.Linear)).requires_grad_(False)
    return module


def test_an_app_of_flowers_leaves_frozen_layers_as_they_are() -> None:
    """By Flower's convention it gets the whole model, but its frozen layers are ignored."""
    local = replace(LOCAL, momentum=0.9)
    expected, _ = run(FedAvg(local), in_memory(FedAvg(local), frozen_model), make=frozen_model)
    algorithm = WithExtra.around(FedAvg(OwnTraining()), {"seed": SEED})
    found, _ = run(algorithm, over_foreign_apps(local, frozen_model), make=frozen_model)
    assert found.constants.keys() == expected.constants.keys() != set()
    assert torch.equal(found.vector, expected.vector)
    for name, value in expected.constants.items():
        assert torch.equal(found.constants[name], value)


def start() -> Params:
    """Return the model with which every run here begins."""
    torch.manual_seed(0)
    return Params.of(make_model())


def by_flower(strategy: StockFedAvg, local: LocalUpdate, **config: float) -> Params:
    """Return the model that one of Flower's strategies trains with our clients."""
    app = client_app(
        lambda node: make_client_trainer(node.client_id), policy_of=lambda _: Policy(), local=local
    )
    grid = StockGrid(VirtualClock(), app, nodes={10 + each: each for each in range(len(SIZES))})
    params = start()
    result = strategy.start(
        grid=cast("Grid", grid),  # it has all methods that a strategy uses
        initial_arrays=ArrayRecord(params.to_tensors()),
        num_rounds=NUM_ROUNDS,
        train_config=ConfigRecord({"seed": SEED, **config}),
    )
    for number in range(1, NUM_ROUNDS + 1):
        assert {"accuracy", "loss"} <= result.evaluate_metrics_clientapp[number].keys()
    return params.with_vector(params.layout.pack(result.arrays.to_torch_state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stock", "ours", "config"),
    [
        (StockFedAvg(), FedAvg(LOCAL), {}),
        (StockFedAvg(), FedAvg(replace(LOCAL, learning_rate=0.02)), {"lr": 0.02}),
        (
            StockFedAvg(),
            FedAvg(replace(LOCAL, epochs=1, batch_size=2)),
            {"local-epochs": 1, "batch-size": 2},
        ),
        (StockFedProx(proximal_mu=0.5), FedProx(LOCAL, proximal=0.5), {}),
        (
            StockFedAvg(),
            FedAvg(replace(LOCAL, momentum=0.9, keep_momentum=True)),
            {"momentum": 0.9, "keep-momentum": True},
        ),
    ],
    ids=["fedavg", "rate of the config", "work of the config", "fedprox", "kept momentum"],
)
def test_a_strategy_of_flowers_gives_the_same_model_but_for_rounding(
    stock: StockFedAvg, ours: Strategy, config: dict[str, float]
) -> None:
    """One averages models, the other adds the mean of their differences."""
    everybody = replace(POLICY, num_wanted=len(SIZES))
    collector = replace(in_memory(ours), policy=everybody)
    expected, _ = run(ours, collector, policy=everybody)
    found = by_flower(stock, LOCAL, **config)
    largest = float((found.vector - expected.vector).abs().max())
    assert largest < 1e-6
    moved = float((expected.vector - start().vector).abs().max())
    assert moved > 0.01  # the control: the models have moved
