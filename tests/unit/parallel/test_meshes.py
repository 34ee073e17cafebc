"""A training is the same on every mesh: its weights, its optimizer state, and every loss.

The reference is a loop in one process that uses nothing of the package. As a control, the same
comparison detects each of several deliberate mistakes.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, before forks, each of which would
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fedlearn.errors import ConfigError, EngineError
from fedlearn.parallel import checkpoints, engine, preparing
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.norms import get_own_part, sum_of_squares
from fedlearn.parallel.optimizers import Rate
from fedlearn.parallel.parts import Cut
from fedlearn.parallel.plan import TrainingPlan, TrainingPrecision
from fedlearn.parallel.task import Task, TrainingState
from tests.trainings import (
    BATCH_SIZE,
    INPUTS,
    MAX_NORM,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_STEPS,
    WIDTH,
    InOrder,
    Outcome,
    Pool,
    alone,
    outcome,
    task_of,
    trained,
    transformer,
)

pytestmark = pytest.mark.xdist_group("meshes")  # they share worlds and imports that take seconds

#: Bound of rounding errors in float64, after six steps.
SAME = 1e-12
#: A difference that rounding cannot explain.
OTHER = 1e-6
LIMIT_S = 300.0


class Feedforward(nn.Module):
    """The feed-forward half of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        added: Tensor = self.down(F.gelu(self.up(self.before(tokens))))
        return tokens + added

    def tensor_cuts(self) -> Mapping[str, Cut]:
        """Return the same cuts as a transformer block."""
        return {"up": Cut(along="columns"), "down": Cut(along="rows")}


def perceptron(num_blocks: int = 1, *, seed: int = 358) -> nn.Sequential:
    """Return a model without attention, for meshes that combine degrees.

    On such a mesh, every process takes seconds to work out how torch cuts each operation. With
    these seeds some steps are clipped, and some are not.
    """
    torch.manual_seed(seed)
    first, blocks = nn.Linear(INPUTS, WIDTH), [Feedforward() for _ in range(num_blocks)]
    return nn.Sequential(first, *blocks, Pool(), nn.Linear(WIDTH, NUM_CLASSES)).double()


def deep_perceptron() -> nn.Sequential:
    """Return a perceptron with a block for each of two stages."""
    return perceptron(2, seed=23)


# ---- the same training, without the package ----------------------------------------------------


def plainly(
    optimizer: str,
    *,
    dtype: torch.dtype = torch.float64,
    num_steps: int = NUM_STEPS,
    make_model: Callable[[], nn.Module] | None = None,
) -> Outcome:
    """Train in one process with a plain loop, the reference."""
    model = transformer(dtype=dtype) if make_model is None else make_model()
    examples = InOrder.small(dtype)
    named = dict(model.named_parameters())
    state, take = _OPTIMIZERS[optimizer](named)
    losses = []
    for step in range(num_steps):
        rows = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % NUM_EXAMPLES
        model.zero_grad()
        loss = F.cross_entropy(model(examples.features[rows]), examples.labels[rows])
        loss.backward()
        grads = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        for grad in grads:  # not by clip_grad_norm_, which adds 1e-6 to the norm
            grad.mul_(min(1.0, MAX_NORM / norm))
        take([1, 4 / 3, 5 / 3][step] if step < 3 else 2)  # the base rate is for half the batch
        losses.append(float(loss.detach()))
    kept = {
        f"{name}/{key}": value
        for name, parameter in named.items()
        for key, value in state[parameter].items()
    }
    return Outcome(losses, model.state_dict(), kept)


#: An optimizer's state by parameter, and the function that takes a step, given the rate's factor.
Plain = tuple[Mapping[Tensor, dict[str, Tensor]], Callable[[float], None]]


def _of_torch(make: Callable[..., torch.optim.Optimizer], named: Mapping[str, Tensor]) -> Plain:
    made = make(list(named.values()))
    rate = made.param_groups[0]["lr"]

    def take(factor: float) -> None:
        made.param_groups[0]["lr"] = rate * factor
        made.step()

    return made.state, take


