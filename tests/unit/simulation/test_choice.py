"""The choice of an executor, and the reason that is reported for it."""

import json
import random  # noqa: TID251 - a user's model draws random numbers from it
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy, CustomLoss
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import (
    ExecutorKind,
    TrainingJob,
    choose,
    make_executor,
    use_configured,
)
from fedlearn.simulation.executors import trial
from fedlearn.simulation.executors.base import TrainedBlock
from fedlearn.simulation.executors.fused.executor import FusedExecutor
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked import StackedExecutor
from fedlearn.simulation.executors.stacked_gradient import BlockGradient
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision

#: Timings in seconds of a probe in which stacked training is four times as fast.
_STACKED_WINS = (9.0, 4.0, 4.0, 9.0, 1.0, 1.0)
PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


class Branching(nn.Module):
    """A forward pass that branches on values, so that it can be neither traced nor stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return -outputs if float(outputs.detach().sum()) > 1e9 else outputs


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def build_normalized() -> nn.Module:
    pool = nn.AdaptiveAvgPool1d(5)  # examples may have any width
    return nn.Sequential(pool, nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))


class Ticking:
    """A clock that advances by the given steps, one for each timed training."""

    def __init__(self, *steps_s: float) -> None:
        times: list[float] = []
        for end in accumulate(steps_s):
            times += [times[-1] if times else 0.0, end]
        self._times: Iterator[float] = iter(times)

    def now_s(self) -> float:
        return next(self._times)

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError


# Any: the fields of a job have different types.
def job(make_model: Callable[[], nn.Module], *, width: int = 5, **changes: Any) -> TrainingJob:
    sizes = [12, 8, 8, 4]
    num_examples = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    population = ArrayPopulation(
        features=torch.randn(num_examples, width, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *sizes])),
        num_classes=3,
    )
    torch.manual_seed(0)
    made = TrainingJob(
        make_model=make_model,
        objective=CrossEntropy(),
        metrics={},
        local=PLAIN,
        broadcast={},
        population=population,
        params=Params.of(make_model()),
        precision=Precision.FLOAT32,
        num_clients=100,
        num_together=100,
        seed=Seed(0),
    )
    return replace(made, **changes)


def test_a_chain_of_layers_is_fused_without_a_probe(tmp_path: Path) -> None:
    """No clock is read, since the fused executor is the fastest one wherever it is applicable."""
    choice = choose(job(chain), clock=Ticking(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.FUSED
    assert "layers one after another" in choice.reason
    assert choice.block_size >= 1
    assert not list(tmp_path.iterdir())


#: Seconds to train four, one, two and one client, as timed after a warm-up.
_BLOCKS = {"fused 4": 4.0, "sequential 1": 3.0, "fused 2": 0.5, "fused 1": 2.0}


def ticking(seconds: Mapping[str, float]) -> Ticking:
    """Create a clock with these timings, after a first training that takes much longer."""
    return Ticking(*(part for each in seconds.values() for part in (99.0, each, 2 * each)))


def test_in_a_long_run_the_fastest_block_is_found(tmp_path: Path) -> None:
    """By seconds per example. The reason lists the timings, which are cached."""
    long = job(chain, num_clients=3300, num_together=4)
    choice = choose(long, clock=ticking(_BLOCKS), cache_dir=tmp_path)
    assert (choice.kind, choice.block_size) == (ExecutorKind.FUSED, 2)
    assert "fused 4: " in choice.reason
    assert "sequential 1: " in choice.reason
    assert choose(long, clock=Ticking(), cache_dir=tmp_path) == choice
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-9])  # a damaged entry is measured again
    others = _BLOCKS | {"fused 2": 50.0}
    assert choose(long, clock=ticking(others), cache_dir=tmp_path).block_size == 4


@pytest.mark.parametrize(
    ("name", "seconds", "chosen"),
    [
        ("sequential 1", 0.95, "fused 4"),
        ("sequential 1", 0.5, "sequential 1"),
        ("fused 2", 1.9, "fused 4"),
        ("fused 2", 1.0, "fused 2"),
    ],
)
def test_the_usual_block_gives_way_only_to_what_is_clearly_faster(
    tmp_path: Path, name: str, seconds: float, chosen: str
) -> None:
    """Others round differently, and timings are noisy. All clients have 8 examples."""
    alike = job(chain, num_clients=3300, num_together=4)
    sizes = [8, 8, 8, 8]
    partition = Partition(np.arange(32), np.cumsum([0, *sizes]))
    assert isinstance(alike.population, ArrayPopulation)
    alike = replace(alike, population=replace(alike.population, partition=partition))
    slow = {"fused 4": 4.0, "sequential 1": 9.0, "fused 2": 9.0, "fused 1": 9.0}
    choice = choose(alike, clock=ticking(slow | {name: seconds}), cache_dir=tmp_path)
    assert f"{choice.kind.value} {choice.block_size}" == chosen


def test_measuring_takes_a_hundredth_of_a_run(tmp_path: Path) -> None:
    """Three trainings of four clients are a hundredth of 1200. A single size is not cached."""
    for num_clients, clock in ((1199, Ticking()), (1200, ticking({"fused 4": 4.0}))):
        choice = choose(
            job(chain, num_clients=num_clients, num_together=4), clock=clock, cache_dir=tmp_path
        )
        assert "microseconds" not in choice.reason
        assert not list(tmp_path.iterdir())


def test_a_gradient_that_is_nothing_but_rounding_is_no_objection() -> None:
    """A bias before a BatchNorm has a zero gradient; Adam takes a step by its rounding error."""

    def build_biased() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    adam = LocalAdam(
        epochs=1,
        batch_size=3,
        learning_rate=0.05,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-12,
        decoupled=False,
        keep_moments=False,
    )
    for seed in range(5):
        torch.manual_seed(seed)
        small = job(build_biased, local=adam)
        assert use_configured(small, ExecutorKind.VMAP).reason == "as configured"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequential_s", "stacked_s", "kind"),
    [(4.0, 1.0, ExecutorKind.VMAP), (1.0, 4.0, ExecutorKind.SEQUENTIAL)],
)
def test_any_other_model_takes_what_was_faster(
    tmp_path: Path, sequential_s: float, stacked_s: float, kind: ExecutorKind
) -> None:
    """By the better of two timings each, after a warm-up; the reason has the ratio."""
    clock = Ticking(9.0, sequential_s, 2 * sequential_s, 9.0, 2 * stacked_s, stacked_s)
    small = job(build_normalized, num_clients=1)
    choice = choose(small, clock=clock, cache_dir=tmp_path)
    assert choice.kind is kind
    much = "fast" if kind is ExecutorKind.VMAP else "slow"
    assert f"stacked clients are 4.0 times as {much} as one at a time" in choice.reason
    assert "not fused" in choice.reason


@pytest.mark.slow
def test_a_probe_is_cached(tmp_path: Path) -> None:
    """The second choice reads no clock and is equal.

    Another update rule is timed separately, and so are examples of another shape.
    """
    small = job(build_normalized, num_clients=1)
    cache = tmp_path / "new folder"
    first = choose(small, clock=Ticking(*_STACKED_WINS), cache_dir=cache)
    assert choose(small, clock=Ticking(), cache_dir=cache) == first
    momentum = replace(small, local=replace(PLAIN, momentum=0.9))
    for other in (momentum, job(build_normalized, num_clients=1, width=10)):
        with pytest.raises(StopIteration):
            choose(other, clock=Ticking(), cache_dir=cache)


def test_a_model_that_cannot_be_stacked_trains_in_turn(tmp_path: Path) -> None:
    """The choice does not fail, and has a reason."""
    choice = choose(job(Branching), clock=Ticking(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert choice.reason


class Plain(nn.Module):
    """A linear layer: a chain, unlike the models below, or at least not always."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(5, 3), 0, list[int]()
        self.kept: Tensor | float = 0.0
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs


