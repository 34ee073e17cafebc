"""The processes beside the first one that share its trainings, and what is said to them.

Over a link of its own each is told whose file to meet the others through, and then of one training
after the other; it answers how that ended. When the link closes, the first process is gone or wants
no more, and so a worker ends, whatever it is at.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Self

import safetensors.torch
import structlog
import torch
from torch import Tensor

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import DeploymentError, FedlearnError, ProcessesParted
from fedlearn.parallel.group import Group, backend_for, joined
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.starting import start_linked
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalResult,
    TaskControl,
    TrainContext,
)
from fedlearn.transport.content import digest_of

#: Longest wait for another process in one sum: one that is merely slow is no error.
_TIMEOUT = timedelta(minutes=10)
#: Longest wait for processes that are there to meet.
_MEETING = timedelta(minutes=1)
#: Seconds that a worker has to answer once its training has ended, and a dead one to be buried.
_ANSWER_S = 60.0

#: Seconds between two looks whether the other end is closed, while a message waits to be read.
_LOOK_S = 0.1

#: What tensors of a training are for, before their names.
_PARTS = ("model", "state", "told", "saved")


@dataclass(frozen=True, eq=False)
class WorkerProcess:
    """One that was started.

    Attributes:
        process: It.
        link: To it: closed, it ends.
    """

    process: "subprocess.Popen[bytes]"
    link: Connection

    @classmethod
    def start(cls, module: str, *, environ: Mapping[str, str], stdout: int) -> Self:
        """Start a module of ours that takes its link by its last argument, a socket.

        Args:
            module: Its name.
            environ: Its environment, but for ``PYTHONPATH``.
            stdout: Where it prints, as for :class:`subprocess.Popen`.

        Raises:
            OSError: There is no memory or process left.
        """
        process, own = start_linked(module, environ=environ, python=sys.executable, stdout=stdout)
        assert process.stdin is not None  # a pipe
        process.stdin.close()
        link = Connection(own.detach())
        # A forked worker of a data loader that outlives this process must not keep it open.
        keep_from_forks(link)
        return cls(process, link)

    def end(self) -> None:
        """End it and return when it is gone; it has nothing to lose."""
        self.link.close()
        self.process.kill()
        self.process.wait()

    def ending(self) -> str:
        """Return in words how it has ended, or that it has not."""
        try:
            code = self.process.wait(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code < 0:
            return f"was ended by {Signals(-code).name}"
        return f"ended with exit code {code}, and its output says why"


@dataclass(frozen=True, eq=False)
class Workers:
    """Workers that have met: process 2 and those that follow, of which this is the first.

    Attributes:
        processes: They, in the order of their ranks from 1.
        group: Through which all add up.
    """

    processes: Sequence[WorkerProcess]
    group: Group

    @classmethod
    def meeting(cls, processes: Sequence[WorkerProcess], trainer: TorchTrainer) -> "Workers":
        """Return workers that have made trainers like this one.

        Raises:
            DeploymentError: One has ended, or its trainer is another.
        """
        ours, devices = trainer.plan(), {0: str(trainer.device)}
        for rank, worker in enumerate(processes, start=1):
            who = _who(rank, processes)
            try:
                said = json.loads(worker.link.recv_bytes())
            except (EOFError, OSError) as error:
                raise DeploymentError(f"{who} {worker.ending()}") from error
            if said["plan"] != ours:
                raise DeploymentError(
                    f"{who} has other examples, another model or other limits than the first: "
                    f"{said['plan']}, not {ours}; let the trainer be made alike in each process, "
                    "with the same examples in the same order: seed what divides them"
                )
            devices[rank] = said["device"]
        backend, world_size = backend_for(devices), len(processes) + 1
        with TemporaryDirectory(prefix="fedlearn-") as folder:
            file = Path(folder) / "met"
            for worker in processes:
                meeting = {"file": str(file), "backend": backend, "world_size": world_size}
                worker.link.send_bytes(json.dumps(meeting).encode())
            try:
                group = _met(trainer, file, backend=backend, rank=0, world_size=world_size)
            except ProcessesParted as error:
                raise DeploymentError(str(error)) from error
        return cls(processes, group)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        *,
        context: TrainContext,
        saved: Mapping[str, Tensor],
    ) -> None:
        """Have all workers begin a training.

        Args:
            tensors: The global model.
            context: What surrounds the training; its control is that of the first process alone.
            saved: What a restarted training continues from.

        Raises:
            ProcessesParted: One has ended.
        """
        head = json.dumps(
            {
                "client_id": context.client_id,
                "round_num": context.round_num,
                "settings": dict(context.settings),
                "extra": dict(context.extra),
                "seed": context.seed.value,
            }
        ).encode()
        given = zip(_PARTS, (tensors, context.state, context.told, saved), strict=True)
        body = safetensors.torch.save(
            {
                f"{part}/{name}": value.detach().cpu().contiguous()
                for part, values in given
                for name, value in values.items()
            }
        )
        for rank, worker in enumerate(self.processes, start=1):
            try:
                worker.link.send_bytes(head)
                worker.link.send_bytes(body)
            except OSError as error:
                raise ProcessesParted(f"{_who(rank, self.processes)} {worker.ending()}") from error

    def agree(self, result: LocalResult) -> None:
        """Return once all workers have come to the same result, to the bit.

        Raises:
            ProcessesParted: One has not.
        """
        ours, answers = _digest(result), [_answer(worker) for worker in self.processes]
        for rank, (worker, answer) in enumerate(zip(self.processes, answers, strict=True), start=1):
            if answer.get("digest") != ours:
                words = _words(answer, worker) or (
                    "has another model after the training; its steps must be functions of the "
                    "gradients and of context.seed alone, and its buffers no statistics of batches"
                )
                raise ProcessesParted(f"{_who(rank, self.processes)} {words}")

    def have_parted(self) -> bool:
        """Return whether all workers have ended a training that is called off, and wait."""
        return all(_answer(worker) for worker in self.processes)

    def culprit(self) -> str | None:
        """Return which worker has failed or ended, and how, if one has."""
        found = [(rank, _answer(each), each) for rank, each in enumerate(self.processes, start=1)]
        for rank, answer, worker in found:
            if (words := _words(answer, worker)) is not None:
                return f"{_who(rank, self.processes)} {words}"
        return None

    def end(self) -> None:
        """End all."""
        for worker in self.processes:
            worker.end()


@dataclass(frozen=True, eq=False)
class Resumed:
    """The control of a training, with what it continues from at hand.

    Attributes:
        control: What is asked otherwise.
        kept: What it continues from.
    """

    control: TaskControl
    kept: Mapping[str, Tensor]

    def check(self) -> None:
        """Ask the control."""
        self.control.check()

    def report(self, *, fraction: float, loss: float) -> None:
        """Tell the control."""
        self.control.report(fraction=fraction, loss=loss)

    def saved(self) -> Mapping[str, Tensor]:
        """Return what is at hand."""
        return self.kept

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the control keep it."""
        self.control.save(tensors)


