"""What a client works on and what it has finished: the values that its other parts share."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlearn.errors import ProtocolError
from fedlearn.transport import wire_pb2

#: A run's id becomes the name of a file.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Seconds past its deadline for which a task is kept: a coordinator that was restarted gives
#: an open round that much more time. Whether a reply is late is the coordinator's to say.
GRACE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class TaskKey:
    """Which task of which round.

    Attributes:
        run_id: Unique to the run for ever.
        kind: Class of the request.
        round_num: Round index, from 0.
        attempt: How often the round was tried before.
        exchange: Messages of this kind before it in the attempt.
    """

    run_id: str
    kind: str
    round_num: int
    attempt: int
    exchange: int

    @classmethod
    def of(cls, message: wire_pb2.TaskKey) -> "TaskKey":
        """Return the key in ``message``.

        Raises:
            ProtocolError: The run's id could not be a file's name.
        """
        if not _RUN_ID.fullmatch(message.run_id):
            raise ProtocolError(
                f"the task's run id {message.run_id[:80]!r} is not of 1 to 64 letters, digits, "
                "- and _; is this a fedlearn coordinator?"
            )
        return cls(
            run_id=message.run_id,
            kind=message.kind,
            round_num=message.round_num,
            attempt=message.attempt,
            exchange=message.exchange,
        )

    def message(self) -> wire_pb2.TaskKey:
        """Return the key for the wire."""
        return wire_pb2.TaskKey(**vars(self))


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task that the coordinator waits for.

    Attributes:
        key: Which.
        digest: Of the request's bytes.
        num_bytes: Of the request.
        data: The request itself where it is small, else empty.
        expires_unix_s: When to give it up if the coordinator says nothing, by this client's own
            clock; infinite without a deadline.
        max_reply_bytes: Largest reply that the coordinator takes.
        max_inline_bytes: Largest reply that goes inside the session's stream.
        personal: Part of the request that is for this client alone; mostly empty. It comes anew
            with the task whenever that is offered again.
    """

    key: TaskKey
    digest: bytes
    num_bytes: int
    data: bytes = field(repr=False)
    expires_unix_s: float
    max_reply_bytes: int
    max_inline_bytes: int
    personal: bytes = field(repr=False)

    @classmethod
    def of(cls, message: wire_pb2.Task, *, now_unix_s: float) -> "OpenTask":
        """Return the task in ``message``, which has just come.

        Raises:
            ProtocolError: Its key is malformed.
        """
        left_s = message.remaining_s + GRACE_S if message.remaining_s > 0.0 else math.inf
        return cls(
            key=TaskKey.of(message.key),
            digest=message.digest,
            num_bytes=message.num_bytes,
            data=message.data,
            expires_unix_s=now_unix_s + left_s,
            max_reply_bytes=message.max_reply_bytes,
            max_inline_bytes=message.max_inline_bytes,
            personal=message.personal,
        )


@dataclass(frozen=True, kw_only=True)
class HeldReply:
    """A finished reply that is not settled yet.

    Attributes:
        key: Of its task.
        digest: Of the reply's bytes.
        num_bytes: Of the reply.
        expires_unix_s: As of its task.
        max_inline_bytes: As of its task.
        path: The reply's bytes.
    """

    key: TaskKey
    digest: bytes
    num_bytes: int
    expires_unix_s: float
    max_inline_bytes: int
    path: Path

    def values(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return all but the path, for a JSON file."""
        expires = self.expires_unix_s if math.isfinite(self.expires_unix_s) else None
        return {
            "key": vars(self.key),
            "digest": self.digest.hex(),
            "num_bytes": self.num_bytes,
            "expires_unix_s": expires,
            "max_inline_bytes": self.max_inline_bytes,
        }

    @classmethod
    def from_values(cls, values: dict[str, Any], *, path: Path) -> "HeldReply":
        """Return the reply that :meth:`values` describes.

        Raises:
            KeyError, TypeError, ValueError: They are not such values.
        """
        expires = values["expires_unix_s"]
        return cls(
            key=TaskKey(**values["key"]),
            digest=bytes.fromhex(values["digest"]),
            num_bytes=values["num_bytes"],
            expires_unix_s=math.inf if expires is None else expires,
            max_inline_bytes=values["max_inline_bytes"],
            path=path,
        )
