"""A data-parallel worker of the client's training process, with which it ends.

Its command-line argument identifies the socket over which it receives work.
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
    """Share one client's training until the client stops this worker or is gone."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Ignore signals sent to the whole group: the client's process may still need this worker while
    # it shuts down, and the worker ends with it.
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
        # The client rejects any other trainer: see :mod:`fedlearn.parallel.shared_trainer`.
        if isinstance(trainer, TorchTrainer):
            work(trainer, link, rank=options.rank)
    except EOFError:  # the client is gone, or is closing the connection
        end()
    except Exception:  # noqa: BLE001 - raised by the user's code, and this process ends here
        traceback.print_exc()
        end(1)
    end()


if __name__ == "__main__":
    main()