def _lars(named: Mapping[str, Tensor]) -> Plain:
    """LARS: algorithm 1 of You, Gitman and Ginsburg, tensor by tensor."""
    state = {w: {"momentum_buffer": torch.zeros_like(w)} for w in named.values()}

    @torch.no_grad()
    def take(factor: float) -> None:
        for w, kept in state.items():
            assert w.grad is not None
            rate, move = 2.0 * factor, w.grad
            if w.dim() == 2:
                size, slope = math.sqrt(float((w * w).sum())), math.sqrt(float((move * move).sum()))
                rate *= 0.001 * size / (slope + 0.001 * size)
                move = move + 0.001 * w
            kept["momentum_buffer"] = 0.9 * kept["momentum_buffer"] + rate * move
            w.sub_(kept["momentum_buffer"])

    return state, take


_OPTIMIZERS: Mapping[str, Callable[[Mapping[str, Tensor]], Plain]] = {
    "adamw": partial(_of_torch, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
    "sgd": partial(_of_torch, partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "lars": _lars,
}


# ---- the same training, on meshes --------------------------------------------------------------


#: Patches the package with a mistake, in one process.
Mistake = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Case:
    """A training on a mesh.

    Attributes:
        mesh: The mesh.
        micro: Number of micro-batches.
        optimizer: Name of the optimizer.
        mistake: A deliberate mistake, made in each process.
        settings: Further arguments of :func:`task_of`.
        num_steps: Number of steps to take.
        make_model: Builds the model; ``None``: :func:`transformer`.
    """

    mesh: Mesh
    micro: int = 1
    optimizer: str = "adamw"
    mistake: Mistake | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: as the fields of Spread
    num_steps: int = NUM_STEPS
    make_model: Callable[[], nn.Module] | None = None

    def __str__(self) -> str:
        told = [str(self.mesh), f"{self.micro} micro-batches", self.optimizer]
        told += [f"{name} {value}" for name, value in self.settings.items()]
        told += [f"{self.num_steps} steps"] * (self.num_steps != NUM_STEPS)
        told += [] if self.make_model is None else [self.make_model.__name__]
        return ", ".join(told if self.mistake is None else [*told, self.mistake.__name__])

    def task(self) -> Task:
        """Build the task to train.

        Raises:
            ConfigError: The settings cannot be combined.
        """
        task = task_of(
            self.mesh, optimizer=self.optimizer, num_micro_batches=self.micro, **self.settings
        )
        return task if self.make_model is None else replace(task, make_model=self.make_model)

    def engine(self) -> RankTrainer:
        """Create the engine of one process."""
        return RankTrainer(self.task(), device=torch.device("cpu"))

    def trained(self, folder: Path) -> list[float]:
        """Train as one process of the world; save the final state as a checkpoint in the folder."""
        with pytest.MonkeyPatch.context() as patch:
            if self.mistake is not None:
                self.mistake(patch)
            made = self.engine()
            losses = [each.loss for each in trained(made, until=self.num_steps)]
        checkpoints.save(made, folder, keep=1)
        return losses


def in_one_world(cases: Sequence[Case]) -> dict[str, Outcome]:
    """Run the trainings one after another in the same world; return their outcomes."""
    (world_size,) = {case.mesh.world_size for case in cases}
    with tempfile.TemporaryDirectory() as folder:

        def body() -> list[list[float]]:
            return [case.trained(Path(folder, str(at))) for at, case in enumerate(cases)]

        losses, *_ = run_in_processes(body, world_size=world_size, timeout_s=LIMIT_S)
        states = [load_final_state(Path(folder, str(at))) for at in range(len(cases))]
    ended = zip(cases, losses, states, strict=True)
    return {str(case): outcome(told, state) for case, told, state in ended}


def load_final_state(folder: Path) -> TrainingState:
    """Read the state in the newest checkpoint of a folder."""
    newest = checkpoints.latest(folder)
    assert newest is not None
    return checkpoints.read(newest)


# ---- mistakes ----------------------------------------------------------------------------------


def without_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankTrainer, "_unscale_and_clip", lambda *_: True)


def clip_by_stage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankTrainer, "_compute_norm", lambda _, grads: sum_of_squares(grads).sqrt())


