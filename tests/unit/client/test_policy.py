"""The client's policy: which requests it refuses, and by which rule."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlearn.client.judging import Judge, build_terms_policy
from fedlearn.client.policy import ExtraPolicy, Policy, SecureAggregationPolicy
from fedlearn.core.codec import encode
from fedlearn.core.messages import (
    EvaluateRequest,
    SecureEvaluateRequest,
    SecureTrainRequest,
    Settings,
    TrainRequest,
)
from fedlearn.errors import ConfigError, PolicyViolation
from fedlearn.secagg.parameters import Adversary


def rule(
    policy: Policy,
    settings: Settings | None,
    *,
    kind: str = "TrainRequest",
    num_tasks_today: int = 0,
) -> str | None:
    """Return the rule that refuses a request; ``None`` if it is accepted."""
    try:
        Judge(policy).check_announcement(kind, settings=settings, num_tasks_today=num_tasks_today)
    except PolicyViolation as violation:
        return violation.rule
    return None


def test_without_a_floor_everything_is_taken() -> None:
    """Including unknown kinds of later versions, which the session itself refuses."""
    for kind in ("TrainRequest", "EvaluateRequest", "SecureRequest", "Other"):
        assert rule(Policy(), {}, kind=kind, num_tasks_today=10**6) is None


@pytest.mark.parametrize("epochs", [3, 2.5, float("nan"), float("inf"), None, "2", [2]])
def test_more_passes_than_allowed_are_refused(epochs: Any) -> None:  # Any: a peer's value
    """Also if ``epochs`` is not a valid number, or missing."""
    settings: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    with pytest.raises(PolicyViolation) as refused:
        Judge(Policy(max_epochs=2)).check_announcement(
            "TrainRequest", settings=settings, num_tasks_today=0
        )
    assert (refused.value.rule, refused.value.limit) == ("max_epochs", "at most 2")
    assert refused.value.asked == f"epochs = {epochs!r}"


def test_as_many_passes_as_allowed_are_taken() -> None:
    """Settings that are not known yet are not judged."""
    assert rule(Policy(max_epochs=2), {"epochs": 2}) is None
    assert rule(Policy(max_epochs=2), None) is None


@pytest.mark.parametrize("is_secure", [False, True])
def test_fine_tuning_for_an_evaluation_is_judged_as_training(*, is_secure: bool) -> None:
    """Its epochs and free-form settings; an evaluation without it has none to judge."""
    judge = Judge(Policy(max_epochs=2))
    for fine_tuning, refused in (({"epochs": 3}, True), ({"epochs": 2}, False), ({}, False)):
        evaluate = EvaluateRequest(
            round_num=1, tensors={"w": torch.ones(1)}, fine_tuning=dict(fine_tuning)
        )
        secure = SecureEvaluateRequest(message=b"x", evaluate=evaluate)
        data = encode(secure if is_secure else evaluate)
        if refused:
            with pytest.raises(PolicyViolation, match="max_epochs"):
                judge.check_request(data, num_tasks_today=0, spent=0.0)
        else:
            assert judge.check_request(data, num_tasks_today=0, spent=0.0) is not None


def test_the_days_number_of_trainings_is_kept() -> None:
    """Evaluations do not count as trainings."""
    policy = Policy(max_tasks_per_day=2)
    assert rule(policy, {}, num_tasks_today=1) is None
    assert rule(policy, {}, num_tasks_today=2) == "max_tasks_per_day"
    assert rule(policy, None, kind="EvaluateRequest", num_tasks_today=2) is None


@pytest.mark.parametrize(
    ("policy", "name", "value", "limit"),
    [
        (ExtraPolicy(), "anything", "at all", None),
        (ExtraPolicy(numbers=()), "rate", 0.5, "no numbers"),
        (ExtraPolicy(numbers=()), "rate", 5, "no numbers"),
        (ExtraPolicy(numbers=()), "dry", True, None),
        (ExtraPolicy(truths=()), "dry", True, "no truth values"),
        (ExtraPolicy(numbers=("loss.*", "rate")), "loss.weight", 1, None),
        (ExtraPolicy(numbers=("loss.*", "rate")), "rat", 1, "numbers with the names loss.*, rate"),
        (ExtraPolicy(texts=("way",)), "way", "up", None),
        (ExtraPolicy(texts=("way",)), "Way", "up", "texts with the names way"),
        (ExtraPolicy(max_characters=3), "way", "down", "texts of at most 3 characters"),
        (ExtraPolicy(), "way", None, "texts, numbers and truth values"),
    ],
)
@pytest.mark.parametrize("kind", ["TrainRequest", "SecureRequest"])
def test_free_form_settings_are_judged_by_name_kind_and_size(
    policy: ExtraPolicy, name: str, value: Any, limit: str | None, kind: str
) -> None:  # Any: a peer's value
    """In secure aggregation they are judged as soon as the training is announced."""
    judge, settings = Judge(Policy(extra=policy)), {f"extra.{name}": value}
    if limit is None:
        judge.check_announcement(kind, settings=settings, num_tasks_today=0)
        return
    with pytest.raises(PolicyViolation) as refused:
        judge.check_announcement(kind, settings=settings, num_tasks_today=0)
    assert (refused.value.rule, refused.value.limit) == ("extra", limit)


def test_as_many_free_form_settings_as_allowed_are_taken() -> None:
    """Other settings do not count. A refusal quotes only the start of a long value."""
    policy = Policy(extra=ExtraPolicy(max_settings=1, texts=()))
    assert rule(policy, {"epochs": 1, "batch_size": 2, "extra.a": 1}) is None
    assert rule(policy, {"extra.a": 1, "extra.b": 2}) == "extra.max_settings"
    with pytest.raises(PolicyViolation) as refused:
        Judge(policy).check_announcement(
            "TrainRequest", settings={"extra.a": "x" * 10**6}, num_tasks_today=0
        )
    assert len(refused.value.asked) < 200
    with pytest.raises(ConfigError, match=r"policy\.extra\.max_settings is -1"):
        ExtraPolicy(max_settings=-1)


QUERY: Settings = {"update": "Moments", "num_features": 3}


def test_an_answer_of_its_own_is_shown_only_if_the_policy_allows_it() -> None:
    """Controls: sums over clients, and a setting of that name in a training."""
    shown: Settings = {**QUERY, "per_client": True}
    for kind in ("TrainRequest", "SecureRequest"):
        assert rule(Policy(), shown, kind=kind) == "answer_per_client"
        assert rule(Policy(answer_per_client=True), shown, kind=kind) is None
        assert rule(Policy(), {**QUERY, "per_client": False}, kind=kind) is None
    assert rule(Policy(), {"update": "sgd", "epochs": 1, "per_client": True}) is None


def test_queries_are_refused_by_a_policy_that_answers_none() -> None:
    """From the announcement on, if it cannot be anything else. Control: trainings are not."""
    none = Policy(answer_queries=False)
    trainings: list[Settings] = [
        {"update": "sgd", "epochs": 1},
        {"update": "Mine", "epochs": 1},
        {},  # a trainer of the user's own needs no settings
        {"update": "own"},
    ]
    for kind in ("TrainRequest", "SecureRequest"):
        assert rule(none, QUERY, kind=kind) == "answer_queries"
        assert rule(Policy(max_epochs=1), QUERY, kind=kind) is None
        assert rule(Policy(max_epochs=0), QUERY, kind=kind) == "max_epochs"
        assert all(rule(none, each, kind=kind) is None for each in trainings)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_query_is_judged_by_whether_there_is_a_model(*, is_secure: bool) -> None:
    """Settings that look like a training do not disguise a query, nor the other way round."""

    def judge(policy: Policy, settings: Settings, *names: str) -> str | None:
        train = TrainRequest(
            round_num=0,
            attempt=0,
            tensors={name: torch.ones(1) for name in names},
            order=names,
            settings=settings,
            seed=0,
        )
        data = encode(SecureTrainRequest(message=b"x", train=train) if is_secure else train)
        try:
            Judge(policy).check_request(data, num_tasks_today=0, spent=0.0)
        except PolicyViolation as violation:
            return violation.rule
        return None

    none, few = Policy(answer_queries=False), Policy(max_epochs=2)
    assert judge(none, QUERY) == judge(none, {"update": "sgd", "epochs": 1}) == "answer_queries"
    assert judge(none, QUERY, "w") is None
    assert judge(few, QUERY) is None
    assert judge(few, QUERY, "w") == "max_epochs"


@pytest.mark.parametrize(("min_cohort", "left"), [(3, "a sum of 1"), (2, "a sum of 1"), (4, None)])
def test_a_cohort_in_which_two_accomplices_read_the_rest_is_warned_of(
    min_cohort: int, left: str | None
) -> None:
    warning = SecureAggregationPolicy(min_cohort=min_cohort).warning
    assert warning is None if left is None else warning is not None and left in warning


REQUIRED = SecureAggregationPolicy(required=True)


@pytest.mark.parametrize("kind", ["TrainRequest", "EvaluateRequest"])
def test_what_the_coordinator_could_read_is_refused_where_secure_aggregation_is_required(
    kind: str,
) -> None:
    """Both updates and evaluations. Control: without the requirement they are accepted."""
    policy = Policy(secure_aggregation=REQUIRED)
    assert rule(policy, None, kind=kind) == "secure_aggregation.required"
    assert rule(Policy(evaluate=True), None, kind=kind) is None


def test_a_secure_update_is_taken_where_secure_aggregation_is_required() -> None:
    """The other rules still apply to session messages that announce training."""
    policy = Policy(max_epochs=2, max_tasks_per_day=1, secure_aggregation=REQUIRED)

    def asked(settings: Settings | None, num_tasks_today: int) -> str | None:
        return rule(policy, settings, kind="SecureRequest", num_tasks_today=num_tasks_today)

    assert asked({"epochs": 2}, 0) is None
    assert asked({"epochs": 3}, 0) == "max_epochs"
    assert asked({"epochs": 2}, 1) == "max_tasks_per_day"
    assert asked(None, 1) is None  # a later stage of a session that was accepted before


def test_what_a_client_accepts_of_secure_aggregation_is_its_own_configuration() -> None:
    """By default a session must withstand an active coordinator."""
    floor = build_terms_policy(Policy().secure_aggregation)
    assert (floor.adversary, floor.min_cohort) == (Adversary.ACTIVE_SERVER, 4)
    assert floor.max_releases_per_round == 2
    assert floor.allow_sparse
    lowered = SecureAggregationPolicy(adversary="honest-but-curious", allow_sparse=False)
    lower = build_terms_policy(lowered)
    assert (lower.adversary, lower.allow_sparse) == (Adversary.HONEST_BUT_CURIOUS, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adversary", "nobody"),
        ("corruption", 1.0),
        ("corruption", -0.1),
        ("max_clip", 0.0),
        ("max_clip", float("nan")),
        ("min_cohort", 1),
        ("max_cohort", 2),
        ("max_upload_bytes", 0),
        ("max_releases_per_round", 0),
    ],
)
def test_a_demand_out_of_range_is_refused_by_name(name: str, value: Any) -> None:  # Any: of all
    """It would allow everything or nothing, most likely by mistake."""
    with pytest.raises(ConfigError, match=rf"secure_aggregation\.{name} is "):
        replace(SecureAggregationPolicy(), **{name: value})


@pytest.mark.parametrize("name", ["max_epochs", "max_tasks_per_day"])
def test_a_negative_maximum_is_refused(name: str) -> None:
    """It would mean the same as 0, so it is most likely a mistake."""
    settings: dict[str, Any] = {name: -1}  # Any: mypy cannot know which field
    with pytest.raises(ConfigError, match=rf"policy\.{name} is -1"):
        Policy(**settings)
