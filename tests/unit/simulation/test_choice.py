"""Which executor is chosen, and that the reason is told."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import (
    ExecutorKind,
    Job,
    ProbeCache,
    Speed,
    choose,
    make_executor,
    named,
)
from fedlearn.simulation.executors.fused.executor import FusedExecutor
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked import StackedExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision

PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


class Branching(nn.Module):
    """A forward pass that depends on values: neither traced nor stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return -outputs if float(outputs.detach().sum()) > 1e9 else outputs


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))


class Ticking:
    """A clock whose successive steps are given, for the three timings of each executor."""

    def __init__(self, *steps_s: float) -> None:
        times: list[float] = []
        for end in accumulate(steps_s):
            times += [times[-1] if times else 0.0, end]
        self._times: Iterator[float] = iter(times)

    def now_s(self) -> float:
        return next(self._times)

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError


# Any: the types of a job's fields differ.
def job(make_model: Callable[[], nn.Module], **changes: Any) -> Job:
    torch.set_num_threads(1)
    sizes = [12, 8, 8, 4]
    num_examples = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    population = ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *sizes])),
        num_classes=3,
    )
    torch.manual_seed(0)
    made = Job(
        make_model=make_model,
        objective=CrossEntropy(),
        local=PLAIN,
        population=population,
        params=Params.of(make_model()),
        precision=Precision.FLOAT32,
        num_clients=100,
        seed=Seed(0),
    )
    return replace(made, **changes)


def test_a_chain_of_layers_is_fused_without_a_probe(tmp_path: Path) -> None:
    """No clock is read: the fused executor is the fastest wherever it fits."""
    choice = choose(job(chain), clock=Ticking(), cache=ProbeCache(tmp_path))
    assert choice.kind is ExecutorKind.FUSED
    assert "chain of layers" in choice.reason
    assert choice.block_size >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sequential_s", "stacked_s", "kind"),
    [(4.0, 1.0, ExecutorKind.VMAP), (1.0, 4.0, ExecutorKind.SEQUENTIAL)],
)
def test_any_other_model_takes_what_was_faster(
    tmp_path: Path, sequential_s: float, stacked_s: float, kind: ExecutorKind
) -> None:
    """The better of two timings each, the first being to warm up; the ratio is told."""
    clock = Ticking(9.0, sequential_s, 2 * sequential_s, 9.0, 2 * stacked_s, stacked_s)
    small = job(normalised, num_clients=1)
    choice = choose(small, clock=clock, cache=ProbeCache(tmp_path))
    assert choice.kind is kind
    assert f"{sequential_s / stacked_s:.1f} x sequential" in choice.reason
    assert "not fused" in choice.reason


def test_a_probe_is_cached(tmp_path: Path) -> None:
    """The second choice reads no clock and is the same; another update rule is another job."""
    small = job(normalised, num_clients=1)
    cache = ProbeCache(tmp_path / "new folder")
    first = choose(small, clock=Ticking(9.0, 4.0, 4.0, 9.0, 1.0, 1.0), cache=cache)
    assert choose(small, clock=Ticking(), cache=cache) == first
    momentum = replace(small, local=replace(PLAIN, momentum=0.9))
    with pytest.raises(StopIteration):
        choose(momentum, clock=Ticking(), cache=cache)


def test_a_model_that_cannot_be_stacked_trains_in_turn(tmp_path: Path) -> None:
    """It never fails; the reason is told."""
    choice = choose(job(Branching), clock=Ticking(), cache=ProbeCache(tmp_path))
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert choice.reason


def test_mixed_precision_is_not_fused(tmp_path: Path) -> None:
    """The fused executor computes without autocast."""
    mixed = job(chain, precision=Precision.BFLOAT16, num_clients=1)
    clock = Ticking(9.0, 1.0, 1.0, 9.0, 4.0, 4.0)
    choice = choose(mixed, clock=clock, cache=ProbeCache(tmp_path))
    assert choice.kind is not ExecutorKind.FUSED


def test_executors_are_made_by_name() -> None:
    """Each name makes its own; what cannot be made says why."""
    plain = job(chain)
    assert isinstance(make_executor(plain, ExecutorKind.SEQUENTIAL), SequentialExecutor)
    assert isinstance(make_executor(plain, ExecutorKind.VMAP), StackedExecutor)
    assert isinstance(make_executor(plain, ExecutorKind.FUSED), FusedExecutor)
    with pytest.raises(EngineError):
        make_executor(job(Branching), ExecutorKind.FUSED)


def test_an_executor_that_the_user_names_is_used_or_refused() -> None:
    """Never replaced in silence; the refusal names the way out."""
    assert named(job(normalised), ExecutorKind.VMAP).reason == "as configured"
    assert named(job(Branching), ExecutorKind.SEQUENTIAL).reason == "as configured"
    with pytest.raises(EngineError, match='use "auto" or "sequential"'):
        named(job(Branching), ExecutorKind.VMAP)
    with pytest.raises(EngineError):
        named(job(normalised), ExecutorKind.FUSED)


@pytest.mark.parametrize(
    "damage",
    ["", "{}", "[1]", "null", '{"sequential_s": "x", "stacked_s": 1}', '{"sequential_s": 1}'],
)
def test_a_damaged_cache_entry_counts_as_none(tmp_path: Path, damage: str) -> None:
    """The next run measures again."""
    cache = ProbeCache(tmp_path)
    assert cache.put("a" * 64, Speed(2.0, 1.0)) == cache.get("a" * 64)
    (entry,) = tmp_path.iterdir()
    assert json.loads(entry.read_text()) == {"sequential_s": 2.0, "stacked_s": 1.0}
    entry.write_text(damage)
    assert cache.get("a" * 64) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A folder that cannot be made: what was measured is used and forgotten."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = ProbeCache(blocked / "cache")
    assert cache.put("b", Speed(2.0, 1.0)) == Speed(2.0, 1.0)
    assert cache.get("b") is None


def test_a_trial_block_is_made_of_real_clients_largest_first() -> None:
    """With zero velocities where the rule keeps them, and no more clients than there are."""
    keeping = replace(PLAIN, momentum=0.9, keep_momentum=True)
    work = job(chain, local=keeping).work(3)
    assert len(work.client_ids) == 3
    assert (np.diff(work.schedule.counts_TK.sum(0)) <= 0).all()
    assert work.velocity_KQ is not None
    assert work.velocity_KQ.shape == (3, work.params.layout.num_trainable)
    assert len(job(chain).work(100).client_ids) == 4