def clip_by_shard(patch: pytest.MonkeyPatch) -> None:
    def own_squares(grads: Sequence[Tensor]) -> Tensor:
        return torch.stack([get_own_part(each).double().square().sum() for each in grads]).sum()

    patch.setattr(engine, "sum_of_squares", own_squares)


def without_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preparing, "DistributedDataParallel", lambda module, **_: module)


def without_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    switch = FSDPModule.set_requires_gradient_sync
    patch.setattr(FSDPModule, "set_requires_gradient_sync", lambda module, _: switch(module, False))


def sum_over_processes(patch: pytest.MonkeyPatch) -> None:
    def sum_rows(bucket: Any) -> torch.futures.Future[Tensor]:  # Any: torch's own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        done: torch.futures.Future[Tensor] = work.get_future().then(lambda all_: all_.value()[0])
        return done

    def made(module: nn.Module, **settings: Any) -> DistributedDataParallel:  # Any: torch's own
        replicas = DistributedDataParallel(module, **settings)
        # Without annotations: torch compares them with a type that it does not name.
        replicas.register_comm_hook(None, lambda state, bucket: sum_rows(bucket))  # noqa: ARG005
        return replicas

    patch.setattr(preparing, "DistributedDataParallel", made)


def sum_over_examples(patch: pytest.MonkeyPatch) -> None:
    def sum_rows(_: RankTrainer, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="sum")

    patch.setattr(RankTrainer, "_compute_loss", sum_rows)


def without_warmup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rate, "at", lambda *_, **__: 2.0)


def without_scaled_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rate, "at", lambda *_, **__: 1.0)


def on_the_same_examples(patch: pytest.MonkeyPatch) -> None:
    positions = TrainingPlan.positions
    patch.setattr(TrainingPlan, "positions", lambda plan, step, _: positions(plan, step, 0))


# ---- what is trained ---------------------------------------------------------------------------

#: Together with those in ACCEPTED, these have sixteen meshes. Most use several micro-batches, and
#: some use other optimizers.
CASES = [
    Case(Mesh(replicate=2)),
    Case(Mesh(replicate=2), micro=4, optimizer="sgd"),
    Case(Mesh(replicate=2), optimizer="lars"),
    Case(Mesh(shard=2), micro=2),
    Case(Mesh(shard=2), optimizer="lars"),
    Case(Mesh(shard=2), settings={"offload": True}),
    Case(Mesh(tensor=2)),
    Case(Mesh(tensor=2), micro=2, optimizer="sgd"),
    Case(Mesh(tensor=2), optimizer="lars"),
    Case(Mesh(pipeline=2), micro=4),
    Case(Mesh(pipeline=2), micro=2, optimizer="lars"),
    Case(Mesh(replicate=4), micro=2),
    Case(Mesh(shard=4), num_steps=3, make_model=perceptron),
    Case(Mesh(tensor=4)),
    Case(Mesh(replicate=2, shard=2), micro=2, num_steps=3, make_model=perceptron),
    Case(Mesh(replicate=2, tensor=2), micro=2, num_steps=3, make_model=perceptron),
    Case(Mesh(shard=2, tensor=2), micro=2, optimizer="lars", num_steps=3, make_model=perceptron),
    Case(Mesh(pipeline=2, replicate=2, tensor=2), micro=2, num_steps=3, make_model=deep_perceptron),
    Case(Mesh(replicate=2, shard=2, tensor=2), optimizer="sgd", num_steps=2, make_model=perceptron),
]

