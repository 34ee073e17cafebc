"""Federated data sets: the examples of each client, and a central test set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fedlearn.core.calls import explain_calls
from fedlearn.core.features import (
    Features,
    Inputs,
    list_tensors,
    map_inputs,
    name_inputs,
    rebuild_inputs,
    require_single_input,
)
from fedlearn.core.randomness import Seed, reseed_by_key
from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import DataError
from fedlearn.simulation.feature_shift import (
    ClientShift,
    FeatureShift,
    find_common_examples,
    shift_population,
)
from fedlearn.simulation.inspection import Inspection, inspect_population
from fedlearn.simulation.parquet import (
    ParquetPopulation,
    TableColumns,
    num_classes_in,
    read_parquet,
)
from fedlearn.simulation.partition import (
    ByIds,
    Partition,
    Partitioner,
    client_text,
    number_ids,
    offsets_of,
    require_ids,
)
from fedlearn.simulation.population import (
    ArrayPopulation,
    BootstrapPopulation,
    CheckedExamples,
    DatasetPopulation,
    MapDataset,
    Population,
    client_names,
    find_readable_client,
    pick_spread_clients,
)
from fedlearn.simulation.sources import (
    Examples,
    TrainTest,
    labels_of,
    larger,
    npz,
    num_classes_of,
    tensor_of,
)
from fedlearn.training.local_data import (
    Pair,
    evaluation_batches,
    read_pairs,
    require_map_style,
    stack_pairs,
)
from fedlearn.training.scaling import FeatureScaling

_GROUPS_WITHOUT_TEST = (
    "test_groups is given without test rows; give them as `test`, or leave test_groups out and "
    "set evaluation.client_test_fraction"
)
_CACHE_BYTES = 256 << 20  # of decoded Parquet row groups
# Bounds the memory of checks over populations of many millions.
_CLIENTS_AT_ONCE = 1 << 20
#: Virtual clients that are inspected, and clients that a notebook's summary reads.
_MAX_VIRTUAL, _MAX_IN_NOTEBOOK = 1000, 300
_READ_TWICE = 4  # rows of a dataset that are read twice, to check that reads are repeatable


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData:
    """The data of a simulation: clients with their examples, and a central test set.

    Attributes:
        population: The clients and their examples.
        test: The central test set. Features in float64 are converted to float32, which most
            models take. Queries and statistics need none: then it has no rows.
        client_tests: The clients with the examples on which each of them is evaluated; ``None``:
            on those that it trains on. See :meth:`with_client_tests`.
        shift: The shift of each client's features; ``None``: there is none. Clients' own tests are
            shifted too, the central test set is not. See :meth:`with_feature_shift`.
        stored_test: The test set with features in their original dtype, for a model in float64.

    Raises:
        DataError: A client has no examples, or the first client's examples
            differ from the test set's in their inputs, a shape, or in whether they are floats,
            integers or masks. The same holds for the clients' own tests.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.eye(10), np.arange(10) % 2
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(num_clients=4), test_fraction=0.2, seed=0)
        >>> data.population.num_clients, data.feature_shape, len(data.test.labels)
        (4, (10,), 2)
    """

    population: Population
    test: Examples = field(repr=False)
    client_tests: Population | None = field(default=None, repr=False)
    shift: ClientShift | None = field(default=None, repr=False)
    stored_test: Examples = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _require_examples(self.population)
        _require_alike(self.population, test=self.test)
        if self.client_tests is not None:
            _require_tests_of_each(self.population, self.client_tests)
            _require_alike(self.client_tests, test=self.test)
        object.__setattr__(self, "stored_test", self.test)  # the class is frozen
        object.__setattr__(self, "test", _in_float32(self.test))

    @property
    def has_test(self) -> bool:
        """Whether there is a central test set, which a training needs."""
        return bool(len(self.test.labels))

    @property
    def names(self) -> NDArray[Any] | None:
        """The clients' names in the data: shape [C]; ``None``: they have no names.

        ``names[k]`` is the user, writer or hospital that records and errors call client k.
        """
        return client_names(self.population)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes' names in the data, by label; ``None``: they have no names.

        Text labels are numbered in ascending order over all clients.
        """
        return self.test.class_names

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The features' names in the data, by column; ``None``: they have no names."""
        return self.test.feature_names

    @property
    def feature_scaling(self) -> FeatureScaling | None:
        """How the features were scaled; ``None``: they are as in the data."""
        return self.test.feature_scaling

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one example's features.

        Raises:
            DataError: There are several inputs, so there is no single shape.
        """
        return tuple(require_single_input(self.test.features).shape[1:])

    def inspect(self, *, max_clients: int | None = None) -> Inspection:
        """Count the examples and labels of the clients, and measure how they differ.

        A notebook shows the result as a table; ``fedlearn data inspect`` prints it.

        Args:
            max_clients: Number of clients whose examples are read, evenly spread; ``None``: all,
                or 1,000 virtual ones. Sizes are of all clients.

        Raises:
            DataError: An example cannot be read.

        Example:
            >>> import numpy as np
            >>> import fedlearn as fl
            >>> x, y = np.eye(100), np.arange(100) % 10
            >>> clients = fl.FewClasses(num_clients=10, classes_per_client=2)
            >>> data = fl.from_arrays(x, y, partition=clients, test=(x, y), seed=0)
            >>> found = data.inspect()
            >>> found.num_labels_n.tolist(), round(float(found.distances_n.mean()), 2)
            ([2, 2, 2, 2, 2, 2, 2, 2, 2, 2], 0.8)
        """
        if max_clients is None:
            is_virtual = find_common_examples(self.population) is not None
            max_clients = _MAX_VIRTUAL if is_virtual else self.population.num_clients
        client_ids = pick_spread_clients(self.population, max_clients)
        shift = self.shift
        return inspect_population(
            self.population,
            has_classes=self.test.num_classes is not None,
            client_ids=client_ids,
            tests=self.client_tests,
            shifts=() if shift is None else list(map(shift.describe, client_ids.tolist())),
            class_names=self.class_names,
        )

    def _repr_html_(self) -> str:
        """Return a summary for a notebook, which reads at most a few hundred clients in memory."""
        is_in_memory = isinstance(self.population, CheckedExamples)
        found = self.inspect(max_clients=_MAX_IN_NOTEBOOK if is_in_memory else 0)
        return found._repr_html_()

    def with_feature_shift(self, shift: FeatureShift, *, seed: int) -> "FederatedData":
        """Return the data with features that look different at each client.

        A client's own tests are shifted as the examples that it trains on are. The central test set
        stays as it is. Examples in memory are copied; others are shifted when they are read.

        Args:
            shift: How they differ: ``fl.RotationShift``, ``fl.NoiseShift`` or ``fl.AffineShift``.
            seed: Chooses each client's shift.

        Raises:
            DataError: Such examples cannot be shifted, or they are shifted already.

        Example:
            >>> import numpy as np
            >>> import fedlearn as fl
            >>> x, y = np.zeros((20, 2)), np.arange(20) % 2
            >>> data = fl.from_arrays(x, y, partition=fl.Iid(2), test_fraction=0.2, seed=0)
            >>> noisy = data.with_feature_shift(fl.NoiseShift(std=0.1), seed=0)
            >>> [bool(noisy.population.load(np.array([each])).gather()[0].any()) for each in (0, 1)]
            [False, True]
        """
        if self.shift is not None:
            raise DataError(
                "the features are shifted already; shift the data once, or write a shift that "
                "does both"
            )
        fitted = shift.fit(
            self.stored_test,
            num_clients=self.population.num_clients,
            seed=Seed(seed).derive("data").derive("shift"),
        )
        tests = self.client_tests
        if tests is not None:
            tests = shift_population(tests, fitted, is_test=True)
        return replace(
            self,
            test=self.stored_test,
            population=shift_population(self.population, fitted, is_test=False),
            client_tests=tests,
            shift=fitted,
        )

    def with_client_tests(
        self, tests: Sequence[tuple[Inputs[ArrayLike], ArrayLike]]
    ) -> "FederatedData":
        """Return the data with test examples of each client, on which it is evaluated.

        To hold out a share of each client's examples instead, set
        ``evaluation.client_test_fraction``.

        Args:
            tests: Features and labels for each client, in the order of the clients.

        Raises:
            DataError: Their number is not that of the clients, a client has none, or they differ
                in kind from the central test set.

        Example:
            >>> import numpy as np
            >>> import fedlearn as fl
            >>> x, y = np.eye(10), np.arange(10) % 2
            >>> data = fl.from_arrays(
            ...     x[:8], y[:8], test=(x, y), partition=fl.Iid(num_clients=2), seed=0
            ... )
            >>> own = data.with_client_tests([(x[8:9], y[8:9]), (x[9:], y[9:])])
            >>> own.client_tests.num_examples(np.arange(2))
            array([1, 1])
        """
        parts = [_examples(*_test_pair(each)) for each in tests]
        if len(parts) != self.population.num_clients:
            raise DataError(
                f"there are tests of {len(parts)} clients, but {self.population.num_clients} "
                "clients; give one pair of features and labels for each client"
            )
        known = self.class_names or ()
        joined = _join_examples(
            [each if each.class_names is None else each.with_classes(known) for each in parts]
        )
        sizes = offsets_of(np.asarray([len(part.labels) for part in parts], np.int64))
        population = ArrayPopulation(
            features=joined.features,
            labels=joined.labels,
            num_classes=larger(joined.num_classes, self.test.num_classes),
            partition=Partition(np.arange(sizes[-1]), sizes, self.names),
        )
        return replace(self, test=self.stored_test, client_tests=self._shift_tests(population))

    def with_test_groups(self, groups: ArrayLike) -> "FederatedData":
        """Return the data with each client evaluated on its own rows of the central test set.

        Args:
            groups: The client of each test row, by its name in the data: [N], integers or strings.

        Raises:
            DataError: The clients have no names, a group is not one of them, or a client has no
                test row.

        Example:
            >>> import numpy as np
            >>> import fedlearn as fl
            >>> x, y, users = np.eye(4), np.arange(4) % 2, ["zoe", "ada", "zoe", "ada"]
            >>> data = fl.from_arrays(
            ...     x, y, groups=users, partition=fl.Natural(), test=(x[:3], y[:3]), seed=0
            ... )
            >>> data.with_test_groups(users[:3]).client_tests.num_examples(np.arange(2))
            array([1, 2])
        """
        test, names = self.stored_test, self.names
        if names is None:
            raise DataError(
                "test rows are given by client, but the clients have no names; divide the examples "
                "with fl.Natural(), or leave the test groups out"
            )
        found, places = number_ids(require_ids(groups, num_examples=len(test.labels)))
        numbers = {name: number for number, name in enumerate(names.tolist())}
        unknown = [name for name in found.tolist() if name not in numbers]
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(found)} test groups are no clients, such as "
                f"{unknown[0]!r}, where a client is {names.tolist()[0]!r}; call both the same, or "
                "leave such test rows out"
            )
        owners = np.asarray([numbers[name] for name in found.tolist()], np.int64)[places]
        lacking = np.flatnonzero(np.bincount(owners, minlength=len(names)) == 0)
        if lacking.size:
            raise DataError(
                f"{lacking.size} of {len(names)} clients have no test rows, such as "
                f"{client_text(int(lacking[0]), names)}; leave such clients out, or hold out a "
                "share of each client's examples with evaluation.client_test_fraction"
            )
        tests = ArrayPopulation(
            features=test.features,
            labels=test.labels,
            num_classes=test.num_classes,
            partition=Partition.of_owners(owners, num_clients=len(names), names=names),
        )
        return replace(self, test=test, client_tests=self._shift_tests(tests))

    def _shift_tests(self, tests: Population) -> Population:
        """Shift the clients' own tests as the examples that they train on are shifted, if so."""
        return tests if self.shift is None else shift_population(tests, self.shift, is_test=True)


