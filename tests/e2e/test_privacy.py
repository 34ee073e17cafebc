"""Differential privacy from Python: the noise in the model, the ledger, and what is refused."""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.cli.app import main
from fedlearn.cli.overview import run_page
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.deployment.descriptions import describe_run
from fedlearn.errors import BudgetExhausted, ConfigError, RoundError
from fedlearn.experiment.spending import ledger_of, section_of
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord, RunStatus
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.e2e.noise import has_scale, moved
from tests.processes import Launcher, json_lines

POPULATION = 60
#: Trains with a step size near zero, so that the model moves only by the noise.
STILL = fl.FedAvg(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=1e-30), weight_by_examples=False
)
LEARNS = fl.FedAvg(fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.5), weight_by_examples=False)
PRIVACY = {"mode": "central", "clip_norm": 0.6, "noise_multiplier": 1.5, "target_delta": 1e-3}


class Trimmed(fl.WeightedMean):
    """A user's own mean, which the bounded noisy sum must not silently replace."""


@dataclass(frozen=True)
class Later(StrategyWrapper):
    """A strategy that switches to the user's own mean once it has a state."""

    own = frozenset({"begun"})

    def init(self, params: Params) -> Mapping[str, Tensor]:
        return {**self.inner.init(params), "begun": torch.tensor(1)}

    def at(self, state: Mapping[str, Tensor]) -> fl.Strategy:
        return replace(self, inner=replace(STILL, aggregation=Trimmed(by_examples=False)))


class Told:
    """A progress display that keeps its arguments, and may interrupt the run after some rounds."""

    def __init__(self, break_after: int = -1) -> None:
        self.notes: Sequence[str] = ()
        self.num_rounds, self._break_after = 0, break_after
        self.summary: Summary | None = None

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        self.notes = notes

    def round(self, record: RoundRecord) -> None:
        self.num_rounds += 1
        if self.num_rounds == self._break_after:
            raise KeyboardInterrupt

    def end(self, summary: Summary) -> None:
        self.summary = summary


pytestmark = pytest.mark.usefixtures("surroundings")