MISTAKES = [
    Case(Mesh(replicate=2), mistake=without_clip),
    Case(Mesh(pipeline=2), micro=4, mistake=clip_by_stage),
    Case(Mesh(shard=2), micro=2, mistake=clip_by_shard),
    Case(Mesh(tensor=2), mistake=clip_by_shard),
    Case(Mesh(replicate=2), mistake=without_sync),
    Case(Mesh(shard=2), micro=2, mistake=without_reduce_scatter),
    Case(Mesh(replicate=2), mistake=sum_over_processes),
    Case(Mesh(replicate=2), mistake=sum_over_examples),
    Case(Mesh(replicate=2), mistake=without_warmup),
    Case(Mesh(replicate=2), mistake=without_scaled_rate),
    Case(Mesh(replicate=2), mistake=on_the_same_examples),
]

#: Trainings that compute partly in half precision.
HALVES = [
    Case(mesh, settings={"dtype": torch.float32, "precision": precision})
    for mesh in (Mesh(replicate=2), Mesh(shard=2))
    for precision in (TrainingPrecision.BFLOAT16, TrainingPrecision.FLOAT16)
] + [
    Case(
        Mesh(pipeline=2),
        micro=2,
        settings={"dtype": torch.float32, "precision": TrainingPrecision.BFLOAT16},
    ),
    Case(
        Mesh(tensor=2), settings={"dtype": torch.float32, "precision": TrainingPrecision.BFLOAT16}
    ),
]

#: Pairs of trainings: without recomputation of blocks, and with it.
RECOMPUTED = [
    Case(mesh, micro=2, settings={"dropout": 0.3, "recompute": again})
    for mesh in (Mesh(replicate=2), Mesh(shard=2), Mesh(pipeline=2))
    for again in (False, True)
]


