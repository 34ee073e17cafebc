"""Shows how the clients of a federated data set differ: as text, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlearn.core.calls import explain_calls
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.figures import (
    RUN_COLORS,
    SMALL,
    label_axes,
    new_figure,
    write_png,
)
from fedlearn.experiment.layout import facts_text, table_text
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.inspection import Inspection

_MOST_ROWS, _MOST_COLUMNS, _MOST_LISTED = 30, 15, 4
#: Of clients beyond the most rows, so many of the largest and of the smallest are shown.
_AT_EACH_END = 8
_MOST_BUBBLES, _MOST_LABELS, _MOST_BINS = 60, 40, 400
#: Area of the largest bubble in points², for few clients.
_BUBBLE = 500.0
_MUCH_LARGER = 30


def render_inspection(found: Inspection, *, width: int | None = None) -> str:
    """Format the summary, and a table of the clients: the largest and smallest of many."""
    places = _choose_clients(found)
    rows = [_header(found), *(_row(found, place) for place in places)]
    facts = facts_text(found.facts(), width=width)
    if not places:
        return facts
    num = len(found.client_ids)
    note = ""
    if len(places) < num:
        note = f"\nthe {_AT_EACH_END} largest and the {_AT_EACH_END} smallest of {num:,} clients:"
    return f"{facts}\n{note}\n{table_text(rows, values_right=True, width=width)}"


@explain_calls
def draw_clients(data: FederatedData, path: Path | str) -> Path:
    """Draw the labels and sizes of the clients as a PNG, and return its path.

    Each of a few clients has a bubble for each label. Many clients are sorted by their most
    frequent label, and neighbors are averaged.

    Args:
        data: The clients.
        path: The file to write; an existing one is replaced.

    Raises:
        DataError: An example cannot be read.
        StoreError: The file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.eye(100), np.arange(100) % 10
        >>> clients = fl.FewClasses(num_clients=10, classes_per_client=2)
        >>> data = fl.from_arrays(x, y, partition=clients, test=(x, y), seed=0)
        >>> with TemporaryDirectory() as folder:
        ...     fl.draw_clients(data, f"{folder}/clients.png").name
        'clients.png'
    """
    return write_png(draw_inspection(data.inspect()), Path(path))


def draw_inspection(found: Inspection) -> Figure:
    """Draw two panels: the labels of the inspected clients, and their sizes."""
    figure = new_figure(12, 8)
    labels, sizes = figure.subplots(2, 1, gridspec_kw={"height_ratios": (3, 2)})
    if found.counts is None:
        _draw_values(labels, found)
    elif len(found.client_ids) <= _MOST_BUBBLES:
        _draw_bubbles(labels, found)
    else:
        _draw_shares(figure, labels, found)
    _draw_sizes(sizes, found)
    return figure


# ---- Text ---------------------------------------------------------------------------------


def _choose_clients(found: Inspection) -> list[int]:
    """Return the places of the clients to list: all, or the largest and the smallest."""
    num = len(found.client_ids)
    if num <= _MOST_ROWS:
        return list(range(num))
    order = np.argsort(-found.sizes_C[found.client_ids], kind="stable").tolist()
    return [*order[:_AT_EACH_END], *order[-_AT_EACH_END:]]


def _header(found: Inspection) -> tuple[str, ...]:
    header = ["client", "examples"]
    if found.tests_C is not None:
        header.append("tests")
    if found.counts is not None:
        classes = _list_classes(found)
        header += ["classes", "distance"]
        header += list(map(found.label, classes)) if classes else ["most frequent"]
    if found.label_values is not None:
        header += ["label min", "mean", "max"]
    return (*header, *(["shift"] if found.shifts else []))


def _row(found: Inspection, place: int) -> tuple[str, ...]:
    client_id = int(found.client_ids[place])
    row = [found.client(place).removeprefix("client "), f"{found.sizes_C[client_id]:,}"]
    if found.tests_C is not None:
        row.append(f"{found.tests_C[client_id]:,}")
    if found.counts is not None:
        row += [str(found.num_labels_n[place]), f"{found.distances_n[place]:.2f}"]
        own, classes = dict(found.top_labels(place, found.counts.shape[1])), _list_classes(found)
        if classes:
            row += [f"{own[each]:,}" if each in own else "-" for each in classes]
        else:
            top = list(own.items())[:_MOST_LISTED]
            row.append(", ".join(f"{found.label(label)}: {count:,}" for label, count in top))
    if found.label_values is not None:
        row += map(format_number, found.label_values[place].tolist())
    return (*row, *([found.shifts[place]] if found.shifts else []))


def _list_classes(found: Inspection) -> list[int]:
    """Return the classes that have columns; empty: there are too many."""
    classes = np.flatnonzero(found.pooled_K).tolist()
    return classes if len(classes) <= _MOST_COLUMNS else []


# ---- Panels -------------------------------------------------------------------------------


def _draw_bubbles(axes: Axes, found: Inspection) -> None:
    """Draw a bubble for each client and label, whose area is the number of examples."""
    assert found.counts is not None
    classes, shares = _dense(found)
    counts = shares * np.asarray(found.counts.sum(axis=1)).reshape(-1, 1)
    places, rows = np.nonzero(counts)
    num = max(len(found.client_ids), len(classes), 1)
    area = _BUBBLE * min(1.0, (20 / num) ** 2)
    sizes = area * counts[places, rows] / max(1.0, counts.max(initial=0.0))
    colors = [RUN_COLORS[row % len(RUN_COLORS)] for row in rows]
    axes.scatter(places, rows, s=np.maximum(2.0, sizes), c=colors, linewidths=0)
    title = f"Labels by client, the largest bubble {counts.max(initial=0.0):,.0f}"
    _label_classes(axes, found, classes, title)
    _name_clients(axes, found)


def _draw_shares(figure: Figure, axes: Axes, found: Inspection) -> None:
    """Draw the shares of the labels as an image, in which clients are sorted and averaged."""
    classes, shares = _dense(found)
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    groups = np.array_split(shares[order], min(_MOST_BINS, len(order)))
    drawn = axes.imshow(
        np.stack([group.mean(axis=0) for group in groups], axis=1),
        extent=(0.0, float(len(order)), -0.5, len(classes) - 0.5),
        aspect="auto",
        origin="lower",
        cmap="Blues",
        vmin=0.0,
        vmax=1.0,
        interpolation="nearest",
    )
    title = f"Shares of labels of {len(order):,} clients, sorted by the most frequent"
    _label_classes(axes, found, classes, title)
    axes.set_xlabel("clients")
    axes.grid(visible=False)
    figure.colorbar(drawn, ax=axes, pad=0.01).ax.tick_params(labelsize=SMALL)


def _draw_values(axes: Axes, found: Inspection) -> None:
    """Draw the range and the mean of each client's labels."""
    if found.label_values is not None:
        low, mean, high = found.label_values.T
        is_many = len(mean) > _MOST_BUBBLES
        order = np.argsort(mean) if is_many else np.arange(len(mean))
        places = np.arange(len(order))
        axes.vlines(places, low[order], high[order], color="#9ecae1", linewidth=1)
        axes.plot(places, mean[order], "." if is_many else "o", color=RUN_COLORS[0], markersize=3)
        sorted_ = ", sorted by mean" if is_many else ""
        label_axes(axes, f"Labels by client: range and mean{sorted_}", "", "label", [])
        if not is_many:
            _name_clients(axes, found)
            return
    label_axes(axes, axes.get_title(loc="left") or "Labels", "clients", "label", [])


