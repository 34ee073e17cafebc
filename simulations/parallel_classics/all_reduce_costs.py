"""Measure the bytes and time of all-reduce on this machine, and compare them with the formulas.

    python simulations/parallel_classics/all_reduce_costs.py

Starts processes on this machine and runs the four methods of ``all_reduce.py`` in them. Each is run
over loopback, and over an emulated network with a line out and a line in for each process. The
library's messages are counted by the kernel, and cannot be run over the emulated network.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from all_reduce import METHODS, Cost, Messages, Method, PacedMessages
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from tcp_counters import open_sockets, sent_bytes
from torch import Tensor

from fedlearn.core.clock import SystemClock
from fedlearn.core.ranges import Count, Positive, Ranged
from fedlearn.errors import ConfigError, EngineError
from fedlearn.experiment.figures import INK, RUN_COLORS, label_axes, new_figure, write_png
from fedlearn.experiment.layout import table_text
from fedlearn.parallel.local_world import run_in_processes

#: Numbers are float32.
NUMBER_BYTES = 4
#: Most processes on one machine; more would measure its cores and not a network.
MOST_PROCESSES = 64
_BYTES_PER_S = 1e6 / 8  # of a Mbit/s
#: Extra time allowed beyond the formulas, for starting processes, sharing cores and adding.
_SPARE_S, _SPARE_FACTOR = 120.0, 10.0
#: Longest time that the formulas may predict for one world: an hour.
_LONGEST_S = 3600.0
_MB, _MS = 1e6, 1e-3
_BAR = 0.2
_STROKE: Mapping[str, Any] = {  # Any: matplotlib's keywords
    "color": INK,
    "markersize": 18,
    "markeredgewidth": 1.5,
}


@dataclass(frozen=True, kw_only=True)
class Settings(Ranged):
    """The sizes of the measurement.

    Attributes:
        numbers: Numbers of each process, >= 1; one all-reduce for each entry.
        repeats: How often each is timed, >= 1; the median is reported.
        mbit_per_s: Bandwidth of each line of the emulated network.
    """

    numbers: tuple[int, ...]
    repeats: Count
    mbit_per_s: Positive


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one method with some number of processes and numbers.

    Attributes:
        method: The method.
        world_size: Processes, p.
        num_numbers: Numbers of each process, n.
        mbit_per_s: Bandwidth of each line of the emulated network.
        sent_P: Bytes that each rank has sent, by our own count, without headers; ``None`` for the
            library.
        num_sent_P: Messages that each rank has sent; ``None`` for the library.
        carried_P: Bytes that each rank has sent, by the kernel's count, with headers and traffic
            between the ranks that is not part of the method; ``None`` if it does not count.
        seconds: Time over loopback, from the start of all ranks until the last one has the sum.
        paced_seconds: The same over the emulated network; ``None`` for the library.
    """

    method: Method
    world_size: int
    num_numbers: int
    mbit_per_s: float
    sent_P: tuple[int, ...] | None
    num_sent_P: tuple[int, ...] | None
    carried_P: tuple[int, ...] | None
    seconds: float
    paced_seconds: float | None

    @property
    def cost(self) -> Cost:
        """Cost by the formula, in numbers."""
        return self.method.cost(self.num_numbers, self.world_size)

    @property
    def known_sent(self) -> tuple[int, ...] | None:
        """Bytes that each rank has sent, by our count, or else by the kernel's."""
        return self.carried_P if self.sent_P is None else self.sent_P

    @property
    def formula_sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends by the formula."""
        return tuple(NUMBER_BYTES * numbers for numbers in self.cost.sent_P)

    @property
    def formula_seconds(self) -> float:
        """Time over the emulated network by the formula."""
        return _seconds(self.cost, self.mbit_per_s)

    def facts(self) -> dict[str, object]:
        """Return the measurements as JSON values; unknown ones are null."""
        return {
            "method": self.method.name,
            "processes": self.world_size,
            "numbers": self.num_numbers,
            "mbit_per_s": self.mbit_per_s,
            "sent_bytes": self.sent_P,
            "sent_messages": self.num_sent_P,
            "kernel_sent_bytes": self.carried_P,
            "formula_sent_bytes": self.formula_sent,
            "loopback_s": self.seconds,
            "emulated_s": self.paced_seconds,
            "formula_s": self.formula_seconds,
        }


# ---- Measuring ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _OfRank:
    """Measurements of one method in one rank."""

    sent: int
    num_sent: int
    carried: int | None
    seconds: tuple[float, ...]
    paced_seconds: tuple[float, ...]


def measure(settings: Settings, *, world_size: int) -> list[Measured]:
    """Start ``world_size`` processes and measure every method in them.

    Raises:
        ConfigError: It would take hours.
        EngineError: A process failed or died, they took much longer than the formulas say, or a sum
            is wrong.
    """
    cases = [(method, num_numbers) for num_numbers in settings.numbers for method in METHODS]
    expected_s = settings.repeats * sum(
        _seconds(method.cost(n, world_size), settings.mbit_per_s) for method, n in cases
    )
    if expected_s > _LONGEST_S:
        raise ConfigError(
            f"with {world_size} processes, {settings.repeats} repeats at {settings.mbit_per_s:g} "
            f"Mbit/s take {expected_s:.3g} s, the limit is {_LONGEST_S:g} s; measure fewer numbers "
            "or repeats, or a faster network"
        )
    inherited = open_sockets()
    by_rank = run_in_processes(
        lambda: [_of_rank(*case, settings, inherited=inherited) for case in cases],
        world_size=world_size,
        timeout_s=_SPARE_S + _SPARE_FACTOR * expected_s,
    )
    return [
        _measure(*case, settings, of_ranks)
        for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


def _seconds(cost: Cost, mbit_per_s: float) -> float:
    return cost.in_sequence * NUMBER_BYTES / (mbit_per_s * _BYTES_PER_S)


def _measure(
    method: Method, num_numbers: int, settings: Settings, of_ranks: Sequence[_OfRank]
) -> Measured:
    carried_P = [each.carried for each in of_ranks if each.carried is not None]
    return Measured(
        method=method,
        world_size=len(of_ranks),
        num_numbers=num_numbers,
        mbit_per_s=settings.mbit_per_s,
        sent_P=tuple(each.sent for each in of_ranks) if method.is_own else None,
        num_sent_P=tuple(each.num_sent for each in of_ranks) if method.is_own else None,
        carried_P=tuple(carried_P) if len(carried_P) == len(of_ranks) else None,
        seconds=_median([each.seconds for each in of_ranks]),
        paced_seconds=_median([each.paced_seconds for each in of_ranks]) if method.is_own else None,
    )


def _median(seconds_PK: Sequence[Sequence[float]]) -> float:
    """Return the median over K repeats of the slowest of P ranks."""
    slowest_K: list[float] = [max(seconds_P) for seconds_P in zip(*seconds_PK, strict=True)]
    return statistics.median(slowest_K)


def _of_rank(
    method: Method, num_numbers: int, settings: Settings, *, inherited: AbstractSet[int]
) -> _OfRank:
    """Run one method in a rank: once to count and check, then to time."""
    values, total = _values(num_numbers)
    messages = Messages()
    dist.barrier()
    before = sent_bytes(without=inherited)
    found = method.run(values, messages)
    dist.barrier()
    after = sent_bytes(without=inherited)
    if not torch.equal(found, total):
        raise EngineError(f"{method.name}: the sum of {num_numbers} numbers is wrong")
    clock = SystemClock()
    bytes_per_s = settings.mbit_per_s * _BYTES_PER_S
    paced_seconds = []
    if method.is_own:
        for _ in range(settings.repeats):
            paced = PacedMessages(bytes_per_s=bytes_per_s, clock=clock)
            paced_seconds.append(_time_action(method, values, paced))
    return _OfRank(
        sent=messages.sent * values.element_size(),
        num_sent=messages.num_sent,
        carried=None if before is None or after is None else after - before,
        seconds=tuple(_time_action(method, values, Messages()) for _ in range(settings.repeats)),
        paced_seconds=tuple(paced_seconds),
    )


def _time_action(method: Method, values: Tensor, messages: Messages) -> float:
    """Return the seconds that this rank took, after waiting for all ranks."""
    dist.barrier()
    clock = SystemClock()
    began_s = clock.now_s()
    method.run(values, messages)
    return clock.now_s() - began_s


def _values(num_numbers: int) -> tuple[Tensor, Tensor]:
    """Return this rank's numbers and the sum over all ranks; they are integers, so it is exact."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(num_numbers, dtype=torch.int32) % 1009
    values = (pattern * (rank + 1)).float()
    total = (pattern * (world_size * (world_size + 1) // 2)).float()
    return values, total


# ---- The table and the picture ------------------------------------------------------------


def render(measured: Sequence[Measured]) -> str:
    """Format one table for each size of vector."""
    return "\n\n".join([*map(_table, _by_numbers(measured)), *_notes(measured)])


def _by_numbers(measured: Sequence[Measured]) -> list[list[Measured]]:
    sizes = dict.fromkeys(each.num_numbers for each in measured)
    return [[each for each in measured if each.num_numbers == size] for size in sizes]


def _table(measured: Sequence[Measured]) -> str:
    num_numbers, rate = measured[0].num_numbers, f"{measured[0].mbit_per_s:g} Mbit/s"
    header = (
        *("p", "method", "all send", "formula", "one sends", "formula", "messages"),
        *("loopback", rate, "formula"),
    )
    size = _mb(NUMBER_BYTES * num_numbers)
    title = f"n = {num_numbers:,} of float32, {size} MB; bytes in MB, times in ms"
    return f"{title}\n{table_text([header, *map(_row, measured)], values_right=True)}"


def _notes(measured: Sequence[Measured]) -> Iterator[str]:
    if any(each.carried_P is not None for each in measured):
        yield "library: bytes as the kernel counts them, with headers; it cannot be emulated."
    else:
        yield "library: its bytes cannot be counted here, and it cannot be emulated."


def _row(each: Measured) -> tuple[str, ...]:
    sent_P, formula_P = each.known_sent, each.formula_sent
    return (
        str(each.world_size),
        each.method.name,
        "-" if sent_P is None else _mb(sum(sent_P)),
        _mb(sum(formula_P)),
        "-" if sent_P is None else _mb(max(sent_P)),
        _mb(max(formula_P)),
        "-" if each.num_sent_P is None else str(max(each.num_sent_P)),
        _ms(each.seconds),
        "-" if each.paced_seconds is None else _ms(each.paced_seconds),
        _ms(each.formula_seconds),
    )


def _mb(num_bytes: int) -> str:
    """Format bytes in MB, with at most four digits.

    Example:
        >>> [_mb(num_bytes) for num_bytes in (0, 12, 4_000_432, 120_000_000)]
        ['0', '1.2e-05', '4', '120']
    """
    return f"{num_bytes / _MB:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds / _MS:.1f}"


def picture(measured: Sequence[Measured], path: Path) -> None:
    """Plot times and bytes by number of processes as a PNG; an existing file is replaced.

    Each size of vector has a row. Bars are measurements; dashes are the formulas.

    Raises:
        StoreError: The file cannot be written.
    """
    tables = _by_numbers(measured)
    figure = new_figure(11, 0.6 + 4.2 * len(tables))
    rows = figure.subplots(len(tables), 2, squeeze=False)
    for (times, sent), table in zip(rows, tables, strict=True):
        title = f"{table[0].num_numbers:,} numbers of float32"
        time = f"time at {table[0].mbit_per_s:g} Mbit/s (ms)"
        _draw(times, table, of=_times, unit=_MS, title=title, label=time)
        _draw(sent, table, of=_busiest, unit=_MB, title="", label="busiest process sends (MB)")
    write_png(figure, path)


def _times(each: Measured) -> tuple[float | None, float]:
    return each.paced_seconds, each.formula_seconds


def _busiest(each: Measured) -> tuple[float | None, float]:
    sent_P = each.known_sent
    return None if sent_P is None else max(sent_P), max(each.formula_sent)


def _draw(
    axes: Axes,
    measured: Sequence[Measured],
    *,
    of: Callable[[Measured], tuple[float | None, float]],
    unit: float,
    title: str,
    label: str,
) -> None:
    """Draw a group of bars for each number of processes; unmeasured methods have none."""
    sizes = sorted({each.world_size for each in measured})
    for place, (color, method) in enumerate(zip(RUN_COLORS, METHODS, strict=False)):
        shown = [each for each in measured if each.method == method and of(each)[0] is not None]
        if not shown:
            continue
        at = [sizes.index(each.world_size) + _BAR * (place - 1.5) for each in shown]
        values, formulas = zip(*map(of, shown), strict=True)
        heights = [value / unit for value in values]
        axes.bar(at, heights, 0.9 * _BAR, color=color, label=method.name)
        axes.plot(at, [value / unit for value in formulas], "_", **_STROKE)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    stroke = Line2D([], [], linestyle="", marker="_", **_STROKE)
    keys = [*zip(*axes.get_legend_handles_labels(), strict=True), (stroke, "formula")]
    label_axes(axes, title, "processes", label, keys)


# ---- The script ---------------------------------------------------------------------------


def _whole(*, most: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for integers from 1 to ``most``."""

    def read(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            limits = ">= 1" if most == math.inf else f"from 1 to {most}"
            raise argparse.ArgumentTypeError(f"{value} is out of range; give a number {limits}")
        return value

    return read


def main(words: Sequence[str] | None = None) -> None:
    """Measure with the options of the command line, and print or plot the results."""
    parser = argparse.ArgumentParser(description="Compare all-reduces with their formulas.")
    add = parser.add_argument
    add("--processes", type=_whole(most=MOST_PROCESSES), nargs="+", default=[2, 4, 8], metavar="P")
    add(
        "--numbers",
        type=_whole(),
        nargs="+",
        default=[1_000_000],
        metavar="N",
        help="numbers of each process",
    )
    add("--repeats", type=_whole(), default=3, metavar="K", help="runs that medians are over")
    add(
        "--mbit-per-s",
        type=float,
        default=400.0,
        metavar="X",
        help="bandwidth of the emulated network",
    )
    add("--json", action="store_true", help="print one object per measurement")
    add("--output", type=Path, metavar="FILE", help="also plot the result as PNG")
    given = parser.parse_args(words)
    try:
        settings = Settings(
            numbers=tuple(dict.fromkeys(given.numbers)),
            repeats=given.repeats,
            mbit_per_s=given.mbit_per_s,
        )
        by_world = [measure(settings, world_size=p) for p in sorted(set(given.processes))]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    measured = list(chain.from_iterable(by_world))
    if given.json:
        for each in measured:
            print(json.dumps(each.facts()))
    else:
        print(render(measured))
    if given.output is not None:
        picture(measured, given.output)


if __name__ == "__main__":
    main()
