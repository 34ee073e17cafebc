"""Two simulations or trainers in threads of one process give the results of each one alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

LOCAL = fl.LocalSgd(epochs=4, batch_size=4, learning_rate=0.1)


class Noisy(nn.Module):
    """Draws from torch's global generator in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = F.dropout(self.layer(rows), 0.5, self.training)
        found: Tensor = self.out(F.rrelu(hidden, training=self.training))
        return found + 0.1 * torch.randn_like(found) if self.training else found


def both(work: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the results of two threads that start together."""
    barrier = Barrier(2)

    def begin(seed: int) -> dict[str, Tensor]:
        barrier.wait()
        return work(seed)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(begin, range(2)))


def require_equal(found: list[dict[str, Tensor]], alone: list[dict[str, Tensor]]) -> None:
    for own, want in zip(found, alone, strict=True):
        assert all(torch.equal(own[name], value) for name, value in want.items())


@pytest.mark.slow
def test_simulations_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 5))
    data = fl.from_arrays(
        x, (x[:, 0] > 0).astype(int), partition=fl.Iid(4), test_fraction=0.2, seed=0
    )

    def simulated(seed: int) -> dict[str, Tensor]:
        run = fl.simulate(
            Noisy, data, fl.FedAvg(LOCAL), num_rounds=2, seed=seed, engine={"num_workers": 1}
        )
        return run.weights(best=False)

    require_equal(both(simulated), [simulated(seed) for seed in range(2)])
    assert torch.get_num_threads() == 1, "as it was"


def test_trainers_in_threads() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    begin = {name: torch.full_like(t, 0.1) for name, t in Noisy().state_dict().items()}

    def trained(seed: int) -> dict[str, Tensor]:
        trainer = TorchTrainer.of(Noisy, x, (x[:, 0] > 0).long())
        context = TrainContext(
            client_id=ClientId(0),
            round_num=0,
            settings=settings_of(LOCAL),
            extra={},
            seed=Seed(seed),
            state={},
            broadcast={},
        )
        return dict(trainer.train(begin, context=context).tensors)

    alone = [trained(seed) for seed in range(2)]
    for _ in range(3):
        require_equal(both(trained), alone)
