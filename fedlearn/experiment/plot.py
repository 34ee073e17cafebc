"""The curves of one run, or of several over each other: as a PNG, or as SVG for a page.

Figures are built from matplotlib's objects, without pyplot: no figure is kept, and nothing
of the caller's is restyled.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from fedlearn.core.collecting import Status
from fedlearn.core.files import write_durably
from fedlearn.core.words import printable
from fedlearn.errors import StoreError
from fedlearn.experiment.comparison import (
    Counts,
    History,
    Point,
    best_point,
    direction_of,
    drawn_metric,
    headed,
    number_text,
    series,
    staleness_text,
    time_unit,
)
from fedlearn.rounds.records import RoundRecord

# Okabe and Ito's palette, told apart with any colour vision.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
STATUS_COLOURS = {
    Status.REPORTED: "#0072B2",
    Status.LATE: "#E69F00",
    Status.FAILED: "#D55E00",
    Status.STALE: "#CC79A7",
}
#: By the least staleness that it stands for: darker is older.
_AGE_COLOURS = {0: "#9ecae1", 1: "#6baed6", 2: "#3182bd", 4: "#08519c", 8: "#08306b"}

_INK, _GRID, _SMALL, _NORMAL, _LARGE = "#222222", "#dddddd", 9, 10.5, 15
_MARKED_POINTS = 40
#: How many times longer than another a run is where both no longer fit one linear scale.
_MUCH_LONGER = 20
_NUM_BARS = 120
_MOST_HOVERS = 150

#: Draws on a panel of its own.
Panel: TypeAlias = Callable[[Axes], None]

_HOVER = "hover: "  # begins the id of what tells something when pointed at
_ID = re.compile(r' id="(?!hover: )\w+_\d+"')  # of groups: the same in every drawing of a page
_COLOUR = re.compile(r"(fill|stroke): #([0-9a-f]{6})")


def plot(runs: Sequence[History], path: Path) -> Path:
    """Draw accuracy, loss, virtual time and participation as the PNG ``path``, which is returned.

    Several runs lie over each other. A file that is there is replaced as a whole.

    Raises:
        StoreError: The file cannot be written.
    """
    content = BytesIO()
    draw(runs).savefig(content, format="png")
    write_durably(path, content.getvalue(), raises=StoreError)
    return path


def draw(runs: Sequence[History]) -> Figure:
    """Return the figure of :func:`plot`: four panels, by rows and then columns."""
    figure = Figure(figsize=(12, 8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels(runs), figure.subplots(2, 2).flat, strict=True):
        panel(axes)
    names = ", ".join(printable(record.name) for record, _ in runs)
    figure.suptitle(names, fontsize=_LARGE, fontweight="bold", color=_INK, parse_math=False)
    return figure


def panels(runs: Sequence[History]) -> tuple[Panel, ...]:
    """Return what draws accuracy, loss, accuracy over time, and participation."""
    measured = (drawn_metric(*run) for run in runs if any(one.metrics for one in run[1]))
    metric = next(measured, "accuracy")
    return (
        partial(_draw_metric, runs=runs, metric=metric),
        partial(_draw_losses, runs=runs),
        partial(_draw_over_time, runs=runs, metric=metric),
        partial(_draw_participation if len(runs) == 1 else _draw_shares, runs=runs),
    )


def svg(panel: Panel, *, inches: tuple[float, float]) -> str:
    r"""Return a panel of this width and height as an SVG element for an HTML page.

    Texts stay texts, in the page's font, and what :func:`tell` marked answers the pointer
    without a script. Every colour ``#rrggbb`` is ``var(--rrggbb, #rrggbb)``: the page may
    replace it, for a dark look. While it is written, matplotlib's settings of SVG are changed for
    the process, so two threads must not do this at once.

    Example:
        >>> def panel(axes: Axes) -> None:
        ...     axes.plot([1, 2], [3.0, 4.0], color="#0072B2", label="accuracy")
        >>> drawing = svg(panel, inches=(4, 3))
        >>> drawing.startswith("<svg "), drawing.endswith("</svg>")
        (True, True)
        >>> "<title>2: accuracy 4.0000</title>" in drawing, "var(--0072b2, #0072b2)" in drawing
        (True, True)
    """
    figure = Figure(figsize=inches, layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    panel(axes)
    _tell_values(axes)
    written = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedlearn"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas: Any = FigureCanvasSVG(figure)  # Any: its methods have no types
        canvas.print_svg(written, metadata=nothing)  # savefig draws twice
    text = written.getvalue()
    text = _ID.sub("", text[text.index("<svg") :].rstrip())
    text = re.sub(rf'<g id="{_HOVER}([^"]*)">', r'<g class="hover"><title>\1</title>', text)
    return _COLOUR.sub(r"\1: var(--\2, #\2)", text)


def tell(artist: Artist, text: str) -> None:
    """Let :func:`svg` show ``text`` where somebody points at ``artist``."""
    artist.set_gid(f"{_HOVER}{printable(text)}")


def put(axes: Axes, shape: Rectangle) -> None:
    """Add a shape inside the axes, which do not stretch for it, and are laid out without it."""
    shape.set_in_layout(False)
    axes.add_artist(shape)  # as no patch, whose extent would be looked at


def _tell_values(axes: Axes) -> None:
    """Tell the values of all named lines at a position, in invisible columns over them."""
    told: dict[float, list[str]] = {}
    for line in axes.get_lines():
        name = str(line.get_label())
        for x, y in () if name.startswith("_") else np.asarray(line.get_xydata()).tolist():
            told.setdefault(x, []).append(f"{name} {number_text(y)}")
    positions = sorted(told)[:: -(-len(told) // _MOST_HOVERS) or 1]
    width = (positions[-1] - positions[0]) / max(1, len(positions) - 1) if positions else 0.0
    for x in positions:
        what = f"{axes.get_xlabel()} {x:g}: ".lstrip()
        _tell_column(axes, x - (width or 1.0) / 2, width or 1.0, what + ", ".join(told[x]))


def _tell_column(axes: Axes, left: float, width: float, text: str) -> None:
    column = Rectangle((left, 0), width, 1, alpha=0.0, transform=axes.get_xaxis_transform())
    tell(column, text)
    put(axes, column)


# ---- Panels -------------------------------------------------------------------------------


def _draw_metric(axes: Axes, *, runs: Sequence[History], metric: str) -> None:
    """Draw the metric by round, with the spread over clients and the best value."""
    keys: list[tuple[Line2D, str]] = []
    for colour, name, (record, rounds) in _coloured(runs):
        low, median, high = (
            series(rounds, f"clients/{metric}_{part}") for part in ("p10", "p50", "p90")
        )
        if low and len(low) == len(high):
            steps = [point.num_finished for point in low]
            bounds = [point.value for point in low], [point.value for point in high]
            axes.fill_between(steps, *bounds, color=colour, alpha=0.16, linewidth=0)
        points = series(rounds, metric)
        direction = direction_of(record, metric)
        best = best_point(points, direction) if direction else None
        if best is not None:
            line = _curve(axes, points, colour, label=metric)
            axes.plot(best.num_finished, best.value, "*", color=colour, markersize=13, zorder=4)
            keys.append((line, f"{name}best {best.value:.4f}"))
        if median:
            _curve(axes, median, colour, label="clients' median", style=":")
    _finish(axes, f"{headed(metric)} by round", "round", _metric_label(metric), keys)
    _widen(axes, [len(rounds) for _, rounds in runs])
    if axes.collections:
        about = "clients: 10th to 90th percentile, median dotted"
        axes.set_title(about, fontsize=_SMALL, loc="right")


def _draw_losses(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw the evaluation loss, and dashed what the clients trained at."""
    keys: list[tuple[Line2D, str]] = []
    for colour, name, (_, rounds) in _coloured(runs):
        for metric, style, label in (("loss", "-", "evaluation"), ("train_loss", "--", "training")):
            if points := series(rounds, metric):
                keys.append((_curve(axes, points, colour, label=label, style=style), name + label))
    _finish(axes, "Loss by round", "round", "loss", keys)
    _widen(axes, [len(rounds) for _, rounds in runs])


