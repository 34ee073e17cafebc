"""The channel: sends requests to clients and receives replies, in memory or over a network."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from typing import Protocol

from torch import Tensor

from fedlearn.core.codec import decode
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
from fedlearn.core.participations import MAX_REASON
from fedlearn.errors import ProtocolError


def _ignore_refusal(_: str) -> None:
    """Ignore a refusal on a channel that cannot report it to the client."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """One client's reply.

    Attributes:
        elapsed_s: When it arrived, in seconds since the exchange first asked.
        refuse: Rejects the reply, with the reason, which the client receives where the channel can
            send it. Call it before the exchange is used again; otherwise the reply counts.
        logged_s: If the reply arrived at an earlier process, the seconds that its client took,
            since the exchange's clock has restarted; ``None`` otherwise.
    """

    client_id: ClientId
    reply: Reply
    elapsed_s: float
    refuse: Callable[[str], None] = _ignore_refusal
    logged_s: float | None = None

    def duration_s(self, sent_s: float) -> float:
        """Return how long the client took, in seconds, if it was asked at ``sent_s``."""
        return self.elapsed_s - sent_s if self.logged_s is None else self.logged_s


class Exchange(Protocol):
    """Questions to clients and their replies, until it is closed; for one thread.

    Time is that of the channel's clock, in seconds since the first :meth:`ask`; later requests
    have the same deadline. A client has one open task at a time. It may be asked again once its
    reply has been returned, and receives the new task only then.
    """

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        """Send every request; allowed until the exchange is closed.

        Args:
            requests: By client.
            number: Index of the question among those of its kind, round and attempt, so that a
                resumed process finds the replies that an earlier one received; ``None``: the next
                index.

        Raises:
            ValueError: The exchange is closed, or a client is asked whose reply to an earlier
                request has not been returned by :meth:`next`; no request has been sent.
        """

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply, in order of arrival, as soon as it is available.

        A client that fails answers with :class:`~fedlearn.core.messages.Failure`. The next call of
        any method of this exchange marks the reply as accepted, unless it was refused
        (:attr:`Arrival.refuse`).

        Args:
            until_s: How long to wait, in seconds since the first :meth:`ask`; infinite: until the
                deadline. A reply that arrives at exactly that time is returned.

        Returns:
            ``None`` if no reply has come by then or by the deadline, and at once if no client is
            awaited.
        """

    def elapsed_s(self) -> float:
        """Return the seconds since the first :meth:`ask`; 0 before it."""

    def grace_until_s(self) -> float:
        """Return until when clients have time to reconnect after a restart of the coordinator.

        In seconds since the first :meth:`ask`; 0 if there was no restart.
        """

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Stop waiting for some clients: their replies are late, and they may be asked again."""

    def close(self) -> None:
        """Take no more replies: later and unread ones are late. Idempotent."""


class Channel(Protocol):
    """How the coordinator reaches its clients.

    A protocol of several stages opens several exchanges in a round, one after the other; a client
    (or its transport) must itself keep its state between them.
    """

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def open(self, *, deadline_s: float) -> Exchange:
        """Open an exchange; no client is asked yet.

        Args:
            deadline_s: When it ends, in seconds after its first question; infinite: not before it
                is closed. Clients receive the deadline, and may give up then.
        """


def ask_once(
    channel: Channel, requests: Mapping[ClientId, Request], *, deadline_s: float
) -> Iterator[Arrival]:
    """Ask in a separate exchange and yield replies as they arrive.

    Ends when all clients have answered, or after ``deadline_s``, which may be infinite; clients
    that have not answered by then are absent. The exchange closes with the iteration, also if the
    caller leaves it early.
    """
    with closing(channel.open(deadline_s=deadline_s)) as exchange:
        exchange.ask(requests)
        yield from iter(partial(exchange.next, until_s=math.inf), None)


@dataclass(frozen=True)
class CohortRequests:
    """The requests of a cohort, split so that shared parts are encoded and stored once."""

    shared: Sequence[Request]  # the distinct requests, without personal parts
    places: Mapping[ClientId, int]  # by client the index of its request in `shared`
    personal: Mapping[ClientId, bytes]  # by client its packets of secure aggregation, if it has any

    @classmethod
    def of(cls, requests: Mapping[ClientId, Request]) -> "CohortRequests":
        """Split requests; those that are, or wrap, the same object share one entry."""
        # Keyed by identity: comparing models by value would cost more than it saves. `requests`
        # keeps the objects alive, so no id is used twice.
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
    """Return whether these are the same tensor objects, whose values never change in place."""
    return known.keys() == constants.keys() and all(
        known[name] is value for name, value in constants.items()
    )


def require_free(
    awaited: Container[ClientId], requests: Iterable[ClientId], *, is_open: bool
) -> None:
    """Check that an exchange may send these requests, for implementations of the protocol.

    Raises:
        ValueError: See :meth:`Exchange.ask`.
    """
    if not is_open:
        raise ValueError("this exchange is closed; open another one to send requests")
    for client_id in requests:
        if client_id in awaited:
            raise ValueError(
                f"client {client_id} is asked again before its reply has been returned; ask it "
                "after `next` has returned the reply, or leave it out"
            )


def decode_reply(data: bytes | mmap) -> Reply:
    """Decode a reply.

    Raises:
        ProtocolError: The bytes are not a reply; the message is cut, since it may quote them.
    """
    try:
        message = decode(data)
    except ProtocolError as error:
        # The same class: callers treat a reply of another version differently.
        raise type(error)(str(error)[:MAX_REASON]) from error
    if isinstance(message, TrainReply | EvaluateReply | SecureReply | Failure):
        return message
    raise ProtocolError(f"{type(message).__name__} is not a reply")


def decode_reply_or_failure(data: bytes | mmap) -> Reply:
    """Decode a reply; bytes that are not a reply become a :class:`Failure`."""
    try:
        return decode_reply(data)
    except ProtocolError as error:
        return Failure(reason=str(error))
