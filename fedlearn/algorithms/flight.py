"""The clients of an asynchronous run that are in flight, and the buffer that their updates fill.

A state machine without network and clock: it is told what happened, and says who may be asked.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.core.messages import ClientId
from fedlearn.errors import RoundError


class Asked(NamedTuple):
    """A client in flight: it was asked, and nothing has become of it yet.

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
Flight = tuple[Asked, ...]


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


class Buffer:
    """One round of an asynchronous run, from the step before to its own.

    Guarantees:
        No client is in flight twice, or asked again in a round in which it answered: of one client
        one update at the most is sent by the model of a round, and is in a buffer. One that failed
        is asked again only where nobody is in flight and nobody else is there. No more are in
        flight than can count: of more than ``num_counting`` one would be too stale, whatever
        happens.

    Args:
        asynchrony: Its limits.
        flight: Who is in flight as the round opens.
        round_num: Index, from 0.
        most: Clients in flight from which on nobody is asked; ``None``: the concurrency.
    """

    def __init__(
        self,
        asynchrony: Asynchrony,
        flight: Iterable[Asked],
        *,
        round_num: int,
        most: int | None = None,
    ) -> None:
        self._most = asynchrony.concurrency if most is None else most
        self._asynchrony, self.round_num = asynchrony, round_num
        self._flying = {each.client_id: each for each in flight}
        self._taken = dict[ClientId, Asked]()
        self._answered = set[ClientId]()
        self._failed = set[ClientId]()  # and may be asked again
        self._num_failed = Counter[ClientId]()
        self._drawn = deque[Asked]()
        self._num_draws = 0

    def limit(self, most: int) -> None:
        """Have nobody asked while so many are in flight; those that are, go on."""
        self._most = most

    @property
    def is_full(self) -> bool:
        """Whether the server steps."""
        return len(self._taken) == self._asynchrony.buffer_size

    @property
    def flight(self) -> Flight:
        """Who is in flight, in the order of asking."""
        return tuple(self._flying.values())

    @property
    def taken(self) -> Mapping[ClientId, Asked]:
        """Whose updates are in the buffer, in the order of their coming."""
        return self._taken

    def staleness(self, asked: Asked) -> int:
        """Return how many rounds the model has changed in since a client was sent it."""
        return self.round_num - asked.based_on

    def give_up(self) -> list[Asked]:
        """Return those whose updates would be too stale, who are in flight no more."""
        stale = [
            each
            for each in self._flying.values()
            if self.staleness(each) > self._asynchrony.max_staleness
        ]
        for each in stale:
            del self._flying[each.client_id]
        return stale

    # ---- Who is asked ---------------------------------------------------------------------

    def draw(self, draw: Draw) -> Sequence[Asked]:
        """Draw those who will be asked next, if there is somebody to ask and nobody drawn.

        They are as many as the round asks if nobody fails: one drawing is of nearly all.
        """
        if self._drawn or not self._num_askable:
            return ()
        free = self._most - len(self._flying)
        to_come = self._asynchrony.buffer_size - len(self._taken) - 1
        num, attempt = min(free + max(0, to_come), self._num_counting_more), self._num_draws
        others = partial(draw, num, round_num=self.round_num, attempt=attempt)
        busy = self._flying.keys() | self._answered
        drawn = others(busy=busy | self._failed)
        if not drawn and self._failed and not self._flying:
            self._failed.clear()  # it is they, or nobody
            drawn = others(busy=busy)
        self._num_draws += bool(drawn)
        return [
            Asked(client_id, self.round_num, attempt, place, math.nan)
            for place, client_id in enumerate(drawn)
        ]

    @property
    def has_missed_any(self) -> bool:
        """Whether some had their turn in this round, and nothing of them is in the buffer.

        They were late, kept failing, or sent what cannot be used, and are not asked again on this
        model.
        """
        return not self._answered <= self._taken.keys()

    @property
    def is_over_limit(self) -> bool:
        """Whether more are in flight than may be: somebody who lands is not asked next."""
        return len(self._flying) > self._most

    def could_ask_others(self, available: Iterable[ClientId]) -> bool:
        """Return whether some who are there are neither in flight nor have answered."""
        return not (self._flying.keys() | self._answered).issuperset(available)

    def put(self, drawn: Iterable[Asked]) -> None:
        """Take those who were drawn, with what is known of them, to be asked by and by."""
        self._drawn.extend(drawn)

    def ask(self, now_s: float) -> list[Asked]:
        """Return those who are asked now: they are in flight from here on."""
        asked = list[Asked]()
        while self._drawn and self._num_askable:
            each = self._drawn.popleft()._replace(asked_s=now_s)
            # Where a process goes on with a round, some may have landed in another order.
            if each.client_id not in self._flying and each.client_id not in self._answered:
                self._flying[each.client_id] = each
                asked.append(each)
        return asked

    @property
    def _num_askable(self) -> int:
        free = self._most - len(self._flying)
        return max(0, min(free, self._num_counting_more))

    @property
    def _num_counting_more(self) -> int:
        """How many updates can count beside those in the buffer and in flight."""
        return self._asynchrony.num_counting - len(self._flying) - len(self._taken)

    # ---- What becomes of them -------------------------------------------------------------

    def land(self, client_id: ClientId) -> Asked:
        """Return a client that is in flight no more: it answered, failed, or took too long.

        Raises:
            RoundError: It is not in flight.
        """
        if client_id not in self._flying:
            raise RoundError(f"client {client_id} was not asked, or has answered before")
        self._answered.add(client_id)
        return self._flying.pop(client_id)

    def excuse(self, client_id: ClientId) -> None:
        """Let one that landed be asked again in this round: what it sent is in no buffer."""
        self._answered.discard(client_id)

    def fail(self, client_id: ClientId, *, max_retries: int) -> None:
        """Let one that landed be asked again after all others: it failed, and sent no update.

        So many times: one that always fails has had its turn.
        """
        self._num_failed[client_id] += 1
        if self._num_failed[client_id] <= max_retries:
            self.excuse(client_id)
            self._failed.add(client_id)

    def take(self, asked: Asked) -> None:
        """Put the update of one that landed into the buffer."""
        self._taken[asked.client_id] = asked

    def refuse(self, client_id: ClientId) -> None:
        """Take an update out of the buffer that must not be aggregated."""
        del self._taken[client_id]

    # ---- The step -------------------------------------------------------------------------

    def histogram(self) -> dict[int, int]:
        """Return how many updates in the buffer have which staleness, in its order."""
        return dict(sorted(Counter(map(self.staleness, self._taken.values())).items()))

    def flight_after(self, closed_s: float) -> Flight:
        """Return who is in flight when the round has closed, as the next round sees it."""
        return tuple(
            each._replace(asked_s=each.asked_s - closed_s) for each in self._flying.values()
        )


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
        >>> flight = (Asked(ClientId(7), 2, 0, 5, -1.5, 3.0), Asked(ClientId(4), 3, 1, 0, -0.5))
        >>> repr(flight_from(flight_tensors(flight))) == repr(flight)
        True
    """
    columns = zip(*flight, strict=True)
    named = zip(_DTYPES.items(), columns, strict=False)  # of nobody there are no columns
    return {name: torch.tensor(column, dtype=dtype) for (name, dtype), column in named}


def flight_from(tensors: Mapping[str, Tensor]) -> Flight:
    """Return what :func:`flight_tensors` was given."""
    columns = (tensors[name].tolist() for name in _DTYPES if name in tensors)
    return tuple(Asked(*row) for row in zip(*columns, strict=True))
