"""Samplers with state: resumed, with retries, in every kind of round, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.informed_sampling import ObservedRound, SamplerState
from fedlearn.config import from_mapping
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError

NUM_CLIENTS, NUM_ROUNDS = 12, 6
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "own-sampler-and-callbacks.md"
LOCAL = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
SYNCHRONOUS: dict[str, Any] = {"cohort": {"num_wanted": 4}}
SEMI_SYNCHRONOUS: dict[str, Any] = {
    **SYNCHRONOUS,
    "late_updates": {"mode": "keep"},
    "stragglers": {"over_selection": 1.5, "deadline_s": 3.0},
    "devices": {"kind": "lognormal"},
}
BUFFERED: dict[str, Any] = {
    "asynchronous": {"mode": "buffered", "buffer_size": 3, "concurrency": 5},
    "devices": {"kind": "lognormal"},
}
KINDS = {"synchronous": SYNCHRONOUS, "late": SEMI_SYNCHRONOUS, "buffered": BUFFERED}


@dataclass(frozen=True)
class HighestLoss(fl.InformedSampler):
    """Asks the clients whose last loss was highest; those that never reported come first."""

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        rows = observed.participations
        known = np.isfinite(rows.losses)
        count = state.get("count", torch.zeros(1)) + 1
        losses = {"loss": rows.losses[known]}
        return {**fl.write_client_values(state, rows.client_ids[known], losses), "count": count}

    def sample(
        self, available: Any, *, cohort_size: int, state: SamplerState, **_: Any
    ) -> tuple[ClientId, ...]:
        losses = fl.read_client_values(state, "loss", fl.ids_of(available), default=np.inf)
        order = np.argsort(-losses, kind="stable")[:cohort_size]
        return tuple(available[each] for each in order.tolist())


@dataclass
class HiddenLoss:
    """The same with a memory of its own, which no checkpoint holds."""

    losses: dict[int, float] = field(default_factory=dict)

    def sample(self, available: Any, *, cohort_size: int, **_: Any) -> tuple[ClientId, ...]:
        order = sorted(available, key=lambda each: -self.losses.get(each, np.inf))
        return tuple(order[:cohort_size])

    def after_round(self, record: fl.RoundRecord, _: nn.Module) -> None:
        rows = record.participations
        self.losses |= {
            each.client_id: each.loss for each in rows if each.status is Status.REPORTED
        }


class Failing:
    """A callback that ends the run in its fourth round."""

    def after_round(self, record: fl.RoundRecord, _: nn.Module) -> None:
        if record.round_num == 3:
            raise LookupError("stop here")


def make_model() -> nn.Module:
    return nn.Linear(6, 3)


def make_data() -> fl.FederatedData:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    features = rng.normal(size=(300, 6)) + labels[:, None]
    partition = fl.Dirichlet(num_clients=NUM_CLIENTS, alpha=1.0, min_examples=8)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.2, seed=0)


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(**settings: Any) -> fl.Run:  # Any: arguments, keys and tables
    everything: dict[str, Any] = {
        "num_rounds": NUM_ROUNDS,
        "store": {"checkpoint_every_s": 0.0},
        "evaluation": {"every_rounds": 0, "clients": 0},
        "engine": {"num_workers": 1, "executor": "sequential"},
        **settings,
    }
    algorithm = fl.FedAvg(LOCAL, weight_by_examples=False)
    return fl.simulate(make_model, make_data(), algorithm, **everything)


def cohorts(finished: fl.Run) -> list[list[int]]:
    return [record.participations.client_ids.tolist() for record in finished.history]


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def interrupt_and_resume(**settings: Any) -> fl.Run:
    with pytest.raises(LookupError, match="stop here"):
        run(name="broken", callbacks=[Failing()], **settings)
    return run(resume="broken", **settings)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_run_draws_the_same_cohorts(kind: str) -> None:
    settings = {"sampler": HighestLoss(), **KINDS[kind]}
    whole, resumed = run(**settings), interrupt_and_resume(**settings)
    assert cohorts(resumed) == cohorts(whole)
    assert same(resumed.weights(best=False), whole.weights(best=False))


BUILT_IN: dict[str, dict[str, Any]] = {
    "by_size": {},
    "power_of_choice": {"candidates_per_client": 1.5},
    "oort": {"exploration": 0.4, "pacer_window": 1},
    "f3ast": {},
    "stratified": {"by": "label"},
}


#: Samplers that keep what they have learned from earlier rounds.
LEARNING = ("power_of_choice", "oort", "f3ast")


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(each, marks=() if each in LEARNING else pytest.mark.slow) for each in BUILT_IN],
)
def test_a_resumed_run_of_each_sampling_draws_the_same_cohorts(sampling: str) -> None:
    """Each by its name in a file; and other cohorts than uniform ones."""
    settings = {"cohort": {"num_wanted": 4, "sampling": sampling, **BUILT_IN[sampling]}}
    whole, resumed = run(**settings), interrupt_and_resume(**settings)
    assert cohorts(resumed) == cohorts(whole)
    assert cohorts(whole) != cohorts(run(**SYNCHRONOUS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", "buffered"])
@pytest.mark.parametrize("sampling", list(BUILT_IN))
def test_each_sampling_resumes_in_every_kind_of_round(sampling: str, kind: str) -> None:
    settings = {**KINDS[kind]}
    settings["cohort"] = {
        **settings.get("cohort", {}),
        "sampling": sampling,
        **BUILT_IN[sampling],
    }
    assert cohorts(interrupt_and_resume(**settings)) == cohorts(run(**settings))


def test_examples_do_not_count_twice() -> None:
    """Under weights by examples. In a file, equal weights are the default of such a sampling."""
    algorithm = fl.FedAvg(LOCAL)
    with pytest.raises(ConfigError, match="SizeSampler asks clients with more examples more often"):
        fl.simulate(
            make_model, make_data(), algorithm, num_rounds=1, cohort={"sampling": "by_size"}
        )
    assert not fl_config({"cohort": {"sampling": "by_size"}})["weight_by_examples"]
    assert fl_config({"cohort": {"sampling": "stratified", "by": "label"}})["weight_by_examples"]


def fl_config(raw: dict[str, object]) -> dict[str, Any]:
    """The resolved table of the algorithm."""
    return from_mapping(raw, source="test").algorithm.model_dump()


def test_a_group_that_clients_do_not_have_is_refused_with_those_they_have() -> None:
    """Before any client trains."""
    cohort = {"num_wanted": 4, "sampling": "stratified", "by": "country"}
    with pytest.raises(ConfigError, match=r'cohort\.by: .* no property "country"; give "label"'):
        run(cohort=cohort)


def test_a_sampler_that_hides_its_state_draws_others() -> None:
    """The control of the test above."""

    def play(**settings: Any) -> fl.Run:
        sampler = HiddenLoss()
        given = settings.pop("callbacks", [])
        return run(sampler=sampler, callbacks=[sampler, *given], **SYNCHRONOUS, **settings)

    whole = play()
    with pytest.raises(LookupError, match="stop here"):
        play(name="broken", callbacks=[Failing()])
    resumed = play(resume="broken")
    assert cohorts(resumed)[:3] == cohorts(whole)[:3]
    assert cohorts(resumed) != cohorts(whole)


@pytest.mark.slow
def test_two_workers_draw_the_same_cohorts() -> None:
    two = {"sampler": HighestLoss(), **SYNCHRONOUS, "engine": {"num_workers": 2}}
    alone = run(sampler=HighestLoss(), **SYNCHRONOUS)
    assert [sorted(each) for each in cohorts(run(**two))] == [
        sorted(each) for each in cohorts(alone)
    ]
    assert cohorts(interrupt_and_resume(**two)) == cohorts(run(**two))


def test_a_round_is_observed_once_however_often_it_is_retried() -> None:
    """Otherwise a process that resumes in a later attempt would know less than the first one."""
    seen = list[tuple[int, int]]()

    @dataclass(frozen=True)
    class Counting(HighestLoss):
        def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
            seen.append((observed.round_num, len(observed.participations)))
            return super().observe(state, observed)

    finished = run(
        sampler=Counting(),
        cohort={"num_wanted": 4},
        stragglers={"min_reports": 3, "max_retries": 9},
        devices={"kind": "lognormal", "dropout_rate": 0.3},
    )
    attempts = [record.attempt for record in finished.history]
    assert max(attempts) > 0
    assert seen == [(number, 4) for number in range(NUM_ROUNDS)]


def test_a_sampler_of_a_file_runs_over_sessions(tmp_path: Path) -> None:
    """From TOML, next to its file, with arguments."""
    (tmp_path / "first.py").write_text(
        "import fedlearn as fl\n"
        "class First(fl.InformedSampler):\n"
        "    def __init__(self, least):\n"
        "        self.least = least\n"
        "    def sample(self, available, *, cohort_size, **_):\n"
        "        return tuple(each for each in available if each >= self.least)[:cohort_size]\n"
    )
    finished = run(
        cohort={"num_wanted": 3, "sampling": "first.py:First", "args": {"least": 4}},
        engine={"transport": "memory"},
        num_rounds=1,
    )
    assert sorted(cohorts(finished)[0]) == [4, 5, 6]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("class S:\n    pass", "cohort.sampling: .*made a S without sample"),
        (
            "class S:\n    def sample(self): ...\n    def observe(self): ...",
            "a method observe, which is never called; let its class inherit",
        ),
    ],
)
def test_what_is_no_sampler_is_refused(tmp_path: Path, code: str, complaint: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=complaint):
        run(cohort={"num_wanted": 3, "sampling": "own.py:S"})


def test_a_sampler_given_in_python_whose_observations_nobody_makes_is_refused() -> None:
    """As one in a file."""

    @dataclass(frozen=True)
    class Deaf(Drawn):
        def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
            return state

    with pytest.raises(ConfigError, match="Deaf has a method observe, which is never called"):
        run(sampler=Deaf(), **SYNCHRONOUS)
    assert run(sampler=Drawn(), **SYNCHRONOUS, num_rounds=1).history


@dataclass(frozen=True)
class Drawn:
    """A plain sampler."""

    def sample(self, available: Any, *, cohort_size: int, **_: Any) -> tuple[ClientId, ...]:
        return tuple(available[:cohort_size])


@pytest.mark.parametrize(
    ("sampler", "settings", "complaint"),
    [
        (fl.CyclicSampler(), BUFFERED, "CyclicSampler, but asynchronous.mode is on"),
        (fl.PoissonSampler(cap=2.0), BUFFERED, "PoissonSampler, but asynchronous.mode is on"),
        (fl.CyclicSampler(), SEMI_SYNCHRONOUS, "CyclicSampler, but late_updates.mode is on"),
    ],
)
def test_a_sampler_of_whole_groups_is_refused_where_clients_are_drawn_one_by_one(
    sampler: Any, settings: dict[str, Any], complaint: str
) -> None:
    """The control: uniform cohorts."""
    with pytest.raises(ConfigError, match=complaint):
        run(sampler=sampler, **settings)
    assert run(sampler=fl.UniformSampler(), num_rounds=1, **settings).history


SECURE: dict[str, Any] = {
    "cohort": {"num_wanted": 8},
    "secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"},
    "num_rounds": 1,
}


@dataclass(frozen=True)
class Exact(HighestLoss):
    """A sampler that declares to draw as many as it is asked for."""

    draws_exactly = True


@dataclass(frozen=True)
class Nosy(Exact):
    """A sampler that declares to need losses."""

    needs_losses = True


@dataclass(frozen=True)
class Lying(Exact):
    """A sampler that draws fewer than it declares."""

    def sample(self, available: Any, **_: Any) -> tuple[ClientId, ...]:
        return tuple(available[:1])


def test_a_secure_sum_refuses_a_sampler_that_needs_what_it_hides() -> None:
    """The control needs nothing of single clients, and draws as many as it is asked for."""
    for sampler, complaint in [
        (HighestLoss(), "HighestLoss, whose cohorts have no least size"),
        (Nosy(), "Nosy, which needs the training loss of each client"),
        (Lying(), r"it returned 1 clients, but declares draws_exactly, and \d+ were asked for"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            run(sampler=sampler, **SECURE)
    assert len(cohorts(run(sampler=Exact(), **SECURE))[0]) >= 8


@pytest.mark.parametrize("sampling", list(BUILT_IN))
def test_a_secure_sum_takes_each_sampling_that_needs_no_losses(sampling: str) -> None:
    """The others are refused, as are all of them under privacy."""
    cohort = {"num_wanted": 8, "sampling": sampling, **BUILT_IN[sampling]}
    if sampling in ("power_of_choice", "oort"):
        with pytest.raises(ConfigError, match="which needs the training loss of each client"):
            run(**SECURE | {"cohort": cohort})
    else:
        assert len(cohorts(run(**SECURE | {"cohort": cohort}))[0]) == 8
    privacy = {"mode": "central", "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
    with pytest.raises(ConfigError, match="what its cohorts cost in privacy is not known"):
        run(privacy=privacy, cohort=cohort, stragglers={"over_selection": 1.0})


def test_a_state_that_is_no_tensor_is_refused_with_its_name() -> None:
    class Slip(HighestLoss):
        def observe(self, state: SamplerState, observed: ObservedRound) -> Any:
            return {"loss": 0.5}

    with pytest.raises(ConfigError, match=r"Slip\.observe returned the state 'loss' as float"):
        run(sampler=Slip(), **SYNCHRONOUS)


def test_privacy_refuses_a_sampler_without_a_scheme(tmp_path: Path) -> None:
    """In every mode, and also where it accounts for all users in each round."""
    (tmp_path / "own.py").write_text(
        "class First:\n"
        "    def sample(self, available, *, cohort_size, **_):\n"
        "        return tuple(available[:cohort_size])\n"
    )
    sampled = {"cohort": {"num_wanted": 4, "sampling": "own.py:First"}}
    buffered = {
        "cohort": {"sampling": "own.py:First"},
        "asynchronous": {"mode": "buffered", "buffer_size": 3, "concurrency": 5},
    }
    cases: list[tuple[str, dict[str, Any]]]
    cases = [("central", sampled), ("example", sampled), ("example", buffered)]
    for mode, settings in cases:
        privacy = {"mode": mode, "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
        with pytest.raises(ConfigError, match="cohorts of First cost is not known"):
            run(privacy=privacy, stragglers={"over_selection": 1.0}, **settings)


def test_example_privacy_refuses_cohorts_in_a_public_order() -> None:
    """It used to fail with an AssertionError. The control: cohorts that are drawn at random."""
    privacy = {"mode": "example", "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
    with pytest.raises(ConfigError, match='is "cyclic", an order that is public'):
        run(privacy=privacy, cohort={"num_wanted": 4, "sampling": "cyclic"})
    uniform = {"num_wanted": 4, "sampling": "uniform"}
    assert run(privacy=privacy, cohort=uniform, num_rounds=1).history
