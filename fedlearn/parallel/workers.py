"""Worker processes that share the first process's trainings, and the protocol between them.

Each worker has a link to the first process. It sends a fingerprint of its trainer, receives the
rendezvous file of the group, and then one training after another, and answers each with its
outcome. The link closes when the first process dies or needs no more workers; a worker then exits,
even in the middle of a training.
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
from fedlearn.parallel.group import Group, choose_backend, join_group
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.starting import start_linked
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalResult,
    TaskControl,
    TrainContext,
)
from fedlearn.transport.content import compute_digest

#: Longest wait for another process in one sum; being slow is no error.
_TIMEOUT = timedelta(minutes=10)
#: Longest wait for processes that have started to join the group.
_MEETING = timedelta(minutes=1)
#: Longest wait, in seconds, for a worker's answer after a training, or for its exit code.
_ANSWER_S = 60.0

#: Seconds between two checks for a closed link, while a message waits to be read.
_LOOK_S = 0.1

#: Purposes of the tensors that are sent for a training, which are prefixes of their names.
_PARTS = ("model", "state", "broadcast", "saved")


@dataclass(frozen=True, eq=False)
class WorkerProcess:
    """A worker, as the first process sees it.

    Attributes:
        process: The process.
        link: Connection to the worker, which exits when it closes.
    """

    process: "subprocess.Popen[bytes]"
    link: Connection

    @classmethod
    def start(cls, module: str, *, environ: Mapping[str, str], stdout: int) -> Self:
        """Start a worker from one of fedlearn's modules, whose last argument is its link.

        Args:
            module: Dotted name of the module.
            environ: Its environment; ``PYTHONPATH`` is overwritten.
            stdout: Standard output, as for :class:`subprocess.Popen`.

        Raises:
            OSError: The system is out of memory or processes.
        """
        process, own = start_linked(module, environ=environ, python=sys.executable, stdout=stdout)
        assert process.stdin is not None  # a pipe
        process.stdin.close()
        link = Connection(own.detach())
        # A forked worker of a data loader that outlives this process must not keep it open.
        keep_from_forks(link)
        return cls(process, link)

    def end(self) -> None:
        """Kill the process and wait until it is gone; it has no state to save."""
        self.link.close()
        self.process.kill()
        self.process.wait()

    def ending(self) -> str:
        """Describe for a message how the process ended, or that it does not answer."""
        try:
            code = self.process.wait(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code < 0:
            return f"was killed by {Signals(-code).name}"
        return f"ended with exit code {code}, and its output says why"


@dataclass(frozen=True, eq=False)
class Workers:
    """The workers of a shared trainer, joined in a group with this process, which has rank 0.

    Attributes:
        processes: The workers, in the order of their ranks from 1.
        group: The group of all processes, this one included.
    """

    processes: Sequence[WorkerProcess]
    group: Group

    @classmethod
    def meeting(cls, processes: Sequence[WorkerProcess], trainer: TorchTrainer) -> "Workers":
        """Check that all workers have trainers like this one, and join them in a group.

        Raises:
            DeploymentError: A worker has exited, has a different trainer, or did not join.
        """
        ours, devices = trainer.plan(), {0: str(trainer.device)}
        for rank, worker in enumerate(processes, start=1):
            who = _name_worker(rank, processes)
            try:
                # Sent once the worker has built its trainer, so this also waits for that.
                said = json.loads(worker.link.recv_bytes())
            except (EOFError, OSError) as error:
                raise DeploymentError(f"{who} {worker.ending()}") from error
            if said["plan"] != ours:
                raise DeploymentError(
                    f"{who} has different examples, a different model or different limits than "
                    f"the first: {said['plan']}, not {ours}; build the same trainer in each "
                    "process, with the same examples in the same order: seed their split"
                )
            devices[rank] = said["device"]
        backend, world_size = choose_backend(devices), len(processes) + 1
        with TemporaryDirectory(prefix="fedlearn-") as folder:
            file = Path(folder) / "met"
            for worker in processes:
                meeting = {"file": str(file), "backend": backend, "world_size": world_size}
                worker.link.send_bytes(json.dumps(meeting).encode())
            try:
                # The folder may go afterwards: all have joined when this returns.
                group = _join_group(trainer, file, backend=backend, rank=0, world_size=world_size)
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
        """Start a training in all workers.

        Args:
            tensors: The global model.
            context: The training's context; its control is not sent, and remains this process's.
            saved: Checkpoint from which the training resumes, if any.

        Raises:
            ProcessesParted: A worker has exited.
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
        given = zip(_PARTS, (tensors, context.state, context.broadcast, saved), strict=True)
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
                raise ProcessesParted(
                    f"{_name_worker(rank, self.processes)} {worker.ending()}"
                ) from error

    def agree(self, result: LocalResult) -> None:
        """Wait for all workers, and check that their results have the same bits as this one.

        Raises:
            ProcessesParted: A worker has a different result, or has failed or exited.
        """
        # Take every answer, even after a bad one: one left in its link would answer the next
        # training.
        ours, answers = _digest(result), [_answer(worker) for worker in self.processes]
        for rank, (worker, answer) in enumerate(zip(self.processes, answers, strict=True), start=1):
            if answer.get("digest") != ours:
                words = _describe_answer(answer, worker) or (
                    "has a different model after the training; its steps must depend only on the "
                    "gradients and on context.seed, and its buffers must not hold batch statistics"
                )
                raise ProcessesParted(f"{_name_worker(rank, self.processes)} {words}")

    def wait_until_ready(self) -> bool:
        """Tell whether all workers have ended a cancelled training, and are ready for the next."""
        return all(_answer(worker) for worker in self.processes)

    def culprit(self) -> str | None:
        """Name the first worker that has failed or exited, and say how; ``None`` if none has."""
        found = [(rank, _answer(each), each) for rank, each in enumerate(self.processes, start=1)]
        for rank, answer, worker in found:
            if (words := _describe_answer(answer, worker)) is not None:
                return f"{_name_worker(rank, self.processes)} {words}"
        return None

    def end(self) -> None:
        """Kill all workers."""
        for worker in self.processes:
            worker.end()


