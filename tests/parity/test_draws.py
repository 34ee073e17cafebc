"""A local update draws the same random numbers wherever a client trains."""

import random  # noqa: TID251 - under test
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.draws import BEGIN, REPORT, Draws, client_seed
from fedlearn.algorithms.lanes import LaneSpec, Over
from fedlearn.algorithms.local import (
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
)
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.clock import VirtualClock
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import ExecutorKind, choose, make_executor, use_configured
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext
from tests.parity.test_layerwise_updates import Remembering, job, make_model


@dataclass(frozen=True, kw_only=True)
class StochasticSign(Remembering):
    """Steps by random signs, more likely the right ones the larger the gradient is."""

    learning_rate: float = 0.01
    specs: ClassVar[Mapping[str, MemorySpec]] = {
        "coin": MemorySpec(over=Over.TRAINABLE, is_kept=False, draws="uniform"),
        "mean": MemorySpec(over=Over.TRAINABLE, is_kept=True),
    }

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        for value, grad, coin, mean in zip(x, grads, memory["coin"], memory["mean"], strict=True):
            mean.lerp_(grad, 0.5)
            is_up = coin < torch.sigmoid(5.0 * mean)
            value.sub_(torch.where(is_up, 1.0, -1.0), alpha=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class Dithered(LocalUpdateWrapper):
    """Starts near the model, and rounds it at random before it is sent; reports its draws."""

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Draws of each distribution and size."""
        return {
            **self.inner.memory,
            "dither": MemorySpec(over=Over.TRAINABLE, is_kept=False, draws="uniform"),
            "start": MemorySpec(over=Over.TRAINABLE, is_kept=False, draws="normal"),
            "each": MemorySpec(over=Over.TENSORS, is_kept=False, draws="normal"),
            "one": MemorySpec(over=2, is_kept=False, draws="uniform"),
        }

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The last draws."""
        return (
            LaneSpec(name="drawn", over=2, weighted=False, bound=None),
            LaneSpec(name="drawn_each", over=Over.TENSORS, weighted=False, bound=None),
        )

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Move away from the model at random."""
        for value, start in zip(x, memory["start"], strict=True):
            value.add_(start, alpha=0.01)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Round the model to a coarse grid."""
        for value, dither in zip(x, memory["dither"], strict=True):
            value.copy_((value * 64 + dither).floor() / 64)
        return {"drawn": memory["one"], "drawn_each": memory["each"]}


SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, shuffle=False)
UPDATES: dict[str, LocalUpdate] = {
    "coins": StochasticSign(epochs=2, batch_size=4, shuffle=False),
    "dither": Dithered(inner=SGD),
    "both": Dithered(inner=StochasticSign(epochs=2, batch_size=4, shuffle=False)),
}


def extract_client(trained: TrainedBlock, place: int) -> dict[str, Tensor]:
    """Return one client's update and new state from a trained block."""
    rows = {**trained.lanes, **trained.client_state, "delta": trained.deltas_KP}
    return {name: value[place].clone() for name, value in rows.items()}


def by_executor(local: LocalUpdate, kind: ExecutorKind, *, num_clients: int) -> dict[str, Tensor]:
    """Return the update of client 0 in round 3, in a block of ``num_clients``."""
    work: Work = replace(job(local).work(np.arange(num_clients)), round_num=3)
    trained = make_executor(job(local), kind).train(work)
    return extract_client(trained, work.client_ids.tolist().index(0))


def by_trainer(local: LocalUpdate) -> dict[str, Tensor]:
    """Return the update of the same client in a deployment."""
    work = job(local).work(np.arange(1))
    rows = torch.from_numpy(work.rows_K[0])
    trainer = TorchTrainer.of(
        make_model,
        require_single_input(work.features)[rows],
        work.labels[rows],
        device="cpu",
        local_updates=[StochasticSign, Dithered],
    )
    context = TrainContext(
        client_id=ClientId(0),
        round_num=3,
        settings=settings_of(local),
        seed=work.seed,
        state={},
    )
    result = trainer.train(work.params.to_tensors(), context=context)
    start = work.params.to_tensors()
    delta = torch.cat([(result.tensors[n] - start[n]).flatten() for n in start])
    return {**result.lanes, **result.state, "delta": delta}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_a_client_draws_the_same_wherever_it_trains(name: str) -> None:
    """Alone, in a block of any size, on each executor, and deployed."""
    local = UPDATES[name]
    expected = by_executor(local, ExecutorKind.SEQUENTIAL, num_clients=6)
    for found in (
        by_executor(local, ExecutorKind.FUSED, num_clients=6),
        by_executor(local, ExecutorKind.FUSED, num_clients=1),
        by_executor(local, ExecutorKind.VMAP, num_clients=6),
        by_trainer(local),
    ):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=key)


