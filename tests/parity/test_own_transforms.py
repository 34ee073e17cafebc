"""Custom transforms, and the lanes of users' trainers, wherever clients train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.lanes import LaneSpec, stack_rows
from fedlearn.algorithms.settings import require_honored, settings_of, transforms_from
from fedlearn.algorithms.transforms import ClippedUpdates, NoisedUpdates, Transform
from fedlearn.client.judging import local_noise_ratio
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, TrainReply
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, FedlearnError, SettingsRefused
from fedlearn.session.session import ClientSession
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalEvaluation, LocalResult

pytestmark = pytest.mark.usefixtures("ready_store")

SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
ENGINE = {"executor": "sequential", "block_size": 1, "num_workers": 1}
MEMORY = {"transport": "memory", "num_workers": 1}
FUSED = {"executor": "fused", "num_workers": 1}
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(60, 3)).astype("float32")
LABELS = (FEATURES[:, 0] > 0).astype(int)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Multiplies the delta by a factor."""

    factor: float

    def __call__(self, updates: fl.Updates) -> fl.Updates:
        delta = stack_rows(updates.lanes["delta"]) * self.factor
        return replace(updates, lanes={**updates.lanes, "delta": delta})


@dataclass(frozen=True, kw_only=True)
class DitheredDelta:
    """Rounds the delta to a grid at random, in place; multiplies it by the weights, all ones."""

    grid: float

    def __call__(self, updates: fl.Updates) -> fl.Updates:
        delta = stack_rows(updates.lanes["delta"]) * updates.weights_B[:, None]
        delta.copy_((delta / self.grid + torch.rand_like(delta)).floor() * self.grid)
        return replace(updates, lanes={**updates.lanes, "delta": delta})


@dataclass(frozen=True)
class Centered:
    """Subtracts the mean over the rows, which leaves nothing of a single client."""

    def __call__(self, updates: fl.Updates) -> fl.Updates:
        delta = stack_rows(updates.lanes["delta"])
        return replace(updates, lanes={"delta": delta - delta.mean(0)})


CLIP, SCALE = ClippedUpdates(update_clip_norm=0.05), Scaled(factor=3.0)
DITHER = DitheredDelta(grid=0.01)


def simulated(
    transforms: Sequence[Any], engine: Mapping[str, Any], **settings: Any
) -> torch.Tensor:
    """Return the model after two rounds, as one vector."""
    algorithm = replace(fl.FedAvg(SGD, weight_by_examples=False), transforms=tuple(transforms))
    return run_of(algorithm, engine, **settings)


