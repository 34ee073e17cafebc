"""Custom pieces with common mistakes: the error names the mistake, and none is ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.lanes import Rows
from fedlearn.algorithms.local import Memory, Moment, Tensors
from fedlearn.core.params import Params
from fedlearn.errors import FedlearnError

SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
ENGINE, MEMORY = {"executor": "sequential"}, {"transport": "memory"}
#: A default run of the tests uses only the engine.
EACH_PLACE = pytest.mark.parametrize(
    "engine", [ENGINE, pytest.param(MEMORY, marks=pytest.mark.slow)], ids=["engine", "memory"]
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


def simulated(algorithm: fl.Strategy, engine: Mapping[str, Any] = ENGINE) -> fl.Run:
    x = np.random.default_rng(0).normal(size=(40, 3))
    data = fl.from_arrays(
        x, (x[:, 0] > 0).astype(int), partition=fl.Iid(4), test_fraction=0.2, seed=0
    )
    return fl.simulate(make_model, data, algorithm, num_rounds=2, engine=engine)


@dataclass(frozen=True, kw_only=True)
class Plain(fl.Strategy):
    """Adds the mean update; each strategy below gets one part of it wrong."""

    local: fl.LocalUpdate = SGD
    aggregation = fl.WeightedMean(by_examples=True)

    def step(
        self, params: Params, aggregate: fl.Aggregate, state: Mapping[str, Tensor]
    ) -> fl.StepResult:
        """Return the sum."""
        return fl.StepResult(params.with_vector(params.vector + aggregate.lanes["delta"]), state)


class InPlace(Plain):
    """Writes to the given model, which may be the best one so far."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> fl.StepResult:
        """Add to the model in place."""
        params.vector.add_(aggregate.lanes["delta"])
        return fl.StepResult(params, state)


class Forgetful(Plain):
    """Returns nothing."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> Any:
        """Compute the sum, but do not return it."""
        params.with_vector(params.vector + aggregate.lanes["delta"])


class Double(Plain):
    """Returns the model in another precision."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> fl.StepResult:
        """Widen it."""
        return fl.StepResult(params.with_vector(params.vector.double()), state)


class Exploding(Plain):
    """Divides by zero."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> fl.StepResult:
        """Make it infinite."""
        return fl.StepResult(params.with_vector(params.vector / 0.0), state)


class Counting(Plain):
    """Has a state that cannot go into a checkpoint."""

    def init(self, params: Params) -> Any:
        """Count."""
        return {"rounds": 0}


class Claiming(Plain):
    """Returns a metric with the name of an evaluated one."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> fl.StepResult:
        """Measure."""
        return replace(super().step(params, aggregate, state), metrics={"accuracy": 1.0})


class Listing(Plain):
    """Returns many numbers under one name."""

    def step(self, params: Params, aggregate: fl.Aggregate, state: Any) -> fl.StepResult:
        """Measure."""
        metrics: Any = {"norms": torch.ones(3)}
        return replace(super().step(params, aggregate, state), metrics=metrics)


class Short(Plain):
    """Broadcasts too few numbers."""

    def broadcast(self, state: Any) -> Mapping[str, Tensor]:
        """Broadcast three numbers."""
        return {"control": torch.zeros(3)}


class Renaming(Plain):
    """Broadcasts another model under the name of the global one."""

    def broadcast(self, state: Any) -> Mapping[str, Tensor]:
        """Broadcast zeros."""
        return {"model": torch.zeros(8)}


@EACH_PLACE
@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (InPlace(), r"InPlace\.step wrote to its input tensors"),
        (Forgetful(), r"Forgetful\.step returned NoneType; it returns a StepResult"),
        (Double(), r"Double\.step returned a model of shape \(8,\), torch.float64"),
        (Exploding(), r"Exploding\.step gave values that are not finite"),
        (Counting(), r"Counting\.init returned the state 'rounds' as int"),
        (Claiming(), r"names a metric 'accuracy', and so does the evaluation"),
        (Listing(), r"Listing\.step returned the metric 'norms' as Tensor"),
        (Short(), r"Short\.broadcast: the strategy broadcasts 'control' of shape \(3,\)"),
        (Renaming(), r"Renaming\.broadcast: .* 'model' is reserved for the model"),
        (
            fl.Scaffold(SGD, num_clients=2, server_learning_rate=1.0),
            r"num_clients is 2, but 4 clients contributed",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_mistake_of_a_strategy_is_named(
    strategy: fl.Strategy, complaint: str, engine: Mapping[str, Any]
) -> None:
    """No run continues, fails in another place, or blames the clients."""
    with pytest.raises(FedlearnError, match=complaint):
        simulated(strategy, engine)


def test_the_strategy_without_a_mistake_trains() -> None:
    """The control."""
    assert torch.equal(
        simulated(Plain()).weights(best=False)["0.weight"],
        simulated(fl.FedAvg(SGD)).weights(best=False)["0.weight"],
    )


@dataclass(frozen=True, kw_only=True)
class Returning(fl.LocalWork):
    """Returns new tensors instead of writing to the given ones."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Any:
        """Return new tensors."""
        return [value - 0.1 * grad for value, grad in zip(x, grads, strict=True)]


class Putting(Returning):
    """Puts new tensors into the list."""

    def step(
        self, x: Any, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Any:
        """Change the list."""
        x[:] = super().step(x, grads, memory, broadcast=broadcast, moment=moment)


class Overwriting(Returning):
    """Also writes to the global model, from which the next client starts."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Any:
        """Write to both."""
        for value, start, grad in zip(x, broadcast["model"], grads, strict=True):
            value.sub_(grad, alpha=0.1)
            start.sub_(1.0)


class Silent(Returning):
    """Declares a lane and does not report it."""

    @property
    def lanes(self) -> Sequence[fl.LaneSpec]:
        """Three numbers."""
        return (fl.LaneSpec(name="extra", over=3, weighted=False, bound=None),)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Any:
        """Step."""
        for value, grad in zip(x, grads, strict=True):
            value.sub_(grad, alpha=0.1)


class Talkative(Silent):
    """Reports more than it declares."""

    def report(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> Any:
        """Report two lanes."""
        return {name: [torch.zeros(len(moment.num_steps_K), 3)] for name in ("extra", "surprise")}


@pytest.mark.parametrize(
    "executor",
    ["fused", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "vmap"))],
)
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Returning, "Returning.step changes nothing"),
        (Putting, "Putting.step changes nothing"),
        (Overwriting, "wrote to its input tensors|a second training of the same clients"),
        (Silent, r"the updates of Silent do not fit: it has missing or extra lanes: \['extra'\]"),
        (Talkative, r"the updates of Talkative do not fit: .*'surprise'"),
    ],
)
def test_a_mistake_of_a_local_update_is_named(
    kind: type[Returning], complaint: str, executor: str
) -> None:
    """A step that changes nothing must not give a run that silently trains nothing."""
    local = kind(epochs=1, batch_size=4)
    with pytest.raises(FedlearnError, match=complaint):
        simulated(Plain(local=local), {"executor": executor})


