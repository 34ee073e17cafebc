"""A run as it happens: one line a round, for a person, for a log, or for a program.

Each call costs a few microseconds, since the engine finishes hundreds of rounds a second:
lines are written as they come, and their colours are rendered once, at the start.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from fedlearn.core.words import printable
from fedlearn.experiment.comparison import (
    Counts,
    Summary,
    duration_text,
    headline,
    number_text,
)
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

_TOP_REASONS = 3
_REASON_CHARACTERS = 100


class Progress(Protocol):
    """Who is told of a run: ``start``, then ``round`` for each, then ``end``."""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Tell that a run begins or goes on.

        Args:
            record: The run.
            path: Where it lies.
            notes: What a reader should know, one line each, such as the executor chosen.
        """

    def round(self, record: RoundRecord) -> None:
        """Tell of a finished round; at once visible, in some 10 us."""

    def end(self, summary: Summary) -> None:
        """Tell what the run came to, be it done, failed or interrupted."""


def progress_to(stream: TextIO, *, as_json: bool) -> Progress:
    """Return what suits ``stream``: JSON if asked for, else by whether it is a terminal."""
    if as_json:
        return JsonProgress(stream)
    console = Console(file=stream, highlight=False)
    return TerminalProgress(console) if console.is_terminal else PlainProgress(stream)


# ---- For a program ------------------------------------------------------------------------


class JsonProgress:
    """One JSON object a line: ``start``, ``round``s, ``end``; what is not finite is null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_rounds = 0
        self._path = ""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Write the ``start`` line: run, rounds, path, notes."""
        self._num_rounds, self._path = record.num_rounds, str(path)
        self._write(
            {
                "event": "start",
                "run": record.name,
                "rounds": record.num_rounds,
                "path": self._path,
                "notes": list(notes),
            }
        )

    def round(self, record: RoundRecord) -> None:
        """Write a ``round`` line."""
        counts = Counts.of(record)
        self._write(
            {
                "event": "round",
                "round": record.round_num + 1,
                "rounds": self._num_rounds,
                "accuracy": _finite(headline(record.metrics, "accuracy")),
                "loss": _finite(headline(record.metrics, "loss")),
                "train_loss": _finite(record.train_loss),
                "reported": counts.reported,
                "late": counts.late,
                "failed": counts.failed,
                "retries": record.attempt,
                "outcome": record.outcome.value,
                "virtual_s": _finite(record.virtual_s),
                "seconds": _finite(record.seconds),
                "metrics": {name: _finite(value) for name, value in record.metrics.items()},
            }
        )

    def end(self, summary: Summary) -> None:
        """Write the ``end`` line: the last accuracy and loss, and rounds finished."""
        self._write(
            {
                "event": "end",
                "run": summary.name,
                "accuracy": _finite(summary.accuracy),
                "loss": _finite(summary.loss),
                "rounds": summary.num_finished,
                "seconds": _finite(summary.seconds),
                "path": self._path,
            }
        )

    def _write(self, event: dict[str, object]) -> None:
        self._stream.write(json.dumps(event, allow_nan=False) + "\n")
        self._stream.flush()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- For a log ----------------------------------------------------------------------------


class PlainProgress:
    """Plain lines of ``key=value``, in a fixed order, without colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_deployed = False  # then no time is virtual
        self._num_rounds = 0
        self._path = Path()

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Write the run's name, and the notes."""
        self._num_rounds, self._path = record.num_rounds, path
        self._is_deployed = record.is_deployed
        self._write(f"run {printable(record.name)}: {record.num_rounds} rounds")
        for note in notes:
            self._write(f"note: {printable(note)}")

    def round(self, record: RoundRecord) -> None:
        """Write a line with every fact of the round."""
        reported, late, failed = Counts.of(record)
        virtual = "" if self._is_deployed else f" virtual_s={record.virtual_s:.1f}"
        self._write(
            f"round {record.round_num + 1}/{self._num_rounds}"
            f" accuracy={number_text(headline(record.metrics, 'accuracy'))}"
            f" loss={number_text(headline(record.metrics, 'loss'))}"
            f" train_loss={number_text(_train_loss(record))}"
            f" reported={reported} late={late} failed={failed}"
            f"{virtual} seconds={record.seconds:.3f}"
            f" retries={record.attempt} outcome={record.outcome.value}"
        )

    def end(self, summary: Summary) -> None:
        """Write what the run came to."""
        for label, text in _facts(summary, self._path):
            self._write(f"{label}: {text}")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


# ---- For a person -------------------------------------------------------------------------


class _Paint(NamedTuple):
    """A style as the two control sequences around a text; both empty without colours."""

    before: str
    after: str

    @classmethod
    def of(cls, style: str, console: Console) -> "_Paint":
        """Render ``style`` once, as ``console`` would."""
        with console.capture() as captured:
            console.print(Text("x", style=style), end="")
        before, _, after = captured.get().partition("x")
        return cls(before, after)

    def on(self, text: str) -> str:
        """Return ``text`` in this style."""
        return f"{self.before}{text}{self.after}"


