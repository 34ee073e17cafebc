"""The task that a client works on, and the reply it has finished."""

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

#: A run's id becomes a file name, so it must not contain path separators.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Seconds past its deadline for which a task is kept, because a restarted coordinator extends open
#: rounds by as much. The coordinator decides whether a reply is late.
GRACE_S = 900.0

#: A failure is a short message, so a larger reply need not be parsed to rule it out.
_MAX_FAILURE_BYTES = 1 << 16


def is_run_id(run_id: str) -> bool:
    """Whether a run id can be a file's name."""
    return _RUN_ID.fullmatch(run_id) is not None


def require_run_id(run_id: str) -> None:
    """Check that a run id can be a file's name.

    Raises:
        ProtocolError: It cannot.
    """
    if not is_run_id(run_id):
        raise ProtocolError(
            f"the run id {run_id[:80]!r} is not 1 to 64 letters, digits, - and _; is this a "
            "fedlearn coordinator?"
        )


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task that the coordinator has sent or announced.

    Attributes:
        key: Identifies the task.
        message: The message as received. It contains a small request itself, and the personal part
            of a request; both are sent again whenever the task is offered again.
        expires_unix_s: When to give up without further word from the coordinator, by this client's
            clock; infinite without a deadline.
        is_announced: Whether it was only announced; the coordinator does not wait for it yet.
    """

    key: TaskKey
    message: wire_pb2.Task = field(repr=False)
    expires_unix_s: float
    is_announced: bool = False

    @classmethod
    def of(
        cls, message: wire_pb2.Task, *, now_unix_s: float, is_announced: bool = False
    ) -> "OpenTask":
        """Read the task from a ``message`` just received; raises as :func:`require_run_id`."""
        require_run_id(message.key.run_id)
        left_s = message.remaining_s + GRACE_S if message.remaining_s > 0.0 else math.inf
        key = TaskKey.of(message.key)
        expires_unix_s = now_unix_s + left_s
        return cls(
            key=key, message=message, expires_unix_s=expires_unix_s, is_announced=is_announced
        )

    def may_answer(self, task: "OpenTask") -> bool:
        """Check whether the result of this announced task is recent enough to answer ``task``."""
        is_alike = (self.key.run_id, self.key.kind) == (task.key.run_id, task.key.kind)
        last = self.message.last_round_num
        return is_alike and self.key.round_num <= task.key.round_num <= last


@dataclass(frozen=True, kw_only=True)
class HeldReply:
    """A finished reply that is not settled yet.

    Attributes:
        key, expires_unix_s, max_inline_bytes: Copied from its task.
        digest, num_bytes: Digest and size of the reply.
        path: File with the reply's bytes.
        study: Name of the study of its run; empty: none.
        traceparent: The coordinator's span that asked for it; empty if there is none.
        trainer: What was run; empty: unknown.
    """

    key: TaskKey
    digest: bytes
    num_bytes: int
    expires_unix_s: float
    max_inline_bytes: int
    path: Path
    study: str = ""
    traceparent: str = ""
    trainer: str = ""

    @property
    def is_inline(self) -> bool:
        """Whether it is sent inside the session's stream, rather than uploaded separately."""
        return self.num_bytes <= min(self.max_inline_bytes, wire.MAX_INLINE_BYTES)

    def is_failure(self) -> bool:
        """Check whether the reply reports a failure; false if it cannot be read."""
        if self.num_bytes > _MAX_FAILURE_BYTES:
            return False
        from fedlearn.core.codec import peek  # noqa: PLC0415 (imports torch, which is slow)

        try:
            return isinstance(peek(self.path.read_bytes()), Failure)
        except (OSError, ProtocolError):
            return False  # sending it will report the error

    def values(self) -> dict[str, Any]:  # Any: what JSON holds
        """Convert all attributes but the path to values for a JSON file."""
        expires = self.expires_unix_s if math.isfinite(self.expires_unix_s) else None
        return {
            "key": self.key._asdict(),
            "digest": self.digest.hex(),
            "num_bytes": self.num_bytes,
            "expires_unix_s": expires,
            "max_inline_bytes": self.max_inline_bytes,
            "study": self.study,
            "traceparent": self.traceparent,
            "trainer": self.trainer,
        }

    @classmethod
    def load(cls, file: Path, *, path: Path) -> "HeldReply":
        """Load the description of the reply at ``path`` from a JSON ``file`` of :meth:`values`.

        Raises:
            DeploymentError: The file is missing, cannot be read, or is damaged.
        """
        found = require_json(
            file,
            _REPLY_DESCRIPTION,
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
            study=found.study,
            path=path,
            traceparent=found.traceparent,
            trainer=found.trainer,
        )


@dataclass(frozen=True, kw_only=True)
class _ReplyDescription:
    """The type of the values that :meth:`HeldReply.values` returns."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    key: TaskKey
    digest: bytes
    num_bytes: int
    expires_unix_s: float | None
    max_inline_bytes: int
    study: str = ""  # earlier versions wrote none
    traceparent: str = ""  # an earlier version has stored none
    trainer: str = ""


_REPLY_DESCRIPTION = TypeAdapter(_ReplyDescription)
