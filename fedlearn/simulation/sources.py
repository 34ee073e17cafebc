"""Data sets as arrays: digits from inside scikit-learn, and npz files on disk.

Archives are read with ``allow_pickle=False``: a data file never runs code.
"""

import importlib.util
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedlearn.core.features import Features, Inputs, mapped, named, only
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import is_number
from fedlearn.errors import DataError
from fedlearn.simulation.behaviour import TraceBandwidth
from fedlearn.simulation.partition import checked_ids, numbered_ids
from fedlearn.simulation.population import CheckedExamples

_NUM_DIGITS = 10
#: In scikit-learn's folder: a line a digit, its pixels from 0 to 16 and its class.
_DIGITS = Path("datasets", "data", "digits.csv.gz")
#: What reading a damaged archive raises.
_DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
_WHERE_TO_LOOK = "give the folder that has it with `--data-dir`, or its path; it holds"
_MNIST_ORIGIN = (
    f"{_WHERE_TO_LOOK} the digits of MNIST with their writers' numbers, which are in the labels of "
    "QMNIST (github.com/facebookresearch/qmnist), as the arrays x_train, y_train, writer_train, "
    "x_test, y_test and writer_test"
)
_TRACES_ORIGIN = (
    f"{_WHERE_TO_LOOK} recorded bandwidths, such as those in github.com/thu-media/Comyco, as the "
    "arrays time_s, mbit_per_s and offset"
)
#: Dtypes of features by numpy's kind and size. What is not here becomes float32 or int64.
_KEPT_DTYPES = {
    (dtype.kind, dtype.itemsize): dtype
    for dtype in map(np.dtype, ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2"))
} | {("b", 1): np.dtype(np.uint8), ("f", np.dtype(np.longdouble).itemsize): np.dtype(np.float64)}
_LARGEST = 2**63 - 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples(CheckedExamples):
    """Examples before they are divided among clients.

    Attributes:
        features: Finite and real: [N, *F], or several such.
        labels: int64 classes, or finite floats to regress on: [N, *L].
        groups: Who produced each example, integers or texts: [N]; ``None`` if unknown.
        num_classes: Labels lie below it; ``None`` where they are not classes.

    Raises:
        DataError: The lengths differ, a dtype is wrong, a feature or label is not finite,
            or a label is out of range.
    """

    groups: NDArray[Any] | None = field(repr=False)  # integers or strings, as the data has them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None and self.groups.shape != (len(self.labels),):
            raise DataError(
                f"groups of shape {self.groups.shape} for {len(self.labels)} examples; give one "
                "an example"
            )

    @classmethod
    def of(
        cls, *, features: Features, labels: Tensor, groups: NDArray[Any] | None = None
    ) -> "Examples":
        """Return examples with as many classes as integer labels tell.

        Raises:
            DataError: There are none, or as above.
        """
        num_classes = num_classes_of(labels)
        return cls(features=features, labels=labels, groups=groups, num_classes=num_classes)

    def split(self, *, fraction: float, seed: Seed) -> "TrainTest":
        """Hold out a part: of every class alike, or of all examples where there are no classes.

        Every group keeps at least one example for training. Where that is less than was to be held
        out, a warning says so.

        Args:
            fraction: The part that is held out as the test set, in (0, 1).
            seed: Decides which examples are held out.

        Raises:
            ValueError: ``fraction`` is not in (0, 1).
            DataError: It leaves a part without examples.
        """
        if not is_number(fraction) or not 0.0 < fraction < 1.0:
            raise ValueError(
                f"test_fraction is {fraction!r}; give the share of the examples to hold out, a "
                "number above 0 and below 1, such as 0.2"
            )
        has_classes = self.num_classes is not None and self.labels.dim() == 1
        strata = self.labels.numpy() if has_classes else np.zeros(len(self.labels), np.int64)
        is_test = _held_out(strata, fraction=fraction, seed=seed)
        if self.groups is not None:
            is_test &= ~_last_of_each(self.groups, is_test, seed=seed)
        if not is_test.any() or is_test.all():
            raise DataError(
                f"test_fraction {fraction} of {len(self.labels)} examples leaves one part empty; "
                "take about 0.2, or add data"
            )
        return TrainTest(train=self._taken(~is_test), test=self._taken(is_test))

    def _taken(self, mask: NDArray[np.bool_]) -> "Examples":
        chosen = torch.from_numpy(mask)
        return replace(
            self,
            features=mapped(lambda tensor: tensor[chosen], self.features),
            labels=self.labels[chosen],
            groups=None if self.groups is None else self.groups[mask],
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

    @classmethod
    def of(cls, train: Examples, test: Examples) -> "TrainTest":
        """Return both parts with the classes of either.

        Raises:
            DataError: The labels of one are classes, those of the other numbers to regress on.
        """
        num_classes = larger(train.num_classes, test.num_classes)
        return cls(
            train=replace(train, num_classes=num_classes),
            test=replace(test, num_classes=num_classes),
        )


def num_classes_of(labels: Tensor) -> int | None:
    """Return one more than the largest label; ``None`` for floats, which are not classes.

    Labels of -100 are to be ignored.

    Raises:
        DataError: There are no labels.
    """
    if not labels.numel():
        raise DataError("there are no examples; give at least one")
    return None if labels.is_floating_point() else classes_up_to(int(labels.max()))


def classes_up_to(largest: int) -> int:
    """Return the number of classes where this is the largest label.

    Raises:
        DataError: It is negative: all labels are to be ignored, or are no classes.
    """
    if largest < 0:
        raise DataError(
            f"no label is a class: the largest is {largest}; give at least one label >= 0"
        )
    return largest + 1


def larger(train: int | None, test: int | None) -> int | None:
    """Return the number of classes of both parts.

    Raises:
        DataError: One has classes, the other none.
    """
    if train is not None and test is not None:
        return max(train, test)
    if train != test:
        integers, floats = ("test", "training") if train is None else ("training", "test")
        raise DataError(
            f"the {integers} labels are integers, the {floats} labels floats; make both integers "
            "for classes, or both floats to regress on"
        )
    return None


def tensor_of(
    values: ArrayLike,
    *,
    what: str,
    keeps_dtype: bool = False,
    keeps_masks: bool = False,
) -> Tensor:
    """Return a copy of real numbers as a tensor: floats in float32, integers in int64.

    Args:
        values: Shape [N, ...].
        what: Their name in a message.
        keeps_dtype: Whether they keep their own dtype, where torch can gather it.
        keeps_masks: Whether booleans stay booleans; else they are integers 0 and 1.

    Raises:
        DataError: They are ragged, no real numbers, or have no dimension.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
    except ValueError as error:  # numpy's word for ragged nested lists
        raise DataError(f"{what}: {error}; pad or crop them to one shape") from error
    kind = array.dtype.kind
    if kind not in "biuf" or not array.ndim:
        raise DataError(_no_numbers(array, what))
    if keeps_masks and kind == "b":
        return torch.from_numpy(array)
    if kind == "u" and array.size and int(array.max()) > _LARGEST:
        raise DataError(f"{what} are {array.dtype} up to {array.max()}; they lie below 2**63")
    usual = np.dtype(np.float32 if kind == "f" else np.int64)
    dtype = _KEPT_DTYPES.get((kind, array.dtype.itemsize), usual) if keeps_dtype else usual
    return torch.from_numpy(array.astype(dtype, order="C"))


def _no_numbers(array: NDArray[Any], what: str) -> str:
    """Return why an array is no examples, and what to do."""
    if not array.ndim and array.dtype.kind in "OSU":
        value = array.item()
        shown = f'"{value}"' if isinstance(value, str | Path) else f"a {type(value).__name__}"
        remedy = "; read a file with fl.from_npz or np.load" if shown[0] == '"' else ""
        return (
            f"{what}: {shown} is no array of examples; give real numbers, the first dimension "
            f"counting examples{remedy}"
        )
    found = f"{what} are {array.dtype} of shape {array.shape}; give real numbers"
    if array.dtype.kind not in "OSU" or not array.size:
        return f"{found}, the first dimension counting examples"
    text = next((each for each in array.ravel().tolist() if isinstance(each, str | bytes)), None)
    if text is None:
        return f"{found}, all rows of one shape, and fill or drop missing values"
    if what == "labels":
        return f"{found}: number the classes, as np.unique(labels, return_inverse=True)[1] does"
    return f"{found}: one is the text {text!r}; encode such columns, or leave them out"


def digits(*, test_fraction: float, seed: Seed) -> TrainTest:
    """Return the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel.

    Features are float32 in [0, 1] of shape [N, 64], labels 0..9; there are no groups. The rest is
    as of :meth:`Examples.split`.

    Raises:
        DataError: The wheel is not installed, or holds them elsewhere.
    """
    # To import the package for its load_digits takes more than a second, to read them 0.03 s.
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin if package and package.origin else "sklearn")
    try:
        rows = np.loadtxt(path.parent / _DIGITS, delimiter=",", dtype=np.float32)
    except OSError as error:
        raise DataError(
            f"the digits are not in scikit-learn's folder: {error}; install scikit-learn, or set "
            "data.source to other data"
        ) from error
    examples = Examples.of(
        features=torch.from_numpy(rows[:, :-1] / 16.0), labels=torch.from_numpy(rows[:, -1]).long()
    )
    return examples.split(fraction=test_fraction, seed=seed)


def _held_out(labels: NDArray[np.int64], *, fraction: float, seed: Seed) -> NDArray[np.bool_]:
    """Return a mask with the fraction of every class, to the nearest example."""
    keys = seed.derive("test split").hash(np.arange(labels.size))
    order = np.lexsort((keys, labels))
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place_in_class = np.arange(labels.size) - np.repeat(first, counts)
    mask = np.empty(labels.size, np.bool_)
    mask[order] = place_in_class < np.repeat(np.rint(counts * fraction), counts)
    return mask


def _last_of_each(
    groups: NDArray[Any], is_test: NDArray[np.bool_], *, seed: Seed
) -> NDArray[np.bool_]:
    """Return one example of each group that would have none left for training, as a mask."""
    names, owners = numbered_ids(checked_ids(groups, num_examples=len(groups)))
    lost = np.bincount(owners[~is_test], minlength=len(names)) == 0
    is_kept = np.zeros(len(groups), np.bool_)
    if lost.any():
        rows = np.flatnonzero(lost[owners])
        keys = seed.derive("test split").hash(rows)
        order = rows[np.lexsort((keys, owners[rows]))]
        _, first = np.unique(owners[order], return_index=True)
        is_kept[order[first]] = True
        _log.warning(
            "clients_keep_an_example",
            note=f"the test set would have had all examples of {lost.sum()} of {len(names)} "
            f"clients, such as {names[lost][0]}: one example of each stays for training",
        )
    return is_kept


def mnist_by_writer(path: Path) -> TrainTest:
    """Return MNIST, from an archive like ``mnist.npz``, with the writer of each digit as its group.

    Returns:
        60,000 digits by 539 writers and 10,000 by 297 others; float32 in [0, 1] of shape
        [N, 1, 28, 28].

    Raises:
        DataError: The file is missing, is not an npz, or lacks an array.
    """
    _require_file(path, remedy=_MNIST_ORIGIN)

    def part(name: str) -> Examples:
        read = npz(path, features=f"x_{name}", labels=f"y_{name}", groups=f"writer_{name}")
        images = only(read.features).to(torch.float32).mul_(1.0 / 255.0).unsqueeze(1)
        return replace(read, features=images, num_classes=_NUM_DIGITS)

    return TrainTest(train=part("train"), test=part("test"))


def npz(path: Path, *, features: Inputs[str], labels: str, groups: str | None = None) -> Examples:
    """Return the examples in these arrays of an npz archive.

    Returns:
        Features in the dtypes of the arrays; see :mod:`fedlearn.training.input_dtypes`. Labels in
        int64 where they are integers, hence classes, else in float32.

    Raises:
        DataError: The file is missing or no npz, an array is missing, holds Python objects
            or something else than is needed, shapes do not fit, a value is not finite, or a
            label is negative.
    """
    arrays = read_npz(
        path, names=[*named(features).values(), labels, *([groups] if groups else [])]
    )
    is_only = isinstance(features, str)

    def read(name: str) -> Tensor:
        what = f"array {name!r}"
        return tensor_of(arrays[name], what=what, keeps_dtype=True, keeps_masks=not is_only)

    try:
        return Examples.of(
            features=mapped(read, features),
            labels=tensor_of(arrays[labels], what=f"array {labels!r}"),
            groups=arrays[groups] if groups else None,
        )
    except DataError as error:
        raise DataError(f"arrays {features!r} and {labels!r} of {path}: {error}") from error


def bandwidth_traces(path: Path) -> TraceBandwidth:
    """Return the recorded bandwidths in an archive such as ``bandwidth_traces.npz``.

    Raises:
        DataError: The file is missing, is not an npz, lacks an array, or a trace is unusable.
    """
    names = ("time_s", "mbit_per_s", "offset")
    _require_file(path, remedy=_TRACES_ORIGIN)
    time_s, mbit_per_s, offset = read_npz(path, names=names).values()
    return TraceBandwidth(
        time_s.astype(np.float64), mbit_per_s.astype(np.float64), offset.astype(np.int64)
    )


def read_npz(path: Path, *, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return named arrays of an npz archive; never unpickles.

    Raises:
        DataError: The file is missing, is not an npz or is damaged, an array is missing, or
            it holds Python objects.
    """
    _require_file(path, remedy="correct the path")
    with path.open("rb") as file:  # numpy would leave a file open that it cannot read
        try:
            archive = np.load(file, allow_pickle=False)
        except _DAMAGE as error:
            raise DataError(
                f"{path} is not an npz archive: {error}; fetch or write it again"
            ) from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is one array, not an npz archive; write it with `numpy.savez`")
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}; it has {archive.files}")
        return {name: _read_array(archive, name=name, path=path) for name in names}


def _read_array(archive: np.lib.npyio.NpzFile, *, name: str, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except _DAMAGE as error:
        raise DataError(
            f"array {name!r} of {path} cannot be read: {error}; fetch or write the file again, "
            "without Python objects"
        ) from error
    return array


def _require_file(path: Path, *, remedy: str) -> None:
    if not path.is_file():
        raise DataError(f"there is no {path.name} in {path.parent.absolute()}; {remedy}")
