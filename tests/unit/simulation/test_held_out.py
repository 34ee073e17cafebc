"""Clients are evaluated on examples that they do not train on."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedlearn as fl
from fedlearn.config import load
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, DataError
from fedlearn.simulation.held_out import hold_out
from fedlearn.simulation.population import Population
from fedlearn.training.torch_trainer import TorchTrainer

ROOT = Path(__file__).resolve().parents[3]
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(90, 20)).astype("float32")
#: Labels by coin: nothing can be learned of them but the examples themselves.
LABELS = RNG.integers(0, 2, 90)
OWNERS = RNG.integers(0, 4, 90)
SGD = fl.LocalSgd(epochs=5, batch_size=8, learning_rate=0.5)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))


def in_memory() -> fl.FederatedData:
    return fl.from_arrays(
        FEATURES,
        LABELS,
        groups=OWNERS,
        partition=fl.Natural(),
        test=(FEATURES[:4], LABELS[:4]),
        seed=0,
    )


def from_datasets() -> fl.FederatedData:
    """The same clients, read from a dataset each."""
    parts = [np.flatnonzero(owner == OWNERS) for owner in range(4)]
    datasets = [
        TensorDataset(torch.from_numpy(FEATURES[own]), torch.from_numpy(LABELS[own]))
        for own in parts
    ]
    test = TensorDataset(torch.from_numpy(FEATURES[:4]), torch.from_numpy(LABELS[:4]))
    return fl.from_dataset(datasets, partition=fl.Natural(), test=test, seed=0)


def simulate(
    data: fl.FederatedData, *, algorithm: fl.Strategy | None = None, **settings: Any
) -> dict[str, float]:
    """Return the metrics over clients after the last round."""
    usual: dict[str, Any] = {"num_rounds": 3, "cohort": {"num_wanted": 4}}
    run = fl.simulate(make_model, data, algorithm or fl.FedAvg(SGD), **{**usual, **settings})
    metrics = run.history[-1].metrics
    return {name: value for name, value in metrics.items() if name.startswith("clients/")}


def read(population: Population, client_id: int) -> np.ndarray[Any, Any]:
    features, _ = population.load(np.asarray([client_id])).gather()
    assert isinstance(features, torch.Tensor)
    return features.numpy()


@pytest.mark.parametrize("make_data", [in_memory, from_datasets])
def test_each_client_keeps_all_examples_in_two_parts(make_data: Any) -> None:
    """In their order, and the same ones from memory and from a dataset, alone and in blocks."""
    whole = make_data().population
    train, test = hold_out(whole, fraction=0.3, seed=Seed(1))
    expected = hold_out(in_memory().population, fraction=0.3, seed=Seed(1))
    for client_id in range(4):
        own = FEATURES[client_id == OWNERS]
        parts = [read(each, client_id) for each in (train, test)]
        assert len(parts[1]) == round(0.3 * len(own))
        at = [[np.flatnonzero((own == row).all(1)).item() for row in part] for part in parts]
        assert all(places == sorted(places) for places in at)
        assert sorted(at[0] + at[1]) == list(range(len(own)))
        for part, other in zip(parts, expected, strict=True):
            assert np.array_equal(part, read(other, client_id))
    block, _ = test.load(np.asarray([2, 0])).gather()
    assert isinstance(block, torch.Tensor)
    assert np.array_equal(block.numpy(), np.concatenate([read(test, 2), read(test, 0)]))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_part_has_an_example(fraction: float) -> None:
    data = fl.from_arrays(
        FEATURES[:6],
        LABELS[:6],
        partition=fl.Iid(num_clients=3),
        test=(FEATURES, LABELS),
        seed=0,
    )
    for part in hold_out(data.population, fraction=fraction, seed=Seed(0)):
        assert part.num_examples(np.arange(3)).tolist() == [1, 1, 1]


def test_labels_by_coin_cannot_be_foretold() -> None:
    """The control: evaluated on the examples that it trained on, the model knows them all."""
    settings: dict[str, Any] = {"num_rounds": 30, "cohort": {"num_wanted": 4}}
    known = simulate(in_memory(), evaluation={"every_rounds": 0}, **settings)
    held = simulate(
        in_memory(), evaluation={"every_rounds": 0, "client_test_fraction": 0.4}, **settings
    )
    assert known["clients/accuracy_mean"] > 0.95
    assert held["clients/accuracy_mean"] < 0.75


@pytest.mark.parametrize("make_data", [in_memory, from_datasets])
def test_sessions_measure_the_same_as_the_engine(make_data: Any) -> None:
    """Also personal models, which are fine-tuned on the other examples."""
    settings: dict[str, Any] = {"evaluation": {"client_test_fraction": 0.3, "fine_tune_epochs": 2}}
    algorithm = fl.KeepLocal(fl.FedAvg(SGD), ["2.*"])
    engine = simulate(make_data(), algorithm=algorithm, **settings)
    sessions = simulate(
        make_data(), algorithm=algorithm, engine={"transport": "memory"}, **settings
    )
    assert "clients/personal_accuracy_mean" in engine
    assert sessions == pytest.approx(engine, abs=1e-5)


def test_given_tests_equal_those_held_out() -> None:
    """Clients that train on the rest, and are tested on what would have been held out."""
    data = in_memory()
    seed = Seed(0).derive("client tests")
    train, test = hold_out(data.population, fraction=0.3, seed=seed)
    pairs = [test.load(np.asarray([client_id])).gather() for client_id in range(4)]
    rest = [train.load(np.asarray([client_id])).gather() for client_id in range(4)]
    given = fl.from_arrays(
        np.concatenate([read(train, client_id) for client_id in range(4)]),
        torch.cat([labels for _, labels in rest]),
        groups=np.repeat(np.arange(4), [len(labels) for _, labels in rest]),
        partition=fl.Natural(),
        test=(FEATURES[:4], LABELS[:4]),
        seed=0,
    ).with_client_tests(pairs)
    expected = simulate(data, seed=0, evaluation={"client_test_fraction": 0.3})
    assert simulate(given, seed=0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([(FEATURES, LABELS)] * 3, "tests of 3 clients, but 4 clients"),
        ([(FEATURES, LABELS)] * 3 + [(FEATURES[:0], LABELS[:0])], "no examples"),
        ([(FEATURES[:, :3], LABELS)] * 4, r"shape \(3,\)"),
        ([(FEATURES, LABELS)] * 3 + [(FEATURES[:, :3], LABELS)], "of client 3 .* of client 0"),
    ],
)
def test_given_tests_must_fit(tests: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        in_memory().with_client_tests(tests)


NAMES = np.asarray(["ada", "bob", "zoe", "Ünna, <b>"])
#: In an order in which the clients alternate.
TEST_ROWS = np.asarray([5, 0, 3, 9, 11, 2, 40, 1, 89, 30])
TEST_GROUPS = NAMES[[1, 0, 2, 1, 3, 0, 1, 2, 3, 3]]


def from_grouped(tmp_path: Path, source: str, *, groups: Any = TEST_GROUPS) -> fl.FederatedData:
    """The same clients and tests from arrays, an npz archive or Parquet files."""
    users, tests = NAMES[OWNERS], (FEATURES[TEST_ROWS], LABELS[TEST_ROWS])
    if source == "arrays":
        return fl.from_arrays(
            FEATURES,
            LABELS,
            groups=users,
            partition=fl.Natural(),
            test=tests,
            test_groups=groups,
            seed=0,
        )
    if source == "npz":
        arrays = {"x": FEATURES, "y": LABELS, "who": users, "u": groups}
        np.savez(tmp_path / "a.npz", tx=tests[0], ty=tests[1], **arrays)
        return fl.from_npz(
            tmp_path / "a.npz",
            features="x",
            labels="y",
            groups="who",
            test=("tx", "ty"),
            test_groups="u",
            partition=fl.Natural(),
            seed=0,
        )
    order = np.argsort(OWNERS, kind="stable")
    write_parquet(tmp_path / "train.parquet", FEATURES[order], LABELS[order], who=users[order])
    write_parquet(tmp_path / "test.parquet", *tests, u=groups)
    return fl.from_parquet(
        tmp_path / "train.parquet",
        test_path=tmp_path / "test.parquet",
        client="who",
        label="y",
        features=["x"],
        test_client="u",
    )


def write_parquet(path: Path, features: Any, labels: Any, **column: Any) -> None:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1])
    columns = {name: values.tolist() for name, values in column.items()}
    pq.write_table(pa.table({"x": rows, "y": labels, **columns}), path, row_group_size=4)


@pytest.mark.parametrize("source", ["arrays", "npz", "parquet"])
def test_each_client_is_tested_on_the_test_rows_of_its_group(tmp_path: Path, source: str) -> None:
    data = from_grouped(tmp_path, source)
    assert data.names is not None
    assert data.names.tolist() == NAMES.tolist()
    assert data.client_tests is not None
    for client_id, name in enumerate(NAMES):
        own = FEATURES[TEST_ROWS[name == TEST_GROUPS]]
        assert np.array_equal(read(data.client_tests, client_id), own)
    assert len(data.test.labels) == len(TEST_ROWS), "the central test has all rows"


@pytest.mark.parametrize("source", ["arrays", "npz", "parquet"])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.where(TEST_GROUPS == "bob", "Bob", TEST_GROUPS), "1 of 4 test groups are no clients"),
        (np.where(TEST_GROUPS == "zoe", "ada", TEST_GROUPS), r"1 of 4 .* client 2 \('zoe'\)"),
        (np.arange(10) % 4, "such as 0, where a client is 'ada'"),
    ],
)
def test_groups_that_are_not_the_clients_are_refused(
    tmp_path: Path, source: str, groups: Any, message: str
) -> None:
    """Control: the test above."""
    with pytest.raises(DataError, match=message):
        from_grouped(tmp_path, source, groups=groups)


def test_groups_without_names_or_test_rows_are_refused() -> None:
    iid, natural = fl.Iid(num_clients=2), fl.Natural()
    with pytest.raises(DataError, match="the clients have no names"):
        fl.from_arrays(
            FEATURES, LABELS, partition=iid, test=(FEATURES, LABELS), test_groups=OWNERS, seed=0
        )
    with pytest.raises(DataError, match="without test rows"):
        fl.from_arrays(
            FEATURES,
            LABELS,
            groups=OWNERS,
            partition=natural,
            test_fraction=0.2,
            test_groups=OWNERS,
            seed=0,
        )
    with pytest.raises(DataError, match=r"shape \(3,\) for 4 examples"):
        in_memory().with_test_groups([0, 1, 2])


def test_writers_of_femnist_have_their_own_tests() -> None:
    folder = Path(os.environ.get("FEDLEARN_DATA_DIR") or ROOT.parent / "shared" / "data")
    path = folder / "femnist_leaf05.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {folder}: name its folder in FEDLEARN_DATA_DIR")
    config = load(
        None,
        overrides=[
            f"data={{source='npz',path='{path}',features='x_train',labels='y_train'}}",
            "data.groups='writer_train'",
            "data.test_features='x_test'",
            "data.test_labels='y_test'",
            "data.test_groups='writer_test'",
            "data.partition.kind='natural'",
        ],
    )
    data = config.data.load(seed=0, data_dir=path.parent)
    with np.load(path) as arrays:
        writers, counts = np.unique(arrays["writer_test"], return_counts=True)
    assert data.names is not None
    assert data.names.tolist() == writers.tolist()
    assert data.client_tests is not None
    assert data.client_tests.num_examples(np.arange(105)).tolist() == counts.tolist()


def test_what_cannot_be_held_out_is_refused() -> None:
    fraction = {"client_test_fraction": 0.3}
    single = fl.from_arrays(
        FEATURES[:3], LABELS[:3], partition=fl.Iid(num_clients=3), test=(FEATURES, LABELS), seed=0
    )
    with pytest.raises(DataError, match="client 0 has a single example"):
        simulate(single, evaluation=fraction, cohort={"num_wanted": 2})
    drawn = fl.from_arrays(
        FEATURES,
        LABELS,
        partition=fl.Bootstrap(num_clients=5, examples_per_client=9),
        test=(FEATURES, LABELS),
        seed=0,
    )
    with pytest.raises(DataError, match="draw their examples from common ones"):
        simulate(drawn, evaluation=fraction)
    with pytest.raises(ConfigError, match="no client evaluates"):
        simulate(in_memory(), evaluation={**fraction, "clients": 0})
    given = in_memory().with_client_tests([(FEATURES, LABELS)] * 4)
    with pytest.raises(ConfigError, match=r"client_test_fraction is 0\.3, but the data have tests"):
        simulate(given, evaluation=fraction)


def test_trainers_of_your_own_hold_out_their_own_tests() -> None:
    """In sessions, where they evaluate. Control: the engine evaluates by itself."""

    def make_trainer(features: Any, labels: torch.Tensor) -> TorchTrainer:
        return TorchTrainer.of(make_model, features, labels)

    fraction = {"client_test_fraction": 0.3}
    with pytest.raises(ConfigError, match="let the trainers hold out examples"):
        simulate(
            in_memory(), trainer=make_trainer, evaluation=fraction, engine={"transport": "memory"}
        )
    found = simulate(in_memory(), trainer=make_trainer, evaluation=fraction)
    assert found == pytest.approx(simulate(in_memory(), evaluation=fraction), abs=1e-5)
