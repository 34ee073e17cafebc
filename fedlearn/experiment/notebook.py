"""Shows runs in a notebook: one output of a cell, and tables in HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from fedlearn.core.words import replace_unprintable

#: Light in dark notebooks as well, because the curves have dark labels.
_BOX = "background: #ffffff; color: #222222; padding: 8px; display: inline-block"


class Cell:
    """One output of the current notebook cell, whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None  # Any: IPython's, which is there only in a notebook

    def show(self, content: Mapping[str, str]) -> None:
        """Show ``content``, which has the same by MIME type, in place of what was shown before."""
        if self._handle is not None:
            self._handle.update(content, raw=True)
            return
        notebook: Any = import_module("IPython.display")  # Any: only a notebook has it
        self._handle = notebook.display(content, raw=True, display_id=True)


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table of texts as HTML; an empty ``header`` makes the first cell of a row one.

    Example:
        >>> render_table([], [("run", "<b>")])
        '<table><tr><th>run</th><td style="text-align: left">&lt;b&gt;</td></tr></table>'
    """
    parts = ["<table>"]
    if header:
        parts += ["<tr>", *(f"<th>{_clean(each)}</th>" for each in header), "</tr>"]
    for first, *others in rows:
        parts.append(
            f"<tr>{f'<td>{_clean(first)}</td>' if header else f'<th>{_clean(first)}</th>'}"
        )
        style = "" if header else ' style="text-align: left"'
        parts += [*(f"<td{style}>{_clean(each)}</td>" for each in others), "</tr>"]
    return "".join([*parts, "</table>"])


def render_bar(num_finished: int, num_rounds: int, text: str) -> str:
    """Render a progress bar with a text as HTML."""
    bar = f'<progress value="{num_finished}" max="{num_rounds}"></progress>'
    return f"<div>{bar} {_clean(text)}</div>"


def render_box(title: str, *parts: str) -> str:
    """Render a title above parts that are HTML."""
    return f'<div style="{_BOX}"><div><b>{_clean(title)}</b></div>{"".join(parts)}</div>'


def render_notes(notes: Iterable[str]) -> str:
    """Render notes, one line each, as HTML."""
    return "".join(f"<div><small>{_clean(each)}</small></div>" for each in notes)


def _clean(text: str) -> str:
    return escape(replace_unprintable(text))
