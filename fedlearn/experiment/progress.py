"""Prints a run as it happens, one line a round: for a person, for a log, or for a program.

The engine finishes hundreds of rounds a second, so each call may take only some microseconds:
colors are rendered once, at the start.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import IO, NamedTuple, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from fedlearn.config.tables import PYTHON_OBJECTS, has_plan
from fedlearn.core.distribution import NUM_CLIENTS, improvement_sign
from fedlearn.core.json_values import format_json
from fedlearn.core.participations import NUM_CAPPED, NUM_CLIPPED, Status
from fedlearn.core.quantities import format_amount, format_duration, format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import OutputClosed
from fedlearn.experiment.history import (
    direction_of,
    find_own_metrics,
    headline,
    headline_metric,
)
from fedlearn.experiment.notebook import (
    Cell,
    render_bar,
    render_box,
    render_notes,
    render_table,
)
from fedlearn.experiment.summary import Counts, Summary
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

_TOP_REASONS = 3
_REASON_CHARACTERS = 100
_NAME_CHARACTERS = 20

#: Of the bar with the time left: shortest time that is shown, seconds between updates, and weight
#: of the newest round in the mean.
_LONG_S, _REDRAW_S, _NEWEST_WEIGHT = 3.0, 0.2, 0.1
_MOST_CELLS = 40
_NOTEBOOK_ROWS = 10
_CLEAR_LINE = "\r\x1b[2K"


class RunProgress(Protocol):
    """Shows the progress of a run: ``start``, then ``round`` for each, then ``end``."""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Show that the run in the folder ``path`` starts or resumes.

        The ``notes``, one line each, are for the user: for example which executor was chosen.
        """

    def round(self, record: RoundRecord) -> None:
        """Show a finished round at once; takes some 10 us."""

    def end(self, summary: Summary) -> None:
        """Show the result of the run, whether it is done, failed or interrupted."""


def choose_printer(
    stream: TextIO, *, as_json: bool
) -> "JsonProgress | PlainProgress | TerminalProgress | NotebookProgress":
    """Return the printer that suits ``stream``: JSON if asked for, else by what shows it."""
    if as_json:
        return JsonProgress(stream)
    if type(stream).__module__.startswith("ipykernel."):
        return NotebookProgress(stream, Cell().show)
    console = Console(file=stream, highlight=False)
    return TerminalProgress(console) if console.is_terminal else PlainProgress(stream)


def raise_num_rounds(progress: RunProgress, num_rounds: int) -> None:
    """Update the total number of rounds in a built-in printer; others are left as they are."""
    if isinstance(progress, _Lines):
        progress.set_num_rounds(num_rounds)


class SilentProgress:
    """Shows nothing."""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Show nothing."""

    def round(self, record: RoundRecord) -> None:
        """Show nothing."""

    def end(self, summary: Summary) -> None:
        """Show nothing."""


class _Lines:
    """Base of the line printers: the facts of the run; ``run`` is ``None`` before the start."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.run: str | None = None
        self.path = Path()
        self._num_rounds = 0
        self._is_deployed = False  # if true, there is no virtual time
        self._metric = "accuracy"
        self._has_model = True  # a query has none
        self._clip_norm: object = None  # of secure aggregation
        #: The result of the run, once it has ended.
        self.ended: Summary | None = None

    def _begin(self, record: RunRecord, path: Path) -> None:
        self.run, self.path, self._num_rounds = record.name, path, record.num_rounds
        self._is_deployed, self._metric = record.is_deployed, headline_metric(record)
        self._has_model = record.has_model
        section = record.config.get("secure_aggregation")
        self._clip_norm = None
        if isinstance(section, Mapping) and section.get("mode") != "off":
            self._clip_norm = section.get("clip_norm")

    def set_num_rounds(self, num_rounds: int) -> None:
        """Show this total from the next line on."""
        self._num_rounds = num_rounds

    def _clip_advice(self, record: RoundRecord) -> str:
        """Return advice if most updates of the first round were scaled down; else empty."""
        num_clipped = 0 if record.round_num else _num_clipped(record)
        if not num_clipped or self._clip_norm is None:
            return ""
        num_reported = Counts.of(record).reported
        if 2 * num_clipped <= num_reported:
            return ""
        remedy = f"secure_aggregation.clip_norm, which is {self._clip_norm}"
        return (
            f"{num_clipped} of {num_reported} updates were scaled down to the bounds of the secure "
            f"sum; raise {remedy if self._has_model else 'the bounds of the query'}"
        )

    def _write(self, line: str, *, then: str = "") -> None:
        """Write a line, followed by the provisional start of the next one."""
        try:
            self._stream.write(f"{line}\n{then}")
            self._stream.flush()
        except BrokenPipeError as error:
            # A reader such as `head` has ended, which is no failure of the run.
            raise OutputClosed from error


