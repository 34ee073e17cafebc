"""Draws the counts of federated statistics as bars, with intervals where there is noise."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fedlearn.core.quantities import format_amount
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.figures import (
    INK,
    RUN_COLORS,
    SMALL,
    Panel,
    add_shape,
    add_tooltip,
    label_axes,
)
from fedlearn.experiment.statistics_result import StatisticsResult
from fedlearn.statistics.counts import ColumnHistogram, FrequentValues, GroupCounts
from fedlearn.statistics.statistic import ResultRow

#: Statistics whose items are counts of one whole.
_COUNTS = (ColumnHistogram.kind, FrequentValues.kind, GroupCounts.kind)
_MOST_BARS = 40
_MOST_CHARACTERS = 18


def statistics_panels(result: StatisticsResult | None) -> Iterator[Panel]:
    """Yield one panel for each histogram, list of frequent values and table of groups."""
    if result is None:
        return
    for place in dict.fromkeys((each.statistic, each.column) for each in result.rows):
        rows = list(result[place].values())
        if place[0] in _COUNTS and any(each.suppressed or each.value is not None for each in rows):
            yield partial(_draw, rows=rows)


def _draw(axes: Axes, *, rows: Sequence[ResultRow]) -> None:
    shown = rows[:_MOST_BARS]
    title = f"{shown[0].column}: {shown[0].statistic}"
    if len(shown) < len(rows):
        title += f", the first {len(shown)} of {len(rows)}"
    values = [0.0 if each.value is None else each.value for each in shown]
    tops = [max(v, each.high or 0.0) for v, each in zip(values, shown, strict=True)]
    axes.set(xlim=(-0.6, len(shown) - 0.4), ylim=(0.0, 1.05 * max([1.0, *tops])))
    for place, (each, value) in enumerate(zip(shown, values, strict=True)):
        text = "suppressed" if each.suppressed else format_amount(each.value)
        bar = Rectangle((place - 0.4, 0.0), 0.8, max(0.0, value), facecolor=RUN_COLORS[0])
        add_tooltip(bar, f"{each.item}: {text}")
        add_shape(axes, bar)
        if each.suppressed:
            axes.text(place, 0.0, " withheld", rotation=90, ha="center", fontsize=SMALL)
        elif each.low is not None and each.high is not None:
            axes.plot([place] * 2, [max(0.0, each.low), each.high], color=INK, label="_interval")
    # After the bars, since a panel without any says so.
    label_axes(axes, replace_unprintable(title), "", "count", keys=())
    axes.set_xticks(
        np.arange(len(shown)),
        [_shorten(each.item) for each in shown],
        rotation=45 if len(shown) > 1 else 0,
        ha="right" if len(shown) > 1 else "center",
    )
    for label in (*axes.get_xticklabels(), axes.title):
        # A value may contain "$", which would start a formula.
        label.set_parse_math(False)


def _shorten(text: str) -> str:
    shown = replace_unprintable(text)
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 1]}…"
