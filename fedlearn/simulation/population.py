"""The examples of all clients, and how a block of clients gets at its own.

A population answers two questions by client id, from 0 to ``num_clients - 1``: how many examples,
and which. It returns tensors and row numbers into them, so what lies in memory is not copied.
"""

from collections.abc import Callable, Sequence
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
    named,
    require_finite,
    require_one_label_each,
    taken,
)
from fedlearn.core.randomness import Seed, keyed_draws
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


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The examples of several clients.

    Attributes:
        features: Shape [N, *F], or several such.
        labels: Shape [N, *L].
        rows: Row numbers into ``features`` and ``labels``, the clients one after another.
        offsets: Client k has ``rows[offsets[k]:offsets[k + 1]]``: int64 [K + 1].
        num_reads_K: How often each client's examples are there, one reading after another, where
            each epoch reads them again: int64 [K]; ``None``: once.
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

    def gathered(self) -> tuple[Features, Tensor]:
        """Return copies of these rows of the features and of the labels."""
        index = torch.from_numpy(self.rows).to(self.labels.device)
        return taken(self.features, index), self.labels.index_select(0, index)


class Population(Protocol):
    """Every client that a simulation can ask, with its examples."""

    @property
    def num_clients(self) -> int:
        """Number of clients."""

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has, all at least 1."""

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order.

        Raises:
            DataError: Examples that were read just now cannot be trained on.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedExamples:
    """Examples that can be trained on.

    Attributes:
        features: Finite and real: [N, *F], or several such.
        labels: int64 classes, or finite floats to regress on: [N, *L].
        num_classes: Labels lie below it; ``None`` where they are not classes.

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
        """Return what a message calls a row."""
        return row_name(row)


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPopulation(CheckedExamples):
    """Clients whose examples lie in memory, divided by a partition; none is copied.

    Attributes:
        partition: Who holds which row.

    Raises:
        DataError: Also where the partition names rows that are not there.
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
        """What the data call the clients, by number: shape [C]; ``None``: they have no names."""
        return self.partition.names

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return sizes_of(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors themselves and the rows of these clients."""
        places, offsets = places_of(self.partition.offsets, client_ids=client_ids)
        rows = places if self._is_grouped else self.partition.rows[places]
        return ClientRows(self.features, self.labels, rows, offsets)

    @cached_property
    def _is_grouped(self) -> bool:
        """Whether rows lie client after client already, so that places are rows."""
        rows = self.partition.rows
        return bool((rows == np.arange(rows.size)).all())


