"""The program of one rank of a job, started by torchrun; its argument is the job's folder.

It runs under :mod:`fedlearn.processes.tethered`, so it exits when the process that started the job
dies.
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

from fedlearn.core.own_lines import describe_error
from fedlearn.errors import ConfigError, EngineError, FedlearnError
from fedlearn.parallel import checkpoints
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.jobs import (
    PATIENCE,
    Folder,
    Job,
    begin,
    build_spec,
    finish_job,
    follow,
    get_rank_device,
    outcome,
    require_job,
)
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.trainer import UNATTENDED

#: Folders of torch's modules that wait for other ranks.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


def main() -> None:
    """Run this rank until the job is done; record an error that a restart would not fix."""
    folder = Folder(Path(sys.argv[1]))
    if folder.failure.exists():  # a restart would fail the same way
        sys.exit(1)
    folder.error.unlink(missing_ok=True)  # left by ranks before a restart
    try:
        job = require_job(folder)
        assert job.task is not None  # jobs.train() refuses a job without a name
        device = join()
        task = _import_maker(job.task)(**job.arguments)
        engine = RankTrainer(task, device=device)
        follow(engine, folder, job=job, saves_last=True, control=UNATTENDED, report=report_progress)
    except FedlearnError as error:
        _write_whole(folder.failure, f"{type(error).__name__}\n{error}")
        sys.exit(1)
    except Exception as error:
        if _is_repeatable(error):
            _write_whole(folder.failure, f"{EngineError.__name__}\n{describe_error(error)}")
            sys.exit(1)
        if not folder.error.exists():  # the first rank that fails has the cause
            _write_whole(folder.error, describe_error(error))
        raise
    dist.destroy_process_group()
    end()


def _write_whole(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}-{os.getpid()}")
    written.write_text(text)
    written.rename(path)  # atomic: readers see the whole text or no file


def _is_repeatable(error: Exception) -> bool:
    """Tell whether an error would occur again after a restart.

    If another rank has died, torch raises a RuntimeError where it waits for that rank. This error,
    and those of memory and the operating system, need not occur again.
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
        job: The training; all ranks must use the same folder.
        start: State to start from; ``None``: the model's initial weights.
        report: Receives the progress reports, in rank 0.

    Returns:
        The final state, or the best model of a training with evaluation, in rank 0; ``None`` in the
        other ranks.

    Raises:
        ConfigError: The mesh has another number of processes than torchrun has started, or does not
            fit the model, or there are fewer GPUs than processes.
        FedlearnError: As :func:`fedlearn.parallel.jobs.train`.
    """
    task, folder = job.make_task(), Folder(job.folder)
    task.require_fitting()
    mesh, started = task.plan.spread.mesh, int(os.environ["WORLD_SIZE"])
    if mesh.world_size != started:
        raise ConfigError(
            f"the mesh {mesh} needs {mesh.world_size} processes, but torchrun has started "
            f"{started}; change the mesh, or start {mesh.world_size}"
        )
    device = join()
    if dist.get_rank() == 0:
        begin(job, folder, start)
    dist.barrier()
    engine = RankTrainer(task, device=device)
    said = build_spec(job, start)
    follow(engine, folder, job=said, saves_last=True, control=UNATTENDED, report=report)
    dist.destroy_process_group()
    if engine.rank > 0:
        return None
    result = checkpoints.latest(folder.checkpoints)
    assert result is not None  # it was just written
    return finish_job(job, outcome(task, folder, result))


def join() -> torch.device:
    """Join the world that torchrun has started; return the device of this process.

    The processes communicate by NCCL if each has a GPU, else by gloo.

    Raises:
        ConfigError: There are fewer GPUs than processes.
    """
    backend, device = "gloo", get_rank_device(os.environ)
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=PATIENCE)
    return device


def end(code: int = 0) -> NoReturn:
    """Exit this process at once, without the interpreter's shutdown; for a rank that is done.

    torch caches meshes, so the threads of their process groups keep running. One that is active
    during the shutdown aborts the process, and a training that succeeded would look like a crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_progress(progress: Progress) -> None:
    """Send a progress report, a line of JSON, to the process that started the job."""
    sys.stdout.flush()  # of custom code, which may have printed only the beginning of a line
    # A single write, so that the output of another rank cannot split the line.
    os.write(sys.stdout.fileno(), b"\n" + json.dumps(asdict(progress)).encode() + b"\n")


def _import_maker(name: str) -> Callable[..., Task]:
    module, _, function = name.partition(":")
    made: Callable[..., Task] = getattr(importlib.import_module(module), function)
    return made


if __name__ == "__main__":
    main()
