"""Noise that clients add, under secure aggregation or each on its own; and what is refused."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.cohorts import FixedCohorts
from fedlearn.assembly import build_deployment
from fedlearn.cli.app import main
from fedlearn.config import load
from fedlearn.errors import ConfigError, RoundError
from fedlearn.experiment.spending import ledger_of, section_of
from tests.e2e.noise import COHORT, POPULATION, has_scale, moved, simulated

#: Trains with a step size near zero, so that the model moves only by the noise.
STILL = fl.FedAvg(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=1e-30), weight_by_examples=False
)
SCAFFOLD = fl.Scaffold(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=1e-30),
    num_clients=POPULATION,
    server_learning_rate=1.0,
    control_bound=1.0,
)
PRIVACY = {"mode": "distributed", "clip_norm": 0.6, "noise_multiplier": 1.5, "target_delta": 1e-3}
#: 8 - ⌊.3 8⌋ - ⌈.1 8⌉ = 5 of the 8 clients must have enough noise, so 8 have 8/5 times that.
SIGMA = 1.5 * 0.6 / COHORT * math.sqrt(8 / 5)


pytestmark = pytest.mark.usefixtures("surroundings")


def make_model() -> nn.Module:
    """Build a network of slightly more than 20,000 parameters, whose statistics are frozen."""
    return nn.Sequential(nn.Linear(400, 50), nn.BatchNorm1d(50, momentum=0.0), nn.Linear(50, 2))


def run(algorithm: fl.Strategy = STILL, **settings: Any) -> fl.Run:  # Any: keys and objects
    """Run a round among 8 of 24 clients."""
    privacy = {**PRIVACY, **settings.pop("privacy", {})}
    return simulated(make_model, algorithm, privacy=privacy, **settings)


everywhere = pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_workers": 1}, id="engine"),
        pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, id="sessions"),
    ],
)


@pytest.mark.slow
@everywhere
def test_the_noise_that_arrives_is_what_was_promised(engine: dict[str, object]) -> None:
    """It is that of all clients that reported. Controls: scales of 2/3 and 3/2 are told apart."""
    done = run(engine=engine)
    noise = moved(done, make_model)
    assert has_scale(noise, SIGMA)
    assert not has_scale(noise * 2.0 / 3.0, SIGMA)
    assert not has_scale(noise * 1.5, SIGMA)
    assert math.isnan(done.history[0].train_loss)  # clients do not send it
    with done.stored.database as database:
        stored = database.run(done.name)
        spent = ledger_of(stored, section_of(stored.record)).load_spent()
    (event,) = spent
    assert event.cohorts == FixedCohorts(POPULATION, COHORT)
    assert event.noise_multiplier == PRIVACY["noise_multiplier"]


@pytest.mark.slow
def test_two_lanes_have_noise_for_both() -> None:
    """SCAFFOLD over the protocol: √2 times the noise on each of two lanes with their own bounds."""
    noise = moved(run(SCAFFOLD, engine={"transport": "memory"}), make_model)
    assert has_scale(noise, math.sqrt(2.0) * SIGMA)


@pytest.mark.slow
def test_a_round_of_fewer_than_the_noise_is_sized_for_is_not_released() -> None:
    """Six of 8 must report; if devices fail often enough, fewer do."""
    with pytest.raises(RoundError, match="reports"):
        run(
            devices={"kind": "lognormal", "dropout_rate": 0.7},
            stragglers={"max_retries": 1},
        )


@pytest.mark.slow
def test_who_adds_how_much_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` and ``budget`` say who adds how much noise, also for noise that clients add."""
    table = "[privacy]\nclip_norm = 0.5\ntarget_delta = 1e-3\nnoise_multiplier = 2.0\nmode = "
    told = {}
    for mode in ("central", "distributed", "local"):
        Path("experiment.toml").write_text(f'{table}"{mode}"\n')
        for command in ("check", "budget"):
            assert main([command, "experiment.toml"]) == 0
            told[mode, command] = capsys.readouterr().out
            assert f"{mode}: " in told[mode, command]
    assert "2 times the clip, in each update" in told["local", "check"]
    assert "2 times the clip, in the sum of a round" in told["central", "check"]
    assert "noise        of each client: 0.7071 times its norm" in told["distributed", "check"]
    assert "secure_aggregation" not in told["central", "budget"]


LOCALLY: dict[str, Any] = {"privacy": {"mode": "local"}}  # Any: keys and tables


