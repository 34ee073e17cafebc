"""The one interface that differs between a simulation and a deployment."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from typing import Protocol

from torch import Tensor

from fedlearn.core.codec import decode
from fedlearn.core.collecting import MAX_REASON
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    Failure,
    Reply,
    Request,
    SecureEvaluateRequest,
    SecureReply,
    SecureTrainRequest,
    TrainReply,
)
from fedlearn.errors import ProtocolError


def _tell_nobody(_: str) -> None:
    """Refuse a reply on a channel that has no way to tell its client."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """One client's reply.

    Attributes:
        elapsed_s: When it came, in seconds since the exchange was asked first.
        refuse: Says, before the exchange is used again, why the reply does not count: its client
            is told so, where the channel can. Without a word it counts.
        logged_s: Of a reply that came to an earlier process, how long its client took: the time of
            the exchange began only now; ``None`` of others.
    """

    client_id: ClientId
    reply: Reply
    elapsed_s: float
    refuse: Callable[[str], None] = _tell_nobody
    logged_s: float | None = None

    def took_s(self, asked_s: float) -> float:
        """Return how long its client took, asked ``asked_s`` after the exchange's beginning."""
        return self.elapsed_s - asked_s if self.logged_s is None else self.logged_s


class Exchange(Protocol):
    """Questions to clients and their answers, until it is closed; for one thread.

    Time is that of the channel's clock, in seconds since the first :meth:`ask`: what is sent
    later is due by the same deadline. A client has one open task at a time. It may be asked again
    once its answer has been returned, and hears of that only then.
    """

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        """Send every request; clients may be asked as long as the exchange is not closed.

        Args:
            requests: By client.
            number: Of the question among those of its kind, round and attempt, so that a process
                that goes on finds what an earlier one has received; ``None``: the next one.

        Raises:
            ValueError: The exchange is closed, or a client is asked whose answer to an earlier
                request has not been returned by :meth:`next`; nobody has been asked.
        """

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply, in order of arrival, as soon as it is there.

        A client that fails answers with :class:`~fedlearn.core.messages.Failure`. With the next
        call of this exchange, whichever it is, the reply counts as taken, unless it was refused
        (:attr:`Arrival.refuse`).

        Args:
            until_s: How long to wait, in seconds since the first :meth:`ask`; infinite: until the
                deadline. What has arrived at exactly that time is returned.

        Returns:
            ``None`` if no reply has come by then or by the deadline, and at once if nobody who
            was asked is still to answer.
        """

    def elapsed_s(self) -> float:
        """Return the seconds since the first :meth:`ask`; 0 before it."""

    def grace_until_s(self) -> float:
        """Return until when clients get time to return after a restart of the coordinator.

        In seconds since the first :meth:`ask`; 0 if there was no restart.
        """

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Wait for some clients no more: what they send is late, and they may be asked again."""

    def close(self) -> None:
        """Take no more replies: those that come later, or were not read, are late. Idempotent."""


class Channel(Protocol):
    """How the coordinator reaches its clients.

    A protocol of several stages opens several exchanges in a round, one after the other; what a
    client must remember between them is the client's (or its transport's) to keep.
    """

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def open(self, *, deadline_s: float) -> Exchange:
        """Open an exchange in which nobody has been asked yet.

        Args:
            deadline_s: When it ends, in seconds after its first question; infinite: not before
                it is closed. Clients are told, and may give up then.
        """


def ask_once(
    channel: Channel, requests: Mapping[ClientId, Request], *, deadline_s: float
) -> Iterator[Arrival]:
    """Ask in an exchange of its own and yield replies as they arrive.

    Ends when all have answered, or after ``deadline_s``, which may be infinite: whoever has not
    answered by then is absent. The exchange closes with the iteration, also if the caller leaves
    it early.
    """
    with closing(channel.open(deadline_s=deadline_s)) as exchange:
        exchange.ask(requests)
        yield from iter(partial(exchange.next, until_s=math.inf), None)


@dataclass(frozen=True)
class Asked:
    """What a cohort is asked, so that what is alike is encoded and kept once."""

    shared: Sequence[Request]  # the different ones, without what is for one client alone
    places: Mapping[ClientId, int]  # by client that of its own among them
    personal: Mapping[ClientId, bytes]  # by client its packets of secure aggregation, if it has any

    @classmethod
    def of(cls, requests: Mapping[ClientId, Request]) -> "Asked":
        """Take requests apart; those that are one object, or work on one, are alike."""
        shared: dict[tuple[type[Request], int], tuple[int, Request]] = {}
        places, personal = dict[ClientId, int](), dict[ClientId, bytes]()
        for client_id, request in requests.items():
            common, same = request, id(request)
            match request:
                case SecureTrainRequest(train=work) | SecureEvaluateRequest(evaluate=work):
                    personal[client_id] = request.message
                    common, same = replace(request, message=b""), id(work)
            place, _ = shared.setdefault((type(request), same), (len(shared), common))
            places[client_id] = place
        return cls([request for _, request in shared.values()], places, personal)


def are_same(known: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> bool:
    """Return whether these are the very same tensors; their values never change in place."""
    return known.keys() == constants.keys() and all(
        known[name] is value for name, value in constants.items()
    )


def require_free(
    awaited: Container[ClientId], requests: Iterable[ClientId], *, is_open: bool
) -> None:
    """Check that an exchange may ask, for those who implement one.

    Raises:
        ValueError: See :meth:`Exchange.ask`.
    """
    if not is_open:
        raise ValueError("this exchange is closed; open another one to ask")
    for client_id in requests:
        if client_id in awaited:
            raise ValueError(
                f"client {client_id} is asked again before its answer has been returned; ask it "
                "once `next` has returned it, or leave it out"
            )


def reply_in(data: bytes | mmap) -> Reply:
    """Decode a reply.

    Raises:
        ProtocolError: The bytes are none; what the message quotes of them is cut.
    """
    try:
        message = decode(data)
    except ProtocolError as error:
        raise type(error)(str(error)[:MAX_REASON]) from error
    if isinstance(message, TrainReply | EvaluateReply | SecureReply | Failure):
        return message
    raise ProtocolError(f"{type(message).__name__} is not a reply")


def as_reply(data: bytes | mmap) -> Reply:
    """Decode a reply; what is not one becomes a :class:`Failure`."""
    try:
        return reply_in(data)
    except ProtocolError as error:
        return Failure(reason=str(error))
