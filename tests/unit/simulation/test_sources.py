"""Data sets as arrays, and what is said when a file is not as expected."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.sources import (
    Examples,
    Mask,
    bandwidth_traces,
    digits,
    mnist_by_writer,
    npz,
    read_npz,
)


def _archive(path: Path, **changes: NDArray[np.generic]) -> Path:
    arrays: dict[str, NDArray[np.generic]] = {
        "x": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "y": np.array([0, 1, 0, 1, 0, 1], np.uint8),
        "who": np.array(["a", "a", "b", "b", "c", "c"]),
        "held": np.array([False, False, True, False, False, True]),
    }
    np.savez(path, allow_pickle=True, **(arrays | changes))
    return path


def _examples(
    path: Path,
    *,
    groups: str | None = "who",
    mask: Mask | None = None,
    feature_shape: tuple[int, ...] | None = None,
    num_classes: int | None = 2,
) -> Examples:
    return npz(
        path,
        features="x",
        labels="y",
        groups=groups,
        mask=mask,
        feature_shape=feature_shape,
        scale=0.5,
        num_classes=num_classes,
    )


def test_digits_are_split_by_class_and_scaled() -> None:
    """A fifth of every class is held out, and pixels lie in [0, 1]."""
    data = digits(test_fraction=0.2, seed=Seed(0))
    assert data.train.features.shape == (1438, 64)
    assert data.test.features.shape == (359, 64)
    assert data.train.features.dtype == torch.float32
    assert [float(extreme) for extreme in data.train.features.aminmax()] == [0.0, 1.0]
    train, test = (torch.bincount(part.labels).float() for part in (data.train, data.test))
    assert (test / (train + test)).sub(0.2).abs().max() < 0.004


def test_the_seed_alone_decides_what_is_held_out() -> None:
    """The same seed holds out the same digits, another seed others."""
    first, again, other = (
        digits(test_fraction=0.2, seed=Seed(value)).test.features for value in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.001, 0.999])
def test_a_split_needs_two_parts(fraction: float) -> None:
    """Neither part may be empty."""
    with pytest.raises(ValueError, match="test_fraction"):
        digits(test_fraction=fraction, seed=Seed(0))


def _mnist(folder: Path) -> Path:
    rng, arrays = np.random.default_rng(0), {}
    for part, size in (("train", 6), ("test", 3)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, 28, 28), np.uint8)
        arrays[f"y_{part}"] = np.arange(size, dtype=np.uint8)
        arrays[f"writer_{part}"] = np.arange(size, dtype=np.int16) // 2
    np.savez(folder / "mnist.npz", allow_pickle=False, **arrays)
    return folder


def test_mnist_keeps_its_writers(tmp_path: Path) -> None:
    """Features are images or vectors in [0, 1]; groups are the writers."""
    folder = _mnist(tmp_path)
    images = mnist_by_writer(folder, flat=False)
    vectors = mnist_by_writer(folder, flat=True)
    assert images.train.features.shape == (6, 1, 28, 28)
    assert images.test.features.shape == (3, 1, 28, 28)
    assert torch.equal(images.train.features.flatten(1), vectors.train.features)
    assert 0.9 < images.train.features.max() <= 1.0
    assert images.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.train.groups is not None
    assert images.train.groups.tolist() == [0, 0, 1, 1, 2, 2]


def test_an_archive_gives_scaled_features_labels_and_groups(tmp_path: Path) -> None:
    """Bytes become float32 times the scale, labels int64, groups stay as they are."""
    examples = _examples(_archive(tmp_path / "d.npz"))
    assert torch.equal(examples.features, torch.arange(24).reshape(6, 2, 2) * 0.5)
    assert examples.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert examples.groups is not None
    assert examples.groups.tolist() == ["a", "a", "b", "b", "c", "c"]
    assert _examples(tmp_path / "d.npz", groups=None).groups is None
    assert _examples(tmp_path / "d.npz", feature_shape=(4,)).features.shape == (6, 4)
    assert _examples(tmp_path / "d.npz", num_classes=None).labels.dtype == torch.float32


def test_a_mask_divides_an_archive_in_two(tmp_path: Path) -> None:
    """Rows where the mask has the value, groups included."""
    path = _archive(tmp_path / "d.npz")
    held, kept = (_examples(path, mask=Mask("held", value)) for value in (True, False))
    assert held.groups is not None
    assert held.groups.tolist() == ["b", "c"]
    assert len(kept.labels) == 4
    assert held.features[1, 0, 0] == 10.0


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    """What is missing, where, and how to give the folder."""
    for load in (lambda: mnist_by_writer(tmp_path, flat=True), lambda: bandwidth_traces(tmp_path)):
        with pytest.raises(DataError, match=rf"no \w+\.npz in {tmp_path}; .*`--data-dir`"):
            load()


def test_a_missing_array_lists_those_present(tmp_path: Path) -> None:
    """The names in the archive are in the message."""
    with pytest.raises(DataError, match=r"no array 'z'; it has \['x', 'y', 'who', 'held'\]"):
        read_npz(_archive(tmp_path / "d.npz"), names=["x", "z"])


def test_what_is_not_an_npz_is_refused(tmp_path: Path) -> None:
    """Text, nothing, a truncated archive, a bare array, a pickle."""
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
    """A flipped byte fails the archive's own checksum."""
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
    """Lengths, shapes, dtypes and values are checked, each with its name."""
    path = tmp_path / "d.npz"
    _archive(path, y=np.zeros(5, np.uint8))
    with pytest.raises(DataError, match=r"differ in length: \{'x': \(6, 2, 2\), 'y': \(5,\)"):
        _examples(path)
    _archive(path, x=np.array(["a"] * 6))
    with pytest.raises(DataError, match=r"array 'x' .* real numbers"):
        _examples(path)
    _archive(path, y=np.linspace(0.0, 1.0, 6))
    with pytest.raises(DataError, match="class labels are integers"):
        _examples(path)
    _archive(path, y=np.arange(6))
    with pytest.raises(DataError, match=r"row 2 has the label 2, outside 0\.\.1"):
        _examples(path)
    _archive(path, x=np.full((6, 2), np.nan))
    with pytest.raises(DataError, match="row 0 has a feature that is NaN"):
        _examples(path)
    _archive(path, who=np.zeros((6, 2)))
    with pytest.raises(DataError, match="one an example"):
        _examples(path)
    _archive(path)
    with pytest.raises(DataError, match=r"shape \(2, 2\), which is not \(5,\)"):
        _examples(path, feature_shape=(5,))
    with pytest.raises(DataError, match="a mask is boolean"):
        _examples(path, mask=Mask("y", value=True))


def test_recorded_bandwidths_become_traces(tmp_path: Path) -> None:
    """Two traces of two samples each."""
    np.savez(
        tmp_path / "bandwidth_traces.npz",
        allow_pickle=False,
        time_s=np.array([0.0, 1.0, 0.0, 2.0], np.float32),
        mbit_per_s=np.array([1.0, 1.0, 4.0, 4.0], np.float32),
        offset=np.array([0, 2, 4], np.int32),
    )
    traces = bandwidth_traces(tmp_path)
    seconds = traces.transfer_s(np.array([0, 1]), start_s=np.zeros(2), num_bytes=1_000_000)
    assert seconds == pytest.approx([8.0, 2.0])


def test_importing_the_data_side_loads_neither_sklearn_nor_pyarrow() -> None:
    """A simulation on arrays starts fast and needs torch and little else."""
    program = (
        "import sys\n"
        "from fedlearn.simulation import behaviour, partition, population, sources\n"
        "print([name for name in ('sklearn', 'pyarrow') if name in sys.modules])\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[]\n"
