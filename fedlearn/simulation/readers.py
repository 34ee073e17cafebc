"""Federated data sets from CSV files, data frames and partitioned Hugging Face datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedlearn.core.calls import explain_calls
from fedlearn.core.features import require_single_input
from fedlearn.errors import DataError
from fedlearn.simulation.columns import ColumnRoles, Missing, train_test_of
from fedlearn.simulation.federated_data import (
    Division,
    FederatedData,
    Natural,
    from_dataset,
    from_examples,
    split_examples,
)
from fedlearn.simulation.population import DatasetPopulation
from fedlearn.simulation.sources import TrainTest
from fedlearn.training.csv_columns import CsvFormat, NamedColumns, read_csv
from fedlearn.training.frames import read_frame, with_one_type
from fedlearn.training.local_data import Columns
from fedlearn.training.scaling import FeatureScaling


@explain_calls
def from_csv(
    path: Path | str,
    *,
    label: str,
    test: float | Path | str | None = None,
    seed: int,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    one_hot: Sequence[str] = (),
    missing: Missing = "error",
    regression: bool = False,
    standardize: bool = False,
    client: str | None = None,
    partition: Division | None = None,
    csv_format: CsvFormat | None = None,
) -> FederatedData:
    r"""Build a federated data set from CSV files: one file for each client, named like it.

    Text labels become classes, in ascending order: see :attr:`FederatedData.class_names`. Features
    become float32, one column each, with the names in :attr:`FederatedData.feature_names`.

    Args:
        path: A folder with a file for each client, or one file.
        label: Column of the label: text or whole numbers for classes, other numbers to regress on.
        test: The share of all rows to hold out for the central test, in (0, 1), which a query does
            not need; or a CSV file, or a
            folder with one for each client, which is then evaluated on its own.
        seed: Chooses the test rows and the partition.
        features: Columns of features; ``None``: all columns of numbers with no other role.
        exclude: Instead of ``features``, columns that are none, such as a patient's number.
        one_hot: Columns of categories. Each category becomes a feature that is 0 or 1.
        missing: What is done with a missing value: ``"error"``, ``"drop"`` leaves its row out, or
            the value to fill in, for all columns or by column.
        regression: Whether to regress on labels that are whole numbers.
        standardize: Whether features are scaled to mean 0 and standard deviation 1 over the
            training rows of all clients, columns of only 0 and 1 excepted. What they were scaled by
            is :attr:`FederatedData.feature_scaling`.
        client: Column with the client of each row; ``None``: each file is a client.
        partition: How the rows are divided among clients; ``None``: each file or each value in the
            client column is one.
        csv_format: How the files are written; ``None``: see :class:`CsvFormat`.

    Raises:
        ValueError: The share to hold out is not in (0, 1).
        DataError: A file is missing or damaged, a column is missing or has two roles, a value is
            missing, not finite or of the wrong type, or the division is impossible.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import fedlearn as fl
        >>> rows = "age,sex,ill\n61,m,yes\n47,f,no\n52,f,yes\n40,m,no\n"
        >>> with TemporaryDirectory() as folder:
        ...     for name in ("aachen", "berlin"):
        ...         _ = Path(folder, f"{name}.csv").write_text(rows)
        ...     data = fl.from_csv(folder, label="ill", one_hot=["sex"], test=0.25, seed=0)
        >>> data.names, data.class_names, data.feature_names
        (array(['aachen', 'berlin'], dtype='<U6'), ('no', 'yes'), ('age', 'sex=f', 'sex=m'))
    """
    roles = ColumnRoles(
        label=label,
        features=features,
        exclude=exclude,
        one_hot=one_hot,
        missing=missing,
        regression=regression,
        standardize=standardize,
    )
    has_clients = client is not None or Path(path).is_dir()
    read = partial(read_csv, csv_format=csv_format, ids=[] if client is None else [client])
    return _build(
        read(path),
        read(test) if isinstance(test, str | Path) else test,
        roles=roles,
        client=client,
        partition=_find_partition(partition, has_clients=has_clients),
        is_test_grouped=isinstance(test, str | Path) and Path(test).is_dir(),
        seed=seed,
    )


@explain_calls
def from_frame(
    frame: Any,  # of pandas, polars, or any library that exports Arrow tables
    *,
    label: str,
    test: Any = None,  # a share, or like frame
    seed: int,
    client: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    one_hot: Sequence[str] = (),
    missing: Missing = "error",
    regression: bool = False,
    standardize: bool = False,
    partition: Division | None = None,
) -> FederatedData:
    """Build a federated data set from data frames of pandas, polars or pyarrow.

    Args:
        frame: One frame with a client column, or a mapping from clients' names to frames.
        label: As in :func:`from_csv`, and likewise the arguments that are not described here.
        test: The share of all rows to hold out for the central test, in (0, 1), which a query does
            not need; or a frame; or a
            mapping from clients' names to frames, on which they are then evaluated.
        seed: Chooses the test rows and the partition.
        client: Column with the client of each row: integers or strings.
        features: Columns of features; ``None``: all columns of numbers with no other role.
        exclude: Instead of ``features``, columns that are none.
        one_hot: Columns of categories.
        missing: What is done with a missing value.
        regression: Whether to regress on labels that are whole numbers.
        standardize: Whether features are scaled.
        partition: How the rows are divided among clients.

    Raises:
        ValueError: The share to hold out is not in (0, 1).
        DataError: A frame is none, a column is missing or has two roles, a value is missing, not
            finite or of the wrong type, or the division is impossible.

    Example:
        >>> import pyarrow as pa
        >>> import fedlearn as fl
        >>> frame = pa.table({"age": [61, 47, 52, 40], "ill": [1, 0, 1, 0], "site": [7, 7, 9, 9]})
        >>> data = fl.from_frame(frame, label="ill", client="site", test=frame, seed=0)
        >>> data.names, data.feature_names
        (array([7, 9]), ('age',))
    """
    roles = ColumnRoles(
        label=label,
        features=features,
        exclude=exclude,
        one_hot=one_hot,
        missing=missing,
        regression=regression,
        standardize=standardize,
    )
    has_clients = client is not None or isinstance(frame, Mapping)
    return _build(
        _read_frames(frame, what="the frame"),
        test if isinstance(test, float | int | None) else _read_frames(test, what="the test frame"),
        roles=roles,
        client=client,
        partition=_find_partition(partition, has_clients=has_clients),
        is_test_grouped=isinstance(test, Mapping),
        seed=seed,
    )


class Partitions(Protocol):
    """Divides a dataset of mappings, as the partitioners of flwr-datasets do."""

    @property
    def num_partitions(self) -> int:
        """Number of clients."""

    def load_partition(self, partition_id: int) -> Any:  # a map-style dataset of any class
        """Return the rows of a client, by its number from 0."""


@explain_calls
def from_partitions(
    partitions: Partitions,
    *,
    label: str,
    inputs: Sequence[str] = (),
    test: Any = None,  # a map-style dataset, of torch's class or not
) -> FederatedData:
    """Build a federated data set from Hugging Face datasets that a partitioner divides.

    A partitioner of flwr-datasets fits, and so does any object with ``num_partitions`` and
    ``load_partition``. Rows are read when a client trains, so give datasets the format or transform
    that makes numbers of their columns, such as ``dataset.with_format("torch")``. If the label is a
    ``ClassLabel``, its names become :attr:`FederatedData.class_names`.

    Args:
        partitions: The partitioner, with its dataset. Clients of a natural partition have names.
        label: Column of the label.
        inputs: Columns that the model takes, as in :class:`Columns`; empty: all others.
        test: The central test set, with the same columns; a query needs none.

    Raises:
        DataError: The object does not divide anything, a partition is empty, a column is missing,
            or an example is invalid.

    Example:
        >>> import fedlearn as fl
        >>> class Halves:
        ...     num_partitions = 2
        ...     def load_partition(self, partition_id):
        ...         return [{"x": [float(partition_id)], "y": label} for label in (0, 1)]
        >>> rows = [{"x": [1.0], "y": 1}]
        >>> fl.from_partitions(Halves(), label="y", test=rows).population.num_clients
        2
    """
    if not hasattr(partitions, "load_partition") or not hasattr(partitions, "num_partitions"):
        raise DataError(
            f"partitions is a {type(partitions).__name__}, without load_partition and "
            "num_partitions; give a partitioner, such as that of a FederatedDataset: "
            'dataset.partitioners["train"]'
        )
    datasets = [partitions.load_partition(each) for each in range(partitions.num_partitions)]
    columns = [Columns(each, label=label, inputs=inputs) for each in datasets]
    natural = getattr(partitions, "partition_id_to_natural_id", None)
    data = from_dataset(
        {natural[number]: each for number, each in enumerate(columns)} if natural else columns,
        partition=Natural(),
        test=None if test is None else Columns(test, label=label, inputs=inputs),
        labels=_read_labels(datasets, label) if test is None else None,
        seed=0,  # nothing is drawn: the partitioner has divided the rows
    )
    described = datasets[0] if test is None else test
    names = getattr(getattr(described, "features", {}).get(label), "names", None)
    if names is None:
        return data
    assert isinstance(data.population, DatasetPopulation)
    return replace(
        data,
        population=replace(data.population, num_classes=len(names)),
        test=replace(data.stored_test, num_classes=len(names), class_names=tuple(names)),
    )


def _read_labels(datasets: Sequence[Any], label: str) -> list[Any]:  # Any: of any class
    return [row[label] for each in datasets for row in (each[at] for at in range(len(each)))]


def _find_partition(partition: Division | None, *, has_clients: bool) -> Division:
    if partition is not None:
        return partition
    if not has_clients:
        raise DataError(
            "one table does not say which rows belong to which client; name the column with the "
            "clients, client=..., or give a partition, such as fl.Iid(num_clients=10)"
        )
    return Natural()


def _build(
    train: Sequence[NamedColumns],
    test: float | Sequence[NamedColumns] | None,
    *,
    roles: ColumnRoles,
    client: str | None,
    partition: Division,
    is_test_grouped: bool,
    seed: int,
) -> FederatedData:
    is_natural = isinstance(partition, Natural)
    if is_test_grouped and not is_natural:
        raise DataError(
            f"there are test rows of each client, but {type(partition).__name__} does not divide "
            "by these clients; leave partition out, or give all test rows in one table"
        )
    tables = None if isinstance(test, float | int | None) else test
    examples, held_out = train_test_of(
        train,
        tables,
        roles=roles,
        client=client,
        is_grouped=is_natural,
        is_test_grouped=is_test_grouped,
    )
    if test is None:
        parts = TrainTest(train=examples, test=examples.without_rows())
    elif held_out is None:
        assert isinstance(test, float | int)
        parts = split_examples(examples, test, seed=seed)
    else:
        parts = TrainTest.of(examples, held_out)
    if roles.standardize:
        scaling = FeatureScaling.of(require_single_input(parts.train.features))
        parts = TrainTest.of(*(each.with_scaling(scaling) for each in (parts.train, parts.test)))
    data = from_examples(parts, partition=partition, seed=seed)
    groups = None if held_out is None else held_out.groups
    return data if groups is None else data.with_test_groups(groups)


def _read_frames(frames: Any, *, what: str) -> list[NamedColumns]:  # Any: not looked at yet
    if not isinstance(frames, Mapping):
        return with_one_type([read_frame(frames, client="", source=what)])
    if not frames:
        raise DataError(f"{what} is an empty mapping; give a frame for each client")
    return with_one_type(
        [
            read_frame(each, client=str(name), source=f"{what} of {name!r}")
            for name, each in frames.items()
        ]
    )
