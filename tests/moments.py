"""Moments of local updates that tests call by hand, and the rounds of clients that they train."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedlearn.algorithms.local import Moment, PointGradient, Tensors
from fedlearn.core.randomness import Seed
from fedlearn.training.resident import ClientRound


@dataclass(frozen=True)
class KnownSteps:
    """Knows only how many steps clients take."""

    num_steps_K: Tensor
    client_ids: Sequence[int] = ()
    names: Sequence[str] = ()

    @property
    def epochs_K(self) -> Tensor:
        raise NotImplementedError

    @property
    def losses_K(self) -> Tensor:
        raise NotImplementedError

    def gradient_at(self, point: Tensors) -> PointGradient:
        raise NotImplementedError


def after(num_steps_K: Tensor) -> Moment:
    """Return the moment of a report after these numbers of steps."""
    return Moment(0, int(num_steps_K.max()), info=KnownSteps(num_steps_K))


#: The round of a client that takes as many steps as the test likes.
SOME_CLIENT = ClientRound(
    client_id=0, seed=Seed(0), num_steps=1, steps_per_epoch=1, read_epoch=lambda: ()
)