@dataclass(frozen=True)
class Natural:
    """Clients are the groups of the examples: a writer, a user, a hospital.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y, users = np.eye(4), np.arange(4) % 2, ["zoe", "ada", "zoe", "ada"]
        >>> data = fl.from_arrays(x, y, groups=users, partition=fl.Natural(), test=(x, y), seed=0)
        >>> data.names
        array(['ada', 'zoe'], dtype='<U3')
    """


@dataclass(frozen=True, kw_only=True)
class Bootstrap(Ranged):
    """Virtual clients that draw their examples with replacement: populations of any size.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.eye(10), np.arange(10) % 2
        >>> clients = fl.Bootstrap(num_clients=1_000_000, examples_per_client=20)
        >>> data = fl.from_arrays(x, y, partition=clients, test_fraction=0.2, seed=0)
        >>> data.population.num_clients
        1000000
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    examples_per_client: Annotated[Count, doc("Examples drawn for each client, >= 1.")]


Division: TypeAlias = Partitioner | Natural | Bootstrap
"""How pooled examples become clients."""


@explain_calls
def from_examples(data: TrainTest, *, partition: Division, seed: int) -> FederatedData:
    """Build a federated data set from training and test examples.

    Args:
        data: The training examples to divide, and the test set.
        partition: How the training examples are divided among clients.
        seed: Chooses the partition.

    Raises:
        DataError: The examples cannot be divided as asked, or a client would have none.

    Example:
        >>> import torch
        >>> from fedlearn.simulation.partition import Iid
        >>> def examples(n):
        ...     inputs = {"tokens": torch.zeros(n, 5).long(), "mask": torch.ones(n, 5).bool()}
        ...     return Examples.of(features=inputs, labels=torch.arange(n) % 2)
        >>> two_parts = TrainTest(train=examples(8), test=examples(4))
        >>> from_examples(two_parts, partition=Iid(num_clients=3), seed=0).population.num_clients
        3
    """
    _require_division(partition)
    train, derived = data.train, _partition_seed(seed)
    population: Population
    if isinstance(partition, Bootstrap):
        population = BootstrapPopulation(
            features=train.features,
            labels=train.labels,
            num_classes=train.num_classes,
            num_clients=partition.num_clients,
            examples_per_client=partition.examples_per_client,
            seed=derived,
        )
    else:
        rule = ByIds(_groups(train)) if isinstance(partition, Natural) else partition
        population = ArrayPopulation(
            features=train.features,
            labels=train.labels,
            num_classes=train.num_classes,
            partition=rule.split(train.labels.numpy(), seed=derived),
        )
    return FederatedData(population=population, test=data.test)


@explain_calls
def from_arrays(
    features: Inputs[ArrayLike],
    labels: ArrayLike,
    *,
    partition: Division,
    seed: int,
    test: tuple[Inputs[ArrayLike], ArrayLike] | None = None,
    test_fraction: float | None = None,
    groups: ArrayLike | None = None,
    test_groups: ArrayLike | None = None,
) -> FederatedData:
    """Build a federated data set from arrays in memory.

    Args:
        features: Real numbers, [N, ...]. They keep their dtype in memory; each batch is converted
            to the dtype that the model takes: see :mod:`fedlearn.training.input_dtypes`. A tuple
            of such arrays are the positional arguments of the model's forward, a dict the keyword
            arguments; one of several inputs may be boolean, a mask.
        labels: Integers or texts for classes, floats to regress on: [N, ...]. Texts are numbered in
            ascending order: see :attr:`FederatedData.class_names`.
        partition: How the training examples are divided among clients.
        seed: Chooses the test examples and the partition.
        test: Features and labels of the central test set, of the same form; a query needs none.
        test_fraction: Instead of ``test``, the share of the examples to hold out, in (0, 1).
        groups: The client of each example, for :class:`Natural`: [N], integers or strings.
        test_groups: The client of each row of ``test``, on which it is then evaluated: see
            :meth:`FederatedData.with_test_groups`.

    Raises:
        ValueError: Both of ``test`` and ``test_fraction`` are given, or the latter is not in
            (0, 1).
        DataError: Lengths differ, a value is not a finite real number, training and test data
            differ in kind, or the division is impossible.

    Example:
        >>> from fedlearn.simulation.partition import Iid
        >>> data = from_arrays(np.eye(8), np.arange(8) % 2, partition=Iid(num_clients=3),
        ...                    test_fraction=0.25, seed=0)
        >>> data.population.num_clients, len(data.test.labels)
        (3, 2)
    """
    if test is not None and test_fraction is not None:
        raise ValueError(
            "both of `test` and `test_fraction` are given; give one: a test set, or the share of "
            "the examples to hold out"
        )
    train = _examples(features, labels, groups=groups)
    if groups is not None:
        _require_natural(partition)
    held_out = test_fraction if test is None else _examples(*_test_pair(test))
    if test_groups is not None and not isinstance(held_out, Examples):
        raise DataError(_GROUPS_WITHOUT_TEST)
    data = divide_examples(train, held_out, partition=partition, seed=seed)
    return data if test_groups is None else data.with_test_groups(test_groups)


def _test_pair(test: Any) -> tuple[Any, Any]:  # Any: not looked at yet
    """Unpack the features and labels of a test set.

    Raises:
        DataError: ``test`` is not a tuple or list of two.
    """
    if not isinstance(test, tuple | list) or len(test) != 2:  # noqa: PLR2004 - a pair
        number = f" of {len(test)}" if isinstance(test, tuple | list) else ""
        raise DataError(
            f"test is a {type(test).__name__}{number}; give features and labels as a pair, "
            "test=(x_test, y_test), or the share to hold out, test_fraction=0.2"
        )
    return test[0], test[1]


def _require_natural(partition: object) -> None:
    """Check that the partition uses groups, since groups are given."""
    if not isinstance(partition, Natural):
        raise DataError(
            f"groups is given, but {type(partition).__name__} does not divide by groups; give "
            "partition=fl.Natural(), or leave groups out"
        )


def _examples(
    features: Inputs[ArrayLike], labels: ArrayLike, *, groups: ArrayLike | None = None
) -> Examples:
    arrays: dict[str, ArrayLike] = name_inputs(features)
    # A boolean array that is the only input holds values; among several it is a mask.
    has_several = isinstance(features, tuple | Mapping)
    inputs = [
        tensor_of(arrays[name], what=name, keeps_dtype=True, keeps_masks=has_several)
        for name in arrays
    ]
    values, class_names = labels_of(labels, what="labels")
    return Examples.of(
        features=rebuild_inputs(inputs, like=features),
        labels=values,
        groups=None if groups is None else require_ids(groups, num_examples=len(values)),
        class_names=class_names,
    )


def divide_examples(
    train: Examples, test: Examples | float | None, *, partition: Division, seed: int
) -> FederatedData:
    """Divide examples; ``test`` is a test set, the share to hold out, or ``None`` for neither.

    Raises:
        ValueError: The share is not in (0, 1).
        DataError: The examples cannot be divided as asked.
    """
    if test is None:
        data = TrainTest(train=train, test=train.without_rows())
    elif isinstance(test, Examples):
        data = TrainTest.of(train, test)
    else:
        data = split_examples(train, test, seed=seed)
    return from_examples(data, partition=partition, seed=seed)


def split_examples(examples: Examples, fraction: float, *, seed: int) -> TrainTest:
    """Hold out a share of the examples for the central test; raises as :meth:`Examples.split`."""
    return examples.split(fraction=fraction, seed=Seed(seed).derive("data"))


@explain_calls
def from_dataset(
    dataset: MapDataset | Sequence[MapDataset] | Mapping[Any, MapDataset],
    *,
    labels: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    partition: Partitioner | Natural,
    test: MapDataset | None = None,
    seed: int,
) -> FederatedData:
    """Build a federated data set from a torch ``Dataset``, whose rows are read when needed.

    Reading a row may draw random numbers, as augmentation does, from the global generators of
    torch, numpy and Python. Training then reads it again in each epoch; the draws depend on the
    run's ``seed``, the round, the client and the batch, as on a deployed client. Evaluation draws
    the same numbers every time.

    Args:
        dataset: Pairs (features, label) to divide among clients. Features that are a tuple are
            the positional arguments of the model's forward, a mapping the keyword arguments. In a
            list of datasets, or a mapping from names to datasets, each is one client, in order.
        labels: The label of each row, so that rows need not be read to divide them: [N]. Natural
            clients need none; the labels must then be among the classes of ``test``, or without
            it, be floats.
        groups: The client of each row, for :class:`Natural`: [N], integers or strings; see
            :func:`~fedlearn.simulation.partition.require_ids`.
        partition: How the rows are divided among clients.
        test: Pairs for the central test set; all are read at once and kept in memory. A query
            needs none.
        seed: Chooses the partition.

    Raises:
        DataError: Lengths differ, an example is invalid, the division is impossible, or two reads
            of a row differ.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlearn.simulation.partition import Iid
        >>> pairs = TensorDataset(torch.eye(4), torch.tensor([0, 1, 0, 1]))
        >>> from_dataset(pairs, labels=[0, 1, 0, 1], partition=Iid(2), test=pairs,
        ...              seed=0).population.num_clients
        2
        >>> from_dataset({"ada": pairs, "zoe": pairs}, partition=Natural(), test=pairs,
        ...              seed=0).names
        array(['ada', 'zoe'], dtype='<U3')
    """
    own = _own_datasets(dataset)
    whole = _join_datasets(dataset, own)
    require_map_style(whole, what="the dataset")
    if test is not None:
        require_map_style(test, what="the test set")
    known = None if labels is None else tensor_of(labels, what="labels")
    if known is not None and len(known) != len(whole):
        raise DataError(f"{len(known)} labels for a dataset of {len(whole)}; give one per row")
    _require_repeatable(whole)
    # Without a test set, a row shows of which kind examples are.
    test_features, test_labels = (
        _read_all(whole, num_rows=1) if test is None else _read_all(test, num_rows=len(test))
    )
    held_out = Examples.of(features=test_features, labels=test_labels)
    num_classes = held_out.num_classes
    if test is None:
        held_out = held_out.without_rows()
        if num_classes is not None and known is None:
            raise DataError(
                "without labels= and test=, the number of classes is not known; give one of them"
            )
    if known is not None:
        num_classes = larger(num_classes_of(known), num_classes)
    population = DatasetPopulation(
        dataset=whole,
        partition=_divide_rows(
            len(whole), partition, own=own, groups=groups, labels=known, seed=seed
        ),
        num_classes=num_classes,
    )
    return FederatedData(population=population, test=replace(held_out, num_classes=num_classes))


def _join_datasets(
    dataset: Any, own: "_OwnDatasets | None"
) -> MapDataset:  # Any: not looked at yet
    whole: MapDataset = dataset if own is None else ConcatDataset(own.datasets)
    return whole


class _OwnDatasets(NamedTuple):
    """Datasets of one client each, with the clients' names if they have any."""

    datasets: Sequence[Any]  # map-style datasets, of torch's class or not
    names: NDArray[Any] | None