def run_of(algorithm: fl.Strategy, engine: Mapping[str, Any], **settings: Any) -> Tensor:
    groups = np.repeat(np.arange(6), [5, 8, 9, 10, 13, 15])
    data = fl.from_arrays(
        FEATURES, LABELS, groups=groups, partition=fl.Natural(), test=(FEATURES, LABELS), seed=0
    )
    run = fl.simulate(
        make_model,
        data,
        algorithm,
        num_rounds=2,
        engine=engine,
        cohort={"num_wanted": 6},
        **settings,
    )
    return torch.cat([value.flatten() for value in run.weights(best=False).values()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "transforms",
    [(SCALE, CLIP), (CLIP, SCALE), (DITHER,), (CLIP, DITHER, SCALE), (Centered(), SCALE)],
    ids=lambda each: " ".join(type(part).__name__ for part in each),
)
def test_transforms_act_alike_and_in_order_in_the_engine_and_in_sessions(
    transforms: Sequence[Transform],
) -> None:
    """Bit for bit with one client at a time; up to rounding in blocks."""
    by_engine = simulated(transforms, ENGINE)
    assert torch.equal(simulated(transforms, MEMORY), by_engine)
    # A number close to a border of the dither's grid may be rounded to the other side.
    tolerance = 0.011 if DITHER in transforms else 1e-5
    torch.testing.assert_close(simulated(transforms, FUSED), by_engine, rtol=0, atol=tolerance)


def test_the_order_counts() -> None:
    """The control of the test above."""
    assert not torch.allclose(simulated((SCALE, CLIP), ENGINE), simulated((CLIP, SCALE), ENGINE))


@pytest.mark.slow
def test_a_transform_under_secure_aggregation_acts_before_the_clip() -> None:
    """As in plaintext if the clip is far away; if it is close, it is applied last."""
    secure = {"mode": "complete", "clip_norm": 50.0}
    masked = simulated((SCALE,), MEMORY, secure_aggregation=secure)
    torch.testing.assert_close(masked, simulated((SCALE,), ENGINE), rtol=0, atol=1e-3)
    start = torch.cat([value.flatten() for value in make_start().values()])
    bounded = simulated(
        (Scaled(factor=1e4),), MEMORY, secure_aggregation={**secure, "clip_norm": 0.5}
    )
    assert float((bounded - start).norm()) <= 2 * 0.5 + 1e-2


def make_start() -> Mapping[str, Tensor]:
    """Return the model before the first round."""
    data = fl.from_arrays(FEATURES, LABELS, partition=fl.Iid(2), test=(FEATURES, LABELS), seed=0)
    zero = replace(fl.FedAvg(SGD), transforms=(Scaled(factor=0.0),))
    run = fl.simulate(make_model, data, zero, num_rounds=1, engine=ENGINE)
    return run.weights(best=False)


def request(transforms: Sequence[Transform], local: fl.LocalUpdate = SGD) -> RoundRequest:
    return RoundRequest(
        round_num=0,
        attempt=0,
        params=Params.of(make_model()),
        strategy=replace(fl.FedAvg(local), transforms=tuple(transforms)),
        broadcast={},
        seed=7,
    )


def answer(trainer: Any, asked: RoundRequest) -> TrainReply | Failure:
    """Return the reply of a deployed client."""
    data, _ = ClientSession(ClientId(3), trainer).handle(encode(asked.message()), b"")
    reply = decode(data)
    assert isinstance(reply, TrainReply | Failure)
    return reply


def torch_trainer(**known: Any) -> TorchTrainer:
    return TorchTrainer.of(
        make_model, torch.from_numpy(FEATURES), torch.from_numpy(LABELS), device="cpu", **known
    )


def test_a_deployed_client_applies_the_transforms_that_it_knows() -> None:
    """It refuses others with a reason, before it trains."""
    asked = request((CLIP, SCALE))
    reply = answer(torch_trainer(transforms=[Scaled]), asked)
    assert isinstance(reply, TrainReply)
    norm = float(reply.lanes["delta"].norm())
    assert norm == pytest.approx(3.0 * 0.05, rel=1e-3)
    refusal = answer(torch_trainer(), asked)
    assert isinstance(refusal, Failure)
    assert "transform 'Scaled', which this client does not know" in refusal.reason
    assert "transforms=[Scaled]" in refusal.reason


def test_a_trainer_of_ones_own_names_its_transforms_too() -> None:
    """It must honor its own settings, but not those of the transforms."""
    inner = torch_trainer()

    class Mine:
        honors = inner.honors
        own_transforms = (Scaled,)
        evaluate = staticmethod(inner.evaluate)

        @staticmethod
        def train(tensors: Mapping[str, Tensor], *, context: Any) -> LocalResult:
            assert "factor" not in context.settings
            return inner.train(tensors, context=context)

    assert isinstance(answer(Mine(), request((SCALE,))), TrainReply)


@dataclass(frozen=True, kw_only=True)
class SignSgd(fl.LocalWork):
    """A custom rule."""

    rate: float

    def step(self, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any) -> None:
        for value, grad in zip(x, grads, strict=True):
            value.sub_(grad.sign(), alpha=self.rate)


def test_an_unknown_update_is_named_with_what_to_do() -> None:
    """The reason says where to list its class, since users do not write what trainers honor."""
    asked = request((), SignSgd(epochs=1, batch_size=4, rate=0.01))
    assert isinstance(answer(torch_trainer(local_updates=[SignSgd]), asked), TrainReply)
    refusal = answer(torch_trainer(), asked)
    assert isinstance(refusal, Failure)
    assert "local_updates=[SignSgd]" in refusal.reason
    assert "honor" not in refusal.reason


def test_an_unknown_update_is_named_to_a_trainer_of_ones_own() -> None:
    """Wrap it around fedlearn's trainer, or declare its name if it does what the update says."""
    settings = settings_of(SignSgd(epochs=1, batch_size=4, rate=0.01))
    fields = {"epochs", "batch_size", "rate"}
    with pytest.raises(SettingsRefused) as refused:
        require_honored(settings, fields, who="Mine")
    text = str(refused.value)
    assert "'SignSgd', which Mine does not know" in text
    assert "local_updates=[SignSgd]" in text
    assert 'declare "SignSgd"' in text
    assert "honor" not in text
    require_honored(settings, {*fields, "SignSgd"}, who="Mine")


@pytest.mark.slow
def test_what_cannot_travel_is_refused_before_the_first_round() -> None:
    """In sessions; in the engine nothing is serialized."""

    def halve(updates: fl.Updates) -> fl.Updates:
        return Scaled(factor=0.5)(updates)

    half = simulated((Scaled(factor=0.5),), ENGINE)
    assert torch.equal(simulated((halve,), ENGINE), half)
    with pytest.raises(ConfigError, match="function cannot be sent to clients"):
        simulated((halve,), MEMORY)
    with pytest.raises(ConfigError, match="'factor' belongs to two components"):
        simulated((SCALE, SCALE), MEMORY)
    other: Any = type("Scaled", (Centered,), {})  # a subclass of a dataclass is one as well
    with pytest.raises(ConfigError, match="two transforms are called 'Scaled'"):
        simulated((SCALE, other()), MEMORY)


def test_noise_that_a_transform_follows_is_none_to_a_clients_policy() -> None:
    """The transform before the noise is the control."""
    noise = NoisedUpdates(clip_norm=1.0, noise_multiplier=2.0)
    assert local_noise_ratio(settings_of(SGD, (SCALE, noise))) == 2.0
    assert local_noise_ratio(settings_of(SGD, (noise, SCALE))) is None
    assert local_noise_ratio(settings_of(SGD, (noise, CLIP))) is None


def test_order_and_values_survive_the_wire() -> None:
    """They are sent as settings, by name; an unknown class has no default meaning."""
    settings = settings_of(SGD, (DITHER, CLIP, SCALE))
    assert transforms_from(settings, known=[Scaled, DitheredDelta]) == (DITHER, CLIP, SCALE)
    with pytest.raises(SettingsRefused, match="DitheredDelta"):
        transforms_from(settings, known=[Scaled])


# --- lanes of users' trainers ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Counting(fl.OwnTraining):
    """Training whose clients report how often each class occurs in their labels."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        return (LaneSpec(name="counts", over=2, weighted=False, bound=None),)


@dataclass(frozen=True, kw_only=True)
class Watching(fl.Strategy):
    """Averages, and records the counts as metrics."""

    local: fl.LocalUpdate
    aggregation = fl.WeightedMean(by_examples=True)

    def step(self, params: Any, aggregate: Any, state: Any) -> fl.StepResult:
        vector = params.vector + aggregate.lanes["delta"]
        first, second = aggregate.lanes["counts"].tolist()
        return fl.StepResult(params.with_vector(vector), {}, {"first": first, "second": second})


class Counter:
    """A trainer that changes the model by a constant, and counts labels."""

    honors = ("epochs", "batch_size", "shuffle", "Counting")
    make_lanes: Callable[[Tensor], Any] = staticmethod(lambda labels: labels.bincount(minlength=2))

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.labels = labels

    def train(self, tensors: Mapping[str, Tensor], *, context: Any) -> LocalResult:
        moved = {name: value + 0.01 for name, value in tensors.items()}
        lanes = {"counts": self.make_lanes(self.labels)}
        return LocalResult(
            tensors=moved, num_examples=len(self.labels), metrics={}, state={}, lanes=lanes
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: Any) -> LocalEvaluation:
        return LocalEvaluation(num_examples=len(self.labels), metrics={})


def count_calls(trainer: type[Counter], engine: Mapping[str, Any]) -> tuple[float, float]:
    data = fl.from_arrays(FEATURES, LABELS, partition=fl.Iid(4), test=(FEATURES, LABELS), seed=0)
    run = fl.simulate(
        make_model,
        data,
        Watching(local=Counting()),
        trainer=trainer,
        num_rounds=1,
        engine={"num_workers": 1, **engine},
    )
    found = run.history[0].metrics
    return found["first"], found["second"]


def test_the_engine_takes_the_lanes_of_a_trainer_as_sessions_do() -> None:
    """They are means over the clients, all of which take part."""
    expected = tuple((np.bincount(LABELS) / 4).tolist())
    assert count_calls(Counter, {}) == expected
    assert count_calls(Counter, {"transport": "memory"}) == expected


class Short(Counter):
    """Leaves out a class."""

    make_lanes = staticmethod(lambda labels: labels.bincount()[:1])


def test_lanes_that_do_not_fit_are_refused_by_the_engine() -> None:
    """With the same message as from a coordinator."""
    with pytest.raises(FedlearnError, match=r"Short .*lane 'counts' has shape \(1,\), not \(2,\)"):
        count_calls(Short, {})
