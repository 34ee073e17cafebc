"""Data sets as arrays, and the errors for files that are not as expected."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation import sources
from fedlearn.simulation.sources import (
    Examples,
    TrainTest,
    bandwidth_traces,
    digits,
    mnist_by_writer,
    npz,
    num_classes_of,
    read_npz,
)

_DATA = Path(__file__).parents[4] / "shared" / "data"
_NEEDS_DATA = pytest.mark.skipif(not _DATA.is_dir(), reason=f"there is no {_DATA} with real data")


def _archive(path: Path, **changes: NDArray[np.generic]) -> Path:
    arrays: dict[str, NDArray[np.generic]] = {
        "x": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "y": np.array([0, 1, 0, 1, 0, 1], np.uint8),
        "who": np.array(["a", "a", "b", "b", "c", "c"]),
        "held": np.array([False, False, True, False, False, True]),
    }
    np.savez(path, allow_pickle=True, **(arrays | changes))
    return path


def _examples(path: Path, *, groups: str | None = "who") -> Examples:
    return npz(path, features="x", labels="y", groups=groups)


def test_digits_are_split_by_class_and_scaled() -> None:
    """A fifth of every class is held out, and pixels are in [0, 1]."""
    data = digits(test_fraction=0.2, seed=Seed(0))
    assert require_single_input(data.train.features).shape == (1438, 64)
    assert require_single_input(data.test.features).shape == (359, 64)
    assert require_single_input(data.train.features).dtype == torch.float32
    assert [float(extreme) for extreme in require_single_input(data.train.features).aminmax()] == [
        0.0,
        1.0,
    ]
    train, test = (torch.bincount(part.labels).float() for part in (data.train, data.test))
    assert (test / (train + test)).sub(0.2).abs().max() < 0.004


@pytest.mark.slow
def test_the_digits_are_those_of_scikit_learn() -> None:
    """scikit-learn reads the same values, but must be imported first."""
    pixels, classes = import_module("sklearn.datasets").load_digits(return_X_y=True)
    data = digits(test_fraction=0.2, seed=Seed(0))
    ours = torch.cat([require_single_input(part.features) for part in (data.train, data.test)])
    labels = torch.cat([data.train.labels, data.test.labels])
    found = torch.cat([ours * 16.0, labels[:, None]], dim=1).int().tolist()
    expected = np.column_stack([pixels, classes]).astype(int).tolist()
    assert sorted(found) == sorted(expected)


def test_digits_that_are_not_there_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DIGITS", "elsewhere.csv.gz")
    with pytest.raises(DataError, match=r"elsewhere.csv.gz.*install scikit-learn"):
        digits(test_fraction=0.2, seed=Seed(0))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match="install scikit-learn"):
        digits(test_fraction=0.2, seed=Seed(0))


def test_the_seed_alone_decides_what_is_held_out() -> None:
    """The same seed holds out the same digits, and another seed holds out others."""
    first, again, other = (
        require_single_input(digits(test_fraction=0.2, seed=Seed(value)).test.features)
        for value in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def _label(labels: Tensor, *, num_classes: int | None) -> Examples:
    return Examples(
        features=torch.arange(len(labels)).float()[:, None],
        labels=labels,
        groups=np.arange(len(labels)) % 7,
        num_classes=num_classes,
    )


def test_a_split_holds_out_of_every_class_alike_and_keeps_rows_together() -> None:
    """A tenth of each class; every row is in one part, with its label and its group."""
    labels = torch.tensor([0] * 80 + [1] * 20)
    data = _label(labels, num_classes=2).split(fraction=0.1, seed=Seed(0))
    assert torch.bincount(data.test.labels).tolist() == [8, 2]
    rows = torch.cat(
        [require_single_input(part.features)[:, 0].long() for part in (data.train, data.test)]
    )
    assert sorted(rows.tolist()) == list(range(100))
    for part in (data.train, data.test):
        kept = require_single_input(part.features)[:, 0].long()
        assert torch.equal(part.labels, labels[kept])
        assert part.groups is not None
        assert part.groups.tolist() == (kept % 7).tolist()
        assert part.num_classes == 2


@pytest.mark.parametrize("shape", [(100,), (100, 3)])
def test_a_split_without_classes_holds_out_of_all(shape: tuple[int, ...]) -> None:
    """Floats and labels of several values cannot be split by class."""
    data = _label(torch.rand(shape), num_classes=None).split(fraction=0.25, seed=Seed(0))
    assert (len(data.train.labels), len(data.test.labels)) == (75, 25)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_split_holds_out_a_proper_part(fraction: float) -> None:
    """Holding out all or nothing is not a split."""
    with pytest.raises(ValueError, match="test_fraction is"):
        digits(test_fraction=fraction, seed=Seed(0))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_split_needs_two_parts(fraction: float) -> None:
    """Neither part may be empty."""
    with pytest.raises(DataError, match="leaves one part empty"):
        digits(test_fraction=fraction, seed=Seed(0))


def test_train_and_test_have_the_same_classes() -> None:
    """A model has a fixed number of outputs."""
    two, three = (_label(torch.tensor([0, 1]), num_classes=number) for number in (2, 3))
    with pytest.raises(DataError, match="num_classes is 2 for training and 3 for the test"):
        TrainTest(train=two, test=three)


def test_the_number_of_classes_is_one_more_than_the_largest_label() -> None:
    """Float labels are not classes, and without labels the number is undefined."""
    assert num_classes_of(torch.tensor([3, 0])) == 4
    assert num_classes_of(torch.tensor([3.0])) is None
    with pytest.raises(DataError, match="there are no examples"):
        num_classes_of(torch.zeros(0).long())


def _mnist(folder: Path) -> Path:
    rng, arrays = np.random.default_rng(0), {}
    for part, size in (("train", 6), ("test", 3)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, 28, 28), np.uint8)
        arrays[f"y_{part}"] = np.arange(size, dtype=np.uint8)
        arrays[f"writer_{part}"] = np.arange(size, dtype=np.int16) // 2
    np.savez(folder / "mnist.npz", allow_pickle=False, **arrays)
    return folder / "mnist.npz"


def test_mnist_keeps_its_writers(tmp_path: Path) -> None:
    """Features are images in [0, 1]; groups are the writers; the file may have any name."""
    path = _mnist(tmp_path).rename(tmp_path / "written.npz")
    images = mnist_by_writer(path)
    assert require_single_input(images.train.features).shape == (6, 1, 28, 28)
    assert require_single_input(images.test.features).shape == (3, 1, 28, 28)
    assert 0.9 < require_single_input(images.train.features).max() <= 1.0
    assert images.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.train.groups is not None
    assert images.train.groups.tolist() == [0, 0, 1, 1, 2, 2]


@_NEEDS_DATA
def test_the_real_mnist_has_539_writers_and_others_in_the_test() -> None:
    """The numbers are those in the data set's description."""
    data = mnist_by_writer(_DATA / "mnist.npz")
    assert data.train.groups is not None
    assert data.test.groups is not None
    train, test = (set(part.tolist()) for part in (data.train.groups, data.test.groups))
    assert (len(train), len(test), len(train & test)) == (539, 297, 0)
    assert require_single_input(data.train.features).shape == (60_000, 1, 28, 28)