def data(seed: int = 0) -> fl.FederatedData:
    """Make two classes that a linear model separates, with 20 examples per client."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 20 * POPULATION + 200)
    features = rng.normal(size=(len(labels), 400)) + 0.5 * labels[:, None]
    partition = fl.Iid(num_clients=POPULATION)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=1 / 7, seed=0)


def make_model() -> nn.Module:
    """Build a network of slightly more than 20,000 parameters."""
    return nn.Sequential(nn.Linear(400, 50), nn.Tanh(), nn.Linear(50, 2))


def run(
    algorithm: fl.Strategy = STILL,
    *,
    privacy: Mapping[str, object] = {},
    told: Told | None = None,
    **settings: Any,  # Any: keys and objects
) -> fl.Run:
    """Run two rounds with a quarter of the clients on average."""
    everything: dict[str, Any] = {
        "num_rounds": 2,
        "cohort": {"num_wanted": 15, "sampling": "poisson"},
        "engine": {"num_workers": 1},
        "privacy": {**PRIVACY, **privacy},
        **settings,
    }
    examples = everything.pop("data", None) or data()
    return fl.simulate(make_model, examples, algorithm, progress=told or Told(), **everything)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_workers": 1}, id="engine"),
        pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, id="memory", marks=pytest.mark.slow),
    ],
)
def test_the_noise_that_arrives_is_what_was_promised(engine: dict[str, object]) -> None:
    """It is z C / m in each of two rounds, for any number of processes.

    Controls: scales of 2/3 and 3/2 are told apart.
    """
    noise, sigma = moved(run(engine=engine), make_model), math.sqrt(2.0) * 1.5 * 0.6 / 15
    assert has_scale(noise, sigma)
    assert not has_scale(noise * 2.0 / 3.0, sigma)
    assert not has_scale(noise * 1.5, sigma)


@pytest.mark.slow
def test_a_run_of_a_moment_tells_its_epsilon_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Computing it after each round would take too long, so it is shown at the end and later."""
    told = Told()
    short = run(told=told, name="short")
    assert told.summary is not None
    spent = short.privacy
    assert spent is not None
    assert spent == told.summary.privacy
    assert spent.num_charged == 2
    assert 0.0 < spent.epsilon < spent.epsilon_with_cohorts
    assert main(["show", "short"]) == 0
    assert f"ε {spent.epsilon:.3g} for the released models" in capsys.readouterr().out
    assert main(["show", "short", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy"]["epsilon"] == spent.epsilon


@pytest.mark.slow
def test_the_public_seed_tells_nothing_of_cohorts_and_noise() -> None:
    """Two runs with the same seed differ in both; reproducible runs differ in neither."""
    secret = [run(num_rounds=3), run(num_rounds=3)]
    assert not torch.equal(moved(secret[0], make_model), moved(secret[1], make_model))
    asked = [[list(each.participations.client_ids) for each in one.history] for one in secret]
    assert asked[0] != asked[1]
    told = [Told(), Told()]
    public = [run(privacy={"reproducible": True}, told=each) for each in told]
    assert torch.equal(moved(public[0], make_model), moved(public[1], make_model))
    assert any("nothing is private, and no ε is claimed" in note for note in told[0].notes)
    assert told[0].summary is not None
    assert told[0].summary.privacy is None


@pytest.mark.slow
def test_a_model_learns_behind_the_noise() -> None:
    """The run reports ε of the released models, and ε for an observer of the cohorts."""
    told = Told()
    found = run(LEARNS, privacy={"noise_multiplier": 0.5}, num_rounds=12, told=told)
    assert found.history[-1].metrics["accuracy"] > 0.8  # secret noise: 0.92 to 0.98
    assert told.summary is not None
    spent = told.summary.privacy
    assert spent is not None
    assert 0.0 < spent.epsilon < spent.epsilon_with_cohorts
    assert (spent.num_charged, spent.num_own, spent.target_delta) == (12, 12, 1e-3)
    page = found.report().read_text()
    assert f"{spent.epsilon:.3g}" in page
    assert f"{spent.epsilon_with_cohorts:.3g} for who saw the cohorts" in page
    assert spent.format() in run_page(found, width=None)
    assert describe_run(found)["privacy"]["epsilon"] == spent.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        LEARNS,
        fl.Scaffold(
            fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.5),
            num_clients=POPULATION,
            server_learning_rate=1.0,
            control_bound=0.5,
        ),
    ],
    ids=["fedavg", "scaffold"],
)
@pytest.mark.parametrize("privacy", [{}, {"clip_quantile": 0.5}], ids=["", "adaptive"])
def test_sessions_workers_and_the_engine_agree_bit_for_bit(
    algorithm: fl.Strategy, privacy: dict[str, object]
) -> None:
    """The sums are of integers, so order and number of processes do not matter."""
    sequential = {"executor": "sequential"}
    engines = [
        {"num_workers": 1, **sequential},
        {"num_workers": 2, **sequential},
        {"transport": "memory"},
    ]
    first, *others = (
        run(algorithm, engine=engine, privacy=privacy | {"reproducible": True}, num_rounds=3)
        for engine in engines
    )
    for other in others:
        for name, tensor in first.weights(best=False).items():
            assert torch.equal(tensor, other.weights(best=False)[name])


@pytest.mark.slow
def test_a_clip_norm_that_follows_the_updates_is_told_and_resumed() -> None:
    """It starts too high and falls by nearly a tenth per round, and resumes to the same bits."""
    adaptive = {"clip_norm": 50.0, "clip_quantile": 0.5, "reproducible": True}
    told = Told()
    whole = run(LEARNS, privacy=adaptive, num_rounds=6, told=told)
    found = [each.metrics["clip_norm"] for each in whole.history]
    assert found[0] == 50.0
    assert all(0.85 < after / before < 0.97 for before, after in itertools.pairwise(found))
    assert any("50 at first, then the quantile 0.5" in note for note in told.notes)
    with pytest.raises(KeyboardInterrupt):
        run(
            LEARNS,
            privacy=adaptive,
            num_rounds=6,
            told=Told(break_after=4),
            name="broken",
            store={"checkpoint_every_s": 0.0},
        )
    resumed = run(LEARNS, privacy=adaptive, num_rounds=6, resume="broken")
    assert [each.metrics["clip_norm"] for each in resumed.history] == found
    for name, tensor in whole.weights(best=False).items():
        assert torch.equal(tensor, resumed.weights(best=False)[name])


@pytest.mark.slow
def test_rounds_without_anybody_are_released_like_any_other() -> None:
    """With one client per round on average, some rounds have none; they still get noise."""
    found = run(cohort={"num_wanted": 1, "sampling": "poisson"}, num_rounds=60)
    counts = [each.count(Status.REPORTED) for each in found.history]
    assert 0 in counts
    assert has_scale(moved(found, make_model), math.sqrt(60.0) * 1.5 * 0.6)


# ---- The budget ---------------------------------------------------------------------------


#: All clients are asked, so that ε is a formula; with sampling it takes a second to compute.
ALL = {"num_wanted": POPULATION, "sampling": "poisson"}
BUDGET: dict[str, object] = {"noise_multiplier": 1.0, "epsilon": 10.0}


