"""What a client works on and what it has finished: the values that its other parts share."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from fedlearn.core.json_files import HEXADECIMAL, require_json
from fedlearn.core.messages import Failure
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import TaskKey

#: A run's id becomes the name of a file.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Seconds past its deadline for which a task is kept: a coordinator that was restarted gives
#: an open round that much more time. Whether a reply is late is the coordinator's to say.
GRACE_S = 900.0

#: A failure is a few words; a reply that is larger need not be looked into.
_MAX_FAILURE_BYTES = 1 << 16


def require_run_id(run_id: str) -> None:
    """Check that a run id can be a file's name.

    Raises:
        ProtocolError: It cannot.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ProtocolError(
            f"the run id {run_id[:80]!r} is not of 1 to 64 letters, digits, - and _; is this a "
            "fedlearn coordinator?"
        )


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task that the coordinator waits for.

    Attributes:
        message: As it came; its request lies in it where that is small, and with it whatever part
            of the request is for this client alone, anew whenever the task is offered again.
        expires_unix_s: When to give it up if the coordinator says nothing, by this client's own
            clock; infinite without a deadline.
        is_ahead: Whether it was sent ahead: nobody waits for it yet.
    """

    key: TaskKey
    message: wire_pb2.Task = field(repr=False)
    expires_unix_s: float
    is_ahead: bool = False

    @classmethod
    def of(cls, message: wire_pb2.Task, *, now_unix_s: float, is_ahead: bool = False) -> "OpenTask":
        """Return the task in ``message``, which has just come; raises as :func:`require_run_id`."""
        require_run_id(message.key.run_id)
        left_s = message.remaining_s + GRACE_S if message.remaining_s > 0.0 else math.inf
        key = TaskKey.of(message.key)
        expires_unix_s = now_unix_s + left_s
        return cls(key=key, message=message, expires_unix_s=expires_unix_s, is_ahead=is_ahead)

    def may_answer(self, asked: "OpenTask") -> bool:
        """Return whether the work on this, which was sent ahead, is an answer to ``asked``."""
        is_alike = (self.key.run_id, self.key.kind) == (asked.key.run_id, asked.key.kind)
        last = self.message.last_round_num
        return is_alike and self.key.round_num <= asked.key.round_num <= last


@dataclass(frozen=True, kw_only=True)
class HeldReply:
    """A finished reply that is not settled yet.

    Attributes:
        key, expires_unix_s, max_inline_bytes: As of its task.
        digest, num_bytes: Of the reply.
        path: The reply's bytes.
    """

    key: TaskKey
    digest: bytes
    num_bytes: int
    expires_unix_s: float
    max_inline_bytes: int
    path: Path

    @property
    def is_inline(self) -> bool:
        """Whether it goes inside the session's stream; else it is an upload."""
        return self.num_bytes <= min(self.max_inline_bytes, wire.MAX_INLINE_BYTES)

    def is_failure(self) -> bool:
        """Return whether it says that there is no result."""
        if self.num_bytes > _MAX_FAILURE_BYTES:
            return False
        from fedlearn.core.codec import peek  # noqa: PLC0415 (it takes torch; keys are seen without)

        try:
            return isinstance(peek(self.path.read_bytes()), Failure)
        except (OSError, ProtocolError):
            return False  # that it is of no use is found out where it is sent

    def values(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return all but the path, for a JSON file."""
        expires = self.expires_unix_s if math.isfinite(self.expires_unix_s) else None
        return {
            "key": self.key._asdict(),
            "digest": self.digest.hex(),
            "num_bytes": self.num_bytes,
            "expires_unix_s": expires,
            "max_inline_bytes": self.max_inline_bytes,
        }

    @classmethod
    def load(cls, file: Path, *, path: Path) -> "HeldReply":
        """Return the reply at ``path`` as a JSON ``file`` of :meth:`values` describes it.

        Raises:
            DeploymentError: The file is missing, cannot be read, or is damaged.
        """
        found = require_json(
            file,
            _DESCRIBED,
            raises=DeploymentError,
            holds="a reply's description",
            remedy="the reply is dropped, and the coordinator asks again if there is time",
        )
        expires = found.expires_unix_s
        return cls(
            key=found.key,
            digest=found.digest,
            num_bytes=found.num_bytes,
            expires_unix_s=math.inf if expires is None else expires,
            max_inline_bytes=found.max_inline_bytes,
            path=path,
        )


@dataclass(frozen=True, kw_only=True)
class _Described:
    """What :meth:`HeldReply.values` returns."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    key: TaskKey
    digest: bytes
    num_bytes: int
    expires_unix_s: float | None
    max_inline_bytes: int


_DESCRIBED = TypeAdapter(_Described)
