"""Queries in a deployment: a coordinator and clients that hold data and no model, over gRPC."""

from pathlib import Path

import numpy as np
import pytest

from fedlearn.core.features import require_single_input
from fedlearn.experiment.run import Run
from fedlearn.rounds.records import RunStatus
from tests.e2e.deployed import site_in
from tests.processes import Launcher

NUM_CLIENTS = 5
#: The trainer of a client: its part of the configured data, and the query that it answers.
TRAINER = """
import os

import numpy as np

from fedlearn.algorithms.statistics import Moments
from fedlearn.client import QueryTrainer
from fedlearn.config import load
from fedlearn.deployment import part


def trainer():
    config = load(os.environ[part.CONFIG], overrides=())
    population = config.data.load_clients(seed=config.seed, data_dir=None).population
    own = population.load(np.asarray([int(os.environ[part.CLIENT])]))
    return QueryTrainer(*own.gather(), queries=[Moments])
"""
#: Each of the digits' 64 numbers is in 0..1, and a client has at most 400 of them.
ARGUMENTS = "{num_features=64, num_labels=10, max_examples=400.0, max_norm=8.0}"
QUERY = (
    "model={kind='none'}",
    "algorithm={name='fedlearn.algorithms.statistics:Moments', args=" + ARGUMENTS + "}",
    "num_rounds=2",
    f"cohort.num_wanted={NUM_CLIENTS}",
    "stragglers.over_selection=1.0",
)
POLICY = "[policy.secure_aggregation]\nmin_cohort = 2\nmax_clip = 1e5\n"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("overrides", "atol"),
    [
        pytest.param((), 1e-9, id="plain"),
        pytest.param(
            ("secure_aggregation.mode=complete", "secure_aggregation.modulus_bits=40"),
            1e-3,
            id="secure",
        ),
    ],
)
def test_deployed_moments_are_those_of_the_pooled_examples(
    launcher: Launcher, tmp_path: Path, overrides: tuple[str, ...], atol: float
) -> None:
    with site_in(launcher, tmp_path, *QUERY, *overrides) as site:
        config = site.config
        (tmp_path / "trainer.py").write_text(TRAINER)
        (tmp_path / "policy.toml").write_text(POLICY)
        coordinator = site.serving()
        for number in range(NUM_CLIENTS):
            task = f"{tmp_path / 'trainer.py'}:trainer"
            site.join(number, "--config", str(tmp_path / "policy.toml"), task=task)
        assert coordinator.wait() == 0, coordinator.tail()
        with site.database() as database:
            run = Run(database.run("federation"), None)
            found, rounds = run.state(), run.history
            assert run.record.status is RunStatus.DONE
    data = config.data.load_clients(seed=config.seed, data_dir=tmp_path)
    features, labels = data.population.load(np.arange(NUM_CLIENTS)).gather()
    x = require_single_input(features).double().flatten(1).numpy()
    expected = {
        "count": float(len(x)),
        "mean": x.mean(axis=0),
        "variance": x.var(axis=0),
        "label_counts": np.bincount(labels, minlength=10),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=atol, err_msg=name)
    assert len(rounds) == 2
    assert set(rounds[-1].metrics) == {"count"}, "nothing was evaluated"
