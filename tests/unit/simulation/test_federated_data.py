"""Federated data sets: from arrays, datasets and files to clients and a test set."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core.features import Features, Inputs, require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.experiment.simulate import simulate
from fedlearn.simulation.federated_data import (
    Bootstrap,
    Division,
    FederatedData,
    Natural,
    from_arrays,
    from_dataset,
    from_examples,
    from_npz,
    from_parquet,
)
from fedlearn.simulation.parquet import TableColumns, read_parquet
from fedlearn.simulation.partition import (
    ByIds,
    Dirichlet,
    DirichletSizes,
    FewClasses,
    Iid,
    LognormalSizes,
    Shards,
)
from fedlearn.simulation.population import ArrayPopulation, ClientRows
from fedlearn.simulation.sources import Examples

_FIRST = np.arange(1)
_LABELS = np.arange(60) % 3
_FEATURES = np.arange(120.0).reshape(60, 2)


def _from_arrays(
    *,
    features: Inputs[ArrayLike] = _FEATURES,
    labels: ArrayLike = _LABELS,
    partition: Division = Iid(4),  # noqa: B008  frozen
    groups: ArrayLike | None = None,
    seed: int = 0,
) -> FederatedData:
    return from_arrays(
        features, labels, partition=partition, test_fraction=0.2, seed=seed, groups=groups
    )


def _rows(data: FederatedData) -> list[list[float]]:
    """Return the first feature of each client's examples."""
    result = []
    for client in range(data.population.num_clients):
        loaded = data.population.load(np.array([client]))
        result.append(
            sorted(require_single_input(loaded.features)[torch.from_numpy(loaded.rows), 0].tolist())
        )
    return result


def test_arrays_are_divided_into_clients_and_a_test_set() -> None:
    """Every example belongs to one client or to the test set, which has a fifth of each class."""
    data = _from_arrays()
    clients = _rows(data)
    everything = sorted(sum(clients, require_single_input(data.test.features)[:, 0].tolist()))
    assert everything == _FEATURES[:, 0].tolist()
    assert torch.bincount(data.test.labels).tolist() == [4, 4, 4]
    assert require_single_input(data.stored_test.features).dtype == torch.float64
    assert require_single_input(data.test.features).dtype == torch.float32
    assert data.feature_shape == (2,)
    assert data.test.num_classes == 3


@pytest.mark.parametrize(
    "partition",
    [
        Iid(4),
        Dirichlet(num_clients=4, alpha=1.0, min_examples=2),
        Shards(num_clients=4, shards_per_client=2),
        FewClasses(num_clients=4, classes_per_client=2),
        DirichletSizes(num_clients=4, alpha=1.0, min_examples=2),
        LognormalSizes(num_clients=4, sigma=1.0, min_examples=2),
        Bootstrap(num_clients=4, examples_per_client=9),
    ],
)
def test_the_seed_decides_the_division(partition: Division) -> None:
    """The same seed gives the same clients, and another seed gives others."""
    first, again, other = (_rows(_from_arrays(partition=partition, seed=s)) for s in (0, 0, 1))
    assert len(first) == 4
    assert first == again
    assert first != other


