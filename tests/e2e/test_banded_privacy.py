"""Noise that is correlated over rounds, from Python: the noise in the model, and what it costs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlearn as fl
from fedlearn.cli.app import main
from fedlearn.errors import BudgetExhausted, ConfigError
from fedlearn.privacy.banded_matrix import BandedMatrix, find_optimal
from fedlearn.privacy.gaussian import gaussian_epsilon
from tests.e2e.noise import has_scale, moved
from tests.e2e.test_privacy import LEARNS, PRIVACY, STILL, Told, history, make_model, run
from tests.unit.privacy.test_banded_matrix import explicit

pytestmark = pytest.mark.usefixtures("surroundings")

#: Four groups of 15.
TURNS = {"num_wanted": 15, "sampling": "cyclic"}
GROUPS, BANDED = 4, {"bands": 4}
SCAFFOLD = fl.Scaffold(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.5),
    num_clients=60,
    server_learning_rate=1.0,
    control_bound=0.5,
)
ADAM = fl.FedAdam(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.5),
    weight_by_examples=False,
    server_learning_rate=0.1,
    beta_1=0.9,
    beta_2=0.99,
    tau=1e-3,
)


def run_banded(
    algorithm: fl.Strategy = STILL,
    *,
    privacy: Mapping[str, object] | None = None,
    **settings: Any,  # Any: keys and objects
) -> fl.Run:
    """Run rounds in which users take turns."""
    return run(algorithm, cohort=TURNS, privacy={**BANDED, **(privacy or {})}, **settings)


def asked(rounds: fl.Run | Sequence[Any]) -> list[set[int]]:
    """Return the clients that were asked in each round."""
    records = rounds.history if isinstance(rounds, fl.Run) else rounds
    return [{int(each) for each in record.participations.client_ids} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {"num_workers": 1},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param({"transport": "memory"}, marks=pytest.mark.slow),
    ],
    ids=["engine", "workers", "memory"],
)
def test_the_noise_of_a_model_is_that_of_the_last_prefix_sum(engine: dict[str, object]) -> None:
    """It is the last row of A C⁻¹ times z C ‖c‖ / m.

    Controls: scales of 2/3 and 3/2, and independent noise, are told apart.
    """
    noise = moved(run_banded(num_rounds=6, engine=engine), make_model)
    matrix, scale = find_optimal(bands=4, num_rounds=6), 1.5 * 0.6 / 15
    column = (torch.linalg.inv(torch.from_numpy(explicit(matrix.diagonals, 6)))).sum(dim=0)
    sigma = float(column.norm()) * matrix.norm * scale
    assert has_scale(noise, sigma)
    assert not has_scale(noise * 2.0 / 3.0, sigma)
    assert not has_scale(noise * 1.5, sigma)
    assert not has_scale(noise, math.sqrt(6.0) * scale)


@pytest.mark.slow
def test_one_band_has_the_noise_of_the_mode_without_bands() -> None:
    """The scale is √6 z C / m after 6 rounds."""
    noise = moved(run_banded(num_rounds=6, privacy={"bands": 1}), make_model)
    assert has_scale(noise, math.sqrt(6.0) * 1.5 * 0.6 / 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [LEARNS, pytest.param(SCAFFOLD, marks=pytest.mark.slow)],
    ids=["fedavg", "scaffold"],
)
def test_sessions_workers_and_the_engine_agree_bit_for_bit(algorithm: fl.Strategy) -> None:
    """Correlated noise also subtracts earlier noise, which is the same in every process."""
    sequential = {"executor": "sequential"}
    engines = [
        {"num_workers": 1, **sequential},
        {"num_workers": 2, **sequential},
        {"transport": "memory"},
    ]
    first, *others = (
        run_banded(algorithm, engine=engine, privacy={"reproducible": True}, num_rounds=5)
        for engine in engines
    )
    for other in others:
        assert asked(other) == asked(first)
        for name, tensor in first.weights(best=False).items():
            assert torch.equal(tensor, other.weights(best=False)[name])


@pytest.mark.slow
def test_a_run_that_shall_be_repeated_is_resumed_to_the_same_bits() -> None:
    """The noise and releases of the last rounds are part of its state."""
    settings: dict[str, Any] = {"privacy": {"reproducible": True}, "num_rounds": 7}
    whole = run_banded(ADAM, **settings)
    broken: dict[str, Any] = {"name": "broken", "store": {"checkpoint_every_s": 0.0}}
    with pytest.raises(KeyboardInterrupt):
        run_banded(ADAM, told=Told(break_after=4), **broken, **settings)
    resumed = run_banded(ADAM, resume="broken", **settings)
    assert asked(resumed) == asked(whole)
    for name, tensor in whole.weights(best=False).items():
        assert torch.equal(tensor, resumed.weights(best=False)[name])


@pytest.mark.slow
def test_with_next_to_no_noise_it_is_the_run_in_the_clear() -> None:
    """A run in the clear with the same turns. The control: with more noise it differs."""
    clear = run(
        LEARNS,
        cohort=TURNS,
        privacy={"mode": "off"} | dict.fromkeys(PRIVACY.keys() - {"mode"}),
        num_rounds=6,
    )
    private = [
        run_banded(LEARNS, privacy={"clip_norm": 50.0, "noise_multiplier": z}, num_rounds=6)
        for z in (1e-6, 1e-2)
    ]
    assert asked(private[0]) == asked(clear)
    apart = [float((moved(each, make_model) - moved(clear, make_model)).norm()) for each in private]
    assert apart[0] < 0.01 < apart[1]


@pytest.mark.slow
@pytest.mark.parametrize(("every_s", "num_committed"), [(1000.0, 0), (0.0, 2)])
def test_turns_that_were_lost_are_over(every_s: float, num_committed: int) -> None:
    """Users of a lost turn are asked again only after all other groups had theirs."""
    settings: dict[str, Any] = {"num_rounds": 7, "store": {"checkpoint_every_s": every_s}}
    with pytest.raises(KeyboardInterrupt):
        run_banded(told=Told(break_after=3), name="broken", **settings)
    assert len(history("broken")) == num_committed
    told = Told()
    found = asked(run_banded(told=told, resume="broken", **settings))
    groups = asked(run_banded(num_rounds=GROUPS, privacy={"reproducible": True}))
    turns = [*range(num_committed), *range(3, 3 + 7 - num_committed)]
    assert found == [groups[turn % GROUPS] for turn in turns]
    assert told.summary is not None
    assert told.summary.privacy is not None
    assert told.summary.privacy.num_own == 3 + 7 - num_committed
    assert f"{3 - num_committed} turns of earlier processes were lost" in told.notes[-1]


@pytest.mark.slow
def test_two_runs_on_the_same_users_are_rounded_up_apart() -> None:
    """With 4 groups, 5 rounds contain two turns of one group, so each run costs two turns."""
    told = [Told(), Told()]
    for each in told:
        run_banded(num_rounds=5, told=each)
    for turns, each in zip((2, 4), told, strict=True):
        assert each.summary is not None
        found = each.summary.privacy
        assert found is not None
        assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(turns) / 1.5, 1e-3))
        assert found.epsilon_with_cohorts == found.epsilon


@pytest.mark.slow
def test_a_budget_is_used_up_to_the_end_of_a_turn() -> None:
    """The budget allows two turns, which is 8 of 12 rounds; another run has nothing left."""
    budget = gaussian_epsilon(math.sqrt(2.0) / 1.5, 1e-3) + 1e-6
    told = Told()
    with pytest.raises(BudgetExhausted, match="8 rounds are charged"):
        run_banded(num_rounds=12, privacy={"epsilon": budget}, name="a", told=told)
    assert len(history("a")) == 8
    assert any("enough for 8 of the 12 rounds" in note for note in told.notes)
    with pytest.raises(BudgetExhausted):
        run_banded(num_rounds=1, privacy={"epsilon": budget})


OWN = """
num_rounds = 10
[data.partition]
num_clients = 40
[cohort]
num_wanted = 10
[evaluation]
clients = 0
[privacy]
mode = "central"
bands = 4
clip_norm = 0.5
target_delta = 1e-3
epsilon = 4.0
"""


@pytest.mark.slow
def test_what_a_run_will_cost_rises_by_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeing the cohorts costs no more; the noise for a budget is that of three turns."""
    Path("own.toml").write_text(OWN)
    assert main(["budget", "own.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    noise = found["noise_multiplier"]
    assert gaussian_epsilon(math.sqrt(3.0) / noise, 1e-3) == pytest.approx(4.0, rel=2e-3)
    turns = {each["round"]: each["epsilon"] for each in found["rounds"]}
    assert turns.keys() == {1, 5, 9, 10}
    for num_rounds, epsilon in turns.items():
        expected = gaussian_epsilon(math.sqrt(-(-num_rounds // 4)) / noise, 1e-3)
        assert epsilon == pytest.approx(expected, rel=1e-6)
    assert all(each["epsilon"] == each["epsilon_with_cohorts"] for each in found["rounds"])
    assert found["bands"] == 4
    assert main(["budget", "own.toml", "--output", "budget.png"]) == 0
    text = capsys.readouterr().out
    assert "40 users in 4 groups, which are asked in turn" in text
    rounds = find_optimal(bands=4, num_rounds=10).error(10) ** 2
    independent = BandedMatrix((1,)).error(10) ** 2
    assert f"that of {rounds:.4g} rounds, without bands that of {independent:.4g}" in text
    assert Path("budget.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("privacy", "settings", "message"),
    [
        (
            {"bands": 5},
            {"num_rounds": 8},
            r"over 5 rounds.*once in 4 rounds; lower privacy.bands to 4",
        ),
        ({}, {"cohort": {"num_wanted": 31}}, "too many for two groups"),
        ({}, {"cohort": {"sampling": "poisson"}}, 'is "poisson", but privacy.bands is 4'),
        ({}, {"cohort": {"sampling": "uniform"}}, 'is "uniform", but privacy.bands is 4'),
        ({"bands": None}, {"cohort": TURNS}, "which hides no client, but privacy.bands is mis"),
        ({"bands": 0}, {}, r"bands.*>= 1"),
        ({"clip_quantile": 0.5}, {}, "rounds have clip norms of their own"),
        ({"mode": "distributed"}, {}, 'bands: is 4, but privacy.mode is "distributed"'),
        ({"mode": "local"}, {}, 'bands: is 4, but privacy.mode is "local"'),
        ({"mode": "local", "bands": None}, {"cohort": TURNS}, 'leave it at "uniform"'),
        ({}, {"stragglers": {"over_selection": 1.5}}, "a group is asked as a whole"),
        ({}, {"algorithm": fl.FedAvg(STILL.local)}, "weighted by their numbers of examples"),
        ({}, {"algorithm": fl.FedMedian(STILL.local)}, "CoordinateMedian is not WeightedMean"),
        ({"noise_multiplier": 2000.0}, {}, "exceed exact integers; lower privacy.bands"),
    ],
)
def test_what_would_make_the_guarantee_false_is_refused(
    privacy: dict[str, object], settings: dict[str, Any], message: str
) -> None:
    """With the reason, before a run is created."""
    cohort = {"cohort": {"num_wanted": 15}}
    with pytest.raises(ConfigError, match=message):
        run(**(cohort | settings), privacy={**BANDED, **privacy})
    assert not Path("runs").exists()


@pytest.mark.slow
def test_bands_bring_the_turns_that_they_need() -> None:
    """By default, ``bands`` implies cyclic sampling, in which each user has one turn."""
    found = run(cohort={"num_wanted": 15}, privacy=BANDED, num_rounds=GROUPS)
    assert set.union(*asked(found)) == set(range(60))
    assert [len(each) for each in asked(found)] == [15] * GROUPS