class MapDataset(Readable, Protocol):
    """A map-style ``torch.utils.data.Dataset``: pairs of features and label by index."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class UnreadRows:
    """Examples of several clients that a dataset reads when they are needed.

    What reading draws from the global generators of torch, numpy and Python depends on the batch's
    key alone.

    Attributes:
        dataset: Where they are read from.
        rows: Row numbers in it, the clients one after another.
        offsets: Client k has ``rows[offsets[k]:offsets[k + 1]]``: int64 [K + 1].
        num_classes: Labels lie below it; ``None`` where they are not classes.
        place: What a message calls a row, by its place in ``rows``.
    """

    dataset: MapDataset = field(repr=False)
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_classes: int | None
    place: Callable[[int], str]

    def batch(self, places: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Read the rows at these places, as a deployed client reads a batch.

        Raises:
            DataError: As for :meth:`read`.
        """
        features, labels = read_rows(self.dataset, rows=self.rows[places], key=key)
        self._check(features, labels, place=lambda at: self.place(int(places[at])))
        return features, labels

    def read(self) -> ClientRows:
        """Read the examples as for evaluation: what they draw is the same every time.

        Raises:
            DataError: An example is no pair of numbers or has other inputs or another shape than
                the others, a dtype is wrong, a feature or label is not finite, or a label is out of
                range.
        """
        sizes = np.diff(self.offsets).tolist()
        return self.read_epochs(lambda client: [list(evaluation_batches(sizes[client]))])

    def read_epochs(self, epochs_of: Callable[[int], Sequence[Sequence[KeyedBatch]]]) -> ClientRows:
        """Read the examples for training: again for each epoch where reading draws, else once.

        A client for whom reading its first epoch draws nothing is not read again.

        Args:
            epochs_of: From the place of a client, 0..K-1, to the batches of each of its epochs.
                Their rows are 0..n-1 of its n examples.

        Raises:
            DataError: As for :meth:`read`.
        """
        pairs, places, num_reads = list[Pair](), list[NDArray[np.int64]](), list[int]()
        with keyed_draws() as set_key:
            for client, (start, end) in enumerate(pairwise(self.offsets.tolist())):
                own, epochs = self.rows[start:end], epochs_of(client)
                first, has_drawn = self._epoch(own, epochs[0], set_key)
                pairs += first
                num_reads.append(len(epochs) if has_drawn else 1)
                for epoch in epochs[1 : num_reads[-1]]:
                    again, _ = self._epoch(own, epoch, set_key, instead=first)
                    pairs += again
                places += [np.arange(start, end)] * num_reads[-1]
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

    def _epoch(
        self,
        rows: NDArray[np.int64],
        batches: Sequence[KeyedBatch],
        set_key: Callable[[int], Callable[[], bool]],
        *,
        instead: Sequence[Pair] = (),
    ) -> tuple[list[Pair], bool]:
        """Read an epoch of one client; return its examples in their order, and whether it drew.

        Examples in no batch are those ``instead``. Without such, they are read as well.
        """
        by_place = dict(enumerate(instead))
        if not instead:
            in_batches = np.concatenate([batch.rows for batch in batches])
            others = np.setdiff1d(np.arange(len(rows)), in_batches)
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
    """Return what the data call the clients, by number: shape [C]; ``None``: they have no names."""
    names: NDArray[Any] | None = getattr(population, "names", None)
    return names


def unread_rows(population: Population, client_ids: NDArray[np.int64]) -> UnreadRows | None:
    """Return the examples of these clients if a dataset reads them when needed, else ``None``."""
    unread = getattr(population, "unread", None)
    return None if unread is None else unread(client_ids)


@dataclass(frozen=True, eq=False)
class PooledPopulation:
    """All clients of a population as one, for centralised training.

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
        """Return all examples; data that stream are read into memory as a whole."""
        assert len(client_ids) == 1  # there is one client
        rows = self.parts.load(np.arange(self.parts.num_clients))
        return replace(rows, offsets=np.asarray([0, len(rows.rows)]))

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return all examples, where a dataset reads them."""
        assert len(client_ids) == 1  # as above
        rows = unread_rows(self.parts, np.arange(self.parts.num_clients))
        return None if rows is None else replace(rows, offsets=np.asarray([0, len(rows.rows)]))


