"""Files with what single clients measured in an evaluation, in the folder of a run.

A file is JSON with a list per column: with 100,000 clients and four metrics it has 11 MB. One is
kept for each checkpoint that is kept.
"""

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from fedlearn.core.client_metrics import ClientMetrics
from fedlearn.core.distribution import Direction
from fedlearn.core.files import explain_disk_errors, write_durably
from fedlearn.core.json_files import read_json
from fedlearn.core.json_values import format_json
from fedlearn.errors import NewerStore, StoreError

_FORMAT = 1
_NAME = re.compile(r"round-(\d{6,})\.json")


@dataclass(frozen=True)
class _ClientsHead:
    format: int


@dataclass(frozen=True)
class _ClientsFile:
    measured_after: int
    client_ids: list[int]
    names: list[str | None]
    num_examples: list[int]
    directions: dict[str, Direction]
    metrics: dict[str, list[float | None]]


_HEADS, _FILES = TypeAdapter(_ClientsHead), TypeAdapter(_ClientsFile)


def write_clients(clients: ClientMetrics, *, folder: Path) -> None:
    """Write what clients measured into ``folder``, and return once it is durable.

    Raises:
        NoSpace: The disk is full.
        StoreError: The file cannot be written. No partial file is left.
    """
    with explain_disk_errors(folder, raises=StoreError):
        folder.mkdir(exist_ok=True)
    content = {
        "format": _FORMAT,
        "measured_after": clients.measured_after,
        "client_ids": clients.client_ids,
        "names": [clients.names.get(each) for each in clients.client_ids],
        "num_examples": clients.num_examples,
        "directions": clients.directions,
        # JSON has no NaN: a value that is not finite becomes null.
        "metrics": {name: values.tolist() for name, values in clients.metrics.items()},
    }
    path = folder / f"round-{clients.measured_after:06d}.json"
    write_durably(path, format_json(content).encode(), raises=StoreError)


def read_clients(folder: Path, *, num_rounds: int) -> ClientMetrics | None:
    """Read the last evaluation of clients in the first ``num_rounds`` rounds; ``None`` if none.

    Raises:
        NewerStore: A later version of fedlearn wrote it.
        StoreError: The file is damaged or cannot be read.
    """
    found = {number: path for number, path in _list_files(folder).items() if number <= num_rounds}
    if not found:
        return None
    path = found[max(found)]
    remedy = "remove it, or go back to an earlier checkpoint"
    holds = "what clients measured"
    head = read_json(path, _HEADS, raises=StoreError, holds=holds, remedy=remedy)
    if head is not None and head.format > _FORMAT:
        raise NewerStore(
            f"{path} has format {head.format}, and this version reads up to {_FORMAT}; upgrade "
            "fedlearn"
        )
    file = read_json(path, _FILES, raises=StoreError, holds=holds, remedy=remedy)
    if file is None:
        return None
    lengths = {len(file.names), len(file.num_examples), *map(len, file.metrics.values())}
    if lengths != {len(file.client_ids)}:
        raise StoreError(f"{path} has columns of different lengths: {remedy}")
    named = zip(file.client_ids, file.names, strict=True)
    return ClientMetrics(
        measured_after=file.measured_after,
        client_ids=file.client_ids,
        num_examples=file.num_examples,
        metrics={
            name: np.asarray([math.nan if value is None else value for value in values], np.float64)
            for name, values in file.metrics.items()
        },
        directions=file.directions,
        names={client_id: name for client_id, name in named if name is not None},
    )


def remove_clients(
    folder: Path, *, checkpoints: Collection[int], uncommitted: Collection[int]
) -> None:
    """Remove the files that no checkpoint needs: each needs the last one up to its round.

    Args:
        folder: The folder of the files.
        checkpoints: Numbers of finished rounds at the checkpoints that are kept.
        uncommitted: Numbers of finished rounds whose files are left over from a commit that failed,
            or from rounds that were rolled back.
    """
    files = _list_files(folder)
    valid = [number for number in files if number not in uncommitted]
    needed = {
        max((number for number in valid if number <= each), default=-1) for each in checkpoints
    }
    for number, path in files.items():
        if number not in needed:
            with suppress(OSError):  # it only wastes space, and the next commit tries again
                path.unlink()


def _list_files(folder: Path) -> dict[int, Path]:
    """Return the files by the number of rounds that were finished at their evaluation."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("round-*.json"))
    return {int(found[1]): path for found, path in named if found is not None}
