"""Random numbers for local updates: a client's are the same wherever and with whomever it trains.

They do not come from a generator that all clients share, but from one for each client, round and
step. So neither executor, block, worker, transport nor a restart changes them.

Shape legend: K clients.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedlearn.algorithms.local import LocalUpdate, Memory
from fedlearn.core.randomness import Seed

#: Stand for ``begin`` and ``report`` where steps are counted from 0.
BEGIN, REPORT = -1, -2


def client_seed(seed: Seed, *, round_num: int, client_id: int) -> Seed:
    """Return the seed of all that one client draws in its local update of one round."""
    return seed.derive("local update", round_num, client_id)


class Draws:
    """Fills the memory that a local update declares as draws.

    Args:
        local: The update.
        seeds: Of each client, from :func:`client_seed`: K.
    """

    def __init__(self, local: LocalUpdate, seeds: Sequence[Seed]) -> None:
        laws = {name: spec.draws for name, spec in local.memory.items()}
        self._laws = {name: law for name, law in laws.items() if law is not None}
        self._seeds = {name: [seed.derive(name) for seed in seeds] for name in self._laws}

    def fill(self, memory: Memory, step: int) -> None:
        """Draw the numbers of a step, in place.

        Args:
            memory: Of the first of the clients, perhaps with more rows, which stay as they are.
            step: Index, from 0; or :data:`BEGIN` or :data:`REPORT`.
        """
        for name, law in self._laws.items():
            tensors, seeds = memory[name], self._seeds[name][: len(memory[name][0])]
            sizes = [value[0].numel() for value in tensors]
            like = torch.empty(0, dtype=tensors[0].dtype).numpy()
            rows_KN = np.empty((len(seeds), sum(sizes)), like.dtype)
            for seed, row in zip(seeds, rows_KN, strict=True):
                generator = seed.at(step).numpy()
                draw = generator.random if law == "uniform" else generator.standard_normal
                draw(dtype=row.dtype.type, out=row)
            parts = torch.from_numpy(rows_KN).split(sizes, dim=1)
            for value, part in zip(tensors, parts, strict=True):
                value[: len(part)].copy_(part.view(len(part), *value.shape[1:]))
