"""Statistics in whole runs: secure sums, noise and its stated error, charges, resume, results."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from torch import nn

import fedlearn as fl
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import BudgetExhausted, ConfigError, DataError
from fedlearn.privacy.gaussian import gaussian_epsilon
from fedlearn.statistics import ClientTable, StatisticsPlan
from fedlearn.statistics.suppression import suppress_small_cells, suppress_small_columns
from tests.e2e.noise import has_scale

pytestmark = pytest.mark.usefixtures("ready_store")

COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "age": {"kind": "number", "low": 0, "high": 100},
    "bmi": {"kind": "number", "low": 10, "high": 60},
    "sex": {"kind": "category", "values": ["f", "m"], "other": "other"},
    "dx": {"kind": "text", "width": 5},
}
ONE_ROUND: Sequence[Mapping[str, Any]] = [
    {"kind": "count", "columns": ["age"]},
    {"kind": "missing", "columns": ["age", "sex"]},
    {"kind": "mean", "columns": ["age", "bmi"]},
    {"kind": "histogram", "columns": ["age"], "edges": [0, 40, 60, 100]},
    {"kind": "correlation", "columns": ["age", "bmi"]},
    {"kind": "groups", "columns": ["sex"], "threshold": 0},
]
SEVERAL: Sequence[Mapping[str, Any]] = [
    {
        "kind": "quantiles",
        "columns": ["age"],
        "levels": [0.1, 0.5],
        "branches": 32,
        "num_rounds": 3,
    },
    {"kind": "frequent", "columns": ["dx"], "threshold": 5, "most": 4},
]
MODULAR = {"mode": "complete", "simulate_as": "modular_sum"}


def draw_tables(num_clients: int = 6) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(1)
    tables = {}
    for client in range(num_clients):
        n = 20 + 5 * client
        age = rng.normal(50.0, 15.0, n).round().clip(0.0, 100.0)
        tables[f"ward {client}, <ü>"] = pd.DataFrame(
            {
                "age": np.where(rng.random(n) < 0.1, np.nan, age),
                "bmi": (20.0 + 0.1 * age + rng.normal(0.0, 2.0, n)).clip(10.0, 60.0),
                "sex": rng.choice(np.array(["f", "m", None], object), n),
                "dx": rng.choice(["übel", "üb", "Hust"], n),
            }
        )
    return tables


def plan_of(*statistics: Mapping[str, Any], max_examples: int | None = 50) -> dict[str, Any]:
    found: dict[str, Any] = {"columns": COLUMNS, "statistics": statistics}
    return found if max_examples is None else found | {"max_examples": max_examples}


def pooled() -> pd.DataFrame:
    return pd.concat(draw_tables().values(), ignore_index=True)


def values_of(result: fl.StatisticsResult) -> dict[tuple[str, str, str], float | None]:
    return {(row.statistic, row.column, row.item): row.value for row in result.rows}


WAYS: Sequence[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"engine": {"transport": "memory"}}, id="sessions", marks=pytest.mark.slow),
    pytest.param({"secure_aggregation": MODULAR}, id="modular"),
    pytest.param(
        {"secure_aggregation": {"mode": "complete"}, "engine": {"transport": "memory"}},
        id="protocol",
        marks=pytest.mark.slow,
    ),
    pytest.param({"engine": {"num_workers": 2}}, id="workers", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", WAYS)
def test_statistics_are_those_of_the_pooled_tables(way: dict[str, Any]) -> None:
    """Counts are whole and exact, also from secure sums, which round."""
    result = fl.run_statistics(plan_of(*ONE_ROUND, *SEVERAL), draw_tables(), **way)
    found, frame = values_of(result), pooled()
    rtol = 1e-5 if "secure_aggregation" in way else 1e-11
    assert result.num_clients == 6
    assert result.num_examples == len(frame)
    assert result.charge is None
    assert not any(row.standard_error is not None for row in result.rows)
    age, ages = frame["age"], frame["age"].dropna()
    exact = {
        ("count", "", "rows"): len(frame),
        ("count", "age", "values"): age.count(),
        ("missing", "age", "missing"): age.isna().sum(),
        ("missing", "sex", "missing"): frame["sex"].isna().sum(),
        ("histogram", "age", "[0, 40)"): (ages < 40).sum(),
        ("histogram", "age", "[60, 100]"): (ages >= 60).sum(),
        ("groups", "sex", "f"): (frame["sex"] == "f").sum(),
    }
    exact |= {("frequent", "dx", text): n for text, n in frame["dx"].value_counts().items()}
    assert {place: found[place] for place in exact} == exact
    near = {
        ("mean", "age", "mean"): age.mean(),
        ("mean", "age", "variance"): age.var(ddof=0),
        ("mean", "bmi", "std"): frame["bmi"].std(ddof=0),
        ("correlation", "age", "bmi"): frame[["age", "bmi"]].dropna().corr().iloc[0, 1],
    }
    assert {place: found[place] for place in near} == pytest.approx(near, rel=rtol)
    median = result["quantiles", "age"]["0.5"]
    assert median.value == pytest.approx(np.quantile(ages, 0.5, method="inverted_cdf"), abs=0.002)


def test_one_client_is_enough() -> None:
    (name, table), *_ = draw_tables().items()
    result = fl.run_statistics(plan_of(*ONE_ROUND, max_examples=None), {name: table})
    assert result.num_clients == 1
    assert result["mean", "age"]["mean"].value == pytest.approx(table["age"].mean())


# ---- Privacy ----------------------------------------------------------------------------------

#: A client has 50 rows, and noise for a client as much as for two rows.
CLIENTS: Mapping[str, Any] = {"unit": "client", "noise_multiplier": 0.04}
ROWS: Mapping[str, Any] = {"unit": "example", "noise_multiplier": 2.0}
SECURE: Mapping[str, Any] = {"secure_aggregation": MODULAR}
PRIVATE: Sequence[Any] = [
    pytest.param({"mode": "central", **CLIENTS}, {}, id="central"),
    pytest.param({"mode": "central", **ROWS}, {}, id="central, rows"),
    pytest.param({"mode": "distributed", **CLIENTS}, SECURE, id="distributed"),
    pytest.param({"mode": "distributed", **ROWS}, SECURE, id="distributed, rows"),
]
SEEDS: Sequence[Any] = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def draw_many() -> list[Mapping[str, Any]]:
    """Return the tables of enough clients for noise not to drown a person's correlation."""
    rng = np.random.default_rng(2)
    age = rng.normal(50.0, 20.0, (40, 50)).clip(0.0, 100.0)
    bmi = (10.0 + 0.4 * age + rng.normal(0.0, 6.0, age.shape)).clip(10.0, 60.0)
    sex = rng.choice(["f", "m"], age.shape)
    dx = rng.choice(["übel", "üb", "Hust"], age.shape)
    return [
        {"age": age[c], "bmi": bmi[c], "sex": sex[c], "dx": dx[c].tolist()} for c in range(len(age))
    ]


