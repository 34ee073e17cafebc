"""Events that the training process reports to its application."""

from dataclasses import dataclass
from enum import StrEnum

from fedlearn.core.kinds import EVALUATE_KIND
from fedlearn.transport.content import TaskKey


class EventKind(StrEnum):
    """The kind of an event."""

    ENROLLED = "enrolled"  # the coordinator has issued or renewed a certificate
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"  # the message gives the coordinator's reason, if it has one
    EXPIRING = "expiring"  # the certificate ends soon; the message says what to do
    OFFLINE = "offline"  # sent once, although the client keeps retrying with growing back-off
    WAITING = "waiting"  # a condition does not hold, or creating the trainer takes long
    DOWNLOADING = "downloading"
    TRAINING = "training"
    EVALUATING = "evaluating"  # evaluates the model after round `round_num`
    SUMMING = "summing"  # a step of a secure sum that does not train or evaluate
    PROGRESS = "progress"  # with fraction and loss
    CANCELLED = "cancelled"  # the task was cancelled; the message says why
    UPLOADING = "uploading"
    ACCEPTED = "accepted"  # the reply counts, and is not a failure
    LATE = "late"  # the round had closed before the reply arrived
    REFUSED = "refused"  # the coordinator rejected the client or its reply
    BUNDLE = "bundle"  # a run's bundle does not run here, or has come; the message says why
    POLICY = "policy"  # the client's policy forbids the task
    FAILED = "failed"  # an error on this device
    CRASHED = "crashed"  # the training process died; it is restarted


@dataclass(frozen=True, kw_only=True)
class AgentEvent:
    """One step of a client's work.

    Attributes:
        kind: The kind of event.
        run_id: Id of the run whose task it concerns; ``None`` if it concerns no task.
        round_num: The round that it concerns, from 0; ``None`` if it concerns no round.
        fraction: Share of the local training that is done, [0, 1].
        loss: Mean training loss of the latest batch.
        message: Details in words; may be empty.
        is_final: Whether the client gives up, because a retry would fail in the same way, until the
            application starts the agent again or the user gives consent again. The message says
            what to do.
    """

    kind: EventKind
    run_id: str | None = None
    round_num: int | None = None
    fraction: float | None = None
    loss: float | None = None
    message: str = ""
    is_final: bool = False

    @classmethod
    def of(cls, kind: EventKind, *, key: TaskKey | None = None, message: str = "") -> "AgentEvent":
        """Create an event about the task with ``key``.

        The request of round r evaluates the model after round r - 1, which the event reports.
        """
        round_num = None if key is None else key.round_num
        if key is not None and (kind is EventKind.EVALUATING or key.kind == EVALUATE_KIND):
            round_num = key.round_num - 1 if key.round_num else None
        run_id = None if key is None else key.run_id
        return cls(kind=kind, run_id=run_id, round_num=round_num, message=message)
