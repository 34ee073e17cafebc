"""The one interface that differs between a simulation and a deployment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol

from fedlearn.core.codec import decode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    Failure,
    Reply,
    Request,
    SecureReply,
    TrainReply,
)
from fedlearn.errors import ProtocolError


@dataclass(frozen=True, eq=False)
class Arrival:
    """One reply, and when it came.

    Attributes:
        client_id: Whose.
        reply: The answer, or a :class:`~fedlearn.core.messages.Failure`.
        elapsed_s: Seconds since the requests were sent.
    """

    client_id: ClientId
    reply: Reply
    elapsed_s: float


class Channel(Protocol):
    """How the coordinator reaches its clients.

    A protocol of several messages calls :meth:`exchange` several times in a round; what a
    client must remember between them is the client's (or its transport's) to keep.
    """

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def exchange(
        self, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> Iterator[Arrival]:
        """Send every request and yield replies as they arrive.

        Stops when all have answered or ``deadline_s`` seconds after the call, whichever is
        first. A client that has not answered by then is absent from the result; one that
        fails answers with :class:`~fedlearn.core.messages.Failure`. The caller may stop
        iterating early: the round is closed.
        """


def as_reply(data: bytes | mmap) -> Reply:
    """Decode a reply; what is not one becomes a :class:`Failure`."""
    try:
        message = decode(data)
    except ProtocolError as error:
        return Failure(reason=str(error))
    if isinstance(message, TrainReply | EvaluateReply | SecureReply | Failure):
        return message
    return Failure(reason=f"{type(message).__name__} is not a reply")
