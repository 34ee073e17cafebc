"""An event loop in its own thread, and how other threads reach it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs an asyncio event loop until it is stopped."""

    def __init__(self, name: str) -> None:
        # With its own factory, the runner does not set the event loop of the thread that creates
        # it.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the loop, after what was posted before; ignored once stopped."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the loop and return its result."""
        # On the loop's own thread this would wait for itself forever.
        return self.call(_call_async(function)).result()

    def call(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run ``coroutine`` on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        # On leaving, the runner cancels the tasks that are left, and closes the loop.
        with self._runner:
            self._loop.run_forever()


async def _call_async(function: Callable[[], T]) -> T:
    return function()
