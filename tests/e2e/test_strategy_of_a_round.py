"""Strategies that change from round to round, depending on their state."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.round_settings import RoundSettings
from fedlearn.algorithms.strategy import State
from fedlearn.core.messages import Scalar
from fedlearn.core.params import Params
from fedlearn.errors import RoundError

SGD = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.5)


@dataclass(frozen=True, kw_only=True)
class Halving(fl.Strategy):
    """Averages updates, and halves the clients' learning rate in each round."""

    local: fl.LocalSgd
    aggregation = fl.WeightedMean(by_examples=True)

    def init(self, params: Params) -> State:
        """Return the factor of the first round."""
        return {"factor": torch.tensor(1.0)}

    def at(self, state: State) -> fl.Strategy:
        """Return the strategy with the rate of the round."""
        rate = self.local.learning_rate * float(state["factor"])
        return replace(self, local=replace(self.local, learning_rate=rate))

    def step(self, params: Params, aggregate: fl.Aggregate, state: State) -> fl.StepResult:
        """Add the mean."""
        vector = params.vector + aggregate.lanes["delta"]
        return fl.StepResult(params.with_vector(vector), {"factor": state["factor"] / 2.0})


pytestmark = pytest.mark.usefixtures("surroundings")


def data() -> fl.FederatedData:
    """Make two classes that a linear model separates, for eight clients."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    features = rng.normal(size=(200, 6)) + labels[:, None]
    return fl.from_arrays(
        features, labels, partition=fl.Iid(num_clients=8), test_fraction=0.2, seed=0
    )


def halve(round_num: int) -> dict[str, Scalar]:
    """Return the settings of a round, with a learning rate that halves in each round."""
    return {"learning_rate": SGD.learning_rate / 2**round_num}


def trained(
    algorithm: fl.Strategy, by_round: RoundSettings | None = None, /, **engine: object
) -> fl.Run:
    """Run four rounds of half the clients."""
    return fl.simulate(
        lambda: nn.Linear(6, 2),
        data(),
        algorithm,
        num_rounds=4,
        cohort={"num_wanted": 4},
        engine=engine,
        by_round=by_round,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_workers": 1, "executor": "sequential"}, id="engine"),
        pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, id="memory"),
    ],
)
def test_what_clients_do_may_depend_on_the_state(engine: dict[str, object]) -> None:
    """Halving the rate in the strategy equals halving it by a schedule."""
    found = trained(Halving(local=SGD), **engine).weights(best=False)
    scheduled = fl.ScheduledRate(inner=SGD, rate_decay=0.5)
    expected = trained(fl.FedAvg(scheduled), **engine).weights(best=False)
    by_round = trained(fl.FedAvg(SGD), halve, **engine).weights(best=False)
    assert all(torch.equal(by_round[name], found[name]) for name in found)
    constant = trained(fl.FedAvg(SGD), **engine).weights(best=False)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=1e-6)
        assert not torch.allclose(tensor, constant[name], atol=1e-3), "the control"


#: Devices and settings with which rounds take updates that were trained from earlier models.
UNEVEN = {"kind": "lognormal", "speed_sigma": 1.5, "round_jitter_sigma": 0.0}
OVERTAKING: dict[str, dict[str, object]] = {
    "buffered": {
        "asynchronous": {
            "mode": "buffered",
            "buffer_size": 2,
            "concurrency": 6,
        },
        "staleness": {"staleness_hinge": 0},
    },
    "late": {
        "late_updates": {"mode": "keep"},
        "cohort": {"num_wanted": 3},
        "stragglers": {"over_selection": 2.0, "min_reports": 1},
    },
}


def overtaken(
    algorithm: fl.Strategy,
    mode: str,
    **settings: Any,  # Any: tables of the configuration, and arguments
) -> fl.Run:
    """Run rounds that close while slower clients still train."""
    table: dict[str, Any] = {"num_rounds": 8, "devices": UNEVEN} | OVERTAKING[mode] | settings
    return fl.simulate(lambda: nn.Linear(6, 2), data(), algorithm, **table)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"executor": "sequential"}, {"transport": "memory"}])
@pytest.mark.parametrize("mode", OVERTAKING)
def test_who_is_overtaken_does_what_it_was_asked_to(mode: str, engine: dict[str, object]) -> None:
    """It uses the state of the round in which it was asked, over any transport."""
    run = overtaken(fl.FedAvg(fl.ScheduledRate(inner=SGD, rate_decay=0.5)), mode, engine=engine)
    assert any(age > 0 for each in run.history for age in each.staleness), "the control"
    found = overtaken(Halving(local=SGD), mode, engine=engine).weights(best=False)
    by_round = overtaken(fl.FedAvg(SGD), mode, engine=engine, by_round=halve).weights(best=False)
    for name, expected in run.weights(best=False).items():
        torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-6)
        assert torch.equal(by_round[name], found[name])


@dataclass
class Raising:
    """A callback that interrupts a run after a round."""

    before: int

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        """Raise after a round."""
        del model
        if record.round_num == self.before:
            raise InterruptedError


@pytest.mark.slow
@pytest.mark.parametrize("mode", OVERTAKING)
def test_a_run_that_goes_on_knows_what_was_asked(mode: str) -> None:
    """The state of earlier rounds is in the checkpoint with their models."""
    same: dict[str, Any] = {"store": {"checkpoint_every_s": 0.0}}
    whole = overtaken(Halving(local=SGD), mode, **same)
    with pytest.raises(InterruptedError):
        overtaken(Halving(local=SGD), mode, name="cut", callbacks=[Raising(4)], **same)
    gone_on = overtaken(Halving(local=SGD), mode, resume="cut", **same)
    for name, expected in whole.weights(best=False).items():
        assert torch.equal(gone_on.weights(best=False)[name], expected)


def test_a_strategy_that_says_none_is_refused() -> None:
    """The message has the name of the method, and what to return."""
    forgetful = type("Forgetful", (Halving,), {"at": lambda *_: None})
    with pytest.raises(RoundError, match=r"Forgetful\.at returned NoneType; it returns a strategy"):
        trained(forgetful(local=SGD), num_workers=1)
