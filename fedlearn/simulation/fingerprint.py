"""Fingerprints of data sets: recognize examples however they are divided, ordered or stored.

Each example has a 64-bit hash of its feature values. The smallest hashes of a data set are its
sketch: two sets with many examples in common have hashes in common (Broder, 1997).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.core.features import list_tensors
from fedlearn.core.randomness import preserve_global_generators
from fedlearn.simulation.feature_shift import find_common_examples
from fedlearn.simulation.population import (
    ClientRows,
    Population,
    load_in_blocks,
    unread_rows,
)
from fedlearn.training.keyed_dropout import preserve_generator

#: Hashes in a sketch. A smaller set has all of its hashes there.
SKETCH_SIZE = 4096
#: Examples to read at a time.
_AT_ONCE = 8192
#: Examples to read several times, to check that they stay the same.
_READ_TWICE = 256


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Identifies the examples of a population and their division among clients.

    Attributes:
        sketch: Smallest hashes of the examples, ascending: uint64 [<= SKETCH_SIZE].
        users: Digest of the division among clients; independent of the order of clients and of
            examples.
        is_stable: Whether examples stayed the same when they were read again.
    """

    sketch: NDArray[np.uint64]
    users: str
    is_stable: bool

    @property
    def name(self) -> str:
        """A name for the examples, which does not depend on their division among clients."""
        digest = hashlib.blake2b(self.sketch.astype("<u8").tobytes(), digest_size=8)
        return f"examples-{digest.hexdigest()}"

    def overlaps(self, sketch: NDArray[np.uint64]) -> bool:
        """Return whether the two sketches have an example in common."""
        return bool(np.isin(self.sketch, sketch).any())


def fingerprint_of(population: Population) -> Fingerprint:
    """Compute the fingerprint of a population, which reads every example.

    An example counts by its feature values in float32; its dtype, shape, label, input names and
    position are ignored. The caller's random generators are not changed.

    Raises:
        DataError: Examples cannot be read.
    """
    sketch = np.zeros(0, np.uint64)
    users: list[int] = []
    with preserve_generator(torch.default_generator), preserve_global_generators():
        is_stable = _reads_alike(population)
        for rows in _blocks(population):
            hashes = example_hashes(rows)
            # The smallest k hashes of a union are among the smallest k of its parts (Broder's
            # bottom-k), so the sketch needs memory for one block only.
            sketch = np.unique(np.concatenate([sketch, hashes]))[:SKETCH_SIZE]
            users += [_digest(np.sort(own)) for own in np.split(hashes, rows.offsets[1:-1])]
    if (common := find_common_examples(population)) is not None:
        # Clients are virtual, perhaps millions. Their number and size identify the division.
        users = [_digest(np.array([common.num_clients, common.examples_per_client]))]
    return Fingerprint(sketch, f"{_digest(np.sort(np.array(users, np.uint64))):016x}", is_stable)


def example_hashes(rows: ClientRows) -> NDArray[np.uint64]:
    """Hash each example, in the order of ``rows.rows``: uint64 [n]."""
    features, labels = rows.gather()
    num = len(labels)
    # Adding zero turns -0.0 into 0.0: equal values must have equal bits.
    inputs = [each.reshape(num, -1).float().cpu() + 0.0 for each in list_tensors(features)]
    values = np.ascontiguousarray(torch.cat(inputs, 1).numpy().astype("<f4"))
    return np.array([_digest(row) for row in values], np.uint64)


def _digest(values: NDArray[np.generic]) -> int:
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


def _blocks(population: Population) -> Iterator[ClientRows]:
    """Yield the examples of all clients, a few clients at a time."""
    if (common := find_common_examples(population)) is not None:
        everything = np.arange(len(common.labels))
        offsets = np.array([0, len(everything)])
        yield ClientRows(common.features, common.labels, everything, offsets)
        return
    everyone = np.arange(population.num_clients)
    yield from load_in_blocks(population, everyone, num_examples=_AT_ONCE)


def _reads_alike(population: Population) -> bool:
    """Return whether three reads of the first examples give the same values.

    The reads use different keys, so a dataset that draws random numbers gives different values.
    """
    client_ids = np.arange(min(_READ_TWICE, population.num_clients))
    ends = np.cumsum(population.num_examples(client_ids))
    some = client_ids[: max(1, int(np.searchsorted(ends, _READ_TWICE, side="right")))]
    first, *others = (example_hashes(_read(population, some, key=key)) for key in range(3))
    return all(np.array_equal(first, again) for again in others)


def _read(population: Population, client_ids: NDArray[np.int64], *, key: int) -> ClientRows:
    """Read the examples of these clients; a dataset's random draws depend on ``key`` alone."""
    unread = unread_rows(population, client_ids)
    if unread is None:
        return population.load(client_ids)
    places = np.arange(len(unread.rows))
    features, labels = unread.batch(places, key=key)
    return ClientRows(features, labels, places, unread.offsets)
