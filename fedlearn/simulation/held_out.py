"""Splits each client's examples into those that it trains on and those that test its model."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.feature_shift import find_common_examples
from fedlearn.simulation.partition import Partition, client_text, offsets_of
from fedlearn.simulation.population import (
    ArrayPopulation,
    ClientRows,
    Population,
    PopulationWrapper,
    UnreadRows,
    client_names,
    unread_rows,
)

# Bounds the memory of a check over populations of many millions.
_CLIENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class PartOfEach(PopulationWrapper):
    """A population in which each client has a part of its examples: to train or to test on.

    Each part has at least one of a client's examples. Which ones depends only on the seed, the
    client and the number of its examples.

    Attributes:
        whole: The clients with all their examples, at least two each.
        test_fraction: The share to test on, in (0, 1).
        seed: Seed of the random choice.
        is_test: Whether this is the part to test on.
    """

    test_fraction: float
    seed: Seed
    is_test: bool

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has in this part."""
        totals = self.whole.num_examples(client_ids)
        test = self._count_test(totals)
        return test if self.is_test else totals - test

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return this part of the examples of these clients, in this order.

        Raises:
            DataError: An example that was just read is invalid.
        """
        rows = self.whole.load(client_ids)
        places, offsets = self.choose(client_ids)
        return replace(rows, rows=rows.rows[places], offsets=offsets)

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return these clients' rows without reading them; ``None`` if no dataset reads them."""
        rows = unread_rows(self.whole, client_ids)
        if rows is None:
            return None
        (places, offsets), place = self.choose(client_ids), rows.place
        return replace(
            rows,
            rows=rows.rows[places],
            offsets=offsets,
            place=lambda at: place(int(places[at])),
        )

    def choose(self, client_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places of this part among all examples of these clients, and its offsets."""
        totals = self.whole.num_examples(client_ids)
        begins, chosen = offsets_of(totals), list[NDArray[np.int64]]()
        each = zip(client_ids.tolist(), totals.tolist(), self._count_test(totals), strict=True)
        for begin, (client_id, total, num_test) in zip(begins.tolist(), each, strict=False):
            order = np.argsort(self.seed.hash(client_id, np.arange(total)), kind="stable")
            own = order[:num_test] if self.is_test else order[num_test:]
            chosen.append(begin + np.sort(own))
        return np.concatenate(chosen), offsets_of(np.asarray([len(own) for own in chosen]))

    def _count_test(self, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        rounded: NDArray[np.int64] = np.rint(totals * self.test_fraction).astype(np.int64)
        return np.minimum(np.maximum(rounded, 1), totals - 1)


def hold_out(
    population: Population, *, fraction: float, seed: Seed
) -> tuple[Population, Population]:
    """Split the examples of each client; return those to train on, and those to test on.

    Args:
        population: The clients.
        fraction: The share to test on, in (0, 1).
        seed: Seed of the random choice.

    Raises:
        DataError: A client has a single example, or clients draw theirs from common ones, so that
            a test example could also be one to train on.

    Example:
        >>> import torch
        >>> from fedlearn.simulation.partition import Iid
        >>> everyone = ArrayPopulation(
        ...     features=torch.zeros(20, 1),
        ...     labels=torch.zeros(20).long(),
        ...     num_classes=1,
        ...     partition=Iid(num_clients=2).split(np.zeros(20), seed=Seed(0)),
        ... )
        >>> train, test = hold_out(everyone, fraction=0.3, seed=Seed(1))
        >>> train.num_examples(np.arange(2)), test.num_examples(np.arange(2))
        (array([7, 7]), array([3, 3]))
    """
    if find_common_examples(population) is not None:
        raise DataError(
            "clients draw their examples from common ones, so a test example could also be one to "
            "train on; use another partition, or leave evaluation.client_test_fraction out"
        )
    _require_two_each(population)
    train, test = (
        PartOfEach(whole=population, test_fraction=fraction, seed=seed, is_test=is_test)
        for is_test in (False, True)
    )
    if isinstance(population, ArrayPopulation):  # chosen once, instead of at each access
        return _select(population, train), _select(population, test)
    return train, test


def _select(population: ArrayPopulation, part: PartOfEach) -> ArrayPopulation:
    places, offsets = part.choose(np.arange(population.num_clients))
    rows, names = population.partition.rows[places], population.partition.names
    return replace(population, partition=Partition(rows, offsets, names))


def _require_two_each(population: Population) -> None:
    for start in range(0, population.num_clients, _CLIENTS_AT_ONCE):
        client_ids = np.arange(start, min(start + _CLIENTS_AT_ONCE, population.num_clients))
        single = client_ids[population.num_examples(client_ids) < 2]  # noqa: PLR2004 (one each)
        if single.size:
            client = client_text(int(single[0]), client_names(population))
            raise DataError(
                f"{client} has a single example, so it cannot hold one out; leave such clients "
                "out, or leave evaluation.client_test_fraction out"
            )