def test_draws_are_new_for_each_client_round_step_name_and_seed() -> None:
    """No two of them share numbers, and their distributions are those declared."""
    spec = MemorySpec(over=500, is_kept=False, draws="uniform")

    class Three(LocalSgd):
        @property
        def memory(self) -> Mapping[str, MemorySpec]:
            return {"a": spec, "b": spec, "c": replace(spec, draws="normal")}

    local = Three(epochs=1, batch_size=4, learning_rate=0.1)
    seen = list[Tensor]()
    normal = list[Tensor]()
    for seed in (Seed(0), Seed(1)):
        for round_num in (0, 1):
            seeds = [client_seed(seed, round_num=round_num, client_id=c) for c in (0, 1)]
            for step in (BEGIN, 0, 1, REPORT):
                memory = {name: [torch.zeros(2, 500)] for name in "abc"}
                Draws(local, seeds).fill(memory, step)
                seen += [*memory["a"][0], *memory["b"][0]]
                normal += [*memory["c"][0]]
    drawn, of_normal = torch.cat(seen), torch.cat(normal)
    assert len(drawn.unique()) > 0.99 * len(drawn)
    assert 0.0 <= float(drawn.min()) < 0.01
    assert 0.99 < float(drawn.max()) < 1.0
    assert abs(float(of_normal.mean())) < 0.03
    assert abs(float(of_normal.std()) - 1.0) < 0.03


@dataclass(frozen=True, kw_only=True)
class PlainRandom(LocalUpdateWrapper):
    """Draws from a global generator in one of its methods."""

    where: str
    source: str = "torch"

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The number drawn."""
        return (LaneSpec(name="drawn", over=1, weighted=False, bound=None),)

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Where the number is stored."""
        return {**self.inner.memory, "drawn": MemorySpec(over=1, is_kept=True)}

    def draw(self, memory: Memory, where: str) -> None:
        """Draw if this is the method to draw in."""
        if where != self.where:
            return
        match self.source:
            case "torch":
                memory["drawn"][0].normal_()
            case "numpy":
                memory["drawn"][0].fill_(np.random.rand())  # noqa: NPY002 - under test
            case "python":
                memory["drawn"][0].fill_(random.random())  # noqa: S311 - under test

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        self.draw(memory, "begin")

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)
        self.draw(memory, "step")

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        self.draw(memory, "report")
        return {"drawn": memory["drawn"]}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["begin", "step", "report"])
@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_plain_draws_are_repeatable_or_refused(where: str, source: str) -> None:
    """With one client at a time they are seeded per client; a block refuses them, with the name."""
    local = PlainRandom(inner=SGD, where=where, source=source)
    make_model()  # seeds torch's generator, as each run does
    before = (torch.get_rng_state(), random.getstate())
    runs = [by_executor(local, ExecutorKind.SEQUENTIAL, num_clients=n) for n in (6, 6, 1)]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    for again in runs[1:]:
        torch.testing.assert_close(again, runs[0], rtol=0, atol=0)
    assert runs[0]["drawn"] != 0
    for kind in (ExecutorKind.FUSED, ExecutorKind.VMAP):
        with pytest.raises(EngineError, match=r"PlainRandom draws from a global generator"):
            use_configured(job(local), kind)


def test_a_draw_of_another_thread_does_not_refuse_a_block() -> None:
    """Only an update that draws in each training of the block draws itself."""
    drawn = list[float]()

    class Disturbed(PlainRandom):
        """During its first two trainings a generator moves, as another thread may move it."""

        def draw(self, memory: Memory, where: str) -> None:
            if where == self.where and len(drawn) < 2:
                drawn.append(random.random())  # noqa: S311 - under test

    local = Disturbed(inner=SGD, where="begin")
    disturbed = by_executor(local, ExecutorKind.FUSED, num_clients=3)
    assert len(drawn) == 2
    quiet = by_executor(local, ExecutorKind.FUSED, num_clients=3)
    torch.testing.assert_close(disturbed, quiet, rtol=0, atol=0)


@pytest.mark.slow
def test_one_client_trains_at_a_time_where_an_update_draws_globally(tmp_path: Path) -> None:
    """The choice has the reason."""
    local = PlainRandom(inner=SGD, where="report")
    choice = choose(job(local), clock=VirtualClock(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert "global generator" in choice.reason


@pytest.mark.parametrize("values", [("uniform", True), ("cauchy", False)])
def test_draws_that_cannot_be_are_refused(values: Any) -> None:  # Any: one distribution is unknown
    """State that is kept is not drawn, and there are only two distributions."""
    law, is_kept = values
    with pytest.raises(ValueError, match="draws"):
        MemorySpec(over=1, is_kept=is_kept, draws=law)