@dataclass(frozen=True, eq=False, kw_only=True)
class BootstrapPopulation(CheckedExamples):
    """Virtual clients, each a sample with replacement from the same examples.

    Row j of client c is a keyed hash of (c, j), so any number of clients takes no memory.

    Attributes:
        num_clients: As many as you like, >= 1.
        examples_per_client: >= 1.
        seed: Who draws what.

    Raises:
        DataError: Also where there are no examples.
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
        """Return the tensors and the rows that these clients drew."""
        positions = np.arange(self.examples_per_client)
        hashes = self.seed.derive("bootstrap").hash(client_ids[:, None], positions)
        rows = (hashes % np.uint64(len(self.labels))).astype(np.int64).ravel()
        offsets = np.arange(client_ids.size + 1) * self.examples_per_client
        return ClientRows(self.features, self.labels, rows, offsets)


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetPopulation:
    """Clients whose examples are fetched from a torch dataset and checked when they are asked for.

    For examples that fit in memory :class:`ArrayPopulation` is much faster.

    Attributes:
        dataset: ``dataset[i]`` is a pair (features, label); all of the same shape. Features
            that are a tuple or a mapping are several inputs of the model.
        partition: Who holds which row.
        num_classes: Labels lie below it; ``None`` where they are not classes.

    Raises:
        DataError: The partition names rows that the dataset has not.
    """

    dataset: MapDataset = field(repr=False)
    partition: Partition = field(repr=False)
    num_classes: int | None

    def __post_init__(self) -> None:
        _require_rows(self.partition, num_rows=len(self.dataset))

    @property
    def names(self) -> NDArray[Any] | None:
        """What the data call the clients, by number: shape [C]; ``None``: they have no names."""
        return self.partition.names

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return sizes_of(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Read the examples of these clients as for evaluation: see :meth:`UnreadRows.read`.

        Raises:
            DataError: As there.
        """
        return self.unread(client_ids).read()

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows:
        """Return which rows these clients have, without reading them."""
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
    """Refuse examples that cannot be trained on; ``place`` says in a message where a row is.

    Raises:
        DataError: There is no input, the lengths differ, features are complex, or boolean and
            not one of several inputs (a mask), labels are neither int64 nor (without classes)
            floats, a value is not finite, or a label is neither in
            ``0..num_classes - 1`` nor -100, which is to be ignored.
    """
    require_one_label_each(features, labels)
    for name, tensor in named(features).items():
        if tensor.is_complex() or (tensor is features and tensor.dtype == torch.bool):
            raise DataError(f"{name} of {tensor.dtype}; convert with `.float()`")
    if labels.dtype != torch.int64 and (num_classes is not None or not labels.is_floating_point()):
        raise DataError(f"labels are {labels.dtype}; convert class labels with `.long()`")
    for name, tensor in named(features).items():
        what = "feature" if tensor is features else f"value of {name}"
        require_finite(tensor, what=what, place=place)
    require_finite(labels, what="label", place=place)
    if num_classes is not None:
        _require_classes(labels, num_classes=num_classes, place=place)


def _require_classes(labels: Tensor, *, num_classes: int, place: Callable[[int], str]) -> None:
    if not labels.numel():
        return
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
        f"`num_classes`; a label to ignore is {IGNORED}, and numbers to regress on are floats"
    )


def _require_rows(partition: Partition, *, num_rows: int) -> None:
    low, high = int(partition.rows.min()), int(partition.rows.max())
    if low < 0 or high >= num_rows:
        raise DataError(
            f"the partition names rows {low}..{high}, there are {num_rows} examples; split the "
            "labels of these examples"
        )


def spread_clients(population: Population, num_wanted: int) -> NDArray[np.int64]:
    """Return up to ``num_wanted`` clients from all over a population, the first among them."""
    last = population.num_clients - 1
    ends = np.linspace(0, last, min(num_wanted, population.num_clients))
    return np.unique(ends.astype(np.int64))


def readable_client(population: Population) -> int:
    """Return a client whose examples can be read, the first if its own can.

    Raises:
        Exception: None of those that were tried has such examples; as reading the last one raises.
    """
    *others, last = spread_clients(population, 16)
    for client_id in others:
        with suppress(Exception):  # user code raises anything
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
    """Return the ranges of these clients laid end to end, and the offsets of each in that."""
    sizes = sizes_of(offsets, client_ids=client_ids)
    ends = offsets_of(sizes)
    shifts = np.repeat(offsets[client_ids] - ends[:-1], sizes)
    return np.arange(ends[-1]) + shifts, ends


def owner_at(at: int, *, offsets: NDArray[np.int64], client_ids: NDArray[np.int64]) -> int:
    """Return whose range holds place ``at``."""
    return int(client_ids[np.searchsorted(offsets, at, side="right") - 1])


def row_name(row: int, *, client: str | None = None) -> str:
    """Return what a message calls a row, with what it calls the client that has it."""
    return f"row {row}" if client is None else f"row {row} of {client}"
