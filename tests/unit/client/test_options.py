"""Options that an application passes to the training process."""

from functools import partial
from pathlib import Path

import pytest

from fedlearn.client.backoff import Reconnection
from fedlearn.client.conditions import Conditions
from fedlearn.client.options import OPTIONS, Connection, Resources, RuntimeOptions
from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.errors import ConfigError, DeploymentError


def test_a_roster_lies_where_the_application_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is made absolute, since the training process may have another working directory."""
    monkeypatch.chdir("/")
    assert Connection(roster="all.roster").roster == Path("/all.roster")


def test_what_is_no_address_is_refused() -> None:
    """On construction, before a process starts."""
    with pytest.raises(DeploymentError, match="'https://new' is not an address; write host:port"):
        Connection(addresses=["new:443", "https://new"])


@pytest.mark.parametrize(
    ("name", "value"), [("num_threads", 0), ("num_workers", 0), ("niceness", -1), ("niceness", 20)]
)
def test_resources_that_no_device_has_are_refused(name: str, value: int) -> None:
    """On construction, not in the training process."""
    with pytest.raises(ConfigError, match=rf"resources\.{name} is {value}"):
        Resources(**{name: value})


def test_workers_share_one_training_at_a_time() -> None:
    """Control: one of the two numbers is 1."""
    for num_runs, num_workers in ((2, 1), (1, 2), (2, 2)):
        make = partial(
            RuntimeOptions,
            home=Path("home"),
            trainer="m:T",
            policy=Policy(max_concurrent_runs=num_runs),
            resources=Resources(num_workers=num_workers),
        )
        if num_runs == num_workers:
            with pytest.raises(ConfigError, match="is 2, and 2 workers share each training"):
                make()
        else:
            make()


def test_options_reach_the_other_process_as_they_are() -> None:
    """Including the nested policy and conditions."""
    options = RuntimeOptions(
        home=Path("home"),
        trainer="m:T",
        invitation=Path("a.invitation"),
        conditions=Conditions(between=("22:00", "06:00")),
        policy=Policy(
            max_epochs=2, secure_aggregation=SecureAggregationPolicy(required=True, min_cohort=7)
        ),
        connection=Connection(
            addresses=["new:443"],
            roster="all.roster",
            reconnection=Reconnection(max_backoff_s=3.0),
        ),
        resources=Resources(num_threads=2, num_workers=3, niceness=3),
    )
    assert OPTIONS.validate_json(OPTIONS.dump_json(options)) == options
