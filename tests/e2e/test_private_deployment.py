"""Differential privacy deployed: the simulation's model, and a budget that outlives kills."""

import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch

from fedlearn.config import resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.experiment.privacy import ledger_of, section_of, spending
from fedlearn.experiment.progress import progress_to
from fedlearn.experiment.simulate import Site as RunSite
from fedlearn.experiment.simulate import run_config
from fedlearn.rounds.records import RunStatus
from tests.e2e.deployed import Site, site_in
from tests.processes import Launcher

NUM_CLIENTS, NUM_ROUNDS = 3, 8
BUDGET_SPENT = 4

pytestmark = pytest.mark.slow


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """Three of three clients are asked in each round: no coin decides."""
    overrides = (
        f"num_rounds={NUM_ROUNDS}",
        f"data.partition.num_clients={NUM_CLIENTS}",
        "evaluation.clients=0",
        "algorithm.weight_by_examples=false",
        f'cohort={{sampling="poisson", num_wanted={NUM_CLIENTS}}}',
        "stragglers.over_selection=1.0",
        "privacy.mode=central",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.target_delta=1e-3",
        f"privacy.num_users={NUM_CLIENTS}",
    )
    with site_in(launcher, tmp_path, *overrides) as site:
        yield site


def test_a_deployed_run_is_the_simulation_of_the_same_configuration(site: Site) -> None:
    """To the last bit, in whatever order the clients report: what is summed are integers."""
    site.change("privacy.reproducible=true")
    coordinator = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    assert coordinator.wait() == 0, coordinator.tail()
    config = site.config.model_copy(update={"name": "simulated"})
    engine = config.engine.model_copy(update={"transport": "memory"})
    config = config.model_copy(update={"engine": engine})
    here = RunSite(
        resolve_addresses(config, environ=os.environ),
        os.environ,
        SystemClock(),
        progress_to(StringIO(), as_json=False),
    )
    simulated = run_config(config, here).weights(best=False)
    with site.database() as database:
        deployed = database.run("federation").weights(best=False)
    assert deployed.keys() == simulated.keys()
    assert all(torch.equal(deployed[name], simulated[name]) for name in deployed)


def test_a_budget_holds_however_often_its_coordinator_is_killed(site: Site) -> None:
    """Each time that a round is asked is charged; at the end the run stops by itself."""
    site.change("privacy.epsilon=40.0", "num_rounds=5000")
    first = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, 2)
    first.kill()
    second = site.serving()
    site.until_round(second, 4)
    second.kill()
    third = site.coordinator()
    assert third.wait() == BUDGET_SPENT, third.tail()
    assert "the privacy budget is spent" in third.err()
    with site.database() as database:
        run = database.run("federation")
        rounds, spent = len(run.rounds()), spending(run)
        assert run.record.status is RunStatus.FAILED
        assert "privacy budget" in run.record.error
        charged = sum(ledger_of(run, section_of(run.record)).spent().values())
    assert spent is not None
    assert spent.num_charged == charged
    assert 4 < rounds <= charged < 1000
    assert 37.0 < spent.epsilon <= 40.0
    fourth = site.coordinator()
    assert fourth.wait() == BUDGET_SPENT, fourth.tail()


def test_a_deployment_says_how_many_may_enrol_and_flips_coins(site: Site) -> None:
    """ε rests on both."""
    text = site.file.read_text().replace(f"num_users = {NUM_CLIENTS}\n", "")
    site.file.write_text(text)
    process = site.coordinator()
    assert process.wait() == 2
    assert "privacy.num_users is missing" in process.err()
    cohort = "cohort={{sampling={}, num_wanted=3}}".format
    site.change(cohort('"uniform"'), f"privacy.num_users={NUM_CLIENTS}")
    process = site.coordinator()
    assert process.wait() == 2
    assert "asked more often than is accounted for" in process.err()
    site.change(cohort('"poisson"'), "privacy.num_users=2")
    process = site.start("typed", "check", str(site.file))
    assert process.wait() == 2
    assert "privacy.num_users is 2, but the data have 3 clients" in process.err()
