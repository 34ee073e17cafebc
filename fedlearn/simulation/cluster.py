"""Worker processes that run one simulation together.

All run the same loop with the same seeds, and each trains its share of every cohort. One all-reduce
per round gives all of them the same aggregate, and so the same model. Workers of one machine sum
through shared memory. On Linux they are forked and share the examples. On macOS, a fork of a
process with threads crashes in system libraries, and Windows has no fork; there, workers are
spawned and everything they need is sent to them. Under ``torchrun`` the workers exist already, on
one machine or several, and sum through torch.distributed.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from pickle import PickleError
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.gpus import read_local_rank
from fedlearn.errors import EngineError
from fedlearn.parallel.group import world
from fedlearn.processes.forks import Link, exit_with_parent_process, run_forks
from fedlearn.simulation.shared_memory import SharedRows

ResultT = TypeVar("ResultT")

#: Timeout of an all-reduce. It is long because a slow worker is not an error.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, eq=False)
class SharingMemory:
    """A cluster of processes on one machine that sum through shared memory.

    Attributes:
        rank: Rank of this process; rank 0 started the others.
        links: Connections: from rank 0 to each other process, from another one to rank 0.
        rows: Two buffers for sums, used alternately. While a slow process still reads one, the
            next sum is written to the other.
    """

    rank: int
    links: Sequence[Link]
    rows: tuple[SharedRows, SharedRows]
    _turns: list[int] = field(default_factory=lambda: [0])

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.rows[0])

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all processes; each process sums a part of the elements."""
        # The buffers alternate, which saves a third barrier after read().
        self._turns[0] ^= 1
        shared = self.rows[self._turns[0]]
        shared.write(self.rank, tensors)
        self._meet()
        shared.add_up(self.rank)
        self._meet()
        shared.read(tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return rank 0's value, sent as a pickle; all processes belong to one user."""
        try:
            if self.rank == 0:
                for link in self.links:
                    link.send(value)
            else:
                value = self.links[0].recv()
        except (EOFError, OSError) as error:
            raise _build_lost_error(self.rank, error) from error
        assert value is not None  # rank 0 has one
        return value

    def _meet(self) -> None:
        """Wait until every process has reached this barrier."""
        try:
            if self.rank == 0:
                for link in self.links:
                    link.recv_bytes()
                for link in self.links:
                    link.send_bytes(b"")
            else:
                self.links[0].send_bytes(b"")
                self.links[0].recv_bytes()
        except (EOFError, OSError) as error:
            raise _build_lost_error(self.rank, error) from error


def _build_lost_error(rank: int, error: Exception) -> EngineError:
    return EngineError(
        f"worker {rank} lost another worker in the middle of a round ({error!r}); resume the run "
        "from its last commit with `fedlearn resume`"
    )


def launch(
    body: Callable[[Cluster], ResultT],
    *,
    num_workers: int,
    environment: Mapping[str, str],
    others: Callable[[Cluster], object] | None = None,
) -> ResultT:
    """Run a simulation in all worker processes; return the result of this process.

    Args:
        body: The simulation.
        num_workers: Number of processes on this machine, including this one. Ignored under
            torchrun, which has started them already.
        environment: Environment variables; ``RANK`` and ``WORLD_SIZE`` tell that torchrun started
            the processes.
        others: The function that the started processes run, in step with ``body``; ``None``:
            ``body`` itself. It is pickled if processes are not forked (:func:`can_fork`).

    Raises:
        EngineError: A worker failed or died, and the others were stopped; or a worker could not
            be started.
    """
    others = others or body
    with limit_to_one_thread():
        if read_torchrun_size(environment) is not None:
            return _join_torchrun(body, environment)
        if num_workers == 1:
            return body(Alone())
        start = _run_forked if can_fork() else _run_spawned
        return start(body, others, num_workers)


def can_fork() -> bool:
    """Return whether workers are forks of this process, and so share its memory."""
    return sys.platform == "linux"


def read_torchrun_size(environment: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun has started, or ``None`` without it."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def _join_torchrun(body: Callable[[Cluster], ResultT], environment: Mapping[str, str]) -> ResultT:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if read_local_rank(environment) < torch.cuda.device_count():  # else all compute on the CPU
            torch.cuda.set_device(read_local_rank(environment))
    dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        return body(world())
    finally:
        dist.destroy_process_group()


def _run_spawned(
    body: Callable[[Cluster], ResultT], others: Callable[[Cluster], object], num_workers: int
) -> ResultT:
    """Spawn the workers and run as rank 0; all workers are gone when this returns or raises."""
    context = get_context("spawn")
    processes, links = [], []
    with TemporaryDirectory(prefix="fedlearn-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(1, num_workers):
                link, other = context.Pipe()
                links.append(link)
                arguments = (others, rank, num_workers, other, Path(folder))
                processes.append(context.Process(target=_run_spawned_worker, args=arguments))
                _start(processes[-1])
                other.close()  # then only the worker has it, so its death closes the link
            for rank, each in enumerate(links, start=1):
                _await_ready(each, rank)
            rows = _share_rows(Path(folder), num_workers)
            try:
                return body(SharingMemory(0, links, rows))
            finally:
                for memory in rows:
                    memory.close()
        finally:
            for each in links:
                each.close()
            for process in processes:
                if process.pid is not None:
                    # Workers ignore SIGTERM.
                    process.kill()
                    process.join()


def _start(process: SpawnProcess) -> None:
    try:
        process.start()
    except (TypeError, AttributeError, PickleError) as error:
        raise EngineError(
            f"the simulation cannot be sent to its workers: {error}; define the functions and "
            "classes that you pass to it at the top of a module, or leave engine.num_workers out"
        ) from error


def _await_ready(link: Link, rank: int) -> None:
    try:
        link.recv_bytes()
    except (EOFError, OSError) as error:
        raise EngineError(
            f"worker {rank} did not start, and its output says why; on this system each worker "
            'imports the script, so run the simulation under `if __name__ == "__main__":`'
        ) from error


def _share_rows(folder: Path, num_workers: int) -> tuple[SharedRows, SharedRows]:
    return SharedRows(num_workers, folder / "even"), SharedRows(num_workers, folder / "odd")


def _run_spawned_worker(
    others: Callable[[Cluster], object],
    rank: int,
    num_workers: int,
    link: Link,
    folder: Path,
) -> NoReturn:
    torch.set_num_threads(1)
    # In the middle of a computation, a worker does not notice that its link was closed.
    threading.Thread(target=exit_with_parent_process, daemon=True).start()
    # Sent after the script was imported, so that rank 0 can tell a failed import from a lost
    # worker.
    link.send_bytes(b"ready")
    _work(others, lambda: SharingMemory(rank, [link], _share_rows(folder, num_workers)))


def _run_forked(
    body: Callable[[Cluster], ResultT], others: Callable[[Cluster], object], num_workers: int
) -> ResultT:
    """Fork the workers and run as rank 0; all workers are gone when this returns or raises."""
    rows = (SharedRows(num_workers), SharedRows(num_workers))
    bodies = [partial(_run_forked_worker, others, rank, rows) for rank in range(1, num_workers)]
    try:
        with run_forks(bodies) as workers:
            return body(SharingMemory(0, [each.link for each in workers], rows))
    finally:
        for each in rows:
            each.close()


def _run_forked_worker(
    others: Callable[[Cluster], object],
    rank: int,
    rows: tuple[SharedRows, SharedRows],
    link: Link,
) -> NoReturn:
    _work(others, lambda: SharingMemory(rank, [link], rows))


def _work(body: Callable[[Cluster], object], join: Callable[[], Cluster]) -> NoReturn:
    status = 1
    try:
        # Rank 0 handles these signals. A worker exits when rank 0 is gone.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        body(join())
        status = 0
    except EngineError:
        pass  # another process is gone, and has reported its own error
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Not sys.exit: a fork must not run the atexit handlers and finally blocks of rank 0.
        os._exit(status)


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Limit torch to one thread in the block.

    Small operations gain nothing from a second thread, which busy-waits and takes CPU time from
    other workers. Also, sums then do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
