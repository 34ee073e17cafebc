"""Populations: the clients of a simulation and their examples.

A population answers two questions by client id, from 0 to ``num_clients - 1``: how many examples a
client has, and which. It returns tensors and row numbers into them, so that examples in memory are
not copied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.objectives import IGNORED
from fedlearn.core.features import (
    Features,
    list_tensors,
    name_inputs,
    require_finite,
    require_one_label_each,
    take_rows,
)
from fedlearn.core.randomness import Seed, reseed_by_key
from fedlearn.errors import DataError
from fedlearn.simulation.partition import Partition, offsets_of
from fedlearn.training.local_data import (
    KeyedBatch,
    Pair,
    Readable,
    evaluation_batches,
    read_pairs,
    read_rows,
    stack_pairs,
)

#: Examples that show how large those of a dataset are, and whether it augments them.
_NUM_MEASURED = 8


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The examples of several clients.

    Attributes:
        features: Shape [N, *F], or several such inputs.
        labels: Shape [N, *L].
        rows: Row numbers into ``features`` and ``labels``, the clients one after another.
        offsets: Client k has ``rows[offsets[k]:offsets[k + 1]]``: int64 [K + 1].
        num_reads_K: Number of times that each client's examples were read, if each epoch has its
            own copy of them, one after another: int64 [K]; ``None``: once.
    """

    features: Features
    labels: Tensor
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_reads_K: NDArray[np.int64] | None = None

    def num_examples(self) -> NDArray[np.int64]:
        """Return how many examples each client has: int64 [K]."""
        lengths = np.diff(self.offsets)
        return lengths if self.num_reads_K is None else lengths // self.num_reads_K

    def gather(self) -> tuple[Features, Tensor]:
        """Return copies of these rows of the features and of the labels."""
        index = torch.from_numpy(self.rows).to(self.labels.device)
        return take_rows(self.features, index), self.labels.index_select(0, index)


