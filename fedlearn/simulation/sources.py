"""Data sets as arrays: digits from inside scikit-learn, and npz files on disk.

Archives are read with ``allow_pickle=False``: a data file never runs code.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.behaviour import TraceBandwidth
from fedlearn.simulation.population import check_examples

_NUM_DIGITS = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples:
    """Examples before they are divided among clients.

    Attributes:
        features: Finite and real: [N, *F].
        labels: int64 classes, or finite floats to regress on: [N, *L].
        groups: Who produced each example, integers or strings: [N]; ``None`` if unknown.
        num_classes: Labels lie below it; ``None`` where they are not classes.

    Raises:
        DataError: The lengths differ, a dtype is wrong, a feature or label is not finite,
            or a label is out of range.
    """

    features: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    groups: NDArray[Any] | None = field(repr=False)  # integers or strings, as the data has them
    num_classes: int | None

    def __post_init__(self) -> None:
        check_examples(
            self.features, labels=self.labels, num_classes=self.num_classes, place="row {}".format
        )
        if self.groups is not None and self.groups.shape != (len(self.labels),):
            raise DataError(
                f"groups of shape {self.groups.shape} for {len(self.labels)} examples; give one "
                "an example"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainTest:
    """A data set in two parts.

    Attributes:
        train: What is divided among clients.
        test: What the global model is evaluated on.
    """

    train: Examples
    test: Examples


def digits(*, test_fraction: float, seed: Seed) -> TrainTest:
    """Return the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel.

    Args:
        test_fraction: Part of each class that is held out, in (0, 1).
        seed: Decides which examples are held out.

    Returns:
        Features float32 in [0, 1] of shape [N, 64], labels 0..9, no groups.

    Raises:
        ValueError: ``test_fraction`` is not in (0, 1), or leaves a part without examples.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415  takes a second; other data need it not

    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"test_fraction is {test_fraction}; it lies in (0, 1)")
    pixels, classes = load_digits(return_X_y=True)
    features = torch.from_numpy(pixels / 16.0).float()
    labels = torch.from_numpy(classes).long()
    held_out = torch.from_numpy(held_out(labels.numpy(), fraction=test_fraction, seed=seed))
    if not held_out.any() or held_out.all():
        raise ValueError(f"test_fraction {test_fraction} leaves one part empty; take about 0.2")
    train, test = (
        Examples(features=features[part], labels=labels[part], groups=None, num_classes=_NUM_DIGITS)
        for part in (~held_out, held_out)
    )
    return TrainTest(train=train, test=test)


def held_out(labels: NDArray[np.int64], *, fraction: float, seed: Seed) -> NDArray[np.bool_]:
    """Return a mask with the fraction of every class, to the nearest example."""
    keys = seed.derive("test split").hash(np.arange(labels.size))
    order = np.lexsort((keys, labels))
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place_in_class = np.arange(labels.size) - np.repeat(first, counts)
    mask = np.empty(labels.size, np.bool_)
    mask[order] = place_in_class < np.repeat(np.rint(counts * fraction), counts)
    return mask


def mnist_by_writer(data_dir: Path, *, flat: bool) -> TrainTest:
    """Return MNIST with the writer of each digit as its group.

    Args:
        data_dir: The folder that holds ``mnist.npz``.
        flat: Features of shape [N, 784] rather than [N, 1, 28, 28].

    Returns:
        60,000 digits by 539 writers and 10,000 by 297 others; float32 in [0, 1].

    Raises:
        DataError: The file is missing, is not an npz, or lacks an array.
    """
    shape = (784,) if flat else (1, 28, 28)
    train, test = (
        npz(
            data_dir / "mnist.npz",
            features=f"x_{part}",
            labels=f"y_{part}",
            groups=f"writer_{part}",
            mask=None,
            feature_shape=shape,
            scale=1.0 / 255.0,
            num_classes=_NUM_DIGITS,
        )
        for part in ("train", "test")
    )
    return TrainTest(train=train, test=test)


@dataclass(frozen=True)
class Mask:
    """Rows of an archive: those where a boolean array has a value.

    Attributes:
        array: Name of the boolean array: [N].
        value: What it is for the rows wanted.
    """

    array: str
    value: bool