# ---- For a program ------------------------------------------------------------------------


class JsonProgress(_Lines):
    """One JSON object a line: ``start``, ``round``s, ``end``; NaN and infinities are null."""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Write the ``start`` line: run, rounds, path and notes."""
        self._begin(record, path)
        self._write_event(
            "start", run=record.name, rounds=record.num_rounds, path=str(path), notes=notes
        )

    def round(self, record: RoundRecord) -> None:
        """Write a ``round`` line."""
        self._write_event(
            "round",
            run=self.run,
            round=record.round_num + 1,
            rounds=self._num_rounds,
            accuracy=headline(record.metrics, "accuracy"),
            loss=headline(record.metrics, "loss"),
            train_loss=record.train_loss,
            **Counts.of(record)._asdict(),
            retries=record.attempt,
            outcome=record.outcome.value,
            virtual_s=record.virtual_s,
            seconds=record.seconds,
            metrics=record.metrics,
            train_metrics=record.train_metrics,
            staleness=record.staleness,
        )

    def end(self, summary: Summary) -> None:
        """Write the ``end`` line: the last accuracy and loss, and rounds finished."""
        self.ended = summary
        self._write_event(
            "end",
            run=summary.record.name,
            accuracy=summary.accuracy,
            loss=summary.loss,
            rounds=summary.num_finished,
            seconds=summary.seconds,
            path=str(self.path),
            **({} if summary.privacy is None else {"privacy": asdict(summary.privacy)}),
        )

    def _write_event(self, event: str, **facts: object) -> None:
        self._write(format_json({"event": event, **facts}))


# ---- For a log ----------------------------------------------------------------------------


class PlainProgress(_Lines):
    """Plain lines of ``key=value``, in a fixed order, without colors.

    Each starts with ``label``, for a process that shows several runs.
    """

    def __init__(self, stream: IO[str], *, label: str = "") -> None:
        super().__init__(stream)
        self._label = label

    def _write(self, line: str, *, then: str = "") -> None:
        super()._write(self._label + line, then=then)

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Write the run's name, and the notes."""
        self._begin(record, path)
        self._write(f"run {replace_unprintable(record.name)}: {record.num_rounds} rounds")
        for note in notes:
            self._write(f"note: {replace_unprintable(note)}")

    def round(self, record: RoundRecord) -> None:
        """Write a line with every fact of the round."""
        counts = Counts.of(record)
        virtual = "" if self._is_deployed else f" virtual_s={record.virtual_s:.1f}"
        spent, num_clipped = record.metrics.get("epsilon"), _num_clipped(record)
        num_capped = _num_capped(record)
        self._write(
            f"round {record.round_num + 1}/{self._num_rounds}"
            f"{self._format_values(record)}"
            f" reported={counts.reported} late={counts.late} failed={counts.failed}"
            f"{f' stale={counts.stale}' if record.staleness else ''}"
            f"{virtual} seconds={record.seconds:.3f}"
            f"{f' clipped={num_clipped}' if num_clipped else ''}"
            f"{f' capped={num_capped}' if num_capped else ''}"
            f" retries={record.attempt} outcome={record.outcome.value}"
            f"{'' if spent is None else f' epsilon={spent:.4g}'}"
        )
        if advice := self._clip_advice(record):
            self._write(f"note: {advice}")

    def _format_values(self, record: RoundRecord) -> str:
        """Return how good the model is, or what a query, which has none, has found."""
        if not self._has_model:
            return _format_own_metrics(record)
        return (
            f" {replace_unprintable(self._metric)}="
            f"{format_number(headline(record.metrics, self._metric))}"
            f" loss={format_number(headline(record.metrics, 'loss'))}"
            f" train_loss={format_number(_train_loss(record))}"
        )

    def end(self, summary: Summary) -> None:
        """Write the result of the run."""
        self.ended = summary
        for label, text in describe_end(summary, self.path):
            self._write(f"{label}: {text}")


