"""The predicted memory of a training equals the memory that it really uses."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.cli.app import main
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.live_tensors import StepMemory, measure_step
from fedlearn.parallel.memory import Counted, Memory, predict
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import AdamKin, Lars, MakesOptimizer, Sgd
from fedlearn.parallel.parts import recompute
from fedlearn.parallel.plan import Spread, TrainingPlan, TrainingPrecision
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Task
from fedlearn.training.local_data import TensorData
from tests.trainings import INPUTS, LENGTH, transformer

BATCH_SIZE = 32
ADAMW, SGD = AdamKin(learning_rate=0.01), Sgd(learning_rate=0.1)
#: For activations and the peak: the measurement does not see temporary memory inside operations.
#: Parameters, gradients and state must be exact.
TOLERANCE = 0.15

MAKES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        ),
        (64,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 8 * 8, 4),
        ),
        (3, 16, 16),
    ),
    "transformer": (partial(transformer, dtype=torch.float32), (LENGTH, INPUTS)),
}


def plan_of(
    optimizer: MakesOptimizer,
    *,
    mesh: Mesh | None = None,
    parts: int = 1,
    again: bool = False,
    precision: TrainingPrecision = TrainingPrecision.FULL,
) -> TrainingPlan:
    spread = Spread(
        mesh=mesh or Mesh(), num_micro_batches=parts, recompute=again, precision=precision
    )
    return TrainingPlan(
        batch_size=BATCH_SIZE, num_steps=2, optimizer=optimizer, seed=Seed(0), spread=spread
    )


def examples(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.zeros(BATCH_SIZE, *shape), torch.zeros(BATCH_SIZE, dtype=torch.int64)


def predicted(model: str, plan: TrainingPlan) -> Memory:
    make, shape = MAKES[model]
    features, labels = examples(shape)
    (found,) = predict(make, plan, features=features, labels=labels, objective=CrossEntropy())
    return found


def really(model: str, plan: TrainingPlan) -> StepMemory:
    """Measure a step of a plain loop: forward and backward by micro-batch, then the optimizer."""
    make, shape = MAKES[model]
    module, (features, labels) = make(), examples(shape)
    if plan.spread.recompute:
        recompute(module)
    optimizer = plan.optimizer.over([{"params": list(module.parameters())}])
    parts = plan.spread.num_micro_batches

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(features.chunk(parts), labels.chunk(parts), strict=True):
            (nn.functional.cross_entropy(module(x), y) / parts).backward()
        optimizer.step()

    return measure_step(step, module=module, optimizer=optimizer)


CASES = [
    (model, optimizer, parts, again)
    for model, optimizer, parts, again in product(MAKES, (SGD, ADAMW), (1, 4), (False, True))
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer", "parts", "again"), CASES)
def test_what_is_predicted_is_what_is_held(
    model: str, optimizer: MakesOptimizer, parts: int, *, again: bool
) -> None:
    plan = plan_of(optimizer, parts=parts, again=again)
    found, held = predicted(model, plan), really(model, plan)
    assert found.parameters == held.parameters
    assert found.gradients == held.gradients
    assert found.optimizer_state == held.optimizer_state
    assert found.activations == pytest.approx(held.activations, rel=TOLERANCE)
    assert found.peak == pytest.approx(held.peak, rel=TOLERANCE)


def test_a_wrong_prediction_is_told_apart() -> None:
    """Control: predictions with SGD in place of Adam, or without recomputation, do not fit."""
    held = really("mlp", plan_of(ADAMW))
    assert predicted("mlp", plan_of(SGD)).optimizer_state != held.optimizer_state
    assert predicted("mlp", plan_of(SGD)).peak < (1 - TOLERANCE) * held.peak
    again = plan_of(SGD, again=True)
    less = really("transformer", again).activations
    whole = predicted("transformer", plan_of(SGD)).activations
    assert whole is not None
    assert whole > (1 + TOLERANCE) * less


def test_the_engine_holds_what_is_predicted() -> None:
    plan = plan_of(Lars(learning_rate=1.0), parts=2)
    make, shape = MAKES["mlp"]
    data = TensorData(*examples(shape), device=torch.device("cpu"))
    task = Task(
        make_model=make,
        objective=CrossEntropy(),
        stream=Shuffled(data, seed=Seed(0)),
        plan=plan,
    )
    named = RankTrainer(task, device=torch.device("cpu")).tensors()
    found = predicted("mlp", plan)
    kept = sum(each.nbytes for name, each in named.items() if name.startswith("optimizer/"))
    assert kept == found.optimizer_state == found.parameters


def test_degrees_and_precision_divide_what_they_should() -> None:
    whole, shared = (predicted("mlp", plan_of(ADAMW, mesh=Mesh(shard=n))) for n in (1, 4))
    for name in ("gradients", "optimizer_state"):
        assert getattr(shared, name) == pytest.approx(getattr(whole, name) / 4, rel=0.02)


def test_half_precision_takes_half_of_the_activations_and_a_copy_of_the_weights() -> None:
    whole, half = (
        predicted("cnn", plan_of(ADAMW, precision=each))
        for each in (TrainingPrecision.FULL, TrainingPrecision.BFLOAT16)
    )
    assert half.parameters == whole.parameters  # parameters keep their dtype
    assert half.activations is not None
    assert whole.activations is not None
    assert half.activations < 0.8 * whole.activations


@pytest.mark.parametrize(
    ("number", "size", "gib"), [(1e9, 2, "1.86"), (175e9, 2, "325.96"), (7e9, 4, "26.08")]
)
def test_a_number_of_parameters_is_enough(number: float, size: int, gib: str) -> None:
    counted = Counted(num_parameters=round(number), bytes_per_parameter=size)
    assert f"{counted.storage / 2**30:.2f}" == gib
    found = counted.memory(optimizer=ADAMW, mesh=Mesh(shard=8))
    assert found.peak == pytest.approx(4 * counted.storage / 8)
    assert found.activations is None


def test_a_model_that_asks_for_values_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x) * float(x.sum())
            return made

    features, labels = examples((4,))
    with pytest.raises(ConfigError, match="cannot be traced on tensors without data"):
        predict(Asks, plan_of(SGD), features=features, labels=labels, objective=CrossEntropy())


def told(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["memory", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_the_command_tells_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = ("pipeline=2", "num_micro_batches=4", "batch_size=16")
    settings = [f"--set=coordinator.training.{each}" for each in spread]
    code, out, _ = told(*settings, "--json", f"--output={tmp_path}/m.png", capsys=capsys)
    facts = json.loads(out)
    assert code == 0
    assert facts["mesh"] == "pipeline 2"
    assert sum(each["parameters"] for each in facts["stages"]) == facts["storage"]
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert "pipeline 2" in told(*settings, capsys=capsys)[1]


@pytest.mark.usefixtures("surroundings")
def test_a_model_that_no_machine_could_hold_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no round, so there may be fewer clients than the default cohort needs."""
    (tmp_path / "huge.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(64, 10**12), nn.ReLU(), nn.Linear(10**12, 10))\n"
    )
    model = f'model = {{kind = "python", factory = "{tmp_path}/huge.py:make"}}\n'
    (tmp_path / "e.toml").write_text(model + '[data]\nsource = "digits"\npartition.num_clients = 5')
    code, out, err = told(f"{tmp_path}/e.toml", capsys=capsys)
    assert code == 0, err
    assert "the model's parameters: 279396.77 GiB" in out


@pytest.mark.usefixtures("surroundings")
def test_the_command_takes_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told("--parameters=175e9", "--bytes=2", capsys=capsys)
    assert "325.96 GiB" in out
    code, _, err = told("--parameters=0", capsys=capsys)
    assert code == 2
    assert "num_parameters is 0" in err
    code, _, err = told("--set=coordinator.training.tensor=3", capsys=capsys)
    assert code == 2
    assert "tensor is 3, but layer '1' has 128 columns" in err