def _own_datasets(
    dataset: MapDataset | Sequence[MapDataset] | Mapping[Any, MapDataset],
) -> _OwnDatasets | None:
    """Return the clients' datasets if each client has its own; ``None`` for one dataset of all.

    A list of pairs is one dataset.
    """
    if not isinstance(dataset, list | tuple | Mapping):
        return None
    datasets = list(dataset.values() if isinstance(dataset, Mapping) else dataset)
    if not datasets or not all(map(_is_dataset, datasets)):
        return None
    if not isinstance(dataset, Mapping):
        return _OwnDatasets(datasets, None)
    names = require_ids(list(dataset), num_examples=len(datasets))
    return _OwnDatasets(datasets, np.asarray(names.tolist()))


def _is_dataset(value: object) -> bool:
    """Whether a value is a dataset, not an example of one."""
    is_example = isinstance(value, tuple | list | Mapping | Tensor | np.ndarray)
    # Arrays and tensors have __getitem__ too; a list of those is one dataset of examples.
    return isinstance(value, Dataset) or (hasattr(value, "__getitem__") and not is_example)


def _divide_rows(
    num_rows: int,
    partition: Partitioner | Natural,
    *,
    own: _OwnDatasets | None,
    groups: ArrayLike | None,
    labels: Tensor | None,
    seed: int,
) -> Partition:
    """Divide the rows of a dataset among clients.

    Raises:
        DataError: The partition needs arguments that are missing, or some do not fit together.
    """
    if own is not None:
        if not isinstance(partition, Natural) or groups is not None:
            raise DataError(
                "each of several datasets is one client, which needs partition=fl.Natural() "
                "without groups; to divide them differently, join them with torch's ConcatDataset"
            )
        # The datasets are joined in this order, so each client is a range of rows.
        offsets = offsets_of([len(each) for each in own.datasets])
        return Partition(np.arange(num_rows), offsets, own.names)
    _require_division(partition)
    if groups is not None:
        _require_natural(partition)
    if isinstance(partition, Natural):
        if groups is None:
            raise DataError(
                "the rows do not name their clients, as a natural partition needs; give groups=, "
                "a list or a mapping of datasets, or another partition"
            )
        # ByIds does not look at labels, so zeros will do.
        return ByIds(require_ids(groups, num_examples=num_rows)).split(
            np.zeros(num_rows), seed=_partition_seed(seed)
        )
    if isinstance(partition, Bootstrap):
        raise DataError(
            "fl.Bootstrap draws from examples in memory; read the dataset into arrays for "
            "`fl.from_arrays`, or use another partition"
        )
    if labels is None:
        raise DataError(
            f"{type(partition).__name__} divides by labels, but none are given; give labels=, the "
            "label of each row"
        )
    return partition.split(labels.numpy(), seed=_partition_seed(seed))


