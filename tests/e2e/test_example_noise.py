"""Noise in each step of the clients' training, which hides single examples; what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.assembly import build_deployment
from fedlearn.cli.app import main
from fedlearn.config import load
from fedlearn.errors import ConfigError, EngineError
from fedlearn.experiment.spending import ledger_of, section_of
from fedlearn.privacy.events import ExampleCohorts
from tests.e2e.noise import COHORT, POPULATION, has_scale, moved, simulated

RATE, CLIP, MULTIPLIER = 0.1, 0.6, 1.5
PLAIN = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=8, learning_rate=RATE), weight_by_examples=False)
PRIVACY = {
    "mode": "example",
    "clip_norm": CLIP,
    "noise_multiplier": MULTIPLIER,
    "target_delta": 1e-3,
}
#: Twenty examples make batches of 8, 8 and 4; the model is the mean of eight clients.
SIGMA = RATE * MULTIPLIER * CLIP * math.sqrt((2 / 8**2 + 1 / 4**2) / COHORT)

pytestmark = pytest.mark.usefixtures("surroundings")


def make_model() -> nn.Module:
    """Build a network of over 40,000 parameters, so that noise dominates what it learns."""
    return nn.Sequential(nn.Linear(400, 100), nn.GroupNorm(4, 100), nn.Linear(100, 2))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(400, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))


def run(algorithm: fl.Strategy = PLAIN, **settings: Any) -> fl.Run:  # Any: keys and objects
    """Run a round with 8 of 24 clients."""
    privacy = {**PRIVACY, **settings.pop("privacy", {})}
    return simulated(settings.pop("model", make_model), algorithm, privacy=privacy, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_workers": 1, "executor": "vmap"}, id="engine"),
        pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, id="sessions"),
    ],
)
def test_the_noise_that_arrives_is_what_was_promised(engine: dict[str, object]) -> None:
    """It is that of all steps of all reports; scales of 2/3 and 3/2 are told apart.

    Clients send no loss and no number of examples.
    """
    done = run(engine=engine)
    noise = moved(done, make_model)
    assert has_scale(noise, SIGMA)
    assert not has_scale(noise * 2.0 / 3.0, SIGMA)
    assert not has_scale(noise * 1.5, SIGMA)
    if "transport" in engine:
        (record,) = done.history
        assert math.isnan(record.train_loss)
        assert [each.num_examples for each in record.participations] == [1] * COHORT
    with done.stored.database as database:
        stored = database.run(done.name)
        spent = ledger_of(stored, section_of(stored.record)).load_spent()
    (event,) = spent
    assert event.cohorts == ExampleCohorts(POPULATION, COHORT)
    assert event.noise_multiplier == MULTIPLIER


@pytest.mark.slow
def test_with_next_to_no_noise_sessions_and_blocks_agree() -> None:
    """With momentum, two epochs and a proximal term. Control: without clipping they differ."""
    local = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=RATE, momentum=0.9)
    algorithm = fl.FedProx(local, proximal=0.1, weight_by_examples=False)
    everybody = {"num_wanted": POPULATION}  # smaller cohorts are drawn secretly and would differ
    found = [
        moved(run(algorithm, cohort=everybody, **settings), make_model)
        for settings in (
            {"engine": {"executor": "vmap"}, "privacy": {"noise_multiplier": 1e-9}},
            {"engine": {"transport": "memory"}, "privacy": {"noise_multiplier": 1e-9}},
            {"privacy": {"noise_multiplier": 1e-9, "clip_norm": 1e3}},
        )
    ]
    assert float((found[0] - found[1]).abs().max()) < 1e-5
    assert float((found[0] - found[2]).abs().max()) > 1e-2


def test_the_fused_executor_is_not_taken_and_says_why() -> None:
    """It could train this plain chain of layers otherwise; "auto" uses another executor."""
    with pytest.raises(EngineError, match="each example's gradient is clipped"):
        run(model=lambda: nn.Linear(400, 2), engine={"executor": "fused"})


@pytest.mark.slow
def test_check_and_budget_say_that_examples_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    """They say that clients are not hidden; calibrated noise is that of a step."""
    Path("experiment.toml").write_text(
        '[privacy]\nmode = "example"\nclip_norm = 0.5\ntarget_delta = 1e-3\nepsilon = 4.0\n'
    )
    told = {}
    for epochs in ("1", "4"):
        for command in ("check", "budget")[int(epochs) // 4 :]:
            assert main([command, "experiment.toml", "--set", f"client.epochs={epochs}"]) == 0
            told[command, epochs] = capsys.readouterr().out
    for text in told.values():
        assert "example: each client adds noise to each step" in text
        assert "times the clip, in each step of a client's training" in text
    assert "zero_out: one example of one user counts or not" in told["budget", "1"]
    assert "clip  0.5, the gradient of each example" in told["budget", "1"]
    one, four = (multiplier(told["budget", epochs]) for epochs in ("1", "4"))
    assert four == pytest.approx(2.0 * one, rel=1e-3)


def multiplier(text: str) -> float:
    """Return the noise multiplier in the output of ``budget``."""
    (words,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["noise"])
    return float(words[1])


def test_a_deployment_counts_each_client_as_asked_unless_coins_decide() -> None:
    """If few clients are connected, each is asked more often than by chance among all users."""
    given = [
        "cohort.num_wanted=3",
        "stragglers.over_selection=1.0",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.target_delta=1e-3",
        "privacy.mode=example",
        "privacy.num_users=10",
        "client.epochs=4",
    ]
    for sampling, expected in (("uniform", 10), ("poisson", 3)):
        overrides = [*given, f"cohort.sampling={sampling}"]
        built = build_deployment(load(None, overrides=overrides), data_dir=Path())
        assert built.privacy is not None
        assert built.privacy.event.cohorts == ExampleCohorts(10, expected)
        assert built.privacy.event.noise_multiplier == 0.5
        assert isinstance(built.algorithm.local, NoisedGradients)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": with_batch_norm}, r"layer 1 \(BatchNorm1d\) computes with all .* GroupNorm"),
        ({"algorithm": fl.FedAvg(PLAIN.local)}, "which have no noise and are not sent"),
        (
            {"objective": fl.CustomLoss(lambda outputs, _: outputs.mean(), per_example=False)},
            "couples",
        ),
        ({"privacy": {"reproducible": True}}, "whose clients draw secret noise"),
        ({"privacy": {"clip_quantile": 0.5}}, "clients agree to one clip norm"),
        ({"secure_aggregation": {"mode": "complete"}}, "under secure aggregation"),
        ({"privacy": {"target_delta": 0.1}}, "which would allow to publish all"),
    ],
)
def test_what_would_make_the_guarantee_false_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    """Before anything is trained or charged."""
    with pytest.raises(ConfigError, match=reason):
        run(**settings)
    assert not list(Path().iterdir())


class OwnTrainer:
    """A user's trainer that does not clip by example."""

    honors = ("epochs", "batch_size", "learning_rate", "shuffle")

    def __init__(self, features: object, labels: object) -> None:
        pass

    def train(self, *_: object, **__: object) -> None:
        raise AssertionError("it is refused before it trains")

    evaluate = train


def test_trainers_that_do_not_clip_by_example_are_refused() -> None:
    """The error names the setting that they would ignore."""
    with pytest.raises(fl.FedlearnError, match="does not honor the setting 'example_clip_norm'"):
        run(trainer=OwnTrainer)