def private(mode: str, multiplier: float, **more: Any) -> dict[str, Any]:
    return {"mode": mode, "noise_multiplier": multiplier, "target_delta": 1e-3, **more}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("noise", "way"), PRIVATE)
def test_noise_is_as_large_as_stated(noise: dict[str, Any], way: dict[str, Any], seed: int) -> None:
    """Errors in units of the stated ones are about 1; no result is far outside."""
    tables = draw_many()
    plan = plan_of(*ONE_ROUND)
    truth = values_of(fl.run_statistics(plan, tables))
    errors = list[float]()
    privacy = {**noise, "target_delta": 1e-3, "reproducible": True}
    result = fl.run_statistics(plan, tables, seed=seed, privacy=privacy, **way)
    assert result.charge is None, "noise from a public seed promises nothing"
    for row in result.rows:
        true = truth[(row.statistic, row.column, row.item)]
        assert true is not None
        assert row.value is not None, row
        assert row.low is not None
        assert row.high is not None
        if row.standard_error is not None:
            errors.append((row.value - true) / row.standard_error)
        else:
            assert row.item == "std"
            assert row.low < row.value < row.high
    assert max(map(abs, errors)) < 4.5
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("noise", "way"), PRIVATE)
def test_quantiles_and_texts_with_noise_are_within_their_stated_error(
    noise: dict[str, Any], way: dict[str, Any], seed: int
) -> None:
    tables = draw_many()
    ages = np.concatenate([each["age"] for each in tables])
    counts = pd.Series([text for each in tables for text in each["dx"]]).value_counts().to_dict()
    privacy = {**noise, "target_delta": 1e-3, "reproducible": True}
    result = fl.run_statistics(plan_of(*SEVERAL), tables, seed=seed, privacy=privacy, **way)
    for level, row in result["quantiles", "age"].items():
        assert row.rank_error is not None
        assert row.value is not None
        assert 0.0 < row.rank_error < 0.2
        assert abs((ages <= row.value).mean() - float(level)) <= row.rank_error
    found = result["frequent", "dx"]
    assert found.keys() == counts.keys(), "no text that is only noise"
    for text, row in found.items():
        assert row.value is not None
        assert row.standard_error is not None
        assert 0.0 < abs(row.value - counts[text]) < 4.5 * row.standard_error


