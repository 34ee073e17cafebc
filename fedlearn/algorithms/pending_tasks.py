"""Pending tasks: clients that were sent a task and have not replied yet ("in flight")."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlearn.core.messages import ClientId


class PendingTask(NamedTuple):
    """A client that was sent a task and has not replied yet.

    Attributes:
        based_on: The round whose model it trains.
        attempt: Number of the draw in that round that chose the client, starting at 0.
        place: Position of the client in that draw, starting at 0.
        sent_s: When the task was sent, in seconds since the current round opened; negative if it
            was sent in an earlier round.
        duration_s: Seconds from then to the reply, which a simulation knows in advance; NaN if it
            is not known yet.
        fails: Whether it is known in advance that the client will fail.
    """

    client_id: ClientId
    based_on: int
    attempt: int
    place: int
    sent_s: float
    duration_s: float = math.nan
    fails: bool = False


#: All pending tasks, in the order in which they were sent.
PendingTasks = tuple[PendingTask, ...]


class Draw(Protocol):
    """Draws the next clients to send tasks to, as reproducibly as a cohort sampler."""

    def __call__(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Draw up to ``num`` idle clients, in the order in which to send them tasks.

        Args:
            num: Most clients to draw.
            round_num: Round index, from 0.
            attempt: Number of the draw in this round, starting at 0.
            busy: Clients to leave out: they are in flight, or have replied in this round.
        """


_DTYPES = {
    "client_id": torch.int64,
    "based_on": torch.int64,
    "attempt": torch.int64,
    "place": torch.int64,
    # `sent_s`: stored checkpoints have this name.
    "asked_s": torch.float64,
    "duration_s": torch.float64,
    "fails": torch.bool,
}


def tasks_to_tensors(pending: PendingTasks) -> dict[str, Tensor]:
    """Convert pending tasks to checkpoint tensors: one tensor per field, shape [clients].

    Without pending tasks the result is empty.

    Example:
        >>> known = PendingTask(ClientId(7), 2, 0, 5, -1.5, 3.0)
        >>> pending = (known, PendingTask(ClientId(4), 3, 1, 0, -0.5))
        >>> repr(tasks_from_tensors(tasks_to_tensors(pending))) == repr(pending)
        True
    """
    columns = zip(*pending, strict=True)
    named = zip(_DTYPES.items(), columns, strict=False)  # no tasks, no columns
    return {name: torch.tensor(column, dtype=dtype) for (name, dtype), column in named}


def tasks_from_tensors(tensors: Mapping[str, Tensor]) -> PendingTasks:
    """Restore pending tasks from the tensors of :func:`tasks_to_tensors`."""
    columns = (tensors[name].tolist() for name in _DTYPES if name in tensors)
    return tuple(PendingTask(*row) for row in zip(*columns, strict=True))
