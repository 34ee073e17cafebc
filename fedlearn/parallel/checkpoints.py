"""Checkpoints of a training: written by all its processes, read on any mesh.

Only a complete one counts: torch writes ``.metadata`` last, when every process has written its
part. Tensors have the names that they have in the whole model.
"""

import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from fedlearn.errors import StoreError
from fedlearn.parallel.engine import OPTIMIZER, PROGRESS, Engine, state_of
from fedlearn.parallel.task import TrainingState

_FOLDER = re.compile(r"step-(\d+)")
_COMPLETE = ".metadata"
#: What reading raises where bytes are missing, damaged or of another model.
_UNREADABLE = (
    CheckpointException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
)
_MAX_TOLD = 300


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, if there is one."""
    complete = {
        int(found[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (found := _FOLDER.fullmatch(path.name)) and (path / _COMPLETE).exists()
    }
    return complete[max(complete)] if complete else None


def step_of(checkpoint: Path) -> int:
    """Return after how many steps a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def save(engine: Engine, folder: Path, *, keep: int) -> None:
    """Write a checkpoint; every process of the training calls it.

    Args:
        engine: This process.
        folder: Of the training's checkpoints; all processes see it.
        keep: How many are left, >= 1: the newest.

    Raises:
        StoreError: It cannot be written.
    """
    tensors = engine.tensors() | {PROGRESS: engine.progress()}
    is_alone = engine.world_size == 1
    write(tensors, folder / f"step-{engine.step_num}", is_alone=is_alone)
    if not is_alone:
        dist.barrier()
    if engine.rank == 0:
        prune(folder, keep=keep)


def prune(folder: Path, *, keep: int) -> None:
    """Remove all complete checkpoints of a folder but the newest ``keep`` >= 1."""
    complete = [path for path in folder.iterdir() if (path / _COMPLETE).exists()]
    for path in sorted(complete, key=step_of)[:-keep]:
        shutil.rmtree(path)


def restore(engine: Engine, checkpoint: Path) -> None:
    """Go on from a checkpoint; every process of the training calls it.

    Raises:
        StoreError: It cannot be read, or is of another model.
    """
    tensors = engine.tensors() | {PROGRESS: engine.progress()}
    try:
        there = _names(checkpoint)
        if not any(name.startswith(OPTIMIZER) for name in there):  # it begins anew
            tensors = {n: each for n, each in tensors.items() if not n.startswith(OPTIMIZER)}
        with _as_asked():
            load(tensors, checkpoint_id=checkpoint, no_dist=engine.world_size == 1)
    except _UNREADABLE as error:
        raise _unreadable(checkpoint, error) from error
    engine.set_progress(tensors[PROGRESS])
    engine.agree()


def write(tensors: Mapping[str, Tensor], checkpoint: Path, *, is_alone: bool) -> None:
    """Write tensors by name.

    Args:
        tensors: Those that this process has.
        checkpoint: A new folder.
        is_alone: Whether they are all; else every process of the training calls this.

    Raises:
        StoreError: It cannot be written; without its last file it does not count.
    """
    try:
        with _as_asked():
            save_tensors(dict(tensors), checkpoint_id=checkpoint, no_dist=is_alone)
    except (CheckpointException, OSError) as error:
        raise StoreError(f"{checkpoint} cannot be written ({_cause(error)})") from error


def read(checkpoint: Path) -> TrainingState:
    """Return where a training stood, whole, in a process that was none of its.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        tensors = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in _names(checkpoint).items()
        }
        with _as_asked():
            load(tensors, checkpoint_id=checkpoint, no_dist=True)
    except _UNREADABLE as error:
        raise _unreadable(checkpoint, error) from error
    return state_of(tensors)


@contextmanager
def _as_asked() -> Iterator[None]:
    """Have torch not warn that it does what it is told: to write or read in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield


def _names(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return what tensors there are, by name."""
    found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {n: each for n, each in found.items() if isinstance(each, TensorStorageMetadata)}


def _unreadable(checkpoint: Path, error: BaseException) -> StoreError:
    return StoreError(
        f"{checkpoint} cannot be read ({_cause(error)}); remove the folder to go on from the one "
        "before it, or to begin the training again"
    )


def _cause(error: BaseException) -> str:
    """Return in a line what went wrong, unless it is Ctrl-C, which passes."""
    if isinstance(error, CheckpointException):  # whose text is a trace
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    said = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {said[:_MAX_TOLD]}"