@_NEEDS_DATA
def test_the_real_traces_carry_a_model() -> None:
    """There are 269 recorded traces; each completes a transfer of one megabyte."""
    traces = bandwidth_traces(_DATA / "bandwidth_traces.npz")
    assert traces.num_traces == 269
    every = np.arange(269)
    seconds = traces.transfer_s(every, start_s=np.zeros(269), num_bytes=1_000_000)
    assert (seconds > 0.0).all()
    assert np.isfinite(seconds).all()


def test_an_archive_gives_features_labels_and_groups(tmp_path: Path) -> None:
    """Bytes become float32 and whole labels int64; groups are unchanged."""
    examples = _examples(_archive(tmp_path / "d.npz"))
    assert torch.equal(require_single_input(examples.features), torch.arange(24.0).reshape(6, 2, 2))
    assert examples.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert examples.groups is not None
    assert examples.groups.tolist() == ["a", "a", "b", "b", "c", "c"]
    assert _examples(tmp_path / "d.npz", groups=None).groups is None
    assert examples.num_classes == 2
    halves = _examples(_archive(tmp_path / "h.npz", y=np.arange(6) / 2))
    assert (halves.num_classes, halves.labels.dtype) == (None, torch.float32)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    """The error has the file, the folder, the option for the folder, and the expected contents."""
    loads = (mnist_by_writer, "writer_train"), (bandwidth_traces, "mbit_per_s")
    for load, array in loads:
        with pytest.raises(DataError, match=rf"no d\.npz in {tmp_path}; .*`--data-dir`.*{array}"):
            load(tmp_path / "d.npz")
    with pytest.raises(DataError, match=rf"no d\.npz in {tmp_path}; correct the path"):
        read_npz(tmp_path / "d.npz", names=["x"])


