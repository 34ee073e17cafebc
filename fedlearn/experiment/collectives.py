"""What an all-reduce costs, measured beside its formulas: as a table, as JSON and as a picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlearn.core.files import write_durably
from fedlearn.errors import StoreError
from fedlearn.experiment.comparison import aligned
from fedlearn.experiment.plot import RUN_COLOURS
from fedlearn.parallel.all_reduce_costs import NUMBER_BYTES, Measured, Settings, measure
from fedlearn.parallel.collectives import METHODS

_MB = 1e6
_MS = 1e-3
_BAR = 0.2
_STROKE: Mapping[str, Any] = {  # Any: matplotlib's keywords
    "color": "#222222",
    "markersize": 18,
    "markeredgewidth": 1.5,
}


@dataclass(frozen=True)
class Costs:
    """What all-reduces have cost.

    Attributes:
        settings: What was measured.
        measured: By processes, numbers and method.
    """

    settings: Settings
    measured: tuple[Measured, ...]

    def facts(self) -> Iterator[dict[str, object]]:
        """Yield each as JSON values; what is not known is null."""
        for each in self.measured:
            yield {
                "method": each.method.name,
                "processes": each.world_size,
                "numbers": each.num_numbers,
                "mbit_per_s": each.mbit_per_s,
                "sent_bytes": each.sent_P,
                "sent_messages": each.num_sent_P,
                "kernel_sent_bytes": each.carried_P,
                "formula_sent_bytes": each.formula_sent,
                "loopback_s": each.seconds,
                "emulated_s": each.paced_seconds,
                "formula_s": each.formula_seconds,
            }

    def render(self) -> str:
        """Return it as text: the methods, and a table for each number of numbers."""
        parts = [self._methods()]
        parts += [self._table(numbers) for numbers in self.settings.numbers]
        return "\n\n".join([*parts, "\n".join(self._notes())])

    def _methods(self) -> str:
        header = ("method", "n numbers, p processes", "all send", "one sends at most", "time of")
        rows = [
            (each.name, each.done, each.sent, each.busiest, each.in_sequence) for each in METHODS
        ]
        return aligned([header, *rows])

    def _table(self, num_numbers: int) -> str:
        rate = f"{self.settings.mbit_per_s:g} Mbit/s"
        header = (
            *("p", "method", "all send", "formula", "one sends", "formula", "messages"),
            *("loopback", rate, "formula"),
        )
        rows = [_row(each) for each in self.measured if each.num_numbers == num_numbers]
        size = _mb(NUMBER_BYTES * num_numbers)
        title = f"n = {num_numbers:,} of float32, {size} MB; bytes in MB, times in ms"
        return f"{title}\n{aligned([header, *rows], values_right=True)}"

    def _notes(self) -> Iterator[str]:
        rate = f"{self.settings.mbit_per_s:g} Mbit/s"
        yield f"{rate}: an emulated network, with a line out and a line in for each process."
        yield "loopback: this machine's memory and cores, which no formula is about."
        if any(each.carried_P is not None for each in self.measured):
            yield "library: bytes as the kernel counts them, with headers; it cannot be emulated."
        else:
            yield "library: nobody counts its bytes here, and it cannot be emulated."
        yield "Least possible of one: 2(p-1)n/p (Patarasuk and Yuan, 2009), as ring and library."


def costs(settings: Settings, *, world_sizes: Sequence[int]) -> Costs:
    """Measure every method with each number of processes, one after another.

    Raises:
        EngineError: A process failed, died or hung, or a sum is wrong.
    """
    measured = (each for size in world_sizes for each in measure(settings, world_size=size))
    return Costs(settings, tuple(measured))


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
    """Return bytes in MB, to four digits at most.

    Example:
        >>> [_mb(num_bytes) for num_bytes in (0, 12, 4_000_432, 120_000_000)]
        ['0', '1.2e-05', '4', '120']
    """
    return f"{num_bytes / _MB:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds / _MS:.1f}"


def picture(costs: Costs, path: Path) -> Path:
    """Draw times and bytes by processes as the PNG ``path``, which is returned.

    A row for each number of numbers: bars are measured, and a stroke is what the formula says. A
    file that is there is replaced.

    Raises:
        StoreError: The file cannot be written.
    """
    num_rows = len(costs.settings.numbers)
    size = (11, 0.6 + 4.2 * num_rows)
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rows = figure.subplots(num_rows, 2, squeeze=False)
    rate = f"{costs.settings.mbit_per_s:g} Mbit/s"
    for (times, sent), num_numbers in zip(rows, costs.settings.numbers, strict=True):
        about = [each for each in costs.measured if each.num_numbers == num_numbers]
        _draw(times, about, of=lambda each: (each.paced_seconds, each.formula_seconds), unit=_MS)
        _draw(sent, about, of=_busiest, unit=_MB)
        times.set_ylabel(f"time at {rate} (ms)")
        sent.set_ylabel("sent by the busiest process (MB)")
        times.set_title(f"{num_numbers:,} numbers of float32", loc="left")
    content = BytesIO()
    figure.savefig(content, format="png")
    write_durably(path, content.getvalue(), raises=StoreError)
    return path


def _busiest(each: Measured) -> tuple[float | None, float]:
    sent_P = each.known_sent
    return None if sent_P is None else max(sent_P), max(each.formula_sent)


def _draw(
    axes: Axes,
    measured: Sequence[Measured],
    *,
    of: Callable[[Measured], tuple[float | None, float]],
    unit: float,
) -> None:
    """Draw a group of bars for each number of processes, where there is something to measure."""
    sizes = sorted({each.world_size for each in measured})
    for place, (colour, method) in enumerate(zip(RUN_COLOURS, METHODS, strict=False)):
        shown = [each for each in measured if each.method == method and of(each)[0] is not None]
        if not shown:
            continue
        at = [sizes.index(each.world_size) + _BAR * (place - 1.5) for each in shown]
        values, formulas = zip(*map(of, shown), strict=True)
        axes.bar(
            at, [value / unit for value in values], 0.9 * _BAR, color=colour, label=method.name
        )
        axes.plot(at, [value / unit for value in formulas], "_", **_STROKE)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("processes")
    axes.grid(visible=True, axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    stroke = Line2D([], [], linestyle="", marker="_", **_STROKE, label="formula")
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], stroke], frameon=False)