def _read_all(dataset: MapDataset, *, num_rows: int) -> tuple[Features, Tensor]:
    pairs, batches = list[Pair](), list(evaluation_batches(num_rows))
    with reseed_by_key() as set_key:
        for batch in batches:
            set_key(batch.key)
            pairs += read_pairs(dataset, rows=batch.rows)
    return stack_pairs(pairs, rows=np.arange(num_rows))


def _require_repeatable(dataset: MapDataset) -> None:
    """Check that rows are the same if the global generators have the same state.

    A dataset that fails this draws from its own generator, so that equal runs would differ. Only
    a few rows are read twice, which is enough for datasets that draw in every row.

    Raises:
        DataError: A row differs between two reads, or is not a pair of numbers.
    """
    # Spread over the dataset, which may be several datasets joined.
    rows = np.unique(np.linspace(0, len(dataset) - 1, _READ_TWICE).astype(np.int64))
    with reseed_by_key() as set_key:
        readings = []
        for _ in range(2):
            # The second reading starts from the same generator state as the first.
            set_key(0)
            readings.append(read_pairs(dataset, rows=rows))
    for row, first, second in zip(rows.tolist(), *readings, strict=True):
        one, other = ([*list_tensors(features), label] for features, label in (first, second))
        if len(one) != len(other) or not all(map(_is_same, one, other)):
            raise DataError(
                f"dataset[{row}] differs between two readings, although torch's, numpy's and "
                "Python's global generators had the same state: it draws from its own generator, "
                "so equal runs would differ; draw from the global generators, which fedlearn "
                "seeds for each batch"
            )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


