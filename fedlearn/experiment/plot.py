"""Draws the curves of one run, or of several overlaid: as a PNG, or as panels of a page."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from fedlearn.core.client_metrics import PERSONAL, ClientMetrics
from fedlearn.core.participations import Status
from fedlearn.core.quantities import choose_time_unit, format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.figures import (
    INK,
    LARGE,
    RUN_COLORS,
    SMALL,
    Panel,
    add_column_tooltip,
    label_axes,
    new_figure,
    write_png,
)
from fedlearn.experiment.history import (
    History,
    Point,
    best_point,
    capitalize,
    direction_of,
    metric_to_draw,
    series,
)
from fedlearn.experiment.summary import Counts, staleness_text
from fedlearn.rounds.records import RoundRecord

STATUS_COLORS = {
    Status.REPORTED: "#0072B2",
    Status.LATE: "#E69F00",
    Status.FAILED: "#D55E00",
    Status.STALE: "#CC79A7",
}
#: Colors by the least staleness that they stand for; darker is older.
_AGE_COLORS = {0: "#9ecae1", 1: "#6baed6", 2: "#3182bd", 4: "#08519c", 8: "#08306b"}

_MARKED_POINTS = 40
#: Ratio of lengths above which two runs no longer fit one linear scale.
_MUCH_LONGER = 20
_NUM_BARS = 120
_MOST_BINS = 20


def plot(runs: Sequence[History], path: Path) -> Path:
    """Draw accuracy, loss, virtual time and participation as the PNG ``path``, which is returned.

    Several runs are overlaid. An existing file is replaced as a whole.

    Raises:
        StoreError: The file cannot be written.
    """
    return write_png(draw(runs), path)


def draw(runs: Sequence[History]) -> Figure:
    """Draw the figure of :func:`plot`: four panels in two rows."""
    figure = new_figure(12, 8)
    for panel, axes in zip(panels(runs), figure.subplots(2, 2).flat, strict=True):
        panel(axes)
    names = ", ".join(replace_unprintable(record.name) for record, _ in runs)
    figure.suptitle(names, fontsize=LARGE, fontweight="bold", color=INK, parse_math=False)
    return figure


def panels(runs: Sequence[History]) -> tuple[Panel, ...]:
    """Return the four panels: the metric, the losses, the metric over time, and participation."""
    measured = (metric_to_draw(*run) for run in runs if any(one.metrics for one in run[1]))
    metric = next(measured, "accuracy")
    return (
        partial(_draw_metric, runs=runs, metric=metric),
        partial(_draw_losses, runs=runs),
        partial(_draw_over_time, runs=runs, metric=metric),
        partial(_draw_participation if len(runs) == 1 else _draw_shares, runs=runs),
    )


# ---- Panels -------------------------------------------------------------------------------


def _draw_metric(axes: Axes, *, runs: Sequence[History], metric: str) -> None:
    """Draw the metric by round, with the spread over clients and the best value."""
    keys: list[tuple[Artist, str]] = []
    for color, name, (record, rounds) in _assign_colors(runs):
        low, median, high = (
            series(rounds, f"clients/{metric}_{part}") for part in ("p10", "p50", "p90")
        )
        if low and len(low) == len(high):
            steps = [point.num_finished for point in low]
            bounds = [point.value for point in low], [point.value for point in high]
            axes.fill_between(steps, *bounds, color=color, alpha=0.16, linewidth=0)
        points = series(rounds, metric)
        direction = direction_of(record, metric)
        best = best_point(points, direction) if direction else None
        if best is not None:
            line = _curve(axes, points, color, label=metric)
            axes.plot(best.num_finished, best.value, "*", color=color, markersize=13, zorder=4)
            keys.append((line, f"{name}best {format_number(best.value)}"))
        elif not record.has_model:  # what a query has found is neither good nor bad
            keys.append((_curve(axes, points, color, label=metric), name + metric))
        if median:
            _curve(axes, median, color, label="clients' median", style=":")
    label_axes(axes, f"{capitalize(metric)} by round", "round", _metric_label(metric), keys)
    _widen(axes, [len(rounds) for _, rounds in runs])
    if axes.collections:
        about = "clients: 10th to 90th percentile, median dotted"
        axes.set_title(about, fontsize=SMALL, loc="right")


def _draw_losses(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw the evaluation loss, and dashed the clients' training loss."""
    keys: list[tuple[Artist, str]] = []
    for color, name, (_, rounds) in _assign_colors(runs):
        for metric, style, label in (("loss", "-", "evaluation"), ("train_loss", "--", "training")):
            if points := series(rounds, metric):
                keys.append((_curve(axes, points, color, label=label, style=style), name + label))
    label_axes(axes, "Loss by round", "round", "loss", keys)
    _widen(axes, [len(rounds) for _, rounds in runs])


