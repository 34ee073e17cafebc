"""Answers plans of statistics from a client's own table, such as a CSV or Parquet file."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.settings import update_from
from fedlearn.errors import DataError, SettingsRefused, UnusableResult
from fedlearn.statistics.query import StatisticsQuery
from fedlearn.statistics.schema import CategoryColumn, ClientTable, Schema, TextColumn
from fedlearn.training.csv_columns import CsvFormat, read_csv
from fedlearn.training.frames import is_parquet, read_parquet_table
from fedlearn.training.query_trainer import QueryTrainer
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext


@dataclass(frozen=True, eq=False)
class TableTrainer:
    """A trainer that holds a table: it answers plans of statistics, and refuses to train.

    The plan says what each column is, and the table is read accordingly, so all clients count the
    same values. Give it to a :class:`~fedlearn.training.torch_trainer.TorchTrainer` as ``answers``
    if the client trains, too.

    Attributes:
        table: The client's columns by name: lists, arrays or a pandas frame; or the path of a CSV
            or, if its name ends in ``.parquet``, Parquet file, which is read for each request.
        columns: The columns that it answers about; ``None``: all of the table.
        csv_format: How a CSV file is written; ``None``: as
            :class:`~fedlearn.training.csv_columns.CsvFormat` is by default.

    Example:
        >>> table = {"age": [31, None, 47], "name": ["a", "b", "c"]}
        >>> trainer = TableTrainer(table, columns=["age"])
        >>> trainer.honors
        ('StatisticsQuery', 'per_client', 'plan', 'unit')
    """

    table: Mapping[str, Iterable[Any]] | Path | str  # Any: values of the user
    columns: Collection[str] | None = None
    csv_format: CsvFormat | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            raise TypeError(f"columns is {self.columns!r}; give a list of names")
        if isinstance(self.table, Path | str) and not Path(self.table).is_file():
            raise DataError(f"there is no file {self.table}; correct the path")

    @property
    def honors(self) -> Collection[str]:
        """The query of statistics, and its settings."""
        return (StatisticsQuery.__name__, *(field.name for field in fields(StatisticsQuery)))

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Answer the plan in the settings; there are no tensors to train.

        Raises:
            SettingsRefused: The settings ask something else, or about a column that this client
                does not answer about.
            DataError: The table does not fit to the plan.
        """
        query = update_from(context.settings, known=[StatisticsQuery])
        if not isinstance(query, StatisticsQuery):
            self._refuse()
        schema = query.parsed.columns
        if self.columns is not None and (others := sorted(schema.keys() - set(self.columns))):
            raise SettingsRefused(
                f"this client does not answer about the column {others[0]!r}; leave it out of the "
                "plan"
            )
        table = self._read(schema)
        answering = QueryTrainer(table.features, table.labels, queries=[StatisticsQuery])
        return answering.train(tensors, context=context)

    def evaluate(
        self,
        tensors: Mapping[str, Tensor],  # noqa: ARG002 - refused
        *,
        control: TaskControl,  # noqa: ARG002 - refused
    ) -> LocalEvaluation:
        """Refuse, since there is no model to evaluate.

        Raises:
            UnusableResult: Always.
        """
        self._refuse()

    def _read(self, schema: Schema) -> ClientTable:
        if not isinstance(self.table, Path | str):
            return ClientTable.of(self.table, schema)
        if is_parquet(path := Path(self.table)):
            return ClientTable.of(read_parquet_table(path).columns, schema)
        [found] = read_tables(self.table, schema, csv_format=self.csv_format).values()
        return found

    def _refuse(self) -> NoReturn:
        raise UnusableResult(
            "this client has a TableTrainer, which has no model; ask it for statistics, or give it "
            "a TorchTrainer"
        )


def read_tables(
    path: Path | str, schema: Schema, *, csv_format: CsvFormat | None = None
) -> dict[str, ClientTable]:
    r"""Read a CSV file, or a folder with one for each client, as tables of a schema, by client.

    Args:
        path: A file, or a folder.
        schema: The columns to read. Texts and categories are taken as they are written, even if
            they look like numbers.
        csv_format: How the files are written; ``None``: as
            :class:`~fedlearn.training.csv_columns.CsvFormat` is by default.

    Raises:
        DataError: A file cannot be read, lacks a column, or a value does not fit.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "aachen.csv").write_text("code;ward\n0061;a\n;b\n")
        ...     read_tables(folder, {"code": TextColumn(width=4)})["aachen"].columns["code"].shape
        torch.Size([2, 4])
    """
    found = read_csv(path, csv_format=_with_texts(csv_format, schema))
    return {each.client: ClientTable.of(each.columns, schema, owner=each.client) for each in found}


def read_tables_by(
    path: Path | str, schema: Schema, *, client_column: str, csv_format: CsvFormat | None = None
) -> dict[str, ClientTable]:
    """Read CSV files as tables of a schema by client, where a column names the client of each row.

    Raises:
        DataError: As :func:`read_tables`, or a row names no client.
    """
    named = (csv_format or CsvFormat()).with_texts([client_column])
    rows: dict[str, list[Mapping[str, NDArray[Any]]]] = {}
    for file in read_csv(path, csv_format=_with_texts(named, schema)):
        clients = file.columns[client_column]
        unnamed = np.flatnonzero([each is None for each in clients])
        if unnamed.size:
            raise DataError(
                f"{file.place(int(unnamed[0]))}: there is no {client_column}; name the client of "
                "each row, or leave the row out"
            )
        for client in dict.fromkeys(clients.tolist()):
            is_own = clients == client
            part = {name: values[is_own] for name, values in file.columns.items()}
            rows.setdefault(client, []).append(part)
    return {
        client: ClientTable.of(_join(parts, schema, owner=client), schema, owner=client)
        for client, parts in rows.items()
    }


def _join(
    parts: Sequence[Mapping[str, NDArray[Any]]], schema: Schema, *, owner: str
) -> dict[str, NDArray[Any]]:
    """Join a client's rows from several files.

    Raises:
        DataError: A file lacks a column of the schema.
    """
    lacking = [name for name in schema for part in parts if name not in part]
    if lacking:
        raise DataError(f"client {owner}: a file has no column {lacking[0]!r}; give it one")
    return {name: np.concatenate([part[name] for part in parts]) for name in schema}


def _with_texts(csv_format: CsvFormat | None, schema: Schema) -> CsvFormat:
    """Return the format with the schema's texts and categories as text."""
    texts = (name for name, column in schema.items() if _is_text(column))
    return (csv_format or CsvFormat()).with_texts(texts)


def _is_text(column: object) -> bool:
    if isinstance(column, CategoryColumn):
        return any(isinstance(each, str) for each in column.values)
    return isinstance(column, TextColumn)