# ---- For a person -------------------------------------------------------------------------


def _paint(style: str, console: Console) -> Callable[[str], str]:
    """Return a function that styles a text; the style is rendered here, once, for speed."""
    with console.capture() as captured:
        console.print(Text("{}", style=style), end="")
    return captured.get().format


class _Column(NamedTuple):
    """A column of a round's line; where space is short, columns with a low ``goes`` go first."""

    header: str
    width: int
    goes: int


#: The columns between the metric and the remarks, by name.
_COLUMNS = {
    "loss": _Column("loss", 8, 4),
    "train": _Column("train", 8, 1),
    "reported": _Column("reported", 8, 7),
    "late": _Column("late", 4, 5),
    "failed": _Column("failed", 6, 6),
    "virtual": _Column("virtual", 8, 2),
    "real": _Column("real", 8, 3),
}


class _TimeLeft:
    """A progress bar under the rounds of a long run, with an estimate of the time left."""

    def __init__(self) -> None:
        self._mean_s = math.nan
        self._since_s = math.inf  # since the bar was last redrawn
        self._bar = ""

    def bar(self, record: RoundRecord, num_rounds: int, width: Callable[[], int]) -> str:
        """Return the bar after a round, within ``width()`` columns; empty near the end.

        It is redrawn only every so often, so that a round costs little.
        """
        self.add(record)
        self._since_s += record.seconds
        if self._since_s >= _REDRAW_S:
            self._since_s = 0.0
            self._bar = self._draw(record.round_num + 1, num_rounds, width())
        return self._bar

    def add(self, record: RoundRecord) -> None:
        """Take the time of a round into account."""
        if math.isnan(self._mean_s):
            self._mean_s = record.seconds
        # An exponential mean follows rounds that become faster or slower.
        self._mean_s += _NEWEST_WEIGHT * (record.seconds - self._mean_s)

    def left_s(self, num_left: int) -> float:
        """Estimate the seconds that ``num_left`` rounds take."""
        return self._mean_s * num_left

    def _draw(self, num_finished: int, num_rounds: int, width: int) -> str:
        left_s = self.left_s(num_rounds - num_finished)
        if left_s < _LONG_S:
            return ""
        share = num_finished / num_rounds
        text = f" {100 * share:3.0f}%  {format_duration(left_s)} left"
        num_cells = max(0, min(_MOST_CELLS, width - len(text) - 1))
        full = round(share * num_cells)
        return f"{'━' * full}{'─' * (num_cells - full)}{text}"


