"""The curves of one run, or of several over each other, as a PNG.

Figures are built from matplotlib's objects, without pyplot: nothing global is touched, so
a plot can be drawn in any thread of any program.
"""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedlearn.core.collecting import Status
from fedlearn.core.files import write_durably
from fedlearn.core.words import printable
from fedlearn.errors import StoreError
from fedlearn.experiment.comparison import (
    Counts,
    History,
    Point,
    TimeUnit,
    best_point,
    is_loss,
    series,
)
from fedlearn.rounds.records import RoundRecord

# Okabe and Ito's palette, told apart with any colour vision.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
STATUS_COLOURS = {Status.REPORTED: "#0072B2", Status.LATE: "#E69F00", Status.FAILED: "#D55E00"}

_INK, _GRID, _SMALL, _NORMAL, _LARGE = "#222222", "#dddddd", 9, 10.5, 15
_MARKED_POINTS = 40
_NUM_BARS = 120


def plot(runs: Sequence[History], path: Path) -> Path:
    """Draw accuracy, loss, virtual time and participation as one PNG.

    Args:
        runs: One run, or several to lie over each other.
        path: The file, replaced as a whole.

    Returns:
        ``path``.

    Raises:
        StoreError: The file cannot be written.
    """
    figure = draw(runs)
    content = BytesIO()
    figure.savefig(content, format="png")
    write_durably(path, content.getvalue(), raises=StoreError)
    return path


def draw(runs: Sequence[History]) -> Figure:
    """Return the figure of :func:`plot`: four panels, by rows and then columns."""
    figure = Figure(figsize=(12, 8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    metric = _first_measured(runs)
    (by_round, losses), (by_time, asked) = figure.subplots(2, 2)
    _draw_metric(by_round, runs, metric)
    _draw_losses(losses, runs)
    _draw_over_time(by_time, runs, metric)
    if len(runs) == 1:
        _draw_participation(asked, runs[0][1])
    else:
        _draw_shares(asked, runs)
    names = ", ".join(printable(record.name) for record, _ in runs)
    figure.suptitle(names, fontsize=_LARGE, fontweight="bold", color=_INK, parse_math=False)
    return figure


def _first_measured(runs: Sequence[History]) -> str:
    """Return loss if it is all that any run has, else accuracy."""
    measured = (m for m in ("accuracy", "loss") if any(series(rounds, m) for _, rounds in runs))
    return next(measured, "accuracy")


# ---- Panels -------------------------------------------------------------------------------


def _draw_metric(axes: Axes, runs: Sequence[History], metric: str) -> None:
    """Draw the metric by round, with the spread over clients and the best value."""
    keys: list[tuple[Line2D, str]] = []
    for colour, (record, rounds) in _coloured(runs):
        low, high = (series(rounds, f"clients/{metric}_{part}") for part in ("p10", "p90"))
        if low and len(low) == len(high):
            steps = [point.num_finished for point in low]
            bounds = [point.value for point in low], [point.value for point in high]
            axes.fill_between(steps, *bounds, color=colour, alpha=0.16, linewidth=0)
        points = series(rounds, metric)
        best = best_point(points, metric)
        if best is None:
            continue
        line = _curve(axes, points, colour)
        axes.plot(best.num_finished, best.value, "*", color=colour, markersize=13, zorder=4)
        keys.append((line, f"{printable(record.name)}: best {best.value:.4f}"))
    banded = any(series(rounds, f"clients/{metric}_p10") for _, rounds in runs)
    _finish(axes, f"{metric.capitalize()} by round", "round", _metric_label(metric), keys)
    _count_rounds(axes)
    if banded:
        axes.set_title("band: 10th to 90th percentile of clients", fontsize=_SMALL, loc="right")


def _draw_losses(axes: Axes, runs: Sequence[History]) -> None:
    """Draw the evaluation loss, and dashed what the clients trained at."""
    keys: list[tuple[Line2D, str]] = []
    for colour, (record, rounds) in _coloured(runs):
        name = f"{printable(record.name)}: " if len(runs) > 1 else ""
        for metric, style, label in (("loss", "-", "evaluation"), ("train_loss", "--", "training")):
            if points := series(rounds, metric):
                keys.append((_curve(axes, points, colour, style=style), name + label))
    _finish(axes, "Loss by round", "round", "loss", keys)
    _count_rounds(axes)


def _draw_over_time(axes: Axes, runs: Sequence[History], metric: str) -> None:
    """Draw the metric against virtual time: what a deployment would wait for."""
    unit = TimeUnit.of(max((rounds[-1].virtual_s for _, rounds in runs if rounds), default=0.0))
    keys: list[tuple[Line2D, str]] = []
    for colour, (record, rounds) in _coloured(runs):
        if points := series(rounds, metric):
            times = [point.virtual_s / unit.seconds for point in points]
            line = _curve(axes, points, colour, at=times)
            keys.append((line, printable(record.name)))
    title = f"{metric.capitalize()} by virtual time"
    _finish(axes, title, f"virtual time ({unit.name})", _metric_label(metric), keys)


def _draw_participation(axes: Axes, rounds: Sequence[RoundRecord]) -> None:
    """Draw what became of the clients asked, by round; bars are means where rounds are many."""
    width = max(1, -(-len(rounds) // _NUM_BARS))
    groups = [rounds[start : start + width] for start in range(0, len(rounds), width)]
    counts = [[Counts.of(record) for record in group] for group in groups]
    centres = [group[0].round_num + 1 + (len(group) - 1) / 2 for group in groups]
    floor = [0.0] * len(groups)
    for index, (status, colour) in enumerate(STATUS_COLOURS.items()):
        heights = [sum(count[index] for count in group) / len(group) for group in counts]
        shown = [0.86 * len(group) for group in groups]
        axes.bar(centres, heights, shown, bottom=floor, color=colour, label=status.value)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    title = "Participation" if width == 1 else f"Participation, mean of {width} rounds"
    _finish(axes, title, "round", "clients a round", [])
    _count_rounds(axes)
    _status_legend(axes)


def _draw_shares(axes: Axes, runs: Sequence[History]) -> None:
    """Draw what became of all clients asked, one bar a run."""
    totals = [[Counts.of(record) for record in rounds] for _, rounds in runs]
    floor = [0.0] * len(runs)
    rows = range(len(runs))
    for index, (status, colour) in enumerate(STATUS_COLOURS.items()):
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


def _coloured(runs: Sequence[History]) -> Iterator[tuple[str, History]]:
    for index, run in enumerate(runs):
        yield RUN_COLOURS[index % len(RUN_COLOURS)], run


def _curve(
    axes: Axes,
    points: Sequence[Point],
    colour: str,
    *,
    style: str = "-",
    at: Sequence[float] | None = None,
) -> Line2D:
    """Draw points as a line, over rounds unless ``at`` says where; few points are marked."""
    steps = [point.num_finished for point in points] if at is None else at
    values = [point.value for point in points]
    marker = "o" if len(points) <= _MARKED_POINTS and style == "-" else ""
    [line] = axes.plot(
        steps, values, color=colour, linestyle=style, linewidth=2, marker=marker, markersize=4
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#777777")
    if keys:
        lines, labels = zip(*keys, strict=True)
        legend = axes.legend(lines, labels, fontsize=_SMALL, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _status_legend(axes: Axes) -> None:
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.99),
        ncols=3,
        fontsize=_SMALL,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.2,
    )


def _count_rounds(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _metric_label(metric: str) -> str:
    return metric if is_loss(metric) else f"{metric} (fraction)"
