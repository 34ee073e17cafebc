"""User components as the how-to guides show them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.aggregations import iter_spans
from fedlearn.algorithms.lanes import Aggregate, Rows, Updates
from fedlearn.algorithms.local import Memory, Moment, Tensors
from fedlearn.core.randomness import Seed
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from tests.oracle.reference.client import ETA, OWN_FLOOR
from tests.oracle.reference.model import Model
from tests.oracle.reference.server import TRIMMED
from tests.oracle.workloads import IGNORED, Inputs, own_cohort


@dataclass(frozen=True, kw_only=True)
class LayerWise(fl.LocalWork):
    """Divides each tensor's gradient by its own norm, so it must receive tensors one by one."""

    learning_rate: float

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step each tensor separately."""
        for value, grad in zip(x, grads, strict=True):
            norms = torch.linalg.vector_norm(grad.flatten(1), dim=1)
            shape = (-1, *[1] * (grad.dim() - 1))
            value.sub_(self.learning_rate * moment.rate * grad / (norms.view(shape) + OWN_FLOOR))


@dataclass(frozen=True, kw_only=True)
class PerStep(LayerWise):
    """Sends the delta divided by the number of steps, and that number in a lane (FedNova)."""

    @property
    def lanes(self) -> Sequence[fl.LaneSpec]:
        """Declare the lane of the number of steps."""
        return (fl.LaneSpec(name="tau", over=1, weighted=True, bound=None),)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Send the mean step."""
        for value, model in zip(x, broadcast["model"], strict=True):
            share = moment.num_steps_K.to(value).view(-1, *[1] * (value.dim() - 1))
            value.copy_(model + (value - model) / share)
        return {"tau": [moment.num_steps_K[:, None]]}


@dataclass(frozen=True)
class Nova(fl.Strategy):
    """FedNova: the mean step, times the mean number of steps."""

    local: fl.LocalUpdate
    aggregation: fl.WeightedMean
    transforms: Sequence[Any] = ()  # Any: fedlearn's Transform

    def init(self, params: Any) -> dict[str, Tensor]:  # Any: fedlearn's Params
        """Return an empty state."""
        return {}

    def step(self, params: Any, aggregate: Aggregate, state: Mapping[str, Tensor]) -> fl.StepResult:
        """Move the parameters by the mean step, times the mean number of steps."""
        delta, tau = aggregate.lanes["delta"], aggregate.lanes["tau"]
        last = params.layout.num_trainable
        moved = torch.cat([delta[:last] * tau, delta[last:]])
        return fl.StepResult(params.with_vector(params.vector + moved), {})


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its smallest and largest values."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Give all clients equal weights."""
        return torch.ones_like(num_examples_B)

    def combine(self, updates: Updates) -> dict[str, Tensor]:
        """Return the trimmed mean of each lane."""
        return {name: self._mean(rows) for name, rows in updates.lanes.items()}

    def _mean(self, rows: Rows) -> Tensor:
        mean, cut = torch.empty_like(rows[0]), min(TRIMMED, (len(rows) - 1) // 2)
        for part, values in iter_spans(rows):
            mean[part] = values.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)
        return mean


@dataclass(frozen=True)
class RootWeighted(fl.WeightedMean):
    """A mean that weighs clients by the square root of their number of examples."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the square roots."""
        return num_examples_B.sqrt()


@dataclass(frozen=True)
class Halved:
    """A transform that halves each delta."""

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with halved deltas."""
        delta = torch.stack([row / 2 for row in updates.lanes["delta"]])
        return replace(updates, lanes={**updates.lanes, "delta": delta})


@dataclass(frozen=True)
class InTurn:
    """A sampler that asks clients in rotation."""

    def sample(
        self,
        available: Sequence[int],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[int, ...]:
        """Return the next clients in rotation."""
        return tuple(own_cohort(available, cohort_size, round_num, attempt))


class OneStep:
    """A trainer that takes one step along the gradient of all of its examples."""

    honors: tuple[str, ...] = ()

    def __init__(self, module: nn.Module, objective: str, features: Inputs, labels: Tensor) -> None:
        self.model = Model(module, objective)
        self.features, self.labels = features, labels

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model after the step, in the dtypes of the request."""
        x = {name: value.double().clone() for name, value in tensors.items()}
        loss, g = self.model.gradients(x, self.features, self.labels)
        for name, gradient in g.items():
            x[name] = x[name] - ETA * gradient
        sent = {name: value.to(tensors[name].dtype) for name, value in x.items()}
        return LocalResult(
            tensors=sent, num_examples=len(self.labels), metrics={"loss": loss}, state={}
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Return the loss and, where the objective has one, the accuracy."""
        if bool((self.labels == IGNORED).all()):
            return LocalEvaluation(num_examples=len(self.labels), metrics={"loss": math.nan})
        x = {name: value.double() for name, value in tensors.items()}
        outputs = self.model.predict(x, self.features)
        metrics = {"loss": self.model.loss(outputs, self.labels).item()}
        accuracy = self.model.accuracy(outputs, self.labels)
        if accuracy is not None:
            metrics["accuracy"] = accuracy
        return LocalEvaluation(num_examples=len(self.labels), metrics=metrics)
