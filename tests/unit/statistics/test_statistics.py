"""Statistics over clients' tables, next to pandas on the pooled tables."""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedlearn.algorithms.settings import settings_of, update_from
from fedlearn.errors import ConfigError, DataError, SettingsRefused
from fedlearn.statistics import ClientTable, ResultRow, StatisticsPlan, StatisticsQuery
from fedlearn.statistics.suppression import suppress_small_cells

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


def test_means_and_variances_are_those_of_pandas() -> None:
    frame, columns = draw_frame(), ["age", "bmi"]
    found = values_of(answer(plan_of({"kind": "mean", "columns": columns}), by_client(frame)))
    for name in columns:
        of_column = frame[name]
        expected = [
            of_column.count(),
            of_column.sum(),
            of_column.mean(),
            of_column.var(ddof=0),
            of_column.std(ddof=0),
        ]
        rows = [found[(name, item)] for item in ("values", "sum", "mean", "variance", "std")]
        assert rows == pytest.approx(expected, rel=1e-12)


def test_a_value_outside_of_the_range_counts_as_its_end_and_is_reported() -> None:
    ages = pd.Series([-5.0, 20.0, 300.0, np.inf, np.nan])
    asked = ({"kind": kind, "columns": ["age"]} for kind in ("mean", "missing"))
    found = values_of(answer(plan_of(*asked, columns={"age": NUMBER}), [{"age": ages}]))
    assert found[("age", "mean")] == pytest.approx(ages.clip(0.0, 100.0).mean())
    assert (found[("age", "outside")], found[("age", "missing")]) == (3.0, 1.0)


def test_histograms_are_those_of_numpy_with_what_is_outside() -> None:
    edges, values = (
        [10.0, 20.0, 20.5, 30.0],
        [5.0, 10.0, 15.0, 20.0, 20.5, 29.0, 30.0, 31.0, np.nan],
    )
    plan = plan_of({"kind": "histogram", "columns": ["age"], "edges": edges})
    rest = {name: [None] * 3 for name in COLUMNS}
    tables = [rest | {"age": values[at : at + 3]} for at in (0, 3, 6)]
    rows = answer(plan, tables)
    expected = [1, *np.histogram(values, edges)[0].tolist(), 1]
    assert [row.value for row in rows] == expected
    assert [row.item for row in rows] == ["< 10", "[10, 20)", "[20, 20.5)", "[20.5, 30]", "> 30"]


