"""Replay rounds in numpy from their records: model, training loss and evaluation.

Clients take one step on all of their examples, so the loss that a client reports belongs to the
model that it received, and the replay can tell which one that was.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import nn

import fedlearn as fl
from fedlearn.core.participations import Participation, Status

pytestmark = pytest.mark.usefixtures("ready_store")

NUM_INPUTS, NUM_CLASSES, RATE, NUM_ROUNDS = 6, 3, 0.5, 10
#: From two examples to sixty, so that means over clients and over examples differ.
SIZES = np.array([2, 40, 7, 60, 3, 21, 55, 11, 30, 5, 2, 48])
OWNERS = np.repeat(np.arange(len(SIZES)), SIZES)
RNG = np.random.default_rng(1)
X, X_TEST = (RNG.normal(size=(n, NUM_INPUTS)).astype(np.float32) for n in (len(OWNERS), 101))
Y, Y_TEST = (RNG.integers(0, NUM_CLASSES, size=n) for n in (len(OWNERS), 101))
LOCAL = fl.LocalSgd(epochs=1, batch_size=len(Y), learning_rate=RATE)
DEVICES = {
    "kind": "lognormal",
    "median_ms_per_example": 20.0,
    "speed_sigma": 1.5,
    "round_jitter_sigma": 0.3,
}


def run_buffered(*, by_examples: bool) -> fl.Buffered:
    return fl.FedBuff(
        LOCAL, buffer_size=3, concurrency=7, max_staleness=9, weight_by_examples=by_examples
    )


RUNS: dict[str, tuple[fl.Strategy | fl.Buffered, dict[str, Any]]] = {
    "synchronous": (fl.FedAvg(LOCAL), {"cohort": {"num_wanted": 5}}),
    "unweighted": (fl.FedAvg(LOCAL, weight_by_examples=False), {"cohort": {"num_wanted": 5}}),
    "buffered": (run_buffered(by_examples=False), {}),
    "buffered by examples": (run_buffered(by_examples=True), {}),
    "semi-synchronous": (
        fl.FedAvg(LOCAL),
        {
            "cohort": {"num_wanted": 5},
            "late_updates": {"mode": "keep"},
            "stragglers": {"deadline_s": 1.0, "min_reports": 1},
        },
    ),
}
BY_EXAMPLES = ("synchronous", "buffered by examples", "semi-synchronous")


class Linear(NamedTuple):
    """A model: logits are ``weight`` times the input, plus ``bias``."""

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]

    def measured(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float, "Linear"]:
        """Return the mean loss and accuracy, and the gradient of the loss."""
        logits = x.astype(np.float64) @ self.weight.T + self.bias
        logits -= logits.max(axis=1, keepdims=True)
        log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        truth = np.eye(NUM_CLASSES)[y]
        errors = (np.exp(log_shares) - truth) / len(y)
        loss = -float((log_shares * truth).sum()) / len(y)
        accuracy = float((log_shares.argmax(axis=1) == y).mean())
        return loss, accuracy, Linear(errors.T @ x, errors.sum(axis=0))


@dataclass
class Models:
    """A callback that stores the model after each round."""

    found: list[Linear] = field(default_factory=list)

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        self.found.append(as_linear(model))


def as_linear(model: nn.Module) -> Linear:
    assert isinstance(model, nn.Linear)
    weight, bias = (each.detach().double().numpy().copy() for each in (model.weight, model.bias))
    return Linear(weight, bias)


def of(client_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return X[client_id == OWNERS], Y[client_id == OWNERS]


class Replayed(NamedTuple):
    """A round recomputed from its records: the model after it, the training loss, the staleness."""

    model: Linear
    train_loss: float
    ages: dict[int, int]


def replayed(
    rows: list[Participation], models: list[Linear], *, by_examples: bool, by_age: bool = True
) -> Replayed:
    """Recompute a round; ``models`` are all models so far, the latest one last."""
    before, moved, total = models[-1], Linear(*map(np.zeros_like, models[-1])), 0.0
    losses, ages = [], dict[int, int]()
    for row in rows:
        off = [abs(each.measured(*of(row.client_id))[0] - row.loss) for each in models]
        assert min(off) < 1e-5
        based_on = int(np.argmin(off))
        age = len(models) - 1 - based_on
        loss, _, gradient = models[based_on].measured(*of(row.client_id))
        weight = float(SIZES[row.client_id]) if by_examples else 1.0
        step = weight * RATE / (math.sqrt(1 + age) if by_age else 1.0)
        moved = Linear(*(a - step * b for a, b in zip(moved, gradient, strict=True)))
        total += weight
        losses.append(loss)
        ages[age] = ages.get(age, 0) + 1
    after = Linear(*(a + b / total for a, b in zip(before, moved, strict=True)))
    sizes = [SIZES[row.client_id] for row in rows]
    return Replayed(after, float(np.average(losses, weights=sizes)), dict(sorted(ages.items())))


def are_close(left: Linear, right: Linear) -> bool:
    return all(np.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


def measures(model: Linear) -> dict[str, float]:
    """Return a model's metrics over the test set's examples, and over clients weighted equally."""
    loss, accuracy, _ = model.measured(X_TEST, Y_TEST)
    losses, accuracies, _ = zip(*(model.measured(*of(c)) for c in range(len(SIZES))), strict=True)
    return {
        "loss": loss,
        "accuracy": accuracy,
        "clients/loss_mean": float(np.mean(losses)),
        "clients/loss_worst_decile": max(losses),
        "clients/accuracy_mean": float(np.mean(accuracies)),
        "clients/accuracy_worst_decile": min(accuracies),
    }


@pytest.mark.parametrize("transport", ["engine", pytest.param("memory", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", RUNS)
def test_rounds_are_those_of_the_formulas(kind: str, transport: str) -> None:
    """Including how much each update counts in the model, the training loss and the metrics.

    The control: with other weights the model would differ.
    """
    algorithm, settings = RUNS[kind]
    data = fl.from_arrays(
        X, Y, groups=OWNERS, partition=fl.Natural(), test=(X_TEST, Y_TEST), seed=0
    )
    kept = Models()
    run = fl.simulate(
        lambda: nn.Linear(NUM_INPUTS, NUM_CLASSES),
        data,
        algorithm,
        num_rounds=NUM_ROUNDS,
        callbacks=[kept],
        devices=DEVICES,
        # All clients, and batches of which the last is smaller than the others.
        evaluation={"clients": data.population.num_clients, "batch_size": 7},
        engine={"transport": transport, "num_workers": 1},
        store={"keep_last": NUM_ROUNDS + 1, "checkpoint_every_s": 0.0},
        **settings,
    )
    first = run.stored.checkpoints()[0]
    assert first.round_num == 0
    tensors = load_file(first.path)
    models = [Linear(tensors["params/weight"], tensors["params/bias"]), *kept.found]
    by_examples, noticed, oldest = kind in BY_EXAMPLES, set[str](), 0
    for record, after in zip(run.history, kept.found, strict=True):
        rows = [row for row in record.participations if row.status is Status.REPORTED]
        so_far = models[: record.round_num + 1]
        found = replayed(rows, so_far, by_examples=by_examples)
        assert are_close(after, found.model)
        assert record.train_loss == pytest.approx(found.train_loss, abs=1e-6)
        assert not record.staleness or dict(record.staleness) == found.ages
        told = {name: record.metrics[name] for name in measures(after)}
        assert told == pytest.approx(measures(after), abs=1e-6)
        oldest = max(oldest, *found.ages)
        if not are_close(after, replayed(rows, so_far, by_examples=not by_examples).model):
            noticed.add("examples")
        without = replayed(rows, so_far, by_examples=by_examples, by_age=False)
        if not are_close(after, without.model):
            noticed.add("staleness")
    is_stale = bool(run.history[-1].staleness)
    assert (oldest > 1) == is_stale
    assert noticed == ({"examples", "staleness"} if is_stale else {"examples"})
