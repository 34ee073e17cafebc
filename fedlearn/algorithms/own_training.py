"""Local training that only the clients' own trainers know how to do."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.algorithms.local import (
    LocalUpdate,
    LocalWork,
    Memory,
    Moment,
    Tensors,
    pieces_of,
)
from fedlearn.core.ranges import Count


@dataclass(frozen=True, kw_only=True)
class OwnTraining(LocalWork):
    """Whatever the clients' trainers do; they are asked for no optimiser, only how much to do.

    For trainers of one's own that take no settings, or only these, as far as they honour them.
    """

    epochs: Annotated[
        Count,
        doc(
            "Passes over the local examples, as far as the trainer has them: simulated devices "
            "take so long, and clients' policies bound it; >= 1."
        ),
    ] = 1
    batch_size: Annotated[Count | None, doc("Examples a step, for trainers that honour it.")] = None

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Refuse: nothing says how.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "OwnTraining says not how to train: give clients a trainer of their own "
            "(fl.simulate(trainer=...), client.trainer, join --task), or a LocalSgd"
        )


def keeps_something(local: LocalUpdate) -> bool:
    """Return whether clients may keep something from one of their rounds to the next.

    A trainer of the user's own may, and nobody else knows.

    Example:
        >>> keeps_something(OwnTraining())
        True
    """
    is_own = any(isinstance(each, OwnTraining) for each in pieces_of(local))
    return is_own or any(spec.is_kept for spec in local.memory.values())
