"""Placeholder for local training that the clients' own trainers define."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.algorithms.local import (
    LocalUpdate,
    LocalWork,
    Memory,
    Moment,
    Tensors,
    iter_updates,
)
from fedlearn.core.ranges import Count


@dataclass(frozen=True, kw_only=True)
class OwnTraining(LocalWork):
    """Leaves the optimizer to the clients' own trainers; sets only the amount of work.

    Use it with a trainer that you write yourself, if it needs no settings or only these two.

    Example:
        >>> import fedlearn as fl
        >>> fl.FedAvg(fl.OwnTraining(epochs=5)).local.epochs
        5
    """

    epochs: Annotated[
        Count,
        doc(
            "Passes over the local examples, for trainers that have them, >= 1: it sets how "
            "long simulated devices take, and clients' policies may limit it."
        ),
    ] = 1
    batch_size: Annotated[Count | None, doc("Examples per step, for trainers that honor it.")] = (
        None
    )

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Refuse: only the client's own trainer knows how to train.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "OwnTraining does not say how to train: give clients their own trainer "
            "(fl.simulate(trainer=...), client.trainer, join --task), or a LocalSgd"
        )


def keeps_something(local: LocalUpdate) -> bool:
    """Return whether clients may keep state between their rounds.

    A custom trainer may keep state without declaring it, so for :class:`OwnTraining` the answer
    is yes.

    Example:
        >>> keeps_something(OwnTraining())
        True
    """
    is_own = any(isinstance(each, OwnTraining) for each in iter_updates(local))
    return is_own or any(spec.is_kept for spec in local.memory.values())