@pytest.mark.parametrize(
    ("mode", "way", "num_clients"),
    [
        pytest.param("central", {"privacy": {"reproducible": True}}, 3, id="central"),
        pytest.param(
            "distributed",
            {"secure_aggregation": MODULAR, "privacy": {"reproducible": True}},
            12,
            id="distributed",
        ),
        pytest.param(
            "distributed",
            {"secure_aggregation": {"mode": "complete"}, "engine": {"transport": "memory"}},
            8,
            id="protocol",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_stated_error_is_that_of_many_sums(
    mode: str, way: dict[str, Any], num_clients: int
) -> None:
    """Of empty bins; the control has a tenth less."""
    asked = {"kind": "histogram", "columns": ["age"], "edges": list(range(5000))}
    nobody = {name: [None] * 3 for name in COLUMNS}
    settings = {**way, "privacy": private(mode, 1.0, **way.get("privacy", {}))}
    result = fl.run_statistics(plan_of(ONE_ROUND[0], asked), [nobody] * num_clients, **settings)
    bins = [row for row in result.rows if row.statistic == "histogram"]
    noise = torch.tensor([row.value for row in bins], dtype=torch.float64)
    assert bins[0].standard_error is not None
    assert has_scale(noise, bins[0].standard_error)
    assert not has_scale(noise, 0.9 * bins[0].standard_error), "the control"


def test_a_plan_of_one_round_is_one_charge_to_the_ledger_and_a_second_run_adds_to_it() -> None:
    plan, tables = plan_of(*ONE_ROUND), draw_tables()
    first = fl.run_statistics(plan, tables, privacy=private("central", 2.0))
    assert first.charge is not None
    assert first.charge.num_rounds == 1
    assert first.charge.hidden == "one user added or removed"
    again = fl.run_statistics(plan, tables, privacy=private("central", 2.0))
    assert again.charge is not None
    assert again.charge.num_rounds == 1
    assert again.charge.epsilon > first.charge.epsilon, "both are in the same ledger"
    assert "1 round charged" in str(again)


@pytest.mark.parametrize(("mode", "way"), [("central", {}), ("distributed", SECURE)])
def test_a_row_costs_what_one_gaussian_does_and_is_not_added_to_the_costs_of_clients(
    mode: str, way: dict[str, Any]
) -> None:
    plan, tables = plan_of(*ONE_ROUND), draw_tables()
    rows: dict[str, Any] = private(mode, 2.0, unit="example", population="ward 5")
    found = fl.run_statistics(plan, tables, privacy=rows, **way)
    assert found.charge is not None
    assert found.charge.hidden == "one row added or removed"
    assert found.charge.num_rounds == 1
    assert found.charge.epsilon == pytest.approx(gaussian_epsilon(1.0 / 2.0, 1e-3), rel=1e-6)
    with pytest.raises(ConfigError, match="no common guarantee; use the same sampling, mode and"):
        fl.run_statistics(plan, tables, privacy=rows | {"unit": "client"}, **way)


@cache
def compose_losses(multiplier: float, num_rounds: int) -> float:
    """Return the epsilon of rounds of one Gaussian each, by their privacy losses, to 1e-6."""
    one = privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, value_discretization_interval=1e-3
    )
    return float(one.self_compose(num_rounds).get_epsilon_for_delta(1e-3))


@pytest.mark.parametrize(
    ("noise", "way", "distance"),
    [
        pytest.param({"mode": "central", "unit": "client"}, {}, 1.0, id="client added"),
        pytest.param({"mode": "central", "unit": "example"}, {}, 1.0, id="row added"),
        pytest.param({"mode": "distributed", "unit": "client"}, SECURE, 2.0, id="client replaced"),
        pytest.param({"mode": "distributed", "unit": "example"}, SECURE, 1.0, id="shares, rows"),
    ],
)
def test_two_other_accountants_agree_with_the_charge_of_a_plan(
    noise: dict[str, Any], way: dict[str, Any], distance: float
) -> None:
    """Privacy losses say the same, and Rényi divergences, which are looser, a little more.

    Each round is one Gaussian, and a client or row moves its sums by at most ``distance`` bounds.
    The control: one round more, or noise a tenth smaller, is told apart.
    """
    plan, tables = plan_of(*ONE_ROUND, SEVERAL[0]), draw_many()
    privacy = {**noise, "noise_multiplier": 3.0, "target_delta": 1e-3}
    found = fl.run_statistics(plan, tables, privacy=privacy, **way)
    assert found.charge is not None
    assert found.charge.num_rounds == 3

    accountant = RdpAccountant().compose(GaussianDpEvent(3.0 / distance), 3)
    assert found.charge.epsilon == pytest.approx(compose_losses(3.0 / distance, 3), rel=1e-3)
    assert 1.0 <= accountant.get_epsilon(1e-3) / found.charge.epsilon < 1.15
    assert found.charge.epsilon != pytest.approx(compose_losses(3.0 / distance, 4), rel=0.05)
    assert found.charge.epsilon != pytest.approx(compose_losses(2.7 / distance, 3), rel=0.05)


def test_no_more_than_sums_over_rows_can_hide_one() -> None:
    """Neither the numbers of rows that clients have, nor a training or another query."""
    rows = private("central", 2.0, unit="example")
    plan, tables = plan_of(*ONE_ROUND), draw_tables()

    class Seen:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
            counted.update(each.num_examples for each in record.participations)

    counted = set[int]()
    fl.run_statistics(plan, tables, privacy=rows, callbacks=[Seen()])
    assert counted == {1}
    fl.run_statistics(plan, tables, callbacks=[Seen()])
    assert len(counted) > 2, "the control"
    x, y = torch.zeros(9, 2), torch.zeros(9).long()
    data = fl.from_arrays(x, y, partition=fl.Iid(3), test=(x, y), seed=0)
    settings: Any = {"num_rounds": 1, "cohort": {"num_wanted": 3}}
    moments = fl.Moments(num_features=2, max_examples=9, max_norm=1.0)
    with pytest.raises(ConfigError, match="declares no example_bound"):
        fl.simulate(None, data, moments, privacy=rows | {"clip_norm": 1.0}, **settings)
    with pytest.raises(ConfigError, match=r'set privacy\.mode to "example"'):
        fl.simulate(
            lambda: nn.Linear(2, 2),
            data,
            fl.FedAvg(
                fl.LocalSgd(epochs=1, batch_size=3, learning_rate=0.1), weight_by_examples=False
            ),
            privacy=rows | {"clip_norm": 1.0},
            **settings,
        )


def test_a_plan_that_the_budget_cannot_pay_to_its_end_is_not_begun() -> None:
    """With the first two of five rounds, the budget would be gone and quantiles unknown."""
    plan, tables = plan_of(*ONE_ROUND, *SEVERAL), draw_tables()
    privacy = private("central", 1.2, epsilon=4.0)
    with pytest.raises(ConfigError, match="enough for 2 of the 5 rounds that the query needs"):
        fl.run_statistics(plan, tables, privacy=privacy)
    done = fl.run_statistics(plan_of(*ONE_ROUND), tables, privacy=privacy)  # the control
    assert done.charge is not None
    assert done.charge.num_rounds == 1
    assert done.charge.epsilon < 4.0, "nothing was charged before"


def test_a_run_that_is_ended_early_says_what_is_not_finished() -> None:
    class End:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> bool:
            return True

    result = fl.run_statistics(plan_of(*ONE_ROUND, *SEVERAL), draw_tables(), callbacks=[End()])
    assert result.num_unfinished == 2
    assert "2 statistics unfinished" in str(result)
    assert fl.StatisticsResult.from_json(result.to_json()) == result
    whole = fl.run_statistics(plan_of(*ONE_ROUND, *SEVERAL), draw_tables())
    assert whole.num_unfinished == 0
    assert result["mean", "age"] == whole["mean", "age"]


def test_rounds_that_nothing_needs_are_neither_asked_nor_charged() -> None:
    """Noise drowns all texts in the first of five rounds; the table says so."""
    plan = plan_of({"kind": "frequent", "columns": ["dx"], "threshold": 1000})
    result = fl.run_statistics(plan, draw_tables(), privacy=private("central", 1.0))
    assert result.charge is not None
    assert result.charge.num_rounds == 1
    (row,) = result.rows
    assert row.value is None
    assert row.note == "none reaches the threshold of 1000 rows"
    assert ("frequent", "dx", "", "-", "", row.note) in result.table()
    assert fl.StatisticsResult.from_json(result.to_json()) == result


def test_noise_that_drowns_a_value_leaves_it_undefined() -> None:
    result = fl.run_statistics(
        plan_of(*ONE_ROUND, SEVERAL[0]),
        draw_tables(2),
        privacy=private("central", 20.0, reproducible=True),
    )
    for place, item in ((("mean", "age"), "mean"), (("quantiles", "age"), "0.5")):
        assert result[place][item].value is None
        assert result[place][item].note == "too few values for the noise"


@pytest.mark.parametrize("name", ["privacy", "secure_aggregation"])
def test_without_a_bound_there_are_neither_noise_nor_secure_sums(name: str) -> None:
    table = private("central", 1.0) if name == "privacy" else MODULAR
    settings: Any = {name: table}
    with pytest.raises(ConfigError, match=f"max_examples is missing, and {name.replace('_', ' ')}"):
        fl.run_statistics(plan_of(*ONE_ROUND, max_examples=None), draw_tables(), **settings)


# ---- Runs and results -------------------------------------------------------------------------


class Crash:
    """Ends the process of a run after some rounds, once."""

    def __init__(self, after: int) -> None:
        self.after: int | None = after

    def __repr__(self) -> str:
        return "Crash()"

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        if record.round_num + 1 == self.after:
            self.after = None
            raise KeyboardInterrupt


def test_a_run_resumes_to_the_same_result() -> None:
    plan, tables = plan_of(*ONE_ROUND, *SEVERAL), draw_tables()
    settings: Any = {"store": {"checkpoint_every_s": 0.001}, "callbacks": [Crash(2)]}
    with pytest.raises(KeyboardInterrupt):
        fl.run_statistics(plan, tables, name="first", **settings)
    resumed = fl.run_statistics(plan, tables, resume="first", **settings)
    assert resumed.rows == fl.run_statistics(plan, tables).rows


def test_a_result_is_json_a_table_and_html() -> None:
    plan = plan_of(ONE_ROUND[0], {"kind": "frequent", "columns": ["dx"], "threshold": 5})
    tables = draw_tables() | {
        "x": pd.DataFrame({"age": [1.0] * 9, "bmi": 20, "sex": "f", "dx": "<b>"})
    }
    result = fl.run_statistics(plan, tables)
    assert fl.StatisticsResult.from_json(result.to_json()) == result
    header, *rows = result.table()
    assert header == ("statistic", "column", "item", "value", "±", "note")
    assert ("frequent", "dx", "<b>", "9", "", "") in rows
    text = str(result)
    assert text.endswith(f"7 clients, {len(pooled()) + 9} examples")
    assert "<b>" in text
    assert "&lt;b&gt;" in result._repr_html_()
    assert "<b>" not in result._repr_html_()
    with pytest.raises(KeyError, match=r"there is no \('mean', 'age'\); there are \('count', ''\)"):
        _ = result["mean", "age"]


@pytest.mark.parametrize("way", WAYS)
def test_distinct_values_are_counted_over_all_clients(way: dict[str, Any]) -> None:
    """Numbers, known values and texts; values that several clients have count once."""
    asked = {"kind": "distinct", "columns": ["age", "bmi", "sex", "dx"]}
    found, frame = fl.run_statistics(plan_of(asked), draw_tables(), **way), pooled()
    for name in ("age", "sex", "dx"):  # few values, of which no two share a bucket
        assert found["distinct", name]["distinct"].value == frame[name].nunique()
    bmi, count = found["distinct", "bmi"]["distinct"], frame["bmi"].nunique()
    assert bmi.low is not None
    assert bmi.high is not None
    assert bmi.low <= count <= bmi.high
    assert bmi.high - bmi.low < 0.1 * count
    alone = [each["age"].nunique() for each in draw_tables().values()]
    assert sum(alone) > frame["age"].nunique(), "the control: a sum would be larger"


def test_the_interval_of_distinct_values_has_the_number() -> None:
    """In about 95 of 100 cases, with more values than buckets and with fewer."""
    for num_values in (300, 900):
        num_inside = 0
        for case in range(100):
            values = np.random.default_rng(case).normal(size=num_values)
            columns = {"x": {"kind": "number"}}
            asked = {"kind": "distinct", "columns": ["x"], "num_buckets": 512}
            plan = StatisticsPlan.of({"columns": columns, "statistics": [asked]})
            table, [statistic] = ClientTable.of({"x": values}, plan.columns), plan.statistics
            state = statistic.step(
                statistic.measure(table, plan.columns, {}), {}, schema=plan.columns, round_num=0
            )
            assert state["sums"].shape == (1,), "which buckets they are is not kept"
            [row] = statistic.rows(state, schema=plan.columns, sigmas=None)
            assert row.low is not None
            assert row.high is not None
            num_inside += row.low <= num_values <= row.high
        assert 88 <= num_inside <= 100


def test_distinct_values_are_undefined_or_refused_where_nothing_can_be_said() -> None:
    full = {"kind": "distinct", "columns": ["age"], "num_buckets": 4}
    row = fl.run_statistics(plan_of(full), draw_tables())["distinct", "age"]["distinct"]
    assert (row.value, row.note) == (None, "all buckets have values; raise num_buckets")
    privacy = {"mode": "central", "noise_multiplier": 1.0, "target_delta": 1e-2}
    with pytest.raises(ConfigError, match=r"statistics\[0\] \(distinct\) cannot be private"):
        fl.run_statistics(plan_of(full), draw_tables(), privacy=privacy)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[4]])
