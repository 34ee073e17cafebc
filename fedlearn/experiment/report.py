"""Writes a run as one self-contained HTML file that can be mailed, archived and opened in years.

The page fetches nothing and runs no script: its content security policy forbids both. Text from a
user or a client (names, reasons, errors, configuration) is escaped by the template's environment,
and nowhere else.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from jinja2 import PackageLoader
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlearn.config import Config, render
from fedlearn.config.tables import has_plan
from fedlearn.core.client_metrics import ClientMetrics, Row
from fedlearn.core.files import write_durably
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Status
from fedlearn.core.quantities import format_duration, format_number
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.clients import explain_hidden
from fedlearn.experiment.figures import Panel, add_shape, add_tooltip, render_svg
from fedlearn.experiment.history import headline, headline_metric
from fedlearn.experiment.plot import STATUS_COLORS, draw_clients, draw_staleness, panels
from fedlearn.experiment.statistics_panels import statistics_panels
from fedlearn.experiment.statistics_result import StatisticsResult
from fedlearn.experiment.summary import Summary, summarize
from fedlearn.experiment.templates import make_environment
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord
from fedlearn.training.data_names import DataNames

_PANEL_INCHES = (6.6, 3.2)
_PART_TITLES: Mapping[str, str] = {
    "mean": "mean",
    "p10": "10th percentile",
    "p50": "median",
    "p90": "90th percentile",
    "worst_decile": "worst tenth, mean",
    "by_examples": "mean by examples",
    "num_clients": "clients measured",
}
#: Statistics over clients that not every run has.
_SOMETIMES = ("by_examples", "num_clients")
_SHOWN_REASONS = 20
#: Clients in the tables of the worst and of the best.
_SHOWN_CLIENTS = 10


def report(
    record: RunRecord,
    rounds: Sequence[RoundRecord],
    path: Path,
    *,
    privacy: Spending | None = None,
    clients: ClientMetrics | None = None,
    data_names: DataNames | None = None,
    statistics: StatisticsResult | None = None,
) -> Path:
    """Write a run's figures, curves, clients by rounds, failures and configuration to ``path``.

    The run may be in any state, even without a finished round. ``privacy`` is its privacy spending,
    ``clients`` what single clients measured, ``data_names`` the names in its data, and
    ``statistics`` what it found if it is a run of a plan. An existing file is replaced as a whole.
    Returns ``path``.
    """
    page = render_page(
        record,
        rounds,
        privacy=privacy,
        clients=clients,
        data_names=data_names,
        statistics=statistics,
    )
    write_durably(path, page.encode(), raises=StoreError)
    return path


def render_page(
    record: RunRecord,
    rounds: Sequence[RoundRecord],
    *,
    privacy: Spending | None = None,
    clients: ClientMetrics | None = None,
    data_names: DataNames | None = None,
    statistics: StatisticsResult | None = None,
) -> str:
    """Return the HTML of :func:`report`."""
    environment = make_environment(PackageLoader("fedlearn", "experiment"))
    summary = replace(summarize(record, rounds), privacy=privacy)
    config, is_reproducible = _config_text(record)
    return environment.get_template("report.html").render(
        record=record,
        summary=summary,
        tiles=list(_tiles(summary, headline_metric(record), statistics)),
        curves=[_draw(each) for each in _panels(record, rounds)],
        statistics=statistics,
        pictures=[_draw(each) for each in statistics_panels(statistics)],
        client_parts=_client_parts(summary),
        client_curve=None if clients is None else _draw_clients(clients),
        client_metrics=[] if clients is None else list(clients.metrics),
        client_tables={} if clients is None else _rank_clients(clients),
        hidden_clients=explain_hidden(record),
        client_map=_Map.of(rounds),
        data_names=data_names or DataNames(),
        reasons=summary.reasons[:_SHOWN_REASONS],
        config=config,
        is_reproducible=is_reproducible,
    )


def _draw(panel: Panel) -> Markup:
    return Markup(render_svg(panel, inches=_PANEL_INCHES))  # noqa: S704 (ours)


def _panels(record: RunRecord, rounds: Sequence[RoundRecord]) -> Iterator[Panel]:
    """Yield the panels of curves; a run with stale updates has one for the staleness as well."""
    if not has_plan(record.config):  # statistics have no curves
        yield from panels([(record, rounds)])
    if any(each.staleness for each in rounds):
        yield partial(draw_staleness, rounds=rounds)


def _client_parts(summary: Summary) -> dict[str, str]:
    """Return the statistics over clients to show, with their titles.

    Those that not every run has are left out of a run without them.
    """
    measured = {part for spread in summary.client_metrics().values() for part in spread}
    return {
        part: title
        for part, title in _PART_TITLES.items()
        if part in measured or part not in _SOMETIMES
    }


def _draw_clients(clients: ClientMetrics) -> Markup:
    drawn = render_svg(partial(draw_clients, clients=clients), inches=_PANEL_INCHES)
    return Markup(drawn)  # noqa: S704 (ours)


def _rank_clients(clients: ClientMetrics) -> dict[str, Sequence[Row]]:
    """Return tables of clients with their titles: all if there are few, else the worst and best."""
    metric, rows = clients.leading_metric, clients.worst_first().to_rows()
    if len(rows) <= 2 * _SHOWN_CLIENTS:
        return {f"All clients, the worst {metric} first": rows}
    valued = rows[: len(clients.finite(metric))]  # those without a value are last
    return {
        f"Worst {metric}": valued[:_SHOWN_CLIENTS],
        f"Best {metric}": valued[: -_SHOWN_CLIENTS - 1 : -1],
    }


def _tiles(
    summary: Summary, leading: str, statistics: StatisticsResult | None
) -> Iterator[tuple[str, str, str]]:
    if has_plan(summary.record.config):
        yield from _tiles_of_statistics(statistics)
    else:
        yield from _tiles_of_model(summary, leading)
    num_tasks = summary.num_tasks
    yield "rounds", f"{summary.num_finished} / {summary.record.num_rounds}", _interruptions(summary)
    if not summary.record.is_deployed:
        yield "virtual time", format_duration(summary.virtual_s), "on the simulated devices"
    yield "real time", format_duration(summary.seconds), "of all rounds"
    if summary.privacy is not None:
        spent = summary.privacy
        cohorts, delta = f"{spent.epsilon_with_cohorts:.3g}", f"{spent.target_delta:g}"
        note = f"{cohorts} for who saw the cohorts; δ {delta}; {spent.hidden}"
        of = "statistics" if has_plan(summary.record.config) else "models"
        yield f"ε of the {of}", f"{spent.epsilon:.3g}", note
    yield "clients seen", f"{summary.num_clients:,}", f"asked {num_tasks:,} times"
    share = f"{100 * summary.num_in_time / num_tasks:.0f} % reported in time" if num_tasks else ""
    yield "reports", f"{summary.counts.reported:,}", share
    if summary.num_clipped:
        yield "scaled down", f"{summary.num_clipped:,}", "updates, to their largest norm"
    if summary.num_capped:
        yield "cut off", f"{summary.num_capped:,}", "losses or example counts, at their bounds"


def _tiles_of_model(summary: Summary, leading: str) -> Iterator[tuple[str, str, str]]:
    best = summary.best
    measured = f"after round {summary.measured_after}" if summary.metrics else "not measured"
    yield (
        f"best {best.metric if best else leading}",
        format_number(best.point.value) if best else "-",
        f"after round {best.point.num_finished}" if best else "nothing was evaluated",
    )
    yield f"final {leading}", format_number(headline(summary.metrics, leading)), measured
    yield "final loss", format_number(summary.loss), measured


def _tiles_of_statistics(found: StatisticsResult | None) -> Iterator[tuple[str, str, str]]:
    if found is None:
        yield "statistics", "-", "the run is not done"
        return
    yield "clients in the sums", f"{found.num_clients:,}", "in the round with the fewest"
    if found.num_examples is not None:
        yield "examples", f"{found.num_examples:,.0f}", "that counted"
    if found.num_suppressed:
        yield "suppressed", f"{found.num_suppressed:,}", "counts, since they are small"


def _interruptions(summary: Summary) -> str:
    counts = {"skipped": summary.num_skipped, "retried": summary.num_retries}
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n) or "none skipped"


def _config_text(record: RunRecord) -> tuple[str, bool]:
    """Return the configuration as text, and whether it is TOML that reproduces the run."""
    tree = json.dumps(record.config, indent=2, ensure_ascii=False)
    try:
        return render(Config.from_json(tree)), True
    except ConfigError:
        return tree, False


# ---- Clients by rounds --------------------------------------------------------------------

_MAP_INCHES = 11.6
_MAP_MARGIN_INCHES = 0.5
_MOST_CLIENTS = 200
_MOST_COLUMNS = 500
_MAX_VECTOR_CELLS = 3000  # more are drawn as an image, so that the page still opens at once
_MOST_LABELED_ROWS = 70
_ROW_INCHES = ((30, 0.25), (_MOST_LABELED_ROWS, 0.18), (_MOST_CLIENTS, 0.055))
_WIDEST_CELL_INCHES = 0.7

# Where several rounds share a column, the highest of their codes is shown.
_CODES = {Status.REPORTED: 2, Status.LATE: 3, Status.FAILED: 4, Status.STALE: 5}
_SELECTED = 1
_CODE_NAMES = {_SELECTED: "selected"} | {code: each.value for each, code in _CODES.items()}
_COLORS = {_SELECTED: "#9aa0a6"} | {code: STATUS_COLORS[each] for each, code in _CODES.items()}


@dataclass(frozen=True, eq=False)
class _Map:
    """The map of clients by rounds: each client's status in each round that asked it."""

    clients: Sequence[ClientId]  # one per row, the most often asked first
    cells: NDArray[np.uint8]  # codes, 0 where not asked: shape [clients, columns]
    rounds_per_column: int
    num_clients: int  # all that were asked, shown or not
    num_rounds: int

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord]) -> "_Map":
        num_tasks = Counter(each.client_id for record in rounds for each in record.participations)
        order = sorted(num_tasks, key=lambda client: (-num_tasks[client], client))[:_MOST_CLIENTS]
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
        return cls(order, cells, width, len(num_tasks), len(rounds))

    @property
    def keys(self) -> Sequence[tuple[str, str]]:
        """Names and colors of the legend; rare codes are left out if no cell has them."""
        seldom = (_SELECTED, _CODES[Status.STALE])
        used = [code for code in _COLORS if code not in seldom or np.any(self.cells == code)]
        return [(_CODE_NAMES[code], _COLORS[code]) for code in used]

    def render_svg(self) -> Markup:
        """Draw the map: cells with tooltips, or an image if there are too many cells."""
        rows, columns = self.cells.shape
        height = rows * next(inches for most, inches in _ROW_INCHES if rows <= most)
        width = min(_MAP_INCHES, columns * _WIDEST_CELL_INCHES + 2 * _MAP_MARGIN_INCHES)
        drawn = render_svg(self._draw, inches=(width, height + _MAP_MARGIN_INCHES))
        return Markup(drawn)  # noqa: S704 (ours, and escaped)

    def _draw(self, axes: Axes) -> None:
        rows, columns = self.cells.shape
        last = columns * self.rounds_per_column + 0.5
        if np.count_nonzero(self.cells) <= _MAX_VECTOR_CELLS:
            axes.set(xlim=(0.5, last), ylim=(rows - 0.5, -0.5))
            for row, column in np.argwhere(self.cells):
                add_shape(axes, self._cell(int(row), int(column)))
        else:
            colors = ListedColormap(["#00000000", *_COLORS.values()])
            extent = (0.5, last, rows - 0.5, -0.5)
            # `vmax` is the largest code: each code then has its own color, whichever codes occur.
            axes.imshow(
                self.cells, colors, aspect="auto", interpolation="none", extent=extent, vmax=5
            )
        labels = self.clients if rows <= _MOST_LABELED_ROWS else ()
        axes.set_yticks(range(len(labels)), [str(client) for client in labels])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    def _cell(self, row: int, column: int) -> Rectangle:
        code = self.cells[row, column]
        first = column * self.rounds_per_column + 1
        last = min(first + self.rounds_per_column - 1, self.num_rounds)
        span = f"{first}" if first == last else f"{first} to {last}"
        corner, width = (first - 0.5, row - 0.5), self.rounds_per_column
        cell = Rectangle(corner, width, 1, facecolor=_COLORS[code], edgecolor="#ffffff")
        add_tooltip(cell, f"client {self.clients[row]}, round {span}: {_CODE_NAMES[code]}")
        return cell

    def caption(self) -> str:
        """Explain what the map shows, and what had to be left out."""
        parts = ["One row a client, the most often asked first; one column a round."]
        if len(self.clients) < self.num_clients:
            shown = f"{len(self.clients)} of {self.num_clients:,} clients"
            parts.append(f"Shown are the {shown} that were asked most often.")
        if self.rounds_per_column > 1:
            shown = f"{self.rounds_per_column} rounds and shows the worst of them"
            parts.append(f"A column is {shown}: stale over failed over late over reported.")
        if np.any(self.cells == _SELECTED):
            parts.append("Selected: the client reported, but its round was skipped.")
        return " ".join(parts)
