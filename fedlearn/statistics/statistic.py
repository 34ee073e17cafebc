"""What a statistic is: sums over rows that a client adds up, and what follows from them.

A row adds a vector of numbers; a client adds up its rows; the sums over clients are all that the
coordinator needs. So secure aggregation and privacy work as for any query. The largest L2 norm of a
row's vector bounds what a client with a limited number of rows adds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.strategy import State
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.statistics.schema import CategoryColumn, ClientTable, NumberColumn, Schema, TextColumn

#: Half of the width of a 95 % interval of the normal distribution, in standard deviations.
Z_95 = 1.959963984540054

#: Nothing is divided by a count below so many standard deviations of its noise. Intervals of a
#: mean or variance, which are of first order, then have the true value in 90 to 97 of 100 cases,
#: and from ten standard deviations on in 95.
_LEAST_SIGMAS = 5.0


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One number of a result.

    Attributes:
        statistic: The kind of the statistic, such as ``mean``.
        column: The column; several are joined by ``" / "``; empty for all rows of the table.
        item: Which number, such as ``variance``, a category or a bin.
        value: The number; ``None`` if it is suppressed or not defined.
        standard_error: Of the noise, which privacy adds; ``None`` without noise, and where only an
            interval is known.
        low: Lower end of a 95 % interval of the noise; of a quantile without noise, of the interval
            that has it; of a number of distinct values, of the estimate.
        high: Upper end.
        suppressed: Whether the value is withheld, since too few examples are behind it or a
            neighboring value.
        note: What else there is to know.
        rank_error: Of a quantile with noise: by what share of the values its rank is off at most,
            with a probability of 95 %.
    """

    statistic: str
    column: str
    item: str
    value: float | None
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    suppressed: bool = False
    note: str = ""
    rank_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Statistic(Ranged):
    """One entry of a plan.

    Raises:
        ValueError: A parameter is out of range.
    """

    kind: ClassVar[str]
    #: The columns that it takes.
    takes: ClassVar[tuple[type[NumberColumn | CategoryColumn | TextColumn], ...]] = (
        NumberColumn,
        CategoryColumn,
        TextColumn,
    )

    #: Why privacy refuses it; empty: its noise leaves an estimate.
    needs_no_noise: ClassVar[str] = ""

    columns: Annotated[tuple[str, ...], doc("Names of the columns.")] = ()
    weight: Annotated[
        Positive, doc("Share of the noise budget, relative to the other statistics, > 0.")
    ] = 1.0

    def count_rounds(self, schema: Schema) -> int:
        """Return how many rounds it takes."""
        return 1

    @property
    def cells(self) -> int | None:
        """The threshold below which its counts are suppressed; ``None``: it has no such counts."""
        return None

    def find_problem(self, schema: Schema) -> str | None:
        """Describe what does not fit to the columns; ``None`` if all does."""
        return None if self.columns else "columns is empty; name one column or more"

    def size(self, schema: Schema) -> int:
        """Return how many numbers a row's vector has."""
        raise NotImplementedError

    def row_norm(self, schema: Schema) -> float:
        """Return the largest L2 norm of a row's vector; infinite if a column has no range."""
        raise NotImplementedError

    def init(self, schema: Schema) -> State:
        """Return the state before the first round."""
        return {}

    def broadcast(self, state: State) -> State:
        """Return the part of the state that clients need."""
        return {}

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Add up the vectors of a client's rows: float64 [size]."""
        raise NotImplementedError

    def step(self, sums: Tensor, state: State, *, schema: Schema, round_num: int) -> State:
        """Return the state after a round from its sums: float64 [size].

        The state is saved, so what must not be published may not be in it.
        """
        return {"sums": sums}

    def show_clients(self, sums: Tensor, state: State, *, schema: Schema) -> Tensor:
        """Return what may be shown of the sums of single clients; by default all.

        It is saved, so what must not be published may not be in it.

        Args:
            sums: The sums of each client: float64 [clients, size].
            state: The state after the round, with what is shown of the total.
            schema: The columns.
        """
        return sums

    def is_done(self, state: State, *, schema: Schema, round_num: int) -> bool:
        """Return whether no later round can add to the result."""
        return round_num + 1 >= self.count_rounds(schema)

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield the result.

        Args:
            state: The state after the last round.
            schema: The columns.
            sigmas: Standard deviation of the noise in each sum, by round; ``None``: no noise.
        """
        raise NotImplementedError


def estimate(
    function: Callable[[Tensor], Tensor], sums: Tensor, sigma: float | None
) -> list[tuple[float, float | None]]:
    """Compute numbers from sums, each with the standard error that the sums' noise gives it.

    The error is of first order, by the delta method: ``sigma`` times the norm of the gradient.

    Args:
        function: From sums [n] to numbers [m].
        sums: float64 [n].
        sigma: Standard deviation of the noise in each sum; ``None``: there is none.

    Example:
        >>> estimate(lambda sums: sums[:1] / sums[1:], torch.tensor([30.0, 10.0]), 2.0)
        [(3.0, 0.632...)]
    """
    values = function(sums).tolist()
    if sigma is None:
        return [(value, None) for value in values]
    jacobian = torch.autograd.functional.jacobian(function, sums)
    assert isinstance(jacobian, Tensor)  # of one input and one output
    errors = (sigma * torch.linalg.vector_norm(jacobian, dim=1)).tolist()
    return list(zip(values, errors, strict=True))


def make_row(
    place: tuple[str, str, str], value: float, error: float | None, *, note: str = ""
) -> ResultRow:
    """Build the row of a number with its standard error; one that is not finite is undefined.

    Args:
        place: Statistic, column and item.
        value: The number.
        error: Its standard error; ``None``: it has no noise.
        note: What else there is to know, or why the number is not defined.
    """
    statistic, column, item = place
    if not math.isfinite(value) or not math.isfinite(error or 0.0):
        return ResultRow(statistic=statistic, column=column, item=item, value=None, note=note)
    spread = None if error is None else Z_95 * error
    return ResultRow(
        statistic=statistic,
        column=column,
        item=item,
        value=value,
        standard_error=error,
        low=None if spread is None else value - spread,
        high=None if spread is None else value + spread,
        note=note,
    )


def find_why_undefined(count: float, sigma: float | None, *, what: str) -> str:
    """Return why nothing can be divided by a count; empty if it can.

    Args:
        count: The count.
        sigma: Standard deviation of its noise; ``None``: there is none.
        what: What is counted, in the plural.
    """
    if sigma is not None:
        return "" if count > _LEAST_SIGMAS * sigma else f"too few {what} for the noise"
    return "" if count > 0.0 else f"there are no {what}"


def count_of(value: float, sigma: float | None) -> float:
    """Return a sum that counts: whole, if it has no noise, only the rounding of a secure sum."""
    return value if sigma is not None or not math.isfinite(value) else float(round(value))