@explain_calls
def from_npz(
    path: Path | str,
    *,
    features: Inputs[str],
    labels: str,
    groups: str | None,
    test: tuple[Inputs[str], str] | float | None = None,
    partition: Division,
    seed: int,
    test_groups: str | None = None,
) -> FederatedData:
    """Build a federated data set from the arrays in an npz archive.

    Args:
        path: The archive.
        features: Name of the array of features, real numbers [N, ...]. They keep their dtype in
            memory; each batch is converted to the dtype that the model takes: see
            :mod:`fedlearn.training.input_dtypes`. A tuple of names are the positional arguments of
            the model's forward, a dict the keyword arguments; masks among several inputs stay
            boolean.
        labels: Name of the array of labels [N, ...]: integers for classes, floats to regress
            on.
        groups: Name of the array with the client of each example, [N]; ``None``: there is none.
        test: Names of the test features and labels, or the share to hold out, in (0, 1); a query
            needs neither.
        partition: How the training examples are divided among clients.
        seed: Chooses the test examples and the partition.
        test_groups: Name of the array with the client of each row of ``test``, on which it is then
            evaluated; ``None``: clients have no test rows of their own.

    Raises:
        ValueError: The share to hold out is not in (0, 1).
        DataError: The file or an array is missing or damaged, a value is not a finite real
            number, or the division is impossible.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "digits.npz")
        ...     np.savez(path, x=np.eye(10), y=np.arange(10) % 2)
        ...     data = fl.from_npz(
        ...         path, features="x", labels="y", groups=None, test=0.2,
        ...         partition=fl.Iid(num_clients=4), seed=0,
        ...     )
        >>> data.population.num_clients, len(data.test.labels)
        (4, 2)
    """
    read = partial(npz, Path(path))
    train = read(features=features, labels=labels, groups=groups)
    if not isinstance(test, tuple):
        if test_groups is not None:
            raise DataError(_GROUPS_WITHOUT_TEST)
        return divide_examples(train, test, partition=partition, seed=seed)
    held_out = read(features=test[0], labels=test[1], groups=test_groups)
    data = divide_examples(train, held_out, partition=partition, seed=seed)
    return data if held_out.groups is None else data.with_test_groups(held_out.groups)