def end_with(link: Connection) -> None:
    """End this process when the other end of its link, a socket, closes; on a thread."""
    watched = socket.fromfd(link.fileno(), socket.AF_INET, socket.SOCK_STREAM)  # a duplicate

    def wait() -> None:
        with suppress(OSError):  # it was killed
            while watched.recv(1, socket.MSG_PEEK):  # what is left for whoever reads the link
                SystemClock().sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=wait, name="fedlearn-watch", daemon=True).start()


def take_gpu(rank: int) -> None:
    """Compute on a GPU of this process's own, if there are so many; before a trainer is made."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def work(trainer: TorchTrainer, link: Connection, *, rank: int) -> None:
    """Share the trainings of the first process, until its link closes.

    What is no error of fedlearn's, such as one in reading the user's data, passes, after the other
    processes have heard of it.

    Args:
        trainer: Made as the first process's.
        link: To that.
        rank: Which process this is, from 1.

    Raises:
        EOFError: The link has closed.
        ProcessesParted: The processes did not meet.
    """
    with ExitStack() as at_end:
        at_end.callback(link.close)
        link.send_bytes(
            json.dumps({"plan": trainer.plan(), "device": str(trainer.device)}).encode()
        )
        told = json.loads(link.recv_bytes())
        file, world_size = Path(told["file"]), told["world_size"]
        group = _met(trainer, file, backend=told["backend"], rank=rank, world_size=world_size)
        while True:
            head, tensors = json.loads(link.recv_bytes()), _parted(link.recv_bytes())
            context = TrainContext(
                client_id=ClientId(head["client_id"]),
                round_num=head["round_num"],
                settings=head["settings"],
                extra=head["extra"],
                seed=Seed(head["seed"]),
                state=tensors["state"],
                told=tensors["told"],
                control=Resumed(UNATTENDED, tensors["saved"]),
            )
            answer = _trained(trainer, tensors["model"], context, group)
            link.send_bytes(json.dumps(answer).encode())


def _trained(
    trainer: TorchTrainer, model: Mapping[str, Tensor], context: TrainContext, group: Group
) -> dict[str, str]:
    try:
        return {"digest": _digest(trainer.train_with(group, model, context=context))}
    except ProcessesParted:
        return {"parted": "another process has left"}
    except FedlearnError as error:  # as in the first process, which then says so itself
        log = structlog.get_logger(__name__)
        log.warning("shared_training_failed", rank=group.rank, error=str(error))
        return {"failed": type(error).__name__}


def _met(trainer: TorchTrainer, file: Path, *, backend: str, rank: int, world_size: int) -> Group:
    """Return the group of the processes once all have come."""
    return joined(
        file,
        backend=backend,
        rank=rank,
        world_size=world_size,
        device=trainer.device,
        meeting=_MEETING,
        timeout=_TIMEOUT,
    )


def _parted(body: bytes) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a training by what they are for."""
    parts = {part: dict[str, Tensor]() for part in _PARTS}
    for name, value in safetensors.torch.load(body).items():
        part, _, own = name.partition("/")
        parts[part][own] = value
    return parts


def _digest(result: LocalResult) -> str:
    """Return what results of equal bits have in common."""
    values = [*result.tensors.values(), *result.state.values(), *result.lanes.values()]
    flat = [value.detach().cpu().flatten().view(torch.uint8) for value in values]
    return digest_of(torch.cat(flat).numpy().tobytes()).hex()


def _answer(worker: WorkerProcess) -> dict[str, str]:
    """Return how a worker's training ended; empty: it does not say."""
    with suppress(EOFError, OSError):
        if worker.link.poll(_ANSWER_S):
            answer: dict[str, str] = json.loads(worker.link.recv_bytes())
            return answer
    return {}


def _words(answer: Mapping[str, str], worker: WorkerProcess) -> str | None:
    """Return in words what a worker's answer says of it, unless there is nothing wrong with it."""
    if not answer:
        return worker.ending()
    return f"failed: {answer['failed']}; its output says why" if "failed" in answer else None


def _who(rank: int, processes: Sequence[WorkerProcess]) -> str:
    return f"process {rank + 1} of the {len(processes) + 1} that share this training"
