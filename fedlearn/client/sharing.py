"""Create a client's trainer, with data-parallel worker processes if it has several."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from fedlearn.client.loading import make_trainer
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.process import WORKER, make_client_environment
from fedlearn.errors import DeploymentError
from fedlearn.parallel.shared_trainer import SharedTrainer
from fedlearn.parallel.workers import WorkerProcess, take_gpu
from fedlearn.training.trainer import LocalTrainer

#: Send a worker's prints to standard error, since they are not output of this process.
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The first message to a worker.

    Attributes:
        trainer: Name of the trainer, as in :class:`~fedlearn.client.options.RuntimeOptions`.
        rank: Rank of the worker, from 1; the client's main process has rank 0.
        num_threads: Threads that torch may use.
    """

    trainer: str
    rank: int
    num_threads: int


def make_client_trainer(options: RuntimeOptions) -> LocalTrainer | None:
    """Create the trainer that the options name, if they do, and its workers if there are several.

    Exceptions of the trainer propagate.

    Raises:
        DeploymentError: There is no such trainer, workers cannot share its training, or a worker
            did not start.
    """
    num_workers = options.resources.num_workers
    if options.trainer is None:
        if num_workers > 1:
            raise DeploymentError(
                f"{num_workers} workers need a trainer, and this client has none: name one with "
                "--task; a bundle runs in one process"
            )
        return None
    make = partial(make_trainer, options.trainer)
    if num_workers == 1:
        return make()
    take_gpu(0)
    return SharedTrainer(make, start=partial(_start_workers, options, options.trainer))


def _start_workers(options: RuntimeOptions, trainer: str) -> Sequence[WorkerProcess]:
    """Start all workers.

    Raises:
        OSError: The system is out of memory or processes.
    """
    with ExitStack() as if_failed:
        workers = list[WorkerProcess]()
        for rank in range(1, options.resources.num_workers):
            worker_options = WorkerOptions(
                trainer=trainer, rank=rank, num_threads=options.resources.num_threads
            )
            worker = WorkerProcess.start(WORKER, environ=make_client_environment(), stdout=_STDERR)
            if_failed.callback(worker.end)
            worker.link.send_bytes(json.dumps(asdict(worker_options)).encode())
            workers.append(worker)
        if_failed.pop_all()
    return workers