@explain_calls
def from_parquet(
    path: Path | str,
    *,
    test_path: Path | str | None = None,
    client: str,
    label: str,
    features: Inputs[Sequence[str]] | None,
    test_client: str | None = None,
) -> FederatedData:
    """Build a federated data set that streams from Parquet files, which may be larger than memory.

    Args:
        path: Training file, or a folder of ``*.parquet`` files; rows grouped by client.
        test_path: Test file or folder, read into memory; its rows may be in any order. A query
            needs none.
        client: Column with the client of each example: integers or strings.
        label: Column of labels: integers for classes, floats to regress on.
        features: Columns of features, which are concatenated; ``None`` takes all columns that have
            no other role. A tuple of such lists are the positional arguments of the model's
            forward, a dict the keyword arguments.
        test_client: Column of the test file with the client of each row, on which it is then
            evaluated; ``None``: clients have no test rows of their own.

    Raises:
        DataError: A file or column is missing, damaged or of a wrong type, the rows are not
            grouped by client, or training and test do not fit together.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> import fedlearn as fl
        >>> users, ages = ["ada", "ada", "zoe"], [31.0, 40.0, 25.0]
        >>> table = pa.table({"user": users, "age": ages, "ill": [0, 1, 1]})
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "users.parquet")
        ...     pq.write_table(table, path)
        ...     data = fl.from_parquet(
        ...         path, test_path=path, client="user", label="ill", features=["age"]
        ...     )
        >>> data.names
        array(['ada', 'zoe'], dtype=object)
    """
    columns = TableColumns.of_file(Path(path), client=client, label=label, features=features)
    num_classes = num_classes_in(Path(path), columns=columns)
    if test_path is None:
        if test_client is not None:
            raise DataError(_GROUPS_WITHOUT_TEST)
        population = ParquetPopulation(
            Path(path), columns=columns, num_classes=num_classes, cache_bytes=_CACHE_BYTES
        )
        return without_test(population, num_classes=num_classes)
    test = read_parquet(Path(test_path), columns=columns, client=test_client)
    num_classes = larger(num_classes, test.num_classes)
    population = ParquetPopulation(
        Path(path), columns=columns, num_classes=num_classes, cache_bytes=_CACHE_BYTES
    )
    data = FederatedData(population=population, test=replace(test, num_classes=num_classes))
    return data if test.groups is None else data.with_test_groups(test.groups)


