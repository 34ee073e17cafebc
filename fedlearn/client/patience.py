"""Report to the application that the user's code takes long to return."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.core.own_lines import find_own_line

#: Seconds until the first report; each later one comes after twice the time.
_PATIENCE_S = 30.0


@contextmanager
def report_while_running(
    words: str, report: Callable[[AgentEvent], None], *, patience_s: float = _PATIENCE_S
) -> Iterator[None]:
    """Report this thread's position in the code while the block runs for long, ever less often.

    Args:
        words: What is still running, for the message.
        report: Called with each report, on another thread.
        patience_s: Seconds until the first report.
    """
    thread, is_over = threading.get_ident(), threading.Event()

    def watch() -> None:
        total_s = next_s = patience_s
        while not is_over.wait(next_s):
            place = find_own_line(sys._current_frames().get(thread))  # noqa: SLF001 - no other way
            message = f"{words} after {total_s:g} s, at {place}"
            report(AgentEvent(kind=EventKind.WAITING, message=message))
            next_s, total_s = total_s, 2 * total_s

    threading.Thread(target=watch, name="fedlearn-patience", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
