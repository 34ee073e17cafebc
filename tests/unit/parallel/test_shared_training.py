"""A training that several processes share equals that of one process, up to rounding.

Threads stand for processes in tests in which no process has to die. Each has its own model, and
they sum gradients through the same kind of group as processes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms import noised_gradients
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.ditto import PersonalModel
from fedlearn.algorithms.elastic_averaging import ElasticForce
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.moon import ModelContrast
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.per_fedavg import MetaGradient
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.qfedavg import FairUpdate
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, ProcessesParted, SettingsRefused
from fedlearn.parallel.group import join_group
from fedlearn.training.lockstep import share
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalResult, NullControl, TrainContext

ResultT = TypeVar("ResultT")

ALONE = Alone()
#: Largest difference by dtype, relative to the largest weight.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
#: Makes batches of 8, 8, 8 and 5, each in parts of at most 4; or one batch of 29.
NUM_EXAMPLES = 29
_SHORT = timedelta(seconds=20)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).to(dtype)
    generator = torch.Generator().manual_seed(3)  # all threads share the global one
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return layers


def examples(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 6, generator=generator, dtype=dtype)
    return features, torch.randint(0, 3, (count,), generator=generator)


def context(local: LocalUpdate, broadcast: Mapping[str, Tensor] | None = None) -> TrainContext:
    return TrainContext(
        client_id=ClientId(1),
        round_num=2,
        settings=settings_of(local),
        seed=Seed(5),
        state={},
        broadcast=broadcast or {},
    )


def together(folder: Path, world_size: int, body: Callable[[Cluster], ResultT]) -> list[ResultT]:
    """Run ``body`` in a group of threads; return the results by rank."""
    file = folder / f"met-{world_size}-{len(list(folder.iterdir()))}"

    def run(rank: int) -> ResultT:
        group = join_group(
            file,
            backend="gloo",
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            meeting=_SHORT,
            timeout=_SHORT,
        )
        return body(group)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def make_client_trainer(dtype: torch.dtype = torch.float64, *, num_parts: int = 2) -> TorchTrainer:
    return TorchTrainer.of(
        lambda: make_model(dtype),
        *examples(NUM_EXAMPLES, dtype),
        device="cpu",
        gradient_accumulation=num_parts,
    )


def trained(
    local: LocalUpdate,
    processes: Cluster = ALONE,
    *,
    dtype: torch.dtype = torch.float64,
    num_parts: int = 2,
) -> LocalResult:
    """Train a model with dropout and batches in parts; a control variate is broadcast to all."""
    params = Params.of(make_model(dtype))
    control = torch.linspace(-0.1, 0.1, params.layout.num_trainable, dtype=dtype)
    return make_client_trainer(dtype, num_parts=num_parts).train_with(
        processes, params.to_tensors(), context=context(local, broadcast={"control": control})
    )


def vector(result: LocalResult) -> Tensor:
    """Return everything that a client sends or keeps as its state."""
    values = [*result.tensors.values(), *result.state.values(), *result.lanes.values()]
    return torch.cat([value.flatten() for value in values])


def gap(result: LocalResult, other: LocalResult) -> float:
    """Return the largest difference of two results, relative to the largest number."""
    ours, theirs = vector(result), vector(other)
    return float((ours - theirs).abs().max() / ours.abs().max())


PLAIN = LocalSgd(epochs=2, batch_size=8, learning_rate=0.1)
SGD = replace(PLAIN, momentum=0.9, keep_momentum=True)
ADAM = LocalAdam(
    epochs=2,
    batch_size=8,
    learning_rate=0.01,
    beta_1=0.9,
    beta_2=0.99,
    epsilon=1e-6,
    decoupled=True,
    weight_decay=0.1,
    keep_moments=True,
)
UPDATES: dict[str, LocalUpdate] = {
    "momentum": SGD,
    "adam": ADAM,
    "proximal": Proximal(inner=PLAIN, proximal=0.5),
    "clipped": ClippedGradients(inner=SGD, gradient_clip_norm=0.2),
    "scaffold": ControlVariates(inner=PLAIN, control_bound=None),
    "easgd": ElasticForce(inner=PLAIN, elasticity=0.5),
    "further gradients": MetaGradient(inner=SGD, adaptation_rate=0.3, hessian_step=None),
    "the loss of an epoch": FairUpdate(
        inner=PLAIN, fairness=1.0, step_size=0.1, normalizer_bound=None
    ),
    "a personal model": PersonalModel(inner=PLAIN, personal_learning_rate=0.2, personal_pull=0.3),
    "whole batch": replace(SGD, batch_size=None),
    "fewer than processes": replace(PLAIN, batch_size=2),
    "one by one": replace(PLAIN, batch_size=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_shared_training_is_that_of_one_process(
    tmp_path: Path, name: str, world_size: int
) -> None:
    """With dropout, batches in parts, and uneven or empty shares; all processes have equal bits."""
    local = UPDATES[name]
    alone = trained(local)
    found = together(tmp_path, world_size, lambda group: trained(local, group))
    for each in found:
        assert gap(each, alone) <= TOLERANCE[torch.float64]
        assert torch.equal(vector(each), vector(found[0]))
        assert each.num_examples == alone.num_examples
        assert each.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-12)


def test_a_loss_that_may_couple_examples_is_refused_where_batches_are_shared(
    tmp_path: Path,
) -> None:
    """In all processes. Control: it trains in one process, with whole batches."""
    local = ModelContrast(inner=PLAIN, contrast=1.0, temperature=0.5, representation="1")
    trained(local, num_parts=1)

    def run(group: Cluster) -> str:
        with pytest.raises(SettingsRefused) as refused:
            trained(local, group, num_parts=1)
        return str(refused.value)

    for words in together(tmp_path, 2, run):
        assert "each batch is cut into 2 parts" in words


def test_a_shared_training_in_single_precision_rounds_otherwise(tmp_path: Path) -> None:
    """The difference is no larger than rounding explains."""
    alone = trained(SGD, dtype=torch.float32)
    found = together(tmp_path, 3, lambda group: trained(SGD, group, dtype=torch.float32))
    assert gap(found[0], alone) <= TOLERANCE[torch.float32]
    assert torch.equal(vector(found[0]), vector(found[1]))


@dataclass(frozen=True)
class Broken:
    """A cluster with a defect in its sums, as a control.

    Attributes:
        inner: The cluster without the defect.
        adds_up: Whether it sums gradients at all.
        is_weighted: Whether each process is weighted by its number of rows.
    """

    inner: Cluster
    adds_up: bool = True
    is_weighted: bool = True

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Skip the sum, or take the unweighted mean of the processes' means."""
        if not self.is_weighted:
            rows = share(NUM_EXAMPLES, rank=self.rank, world_size=self.world_size)
            for each in tensors:
                each.mul_(NUM_EXAMPLES / (rows.stop - rows.start) / self.world_size)
        if self.adds_up:
            self.inner.all_reduce(tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        return self.inner.broadcast(value)


@pytest.mark.parametrize("broken", [{"adds_up": False}, {"is_weighted": False}])
def test_a_sum_that_is_none_is_told_from_one(tmp_path: Path, broken: dict[str, bool]) -> None:
    """Control: the comparison above detects a missing sum, and an unweighted mean of shares."""
    local = replace(SGD, batch_size=None)
    alone = trained(local, num_parts=1)

    def run(group: Cluster) -> LocalResult:
        return trained(local, Broken(group, **broken), num_parts=1)

    assert gap(together(tmp_path, 2, run)[0], alone) > 1e-4


@pytest.mark.slow
def test_noise_of_examples_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process draws it for the whole sum, and all processes take the same step."""
    drawn = list[float]()

    def draw(samples: NDArray[np.int64], *, sigma: float, source: object) -> None:
        drawn.append(sigma)
        samples += round(sigma)

    monkeypatch.setattr(noised_gradients, "add_discrete_gaussian", draw)
    once = replace(SGD, epochs=1)
    local = NoisedGradients(inner=once, example_clip_norm=0.5, example_noise_multiplier=0.7)
    alone = trained(local)
    num_drawn = len(drawn)
    found = together(tmp_path, 2, lambda group: trained(local, group))
    assert num_drawn > 0
    assert drawn[:num_drawn] == drawn[num_drawn:]  # by one process, in the same order
    for each in found:
        assert gap(each, alone) <= TOLERANCE[torch.float64]
        assert torch.equal(vector(each), vector(found[0]))


class Reach(nn.Module):
    """A module that uses one of its layers only for some of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.further = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()

    def forward(self, features: Tensor) -> Tensor:
        """Apply the further layer to examples whose first feature is positive."""
        outputs = self.layer(features)
        if bool((features[:, 0] > 0.0).any()):
            outputs = outputs + self.further(features) * (features[:, :1] > 0.0)
        return torch.as_tensor(outputs)


def test_a_parameter_has_a_gradient_if_it_has_one_anywhere(tmp_path: Path) -> None:
    """If no process has a gradient, weight decay does not change it, as in one process."""
    features = torch.tensor([[-1.0, 2.0], [-2.0, 1.0], [-0.5, 1.0], [3.0, 1.0]]).double()
    local = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=0.5)

    def run(
        trainer: Callable[[], TorchTrainer], tensors: Mapping[str, Tensor], group: Cluster
    ) -> LocalResult:
        return trainer().train_with(group, tensors, context=context(local))

    for rows in (4, 3):
        trainer = partial(
            TorchTrainer.of, Reach, features[:rows], torch.arange(rows) % 2, device="cpu"
        )
        torch.manual_seed(1)
        tensors = Params.of(Reach()).to_tensors()
        alone = trainer().train(tensors, context=context(local))

        found = together(tmp_path, 2, partial(run, trainer, tensors))
        assert gap(found[0], alone) <= TOLERANCE[torch.float64]
        is_left_alone = torch.equal(found[0].tensors["further.weight"], tensors["further.weight"])
        assert is_left_alone == (rows == 3)