class TerminalProgress(_Lines):
    """One colored line a round on a terminal, under a header; a new best stands out.

    A narrow terminal gets fewer columns. Under the rounds of a long simulation there is a bar with
    the time left. A deployment has none, because its log lines would run into it.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._console = console
        self._sign, self._best, self._budget = 1.0, -math.inf, ""
        self._round_width, self._metric_width = 0, 0
        self._columns: tuple[str, ...] = ()
        self._left, self._has_bar = _TimeLeft(), False
        self._good = _paint("bold green", console)
        self._dim = _paint("dim", console)
        self._late = _paint("yellow", console)
        self._bad = _paint("bold red", console)

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Print the run's name, the notes and the header."""
        self._begin(record, path)
        self._sign = improvement_sign(direction_of(record, self._metric) or "max")
        privacy = record.config.get("privacy")
        budget = privacy.get("epsilon") if isinstance(privacy, Mapping) else None
        self._budget = "" if budget is None else f" of {budget:g}"
        shown = replace_unprintable(self._metric)[:_NAME_CHARACTERS] if self._has_model else ""
        self._round_width = max(len("round"), 2 * len(str(record.num_rounds)) + 1)
        self._metric_width = max(8, len(shown)) if self._has_model else 0
        self._left = _TimeLeft()
        self._columns = self._choose_columns(self._console.width)
        name = (replace_unprintable(record.name), "bold cyan")
        self._console.print(Text.assemble(name, (f"  {record.num_rounds} rounds", "dim")))
        for note in notes:
            self._console.print(Text(replace_unprintable(note), style="dim"))
        header = f"{'round':>{self._round_width}}  {shown:>{self._metric_width}}"
        for column in (_COLUMNS[name] for name in self._columns):
            header += f"  {column.header:>{column.width}}"
        self._write(self._dim(header))

    def _choose_columns(self, width: int) -> tuple[str, ...]:
        hidden = {"virtual"} if self._is_deployed else set()
        hidden |= set() if self._has_model else {"loss", "train"}
        names = [name for name in _COLUMNS if name not in hidden]
        taken = self._round_width + 2 + self._metric_width
        while names and taken + sum(2 + _COLUMNS[name].width for name in names) > width:
            names.remove(min(names, key=lambda name: _COLUMNS[name].goes))
        return tuple(names)

    def round(self, record: RoundRecord) -> None:
        """Print the round's line."""
        reported, late, failed, _ = Counts.of(record)
        value = headline(record.metrics, self._metric)
        shown = format_number(value) if self._has_model else ""
        measured = f"{shown:>{self._metric_width}}"
        skipped = record.outcome is Outcome.SKIPPED
        place = f"{record.round_num + 1}/{self._num_rounds}"
        cells = {
            "loss": f"{format_number(headline(record.metrics, 'loss')):>8}",
            "train": f"{format_number(_train_loss(record)):>8}",
            "reported": (self._bad if skipped else str)(f"{reported:>8}"),
            "late": (self._late if late else self._dim)(f"{late:>4}"),
            "failed": (self._bad if failed else self._dim)(f"{failed:>6}"),
            "virtual": f"{format_duration(record.virtual_s):>8}",
            "real": self._dim(f"{format_duration(record.seconds):>8}"),
        }
        line = (
            f"{place:>{self._round_width}}"
            f"  {(self._good if self._is_best(value) else str)(measured)}"
        )
        for name in self._columns:
            line += f"  {cells[name]}"
        if not self._has_model:
            line += f" {_format_own_metrics(record)}"
        if remark := _describe_remarks(record):
            line += f"  {self._late(remark)}"
        if (epsilon := record.metrics.get("epsilon")) is not None:
            line += f"  {self._dim(f'ε {epsilon:.3g}{self._budget}')}"
        bar = ""
        if not self._is_deployed:
            # A function, since the width takes a system call, and is only needed when the bar is
            # redrawn.
            bar = self._left.bar(record, self._num_rounds, lambda: self._console.width)
        if advice := self._clip_advice(record):
            line += f"\n{self._late(advice)}"
        self._write(f"{self._erase_bar()}{line}", then=self._dim(bar) if bar else "")
        self._has_bar = bool(bar)

    def _erase_bar(self) -> str:
        had_bar, self._has_bar = self._has_bar, False
        return _CLEAR_LINE if had_bar else ""

    def end(self, summary: Summary) -> None:
        """Print the result of the run and the commands to type next."""
        self.ended = summary
        styles = {RunStatus.DONE: "bold green", RunStatus.FAILED: "bold red"}
        self._write(self._erase_bar())
        for label, text in describe_end(summary, self.path):
            style = "bold" if label in ("best", "next") else ""
            if label == "run":
                style = styles.get(summary.record.status, "bold yellow")
            line = Text.assemble((f"{label:>8}  ", "dim"), (text, style))
            self._console.print(line, soft_wrap=True)  # a command must survive being copied

    def _is_best(self, value: float | None) -> bool:
        if value is None or math.isnan(value) or self._sign * value <= self._best:
            return False
        self._best = self._sign * value
        return True


# ---- For a notebook -----------------------------------------------------------------------


