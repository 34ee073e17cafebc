"""Attackers forge and poison what their papers say, named in the record, wherever they train."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.lanes import Updates
from fedlearn.config import load
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params
from fedlearn.errors import ConfigError
from fedlearn.simulation.attacked import AttackedAggregation
from fedlearn.simulation.attacks import ATTACK_KINDS, Direction, max_deviations
from fedlearn.simulation.population import ArrayPopulation

SEED = fl.Seed(3)
DELTAS = torch.randn(4, 30, generator=torch.Generator().manual_seed(1)) + 0.5
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(90, 4)).astype("float32")
LABELS = (FEATURES[:, 0] > 0).astype(int)
DATA = fl.from_arrays(FEATURES, LABELS, partition=fl.Iid(num_clients=9), test_fraction=0.1, seed=0)
ENGINE = {"executor": "sequential", "block_size": 1, "num_workers": 1}
BLOCKS = {"executor": "vmap", "block_size": 4, "num_workers": 1}
MEMORY = {"transport": "memory"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def forge(attack: fl.Attack, deltas: Tensor = DELTAS, *, num_updates: int = 11) -> Tensor:
    before = deltas.clone()
    forged = attack.forge(deltas, num_updates=num_updates, seed=SEED)
    assert torch.equal(deltas, before)
    assert forged.shape == deltas.shape
    return forged


# ---- Forged updates -----------------------------------------------------------------------


def test_simple_attacks_send_what_they_say() -> None:
    """The negative, noise, or a multiple."""
    assert torch.equal(forge(fl.SignFlip(scale=2.0)), -2.0 * DELTAS)
    assert torch.equal(forge(fl.ModelReplacement(scale=7.0)), 7.0 * DELTAS)
    assert torch.equal(forge(fl.Backdoor(target_label=1, scale=3.0)), 3.0 * DELTAS)
    noise = forge(fl.GaussianNoise(noise_std=0.1), torch.zeros(4, 10_000))
    assert float(noise.std()) == pytest.approx(0.1, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.003)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize(("num_updates", "num_attackers"), [(50, 24), (20, 4), (10, 2), (10, 6)])
def test_a_little_is_as_much_as_the_paper_allows(num_updates: int, num_attackers: int) -> None:
    """The largest z for which enough honest clients support the attackers; never negative."""
    supporters = max(1, num_updates // 2 + 1 - num_attackers)
    honest = num_updates - num_attackers
    expected = max(0.0, float(norm.ppf((honest - supporters) / honest)))
    assert max_deviations(num_updates, num_attackers) == pytest.approx(expected, abs=1e-9)


def test_a_little_is_enough_moves_the_mean_by_deviations() -> None:
    """All attackers send the same; without a number of deviations, by their number."""
    rows = DELTAS.double().numpy()
    for z, attack in (
        (1.5, fl.LittleIsEnough(num_deviations=1.5)),
        (max_deviations(11, 4), fl.LittleIsEnough()),
    ):
        expected = rows.mean(axis=0) - z * rows.std(axis=0)
        for row in forge(attack):
            np.testing.assert_allclose(row.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
def test_min_max_goes_exactly_as_far_as_the_others_are_apart(direction: str) -> None:
    """Found by bisection in float64, as in the paper."""
    rows = DELTAS.double().numpy()
    mean = rows.mean(axis=0)
    away = {"std": -rows.std(axis=0), "unit": -mean / np.linalg.norm(mean), "sign": -np.sign(mean)}
    limit = max(np.linalg.norm(a - b) for a in rows for b in rows)
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        point = mean + middle * away[direction]
        fits = max(np.linalg.norm(point - row) for row in rows) <= limit
        low, high = (middle, high) if fits else (low, middle)
    for row in forge(fl.MinMax(direction=Direction(direction))):
        np.testing.assert_allclose(row.numpy(), mean + low * away[direction], atol=1e-5)


def test_a_single_attacker_knows_nobody_to_hide_among() -> None:
    """So it sends its own update; identical attackers as well."""
    for attack in (fl.LittleIsEnough(), fl.MinMax()):
        torch.testing.assert_close(forge(attack, DELTAS[:1]), DELTAS[:1])
        same = DELTAS[:1].repeat(3, 1)
        torch.testing.assert_close(forge(attack, same), same)


# ---- Poisoned examples --------------------------------------------------------------------


def test_flipped_labels_turn_the_classes_around() -> None:
    """The features are the same."""
    features, labels = torch.randn(4, 3), torch.tensor([0, 1, 8, 9])
    same, flipped = fl.LabelFlip().poison(features, labels, num_classes=10, seed=SEED)
    assert flipped.tolist() == [9, 8, 1, 0]
    assert torch.equal(same, features)
    assert labels.tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("shape", [(6,), (5, 5), (3, 5, 5)])
def test_a_backdoor_stamps_a_share_of_the_examples(shape: tuple[int, ...]) -> None:
    """With the target label; the others are unchanged."""
    features, labels = torch.zeros(10, *shape), torch.ones(10, dtype=torch.int64)
    attack = fl.Backdoor(target_label=4, trigger_size=2, trigger_value=9.0, poisoned_share=0.3)
    stamped, found = attack.poison(features, labels, num_classes=5, seed=SEED)
    is_stamped = found == 4
    assert int(is_stamped.sum()) == 3
    assert not stamped[~is_stamped].any()
    assert not features.any()
    size = 2 if len(shape) == 1 else 4 * (3 if len(shape) == 3 else 1)
    assert stamped[is_stamped].flatten(1).sum(dim=1).tolist() == [9.0 * size] * 3
    assert (stamped[is_stamped] == attack.stamp(features[:3])).all()


# ---- Runs ---------------------------------------------------------------------------------


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def run(
    attack: Any, num_attackers: int | None = None, **settings: Any
) -> fl.Run:  # Any: as simulate's
    local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)
    usual: dict[str, Any] = {"num_rounds": 2, "engine": ENGINE, "algorithm": fl.FedAvg(local)}
    return fl.simulate(
        make_model,
        DATA,
        attack=attack,
        num_attackers=num_attackers,
        evaluation={"clients": 0},
        cohort={"num_wanted": 8},
        **{**usual, **settings},
    )


def vector(run: fl.Run) -> Tensor:
    return Params.of(run.load_model()).vector


def difference(one: fl.Run, other: fl.Run) -> float:
    return float((vector(one) - vector(other)).abs().max())


@cache
def honest_vector() -> Tensor:
    """The model of a run without attackers."""
    return vector(run(None))


KINDS: dict[str, fl.Attack] = {
    "sign_flip": fl.SignFlip(),
    "gaussian": fl.GaussianNoise(noise_std=0.1),
    "label_flip": fl.LabelFlip(),
    "model_replacement": fl.ModelReplacement(),
    "backdoor": fl.Backdoor(target_label=1, trigger_value=3.0),
    "little_is_enough": fl.LittleIsEnough(num_deviations=2.0),
    "min_max": fl.MinMax(),
}


def test_the_attacks_tested_are_all_there_are() -> None:
    """The control of the tables here."""
    assert {name: type(each) for name, each in KINDS.items()} == dict(ATTACK_KINDS)


#: One that forges alone, one that colludes, and one that poisons. The others are slow tests.
ESSENTIAL = ("sign_flip", "little_is_enough", "label_flip")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ESSENTIAL else pytest.mark.slow) for kind in KINDS],
)
def test_an_attack_is_the_same_in_blocks_and_sessions(kind: str) -> None:
    """And has an effect: an honest run gives another model."""
    one = run(KINDS[kind], 3)
    for engine in (BLOCKS, MEMORY):
        assert difference(run(KINDS[kind], 3, engine=engine), one) < 1e-5, engine
    assert float((vector(one) - honest_vector()).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_is_the_same_on_two_workers(kind: str) -> None:
    """The attackers collude across them."""
    two = run(KINDS[kind], 3, engine={"executor": "sequential", "num_workers": 2})
    assert difference(two, run(KINDS[kind], 3)) < 1e-5


def test_the_record_names_the_attackers() -> None:
    """Drawn by the seed, or given; each round counts those who took part."""
    first = run(fl.SignFlip(scale=2.0), 3)
    table: Any = first.record.config["attack"]  # Any: JSON
    assert (table["kind"], table["scale"], len(table["clients"])) == ("sign_flip", 2.0, 3)
    assert all(2 <= each.metrics["num_attackers"] <= 3 for each in first.history)
    again = run({"kind": "sign_flip", "scale": 2.0, "num_attackers": 3})
    assert again.record.config["attack"] == table
    assert difference(again, first) == 0.0
    given = {"kind": "sign_flip", "num_attackers": 3, "clients": [0, 4, 5]}
    other: Any = run(given).record.config["attack"]  # Any: as above
    assert other["clients"] == [0, 4, 5]


def test_an_attacked_run_can_be_resumed() -> None:
    """With the same attackers."""

    class Cut:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> bool:
            raise KeyError(record.round_num, model)

    with pytest.raises(KeyError):
        run(fl.GaussianNoise(noise_std=0.1), 3, name="cut", callbacks=[Cut()])
    resumed = run(fl.GaussianNoise(noise_std=0.1), 3, resume="cut")
    assert difference(resumed, run(fl.GaussianNoise(noise_std=0.1), 3)) == 0.0


def test_a_robust_rule_resists_where_the_mean_does_not() -> None:
    """The end that all of this serves."""
    local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)
    honest, attack = run(None, num_rounds=5), fl.ModelReplacement(scale=30.0)
    spoiled = run(attack, 2, num_rounds=5)
    robust = run(attack, 2, num_rounds=5, algorithm=fl.FedMedian(local))
    losses = [each.history[-1].metrics["loss"] for each in (honest, robust, spoiled)]
    assert losses[0] < losses[1] < losses[2]
    assert losses[2] > 2.0 * losses[1]


@dataclass(frozen=True)
class Nothing(fl.Attack):
    """For the tests of an attack of one's own."""

    forges = True

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: fl.Seed) -> Tensor:
        assert (num_updates, type(seed)) == (8, fl.Seed)
        return torch.zeros_like(deltas_MQ)


