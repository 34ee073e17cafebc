"""An update sees one tensor per parameter in every executor, unless its class accepts flat ones.

Shape legend: K clients; x is a list of tensors [K, ...].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.lanes import LaneSpec, Over
from fedlearn.algorithms.local import (
    Affine,
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    LocalWork,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
)
from fedlearn.algorithms.proximal import Proximal
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, make_executor, use_configured
from fedlearn.simulation.executors.base import TrainedBlock, Work
from tests.parity import test_flower as flower

SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)


def unsqueeze_like(values_K: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client to broadcast with ``like``."""
    return values_K.view(-1, *[1] * (like.dim() - 1))


def norms(value: Tensor) -> Tensor:
    """Return each client's norm of one tensor: [K]."""
    found: Tensor = torch.linalg.vector_norm(value.flatten(1), dim=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Remembering(LocalWork):
    """A rule whose class defines the memory."""

    specs: ClassVar[Mapping[str, MemorySpec]]

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return self.specs


@dataclass(frozen=True, kw_only=True)
class Lars(Remembering):
    """A trust ratio per layer, with momentum; clients keep momentum and the sum of the ratios."""

    learning_rate: float = 0.1
    specs: ClassVar[Mapping[str, MemorySpec]] = {
        "velocity": MemorySpec(over=Over.TRAINABLE, is_kept=True),
        "ratios": MemorySpec(over=Over.TENSORS, is_kept=True),
    }

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        for value, grad, velocity, ratios in zip(
            x, grads, memory["velocity"], memory["ratios"], strict=True
        ):
            ratio_K = norms(value) / (norms(grad) + 1e-3)
            velocity.mul_(0.5).add_(unsqueeze_like(ratio_K, grad) * grad)
            ratios.add_(ratio_K[:, None])
            value.sub_(velocity, alpha=self.learning_rate * moment.rate)


@dataclass(frozen=True, kw_only=True)
class Muonlike(LocalWork):
    """Matrices step in the direction of an orthogonal matrix, vectors along the gradient."""

    learning_rate: float = 0.02

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        for value, grad in zip(x, grads, strict=True):
            direction = grad
            if grad.dim() == 3:  # one matrix per client
                size = unsqueeze_like(norms(grad) + 1e-6, grad)
                matrix = grad / size
                direction = 1.5 * matrix - 0.5 * matrix @ matrix.mT @ matrix
            value.sub_(direction, alpha=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class ClippedLayers(LocalUpdateWrapper):
    """Clips the gradient of each layer separately."""

    max_norm: float = 0.1

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        clipped = [g * unsqueeze_like((self.max_norm / norms(g)).clamp(max=1.0), g) for g in grads]
        self.inner.step(x, clipped, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class ByShape(LocalWork):
    """Written for the shapes of one model: its last layer has another learning rate."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step, with the shapes of the model."""
        first, first_bias, last, last_bias = x
        assert [value.shape[1:] for value in x] == [(8, 5), (8,), (3, 8), (3,)]
        for value, grad in zip((first, first_bias), grads[:2], strict=True):
            value.sub_(grad, alpha=0.1)
        for value, grad, model in zip(
            (last, last_bias), grads[2:], broadcast["model"][2:], strict=True
        ):
            value.sub_(grad + 0.1 * (value - model), alpha=0.01)


@dataclass(frozen=True, kw_only=True)
class LargestChange(LocalUpdateWrapper):
    """Reports the change of each tensor, and the largest of them."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """One number per tensor, and one for all of them."""
        return (
            LaneSpec(name="each", over=Over.TENSORS, weighted=False, bound=None),
            LaneSpec(name="largest", over=1, weighted=False, bound=None),
        )

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        each = [norms(v - m)[:, None] for v, m in zip(x, broadcast["model"], strict=True)]
        return {"each": each, "largest": [torch.cat(each, dim=1).amax(1, keepdim=True)]}


@dataclass(frozen=True, kw_only=True)
class OwnStart(LocalUpdateWrapper):
    """Halves the first layer at the start of a round, and counts the rounds."""

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {**self.inner.memory, "rounds": MemorySpec(over=1, is_kept=True)}

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        x[0].mul_(0.5)
        memory["rounds"][0].add_(1.0)


@dataclass(frozen=True, kw_only=True)
class LastLayerSent(LocalUpdateWrapper):
    """Sends only the last layer: the values of ``x`` at the end are the update."""

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Restore the other layers."""
        lanes = self.inner.report(x, memory, broadcast=broadcast, moment=moment)
        for value, model in zip(x[:-2], broadcast["model"][:-2], strict=True):
            value.copy_(model.expand_as(value))
        return lanes


class NormedSgd(LocalSgd):
    """Subclasses an update that accepts flat tensors, but its own rule is per layer."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step along normalized gradients."""
        unit = [grad / unsqueeze_like(norms(grad) + 1e-3, grad) for grad in grads]
        super().step(x, unit, memory, broadcast=broadcast, moment=moment)


UPDATES: dict[str, LocalUpdate] = {
    "trust ratios": Lars(epochs=2, batch_size=4),
    "orthogonal matrices": Muonlike(epochs=2, batch_size=4),
    "clipped by layer": ClippedLayers(inner=SGD),
    "clipped by layer, around momentum": ClippedLayers(inner=replace(SGD, momentum=0.9)),
    "clipped together, inside": ClippedLayers(
        inner=ClippedGradients(inner=SGD, gradient_clip_norm=0.1)
    ),
    "clipped together, around": ClippedGradients(
        inner=ClippedLayers(inner=Proximal(inner=SGD, proximal=0.1)), gradient_clip_norm=0.1
    ),
    "by shape": ByShape(epochs=2, batch_size=4),
    "lanes over tensors": LargestChange(inner=SGD),
    "lanes over tensors, around momentum": LargestChange(
        inner=replace(SGD, momentum=0.9, keep_momentum=True)
    ),
    "another start": OwnStart(inner=SGD),
    "another end": LastLayerSent(inner=SGD),
    "a subclass": NormedSgd(epochs=2, batch_size=4, learning_rate=0.1),
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def job(local: LocalUpdate) -> TrainingJob:
    return flower.job(local, make_model)


def two_rounds(local: LocalUpdate, kind: ExecutorKind) -> dict[str, Tensor]:
    """Return the updates and states of the clients, by round and name."""
    executor, found = make_executor(job(local), kind), dict[str, Tensor]()
    work: Work = job(local).work(np.arange(6))
    for round_num in range(2):
        trained: TrainedBlock = executor.train(work)
        # Copies, since the executor's next call may reuse the memory.
        lanes, state = (
            {name: rows.clone() for name, rows in each.items()}
            for each in (trained.lanes, trained.client_state)
        )
        found |= {f"{round_num} {name}": rows for name, rows in {**lanes, **state}.items()}
        found[f"{round_num} delta"] = trained.deltas_KP.clone()
        work = replace(work, client_state=state, round_num=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, ExecutorKind.FUSED) for name in UPDATES),
        ("trust ratios", ExecutorKind.VMAP),
        ("lanes over tensors", ExecutorKind.VMAP),
        ("another start", ExecutorKind.VMAP),
    ],
)
def test_a_rule_for_each_layer_means_the_same_in_every_executor(
    name: str, kind: ExecutorKind
) -> None:
    """Updates and client states equal those of one client after another."""
    expected = two_rounds(UPDATES[name], ExecutorKind.SEQUENTIAL)
    found = two_rounds(UPDATES[name], kind)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=key)