def test_natural_clients_are_the_groups_that_are_left_after_the_test() -> None:
    """Groups are divided with their examples; without groups there are no natural clients."""
    owners = np.array(["ada", "kim", "zoe"]).repeat(20)
    data = _from_arrays(partition=Natural(), groups=owners)
    first = [owners[int(rows[0]) // 2] for rows in _rows(data)]
    assert first == ["ada", "kim", "zoe"]
    with pytest.raises(DataError, match="do not name their clients"):
        _from_arrays(partition=Natural())


@pytest.mark.parametrize("labels", [np.linspace(0.0, 1.0, 60), np.zeros((60, 2), int)])
def test_labels_that_are_no_class_numbers_are_not_split_by(labels: NDArray[np.generic]) -> None:
    """Floats and sequences can only be divided at random."""
    for at_random in (Iid(4), DirichletSizes(4, 1.0, 1), LognormalSizes(4, 1.0, 1)):
        assert _from_arrays(labels=labels, partition=at_random).population.num_clients == 4
    by_label: list[Division] = [
        Dirichlet(num_clients=4, alpha=1.0, min_examples=1),
        Shards(num_clients=4, shards_per_client=2),
        FewClasses(num_clients=4, classes_per_client=2),
    ]
    for partition in by_label:
        with pytest.raises(DataError, match="splitting by label needs one class number"):
            _from_arrays(labels=labels, partition=partition)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("u1", torch.uint8),
        ("u2", torch.uint16),
        (">u2", torch.uint16),
        ("u4", torch.int64),
        ("u8", torch.int64),
        ("i1", torch.int8),
        ("i2", torch.int16),
        (">i4", torch.int32),
        ("i8", torch.int64),
        ("f2", torch.float16),
        (">f4", torch.float32),
        ("f8", torch.float64),
        ("g", torch.float64),
        ("?", torch.uint8),
    ],
)
def test_features_keep_their_dtype_in_memory(given: str, kept: torch.dtype) -> None:
    """In the clients and in the test set; lists of labels work as well as arrays."""
    features = (_FEATURES % 2).astype(given)
    data = _from_arrays(features=features, labels=_LABELS.tolist())
    assert (
        require_single_input(data.stored_test.features).dtype
        == require_single_input(data.population.load(_FIRST).features).dtype
        == kept
    )
    assert data.test.labels.dtype == torch.int64


def test_the_callers_array_is_not_shared() -> None:
    """Later writes to it change no example."""
    mine = _FEATURES.copy()
    data = from_arrays(mine, _LABELS, partition=Iid(4), test=(mine, _LABELS), seed=0)
    mine[:] = -1.0
    assert (
        require_single_input(data.test.features).min()
        == require_single_input(data.population.load(_FIRST).features).min()
        == 0.0
    )


def test_integers_beyond_64_bits_are_refused() -> None:
    """They would wrap around to negative numbers."""
    with pytest.raises(DataError, match=r"up to 9223372036854775808; give numbers below 2\*\*63"):
        _from_arrays(features=np.full((60, 2), 2**63, np.uint64))


def test_arrays_that_cannot_be_trained_on_are_refused() -> None:
    """Wrong lengths, types and values, and empty arrays."""
    with pytest.raises(DataError, match="of both must count examples"):
        _from_arrays(labels=_LABELS[:50])
    with pytest.raises(DataError, match=r"features are <U1 of shape \(60,\)"):
        _from_arrays(features=["x"] * 60)
    with pytest.raises(DataError, match=r"labels are int64 of shape \(\)"):
        _from_arrays(labels=3)
    with pytest.raises(DataError, match="NaN"):
        _from_arrays(features=np.full((60, 2), np.nan))
    with pytest.raises(DataError, match="there are no examples"):
        _from_arrays(features=np.zeros((0, 2)), labels=np.zeros(0, int))
    with pytest.raises(DataError, match="outside 0"):
        _from_arrays(labels=_LABELS - 1)


@dataclass(frozen=True)
class _Hollow:
    """A custom population in which one client has no examples."""

    whole: ArrayPopulation

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(client_ids == 2, 0, self.whole.num_examples(client_ids))

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        return self.whole.load(client_ids)


def test_an_empty_client_is_named() -> None:
    """In any kind of population; the complete one is accepted."""
    data = _from_arrays()
    assert isinstance(data.population, ArrayPopulation)
    with pytest.raises(DataError, match="client 2 has no examples"):
        FederatedData(population=_Hollow(data.population), test=data.test)


def _test_set(*, features: torch.Tensor, labels: torch.Tensor) -> Examples:
    return Examples(features=features, labels=labels, groups=None, num_classes=None)


