"""Splitting rules: sizes, skew, names, and data that cannot be divided."""

import tracemalloc
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import ByIds, Dirichlet, Iid, Partition, Shards, require_ids

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
    [Iid(1001), Dirichlet(501, 1.0, 2), Shards(501, 2)],
    ids=lambda rule: type(rule).__name__,
)
def test_too_few_examples_are_refused(rule: Iid | Dirichlet | Shards) -> None:
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
