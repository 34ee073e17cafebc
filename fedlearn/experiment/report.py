"""A run as one self-contained HTML file, to be mailed, archived and opened in ten years.

Nothing is fetched and no script runs: the page's own content security policy forbids both.
Whatever comes from a user or a client (names, reasons, errors, configuration) is escaped in
one place, :func:`_text`.
"""

import html
import json
import math
import struct
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedlearn.config import Config, render
from fedlearn.core.collecting import Status
from fedlearn.core.files import write_durably
from fedlearn.core.messages import ClientId
from fedlearn.core.words import printable
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.comparison import (
    CLIENT_PARTS,
    Counts,
    Point,
    Summary,
    TimeUnit,
    duration_text,
    number_text,
    series,
    summarize,
)
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord

T = TypeVar("T")

_SHOWN_REASONS = 20


def report(record: RunRecord, rounds: Sequence[RoundRecord], path: Path) -> Path:
    """Write the report of a run: figures, curves, clients by rounds, failures, configuration.

    Args:
        record: The run, in any state.
        rounds: Its finished rounds in order; may be empty.
        path: The file, replaced as a whole.

    Returns:
        ``path``.

    Raises:
        StoreError: The file cannot be written.
    """
    write_durably(path, page(record, rounds).encode(), raises=StoreError)
    return path


def page(record: RunRecord, rounds: Sequence[RoundRecord]) -> str:
    """Return the HTML of :func:`report`."""
    summary = summarize(record, rounds)
    sections = (
        _head(record),
        _tiles(summary),
        _curves(rounds),
        _client_evaluation(summary),
        _client_map(rounds),
        _failures(summary),
        _reproduction(record),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(record.name)} - fedlearn</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _text(value: str) -> str:
    """Return ``value`` as HTML text or attribute value: the one place that escapes."""
    return html.escape(printable(value))


# ---- Words and figures --------------------------------------------------------------------


def _head(record: RunRecord) -> str:
    status = _text(record.status.value)
    error = f'<p class="error"><b>Failed:</b> {_text(record.error)}</p>' if record.error else ""
    return (
        f'<header><h1>{_text(record.name)}</h1><span class="badge {status}">{status}</span>'
        f"<p>Federated run of {_text(record.created_utc)}, configuration "
        f"<code>{_text(record.config_hash[:12])}</code></p></header>\n{error}"
    )


