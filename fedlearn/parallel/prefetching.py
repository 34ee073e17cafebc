"""Prefetch the batches of a stream in reader processes.

A reader handles one request at a time for examples that are cheap to read together: the batch of a
step, or, for a stream that is read in windows, everything that the coming steps need of one window,
so that no window is read by two processes. The training process assembles the batches, which are
the same for any number of readers.
"""

import heapq
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import tee
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from operator import attrgetter
from pickle import PickleError
from threading import Thread
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlearn.core.features import (
    Features,
    list_tensors,
    map_inputs,
    move_to_device,
    rebuild_inputs,
    slice_rows,
)
from fedlearn.errors import DataError
from fedlearn.parallel.mixtures import Mixture
from fedlearn.parallel.streams import ReadInWindows, Stream
from fedlearn.processes.forks import exit_with_parent

Batch: TypeAlias = tuple[Features, Tensor]

_PREFETCHED = 2  # results of each reader that wait to be used
_MOST_STEPS = 4096  # served by one request: a small share of a mixture uses up a window slowly


@contextmanager
def prefetch(
    stream: Stream,
    *,
    steps: range,
    share: Callable[[int], range],
    num_workers: int,
    device: torch.device,
    check: Callable[[Tensor], None],
) -> Iterator[Iterator[Batch]]:
    """Prefetch batches while the context lasts; all readers end with it.

    Readers are forked from a server process without threads (``forkserver``), or started from
    scratch on Windows, so that none is a copy of this process with its threads in the middle of
    something. A script that uses them must start its work under ``if __name__ == "__main__":``.
    Each reader has its own copy of the stream, and two of its results wait in shared memory:
    batches, or for a stream that is read in windows, two windows.

    Args:
        stream: The examples. With workers it is pickled and sent to them, so its examples must be
            on the CPU.
        steps: The steps whose batches to read, in order.
        share: Returns the positions of a step's batch, or of this process's share of it: at least
            one, and after those of earlier steps.
        num_workers: Number of readers, >= 0; 0: this process reads each batch when it is needed.
        device: Device of the yielded batches; batches for a GPU pass through pinned memory.
        check: Called with the labels of each batch, before they move to the device.

    Yields:
        The batches of the steps.

    Raises:
        DataError: The stream cannot be sent to a reader; or, when a batch is needed, its examples
            cannot be read or a reader was killed.
    """
    sources = stream.streams if isinstance(stream, Mixture) else (stream,)
    # Two iterators over one plan, the readers' ahead of the other by what is prefetched.
    for_readers, for_batches = tee((step, _split_positions(stream, share(step))) for step in steps)
    loader = DataLoader(
        _Readable(sources),
        batch_size=None,
        sampler=_iter_requests(sources, for_readers),
        num_workers=num_workers,
        multiprocessing_context=_choose_context() if num_workers else None,
        prefetch_factor=_PREFETCHED if num_workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_end_with_parent,
        generator=torch.Generator(),  # else it would draw from the application's generator
        collate_fn=_identity,
    )
    readings = _start(loader)
    read = _read(readings, has_workers=num_workers > 0)
    try:
        yield (
            (move_to_device(features, device), _check_labels(labels, check).to(device))
            for features, labels in _iter_batches(stream, read, for_batches, share)
        )
    finally:
        # Explicitly, since the traceback of an error that propagates keeps the iterator alive, and
        # with it the workers.
        if num_workers:
            readings._shutdown_workers()  # noqa: SLF001 - torch has no public name for it


def _check_labels(labels: Tensor, check: Callable[[Tensor], None]) -> Tensor:
    check(labels)
    return labels


class _Request(NamedTuple):
    """Examples that one reader reads together."""

    step: int  # the first that needs the examples
    source: int
    positions: Sequence[range]  # only one, unless the source is read in windows


@dataclass(frozen=True)
class _Reading:
    """The result of a request: examples, or an error."""

    source: int
    batch: Batch | DataError

    def pin_memory(self) -> "_Reading":
        """Copy the batch to pinned memory; DataLoader calls this method by its name."""
        if isinstance(self.batch, DataError):
            return self
        features, labels = self.batch
        return _Reading(self.source, (map_inputs(_pin, features), _pin(labels)))


