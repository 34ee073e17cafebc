"""Shared by the benchmarks: options, turns, ratios, the table, and processes that answer lines.

Each script measures its subjects in turn, so that a slow phase of the machine slows all of them.
Ratios compare figures of the same turn; the median over the turns is printed.
"""

import argparse
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from fedlearn.core.clock import SystemClock
from fedlearn.transport.grpc_environment import prepare_for_grpc

# gRPC reads this on import, so it must come first. Otherwise each client that leaves logs a line.
prepare_for_grpc(os.environ, verbosity="ERROR")

HERE = Path(__file__).parent

Action = Callable[[], float]
#: Figures by name of the action, one per turn.
Figures = dict[str, list[float]]


# ---- Options ------------------------------------------------------------------------------


def options(doc: str, *, turns: int = 0) -> argparse.ArgumentParser:
    """Build a parser with the options that all scripts have.

    Args:
        doc: The docstring of the script.
        turns: Default of ``--turns``; 0 if the script has no turns.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if turns:
        parser.add_argument("--turns", type=int, default=turns, help="turns that medians are over")
    parser.add_argument("--json", action="store_true", help="print one JSON line per figure")
    parser.add_argument("--check", action="store_true", help="run briefly, to see that it works")
    return parser


def parse(parser: argparse.ArgumentParser, *, check: Mapping[str, object]) -> argparse.Namespace:
    """Parse the command line; with ``--check``, the sizes in ``check`` are the defaults."""
    if "--check" in sys.argv[1:]:
        parser.set_defaults(**check)
    return parser.parse_args()


def add_flower(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate Flower."""
    parser.add_argument("--flower-python", type=Path, help="interpreter with flwr 1.41")
    parser.add_argument("--without-flower", action="store_true")


def flower_python(arguments: argparse.Namespace) -> Path | None:
    """Return the interpreter that has Flower; ``None`` if it is left out or missing."""
    if arguments.without_flower:
        return None
    if arguments.flower_python or importlib.util.find_spec("flwr"):
        return Path(arguments.flower_python or sys.executable)
    print("Flower is skipped: flwr is not installed here; see --flower-python", file=sys.stderr)
    return None


# ---- Turns and figures --------------------------------------------------------------------


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that ``action`` takes."""
    clock = SystemClock()
    started_s = clock.now_s()
    action()
    return clock.now_s() - started_s


def in_turn(
    actions: Mapping[str, Action], *, turns: int, warmup: int = 0
) -> dict[str, list[float]]:
    """Run all actions in every turn, and return the figures of each by turn.

    The order is reversed every other turn. Warm-up turns do not count.
    """
    figures: Figures = {name: [] for name in actions}
    for turn in range(-warmup, turns):
        for name in list(actions)[:: -1 if turn % 2 else 1]:
            value = actions[name]()
            if turn >= 0:
                figures[name].append(value)
                print(f"turn {turn + 1}: {name} {value:.5g}", file=sys.stderr, flush=True)
    return figures


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median of the ratios by turn."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=False))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: Part of the benchmark that measured it.
        what: Name of the figure, with its unit.
        value: The figure.
        at_most: Target that it must not exceed, if any.
        at_least: Target that it must reach, if any.
    """

    part: str
    what: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    def text(self) -> str:
        """Format the line."""
        target, verdict = "", ""
        if self.at_most is not None:
            target, verdict = f"<= {self.at_most:g}", _verdict(met=self.value <= self.at_most)
        if self.at_least is not None:
            target, verdict = f">= {self.at_least:g}", _verdict(met=self.value >= self.at_least)
        return f"{self.part:13}{self.what:58}{self.value:>12.5g}{target:>10}  {verdict}".rstrip()


def _verdict(*, met: bool) -> str:
    return "met" if met else "MISSED"


def report(rows: Iterable[Row], arguments: argparse.Namespace) -> None:
    """Print each row as soon as it is measured.

    With ``--check``, targets are left out, since the sizes are too small for them.

    Raises:
        SystemExit: Nothing was measured, or a figure is negative or not finite.
    """
    found = list[Row]()
    for measured in rows:
        row = replace(measured, at_most=None, at_least=None) if arguments.check else measured
        found.append(row)
        print(json.dumps(asdict(row)) if arguments.json else row.text(), flush=True)
    wrong = [row.what for row in found if not (math.isfinite(row.value) and row.value >= 0.0)]
    if wrong or not found:
        raise SystemExit(f"no figure of: {', '.join(wrong) or 'anything'}")


# ---- Processes ----------------------------------------------------------------------------


class Program(Protocol):
    """What is used of a :class:`subprocess.Popen` whose streams are pipes of text."""

    @property
    def args(self) -> Any:  # Any: as there
        """The command."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def stdin(self) -> IO[str] | None:
        """The pipe to its standard input."""

    @property
    def stdout(self) -> IO[str] | None:
        """The pipe from its standard output."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status.

        Raises:
            subprocess.TimeoutExpired: It runs on after ``timeout`` seconds.
        """

    def kill(self) -> None:
        """Kill it."""


def start_program(
    command: Sequence[str | Path], environ: Mapping[str, str], errors: int = 2
) -> Program:
    """Start a program with pipes as standard input and output.

    ``check.py`` replaces this function by one that forks, which saves the program's imports.

    Args:
        command: The interpreter and its arguments.
        environ: Its environment.
        errors: Descriptor of its standard error.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=errors, env=dict(environ), text=True
    )


def run_program(
    command: Sequence[str | Path],
    environ: Mapping[str, str],
    *,
    errors: int = 2,
    timeout_s: float = 3600.0,
    check: bool = True,
) -> str:
    """Run a program to its end, or kill it after ``timeout_s``; return what it has written.

    Raises:
        subprocess.CalledProcessError: It failed, and ``check`` is true.
    """
    program = start_program(command, environ, errors)
    assert program.stdin is not None
    assert program.stdout is not None
    killer = threading.Timer(timeout_s, program.kill)
    killer.start()
    with program.stdin, program.stdout:
        written = program.stdout.read()
    code = program.wait()
    killer.cancel()
    if check and code:
        raise subprocess.CalledProcessError(code, list(map(str, command)))
    return written


@dataclass(frozen=True)
class Process:
    """A program that answers each JSON line on its standard input with one.

    Attributes:
        popen: The process.
    """

    popen: Program

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:  # Any: JSON of a script of ours
        """Send a command and return the answer.

        Raises:
            SystemExit: The process has ended; its output is on standard error.
        """
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.popen.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Return the next line that it writes.

        Raises:
            SystemExit: The process has ended.
        """
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark has ended: {self.popen.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(command: Sequence[str | Path]) -> Iterator[Process]:
    """Run a program that answers lines until the context is left."""
    popen = start_program(command, _environ())
    try:
        yield Process(popen)
    finally:
        assert popen.stdin is not None
        popen.stdin.close()
        try:
            popen.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        assert popen.stdout is not None
        popen.stdout.close()


def part(name: str, *words: str) -> list[str]:
    """Return the command that runs a module of ``parts`` in this environment."""
    return [sys.executable, "-m", f"parts.{name}", *words]


def _environ() -> dict[str, str]:
    # As in the service files in ``server/``: fewer malloc arenas, so that threads share memory.
    return os.environ | {"MALLOC_ARENA_MAX": "2", "PYTHONPATH": str(HERE)}


def raise_file_limit() -> None:
    """Allow this process and its children as many open files as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
