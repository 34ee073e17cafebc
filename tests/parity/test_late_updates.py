"""Semi-synchronous rounds are the same over Flower as in memory."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from tests.parity import test_flower as flower

LATE = LateUpdates(
    max_staleness=20,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
    deadline_quantile=None,
    deadline_window=3,
    least_deadline_s=0.0,
)


def ran(
    collector: PlainCollector, *, deadline_s: float
) -> tuple[Tensor, list[dict[int, int]], int]:
    """Return the model after six rounds, the staleness of their updates, and the number late."""
    policy = replace(flower.POLICY, deadline_s=deadline_s)
    semi = PlainCollector(channel=collector.channel, policy=policy, round_mode=LATE, slab_bytes=0)
    opening = SampledOpening(sampler=UniformSampler(), available=semi.available, seed=Seed(5))
    plan = RoundPlan(
        draw=opening.draw,
        policy=policy,
        collector=semi,
        strategy=FedAvg(flower.LOCAL),
        seed=Seed(5),
    )
    torch.manual_seed(0)
    state, ages, num_late = plan.init(Params.of(flower.make_model())), list[dict[int, int]](), 0
    for _ in range(6):
        state, collected, _ = run_round(state, plan, attempt=0)
        ages.append(dict(collected.staleness))
        num_late += collected.count(Status.LATE)
    semi.close()
    return state.params.vector, ages, num_late


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [3.5, math.inf])
def test_flower_keeps_late_updates_as_memory_does(deadline_s: float) -> None:
    """If some clients are late, and, as the control, if none is."""
    strategy = FedAvg(flower.LOCAL)
    memory, over_flower = flower.in_memory(strategy), flower.over_flower(strategy)
    assert isinstance(memory, PlainCollector)
    assert isinstance(over_flower, PlainCollector)
    expected, ages, num_late = ran(memory, deadline_s=deadline_s)
    found, found_ages, found_late = ran(over_flower, deadline_s=deadline_s)
    assert torch.equal(found, expected)
    assert (found_ages, found_late) == (ages, num_late)
    assert (num_late > 0) == math.isfinite(deadline_s)
    assert any(age for each in ages for age in each) == math.isfinite(deadline_s)


X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def skipping(folder: Path, transport: str, *, max_staleness: int) -> fl.Run:
    """Simulate eight rounds, most of them with too few reports, that keep late updates."""
    clients = fl.Iid(num_clients=20)
    data = fl.from_arrays(X, Y, partition=clients, test_fraction=0.2, seed=0)
    torch.manual_seed(0)
    return fl.simulate(
        lambda: nn.Linear(4, 2),
        data,
        fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)),
        num_rounds=8,
        cohort={"num_wanted": 6},
        stragglers={
            "deadline_s": 1.0,
            "min_reports": 5,
            "below_minimum": "skip",
            "over_selection": 1.0,
        },
        late_updates={"mode": "keep"},
        staleness={"max_staleness": max_staleness},
        devices={"kind": "lognormal", "median_ms_per_example": 90.0},
        engine={"transport": transport},
        store={"runs_dir": str(folder / transport)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 9])
def test_updates_held_over_skipped_rounds_grow_too_stale(
    tmp_path: Path, max_staleness: int
) -> None:
    """Sessions then drop them as the engine does. Control: with 9 none grows too stale.

    A held update is one that arrived in a round that was skipped; a later round may count it.
    """
    engine, sessions = (
        skipping(tmp_path, transport, max_staleness=max_staleness)
        for transport in ("engine", "memory")
    )
    rows = [
        [(row.outcome, row.participations.codes.tolist()) for row in run.history]
        for run in (engine, sessions)
    ]
    assert rows[0] == rows[1]
    outcomes = [row.outcome.value for row in engine.history]
    assert "skipped" in outcomes
    num_stale = sum(row.participations.num(Status.STALE) for row in engine.history)
    assert (num_stale > 0) == (max_staleness < 9)
    torch.testing.assert_close(
        list(engine.load_model().parameters()), list(sessions.load_model().parameters())
    )