def test_an_attack_of_your_own_is_named_by_its_class() -> None:
    """In a table; an object of an unknown class could not be recorded."""
    own = {"kind": "python", "factory": f"{__name__}:Nothing", "num_attackers": 3}
    assert float((vector(run(own)) - honest_vector()).abs().max()) > 1e-3
    with pytest.raises(ConfigError, match=r'attack is .*Nothing.*"kind": "python"'):
        run(Nothing(), 3)


@pytest.mark.parametrize("kind", ["sign_flip", "little_is_enough"])
def test_local_parts_and_statistics_are_not_forged(kind: str) -> None:
    """Only what clients send and train; the control sends all parts."""

    def make_normalized() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    local = fl.LocalSgd(epochs=1, batch_size=100, learning_rate=0.2)
    shared = fl.KeepLocal(fl.FedAvg(local), ["0.*", "1.weight", "1.bias"])

    def train(attack: fl.Attack | None) -> fl.Run:
        return fl.simulate(
            make_normalized,
            DATA,
            shared,
            attack=attack,
            num_attackers=8 if attack else None,
            num_rounds=1,
            engine={"executor": "sequential"},
            evaluation={"clients": 0},
            cohort={"num_wanted": 8},
        )

    honest, attacked = train(None).load_model(), train(KINDS[kind]).load_model()
    for name, expected in honest.state_dict().items():
        same = torch.equal(attacked.state_dict()[name], expected)
        assert same is not name.startswith("2."), name


