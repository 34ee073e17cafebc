"""Sweeps: what runs, what is refused before anything runs, and what the results say."""

import csv
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fedlearn as fl
from fedlearn.cli.app import main
from fedlearn.errors import ConfigError, FedlearnError, StoreError
from fedlearn.experiment.sweep import print_report
from fedlearn.experiment.sweep_results import SweepResults, compare_pairs, parse_metric
from fedlearn.rounds.records import RoundRecord

ODD = 'Süd, "<script>alert(1)</script>"'


@cache
def data() -> fl.FederatedData:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(60, 4, generator=generator)
    labels = (features[:, 0] > 0).long()
    return fl.from_arrays(
        features, labels, partition=fl.Iid(num_clients=3), test_fraction=0.4, seed=0
    )


def make_model() -> nn.Module:
    return nn.Linear(4, 2)


class FailAt:
    """Raises an error after a round, as long as a file is there."""

    def __init__(self, path: Path, error: BaseException) -> None:
        self.path, self.error = path, error

    def after_round(self, record: RoundRecord, model: nn.Module) -> None:
        if record.round_num == 1 and self.path.exists():
            raise self.error

    def __repr__(self) -> str:
        return "FailAt"


def experiment(
    rate: float, seed: int, *, fail: FailAt | None = None, num_rounds: int = 3
) -> Mapping[str, object]:
    assert seed >= 0
    return {
        "make_model": make_model,
        "data": data(),
        "algorithm": fl.FedSGD(learning_rate=rate),
        "num_rounds": num_rounds,
        "callbacks": [] if fail is None else [fail],
        "cohort": {"num_wanted": 2},
        "engine": {"executor": "sequential"},
    }


def sweep(runs_dir: Path, grid: Mapping[str, object], **more: Any) -> SweepResults:
    """Sweep over the experiment in this process. Any: as :func:`fedlearn.sweep`."""
    given: dict[str, Any] = {"seeds": 1, "name": "s", "jobs": 1, "runs_dir": runs_dir} | more
    return fl.sweep(experiment, dict[str, Any](grid), **given)


def test_a_sweep_runs_what_is_new_and_its_table_is_that_of_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Means and deviations are numpy's; a second call runs nothing, and more seeds only theirs."""
    variants = {"low": {"rate": 0.1}, ODD: {"rate": 1.0}}
    first = sweep(tmp_path, {}, seeds=2, variants=variants)
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    for name in variants:
        losses = [first.run(name, seed).history[-1].metrics["loss"] for seed in (0, 1)]
        assert first.variants[list(variants).index(name)].values("loss") == losses
        shown = f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
        assert shown in str(first)
    found = first.compare("loss")[ODD]
    losses_by = first.values("loss")
    differences = [losses_by[ODD][seed] - losses_by["low"][seed] for seed in (0, 1)]
    assert found.mean == pytest.approx(np.mean(differences))

    sweep(tmp_path, {}, seeds=2, variants=variants)
    assert capsys.readouterr().out == ""
    grown = sweep(tmp_path, {"cohort.num_wanted": [2, 3]}, seeds=1, variants={"low": {"rate": 0.1}})
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert grown.variants[1].runs[0].record is not None
    config = json.loads(
        (tmp_path / grown.run("low, cohort.num_wanted=3", 0).name / "config.json").read_text()
    )
    assert config["cohort"]["num_wanted"] == 3


def test_results_are_written_for_programs_and_pages(tmp_path: Path) -> None:
    """Odd names are quoted in CSV and escaped in HTML; the picture is drawn."""
    results = sweep(
        tmp_path,
        {"rate": [0.1, 1.0]},
        seeds=[3],
        variants={ODD: {}},
        metrics=["accuracy", "loss@2", "loss@best", "lost"],
    )
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").read_text().splitlines()))
    assert [(row["variant"], row["rate"], row["seed"], row["status"]) for row in rows] == [
        (f"{ODD}, rate=0.1", "0.1", "3", "done"),
        (f"{ODD}, rate=1.0", "1.0", "3", "done"),
    ]
    history = results.run(f"{ODD}, rate=0.1", 3).history
    assert float(rows[0]["loss@2"]) == history[1].metrics["loss"]
    assert float(rows[0]["loss@best"]) == min(each.metrics["loss"] for each in history)
    facts = json.loads((tmp_path / "s" / "results.json").read_text())
    assert facts["variants"][0]["metrics"]["accuracy"]["std"] is None  # one seed has none
    assert facts["comparisons"][0]["low"] is None
    page = results._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "lost was not measured; did you mean 'loss'?" in str(results)
    assert (tmp_path / "s" / "figure.png").stat().st_size > 10_000


