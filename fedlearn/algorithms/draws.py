"""Random numbers for local updates, reproducible for each client.

The draw of a round's clients is :class:`fedlearn.algorithms.pending_tasks.Draw`.

Each client, round and step has its own generator. So the numbers depend neither on the executor,
block, worker process or transport that runs the client, nor on restarts.

Shape legend: K clients.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedlearn.algorithms.local import LocalUpdate, Memory
from fedlearn.core.randomness import Seed

#: Step indices of ``begin`` and ``report``; training steps count from 0.
BEGIN, REPORT = -1, -2


def client_seed(seed: Seed, *, round_num: int, client_id: int) -> Seed:
    """Return the seed of a client's random numbers in its local update of one round."""
    return seed.derive("local update", round_num, client_id)


class Draws:
    """Fills the memory that a local update declares as random draws.

    Args:
        local: The local update.
        seeds: Seeds of the K clients, from :func:`client_seed`.
    """

    def __init__(self, local: LocalUpdate, seeds: Sequence[Seed]) -> None:
        laws = {name: spec.draws for name, spec in local.memory.items()}
        self._laws = {name: law for name, law in laws.items() if law is not None}
        self._seeds = {name: [seed.derive(name) for seed in seeds] for name in self._laws}

    def fill(self, memory: Memory, step: int) -> None:
        """Draw the numbers of a step, in place.

        Args:
            memory: Memory of the first clients of ``seeds``, or of all and further rows, which do
                not change.
            step: Step index, from 0; or :data:`BEGIN` or :data:`REPORT`.
        """
        for name, law in self._laws.items():
            tensors, seeds = memory[name], self._seeds[name][: len(memory[name][0])]
            sizes = [value[0].numel() for value in tensors]
            # Only to translate the dtype from torch to NumPy.
            like = torch.empty(0, dtype=tensors[0].dtype).numpy()
            # All tensors of a client in one row: one draw, so the numbers do not depend on how
            # parameters are split.
            rows_KN = np.empty((len(seeds), sum(sizes)), like.dtype)
            for seed, row in zip(seeds, rows_KN, strict=True):
                generator = seed.at(step).numpy()
                draw = generator.random if law == "uniform" else generator.standard_normal
                draw(dtype=row.dtype.type, out=row)
            parts = torch.from_numpy(rows_KN).split(sizes, dim=1)
            for value, part in zip(tensors, parts, strict=True):
                value[: len(part)].copy_(part.view(len(part), *value.shape[1:]))
