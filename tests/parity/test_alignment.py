"""Batches start at a multiple of 64 bytes in memory, in the engine as in a session.

The bits of a matrix product can depend on that, unless MKL is in its reproducible mode. `.ci/run`
also runs this file, and others of this folder, without that mode.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CustomLoss
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.executors.base import LocalTask, Work
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.local_data import DatasetData, LocalData, TensorData
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

CPU = torch.device("cpu")
LINE_BYTES = 64
#: 20 bytes per example, and an odd number of epochs: 16 sizes of the client that trains before
#: cover all 16 offsets within a line at which a batch of floats can start.
FEATURES, NUM_CLASSES = 5, 3
OWN = 7
LOCAL = LocalSgd(epochs=5, batch_size=32, learning_rate=0.1)
SEED, ROUND = Seed(0), 2


@dataclass
class Places:
    """Records where a model's batches are in memory, in bytes after the start of a line.

    Attributes:
        found: Offsets of the features and labels of every step, and of the parameters' vector.
    """

    found: list[int] = field(default_factory=list)

    def note(self, value: Tensor) -> None:
        """Record the offset of a tensor."""
        self.found.append(value.data_ptr() % LINE_BYTES)

    def model(self) -> ResidentModel:
        """Build a model that records every batch."""
        network = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))
        network.register_forward_pre_hook(lambda _, inputs: self.note(inputs[0]))
        model = ResidentModel(
            lambda: network, CustomLoss(self._losses), device=CPU, precision=Precision.FLOAT32
        )
        self.note(model.vector_P)
        return model

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # only in a step: the objective is tried before the first one
            self.note(labels)
        return nn.functional.cross_entropy(outputs, labels, reduction="none")


def weights() -> Params:
    torch.manual_seed(0)
    return Params.of(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES)))


def examples(num_before: int) -> tuple[Tensor, Tensor]:
    """Return the examples of a client with ``num_before`` of them, followed by those of ours."""
    torch.manual_seed(1)
    own = torch.randn(OWN, FEATURES), torch.randint(0, NUM_CLASSES, (OWN,))
    before = torch.randn(num_before, FEATURES), torch.randint(0, NUM_CLASSES, (num_before,))
    return torch.cat([before[0], own[0]]), torch.cat([before[1], own[1]])


def in_the_engine(num_before: int, places: Places) -> Tensor:
    """Return our client's delta if another one with ``num_before`` examples trains before it."""
    features, labels = examples(num_before)
    partition = Partition(np.arange(len(labels)), np.array([0, num_before, len(labels)]))
    population = ArrayPopulation(
        features=features, labels=labels, partition=partition, num_classes=NUM_CLASSES
    )
    task = LocalTask(params=weights(), local=LOCAL, broadcast={}, round_num=ROUND, seed=SEED)
    work = Work.of(task, population.load(np.arange(2)), np.arange(2), client_state={})
    return SequentialExecutor(places.model()).train(work).deltas_KP[1].clone()


def in_a_session(data: LocalData, places: Places) -> Tensor:
    """Return our client's delta if it trains alone."""
    params = weights()
    views = params.layout.views(params.vector)
    context = TrainContext(
        client_id=ClientId(1), round_num=ROUND, settings=settings_of(LOCAL), seed=SEED, state={}
    )
    trained = TorchTrainer(places.model(), data).train(views, context=context)
    return torch.cat([(trained.tensors[name] - views[name]).flatten() for name in views])


def session_data(kind: str) -> LocalData:
    """Return our client's examples, as views that do not start at a line."""
    features, labels = (each[1:] for each in examples(1))
    assert features.data_ptr() % LINE_BYTES, "the control: what the batches are cut from"
    if kind == "tensors":
        return TensorData(features, labels, device=CPU)
    return DatasetData(TensorDataset(features, labels), device=CPU)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_what_trained_before_changes_no_bit_of_a_clients_update(kind: str) -> None:
    """At each of the 16 offsets at which its batch would start, if it were a view of one tensor."""
    expected = in_a_session(session_data(kind), Places())
    for num_before in range(OWN, OWN + 16):
        assert torch.equal(in_the_engine(num_before, Places()), expected), num_before


def test_batches_and_parameters_begin_at_a_line_of_64_bytes() -> None:
    """In the engine, and in a session with either kind of data."""
    places = Places()
    in_the_engine(OWN + 3, places)
    in_a_session(session_data("tensors"), places)
    in_a_session(session_data("dataset"), places)
    num_steps = LOCAL.epochs * (2 + 1 + 1)
    assert places.found == [0] * (3 + 2 * num_steps)
