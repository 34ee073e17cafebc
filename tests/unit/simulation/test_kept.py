"""What simulated clients keep between their rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.core.params import Params
from fedlearn.simulation.cluster import Alone
from fedlearn.simulation.kept import KeptVelocities

ResultT = TypeVar("ResultT")
PARAMS = Params.of(nn.Linear(2, 1))
KEEPING = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1, momentum=0.9, keep_momentum=True)
FORGETTING = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1, momentum=0.9)


def kept() -> KeptVelocities:
    velocities = KeptVelocities()
    velocities.keep(np.array([7, 2]), torch.arange(6.0).view(2, 3), rows=np.ones(2, np.bool_))
    return velocities


def test_a_client_gets_back_what_it_kept() -> None:
    """In the order asked, and zeros if it has never trained."""
    rows = kept().rows(np.array([2, 99, 7]), PARAMS, KEEPING)
    assert rows is not None
    assert rows.tolist() == [[3.0, 4.0, 5.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]


def test_nothing_is_kept_unless_the_rule_says_so() -> None:
    """Neither given out nor taken."""
    velocities = kept()
    assert velocities.rows(np.array([2]), PARAMS, FORGETTING) is None
    velocities.keep(np.array([5]), None, rows=np.ones(1, np.bool_))
    assert set(velocities.by_client) == {7, 2}


def test_what_is_kept_is_a_copy() -> None:
    """Executors reuse their memory."""
    velocities, rows = KeptVelocities(), torch.ones(1, 3)
    velocities.keep(np.array([0]), rows, rows=np.ones(1, np.bool_))
    rows.zero_()
    assert velocities.by_client[0].tolist() == [1.0, 1.0, 1.0]


def test_a_checkpoint_restores_everything_and_nothing_else() -> None:
    """Also in the order of before, so that a resumed run writes the same checkpoints."""
    velocities = kept()
    tensors = {name: tensor.clone() for name, tensor in velocities.tensors().items()}
    other = KeptVelocities()
    other.keep(np.array([1]), torch.ones(1, 3), rows=np.ones(1, np.bool_))
    other.restore(tensors)
    assert list(other.by_client) == [7, 2]
    assert all(torch.equal(other.tensors()[name], tensors[name]) for name in tensors)
    other.restore({})
    assert other.tensors() == {}


@dataclass(frozen=True)
class TwoWorkers:
    """The first of two workers, whose sums add what the other one has."""

    others: Tensor
    rank: int = 0
    world_size: int = 2

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(self.others)

    def broadcast(self, value: ResultT | None) -> ResultT:
        raise NotImplementedError


def test_workers_share_what_their_clients_kept() -> None:
    """Another worker may train the same client in a later round."""
    velocities = KeptVelocities()
    velocities.keep(np.array([4]), torch.full((1, 3), 2.0), rows=np.ones(1, np.bool_))
    others = torch.tensor([[0.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    cluster = TwoWorkers(others)
    velocities.share(np.array([4, 8]), PARAMS, cluster, mine=np.array([0]))
    assert velocities.by_client[4].tolist() == [2.0, 2.0, 2.0]
    assert velocities.by_client[8].tolist() == [5.0, 5.0, 5.0]


def test_a_worker_alone_has_nothing_to_share() -> None:
    """And sends nothing."""
    velocities = kept()
    velocities.share(np.array([7]), PARAMS, Alone(), mine=np.array([0]))
    assert set(velocities.by_client) == {7, 2}