def _draw_sizes(axes: Axes, found: Inspection) -> None:
    """Draw the number of examples of each client; those of many are sorted."""
    sizes = found.sizes_C
    is_few = len(sizes) <= _MOST_BUBBLES
    if is_few:
        axes.bar(range(len(sizes)), sizes, 0.8, color=RUN_COLORS[0])
    else:
        steps = np.sort(sizes)[::-1]
        shown = np.unique(np.linspace(0, len(steps) - 1, 2000).astype(np.int64))
        axes.fill_between(shown, steps[shown], step="mid", color=RUN_COLORS[0], linewidth=0)
    title = f"Examples by client{'' if is_few else ', sorted'}: Gini {found.gini:.2f}"
    label_axes(axes, title, "" if is_few else "clients", "examples", [])
    if sizes.max() > _MUCH_LARGER * sizes.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if is_few:
        _name_clients(axes, found)
    else:
        axes.set_xlim(0, len(sizes))


def _dense(found: Inspection) -> tuple[list[int], NDArray[np.float64]]:
    """Return the most frequent classes, and their shares of each client's labels: [n, classes]."""
    assert found.counts is not None
    order = np.argsort(-found.pooled_K, kind="stable")[:_MOST_LABELS]
    classes = np.sort(order[found.pooled_K[order] > 0])
    totals = np.asarray(found.counts.sum(axis=1), np.float64).reshape(-1, 1)
    shares: NDArray[np.float64] = found.counts[:, classes].toarray() / np.maximum(1.0, totals)
    return classes.tolist(), shares


def _label_classes(axes: Axes, found: Inspection, classes: Sequence[int], title: str) -> None:
    """Label the rows with the classes, and say which are left out."""
    total = int((found.pooled_K > 0).sum())
    more = f", the {len(classes)} most frequent of {total:,}" if len(classes) < total else ""
    label_axes(axes, f"{title}{more}", "", "label", [])
    size = SMALL if len(classes) <= _MOST_LABELS // 2 else SMALL - 3
    names = [_shorten(found.label(each)) for each in classes]
    axes.set_yticks(range(len(classes)), names, fontsize=size, parse_math=False)
    axes.set_ylim(-0.7, len(classes) - 0.3)


def _name_clients(axes: Axes, found: Inspection) -> None:
    """Label the places of a few clients with their names."""
    num = len(found.client_ids)
    axes.set_xlim(-0.7, num - 0.3)
    if found.names is None:
        axes.set_xlabel("client")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    names = [_shorten(str(found.names[each])) for each in found.client_ids]
    axes.set_xticks(range(num), names, rotation=90, fontsize=SMALL, parse_math=False)


def _shorten(name: str) -> str:
    shown = replace_unprintable(name)
    return shown if len(shown) <= 16 else f"{shown[:15]}…"  # noqa: PLR2004 - a width
