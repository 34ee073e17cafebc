"""What a local update may know about a step, and gradients at other points, are right everywhere.

Shape legend: K clients; x is a list of tensors [K, ...].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.lanes import LaneSpec, Over
from fedlearn.algorithms.local import (
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    LocalWork,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
)
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.clock import SystemClock
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.simulation.choice import ExecutorKind, choose, make_executor
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext
from tests.parity import test_flower as flower

Found = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Extragradient(LocalWork):
    """Steps by the gradient at the point that a plain step would reach; reports what it knows."""

    asks_gradients: ClassVar[bool] = True
    learning_rate: float = 0.1

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "full": MemorySpec(over=Over.TRAINABLE, is_kept=True),
            "known": MemorySpec(over=5, is_kept=True),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        losses_K, grads = moment.gradient_at(x)
        for full, grad in zip(memory["full"], grads, strict=True):
            full.copy_(grad)
        known = memory["known"][0]
        known.zero_()
        known[:, 0] = losses_K

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        ahead = add_scaled(x, grads, factor=-self.learning_rate)
        losses_K, further = moment.gradient_at(ahead)
        for value, grad in zip(x, further, strict=True):
            value.sub_(grad, alpha=self.learning_rate)
        known = memory["known"][0]
        known[:, 1] += moment.losses_K + 10.0 * losses_K
        known[:, 2] += moment.epochs_K
        known[:, 3] += sum(len(name) for name in moment.names)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        ids_K = torch.tensor(list(moment.client_ids), device=x[0].device)
        memory["known"][0][:, 4] = moment.num_steps_K + 100.0 * ids_K
        return {"loss": [moment.losses_K[:, None]]}

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        return (LaneSpec(name="loss", over=1, weighted=False, bound=None),)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    """Mixes the examples of a batch, and has statistics that further gradients must not move."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Unreached(nn.Module):
    """A module with a parameter that the loss does not depend on, in front."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Parameter(torch.ones(2)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "dropout": with_dropout,
    "batch norm": with_batch_norm,
    "unreached": Unreached,
}
LOCAL = Extragradient(epochs=2, batch_size=4)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return make()

    return made


def by_executor(local: LocalUpdate, make: Callable[[], nn.Module], kind: ExecutorKind) -> Found:
    """Return the updates and states of six clients in round 0, in the order of their ids."""
    job = flower.job(local, make)
    work = job.work(np.arange(6))
    trained = make_executor(job, kind).train(work)
    order = torch.from_numpy(np.argsort(work.client_ids))
    rows = {**trained.lanes, **trained.client_state, "delta": trained.deltas_KP}
    losses = torch.from_numpy(trained.losses_K)
    return {name: value[order].clone() for name, value in {**rows, "mean loss": losses}.items()}


def by_trainers(local: LocalUpdate, make: Callable[[], nn.Module], *, num_parts: int = 1) -> Found:
    """Return the same from deployed clients' trainers, which may cut batches into parts."""
    work, rows = flower.job(local, make).work(np.arange(6)), list[Found]()
    start = work.params.to_tensors()
    for client in np.argsort(work.client_ids).tolist():
        index = torch.from_numpy(work.rows_K[client])
        trainer = TorchTrainer.of(
            make,
            require_single_input(work.features)[index],
            work.labels[index],
            device="cpu",
            local_updates=[type(local)],
            gradient_accumulation=num_parts,
        )
        context = TrainContext(
            client_id=ClientId(int(work.client_ids[client])),
            round_num=0,
            settings=settings_of(local),
            seed=work.seed,
            state={},
        )
        result = trainer.train(start, context=context)
        moved = {name: result.tensors[name] - start[name] for name in work.params.layout.by_name}
        delta = work.params.layout.pack(moved)
        loss = torch.tensor(result.metrics["loss"], dtype=torch.float64)
        rows.append({**result.lanes, **result.state, "delta": delta, "mean loss": loss})
    return {name: torch.stack([each[name] for each in rows]) for name in rows[0]}


def require_equal(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MODELS)[1:])]
)
def test_further_gradients_are_the_same_in_every_place(name: str) -> None:
    """One client after another, stacked, and deployed, with batches whole or in parts."""
    # In float64: BatchNorm with batches of two and three examples magnifies rounding.
    make = seeded(lambda: MODELS[name]().double())
    expected = by_executor(LOCAL, make, ExecutorKind.SEQUENTIAL)
    require_equal(by_executor(LOCAL, make, ExecutorKind.VMAP), expected)
    require_equal(by_trainers(LOCAL, make), expected)
    if name == "plain":  # the others are no chains of layers
        require_equal(by_executor(LOCAL, make, ExecutorKind.FUSED), expected)
    if name in {"plain", "unreached"}:  # the others see the parts
        require_equal(by_trainers(LOCAL, make, num_parts=2), expected)


