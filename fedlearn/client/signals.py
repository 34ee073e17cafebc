"""Handle signals in an event loop, on every operating system."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def call_on_signals(callbacks: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call functions in the running event loop when signals arrive; in the main thread only.

    Args:
        callbacks: The function to call for each signal.
    """
    # Not loop.add_signal_handler, which Windows lacks.
    loop = asyncio.get_running_loop()
    before = {
        # `call=call` binds the loop variable now. `call_soon` would not wake a loop that waits for
        # I/O.
        number: signal.signal(number, lambda *_, call=call: loop.call_soon_threadsafe(call))
        for number, call in callbacks.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