@dataclass(frozen=True, kw_only=True)
class FlatByMistake(ClippedLayers):
    """Clips per layer, but claims to accept flat tensors."""

    takes_flat: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FlatReport(LargestChange):
    """Looks for the largest layer in one flat tensor."""

    takes_flat: ClassVar[bool] = True

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """Only the largest one, which is not a lane over tensors."""
        return super().lanes[1:]

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        found = super().report(x, memory, broadcast=broadcast, moment=moment)
        return {"largest": found["largest"]}


@dataclass(frozen=True, kw_only=True)
class FlatMemory(FlatByMistake):
    """Keeps the norm of the first layer, which in a flat tensor is that of all layers."""

    max_norm: float = 1e9

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {"first": MemorySpec(over=1, is_kept=True)}

    takes_flat: ClassVar[bool] = True

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        memory["first"][0].copy_(norms(x[0])[:, None])
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "words"),
    [
        (FlatByMistake(inner=SGD), "differently"),
        (FlatReport(inner=SGD), "the lane 'largest' differently"),
        (FlatMemory(inner=SGD), "the client state 'first' differently"),
    ],
)
def test_a_trial_finds_what_takes_flat_tensors_by_mistake(local: LocalUpdate, words: str) -> None:
    """It compares models, lanes and client states."""
    with pytest.raises(EngineError, match=words):
        use_configured(job(local), ExecutorKind.FUSED)
    use_configured(job(local), ExecutorKind.VMAP)  # this executor has one tensor per parameter


