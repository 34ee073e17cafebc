"""Ensemble distillation: the mean model learns the joint predictions of clients' models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.objectives import CrossEntropy, MeanSquaredError, Objective
from fedlearn.algorithms.recipes import FedAvg, FedMedian
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.parallel.distillation import Distillation, DistillationObserver, Distilling
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import Sgd
from fedlearn.parallel.plan import Spread, TrainingPlan
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Progress, Task
from fedlearn.training.local_data import TensorData

FEATURES = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()
BATCH, STEPS, RATE = 6, 5, 0.5
LOCAL = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def task(*, objective: Objective | None = None, mesh: Mesh | None = None) -> Task:
    nobody_looks = torch.full((12,), 2)
    return Task(
        make_model=network,
        objective=objective or CrossEntropy(),
        stream=Shuffled(TensorData(FEATURES, nobody_looks, device=FEATURES.device), seed=Seed(1)),
        plan=TrainingPlan(
            batch_size=BATCH,
            num_steps=0,
            optimizer=Sgd(learning_rate=RATE),
            seed=Seed(2),
            spread=Spread(mesh=mesh or Mesh()),
        ),
    )


def rule(base: Params, *, num_rounds: int = 0, of: Task | None = None) -> Distillation:
    mean = WeightedMean(by_examples=True)
    return Distillation(mean, [DELTA], of or task(), STEPS, base.vector, num_rounds)


def updates(*rows: Tensor, weights: tuple[float, ...]) -> Updates:
    stacked = torch.stack(rows)
    return Updates(
        [ClientId(each) for each in range(len(rows))],
        torch.tensor(weights).double(),
        {"delta": stacked},
        [0] * len(rows),
    )


def by_hand(base: Params, rows: list[Tensor], weights: list[float], start: int) -> Tensor:
    """Algorithm 1 of Lin et al., using nothing of fedlearn except for the order of the examples."""

    def of(vector: Tensor) -> nn.Module:
        module = network()
        nn.utils.vector_to_parameters(vector.clone(), module.parameters())
        return module

    total = sum(weights)
    mean = sum((w / total * row for w, row in zip(weights, rows, strict=True)), base.vector)
    student, teachers = of(mean), [of(base.vector + row) for row in rows]
    for step in range(start, start + STEPS):
        x, _ = task().stream.batch(range(step * BATCH, (step + 1) * BATCH))
        with torch.no_grad():
            said = torch.stack([teacher(x) for teacher in teachers]).mean(0).log_softmax(1)
        loss = F.kl_div(student(x).log_softmax(1), said, log_target=True, reduction="batchmean")
        grads = torch.autograd.grad(loss, list(student.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(student.parameters(), grads, strict=True):
                parameter.sub_(RATE * grad)
    return nn.utils.parameters_to_vector(student.parameters()).detach() - base.vector


@pytest.mark.parametrize("num_rounds", [0, 3])
def test_the_student_learns_what_the_models_say_together(num_rounds: int) -> None:
    base, generator = Params.of(network()), torch.Generator().manual_seed(3)
    rows = [torch.randn(base.layout.size, generator=generator).double() for _ in range(3)]
    given = updates(*rows, weights=(1.0, 4.0, 2.0))
    found = rule(base, num_rounds=num_rounds).combine(given)["delta"]
    wanted = by_hand(base, rows, [1.0, 4.0, 2.0], num_rounds * STEPS)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12)
    plain = (given.weights_B[:, None] * torch.stack(rows)).sum(0) / 7.0
    assert (found - plain).abs().max() > 1e-3  # so the comparison above would reject the mean alone


def test_a_distillation_is_told_of_and_can_be_called_off() -> None:
    """Reports come every other step and at the end; an error of the control is propagated."""
    base, told = Params.of(network()), list[Progress]()
    given = updates(*torch.randn(2, base.layout.size).double(), weights=(1.0, 1.0))
    watched = replace(
        rule(base, num_rounds=1), watch=DistillationObserver(report=told.append, report_every=2)
    )
    watched.combine(given)
    assert [(each.step_num, each.num_steps) for each in told] == [(6, 10), (8, 10), (10, 10)]
    assert told[0].loss > 0.0

    class CalledOff:
        def check(self) -> None:
            raise Interrupted

    with pytest.raises(Interrupted):
        replace(watched, watch=DistillationObserver(control=CalledOff())).combine(given)


def test_labels_of_the_coordinators_examples_are_not_looked_at() -> None:
    base, other = Params.of(network()), task()
    labeled = TensorData(FEATURES, torch.zeros(12).long(), device=FEATURES.device)
    other = replace(other, stream=Shuffled(labeled, seed=Seed(1)))
    given = updates(*torch.randn(2, base.layout.size).double(), weights=(1.0, 1.0))
    found = [rule(base, of=each).combine(given)["delta"] for each in (task(), other)]
    assert torch.equal(*found)


def test_models_that_agree_teach_nothing() -> None:
    base = Params.of(network())
    row = torch.randn(base.layout.size).double()
    found = rule(base).combine(updates(row, row, weights=(1.0, 3.0)))["delta"]
    torch.testing.assert_close(found, row, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "given", "reason"),
    [
        (FedMedian(LOCAL), task(), "updates are combined by CoordinateMedian"),
        (FedAvg(LOCAL), task(objective=MeanSquaredError()), "the loss is MeanSquaredError"),
        (FedAvg(LOCAL), task(mesh=Mesh(replicate=2)), "the mesh is replicate 2"),
    ],
)
def test_what_cannot_be_distilled_is_refused(
    strategy: fl.Strategy, given: Task, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Distilling(strategy, given, 5)


class Interrupted(Exception):
    """Interrupts a run."""


class StopsOnce:
    """Interrupts a run after its second round."""

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        if record.round_num == 1:
            raise Interrupted


def weight(*, transport: str = "engine", **more: Any) -> Tensor:  # Any: settings of a run
    """Simulate four rounds; return the final weights."""
    data = fl.from_arrays(
        torch.randn(60, 4, generator=torch.Generator().manual_seed(5)).numpy(),
        torch.arange(60).numpy() % 3,
        partition=fl.Iid(num_clients=10),
        seed=0,
        test_fraction=0.2,
    )
    # Not Adam: it would turn the rounding error of a zero gradient into a whole step.
    training = {"distil_steps": 3, "share": 0.3, "batch_size": 8, "optimizer": "sgd"}
    run = fl.simulate(
        lambda: nn.Linear(4, 3),
        data,
        FedAvg(LOCAL),
        num_rounds=4,
        cohort={"num_wanted": 3},
        evaluation={"clients": 0},
        engine={"transport": transport, "executor": "sequential"},
        coordinator={"training": training},
        store={"checkpoint_every_s": 0.0},
        **more,
    )
    return run.weights(best=False)["weight"]


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_a_run_distils_alike_in_the_engine_in_sessions_and_when_it_is_resumed() -> None:
    plain = weight()
    torch.testing.assert_close(weight(transport="memory"), plain, rtol=0.0, atol=1e-6)
    with pytest.raises(Interrupted):
        weight(name="cut", callbacks=[StopsOnce()])
    assert torch.equal(weight(resume="cut"), plain)
