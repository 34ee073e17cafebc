"""Federated data sets from CSV files and data frames: roles of columns, classes, and refusals."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fedlearn as fl
from fedlearn.core.features import require_single_input
from fedlearn.errors import DataError
from fedlearn.simulation.held_out import hold_out

_AACHEN = "id,age,sex,ill\n1,61,m,yes\n2,47,f,no\n3,52,f,yes\n4,40,m,no\n"
_BERLIN = "ill,sex,age,id\nmaybe,m,70.5,5\nno,m,35,6\nyes,f,44,7\nno,f,29,8\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "aachen.csv").write_text(_AACHEN)
    (tmp_path / "berlin.csv").write_text(_BERLIN)
    return tmp_path


def _rows_of(data: fl.FederatedData, client_id: int) -> tuple[list[Any], list[Any]]:
    features, labels = data.population.load(np.asarray([client_id])).gather()
    return require_single_input(features).tolist(), labels.tolist()


def test_each_file_is_a_client_with_its_rows(folder: Path) -> None:
    data = fl.from_csv(
        folder, label="ill", exclude=["id"], one_hot=["sex"], test=folder / "berlin.csv", seed=0
    )
    assert data.names is not None
    assert data.names.tolist() == ["aachen", "berlin"]
    assert data.class_names == ("maybe", "no", "yes")
    assert data.feature_names == ("age", "sex=f", "sex=m")
    assert _rows_of(data, 1) == (
        [[70.5, 0.0, 1.0], [35.0, 0.0, 1.0], [44.0, 1.0, 0.0], [29.0, 1.0, 0.0]],
        [0, 1, 2, 1],
    )
    assert data.client_tests is None


def test_columns_of_numbers_are_features_by_default(folder: Path) -> None:
    data = fl.from_csv(folder, label="ill", test=0.25, seed=0)
    assert data.feature_names == ("id", "age")
    assert data.test.num_classes == 3
    train = data.population.num_examples(np.arange(2)).sum()
    assert train + len(data.test.labels) == 8


def test_a_folder_of_test_files_is_each_clients_own(folder: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "aachen.csv").write_text(_AACHEN)
    (tests / "berlin.csv").write_text("ill,sex,age,id\nunknown,m,1,1\n")
    data = fl.from_csv(folder, label="ill", test=tests, seed=0)
    assert data.client_tests is not None
    assert data.client_tests.num_examples(np.arange(2)).tolist() == [4, 1]
    # A class that only the test has is numbered, too.
    assert data.class_names == ("maybe", "no", "unknown", "yes")
    with pytest.raises(DataError, match="but Iid does not divide by these clients"):
        fl.from_csv(folder, label="ill", test=tests, partition=fl.Iid(2), seed=0)


def test_one_file_with_a_client_column(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("site,x,y\nzoe,1,0\nada,2,1\nzoe,3,1\nada,4,0\n")
    data = fl.from_csv(path, label="y", client="site", test=path, seed=0)
    assert data.names is not None
    assert data.names.tolist() == ["ada", "zoe"]
    assert _rows_of(data, 0) == ([[2.0], [4.0]], [1, 0])
    assert data.class_names is None
    assert (
        fl.from_csv(path, label="y", test=0.5, partition=fl.Iid(2), seed=0).population.num_clients
        == 2
    )
    with pytest.raises(DataError, match="one table does not say which rows"):
        fl.from_csv(path, label="y", test=0.5, seed=0)
    path.write_text("site,x,y\nzoe,1,0\n,2,1\n")
    with pytest.raises(DataError, match=r"all\.csv, line 3, column 'site': the client is missing"):
        fl.from_csv(path, label="y", client="site", test=0.5, seed=0)


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (("007", "7", "12"), ["007", "12", "7"]),
        (("7", "7", "12"), [7, 12]),
        (("98765432109876543210", "98765432109876543211", "7"), None),
    ],
)
def test_client_ids_keep_all_their_digits(
    tmp_path: Path, ids: tuple[str, ...], names: list[str | int] | None
) -> None:
    """As numbers, clients 007 and 7 would be one. Control: plain whole numbers stay numbers."""
    path = tmp_path / "all.csv"
    path.write_text("site,x,y\n" + "".join(f"{each},1,{n % 2}\n" for n, each in enumerate(ids)))
    data = fl.from_csv(path, label="y", client="site", test=path, seed=0)
    assert data.names is not None
    assert data.names.tolist() == (sorted(ids) if names is None else names)


def test_whole_numbers_are_classes_unless_they_are_regressed_on(folder: Path) -> None:
    for name, content in (("aachen", "x,y\n1,2\n2,0\n"), ("berlin", "x,y\n1,3\n5,4\n")):
        (folder / f"{name}.csv").write_text(content)
    read: Callable[..., fl.FederatedData] = lambda **options: fl.from_csv(  # noqa: E731
        folder, label="y", test=folder / "berlin.csv", seed=0, **options
    )
    assert read().test.num_classes == 5
    numbers = read(regression=True)
    assert numbers.test.num_classes is None
    assert numbers.test.labels.is_floating_point()


def test_missing_values_are_refused_filled_in_or_left_out(folder: Path) -> None:
    (folder / "berlin.csv").write_text("id,age,sex,ill\n5,,m,no\n6,35,,yes\n7,44,f,no\n")
    read: Callable[..., fl.FederatedData] = lambda **options: fl.from_csv(  # noqa: E731
        folder, label="ill", exclude=["id"], test=folder / "aachen.csv", seed=0, **options
    )
    with pytest.raises(DataError, match=r"berlin\.csv, line 2, column 'age': .*missing=\"drop\""):
        read()
    assert _rows_of(read(missing=50), 1)[0] == [[50.0], [35.0], [44.0]]
    assert _rows_of(read(missing="drop"), 1) == ([[35.0], [44.0]], [1, 0])
    by_column = read(one_hot=["sex"], missing={"age": 50, "sex": "?"})
    assert by_column.feature_names == ("age", "sex=?", "sex=f", "sex=m")
    with pytest.raises(DataError, match="fills in 50 for column 'sex', which is text"):
        read(one_hot=["sex"], missing=50)
    with pytest.raises(DataError, match=r"line 3, column 'sex': the value is missing"):
        read(one_hot=["sex"], missing={"age": 50})


@pytest.mark.parametrize("test", [0.25, "berlin.csv"], ids=["a share", "a file"])
def test_features_are_standardized_by_the_training_rows(folder: Path, test: float | str) -> None:
    """All columns of numbers but flags; test rows by the same numbers, and a constant becomes 0."""
    lines = _AACHEN.splitlines()
    (folder / "aachen.csv").write_text(
        "\n".join(
            [
                f"{lines[0]},unit,flag",
                *(f"{line},0.1,{row % 2}" for row, line in enumerate(lines[1:])),
            ]
        )
    )
    lines = _BERLIN.splitlines()
    (folder / "berlin.csv").write_text(
        "\n".join(
            [
                f"{lines[0]},unit,flag",
                *(f"{line},0.1,{row % 2}" for row, line in enumerate(lines[1:])),
            ]
        )
    )
    read: Callable[..., fl.FederatedData] = lambda **options: fl.from_csv(  # noqa: E731
        folder,
        label="ill",
        exclude=["id"],
        one_hot=["sex"],
        test=test if isinstance(test, float) else folder / test,
        seed=3,
        **options,
    )
    raw, scaled = read(), read(standardize=True)
    assert raw.feature_scaling is None
    ours, theirs = (
        np.concatenate([_rows_of(data, client)[0] for client in (0, 1)]) for data in (scaled, raw)
    )
    ages = theirs[:, 0]
    assert scaled.feature_names == ("age", "sex=f", "sex=m", "unit", "flag")
    np.testing.assert_allclose(ours[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-6)
    assert (ours[:, 3] == 0.0).all()
    assert (ours[:, [1, 2, 4]] == theirs[:, [1, 2, 4]]).all()
    tests, raw_tests = (require_single_input(data.test.features) for data in (scaled, raw))
    np.testing.assert_allclose(tests[:, 0], (raw_tests[:, 0] - ages.mean()) / ages.std(), atol=1e-5)
    assert scaled.feature_scaling is not None
    assert scaled.feature_scaling.means[0] == pytest.approx(ages.mean())
    assert scaled.feature_scaling.stds[3:] == (1.0, 1.0)


def test_labels_are_never_filled_in(folder: Path) -> None:
    (folder / "berlin.csv").write_text("id,age,sex,ill\n5,31,m,\n6,35,f,yes\n")
    read: Callable[..., fl.FederatedData] = lambda missing: fl.from_csv(  # noqa: E731
        folder, label="ill", test=folder / "aachen.csv", missing=missing, seed=0
    )
    with pytest.raises(DataError, match=r"berlin\.csv, line 2, column 'ill': the value is missing"):
        read(0)
    with pytest.raises(DataError, match="labels are not filled in"):
        read({"ill": "no"})
    assert read("drop").population.num_examples(np.arange(2)).tolist() == [4, 1]
    (folder / "berlin.csv").write_text("id,age,sex,ill\n5,31,m,\n")
    with pytest.raises(DataError, match="every row of client 'berlin' has a missing value"):
        read("drop")


def test_whole_labels_stay_classes_where_a_row_without_one_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,\n3,1\n")
    (tmp_path / "b.csv").write_text("x,y\n1,0\n2,2\n")
    data = fl.from_csv(tmp_path, label="y", missing="drop", test=tmp_path / "b.csv", seed=0)
    assert data.test.num_classes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "il"}, r"aachen\.csv has no column 'il'; did you mean 'ill'\?"),
        ({"features": ["agge"]}, r"no column is 'agge'; did you mean 'age'\?"),
        ({"features": ["sex"]}, r"line 2, column 'sex': 'm' is no number; .* one_hot"),
        ({"features": ["age", "ill"]}, "'ill' is the label; name it in no other role"),
        ({"features": ["age"], "exclude": ["id"]}, "features and exclude are both given"),
        ({"features": "age"}, "features is 'age'; give a list"),
        ({"exclude": ["id", "age"]}, "no column of numbers is left for features"),
        ({"missing": "mean"}, "missing is 'mean'; give \"error\""),
        ({"regression": True}, "column 'ill' is text, such as 'yes', and cannot be regressed on"),
        ({"one_hot": ["age"]}, r"column 'age' is in one_hot, but has 70\.5"),
    ],
)
def test_roles_that_the_columns_cannot_have(
    folder: Path,
    options: dict[str, Any],  # Any: also of wrong types
    message: str,
) -> None:
    arguments: dict[str, Any] = {"label": "ill", "test": 0.25, "seed": 0} | options
    with pytest.raises(DataError, match=message):
        fl.from_csv(folder, **arguments)


@pytest.mark.parametrize(
    ("berlin", "message"),
    [
        ("id,ill\n1,no\n", r"berlin\.csv has no column 'age'; .*it has \['id', 'ill'\]"),
        ("id,age,ill\n", r"berlin\.csv has no rows; leave it out"),
        ("id,age,ill\n1,inf,no\n", r"berlin\.csv, line 2, column 'age': inf is not finite"),
        (",age,id,ill\n0,1,2,no\n", "a column has no name, such as the row numbers"),
    ],
)
def test_a_file_that_does_not_fit_the_others(folder: Path, berlin: str, message: str) -> None:
    (folder / "berlin.csv").write_text(berlin)
    with pytest.raises(DataError, match=message):
        fl.from_csv(folder, label="ill", test=0.25, seed=0)


def test_clients_hold_out_rows_of_their_own(folder: Path) -> None:
    data = fl.from_csv(folder, label="ill", test=folder / "aachen.csv", seed=0)
    train, test = hold_out(data.population, fraction=0.25, seed=fl.Seed(0))
    clients = np.arange(2)
    assert train.num_examples(clients).tolist() == [3, 3]
    assert test.num_examples(clients).tolist() == [1, 1]


def test_frames_by_client_column_and_by_client() -> None:
    frame = pa.table(
        {
            "site": pa.array(["zoe", "ada", "zoe", "ada"]).dictionary_encode(),
            "age": pa.array([1, None, 3, 4]),
            "ok": [True, False, True, True],
            "ill": ["no", "yes", "yes", "no"],
        }
    )
    data = fl.from_frame(frame, label="ill", client="site", missing=0, test=frame, seed=0)
    assert data.names is not None
    assert data.names.tolist() == ["ada", "zoe"]
    assert data.feature_names == ("age", "ok")
    assert _rows_of(data, 0) == ([[0.0, 0.0], [4.0, 1.0]], [1, 0])
    with pytest.raises(DataError, match="row 1 of the frame, column 'age': the value is missing"):
        fl.from_frame(frame, label="ill", client="site", test=frame, seed=0)
    own = {"zoe": frame.slice(2), "Köln, <b>": frame.slice(2)}
    data = fl.from_frame(own, label="ill", test=own, seed=0)
    assert data.names is not None
    assert data.names.tolist() == ["Köln, <b>", "zoe"]
    assert data.client_tests is not None


def test_frames_of_pandas_and_polars_equal_those_of_pyarrow() -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    values = {"site": ["a", "b", "a"], "x": [1.5, None, 2.0], "n": [1, 2, 3], "y": ["u", "v", "u"]}
    read: Callable[[Any], fl.FederatedData] = lambda frame: fl.from_frame(  # noqa: E731
        frame, label="y", client="site", missing=0.0, test=frame, seed=0
    )
    expected = read(pa.table(values))
    shuffled = pandas.DataFrame(values, index=[7, 5, 3]).astype({"site": "category"})
    named = polars.DataFrame(values)
    coded = named.with_columns(polars.col("site", "y").cast(polars.Categorical))
    for frame in (shuffled, named, coded):
        data = read(frame)
        assert data.feature_names == expected.feature_names == ("x", "n")
        assert data.class_names == ("u", "v")
        assert [_rows_of(data, each) for each in range(2)] == [
            _rows_of(expected, each) for each in range(2)
        ]


def test_a_column_that_is_neither_numbers_nor_texts_is_no_silent_loss() -> None:
    """Dates and nested values are refused until they are numbers, or left out by name."""
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]
    values = {"x": [1.0, 2.0], "admitted": [None, days[1]], "y": [0, 1]}
    frames = [pa.table(values), *(each(values) for each in _frame_libraries())]
    for frame in frames:
        with pytest.raises(DataError, match=r"row 1 of the frame, column 'admitted': a .* is nei"):
            fl.from_frame(frame, label="y", partition=fl.Iid(2), test=frame, seed=0)
        own: dict[str, Any] = {"label": "y", "partition": fl.Iid(2), "test": frame, "seed": 0}
        assert fl.from_frame(frame, exclude=["admitted"], **own).feature_names == ("x",)
        assert fl.from_frame(frame, features=["x"], **own).feature_names == ("x",)
    frame = pa.table({"x": [[1.0], [2.0]], "n": [1, 2], "y": [0, 1]})
    with pytest.raises(DataError, match="column 'x': a list is neither a number nor text"):
        fl.from_frame(frame, label="y", partition=fl.Iid(2), test=frame, seed=0)


@pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")
def test_two_columns_with_one_name_are_no_silent_loss() -> None:
    """Pandas may call them 1 and "1". Control: with another name both are features."""
    values = [pa.array(each) for each in ([1.0, 2.0], [3.0, 4.0], [0, 1])]
    frames = [pa.Table.from_arrays(values, ["x", "x", "y"])]
    pandas = pytest.importorskip("pandas")
    rows = [[1.0, 3.0, 0], [2.0, 4.0, 1]]
    frames += [pandas.DataFrame(rows, columns=each) for each in (["x", "x", "y"], [1, "1", "y"])]
    own: dict[str, Any] = {"label": "y", "partition": fl.Iid(2), "seed": 0}
    for frame in frames:
        with pytest.raises(DataError, match=r"several columns|Duplicate column names"):
            fl.from_frame(frame, **own)
    named = pa.Table.from_arrays(values, ["x", "z", "y"])
    assert fl.from_frame(named, **own).feature_names == ("x", "z")


def test_pandas_columns_of_other_kinds_are_refused_by_name() -> None:
    """Periods arrive as integers in an extension type, and would be passed over as texts are."""
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    months = plain.assign(month=pandas.period_range("2026-01", periods=2, freq="M"))
    sparse = plain.assign(rare=pandas.arrays.SparseArray([0.0, 1.0]))
    own: dict[str, Any] = {"label": "y", "partition": fl.Iid(2), "seed": 0}
    with pytest.raises(DataError, match="column 'month': a coded value is neither a number nor"):
        fl.from_frame(months, **own)
    with pytest.raises(DataError, match=r"no table of plain columns: .*rare"):
        fl.from_frame(sparse, **own)
    assert fl.from_frame(months, exclude=["month"], **own).feature_names == ("x",)


def test_a_column_without_a_value_has_the_type_that_it_has_at_other_clients() -> None:
    """Without values at any client it is a column of numbers, all of which are missing."""
    full = {"x": [1.0, 2.0], "sex": ["f", "m"], "y": [0, 1]}
    lacking = full | {"x": [None, None], "sex": [None, None]}
    for make in (pa.table, *_frame_libraries()):
        frames = {"aachen": make(full), "berlin": make(lacking)}
        missing: dict[str, float | str] = {"x": 5.0, "sex": "f"}
        own: dict[str, Any] = {"label": "y", "one_hot": ["sex"], "test": frames, "seed": 0}
        data = fl.from_frame(frames, missing=missing, **own)
        assert _rows_of(data, 1) == ([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]], [0, 1])
        with pytest.raises(DataError, match="row 0 of the frame of 'berlin', column 'x': the val"):
            fl.from_frame(frames, **own)
        with pytest.raises(DataError, match="column 'x': the value is missing; give missing="):
            fl.from_frame({"berlin": make(lacking)}, label="y", test=0.5, seed=0)


def _frame_libraries() -> list[Callable[[Any], Any]]:
    """Return the constructors of pandas' and polars' frames."""
    return [pytest.importorskip("pandas").DataFrame, pytest.importorskip("polars").DataFrame]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([[1, 2]], "the frame is a list; give a data frame"),
        ({}, "the frame is an empty mapping"),
        ({"a": {"x": [1]}}, "the frame of 'a' is a dict"),
    ],
)
def test_what_is_no_frame(frame: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fl.from_frame(frame, label="y", test=0.5, seed=0)


def test_text_labels_of_arrays_are_numbered_over_all_parts() -> None:
    x, sites = np.eye(4), ["a", "a", "b", "b"]
    data = fl.from_arrays(
        x,
        ["dog", "cat", "dog", "owl"],
        groups=sites,
        partition=fl.Natural(),
        test=(x[:2], ["emu", "owl"]),
        seed=0,
    )
    assert data.class_names == ("cat", "dog", "emu", "owl")
    assert [_rows_of(data, each)[1] for each in range(2)] == [[1, 0], [1, 3]]
    assert data.test.labels.tolist() == [2, 3]
    own = data.with_client_tests([(x[:1], ["owl"]), (x[:1], ["cat"])])
    assert own.client_tests is not None
    assert own.client_tests.load(np.arange(2)).gather()[1].tolist() == [3, 0]
    with pytest.raises(DataError, match="the label 'cow' is none of the classes"):
        data.with_client_tests([(x[:1], ["owl"]), (x[:1], ["cow"])])
    with pytest.raises(DataError, match="labels are numbers in one part"):
        fl.from_arrays(x, ["a", "b", "a", "b"], test=(x, [0, 1, 0, 1]), partition=fl.Iid(2), seed=0)


def test_text_labels_of_an_archive_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.eye(4), y=np.array(["no", "yes", "no", "yes"]))
    data = fl.from_npz(
        path, features="x", labels="y", groups=None, test=0.5, partition=fl.Iid(2), seed=0
    )
    assert data.class_names == ("no", "yes")


def test_partitions_of_flwr_datasets_are_clients() -> None:
    datasets = pytest.importorskip("datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    rows = datasets.Dataset.from_dict(
        {
            "site": ["zoe", "ada", "zoe", "ada"],
            "x": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
            "y": [0, 1, 1, 0],
        },
        features=datasets.Features(
            {
                "site": datasets.Value("string"),
                "x": datasets.List(datasets.Value("float32")),
                "y": datasets.ClassLabel(names=["no", "yes", "maybe"]),
            }
        ),
    )
    natural = partitioners.NaturalIdPartitioner(partition_by="site")
    natural.dataset = rows
    data = fl.from_partitions(natural, label="y", inputs=["x"], test=rows)
    assert data.names is not None
    clients = dict(zip(data.names.tolist(), (_rows_of(data, k) for k in range(2)), strict=True))
    assert clients["zoe"] == ([[0.0, 1.0], [4.0, 5.0]], [0, 1])
    assert data.class_names == ("no", "yes", "maybe")
    iid = partitioners.IidPartitioner(num_partitions=4)
    iid.dataset = rows.with_format("torch")
    four = fl.from_partitions(iid, label="y", inputs=["x"], test=rows.with_format("torch"))
    assert four.population.num_examples(np.arange(4)).tolist() == [1, 1, 1, 1]
    with pytest.raises(DataError, match="dataset\\[0\\] has no column 'z'"):
        fl.from_partitions(iid, label="z", test=rows)


def test_what_divides_nothing_is_no_partitioner() -> None:
    nothing: Any = [1, 2]  # Any: of a wrong type
    with pytest.raises(DataError, match="partitions is a list, without load_partition"):
        fl.from_partitions(nothing, label="y", test=[])