class CountedSgd(LocalSgd):
    """SGD that counts the calls of its step; its affine form is equivalent."""

    calls: ClassVar[list[int]] = []
    takes_flat: ClassVar[bool] = True

    def affine(self, moment: Moment) -> Affine | None:
        """Return the plain affine form."""
        return super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Count the call."""
        self.calls.append(len(x))
        super().step(x, grads, memory, broadcast=broadcast, moment=moment)


@pytest.mark.parametrize("around", [OwnStart, LastLayerSent, LargestChange])
def test_a_wrapper_that_leaves_the_step_alone_keeps_the_short_cut(
    around: type[LocalUpdateWrapper],
) -> None:
    """The fused executor never calls the step then, but does for a wrapper that changes it."""
    counted = CountedSgd(epochs=1, batch_size=4, learning_rate=0.1)
    CountedSgd.calls.clear()
    two_rounds(around(inner=counted), ExecutorKind.FUSED)
    assert not CountedSgd.calls
    two_rounds(ClippedLayers(inner=around(inner=counted)), ExecutorKind.FUSED)
    assert CountedSgd.calls


@dataclass(frozen=True, kw_only=True)
class Viewed(LocalWork):
    """Writes to views of the parameters, one row per client, for any shape."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step by each layer's gradient over its largest element."""
        for value, grad in zip(x, grads, strict=True):
            flat = grad.view(len(grad), -1)
            value.flatten(1).sub_(0.05 * flat / flat.abs().amax(1, keepdim=True))


def make_convolution() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def test_an_update_may_write_to_views_of_convolutions() -> None:
    """They train like plain torch code written by hand, channels last or not."""
    images = torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(0)).numpy()
    labels = (torch.arange(12) % 3).numpy()
    data = fl.from_arrays(
        images, labels, partition=fl.Iid(num_clients=2), test=(images, labels), seed=0
    )
    local = Viewed(epochs=2, batch_size=None, shuffle=False)
    found = {}
    for kind in (ExecutorKind.SEQUENTIAL, ExecutorKind.FUSED, ExecutorKind.VMAP):
        task = replace(
            job(local),
            make_model=make_convolution,
            population=data.population,
            params=Params.of(make_convolution()),
        )
        found[kind] = make_executor(task, kind).train(task.work(np.arange(2))).deltas_KP[0].clone()
    work, model = task.work(np.arange(1)), make_convolution()
    rows = torch.from_numpy(work.rows_K[0])
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in range(2):
        loss = nn.functional.cross_entropy(
            model(require_single_input(work.features)[rows]), work.labels[rows]
        )
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.data.sub_(0.05 * grad / grad.abs().max())
    by_hand = nn.utils.parameters_to_vector(model.parameters()).detach() - start
    for kind, delta in found.items():
        torch.testing.assert_close(delta, by_hand, rtol=1e-4, atol=1e-5, msg=kind)
