"""Where the user's code is: what an application is told when that fails, or does not come back."""

import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from fedlearn.client.events import AgentEvent, EventKind

#: Seconds that something may take before it is told; twice as long until the next time.
_PATIENCE_S = 30.0
#: What nobody looks for their mistake in: this package, and the standard library.
_NOT_THEIRS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen ")


def place_of(where: TracebackType | FrameType | None) -> str:
    """Return file, line and function of the user's innermost code, or of the innermost at all.

    Example:
        >>> place_of(None)
        'an unknown place'
    """
    if isinstance(where, FrameType):
        frames = traceback.extract_stack(where)
    else:
        frames = traceback.extract_tb(where)
    theirs = [each for each in frames if not each.filename.startswith(_NOT_THEIRS)]
    for each in reversed(theirs or frames):
        return f"{each.filename}:{each.lineno} in {each.name}"
    return "an unknown place"


@contextmanager
def told_while_it_lasts(
    words: str, tell: Callable[[AgentEvent], None], *, patience_s: float = _PATIENCE_S
) -> Iterator[None]:
    """Tell where this thread is if the block has not ended after ``patience_s``, and less and less.

    Args:
        words: What is waited for.
        tell: Called on another thread.
        patience_s: Seconds until the first time.
    """
    thread, is_over = threading.get_ident(), threading.Event()

    def watch() -> None:
        total_s = next_s = patience_s
        while not is_over.wait(next_s):
            place = place_of(sys._current_frames().get(thread))  # noqa: SLF001 - no other way
            message = f"{words} after {total_s:g} s, at {place}"
            tell(AgentEvent(kind=EventKind.WAITING, message=message))
            next_s, total_s = total_s, 2 * total_s

    threading.Thread(target=watch, name="fedlearn-patience", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