@pytest.mark.parametrize("branches", [2, 7, 16])
def test_quantiles_are_those_of_numpy(branches: int) -> None:
    """Ages are whole numbers, with many ties."""
    frame, levels = draw_frame(), [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
    rounds = int(np.ceil(20 / np.log2(branches)))
    plan = plan_of(
        {
            "kind": "quantiles",
            "columns": ["age", "bmi"],
            "levels": levels,
            "branches": branches,
            "num_rounds": rounds,
        }
    )
    rows = answer(plan, by_client(frame))
    for row, (name, level) in zip(
        rows, [(n, q) for n in ("age", "bmi") for q in levels], strict=True
    ):
        expected = np.quantile(frame[name].dropna(), level, method="inverted_cdf")
        assert row.low is not None
        assert row.high is not None
        assert row.low - 1e-9 <= expected <= row.high + 1e-9, (name, level)
        assert row.high - row.low <= 100.0 / branches**rounds * 1.001


def test_frequent_values_and_groups_are_those_of_pandas_without_small_cells() -> None:
    frame = draw_frame()
    counts = frame["sex"].value_counts()
    asked = {"kind": "frequent", "columns": ["sex"], "threshold": 0}
    rows = answer(plan_of(asked), by_client(frame))
    assert {row.item: row.value for row in rows} == counts.to_dict()
    assert rows[0].item == counts.index[0]
    table = pd.crosstab(frame["sex"], frame["ward"])
    threshold = int(np.sort(table.to_numpy().ravel())[1]) + 1  # two cells are smaller
    asked = {"kind": "groups", "columns": ["sex", "ward"], "threshold": threshold}
    found = {row.item: row for row in answer(plan_of(asked), by_client(frame))}
    for sex in ("f", "m"):
        for ward in (1, 2, 3):
            row, count = found[f"{sex} / {ward}"], table.loc[sex, ward]
            assert (row.value, row.suppressed) == (
                (None, True) if count < threshold else (count, False)
            )


def test_one_small_cell_takes_a_second_one_along() -> None:
    """The control: with one suppressed cell, the number of examples would reveal it."""
    sexes = ["f"] * 40 + ["m"] * 3 + ["x"] * 9
    columns = {"sex": {"kind": "category", "values": ["f", "m", "x", "y"]}}
    asked = {"kind": "frequent", "columns": ["sex"], "threshold": 5}
    rows = answer(plan_of(asked, columns=columns), [{"sex": sexes}])
    assert {row.item: row.value for row in rows} == {"f": 40, "m": None, "x": None, "y": 0}
    assert [row.item for row in rows if row.suppressed] == ["m", "x"]
    assert suppress_small_cells(torch.tensor([3.0, 4.0, 9.0]), 5).isnan().tolist() == [
        True,
        True,
        False,
    ]
    assert suppress_small_cells(torch.tensor([2.0, 2.0, 9.0]), 5).isnan().all()


def test_suppressed_cells_are_not_in_the_saved_state() -> None:
    columns = {"sex": {"kind": "category", "values": ["f", "m"]}}
    plan = plan_of({"kind": "groups", "columns": ["sex"], "threshold": 5}, columns=columns)
    query = StatisticsQuery.of(plan)
    state, _ = query.conclude({"answers": torch.tensor([3.0, 90.0])}, query.init(), num_clients=2)
    assert state["0/sums"].isnan().all()


def test_correlations_are_those_of_pandas_over_complete_rows() -> None:
    frame = draw_frame()
    frame["ward"] = frame["ward"].astype(float)
    columns = {**COLUMNS, "ward": {"kind": "number"}}
    names = ["age", "bmi", "ward"]
    rows = answer(
        plan_of({"kind": "correlation", "columns": names}, columns=columns), by_client(frame)
    )
    complete = frame[names].dropna()
    assert rows[0].value == len(complete)
    for row in rows[1:]:
        assert row.value == pytest.approx(complete.corr().loc[row.column, row.item], abs=1e-12)


def test_frequent_texts_are_found_without_a_list_of_them() -> None:
    """Among them a prefix of another one, and letters of two bytes."""
    frame = draw_frame()
    frame.loc[frame.index[:4], "dx"] = "selten"
    asked = {"kind": "frequent", "columns": ["dx"], "threshold": 5}
    rows = answer(plan_of(asked), by_client(frame))
    counts = frame["dx"].replace("", None).value_counts()
    assert {row.item: row.value for row in rows} == counts[counts >= 5].to_dict()
    assert "selten" in counts
    fewer = answer(plan_of({**asked, "most": 2}), by_client(frame))
    assert len(fewer) == 2, "the beam keeps as many prefixes"


def test_texts_are_compared_in_composed_form_and_cut_between_letters() -> None:
    texts = ["U\u0308bel", "\u00dcbel", "aaaü", "aaaß", None, np.nan, "a\0b"]
    columns = {"dx": {"kind": "text", "width": 5}}
    asked = {"kind": "frequent", "columns": ["dx"], "threshold": 1}
    rows = answer(plan_of(asked, columns=columns), [{"dx": texts}])
    found = {row.item: row.value for row in rows}
    assert found == {"\u00dcbel": 2, "aaaü": 1, "aaaß": 1, "a\ufffdb": 1}
    columns = {"dx": {"kind": "text", "width": 4}}
    rows = answer(plan_of(asked, columns=columns), [{"dx": ["aaaü", "aaaß"]}])
    assert {row.item: row.value for row in rows} == {"aaa": 2}


ALL: Sequence[Mapping[str, Any]] = [
    {"kind": "count", "columns": ["age", "dx"]},
    {"kind": "missing", "columns": ["age", "sex", "dx"]},
    {"kind": "mean", "columns": ["age", "bmi"]},
    {"kind": "histogram", "columns": ["age"], "edges": [0, 50, 100]},
    {"kind": "quantiles", "columns": ["age"], "levels": [0.5], "num_rounds": 3},
    {"kind": "frequent", "columns": ["ward"], "threshold": 0},
    {"kind": "frequent", "columns": ["dx"], "threshold": 2},
    {"kind": "correlation", "columns": ["age", "bmi"]},
    {"kind": "groups", "columns": ["sex"], "threshold": 0},
]


def test_statistics_of_one_round_are_not_asked_again_and_share_the_first_round() -> None:
    """Later rounds leave their budget to the others; nothing is as long as the first answer."""
    plan = plan_of(*ALL, max_examples=50)
    assert plan.num_rounds == 9  # the bytes of a text
    assert sorted(plan.active(0)) == list(range(len(ALL)))
    assert plan.active(1) == [6, 4]
    assert plan.active(3) == [6]
    assert plan.scales(3)[6] == 1.0
    for round_num in range(9):
        scaled = [
            (scale * plan.statistics[place].row_norm(plan.columns)) ** 2
            for place, scale in plan.scales(round_num).items()
        ]
        assert sum(scaled) == pytest.approx(1.0), "the norm of a row"
    answer(plan, by_client(draw_frame()))  # asserts that no answer is beyond the bound


def test_weights_divide_the_noise_budget() -> None:
    heavy = plan_of({**ALL[0], "weight": 3.0}, ALL[3])
    equal = plan_of(ALL[0], ALL[3])
    # Three quarters of the variance's budget, instead of a half.
    assert heavy.scales(0)[0] / equal.scales(0)[0] == pytest.approx((0.75 / 0.5) ** 0.5)


def test_no_more_rows_of_a_client_count_than_the_plan_says() -> None:
    """A fixed choice of them, the same in each round."""
    frame = draw_frame()
    plan = plan_of({"kind": "count"}, max_examples=20)
    assert values_of(answer(plan, by_client(frame)))[("", "rows")] == 60.0
    table = ClientTable.of(frame, plan.columns)
    chosen = table.limit(20)
    assert len(chosen) == 20
    assert torch.equal(chosen.columns["bmi"], table.limit(20).columns["bmi"])
    assert set(chosen.columns["bmi"].tolist()) <= set(frame["bmi"])
    assert chosen.columns["bmi"].tolist() != frame["bmi"].tolist()[:20]


def empty() -> dict[str, list[Any]]:
    return {name: [] for name in COLUMNS}


def missing() -> dict[str, list[Any]]:
    return {name: [None] * 4 for name in COLUMNS}


@pytest.mark.parametrize("tables", [[missing()], [empty()], [empty(), missing()]])
def test_without_values_nothing_is_defined_and_nothing_fails(tables: list[Any]) -> None:
    rows = answer(plan_of(*ALL), tables)
    counts = {(row.statistic, row.item): row.value for row in rows}
    num_rows = sum(len(each["age"]) for each in tables)
    assert counts[("count", "rows")] == num_rows
    assert counts[("mean", "values")] == 0.0
    for statistic, item in (("mean", "mean"), ("mean", "std"), ("quantiles", "0.5")):
        assert counts[(statistic, item)] is None
    assert counts[("frequent", "")] is None
    assert all(row.note for row in rows if row.value is None)


def test_an_empty_client_adds_nothing() -> None:
    frame = draw_frame()
    alone, both = (answer(plan_of(*ALL), each) for each in ([frame], [empty(), frame]))
    assert alone == both


def test_a_constant_column_has_no_variance_and_no_correlation() -> None:
    frame = draw_frame().assign(age=33.3)
    asked = ({"kind": kind, "columns": ["age", "bmi"]} for kind in ("mean", "correlation"))
    rows = answer(plan_of(*asked), by_client(frame))
    found = {(row.statistic, row.column, row.item): row for row in rows}
    assert found[("mean", "age", "variance")].value == pytest.approx(0.0, abs=1e-9)
    assert found[("correlation", "age", "bmi")].value is None
    assert found[("correlation", "age", "bmi")].note == "a column is constant"


def test_columns_of_any_library_are_read() -> None:
    columns: Mapping[str, Mapping[str, Any]] = {
        "n": {"kind": "number"},
        "c": {"kind": "category", "values": ["a", 1], "other": "else"},
        "t": {"kind": "text", "width": 4},
    }
    schema = plan_of({"kind": "count"}, columns=columns).columns
    frames: list[Any] = [
        {"n": [1, None, 2.5], "c": ["a", 1.0, None], "t": ["x", None, ""]},
        {
            "n": np.array([1, np.nan, 2.5]),
            "c": np.array(["a", 1, None], object),
            "t": ["x", "", ""],
        },
        pd.DataFrame(
            {
                "n": pd.array([1.0, None, 2.5], dtype="Float64"),
                "c": pd.Categorical(["a", 1, None], categories=["a", 1]),
                "t": pd.array(["x", None, ""], dtype="string"),
            }
        ),
    ]
    for each in frames:
        table = ClientTable.of(each, schema)
        assert table.columns["n"].isnan().tolist() == [False, True, False]
        assert table.columns["c"].tolist() == [0, 1, -1]
        assert table.columns["t"][:, 0].tolist() == [ord("x"), 0, 0]
    assert ClientTable.of({"n": [], "c": ["z"] * 0, "t": []}, schema).labels.tolist() == [0]
    other = ClientTable.of({"n": [Decimal("1.0")], "c": ["z"], "t": ["x"]}, schema)
    assert (other.columns["n"].tolist(), other.columns["c"].tolist()) == ([1.0], [2])


BAD_TABLES: Sequence[tuple[Mapping[str, Any], str]] = [
    ({"age": [1.0, "2"]}, "client ada: column 'age', row 0 is a str_ in a column of numbers"),
    ({"age": [None, "x"]}, "column 'age', row 1 is a str in a column of numbers"),
    ({"sex": ["f", "w"]}, "column 'sex', row 1 is 'w', which is not one of the known values f, m"),
    ({"dx": ["a", 3]}, "column 'dx', row 1 is a int in a column of texts"),
    ({"age": [1.0]}, "columns have different lengths"),
    ({"age": 3.0}, "column 'age' is a float; give one value a row"),
    ({"dx": "ab"}, "column 'dx' is a str; give one value a row"),
    ({"age": np.zeros((2, 2))}, "column 'age' has 2 dimensions"),
]


@pytest.mark.parametrize(("wrong", "said"), BAD_TABLES)
def test_values_that_do_not_fit_are_refused_with_their_place(
    wrong: Mapping[str, Any], said: str
) -> None:
    schema = plan_of({"kind": "count"}).columns
    table: dict[str, Any] = {
        "age": [1.0, 2.0],
        "bmi": [1, 2],
        "sex": ["f", "m"],
        "ward": [1, 2],
        "dx": ["", "a"],
    }
    ClientTable.of(table, schema)  # the control
    with pytest.raises(DataError, match=re.escape(said)):
        ClientTable.of(table | dict(wrong), schema, owner="ada")


def test_a_missing_column_or_an_infinite_number_without_a_range_is_refused() -> None:
    schema = plan_of({"kind": "count"}, columns={"age": {"kind": "number"}}).columns
    with pytest.raises(DataError, match="has no column 'age'; did you mean 'Age'"):
        ClientTable.of({"Age": [1.0]}, schema)
    with pytest.raises(DataError, match="row 1 is infinite, and the column has no range"):
        ClientTable.of({"age": [1.0, np.inf]}, schema)


def test_a_client_without_the_plans_columns_cannot_answer() -> None:
    plan = plan_of({"kind": "count"})
    query, labels = StatisticsQuery.of(plan), torch.ones(2, dtype=torch.int64)
    broadcast = query.broadcast(query.init())
    with pytest.raises(DataError, match="statistics need named columns"):
        query.answer(torch.zeros(2, 3), labels, broadcast=broadcast)
    with pytest.raises(DataError, match="the client has no column 'bmi'"):
        query.answer({"age": torch.zeros(2).double()}, labels, broadcast=broadcast)
    with pytest.raises(DataError, match=r"column 'age' is torch\.float32 of shape"):
        query.answer({"age": torch.zeros(2)}, labels, broadcast=broadcast)


def test_a_plan_is_plain_values_and_back() -> None:
    plan = plan_of(*ALL, max_examples=7)
    assert StatisticsPlan.of(json.loads(plan.to_json())) == plan


MEAN: dict[str, Any] = {"kind": "mean", "columns": ["age"]}
BAD_PLANS: Sequence[tuple[Mapping[str, Any], str]] = [
    ({"statistics": []}, "statistics is empty"),
    ({"statistics": "mean"}, "statistics is 'mean'; give a list of tables"),
    ({"statistics": ["mean"]}, "statistics[0] is 'mean'; give a table"),
    ({"columns": {}}, "statistics[0].columns has 'age', which is not one of the columns"),
    ({"columns": {}, "statistics": [{"kind": "count"}]}, "columns is empty"),
    ({"columns": []}, "columns is []; give a table"),
    ({"column": {}}, "the plan has the unknown key 'column'; did you mean 'columns'?"),
    ({"max_examples": 0}, "max_examples is 0; give a whole number >= 1"),
    ({"max_examples": True}, "max_examples is True; give a whole number >= 1"),
    ({"columns": {"age": {"kind": "date"}}}, "columns.age.kind is 'date'; give one of: number"),
    ({"columns": {"age": {"kind": "number", "low": 3}}}, "columns.age.low is 3 and high is None"),
    (
        {"columns": {"age": {"kind": "number", "low": "0", "high": 3}}},
        "columns.age.low is '0' and high is 3; give two finite numbers",
    ),
    ({"columns": {"age": {"kind": "category"}}}, "columns.age.values is missing"),
    ({"columns": {"age": {"kind": "category", "values": "f"}}}, "columns.age.values is 'f'; give"),
    (
        {"columns": {"age": {"kind": "category", "values": [1, "1"]}}},
        "columns.age.values has '1' twice",
    ),
    ({"columns": {"age": {"kind": "text", "width": 0}}}, "columns.age.width is 0; give"),
    ({"statistics": [{"kind": "means"}]}, "statistics[0].kind is 'means'; did you mean 'mean'?"),
    ({"statistics": [{"kind": "max"}]}, "which is no sum over clients, and one person decides it"),
    ({"statistics": [{"kind": "mean"}]}, "statistics[0].columns is empty"),
    ({"statistics": [MEAN | {"columns": "age"}]}, "statistics[0].columns is 'age'; give a list"),
    ({"statistics": [MEAN | {"columns": ["agee"]}]}, "has 'agee', which is not one of the columns"),
    ({"statistics": [MEAN | {"columns": ["sex"]}]}, "has 'sex', a category column, but mean takes"),
    ({"statistics": [MEAN | {"columns": ["age", "age"]}]}, "name each once"),
    ({"statistics": [MEAN, MEAN]}, "statistics[1] repeats statistics[0]"),
    (
        {
            "statistics": [
                MEAN | {"kind": "histogram", "edges": [1, 2], "threshold": 5},
                MEAN | {"kind": "quantiles", "levels": [0.5]},
            ]
        },
        "suppresses counts below 5, but statistics[1] (quantiles) counts 'age' as well",
    ),
    ({"statistics": [MEAN | {"weight": 0}]}, "statistics[0].weight is 0; give a number > 0"),
    ({"statistics": [MEAN | {"weight": "1"}]}, "statistics[0].weight is '1'; give a number"),
    ({"statistics": [MEAN | {"edges": [1]}]}, "statistics[0] has the unknown key 'edges'"),
    ({"statistics": [MEAN | {"kind": "histogram"}]}, "statistics[0].edges is missing"),
    (
        {"statistics": [MEAN | {"kind": "histogram", "edges": [1, 1]}]},
        "statistics[0].edges is [1, 1]; give two or more finite numbers, ascending",
    ),
    (
        {"statistics": [MEAN | {"kind": "quantiles", "levels": [1.5]}]},
        "statistics[0].levels is [1.5]; give shares from 0 to 1",
    ),
    (
        {"statistics": [MEAN | {"kind": "quantiles", "levels": [0.5], "num_rounds": 99}]},
        "more finely than numbers are",
    ),
    (
        {
            "columns": {"age": {"kind": "number"}},
            "statistics": [MEAN | {"kind": "quantiles", "levels": [0.5]}],
        },
        "column 'age' has no range to divide",
    ),
    ({"statistics": [MEAN | {"kind": "correlation"}]}, "name two columns or more"),
    (
        {"statistics": [{"kind": "frequent", "columns": ["dx", "sex"], "threshold": 3}]},
        "has 'sex', a category column, but frequent takes columns of one kind: category or text",
    ),
    (
        {"statistics": [{"kind": "frequent", "columns": ["dx"]}]},
        "statistics[0].threshold is missing",
    ),
    (
        {"statistics": [{"kind": "groups", "columns": ["sex"], "threshold": -1}]},
        "statistics[0].threshold is -1; give",
    ),
    (
        {
            "statistics": [
                {"kind": "groups", "columns": ["sex", "ward"], "threshold": 5},
                {"kind": "frequent", "columns": ["ward"], "threshold": 0},
            ]
        },
        "suppresses counts below 5, but statistics[1] (frequent) counts 'ward' as well",
    ),
]


@pytest.mark.parametrize(("changes", "said"), BAD_PLANS)
def test_a_plan_that_cannot_be_answered_is_refused(changes: Mapping[str, Any], said: str) -> None:
    values = {"columns": COLUMNS, "statistics": [MEAN]}
    StatisticsPlan.of(values)  # the control
    with pytest.raises(ConfigError, match=re.escape(said)):
        StatisticsPlan.of(values | dict(changes))


def test_numbers_whose_squares_lose_digits_need_a_range() -> None:
    times = {"age": [1.7e9, 1.7e9 + 1.0, 1.7e9 + 3.0]}
    with pytest.raises(DataError, match="column 'age' has numbers so large that their squares"):
        answer(plan_of(MEAN, columns={"age": {"kind": "number"}}), [times])
    ranged = {"age": {"kind": "number", "low": 1.6e9, "high": 1.8e9}}
    found = values_of(answer(plan_of(MEAN, columns=ranged), [times]))
    assert found[("age", "mean")] == pytest.approx(np.mean(times["age"]), rel=1e-15)


def test_without_a_bound_there_is_no_privacy() -> None:
    with pytest.raises(ConfigError, match="max_examples is missing, and privacy needs"):
        plan_of(MEAN).require_bound(reason="privacy")
    plan_of(MEAN, max_examples=5).require_bound(reason="privacy")  # the control
    plan = plan_of(MEAN, columns={"age": {"kind": "number"}}, max_examples=5)
    with pytest.raises(ConfigError, match=re.escape("columns.age has no low and high, but")):
        plan.require_bound(reason="privacy")


def test_a_client_refuses_a_plan_that_it_cannot_read() -> None:
    """Such as one of a later version, with a kind of statistic that it does not know."""
    known = settings_of(StatisticsQuery.of(plan_of(MEAN)))
    update_from(known, known=[StatisticsQuery])  # the control
    newer = {**known, "plan": str(known["plan"]).replace('"mean"', '"skewness"')}
    with pytest.raises(SettingsRefused, match=r"plan: statistics\[0\]\.kind is 'skewness'"):
        update_from(newer, known=[StatisticsQuery])
    with pytest.raises(ValueError, match="plan: it is not JSON"):
        StatisticsQuery(plan="{")
