"""The trainer of a client: alone, or with processes beside it that share its trainings."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from fedlearn.client.loading import make_trainer
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.process import WORKER, client_environment
from fedlearn.parallel.shared_trainer import SharedTrainer
from fedlearn.parallel.workers import WorkerProcess, take_gpu
from fedlearn.training.trainer import LocalTrainer

#: What a worker prints is no output of this process's.
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker is told first.

    Attributes:
        trainer: As in :class:`~fedlearn.client.options.RuntimeOptions`.
        rank: Which process it is, from 1; the client's own is 0.
        num_threads: Threads that torch may use.
    """

    trainer: str
    rank: int
    num_threads: int


def trainer_of(options: RuntimeOptions) -> LocalTrainer:
    """Return the trainer that a client's options name, with its workers if it has some.

    Raises:
        DeploymentError: There is no such trainer, its trainings cannot be shared, or a worker did
            not start; the trainer's own errors pass.
    """
    make = partial(make_trainer, options.trainer)
    if options.resources.num_workers == 1:
        return make()
    take_gpu(0)
    return SharedTrainer(make, start=partial(_started, options))


def _started(options: RuntimeOptions) -> Sequence[WorkerProcess]:
    """Start all workers.

    Raises:
        OSError: There is no memory or process left.
    """
    with ExitStack() as if_failed:
        workers = list[WorkerProcess]()
        for rank in range(1, options.resources.num_workers):
            told = WorkerOptions(
                trainer=options.trainer, rank=rank, num_threads=options.resources.num_threads
            )
            worker = WorkerProcess.start(WORKER, environ=client_environment(), stdout=_STDERR)
            if_failed.callback(worker.end)
            worker.link.send_bytes(json.dumps(asdict(told)).encode())
            workers.append(worker)
        if_failed.pop_all()
    return workers