def _pin(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory, unless it is on a GPU already."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class _Readable(Dataset[_Reading]):
    def __init__(self, sources: Sequence[Stream]) -> None:
        self._sources = sources

    def __getitem__(self, request: _Request) -> _Reading:
        try:
            return _Reading(request.source, self._batch(request))
        except DataError as error:  # DataLoader would bury it under a traceback
            return _Reading(request.source, error)

    def _batch(self, request: _Request) -> Batch:
        source = self._sources[request.source]
        if isinstance(source, ReadInWindows):
            each = [np.arange(part.start, part.stop) for part in request.positions]
            return source.examples(np.concatenate(each))
        (positions,) = request.positions
        return source.batch(positions)


_Wanted: TypeAlias = tuple[int, Sequence[range]]
"""A step, and the positions of each source that it needs."""


def _split_positions(stream: Stream, positions: range) -> Sequence[range]:
    return stream.parts(positions) if isinstance(stream, Mixture) else [positions]


def _iter_requests(sources: Sequence[Stream], wanted: Iterable[_Wanted]) -> Iterator[_Request]:
    """Yield the requests to all sources, in the order of the first step that needs each."""
    each = zip(sources, tee(wanted, len(sources)), strict=True)
    requests = [_iter_source_requests(source, i, steps) for i, (source, steps) in enumerate(each)]
    # Results come in the order of the requests, so this order bounds how many of them wait.
    return heapq.merge(*requests, key=attrgetter("step"))


def _iter_source_requests(
    source: Stream, place: int, wanted: Iterable[_Wanted]
) -> Iterator[_Request]:
    request, end = None, 0
    for step, parts in wanted:
        rest = parts[place]
        while rest:
            # A request ends with its window, or when its first step has waited for long enough.
            if request is None or rest.start >= end or step >= request.step + _MOST_STEPS:
                if request is not None:
                    yield request
                request, end = _Request(step, place, []), _end(source, rest)
            inside, rest = range(rest.start, min(rest.stop, end)), range(end, rest.stop)
            request = request._replace(positions=[*request.positions, inside])
    if request is not None:
        yield request


def _end(source: Stream, positions: range) -> int:
    """Return the end of the positions that are read together with the first of ``positions``."""
    if isinstance(source, ReadInWindows):
        return source.window(positions.start).stop
    return positions.stop


def _iter_batches(
    stream: Stream,
    readings: Iterator[tuple[int, Batch]],
    wanted: Iterable[_Wanted],
    share: Callable[[int], range],
) -> Iterator[Batch]:
    waiting: list[_Waiting] = []
    for step, parts in wanted:
        waiting = waiting or [_Waiting() for _ in parts]
        for source, part in zip(waiting, parts, strict=True):
            while source.num_rows < len(part):
                place, batch = next(readings)
                waiting[place].add(batch)
        given = [
            source.take(len(part)) if part else None
            for source, part in zip(waiting, parts, strict=True)
        ]
        if isinstance(stream, Mixture):
            yield stream.assemble(given, positions=share(step))
        else:
            assert given[0] is not None  # a share is never empty
            yield given[0]


class _Waiting:
    """Queue of a source's examples that were read and are not used yet."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._read: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        self._read.append(batch)
        self.num_rows += len(batch[1])

    def take(self, num_rows: int) -> Batch:
        """Remove and return the first ``num_rows`` examples, >= 1, which must be there."""
        self.num_rows -= num_rows
        taken = []
        while num_rows:
            features, labels = self._read.popleft()
            here, rest = slice(num_rows), slice(num_rows, None)
            taken.append((slice_rows(features, here), labels[here]))
            if len(labels) > num_rows:
                self._read.appendleft((slice_rows(features, rest), labels[rest]))
            num_rows -= len(taken[-1][1])
        return taken[0] if len(taken) == 1 else _concatenate(taken)


def _concatenate(batches: Sequence[Batch]) -> Batch:
    inputs = zip(*(list_tensors(features) for features, _ in batches), strict=True)
    features = rebuild_inputs([torch.cat(each) for each in inputs], like=batches[0][0])
    return features, torch.cat([labels for _, labels in batches])


def _choose_context() -> BaseContext:
    if "forkserver" not in get_all_start_methods():  # on Windows
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by each process
    return context


def _start(loader: DataLoader[_Reading]) -> Any:  # Any: the iterator's class is private
    try:
        with warnings.catch_warnings():  # the error below says as much
            warnings.filterwarnings("ignore", "Got pickle error")
            return iter(loader)
    except (TypeError, AttributeError, PickleError) as error:
        raise DataError(
            f"the examples cannot be sent to the reader processes: {error}; define their classes "
            "and functions at the top of a module, or read without workers"
        ) from error


def _read(readings: Iterator[_Reading], *, has_workers: bool) -> Iterator[tuple[int, Batch]]:
    while True:
        try:
            reading = next(readings)
        except (RuntimeError, OSError, EOFError) as error:
            if not has_workers or "in DataLoader worker process" in str(error):
                raise  # raised by the application's dataset
            raise DataError(
                f"a reader process was killed: {error}; it may lack memory, or shared memory "
                "(/dev/shm): use fewer workers or smaller windows"
            ) from error
        if isinstance(reading.batch, DataError):
            raise reading.batch
        yield reading.source, reading.batch


def _end_with_parent(_worker: int) -> None:
    """Exit this reader when the training process dies, however it dies.

    DataLoader's own watchdog looks for a change of the parent process. That is no help here: the
    parent is the fork server, which lives as long as any of its children.
    """
    parent = parent_process()
    assert parent is not None  # this is a child
    Thread(target=exit_with_parent, args=(parent.sentinel,), daemon=True).start()


def _identity(reading: Any) -> Any:  # Any: a DataLoader expects a list of them
    return reading
