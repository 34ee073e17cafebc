"""An event loop in a thread of its own, and how other threads reach it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs an asyncio event loop until it is stopped.

    Example:
        >>> loop = LoopThread("example")
        >>> loop.ask(lambda: 2 + 3)
        5
        >>> loop.stop()
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], object]) -> None:
        """Have the loop call ``function`` soon, after what was posted before.

        Nothing happens once the loop has been stopped.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the loop."""
        if threading.current_thread() is self._thread:
            return function()
        return self.call(_returned(function)).result()

    def call(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run ``coroutine`` on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            remaining = asyncio.all_tasks(self._loop)
            for task in remaining:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


async def _returned(function: Callable[[], T]) -> T:
    return function()
