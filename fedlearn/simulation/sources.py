"""Loads data sets into arrays: scikit-learn's digits, and npz files on disk.

Archives are read with ``allow_pickle=False``, so that a data file never runs code.
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

from fedlearn.core.features import Features, Inputs, map_inputs, name_inputs, require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import is_number
from fedlearn.errors import DataError
from fedlearn.simulation.behavior import TraceBandwidth
from fedlearn.simulation.partition import number_ids, require_ids
from fedlearn.simulation.population import CheckedExamples
from fedlearn.training.data_names import TableEncoding
from fedlearn.training.scaling import FeatureScaling

_NUM_DIGITS = 10
#: In scikit-learn's folder: one line per digit, with its pixels from 0 to 16 and its class.
_DIGITS = Path("datasets", "data", "digits.csv.gz")
#: Errors from reading a damaged archive.
_DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
_WHERE_TO_LOOK = "give its folder with `--data-dir`, or its path; it holds"
_MNIST_ORIGIN = (
    f"{_WHERE_TO_LOOK} the digits of MNIST with their writers' numbers, which are in the labels of "
    "QMNIST (github.com/facebookresearch/qmnist), as the arrays x_train, y_train, writer_train, "
    "x_test, y_test and writer_test"
)
_TRACES_ORIGIN = (
    f"{_WHERE_TO_LOOK} recorded bandwidths, such as those in github.com/thu-media/Comyco, as the "
    "arrays time_s, mbit_per_s and offset"
)
#: Dtypes of features by numpy's kind and size. Any other becomes float32 or int64.
_KEPT_DTYPES = {
    (dtype.kind, dtype.itemsize): dtype
    for dtype in map(np.dtype, ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2"))
} | {("b", 1): np.dtype(np.uint8), ("f", np.dtype(np.longdouble).itemsize): np.dtype(np.float64)}
# int64 would wrap around silently above this.
_LARGEST = 2**63 - 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples(CheckedExamples):
    """Examples before they are divided among clients.

    Attributes:
        features: Finite real numbers: [N, *F], or several such inputs.
        labels: int64 classes, or finite floats to regress on: [N, *L].
        groups: The natural client of each example, integers or strings: [N]; ``None`` if unknown.
        num_classes: Labels are below it; ``None`` if they are not classes.
        class_names: The classes' names in the data, by label; ``None`` if they have no names.
        feature_names: The features' names in the data, by column; ``None`` if they have no names.
        feature_scaling: How the features were scaled; ``None``: they are as in the data.
        encoding: How a table became features and labels; ``None``: the data are no table.

    Raises:
        DataError: The lengths differ, a dtype is wrong, a feature or label is not finite,
            a label is out of range, or there is not one name for each class.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> examples = fl.Examples.of(features=torch.zeros(4, 2), labels=torch.tensor([0, 1, 2, 1]))
        >>> examples.num_classes
        3
    """

    groups: NDArray[Any] | None = field(repr=False)  # integers or strings, as the data has them
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    feature_names: tuple[str, ...] | None = field(default=None, repr=False)
    feature_scaling: FeatureScaling | None = field(default=None, repr=False)
    encoding: TableEncoding | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise DataError(
                f"{len(self.class_names)} class_names for {self.num_classes} classes; give one "
                "name for each"
            )
        if self.groups is not None and self.groups.shape != (len(self.labels),):
            raise DataError(
                f"groups of shape {self.groups.shape} for {len(self.labels)} examples; give one "
                "per example"
            )

    @classmethod
    def of(
        cls,
        *,
        features: Features,
        labels: Tensor,
        groups: NDArray[Any] | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> "Examples":
        """Create examples, with the number of classes found from integer labels.

        Raises:
            DataError: There are no examples, or they are invalid: see the class.
        """
        return cls(
            features=features,
            labels=labels,
            groups=groups,
            num_classes=num_classes_of(labels),
            class_names=class_names,
        )

    def without_rows(self) -> "Examples":
        """Return no examples, of the same kind and with the same names: a test set left out."""
        features = map_inputs(lambda each: each[:0], self.features)
        return replace(self, features=features, labels=self.labels[:0], groups=None)

    def with_classes(self, class_names: tuple[str, ...]) -> "Examples":
        """Return the examples with the labels that these names have.

        Raises:
            DataError: The classes have no names, or one has another name.
        """
        if self.class_names is None:
            raise DataError(
                "labels are numbers in one part of the data and texts in another; make them alike"
            )
        unknown = [name for name in self.class_names if name not in class_names]
        if unknown:
            raise DataError(
                f"the label {unknown[0]!r} is none of the classes {list(class_names)}; correct it, "
                "or add an example with it to the training or the test data"
            )
        numbers = torch.tensor([class_names.index(name) for name in self.class_names])
        return replace(
            self,
            labels=numbers[self.labels],
            num_classes=len(class_names),
            class_names=class_names,
        )

    def with_scaling(self, scaling: FeatureScaling) -> "Examples":
        """Return the examples with scaled features, which are [N, F]."""
        features = map_inputs(scaling.apply, self.features)
        return replace(self, features=features, feature_scaling=scaling)

    def split(self, *, fraction: float, seed: Seed) -> "TrainTest":
        """Hold out a test set: the same fraction of each class, or of all examples without classes.

        Every group keeps at least one example for training. If fewer examples are held out for
        that reason, a warning is logged.

        Args:
            fraction: The fraction of the examples to hold out, in (0, 1).
            seed: Chooses the examples to hold out.

        Raises:
            ValueError: ``fraction`` is not in (0, 1).
            DataError: One part would have no examples.
        """
        if not is_number(fraction) or not 0.0 < fraction < 1.0:
            raise ValueError(
                f"test_fraction is {fraction!r}; give the share of the examples to hold out, a "
                "number above 0 and below 1, such as 0.2"
            )
        has_classes = self.num_classes is not None and self.labels.dim() == 1
        strata = self.labels.numpy() if has_classes else np.zeros(len(self.labels), np.int64)
        is_test = _choose_held_out(strata, fraction=fraction, seed=seed)
        if self.groups is not None:
            is_test &= ~_last_of_each(self.groups, is_test, seed=seed)
        if not is_test.any() or is_test.all():
            raise DataError(
                f"test_fraction {fraction} of {len(self.labels)} examples leaves one part empty; "
                "use about 0.2, or add data"
            )
        return TrainTest(train=self._select(~is_test), test=self._select(is_test))

    def _select(self, mask: NDArray[np.bool_]) -> "Examples":
        chosen = torch.from_numpy(mask)
        return replace(
            self,
            features=map_inputs(lambda tensor: tensor[chosen], self.features),
            labels=self.labels[chosen],
            groups=None if self.groups is None else self.groups[mask],
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainTest:
    """A data set in two parts: for training and for testing.

    Attributes:
        train: The examples to divide among clients.
        test: The examples on which the global model is evaluated.

    Raises:
        DataError: The parts differ in their number of classes.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> examples = fl.Examples.of(features=torch.zeros(10, 3), labels=torch.arange(10) % 2)
        >>> data = examples.split(fraction=0.2, seed=fl.Seed(0))
        >>> len(data.train.labels), len(data.test.labels)
        (8, 2)
    """

    train: Examples
    test: Examples

    def __post_init__(self) -> None:
        if self.train.num_classes != self.test.num_classes:
            raise DataError(
                f"num_classes is {self.train.num_classes} for training and "
                f"{self.test.num_classes} for the test; give both the larger number, or neither"
            )

    @classmethod
    def of(cls, train: Examples, test: Examples) -> "TrainTest":
        """Combine two parts; both get the larger number of classes.

        Classes with names are numbered anew, in the order of the names in both parts.

        Raises:
            DataError: One part's labels are classes, the other's are numbers to regress on, or only
                one part's classes have names.
        """
        if train.class_names != test.class_names:
            names = tuple(sorted({*(train.class_names or ()), *(test.class_names or ())}))
            train, test = train.with_classes(names), test.with_classes(names)
        num_classes = larger(train.num_classes, test.num_classes)
        return cls(
            train=replace(train, num_classes=num_classes),
            test=replace(test, num_classes=num_classes),
        )


def num_classes_of(labels: Tensor) -> int | None:
    """Return one more than the largest label; ``None`` for floats, which are not classes.

    Labels of -100 mark values to ignore.

    Raises:
        DataError: There are no labels.
    """
    if not labels.numel():
        raise DataError("there are no examples; give at least one")
    return None if labels.is_floating_point() else classes_up_to(int(labels.max()))


def classes_up_to(largest: int) -> int:
    """Return the number of classes, given the largest label.

    Raises:
        DataError: It is negative: all labels are ignored, or they are not classes.
    """
    if largest < 0:
        raise DataError(
            f"no label is a class: the largest is {largest}; give at least one label >= 0"
        )
    return largest + 1


def larger(train: int | None, test: int | None) -> int | None:
    """Return the larger number of classes of the two parts; ``None`` if neither has classes.

    Raises:
        DataError: Only one part has classes.
    """
    if train is not None and test is not None:
        return max(train, test)
    if train != test:
        integers, floats = ("test", "training") if train is None else ("training", "test")
        raise DataError(
            f"the {integers} labels are integers, the {floats} labels floats; make both integers "
            "for classes, or both floats for regression"
        )
    return None


def number_texts(
    columns: Sequence[NDArray[Any]],
) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Number the distinct texts of several columns together, in ascending order.

    Returns:
        The texts, and the numbers of each column.

    Example:
        >>> number_texts([np.array(["no", "yes"]), np.array(["maybe"])])
        (('maybe', 'no', 'yes'), [array([1, 2]), array([0])])
    """
    names = sorted({text for column in columns for text in column.tolist()})
    numbers = {text: number for number, text in enumerate(names)}
    encoded = [
        np.fromiter(map(numbers.__getitem__, column.tolist()), np.int64, len(column))
        for column in columns
    ]
    return tuple(names), encoded


