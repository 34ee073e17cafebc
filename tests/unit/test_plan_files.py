"""Plan files of statistics, and ``fedlearn statistics``."""

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.cli.app import main
from fedlearn.client import TableTrainer, TorchTrainer
from fedlearn.config import load, load_serving
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, Reply, Request, TrainReply, TrainRequest
from fedlearn.errors import ConfigError, DataError
from fedlearn.session.session import ClientSession
from fedlearn.statistics import StatisticsPlan, StatisticsQuery
from fedlearn.training.table_trainer import read_tables
from fedlearn.training.trainer import LocalTrainer

SCRIPT = "<script>alert(1)</script>, $x$"
#: Sites with a comma and an umlaut in their names; one has no rows.
SITES: Mapping[str, pd.DataFrame] = {
    "aachen": pd.DataFrame(
        {"age": [31.0, np.nan, 47.0], "ward": ["1", "2", "2"], "note": ["flu", None, SCRIPT]}
    ),
    "leer": pd.DataFrame({"age": [], "ward": [], "note": []}),
    "zürich, süd": pd.DataFrame({"age": [60.0, 70.0], "ward": ["1", None], "note": ["flu", "flu"]}),
}
TABLES = """
[columns.age]
kind = "number"
low = 0
high = 120

[columns.ward]
kind = "category"
values = ["1", "2"]

[columns.note]
kind = "text"
width = 32
"""
PLAN = """
[[statistics]]
kind = "count"
columns = ["age"]

[[statistics]]
kind = "mean"
columns = ["age"]

[[statistics]]
kind = "histogram"
columns = ["age"]
edges = [0, 40, 80]

[[statistics]]
kind = "frequent"
columns = ["note"]
threshold = 1

[[statistics]]
kind = "groups"
columns = ["ward"]
threshold = 1
"""
CSV = '[data]\nsource = "csv"\npath = "sites"\n'
OWN = '[data]\nsource = "python"\nfactory = "own.py:read"\nargs = {offset = 0}\n'
OWN_CODE = """
import pandas as pd

CALLS = []


def read(offset):
    frame = pd.read_csv("all.csv", dtype={"ward": str})
    return {name: part for name, part in frame.groupby("site")} | {"leer": frame[:0]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the sites' files, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sites").mkdir()
    for name, table in SITES.items():
        table.to_csv(tmp_path / "sites" / f"{name}.csv", index=False, sep=";")
    pd.concat([table.assign(site=name) for name, table in SITES.items()]).to_csv(
        "all.csv", index=False, quoting=csv.QUOTE_NONNUMERIC
    )
    (tmp_path / "own.py").write_text(OWN_CODE)
    return tmp_path


def write(*parts: str, name: str = "plan.toml") -> str:
    Path(name).write_text("\n".join(["max_examples = 10", *parts]))
    return name


def compute(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["statistics", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def values_of(result: Any) -> dict[tuple[str, str, str], float | None]:
    return {
        (each["statistic"], each["column"], each["item"]): each["value"] for each in result["rows"]
    }


def require_pooled(result: Any, *, atol: float = 1e-9) -> None:
    pooled, found = pd.concat(SITES.values()), values_of(result)
    assert result["num_clients"] == 3
    expected = {
        ("count", "", "rows"): 5,
        ("count", "age", "values"): 4,
        ("mean", "age", "mean"): pooled.age.mean(),
        ("mean", "age", "variance"): pooled.age.var(ddof=0),
        ("histogram", "age", "[40, 80]"): 3,
        ("frequent", "note", "flu"): 3,
        ("frequent", "note", SCRIPT): 1,
        ("groups", "ward", "1"): 2,
    }
    for place, value in expected.items():
        assert found[place] == pytest.approx(value, abs=atol), place


SECURE = '[secure_aggregation]\nmode = "complete"\n'


@pytest.mark.parametrize(
    ("parts", "atol"),
    [
        pytest.param((CSV,), 1e-9, id="files"),
        pytest.param(
            (CSV.replace("sites", "all.csv") + 'client_column = "site"\n',),
            1e-9,
            id="column",
            marks=pytest.mark.slow,
        ),
        pytest.param((OWN,), 1e-9, id="own"),
        pytest.param((CSV, SECURE), 1e-3, id="secure"),
        pytest.param(
            (CSV, SECURE, '[engine]\ntransport = "memory"\n'),
            1e-3,
            id="protocol",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_is_computed_over_the_clients_tables(
    parts: tuple[str, ...], atol: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Categories that look like numbers are texts, as the plan says."""
    sites = 3 if "client_column" not in parts[0] else 2
    result = compute(capsys, write(*parts, TABLES, PLAN))
    require_pooled({**result, "num_clients": result["num_clients"] + 3 - sites}, atol=atol)


