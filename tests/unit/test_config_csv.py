"""The data source "csv": its keys, what is checked before a run, and the data that it loads."""

from pathlib import Path

import numpy as np
import pytest

from fedlearn.config import Config, load
from fedlearn.errors import ConfigError

_ROWS = "id;age;sex;ill\n1;61,5;m;yes\n2;?;f;no\n3;52;f;yes\n4;40;m;no\n"


def _config(tmp_path: Path, *overrides: str) -> Config:
    sites = tmp_path / "sites"
    sites.mkdir(exist_ok=True)
    for name in ("aachen", "berlin"):
        (sites / f"{name}.csv").write_text(_ROWS)
    file = tmp_path / "run.toml"
    file.write_text("data = { source = 'csv', path = 'sites', label_column = 'ill' }")
    return load(file, overrides=overrides)


def test_the_keys_are_the_options_of_from_csv(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "data.exclude=['id']",
        "data.one_hot=['sex']",
        "data.decimal=','",
        "data.na_values=['?']",
        "data.missing={age=50}",
        "data.test_fraction=0.25",
    )
    data = config.data.load(seed=0, data_dir=tmp_path)
    assert data.names is not None
    assert data.names.tolist() == ["aachen", "berlin"]
    assert data.class_names == ("no", "yes")
    assert data.feature_names == ("age", "sex=f", "sex=m")


def test_a_test_file_and_another_partition(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "data.decimal=','",
        "data.na_values=['?']",
        "data.missing='drop'",
        f"data.test_path='{tmp_path}/sites/berlin.csv'",
        "data.partition={kind='iid',num_clients=3}",
    )
    data = config.data.load(seed=0, data_dir=tmp_path)
    assert data.population.num_examples(np.arange(3)).tolist() == [2, 2, 2]
    assert len(data.test.labels) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "there is no test set; set test_path or test_fraction"),
        (["data.test_fraction=0.2", "data.test_path='t.csv'"], "but there is a test file"),
        (["data.test_fraction=0.2", "data.decimal=';'"], "data.decimal: is ';'; give"),
        (["data.test_fraction=0.2", "data.exclude=['ill']"], "'ill' is the label"),
        (["data.test_fraction=0.2", "data.missing='mean'"], 'data.missing: .*"error", "drop"'),
    ],
)
def test_conflicts_are_found_before_a_file_is_read(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(tmp_path, *overrides)
