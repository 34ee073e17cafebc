"""Statistics that count rows: totals, missing values, histograms, known values and groups."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Annotated, ClassVar

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.strategy import State
from fedlearn.core.ranges import Count, Whole, is_number
from fedlearn.statistics.schema import CategoryColumn, ClientTable, NumberColumn, Schema
from fedlearn.statistics.statistic import (
    ResultRow,
    Statistic,
    count_of,
    estimate,
    find_why_undefined,
    make_row,
)
from fedlearn.statistics.suppression import suppress_small_cells, suppress_small_columns

#: Most cells of a table of groups.
_MAX_CELLS = 100_000


@dataclass(frozen=True, kw_only=True)
class RowCount(Statistic):
    """Number of rows, and of values that are not missing in each column."""

    kind: ClassVar[str] = "count"

    def find_problem(self, schema: Schema) -> str | None:
        """None: it may have no columns."""
        return None

    def size(self, schema: Schema) -> int:
        """One number for the rows, and one a column."""
        return 1 + len(self.columns)

    def row_norm(self, schema: Schema) -> float:
        """Each number is at most 1."""
        return math.sqrt(self.size(schema))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Count."""
        present = [~schema[each].is_missing(table.columns[each]) for each in self.columns]
        return torch.tensor(
            [float(len(table)), *(float(each.sum()) for each in present)], dtype=torch.float64
        )

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield ``rows``, then ``values`` of each column."""
        sigma = None if sigmas is None else sigmas[0]
        places = [("", "rows"), *((name, "values") for name in self.columns)]
        for (column, item), value in zip(places, state["sums"].tolist(), strict=True):
            yield make_row((self.kind, column, item), count_of(value, sigma), sigma)


@dataclass(frozen=True, kw_only=True)
class MissingValues(Statistic):
    """Missing values of each column, and numbers outside of a column's range."""

    kind: ClassVar[str] = "missing"

    def size(self, schema: Schema) -> int:
        """One number for the rows, and two a column."""
        return 1 + 2 * len(self.columns)

    def row_norm(self, schema: Schema) -> float:
        """A value cannot be both missing and outside."""
        return math.sqrt(1 + len(self.columns))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Count."""
        sums = [float(len(table))]
        for name in self.columns:
            column, values = schema[name], table.columns[name]
            sums.append(float(column.is_missing(values).sum()))
            outside = 0.0
            if isinstance(column, NumberColumn):
                # A missing value is NaN, which differs from itself.
                outside = float((column.clip(values) != values).sum()) - sums[-1]
            sums.append(outside)
        return torch.tensor(sums, dtype=torch.float64)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield ``missing`` and ``share`` of each column, and ``outside`` if it has a range."""
        sigma = None if sigmas is None else sigmas[0]
        sums = state["sums"]
        why_not = find_why_undefined(count_of(float(sums[0]), sigma), sigma, what="rows")
        for place, name in enumerate(self.columns):
            column, (missing, outside) = schema[name], sums[1 + 2 * place :][:2].tolist()
            yield make_row((self.kind, name, "missing"), count_of(missing, sigma), sigma)
            both = torch.stack([sums[0], sums[1 + 2 * place]])
            share, error = math.nan, None
            if not why_not:
                ((share, error),) = estimate(lambda pair: pair[1:] / pair[:1], both, sigma)
            yield make_row((self.kind, name, "share"), share, error, note=why_not)
            if isinstance(column, NumberColumn) and column.has_range:
                yield make_row((self.kind, name, "outside"), count_of(outside, sigma), sigma)


@dataclass(frozen=True, kw_only=True)
class CellCounts(Statistic):
    """Base of statistics that count rows in disjoint cells, and suppress small ones."""

    threshold: Annotated[
        Whole, doc("Cells with fewer examples are suppressed, except empty ones; 0: none is.")
    ]

    @property
    def cells(self) -> int | None:
        """The threshold."""
        return self.threshold

    def tables(self, schema: Schema) -> list[tuple[str, list[str]]]:
        """Return the tables that it counts: their columns' names, and the names of their cells."""
        raise NotImplementedError

    def cells_of(self, table: ClientTable, schema: Schema) -> list[Tensor]:
        """Return the cells of a client's rows in each table; those in no cell are left out."""
        raise NotImplementedError

    def size(self, schema: Schema) -> int:
        """One number a cell."""
        return sum(len(cells) for _, cells in self.tables(schema))

    def row_norm(self, schema: Schema) -> float:
        """A row is in one cell of each table."""
        return math.sqrt(len(self.tables(schema)))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Count."""
        counts = [
            torch.bincount(of_rows, minlength=len(cells))
            for of_rows, (_, cells) in zip(
                self.cells_of(table, schema), self.tables(schema), strict=True
            )
        ]
        return torch.cat(counts).double()

    def step(self, sums: Tensor, state: State, *, schema: Schema, round_num: int) -> State:
        """Suppress small cells before anything is saved."""
        lengths = [len(cells) for _, cells in self.tables(schema)]
        shown = [suppress_small_cells(each, self.threshold) for each in sums.split(lengths)]
        return {"sums": torch.cat(shown)}

    def show_clients(self, sums: Tensor, state: State, *, schema: Schema) -> Tensor:
        """Suppress the cells that are small at any client, at all clients."""
        lengths = [len(cells) for _, cells in self.tables(schema)]
        shown = [
            suppress_small_columns(of_clients, self.threshold, is_hidden=total.isnan())
            for of_clients, total in zip(
                sums.split(lengths, dim=1), state["sums"].split(lengths), strict=True
            )
        ]
        return torch.cat(shown, dim=1)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield the cells of each table."""
        sigma = None if sigmas is None else sigmas[0]
        tables = self.tables(schema)
        parts = state["sums"].split([len(cells) for _, cells in tables])
        for (column, cells), counts in zip(tables, parts, strict=True):
            found = [
                ResultRow(
                    statistic=self.kind, column=column, item=item, value=None, suppressed=True
                )
                if math.isnan(value)
                else make_row((self.kind, column, item), count_of(value, sigma), sigma)
                for item, value in zip(cells, counts.tolist(), strict=True)
            ]
            yield from self.order(found)

    def order(self, rows: list[ResultRow]) -> Iterator[ResultRow]:
        """Yield the rows of one table in the order to show; by default that of the cells."""
        yield from rows