def iter_accepted(world_size: int) -> Iterator[Case]:
    """Yield all accepted pipelines on ``world_size`` processes, for three steps.

    Each mesh is combined with each schedule; for two processes, also with each number of
    micro-batches.
    """
    degrees = [n for n in (1, 2, 4) if world_size % n == 0]
    for pipeline, replicate, shard in product(degrees, repeat=3):
        tensor, rest = divmod(world_size, pipeline * replicate * shard)
        if pipeline == 1 or rest or not tensor:
            continue
        mesh = Mesh(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
        plans = list(product(("1f1b", "gpipe"), (1, 2, 4)))
        for schedule, micro in plans if world_size == 2 else (("1f1b", 4), ("gpipe", 2)):
            case = Case(mesh, micro, settings={"schedule": schedule}, num_steps=3)
            with suppress(ConfigError):
                case.task()
                yield case


ACCEPTED = [*iter_accepted(2), *iter_accepted(4)]

#: One training for each degree, for the default test run.
QUICK = [
    Case(Mesh(replicate=2)),
    Case(Mesh(shard=2), micro=2),
    Case(Mesh(tensor=2)),
    Case(Mesh(pipeline=2), micro=4),
]


_SLOW = (*CASES, *ACCEPTED, *MISTAKES, *HALVES, *RECOMPUTED)
_LONG = [each for each in _SLOW if each not in QUICK]
#: Lists of trainings, each of which runs in one world.
WORLDS = [QUICK, *([each for each in _LONG if each.mesh.world_size == n] for n in (2, 4, 8))]


@cache
def run_world(world: int) -> Mapping[str, Outcome] | EngineError:
    """Return the outcomes of a world's trainings, or its error; each world is run only once."""
    try:
        return in_one_world(WORLDS[world])
    except EngineError as error:
        return error


def on_mesh(case: Case) -> Outcome:
    """Return the outcome of a training, from its world."""
    outcomes = run_world(next(at for at, cases in enumerate(WORLDS) if case in cases))
    if isinstance(outcomes, EngineError):
        raise outcomes
    return outcomes[str(case)]


@pytest.fixture(scope="module")
def plain() -> Mapping[str, Outcome]:
    """Outcomes of the plain loop, by optimizer."""
    return {optimizer: plainly(optimizer) for optimizer in _OPTIMIZERS}


def each_of(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrize a test with these cases; all but the quick ones are slow."""
    slow = pytest.mark.slow
    given = [
        pytest.param(each, id=str(each), marks=() if each in QUICK else slow) for each in cases
    ]
    return pytest.mark.parametrize("case", given)


# ---- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_one_process_equals_a_plain_loop(optimizer: str, plain: Mapping[str, Outcome]) -> None:
    assert alone(task_of(optimizer=optimizer)).apart(plain[optimizer]) <= SAME


def test_micro_batches_add_up_to_the_batch(plain: Mapping[str, Outcome]) -> None:
    assert alone(task_of(num_micro_batches=8)).apart(plain["adamw"]) <= SAME


@pytest.mark.parametrize(
    "case",
    [
        Case(Mesh()),
        *(
            Case(Mesh(), optimizer=optimizer, num_steps=num_steps, make_model=perceptron)
            for optimizer, num_steps in (("adamw", 3), ("lars", 3), ("sgd", 2))
        ),
        Case(Mesh(), num_steps=3, make_model=deep_perceptron),
    ],
    ids=str,
)
def test_some_steps_are_clipped_and_some_are_not(case: Case) -> None:
    """If all were clipped, a gradient that is wrong by a factor would go unnoticed."""
    norms = list[float]()
    with pytest.MonkeyPatch.context() as patch:
        norm = RankTrainer._compute_norm  # noqa: SLF001 (the function under test)

        def note_call(one: RankTrainer, grads: Sequence[Tensor]) -> Tensor:
            norms.append(float(norm(one, grads)))
            return norm(one, grads)

        patch.setattr(RankTrainer, "_compute_norm", note_call)
        alone(case.task(), until=case.num_steps)
    assert min(norms) < MAX_NORM < max(norms)


# ---- meshes ------------------------------------------------------------------------------------


@pytest.mark.slow
@each_of(CASES)
def test_a_mesh_equals_a_plain_loop(case: Case, plain: Mapping[str, Outcome]) -> None:
    whole = plain[case.optimizer]
    if case.num_steps != NUM_STEPS:
        whole = plainly(case.optimizer, num_steps=case.num_steps, make_model=case.make_model)
    assert on_mesh(case).apart(whole) <= SAME


@each_of(ACCEPTED)
def test_a_pipeline_that_is_accepted_equals_a_plain_loop(case: Case) -> None:
    """More than one step, because torch's schedules run a stage once more in the first."""
    assert on_mesh(case).apart(plainly("adamw", num_steps=case.num_steps)) <= SAME


def test_there_are_sixteen_meshes() -> None:
    assert len({case.mesh for case in (*CASES, *ACCEPTED)}) == 16


@each_of(MISTAKES)
def test_a_mistake_is_found(case: Case, plain: Mapping[str, Outcome]) -> None:
    """Found by the same comparison that passes on this mesh without the mistake."""
    assert replace(case, mistake=None) in QUICK
    assert on_mesh(case).apart(plain["adamw"]) > OTHER


@each_of(HALVES)
def test_half_precision_stays_near_the_whole(case: Case) -> None:
    """It must also differ a little, or half precision would not have been used at all."""
    whole, half = plainly("adamw", dtype=torch.float32), on_mesh(case)
    worst = max(abs(a - b) for a, b in zip(whole.losses, half.losses, strict=True))
    assert 1e-5 < worst < 0.02


@each_of(RECOMPUTED[1::2])
def test_what_is_computed_again_has_the_same_bits(case: Case) -> None:
    """Even though the model draws random numbers."""
    kept = replace(case, settings={**case.settings, "recompute": False})
    assert on_mesh(case).apart(on_mesh(kept)) == 0.0


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_is_gone_on_from_on_others(
    tmp_path: Path, plain: Mapping[str, Outcome]
) -> None:
    """Takes two steps each when sharded, in a pipeline, and replicated."""
    meshes = [
        Case(Mesh(shard=2), micro=2),
        Case(Mesh(pipeline=2), micro=4),
        Case(Mesh(replicate=2)),
    ]

    def body() -> list[float]:
        losses = list[float]()
        for at, case in enumerate(meshes):
            made = case.engine()
            if (newest := checkpoints.latest(tmp_path)) is not None:
                checkpoints.restore(made, newest)
            losses += [each.loss for each in trained(made, until=2 * at + 2)]
            checkpoints.save(made, tmp_path, keep=2)
        return losses

    losses, _ = run_in_processes(body, world_size=2, timeout_s=LIMIT_S)
    assert outcome(losses, load_final_state(tmp_path)).apart(plain["adamw"]) <= SAME
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(replicate=2), Mesh(shard=2)], ids=str)
def test_a_step_that_overflows_is_skipped_by_all_alike(mesh: Mesh) -> None:
    """The scale is halved until gradients fit into float16; until then no weight changes."""
    start = 2.0**24
    settings = {"precision": TrainingPrecision.FLOAT16, "initial_loss_scale": start}
    case = Case(mesh, settings={"dtype": torch.float32, **settings})

    def body() -> list[tuple[list[float], Tensor]]:
        made, seen = case.engine(), []
        for step in range(14):
            trained(made, until=step + 1)
            weights = [get_own_part(each).flatten() for each in made.tensors().values()]
            whole = torch.cat([each.double() for each in weights])
            seen.append((made.progress().tolist(), whole))
        return seen

    first, second = run_in_processes(body, world_size=2, timeout_s=LIMIT_S)
    assert [progress for progress, _ in first] == [progress for progress, _ in second]
    skipped = [0, *(int(progress[3]) for progress, _ in first)]
    for (before, after), (progress, _) in zip(pairwise(skipped), first, strict=True):
        assert after - before in (0, 1)
        assert progress[1] == start / 2**after
    assert 0 < skipped[-1] < 14  # in the end, gradients fit
    for (a, b), (one, other) in zip(pairwise(skipped[1:]), pairwise(first), strict=True):
        assert torch.equal(one[1], other[1]) == (a < b)  # a skipped step changes nothing
    if mesh.shard == 1:  # otherwise each process has a different part
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


