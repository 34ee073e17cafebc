"""Another process with a trainer like the client's own, which works on one task at a time.

Training may use what a process has only once, such as torch's random generator. So tasks that are
worked on at the same time have a process each: see :mod:`fedlearn.client.trainers`.

Its command-line argument identifies the socket to the training process, with which it ends. It
receives the client's options, and then tasks.
"""

import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from fedlearn.client.child import configure_client_logs
from fedlearn.client.control import WorkControl
from fedlearn.client.loading import find_modules_here, make_trainer
from fedlearn.client.options import OPTIONS
from fedlearn.client.task_folder import TaskFolder
from fedlearn.client.trainers import SpareTask
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import map_file
from fedlearn.errors import Cancelled
from fedlearn.parallel.worker import end
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.links import take_link
from fedlearn.session.session import ClientSession
from fedlearn.training.trainer import LocalTrainer


def main() -> NoReturn:
    """Serve one training process until it closes the socket."""
    # The training process may need this one while it shuts down, and ends it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    link = Connection(take_link(sys.argv[1]).detach())
    keep_from_forks(link)
    try:
        options = OPTIONS.validate_json(link.recv_bytes())
        configure_client_logs(options)
        torch.set_num_threads(options.resources.num_threads)
        if options.is_command:
            find_modules_here()
        assert options.trainer is not None  # the training process has one
        _TaskServer(link).serve(make_trainer(options.trainer))
    except EOFError:
        end()
    except Exception:  # noqa: BLE001 - raised by the user's code, and this process ends here
        traceback.print_exc()
        end(1)
    end()


class _TaskServer:
    """Works on tasks in this thread; another one receives them, and cancels the present one."""

    def __init__(self, link: Connection) -> None:
        self._link, self._lock = link, threading.Lock()
        self._tasks = queue.SimpleQueue[tuple[SpareTask, WorkControl]]()
        self._latest: WorkControl | None = None

    def serve(self, trainer: LocalTrainer) -> None:
        """Answer tasks forever."""
        threading.Thread(target=self._listen, name="fedlearn-link", daemon=True).start()
        while True:
            task, control = self._tasks.get()
            try:
                self._send("done", self._work(trainer, task, control))
            except Cancelled:
                self._send("cancelled", None)

    def _work(
        self, trainer: LocalTrainer, task: SpareTask, control: WorkControl
    ) -> tuple[bytes, bytes]:
        session = ClientSession(
            task.client_id, trainer, on_failure=lambda words: self._send("failure", words)
        )
        return session.handle(
            TaskFolder(task.folder).request.read_bytes(),
            task.state,
            personal=task.personal,
            constants=b"" if task.constants is None else map_file(task.constants),
            control=control,
        )

    def _send(self, what: str, value: object) -> None:
        with self._lock:
            self._link.send((what, value))

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                match self._link.recv():
                    case SpareTask() as task:
                        self._latest = WorkControl(
                            TaskFolder(task.folder),
                            SystemClock(),
                            on_report=lambda fraction, loss: self._send(
                                "report", (float(fraction), float(loss))
                            ),
                        )
                        self._tasks.put((task, self._latest))
                    case "cancel" if self._latest is not None:
                        self._latest.cancel()
        end()


if __name__ == "__main__":
    main()
