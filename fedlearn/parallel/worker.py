"""One rank of a job: what torchrun starts. The argument is the job's folder.

It runs :mod:`fedlearn.processes.tethered` to the process that has started the job.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fedlearn.core.user_lines import describe_error
from fedlearn.errors import ConfigError, EngineError, FedlearnError
from fedlearn.parallel import checkpoints
from fedlearn.parallel.engine import Engine
from fedlearn.parallel.jobs import (
    PATIENCE,
    Folder,
    Job,
    begin,
    device_of,
    ended,
    follow,
    outcome,
    require_job,
    spec_of,
)
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.trainer import UNATTENDED

#: Where torch waits for other ranks.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


def main() -> None:
    """Train until the job is done; an error that would come again is written down."""
    folder = Folder(Path(sys.argv[1]))
    if folder.failure.exists():  # a restart would end so again
        sys.exit(1)
    folder.error.unlink(missing_ok=True)  # of ranks that were started before
    try:
        job = require_job(folder)
        assert job.task is not None  # else other processes could not make it
        device = join()
        task = _made(job.task)(**job.arguments)
        engine = Engine(task, device=device)
        follow(engine, folder, job=job, saves_last=True, control=UNATTENDED, report=tell)
    except FedlearnError as error:
        _write_whole(folder.failure, f"{type(error).__name__}\n{error}")
        sys.exit(1)
    except Exception as error:
        if _would_come_again(error):
            _write_whole(folder.failure, f"{EngineError.__name__}\n{describe_error(error)}")
            sys.exit(1)
        if not folder.error.exists():  # of the ranks that fail then, the first has the cause
            _write_whole(folder.error, describe_error(error))
        raise
    dist.destroy_process_group()
    end()


def _write_whole(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}-{os.getpid()}")
    written.write_text(text)
    written.rename(path)


def _would_come_again(error: Exception) -> bool:
    """Return whether ranks that are started again would end so, too.

    What another rank's death causes is a RuntimeError of torch's, from where it waits for others.
    """
    if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
        return False
    waits = any(part in traceback.extract_tb(error.__traceback__)[-1].filename for part in _WAITING)
    return not (isinstance(error, RuntimeError) and waits)


def train_as_rank(
    job: Job, *, start: TrainingState | None, report: Callable[[Progress], None]
) -> TrainingState | None:
    """Run a job as one of the ranks that torchrun has started, perhaps on several machines.

    Args:
        job: What is trained; its folder is the same for all of them.
        start: Where it begins; ``None``: with the model's own weights.
        report: Told how far it is, in rank 0.

    Returns:
        Where it stands at the end, in rank 0; ``None`` in the others.

    Raises:
        ConfigError: The mesh is of another number of processes, or does not fit the model, or there
            are fewer GPUs than processes.
        FedlearnError: As :func:`fedlearn.parallel.jobs.train`.
    """
    task, folder = job.make_task(), Folder(job.folder)
    task.require_fitting()
    mesh, started = task.plan.spread.mesh, int(os.environ["WORLD_SIZE"])
    if mesh.world_size != started:
        raise ConfigError(
            f"the mesh is {mesh}, {mesh.world_size} in all, but torchrun has started {started} "
            "processes; make their product so many, or start as many"
        )
    device = join()
    if dist.get_rank() == 0:
        begin(job, folder, start)
    dist.barrier()
    engine = Engine(task, device=device)
    said = spec_of(job, start)
    follow(engine, folder, job=said, saves_last=True, control=UNATTENDED, report=report)
    dist.destroy_process_group()
    if engine.rank > 0:
        return None
    result = checkpoints.latest(folder.checkpoints)
    assert result is not None  # it was just written
    return ended(job, outcome(task, folder, result))


def join() -> torch.device:
    """Join the world that torchrun has started, and return where this process computes.

    Processes add up by NCCL where each has a GPU, and else by gloo.

    Raises:
        ConfigError: There are fewer GPUs than processes.
    """
    backend, device = "gloo", device_of(os.environ)
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=PATIENCE)
    return device


def end(code: int = 0) -> NoReturn:
    """End this process at once, by default as a success: for a rank that has nothing left to do.

    Threads of groups that torch has cached meshes of stay. One that is still at work while the
    interpreter ends aborts the process: a training that has succeeded would look like a crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(progress: Progress) -> None:
    """Report to the process that has started the job: a line of JSON."""
    sys.stdout.flush()  # what code of the user's has printed, which may be the beginning of a line
    os.write(sys.stdout.fileno(), b"\n" + json.dumps(asdict(progress)).encode() + b"\n")


def _made(name: str) -> Callable[..., Task]:
    """Return the function that makes the task."""
    module, _, function = name.partition(":")
    made: Callable[..., Task] = getattr(importlib.import_module(module), function)
    return made


if __name__ == "__main__":
    main()