@pytest.mark.parametrize("kind", [Returning, Putting, Overwriting, Silent, Talkative])
def test_a_mistake_of_a_local_update_fails_in_a_session(kind: type[Returning]) -> None:
    """A client refuses what the engine refuses."""
    with pytest.raises(FedlearnError, match="0 usable reports"):
        simulated(Plain(local=kind(epochs=1, batch_size=4)), MEMORY)


@dataclass(frozen=True)
class Combining:
    """An aggregation with a configurable result and weight."""

    result: str = "mean"
    weight: float = 1.0

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return one weight for all, in double precision."""
        return torch.full_like(num_examples_B, self.weight).double()

    def combine(self, updates: fl.Updates) -> Any:
        """Return the mean, or something else."""
        rows: Rows = updates.lanes["delta"]
        mean = torch.stack(list(rows)).mean(0)
        results = {
            "mean": {"delta": mean},
            "nothing": None,
            "none": {},
            "number": {"delta": mean.mean()},
            "nan": {"delta": mean * torch.nan},
        }
        return results[self.result]


@EACH_PLACE
@pytest.mark.parametrize(
    ("aggregation", "complaint"),
    [
        (Combining("nothing"), "the aggregation Combining returned NoneType"),
        (
            Combining("none"),
            r"the aggregation Combining .* has missing or extra lanes: \['delta'\]",
        ),
        (Combining("number"), r"the aggregation Combining .* has shape \(\), not \(8,\)"),
        (Combining("nan"), "the aggregation Combining gave values that are not finite"),
        (Combining(weight=0.0), r"Combining\.weigh returned \[0\.0"),
    ],
)
def test_a_mistake_of_an_aggregation_is_named(
    aggregation: Combining, complaint: str, engine: Mapping[str, Any]
) -> None:
    """The error names its class, and the model is not changed."""
    algorithm = replace(fl.FedAvg(SGD), aggregation=aggregation)
    with pytest.raises((FedlearnError, ValueError), match=complaint):
        simulated(algorithm, engine)


def test_weights_of_another_precision_count() -> None:
    """The control: the weights of the aggregation above are float64."""
    runs = [
        simulated(replace(fl.FedAvg(SGD), aggregation=Combining()), e) for e in (ENGINE, MEMORY)
    ]
    first, second = (run.weights(best=False)["0.weight"] for run in runs)
    torch.testing.assert_close(first, second)


@dataclass(frozen=True)
class Transforming:
    """A transform that makes a configurable mistake."""

    what: str

    def __call__(self, updates: fl.Updates) -> Any:
        """Return some updates, or none."""
        delta = torch.stack(list(updates.lanes["delta"]))
        lanes = {
            "drop": {},
            "double": {"delta": delta.double()},
            "more": {"delta": delta.repeat(2, 1)},
        }
        return None if self.what == "forget" else replace(updates, lanes=lanes[self.what])


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("forget", "Transforming returned NoneType; return Updates"),
        ("drop", "Transforming do not fit: it lacks the lane 'delta'"),
        ("double", "Transforming do not fit: lane 'delta' is torch.float64"),
        ("more", r"Transforming returned \[2\] rows for 1 clients"),
    ],
)
def test_a_mistake_of_a_transform_is_named(what: str, complaint: str) -> None:
    """A coordinator would refuse such an update."""
    algorithm = replace(fl.FedAvg(SGD), transforms=(Transforming(what),))
    with pytest.raises(FedlearnError, match=complaint):
        simulated(algorithm)
