r"""Mean, variance and correlation.

With the center :math:`c` and the radius :math:`h` of a column's range, a value x adds
:math:`u = (x - c) / h` in [-1, 1] and products of such numbers:

=============================== =========================================
symbol                          here
=============================== =========================================
n, Σ u, Σ u²                    ``sums`` of a column
n c + h Σ u                     ``total``
μ = c + h Σ u / n               ``mean``
σ² = h² (Σ u² / n - (Σ u / n)²) ``variance``, of the population (ddof 0)
=============================== =========================================
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from typing import ClassVar

import torch
from torch import Tensor

from fedlearn.algorithms.strategy import State
from fedlearn.errors import DataError
from fedlearn.statistics.schema import ClientTable, NumberColumn, Schema
from fedlearn.statistics.statistic import (
    ResultRow,
    Statistic,
    count_of,
    estimate,
    find_why_undefined,
    make_row,
)

_DROWNED = "the noise is larger than a correlation can be"
#: Largest sum of squares of a client: larger ones leave no digits to the variance.
_LARGEST = 1e16
_CONSTANT = "a column is constant"
#: Rounding leaves a constant column a variance of about 1e-16 of its mean square, not 0.
_LEAST_SHARE = 1e-13


@dataclass(frozen=True, kw_only=True)
class MeanAndVariance(Statistic):
    """Number of values, sum, mean, variance and standard deviation of each column.

    They are those of the population: ``df.var(ddof=0)`` of pandas. There is no minimum or maximum:
    they are no sums, and a single person decides them. Ask for quantiles instead.
    """

    kind: ClassVar[str] = "mean"
    takes = (NumberColumn,)

    def size(self, schema: Schema) -> int:
        """Three numbers a column."""
        return 3 * len(self.columns)

    def row_norm(self, schema: Schema) -> float:
        """Each number is at most 1."""
        return _choose_norm(self.columns, schema, math.sqrt(self.size(schema)))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Compute n, Σ u and Σ u² of each column."""
        sums = list[float]()
        for name in self.columns:
            u = _scale(table, schema, name)
            u = u[~u.isnan()]
            sums += [float(len(u)), _add_up(u), _add_up(u.square())]
        return torch.tensor(sums, dtype=torch.float64)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield ``values``, ``sum``, ``mean``, ``variance`` and ``std`` of each column."""
        sigma = None if sigmas is None else sigmas[0]
        for name, sums in zip(self.columns, state["sums"].split(3), strict=True):
            center, radius = _place(schema, name)
            count = count_of(float(sums[0]), sigma)
            yield make_row((self.kind, name, "values"), count, sigma)
            known = torch.cat([torch.tensor([count], dtype=torch.float64), sums[1:]])

            def moments(sums: Tensor, center: float = center, radius: float = radius) -> Tensor:
                mean = sums[1] / sums[0]
                variance = sums[2] / sums[0] - mean.square()
                total = center * sums[0] + radius * sums[1]
                return torch.stack([total, center + radius * mean, radius**2 * variance])

            note = find_why_undefined(count, sigma, what="values")
            undefined: list[tuple[float, float | None]] = [(math.nan, None)] * 3
            total, mean, variance = undefined if note else estimate(moments, known, sigma)
            yield make_row((self.kind, name, "sum"), *total, note=note)
            yield make_row((self.kind, name, "mean"), *mean, note=note)
            row = make_row((self.kind, name, "variance"), *variance, note=note)
            # Noise and rounding may make it negative; the interval holds what is possible of it.
            row = _map_ends(row, lambda value: max(0.0, value))
            yield row
            yield replace(_map_ends(row, math.sqrt), item="std", standard_error=None)


def _map_ends(row: ResultRow, function: Callable[[float], float]) -> ResultRow:
    """Apply an increasing function to the value and to the ends of its interval."""
    value, low, high = (
        None if each is None else function(each) for each in (row.value, row.low, row.high)
    )
    return replace(row, value=value, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Correlation(Statistic):
    """Pearson correlation of each two columns, over the rows that have a value in all of them.

    That is ``df[columns].dropna().corr()`` of pandas. For pairs with missing values of their own,
    ask for one correlation of each two columns.
    """

    kind: ClassVar[str] = "correlation"
    takes = (NumberColumn,)

    def find_problem(self, schema: Schema) -> str | None:
        """Check the number of columns."""
        if len(self.columns) < 2:  # noqa: PLR2004 - a pair
            return f"columns is {list(self.columns)!r}; name two columns or more"
        return None

    def size(self, schema: Schema) -> int:
        """n, Σ u of each column, and Σ u v of each two."""
        d = len(self.columns)
        return 1 + d + d * (d + 1) // 2

    def row_norm(self, schema: Schema) -> float:
        """Each number is at most 1."""
        return _choose_norm(self.columns, schema, math.sqrt(self.size(schema)))

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Compute n, Σ u and Σ u v."""
        u = torch.stack([_scale(table, schema, name) for name in self.columns], dim=1)
        u = u[~u.isnan().any(dim=1)]
        of_columns = u.unbind(dim=1)
        pairs = combinations_with_replacement(of_columns, 2)
        sums = [*map(_add_up, of_columns), *(_add_up(one * other) for one, other in pairs)]
        return torch.tensor([float(len(u)), *sums], dtype=torch.float64)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield the number of complete rows, then the correlation of each two columns."""
        sigma = None if sigmas is None else sigmas[0]
        sums, d = state["sums"], len(self.columns)
        count = count_of(float(sums[0]), sigma)
        yield make_row((self.kind, " / ".join(self.columns), "rows"), count, sigma)
        known = torch.cat([torch.tensor([count], dtype=torch.float64), sums[1:]])
        upper = torch.triu_indices(d, d).tolist()
        at = {pair: d + 1 + place for place, pair in enumerate(zip(*upper, strict=True))}
        why_not = find_why_undefined(count, sigma, what="rows")
        for a, b in combinations(range(d), 2):
            first, second = self.columns[a], self.columns[b]
            # n, Σ u, Σ v, Σ u², Σ v², Σ u v of the pair.
            pair = known[[0, 1 + a, 1 + b, at[a, a], at[b, b], at[a, b]]]
            place, value, error = (self.kind, first, second), math.nan, None
            note = why_not
            if not why_not and bool((_variances(pair) > _LEAST_SHARE * pair[3:5] / pair[0]).all()):
                ((value, error),) = estimate(_correlation, pair, sigma)
            elif not why_not:
                note = _CONSTANT if sigma is None else _DROWNED
            if error is not None and error >= 1.0:
                value, note = math.nan, _DROWNED
            limited = max(-1.0, min(1.0, value)) if math.isfinite(value) else value
            yield make_row(place, limited, error, note=note)


def _variances(pair: Tensor) -> Tensor:
    """Return the two variances from the sums of a pair: see :func:`_correlation`."""
    return pair[3:5] / pair[0] - (pair[1:3] / pair[0]).square()


def _correlation(pair: Tensor) -> Tensor:
    """Return the correlation, [1], from n, Σ u, Σ v, Σ u², Σ v² and Σ u v."""
    covariance = pair[5] / pair[0] - pair[1] * pair[2] / pair[0] ** 2
    return (covariance / _variances(pair).prod().sqrt())[None]


def _scale(table: ClientTable, schema: Schema, name: str) -> Tensor:
    """Return a column's values in units of its range: in [-1, 1], or NaN."""
    column = schema[name]
    assert isinstance(column, NumberColumn)  # the plan has checked what the statistic takes
    scaled = (column.clip(table.columns[name]) - column.center) / column.radius
    if float(scaled.square().nansum()) > _LARGEST:
        raise DataError(
            f"column {name!r} has numbers so large that their squares lose digits; give the column "
            "low and high, which scale them"
        )
    return scaled


def _add_up(values: Tensor) -> float:
    """Add up numbers exactly: so a row moves a sum by itself, whatever the others and the order."""
    return math.fsum(values.tolist())


def _place(schema: Schema, name: str) -> tuple[float, float]:
    column = schema[name]
    assert isinstance(column, NumberColumn)  # as above
    return column.center, column.radius


def _choose_norm(columns: Sequence[str], schema: Schema, norm: float) -> float:
    has_range = all(
        isinstance(column, NumberColumn) and column.has_range
        for column in (schema[name] for name in columns)
    )
    return norm if has_range else math.inf