def history(name: str) -> list[RoundRecord]:
    """Return the rounds of a run."""
    return load_stored(name).rounds()


def load_stored(name: str) -> StoredRun:
    """Load a run from the store in the working directory."""
    runs_dir = Path("runs")
    return Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir).run(name)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_stops_before_its_budget_and_keeps_what_it_paid_for(num_workers: int) -> None:
    """All charged rounds are committed; another run on the same clients has no budget left."""
    told = Told()
    settings: dict[str, Any] = {
        "evaluation": {"every_rounds": 0},
        "engine": {"num_workers": num_workers},
    }
    with pytest.raises(BudgetExhausted, match=r"above privacy.epsilon \(10\)"):
        run(privacy=BUDGET, cohort=ALL, num_rounds=16, name="a", told=told, **settings)
    rounds = len(history("a"))
    # No round but the last is evaluated, which nobody knew to be the last one.
    assert ["accuracy" in each.metrics for each in history("a")] == [*[False] * (rounds - 1), True]
    assert 1 < rounds < 16
    assert load_stored("a").record.status is RunStatus.FAILED
    assert any(f"enough for {rounds} of the 16 rounds" in note for note in told.notes)
    assert told.summary is not None
    assert told.summary.privacy is not None
    assert told.summary.privacy.num_charged == rounds
    assert told.summary.privacy.epsilon <= 10.0
    again = Told()
    with pytest.raises(BudgetExhausted):
        run(privacy=BUDGET, cohort=ALL, name="b", told=again)
    assert history("b") == []
    # Other data: by their examples, by the population's name, or because the user says so.
    run(privacy=BUDGET, cohort=ALL, data=data(seed=1))
    run(privacy=BUDGET | {"population": "ward 5"}, cohort=ALL)
    others = {"other_data_because": "the second wave of the study"}
    run(privacy=BUDGET | others, cohort=ALL)


@pytest.mark.slow
def test_rounds_that_were_lost_count_as_spent() -> None:
    """An interrupted run resumes from its last commit, and repeated rounds are charged again."""
    told = Told(break_after=4)
    with pytest.raises(KeyboardInterrupt):
        run(told=told, privacy={"population": "all"}, num_rounds=6, name="broken")
    finished = len(history("broken"))
    assert finished < 4  # the last rounds were not committed
    told = Told()
    run(told=told, resume="broken", privacy={"population": "all"}, num_rounds=6)
    assert told.summary is not None
    assert told.summary.privacy is not None
    assert told.summary.privacy.num_own == 4 + 6 - finished


OWN = """
num_rounds = 3
[data.partition]
num_clients = 40
[cohort]
num_wanted = 10
[evaluation]
clients = 0
[privacy]
mode = "central"
clip_norm = 0.5
target_delta = 1e-3
"""