@pytest.mark.slow
@everywhere
def test_each_update_has_noise_enough_by_itself(engine: dict[str, object]) -> None:
    """The mean of 8 has 1/sqrt(8) of one client's noise; every user counts as asked."""
    done = run(engine=engine, **LOCALLY)
    noise, sigma = moved(done, make_model), 1.5 * 0.6 / math.sqrt(COHORT)
    assert has_scale(noise, sigma)
    assert not has_scale(noise * 2.0 / 3.0, sigma)
    assert not has_scale(noise * 1.5, sigma)
    if "transport" in engine:  # clients send neither
        (record,) = done.history
        assert math.isnan(record.train_loss)
        assert [each.num_examples for each in record.participations] == [1] * COHORT
    with done.stored.database as database:
        stored = database.run(done.name)
        spent = ledger_of(stored, section_of(stored.record)).load_spent()
    (event,) = spent
    assert event.cohorts == FixedCohorts(POPULATION, POPULATION)


class BySize(fl.WeightedMean):
    """A mean that claims equal weights, but weighs by number of examples; records the numbers."""

    seen: ClassVar[set[float]] = set()

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        self.seen.update(num_examples_B.tolist())
        return num_examples_B


@pytest.mark.slow
@everywhere
def test_an_own_rule_hears_no_numbers_of_examples_that_have_no_noise(
    engine: dict[str, object],
) -> None:
    """Clients of a deployment report 1, and so do simulated ones."""
    BySize.seen.clear()
    by_size = replace(STILL, aggregation=BySize(by_examples=False))
    run(by_size, engine=engine, **LOCALLY)
    run(by_size, engine=engine, late_updates={"mode": "keep"}, **LOCALLY)
    assert BySize.seen == {1.0}


@pytest.mark.slow
def test_whatever_is_made_of_noised_updates_is_allowed() -> None:
    """The control: under central noise a median is refused, since the noise needs a sum."""
    local = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
    run(fl.FedMedian(local), **LOCALLY)
    with pytest.raises(ConfigError, match="is not WeightedMean itself"):
        run(fl.FedMedian(local), privacy={"mode": "central"}, cohort={"num_wanted": COHORT})


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["privacy.num_users=2"], "num_users is 2, but 3 clients are asked in a round"),
        (["privacy.num_users=2", "privacy.mode=local"], "3 clients are asked in a round"),
        (["privacy.reproducible=true"], "the clients of a deployment draw secret noise"),
    ],
)
def test_a_deployment_promises_no_more_than_it_can_keep(
    overrides: Sequence[str], reason: str
) -> None:
    """The control: with more users it is built, and counts all of them in each round."""
    given = [
        "cohort.num_wanted=3",
        "stragglers.over_selection=1.0",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.target_delta=1e-3",
        "privacy.mode=distributed",
        "privacy.num_users=10",
    ]
    with pytest.raises(ConfigError, match=reason):
        build_deployment(load(None, overrides=[*given, *overrides]), data_dir=Path())
    built = build_deployment(load(None, overrides=given), data_dir=Path())
    assert built.privacy is not None
    assert built.privacy.cohorts == FixedCohorts(10, 10)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secure_aggregation": {"mode": "off"}}, "without secure aggregation the coordinator"),
        ({"secure_aggregation": {"clip_norm": 5.0}}, "clipped to privacy.clip_norm; leave it out"),
        ({"privacy": {"clip_quantile": 0.5}}, "clients agree to one clip norm"),
        (
            {"privacy": {"mode": "central"}, "secure_aggregation": {"mode": "complete"}},
            "clients add the noise",
        ),
        (
            {"privacy": {"reproducible": True}, "engine": {"transport": "memory"}},
            "whose clients draw secret noise",
        ),
        ({"secure_aggregation": {"modulus_bits": 16}}, "use a wider modulus"),
        ({**LOCALLY, "secure_aggregation": {"mode": "complete"}}, "clients add the noise"),
        ({**LOCALLY, "algorithm": "weighted"}, "which have no noise and are not sent"),
        ({**LOCALLY, "algorithm": "scaffold"}, "lane 'control' has no noise"),
        (
            {**LOCALLY, "cohort": {"num_wanted": COHORT, "sampling": "poisson"}},
            "sampling does not hide updates",
        ),
        ({"privacy": {"mode": "local", "reproducible": True}}, "whose clients draw secret noise"),
        ({"privacy": {"mode": "local", "clip_quantile": 0.5}}, "clients agree to one clip norm"),
        ({"algorithm": "weighted"}, "weights by examples have no noise"),
        (
            {"cohort": {"num_wanted": COHORT, "sampling": "poisson"}},
            "whose cohorts have no least size",
        ),
    ],
)
def test_what_would_make_the_guarantee_false_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    """Before anything is trained or charged."""
    settings = dict(settings)
    algorithms: dict[str | None, fl.Strategy] = {
        None: STILL,
        "weighted": fl.FedAvg(STILL.local),
        "scaffold": SCAFFOLD,
    }
    algorithm = algorithms[settings.pop("algorithm", None)]
    with pytest.raises(ConfigError, match=reason):
        run(algorithm, **settings)
    assert not list(Path().iterdir())
