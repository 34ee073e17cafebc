"""The clients in flight: each has a task and has not answered yet."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlearn.core.messages import ClientId


class PendingTask(NamedTuple):
    """A client in flight: it was asked, and has not answered yet.

    Attributes:
        based_on: The round whose model it trains.
        attempt: The how manieth drawing of clients in that round it is of, from 0.
        place: Its place in the drawing, from 0.
        asked_s: When it was asked, in seconds since the present round opened; of those that were
            asked before, negative.
        duration_s: Seconds from then to its answer; NaN where nobody knows beforehand.
        fails: Whether it is known that it will fail.
    """

    client_id: ClientId
    based_on: int
    attempt: int
    place: int
    asked_s: float
    duration_s: float = math.nan
    fails: bool = False


#: All that are in flight, in the order of asking.
Flight = tuple[PendingTask, ...]


class Draw(Protocol):
    """Draws clients to be asked, as reproducibly as a cohort."""

    def __call__(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return up to ``num`` clients that are there and not busy, in the order of asking.

        Args:
            num: How many at the most.
            round_num: Index, from 0.
            attempt: The how manieth drawing of the round, from 0.
            busy: Clients that are in flight, or in the buffer.
        """


_DTYPES = {
    "client_id": torch.int64,
    "based_on": torch.int64,
    "attempt": torch.int64,
    "place": torch.int64,
    "asked_s": torch.float64,
    "duration_s": torch.float64,
    "fails": torch.bool,
}


def flight_tensors(flight: Flight) -> dict[str, Tensor]:
    """Return who is in flight, for a checkpoint: by field one number a client; none if nobody is.

    Example:
        >>> known = PendingTask(ClientId(7), 2, 0, 5, -1.5, 3.0)
        >>> flight = (known, PendingTask(ClientId(4), 3, 1, 0, -0.5))
        >>> repr(flight_from(flight_tensors(flight))) == repr(flight)
        True
    """
    columns = zip(*flight, strict=True)
    named = zip(_DTYPES.items(), columns, strict=False)  # of nobody there are no columns
    return {name: torch.tensor(column, dtype=dtype) for (name, dtype), column in named}


def flight_from(tensors: Mapping[str, Tensor]) -> Flight:
    """Return what :func:`flight_tensors` was given."""
    columns = (tensors[name].tolist() for name in _DTYPES if name in tensors)
    return tuple(PendingTask(*row) for row in zip(*columns, strict=True))
