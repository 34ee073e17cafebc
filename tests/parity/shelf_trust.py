"""The case of the shelf in which the coordinator trains as well: FLTrust."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedlearn.algorithms.fltrust import FLTrust, RootTraining
from fedlearn.algorithms.local import batch_positions
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.simulation.sessions import trainers_on
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.root_trainer import RootTrainer
from fedlearn.training.trainer import LocalTrainer
from tests.parity.shelf import COHORTS, SEED, SGD, Case, examples, gradient, make_model, train

#: The root examples are those of this client, with some labels of its own.
ROOT = 1
NUM_ROOT = 10


def root_examples() -> tuple[Tensor, Tensor]:
    features, labels = examples(ROOT)
    return features[:NUM_ROOT], (labels[:NUM_ROOT] + 1) % 3


def trainer_on(device: torch.device) -> LocalTrainer:
    features, labels = root_examples()
    model = ResidentModel(make_model, CrossEntropy(), device=device, precision=Precision.FLOAT32)
    return trainers_on(model)(features.float(), labels)


def train_root(x: Tensor, round_num: int) -> Tensor:
    """The server's update: SGD as a client with the root examples."""
    features, labels = root_examples()
    orders = batch_positions(
        SGD, seed=SEED, round_num=round_num, client_id=-1, num_examples=NUM_ROOT
    )
    y = x
    for order in orders:
        rows = torch.from_numpy(order)
        y = y - SGD.learning_rate * gradient(y, features[rows], labels[rows])
    return y - x


def fltrust(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 2 of arXiv:2012.13995, with alpha = 1."""
    for round_num, cohort in enumerate(COHORTS):
        server = train_root(x, round_num)
        updates = [train(x, client, round_num)[0] - x for client in cohort]
        scores = [torch.relu(g.dot(server) / g.norm() / server.norm()) for g in updates]
        scaled = [
            score * server.norm() / g.norm() * g for score, g in zip(scores, updates, strict=True)
        ]
        x = x + torch.stack(scaled).sum(0) / torch.stack(scores).sum()
        yield x


CASES: Mapping[str, Case] = {
    "fltrust": Case(
        RootTraining(replace(FedAvg(SGD), aggregation=FLTrust()), RootTrainer(trainer_on, SEED)),
        fltrust,
        control=FedAvg(SGD, weight_by_examples=False),
        protected=None,
        refused="FLTrust .*(must see each update|would not hide one client)",
    ),
}
