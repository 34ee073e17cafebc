"""Data sets as arrays: digits from inside scikit-learn, and npz files on disk.

Archives are read with ``allow_pickle=False``: a data file never runs code.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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
_WHERE_TO_LOOK = "give the folder that has it with `--data-dir`, or its path"
_MNIST_ORIGIN = (
    "it holds the digits of MNIST with their writers' numbers, which are in the labels of QMNIST "
    "(github.com/facebookresearch/qmnist), as the arrays x_train, y_train, writer_train, x_test, "
    "y_test and writer_test"
)
_TRACES_ORIGIN = (
    "it holds recorded bandwidths, such as those in github.com/thu-media/Comyco, as the arrays "
    "time_s, mbit_per_s and offset"
)


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

    def split(self, *, fraction: float, seed: Seed) -> "TrainTest":
        """Hold out a part: of every class alike, or of all examples where there are no classes.

        Args:
            fraction: The part that is held out as the test set, in (0, 1).
            seed: Decides which examples are held out.

        Raises:
            ValueError: ``fraction`` is not in (0, 1).
            DataError: It leaves a part without examples.
        """
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"the fraction held out is {fraction}; it lies in (0, 1)")
        has_classes = self.num_classes is not None and self.labels.dim() == 1
        strata = self.labels.numpy() if has_classes else np.zeros(len(self.labels), np.int64)
        is_test = held_out(strata, fraction=fraction, seed=seed)
        if not is_test.any() or is_test.all():
            raise DataError(
                f"test_fraction {fraction} of {len(self.labels)} examples leaves one part empty; "
                "take about 0.2, or add data"
            )
        return TrainTest(train=self._taken(~is_test), test=self._taken(is_test))

    def _taken(self, mask: NDArray[np.bool_]) -> "Examples":
        chosen = torch.from_numpy(mask)
        return Examples(
            features=self.features[chosen],
            labels=self.labels[chosen],
            groups=None if self.groups is None else self.groups[mask],
            num_classes=self.num_classes,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainTest:
    """A data set in two parts.

    Attributes:
        train: What is divided among clients.
        test: What the global model is evaluated on.

    Raises:
        DataError: The parts differ in their number of classes.
    """

    train: Examples
    test: Examples

    def __post_init__(self) -> None:
        if self.train.num_classes != self.test.num_classes:
            raise DataError(
                f"num_classes is {self.train.num_classes} for training and "
                f"{self.test.num_classes} for the test; give both the larger, or neither"
            )


def num_classes_of(labels: Tensor) -> int | None:
    """Return one more than the largest label; ``None`` for floats, which are not classes.

    Raises:
        DataError: There are no labels.
    """
    if not labels.numel():
        raise DataError("there are no examples; give at least one")
    return None if labels.is_floating_point() else int(labels.max()) + 1


def digits(*, test_fraction: float, seed: Seed) -> TrainTest:
    """Return the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel.

    Args:
        test_fraction: Part of each class that is held out, in (0, 1).
        seed: Decides which examples are held out.

    Returns:
        Features float32 in [0, 1] of shape [N, 64], labels 0..9, no groups.

    Raises:
        ValueError: ``test_fraction`` is not in (0, 1).
        DataError: It leaves a part without examples.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415  takes a second; other data need it not

    pixels, classes = load_digits(return_X_y=True)
    examples = Examples(
        features=torch.from_numpy(pixels / 16.0).float(),
        labels=torch.from_numpy(classes).long(),
        groups=None,
        num_classes=_NUM_DIGITS,
    )
    return examples.split(fraction=test_fraction, seed=seed)


def held_out(labels: NDArray[np.int64], *, fraction: float, seed: Seed) -> NDArray[np.bool_]:
    """Return a mask with the fraction of every class, to the nearest example."""
    keys = seed.derive("test split").hash(np.arange(labels.size))
    order = np.lexsort((keys, labels))
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place_in_class = np.arange(labels.size) - np.repeat(first, counts)
    mask = np.empty(labels.size, np.bool_)
    mask[order] = place_in_class < np.repeat(np.rint(counts * fraction), counts)
    return mask


