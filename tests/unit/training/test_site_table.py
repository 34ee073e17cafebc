"""A site's own CSV or Parquet file, read as a simulation on all files read it."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
import torch
from torch import nn

import fedlearn as fl
from fedlearn.client import DataNames, read_examples
from fedlearn.core.features import require_single_input
from fedlearn.core.json_values import format_json
from fedlearn.errors import DataError

#: Berlin has fewer categories and classes, its columns in another order, and codes that all look
#: like numbers; Celle lacks a value.
FILES = {
    "aachen": "age,sex,ward,code,ill\n61,m,3,1,yes\n47,f,4,A,no\n39,f,3,2,maybe\n",
    "berlin": "ill;code;sex;age;ward\nno;1;m;58.5;4\nno;2;m;71;4\nno;2;m;40;4\n",
    "celle": "age,sex,ward,code,ill\n50,f,4,2,no\n,f,3,A,yes\n66,m,3,2,yes\n",
}
ROLES: dict[str, Any] = {
    "label": "ill",
    "one_hot": ["sex", "code", "ward"],
    "missing": "drop",
    "csv_format": fl.CsvFormat(text_columns=("code",)),
}


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    folder = tmp_path / "sites"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def read(sites: Path, **roles: Any) -> fl.FederatedData:  # Any: as of from_csv
    """Read all files, with all rows to train on."""
    return fl.from_csv(sites, test=sites / "aachen.csv", seed=0, **{**ROLES, **roles})


def write_names(data: fl.FederatedData, folder: Path) -> Path:
    """Run a round, and return the file of names in its folder."""
    num_outputs = data.test.num_classes or 1
    run = fl.simulate(
        lambda: nn.Linear(len(data.feature_names or ()), num_outputs),
        data,
        fl.FedSGD(learning_rate=0.1),
        objective=None if data.test.num_classes else nn.MSELoss(),
        num_rounds=1,
        engine={"num_workers": 1, "executor": "sequential"},
        store={"runs_dir": str(folder / "runs")},
    )
    return run.path / "data_names.json"


@pytest.mark.parametrize(
    "roles",
    [
        {"standardize": True},
        {"missing": {"age": 44.5}, "features": ["ward", "age"], "one_hot": ["sex"]},
        {"label": "ward", "one_hot": ["sex"], "exclude": ["code", "ill"]},
        {"label": "ward", "one_hot": ["ill"], "regression": True, "standardize": True},
    ],
)
def test_each_site_gets_the_rows_that_its_client_had(
    sites: Path, tmp_path: Path, roles: dict[str, Any]
) -> None:
    """Bit for bit, though a site has neither all categories nor all classes."""
    data = read(sites, **roles)
    names = write_names(data, tmp_path)
    for client, name in enumerate(FILES):
        features, labels = read_examples(sites / f"{name}.csv", names=names)
        simulated, expected = data.population.load(np.asarray([client])).gather()
        assert torch.equal(features, require_single_input(simulated))
        assert torch.equal(labels, expected)
        assert labels.dtype == expected.dtype


def test_a_parquet_file_is_read_like_a_csv_file(sites: Path, tmp_path: Path) -> None:
    """Its columns have types of their own, and one without a value has none."""
    names = write_names(read(sites, missing={"age": 44.5}), tmp_path)
    (sites / "celle.csv").write_text("age,sex,ward,code,ill\n,f,3,1,no\n,m,3,2,yes\n")
    table = {
        "ill": ["no", "yes"],
        "ward": pa.array([3, 3], pa.int8()),
        "sex": pa.array(["f", "m"]).dictionary_encode(),
        "age": pa.nulls(2),
        "code": ["1", "2"],
        "admitted": [datetime(2026, 1, 2, tzinfo=UTC)] * 2,  # no feature of the run
    }
    pq.write_table(pa.table(table), tmp_path / "celle.parquet")
    expected = read_examples(sites / "celle.csv", names=names)
    found = read_examples(tmp_path / "celle.parquet", names=names)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    pq.write_table(pa.table(table | {"sex": ["f", "d"]}), tmp_path / "celle.parquet")
    with pytest.raises(DataError, match=r"celle.parquet, row 1, column 'sex': 'd' is no category"):
        read_examples(tmp_path / "celle.parquet", names=names)
    (tmp_path / "celle.parquet").write_text("age\n1\n")
    with pytest.raises(DataError, match=r"celle.parquet cannot be read as Parquet: .*write it ag"):
        read_examples(tmp_path / "celle.parquet", names=names)


def test_rows_that_are_left_out_are_counted(sites: Path, tmp_path: Path) -> None:
    names = write_names(read(sites), tmp_path)
    with structlog.testing.capture_logs() as logs:
        read_examples(sites / "celle.csv", names=names)
    assert logs[0]["note"] == "1 of 3 rows have a missing value"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "age,sex,ward,code,ill\n1,f,3,1,no\n2,d,3,1,no\n",
            r"line 3, column 'sex': 'd' is no category of .*'m'\]: correct it",
        ),
        ("age,sex,ward,code,ill\n1,f,5,1,no\n", r"line 2, column 'ward': 5 is no category"),
        ("age,sex,ward,code,ill\n1,f,,1,no\n1,f,5,1,no\n", r"line 3, column 'ward': 5.0 is no cat"),
        ("age,sex,ward,code,ill\n1,f,3,1,yse\n", r"'yse' is no class .*did you mean 'yes'"),
        (
            "age,gender,ward,code,ill\n1,f,3,1,no\n",
            r"own.csv has no column 'sex'; .*has \['age'",
        ),
        ("age,sex,ward,code\n1,f,3,1\n", r"has no column 'ill'"),
        ("age,sex,ward,code,ill\nold,f,3,1,no\n", r"line 2, column 'age': 'old' is no number"),
        ("age,sex,ward,code,ill\ninf,f,3,1,no\n", r"line 2, column 'age': inf is not finite"),
        (
            "age,sex,ward,code,ill\n,f,3,1,no\n",
            r"every row has a missing value, such as own.csv",
        ),
        ("age,sex,ward,code,ill\n", r"has no rows"),
    ],
)
def test_what_the_run_does_not_know_is_refused_with_its_place(
    sites: Path, tmp_path: Path, text: str, reason: str
) -> None:
    names = write_names(read(sites), tmp_path)
    file = tmp_path / "own.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=reason):
        read_examples(file, names=names)


def test_a_missing_value_is_refused_if_the_run_had_none(sites: Path, tmp_path: Path) -> None:
    names = write_names(read(sites, missing={"age": 40}), tmp_path)
    (sites / "celle.csv").write_text("age,sex,ward,code,ill\n50,,4,2,no\n")
    with pytest.raises(DataError, match=r"celle.csv, line 2, column 'sex': the value is missing"):
        read_examples(sites / "celle.csv", names=names)


def test_classes_that_are_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    for name in ("aachen", "berlin"):
        (tmp_path / f"{name}.csv").write_text("age,ill\n61,0\n47,1\n")
    data = fl.from_csv(tmp_path, label="ill", test=tmp_path / "aachen.csv", seed=0)
    names = write_names(data, tmp_path)
    (tmp_path / "berlin.csv").write_text("age,ill\n61,0\n47,2\n")
    with pytest.raises(DataError, match=r"line 3, column 'ill': 2 is no class of the run; .*\[0"):
        read_examples(tmp_path / "berlin.csv", names=names)


def test_names_of_other_data_are_refused(sites: Path, tmp_path: Path) -> None:
    file = tmp_path / "data_names.json"
    with pytest.raises(DataError, match=r"there is no file .*data_names.json"):
        read_examples(sites / "celle.csv", names=file)
    file.write_text(format_json(asdict(DataNames(class_names=("no", "yes")))))
    with pytest.raises(DataError, match="does not say how the columns"):
        read_examples(sites / "celle.csv", names=file)
    file.write_text("{")
    with pytest.raises(DataError, match=r"copy data_names.json from the folder of the run again"):
        read_examples(sites / "celle.csv", names=file)