def labels_of(values: ArrayLike, *, what: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """Copy labels into a tensor, as :func:`tensor_of` does; number texts in ascending order.

    Returns:
        The labels, and the names of the classes if they are texts.

    Raises:
        DataError: As for :func:`tensor_of`.

    Example:
        >>> labels_of(["no", "yes", "no"], what="labels")
        (tensor([0, 1, 0]), ('no', 'yes'))
    """
    if not isinstance(values, Tensor):
        array = np.asarray(values, dtype=object if isinstance(values, list | tuple) else None)
        is_text = array.dtype.kind == "U" or (
            array.dtype.kind == "O" and all(isinstance(each, str) for each in array.ravel())
        )
        if is_text and array.ndim == 1 and array.size:
            names, [numbers] = number_texts([array])
            return torch.from_numpy(numbers), names
    return tensor_of(values, what=what), None


def tensor_of(
    values: ArrayLike,
    *,
    what: str,
    keeps_dtype: bool = False,
    keeps_masks: bool = False,
) -> Tensor:
    """Copy real numbers into a tensor: floats as float32, integers as int64.

    Args:
        values: Shape [N, ...].
        what: The name of the values in messages.
        keeps_dtype: Whether to keep the values' dtype, if torch can gather rows of it.
        keeps_masks: Whether booleans stay booleans; else they become the integers 0 and 1.

    Raises:
        DataError: The values are ragged, not real numbers, or have no dimension.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
    except ValueError as error:  # numpy raises it for ragged nested lists
        raise DataError(f"{what}: {error}; pad or crop them to one shape") from error
    kind = array.dtype.kind
    if kind not in "biuf" or not array.ndim:
        raise DataError(_no_numbers(array, what))
    if keeps_masks and kind == "b":
        return torch.from_numpy(array)
    if kind == "u" and array.size and int(array.max()) > _LARGEST:
        raise DataError(f"{what} are {array.dtype} up to {array.max()}; give numbers below 2**63")
    usual = np.dtype(np.float32 if kind == "f" else np.int64)
    dtype = _KEPT_DTYPES.get((kind, array.dtype.itemsize), usual) if keeps_dtype else usual
    # astype copies: torch accepts neither negative strides nor read-only arrays.
    return torch.from_numpy(array.astype(dtype, order="C"))


def _no_numbers(array: NDArray[Any], what: str) -> str:
    if not array.ndim and array.dtype.kind in "OSU":
        value = array.item()
        shown = f'"{value}"' if isinstance(value, str | Path) else f"a {type(value).__name__}"
        remedy = "; read a file with fl.from_npz or np.load" if shown[0] == '"' else ""
        return (
            f"{what}: {shown} is not an array of examples; give real numbers, the first dimension "
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
    return f"{found}: one is the string {text!r}; encode such columns, or leave them out"


def digits(*, test_fraction: float, seed: Seed) -> TrainTest:
    """Load the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    Features are float32 in [0, 1] of shape [N, 64], labels 0..9; there are no groups. The test set
    is held out as in :meth:`Examples.split`.

    Raises:
        DataError: scikit-learn is not installed, or has no such file.
    """
    # Importing scikit-learn for its load_digits takes more than a second, reading the file 0.03 s.
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


def _choose_held_out(
    labels: NDArray[np.int64], *, fraction: float, seed: Seed
) -> NDArray[np.bool_]:
    """Choose the examples to hold out, as a mask: the fraction of each class, rounded."""
    keys = seed.derive("test split").hash(np.arange(labels.size))
    # Sort by class, then by key: the first few of each class are a random sample of it.
    order = np.lexsort((keys, labels))
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place_in_class = np.arange(labels.size) - np.repeat(first, counts)
    mask = np.empty(labels.size, np.bool_)
    mask[order] = place_in_class < np.repeat(np.rint(counts * fraction), counts)
    return mask


def _last_of_each(
    groups: NDArray[Any], is_test: NDArray[np.bool_], *, seed: Seed
) -> NDArray[np.bool_]:
    """Choose one example of each group that would have none left for training, as a mask."""
    names, owners = number_ids(require_ids(groups, num_examples=len(groups)))
    lost = np.bincount(owners[~is_test], minlength=len(names)) == 0
    is_kept = np.zeros(len(groups), np.bool_)
    if lost.any():
        rows = np.flatnonzero(lost[owners])
        keys = seed.derive("test split").hash(rows)
        order = rows[np.lexsort((keys, owners[rows]))]
        # The example with the smallest key stays, whatever the order of the rows.
        _, first = np.unique(owners[order], return_index=True)
        is_kept[order[first]] = True
        _log.warning(
            "clients_keep_an_example",
            note=f"the test set would have had all examples of {lost.sum()} of {len(names)} "
            f"clients, such as {names[lost][0]}: one example of each is kept for training",
        )
    return is_kept


def mnist_by_writer(path: Path) -> TrainTest:
    """Load MNIST from an archive like ``mnist.npz``, with the writer of each digit as its group.

    Returns:
        60,000 digits by 539 writers and 10,000 by 297 others; float32 in [0, 1] of shape
        [N, 1, 28, 28].

    Raises:
        DataError: The file is missing, is not an npz, or lacks an array.
    """
    _require_file(path, remedy=_MNIST_ORIGIN)

    def part(name: str) -> Examples:
        read = npz(path, features=f"x_{name}", labels=f"y_{name}", groups=f"writer_{name}")
        images = (
            require_single_input(read.features).to(torch.float32).mul_(1.0 / 255.0).unsqueeze(1)
        )
        return replace(read, features=images, num_classes=_NUM_DIGITS)

    return TrainTest(train=part("train"), test=part("test"))


def npz(path: Path, *, features: Inputs[str], labels: str, groups: str | None = None) -> Examples:
    """Load examples from arrays of an npz archive.

    Returns:
        Features in the dtypes of the arrays; see :mod:`fedlearn.training.input_dtypes`. Integer
        labels are classes, in int64; others are in float32.

    Raises:
        DataError: The file is missing or not an npz archive, an array is missing, has Python
            objects or otherwise wrong values, shapes do not match, a value is not finite, or a
            label is negative (other than -100, which is ignored).
    """
    arrays = read_npz(
        path, names=[*name_inputs(features).values(), labels, *([groups] if groups else [])]
    )
    is_only = isinstance(features, str)

    def read(name: str) -> Tensor:
        what = f"array {name!r}"
        return tensor_of(arrays[name], what=what, keeps_dtype=True, keeps_masks=not is_only)

    try:
        values, class_names = labels_of(arrays[labels], what=f"array {labels!r}")
        return Examples.of(
            features=map_inputs(read, features),
            labels=values,
            groups=arrays[groups] if groups else None,
            class_names=class_names,
        )
    except DataError as error:
        raise DataError(f"arrays {features!r} and {labels!r} of {path}: {error}") from error


def bandwidth_traces(path: Path) -> TraceBandwidth:
    """Load recorded bandwidths from an archive such as ``bandwidth_traces.npz``.

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
    """Load named arrays of an npz archive, without unpickling anything.

    Raises:
        DataError: The file is missing, is not an npz or is damaged, an array is missing, or
            it holds Python objects.
    """
    _require_file(path, remedy="correct the path")
    with path.open("rb") as file:  # given a path, numpy leaves a damaged file open
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