@dataclass(frozen=True, kw_only=True)
class ColumnHistogram(CellCounts):
    """Counts of numbers between fixed edges, and below and above them.

    A bin has its lower edge but not its upper one; the last has both, as in NumPy.
    """

    kind: ClassVar[str] = "histogram"
    takes = (NumberColumn,)

    edges: Annotated[tuple[float, ...], doc("Edges of the bins, ascending; two or more.")]
    threshold: Annotated[
        Whole, doc("Cells with fewer examples are suppressed, except empty ones; 0: none is.")
    ] = 0

    def find_problem(self, schema: Schema) -> str | None:
        """Check the edges, too."""
        numbers = [float(each) for each in self.edges if is_number(each) and math.isfinite(each)]
        if len(numbers) < len(self.edges) or len(numbers) < 2 or sorted(set(numbers)) != numbers:  # noqa: PLR2004 - two make a bin
            return f"edges is {list(self.edges)!r}; give two or more finite numbers, ascending"
        return super().find_problem(schema)

    def tables(self, schema: Schema) -> list[tuple[str, list[str]]]:
        """One table for each column."""
        names = [f"{edge:g}" for edge in self.edges]
        bins = [f"[{low}, {high})" for low, high in pairwise(names)]
        bins[-1] = f"{bins[-1][:-1]}]"
        cells = [f"< {names[0]}", *bins, f"> {names[-1]}"]
        return [(column, cells) for column in self.columns]

    def cells_of(self, table: ClientTable, schema: Schema) -> list[Tensor]:
        """Find the bins."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        found = []
        for name in self.columns:
            values = table.columns[name]
            values = values[~values.isnan()]
            cells = torch.bucketize(values, edges, right=True)
            found.append(torch.where(values == edges[-1], cells - 1, cells))
        return found


@dataclass(frozen=True, kw_only=True)
class FrequentValues(CellCounts):
    """Counts of the values of a categorical column, the most frequent ones first."""

    kind: ClassVar[str] = "frequent"
    takes = (CategoryColumn,)

    most: Annotated[Count | None, doc("Most values to show, >= 1; not set: all.")] = None

    def tables(self, schema: Schema) -> list[tuple[str, list[str]]]:
        """One table for each column."""
        return [(name, list(_category(schema, name).names)) for name in self.columns]

    def cells_of(self, table: ClientTable, schema: Schema) -> list[Tensor]:
        """Return the places of the values."""
        found = []
        for name in self.columns:
            values = table.columns[name]
            found.append(values[~schema[name].is_missing(values)])
        return found

    def order(self, rows: list[ResultRow]) -> Iterator[ResultRow]:
        """Yield the most frequent values first, then those that are suppressed."""
        shown = [row for row in rows if row.value is not None]
        yield from sorted(shown, key=lambda row: -(row.value or 0.0))[: self.most]
        yield from (row for row in rows if row.suppressed)


@dataclass(frozen=True, kw_only=True)
class GroupCounts(CellCounts):
    """Counts of the combinations of several categorical columns, without margins.

    Margins would reveal suppressed cells, so there are none: a plan refuses a second table of one
    of the columns.
    """

    kind: ClassVar[str] = "groups"
    takes = (CategoryColumn,)

    def find_problem(self, schema: Schema) -> str | None:
        """Check the number of cells, too."""
        num_cells = math.prod(len(_category(schema, name).names) for name in self.columns)
        if num_cells > _MAX_CELLS:
            return f"columns have {num_cells} groups; give columns with at most {_MAX_CELLS}"
        return super().find_problem(schema)

    def tables(self, schema: Schema) -> list[tuple[str, list[str]]]:
        """One table."""
        names = [_category(schema, name).names for name in self.columns]
        return [(" / ".join(self.columns), [" / ".join(each) for each in product(*names)])]

    def cells_of(self, table: ClientTable, schema: Schema) -> list[Tensor]:
        """Number the combinations; a row with a missing value is in none."""
        cells = torch.zeros(len(table), dtype=torch.int64)
        is_missing = torch.zeros(len(table), dtype=torch.bool)
        for name in self.columns:
            values = table.columns[name]
            is_missing |= schema[name].is_missing(values)
            cells = cells * len(_category(schema, name).names) + values
        return [cells[~is_missing]]


def _category(schema: Schema, name: str) -> CategoryColumn:
    column = schema[name]
    assert isinstance(column, CategoryColumn)  # the plan has checked what the statistic takes
    return column
