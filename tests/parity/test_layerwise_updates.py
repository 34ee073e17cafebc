"""An update sees one tensor a parameter in every executor, unless its class takes flat ones.

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
    Around,
    LocalSgd,
    LocalUpdate,
    LocalWork,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
)
from fedlearn.algorithms.proximal import Proximal
from fedlearn.core.features import only
from fedlearn.core.params import Params
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import ExecutorKind, Job, make_executor, named
from fedlearn.simulation.executors.base import Trained, Work
from tests.parity import test_flower as flower

SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)


def beside(values_K: Tensor, like: Tensor) -> Tensor:
    """Return one value a client in a shape that goes with ``like``."""
    return values_K.view(-1, *[1] * (like.dim() - 1))


def norms(value: Tensor) -> Tensor:
    """Return each client's norm of one tensor: [K]."""
    found: Tensor = torch.linalg.vector_norm(value.flatten(1), dim=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Remembering(LocalWork):
    """A rule whose memory is the same for all values of its fields."""

    specs: ClassVar[Mapping[str, MemorySpec]]

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """What the class says."""
        return self.specs


@dataclass(frozen=True, kw_only=True)
class Lars(Remembering):
    """A trust ratio for each layer, with momentum and the sum of ratios that clients keep."""

    learning_rate: float = 0.1
    specs: ClassVar[Mapping[str, MemorySpec]] = {
        "velocity": MemorySpec(over=Over.TRAINABLE, is_kept=True),
        "ratios": MemorySpec(over=Over.TENSORS, is_kept=True),
    }

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Step."""
        for value, grad, velocity, ratios in zip(
            x, grads, memory["velocity"], memory["ratios"], strict=True
        ):
            ratio_K = norms(value) / (norms(grad) + 1e-3)
            velocity.mul_(0.5).add_(beside(ratio_K, grad) * grad)
            ratios.add_(ratio_K[:, None])
            value.sub_(velocity, alpha=self.learning_rate * moment.rate)


@dataclass(frozen=True, kw_only=True)
class Muonlike(LocalWork):
    """Matrices step along an orthogonal matrix, vectors along the gradient."""

    learning_rate: float = 0.02

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Step."""
        for value, grad in zip(x, grads, strict=True):
            direction = grad
            if grad.dim() == 3:  # one matrix a client
                size = beside(norms(grad) + 1e-6, grad)
                matrix = grad / size
                direction = 1.5 * matrix - 0.5 * matrix @ matrix.mT @ matrix
            value.sub_(direction, alpha=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class ClippedLayers(Around):
    """Clips each layer's gradient by itself."""

    max_norm: float = 0.1

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Take the inner step."""
        clipped = [g * beside((self.max_norm / norms(g)).clamp(max=1.0), g) for g in grads]
        self.inner.step(x, clipped, memory, told=told, moment=moment)


@dataclass(frozen=True, kw_only=True)
class ByShape(LocalWork):
    """Written for the shapes of one model: its last layer trains at another rate."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Step, where the weights are as they were made."""
        first, first_bias, last, last_bias = x
        assert [value.shape[1:] for value in x] == [(8, 5), (8,), (3, 8), (3,)]
        for value, grad in zip((first, first_bias), grads[:2], strict=True):
            value.sub_(grad, alpha=0.1)
        for value, grad, model in zip((last, last_bias), grads[2:], told["model"][2:], strict=True):
            value.sub_(grad + 0.1 * (value - model), alpha=0.01)


@dataclass(frozen=True, kw_only=True)
class LargestChange(Around):
    """Reports each tensor's change, and the largest of them."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """One number a tensor, and one in all."""
        return (
            LaneSpec(name="each", over=Over.TENSORS, weighted=False, bound=None),
            LaneSpec(name="largest", over=1, weighted=False, bound=None),
        )

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Return both."""
        each = [norms(v - m)[:, None] for v, m in zip(x, told["model"], strict=True)]
        return {"each": each, "largest": [torch.cat(each, dim=1).amax(1, keepdim=True)]}


@dataclass(frozen=True, kw_only=True)
class OwnStart(Around):
    """Begins from half of the first layer, and keeps how often it did."""

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner one's, and a count."""
        return {**self.inner.memory, "rounds": MemorySpec(over=1, is_kept=True)}

    def begin(self, x: Tensors, memory: Memory, *, told: Memory) -> None:
        """Halve the first tensor."""
        self.inner.begin(x, memory, told=told)
        x[0].mul_(0.5)
        memory["rounds"][0].add_(1.0)


@dataclass(frozen=True, kw_only=True)
class LastLayerSent(Around):
    """Sends the last layer alone: what is written to ``x`` in the end is the update."""

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Put the others back."""
        lanes = self.inner.report(x, memory, told=told, num_steps=num_steps)
        for value, model in zip(x[:-2], told["model"][:-2], strict=True):
            value.copy_(model.expand_as(value))
        return lanes


class NormedSgd(LocalSgd):
    """A subclass of an update that takes flat tensors; its own rule is one for each layer."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Step along gradients of length 1."""
        unit = [grad / beside(norms(grad) + 1e-3, grad) for grad in grads]
        super().step(x, unit, memory, told=told, moment=moment)


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


def job(local: LocalUpdate) -> Job:
    return flower.job(local, make_model)


def two_rounds(local: LocalUpdate, kind: ExecutorKind) -> dict[str, Tensor]:
    """Return what clients send and keep, by round and name."""
    executor, found = make_executor(job(local), kind), dict[str, Tensor]()
    work: Work = job(local).work(np.arange(6))
    for round_num in range(2):
        trained: Trained = executor.train(work)
        found |= {f"{round_num} {name}": rows for name, rows in trained.lanes.items()}
        found |= {f"{round_num} {name}": rows for name, rows in trained.kept.items()}
        found[f"{round_num} delta"] = trained.deltas_KP.clone()
        work = replace(work, kept=trained.kept, round_num=1)
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
    """What clients send and keep is what it is one client after another."""
    expected = two_rounds(UPDATES[name], ExecutorKind.SEQUENTIAL)
    found = two_rounds(UPDATES[name], kind)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=key)


@dataclass(frozen=True, kw_only=True)
class FlatByMistake(ClippedLayers):
    """Clips by layer, and says that it does not mind a flat tensor."""

    takes_flat: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FlatReport(LargestChange):
    """Looks for the largest layer in one flat tensor."""

    takes_flat: ClassVar[bool] = True

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The largest alone, which is no lane over tensors."""
        return super().lanes[1:]

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Return it."""
        found = super().report(x, memory, told=told, num_steps=num_steps)
        return {"largest": found["largest"]}


@dataclass(frozen=True, kw_only=True)
class FlatMemory(FlatByMistake):
    """Keeps the norm of the first layer; in a flat tensor, that of all."""

    max_norm: float = 1e9

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """One number."""
        return {"first": MemorySpec(over=1, is_kept=True)}

    takes_flat: ClassVar[bool] = True

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Keep it."""
        memory["first"][0].copy_(norms(x[0])[:, None])
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "words"),
    [
        (FlatByMistake(inner=SGD), "differently"),
        (FlatReport(inner=SGD), "the lane 'largest' differently"),
        (FlatMemory(inner=SGD), "the kept 'first' differently"),
    ],
)
def test_a_trial_finds_what_takes_flat_tensors_by_mistake(local: LocalUpdate, words: str) -> None:
    """It compares models, lanes and what clients keep."""
    with pytest.raises(EngineError, match=words):
        named(job(local), ExecutorKind.FUSED)
    named(job(local), ExecutorKind.VMAP)  # which has one tensor a parameter


class CountedSgd(LocalSgd):
    """SGD that counts the calls of its step; its short cut stands for it."""

    calls: ClassVar[list[int]] = []
    takes_flat: ClassVar[bool] = True

    def affine(self, moment: Moment) -> Affine | None:
        """Return the step as it is."""
        return super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Count the call."""
        self.calls.append(len(x))
        super().step(x, grads, memory, told=told, moment=moment)


@pytest.mark.parametrize("around", [OwnStart, LastLayerSent, LargestChange])
def test_a_wrapper_that_leaves_the_step_alone_keeps_the_short_cut(around: type[Around]) -> None:
    """The fused executor then never calls the step; a wrapper that changes it has it called."""
    counted = CountedSgd(epochs=1, batch_size=4, learning_rate=0.1)
    CountedSgd.calls.clear()
    two_rounds(around(inner=counted), ExecutorKind.FUSED)
    assert not CountedSgd.calls
    two_rounds(ClippedLayers(inner=around(inner=counted)), ExecutorKind.FUSED)
    assert CountedSgd.calls


@dataclass(frozen=True, kw_only=True)
class Viewed(LocalWork):
    """Writes to views of the parameters, one row a client, whatever their shapes."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Step by each layer's largest gradient."""
        for value, grad in zip(x, grads, strict=True):
            flat = grad.view(len(grad), -1)
            value.flatten(1).sub_(0.05 * flat / flat.abs().amax(1, keepdim=True))


def make_convolution() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def test_an_update_may_write_to_views_of_convolutions() -> None:
    """They train, channels last or not, as plain torch does by hand."""
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
        loss = nn.functional.cross_entropy(model(only(work.features)[rows]), work.labels[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.data.sub_(0.05 * grad / grad.abs().max())
    by_hand = nn.utils.parameters_to_vector(model.parameters()).detach() - start
    for kind, delta in found.items():
        torch.testing.assert_close(delta, by_hand, rtol=1e-4, atol=1e-5, msg=kind)