def without_test(population: Population, *, num_classes: int | None) -> FederatedData:
    """Build a federated data set without a central test set.

    Raises:
        DataError: A client has no examples, or they cannot be read.
    """
    first = population.load(np.asarray([find_readable_client(population)]))
    features, labels = map_inputs(lambda each: each[:0], first.features), first.labels[:0]
    none = Examples(features=features, labels=labels, groups=None, num_classes=num_classes)
    return FederatedData(population=population, test=none)


def _partition_seed(seed: int) -> Seed:
    return Seed(seed).derive("data").derive("partition")


def _groups(examples: Examples) -> NDArray[np.generic]:
    if examples.groups is None:
        raise DataError(
            "the examples do not name their clients, as a natural partition needs; give them "
            "groups, or use another partition"
        )
    return examples.groups


def _in_float32(examples: Examples) -> Examples:
    """Convert features in float64 to float32; without any, return the same object."""
    if all(each.dtype != torch.float64 for each in list_tensors(examples.features)):
        return examples
    single = map_inputs(
        lambda each: each.float() if each.dtype == torch.float64 else each, examples.features
    )
    return replace(examples, features=single)


def _require_division(partition: object) -> None:
    """Check that a partition is a rule, not a number of clients or a class, for example."""
    # A class such as fl.Iid has the method too, and so does a string: str.split.
    if isinstance(partition, type | str) or not (
        isinstance(partition, Natural | Bootstrap) or hasattr(partition, "split")
    ):
        number = partition if isinstance(partition, int) else 10
        raise DataError(
            f"partition is {partition!r}; give a rule that divides the examples, such as "
            f"fl.Iid(num_clients={number}), fl.Dirichlet(...) or fl.Natural()"
        )