def test_a_different_test_set_is_refused() -> None:
    """A model takes one shape and one dtype."""
    population = _from_arrays().population
    zeros = torch.zeros(3).long()
    wrong = {
        r"client 0 has features of torch.float64 and shape \(2,\)": (torch.zeros(3, 5), zeros),
        "features .* the test set of torch.int64": (torch.zeros(3, 2).long(), zeros),
        "client 0 has labels of torch.int64": (torch.zeros(3, 2), torch.zeros(3)),
    }
    for message, (features, labels) in wrong.items():
        with pytest.raises(DataError, match=message):
            FederatedData(population=population, test=_test_set(features=features, labels=labels))


def _dataset(num_rows: int, *, classes: int = 3) -> TensorDataset:
    features = torch.arange(num_rows).float()[:, None]
    return TensorDataset(features, torch.arange(num_rows) % classes)


def test_a_torch_dataset_is_divided_by_the_labels_given() -> None:
    """Clients have the rows of their part; classes are counted over the test set as well."""
    data = from_dataset(
        _dataset(12),
        labels=[row % 3 for row in range(12)],
        partition=ByIds(np.arange(12) // 4),
        test=_dataset(5, classes=5),
        seed=0,
    )
    assert _rows(data) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert data.test.num_classes == 5
    assert require_single_input(data.test.features)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_torch_dataset_that_does_not_fit_is_refused() -> None:
    """One label per row, a test set, and the same kind of labels in both."""
    labels = np.arange(12) % 3
    with pytest.raises(DataError, match="11 labels for a dataset of 12"):
        from_dataset(_dataset(12), labels=labels[:11], partition=Iid(2), test=_dataset(2), seed=0)
    with pytest.raises(DataError, match="the test set has no examples"):
        from_dataset(_dataset(12), labels=labels, partition=Iid(2), test=_dataset(0), seed=0)
    with pytest.raises(DataError, match="the test labels are integers, the training labels floats"):
        from_dataset(_dataset(12), labels=labels + 0.5, partition=Iid(2), test=_dataset(2), seed=0)


def test_an_npz_equals_its_arrays(tmp_path: Path) -> None:
    """The same seed gives the same clients either way."""
    np.savez(tmp_path / "d.npz", allow_pickle=False, x=_FEATURES, y=_LABELS, who=_LABELS * 10)
    read = from_npz(
        tmp_path / "d.npz",
        features="x",
        labels="y",
        groups="who",
        test=0.2,
        partition=Natural(),
        seed=3,
    )
    made = _from_arrays(partition=Natural(), groups=_LABELS * 10, seed=3)
    assert _rows(read) == _rows(made)
    assert torch.equal(
        require_single_input(read.test.features), require_single_input(made.test.features)
    )


def _from_archive(path: Path, *, test: tuple[str, str] | float) -> FederatedData:
    return from_npz(
        path, features="x", labels="y", groups=None, test=test, partition=Iid(1), seed=0
    )


def test_an_archive_gives_a_part_to_hold_out_or_its_own_test(tmp_path: Path) -> None:
    """Classes are counted over both parts: a label may occur in the test set only."""
    path, y = tmp_path / "d.npz", np.arange(6) % 2
    np.savez(path, allow_pickle=False, x=np.ones((6, 2)), y=y, test_x=np.ones((2, 2)), z=[0, 4])
    given = _from_archive(path, test=("test_x", "z"))
    assert (given.population.num_examples(np.zeros(1, int)).tolist(), given.test.num_classes) == (
        [6],
        5,
    )
    assert given.test.labels.tolist() == [0, 4]
    held_out = _from_archive(path, test=0.34)
    assert held_out.population.num_examples(np.zeros(1, int)).tolist() == [4]
    assert held_out.test.labels.sort().values.tolist() == [0, 1]
    assert held_out.test.num_classes == 2


def test_an_archive_of_numbers_to_regress_on_has_no_classes(tmp_path: Path) -> None:
    """Float labels may have any shape; those of the test set must be floats as well."""
    path, two = tmp_path / "d.npz", np.linspace(0.0, 1.0, 12).reshape(6, 2)
    np.savez(path, allow_pickle=False, x=np.ones((6, 2)), y=two, z=np.arange(6))
    data = _from_archive(path, test=0.5)
    assert data.test.num_classes is None
    assert data.test.labels.shape == (3, 2)
    with pytest.raises(DataError, match="the test labels are integers, the training labels floats"):
        _from_archive(path, test=("x", "z"))


def _write_idx(path: Path, *, labels: ArrayLike) -> Path:
    clients = np.arange(np.size(labels)) // 2
    table = pa.table({"user": clients, "a": clients + 0.5, "b": clients, "digit": labels})
    pq.write_table(table, path)
    return path


def _from_parquet(folder: Path, *, train: ArrayLike, test: ArrayLike) -> FederatedData:
    return from_parquet(
        _write_idx(folder / "train.parquet", labels=train),
        test_path=_write_idx(folder / "test.parquet", labels=test),
        client="user",
        label="digit",
        features=None,
    )


@pytest.mark.parametrize(("train", "test"), [([0, 1, 0, 4], [0, 1]), ([0, 1, 0, 1], [0, 4])])
def test_classes_of_parquet_count_over_training_and_test(
    tmp_path: Path, train: list[int], test: list[int]
) -> None:
    """It is no error if only one of the two has some label."""
    data = _from_parquet(tmp_path, train=train, test=test)
    assert data.test.num_classes == 5
    assert data.feature_shape == (2,)
    assert _rows(data) == [[0.5, 0.5], [1.5, 1.5]]


def test_classes_here_and_numbers_there_are_refused(tmp_path: Path) -> None:
    """They cannot belong to one task."""
    with pytest.raises(DataError, match="the training labels are integers, the test labels floats"):
        _from_parquet(tmp_path, train=[0, 1], test=[0.5, 1.0])
    assert _from_parquet(tmp_path, train=[0.1, 1], test=[0.5, 1]).test.num_classes is None


def test_a_million_virtual_clients_are_checked_without_a_table() -> None:
    """The check for empty clients covers all of them, in parts."""
    data = _from_arrays(partition=Bootstrap(num_clients=3_000_000, examples_per_client=2))
    assert data.population.num_clients == 3_000_000


def test_a_division_is_refused_before_anything_is_divided() -> None:
    """Numbers out of range are errors of the caller."""
    examples = _from_arrays().test.split(fraction=0.5, seed=Seed(0))
    with pytest.raises(ValueError, match="num_clients is 0"):
        from_examples(examples, partition=Bootstrap(num_clients=0, examples_per_client=2), seed=0)
    with pytest.raises(ValueError, match="examples_per_client is 0"):
        Bootstrap(num_clients=2, examples_per_client=0)


_TOKENS = np.arange(180).reshape(60, 3) % 7
_MASK = _TOKENS > 2


def _by_name(features: Features, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the inputs of a dict, or of a tuple in the order of ``names``."""
    if isinstance(features, tuple):
        return dict(zip(names, features, strict=True))
    assert isinstance(features, dict)
    return features


@pytest.mark.parametrize("partition", [Iid(4), Bootstrap(num_clients=4, examples_per_client=9)])
@pytest.mark.parametrize("is_positional", [False, True])
def test_arrays_of_several_inputs_keep_their_kinds_and_their_rows(
    *, partition: Division, is_positional: bool
) -> None:
    """Each keeps its dtype, and masks stay boolean."""
    arrays: dict[str, ArrayLike] = {
        "tokens": _TOKENS.astype(np.int32),
        "mask": _MASK,
        "x": _FEATURES,
    }
    data = _from_arrays(
        features=tuple(arrays.values()) if is_positional else arrays, partition=partition
    )
    clients, _ = data.population.load(np.array([1, 3])).gather()
    for features in (clients, data.stored_test.features):
        inputs = _by_name(features, arrays)
        assert inputs["mask"].dtype == torch.bool
        assert inputs["x"].dtype == torch.float64
        assert inputs["tokens"].dtype == torch.int32
        assert torch.equal(inputs["mask"], inputs["tokens"] > 2)
        assert torch.equal(inputs["tokens"][:, 0], (inputs["x"][:, 0] / 2 * 3).long() % 7)
    with pytest.raises(DataError, match="where one tensor is needed"):
        assert data.feature_shape


def test_inputs_of_other_lengths_are_refused_by_name() -> None:
    """So are ragged ones; the error suggests a fix."""
    with pytest.raises(DataError, match=r"input 'mask' of shape \(59, 3\) and labels .* \(60,\)"):
        _from_arrays(features={"tokens": _TOKENS, "mask": _MASK[:59]})
    ragged: Any = [[1, 2], [3]] * 30
    with pytest.raises(DataError, match=r"input 1: .*pad or crop"):
        _from_arrays(features=(_TOKENS, ragged))


def test_arrays_may_come_with_a_test_set_of_their_own() -> None:
    """Then no example is held out, and classes are counted over both sets."""
    test = ((_TOKENS[:5], _MASK[:5]), np.arange(5))
    data = from_arrays((_TOKENS, _MASK), _LABELS, partition=Iid(4), test=test, seed=0)
    assert data.population.num_examples(np.arange(4)).sum() == 60
    assert data.test.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.test.num_classes == 5
    held_out = from_arrays(_TOKENS, _LABELS, partition=Iid(4), test_fraction=0.2, seed=0)
    assert held_out.population.num_examples(np.arange(4)).sum() == 48


def test_there_is_at_most_one_test_set() -> None:
    none = from_arrays(_TOKENS, _LABELS, partition=Iid(4), seed=0)
    assert not none.has_test
    assert none.population.num_examples(np.arange(4)).sum() == len(_LABELS)
    with pytest.raises(DataError, match="there are no examples"):
        from_arrays(_TOKENS, _LABELS, partition=Iid(4), test=(_TOKENS, _LABELS[:0]), seed=0)
    test = (_TOKENS, _LABELS)
    with pytest.raises(ValueError, match="both of `test` and `test_fraction`"):
        from_arrays(_TOKENS, _LABELS, partition=Iid(4), test=test, test_fraction=0.2, seed=0)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            (_TOKENS, _LABELS),
            "client 0 has input 'mask', input 'tokens', labels, the test set features, labels",
        ),
        (
            ({"tokens": _TOKENS}, _LABELS),
            "the test set input 'tokens', labels; give both the same inputs",
        ),
        (
            ({"tokens": _TOKENS, "mask": _MASK[:, :2]}, _LABELS),
            r"input 'mask' of torch.bool and shape \(3,\) per example, the test .* \(2,\)",
        ),
        (
            ({"tokens": _TOKENS, "mask": _MASK + 0.0}, _LABELS),
            "input 'mask' of torch.bool .* the test set of torch.float64",
        ),
        (
            ({"tokens": _TOKENS, "mask": _MASK}, _LABELS + 0.5),
            "the training labels are integers, the test labels floats",
        ),
    ],
)
def test_a_test_set_of_another_kind_is_refused(
    test: tuple[Inputs[ArrayLike], ArrayLike], message: str
) -> None:
    """Its inputs, shapes, dtypes and labels must match those of training."""
    inputs: dict[str, ArrayLike] = {"tokens": _TOKENS, "mask": _MASK}
    with pytest.raises(DataError, match=message):
        from_arrays(inputs, _LABELS, partition=Iid(4), test=test, seed=0)


def test_examples_that_are_held_out_by_hand_become_clients() -> None:
    """They give the same clients as arrays with the same seed."""
    groups = _LABELS * 10
    whole = Examples(
        features=torch.from_numpy(_FEATURES).float(),
        labels=torch.from_numpy(_LABELS),
        groups=groups,
        num_classes=3,
    )
    parts = whole.split(fraction=0.2, seed=Seed(0).derive("data"))
    made = from_examples(parts, partition=Natural(), seed=0)
    assert _rows(made) == _rows(_from_arrays(partition=Natural(), groups=groups))


@dataclass(frozen=True)
class _Listed:
    """A dataset backed by a list."""

    pairs: Sequence[tuple[object, int]]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int, /) -> tuple[object, int]:
        return self.pairs[index]


def test_a_dataset_of_several_inputs_becomes_clients() -> None:
    """So does its test set."""
    rows = range(60)
    pairs = _Listed([((_TOKENS[row], _MASK[row]), int(_LABELS[row])) for row in rows])
    data = from_dataset(
        pairs, labels=_LABELS, partition=Iid(4), test=_Listed(pairs.pairs[:6]), seed=0
    )
    features, _ = data.population.load(np.array([2])).gather()
    assert isinstance(features, tuple)
    assert torch.equal(features[1], features[0] > 2)
    assert isinstance(data.test.features, tuple)
    assert torch.equal(data.test.features[0], torch.from_numpy(_TOKENS[:6]))


@pytest.mark.parametrize(
    "names", [("ids", "m", "x"), {"mask": "m", "tokens": "ids", "x": "x"}], ids=["tuple", "dict"]
)
def test_an_npz_of_several_inputs_equals_its_arrays(tmp_path: Path, names: Inputs[str]) -> None:
    """Names by position or by argument, with a part held out or separate test arrays."""
    np.savez(
        tmp_path / "d.npz",
        allow_pickle=False,
        ids=_TOKENS.astype(np.uint8),
        m=_MASK,
        x=_FEATURES,
        y=_LABELS,
    )
    read = partial(
        from_npz,
        tmp_path / "d.npz",
        features=names,
        labels="y",
        groups=None,
        partition=Iid(4),
        seed=3,
    )
    arrays: dict[str, ArrayLike] = {"tokens": _TOKENS, "mask": _MASK, "x": _FEATURES}
    held_out = _by_name(_from_arrays(features=arrays, seed=3).test.features, arrays)
    found = _by_name(read(test=0.2).test.features, arrays)
    assert all(torch.equal(found[name], held_out[name]) for name in arrays)
    found = _by_name(read(test=(names, "y")).test.features, arrays)
    assert torch.equal(found["tokens"], torch.from_numpy(_TOKENS))
    assert torch.equal(found["mask"], torch.from_numpy(_MASK))
    with pytest.raises(DataError, match="give both the same inputs"):
        read(test=("x", "y"))


@pytest.mark.parametrize("form", [dict, tuple, list])
def test_parquet_columns_make_several_inputs(tmp_path: Path, form: type) -> None:
    """Lists of columns by argument or by position, each with its own shape and dtype."""
    owners, path = np.arange(12) // 3, tmp_path / "t.parquet"
    gate = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24) % 5 > 1), 2)
    columns = {"user": owners, "age": owners, "a": owners + 0.5, "b": owners, "y": owners}
    pq.write_table(pa.table({**columns, "gate": gate}), path, row_group_size=5)
    groups = {"x": ["a", "b"], "age": ["age"], "gate": ["gate"]}
    data = from_parquet(
        path,
        test_path=path,
        client="user",
        label="y",
        features=groups if form is dict else form(groups.values()),
    )
    features, labels = data.population.load(np.array([3, 1])).gather()
    found, whole = (_by_name(each, groups) for each in (features, data.test.features))
    assert torch.equal(found["x"], torch.stack([labels + 0.5, labels], 1).float())
    assert torch.equal(found["age"], labels[:, None])
    gates = torch.arange(24).reshape(12, 2) % 5 > 1
    assert torch.equal(found["gate"], gates[[9, 10, 11, 3, 4, 5]])
    assert torch.equal(whole["gate"], gates)


def test_columns_that_make_no_input_are_refused(tmp_path: Path) -> None:
    """A missing column, and an input without columns; a mask alone is not a feature."""
    path, owners = tmp_path / "t.parquet", np.arange(6) // 3
    pq.write_table(pa.table({"user": owners, "a": owners > 0, "y": owners}), path)
    of_file = partial(TableColumns.of_file, path, client="user", label="y")
    with pytest.raises(DataError, match="no column 'size'"):
        of_file(features=(["a"], ["size"]))
    with pytest.raises(ValueError, match="no feature column is named"):
        of_file(features=(["a"], []))
    with pytest.raises(DataError, match="feature column 'a' is bool; cast it to numbers"):
        read_parquet(path, columns=of_file(features=["a"]))
    beside = read_parquet(path, columns=of_file(features={"a": ["a"]})).features
    assert torch.equal(_by_name(beside, ["a"])["a"], torch.from_numpy(owners > 0)[:, None])


def _sets(*sizes: int) -> list[TensorDataset]:
    rows = torch.arange(sum(sizes)).split(sizes)
    return [TensorDataset(each.float()[:, None], each % 3) for each in rows]


def test_groups_of_a_dataset_are_its_natural_clients() -> None:
    """Labels are not needed for that, and names are kept."""
    who = ["kim", "ada", "kim", "zoe", "ada", "kim"]
    data = from_dataset(_dataset(6), groups=who, partition=Natural(), test=_dataset(3), seed=0)
    assert data.names is not None
    assert data.names.tolist() == ["ada", "kim", "zoe"]
    assert _rows(data) == [[1.0, 4.0], [0.0, 2.0, 5.0], [3.0]]
    with pytest.raises(DataError, match="6 examples; give one id per example"):
        from_dataset(_dataset(6), groups=who[1:], partition=Natural(), test=_dataset(3), seed=0)


def test_the_progress_says_that_clients_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the names equal the numbers."""
    monkeypatch.chdir(tmp_path)
    for names, expected in (["kim", "ada", "zoe"], True), ([0, 1, 2], False):
        who = np.array(names).repeat(2)
        data = from_dataset(_dataset(6), groups=who, partition=Natural(), test=_dataset(3), seed=0)
        simulate(
            partial(torch.nn.Linear, 1, 3),
            data,
            FedAvg(LocalSgd(epochs=1, batch_size=2, learning_rate=0.1)),
            num_rounds=1,
            engine={"num_workers": 1},
        )
        text = "from client 0 ('ada') to client 2 ('zoe'): data.names"
        assert (text in capsys.readouterr().out) == expected


def test_several_datasets_are_one_client_each() -> None:
    """In order; a mapping also names them."""
    sets = _sets(2, 1, 3)
    expected = [[0.0, 1.0], [2.0], [3.0, 4.0, 5.0]]
    for given in (sets, tuple(sets)):
        data = from_dataset(given, partition=Natural(), test=_dataset(3), seed=0)
        assert _rows(data) == expected
        assert data.names is None
    by_name = dict(zip(("zoe", "ada", "kim"), sets, strict=True))
    data = from_dataset(by_name, partition=Natural(), test=_dataset(3), seed=0)
    assert _rows(data) == expected
    assert data.names is not None
    assert data.names.tolist() == ["zoe", "ada", "kim"]


def test_a_list_of_pairs_is_one_dataset() -> None:
    """Its items are examples, not clients."""
    pairs: list[Any] = [(torch.zeros(2), 0), (torch.ones(2), 1), (torch.ones(2), 1)]
    data = from_dataset(pairs, labels=[0, 1, 1], partition=Iid(2), test=pairs, seed=0)
    assert data.population.num_clients == 2


def test_clients_of_a_dataset_that_cannot_be_had_are_refused_in_words() -> None:
    """The error suggests a fix."""

    def made(dataset: Any, partition: Any, **more: Any) -> FederatedData:
        return from_dataset(dataset, partition=partition, test=_dataset(3), seed=0, **more)

    refused: dict[str, Callable[[], FederatedData]] = {
        "do not name their clients.*groups=": lambda: made(_dataset(6), Natural()),
        "read the dataset into arrays": lambda: made(
            _dataset(6), Bootstrap(num_clients=2, examples_per_client=2), labels=[0] * 6
        ),
        "Iid divides by labels, but none are given": lambda: made(_dataset(6), Iid(2)),
        "each of several datasets is one client": lambda: made(_sets(2, 1), Iid(2), labels=[0] * 3),
        r"client 1 \('ada'\) has no examples": lambda: made(
            {"kim": _sets(2)[0], "ada": _sets(0)[0]}, Natural()
        ),
        "client id of row 1 is 1.5": lambda: made(dict.fromkeys([1, 1.5], _sets(2)[0]), Natural()),
        "the dataset is a .*, not a map-style dataset": lambda: made(iter(_dataset(3)), Natural()),
    }
    for message, make in refused.items():
        with pytest.raises(DataError, match=message):
            make()


def test_a_label_beyond_those_of_the_test_set_is_named_with_its_client() -> None:
    """Without given labels, the test set defines the number of classes."""
    sets = {"ada": _sets(2)[0], "kim": TensorDataset(torch.zeros(2, 1), torch.tensor([0, 7]))}
    data = from_dataset(sets, partition=Natural(), test=_dataset(3), seed=0)
    with pytest.raises(DataError, match=r"row 3 of client 1 \('kim'\) has the label 7"):
        data.population.load(np.array([1]))


@pytest.mark.parametrize("as_npz", [False, True])
def test_users_with_a_row_each_are_not_lost_to_the_test_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_npz: bool
) -> None:
    """Each keeps one example for training, with a warning; others are held out as usual."""
    users = np.concatenate([np.repeat(np.arange(60), 12), np.arange(60, 100)])
    names = np.array([f"user-{user:03d}" for user in users])
    x, y = np.arange(760.0)[:, None], np.arange(760) % 2
    if as_npz:
        np.savez(tmp_path / "d.npz", allow_pickle=False, x=x, y=y, who=names)
        data = from_npz(
            *(tmp_path / "d.npz",),
            features="x",
            labels="y",
            groups="who",
            test=0.2,
            partition=Natural(),
            seed=0,
        )
    else:
        data = from_arrays(x, y, groups=names, partition=Natural(), test_fraction=0.2, seed=0)
    assert data.names is not None
    assert data.names.tolist() == np.unique(names).tolist()
    num_held_out = len(data.test.labels)
    assert data.population.num_examples(np.arange(100)).sum() + num_held_out == 760
    unmoved = from_arrays(x, y, partition=Iid(3), test_fraction=0.2, seed=0)
    given_back = set(require_single_input(unmoved.test.features)[:, 0].tolist()) - set(
        require_single_input(data.test.features)[:, 0].tolist()
    )
    assert {users[int(row)] >= 60 for row in given_back} == {True}
    assert f"all examples of {len(given_back)} of 100 clients, such as user-0" in (
        capsys.readouterr().out
    )


def test_no_warning_where_no_user_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Users with enough examples are divided as before."""
    plain = _from_arrays()
    grouped = _from_arrays(groups=np.arange(60) // 20, partition=Natural())
    assert torch.equal(
        require_single_input(plain.test.features), require_single_input(grouped.test.features)
    )
    assert "clients_keep" not in capsys.readouterr().out