def test_a_run_from_python_is_shown_and_reported_as_one_of_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(CSV, TABLES, PLAN)
    assert main(["statistics", path, "--name", "file"]) == 0
    table = capsys.readouterr().out
    plan = json.loads(load(path, overrides=()).model_dump()["algorithm"]["args"]["plan"])
    fl.run_statistics(plan, read_tables("sites", StatisticsPlan.of(plan).columns), name="python")
    capsys.readouterr()
    assert main(["show", "python"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(table)
    assert "StatisticsQuery" not in shown
    assert main(["report", "python"]) == 0
    assert "<h2>Statistics</h2>" in Path("runs", "python", "report.html").read_text()
    capsys.readouterr()
    assert main(["show", "python", "--json"]) == 0
    require_pooled(json.loads(capsys.readouterr().out)["statistics"])


def test_a_file_is_read_once_for_a_run_and_again_if_it_has_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = list[object]()

    def read(*arguments: Any, **options: Any) -> Any:
        num_read.append(arguments)
        return read_tables(*arguments, **options)

    monkeypatch.setattr("fedlearn.config.statistics.read_tables", read)
    path = write(CSV, TABLES, PLAN)
    before = compute(capsys, path)
    assert len(num_read) == 1
    file = next(iter(sorted(Path("sites").iterdir())))
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")
    after = compute(capsys, path)
    assert len(num_read) == 2
    assert after["num_examples"] == before["num_examples"] + 1


def test_a_run_of_a_plan_is_shown_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a table. Values of the clients are escaped, and no formulas."""
    assert main(["statistics", write(CSV, TABLES, PLAN), "--name", "first"]) == 0
    printed = capsys.readouterr()
    assert "5 examples" in printed.out
    assert "round 1/" in printed.err
    assert "round 1/" not in printed.out
    assert main(["show", "first"]) == 0
    shown = capsys.readouterr().out
    assert "[40, 80]" in shown
    for word in ("model", "export", "device", "straggler"):
        assert word not in printed.out + printed.err
    assert "model" not in shown
    assert "export" not in shown
    assert "StatisticsQuery" not in shown
    assert main(["show", "first", "--json"]) == 0
    require_pooled(json.loads(capsys.readouterr().out)["statistics"])
    assert main(["report", "first"]) == 0
    page = Path("runs", "first", "report.html").read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;, $x$") >= 2
    assert page.count("<svg") >= 3
    assert "<h2>Curves</h2>" not in page
    assert "not measured" not in page


@pytest.mark.slow
def test_an_interrupted_plan_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rounds continue with what the ones before have found. Until then it has no result."""
    Path("crash.py").write_text(
        "from pathlib import Path\n\n\nclass Crash:\n"
        "    def after_round(self, record, model):\n"
        "        if record.round_num == 2 and not Path('crashed').exists():\n"
        "            Path('crashed').touch()\n"
        "            raise KeyboardInterrupt\n"
    )
    crash = '[callbacks.crash]\nfactory = "crash.py:Crash"\n[store]\ncheckpoint_every_s = 0.001\n'
    plan = write(CSV, TABLES, PLAN, crash)
    assert main(["statistics", plan, "--name", "half"]) == 130
    assert "fedlearn resume half" in capsys.readouterr().err
    assert main(["show", "half", "--json"]) == 0
    assert "statistics" not in json.loads(capsys.readouterr().out)
    assert main(["report", "half"]) == 0
    assert main(["resume", "half"]) == 0
    capsys.readouterr()
    assert main(["show", "half", "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)["statistics"]
    assert values_of(resumed) == values_of(compute(capsys, plan))


@pytest.mark.slow
def test_privacy_is_charged_to_the_ledger_of_its_population(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second run over the same population adds up, and the budget stops it."""
    private = (
        '[privacy]\nmode = "central"\nnoise_multiplier = 4.0\ntarget_delta = 1e-2\n'
        'population = "wards"\nepsilon = {}\n'
    )
    one = '[[statistics]]\nkind = "count"\n'
    plan = write(CSV, TABLES, one, private.format(20.0))
    first, second = compute(capsys, plan), compute(capsys, plan)
    assert first["charge"]["num_rounds"] == second["charge"]["num_rounds"] == 1
    assert second["charge"]["epsilon"] > first["charge"]["epsilon"]
    # 4 times the largest count of a client, and what rounding adds to it.
    assert first["rows"][0]["standard_error"] == pytest.approx(40.0, rel=1e-3)
    spent = second["charge"]["epsilon"]
    capsys.readouterr()
    assert main(["statistics", write(CSV, TABLES, one, private.format(spent))]) == 2
    assert "the budget is enough for 0 of the 1 rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((TABLES, PLAN), "data.source is None"),
        (('[data]\nsource = "digits"\n', TABLES, PLAN), "tables with named columns"),
        (('[data]\nsource = "csv"\n', TABLES, PLAN), "data.path is missing"),
        ((CSV + 'delimeter = ";"\n', TABLES, PLAN), "did you mean 'delimiter'"),
        ((CSV + 'decimal = "x"\n', TABLES, PLAN), "decimal is 'x'"),
        ((CSV, TABLES, PLAN, "[model]\nkind = 'mlp'\n"), "statistics train no model"),
        ((CSV, TABLES, PLAN, "[client]\nepochs = 2\n"), "clients train nothing"),
        (("num_rounds = 3", CSV, TABLES, PLAN), "the plan has the number of rounds"),
        ((CSV, TABLES, PLAN, "[cohort]\nnum_wanted = 2\n"), "there are tables of 3 clients"),
        ((CSV, TABLES), "the plan has no statistics"),
        ((CSV, TABLES, "[[statistics]]\nkind = 'count'\ncolumns = ['agee']\n"), r"statistics\[0\]"),
        ((CSV, PLAN), "the plan has no columns"),
        (('[data]\nsource = "none"\n', TABLES, PLAN), "cohort.num_wanted is missing"),
        (('[data]\nsource = "none"\n[cohort]\nnum_wanted = 9\n', TABLES, PLAN), "coordinator"),
        (
            (CSV, TABLES, PLAN, "[asynchronous]\nmode = 'buffered'\n"),
            "an answer belongs to the question of its round",
        ),
        (
            (CSV, TABLES.replace("low = 0\nhigh = 120", ""), PLAN, SECURE),
            "columns.age has no low and high",
        ),
    ],
)
def test_what_does_not_apply_to_statistics_is_refused(
    parts: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["statistics", write(*parts)]) == 2
    error = capsys.readouterr().err
    assert "plan.toml" in error
    assert re.search(said, error), error


def test_an_experiment_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    Path("experiment.toml").write_text("num_rounds = 1\n")
    assert main(["statistics", "experiment.toml"]) == 2
    assert "there are no statistics" in capsys.readouterr().err


def test_operators_need_no_more_than_how_a_plan_is_served() -> None:
    """An override changes the plan as it does any key."""
    plan = write(
        'name = "ages"', '[data]\nsource = "none"\n[cohort]\nnum_wanted = 4\n', TABLES, PLAN
    )
    assert load_serving(Path(plan)).name == "ages"
    config = load(plan, overrides=["max_examples=7"])
    assert '"max_examples": 7' in str(config.algorithm.model_dump()["args"]["plan"])
    with pytest.raises(ConfigError, match="max_examples is 0"):
        load(plan, overrides=["max_examples=0"])


# ---- The client's side ------------------------------------------------------------------------


def ask(trainer: LocalTrainer) -> Request | Reply:
    plan = StatisticsPlan.of(
        {
            "columns": {"ward": {"kind": "category", "values": ["1", "2"]}},
            "statistics": [{"kind": "groups", "columns": ["ward"], "threshold": 1}],
        }
    )
    query = StatisticsQuery.of(plan)
    request = TrainRequest(
        round_num=0,
        attempt=0,
        tensors={},
        order=(),
        settings=settings_of(query),
        seed=0,
        broadcast=query.broadcast(query.init()),
    )
    reply, _ = ClientSession(ClientId(0), trainer).handle(encode(request), b"")
    return decode(reply)


def test_a_client_reads_its_table_as_the_plan_says() -> None:
    """From its file or from memory, alone or next to a model that it trains."""
    alone, in_memory = TableTrainer("sites/aachen.csv"), TableTrainer(SITES["aachen"])
    SITES["aachen"].to_parquet("aachen.parquet")
    features, labels = torch.zeros(3, 4), torch.zeros(3).long()
    both = TorchTrainer.of(lambda: nn.Linear(4, 2), features, labels, device="cpu", answers=alone)
    for trainer in (alone, in_memory, both, TableTrainer("aachen.parquet")):
        answer = ask(trainer)
        assert isinstance(answer, TrainReply), answer
        assert answer.lanes["answers"].tolist() == [1.0, 2.0]


def test_a_client_answers_only_about_the_columns_that_it_lists() -> None:
    """Other errors of its table stay with the client."""
    refused = ask(TableTrainer("sites/aachen.csv", columns=["age"]))
    assert isinstance(refused, Failure)
    assert "does not answer about the column 'ward'" in refused.reason
    assert isinstance(ask(TableTrainer(SITES["aachen"], columns=["ward"])), TrainReply)
    private = ask(TableTrainer({"ward": ["1", "a secret"]}))
    assert isinstance(private, Failure)
    assert private.reason == "DataError"
    with pytest.raises(DataError, match=r"there is no file gone\.csv"):
        TableTrainer("gone.csv")
    with pytest.raises(TypeError, match="give a list of names"):
        TableTrainer(SITES["aachen"], columns="ward")