class Counting(Plain):
    """Behaves differently from its hundredth call on."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls < 100 else 2 * super().forward(x)


class Listing(Plain):
    """Counts calls by the length of a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return super().forward(x) if len(self.seen) < 100 else 2 * super().forward(x)


CALLS = {"of all": 0}


class CountingGlobally(Plain):
    """Counts calls in a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS["of all"] += 1
        return super().forward(x) if CALLS["of all"] % 100 else 2 * super().forward(x)


class CountingForAll(Plain):
    """Counts calls in a class attribute."""

    total = 0

    def forward(self, x: Tensor) -> Tensor:
        CountingForAll.total += 1
        return super().forward(x) if self.total % 100 else 2 * super().forward(x)


class First(Plain):
    """Behaves differently in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1 + min(self.calls, 1)
        return super().forward(x) if self.calls == 1 else torch.tanh(super().forward(x))


class Feeding(Plain):
    """Adds the result of its last call."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x) + self.kept
        self.kept = outputs.detach().mean()
        return outputs


class Keeping(Plain):
    """Stores its outputs for inspection, but does not read them."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = outputs = super().forward(x)
        return outputs


class Deep(Plain):
    """Skips a layer once in a thousand calls."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(self.more(x)) if self.draw() < 0.999 else x)

    def draw(self) -> float:
        return random.random()  # noqa: S311 - as users do


class DeepByNumpy(Deep):
    """Draws from numpy's global generator."""

    def draw(self) -> float:
        return float(np.random.rand())  # noqa: NPY002 - as users do


