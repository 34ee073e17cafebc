"""A strategy that is another one in each round, by its state."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.strategy import State
from fedlearn.core.params import Params
from fedlearn.errors import RoundError

SGD = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.5)


@dataclass(frozen=True, kw_only=True)
class Halving(fl.Strategy):
    """Averages; the clients' rate is half of that of the round before."""

    local: fl.LocalSgd
    aggregation = fl.WeightedMean(by_examples=True)

    def init(self, params: Params) -> State:
        """Return the factor of the first round."""
        return {"factor": torch.tensor(1.0)}

    def at(self, state: State) -> fl.Strategy:
        """Return the strategy with the rate of the round."""
        rate = self.local.learning_rate * float(state["factor"])
        return replace(self, local=replace(self.local, learning_rate=rate))

    def step(self, params: Params, aggregate: fl.Aggregate, state: State) -> fl.Stepped:
        """Add the mean."""
        vector = params.vector + aggregate.lanes["delta"]
        return fl.Stepped(params.with_vector(vector), {"factor": state["factor"] / 2.0})


pytestmark = pytest.mark.usefixtures("surroundings")


def data() -> fl.FederatedData:
    """Two classes that a linear model separates, of eight clients."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    features = rng.normal(size=(200, 6)) + labels[:, None]
    return fl.from_arrays(
        features, labels, partition=fl.Iid(num_clients=8), test_fraction=0.2, seed=0
    )


def trained(algorithm: fl.Strategy, **engine: object) -> fl.Run:
    """Run four rounds of half the clients."""
    return fl.simulate(
        lambda: nn.Linear(6, 2),
        data(),
        algorithm,
        num_rounds=4,
        cohort={"num_wanted": 4},
        engine=engine,
    )


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_workers": 1, "executor": "sequential"}, id="engine"),
        pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, id="memory"),
    ],
)
def test_what_clients_do_may_depend_on_the_state(engine: dict[str, object]) -> None:
    """A rate that is halved by the strategy is one that is halved by a schedule."""
    found = trained(Halving(local=SGD), **engine).weights(best=False)
    scheduled = fl.ScheduledRate(inner=SGD, rate_decay=0.5)
    expected = trained(fl.FedAvg(scheduled), **engine).weights(best=False)
    constant = trained(fl.FedAvg(SGD), **engine).weights(best=False)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=1e-6)
        assert not torch.allclose(tensor, constant[name], atol=1e-3), "the control"


def test_a_strategy_that_says_none_is_refused() -> None:
    """With the name of the method, and what to return."""
    forgetful = type("Forgetful", (Halving,), {"at": lambda *_: None})
    with pytest.raises(RoundError, match=r"Forgetful\.at returned NoneType; it returns a strategy"):
        trained(forgetful(local=SGD), num_workers=1)
