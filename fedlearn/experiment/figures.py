"""Draws figures in one common style, and writes them as PNG or SVG.

Figures are built from matplotlib's objects, without pyplot, which would keep every figure in memory
and restyle the caller's.
"""

import re
from collections.abc import Callable, Sequence
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
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from fedlearn.core.files import write_durably
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import StoreError

# Okabe and Ito's palette, which people with color vision deficiency can tell apart.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
INK, SMALL, LARGE = "#222222", 9, 15
_GRID, _NORMAL = "#dddddd", 10.5
_MOST_HOVERS = 150

#: Draws on one panel of a figure.
Panel: TypeAlias = Callable[[Axes], None]

_HOVER = "hover: "  # prefix of the ids of elements that have a tooltip
# Ids of groups, which are removed: they repeat in every drawing of a page.
_ID = re.compile(r' id="(?!hover: )\w+_\d+"')
_COLOR = re.compile(r"(fill|stroke): #([0-9a-f]{6})")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    return Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


def write_png(figure: Figure, path: Path) -> Path:
    """Write a figure as the PNG ``path``, which is returned; an existing file is replaced.

    Raises:
        StoreError: The file cannot be written.
    """
    content = BytesIO()
    canvas: Any = FigureCanvasAgg(figure)  # Any: its methods have no types
    canvas.print_png(content)  # savefig draws twice
    write_durably(path, content.getvalue(), raises=StoreError)
    return path


def label_axes(
    axes: Axes,
    title: str,
    x_label: str,
    y_label: str,
    keys: Sequence[tuple[Artist, str]] | None = None,
) -> None:
    """Label a panel, with a note if it has nothing to show.

    The legend shows ``keys``; if they are ``None``, it shows everything drawn with a label.
    """
    if keys is None:
        keys = list(zip(*axes.get_legend_handles_labels(), strict=True))
    axes.set_title(title, fontsize=_NORMAL + 1, fontweight="bold", loc="left", color=INK)
    axes.set_xlabel(x_label, fontsize=_NORMAL, color=INK)
    axes.set_ylabel(y_label, fontsize=_NORMAL, color=INK)
    axes.tick_params(labelsize=SMALL, color=_GRID, labelcolor=INK)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if not axes.has_data():
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#777777")
    if keys:
        lines, labels = zip(*keys, strict=True)
        legend = axes.legend(lines, labels, fontsize=SMALL, edgecolor="none")
        for text in legend.get_texts():
            # A run's name may contain "$", which would start a formula.
            text.set_parse_math(False)


def render_svg(panel: Panel, *, inches: tuple[float, float]) -> str:
    r"""Return a panel of this width and height as an SVG element for an HTML page.

    Texts stay texts, in the page's font. Elements marked by :func:`add_tooltip` have a tooltip that
    works without a script. Every color ``#rrggbb`` becomes ``var(--rrggbb, #rrggbb)``, so the page
    can replace it in dark mode. matplotlib's SVG settings are changed for the whole process
    meanwhile, so two threads must not call this at once.

    Example:
        >>> def panel(axes: Axes) -> None:
        ...     axes.plot([1, 2], [3.0, 4.0], color="#0072B2", label="accuracy")
        >>> drawing = render_svg(panel, inches=(4, 3))
        >>> drawing.startswith("<svg "), drawing.endswith("</svg>")
        (True, True)
        >>> "<title>2: accuracy 4.0000</title>" in drawing, "var(--0072b2, #0072b2)" in drawing
        (True, True)
    """
    figure = Figure(figsize=inches, layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    panel(axes)
    _add_value_tooltips(axes)
    written = StringIO()
    # With a fixed salt, the same figure gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedlearn"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas: Any = FigureCanvasSVG(figure)  # Any: its methods have no types
        canvas.print_svg(written, metadata=nothing)  # savefig draws twice
    text = written.getvalue()
    text = _ID.sub("", text[text.index("<svg") :].rstrip())
    text = re.sub(rf'<g id="{_HOVER}([^"]*)">', r'<g class="hover"><title>\1</title>', text)
    return _COLOR.sub(r"\1: var(--\2, #\2)", text)


def add_tooltip(artist: Artist, text: str) -> None:
    """Give ``artist`` the tooltip ``text`` in the output of :func:`render_svg`."""
    artist.set_gid(f"{_HOVER}{replace_unprintable(text)}")


def add_shape(axes: Axes, shape: Rectangle) -> None:
    """Add a shape to the axes without changing their limits or layout."""
    shape.set_in_layout(False)
    axes.add_artist(shape)  # add_patch would stretch the limits to the shape's extent


def _add_value_tooltips(axes: Axes) -> None:
    """Add tooltips with the values of all named lines, on invisible columns over the panel."""
    texts: dict[float, list[str]] = {}
    for line in axes.get_lines():
        name = str(line.get_label())
        for x, y in () if name.startswith("_") else np.asarray(line.get_xydata()).tolist():
            texts.setdefault(x, []).append(f"{name} {format_number(y)}")
    # Every n-th position, n rounded up; at least 1, since a step of 0 is an error.
    positions = sorted(texts)[:: -(-len(texts) // _MOST_HOVERS) or 1]
    width = (positions[-1] - positions[0]) / max(1, len(positions) - 1) if positions else 0.0
    for x in positions:
        what = f"{axes.get_xlabel()} {x:g}: ".lstrip()
        add_column_tooltip(axes, x - (width or 1.0) / 2, width or 1.0, what + ", ".join(texts[x]))


def add_column_tooltip(axes: Axes, left: float, width: float, text: str) -> None:
    """Add the tooltip ``text`` to a column of the panel, ``width`` wide from ``left``."""
    column = Rectangle((left, 0), width, 1, alpha=0.0, transform=axes.get_xaxis_transform())
    add_tooltip(column, text)
    add_shape(axes, column)
