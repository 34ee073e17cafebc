"""Draws the picture of a sweep: curves with bands over seeds, and the values of every run."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from matplotlib.axes import Axes

from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.figures import (
    INK,
    LARGE,
    RUN_COLORS,
    SMALL,
    label_axes,
    new_figure,
    write_png,
)

_NAME_CHARACTERS = 48


class VariantCurve(NamedTuple):
    """The values of one metric of a variant, over its seeds.

    Attributes:
        name: The variant.
        by_round: The values of all seeds by number of finished rounds.
        values: The value of each run that counts in the table.
    """

    name: str
    by_round: Mapping[int, Sequence[float]]
    values: Sequence[float]


def draw_sweep(title: str, metric: str, variants: Sequence[VariantCurve], path: Path) -> Path:
    """Draw a metric of a sweep as the PNG ``path``, which is returned.

    Left its mean over the seeds by round, with a band of one standard deviation; right the value
    of each run, and the mean, by variant.

    Raises:
        StoreError: The file cannot be written.
    """
    figure = new_figure(12, max(4.5, 1.6 + 0.32 * len(variants)))
    curves, points = figure.subplots(1, 2)
    _draw_curves(curves, variants, metric)
    _draw_points(points, variants, metric)
    figure.suptitle(title, fontsize=LARGE, fontweight="bold", color=INK, parse_math=False)
    return write_png(figure, path)


def _draw_curves(axes: Axes, variants: Sequence[VariantCurve], metric: str) -> None:
    # More variants than colors differ in the style of their lines.
    styles = (style for style in cycle(("-", "--", ":")) for _ in RUN_COLORS)
    for variant, color, style in zip(variants, cycle(RUN_COLORS), styles, strict=False):
        steps = sorted(variant.by_round)
        found = [variant.by_round[step] for step in steps]
        means = [fmean(each) for each in found]
        spreads = [stdev(each) if len(each) > 1 else 0.0 for each in found]
        axes.plot(steps, means, style + ("o" if len(steps) == 1 else ""), color=color)
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
    name = metric.partition("@")[0]
    label_axes(axes, f"{name} by round, colors as right", "round", name, [])
    axes.set_title("mean ± standard deviation", fontsize=SMALL, loc="right")


def _draw_points(axes: Axes, variants: Sequence[VariantCurve], metric: str) -> None:
    for place, (variant, color) in enumerate(zip(variants, cycle(RUN_COLORS), strict=False)):
        if variant.values:
            axes.plot(variant.values, [place] * len(variant.values), "o", color=color, alpha=0.45)
            mean = fmean(variant.values)
            axes.plot(mean, place, "|", color=color, markersize=22, markeredgewidth=2.5)
    names = [_shorten(each.name) for each in variants]
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    label_axes(axes, f"{metric} of each run", metric, "", [])
    axes.set_title("line: mean", fontsize=SMALL, loc="right")


def _shorten(name: str) -> str:
    """Leave out the middle of a long name: its end often tells it from others."""
    text, half = replace_unprintable(name), _NAME_CHARACTERS // 2
    return text if len(text) <= _NAME_CHARACTERS else f"{text[:half]}…{text[-half:]}"