class CalledOff(NullControl):
    """The control of a task that is cancelled at its n-th batch."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def check(self) -> None:
        """Count down."""
        self.left -= 1
        if self.left < 0:
            raise Cancelled


@pytest.mark.parametrize("nth", [0, 3])
def test_who_leaves_a_training_takes_the_others_out(tmp_path: Path, nth: int) -> None:
    """In the middle of a batch, even without a share of it; afterwards they can train again."""

    def run(group: Cluster) -> LocalResult:
        called_off = context(replace(SGD, batch_size=2))
        if group.rank == 0:
            called_off = replace(called_off, control=CalledOff(nth))
        with pytest.raises(Cancelled if group.rank == 0 else ProcessesParted):
            make_client_trainer().train_with(
                group, Params.of(make_model()).to_tensors(), context=called_off
            )
        return trained(SGD, group)

    assert gap(together(tmp_path, 3, run)[0], trained(SGD)) <= TOLERANCE[torch.float64]


def test_a_process_that_is_gone_is_no_reason_to_wait(tmp_path: Path) -> None:
    """The others get an error at their next sum."""

    def run(group: Cluster) -> LocalResult:
        if group.rank == 0:
            with pytest.raises(ProcessesParted, match="process 1 of 2 lost another process"):
                trained(SGD, group)
        return trained(SGD)

    clock = SystemClock()
    began_s = clock.now_s()
    together(tmp_path, 2, run)
    assert clock.now_s() - began_s < _SHORT.total_seconds()


def test_what_the_first_process_broadcasts_reaches_all(tmp_path: Path) -> None:
    """A value of any size, which the others need not know."""
    value = {"cohort": tuple(range(1000))}
    heard = together(tmp_path, 3, lambda group: group.broadcast(value if group.rank == 0 else None))
    assert heard == [value] * 3


def test_several_tensors_are_added_up_at_once(tmp_path: Path) -> None:
    """Tensors of any shape and dtype, and views, are summed in place."""

    def run(group: Cluster) -> list[list[float]]:
        view = torch.full((2, 3), group.rank + 1.0)[:, 1]
        number = torch.tensor(0.1 + group.rank, dtype=torch.float64)
        group.all_reduce([view, number])
        group.all_reduce([view])
        return [view.tolist(), [float(number)]]

    for view, number in together(tmp_path, 2, run):
        assert view == [6.0, 6.0]
        assert number == pytest.approx([1.2], rel=1e-6)  # it is sent as two float32 numbers