# ---- What the coordinator does ------------------------------------------------------------


def test_forged_updates_beyond_the_bounds_are_refused() -> None:
    """As those of real clients. Control: within the bounds they count."""
    layout = Layout.of(nn.Linear(9, 3))
    rows = torch.ones(5, 30)
    sent = Updates([ClientId(k) for k in range(5)], torch.ones(5), {"delta": rows}, [0] * 5)
    local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)
    for limit, expected in ((100.0, -5.0 * 2 / 5 + 3 / 5), (10.0, 1.0)):
        rule = AttackedAggregation(
            rule=fl.WeightedMean(by_examples=False),
            attack=fl.SignFlip(scale=5.0),
            attackers=frozenset([1, 3]),
            lanes=fl.FedAvg(local).lanes,
            bounds=UpdateBounds(max_norm=limit, max_examples=100),
            layout=layout,
            seed=SEED,
        )
        found = rule.combine(sent)
        torch.testing.assert_close(found.lanes["delta"], torch.full((30,), expected))
        assert found.metrics == {"num_attackers": 2}


def test_what_a_rule_knows_of_clients_stays_theirs() -> None:
    """Also if updates before theirs are refused."""
    seen = dict[ClientId, float]()

    class Recorder(fl.CoordinateMedian):
        def combine(self, updates: Updates) -> Mapping[str, Tensor]:
            losses = updates.metrics_B["loss"].tolist()
            seen.update(zip(updates.client_ids, losses, strict=True))
            return super().combine(updates)

    ids = [ClientId(k) for k in range(5)]
    rule = AttackedAggregation(
        rule=Recorder(),
        attack=fl.SignFlip(scale=5.0),
        attackers=frozenset([1, 3]),
        lanes=fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)).lanes,
        bounds=UpdateBounds(max_norm=10.0, max_examples=100),
        layout=Layout.of(nn.Linear(9, 3)),
        seed=SEED,
    )
    losses = {"loss": torch.arange(5.0)}
    rule.combine(
        Updates(ids, torch.ones(5), {"delta": torch.ones(5, 30)}, [0] * 5, metrics_B=losses)
    )
    assert seen == {0: 0.0, 2: 2.0, 4: 4.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["attack.kind=sign_flip", "attack.num_attackers=0"], r"attack.num_attackers: is 0"),
        (["attack.num_attackers=2"], r"attack.num_attackers: is 2, but there is no attack"),
        (
            ["attack.kind=sign_flip", "attack.num_attackers=2", "attack.clients=[1]"],
            r"attack.clients: names 1 clients, but attack.num_attackers is 2",
        ),
        (
            ["attack.kind=sign_flip", "attack.num_attackers=2", "centralized=true"],
            r"attack.kind: is .sign_flip., but centralized is on",
        ),
        (
            [
                *("attack.kind=sign_flip", "attack.num_attackers=2"),
                *("secure_aggregation.mode=complete", "engine.transport=memory"),
            ],
            r"secure_aggregation.mode is on, under which clients clip their own",
        ),
    ],
)
def test_an_attack_that_cannot_be_simulated_is_refused(settings: list[str], message: str) -> None:
    """By the configuration."""
    with pytest.raises(ConfigError, match=message):
        load(None, overrides=settings)


def test_an_attack_must_fit_the_data() -> None:
    """More attackers than clients, or a class that does not exist."""
    with pytest.raises(ConfigError, match=r"num_attackers is 10 .* have 9 clients"):
        run(fl.SignFlip(), 10)
    with pytest.raises(ConfigError, match=r"attack.target_label is 5, but there are 2 classes"):
        run(fl.Backdoor(target_label=5), 1)
    assert isinstance(DATA.population, ArrayPopulation)