def _draw_over_time(axes: Axes, *, runs: Sequence[History], metric: str) -> None:
    """Draw the metric against virtual time: what a deployment would wait for."""
    longest_s = max((rounds[-1].virtual_s for _, rounds in runs if rounds), default=0.0)
    unit, unit_s = time_unit(longest_s)
    keys: list[tuple[Line2D, str]] = []
    for colour, name, (_, rounds) in _coloured(runs):
        if points := series(rounds, metric):
            times = [point.virtual_s / unit_s for point in points]
            keys.append((_curve(axes, points, colour, label=metric, at=times), f"{name}{metric}"))
    title = f"{headed(metric)} by virtual time"
    _finish(axes, title, f"virtual time ({unit})", _metric_label(metric), keys)
    _widen(axes, [rounds[-1].virtual_s for _, rounds in runs if rounds])


def _draw_participation(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw what became of the clients that one run asked; bars are means where rounds are many."""
    [(_, rounds)] = runs
    groups, width = _grouped(rounds)
    counts = [[Counts.of(record) for record in group] for group in groups]
    means = [[sum(of) / len(each) for of in zip(*each, strict=True)] for each in counts]
    starts = [group[0].round_num + 1 for group in groups]
    centres = [start + (len(group) - 1) / 2 for start, group in zip(starts, groups, strict=True)]
    shown = [0.86 * len(group) for group in groups]
    floor = [0.0] * len(groups)
    ended_so = _endings(counts)
    for index, (status, colour) in enumerate(ended_so.items()):
        heights = [mean[index] for mean in means]
        axes.bar(centres, heights, shown, bottom=floor, color=colour, label=status.value)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for start, group, mean in zip(starts, groups, means, strict=True):
        last = start + len(group) - 1
        ended = (f"{num:.4g} {each.value}" for num, each in zip(mean, ended_so, strict=False))
        what = f"round {start if start == last else f'{start} to {last}'}: {', '.join(ended)}"
        _tell_column(axes, start - 0.5, len(group), what)
    title = "Participation" if width == 1 else f"Participation, mean of {width} rounds"
    _finish(axes, title, "round", "clients a round", [])
    _status_legend(axes)


def draw_staleness(axes: Axes, *, rounds: Sequence[RoundRecord]) -> None:
    """Draw how stale the updates of a run were; bars are means where rounds are many."""
    groups, width = _grouped(rounds)
    lows, floor = list(_AGE_COLOURS), [0.0] * len(groups)
    centres = [each[0].round_num + 1 + (len(each) - 1) / 2 for each in groups]
    for low, above, colour in zip(lows, [*lows[1:], math.inf], _AGE_COLOURS.values(), strict=True):
        heights = [
            sum(n for one in each for age, n in one.staleness.items() if low <= age < above)
            / len(each)
            for each in groups
        ]
        last = "" if above == low + 1 else " and more" if math.isinf(above) else f" to {above - 1}"
        shown = [0.86 * len(each) for each in groups]
        axes.bar(centres, heights, shown, bottom=floor, color=colour, label=f"{low}{last}")
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    for each in groups:
        total = Counter[int]()
        for one in each:
            total.update(one.staleness)
        start, last_num = each[0].round_num + 1, each[-1].round_num + 1
        which = f"round {start if start == last_num else f'{start} to {last_num}'}"
        told = f"{which}: {staleness_text(dict(sorted(total.items())))}"
        _tell_column(axes, start - 0.5, len(each), told)
    title = "Staleness" if width == 1 else f"Staleness, mean of {width} rounds"
    _finish(axes, title, "round", "updates a round", [])
    _status_legend(axes)


def _grouped(rounds: Sequence[RoundRecord]) -> tuple[list[Sequence[RoundRecord]], int]:
    """Return consecutive rounds that share a bar, and how many do: one, unless there are many."""
    width = max(1, -(-len(rounds) // _NUM_BARS))
    return [rounds[start : start + width] for start in range(0, len(rounds), width)], width


def _endings(counts: Sequence[Sequence[Counts]]) -> dict[Status, str]:
    """Return the colours of how clients ended; of stale ones where somebody was."""
    is_stale = any(each.stale for group in counts for each in group)
    return {
        status: colour
        for status, colour in STATUS_COLOURS.items()
        if is_stale or status is not Status.STALE
    }


def _draw_shares(axes: Axes, *, runs: Sequence[History]) -> None:
    """Draw what became of all clients asked, one bar a run."""
    totals = [[Counts.of(record) for record in rounds] for _, rounds in runs]
    floor = [0.0] * len(runs)
    rows = range(len(runs))
    for index, (status, colour) in enumerate(_endings(totals).items()):
        shares = [
            100.0 * sum(count[index] for count in counts) / max(1, sum(map(sum, counts)))
            for counts in totals
        ]
        axes.barh(rows, shares, 0.6, left=floor, color=colour, label=status.value)
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    names = [printable(record.name) for record, _ in runs]
    axes.set_yticks(rows, names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    _finish(axes, "Participation", "share of clients asked (%)", "", [])
    _status_legend(axes)


# ---- Strokes ------------------------------------------------------------------------------


def _coloured(runs: Sequence[History]) -> Iterator[tuple[str, str, History]]:
    """Yield a colour, what begins a legend's text, and the run; one alone needs no name."""
    for index, run in enumerate(runs):
        name = f"{printable(run[0].name)}: " if len(runs) > 1 else ""
        yield RUN_COLOURS[index % len(RUN_COLOURS)], name, run


def _curve(
    axes: Axes,
    points: Sequence[Point],
    colour: str,
    *,
    label: str,
    style: str = "-",
    at: Sequence[float] | None = None,
) -> Line2D:
    """Draw points as a line, over rounds unless ``at`` says where; few points are marked."""
    steps = [point.num_finished for point in points] if at is None else at
    values = [point.value for point in points]
    marker = "o" if len(points) <= _MARKED_POINTS and style == "-" else ""
    [line] = axes.plot(
        steps, values, style, color=colour, label=label, linewidth=2, marker=marker, markersize=4
    )
    return line


def _finish(
    axes: Axes, title: str, x_label: str, y_label: str, keys: Sequence[tuple[Line2D, str]]
) -> None:
    """Label a panel, and say so where it has nothing to show."""
    axes.set_title(title, fontsize=_NORMAL + 1, fontweight="bold", loc="left", color=_INK)
    axes.set_xlabel(x_label, fontsize=_NORMAL, color=_INK)
    axes.set_ylabel(y_label, fontsize=_NORMAL, color=_INK)
    axes.tick_params(labelsize=_SMALL, color=_GRID, labelcolor=_INK)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if not axes.has_data():
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#777777")
    if keys:
        lines, labels = zip(*keys, strict=True)
        legend = axes.legend(lines, labels, fontsize=_SMALL, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _widen(axes: Axes, lengths: Sequence[float]) -> None:
    """Let a run that is much shorter than another be seen: by a logarithmic scale."""
    shown = [length for length in lengths if length > 0]
    if shown and max(shown) > _MUCH_LONGER * min(shown):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())


def _status_legend(axes: Axes) -> None:
    style = {"fontsize": _SMALL, "frameon": False, "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=5, **style)


def _metric_label(metric: str) -> str:
    return "accuracy (fraction)" if metric == "accuracy" else metric
