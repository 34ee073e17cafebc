"""Statistics of several rounds: quantiles by repeated division, frequent texts by a prefix tree.

Each round asks where rows fall in the part that the rounds before have left. A row is in at most
one cell, so a round costs what one histogram costs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le, doc
from torch import Tensor

from fedlearn.algorithms.strategy import State
from fedlearn.core.ranges import Count, is_number
from fedlearn.statistics.schema import ClientTable, NumberColumn, Schema, TextColumn
from fedlearn.statistics.statistic import ResultRow, Statistic, count_of, make_row

#: Chance that a statement about noise is wrong.
_RISK = 0.05
#: Parts of a range beyond this cannot be told apart in float64.
_MOST_PARTS = 2.0**45
#: Bytes that UTF-8 never has; nobody's text is counted there, so what is found is noise.
_IMPOSSIBLE = (0xC0, 0xC1, *range(0xF5, 0x100))
_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Quantiles(Statistic):
    """Quantiles of numbers, by repeated division of their range.

    Each round divides an interval into ``branches`` parts and continues in the one with the
    quantile, so the last interval has ``branches ** -num_rounds`` of the range. The quantile is
    NumPy's ``inverted_cdf``: the smallest value with at least that share of the values up to it.

    With noise, each count is wrong by some rows, so the result states how many per cent of the
    values its rank may be off. Levels 0 and 1, the minimum and the maximum, depend on one person
    and drown in noise.
    """

    kind: ClassVar[str] = "quantiles"
    takes = (NumberColumn,)

    levels: Annotated[tuple[float, ...], doc("Shares of the values, [0, 1]: 0.5 is the median.")]
    branches: Annotated[int, Ge(2), Le(1024), doc("Parts of an interval, 2 to 1024.")] = 16
    num_rounds: Annotated[Count, doc("Rounds, each of which divides the interval, >= 1.")] = 5

    def count_rounds(self, schema: Schema) -> int:
        """As configured."""
        return self.num_rounds

    @property
    def cells(self) -> int | None:
        """0: quantiles tell how many values there are between two numbers, and suppress nothing."""
        return 0

    def find_problem(self, schema: Schema) -> str | None:
        """Check the levels, and that each column has a range."""
        if not self.levels or not all(is_number(q) and 0.0 <= q <= 1.0 for q in self.levels):
            return f"levels is {list(self.levels)!r}; give shares from 0 to 1, such as [0.5]"
        if float(self.branches) ** self.num_rounds > _MOST_PARTS:
            return (
                f"branches is {self.branches} and num_rounds is {self.num_rounds}, which would "
                "divide the range more finely than numbers are; lower one of them"
            )
        for name in self.columns:
            column = schema[name]
            if isinstance(column, NumberColumn) and not column.has_range:
                return f"column {name!r} has no range to divide; give it low and high"
        return super().find_problem(schema)

    def _targets(self) -> list[tuple[str, float]]:
        return [(name, level) for name in self.columns for level in self.levels]

    def size(self, schema: Schema) -> int:
        """The parts of each interval, and the values below and above it."""
        return len(self._targets()) * (self.branches + 2)

    def row_norm(self, schema: Schema) -> float:
        """A row is in one part of each interval."""
        return math.sqrt(len(self._targets()))

    def init(self, schema: Schema) -> State:
        """Return the edges of the first parts: of the whole range."""
        ranges = []
        for name, _ in self._targets():
            column = schema[name]
            assert isinstance(column, NumberColumn)  # the plan has checked it
            ranges.append((column.low, column.high))
        low, high = torch.tensor(ranges, dtype=torch.float64).T
        return {"edges": self._divide(low, high), "totals": torch.zeros_like(low)}

    def broadcast(self, state: State) -> State:
        """Return the edges."""
        return {"edges": state["edges"]}

    def _divide(self, low: Tensor, high: Tensor) -> Tensor:
        steps = torch.arange(self.branches + 1, dtype=torch.float64) / self.branches
        edges = low[:, None] + (high - low)[:, None] * steps
        return torch.cat([edges[:, :-1], high[:, None]], dim=1)  # rounding does not move the end

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Count the values in each part: above its lower edge, up to its upper one."""
        counts = []
        for (name, _), edges in zip(self._targets(), broadcast["edges"], strict=True):
            column, values = schema[name], table.columns[name]
            assert isinstance(column, NumberColumn)  # the plan has checked it
            values = column.clip(values[~values.isnan()])
            parts = torch.bucketize(values, edges)
            counts.append(torch.bincount(parts, minlength=self.branches + 2))
        return torch.cat(counts).double()

    def step(self, sums: Tensor, state: State, *, schema: Schema, round_num: int) -> State:
        """Continue in the part with the quantile."""
        counts = sums.round().view(-1, self.branches + 2)
        totals, up_to = counts.sum(dim=1), counts.cumsum(dim=1)[:, :-1]
        levels = torch.tensor([level for _, level in self._targets()], dtype=torch.float64)
        ranks = (levels * totals).sub(1e-9).ceil().clamp(min=1.0)
        # The first edge with enough values up to it. Those up to the lower end were ruled out
        # before, so they mean the first part.
        has_enough = up_to >= ranks[:, None]
        first = torch.where(has_enough.any(dim=1), has_enough.int().argmax(dim=1), self.branches)
        first = first.clamp(min=1)[:, None]
        edges = state["edges"]
        low, high = edges.gather(1, first - 1)[:, 0], edges.gather(1, first)[:, 0]
        is_last = round_num + 1 == self.num_rounds
        found = torch.stack([low, high], dim=1) if is_last else self._divide(low, high)
        return {"edges": found, "totals": totals}

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield each level, as the middle of its last interval."""
        totals = state["totals"].tolist()
        for (name, level), edges, total in zip(
            self._targets(), state["edges"].tolist(), totals, strict=True
        ):
            low, high = edges[0], edges[-1]
            place = (self.kind, name, f"{level:g}")
            rank_error = None if sigmas is None else self._rank_error(level, total, sigmas)
            if total < 1.0 or (rank_error is not None and rank_error >= 1.0):
                why = "there are no values" if sigmas is None else "too few values for the noise"
                yield make_row(place, math.nan, None, note=why)
                continue
            row = ResultRow(
                statistic=self.kind, column=name, item=f"{level:g}", value=(low + high) / 2.0
            )
            if rank_error is None:
                yield replace(row, low=low, high=high)
                continue
            note = f"its rank is off by at most {100.0 * rank_error:.2g} % of the values (95 %)"
            yield replace(row, rank_error=rank_error, note=note)

    def _rank_error(self, level: float, total: float, sigmas: Sequence[float]) -> float:
        """Return by how much of the total the rank is off at most, in all rounds together."""
        num_cells, num_edges = self.branches + 2, self.branches * self.num_rounds
        z = NormalDist().inv_cdf(1.0 - _RISK / (2.0 * num_edges))
        # Of the noise in (values up to an edge) - level * (all values).
        spread = max(sigmas) * math.sqrt(num_cells) * max(level, 1.0 - level)
        return z * spread / total if total > 0.0 else math.inf


@dataclass(frozen=True, kw_only=True)
class FrequentTexts(Statistic):
    """The most frequent texts of a column, of which no list is known, by a tree of prefixes.

    The first round counts first bytes; each later one the bytes that follow the prefixes that are
    frequent enough. With noise, a prefix must also stand out from the noise, which is measured
    where no text can be. A text that is frequent at few clients and rare over all is not found.

    Without privacy, the coordinator sees how many rows have each byte after a frequent prefix, in
    the sum over the clients; so it may see rare texts.

    References:
        Zhu et al., 2020, `Federated Heavy Hitters Discovery with Differential Privacy
        <https://arxiv.org/abs/1902.08534>`_ (the tree over rounds, with a threshold). Bassily et
        al., 2017, `Practical Locally Private Heavy Hitters <https://arxiv.org/abs/1707.04982>`_
        (noisy counts of prefixes).
    """

    kind: ClassVar[str] = "frequent"
    takes = (TextColumn,)

    threshold: Annotated[Count, doc("Fewest examples of a text, and of a prefix, >= 1.")]
    most: Annotated[Count, Le(1024), doc("Most texts to find, and prefixes of a round, >= 1.")] = 16

    def count_rounds(self, schema: Schema) -> int:
        """One a byte."""
        return self._column(schema).width

    def _column(self, schema: Schema) -> TextColumn:
        column = schema[self.columns[0]]
        assert isinstance(column, TextColumn)  # the plan has checked it
        return column

    def find_problem(self, schema: Schema) -> str | None:
        """Check the number of columns."""
        if len(self.columns) != 1:
            return (
                f"columns is {list(self.columns)!r}; name one column of texts, and ask once more "
                "for another"
            )
        return None

    def size(self, schema: Schema) -> int:
        """One number for each prefix and byte."""
        return self.most * _BYTES

    def row_norm(self, schema: Schema) -> float:
        """A row has one prefix and one next byte."""
        return 1.0

    def init(self, schema: Schema) -> State:
        """Return the empty prefix, and no text."""
        width = self._column(schema).width
        return {
            "prefixes": torch.zeros(1, width, dtype=torch.int64),
            "length": torch.zeros((), dtype=torch.int64),
            "texts": torch.zeros(0, width, dtype=torch.int64),
            "counts": torch.zeros(0, dtype=torch.float64),
            "rounds": torch.zeros(0, dtype=torch.int64),
            "limit": torch.tensor(float(self.threshold), dtype=torch.float64),
        }

    def broadcast(self, state: State) -> State:
        """Return the prefixes, padded by zeros, and their length."""
        return {name: state[name] for name in ("prefixes", "length")}

    def measure(self, table: ClientTable, schema: Schema, broadcast: State) -> Tensor:
        """Count the bytes after each prefix."""
        (name,) = self.columns
        texts = table.columns[name]
        texts = texts[~schema[name].is_missing(texts)].long()
        counts, length = torch.zeros(self.most, _BYTES), int(broadcast["length"])
        for place, prefix in enumerate(broadcast["prefixes"]):
            matches = (texts[:, :length] == prefix[:length]).all(dim=1)
            counts[place] = torch.bincount(texts[matches, length], minlength=_BYTES)
        return counts.double().flatten()

    def step(self, sums: Tensor, state: State, *, schema: Schema, round_num: int) -> State:
        """Keep the frequent prefixes, and the texts that end after one."""
        counts, prefixes = sums.view(self.most, _BYTES).clone(), state["prefixes"]
        empty = torch.cat(
            [counts[: len(prefixes), _IMPOSSIBLE].flatten(), counts[len(prefixes) :].flatten()]
        )
        noise = float(empty.square().mean().sqrt())
        # So that the chance of a prefix that is only noise is 5 % a round.
        z = NormalDist().inv_cdf(1.0 - _RISK / counts.numel())
        counts[:, _IMPOSSIBLE] = -math.inf
        counts[len(prefixes) :] = -math.inf
        # A secure sum is rounded, so a count of 10 may be 9.999.
        limit = max(self.threshold - 0.5, z * noise)
        is_frequent = counts.flatten() >= limit
        places = is_frequent.nonzero()[:, 0]
        order = counts.flatten()[places].argsort(descending=True, stable=True)
        places = places[order]
        extended = prefixes[places // _BYTES].clone()
        extended[:, round_num] = places % _BYTES
        ends = (places % _BYTES == 0) | (round_num + 1 == self._column(schema).width)
        texts = torch.cat([state["texts"], extended[ends]])
        of_texts = torch.cat([state["counts"], counts.flatten()[places[ends]]])
        rounds = torch.cat([state["rounds"], torch.full_like(places[ends], round_num)])
        best = of_texts.argsort(descending=True, stable=True)[: self.most]
        return {
            "prefixes": extended[~ends][: self.most],
            "length": torch.tensor(round_num + 1),
            "texts": texts[best],
            "counts": of_texts[best],
            "rounds": rounds[best],
            "limit": torch.tensor(max(float(self.threshold), limit), dtype=torch.float64),
        }

    def is_done(self, state: State, *, schema: Schema, round_num: int) -> bool:
        """Also if no prefix is left."""
        is_last = super().is_done(state, schema=schema, round_num=round_num)
        return is_last or not len(state["prefixes"])

    def rows(
        self, state: State, *, schema: Schema, sigmas: Sequence[float] | None
    ) -> Iterator[ResultRow]:
        """Yield the texts, the most frequent one first, or one row that says that there is none."""
        (name,), column = self.columns, self._column(schema)
        if not len(state["texts"]):
            limit = float(state["limit"])
            why = "" if limit <= self.threshold else ", below which all may be noise"
            note = f"none reaches the threshold of {limit:.4g} rows{why}"
            yield make_row((self.kind, name, ""), math.nan, None, note=note)
        found = zip(
            state["texts"].tolist(), state["counts"].tolist(), state["rounds"].tolist(), strict=True
        )
        for text, count, round_num in found:
            sigma = None if sigmas is None else sigmas[round_num]
            yield make_row((self.kind, name, column.decode(text)), count_of(count, sigma), sigma)
