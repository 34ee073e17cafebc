"""Splitting rules: sizes, skew, names, and data that cannot be divided."""

import tracemalloc
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import (
    ByIds,
    Dirichlet,
    DirichletSizes,
    FewClasses,
    Iid,
    LognormalSizes,
    Partition,
    Partitioner,
    Shards,
    require_ids,
)

_LABELS = np.repeat(np.arange(10), 100)


def _skew(partition: Partition) -> float:
    """Return the mean share of a client's most frequent label."""
    clients = [_LABELS[partition.rows_of(c)] for c in range(partition.num_clients)]
    return float(np.mean([np.bincount(labels).max() / labels.size for labels in clients]))


def test_iid_sizes_differ_by_one_at_most() -> None:
    """1,000 examples over 7 clients: 142 or 143 each."""
    sizes = np.diff(Iid(7).split(_LABELS, seed=Seed(0)).offsets)
    assert set(sizes.tolist()) == {142, 143}


def test_a_smaller_alpha_skews_labels_more() -> None:
    """From about one label per client to all labels in equal shares."""
    skews = [
        _skew(Dirichlet(20, alpha, 1).split(_LABELS, seed=Seed(0))) for alpha in (0.05, 0.5, 100.0)
    ]
    assert skews[0] > 0.6 > skews[1] > 0.25 > skews[2]


def test_dirichlet_redraws_until_every_client_has_enough() -> None:
    """The first draw leaves a client below the minimum."""
    drawn_once = Dirichlet(20, 0.3, 1).split(_LABELS, seed=Seed(0))
    redrawn = Dirichlet(20, 0.3, 22).split(_LABELS, seed=Seed(0))
    assert np.diff(drawn_once.offsets).min() < 22 <= np.diff(redrawn.offsets).min()


def test_dirichlet_gives_up_with_the_best_it_found() -> None:
    """If the minimum is never reached, the error suggests a fix."""
    with pytest.raises(DataError, match=r"45 examples, .* at most \d+; raise `alpha`"):
        Dirichlet(20, 0.05, 45).split(_LABELS, seed=Seed(0))


def test_shards_bound_the_labels_of_a_client() -> None:
    """20 shards of a sorted set of 10 classes have one label each, so clients have at most two."""
    partition = Shards(10, 2).split(_LABELS, seed=Seed(1))
    labels = [np.unique(_LABELS[partition.rows_of(c)]).size for c in range(10)]
    assert max(labels) == 2
    assert np.diff(partition.offsets).tolist() == [100] * 10


