"""Finds the line of your own code that caused an error, or that a thread has reached.

Your own code is neither part of fedlearn nor installed: scripts, notebook cells, and projects
installed in editable mode. The standard library and everything in a ``site-packages`` folder are
libraries.
"""

import sysconfig
import traceback
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_FEDLEARN = Path(__file__).resolve().parents[1]
_STANDARD = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
#: Folders of installed packages in any environment; the second name is Debian's.
_INSTALLED = {"site-packages", "dist-packages"}
#: Beginnings of the file names of notebook cells and interactive lines.
_TYPED = ("<ipython-input", "<python-input", "<stdin", "<console>")


class _Owner(IntEnum):
    """The owner of a line of code; the higher, the more likely you can fix the error there."""

    FEDLEARN = 0
    LIBRARY = 1
    OWN = 2


class _Line(NamedTuple):
    owner: _Owner
    place: str


def find_own_line(where: BaseException | FrameType | None) -> str | None:
    """Return file, line and function of the innermost line of your own code.

    If there is none, the innermost line of a library, else of fedlearn, else ``None``.

    For an error that your code did not raise itself, the search continues with its cause
    (``raise ... from``), and with the errors in its group, the first one foremost.

    Args:
        where: A raised error, or the innermost frame of a thread.

    Example:
        >>> find_own_line(ValueError("never raised")) is None
        True
    """
    lines = _read_thread(where) if isinstance(where, FrameType) else _read_traceback(where, set())
    # max returns the first of equals, so the innermost line of the best owner.
    innermost = max(reversed(lines), key=lambda line: line.owner, default=None)
    return None if innermost is None else innermost.place


def describe_error(error: BaseException) -> str:
    """Return an error's origin, type and message. Do not send it anywhere: it may contain data.

    Example:
        >>> describe_error(KeyError("PART"))
        "KeyError: 'PART'"
    """
    words = f"{type(error).__name__}: {error}".removesuffix(": ")
    place = find_own_line(error)
    return words if place is None else f"{place}: {words}"


def _read_thread(frame: FrameType) -> list[_Line]:
    return list(_classify_frames(traceback.walk_stack(frame)))[::-1]


def _read_traceback(error: BaseException | None, seen: set[int]) -> list[_Line]:
    """Return the lines of an error's traceback, outermost first; none of errors in ``seen``."""
    if error is None or id(error) in seen:  # `raise error from error` is possible
        return []
    seen.add(id(error))
    lines = list(_classify_frames(traceback.walk_tb(error.__traceback__)))
    if isinstance(error, SyntaxError) and error.filename:  # that line is in no frame
        lines += _classify(error.filename, f"{error.filename}:{error.lineno}")
    if lines and lines[-1].owner is _Owner.OWN:
        return lines
    members = error.exceptions[::-1] if isinstance(error, BaseExceptionGroup) else ()
    for inner in (error.__cause__, *members):
        lines += _read_traceback(inner, seen)
    return lines


def _classify_frames(walk: Iterator[tuple[FrameType, int]]) -> Iterator[_Line]:
    for frame, number in walk:
        filename, function = frame.f_code.co_filename, frame.f_code.co_name
        place = f"{filename}:{number}, in {function}"
        # Code of `python -c`. Generated methods of dataclasses have the same file name, but their
        # module has a __file__.
        if filename == "<string>" and "__file__" not in frame.f_globals:
            yield _Line(_Owner.OWN, place)
        else:
            yield from _classify(filename, place)


def _classify(filename: str, place: str) -> list[_Line]:
    """Return a line with its owner; empty for generated code and the import system."""
    if filename.startswith(_TYPED):
        return [_Line(_Owner.OWN, place)]
    if filename.startswith("<"):
        return []
    # Some tools link packages into site-packages, so check the path as imported, too.
    paths = {Path(filename), Path(filename).resolve()}
    if any(path.is_relative_to(_FEDLEARN) for path in paths):
        return [_Line(_Owner.FEDLEARN, place)]
    if any(_is_library(path) for path in paths):
        return [_Line(_Owner.LIBRARY, place)]
    return [_Line(_Owner.OWN, place)]


def _is_library(path: Path) -> bool:
    is_installed = not _INSTALLED.isdisjoint(part.lower() for part in path.parts)
    return is_installed or any(path.is_relative_to(folder) for folder in _STANDARD)
