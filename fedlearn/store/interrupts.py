"""Ctrl-C and SIGTERM wait until a write to the database has ended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Call the handlers of SIGINT and SIGTERM when the block has ended, not within it.

    A KeyboardInterrupt inside SQLAlchemy may leave a transaction that can be neither committed nor
    rolled back, and its lock held; in a finalizer it is lost. The second signal of a kind does not
    wait: a database that hangs can be left.

    In the main thread only, where Python calls handlers. A signal that ends the process without a
    handler still does, and one that is ignored still is.

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
        if number in deferred:
            handlers[signal.Signals(number)](number, frame)
        deferred[number] = frame

    try:
        for each in handlers:
            signal.signal(each, note)
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number, frame in deferred.items():
            handlers[signal.Signals(number)](number, frame)
