"""With ``privacy.unit = "example"``, one row moves the sums by no more than noise is scaled to.

Two tables differ in one row. The sums before noise are those of the product; the noise is what it
asks for. Every round is checked, from the same broadcast, as neighbors have it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.cohorts import PoissonCohorts
from fedlearn.algorithms.lanes import Aggregate, Updates
from fedlearn.algorithms.query import QueryStrategy
from fedlearn.algorithms.strategy import State
from fedlearn.core.messages import ClientId
from fedlearn.core.params import NoModel, Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.privacy.plan import CentralPlan
from fedlearn.privacy.secret import ReproducibleStreams
from fedlearn.secagg.fixed_point import build_noisy_lane, encode, read_levels
from fedlearn.secagg.plan import clip
from fedlearn.statistics import ClientTable, StatisticsPlan, StatisticsQuery

MULTIPLIER = 1.3
LAYOUT = Params.of(NoModel()).layout
COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "age": {"kind": "number", "low": 0, "high": 100},
    "bmi": {"kind": "number", "low": 10, "high": 60},
    "sex": {"kind": "category", "values": ["f", "m"], "other": "other"},
    "ward": {"kind": "category", "values": [1, 2], "other": "other"},
    "dx": {"kind": "text", "width": 3},
}
ALL: Sequence[Mapping[str, Any]] = [
    {"kind": "count", "columns": ["age", "sex", "dx"]},
    {"kind": "missing", "columns": ["age", "bmi", "sex", "dx"]},
    {"kind": "mean", "columns": ["age", "bmi"], "weight": 2.0},
    {"kind": "histogram", "columns": ["age", "bmi"], "edges": [0, 40, 60, 100]},
    {"kind": "correlation", "columns": ["age", "bmi"]},
    {"kind": "groups", "columns": ["sex", "ward"], "threshold": 0},
    {"kind": "frequent", "columns": ["sex"], "threshold": 0},
    {"kind": "quantiles", "columns": ["age", "bmi"], "levels": [0.1, 0.5], "num_rounds": 3},
    {"kind": "frequent", "columns": ["dx"], "threshold": 2, "most": 4},
]
#: Rows as people have them, and as an attacker would: [age, bmi, sex, ward, dx].
ODD_ROWS: Sequence[tuple[Any, ...]] = [
    (math.nan, math.nan, None, None, None),
    (math.inf, -math.inf, "x", 99, ""),
    (1e300, -1e300, "f", 1, "\0\0"),
    (0.0, 10.0, "m", 2, "flu"),
    (100.0, 60.0, "f", 1, "flu"),
    (-5.0, 61.0, 3, "1", "übel, too long"),
    (50.0, 35.0, "f", 2, "\ud800"),
]


def plan_of(*statistics: Mapping[str, Any], max_examples: int) -> StatisticsPlan:
    values = {"columns": COLUMNS, "statistics": statistics, "max_examples": max_examples}
    return StatisticsPlan.of(values)


def draw_rows(num_rows: int) -> list[tuple[Any, ...]]:
    """Draw rows, many of them equal."""
    rng = np.random.default_rng(4)
    usual = [(20.0, 22.5, "f", 1, "flu"), (47.1, 31.3, "m", 2, "hus"), (73.0, 28.9, "f", 2, "fl")]
    return [usual[place] for place in rng.integers(0, len(usual), num_rows)]


def answer(query: StatisticsQuery, rows: Sequence[tuple[Any, ...]], state: State) -> Tensor:
    columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
    table = ClientTable.of(columns, query.parsed.columns)
    broadcast = query.broadcast(state)
    return query.answer(table.features, table.labels, broadcast=broadcast)["answers"]


def rounds_of(
    query: StatisticsQuery, clients: Sequence[Sequence[tuple[Any, ...]]]
) -> Iterator[State]:
    """Yield the state of each round, as the sums over the clients make it."""
    state = query.init()
    for _ in range(query.parsed.num_rounds):
        yield state
        total = torch.stack([answer(query, rows, state) for rows in clients]).sum(dim=0)
        state, _ = query.conclude({"answers": total}, state, num_clients=len(clients))


def central_sum(query: StatisticsQuery, answers: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Return the sum before noise, and the standard deviation of the noise, both in levels."""
    asked = list[float]()

    class Seen:
        def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
            asked.append(sigma)
            return torch.zeros(size, dtype=torch.float64)

    plan = CentralPlan(
        cohorts=PoissonCohorts(4, 4, 4),
        clip_norm=1.0,
        noise_multiplier=MULTIPLIER,
        num_wanted=4,
        streams=ReproducibleStreams(Seed(0)),
        sums_examples=True,
    )
    strategy = plan.wrap_strategy(QueryStrategy(query))
    summed = strategy.aggregation
    assert isinstance(summed, BoundedSum)
    state = summed.init(strategy.lanes, LAYOUT, device=torch.device("cpu"))
    updates = Updates(
        client_ids=[ClientId(each) for each in range(len(answers))],
        lanes={"answers": torch.stack(list(answers))},
        weights_B=torch.ones(len(answers)),
        based_on=[0] * len(answers),
    )
    levels = summed.finalize(summed.accumulate(state, updates)).lanes["answers"]
    release = plan.build_release(strategy, LAYOUT, Seen())
    release(
        Aggregate(lanes={"answers": levels.clone()}, num_clients=len(answers)),
        strategy=strategy,
        layout=LAYOUT,
        state={},
        round_num=0,
        attempt=0,
    )
    [sigma] = asked
    return levels, sigma


