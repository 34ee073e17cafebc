"""What a client's process tells the application that it works for."""

from dataclasses import dataclass
from enum import StrEnum

from fedlearn.core.kinds import EVALUATE_KIND
from fedlearn.transport.content import TaskKey


class EventKind(StrEnum):
    """What has happened."""

    ENROLLED = "enrolled"  # certified by the coordinator
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"  # if by the coordinator's wish, the message says why
    EXPIRING = "expiring"  # the certificate ends soon: the message says what to do
    OFFLINE = "offline"  # told once; it is tried again, ever less often
    WAITING = "waiting"  # a condition does not hold, or the trainer is still being made
    DOWNLOADING = "downloading"
    TRAINING = "training"
    EVALUATING = "evaluating"  # the model after a round, which is the one named
    PROGRESS = "progress"  # with fraction and loss
    CANCELLED = "cancelled"  # the task was called off, by whom the message says
    UPLOADING = "uploading"
    ACCEPTED = "accepted"  # the reply counts: it was no failure
    LATE = "late"  # the round had closed without it
    REFUSED = "refused"  # the coordinator does not want the client or its reply
    POLICY = "policy"  # the client does not want the task
    FAILED = "failed"  # what goes wrong on this device
    CRASHED = "crashed"  # the training process ended by itself; it is started again


@dataclass(frozen=True, kw_only=True)
class AgentEvent:
    """One step of a client's work.

    Attributes:
        kind: What has happened.
        round_num: The round it is about, from 0; ``None``: none.
        fraction: Share of the local training done, [0, 1].
        loss: Mean training loss of the latest batch.
        message: In words, where there is more to say.
        is_final: Whether nothing more is tried until the application starts the agent again or
            the user agrees anew: trying would change nothing, and the message says what to do.
    """

    kind: EventKind
    round_num: int | None = None
    fraction: float | None = None
    loss: float | None = None
    message: str = ""
    is_final: bool = False

    @classmethod
    def of(cls, kind: EventKind, *, key: TaskKey | None = None, message: str = "") -> "AgentEvent":
        """Return what is told of a task; an evaluation is of the model after the round named."""
        round_num = None if key is None else key.round_num
        if key is not None and key.kind == EVALUATE_KIND:
            round_num = key.round_num - 1 if key.round_num else None
        return cls(kind=kind, round_num=round_num, message=message)
