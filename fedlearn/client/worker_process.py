"""A process beside the client's own that shares its trainings; it ends with that one.

Its argument is the number of a socket, over which it is told what to do.
"""

import json
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

import structlog
import torch

from fedlearn.client.loading import make_trainer
from fedlearn.client.sharing import WorkerOptions
from fedlearn.parallel.worker import end
from fedlearn.parallel.workers import end_with, take_gpu, work
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.links import take_link
from fedlearn.training.torch_trainer import TorchTrainer


def main() -> NoReturn:
    """Share the trainings of one client until it wants no more or is gone."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # It ends with the client's process, which may still need it when all are told to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    link = Connection(take_link(sys.argv[1]).detach())
    keep_from_forks(link)
    end_with(link)
    try:
        options = WorkerOptions(**json.loads(link.recv_bytes()))
        torch.set_num_threads(options.num_threads)
        take_gpu(options.rank)
        trainer = make_trainer(options.trainer)
        # The client refuses what is none: see :func:`fedlearn.parallel.shared_trainer`.
        if isinstance(trainer, TorchTrainer):
            work(trainer, link, rank=options.rank)
    except EOFError:  # its client has gone, or ends it
        end()
    except Exception:  # noqa: BLE001 - of the user's code, and this is the end
        traceback.print_exc()
        end(1)
    end()


if __name__ == "__main__":
    main()