def make_named_data() -> fl.FederatedData:
    """Hospitals with held-out rows of their own; one has an odd name."""
    features = torch.randn(60, 4, generator=torch.Generator().manual_seed(3))
    labels = (features[:, 0] > 0).long()
    hospitals = np.asarray(["Nord", ODD, "West"])[np.arange(60) % 3]
    data = fl.from_arrays(
        features,
        labels,
        groups=hospitals,
        partition=fl.Natural(),
        test=(features[:30], labels[:30]),
        seed=0,
    )
    return data.with_test_groups(hospitals[:30])


def hospitals(rate: float, personal: bool) -> Mapping[str, object]:  # noqa: FBT001
    local = fl.LocalSgd(epochs=1, batch_size=5, learning_rate=rate)
    ditto = fl.Ditto(local, personal_learning_rate=rate, personal_pull=0.1)
    return {
        "make_model": make_model,
        "data": make_named_data(),
        "algorithm": ditto if personal else fl.FedAvg(local),
        "num_rounds": 2,
        "engine": {"executor": "sequential"},
        "evaluation": {"clients": 3},
    }


def test_each_client_has_a_row_in_a_table_of_variants_over_seeds(tmp_path: Path) -> None:
    """Of the model that it uses itself; by name, escaped, and the same as each run says."""
    variants: Any = {"FedAvg": {"personal": False}, "Ditto": {"personal": True}}
    results = fl.sweep(
        hospitals, {"rate": [0.05]}, variants=variants, seeds=2, name="s", jobs=1, runs_dir=tmp_path
    )
    found = results.by_client()
    assert list(found) == ["Nord", ODD, "West"]
    for variant, metric in (("FedAvg", "accuracy"), ("Ditto", "personal_accuracy")):
        name = f"{variant}, rate=0.05"
        for client, by_variant in found.items():
            want = [results.run(name, seed).clients[client][metric] for seed in (0, 1)]
            assert by_variant[name] == want
    assert results.by_client("loss")["West"].keys() == {f"{each}, rate=0.05" for each in variants}
    text = str(results)
    assert "accuracy or personal_accuracy of each client at the last evaluation" in text
    values = found["West"]["Ditto, rate=0.05"]
    assert f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}" in text
    facts = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [each["client"] for each in facts["clients"]] == list(found)
    mean = facts["clients"][2]["variants"]["Ditto, rate=0.05"]["mean"]
    assert mean == pytest.approx(np.mean(values))
    assert "<script>" not in results._repr_html_()
    assert "West" in results._repr_html_()


