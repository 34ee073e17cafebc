"""What an application hands to the process that trains."""

from pathlib import Path

from fedlearn.client.conditions import Conditions
from fedlearn.client.options import OPTIONS, RuntimeOptions
from fedlearn.client.policy import Policy, SecureAggregationPolicy


def test_options_reach_the_other_process_as_they_are() -> None:
    """Policy and conditions whole, with what is nested in them."""
    options = RuntimeOptions(
        home=Path("home"),
        trainer="m:T",
        invitation=Path("a.invitation"),
        conditions=Conditions(between=("22:00", "06:00")),
        policy=Policy(
            max_epochs=2, secure_aggregation=SecureAggregationPolicy(required=True, min_cohort=7)
        ),
        num_threads=2,
        num_workers=3,
        niceness=3,
    )
    assert OPTIONS.validate_json(OPTIONS.dump_json(options)) == options
