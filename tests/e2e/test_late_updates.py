"""Semi-synchronous runs from Python: resumed, with several workers, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlearn as fl
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError
from tests.e2e.test_python_api import Quiet, data, make_model

#: Some devices take ten times as long as others, so that there are always late clients.
SETTINGS: dict[str, Any] = {
    "num_rounds": 8,
    "cohort": {"num_wanted": 4},
    "devices": {"kind": "lognormal", "speed_sigma": 1.5},
    "stragglers": {"over_selection": 1.25, "deadline_s": 20.0},
    "late_updates": {"mode": "keep", "deadline_quantile": 0.6},
    "store": {"checkpoint_every_s": 0.0},
    "engine": {"num_workers": 1},
}
LOCAL = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1, momentum=0.5, keep_momentum=True)


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(algorithm: fl.Strategy | None = None, **settings: Any) -> fl.Run:  # Any: keys and objects
    return fl.simulate(make_model, data(), algorithm or fl.FedAvg(LOCAL), **SETTINGS | settings)


def weights(found: fl.Run) -> torch.Tensor:
    return torch.cat([value.flatten() for value in found.weights(best=False).values()])


@pytest.mark.slow
@pytest.mark.parametrize("break_after", [2, 5])
def test_a_run_goes_on_with_who_is_late_and_what_was_observed(break_after: int) -> None:
    """Weights, virtual time and every client's status are the same, to the bit."""
    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(name="broken", progress=Quiet(break_after=break_after))
    again = run(resume="broken")
    assert torch.equal(weights(again), weights(whole))
    for left, right in zip(again.history, whole.history, strict=True):
        assert left.participations == right.participations
        assert (left.virtual_s, dict(left.staleness)) == (right.virtual_s, dict(right.staleness))
    taken = Counter[int]()
    for record in whole.history[break_after:]:
        taken.update({age: n for age, n in record.staleness.items() if age})
    assert taken.total() > 0, "late updates were taken after the break"


@pytest.mark.slow
def test_who_was_late_counts_where_it_would_be_dropped() -> None:
    """The control: by default late updates are dropped, none is stale, and the model differs."""
    kept, dropped = run(), run(late_updates={"mode": "drop"})
    assert any(age for record in kept.history for age in record.staleness)
    assert not any(record.staleness for record in dropped.history)
    assert any(record.count(Status.LATE) for record in dropped.history)
    assert not torch.equal(weights(kept), weights(dropped))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"num_workers": 2}, {"executor": "sequential"}])
def test_workers_and_executors_change_nothing_but_rounding(engine: dict[str, Any]) -> None:
    """Every client's status is the same as well."""
    one, other = run(), run(engine={"num_workers": 1} | engine)
    torch.testing.assert_close(weights(other), weights(one), rtol=0.0, atol=1e-6)
    for left, right in zip(other.history, one.history, strict=True):
        assert [each[:3] for each in left.participations] == [
            each[:3] for each in right.participations
        ]
        assert left.virtual_s == right.virtual_s


TOO_FEW = {"over_selection": 1.25, "deadline_s": 5.0, "min_reports": 4, "max_retries": 20}


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", [SETTINGS["stragglers"], TOO_FEW], ids=["late", "retried"])
def test_sessions_over_memory_are_the_engine_to_the_bit(stragglers: dict[str, Any]) -> None:
    """Models, virtual time and every client's status, also if rounds are retried."""
    exactly = {"num_workers": 1, "executor": "sequential", "block_size": 1}
    engine = run(stragglers=stragglers, engine=exactly)
    sessions = run(stragglers=stragglers, engine={"transport": "memory"})
    assert torch.equal(weights(sessions), weights(engine))
    for left, right in zip(sessions.history, engine.history, strict=True):
        assert {each[:2] for each in left.participations} == {
            each[:2] for each in right.participations
        }
        assert (left.attempt, dict(left.staleness)) == (right.attempt, dict(right.staleness))
        assert left.virtual_s == pytest.approx(right.virtual_s, rel=1e-12)
    retried = any(record.attempt for record in engine.history)
    assert retried == (stragglers is TOO_FEW)


@pytest.mark.slow
def test_who_takes_as_long_as_the_deadline_is_in_time() -> None:
    """In both transports. Without jitter, deadlines equal the durations of some clients."""
    same: dict[str, Any] = {
        "cohort": {"num_wanted": 5},
        "devices": SETTINGS["devices"] | {"round_jitter_sigma": 0.0},
        "late_updates": SETTINGS["late_updates"] | {"deadline_quantile": 0.8},
    }
    engine = run(engine={"num_workers": 1, "executor": "sequential", "block_size": 1}, **same)
    sessions = run(engine={"transport": "memory"}, **same)
    for left, right in zip(sessions.history, engine.history, strict=True):
        assert {each[:2] for each in left.participations} == {
            each[:2] for each in right.participations
        }
    assert torch.equal(weights(sessions), weights(engine))


SCAFFOLD = fl.Scaffold(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1),
    num_clients=12,
    server_learning_rate=1.0,
)
EASGD = fl.EASGD(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1), elasticity=0.1, cohort_size=4
)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"algorithm": SCAFFOLD}, "the model that its client was sent"),
        ({"algorithm": EASGD}, "equal and opposite amounts"),
        ({"secure_aggregation": {"mode": "complete"}}, "masks cancel in the sum of one session"),
        (
            {"privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-5}},
            "moves from one sum to the next",
        ),
        ({"cohort": {"num_wanted": 4, "sampling": "poisson"}}, 'such as "uniform"'),
        ({"asynchronous": {"mode": "buffered"}}, "a buffer takes updates whenever they come"),
        ({"late_updates": {"deadline_quantile": 0.5}}, "their durations are unknown"),
        (
            {"late_updates": {"mode": "keep", "least_deadline_s": 30.0}},
            r"is 30, above stragglers.deadline_s, which is 20",
        ),
        ({"centralized": True}, "remove one of them"),
    ],
)
def test_what_does_not_hold_with_late_updates_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    """Before anything is trained."""
    if "privacy" in settings:
        settings = {**settings, "privacy": {"mode": "central", **settings["privacy"]}}
    with pytest.raises(ConfigError, match=reason):
        run(**settings)
