"""Checkpoints of a training, which all its processes write, and which any mesh can read.

Incomplete checkpoints are ignored: torch writes ``.metadata`` last, after every process has written
its part. Tensors have the same names as in the whole model.
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
from fedlearn.parallel.engine import OPTIMIZER, PROGRESS, RankTrainer, state_of
from fedlearn.parallel.task import TrainingState

_FOLDER = re.compile(r"step-(\d+)")
_COMPLETE = ".metadata"
#: Errors of reading a checkpoint that is incomplete or damaged, or belongs to another model.
_UNREADABLE = (
    CheckpointException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
)
#: Most characters of an error that a message quotes.
_MAX_QUOTED = 300


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, if there is one."""
    complete = {
        int(found[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (found := _FOLDER.fullmatch(path.name)) and (path / _COMPLETE).exists()
    }
    # By number: as text, step-10 comes before step-9.
    return complete[max(complete)] if complete else None


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def save(engine: RankTrainer, folder: Path, *, keep: int) -> None:
    """Write a checkpoint; every process of the training must call it.

    Args:
        engine: This process.
        folder: Folder of the training's checkpoints, which all processes can access.
        keep: Number of newest checkpoints to keep, >= 1; older ones are removed.

    Raises:
        StoreError: The checkpoint cannot be written.
    """
    tensors = engine.tensors() | {PROGRESS: engine.progress()}
    is_alone = engine.world_size == 1
    write(tensors, folder / f"step-{engine.step_num}", is_alone=is_alone)
    if not is_alone:
        dist.barrier()
    # All ranks have written their part, so older checkpoints may go.
    if engine.rank == 0:
        prune(folder, keep=keep)


def prune(folder: Path, *, keep: int) -> None:
    """Remove all complete checkpoints in a folder except for the newest ``keep`` >= 1."""
    # An incomplete checkpoint may be one that is being written.
    complete = [path for path in folder.iterdir() if (path / _COMPLETE).exists()]
    for path in sorted(complete, key=step_of)[:-keep]:
        shutil.rmtree(path)


def restore(engine: RankTrainer, checkpoint: Path) -> None:
    """Load a checkpoint into a training; every process of the training must call it.

    Raises:
        StoreError: The checkpoint cannot be read, or belongs to another model.
    """
    # load() copies into these tensors, which are those of the model and the optimizer.
    tensors = engine.tensors() | {PROGRESS: engine.progress()}
    try:
        there = _read_metadata(checkpoint)
        # A checkpoint without optimizer state leaves the optimizer new.
        if not any(name.startswith(OPTIMIZER) for name in there):
            tensors = {n: each for n, each in tensors.items() if not n.startswith(OPTIMIZER)}
        with _silence_single_process_warning():
            load(tensors, checkpoint_id=checkpoint, no_dist=engine.world_size == 1)
    except _UNREADABLE as error:
        raise _build_error(checkpoint, error) from error
    engine.set_progress(tensors[PROGRESS])
    engine.agree()


def write(tensors: Mapping[str, Tensor], checkpoint: Path, *, is_alone: bool) -> None:
    """Write named tensors as a checkpoint.

    Args:
        tensors: The tensors that this process has.
        checkpoint: Folder of the checkpoint, which is created.
        is_alone: Whether these are all tensors; if not, every process of the training must call
            this.

    Raises:
        StoreError: The checkpoint cannot be written; what was written of it will be ignored.
    """
    try:
        with _silence_single_process_warning():
            save_tensors(dict(tensors), checkpoint_id=checkpoint, no_dist=is_alone)
    except (CheckpointException, OSError) as error:
        raise StoreError(f"{checkpoint} cannot be written ({_describe_cause(error)})") from error


def read(checkpoint: Path) -> TrainingState:
    """Read a whole checkpoint in one process, which need not belong to the training.

    Raises:
        StoreError: The checkpoint cannot be read.
    """
    try:
        tensors = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in _read_metadata(checkpoint).items()
        }
        with _silence_single_process_warning():
            load(tensors, checkpoint_id=checkpoint, no_dist=True)
    except _UNREADABLE as error:
        raise _build_error(checkpoint, error) from error
    return state_of(tensors)


@contextmanager
def _silence_single_process_warning() -> Iterator[None]:
    """Silence torch's warning about writing or reading in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield


def _read_metadata(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of a checkpoint's tensors, by name."""
    found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {n: each for n, each in found.items() if isinstance(each, TensorStorageMetadata)}


def _build_error(checkpoint: Path, error: BaseException) -> StoreError:
    return StoreError(
        f"{checkpoint} cannot be read ({_describe_cause(error)}); remove the folder to continue "
        "from the checkpoint before it, or to restart the training"
    )


def _describe_cause(error: BaseException) -> str:
    """Describe an error in one line; if it is Ctrl-C, raise it instead."""
    if isinstance(error, CheckpointException):  # its own text is a traceback
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    said = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {said[:_MAX_QUOTED]}"
