"""The client's floor."""

from typing import Any

import pytest

from fedlearn.client.policy import Policy
from fedlearn.core.messages import Settings
from fedlearn.errors import ConfigError
from fedlearn.secagg.parameters import Adversary


def refusal(policy: Policy, settings: Settings | None, *, num_tasks_today: int = 0) -> str | None:
    return policy.refusal("TrainRequest", settings=settings, num_tasks_today=num_tasks_today)


def test_without_a_floor_everything_is_taken() -> None:
    """Trainings, evaluations, and what later versions may ask (the session refuses those)."""
    for kind in ("TrainRequest", "EvaluateRequest", "Other"):
        assert Policy().refusal(kind, settings={}, num_tasks_today=10**6) is None


@pytest.mark.parametrize("epochs", [3, 2.5, float("nan"), float("inf"), None, "2", [2]])
def test_more_passes_than_allowed_are_refused(epochs: Any) -> None:  # Any: a peer's value
    """Also where their number is none, or not said."""
    settings: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    found = refusal(Policy(max_epochs=2), settings)
    assert found is not None
    assert found.startswith("policy: max_epochs is 2")


def test_as_many_passes_as_allowed_are_taken() -> None:
    """And before the settings are known, nothing is said about them."""
    assert refusal(Policy(max_epochs=2), {"epochs": 2}) is None
    assert refusal(Policy(max_epochs=2), None) is None


def test_the_days_number_of_trainings_is_kept() -> None:
    """Evaluations do not count."""
    policy = Policy(max_tasks_per_day=2)
    assert refusal(policy, {}, num_tasks_today=1) is None
    assert refusal(policy, {}, num_tasks_today=2) == "policy: max_tasks_per_day is 2"
    assert policy.refusal("EvaluateRequest", settings=None, num_tasks_today=2) is None


def test_a_readable_update_is_refused_where_secure_aggregation_is_required() -> None:
    """Evaluations carry no update."""
    policy = Policy(require_secure_aggregation=True)
    assert refusal(policy, None) is not None
    assert policy.refusal("EvaluateRequest", settings=None, num_tasks_today=0) is None


def test_a_secure_update_is_taken_where_secure_aggregation_is_required() -> None:
    """And is held to the other rules, in the one message of a session that asks for training."""
    policy = Policy(require_secure_aggregation=True, max_epochs=2, max_tasks_per_day=1)

    def asked(settings: Settings | None, num_tasks_today: int) -> str | None:
        return policy.refusal("SecureRequest", settings=settings, num_tasks_today=num_tasks_today)

    assert asked({"epochs": 2}, 0) is None
    assert asked({"epochs": 3}, 0) is not None
    assert asked({"epochs": 2}, 1) == "policy: max_tasks_per_day is 1"
    assert asked(None, 1) is None  # shares of what was trained before


def test_what_a_client_accepts_of_secure_aggregation_is_its_own_configuration() -> None:
    """By default a session must hold against an active coordinator, with three clients."""
    floor = Policy().secure_terms()
    assert (floor.adversary, floor.min_cohort) == (Adversary.ACTIVE_SERVER, 3)
    assert floor.max_releases_per_round == 2
    lower = Policy(secure_adversary="honest-but-curious", secure_sparse=False).secure_terms()
    assert (lower.adversary, lower.allow_sparse) == (Adversary.HONEST_BUT_CURIOUS, False)
    with pytest.raises(ConfigError, match="secure_adversary is 'nobody'"):
        Policy(secure_adversary="nobody")


@pytest.mark.parametrize("name", ["max_epochs", "max_tasks_per_day"])
def test_a_negative_maximum_is_refused(name: str) -> None:
    """It would forbid what zero forbids already: most likely a slip."""
    settings: dict[str, Any] = {name: -1}  # Any: mypy cannot know which field
    with pytest.raises(ConfigError, match=f"policy.{name} is -1"):
        Policy(**settings)