class Population(Protocol):
    """All clients of a simulation, with their examples."""

    @property
    def num_clients(self) -> int:
        """Number of clients."""

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has, all at least 1."""

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order.

        Raises:
            DataError: An example that was just read is invalid.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedExamples:
    """Examples that were checked to be valid for training.

    Attributes:
        features: Finite real numbers: [N, *F], or several such inputs.
        labels: int64 classes, or finite floats to regress on: [N, *L].
        num_classes: Labels are below it; ``None`` if they are not classes.

    Raises:
        DataError: The lengths differ, a dtype is wrong, a feature or label is not finite,
            or a label is out of range.
    """

    features: Features = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int | None

    def __post_init__(self) -> None:
        check_examples(
            self.features, labels=self.labels, num_classes=self.num_classes, place=self._place
        )

    def _place(self, row: int) -> str:
        return row_name(row)


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPopulation(CheckedExamples):
    """Clients whose examples are in memory, divided by a partition without copies.

    Attributes:
        partition: Assigns rows to clients.

    Raises:
        DataError: Also if the partition has rows that do not exist.
    """

    partition: Partition = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_rows(self.partition, num_rows=len(self.labels))

    def _place(self, row: int) -> str:
        owner = self.partition.owner_of(row)
        return row_name(row, client=None if owner is None else self.partition.client(owner))

    @property
    def names(self) -> NDArray[Any] | None:
        """The clients' names in the data, by number: shape [C]; ``None``: they have no names."""
        return self.partition.names

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return sizes_of(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors, uncopied, and the rows of these clients."""
        places, offsets = places_of(self.partition.offsets, client_ids=client_ids)
        rows = places if self._is_grouped else self.partition.rows[places]
        return ClientRows(self.features, self.labels, rows, offsets)

    @cached_property
    def _is_grouped(self) -> bool:
        """Whether rows are stored client after client, so that positions are row numbers."""
        rows = self.partition.rows
        return bool((rows == np.arange(rows.size)).all())


class MapDataset(Readable, Protocol):
    """A map-style ``torch.utils.data.Dataset``: pairs of features and label, by index."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class UnreadRows:
    """Examples of several clients that a dataset reads when they are needed.

    Random numbers that reading draws from the global generators of torch, numpy and Python depend
    on the batch's key alone.

    Attributes:
        dataset: The dataset to read from.
        rows: Row numbers in it, the clients one after another.
        offsets: Client k has ``rows[offsets[k]:offsets[k + 1]]``: int64 [K + 1].
        num_classes: Labels are below it; ``None`` if they are not classes.
        place: Formats a row for a message, by its position in ``rows``.
    """

    dataset: MapDataset = field(repr=False)
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_classes: int | None
    place: Callable[[int], str]

    def batch(self, places: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Read the rows at these positions, as a deployed client reads a batch.

        Raises:
            DataError: As for :meth:`read`.
        """
        features, labels = read_rows(self.dataset, rows=self.rows[places], key=key)
        self._check(features, labels, place=lambda at: self.place(int(places[at])))
        return features, labels

    def read(self) -> ClientRows:
        """Read the examples for evaluation, which draws the same random numbers every time.

        Raises:
            DataError: An example is not a pair of numbers, its inputs or shape differ from those
                of the others, a dtype is wrong, a feature or label is not finite, or a label is
                out of range.
        """
        sizes = np.diff(self.offsets).tolist()
        return self.read_epochs(lambda client: [list(evaluation_batches(sizes[client]))])

    def read_epochs(self, epochs_of: Callable[[int], Sequence[Sequence[KeyedBatch]]]) -> ClientRows:
        """Read the examples for training: again in each epoch if reading is random, else once.

        If reading a client's first epoch draws no random numbers, its examples are read only once.

        Args:
            epochs_of: Maps the index of a client, 0..K-1, to the batches of each of its epochs,
                whose rows are 0..n-1 for its n examples.

        Raises:
            DataError: As for :meth:`read`.
        """
        pairs, places, num_reads = list[Pair](), list[NDArray[np.int64]](), list[int]()
        with reseed_by_key() as set_key:
            for client, (start, end) in enumerate(pairwise(self.offsets.tolist())):
                own, epochs = self.rows[start:end], epochs_of(client)
                # Only reading can show whether a dataset draws random numbers.
                first, has_drawn = self._epoch(own, epochs[0], set_key)
                pairs += first
                num_reads.append(len(epochs) if has_drawn else 1)
                for epoch in epochs[1 : num_reads[-1]]:
                    again, _ = self._epoch(own, epoch, set_key, instead=first)
                    pairs += again
                places += [np.arange(start, end)] * num_reads[-1]
        # Maps each example that was read to its place among the clients' rows.
        at = np.concatenate(places)
        features, labels = stack_pairs(pairs, rows=self.rows[at])
        self._check(features, labels, place=lambda row: self.place(int(at[row])))
        num_reads_K = np.asarray(num_reads, np.int64)
        lengths = np.diff(self.offsets) * num_reads_K
        return ClientRows(
            features,
            labels,
            np.arange(len(at)),
            offsets_of(lengths),
            None if set(num_reads) == {1} else num_reads_K,
        )

    def bytes_per_example(self, num_epochs: int) -> int:
        """Return what an example takes that is read for some epochs, judged by a few of them.

        Raises:
            DataError: As for :meth:`read`.
        """
        some = self.rows[:_NUM_MEASURED]
        batch = KeyedBatch(np.arange(len(some)), 0)
        found = replace(self, rows=some, offsets=np.array([0, len(some)])).read_epochs(
            lambda _: [[batch], [batch]]
        )
        num_bytes = sum(each.nbytes for each in (*list_tensors(found.features), found.labels))
        each = num_bytes // len(found.rows)
        return each if found.num_reads_K is None else each * num_epochs

    def _epoch(
        self,
        rows: NDArray[np.int64],
        batches: Sequence[KeyedBatch],
        set_key: Callable[[int], Callable[[], bool]],
        *,
        instead: Sequence[Pair] = (),
    ) -> tuple[list[Pair], bool]:
        """Read one client's epoch; return its examples in order, and whether reading was random.

        Examples that are in no batch are taken from ``instead``; if that is empty, they are read.
        """
        by_place = dict(enumerate(instead))
        if not instead:
            in_batches = np.concatenate([batch.rows for batch in batches])
            others = np.setdiff1d(np.arange(len(rows)), in_batches)
            # The last batch may have been dropped, but its examples need their places too.
            batches = [*batches, KeyedBatch(others, 0)] if others.size else batches
        has_drawn = False
        for batch in batches:
            draws = set_key(batch.key)
            pairs = read_pairs(self.dataset, rows=rows[batch.rows])
            has_drawn |= draws()
            by_place |= zip(batch.rows.tolist(), pairs, strict=True)
        return [by_place[place] for place in range(len(rows))], has_drawn

    def _check(self, features: Features, labels: Tensor, *, place: Callable[[int], str]) -> None:
        check_examples(features, labels=labels, num_classes=self.num_classes, place=place)


def client_names(population: Population) -> NDArray[Any] | None:
    """Return the clients' names in the data: shape [C]; ``None``: they have no names."""
    names: NDArray[Any] | None = getattr(population, "names", None)
    return names


def unread_rows(population: Population, client_ids: NDArray[np.int64]) -> UnreadRows | None:
    """Return these clients' rows without reading them; ``None`` if no dataset reads them."""
    unread = getattr(population, "unread", None)
    return None if unread is None else unread(client_ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class PopulationWrapper:
    """Base class of populations with the same clients as another, but other examples.

    Attributes:
        whole: The other population.
    """

    whole: Population

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.whole.num_clients

    @property
    def names(self) -> NDArray[Any] | None:
        """The clients' names in the data: shape [C]; ``None``: they have no names."""
        return client_names(self.whole)


@dataclass(frozen=True, eq=False)
class PooledPopulation:
    """All clients of a population as a single client, for centralized training.

    Attributes:
        parts: The population whose examples are pooled.
    """

    parts: Population

    @property
    def num_clients(self) -> int:
        """One."""
        return 1

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of all examples."""
        everyone = np.arange(self.parts.num_clients)
        return np.full(len(client_ids), self.parts.num_examples(everyone).sum())

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return all examples; streamed data is read into memory as a whole."""
        assert len(client_ids) == 1  # there is one client
        rows = self.parts.load(np.arange(self.parts.num_clients))
        return replace(rows, offsets=np.asarray([0, len(rows.rows)]))

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return all rows without reading them; ``None`` if no dataset reads them."""
        assert len(client_ids) == 1  # as above
        rows = unread_rows(self.parts, np.arange(self.parts.num_clients))
        return None if rows is None else replace(rows, offsets=np.asarray([0, len(rows.rows)]))


@dataclass(frozen=True, eq=False, kw_only=True)
class BootstrapPopulation(CheckedExamples):
    """Virtual clients, each with a sample with replacement of the same examples.

    Row j of client c is a keyed hash of (c, j), so any number of clients takes no memory.

    Attributes:
        num_clients: Number of clients, >= 1, without an upper limit.
        examples_per_client: Examples that each client draws, >= 1.
        seed: Seed of the draws.

    Raises:
        DataError: Also if there are no examples.
    """

    num_clients: int
    examples_per_client: int
    seed: Seed

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.labels):
            raise DataError("there are no examples to draw from; give at least one")

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``examples_per_client`` for each of these clients."""
        return np.full(client_ids.shape, self.examples_per_client, np.int64)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors, uncopied, and the rows that these clients drew."""
        positions = np.arange(self.examples_per_client)
        # The modulo's bias is below N / 2**64, far from visible.
        hashes = self.seed.derive("bootstrap").hash(client_ids[:, None], positions)
        rows = (hashes % np.uint64(len(self.labels))).astype(np.int64).ravel()
        offsets = np.arange(client_ids.size + 1) * self.examples_per_client
        return ClientRows(self.features, self.labels, rows, offsets)


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetPopulation:
    """Clients whose examples are read from a torch dataset, and checked, on demand.

    For examples that fit in memory, :class:`ArrayPopulation` is much faster.

    Attributes:
        dataset: ``dataset[i]`` is a pair (features, label); all of the same shape. Features
            that are a tuple or a mapping are several inputs of the model.
        partition: Assigns rows to clients.
        num_classes: Labels are below it; ``None`` if they are not classes.

    Raises:
        DataError: The partition has rows that are not in the dataset.
    """

    dataset: MapDataset = field(repr=False)
    partition: Partition = field(repr=False)
    num_classes: int | None

    def __post_init__(self) -> None:
        _require_rows(self.partition, num_rows=len(self.dataset))

    @property
    def names(self) -> NDArray[Any] | None:
        """The clients' names in the data, by number: shape [C]; ``None``: they have no names."""
        return self.partition.names

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return sizes_of(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Read the examples of these clients for evaluation: see :meth:`UnreadRows.read`.

        Raises:
            DataError: As for :meth:`UnreadRows.read`.
        """
        return self.unread(client_ids).read()

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows:
        """Return these clients' rows without reading them."""
        places, offsets = places_of(self.partition.offsets, client_ids=client_ids)
        rows = self.partition.rows[places]

        def place(at: int) -> str:
            owner = owner_at(at, offsets=offsets, client_ids=client_ids)
            return row_name(int(rows[at]), client=self.partition.client(owner))

        return UnreadRows(
            dataset=self.dataset,
            rows=rows,
            offsets=offsets,
            num_classes=self.num_classes,
            place=place,
        )


def check_examples(
    features: Features, *, labels: Tensor, num_classes: int | None, place: Callable[[int], str]
) -> None:
    """Check that examples are valid for training; ``place`` formats a row for the message.

    Raises:
        DataError: There is no input, the lengths differ, features are complex, or boolean and
            not one of several inputs (a mask), labels are neither int64 nor (without classes)
            floats, a value is not finite, or a label is neither in
            ``0..num_classes - 1`` nor -100, which is ignored.
    """
    require_one_label_each(features, labels)
    for name, tensor in name_inputs(features).items():
        # `tensor is features`: it is the only input, so a boolean one is not a mask.
        if tensor.is_complex() or (tensor is features and tensor.dtype == torch.bool):
            raise DataError(f"{name} of {tensor.dtype}; convert with `.float()`")
    if labels.dtype != torch.int64 and (num_classes is not None or not labels.is_floating_point()):
        raise DataError(f"labels are {labels.dtype}; convert class labels with `.long()`")
    for name, tensor in name_inputs(features).items():
        what = "feature" if tensor is features else f"value of {name}"
        require_finite(tensor, what=what, place=place)
    require_finite(labels, what="label", place=place)
    if num_classes is not None:
        _require_classes(labels, num_classes=num_classes, place=place)


def _require_classes(labels: Tensor, *, num_classes: int, place: Callable[[int], str]) -> None:
    if not labels.numel():
        return
    # The extremes first: that is one pass, while the masks below take memory.
    low, high = (int(extreme) for extreme in labels.aminmax())
    if low >= 0 and high < num_classes:
        return
    bad = ((labels < 0) & (labels != IGNORED)) | (labels >= num_classes)
    if not bool(bad.any()):
        return
    bad = bad.reshape(len(labels), -1)
    row = int(bad.any(1).nonzero()[0])
    value = int(labels.reshape(len(labels), -1)[row][bad[row]][0])
    raise DataError(
        f"{place(row)} has the label {value}, outside 0..{num_classes - 1}; correct the label or "
        f"`num_classes`; use {IGNORED} for a label to ignore, and floats for regression"
    )


def _require_rows(partition: Partition, *, num_rows: int) -> None:
    low, high = int(partition.rows.min()), int(partition.rows.max())
    if low < 0 or high >= num_rows:
        raise DataError(
            f"the partition names rows {low}..{high}, but there are {num_rows} examples; split "
            "the labels of these examples"
        )


def load_in_blocks(
    population: Population, client_ids: NDArray[np.int64], *, num_examples: int
) -> Iterator[ClientRows]:
    """Yield the examples of these clients, a few clients with up to ``num_examples`` at a time.

    A client with more examples is yielded alone.

    Raises:
        DataError: As for :meth:`Population.load`.
    """
    first = 0
    while first < len(client_ids):
        some = client_ids[first : first + num_examples]
        ends = np.cumsum(population.num_examples(some))
        count = max(1, int(np.searchsorted(ends, num_examples, side="right")))
        yield population.load(some[:count])
        first += count


def pick_spread_clients(population: Population, num_wanted: int) -> NDArray[np.int64]:
    """Return up to ``num_wanted`` clients evenly spread over a population, including the first."""
    last = population.num_clients - 1
    ends = np.linspace(0, last, min(num_wanted, population.num_clients))
    return np.unique(ends.astype(np.int64))


def find_readable_client(population: Population) -> int:
    """Find a client whose examples can be read, preferably the first.

    Raises:
        Exception: No client that was tried has such examples; this is the last one's error.
    """
    *others, last = pick_spread_clients(population, 16)
    for client_id in others:
        with suppress(Exception):  # custom code raises anything
            population.load(np.asarray([client_id]))
            return int(client_id)
    population.load(np.asarray([last]))
    return int(last)


def sizes_of(offsets: NDArray[np.int64], *, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lengths of these clients' ranges."""
    return offsets[client_ids + 1] - offsets[client_ids]


def places_of(
    offsets: NDArray[np.int64], *, client_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate the ranges of these clients; return that and each client's offset in it."""
    sizes = sizes_of(offsets, client_ids=client_ids)
    ends = offsets_of(sizes)
    # A client's range starts at offsets[c], and in the result at ends[i].
    shifts = np.repeat(offsets[client_ids] - ends[:-1], sizes)
    return np.arange(ends[-1]) + shifts, ends


def owner_at(at: int, *, offsets: NDArray[np.int64], client_ids: NDArray[np.int64]) -> int:
    """Return the client whose range contains position ``at``."""
    return int(client_ids[np.searchsorted(offsets, at, side="right") - 1])


def row_name(row: int, *, client: str | None = None) -> str:
    """Format a row for a message, with its client if given."""
    return f"row {row}" if client is None else f"row {row} of {client}"