class DeepByTorch(Deep):
    """Draws from torch's global generator."""

    def draw(self) -> float:
        return float(torch.rand(()))


class DeepByItsOwn(Deep):
    """Draws from its own generator."""

    def draw(self) -> float:
        return float(self.generator.random())


def is_stand_in(x: object) -> bool:
    """Whether this is a tracer's proxy, or a batched tensor under ``vmap``."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - as debuggers do
    return not isinstance(x, Tensor) or bool(is_wrapped(x))


class Suspicious(Plain):
    """Raises its own type of error for anything but a real tensor."""

    class Error(Exception):
        """An error that is not derived from one of Python's specific errors."""

    def forward(self, x: Tensor) -> Tensor:
        if is_stand_in(x):
            raise self.Error("no stand-ins")
        return super().forward(x)


def build_hooked() -> nn.Module:
    """Build a chain with a hook that counts calls."""
    model, calls = build_normalized(), list[int]()

    def count(_module: nn.Module, _inputs: object, outputs: Tensor) -> Tensor:
        calls.append(1)
        return outputs if len(calls) < 100 else 2 * outputs

    model.register_forward_hook(count)
    return model


def alternating() -> nn.Module:
    """Build a model with another activation on every second call."""
    CALLS["of all"] += 1
    activation = nn.ReLU() if CALLS["of all"] % 2 else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 7), activation, nn.Linear(7, 3))


def growing() -> nn.Module:
    """Build a model that is wider on each call."""
    CALLS["of all"] += 1
    return nn.Sequential(nn.Linear(5, CALLS["of all"]), nn.Linear(CALLS["of all"], 3))


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (Counting, "changes 'calls' of the model"),
        (Listing, "changes 'seen' of the model"),
        (CountingGlobally, "changes an object that the code of CountingGlobally refers to"),
        (CountingForAll, "changes an object that the code of CountingForAll refers to"),
        (First, "a second training of the same clients"),
        (Feeding, "changes 'kept'"),
        (Deep, "random numbers of Python or numpy"),
        (DeepByNumpy, "random numbers of Python or numpy"),
        (DeepByTorch, "draws random numbers"),
        (DeepByItsOwn, "changes 'generator' of the model"),
        (Suspicious, "Error: no stand-ins"),
        (build_hooked, "changes '_forward_hooks' of the model"),
        (alternating, "a second model of make_model"),
        (Branching, "RuntimeError"),
    ],
)
def test_a_forward_pass_that_changes_from_call_to_call_trains_in_turn(
    tmp_path: Path, make_model: Callable[[], nn.Module], says: str
) -> None:
    """Whatever it does or raises; fast executors that the user names give the same reason."""
    unsteady = job(make_model)
    states = random.getstate(), repr(np.random.get_state())  # noqa: NPY002 - the application's
    choice = choose(unsteady, clock=Ticking(), cache_dir=tmp_path)
    assert (random.getstate(), repr(np.random.get_state())) == states  # noqa: NPY002 - as above
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert says in choice.reason
    make_executor(unsteady, choice.kind).train(unsteady.work(np.arange(2)))
    with pytest.raises(EngineError):
        use_configured(unsteady, ExecutorKind.FUSED)
    with pytest.raises(EngineError, match=re.escape(says)):
        use_configured(unsteady, ExecutorKind.VMAP)


