"""Names of classes and features in a run's folder, in `fedlearn show` and in the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedlearn as fl
from fedlearn.cli.overview import run_page
from fedlearn.deployment.descriptions import describe_run
from fedlearn.errors import ConfigError, DataError, StoreError
from fedlearn.experiment.data_names import keep_data_names, load_data_names
from fedlearn.training.data_names import DataNames, TableEncoding


def test_names_are_kept_and_shown(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir(exist_ok=True)
    for name in ("aachen", "berlin"):
        (sites / f"{name}.csv").write_text("age,ill\n6,yes <b>\n4,no\n")
    data = fl.from_csv(sites, label="ill", test=sites / "aachen.csv", standardize=True, seed=0)
    run = fl.simulate(
        lambda: torch.nn.Linear(1, 2),
        data,
        fl.FedSGD(learning_rate=0.1),
        num_rounds=1,
        store={"runs_dir": str(tmp_path / "runs")},
    )
    encoding = TableEncoding(
        label="ill", columns=("age",), categories={}, missing="error", num_classes=2
    )
    assert run.data_names == DataNames(("no", "yes <b>"), ("age",), (5.0,), (1.0,), encoding)
    page = run_page(run, width=None)
    assert "classes  0: no, 1: yes <b>" in page
    assert "features  0: age" in page
    assert list(describe_run(run)["data_names"]["class_names"]) == ["no", "yes <b>"]
    report = run.report().read_text()
    assert "<td>class 1</td><td>yes &lt;b&gt;</td>" in report


def test_a_run_does_not_resume_with_other_classes(tmp_path: Path) -> None:
    names = DataNames(("no", "yes"), ("age",))
    for _ in ("start", "resume"):
        keep_data_names(names, folder=tmp_path)
    assert load_data_names(tmp_path) == names
    with pytest.raises(DataError, match=r"classes are \('new', 'no'\), but the run was started"):
        keep_data_names(DataNames(("new", "no"), ("age",)), folder=tmp_path)
    with pytest.raises(DataError, match=r"features are \('sex',\), but the run was started"):
        keep_data_names(DataNames(("no", "yes"), ("sex",)), folder=tmp_path)
    with pytest.raises(DataError, match=r"means of features are \(4.0,\), but the run was started"):
        keep_data_names(DataNames(("no", "yes"), ("age",), (4.0,)), folder=tmp_path)
    with pytest.raises(DataError, match="classes are None, but the run was started"):
        keep_data_names(DataNames(), folder=tmp_path)


def test_a_run_of_an_earlier_version_resumes_without_its_encoding(tmp_path: Path) -> None:
    """From then on the encoding is recorded, and another one is refused."""

    def encoded(missing: str) -> DataNames:
        encoding = TableEncoding(
            label="ill", columns=("age",), categories={}, missing=missing, num_classes=2
        )
        return DataNames(("no", "yes"), ("age",), encoding=encoding)

    earlier = {"class_names": ["no", "yes"], "feature_names": ["age"]}
    (tmp_path / "data_names.json").write_text(json.dumps(earlier))
    with pytest.raises(DataError, match=r"classes are \('new', 'no'\), but the run was started"):
        keep_data_names(replace(encoded("drop"), class_names=("new", "no")), folder=tmp_path)
    keep_data_names(encoded("drop"), folder=tmp_path)
    assert load_data_names(tmp_path) == encoded("drop")
    with pytest.raises(DataError, match=r"the encoding of columns is .* but the run was started"):
        keep_data_names(encoded("error"), folder=tmp_path)


def test_statistics_without_noise_are_no_part_of_a_private_run(tmp_path: Path) -> None:
    for name in ("aachen", "berlin"):
        (tmp_path / f"{name}.csv").write_text("age,ill\n6,1\n4,0\n7,1\n")

    def run(*, standardize: bool, privacy: dict[str, object]) -> fl.Run:
        return fl.simulate(
            lambda: torch.nn.Linear(1, 2),
            fl.from_csv(tmp_path, label="ill", test=0.3, standardize=standardize, seed=0),
            fl.FedSGD(learning_rate=0.1, weight_by_examples=False),
            num_rounds=1,
            privacy=privacy,
            store={"runs_dir": str(tmp_path / "runs")},
        )

    private: dict[str, object] = {
        "mode": "central",
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "reproducible": True,
    }
    run(standardize=True, privacy={})  # controls
    run(standardize=False, privacy=private)
    with pytest.raises(ConfigError, match=r"standardized by the mean .* leave standardize out"):
        run(standardize=True, privacy=private)


def test_a_damaged_file_of_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_names.json").write_text("{")
    with pytest.raises(StoreError, match="the names of classes and features"):
        load_data_names(tmp_path)


def test_data_without_names_write_no_file(tmp_path: Path) -> None:
    x, y = torch.eye(4), torch.arange(4) % 2
    run = fl.simulate(
        lambda: torch.nn.Linear(4, 2),
        fl.from_arrays(x, y, partition=fl.Iid(2), test=(x, y), seed=0),
        fl.FedSGD(learning_rate=0.1),
        num_rounds=1,
        store={"runs_dir": str(tmp_path)},
    )
    assert run.data_names == DataNames()
    assert not (run.path / "data_names.json").exists()