@dataclass(frozen=True, eq=False)
class ResumeControl:
    """A task control with a given checkpoint, so that all processes resume from the same one.

    Attributes:
        control: The control that handles everything else.
        checkpoint: The checkpoint.
    """

    control: TaskControl
    checkpoint: Mapping[str, Tensor]

    def check(self) -> None:
        """Check the other control."""
        self.control.check()

    def report(self, *, fraction: float, loss: float) -> None:
        """Report to the other control."""
        self.control.report(fraction=fraction, loss=loss)

    def load(self) -> Mapping[str, Tensor]:
        """Return the checkpoint."""
        return self.checkpoint

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Save through the other control."""
        self.control.save(tensors)


def end_with(link: Connection) -> None:
    """Exit this process when the other end of its link, a socket, closes; watched on a thread."""
    watched = socket.fromfd(link.fileno(), socket.AF_INET, socket.SOCK_STREAM)  # a duplicate

    # MSG_PEEK leaves the data to the link's reader; only the end of the stream matters here.
    def wait() -> None:
        with suppress(OSError):  # the other process was killed
            while watched.recv(1, socket.MSG_PEEK):  # peek: the data is for the link's reader
                SystemClock().sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=wait, name="fedlearn-watch", daemon=True).start()


def take_gpu(rank: int) -> None:
    """Select this rank's GPU before a trainer is created; ranks share GPUs if there are too few."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def work(trainer: TorchTrainer, link: Connection, *, rank: int) -> None:
    """Run a worker: share the trainings of the first process until the link closes.

    Errors other than fedlearn's, such as one in reading the data, are propagated after the
    link has been closed, by which the first process learns of them.

    Args:
        trainer: This worker's trainer, created like that of the first process.
        link: Connection to the first process.
        rank: Rank of this process, from 1.

    Raises:
        EOFError: The link has closed.
        ProcessesParted: The processes did not join in time.
    """
    with ExitStack() as at_end:
        at_end.callback(link.close)
        link.send_bytes(
            json.dumps({"plan": trainer.plan(), "device": str(trainer.device)}).encode()
        )
        start = json.loads(link.recv_bytes())
        file, world_size = Path(start["file"]), start["world_size"]
        group = _join_group(
            trainer, file, backend=start["backend"], rank=rank, world_size=world_size
        )
        while True:
            head, tensors = json.loads(link.recv_bytes()), _split_by_purpose(link.recv_bytes())
            context = TrainContext(
                client_id=ClientId(head["client_id"]),
                round_num=head["round_num"],
                settings=head["settings"],
                extra=head["extra"],
                seed=Seed(head["seed"]),
                state=tensors["state"],
                broadcast=tensors["broadcast"],
                control=ResumeControl(UNATTENDED, tensors["saved"]),
            )
            answer = _train(trainer, tensors["model"], context, group)
            link.send_bytes(json.dumps(answer).encode())


def _train(
    trainer: TorchTrainer, model: Mapping[str, Tensor], context: TrainContext, group: Group
) -> dict[str, str]:
    try:
        return {"digest": _digest(trainer.train_with(group, model, context=context))}
    except ProcessesParted:
        return {"parted": "another process has left"}
    except FedlearnError as error:  # the first process has the same error, and raises it
        log = structlog.get_logger(__name__)
        log.warning("shared_training_failed", rank=group.rank, error=str(error))
        return {"failed": type(error).__name__}


def _join_group(
    trainer: TorchTrainer, file: Path, *, backend: str, rank: int, world_size: int
) -> Group:
    return join_group(
        file,
        backend=backend,
        rank=rank,
        world_size=world_size,
        device=trainer.device,
        meeting=_MEETING,
        timeout=_TIMEOUT,
    )


def _split_by_purpose(body: bytes) -> dict[str, dict[str, Tensor]]:
    """Group the tensors of a training by their purpose, one of ``_PARTS``."""
    parts = {part: dict[str, Tensor]() for part in _PARTS}
    for name, value in safetensors.torch.load(body).items():
        part, _, own = name.partition("/")
        parts[part][own] = value
    return parts


def _digest(result: LocalResult) -> str:
    values = [*result.tensors.values(), *result.state.values(), *result.lanes.values()]
    flat = [value.detach().cpu().flatten().view(torch.uint8) for value in values]
    return compute_digest(torch.cat(flat).numpy().tobytes()).hex()


def _answer(worker: WorkerProcess) -> dict[str, str]:
    """Receive a worker's answer to a training; empty if there is none in time."""
    with suppress(EOFError, OSError):
        if worker.link.poll(_ANSWER_S):
            answer: dict[str, str] = json.loads(worker.link.recv_bytes())
            return answer
    return {}


def _describe_answer(answer: Mapping[str, str], worker: WorkerProcess) -> str | None:
    """Describe what is wrong with a worker, given its answer; ``None`` if nothing is."""
    if not answer:
        return worker.ending()
    return f"failed: {answer['failed']}; its output says why" if "failed" in answer else None


def _name_worker(rank: int, processes: Sequence[WorkerProcess]) -> str:
    return f"process {rank + 1} of the {len(processes) + 1} that share this training"
