"""A privacy ledger belongs to examples: the same ones get a new one only if the user says so."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedlearn as fl
from fedlearn.errors import ConfigError
from fedlearn.experiment.progress import choose_printer
from fedlearn.simulation.federated_data import Division
from tests.augmented import Augmented

NUM = 120
FEATURES = np.random.default_rng(0).normal(size=(NUM, 4)).astype(np.float32)
LABELS = np.arange(NUM) % 2
EXAMPLE = {"mode": "example", "clip_norm": 1.0, "noise_multiplier": 2.0, "target_delta": 1e-3}
CENTRAL = EXAMPLE | {"mode": "central"}

pytestmark = pytest.mark.usefixtures("surroundings")


def divide(
    partition: Division | None = None,
    *,
    seed: int = 0,
    rows: slice = slice(None),
    test_fraction: float = 0.2,
) -> fl.FederatedData:
    return fl.from_arrays(
        FEATURES[rows],
        LABELS[rows],
        partition=partition or fl.Iid(4),
        test_fraction=test_fraction,
        seed=seed,
    )


def spend_round(
    data: fl.FederatedData, privacy: dict[str, object], name: str | None = None
) -> float:
    """Run a round on all clients and return ε."""
    done = fl.simulate(
        lambda: nn.Linear(4, 2),
        data,
        fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1), weight_by_examples=False),
        privacy=privacy,
        num_rounds=1,
        cohort={"num_wanted": data.population.num_clients, "sampling": "uniform"},
        evaluation={"clients": 0},
        engine={"num_workers": 1, "executor": "sequential"},
        progress=choose_printer(io.StringIO(), as_json=False),
        name=name,
    )
    assert done.privacy is not None
    return done.privacy.epsilon


@pytest.mark.slow
def test_the_cost_of_examples_adds_up_however_they_are_divided() -> None:
    """For other seeds, clients, held-out rows and subsets. Control: other examples start afresh."""
    once = spend_round(divide(), EXAMPLE)
    found = [
        spend_round(divide(seed=1), EXAMPLE),
        spend_round(divide(fl.Iid(3)), EXAMPLE, name="renamed"),
        spend_round(divide(fl.Dirichlet(3, alpha=1.0, min_examples=5)), EXAMPLE),
        spend_round(divide(test_fraction=0.5, seed=7), EXAMPLE),
        spend_round(divide(rows=slice(60, 20, -1)), EXAMPLE),
    ]
    assert np.all(np.diff([once, *found]) > 0.1)
    others = fl.from_arrays(-FEATURES, LABELS, partition=fl.Iid(4), test_fraction=0.2, seed=0)
    assert spend_round(others, EXAMPLE) == pytest.approx(once)
    assert spend_round(divide(), EXAMPLE | {"population": "ward 5"}) == pytest.approx(once)


@pytest.mark.slow
def test_users_that_hold_other_examples_need_a_name() -> None:
    """Their costs cannot be added up, unless the user names the population they belong to."""
    once = spend_round(divide(), CENTRAL, name="first")
    for other in (divide(seed=1), divide(fl.Iid(3)), divide(rows=slice(0, 90))):
        with pytest.raises(ConfigError, match=r"divided among other clients.* name the population"):
            spend_round(other, CENTRAL)
    twice = spend_round(divide(), CENTRAL)
    assert twice > once + 0.1
    others = CENTRAL | {"other_data_because": "the control group"}
    assert spend_round(divide(seed=1), others) == pytest.approx(once)
    named = CENTRAL | {"population": "ward 5"}
    assert spend_round(divide(seed=2), named) == pytest.approx(once)
    assert spend_round(divide(seed=3), named) == pytest.approx(twice)
    with pytest.raises(ConfigError, match=r"each of the ledgers .*ward 5"):
        spend_round(divide(seed=2), CENTRAL)


def test_examples_that_cannot_be_known_again_need_a_name() -> None:
    """Such as randomly augmented examples. Control: with a name they are accepted."""
    test = TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(LABELS))
    data = fl.from_dataset(
        Augmented(FEATURES, LABELS), labels=LABELS, partition=fl.Iid(4), test=test, seed=0
    )
    with pytest.raises(ConfigError, match=r"change each time they are read.* name the population"):
        spend_round(data, EXAMPLE)
    assert spend_round(data, EXAMPLE | {"population": "ward 5"}) > 0.0
