"""Lays out the text output of all commands: tables, and labeled facts."""

from collections.abc import Iterable, Sequence
from textwrap import fill

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2  # between columns
_LEAST_CHARACTERS = 6  # of a cell that is truncated
_BOUNDLESS = 10**6
_LEAST_FACT_CHARACTERS = 20
#: Labels of facts that users copy, which are never wrapped.
_UNBROKEN = ("path", "next")


def table_text(
    rows: Sequence[Sequence[str]], *, values_right: bool = False, width: int | None = None
) -> str:
    """Format rows as aligned columns without borders; the first row is the header.

    With ``values_right`` all columns but the first are aligned to the right. With a ``width``, the
    widest columns after the first are truncated until a line fits.

    Example:
        >>> print(table_text([("id", "name"), ("17", "clinic-a")]))
        id  name
        17  clinic-a
        >>> print(table_text([("id", "name"), ("17", "clinic-a")], width=10))
        id  name
        17  clini…
    """
    grid, cells, least = Table.grid(padding=(0, 0, 0, _GAP), pad_edge=False), [], -_GAP
    for place, column in enumerate(zip(*rows, strict=True)):
        whole = max(map(cell_len, column))
        # rich narrows the widest column first, but only among columns that may wrap. No cell wraps,
        # since the texts below have no_wrap.
        grid.add_column(justify="right" if place and values_right else "left", no_wrap=not place)
        # One cell per column, with a line per row: with a cell per value rich takes four times as
        # long.
        cells.append(Text("\n".join(column), no_wrap=True, overflow="ellipsis"))
        least += _GAP + (min(whole, _LEAST_CHARACTERS) if place else whole)
    grid.add_row(*cells)
    # Fixed settings, so that neither the terminal nor the environment changes the output.
    console = Console(width=_BOUNDLESS, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(grid, width=None if width is None else max(width, least))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def facts_text(labeled: Iterable[tuple[str, str]], *, width: int | None = None) -> str:
    """Format labeled texts, one a line, wrapped between words to ``width`` columns.

    Empty texts are left out. Paths and commands are never wrapped.

    Example:
        >>> print(facts_text([("clip", "norm 1"), ("delta", "1e-05"), ("error", "")]))
         clip  norm 1
        delta  1e-05
    """
    shown = [(label, text) for label, text in labeled if text]
    longest = max(len(label) for label, _ in shown)
    return "\n".join(_fact(f"{label:>{longest}}  ", text, width) for label, text in shown)


def _fact(label: str, text: str, width: int | None) -> str:
    if width is None or label.strip() in _UNBROKEN:
        return f"{label}{text}"
    return fill(
        text,
        width=max(width, len(label) + _LEAST_FACT_CHARACTERS),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