class NotebookProgress(_Lines):
    """A table of the last rounds in one output of a notebook's cell, under a progress bar.

    ``show`` receives the same content by MIME type, in place of what it received before. At the end
    the result takes the place of the bar.
    """

    def __init__(self, stream: IO[str], show: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__(stream)
        self._show, self._left = show, _TimeLeft()
        self._rows = deque[tuple[str, ...]](maxlen=_NOTEBOOK_ROWS)
        self._header: tuple[str, ...] = ()
        self._notes: Sequence[str] = ()
        self._since_s = math.inf  # since the output was last replaced

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Show the run's name and the notes."""
        self._begin(record, path)
        self._notes, self._left = notes, _TimeLeft()
        self._rows.clear()
        model = (self._metric, "loss", "train loss") if self._has_model else ("result",)
        self._header = ("round", *model, "reported", "late", "failed", "seconds", "")
        self._replace(f"run {record.name}: {record.num_rounds} rounds", "")

    def round(self, record: RoundRecord) -> None:
        """Add the round; the output is replaced a few times a second at most."""
        reported, late, failed, _ = Counts.of(record)
        values = (
            (
                format_number(headline(record.metrics, self._metric)),
                format_number(headline(record.metrics, "loss")),
                format_number(_train_loss(record)),
            )
            if self._has_model
            else (_format_own_metrics(record),)
        )
        remarks = [_describe_remarks(record)] if _describe_remarks(record) else []
        if (epsilon := record.metrics.get("epsilon")) is not None:
            remarks.append(f"ε {epsilon:.3g}")
        if advice := self._clip_advice(record):
            self._notes = (*self._notes, advice)
        counts = (str(reported), str(late), str(failed), f"{record.seconds:.3g}")
        self._rows.append((str(record.round_num + 1), *values, *counts, ", ".join(remarks)))
        self._left.add(record)
        self._since_s += record.seconds
        if self._since_s >= _REDRAW_S:
            self._since_s = 0.0
            place = f"{record.round_num + 1}/{self._num_rounds} rounds"
            left = format_duration(self._left.left_s(self._num_rounds - record.round_num - 1))
            bar = render_bar(record.round_num + 1, self._num_rounds, f"{place}, {left} left")
            self._replace(place, bar)

    def end(self, summary: Summary) -> None:
        """Show the result of the run."""
        self.ended = summary
        found = list(describe_end(summary, self.path))
        text = "\n".join(f"{label}: {value}" for label, value in found)
        self._replace(text, render_table([], found))

    def _replace(self, text: str, below: str) -> None:
        table = render_table(self._header, self._rows) if self._rows else ""
        box = render_box(f"run {self.run}", render_notes(self._notes), table, below)
        self._show({"text/html": box, "text/plain": text})


def _format_own_metrics(record: RoundRecord) -> str:
    """Format the metrics that a query computed in a round, each as a space and ``name=value``."""
    found = find_own_metrics(record).items()
    return "".join(f" {replace_unprintable(name)}={format_amount(value)}" for name, value in found)


def _train_loss(record: RoundRecord) -> float | None:
    # NaN: no client reported one.
    return None if math.isnan(record.train_loss) else record.train_loss


def _describe_remarks(record: RoundRecord) -> str:
    skipped = ["skipped"] if record.outcome is Outcome.SKIPPED else []
    retries = [_format_count(record.attempt, "retry", "retries")] if record.attempt else []
    num_stale = record.count(Status.STALE)
    stale = [f"{num_stale} stale"] if num_stale else []
    num_clipped = _num_clipped(record)
    clipped = [f"{num_clipped} scaled down"] if num_clipped else []
    num_capped = _num_capped(record)
    capped = [f"{num_capped} cut off"] if num_capped else []
    return ", ".join(skipped + retries + stale + clipped + capped)


def _num_clipped(record: RoundRecord) -> int:
    """Return the number of reports scaled down to a clip; 0 also if the count is not known."""
    return round(record.metrics.get(NUM_CLIPPED, 0.0))


def _num_capped(record: RoundRecord) -> int:
    """Return the number of reports with values cut off by a secure sum; 0 also if not known."""
    return round(record.metrics.get(NUM_CAPPED, 0.0))


# ---- The end ------------------------------------------------------------------------------


def describe_end(summary: Summary, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the result of a run, and the commands to type next, as labels and texts."""
    run = summary.record
    is_parked = run.is_deployed and run.status is RunStatus.RUNNING
    ended = f"{replace_unprintable(run.name)} {'parked' if is_parked else run.status.value}"
    rounds = f"{summary.num_finished}/{run.num_rounds} rounds"
    yield "run", f"{ended} after {rounds}, {summary.times()}"
    if is_parked:
        yield "parked", "run the same command again to continue"
    if run.error:
        yield "error", replace_unprintable(run.error)
    is_plan = has_plan(run.config)
    if run.has_model:
        nothing = [("best", "nothing was evaluated")]
        yield from describe_metrics(summary) if summary.best else nothing
    elif not is_plan:  # the result of a plan is a table, which is printed next to this
        yield "result", "a query has no model; its result is what Run.state() or an export gives"
    if summary.privacy is not None:
        of = "statistics" if is_plan else "released models"
        yield "privacy", summary.privacy.format(of=of)
    yield from _describe_problems(summary)
    yield "path", replace_unprintable(str(path))
    last = "report" if is_plan else "plot" if run.has_model else "export"
    yield from next_steps(summary, path, "show", last)


def next_steps(summary: Summary, path: Path, *verbs: str) -> Iterator[tuple[str, str]]:
    """Yield the commands to type next for the run at ``path``; resume comes first if possible."""
    for verb in ("resume", *verbs) if summary.is_resumable else verbs:
        if verb == "resume" and PYTHON_OBJECTS in summary.record.config:
            # Only Python has its model and data.
            function = "run_statistics" if has_plan(summary.record.config) else "simulate"
            yield "next", f"fl.{function}(..., resume={summary.record.name!r})"
        else:
            yield "next", next_command(verb, summary.record.name, path=path)


def next_command(verb: str, name: str, *, path: Path) -> str:
    """Return the command line for ``verb`` on the run at ``path``.

    Example:
        >>> next_command("show", "amber-fox-3", path=Path("runs/amber-fox-3"))
        'fedlearn show amber-fox-3'
        >>> next_command("show", "amber-fox-3", path=Path("/srv/fl/amber-fox-3"))
        'fedlearn show amber-fox-3 --runs-dir /srv/fl'
    """
    is_default = path.parent == Path("runs")
    place = "" if is_default else f" --runs-dir {quote(replace_unprintable(str(path.parent)))}"
    return f"fedlearn {verb} {quote(replace_unprintable(name))}{place}"


def describe_metrics(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield a run's measurements: its best, its last values, and their spread over clients."""
    if (best := summary.best) is not None:
        value = format_number(best.point.value)
        yield (
            "best",
            f"{replace_unprintable(best.metric)} {value} after round {best.point.num_finished}",
        )
    if central := summary.central_metrics():
        yield "final", _format_metrics(central)
    for name, spread in summary.client_metrics().items():
        counted = spread.pop(NUM_CLIENTS, None)  # runs of earlier versions do not have it
        over = "" if counted is None else f" of {counted} clients"
        yield "clients", f"{replace_unprintable(name)}{over}: {_format_metrics(spread)}"


def _describe_problems(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the problems of a run: skipped rounds, retries, clipped updates and failures."""
    if summary.num_skipped:
        yield "skipped", _format_count(summary.num_skipped, "round", "rounds")
    if summary.num_retries:
        yield "retries", str(summary.num_retries)
    if summary.num_clipped:
        text = f"{summary.num_clipped} of {summary.counts.reported} updates"
        yield "scaled", f"{text}, to their largest norm"
    if summary.num_capped:
        text = f"values of {summary.num_capped} of {summary.counts.reported} reports"
        yield "cut off", f"{text}, at secure_aggregation.max_loss or max_examples"
    for reason, count in summary.reasons[:_TOP_REASONS]:
        text = replace_unprintable(reason or "no reason given")[:_REASON_CHARACTERS]
        yield "failed", f"{count} x {text}"
    if (others := len(summary.reasons) - _TOP_REASONS) > 0:
        yield "failed", f"for {_format_count(others, 'other reason', 'other reasons')}"


def _format_metrics(metrics: dict[str, float]) -> str:
    return ", ".join(
        f"{replace_unprintable(name)} {format_number(v)}" for name, v in metrics.items()
    )


def _format_count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
