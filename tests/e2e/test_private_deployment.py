"""Deployed differential privacy: the simulation's model, and a budget that survives kills."""

import math
import os
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fedlearn.algorithms.cohorts import FixedCohorts
from fedlearn.algorithms.sampling import whose_turn
from fedlearn.assembly import build_deployment
from fedlearn.config import resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site as RunSite
from fedlearn.experiment.spending import ledger_of, load_spending, section_of
from fedlearn.privacy.events import Event
from fedlearn.privacy.gaussian import gaussian_epsilon
from fedlearn.rounds.records import RunStatus
from tests.e2e.deployed import Site, site_in
from tests.processes import Launcher

NUM_CLIENTS, NUM_ROUNDS = 3, 8
TURNS = '{sampling="cyclic", num_wanted=1}'
BUDGET_SPENT = 4

pytestmark = pytest.mark.slow


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """All three clients are asked in each round, so sampling does not matter."""
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
    """To the last bit and for any order of reports, since the sums are of integers.

    The clip norm adapts, so clients also send whether their update was within it.
    """
    site.change("privacy.reproducible=true", "privacy.clip_quantile=0.5")
    assert_as_simulated(site)


def test_clients_that_take_turns_are_those_of_the_simulation(site: Site) -> None:
    """Each client is one group, and the correlated noise is the same."""
    site.change("privacy.reproducible=true", "privacy.bands=3", f"cohort={TURNS}")
    assert_as_simulated(site)
    with site.database() as database:
        rounds = database.run("federation").rounds()
    asked = [each.participations.client_ids.tolist() for each in rounds]
    assert sorted(asked[:NUM_CLIENTS]) == [[0], [1], [2]]
    assert asked == (asked[:NUM_CLIENTS] * NUM_ROUNDS)[:NUM_ROUNDS]


def assert_as_simulated(site: Site) -> None:
    """Run a deployment of all clients and a simulation, and compare their models."""
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
        choose_printer(StringIO(), as_json=False),
    )
    simulated = run_config(config, here).weights(best=False)
    with site.database() as database:
        deployed = database.run("federation").weights(best=False)
    assert deployed.keys() == simulated.keys()
    assert all(torch.equal(deployed[name], simulated[name]) for name in deployed)


def test_turns_go_on_when_a_coordinator_is_killed(site: Site) -> None:
    """Charged turns are not repeated: no client is asked again before all others had their turn."""
    site.change("num_rounds=12", "privacy.bands=3", f"cohort={TURNS}")
    first = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, NUM_CLIENTS)
    first.kill()
    second = site.serving()
    assert second.wait() == 0, second.tail()
    with site.database() as database:
        run = database.run("federation")
        rounds = run.rounds()
        charged = sum(ledger_of(run, section_of(run.record)).load_spent_by_run().values())
    available = [ClientId(number) for number in range(NUM_CLIENTS)]
    of_turns = [
        whose_turn(available, num_groups=NUM_CLIENTS, turn=turn, seed=Seed(site.config.seed))
        for turn in range(NUM_CLIENTS)
    ]
    groups = [of_turns.index(tuple(each.participations.client_ids.tolist())) for each in rounds]
    assert groups[0] == 0
    skipped = [(after - before - 1) % NUM_CLIENTS for before, after in pairwise(groups)]
    assert len(rounds) == 12
    assert sum(each > 0 for each in skipped) <= 1  # where it was killed
    assert (charged - 12 - sum(skipped)) % NUM_CLIENTS == 0


def test_a_budget_holds_however_often_its_coordinator_is_killed(site: Site) -> None:
    """Each attempt of a round is charged; when the budget is spent, the run stops by itself."""
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
        rounds, spent = len(run.rounds()), load_spending(run)
        assert run.record.status is RunStatus.FAILED
        assert "privacy budget" in run.record.error
        charged = sum(ledger_of(run, section_of(run.record)).load_spent().values())
    assert spent is not None
    assert spent.num_charged == charged
    assert 4 < rounds <= charged < 1000
    assert 37.0 < spent.epsilon <= 40.0
    fourth = site.coordinator()
    assert fourth.wait() == BUDGET_SPENT, fourth.tail()


def test_clients_add_the_noise_themselves(site: Site) -> None:
    """Over the protocol and mutual TLS. Clients that take no step leave only noise in the model.

    Cohorts are not sampled secretly, so the accounting treats every user as asked in each round.
    """
    site.change(
        "privacy.mode=distributed",
        'cohort={sampling="uniform", num_wanted=3}',
        "secure_aggregation.mode=complete",
        "client.learning_rate=1e-30",
        "num_rounds=2",
        "privacy.num_users=10",
    )
    coordinator = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    assert coordinator.wait() == 0, coordinator.tail()
    with site.database() as database:
        run = database.run("federation")
        after, ledger = run.weights(best=False), ledger_of(run, section_of(run.record))
        spent = ledger.load_spent()
    assert spent == {Event(FixedCohorts(10, 10), 1.0): 2}
    torch.manual_seed(Seed(site.config.seed).derive("model").value)
    components = build_deployment(site.config, data_dir=Path("nowhere"))
    before = components.make_model().state_dict()
    noise = torch.cat([(after[name] - before[name]).flatten() for name in after]).double()
    # Each of 3 clients adds half of the variance, since one may reveal its share; in 2 rounds.
    sigma = 0.5 / 3 * (3 / 2 * 2) ** 0.5
    excess = float((noise**2).mean()) / sigma**2 - 1.0
    tolerance = 5.0 * (2.0 / len(noise)) ** 0.5
    assert abs(excess) < tolerance < 0.3


def test_a_client_counts_what_a_day_costs_it_over_its_restarts(site: Site) -> None:
    """Its limit allows two rounds a day, so the third round has only two clients."""
    site.change(
        "privacy.mode=distributed",
        "privacy.noise_multiplier=8.0",
        'cohort={sampling="uniform", num_wanted=3}',
        "secure_aggregation.mode=complete",
        "stragglers.max_retries=0",
        "stragglers.below_minimum=fail",
    )
    policy = site.folder / "policy.toml"
    affordable = gaussian_epsilon(math.sqrt(2 * (2 / 8) ** 2), 1e-6) * 1.001
    policy.write_text(
        "[policy.secure_aggregation]\ncorruption = 0.0\nmin_cohort = 3\n[policy.privacy]\n"
        f'mode = "distributed"\nmax_epsilon_per_day = {affordable}\n'
    )
    coordinator = site.serving()
    careful = site.join(0, "--config", str(policy))
    for number in (1, 2):
        site.join(number)
    site.until_round(coordinator, 1)
    careful.kill()
    site.join(0, "--config", str(policy))
    assert coordinator.wait() != 0
    with site.database() as database:
        rounds = database.run("federation").rounds()
    assert [each.round_num for each in rounds] == [0, 1]
    assert "privacy.max_epsilon_per_day" in coordinator.err()


def test_a_deployment_says_how_many_may_enrol_and_flips_coins(site: Site) -> None:
    """ε depends on the number of users and on Poisson sampling."""
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
