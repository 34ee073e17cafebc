"""From a configuration to the components of a deployed run, and what is refused."""

import math
from pathlib import Path

import pytest
from torch import nn

from fedlearn.algorithms.informed_sampling import NO_PROPERTIES, NO_STATE, as_informed
from fedlearn.assembly import Deployment, build_deployment, build_simulation
from fedlearn.config import from_mapping
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError
from fedlearn.experiment.privacy import skip_lost_turns
from fedlearn.gateway.eligibility import Requirements
from fedlearn.privacy.plan import BandedPlan

_USER_FILE = """
from torch import nn


def network():
    return nn.Linear(4, 2)
"""


def build(values: dict[str, object]) -> Deployment:
    return build_deployment(from_mapping(values, source="test"), data_dir=Path("nowhere"))


@pytest.fixture
def without_data(tmp_path: Path) -> dict[str, object]:
    """A configuration whose coordinator has a model but no data."""
    file = tmp_path / "user.py"
    file.write_text(_USER_FILE)
    model = {"kind": "python", "factory": f"{file}:network"}
    return {"data": {"source": "none"}, "model": model}


def test_a_deployment_and_its_simulation_have_the_same_pieces() -> None:
    """One file describes both."""
    config = from_mapping({"seed": 3}, source="test")
    deployed = build_deployment(config, data_dir=Path("nowhere"))
    simulated = build_simulation(config, data_dir=Path("nowhere"))
    assert deployed.algorithm == simulated.algorithm
    assert deployed.policy == simulated.policy
    assert deployed.sampler == simulated.sampler
    assert deployed.make_model == simulated.make_model
    assert deployed.seed == simulated.seed
    assert deployed.test is not None
    assert deployed.test.labels.equal(simulated.test.labels)


def test_without_data_the_clients_measure_the_model(without_data: dict[str, object]) -> None:
    """The mean of their results determines the best model."""
    components = build(without_data)
    assert components.test is None
    assert isinstance(components.make_model(), nn.Linear)
    assert components.early_stopping().metric == "clients/accuracy_mean"
    assert build({}).early_stopping().metric == "accuracy"


def test_a_metric_that_only_clients_measure_needs_no_more_than_its_direction(
    without_data: dict[str, object],
) -> None:
    """The coordinator receives it by name; its file says which direction is better."""
    own = {"metrics": {"dose": {"direction": "min"}}, "early_stopping": {"metric": "dose"}}
    stopping = build(without_data | own).early_stopping()
    assert (stopping.metric, stopping.direction) == ("clients/dose_mean", "min")
    assert build(own).early_stopping().metric == "clients/dose_mean", "nothing central has it"
    with pytest.raises(ConfigError, match=r'"dose", which is not measured.*one of: loss, accuracy'):
        build(without_data | {"early_stopping": {"metric": "dose"}})
    with pytest.raises(ConfigError, match="measures 'loss' already"):
        build(without_data | {"metrics": {"loss": {"direction": "max"}}})


def test_real_clients_have_ten_minutes_unless_it_is_written(
    without_data: dict[str, object],
) -> None:
    """Not the main job's ten seconds; an explicit deadline is kept, even "none"."""
    components = build(without_data)
    assert (components.policy.deadline_s, components.policy.cohort_size) == (600.0, 10)
    assert (
        components.config.stragglers.deadline_s == components.policy.deadline_s
    )  # the recorded form
    written = build(without_data | {"stragglers": {"deadline_s": "none"}})
    assert written.policy.deadline_s == math.inf


def test_what_has_no_data_cannot_be_simulated(without_data: dict[str, object]) -> None:
    """The error names the key to change."""
    config = from_mapping(without_data, source="test")
    with pytest.raises(ConfigError, match=r'data\.source is "none".*data\.source=digits'):
        build_simulation(config, data_dir=Path("nowhere"))


def test_pooled_training_is_not_deployed() -> None:
    """There is no data to pool."""
    with pytest.raises(ConfigError, match=r"centralized is true.*fedlearn simulate"):
        build({"centralized": True})


def test_a_loss_that_the_test_set_has_no_meaning_for_is_refused() -> None:
    """Before any client is asked, as in a simulation."""
    with pytest.raises(ConfigError, match=r"loss\.kind.*one label per example"):
        build({"loss": {"kind": "bce_with_logits"}})


def test_the_eligibility_table_becomes_requirements() -> None:
    """Key by key."""
    eligibility = {"tags": ["a=b"], "min_examples": 5, "devices": ["cuda"], "idle": True}
    components = build({"coordinator": {"eligibility": eligibility}})
    expected = Requirements(tags=("a=b",), min_examples=5, devices=("cuda",), idle=True)
    assert components.requirements == expected


def test_clients_that_take_turns_may_all_be_in_one_group(without_data: dict[str, object]) -> None:
    """Those that may enrol count: client numbers have gaps where others were revoked."""
    privacy = {
        "mode": "central",
        "bands": 3,
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "target_delta": 1e-4,
        "num_users": 50,
    }
    values = without_data | {"privacy": privacy, "cohort": {"num_wanted": 15}}
    components = build(values)
    assert isinstance(components.privacy, BandedPlan)
    assert (components.privacy.cohorts.num_groups, components.privacy.cohorts.largest) == (3, 50)
    assert (components.policy.num_wanted, components.policy.min_reports) == (50, 0)
    assert (components.num_needed, components.privacy.num_wanted) == (16, 17)
    plan = components.privacy
    assert components.sampler == plan.sampler == skip_lost_turns(components, num_lost=0).sampler
    later, available = (
        skip_lost_turns(components, num_lost=2),
        [ClientId(each) for each in range(0, 100, 2)],
    )
    cohorts = [
        as_informed(sampler).sample(
            available,
            cohort_size=50,
            round_num=turn,
            attempt=0,
            seed=components.seed,
            state=NO_STATE,
            properties=NO_PROPERTIES,
        )
        for sampler, turn in [(components.sampler, 7), (later.sampler, 5), (later.sampler, 7)]
    ]
    assert cohorts[0] == cohorts[1] != cohorts[2]
    sampled = values | {"cohort": {"num_wanted": 15, "sampling": "uniform"}}
    with pytest.raises(ConfigError, match=r'is "uniform", but privacy\.bands is 3'):
        build(sampled)
    del privacy["bands"]
    with pytest.raises(ConfigError, match=r'or to "cyclic", with privacy\.bands'):
        build(sampled)


@pytest.mark.parametrize(
    "name", ["rounds", "connected", "phase", "clients_loss_mean", "refused_total"]
)
def test_a_measure_does_not_pass_for_what_metrics_tell_of_a_coordinator(name: str) -> None:
    """In /metrics both would be one series. Control: an unused name."""
    table = {"direction": "max"}
    with pytest.raises(ConfigError, match=f"fedlearn_{name} already has another meaning"):
        build({"metrics": {name: table}})
    assert f"{name}_of_mine" in build({"metrics": {f"{name}_of_mine": table}}).directions
