"""The curves of one run or several, as JSON for the page's script."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fedlearn.core.distribution import NUM_CLIENTS, split_statistic
from fedlearn.core.json_values import to_json_values
from fedlearn.core.participations import STATUSES
from fedlearn.dashboard.rendering import Dashboard, RequestQuery, dashboard_of
from fedlearn.experiment.history import capitalize, headline_metric
from fedlearn.rounds.records import RunRecord
from fedlearn.store.curves import (
    ROUND_CURVES,
    Curve,
    list_metrics,
    read_curves,
    read_participation,
)
from fedlearn.store.run_totals import read_totals

#: Points of a curve: about one for each pixel of a narrow screen.
_NUM_POINTS = 400
_DIGITS = 6
#: Most panels of a page.
_MAX_PANELS = 40
#: Statistics of the staleness of updates are counts by age, which reports draw.
_HIDDEN = ("staleness/",)
#: Panels after all others.
_LAST = ("epsilon", "num_clipped", "num_capped", "seconds")
_TITLES = {
    "seconds": "Seconds a round",
    "epsilon": "Privacy spent, ε",
    "num_clipped": "Reports scaled down",
    "num_capped": "Losses and counts cut off",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a panel, as the script draws it.

    Attributes:
        run: Index of its run, which decides on its color.
        color: Name of the status that decides on the color instead.
        lows: Lower end of the band around the line; ``highs`` the upper. Equal to ``values`` if
            there is no band.
    """

    label: str
    run: int
    style: Literal["solid", "dashed", "dotted"] = "solid"
    color: str | None = None
    rounds: Sequence[int]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class _DrawnRun:
    """A run with its curves by recorded name."""

    record: RunRecord
    number: int
    curves: Mapping[str, Curve]


def _send_curves(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "with")
    name = request.path_params["name"]
    return _send(dashboard, [name, *(each for each in query.texts("with") if each != name)])


def _send_compared(request: Request) -> Response:
    return _send(dashboard_of(request), RequestQuery(request, "with").texts("with"))


def _send(dashboard: Dashboard, names: Sequence[str]) -> Response:
    database = dashboard.database
    longest = max((read_totals(database, name).num_finished for name in names), default=0)
    rounds_per_bucket = max(1, -(-longest // _NUM_POINTS))
    runs = []
    for number, name in enumerate(names):
        recorded = [*list_metrics(database, name), *ROUND_CURVES]
        curves = read_curves(database, name, recorded, rounds_per_bucket=rounds_per_bucket)
        runs.append(_DrawnRun(record=database.run(name).record, number=number, curves=curves))
    panels = [_panel(title, lines) for title, lines in _panels(runs) if lines]
    if len(names) == 1:
        counts = read_participation(database, names[0], rounds_per_bucket=rounds_per_bucket)
        if counts:
            lines = list(_participation_lines(counts))
            panels.insert(2, _panel("Clients a round", lines, from_zero=True))
    values = {
        "num_left_out": max(0, len(panels) - _MAX_PANELS),
        "panels": panels[:_MAX_PANELS],
    }
    return JSONResponse(_shorten(to_json_values(values)))


def _panel(title: str, lines: Sequence[Line], *, from_zero: bool = False) -> dict[str, object]:
    return {"title": title, "from_zero": from_zero, "lines": [asdict(line) for line in lines]}


def _panels(runs: Sequence[_DrawnRun]) -> Iterator[tuple[str, list[Line]]]:
    """Yield titles and lines: the leading metric and the losses first."""
    families = dict.fromkeys(
        split_statistic(name)[0] for run in runs for name in run.curves if _is_drawn(name)
    )
    leading = [headline_metric(run.record) for run in runs]
    first = [name for name in dict.fromkeys((*leading, "loss")) if name in families]
    middle = [name for name in families if name not in (*first, *_LAST, "train_loss")]
    if "train_loss" in families and "loss" not in families:
        first.append("loss")
    for family in (*first, *middle, *(name for name in _LAST if name in families)):
        lines = [line for run in runs for line in _family_lines(run, family, len(runs))]
        yield _TITLES.get(family, capitalize(family)), lines


def _is_drawn(name: str) -> bool:
    return not name.startswith(_HIDDEN) and split_statistic(name)[1] != NUM_CLIENTS


def _family_lines(run: _DrawnRun, family: str, num_runs: int) -> Iterator[Line]:
    """Yield the lines of a metric: its value, the clients' spread, and the training loss."""
    curves, of = run.curves, f"{run.record.name}: " if num_runs > 1 else ""
    mean = f"clients/{family}_mean"
    if (curve := curves.get(family)) is not None:
        yield _line(f"{of}{family}", run, curve)
    elif (curve := curves.get(mean)) is not None:
        yield _line(f"{of}mean of clients", run, curve)
    if family == "loss" and (curve := curves.get("train_loss")) is not None:
        yield _line(f"{of}training", run, curve, style="dashed")
    parts = [curves.get(f"clients/{family}_{part}") for part in ("p10", "p50", "p90")]
    low, median, high = parts
    if median is None or num_runs > 1:
        return
    if low is None or high is None or not low.rounds == median.rounds == high.rounds:
        yield _line("median of clients", run, median, style="dotted")
        return
    spread = Curve(rounds=median.rounds, means=median.means, lows=low.means, highs=high.means)
    yield _line("clients: median, 10 to 90 %", run, spread, style="dotted")


def _line(
    label: str,
    run: _DrawnRun,
    curve: Curve,
    *,
    style: Literal["solid", "dashed", "dotted"] = "solid",
) -> Line:
    return Line(
        label=label,
        run=run.number,
        style=style,
        rounds=curve.rounds,
        values=curve.means,
        lows=curve.lows,
        highs=curve.highs,
    )


def _participation_lines(counts: Mapping[str, Curve]) -> Iterator[Line]:
    for status in STATUSES:
        if (curve := counts.get(status.value)) is not None:
            yield Line(
                label=status.value,
                run=0,
                color=status.value,
                rounds=curve.rounds,
                values=curve.means,
                lows=curve.lows,
                highs=curve.highs,
            )


def _shorten(value: object) -> object:
    """Round all numbers to what a picture shows, which halves what is transferred."""
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}")
        case dict():
            return {key: _shorten(each) for key, each in value.items()}
        case list():
            return [_shorten(each) for each in value]
        case _:
            return value


ROUTES: Sequence[BaseRoute] = (
    Route("/runs/{name}/curves.json", _send_curves),
    Route("/compare/curves.json", _send_compared),
)