class TerminalProgress:
    """One coloured line a round on a terminal, under a header; a new best stands out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best = -math.inf
        self._is_deployed = False  # then no time is virtual
        self._num_rounds = 0
        self._round_width = 0
        self._path = Path()
        self._good = _Paint.of("bold green", console)
        self._plain = _Paint("", "")
        self._dim = _Paint.of("dim", console)
        self._late = _Paint.of("yellow", console)
        self._bad = _Paint.of("bold red", console)

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Print the run's name, the notes and the header."""
        self._num_rounds, self._path = record.num_rounds, path
        self._is_deployed = record.is_deployed
        self._round_width = max(len("round"), 2 * len(str(record.num_rounds)) + 1)
        name = (printable(record.name), "bold cyan")
        self._console.print(Text.assemble(name, (f"  {record.num_rounds} rounds", "dim")))
        for note in notes:
            self._console.print(Text(printable(note), style="dim"))
        header = (
            f"{'round':>{self._round_width}}  accuracy      loss     train"
            f"  reported  late  failed{'' if self._is_deployed else '   virtual'}      real"
        )
        self._write(self._dim.on(header))

    def round(self, record: RoundRecord) -> None:
        """Print the round's line."""
        reported, late, failed = Counts.of(record)
        accuracy = headline(record.metrics, "accuracy")
        is_best = self._is_best(accuracy)
        skipped = record.outcome is Outcome.SKIPPED
        place = f"{record.round_num + 1}/{self._num_rounds}"
        virtual = "" if self._is_deployed else f"  {duration_text(record.virtual_s):>8}"
        line = (
            f"{place:>{self._round_width}}"
            f"  {(self._good if is_best else self._plain).on(f'{number_text(accuracy):>8}')}"
            f"  {number_text(headline(record.metrics, 'loss')):>8}"
            f"  {number_text(_train_loss(record)):>8}"
            f"  {(self._bad if skipped else self._plain).on(f'{reported:>8}')}"
            f"  {(self._late if late else self._dim).on(f'{late:>4}')}"
            f"  {(self._bad if failed else self._dim).on(f'{failed:>6}')}"
            f"{virtual}"
            f"  {self._dim.on(f'{duration_text(record.seconds):>8}')}"
        )
        if skipped or record.attempt:
            line += f"  {self._late.on(_remark(record))}"
        self._write(line)

    def end(self, summary: Summary) -> None:
        """Print what the run came to and the commands to type next."""
        styles = {RunStatus.DONE: "bold green", RunStatus.FAILED: "bold red"}
        self._console.print()
        for label, text in _facts(summary, self._path):
            style = "bold" if label in ("best", "next") else ""
            if label == "run":
                style = styles.get(summary.status, "bold yellow")
            line = Text.assemble((f"{label:>8}  ", "dim"), (text, style))
            self._console.print(line, soft_wrap=True)  # a command must survive being copied

    def _is_best(self, accuracy: float | None) -> bool:
        if accuracy is None or math.isnan(accuracy) or accuracy <= self._best:
            return False
        self._best = accuracy
        return True

    def _write(self, line: str) -> None:
        stream = self._console.file
        stream.write(line + "\n")
        stream.flush()


def _train_loss(record: RoundRecord) -> float | None:
    """Return the training loss; by its contract NaN says that nobody reported one."""
    return None if math.isnan(record.train_loss) else record.train_loss


def _remark(record: RoundRecord) -> str:
    retries = "" if not record.attempt else _counted(record.attempt, "retry", "retries")
    skipped = "skipped" if record.outcome is Outcome.SKIPPED else ""
    return ", ".join(filter(None, (skipped, retries)))


# ---- The end ------------------------------------------------------------------------------


def _facts(summary: Summary, path: Path) -> Iterator[tuple[str, str]]:
    """Yield what the end of a run is told with: label and text."""
    is_parked = summary.is_deployed and summary.status is RunStatus.RUNNING
    yield (
        "run",
        (
            f"{printable(summary.name)} {'parked' if is_parked else summary.status.value} after "
            f"{summary.num_finished}/{summary.num_rounds} rounds, {summary.times()}"
        ),
    )
    if is_parked:
        yield "parked", "the same command goes on from here"
    if summary.error:
        yield "error", printable(summary.error)
    yield from _measured(summary)
    yield from _trouble(summary)
    yield "path", printable(str(path))
    verbs = ("resume", "show", "plot") if summary.is_resumable else ("show", "plot")
    for verb in verbs:
        yield "next", next_command(verb, summary.name, path=path)


def next_command(verb: str, name: str, *, path: Path) -> str:
    """Return the command that does ``verb`` with the run that lies at ``path``.

    Example:
        >>> next_command("show", "amber-fox-3", path=Path("runs/amber-fox-3"))
        'fedlearn show amber-fox-3'
        >>> next_command("show", "amber-fox-3", path=Path("/srv/fl/amber-fox-3"))
        'fedlearn show amber-fox-3 --runs-dir /srv/fl'
    """
    is_default = path.parent == Path("runs")
    place = "" if is_default else f" --runs-dir {quote(printable(str(path.parent)))}"
    return f"fedlearn {verb} {quote(printable(name))}{place}"


def _measured(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.best is None:
        yield "best", "nothing was evaluated"
        return
    best = summary.best
    value = number_text(best.point.value)
    yield "best", f"{printable(best.metric)} {value} after round {best.point.num_finished}"
    if central := summary.central_metrics():
        yield "final", _listed(central)
    for name, spread in summary.client_metrics().items():
        yield "clients", f"{printable(name)}: {_listed(spread)}"


def _trouble(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield what went wrong on the way, if anything did."""
    if summary.num_skipped:
        yield "skipped", _counted(summary.num_skipped, "round", "rounds")
    if summary.num_retries:
        yield "retries", str(summary.num_retries)
    for reason, count in summary.reasons[:_TOP_REASONS]:
        text = printable(reason or "no reason given")[:_REASON_CHARACTERS]
        yield "failed", f"{count} x {text}"
    if (others := len(summary.reasons) - _TOP_REASONS) > 0:
        yield "failed", f"for {_counted(others, 'other reason', 'other reasons')}"


def _listed(metrics: dict[str, float]) -> str:
    return ", ".join(f"{printable(name)} {number_text(v)}" for name, v in metrics.items())


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