def npz(
    path: Path,
    *,
    features: str,
    labels: str,
    groups: str | None,
    mask: Mask | None,
    feature_shape: tuple[int, ...] | None,
    scale: float,
    num_classes: int | None,
) -> Examples:
    """Return one part of the examples in an npz archive.

    Args:
        path: The archive.
        features: Name of the array of features: real numbers, [N, ...].
        labels: Name of the array of labels: [N, ...].
        groups: Name of the array of client ids, [N]; ``None`` if there is none.
        mask: Which rows to take; ``None`` for all.
        feature_shape: Shape of one example's features; ``None`` as they are stored.
        scale: Features are multiplied by it, e.g. 1/255 for bytes.
        num_classes: Labels are classes below it; ``None`` for numbers to regress on.

    Returns:
        Features float32; labels int64, or float32 without ``num_classes``.

    Raises:
        DataError: The file is missing or no npz, an array is missing, holds Python objects
            or something else than is needed, shapes do not fit, a value is not finite, or a
            label is out of range.
    """
    names = [features, labels, *([groups] if groups else []), *([mask.array] if mask else [])]
    arrays = read_npz(path, names=names)
    taken = _taken(arrays, mask=mask, features=features, path=path)
    pixels = _real(arrays[features], name=features, path=path)[taken]
    targets = _real(arrays[labels], name=labels, path=path)[taken]
    if num_classes is not None and targets.dtype.kind == "f":
        raise DataError(f"array {labels!r} of {path} is {targets.dtype}; class labels are integers")
    tensor = torch.from_numpy(pixels.astype(np.float32, order="C")).mul_(scale)
    target_dtype = np.float32 if num_classes is None else np.int64
    return Examples(
        features=_reshaped(tensor, shape=feature_shape, name=features, path=path),
        labels=torch.from_numpy(targets.astype(target_dtype)),
        groups=arrays[groups][taken] if groups else None,
        num_classes=num_classes,
    )


def bandwidth_traces(data_dir: Path) -> TraceBandwidth:
    """Return the recorded 3G and broadband bandwidths of ``bandwidth_traces.npz``.

    Raises:
        DataError: The file is missing, is not an npz, lacks an array, or a trace is unusable.
    """
    names = ("time_s", "mbit_per_s", "offset")
    arrays = read_npz(data_dir / "bandwidth_traces.npz", names=names)
    return TraceBandwidth(
        arrays["time_s"].astype(np.float64),
        arrays["mbit_per_s"].astype(np.float64),
        arrays["offset"].astype(np.int64),
    )


def read_npz(path: Path, *, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return named arrays of an npz archive; never unpickles.

    Raises:
        DataError: The file is missing, is not an npz or is damaged, an array is missing, or
            it holds Python objects.
    """
    if not path.is_file():
        raise DataError(
            f"there is no {path.name} in {path.parent.absolute()}; give the folder that has it "
            "with `--data-dir`"
        )
    with path.open("rb") as file:  # numpy would leave a file open that it cannot read
        archive = _as_archive(file, path=path)
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}; it has {archive.files}")
        return {name: _read_array(archive, name=name, path=path) for name in names}


def _as_archive(file: BinaryIO, *, path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is not an npz archive: {error}; fetch or write it again"
        ) from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path} is one array, not an npz archive; write it with `numpy.savez`")
    return archive


def _read_array(archive: np.lib.npyio.NpzFile, *, name: str, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"array {name!r} of {path} cannot be read: {error}; fetch or write the file again, "
            "without Python objects"
        ) from error
    return array


def _taken(
    arrays: dict[str, NDArray[Any]], *, mask: Mask | None, features: str, path: Path
) -> NDArray[np.bool_] | slice:
    """Return the rows to take, after all arrays were found equally long."""
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        shapes = {name: array.shape for name, array in arrays.items()}
        raise DataError(f"the arrays of {path} differ in length: {shapes}; name others")
    if mask is None:
        return slice(None)
    chosen: NDArray[np.bool_] = arrays[mask.array]
    if chosen.dtype != np.bool_ or chosen.ndim != 1:
        raise DataError(
            f"array {mask.array!r} of {path} is {chosen.dtype} {chosen.shape}; a mask is boolean, "
            f"one value a row of {features!r}"
        )
    return chosen if mask.value else ~chosen


def _real(array: NDArray[Any], *, name: str, path: Path) -> NDArray[Any]:
    if array.dtype.kind not in "iuf":
        raise DataError(f"array {name!r} of {path} is {array.dtype}; it holds real numbers")
    return array


def _reshaped(features: Tensor, *, shape: tuple[int, ...] | None, name: str, path: Path) -> Tensor:
    stored = features.shape[1:]
    if shape is None:
        return features
    if torch.Size(shape).numel() != stored.numel():
        raise DataError(
            f"array {name!r} of {path} has examples of shape {tuple(stored)}, which is not "
            f"{shape}; change the shape of features"
        )
    return features.reshape(-1, *shape)