def farthest(query: StatisticsQuery, rows: Sequence[tuple[Any, ...]]) -> float:
    """Return by how much one odd row moves the sum over clients at most, relative to its bound."""
    others = [draw_rows(30), []]
    found = list[float]()
    for state in rounds_of(query, [*others, rows]):
        rest = [answer(query, each, state) for each in others]
        before, sigma = central_sum(query, [*rest, answer(query, rows, state)])
        for odd in (*ODD_ROWS, rows[0]):
            after, _ = central_sum(query, [*rest, answer(query, [*rows, odd], state)])
            moved = float(torch.linalg.vector_norm(after - before))
            found.append(moved * MULTIPLIER / sigma)
    return max(found)


@pytest.mark.parametrize("max_examples", [1000, 20], ids=["room", "scaled down"])
def test_one_row_moves_the_sum_by_no_more_than_the_noise_is_scaled_to(max_examples: int) -> None:
    """Nearly that much is reached: a row that is in a cell of everything."""
    query = StatisticsQuery.of(plan_of(*ALL, max_examples=max_examples), unit="example")
    moved = farthest(query, draw_rows(50))
    assert moved <= 1.0
    assert moved > (0.9 if max_examples == 1000 else 0.1)


class Choosing(StatisticsQuery):
    """A choice of 20 rows counts, which is another one with one row more."""

    def answer(self, features: Any, labels: Tensor, *, broadcast: Any) -> Any:
        table = ClientTable.from_features(features, labels, self.parsed.columns).limit(20)
        return super().answer(table.features, table.labels, broadcast=broadcast)


def test_where_a_choice_of_rows_counts_one_row_moves_the_sum_further() -> None:
    """The control."""
    plan = plan_of(*ALL, max_examples=20)
    assert farthest(Choosing(plan=plan.to_json(), unit="example"), draw_rows(50)) > 1.2


def farthest_in_secure_sums(query: StatisticsQuery, rows: Sequence[tuple[Any, ...]]) -> float:
    """Return by how much one odd row moves a client's levels, relative to what noise is for."""
    spec, num_noisy = query.sums["answers"], 3
    assert spec.bound is not None
    assert spec.example_bound is not None
    lane = build_noisy_lane(
        "answers",
        size=math.prod(spec.shape),
        bound=spec.bound,
        modulus_bits=40,
        num_clients=4,
        noise_share=MULTIPLIER / math.sqrt(num_noisy),
        hidden_norm=spec.example_bound,
    )
    rng, state = np.random.default_rng(0), query.init()

    def levels(of_rows: Sequence[tuple[Any, ...]]) -> Any:
        values, _ = clip(answer(query, of_rows, state), lane.bound)
        bits = rng.integers(0, 1 << 32, lane.size, np.uint32)
        return read_levels(lane, encode(lane, values.numpy(), factor=1.0, rounding_bits=bits))

    before, noise = levels(rows), lane.noise * math.sqrt(num_noisy)
    moved = max(float(np.linalg.norm(levels([*rows, odd]) - before)) for odd in ODD_ROWS)
    return moved * MULTIPLIER / noise


@pytest.mark.parametrize("max_examples", [1000, 20], ids=["room", "scaled down"])
def test_one_row_moves_a_secure_sum_by_no_more_than_the_noise_of_enough_clients(
    max_examples: int,
) -> None:
    """Whatever the rounding. The control: where a choice of rows counts, by more."""
    plan = plan_of(*ALL, max_examples=max_examples)
    moved = farthest_in_secure_sums(StatisticsQuery.of(plan, unit="example"), draw_rows(50))
    assert moved <= 1.0
    if max_examples == 1000:
        assert moved > 0.5
    choosing = Choosing(plan=plan.to_json(), unit="example")
    assert farthest_in_secure_sums(choosing, draw_rows(50)) > 1.05


def test_a_row_may_have_no_value_that_keeps_its_client_from_answering() -> None:
    plan = plan_of(*ALL, max_examples=9)
    plan.require_private(unit="example")  # the control
    for name, column, said in (
        ("sex", {"kind": "category", "values": ["f", "m"]}, r"columns\.sex\.other is missing"),
        ("age", {"kind": "number"}, r"columns\.age has no low and high, and privacy\.unit"),
    ):
        values = {
            "columns": {**COLUMNS, name: column},
            "statistics": [{"kind": "count"}],
            "max_examples": 9,
        }
        other = StatisticsPlan.of(values)
        other.require_private(unit="client")
        with pytest.raises(ConfigError, match=said):
            other.require_private(unit="example")