def _divide_as_niid_bench(
    labels: NDArray[Any], *, num_clients: int, num_labels: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the owner of each row by "#C=k" of NIID-Bench, written from its published code."""
    contain = []
    for client_id in range(num_clients):
        current = [client_id % 10]
        while len(current) < num_labels:
            drawn = int(rng.integers(0, 10))
            if drawn not in current:
                current.append(drawn)
        contain.append(current)
    owners = np.empty(len(labels), np.int64)
    for label in range(10):
        holders = [client_id for client_id in range(num_clients) if label in contain[client_id]]
        rows = np.flatnonzero(labels == label)
        rng.shuffle(rows)
        for client_id, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            owners[part] = client_id
    return owners


@pytest.mark.parametrize(("num_clients", "num_labels"), [(10, 2), (37, 1), (12, 9), (11, 10)])
def test_few_classes_divide_as_niid_bench_does(num_clients: int, num_labels: int) -> None:
    """With the same draws, each row goes to the same client, and each client has k classes."""
    drawn = FewClasses(num_clients, num_labels).draw(_LABELS, rng=np.random.default_rng(3))
    expected = _divide_as_niid_bench(
        _LABELS, num_clients=num_clients, num_labels=num_labels, rng=np.random.default_rng(3)
    )
    for client_id in range(num_clients):
        rows = drawn.rows_of(client_id)
        assert rows.tolist() == np.flatnonzero(expected == client_id).tolist()
        assert np.unique(_LABELS[rows]).size == num_labels


@pytest.mark.parametrize(("num_clients", "per_client"), [(5, 2), (1, 10), (3, 4), (9, 2)])
def test_few_classes_cover_every_class_with_fewer_clients_than_classes(
    num_clients: int, per_client: int
) -> None:
    """All examples are divided, and each client has its number of classes."""
    for seed in range(5):
        parts = FewClasses(num_clients, per_client).split(_LABELS, seed=Seed(seed))
        assert np.sort(parts.rows).tolist() == list(range(_LABELS.size))
        counts = [np.unique(_LABELS[parts.rows_of(c)]).size for c in range(num_clients)]
        assert counts == [per_client] * num_clients


def test_few_classes_that_cannot_be_are_refused() -> None:
    """More classes for a client than there are, classes without clients, and clients without."""
    with pytest.raises(DataError, match=r"classes_per_client is 11, .* 10 classes; lower it"):
        FewClasses(20, 11).split(_LABELS, seed=Seed(0))
    with pytest.raises(DataError, match="4 clients with 2 classes each leave some of the 10 cl"):
        FewClasses(4, 2).split(_LABELS, seed=Seed(0))
    with pytest.raises(DataError, match=r"class 0 has 100 examples for the \d+ clients"):
        FewClasses(1001, 2).split(_LABELS, seed=Seed(0))


@pytest.mark.parametrize("make", [DirichletSizes, LognormalSizes])
def test_sizes_are_skewed_and_labels_are_not(make: type[DirichletSizes | LognormalSizes]) -> None:
    """Skew grows with the parameter, every client has its minimum, and labels stay mixed."""
    mild, strong = (100.0, 0.2) if make is DirichletSizes else (0.1, 2.0)
    parts = [make(20, value, 5).split(_LABELS, seed=Seed(0)) for value in (mild, strong)]
    spreads = [float(np.diff(each.offsets).std()) for each in parts]
    assert 3 * spreads[0] < 50 < spreads[1]
    assert all(np.diff(each.offsets).min() >= 5 for each in parts)
    largest = parts[1].rows_of(int(np.diff(parts[1].offsets).argmax()))
    assert np.unique(_LABELS[largest]).size == 10


def test_lognormal_sizes_follow_the_draws() -> None:
    """Without a minimum that matters, the logarithms of sizes spread by sigma."""
    sizes = np.diff(LognormalSizes(400, 0.5, 1).split(np.zeros(400_000), seed=Seed(0)).offsets)
    assert abs(float(np.log(sizes).std()) - 0.5) < 0.05
    assert np.ptp(np.diff(LognormalSizes(7, 0.0, 1).split(_LABELS, seed=Seed(0)).offsets)) <= 1


def test_natural_ids_keep_their_names() -> None:
    """Clients are numbered in ascending order of their ids, which stay their names."""
    ids = np.array([40, 7, 40, 7, 7])
    partition = ByIds(ids).split(np.zeros(5), seed=Seed(0))
    assert partition.names is not None
    assert partition.names.tolist() == [7, 40]
    assert partition.rows_of(0).tolist() == [1, 3, 4]


def test_a_row_knows_its_owner() -> None:
    """Every row of a partition is found; a row outside of it has no owner."""
    partition = Partition.of_owners(np.array([1, 0, 1, 2]), num_clients=3)
    assert [partition.owner_of(row) for row in range(4)] == [1, 0, 1, 2]
    assert partition.owner_of(4) is None


@pytest.mark.parametrize(
    "rule",
    [
        *(Iid(1001), Dirichlet(501, 1.0, 2), Shards(501, 2)),
        *(DirichletSizes(501, 1.0, 2), LognormalSizes(501, 1.0, 2)),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_too_few_examples_are_refused(rule: Partitioner) -> None:
    """1,000 examples cannot be divided into more than 1,000 parts."""
    with pytest.raises(DataError, match="1000 examples are too few"):
        rule.split(_LABELS, seed=Seed(0))


def test_an_empty_client_is_named() -> None:
    """A partition in which client 1 has no rows."""
    with pytest.raises(DataError, match="client 1 has no examples"):
        Partition.of_owners(np.array([0, 2]), num_clients=3)


def test_offsets_that_do_not_cover_the_rows_are_refused() -> None:
    """Offsets must end at the number of rows."""
    with pytest.raises(DataError, match="offsets must rise from 0 to its 3 rows"):
        Partition(np.arange(3), np.array([0, 2]))


def test_names_for_another_number_of_clients_are_refused() -> None:
    """Two names for one client."""
    with pytest.raises(DataError, match="2 names for 1 clients"):
        Partition(np.arange(3), np.array([0, 3]), np.array(["a", "b"]))


def test_splitting_by_label_needs_class_numbers() -> None:
    """Regression targets have no classes to skew."""
    for rule in (Dirichlet(2, 1.0, 1), Shards(2, 1)):
        with pytest.raises(DataError, match="one class number per example, not float64"):
            rule.split(np.linspace(0.0, 1.0, 9), seed=Seed(0))


def test_ids_of_another_length_or_kind_are_refused() -> None:
    """One id per example, an integer or a string."""
    with pytest.raises(DataError, match="one id per example"):
        ByIds(np.arange(3)).split(np.zeros(4), seed=Seed(0))
    with pytest.raises(DataError, match=r"row 0 is 0.0, a float; give integers or strings"):
        ByIds(np.linspace(0.0, 1.0, 4)).split(np.zeros(4), seed=Seed(0))


def test_values_out_of_range_are_refused() -> None:
    """Every field of every rule is checked at construction."""
    with pytest.raises(ValueError, match="num_clients is 0"):
        Iid(0)
    with pytest.raises(ValueError, match="alpha is 0"):
        Dirichlet(2, 0.0, 1)
    with pytest.raises(ValueError, match="min_examples is 0"):
        Dirichlet(2, 1.0, 0)
    with pytest.raises(ValueError, match="shards_per_client is 0"):
        Shards(2, 0)
    with pytest.raises(ValueError, match="classes_per_client is 0"):
        FewClasses(2, 0)
    with pytest.raises(ValueError, match="sigma is -1"):
        LognormalSizes(2, -1.0, 1)


def test_a_hopeless_dirichlet_is_refused_after_a_few_draws() -> None:
    """A split with a chance of success is drawn again."""
    hopeless = Dirichlet(num_clients=250, alpha=0.05, min_examples=3)
    with pytest.raises(DataError, match=r"^\d draws of Dirichlet\(0\.05\) over 250 clients: \d"):
        hopeless.split(_LABELS, seed=Seed(0))
    with pytest.raises(DataError, match=r"^1000 draws .* smallest client had at most"):
        Dirichlet(num_clients=6, alpha=0.05, min_examples=160).split(_LABELS, seed=Seed(0))


_TEXTS = ["zoe", "ada", "zoe", "kim"]


def _column(kind: str, values: list[Any]) -> Any:  # Any: a column of another library
    """Build a column of values as a given library represents it."""
    library, _, dtype = kind.partition(":")
    match library:
        case "pandas":
            return pytest.importorskip("pandas").Series(values, dtype=dtype or None)
        case "polars":
            return pytest.importorskip("polars").Series(values)
        case "pyarrow":
            array = pa.array(values)
            return array.dictionary_encode() if dtype == "dictionary" else array
        case "chunked":
            return pa.chunked_array([values[:1], values[1:]])
        case "numpy":
            return np.array(values, dtype=dtype)
        case _:
            return tuple(values) if library == "tuple" else values


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "tuple", "numpy:object", "numpy:U", "numpy:T", "pyarrow", "pyarrow:dictionary"),
        *("chunked", "polars", "pandas", "pandas:object", "pandas:category"),
        *("pandas:string[python]", "pandas:string[pyarrow]"),
    ],
)
def test_a_column_of_texts_names_the_clients(kind: str) -> None:
    """Whatever the library; clients are in the order of the texts."""
    partition = ByIds(_column(kind, _TEXTS)).split(np.zeros(4), seed=Seed(0))
    assert partition.names is not None
    assert partition.names.tolist() == ["ada", "kim", "zoe"]
    assert [partition.rows_of(client).tolist() for client in range(3)] == [[1], [3], [0, 2]]


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "numpy:object", "numpy:int16", "numpy:>i8", "pyarrow", "chunked", "polars"),
        *("pandas", "pandas:Int64", "pandas:category"),
    ],
)
def test_integers_with_gaps_and_signs_name_the_clients(kind: str) -> None:
    """Such ids are names, not client numbers."""
    partition = ByIds(_column(kind, [70, -3, 70, 4])).split(np.zeros(4), seed=Seed(0))
    assert partition.names is not None
    assert partition.names.tolist() == [-3, 4, 70]
    assert partition.rows_of(2).tolist() == [0, 2]


@pytest.mark.parametrize("values", [["a", "b", None], [1, 2, None]])
@pytest.mark.parametrize(
    "kind",
    [
        *("list", "numpy:object", "pyarrow", "pyarrow:dictionary", "chunked", "polars", "pandas"),
        *("pandas:object", "pandas:category", "pandas:string[python]", "pandas:string[pyarrow]"),
        "pandas:Int64",
    ],
)
def test_a_missing_id_is_refused_by_its_row(kind: str, values: list[Any]) -> None:
    """Otherwise rows without an owner would form one client."""
    if (values[0] == "a") == (kind == "pandas:Int64") or (values[0] == 1 and "string" in kind):
        pytest.skip("no such column")
    with pytest.raises(DataError, match="row 2 has no client id"):
        ByIds(_column(kind, values)).split(np.zeros(3), seed=Seed(0))


def test_a_masked_id_is_missing() -> None:
    """A masked value is not a name."""
    ids = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    with pytest.raises(DataError, match="row 1 has no client id"):
        ByIds(ids).split(np.zeros(3), seed=Seed(0))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, "a", 2], "row 0 is 1, of row 1 'a': integer and text; make them the same type"),
        (["a", b"a", "b"], "row 0 is 'a', of row 1 b'a': text and bytes"),
        ([True, False, True], "row 0 is True, a bool; give integers or strings"),
        (np.array([True, False, True]), "row 0 is True, a bool"),
        ([1, 2.0, 3], "row 1 is 2.0, a float"),
        ([UUID(int=1)] * 3, r"row 0 is UUID\('0.*1'\), a UUID"),
        (np.array(["2026-01-01"] * 3, "datetime64[D]"), "row 0 is datetime.date.*, a date"),
        (np.array(["NaT"] * 3, "datetime64[s]"), "row 0 has no client id"),
        ([2**70, 1, 2], "integers of more than 64 bits"),
        ([["a", "b"], ["a", "b"], ["a", "b"]], r"shape \(3, 2\) for 3 examples"),
    ],
)
def test_what_names_nobody_is_refused_in_words(ids: Any, message: str) -> None:
    """The error has the row and a fix."""
    with pytest.raises(DataError, match=message):
        ByIds(ids).split(np.zeros(3), seed=Seed(0))


def test_a_long_text_costs_no_memory_for_the_others() -> None:
    """As it would in a numpy array of fixed-width texts, with 4 MB per id."""
    ids = ["x" * 1_000_000, *map(str, range(999))]
    tracemalloc.start()
    require_ids(ids, num_examples=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