def test_a_failed_run_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When its cause is gone, the next call resumes that run alone, to the same result."""
    mark = tmp_path / "mark"
    mark.touch()
    variants = {
        "bad": {"fail": FailAt(mark, ValueError("no <luck>"))},
        "good": {"fail": FailAt(tmp_path / "none", ValueError())},
    }
    runs = tmp_path / "runs"
    results = sweep(runs, {"rate": [0.5]}, seeds=2, variants=variants)
    assert [(variant, run.seed, run.error) for variant, run in results.failed] == [
        ("bad, rate=0.5", 0, "ValueError: no <luck>"),
        ("bad, rate=0.5", 1, "ValueError: no <luck>"),
    ]
    assert "0 of 2" in str(results)
    assert "failed: bad, rate=0.5, seed 1: ValueError: no <luck>" in str(results)
    assert "&lt;luck&gt;" in results._repr_html_()
    capsys.readouterr()
    mark.unlink()
    results = sweep(runs, {"rate": [0.5]}, seeds=2, variants=variants)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert results.values("loss")["bad, rate=0.5"] == results.values("loss")["good, rate=0.5"]


def test_an_interrupted_sweep_resumes_its_run(tmp_path: Path) -> None:
    """Ctrl-C ends it, with the run recorded as interrupted; the results so far are written."""
    mark = tmp_path / "mark"
    mark.touch()
    variants = {"one": {"fail": FailAt(mark, KeyboardInterrupt())}}
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "runs", {"rate": [0.5]}, variants=variants)
    facts = json.loads((tmp_path / "runs" / "s" / "results.json").read_text())
    assert facts["variants"][0]["runs"][0]["status"] == "interrupted"
    mark.unlink()
    results = sweep(tmp_path / "runs", {"rate": [0.5]}, variants=variants)
    assert len(results.run("one, rate=0.5", 0).history) == 3


@pytest.mark.parametrize(
    ("grid", "variants", "more", "message"),
    [
        ({"rate": [0.1], "cohort.num_wnted": [1]}, {}, {}, r"num_wnted: .*did you mean"),
        ({"rate": [0.1], "cohort.num_wanted": [2, -1]}, {}, {}, r"variant '.*=-1'.*num_wanted"),
        ({"rate": [0.1, "x"]}, {}, {}, r"variant 'rate=x'.*learning_rate"),
        ({"rate": 0.1}, {}, {}, r"grid: rate is 0\.1; give a list"),
        ({"rate": [0.1, 0.1]}, {}, {}, r"same name"),
        ({"rate": [0.1], "seed": [1]}, {}, {}, r"cannot vary seed: give seeds"),
        ({"rate": [0.1], "store.runs_dir": ["x"]}, {}, {}, r"cannot vary store"),
        ({}, {"a": {}}, {}, r"cannot be called with \['seed'\].*rate"),
        ({"rate": [0.1]}, {"a": 5}, {}, r"variants: 'a' is 5"),
        ({"rate": [0.1]}, {}, {"baseline": "rate=1"}, r"baseline .*did you mean 'rate=0.1'"),
        ({"rate": [0.1]}, {}, {"metrics": ["a@b"]}, r"'a@b' is not a metric"),
        ({"rate": [0.1]}, {}, {"seeds": [1, 1]}, r"seeds: 1 is given twice"),
        ({"rate": [0.1]}, {}, {"seeds": 0}, r"seeds"),
        ({"rate": [0.1]}, {}, {"name": "a/b"}, r"name"),
        ({"rate": [0.1]}, {}, {"name": "a" * 63}, r"more than 64 characters"),
    ],
)  # fmt: skip
def test_every_combination_is_checked_before_the_first_run(
    grid: dict[str, list[object]],
    variants: dict[str, dict[str, object]],
    more: dict[str, object],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(FedlearnError, match=message):
        sweep(tmp_path, grid, variants=variants, **more)
    assert not list(tmp_path.iterdir())


def test_runs_that_would_charge_one_ledger_are_refused(tmp_path: Path) -> None:
    """The noise of each would depend on those before it."""
    file = tmp_path / "experiment.toml"
    file.write_text(
        'algorithm = {weight_by_examples = false}\n[privacy]\nmode = "central"\nclip_norm = 1.0\n'
        "epsilon = 1.0\ntarget_delta = 1e-3\n"
    )
    with pytest.raises(ConfigError, match="ledger of the same clients"):
        fl.sweep(file, {}, 2, name="s", runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_changed_experiment_is_refused_by_key(tmp_path: Path) -> None:
    """A configuration key, an algorithm, and runs that the sweep does not know."""

    def run(rate: float, num_rounds: int = 3, variant: str = "v") -> None:
        sweep(tmp_path, {}, variants={variant: {"rate": rate, "num_rounds": num_rounds}})

    run(0.1)
    with pytest.raises(
        ConfigError, match=r"'v': num_rounds is 4, but .* has runs with 3; .*start a new one"
    ):
        run(0.1, 4)
    with pytest.raises(ConfigError, match=r"'v': python.algorithm is .* has runs with "):
        run(0.2)
    run(0.2, 4, "w")  # another name is another variant
    (tmp_path / "s" / "sweep.json").unlink()
    with pytest.raises(ConfigError, match="run 's-v-0' is not of this sweep"):
        run(0.1)


def test_a_file_describes_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths are relative to the file; tables are merged; `--show` runs nothing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.py").write_text(
        "import torch\nfrom torch import nn\nfrom fedlearn import Examples, TrainTest\n"
        "def make(hidden=2):\n    return nn.Linear(4, hidden)\n"
    )
    (folder / "experiment.toml").write_text(
        "num_rounds = 2\n[client]\nepochs = 1\nlearning_rate = 0.5\n[engine]\nnum_workers = 1\n"
    )
    (folder / "rates.toml").write_text(
        'experiment = "experiment.toml"\nseeds = [4]\njobs = 1\nbaseline = "plain"\n'
        "[variants.plain]\n[variants]\ntexts = ['client.learning_rate=0.1']\n"
        '[variants."Süd, 2"]\nalgorithm.name = "fedprox"\nalgorithm.proximal = 0.5\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "folder/rates.toml", "--runs-dir", "runs", "--json"]) == 0
    *runs, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["variant"] for each in runs] == ["plain", "texts", "Süd, 2"]
    configs = {
        each["name"]: json.loads(Path("runs", each["runs"][0]["run"], "config.json").read_text())
        for each in end["variants"]
    }
    assert {name: each["client"]["learning_rate"] for name, each in configs.items()} == {
        "plain": 0.5,
        "texts": 0.1,
        "Süd, 2": 0.5,
    }
    assert configs["Süd, 2"]["algorithm"]["proximal"] == 0.5
    assert {each["seed"] for each in configs.values()} == {4}
    assert main(["sweep", "folder/rates.toml", "--runs-dir", "runs", "--show"]) == 0
    assert "rates: mean ± standard deviation, seeds 4" in capsys.readouterr().out

    assert main(["sweep", "folder/rates.toml", "--runs-dir", "others", "--show"]) == 2
    assert "there is no sweep called 'rates'" in capsys.readouterr().err


def test_what_is_said_of_the_data_is_said_once_in_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the four runs reads the same files; other files are spoken of again."""
    monkeypatch.chdir(tmp_path)
    for folder, missing in (("sites", ""), ("others", ",")):
        Path(tmp_path, folder).mkdir()
        for name in ("aachen", "berlin"):
            rows = "".join(f"{age},{'yes' if age % 2 else 'no'}\n" for age in range(12))
            Path(tmp_path, folder, f"{name}.csv").write_text(f"age,ill\n{rows}{missing}\n")
    Path(tmp_path, "sites", "berlin.csv").write_text("age,ill\n1,yes\n2,no\n3,\n4,no\n5,yes\n")
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        'num_rounds = 1\n[engine]\nnum_workers = 1\nexecutor = "sequential"\n[data]\n'
        'source = "csv"\nlabel_column = "ill"\nmissing = "drop"\ntest_fraction = 0.3\n'
    )
    fl.sweep(
        experiment,
        {"data.path": ["sites", "others"], "num_rounds": [1, 2]},
        seeds=2,
        name="s",
        jobs=1,
        runs_dir=tmp_path / "runs",
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "rows_left_out" in line]
    assert len(said) == 2
    assert "1 of 17 rows have a missing value, the first in berlin.csv, line 4" in said[0]
    assert "2 of 26 rows" in said[1]