def _join_examples(parts: Sequence[Examples]) -> Examples:
    """Join the examples of several clients, one after another.

    Raises:
        DataError: Their inputs or shapes differ.
    """
    inputs = [name_inputs(part.features) for part in parts]
    first = inputs[0]
    for number, other in enumerate(inputs):
        shapes = [{name: each.shape[1:] for name, each in one.items()} for one in (first, other)]
        if shapes[0] != shapes[1]:
            raise DataError(
                f"the test examples of client {number} have inputs of shapes {shapes[1]} per "
                f"example, those of client 0 of {shapes[0]}; make them the same"
            )
    features = [torch.cat([each[name] for each in inputs]) for name in first]
    return Examples.of(
        features=rebuild_inputs(features, like=parts[0].features),
        labels=torch.cat([part.labels for part in parts]),
    )


def _require_tests_of_each(population: Population, tests: Population) -> None:
    if tests.num_clients != population.num_clients:
        raise DataError(
            f"there are tests of {tests.num_clients} clients, but {population.num_clients} "
            "clients; give each client its own"
        )
    _require_examples(tests)


def _require_examples(population: Population) -> None:
    for start in range(0, population.num_clients, _CLIENTS_AT_ONCE):
        client_ids = np.arange(start, min(start + _CLIENTS_AT_ONCE, population.num_clients))
        empty = client_ids[population.num_examples(client_ids) < 1]
        if empty.size:
            client = client_text(int(empty[0]), client_names(population))
            raise DataError(f"{client} has no examples; leave clients without examples out")


def _require_alike(population: Population, *, test: Examples) -> None:
    client_id = find_readable_client(population)
    first = population.load(np.asarray([client_id]))
    ours, theirs = ({**name_inputs(each.features), "labels": each.labels} for each in (first, test))
    if ours.keys() != theirs.keys():
        raise DataError(
            f"client {client_id} has {', '.join(ours)}, the test set {', '.join(theirs)}; give "
            "both the same inputs"
        )
    for what, own in ours.items():
        other = theirs[what]
        if own.shape[1:] != other.shape[1:] or _find_kind(own.dtype) != _find_kind(other.dtype):
            raise DataError(
                f"client {client_id} has {what} of {own.dtype} and shape {tuple(own.shape[1:])} "
                f"per example, the test set of {other.dtype} and shape {tuple(other.shape[1:])}; "
                "make them the same"
            )


def _find_kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype. Dtypes of one kind are converted to one dtype for the model."""
    if dtype.is_floating_point:
        return "floats"
    return "masks" if dtype == torch.bool else "integers"
