"""The processes that share a simulation.

Each runs the same run loop on the same seeds and trains its share of each cohort; one all-reduce
a round gives all of them the same aggregate, hence the same model. The workers of one machine add
up through shared memory. On Linux they are forked, and share the examples; on macOS, where forks of
a process that has threads crash in the system's libraries, and on Windows, which has no forks, they
are started anew and sent what they need. Under ``torchrun`` they exist already, on one machine or
many, and add up through torch.distributed.
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
from multiprocessing import get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from pickle import PickleError
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.gpus import local_rank
from fedlearn.errors import EngineError
from fedlearn.parallel.group import world
from fedlearn.processes.forks import Link, forked
from fedlearn.simulation.shared_memory import SharedRows

ResultT = TypeVar("ResultT")

#: Longest wait for another process in one all-reduce: a worker that is merely slow is no error.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, eq=False)
class SharingMemory:
    """Processes of one machine, started by the first.

    Attributes:
        rank: This process.
        links: Of rank 0 to each of the others, of another to rank 0.
        rows: Where they add up, by turns: a row may be read until its turn comes again.
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
        """Add the tensors up over all processes, each process a part of the elements."""
        self._turns[0] ^= 1
        shared = self.rows[self._turns[0]]
        shared.write(self.rank, tensors)
        self._meet()
        shared.add_up(self.rank)
        self._meet()
        shared.read(tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return rank 0's value; it travels pickled, among processes of one user."""
        try:
            if self.rank == 0:
                for link in self.links:
                    link.send(value)
            else:
                value = self.links[0].recv()
        except (EOFError, OSError) as error:
            raise _lost(self.rank, error) from error
        assert value is not None  # rank 0 has one
        return value

    def _meet(self) -> None:
        """Return once every process is here."""
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
            raise _lost(self.rank, error) from error


def _lost(rank: int, error: Exception) -> EngineError:
    return EngineError(
        f"worker {rank} lost another worker in the middle of a round ({error!r}); "
        "the run resumes from its last commit with `fedlearn resume`"
    )


def launch(
    body: Callable[[Cluster], ResultT],
    *,
    num_workers: int,
    environment: Mapping[str, str],
    others: Callable[[Cluster], object] | None = None,
) -> ResultT:
    """Run a simulation in every process and return what it returns in this one.

    Args:
        body: The simulation.
        num_workers: Processes to start on this machine, this one included; ignored under
            torchrun, which has started them already.
        environment: Says whether torchrun did (``RANK`` and ``WORLD_SIZE``).
        others: What processes that this one starts run in its place, in step with it; ``None``:
            the same. It travels pickled where processes are not forked (:func:`can_fork`).

    Raises:
        EngineError: A worker failed or died, and the others were stopped; or it cannot be started.
    """
    others = others or body
    with one_thread():
        if under_torchrun(environment) is not None:
            return _joined(body, environment)
        if num_workers == 1:
            return body(Alone())
        start = _forked if can_fork() else _spawned
        return start(body, others, num_workers)


def can_fork() -> bool:
    """Return whether workers are forks of this process, which share all that it has."""
    return sys.platform == "linux"


def under_torchrun(environment: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun has started, or ``None`` without it."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def _joined(body: Callable[[Cluster], ResultT], environment: Mapping[str, str]) -> ResultT:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if local_rank(environment) < torch.cuda.device_count():  # else all compute on the CPU
            torch.cuda.set_device(local_rank(environment))
    dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        return body(world())
    finally:
        dist.destroy_process_group()


def _spawned(
    body: Callable[[Cluster], ResultT], others: Callable[[Cluster], object], num_workers: int
) -> ResultT:
    """Start the workers anew, be rank 0, and leave none behind whatever happens."""
    context = get_context("spawn")
    processes, links = [], []
    with TemporaryDirectory(prefix="fedlearn-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(1, num_workers):
                link, other = context.Pipe()
                links.append(link)
                arguments = (others, rank, num_workers, other, Path(folder))
                processes.append(context.Process(target=_be_spawned, args=arguments))
                _start(processes[-1])
                other.close()  # only the worker has it, so its death ends the link
            for rank, each in enumerate(links, start=1):
                _await_ready(each, rank)
            rows = _rows_in(Path(folder), num_workers)
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
                    process.kill()
                    process.join()


def _start(process: SpawnProcess) -> None:
    try:
        process.start()
    except (TypeError, AttributeError, PickleError) as error:
        raise EngineError(
            f"what the workers need cannot be sent to them: {error}; define the functions and "
            "classes that the simulation is given at the top of a module, or leave "
            "engine.num_workers out"
        ) from error


def _await_ready(link: Link, rank: int) -> None:
    try:
        link.recv_bytes()
    except (EOFError, OSError) as error:
        raise EngineError(
            f"worker {rank} has not started, and its output says why; on this system a script runs "
            'its simulation under `if __name__ == "__main__":`, since each worker imports it'
        ) from error


def _rows_in(folder: Path, num_workers: int) -> tuple[SharedRows, SharedRows]:
    return SharedRows(num_workers, folder / "even"), SharedRows(num_workers, folder / "odd")


def _be_spawned(
    others: Callable[[Cluster], object],
    rank: int,
    num_workers: int,
    link: Link,
    folder: Path,
) -> NoReturn:
    """Run in a worker that was started anew."""
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent_process, daemon=True).start()
    link.send_bytes(b"ready")
    _work(others, lambda: SharingMemory(rank, [link], _rows_in(folder, num_workers)))


def _exit_with_parent_process() -> NoReturn:
    parent = parent_process()
    assert parent is not None  # rank 0
    parent.join()
    os._exit(1)


def _forked(
    body: Callable[[Cluster], ResultT], others: Callable[[Cluster], object], num_workers: int
) -> ResultT:
    """Fork the workers, be rank 0, and leave none behind whatever happens."""
    rows = (SharedRows(num_workers), SharedRows(num_workers))
    bodies = [partial(_be_forked, others, rank, rows) for rank in range(1, num_workers)]
    try:
        with forked(bodies) as workers:
            return body(SharingMemory(0, [each.link for each in workers], rows))
    finally:
        for each in rows:
            each.close()


def _be_forked(
    others: Callable[[Cluster], object],
    rank: int,
    rows: tuple[SharedRows, SharedRows],
    link: Link,
) -> NoReturn:
    """Run in a fork."""
    _work(others, lambda: SharingMemory(rank, [link], rows))


def _work(body: Callable[[Cluster], object], join: Callable[[], Cluster]) -> NoReturn:
    """Be a worker to the end of its process."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, the lifeline tells
            signal.signal(number, signal.SIG_IGN)
        body(join())
        status = 0
    except EngineError:
        pass  # the loss of another process, which speaks for itself
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread per process for a while.

    Small operations gain nothing from a second one, which spins and starves its neighbours; and
    sums then do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
