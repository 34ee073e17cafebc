"""The state of questions, without a network: which clients were asked, and which replies count.

An exchange sends one question to a cohort, or several, one after the other: each has its own key,
log and verdicts. They stay open together until the exchange closes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.transport.content import TaskKey

#: How many closed questions keep their verdicts: always the last 32, and older ones while all
#: verdicts together are at most 10,000.
_NUM_PAST, _NUM_VERDICTS = 32, 10_000


class ClientPhase(StrEnum):
    """A client's progress with its task, as the operator sees it."""

    ASKED = "asked"  # but has not connected since
    CONNECTED = "connected"  # has been sent the task
    DOWNLOADING = "downloading"
    TRAINING = "training"
    UPLOADING = "uploading"
    REPORTED = "reported"
    FAILED = "failed"
    GONE = "gone"


class Verdict(StrEnum):
    """Whether a reply counts."""

    ACCEPTED = "accepted"
    LATE = "late"
    REFUSED = "refused"


@dataclass(frozen=True)
class Ruling:
    """A verdict and its reason, for people; refusals also have one word to count them by."""

    verdict: Verdict
    reason: str = ""
    cause: str = ""


def refuse(reason: str, cause: str) -> Ruling:
    """Return the verdict on a reply that breaks a rule."""
    return Ruling(Verdict.REFUSED, reason, cause)


class ReplyState(Enum):
    """The state of a reply that has no verdict yet."""

    OPEN = auto()  # it may be sent now
    TAKEN = auto()  # it was received, and waits for its verdict
    UNKNOWN = auto()  # this process has not opened the question (again) yet


def refuse_unusable(reason: str) -> Ruling:
    """Return the verdict on a reply that was read but does not count."""
    return refuse(reason, "unusable")


ACCEPTED = Ruling(Verdict.ACCEPTED)
LATE = Ruling(Verdict.LATE, "the coordinator no longer waits for this reply")

Judgment: TypeAlias = Ruling | ReplyState


@dataclass
class Participant:
    """A client that was asked a question.

    Attributes:
        offer: Index of its request among those of the question.
        since_s: When it entered its phase, on the server's clock.
        is_taken: Whether its reply has been received.
        ruling: The final verdict on its reply.
    """

    offer: int
    phase: ClientPhase
    since_s: float
    is_taken: bool = False
    ruling: Ruling | None = None


@dataclass(kw_only=True)
class QuestionState:
    """One question from the first request to its close.

    Attributes:
        participants: All clients that were asked.
        logged: Clients whose replies are durable, in order; they count unless they are late.
        num_consumed: Number of them, from the first, that have their verdict.
    """

    key: TaskKey
    participants: dict[ClientId, Participant]
    logged: list[ClientId] = field(default_factory=list)
    num_consumed: int = 0

    @classmethod
    def of(cls, key: TaskKey, offers: Mapping[ClientId, int], *, now_s: float) -> "QuestionState":
        """Create a question that no client has answered."""
        participants = {
            each: Participant(offer, ClientPhase.ASKED, now_s) for each, offer in offers.items()
        }
        return cls(key=key, participants=participants)

    def move(self, client_id: ClientId, phase: ClientPhase, *, now_s: float) -> None:
        """Set a client's phase; nothing changes once its reply has been received."""
        participant = self.participants.get(client_id)
        if participant is not None and not participant.is_taken and participant.phase != phase:
            participant.phase, participant.since_s = phase, now_s

    def is_awaited(self, client_id: ClientId) -> bool:
        """Whether this client's reply is waited for."""
        participant = self.participants.get(client_id)
        return participant is not None and not participant.is_taken

    def take(self, client_id: ClientId) -> None:
        """Note that the reply of an awaited client is being logged."""
        self.participants[client_id].is_taken = True

    def put_back(self, client_id: ClientId) -> None:
        """Note that the reply could not be logged: the client is awaited again."""
        self.participants[client_id].is_taken = False

    def log(self, client_id: ClientId, *, now_s: float) -> None:
        """Note that the reply of a client is durable."""
        participant = self.participants[client_id]
        participant.is_taken, participant.phase = True, ClientPhase.REPORTED
        participant.since_s = now_s
        self.logged.append(client_id)

    def consume(self, *, ruling: Ruling, failed: bool) -> ClientId:
        """Record the verdict on the next reply, or its client's failure; return the client."""
        client_id = self.logged[self.num_consumed]
        self.num_consumed += 1
        participant = self.participants[client_id]
        participant.ruling = ruling
        if failed or ruling.verdict is Verdict.REFUSED:
            participant.phase = ClientPhase.FAILED
        return client_id

    def collect_rulings(self) -> dict[ClientId, Ruling]:
        """Return the verdicts so far."""
        found = {each: self.participants[each].ruling for each in self.logged[: self.num_consumed]}
        return {each: ruling for each, ruling in found.items() if ruling is not None}

    def split_unsettled(self) -> tuple[list[ClientId], list[ClientId]]:
        """Return the clients with unread replies, and those that have not answered.

        If the question closes now, the former are late.
        """
        silent = [each for each, found in self.participants.items() if not found.is_taken]
        return self.logged[self.num_consumed :], silent

    def judge(self, client_id: ClientId) -> Judgment:
        """Return the verdict on a reply of ``client_id``, or its state so far."""
        participant = self.participants.get(client_id)
        if participant is None:
            return refuse("this client was not asked", "not_asked")
        if not participant.is_taken:
            return ReplyState.OPEN
        return ReplyState.TAKEN if participant.ruling is None else participant.ruling


class VerdictHistory:
    """The verdicts on a run's questions that are closed, or not open yet.

    ``run_id`` is the run's id; ``None``: that of no run, so that every reply belongs to another.
    """

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self._past: OrderedDict[TaskKey, Mapping[ClientId, Ruling]] = OrderedDict()
        self._latest: dict[str, tuple[int, int, int]] = {}

    def open(self, key: TaskKey) -> None:
        """Forget the verdicts on a question because it is open, perhaps again."""
        self._past.pop(key, None)
        self._latest[key.kind] = key.order

    def remember(self, key: TaskKey, rulings: Mapping[ClientId, Ruling]) -> None:
        """Record the verdicts on a closed question; replies without one are late."""
        self._past[key] = rulings
        while len(self._past) > _NUM_PAST and sum(map(len, self._past.values())) > _NUM_VERDICTS:
            self._past.popitem(last=False)

    def is_past(self, key: TaskKey) -> bool:
        """Whether a question is closed and its verdicts are known."""
        return key in self._past

    def judge(self, key: TaskKey, client_id: ClientId) -> Judgment:
        """Return the verdict on a client's reply to a question that is not open."""
        if key.run_id != self.run_id:
            return refuse("it belongs to another run", "other_run")
        if key in self._past:
            return self._past[key].get(client_id, LATE)
        # Older than the last question of its kind, and forgotten: late. A newer one may be a
        # question that this process has yet to reopen.
        latest = self._latest.get(key.kind)
        if latest is not None and key.order < latest:
            return LATE
        return ReplyState.UNKNOWN