def _tiles(summary: Summary) -> str:
    best = summary.best
    counts = summary.counts
    asked = sum(counts)
    share = f"{100 * counts.reported / asked:.0f} % reported in time" if asked else ""
    measured = f"after round {summary.measured_after}" if summary.metrics else "not measured"
    virtual = ("virtual time", duration_text(summary.virtual_s), "on the simulated devices")
    tiles = (
        (
            f"best {best.metric}" if best else "best accuracy",
            number_text(best.point.value) if best else "-",
            f"after round {best.point.num_finished}" if best else "nothing was evaluated",
        ),
        ("final accuracy", number_text(summary.accuracy), measured),
        ("final loss", number_text(summary.loss), measured),
        ("rounds", f"{summary.num_finished} / {summary.num_rounds}", _interruptions(summary)),
        *(() if summary.is_deployed else (virtual,)),
        ("real time", duration_text(summary.seconds), "of all rounds"),
        ("clients seen", f"{summary.num_clients:,}", f"asked {asked:,} times"),
        ("reports", f"{counts.reported:,}", share),
    )
    cells = (
        f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b>'
        f"<small>{_text(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<section class="tiles">{"".join(cells)}</section>\n'


def _interruptions(summary: Summary) -> str:
    parts = []
    if summary.num_skipped:
        parts.append(f"{summary.num_skipped} skipped")
    if summary.num_retries:
        parts.append(f"{summary.num_retries} retried")
    return ", ".join(parts) or "none skipped"


def _client_evaluation(summary: Summary) -> str:
    """Return the last evaluation's spread over clients; nothing where none was measured."""
    spread = summary.client_metrics()
    if not spread:
        return ""
    titles = ("mean", "10th percentile", "median", "90th percentile", "worst tenth, mean")
    head = "".join(f'<th class="n">{title}</th>' for title in titles)
    rows = "".join(
        f"<tr><td>{_text(name)}</td>"
        + "".join(f'<td class="n">{number_text(p.get(k))}</td>' for k in CLIENT_PARTS)
        + "</tr>"
        for name, p in spread.items()
    )
    return (
        f"<section><h2>Across clients</h2><p>Evaluated on each client's own data after round "
        f"{summary.measured_after}: a mean hides those that a model serves badly.</p>"
        f"<table><thead><tr><th>metric</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</section>\n"
    )


def _failures(summary: Summary) -> str:
    if not summary.reasons:
        return "<section><h2>Failures</h2><p>No client failed.</p></section>\n"
    rows = "".join(
        f'<tr><td class="n">{count:,}</td><td class="n">{100 * count / summary.counts.failed:.1f}'
        f" %</td><td>{_text(reason or 'no reason given')}</td></tr>"
        for reason, count in summary.reasons[:_SHOWN_REASONS]
    )
    hidden = len(summary.reasons) - _SHOWN_REASONS
    more = f"<p>{hidden:,} rarer reasons are not shown.</p>" if hidden > 0 else ""
    return (
        '<section><h2>Failures</h2><table><thead><tr><th class="n">times</th>'
        f'<th class="n">share</th><th>reason</th></tr></thead><tbody>{rows}</tbody></table>'
        f"{more}</section>\n"
    )


def _reproduction(record: RunRecord) -> str:
    """Return how to get the same run again: command, versions, configuration."""
    tree = json.dumps(record.config, indent=2, ensure_ascii=False)
    try:
        config = Config.from_json(tree)
        name = "" if config.name is None else f" --set name={config.name}-again"
        text = render(config)
        how = (
            "Save the configuration below as <code>experiment.toml</code>, install the versions "
            "listed, and type"
        )
        command = f"<pre>{_text(f'fedlearn simulate experiment.toml{name}')}</pre>"
    except ConfigError:
        text, command = tree, ""
        how = (
            "This run's model and data came from a Python program, or from another version of "
            "fedlearn: run that program again with the settings below."
        )
    versions = "".join(
        f"<tr><td>{_text(name)}</td><td><code>{_text(version)}</code></td></tr>"
        for name, version in sorted(record.versions.items())
    )
    lines = "\n".join(_text(line) for line in text.splitlines())
    return (
        f"<section><h2>How to reproduce</h2><p>{how}</p>{command}"
        f"<table><tbody>{versions}<tr><td>configuration SHA-256</td>"
        f"<td><code>{_text(record.config_hash)}</code></td></tr></tbody></table></section>\n"
        f'<section><h2>Configuration</h2><pre class="config">{lines}</pre></section>\n'
    )


# ---- Curves -------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 10, 40
_MAX_POINTS = 1000  # of a curve: more than the page has pixels
_MAX_HOVERS = 150
_MAX_BARS = 120
_MAX_MARKED = 40


class _Line(NamedTuple):
    """A curve: its name, its CSS class, its points."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


class _Axis(NamedTuple):
    """A linear map from a range of values to pixels, with round numbers to label."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def across(cls, values: Iterable[float], *, end: float, least_step: float) -> "_Axis":
        """Return a horizontal axis from the least of ``values`` to the greatest."""
        low, high = _extent(values)
        step = max(least_step, _round_step((high - low) / 6))
        first, last = math.ceil(low / step), math.floor(high / step)
        ticks = tuple(step * index for index in range(first, last + 1))
        return cls(low, high, _LEFT, end, ticks)

    @classmethod
    def upright(cls, values: Iterable[float]) -> "_Axis":
        """Return a vertical axis that goes from tick to tick around ``values``."""
        low, high = _extent(values)
        step = _round_step((high - low) / 5)
        first, last = math.floor(low / step), math.ceil(high / step)
        ticks = tuple(step * index for index in range(first, last + 1))
        return cls(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP, ticks)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the greatest, apart even where all are (almost) equal."""
    known = list(values)
    low, high = min(known), max(known)
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    room = 0.1 * size or 0.5
    return low - room, high + room


def _round_step(rough: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """Curves over a common axis, as an SVG that answers the pointer without a script.

    Attributes:
        title: Above it.
        x_label: With the unit.
        x_name: Of one position, in the hover text.
        lines: The curves.
        band: Lower and upper bound to shade, at the same positions; may be empty.
        least_step: Between two labelled positions: 1 where they are counted.
    """

    title: str
    x_label: str
    x_name: str
    lines: Sequence[_Line]
    band: tuple[_Line, _Line] | None
    least_step: float

    def svg(self) -> str:
        """Return the chart, or a note where nothing was measured."""
        lines = [line for line in self.lines if line.points]
        if not lines:
            return _figure(self.title, (), _note("not measured"))
        everything = [*lines, *(self.band or ())]
        xs = (x for line in everything for x, _ in line.points)
        ys = (y for line in everything for _, y in line.points)
        x = _Axis.across(xs, end=_WIDTH - _RIGHT, least_step=self.least_step)
        y = _Axis.upright(ys)
        parts = [_grid(x, y, self.x_label)]
        if self.band is not None:
            parts.append(_shaded(*self.band, x, y))
        parts += [_drawn(line, x, y) for line in lines]
        keys = [(line.name, line.style) for line in lines]
        return _figure(self.title, keys, "".join([*parts, *self._hovers(lines, x)]))

    def _hovers(self, lines: Sequence[_Line], x: _Axis) -> Iterator[str]:
        """Yield invisible columns that tell the values at their position."""
        texts: dict[float, list[str]] = {}
        for line in lines:
            for position, value in line.points:
                texts.setdefault(position, []).append(f"{line.name} {number_text(value)}")
        positions = _thinned(sorted(texts), _MAX_HOVERS)
        width = (_WIDTH - _LEFT - _RIGHT) / len(positions)
        for position in positions:
            where = f"{self.x_name} {position:g}: "
            yield _hover(x.at(position) - width / 2, width, where + ", ".join(texts[position]))


def _curves(rounds: Sequence[RoundRecord]) -> str:
    if not rounds:
        return "<section><h2>Curves</h2><p>No round has finished.</p></section>\n"
    only_loss = series(rounds, "loss") and not series(rounds, "accuracy")
    metric = "loss" if only_loss else "accuracy"
    points = series(rounds, metric)
    unit = TimeUnit.of(rounds[-1].virtual_s)
    over_time = [(point.virtual_s / unit.seconds, point.value) for point in points]
    charts = (
        _metric_chart(rounds, metric),
        _Chart(
            title="Loss by round",
            x_label="round",
            x_name="round",
            lines=[
                _Line("evaluation", "c1", _by_round(series(rounds, "loss"))),
                _Line("training", "c2 dashed", _by_round(series(rounds, "train_loss"))),
            ],
            band=None,
            least_step=1.0,
        ),
        _Chart(
            title=f"{metric.capitalize()} by virtual time",
            x_label=f"virtual time ({unit.name})",
            x_name=f"{unit.name}",
            lines=[_Line(metric, "c1", over_time)],
            band=None,
            least_step=0.0,
        ),
    )
    figures = "".join(chart.svg() for chart in charts) + _participation(rounds)
    return f'<section><h2>Curves</h2><div class="charts">{figures}</div></section>\n'


def _metric_chart(rounds: Sequence[RoundRecord], metric: str) -> _Chart:
    low, high = (
        _Line(part, "band", _by_round(series(rounds, f"clients/{metric}_{part}")))
        for part in ("p10", "p90")
    )
    lines = [_Line(metric, "c1", _by_round(series(rounds, metric)))]
    if low.points:
        median = _by_round(series(rounds, f"clients/{metric}_p50"))
        lines.append(_Line("clients: median, 10-90 %", "c3", median))
    return _Chart(
        title=f"{metric.capitalize()} by round",
        x_label="round",
        x_name="round",
        lines=lines,
        band=(low, high) if low.points and len(low.points) == len(high.points) else None,
        least_step=1.0,
    )


def _by_round(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.num_finished, point.value) for point in points]


def _participation(rounds: Sequence[RoundRecord]) -> str:
    """Return stacked bars of what became of the clients asked; means where rounds are many."""
    if not any(record.participations for record in rounds):
        return _figure("Participation", (), _note("no client was asked"))
    width = -(-len(rounds) // _MAX_BARS)
    bars = [_Bar.of(rounds[start : start + width]) for start in range(0, len(rounds), width)]
    last = rounds[-1].round_num + 1
    x = _Axis.across((bars[0].first - 0.5, last + 0.5), end=_WIDTH - _RIGHT, least_step=1.0)
    y = _Axis.upright((0.0, *(sum(bar.means) for bar in bars)))
    statuses = [(status.value, status.value) for status in Status]
    title = "Participation" if width == 1 else f"Participation, mean of {width} rounds"
    body = "".join(bar.svg(x, y) for bar in bars)
    return _figure(title, statuses, _grid(x, y, "round") + body)


class _Bar(NamedTuple):
    """Mean numbers of clients by status over consecutive rounds, counted from 1."""

    first: int
    last: int
    means: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord]) -> "_Bar":
        counts = [Counts.of(record) for record in rounds]
        means = tuple(sum(column) / len(rounds) for column in zip(*counts, strict=True))
        return cls(rounds[0].round_num + 1, rounds[-1].round_num + 1, means)

    def svg(self, x: _Axis, y: _Axis) -> str:
        left, right = x.at(self.first - 0.42), x.at(self.last + 0.42)
        parts, floor = [], 0.0
        for status, mean in zip(Status, self.means, strict=True):
            top, bottom = y.at(floor + mean), y.at(floor)
            if mean:
                parts.append(
                    f'<rect class="{status.value}" x="{left}" y="{top}" '
                    f'width="{right - left:.1f}" height="{bottom - top:.1f}"/>'
                )
            floor += mean
        named = zip(Status, self.means, strict=True)
        told = ", ".join(f"{mean:.4g} {status.value}" for status, mean in named)
        span = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return "".join(parts) + _hover(left, right - left, f"round {span}: {told}")


# ---- SVG ----------------------------------------------------------------------------------


def _figure(title: str, keys: Sequence[tuple[str, str]], body: str) -> str:
    """Return a titled drawing; ``keys`` are names and CSS classes of what is in it."""
    return (
        f"<figure><figcaption><b>{_text(title)}</b>{_keys(keys)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(title)}">'
        f"{body}</svg></figure>"
    )


def _keys(keys: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="key"><i class="{style}"></i>{_text(name)}</span>' for name, style in keys
    )


def _note(text: str) -> str:
    place = f'x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle"'
    return f'<text class="tick" {place}>{_text(text)}</text>'


def _grid(x: _Axis, y: _Axis, x_label: str) -> str:
    """Return horizontal lines, the numbers of both axes, and the name of the lower."""
    parts = []
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{x.start} {at}H{x.end}"/>')
        parts.append(f'<text class="tick" x="{x.start - 7}" y="{at + 4}" text-anchor="end">')
        parts.append(f"{_tick_text(tick)}</text>")
    for tick in x.ticks:
        place = f'x="{x.at(tick)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{_tick_text(tick)}</text>')
    middle = (x.start + x.end) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">')
    parts.append(f"{_text(x_label)}</text>")
    return "".join(parts)


def _tick_text(tick: float) -> str:
    return f"{0.0 if abs(tick) < 1e-12 else tick:.6g}"  # noqa: PLR2004 (rounding left of zero)


def _shaded(low: _Line, high: _Line, x: _Axis, y: _Axis) -> str:
    there = _thinned(low.points, _MAX_POINTS)
    back = _thinned(high.points, _MAX_POINTS)[::-1]
    corners = " ".join(f"{x.at(px)},{y.at(py)}" for px, py in [*there, *back])
    return f'<polygon class="band" points="{corners}"/>'


def _drawn(line: _Line, x: _Axis, y: _Axis) -> str:
    points = [(x.at(px), y.at(py)) for px, py in _thinned(line.points, _MAX_POINTS)]
    corners = " ".join(f"{px},{py}" for px, py in points)
    parts = [f'<polyline class="line {line.style}" points="{corners}"/>']
    if len(points) <= _MAX_MARKED:
        style = line.style.split()[0]
        parts += [f'<circle class="dot {style}" cx="{px}" cy="{py}" r="2.6"/>' for px, py in points]
    return "".join(parts)


def _hover(left: float, width: float, text: str) -> str:
    height = _HEIGHT - _TOP - _BOTTOM
    return (
        f'<rect class="hover" x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{height}">'
        f"<title>{_text(text)}</title></rect>"
    )


def _thinned(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most about ``most`` of the items, evenly, and always the last."""
    stride = -(-len(items) // most)
    if stride <= 1:
        return items
    return [*items[:-1:stride], items[-1]]


# ---- Clients by rounds --------------------------------------------------------------------

_MAP_WIDTH = 1120
_MAP_BOTTOM = 26
_MOST_CLIENTS = 200
_MOST_COLUMNS = 500
_MOST_TITLED_CELLS = 3000  # more become an image: a page must open at once
_WIDEST_CELL = 52.0
_CELL_HEIGHTS = ((30, 18), (70, 13), (_MOST_CLIENTS, 4))
_LABELLED_HEIGHT = 13

# Where several rounds share a column the highest of their codes is shown.
_CODES = {Status.REPORTED: 2, Status.LATE: 3, Status.FAILED: 4}
_SELECTED = 1
_CODE_NAMES = ("", "selected", "reported", "late", "failed")
_CODE_COLOURS = ("000000", "9aa0a6", "3b82c4", "eda100", "d9541e")


@dataclass(frozen=True, eq=False)
class _Map:
    """What became of whom when.

    Attributes:
        clients: One a row, the most often asked first.
        cells: Codes, 0 where not asked: shape [clients, columns].
        rounds_per_column: How many rounds share a column.
        num_clients: Clients seen, shown or not.
        num_rounds: Rounds.
    """

    clients: Sequence[ClientId]
    cells: NDArray[np.uint8]
    rounds_per_column: int
    num_clients: int
    num_rounds: int

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord]) -> "_Map":
        asked = Counter(each.client_id for record in rounds for each in record.participations)
        order = sorted(asked, key=lambda client: (-asked[client], client))[:_MOST_CLIENTS]
        row = {client: index for index, client in enumerate(order)}
        width = max(1, -(-len(rounds) // _MOST_COLUMNS))
        cells = np.zeros((len(order), -(-len(rounds) // width)), dtype=np.uint8)
        for index, record in enumerate(rounds):
            unused = record.outcome is Outcome.SKIPPED
            for each in record.participations:
                if each.client_id in row:
                    reported = each.status is Status.REPORTED
                    code = _SELECTED if unused and reported else _CODES[each.status]
                    place = row[each.client_id], index // width
                    cells[place] = max(cells[place], code)
        return cls(order, cells, width, len(asked), len(rounds))

    @property
    def cell_height(self) -> int:
        """Pixels of a row: as high as their number allows."""
        return next(height for most, height in _CELL_HEIGHTS if len(self.clients) <= most)

    @property
    def cell_width(self) -> float:
        """Pixels of a column."""
        num_columns = len(self.cells[0])
        return min(_WIDEST_CELL, (_MAP_WIDTH - _LEFT - _RIGHT) / num_columns)

    def svg(self) -> str:
        """Return the map: cells that tell what they are, or an image where they are many."""
        num_rows, num_columns = self.cells.shape
        height = num_rows * self.cell_height
        width = _LEFT + num_columns * self.cell_width
        few = np.count_nonzero(self.cells) <= _MOST_TITLED_CELLS
        body = "".join(self._rects()) if few else self._image()
        return (
            f'<svg class="map" viewBox="0 0 {_MAP_WIDTH} {height + _MAP_BOTTOM}" role="img" '
            'aria-label="Clients by rounds">'
            f'<rect class="ground" x="{_LEFT}" y="0" width="{width - _LEFT:.1f}" '
            f'height="{height}"/>{body}{"".join(self._labels(height))}</svg>'
        )

    def _rects(self) -> Iterator[str]:
        gap = 1.0 if self.cell_width >= 4 else 0.0  # noqa: PLR2004 (pixels)
        for row, column in np.argwhere(self.cells):
            name = _CODE_NAMES[self.cells[row, column]]
            yield (
                f'<rect class="{name}" x="{_LEFT + column * self.cell_width:.1f}" '
                f'y="{row * self.cell_height}" width="{self.cell_width - gap:.1f}" '
                f'height="{self.cell_height - 1}"><title>client {self.clients[row]}, round '
                f"{self._span(column)}: {name}</title></rect>"
            )

    def _span(self, column: int) -> str:
        first = column * self.rounds_per_column + 1
        last = min(first + self.rounds_per_column - 1, self.num_rounds)
        return f"{first}" if first == last else f"{first} to {last}"

    def _image(self) -> str:
        num_rows, num_columns = self.cells.shape
        data = b64encode(_png(self.cells)).decode()
        return (
            f'<image x="{_LEFT}" y="0" width="{num_columns * self.cell_width:.1f}" '
            f'height="{num_rows * self.cell_height}" preserveAspectRatio="none" '
            f'href="data:image/png;base64,{data}"/>'
        )

    def _labels(self, height: int) -> Iterator[str]:
        """Yield the clients' numbers, where rows are high enough, and the rounds'."""
        tall = self.cell_height
        if tall >= _LABELLED_HEIGHT:
            for row, client in enumerate(self.clients):
                place = f'x="{_LEFT - 6}" y="{row * tall + tall - 2}" text-anchor="end"'
                yield f'<text class="tick" {place}>{client}</text>'
        end = _LEFT + self.cells.shape[1] * self.cell_width
        axis = _Axis.across((0.5, self.num_rounds + 0.5), end=end, least_step=1.0)
        for tick in sorted({1.0, *axis.ticks}):
            place = f'x="{axis.at(tick)}" y="{height + 16}" text-anchor="middle"'
            yield f'<text class="tick" {place}>{tick:g}</text>'

    def caption(self) -> str:
        """Return what is shown, and what had to be left out."""
        parts = ["One row a client, the most often asked first; one column a round."]
        if len(self.clients) < self.num_clients:
            parts.append(f"Shown are the {len(self.clients)} of {self.num_clients:,} clients")
            parts.append("that were asked most often.")
        if self.rounds_per_column > 1:
            parts.append(f"A column is {self.rounds_per_column} rounds and shows the worst of")
            parts.append("them: failed over late over reported.")
        if np.any(self.cells == _SELECTED):
            parts.append("Selected: the client reported, but its round was skipped.")
        return " ".join(parts)


def _client_map(rounds: Sequence[RoundRecord]) -> str:
    title = "<section><h2>Clients by rounds</h2>"
    if not any(record.participations for record in rounds):
        return f"{title}<p>No client was asked.</p></section>\n"
    drawn = _Map.of(rounds)
    keys = [
        (name, name)
        for code, name in enumerate(_CODE_NAMES)
        if name and (code != _SELECTED or np.any(drawn.cells == _SELECTED))
    ]
    return (
        f"{title}<p>{_text(drawn.caption())}</p><p>{_keys(keys)}</p>"
        f'<div class="scroll">{drawn.svg()}</div></section>\n'
    )


def _png(cells: NDArray[np.uint8]) -> bytes:
    """Return codes as a PNG with the map's palette, one byte a pixel; code 0 is transparent."""
    height, width = cells.shape
    lines = np.zeros((height, width + 1), dtype=np.uint8)  # column 0: the filter "none"
    lines[:, 1:] = cells
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", bytes.fromhex("".join(_CODE_COLOURS))),
            _chunk(b"tRNS", b"\x00"),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


# ---- Looks --------------------------------------------------------------------------------

_STATUS_CSS = "".join(
    f".{name} {{ fill: #{colour}; stroke: none; background: #{colour}; }}\n"
    for name, colour in zip(_CODE_NAMES, _CODE_COLOURS, strict=True)
    if name
)

_CSS = (
    """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #1b1f24;
  --soft: #5d6670; --rule: #e2e5e9; --c1: #0067b1; --c2: #c2510a; --c3: #00805a;
  --good: #00714f; --bad: #b3261e; --wait: #8a5a00; --code: #f0f2f5; }
@media (prefers-color-scheme: dark) { :root { --page: #111418; --card: #1a1f25;
  --ink: #e7eaee; --soft: #9aa5b1; --rule: #2c333b; --c1: #5ab0f2; --c2: #ff9456;
  --c3: #3cc79a; --good: #45cf9e; --bad: #ff8a80; --wait: #f2b84b; --code: #12161b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui,
  -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 24px 64px; }
header { display: flex; align-items: center; flex-wrap: wrap; gap: 0 14px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 0;
  overflow-wrap: anywhere; }
header p { flex-basis: 100%; margin: 4px 0 20px; color: var(--soft); }
h2 { font-size: 17px; margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 20px 22px; margin: 0 0 18px; }
section > p { margin: 0 0 12px; color: var(--soft); max-width: 80ch; }
.badge { font-size: 13px; font-weight: 600; border: 1px solid; border-radius: 999px;
  padding: 1px 11px; background: none; }
.badge.done { color: var(--good); } .badge.failed { color: var(--bad); background: none; }
.badge.running { color: var(--wait); }
.error { border: 1px solid var(--bad); border-left-width: 5px; border-radius: 8px;
  padding: 10px 14px; margin: 0 0 18px; overflow-wrap: anywhere; }
.error b { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px;
  background: none; border: 0; padding: 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 13px 16px; display: flex; flex-direction: column; }
.tile span { color: var(--soft); font-size: 13px; }
.tile b { font-size: 25px; line-height: 1.3; font-weight: 650; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }
.tile small { color: var(--soft); min-height: 1.5em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr));
  gap: 20px 28px; }
figure { margin: 0; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-family: inherit; }
svg .tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 16px; margin: 0 0 6px; }
figcaption b { font-size: 14.5px; font-weight: 600; margin-right: auto; }
.key { font-size: 13px; color: var(--soft); } p .key { margin-right: 18px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.key .c1, .key .c2, .key .c3 { width: 16px; height: 0; border-top: 3px solid;
  border-radius: 0; vertical-align: 4px; }
.key .c1 { color: var(--c1); } .key .c2 { color: var(--c2); } .key .c3 { color: var(--c3); }
.key .dashed { border-top-style: dashed; }
.grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.dashed { stroke-dasharray: 5 3.5; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
.dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); } .dot.c3 { fill: var(--c3); }
polygon.band { fill: var(--c3); opacity: 0.15; }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); opacity: 0.07; }
"""
    + _STATUS_CSS
    + """
.ground { fill: var(--code); }
.map rect:hover { stroke: var(--ink); }
image { image-rendering: pixelated; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 640px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.n { text-align: right; white-space: nowrap; width: 1%; padding-right: 24px; }
code, pre { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--code); border-radius: 8px; padding: 12px 16px; margin: 0 0 14px;
  overflow-x: auto; }
pre.config { margin: 0; }
@media (max-width: 560px) { .charts { grid-template-columns: 1fr; }
  .tiles { grid-template-columns: 1fr 1fr; } }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
)
