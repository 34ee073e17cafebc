"""Run tasks in a pool of new processes, where the death of one costs only the task it was on.

:class:`concurrent.futures.ProcessPoolExecutor` fails all tasks at work when one process dies. Here
each process has its own connection, so it is known whose task is lost. That task runs again.
"""

import pickle
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pickle import PickleError
from types import FrameType
from typing import Generic, NoReturn, TypeVar, cast

from fedlearn.errors import EngineError
from fedlearn.processes.forks import Link, exit_with_parent_process, keep_from_forks

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

#: How often a task is started before it counts as the reason why its processes die.
_ATTEMPTS = 2
#: How long a process may take to end its task when it is interrupted.
_GRACE_S = 15.0
#: How many processes may be killed before their first task.
_EARLY_DEATHS = 3


class WorkerDied(EngineError):
    """The process that worked on a task died, each time that it was started."""


def run_in_pool(
    function: Callable[[TaskT], ResultT],
    tasks: Sequence[TaskT],
    *,
    prepare: Sequence[Callable[[], object]],
) -> Generator[tuple[int, ResultT | WorkerDied]]:
    """Run ``function`` on each task, in one new process for each of ``prepare``.

    A process is started once and works on one task after another. All have ended when the iterator
    is exhausted or closed, and all end with this process, however it ends. SIGTERM, which closing
    the iterator sends them, raises KeyboardInterrupt in ``function``; Ctrl-C is left to this
    process.

    Args:
        function: Called in another process, so it is pickled. It must not raise.
        tasks: Pickled as well.
        prepare: Each is called in its process before the first task.

    Yields:
        The place of each task and its result, in the order in which they end. A task whose process
        dies runs again once, and then gives a WorkerDied.

    Raises:
        EngineError: A process cannot be started, or what it needs cannot be pickled.
    """
    waiting, attempts = deque(enumerate(tasks)), Counter[int]()
    free, workers = deque(prepare), dict[Link, _Worker[TaskT, ResultT]]()
    num_killed_early = 0
    try:
        while waiting or workers:
            num_starting = sum(each.task is None for each in workers.values())
            for _ in range(min(len(free), len(waiting) - num_starting)):
                worker = _start(function, free.popleft())
                workers[worker.link] = worker
            for link in cast(list[Link], wait(list(workers))):
                worker = workers.pop(link)
                ended, results = worker.receive()
                if results is not None and waiting:
                    workers[link] = worker
                    attempts[waiting[0][0]] += 1
                    worker.give(waiting.popleft())
                else:
                    free.append(worker.prepare)
                    worker.end()
                if results is not None:
                    yield from results
                elif ended is None:
                    num_killed_early += 1
                    worker.require_killed(num_killed_early)
                elif attempts[ended[0]] < _ATTEMPTS:
                    waiting.appendleft(ended)
                else:
                    yield ended[0], WorkerDied(f"its process {worker.describe_end()}")
    finally:
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.end()


@dataclass(eq=False)
class _Worker(Generic[TaskT, ResultT]):
    """A process of the pool; ``task`` is the one that it works on, with its place."""

    process: SpawnProcess
    link: Link
    prepare: Callable[[], object]
    task: tuple[int, TaskT] | None = None

    def give(self, task: tuple[int, TaskT]) -> None:
        """Send a task."""
        self.task = task
        try:
            self.link.send(task[1])
        except OSError:
            return  # it has died, and the next look at the link finds that
        except (TypeError, AttributeError, PickleError) as error:
            raise _explain_pickling(error) from error

    def receive(
        self,
    ) -> tuple[tuple[int, TaskT] | None, list[tuple[int, ResultT | WorkerDied]] | None]:
        """Return the task that has ended, with its result; ``None`` for it if the process died.

        A process that is ready for its first task has no task and no result.
        """
        ended, self.task = self.task, None
        try:
            results: list[ResultT] = self.link.recv()
        except (EOFError, OSError):
            return ended, None
        return ended, [(ended[0], each) for each in results if ended is not None]

    def end(self) -> None:
        """End the process, if it has not ended: it gets some time to record where it was."""
        self.link.close()
        self.process.terminate()
        self.process.join(_GRACE_S)
        self.process.kill()
        self.process.join()

    def describe_end(self) -> str:
        """Say how the process ended."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return (
                f"was killed by signal {-code}, as the system does when memory is short: use fewer "
                "jobs, or less memory a run"
            )
        return f"ended with exit code {code}; its output says why"

    def require_killed(self, num_killed: int) -> None:
        """Refuse to start another process if this one ended by itself before its first task.

        Raises:
            EngineError: It did, or too many were killed.
        """
        code = self.process.exitcode
        if code is None or code >= 0 or num_killed > _EARLY_DEATHS:
            raise EngineError(
                f"a process of the pool did not start: it {self.describe_end()}. Each one imports "
                'the script, so run it under `if __name__ == "__main__":`, and define what you '
                "pass in a file; with one job no other process is needed"
            )


def _start(
    function: Callable[[TaskT], ResultT], prepare: Callable[[], object]
) -> _Worker[TaskT, ResultT]:
    context = get_context("spawn")
    link, other = context.Pipe()
    keep_from_forks(link)
    try:
        # As bytes, which are unpickled, and modules imported, when the process already watches
        # whether this one is alive.
        sent = ForkingPickler.dumps((function, prepare))
        process = context.Process(target=_work, args=(bytes(sent), other))
        process.start()
    except (TypeError, AttributeError, PickleError) as error:
        raise _explain_pickling(error) from error
    finally:
        other.close()  # then only the worker has it, so its death closes the link
    return _Worker(process, link, prepare)


def _explain_pickling(error: Exception) -> EngineError:
    return EngineError(
        f"a process of the pool cannot be sent what it needs: {error}; define functions and "
        "classes at the top of a module, or use one job, which needs no other process"
    )


def _work(sent: bytes, link: Link) -> None:
    """Work on the tasks of the pool until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    keep_from_forks(link)
    # In the middle of a task, a closed link would not be noticed.
    threading.Thread(target=exit_with_parent_process, daemon=True).start()
    with suppress(KeyboardInterrupt, EOFError, OSError):
        function, prepare = pickle.loads(sent)  # noqa: S301 (from the process that started this)
        prepare()
        results = list[object]()
        while True:
            link.send(results)
            results = [function(link.recv())]
    # It would interrupt what libraries have left to do at exit, such as a tracker's upload.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the shutdown
    raise KeyboardInterrupt
