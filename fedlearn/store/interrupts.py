"""Defer Ctrl-C and SIGTERM until a write to the database has ended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Call the handlers of SIGINT and SIGTERM after the block instead of inside it.

    A KeyboardInterrupt inside SQLAlchemy may leave a transaction that can be neither committed nor
    rolled back, with its lock held; inside a finalizer it is lost. A second signal of the same kind
    is handled at once, so that a user can leave a database that hangs.

    Works in the main thread only, where Python calls handlers; elsewhere it does nothing. Signals
    without a Python handler keep their default action, and ignored ones stay ignored.

    Example:
        >>> with defer_interrupts():
        ...     written = True
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _DEFERRED}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    deferred = dict[int, FrameType | None]()

    def note(number: int, frame: FrameType | None) -> None:
        # The second signal: the user does not want to wait.
        if number in deferred:
            handlers[signal.Signals(number)](number, frame)
        deferred[number] = frame

    try:
        for each in handlers:
            signal.signal(each, note)
        yield
    finally:
        # Restore all handlers before calling any: a handler usually raises.
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number, frame in deferred.items():
            handlers[signal.Signals(number)](number, frame)