def mnist_by_writer(path: Path) -> TrainTest:
    """Return MNIST with the writer of each digit as its group.

    Args:
        path: The archive, usually called ``mnist.npz``.

    Returns:
        60,000 digits by 539 writers and 10,000 by 297 others; float32 in [0, 1] of shape
        [N, 1, 28, 28].

    Raises:
        DataError: The file is missing, is not an npz, or lacks an array.
    """
    _require_file(path, remedy=f"{_WHERE_TO_LOOK}; {_MNIST_ORIGIN}")
    train, test = (
        npz(
            path,
            features=f"x_{part}",
            labels=f"y_{part}",
            groups=f"writer_{part}",
            mask=None,
            feature_shape=(1, 28, 28),
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
    shaped = _reshaped(tensor, shape=feature_shape, name=features, path=path)
    try:
        return Examples(
            features=shaped,
            labels=torch.from_numpy(targets.astype(target_dtype)),
            groups=arrays[groups][taken] if groups else None,
            num_classes=num_classes,
        )
    except DataError as error:
        raise DataError(f"arrays {features!r} and {labels!r} of {path}: {error}") from error


def npz_train_test(
    path: Path,
    *,
    features: str,
    labels: str,
    groups: str | None,
    test: tuple[str, str] | float,
    seed: Seed,
) -> TrainTest:
    """Return the examples of an npz archive in two parts. Integer labels are classes.

    Args:
        path: The archive.
        features: Name of the array of features.
        labels: Name of the array of labels.
        groups: Name of the array of client ids; ``None`` if there is none.
        test: Names of the test features and labels, or the part to hold out, in (0, 1).
        seed: Decides which examples are held out.

    Raises:
        ValueError: The part to hold out is not in (0, 1).
        DataError: As :func:`npz`; or holding out leaves a part without examples.
    """
    names = [labels, test[1]] if isinstance(test, tuple) else [labels]
    num_classes = _num_classes(path, names=names)
    read = partial(npz, path, mask=None, feature_shape=None, scale=1.0, num_classes=num_classes)
    train = read(features=features, labels=labels, groups=groups)
    if isinstance(test, tuple):
        return TrainTest(train=train, test=read(features=test[0], labels=test[1], groups=None))
    return train.split(fraction=test, seed=seed)


def _num_classes(path: Path, *, names: Sequence[str]) -> int | None:
    """Return the number of classes in all these label arrays; ``None`` if they hold floats."""
    arrays = read_npz(path, names=names)
    is_float = {name: _real(arrays[name], name=name, path=path).dtype.kind == "f" for name in names}
    if len(set(is_float.values())) > 1:
        raise DataError(
            f"of the label arrays {list(names)} of {path} one holds integers and one floats; "
            "write classes as integers in both, or numbers to regress on as floats in both"
        )
    if is_float[names[0]]:
        return None
    return max(int(array.max(initial=0)) for array in arrays.values()) + 1


def bandwidth_traces(path: Path) -> TraceBandwidth:
    """Return the recorded bandwidths in an archive such as ``bandwidth_traces.npz``.

    Raises:
        DataError: The file is missing, is not an npz, lacks an array, or a trace is unusable.
    """
    names = ("time_s", "mbit_per_s", "offset")
    _require_file(path, remedy=f"{_WHERE_TO_LOOK}; {_TRACES_ORIGIN}")
    arrays = read_npz(path, names=names)
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
    _require_file(path, remedy="correct the path")
    with path.open("rb") as file:  # numpy would leave a file open that it cannot read
        archive = _as_archive(file, path=path)
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}; it has {archive.files}")
        return {name: _read_array(archive, name=name, path=path) for name in names}


def _require_file(path: Path, *, remedy: str) -> None:
    if not path.is_file():
        raise DataError(f"there is no {path.name} in {path.parent.absolute()}; {remedy}")


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
