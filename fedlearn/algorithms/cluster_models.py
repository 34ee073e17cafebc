"""Clients that train one model of several, as :func:`IFCA` and :func:`ClusteredFL` do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
)

#: The number of the client's model in its memory, and the prefix of the names of the models.
CLUSTER = "cluster"
_PERSONAL = "personal"


def name_models(num_clusters: int) -> list[str]:
    """Return the names of all models but the first, in the state, the broadcast and the lanes."""
    return [f"{CLUSTER}_{number}" for number in range(1, num_clusters)]


@dataclass(frozen=True, kw_only=True)
class OneOfSeveral(LocalUpdateWrapper):
    """Trains one model of several, which is the global model of the inner update.

    The client keeps the model as it received it, and its number. That is the model that it uses
    itself, and on which it is evaluated. A subclass chooses it in ``begin``, with :meth:`begin_at`.
    """

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, the client's model, and its number."""
        return {
            **self.inner.memory,
            _PERSONAL: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            CLUSTER: MemorySpec(over=1, is_kept=True),
        }

    def begin_at(
        self,
        models: Sequence[Tensors],
        choice_K: Tensor,
        x: Tensors,
        memory: Memory,
        *,
        broadcast: Memory,
        moment: Moment,
    ) -> None:
        """Begin at the model that each client chose.

        Args:
            models: As they are broadcast, shaped like ``x`` with one client.
            choice_K: By client, the index of its model: [K], int64.
            x: The parameters to write to; the rest are the arguments of ``begin``.
            memory: The clients' memory.
            broadcast: The broadcast.
            moment: The moment.
        """
        memory[CLUSTER][0].copy_(choice_K[:, None])
        for place, value in enumerate(x):
            value.copy_(torch.cat([model[place] for model in models])[choice_K])
        torch._foreach_copy_(list(memory[_PERSONAL]), list(x))
        self.inner.begin(x, memory, broadcast=use_own(broadcast, memory), moment=moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner update's step."""
        self.inner.step(x, grads, memory, broadcast=use_own(broadcast, memory), moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """Return the client's model as it received it in its last round."""
        return memory[_PERSONAL]


def use_own(broadcast: Memory, memory: Memory) -> Memory:
    """Return the broadcast with the client's model in place of the global one."""
    return {**broadcast, MODEL: memory[_PERSONAL]}