class Underway(torch.autograd.Function):
    """Counts micro-batches in flight: after their forward and before their backward pass."""

    now = most = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # Any: torch's own
        Underway.now += 1
        Underway.most = max(Underway.most, Underway.now)
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        Underway.now -= 1
        return grads[0]


class Counted(nn.Linear):
    """A linear layer that counts its micro-batches in flight."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, inputs] to [batch, length, outputs]."""
        apply: Any = Underway.apply  # Any: torch's own
        counted: Tensor = apply(super().forward(x))
        return counted


def most_underway(stages: int, schedule: str) -> list[int]:
    """Return the most of eight micro-batches that each stage has in flight at once."""
    task = task_of(Mesh(pipeline=stages), num_micro_batches=8, schedule=schedule)

    def model() -> nn.Module:
        widths = [Counted(INPUTS, INPUTS) for _ in range(stages - 1)]
        return nn.Sequential(*widths, Pool(), Counted(INPUTS, NUM_CLASSES)).double()

    def body() -> int:
        made = RankTrainer(replace(task, make_model=model), device=torch.device("cpu"))
        trained(made, until=1)  # the first step also runs a pass to infer shapes
        Underway.now = Underway.most = 0
        trained(made, until=2)
        return Underway.most

    return run_in_processes(body, world_size=stages, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_1f1b_has_as_many_micro_batches_underway_as_stages_follow_and_gpipe_all() -> None:
    assert most_underway(2, "1f1b") == [2, 1]
    assert most_underway(2, "gpipe") == [8, 8]


@pytest.mark.slow
def test_the_first_of_four_stages_has_four_underway() -> None:
    assert most_underway(4, "1f1b") == [4, 3, 2, 1]


class Term(nn.Module):
    """Adds w_i x_i to y, in rows that hold x_0, x_1, x_2 and y."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.w = index, nn.Linear(INPUTS, INPUTS, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [batch, 4, inputs] to the same shape."""
        y = rows[:, 3] + self.w(rows[:, self.index])
        return torch.cat([rows[:, :3], y.unsqueeze(1)], dim=1)


class Last(nn.Module):
    """Selects y, whose first numbers are the logits."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map [batch, 4, inputs] to [batch, classes]."""
        return rows[:, 3, :NUM_CLASSES]


@pytest.mark.slow
def test_naive_model_parallelism_computes_one_product_after_the_other(tmp_path: Path) -> None:
    """Three processes compute y = w_0 x_0 + w_1 x_1 + w_2 x_2, a pipeline without micro-batches."""
    mesh = Mesh(pipeline=3)
    examples = InOrder.small()
    padded = torch.cat([examples.features, torch.zeros(NUM_EXAMPLES, 1, INPUTS)], dim=1)

    def model() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(Term(index) for index in range(3)), Last()).double()

    def body() -> list[float]:
        task = replace(
            task_of(mesh, optimizer="sgd", schedule="gpipe"),
            make_model=model,
            stream=InOrder(padded, examples.labels),
        )
        made = RankTrainer(task, device=torch.device("cpu"))
        losses = [each.loss for each in trained(made, until=1)]
        checkpoints.save(made, tmp_path, keep=1)
        return losses

    losses, *_ = run_in_processes(body, world_size=3, timeout_s=LIMIT_S)
    w = [each.detach().requires_grad_() for each in model().parameters()]
    x, labels = examples.features[:BATCH_SIZE], examples.labels[:BATCH_SIZE]
    y = x[:, 0] @ w[0].T + x[:, 1] @ w[1].T + x[:, 2] @ w[2].T
    loss = F.cross_entropy(y[:, :NUM_CLASSES], labels)
    loss.backward()
    assert losses[0] == pytest.approx(float(loss.detach()), abs=SAME)
    ended = list(load_final_state(tmp_path).model.values())
    grads = [each.grad for each in w if each.grad is not None]
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    for before, grad, after in zip(w, grads, ended, strict=True):
        step = 0.1 * (grad * min(1.0, MAX_NORM / norm) + 0.01 * before)
        assert float((before - step - after).detach().abs().max()) <= SAME