def _draw_over_time(axes: Axes, *, runs: Sequence[History], metric: str) -> None:
    """Draw the metric against virtual time: what a deployment would wait for."""
    longest_s = max((rounds[-1].virtual_s for _, rounds in runs if rounds), default=0.0)
    unit, unit_s = choose_time_unit(longest_s)
    keys: list[tuple[Artist, str]] = []
    for color, name, (_, rounds) in _assign_colors(runs):
        if points := series(rounds, metric):
            times = [point.virtual_s / unit_s for point in points]
            keys.append((_curve(axes, points, color, label=metric, at=times), f"{name}{metric}"))
    title = f"{capitalize(metric)} by virtual time"
    label_axes(axes, title, f"virtual time ({unit})", _metric_label(metric), keys)
    _widen(axes, [rounds[-1].virtual_s for _, rounds in runs if rounds])


def _draw_participation(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw how the clients of each round of one run ended; many rounds are averaged into bars."""
    [(_, rounds)] = runs
    groups, width = _group_rounds(rounds)
    counts = [[Counts.of(record) for record in group] for group in groups]
    means = [[sum(of) / len(each) for of in zip(*each, strict=True)] for each in counts]
    starts = [group[0].round_num + 1 for group in groups]
    centers = [start + (len(group) - 1) / 2 for start, group in zip(starts, groups, strict=True)]
    shown = [0.86 * len(group) for group in groups]
    floor = [0.0] * len(groups)
    ended_so = _pick_status_colors(counts)
    for index, (status, color) in enumerate(ended_so.items()):
        heights = [mean[index] for mean in means]
        axes.bar(centers, heights, shown, bottom=floor, color=color, label=status.value)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for start, group, mean in zip(starts, groups, means, strict=True):
        last = start + len(group) - 1
        ended = (f"{num:.4g} {each.value}" for num, each in zip(mean, ended_so, strict=False))
        what = f"round {start if start == last else f'{start} to {last}'}: {', '.join(ended)}"
        add_column_tooltip(axes, start - 0.5, len(group), what)
    title = "Participation" if width == 1 else f"Participation, mean of {width} rounds"
    label_axes(axes, title, "round", "clients a round", [])
    _status_legend(axes)


def draw_staleness(axes: Axes, *, rounds: Sequence[RoundRecord]) -> None:
    """Draw how stale the updates of each round were; many rounds are averaged into bars."""
    groups, width = _group_rounds(rounds)
    lows, floor = list(_AGE_COLORS), [0.0] * len(groups)
    centers = [each[0].round_num + 1 + (len(each) - 1) / 2 for each in groups]
    for low, above, color in zip(lows, [*lows[1:], math.inf], _AGE_COLORS.values(), strict=True):
        heights = [
            sum(n for one in each for age, n in one.staleness.items() if low <= age < above)
            / len(each)
            for each in groups
        ]
        last = "" if above == low + 1 else " and more" if math.isinf(above) else f" to {above - 1}"
        shown = [0.86 * len(each) for each in groups]
        axes.bar(centers, heights, shown, bottom=floor, color=color, label=f"{low}{last}")
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    for each in groups:
        total = Counter[int]()
        for one in each:
            total.update(one.staleness)
        start, last_num = each[0].round_num + 1, each[-1].round_num + 1
        which = f"round {start if start == last_num else f'{start} to {last_num}'}"
        tooltip = f"{which}: {staleness_text(dict(sorted(total.items())))}"
        add_column_tooltip(axes, start - 0.5, len(each), tooltip)
    title = "Staleness" if width == 1 else f"Staleness, mean of {width} rounds"
    label_axes(axes, title, "round", "updates a round", [])
    _status_legend(axes)


def draw_clients(axes: Axes, *, clients: ClientMetrics) -> None:
    """Draw how many clients measured which values of the leading metric.

    If that is of personal models, the same metric of the global model is drawn as well.
    """
    leading = clients.leading_metric
    name = leading.removeprefix(PERSONAL)
    shown = {
        label: values
        for label in dict.fromkeys((name, leading))
        if (values := clients.finite(label)).size
    }
    everything = np.concatenate([*shown.values(), np.empty(0)])
    edges = np.histogram_bin_edges(everything, bins=min(_MOST_BINS, 2 + len(clients) // 2))
    counts = {label: np.histogram(values, edges)[0] for label, values in shown.items()}
    for color, (label, heights) in zip(RUN_COLORS, counts.items(), strict=False):
        axes.stairs(heights, edges, color=color, label=label, fill=True, alpha=0.35)
        axes.stairs(heights, edges, color=color, linewidth=1.5)
    for place, (low, high) in enumerate(pairwise(edges.tolist()) if shown else ()):
        texts = (f"{heights[place]} {label}" for label, heights in counts.items())
        what = f"{format_number(low)} to {format_number(high)}: {', '.join(texts)}"
        add_column_tooltip(axes, low, high - low, what)
    label_axes(axes, "Clients by value", _metric_label(name), "clients")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _group_rounds(rounds: Sequence[RoundRecord]) -> tuple[list[Sequence[RoundRecord]], int]:
    """Group consecutive rounds into bars, and return the number of rounds per bar."""
    width = max(1, -(-len(rounds) // _NUM_BARS))
    return [rounds[start : start + width] for start in range(0, len(rounds), width)], width


def _pick_status_colors(counts: Sequence[Sequence[Counts]]) -> dict[Status, str]:
    """Return the colors by status, without the one for stale if no client was stale."""
    is_stale = any(each.stale for group in counts for each in group)
    return {
        status: color
        for status, color in STATUS_COLORS.items()
        if is_stale or status is not Status.STALE
    }


def _draw_shares(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw the shares of how all clients of a run ended, one bar per run."""
    totals = [[Counts.of(record) for record in rounds] for _, rounds in runs]
    floor = [0.0] * len(runs)
    rows = range(len(runs))
    for index, (status, color) in enumerate(_pick_status_colors(totals).items()):
        shares = [
            100.0 * sum(count[index] for count in counts) / max(1, sum(map(sum, counts)))
            for counts in totals
        ]
        axes.barh(rows, shares, 0.6, left=floor, color=color, label=status.value)
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    names = [replace_unprintable(record.name) for record, _ in runs]
    axes.set_yticks(rows, names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    label_axes(axes, "Participation", "share of clients asked (%)", "", [])
    _status_legend(axes)


# ---- Strokes ------------------------------------------------------------------------------


def _assign_colors(runs: Sequence[History]) -> Iterator[tuple[str, str, History]]:
    """Yield each run with its color and the prefix of its legend texts; empty for a single run."""
    for index, run in enumerate(runs):
        name = f"{replace_unprintable(run[0].name)}: " if len(runs) > 1 else ""
        yield RUN_COLORS[index % len(RUN_COLORS)], name, run


def _curve(
    axes: Axes,
    points: Sequence[Point],
    color: str,
    *,
    label: str,
    style: str = "-",
    at: Sequence[float] | None = None,
) -> Line2D:
    """Draw points as a line over rounds, or over ``at``; markers are drawn if points are few."""
    steps = [point.num_finished for point in points] if at is None else at
    values = [point.value for point in points]
    marker = "o" if len(points) <= _MARKED_POINTS and style == "-" else ""
    [line] = axes.plot(
        steps, values, style, color=color, label=label, linewidth=2, marker=marker, markersize=4
    )
    return line


def _widen(axes: Axes, lengths: Sequence[float]) -> None:
    """Switch to a logarithmic x axis if one run is so much shorter that it would not be seen."""
    shown = [length for length in lengths if length > 0]
    if shown and max(shown) > _MUCH_LONGER * min(shown):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())


def _status_legend(axes: Axes) -> None:
    style = {"fontsize": SMALL, "frameon": False, "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=5, **style)


def _metric_label(metric: str) -> str:
    return "accuracy (fraction)" if metric == "accuracy" else metric