def test_a_missing_array_lists_those_present(tmp_path: Path) -> None:
    """The message has the names in the archive."""
    with pytest.raises(DataError, match=r"no array 'z'; it has \['x', 'y', 'who', 'held'\]"):
        read_npz(_archive(tmp_path / "d.npz"), names=["x", "z"])


def test_what_is_not_an_npz_is_refused(tmp_path: Path) -> None:
    """Text, an empty file, a truncated archive, a single array, or a pickle."""
    path = tmp_path / "d.npz"
    whole = _archive(path).read_bytes()
    for content in (b"hello, this is text", b"", whole[: len(whole) // 2], b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not an npz archive"):
            read_npz(path, names=["x"])
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="is one array, not an npz"):
        read_npz(path, names=["x"])


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    """A flipped byte fails the archive's checksum."""
    path = _archive(tmp_path / "d.npz")
    content = path.read_bytes()
    pixels = np.arange(24, dtype=np.uint8).tobytes()
    path.write_bytes(content.replace(pixels, pixels[::-1], 1))
    with pytest.raises(DataError, match=r"array 'x' .* cannot be read"):
        read_npz(path, names=["x"])


def test_an_array_of_python_objects_is_never_unpickled(tmp_path: Path) -> None:
    """A data file must not run code."""
    path = _archive(tmp_path / "d.npz", x=np.array([print, 1], object))
    with pytest.raises(DataError, match=r"array 'x' .* cannot be read"):
        read_npz(path, names=["x"])


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Lengths, shapes, dtypes and values are checked, and the error names the array."""
    path = tmp_path / "d.npz"
    _archive(path, y=np.zeros(5, np.uint8))
    says = r"of .*\.npz: features of shape \(6, 2, 2\) and labels of shape \(5,\)"
    with pytest.raises(DataError, match=says):
        _examples(path)
    _archive(path, x=np.array(["a"] * 6))
    with pytest.raises(DataError, match=r"array 'x' .* real numbers"):
        _examples(path)
    _archive(path, y=np.arange(6) - 1)
    with pytest.raises(DataError, match=r"row 0 has the label -1, outside 0\.\.4"):
        _examples(path)
    _archive(path, x=np.full((6, 2), np.nan))
    with pytest.raises(DataError, match=r"of .*\.npz: row 0 has a feature that is NaN"):
        _examples(path)
    _archive(path, who=np.zeros((6, 2)))
    with pytest.raises(DataError, match="one per example"):
        _examples(path)


def test_recorded_bandwidths_become_traces(tmp_path: Path) -> None:
    """Two traces of two samples each."""
    np.savez(
        tmp_path / "bandwidth_traces.npz",
        allow_pickle=False,
        time_s=np.array([0.0, 1.0, 0.0, 2.0], np.float32),
        mbit_per_s=np.array([1.0, 1.0, 4.0, 4.0], np.float32),
        offset=np.array([0, 2, 4], np.int32),
    )
    traces = bandwidth_traces(tmp_path / "bandwidth_traces.npz")
    seconds = traces.transfer_s(np.array([0, 1]), start_s=np.zeros(2), num_bytes=1_000_000)
    assert seconds == pytest.approx([8.0, 2.0])


@pytest.mark.slow
def test_importing_the_data_side_loads_neither_sklearn_nor_pyarrow() -> None:
    """A simulation on arrays starts fast and needs little besides torch."""
    program = (
        "import sys\n"
        "from fedlearn.core.randomness import Seed\n"
        "from fedlearn.simulation import behavior, partition, population, sources\n"
        "sources.digits(test_fraction=0.2, seed=Seed(0))\n"
        "print([name for name in ('sklearn', 'pyarrow') if name in sys.modules])\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[]\n"