def test_further_gradients_are_those_of_a_loop_by_hand() -> None:
    """In float64, with autograd on the plain module."""
    make = seeded(lambda: plain().double())
    job = flower.job(LOCAL, make)
    work, expected = job.work(np.arange(6)), list[Found]()
    features = require_single_input(work.features)
    for client in np.argsort(work.client_ids).tolist():
        module = make()
        weights = list(module.parameters())

        def gradient(rows: Tensor, module: nn.Module = module) -> tuple[Tensor, list[Tensor]]:
            loss = F.cross_entropy(module(features[rows].double()), work.labels[rows])
            return loss.detach(), list(torch.autograd.grad(loss, list(module.parameters())))

        own = torch.from_numpy(work.rows_K[client])
        full_loss, full = gradient(own)
        known = torch.zeros(5, dtype=torch.float64)
        known[0] = full_loss
        losses, sizes, start = list[Tensor](), list[int](), [w.detach().clone() for w in weights]
        num_steps = int((work.schedule.counts_TK[:, client] > 0).sum())
        for step in range(num_steps):
            rows = work.schedule.rows_TKB[step, client, : work.schedule.counts_TK[step, client]]
            before = [w.detach().clone() for w in weights]
            loss, grads = gradient(rows)
            with torch.no_grad():
                for w, grad in zip(weights, grads, strict=True):
                    w.sub_(0.1 * grad)
            ahead, further = gradient(rows)
            with torch.no_grad():
                for w, old, grad in zip(weights, before, further, strict=True):
                    w.copy_(old - 0.1 * grad)
            losses, sizes = [*losses, loss], [*sizes, len(rows)]
            known[1] += loss + 10.0 * ahead
            known[2] += step // (num_steps // 2)
            known[3] += sum(len(each) for each, _ in module.named_parameters())
        known[4] = num_steps + 100.0 * int(work.client_ids[client])
        mean = (torch.stack(losses) * torch.tensor(sizes)).sum() / sum(sizes)
        delta = torch.cat([(w.detach() - s).flatten() for w, s in zip(weights, start, strict=True)])
        flat = torch.cat([grad.flatten() for grad in full])
        expected.append(
            {"full": flat, "known": known, "delta": delta, "loss": mean[None], "mean loss": mean}
        )
    whole = {name: torch.stack([each[name] for each in expected]) for name in expected[0]}
    for kind in KINDS:
        found = by_executor(LOCAL, make, kind)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_statistics_move_once_in_a_step() -> None:
    """As with plain SGD on the same batches, whose statistics depend on the first layer's input."""
    make = seeded(lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)))
    num_trainable = Params.of(make()).layout.num_trainable
    sgd = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
    expected = by_executor(sgd, make, ExecutorKind.SEQUENTIAL)["delta"][:, num_trainable:]
    assert float(expected.abs().max()) > 0.01
    for kind in (ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP):
        found = by_executor(LOCAL, make, kind)["delta"][:, num_trainable:]
        torch.testing.assert_close(found, expected)


SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
KINDS = [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP, ExecutorKind.FUSED]


def test_fused_layers_are_chosen_for_further_gradients(tmp_path: Path) -> None:
    job = flower.job(LOCAL, seeded(plain))
    assert choose(job, clock=SystemClock(), cache_dir=tmp_path).kind is ExecutorKind.FUSED


@dataclass(frozen=True, kw_only=True)
class Undeclared(LocalUpdateWrapper):
    """Asks for a further gradient without declaring it."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        self.inner.step(x, moment.gradient_at(x).grads, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class EarlyLoss(LocalUpdateWrapper):
    """Reads the loss of a batch before there is one."""

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        moment.losses_K.sum()


@dataclass(frozen=True, kw_only=True)
class LossRate(LocalUpdateWrapper):
    """Scales gradients by the loss."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        scaled = [grad * moment.losses_K.view(-1, *[1] * (grad.dim() - 1)) for grad in grads]
        self.inner.step(x, scaled, memory, broadcast=broadcast, moment=moment)


@pytest.mark.parametrize("kind", KINDS)
def test_every_executor_knows_the_loss_of_a_batch(kind: ExecutorKind) -> None:
    expected = by_executor(LossRate(inner=SGD), seeded(plain), ExecutorKind.SEQUENTIAL)
    require_equal(by_executor(LossRate(inner=SGD), seeded(plain), kind), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("local", "words"),
    [
        (Undeclared(inner=SGD), "asks_gradients: ClassVar"),
        (EarlyLoss(inner=SGD), "there is none in begin"),
    ],
)
def test_what_is_not_there_is_refused(kind: ExecutorKind, local: LocalUpdate, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_executor(local, seeded(plain), kind)


def test_noised_gradients_refuse_further_ones() -> None:
    """They would be neither clipped nor noised. Control: an update without them."""
    noise = {"example_clip_norm": 1.0, "example_noise_multiplier": 1.0}
    with pytest.raises(ValueError, match="neither clipped nor noised"):
        NoisedGradients(inner=LOCAL, **noise)
    NoisedGradients(inner=SGD, **noise)


@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
def test_noised_gradients_refuse_the_loss(kind: ExecutorKind) -> None:
    """It has no noise either."""
    local = NoisedGradients(
        inner=LossRate(inner=SGD), example_clip_norm=1.0, example_noise_multiplier=1.0
    )
    with pytest.raises(ValueError, match="would bypass the noise"):
        by_executor(local, seeded(plain), kind)
