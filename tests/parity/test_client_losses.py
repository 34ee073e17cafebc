"""A local update's own loss over several models is the same in every place, and right.

Shape legend: K clients; x is a list of tensors [K, ...].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    MODEL,
    ClientBatch,
    ClientModel,
    LocalSgd,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
)
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.core.features import require_single_input
from fedlearn.errors import EngineError, SettingsRefused
from fedlearn.simulation.choice import ExecutorKind, use_configured
from tests.parity import test_flower as flower
from tests.parity.test_further_gradients import (
    by_executor,
    by_trainers,
    require_equal,
    seeded,
)


@dataclass(frozen=True, kw_only=True)
class Distilled(LocalUpdateWrapper):
    """Adds a distance of outputs to the global model's, and of features to the kept model's.

    The second one couples the examples, and draws random numbers.
    """

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            **self.inner.memory,
            "before": MemorySpec(over=Over.TRAINABLE, is_kept=True),
            "noise": MemorySpec(over=1, is_kept=False, draws="normal"),
        }

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        outputs, inner = model.with_output_of("0", batch.features)
        theirs = model.at(broadcast[MODEL])(batch.features)
        _, before = model.at(memory["before"]).with_output_of("0", batch.features)
        far = (outputs - theirs).square().mean() + (inner.mean(0) - before.mean(0)).square().sum()
        weight = 0.5 + 0.1 * moment.step + 0.1 * memory["noise"][0][0]
        return batch.mean_loss(outputs) + weight * far

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        for before, value in zip(memory["before"], x, strict=True):
            before.copy_(value)
        return super().report(x, memory, broadcast=broadcast, moment=moment)


SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
LOCAL = Distilled(inner=replace(SGD, momentum=0.5))
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    ),
}


@pytest.mark.parametrize(
    "name",
    ["dropout", *(pytest.param(each, marks=pytest.mark.slow) for each in ("plain", "batch norm"))],
)
def test_a_loss_over_several_models_is_the_same_in_every_place(name: str) -> None:
    """One client after another, stacked, and deployed."""
    # In float64: BatchNorm with batches of two and three examples magnifies rounding.
    make = seeded(lambda: MODELS[name]().double())
    expected = by_executor(LOCAL, make, ExecutorKind.SEQUENTIAL)
    require_equal(by_executor(LOCAL, make, ExecutorKind.VMAP), expected)
    require_equal(by_trainers(LOCAL, make), expected)


@dataclass(frozen=True, kw_only=True)
class Pulled(LocalUpdateWrapper):
    """Adds the squared distance of the outputs to those of the global model."""

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        outputs = model(batch.features)
        far = (outputs - model.at(broadcast[MODEL])(batch.features)).square().mean()
        return batch.mean_loss(outputs) + 2.0 * far


@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
def test_a_loss_over_several_models_is_that_of_a_loop_by_hand(kind: ExecutorKind) -> None:
    """In float64, with autograd on plain modules."""
    make = seeded(lambda: MODELS["plain"]().double())
    work = flower.job(SGD, make).work(np.arange(6))
    features, deltas = require_single_input(work.features).double(), list[Tensor]()
    for client in np.argsort(work.client_ids).tolist():
        ours, theirs = make(), make()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for step in range(int((work.schedule.counts_TK[:, client] > 0).sum())):
            rows = work.schedule.rows_TKB[step, client, : work.schedule.counts_TK[step, client]]
            outputs, others = ours(features[rows]), theirs(features[rows]).detach()
            loss = F.cross_entropy(outputs, work.labels[rows])
            optimizer.zero_grad()
            (loss + 2.0 * (outputs - others).square().mean()).backward()
            optimizer.step()
        flat = nn.utils.parameters_to_vector
        deltas.append((flat(ours.parameters()) - flat(theirs.parameters())).detach())
    found = by_executor(Pulled(inner=SGD), make, kind)["delta"]
    torch.testing.assert_close(found, torch.stack(deltas), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [ExecutorKind.FUSED, ExecutorKind.COMPILED])
def test_executors_without_the_loss_refuse(kind: ExecutorKind) -> None:
    """They would minimize the objective alone, or a loss frozen at the first step."""
    job = flower.job(LOCAL, seeded(MODELS["plain"]))
    with pytest.raises(EngineError, match="has its own loss"):
        use_configured(job, kind)


def test_batches_in_parts_and_noised_gradients_are_refused() -> None:
    """The loss may couple the examples. Control: the same update with whole batches."""
    by_trainers(Pulled(inner=SGD), seeded(MODELS["plain"]))
    with pytest.raises(SettingsRefused, match="cut into 2 parts"):
        by_trainers(Pulled(inner=SGD), seeded(MODELS["plain"]), num_parts=2)
    with pytest.raises(ValueError, match="may couple the examples"):
        NoisedGradients(inner=LOCAL, example_clip_norm=1.0, example_noise_multiplier=1.0)


@dataclass(frozen=True, kw_only=True)
class PerExample(Pulled):
    """Returns one loss per example, by mistake."""

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        return model(batch.features).square().sum(1)


@dataclass(frozen=True, kw_only=True)
class Misnamed(Pulled):
    """Asks for a layer that does not exist."""

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        outputs, _ = model.with_output_of("body", batch.features)
        return batch.mean_loss(outputs)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (PerExample(inner=SGD), r"client_loss returned shape \(.*\); return a tensor without"),
        (Misnamed(inner=SGD), "no submodule 'body'; give one of '0', '1', '2'"),
        (Pulled(inner=Misnamed(inner=SGD)), "Misnamed and Pulled both define client_loss"),
    ],
)
@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
def test_a_loss_that_is_none_is_refused(
    kind: ExecutorKind, local: LocalUpdateWrapper, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        by_executor(local, seeded(MODELS["plain"]), kind)