@pytest.mark.slow
def test_stages_do_not_draw_the_same_random_numbers() -> None:
    """Otherwise dropout would use the same masks in all stages."""

    def body() -> Tensor:
        made = Case(Mesh(pipeline=2), micro=2).engine()
        trained(made, until=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made, "_compute_gradients", lambda: torch.rand(8).double())
            return made.take_step()

    first, second = run_in_processes(body, world_size=2, timeout_s=LIMIT_S)
    assert not torch.equal(first, second)
    again, _ = run_in_processes(body, world_size=2, timeout_s=LIMIT_S)
    assert torch.equal(first, again)  # control: a stage draws the same numbers in each run


@pytest.mark.slow
def test_a_layer_that_changes_its_input_in_place_may_follow_a_sharded_one() -> None:
    """A linear layer on sequences returns a view; FSDP misses the gradient if it is changed."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(INPUTS, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
        last = [nn.ReLU(inplace=True), Pool(), nn.Linear(WIDTH, NUM_CLASSES)]
        return nn.Sequential(*layers, *last).double()

    def losses(mesh: Mesh) -> list[float]:
        task = replace(task_of(mesh), make_model=model)
        return [each.loss for each in trained(RankTrainer(task, device=torch.device("cpu")))]

    spread, _ = run_in_processes(lambda: losses(Mesh(shard=2)), world_size=2, timeout_s=LIMIT_S)
    assert spread == pytest.approx(losses(Mesh()), abs=SAME)