def test_numbers_of_single_clients_are_those_of_their_tables(way: dict[str, Any]) -> None:
    """Next to the same totals, which also take further rounds, and by the clients' names."""
    tables, asked = draw_tables(), plan_of(*ONE_ROUND, *SEVERAL)
    result = fl.run_statistics(asked | {"per_client": True}, tables, **way)
    assert values_of(result) == pytest.approx(values_of(fl.run_statistics(asked, tables, **way)))
    assert list(result.clients) == list(tables)
    for name, frame in tables.items():
        age = frame["age"]
        assert result.of_client(name, ("mean", "age"))["mean"].value == pytest.approx(age.mean())
        assert result.of_client(name, ("count", ""))["rows"].value == len(frame)
        assert result.of_client(name, ("missing", "age"))["missing"].value == age.isna().sum()
        bins = result.of_client(name, ("histogram", "age"))
        assert bins["[0, 40)"].value == (age < 40).sum()
        with pytest.raises(KeyError, match="there is no"):
            result.of_client(name, ("quantiles", "bmi"))  # its rounds follow the total's
    assert fl.StatisticsResult.from_json(result.to_json()) == result
    header, *rows = result.client_table()
    assert header[3:] == tuple(map(replace_unprintable, tables))
    assert rows[0] == ("count", "", "rows", *(str(len(each)) for each in tables.values()))
    assert fl.run_statistics(asked, tables).clients == {}, "the control"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"secure_aggregation": MODULAR}, "secure aggregation hides what single clients have"),
        (
            {"privacy": {"mode": "central", "noise_multiplier": 1.0, "target_delta": 1e-2}},
            "privacy hides what single clients have",
        ),
    ],
)
def test_what_hides_single_clients_refuses_their_numbers(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        fl.run_statistics(plan_of(*ONE_ROUND) | {"per_client": True}, draw_tables(), **settings)


def test_no_small_cell_of_a_client_follows_from_what_is_shown() -> None:
    """By linear algebra, from totals, the clients' numbers of rows, and cells that are shown.

    The control: with the cells of each client suppressed on their own, some follow.
    """
    rng, threshold, num_found = np.random.default_rng(0), 5, 0
    for _ in range(300):
        shape = (int(rng.integers(2, 5)), int(rng.integers(2, 6)))
        counts = rng.poisson(rng.choice([0.5, 4.0, 12.0], shape)).astype(float)
        total = suppress_small_cells(torch.tensor(counts.sum(0)), threshold)
        shown = suppress_small_columns(
            torch.tensor(counts), threshold, is_hidden=total.isnan()
        ).numpy()
        own = np.stack(
            [suppress_small_cells(torch.tensor(row), threshold).numpy() for row in counts]
        )
        assert np.array_equal(counts[~np.isnan(shown)], shown[~np.isnan(shown)])
        assert not find_small(counts, shown, total.numpy(), threshold)
        num_found += find_small(counts, own, total.numpy(), threshold)
    assert num_found > 0


def find_small(counts: Any, shown: Any, total: Any, threshold: int) -> int:
    """Count the cells in 1 to threshold - 1 that all solutions of the known sums agree on."""
    cells, totals = np.isnan(shown), np.isnan(total)
    for row in range(len(counts)):  # counts that add up to zero are all zero
        if counts[row][cells[row]].sum() == 0:
            cells[row] = False
    places = [tuple(each) for each in np.argwhere(cells)]
    sums = [[place[0] == row for place in places] for row in range(len(counts))]
    sums += [[place[1] == column for place in places] for column in np.flatnonzero(~totals)]
    sums += [[bool(totals[place[1]]) for place in places]]
    known = np.array(sums, float).reshape(len(sums), len(places))
    rank = np.linalg.matrix_rank(known) if places else 0
    num_shown = int(((shown > 0) & (shown < threshold)).sum())
    return num_shown + sum(
        bool(0 < counts[place] < threshold)
        and int(np.linalg.matrix_rank(np.vstack([known, np.eye(len(places))[number]]))) == rank
        for number, place in enumerate(places)
    )


def test_suppressed_counts_are_counted_and_shown_as_such() -> None:
    tables = {
        "a": {"age": [1.0] * 12, "bmi": [20.0] * 12, "sex": ["f"] * 9 + ["m"] * 3, "dx": [""] * 12}
    }
    asked = {"kind": "groups", "columns": ["sex"], "threshold": 5}
    result = fl.run_statistics(plan_of(asked), tables)
    assert result.num_suppressed == 2
    assert "2 counts suppressed" in str(result)
    assert [row[3] for row in result.table()[1:]] == ["suppressed", "suppressed", "0"]
    assert result.num_examples is None, "the plan does not ask for it"


def test_tables_of_clients_may_be_made_before() -> None:
    plan = StatisticsPlan.of(plan_of(*ONE_ROUND))
    made = {name: ClientTable.of(each, plan.columns) for name, each in draw_tables().items()}
    assert fl.run_statistics(plan, made).rows == fl.run_statistics(plan, draw_tables()).rows


NOBODY: Mapping[str, Any] = {name: [] for name in COLUMNS}
BAD_CALLS: Sequence[tuple[Any, Mapping[str, Any], type[Exception], str]] = [
    ({}, {}, DataError, "there are no tables"),
    ("a.csv", {}, ConfigError, "tables is a str; give the clients' tables by name"),
    ({"a": [1, 2]}, {}, ConfigError, "the table of client a is a list; give a data frame"),
    ({"a": {}}, {}, DataError, "client a: the table has no column 'age'; it has none"),
    ({1: NOBODY, "1": NOBODY}, {}, ConfigError, "two clients have the name 1"),
    (None, {"num_rounds": 3}, ConfigError, "num_rounds is given, but all clients take part"),
    (None, {"centralized": True}, ConfigError, "centralized is given, but all clients take part"),
    (None, {"cohort": {"num_wanted": 2}}, ConfigError, "cohort is given, but all clients"),
]


@pytest.mark.parametrize(("tables", "settings", "error", "said"), BAD_CALLS)
def test_a_call_that_cannot_be_answered_is_refused(
    tables: Any, settings: Mapping[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        fl.run_statistics(
            plan_of(*ONE_ROUND), draw_tables() if tables is None else tables, **settings
        )


# ---- One ledger for statistics and training ---------------------------------------------------

#: What hides clients in both, and what hides rows in both: by mode of the training.
SHARED: Sequence[Any] = [
    pytest.param({"mode": "central"}, {"mode": "central"}, id="clients"),
    pytest.param({"mode": "central", "unit": "example"}, {"mode": "example"}, id="rows"),
]


def train(privacy: Mapping[str, Any], *, num_rounds: int) -> fl.Run:
    tables = draw_tables()
    sizes = [len(each) for each in tables.values()]
    x = torch.linspace(0.0, 1.0, 2 * sum(sizes)).view(-1, 2)
    y, groups = torch.arange(len(x)) % 2, np.repeat(np.arange(len(sizes)), sizes)
    return fl.simulate(
        lambda: nn.Linear(2, 2),
        fl.from_arrays(x, y, groups=groups, partition=fl.Natural(), test=(x, y), seed=0),
        fl.FedAvg(
            fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1), weight_by_examples=False
        ),
        privacy={"clip_norm": 1.0, **privacy},
        num_rounds=num_rounds,
        cohort={"num_wanted": len(sizes)},
        evaluation={"clients": 0},
        engine={"executor": "sequential"},  # to choose one takes longer than to train
        progress=False,
    )


@pytest.mark.parametrize(("of_statistics", "of_training"), SHARED)
def test_statistics_and_trainings_of_one_population_share_its_budget(
    of_statistics: Mapping[str, Any], of_training: Mapping[str, Any]
) -> None:
    """The budget is enough for two rounds, whoever spends them, and not for three."""
    multiplier = {"target_delta": 1e-3, "noise_multiplier": 2.0, "epsilon": 2.3}
    asking, training = {**of_statistics, **multiplier}, {**of_training, **multiplier}
    plan, tables = plan_of(*ONE_ROUND), draw_tables()
    ward: dict[str, Any] = {"population": "ward 5"}
    first = fl.run_statistics(plan, tables, privacy=asking | ward)
    assert first.charge is not None
    with pytest.raises(BudgetExhausted, match="2 rounds are charged"):
        train(training | ward, num_rounds=3)
    with pytest.raises(ConfigError, match="enough for 0 of the 1 rounds that the query needs"):
        fl.run_statistics(plan, tables, privacy=asking | ward)
    ward = {"population": "ward 6"}
    trained = train(training | ward, num_rounds=2)
    assert trained.privacy is not None
    assert trained.privacy.num_own == 2, "the control: nothing was spent before"
    with pytest.raises(ConfigError, match="enough for 0 of the 1 rounds that the query needs"):
        fl.run_statistics(plan, tables, privacy=asking | ward)