@pytest.mark.parametrize(("num_draws", "is_found"), [(2, False), (1000, True)])
def test_only_a_model_that_draws_in_each_training_draws_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, num_draws: int, is_found: bool
) -> None:
    """Another thread draws during some of them."""
    train, calls = trial._train, list[float]()  # noqa: SLF001 - each training passes here

    def train_disturbed(*arguments: Any) -> TrainedBlock:  # Any: as trial._train
        if len(calls) < num_draws:
            calls.append(random.random())  # noqa: S311 - as another thread may
        return train(*arguments)

    monkeypatch.setattr(trial, "_train", train_disturbed)
    choice = choose(job(Plain), clock=Ticking(), cache_dir=tmp_path)
    assert len(calls) >= 2
    assert ("random numbers" in choice.reason) == is_found


def test_a_loss_that_changes_from_call_to_call_trains_in_turn(tmp_path: Path) -> None:
    """For example a curriculum that counts calls in a closure."""
    calls = list[int]()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        calls.append(1)
        share = min(1.0, len(calls) / 1e4)
        return nn.functional.cross_entropy(outputs, labels, reduction="none") * (1 - share)

    unsteady = job(chain, objective=CustomLoss(loss))
    choice = choose(unsteady, clock=Ticking(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert "changes its loss" in choice.reason


def test_a_model_that_keeps_its_outputs_is_fused(tmp_path: Path) -> None:
    """The control: its state is a function of the inputs, so it does not matter."""
    choice = choose(job(Keeping), clock=Ticking(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.FUSED


def test_a_model_that_is_another_each_time_is_refused(tmp_path: Path) -> None:
    """No executor can train it; the message names a tensor that differs."""
    with pytest.raises(EngineError, match=r"a different model on each call: '0.weight'"):
        choose(job(growing), clock=Ticking(), cache_dir=tmp_path)


def test_a_model_that_no_executor_can_train_is_an_engine_error(tmp_path: Path) -> None:
    """The message includes the model's own error."""

    class Narrow(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :4])

    for kind in (ExecutorKind.VMAP, ExecutorKind.COMPILED):
        with pytest.raises(EngineError, match=r"cannot be trained.*shapes cannot be multiplied"):
            use_configured(job(Narrow), kind)
    with pytest.raises(EngineError, match=r"cannot be trained.*shapes cannot be multiplied"):
        choose(job(Narrow), clock=Ticking(), cache_dir=tmp_path)


def test_a_model_that_fails_on_larger_blocks_trains_in_turn(tmp_path: Path) -> None:
    """The model passes the trial, and fails only when blocks are timed."""

    class Small(Plain):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3 and is_stand_in(x):
                raise LookupError("too many")
            return super().forward(x).square()

    choice = choose(job(Small), clock=Ticking(*[1.0] * 6), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert "LookupError: too many" in choice.reason


class Widening(Plain):
    """A layer in float64 after one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(super().forward(x).double())
        return outputs


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (lambda: chain().bfloat16(), "'0.weight' is torch.bfloat16"),
        (Widening, "'linear.weight' is torch.float32, not torch.float64"),
    ],
)
def test_a_model_of_other_dtypes_trains_in_turn(
    tmp_path: Path, make_model: Callable[[], nn.Module], says: str
) -> None:
    """It keeps its dtypes, which stacking would convert, and the reason says so."""
    odd = job(make_model)
    choice = choose(odd, clock=Ticking(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert says in choice.reason
    assert (
        make_executor(odd, choice.kind).train(odd.work(np.arange(4))).deltas_KP.abs().amax(1).all()
    )
    with pytest.raises(EngineError, match="trains in that dtype"):
        use_configured(odd, ExecutorKind.VMAP)


def test_layers_whose_dtypes_do_not_fit_are_named(tmp_path: Path) -> None:
    """No executor can train a model in which a cast is missing."""

    class Uncast(Widening):
        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.linear(x))
            return outputs

    says = r"same dtype.*torch.float32 \('linear.weight', ...\), torch.float64 \('head.weight'"
    with pytest.raises(EngineError, match=says):
        choose(job(Uncast), clock=Ticking(), cache_dir=tmp_path)


@pytest.mark.slow
def test_a_model_in_float64_takes_features_in_float32(tmp_path: Path) -> None:
    """With the stacked executor as well as the sequential one."""
    clock = Ticking(*_STACKED_WINS)
    wide = job(lambda: build_normalized().double(), num_clients=1)
    assert choose(wide, clock=clock, cache_dir=tmp_path).kind is ExecutorKind.VMAP


def test_mixed_precision_is_not_fused(tmp_path: Path) -> None:
    """The fused executor computes without autocast."""
    mixed = job(chain, precision=Precision.BFLOAT16, num_clients=1)
    clock = Ticking(9.0, 1.0, 1.0, 9.0, 4.0, 4.0)
    choice = choose(mixed, clock=clock, cache_dir=tmp_path)
    assert choice.kind is not ExecutorKind.FUSED


@pytest.mark.slow
def test_features_that_are_several_inputs_are_not_fused(tmp_path: Path) -> None:
    """A chain takes one tensor; the other executors pass the inputs as the features define them."""
    of_one = job(chain, num_clients=1)
    assert isinstance(of_one.population, ArrayPopulation)
    by_name = replace(
        of_one.population, features={"input": require_single_input(of_one.population.features)}
    )
    several = replace(of_one, population=by_name)
    says = "the features are input 'input', where one tensor is needed"
    clock = Ticking(9.0, 1.0, 1.0, 9.0, 4.0, 4.0)
    choice = choose(several, clock=clock, cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert f"not fused: {says}" in choice.reason
    with pytest.raises(EngineError, match=says):
        use_configured(several, ExecutorKind.FUSED)
    assert use_configured(several, ExecutorKind.VMAP).kind is ExecutorKind.VMAP


def test_executors_are_made_by_name() -> None:
    """Each name creates its executor; an impossible one raises an error with the reason."""
    plain = job(chain)
    assert isinstance(make_executor(plain, ExecutorKind.SEQUENTIAL), SequentialExecutor)
    assert isinstance(make_executor(plain, ExecutorKind.VMAP), StackedExecutor)
    assert isinstance(make_executor(plain, ExecutorKind.FUSED), FusedExecutor)
    with pytest.raises(EngineError):
        make_executor(job(Branching), ExecutorKind.FUSED)


class Drifting(nn.Module):
    """A head on a frozen base that each forward pass changes, unseen by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(5), requires_grad=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.base.data.mul_(1.01)
        outputs: Tensor = self.head(x * self.base)
        return outputs


def test_frozen_parameters_are_in_memory_twice() -> None:
    """As the global model, and where modules may change them; each module had its own copy."""
    made = job(Drifting)
    kept = made.params.constants["base"]
    places = {made.resident_model().frozen["base"].data_ptr() for _ in range(3)}
    assert len(places) == 1
    assert kept.data_ptr() not in places
    for constants, is_shared in ((None, False), (made.params.constants, True)):
        stacked = BlockGradient(
            Drifting,
            CrossEntropy(),
            device=kept.device,
            precision=Precision.FLOAT32,
            constants=constants,
        )
        base = stacked.module.get_parameter("base")
        assert (base.data_ptr() == kept.data_ptr()) is is_shared


def test_a_frozen_parameter_that_changes_starts_from_the_global_one_in_each_client() -> None:
    """Also after another model that shares the memory was used."""
    made = job(Drifting)
    executor, other = make_executor(made, ExecutorKind.SEQUENTIAL), made.resident_model()
    alone = [executor.train(made.work(np.asarray([each]))).deltas_KP.clone() for each in range(4)]
    assert torch.equal(made.params.constants["base"], torch.ones(5))
    other.load(made.params)
    other.module(torch.ones(2, 5))
    work = made.work(np.arange(4))
    together = executor.train(work).deltas_KP
    for client_id, delta in zip(work.client_ids.tolist(), together, strict=True):
        assert torch.equal(delta, alone[client_id][0])


def test_an_executor_that_the_user_names_is_used_or_refused() -> None:
    """It is never replaced silently, and the error suggests an alternative."""
    assert use_configured(job(build_normalized), ExecutorKind.VMAP).reason == "as configured"
    assert use_configured(job(Branching), ExecutorKind.SEQUENTIAL).reason == "as configured"
    with pytest.raises(EngineError, match='use "auto" or "sequential"'):
        use_configured(job(Branching), ExecutorKind.VMAP)
    with pytest.raises(EngineError):
        use_configured(job(build_normalized), ExecutorKind.FUSED)


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
@pytest.mark.parametrize("kind", [ExecutorKind.VMAP, ExecutorKind.FUSED])
def test_small_batches_are_no_objection(kind: ExecutorKind, batch_size: int | None) -> None:
    """The trial uses batches no larger than the clients' own."""
    make_model = chain if kind is ExecutorKind.FUSED else build_normalized
    small = job(make_model, local=replace(PLAIN, batch_size=batch_size))
    assert use_configured(small, kind).reason == "as configured"


@pytest.mark.slow
def test_a_damaged_cache_entry_counts_as_none(tmp_path: Path) -> None:
    """The next choice measures again, and replaces it."""
    small = job(build_normalized, num_clients=1)
    first = choose(small, clock=Ticking(*_STACKED_WINS), cache_dir=tmp_path)
    (entry,) = tmp_path.iterdir()
    assert json.loads(entry.read_text()) == {"sequential_s": 1.0, "stacked_s": 0.25}
    for damage in ("", "{}", "[1]", "null", '{"sequential_s": "x", "stacked_s": 1}'):
        entry.write_text(damage)
        with pytest.raises(StopIteration):  # it measures, so it needs the clock
            choose(small, clock=Ticking(), cache_dir=tmp_path)
    entry.write_text('{"sequential_s": 1}')
    assert choose(small, clock=Ticking(*_STACKED_WINS), cache_dir=tmp_path) == first
    assert json.loads(entry.read_text()) == {"sequential_s": 1.0, "stacked_s": 0.25}


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """The folder cannot be created: the timings are used, but not cached."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    small = job(build_normalized, num_clients=1)
    clock = Ticking(*_STACKED_WINS)
    assert choose(small, clock=clock, cache_dir=blocked / "cache").kind is ExecutorKind.VMAP
    with pytest.raises(StopIteration):
        choose(small, clock=Ticking(), cache_dir=blocked / "cache")


def test_a_trial_block_is_made_of_real_clients_largest_first() -> None:
    """Without client state."""
    keeping = replace(PLAIN, momentum=0.9, keep_momentum=True)
    work = job(chain, local=keeping).work(np.arange(3))
    assert len(work.client_ids) == 3
    assert (np.diff(work.schedule.counts_TK.sum(0)) <= 0).all()
    assert work.client_state == {}