def test_a_wrong_file_is_refused_with_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text('sedes = 3\nseeds = "x"\n[grid]\nclient.epochs = 3\n')
    assert main(["sweep", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{file}:1: sedes" in said
    assert f"{file}:2: seeds" in said
    assert f"{file}:3: grid" in said


def test_a_report_of_a_run_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(1, 2, "a\x1b[2J", 0, "b\x07")
    assert capsys.readouterr().out == "1/2 a\ufffd[2J, seed 0: failed: b\ufffd\n"


@pytest.mark.parametrize("num", [2, 3, 5, 8])
def test_a_paired_comparison_agrees_with_scipy(num: int) -> None:
    """The interval is that of a paired t test, and p that of all sign flips."""
    a, b = np.random.default_rng(num).normal(size=(2, num))
    found = compare_pairs(a.tolist(), b.tolist())
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    p = stats.permutation_test(
        (a - b,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert found.p == pytest.approx(p)
    assert found.p >= 2.0 ** (1 - num)


def test_few_and_many_seeds_claim_no_more_than_they_can() -> None:
    assert math.isnan(compare_pairs([1.0], [0.5]).low)
    assert compare_pairs([1.0], [0.5]).p == 1.0
    assert compare_pairs([], []).num_seeds == 0
    many = compare_pairs([1.0 + k for k in range(20)], [0.0] * 20)
    assert math.isnan(many.p)
    assert many.low > 0
    with pytest.raises(ConfigError, match="not a metric"):
        parse_metric("accuracy@0")


def test_a_name_of_a_run_is_no_name_of_a_sweep(tmp_path: Path) -> None:
    variants = {"v": {"rate": 0.1}}
    results = sweep(tmp_path, {}, variants=variants)
    with pytest.raises(ConfigError, match="a run called 's-v-0' already"):
        sweep(tmp_path, {}, variants=variants, name="s-v-0")
    with pytest.raises(ConfigError, match=r"no variant 'w'; .*\['v'\]"):
        results.run("w", 0)
    with pytest.raises(StoreError):
        fl.simulate(
            make_model,
            data(),
            fl.FedSGD(learning_rate=0.1),
            name="s",
            num_rounds=1,
            store={"runs_dir": str(tmp_path)},
        )
