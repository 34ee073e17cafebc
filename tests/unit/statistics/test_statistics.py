"""Statistics over clients' tables, next to pandas on the pooled tables."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedlearn.statistics import ClientTable, ResultRow, StatisticsPlan, StatisticsQuery

NUMBER = {"kind": "number", "low": 0.0, "high": 100.0}
COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "age": NUMBER,
    "bmi": {"kind": "number", "low": 10.0, "high": 60.0},
    "sex": {"kind": "category", "values": ["f", "m"]},
    "ward": {"kind": "category", "values": [1, 2, 3]},
    "dx": {"kind": "text", "width": 9},
}


def draw_frame(seed: int = 0, num_rows: int = 300) -> pd.DataFrame:
    """Return rows of several clients, with missing values and ties."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50.0, 15.0, num_rows).round().clip(0.0, 100.0)
    frame = pd.DataFrame(
        {
            "client": rng.choice(["north", "süd", "west, the"], num_rows),
            "age": np.where(rng.random(num_rows) < 0.1, np.nan, age),
            "bmi": (20.0 + 0.1 * age + rng.normal(0.0, 2.0, num_rows)).clip(10.0, 60.0),
            "sex": rng.choice(np.array(["f", "m", None], object), num_rows, p=[0.6, 0.3, 0.1]),
            "ward": rng.choice([1, 2, 3], num_rows),
            "dx": rng.choice(["Grippe", "Übelkeit", "Hust", "Husten", ""], num_rows),
        }
    )
    return frame.astype({"sex": object, "dx": object})


def plan_of(
    *statistics: Mapping[str, Any],
    columns: Mapping[str, Mapping[str, Any]] = COLUMNS,
    max_examples: int | None = None,
) -> StatisticsPlan:
    values: dict[str, Any] = {"columns": columns, "statistics": statistics}
    return StatisticsPlan.of(values | ({"max_examples": max_examples} if max_examples else {}))


def answer(plan: StatisticsPlan, tables: Sequence[Any]) -> list[ResultRow]:
    """Answer a plan as clients and a coordinator do, without either."""
    query = StatisticsQuery.of(plan)
    state = query.init()
    clients = [ClientTable.of(each, plan.columns) for each in tables]
    for _ in range(plan.num_rounds):
        broadcast = query.broadcast(state)
        answers = [
            query.answer(each.features, each.labels, broadcast=broadcast)["answers"]
            for each in clients
        ]
        bound = query.sums["answers"].bound
        assert bound is None or all(float(each.norm()) <= bound * (1 + 1e-12) for each in answers)
        total = sum(answers[1:], start=answers[0])
        state, _ = query.conclude({"answers": total}, state, num_clients=len(tables))
    return list(query.result_rows(state, sigma=None))


def values_of(rows: Sequence[ResultRow]) -> dict[tuple[str, str], float | None]:
    return {(row.column, row.item): row.value for row in rows}


def by_client(frame: pd.DataFrame) -> list[pd.DataFrame]:
    return [each for _, each in frame.groupby("client")]


def test_counts_and_missing_values_are_those_of_pandas() -> None:
    frame = draw_frame()
    columns = ["age", "sex", "ward", "dx"]
    found = values_of(answer(plan_of({"kind": "count", "columns": columns}), by_client(frame)))
    shown = frame.replace({"dx": {"": None}})  # an empty text is missing
    assert found[("", "rows")] == len(frame)
    assert [found[(name, "values")] for name in columns] == shown[columns].count().tolist()
    missing = answer(plan_of({"kind": "missing", "columns": columns}), by_client(frame))
    expected = shown[columns].isna().sum()
    of_rows = values_of(missing)
    assert [of_rows[(name, "missing")] for name in columns] == expected.tolist()
    assert of_rows[("age", "share")] == pytest.approx(expected["age"] / len(frame))


def test_a_plan_is_plain_values_and_back() -> None:
    plan = plan_of({"kind": "count"}, {"kind": "quantiles", "columns": ["age"], "levels": [0.5]})
    assert StatisticsPlan.of(json.loads(plan.to_json())) == plan