def budget(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the JSON output of ``fedlearn budget own.toml``."""
    assert main(["budget", "own.toml", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_what_a_run_will_cost_is_answered_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """The noise for a budget, and ε for a noise; as a table and a plot; including earlier runs."""
    Path("own.toml").write_text(OWN)
    by_epsilon = budget(capsys, "--set", "privacy.epsilon=3.0")
    *_, last = by_epsilon["rounds"]
    assert last["round"] == 3
    assert 2.9 < last["epsilon"] <= 3.0 < last["epsilon_with_cohorts"]
    noise = f"privacy.noise_multiplier={by_epsilon['noise_multiplier']}"
    by_noise = budget(capsys, "--set", noise)
    assert by_noise == by_epsilon | {"epsilon": None}
    assert main(["budget", "own.toml", "--set", noise, "--output", "budget.png"]) == 0
    text = capsys.readouterr().out
    assert "each of 40 users at rate 0.25, at most 20 a round" in text
    assert f"{last['epsilon']:.4g}" in text
    assert Path("budget.png").read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", "own.toml", "--set", noise]) == 0
    capsys.readouterr()
    after = budget(capsys, "--set", noise)
    assert after["rounds_before"] == 3
    assert after["rounds"][0]["epsilon"] > last["epsilon"]
    assert main(["simulate", "own.toml", "--set", noise, "--set", "privacy.epsilon=3.0"]) == 4
    assert "the privacy budget is spent" in capsys.readouterr().err


@pytest.mark.slow
def test_a_deployment_without_data_has_a_budget_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Computing a budget needs no data. Without privacy there is none."""
    Path("net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(3, 2)\n")
    Path("own.toml").write_text(
        OWN.replace("[data.partition]\nnum_clients = 40\n[cohort]", "[cohort]").replace(
            "[evaluation]\nclients = 0\n", ""
        )
        + 'noise_multiplier = 1.0\nnum_users = 400\n[data]\nsource = "none"\n'
        + '[model]\nkind = "python"\nfactory = "net.py:net"\n'
    )
    assert budget(capsys)["users"] == 400
    Path("own.toml").write_text("")
    assert main(["budget", "own.toml"]) == 2
    assert "there is no budget" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_has_charged_what_it_opened(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Killed by -9 several times and resumed: each round that was shown or opened is charged."""
    Path("own.toml").write_text(
        'num_rounds = 4000\nname = "killed"\n[cohort]\nnum_wanted = 5\n'
        "[evaluation]\nevery_rounds = 0\nclients = 0\n[store]\ncheckpoint_every_s = 0.3\n"
        '[privacy]\nmode = "central"\nclip_norm = 0.5\nnoise_multiplier = 1.0\n'
        "target_delta = 1e-3\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "RANK"}
    num_told = 0
    for attempt in range(3):
        command = ["resume", "killed"] if attempt else ["simulate", "own.toml"]
        stem = tmp_path / f"attempt-{attempt}"
        with closing(launcher.launch(stem, *command, "--json", environ=environ)) as process:
            process.wait_for_lines(24 + 41 * attempt)
            process.kill()
            assert process.wait() is None
            num_told += sum(each["event"] == "round" for each in json_lines(process.out()))
        charged = sum(
            ledger_of(load_stored("killed"), section_of(load_stored("killed").record))
            .load_spent()
            .values()
        )
        assert charged >= num_told
    assert charged < num_told + 2000


@pytest.mark.slow
def test_samplings_without_a_common_guarantee_are_not_mixed() -> None:
    """Not on one population. A statement that the data differ is accepted."""
    run(privacy={"population": "all"}, num_rounds=1)
    uniform = {"num_wanted": 15, "sampling": "uniform"}
    with pytest.raises(ConfigError, match=r"cohort\.sampling.*add_or_remove and replace"):
        run(privacy={"population": "all"}, cohort=uniform)
    other = run(privacy={"population": "all", "other_data_because": "a test"}, cohort=uniform)
    assert [each.count(Status.REPORTED) for each in other.history] == [15, 15]


def test_a_rule_of_a_later_round_is_not_replaced_by_the_noisy_mean() -> None:
    """An aggregation that is refused in the first round is also refused in a later one."""
    with pytest.raises(RoundError, match="Trimmed is not WeightedMean itself"):
        run(Later(STILL))


# ---- What would make ε false --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": fl.FedAvg(STILL.local)}, "weighted by their numbers of examples"),
        ({"algorithm": fl.FedMedian(STILL.local)}, "CoordinateMedian is not WeightedMean itself"),
        (
            {"algorithm": replace(STILL, aggregation=Trimmed(by_examples=False))},
            "Trimmed is not WeightedMean itself",
        ),
        (
            {
                "algorithm": fl.Scaffold(
                    STILL.local, num_clients=POPULATION, server_learning_rate=1.0
                )
            },
            "lane 'control' has no bound.* set algorithm.control_bound",
        ),
        ({"stragglers": {"over_selection": 1.3}}, "must not displace another"),
        (
            {"sampler": fl.UniformSampler(), "cohort": {"num_wanted": 15}},
            "ε depends on how clients are drawn",
        ),
        ({"early_stopping": {"metric": "clients/loss_mean"}}, "measured by the clients"),
        ({"centralized": True}, "pools the examples"),
        (
            {
                "secure_aggregation": {"mode": "complete", "dropout": 0.0},
                "cohort": {"sampling": "uniform", "num_wanted": 15},
            },
            "clients add the noise; set it to",
        ),
        ({"privacy": {"target_delta": 0.02}}, "give a number well below 0.017"),
        ({"privacy": {"clip_norm": None}}, "privacy.clip_norm: is missing"),
        ({"privacy": {"noise_multiplier": None}}, "privacy.epsilon: is missing"),
        ({"privacy": {"mode": "off"}}, "without effect"),
        ({"privacy": {"clip_learning_rate": 0.5}}, "it is always 0.2 now"),
        ({"privacy": {"clip_quantile": 1.0}}, r"clip_quantile.*< 1"),
        ({"privacy": {"noise_multiplier": 1e9}}, "exceeds exact integers"),
    ],
)
def test_what_would_make_the_guarantee_false_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    """With the reason, before a run is created."""
    with pytest.raises(ConfigError, match=message):
        run(**settings)
    assert not Path("runs").exists()
