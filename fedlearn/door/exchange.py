"""What the door knows of a question, without a network: who was asked, who counts, who is late.

An exchange is one question to a cohort, or several, one after the other: each has a key, a log and
verdicts of its own. They stay open together until the exchange closes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.transport.content import TaskKey

#: Questions whose verdicts are still known after they have closed: so many at least, and more as
#: long as they are few together.
_NUM_PAST, _NUM_VERDICTS = 32, 10_000


class ClientPhase(StrEnum):
    """How far a client is, as the operator reads it."""

    ASKED = "asked"  # and not connected since
    CONNECTED = "connected"  # has been sent the task
    DOWNLOADING = "downloading"
    TRAINING = "training"
    UPLOADING = "uploading"
    REPORTED = "reported"
    FAILED = "failed"
    GONE = "gone"


class Verdict(StrEnum):
    """What becomes of a reply."""

    ACCEPTED = "accepted"
    LATE = "late"
    REFUSED = "refused"


@dataclass(frozen=True)
class Ruling:
    """A verdict and, for a person, why; of a refusal one word to count by, too."""

    verdict: Verdict
    reason: str = ""
    cause: str = ""


def refusal(reason: str, cause: str) -> Ruling:
    """Return the verdict on a reply that breaks a rule."""
    return Ruling(Verdict.REFUSED, reason, cause)


class Standing(Enum):
    """A reply without a verdict so far."""

    OPEN = auto()  # it may come now
    TAKEN = auto()  # it is here, and waits for its verdict
    UNKNOWN = auto()  # to a question that this process has not opened (again) yet


def unusable(reason: str) -> Ruling:
    """Return the verdict on a reply that was read, and does not count."""
    return refusal(reason, "unusable")


ACCEPTED = Ruling(Verdict.ACCEPTED)
LATE = Ruling(Verdict.LATE, "the exchange has closed without it")

Judgement: TypeAlias = Ruling | Standing


@dataclass
class Participant:
    """One client that is asked.

    Attributes:
        offer: Which of the requests it is sent.
        since_s: When it came to its phase, on the door's clock.
        is_taken: Whether its reply is here.
        ruling: What became of it, for good.
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
        participants: All that are asked.
        logged: Those whose reply counts unless it is late, in order.
        num_consumed: The first so many of them have their verdict.
    """

    key: TaskKey
    participants: dict[ClientId, Participant]
    logged: list[ClientId] = field(default_factory=list)
    num_consumed: int = 0

    @classmethod
    def of(cls, key: TaskKey, offers: Mapping[ClientId, int], *, now_s: float) -> "QuestionState":
        """Return a question that nobody has answered."""
        asked = {
            each: Participant(offer, ClientPhase.ASKED, now_s) for each, offer in offers.items()
        }
        return cls(key=key, participants=asked)

    def move(self, client_id: ClientId, phase: ClientPhase, *, now_s: float) -> None:
        """Note how far a client is; nothing changes once its reply is here."""
        participant = self.participants.get(client_id)
        if participant is not None and not participant.is_taken and participant.phase != phase:
            participant.phase, participant.since_s = phase, now_s

    def is_awaited(self, client_id: ClientId) -> bool:
        """Whether this client's reply is waited for."""
        participant = self.participants.get(client_id)
        return participant is not None and not participant.is_taken

    def take(self, client_id: ClientId) -> None:
        """Note that the reply of an awaited client is on its way into the log."""
        self.participants[client_id].is_taken = True

    def put_back(self, client_id: ClientId) -> None:
        """Note that it could not be logged: the client is awaited again."""
        self.participants[client_id].is_taken = False

    def log(self, client_id: ClientId, *, now_s: float) -> None:
        """Note that the reply of a client is durable."""
        participant = self.participants[client_id]
        participant.is_taken, participant.phase = True, ClientPhase.REPORTED
        participant.since_s = now_s
        self.logged.append(client_id)

    def consume(self, *, ruling: Ruling, failed: bool) -> ClientId:
        """Note the verdict on the next reply, or that its client failed; return whose it is."""
        client_id = self.logged[self.num_consumed]
        self.num_consumed += 1
        participant = self.participants[client_id]
        participant.ruling = ruling
        if failed or ruling.verdict is Verdict.REFUSED:
            participant.phase = ClientPhase.FAILED
        return client_id

    def rulings(self) -> dict[ClientId, Ruling]:
        """Return the verdicts so far."""
        found = {each: self.participants[each].ruling for each in self.logged[: self.num_consumed]}
        return {each: ruling for each, ruling in found.items() if ruling is not None}

    def rest(self) -> tuple[list[ClientId], list[ClientId]]:
        """Return whose replies came too late if this is the end, and who has not answered."""
        silent = [each for each, found in self.participants.items() if not found.is_taken]
        return self.logged[self.num_consumed :], silent

    def judge(self, client_id: ClientId) -> Judgement:
        """Return what is to be said of a reply of ``client_id``."""
        participant = self.participants.get(client_id)
        if participant is None:
            return refusal("this client was not asked", "not_asked")
        if not participant.is_taken:
            return Standing.OPEN
        return Standing.TAKEN if participant.ruling is None else participant.ruling


class ExchangeHistory:
    """The verdicts on a run's questions that are not open any more, or not yet."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._past: OrderedDict[TaskKey, Mapping[ClientId, Ruling]] = OrderedDict()
        self._latest: dict[str, tuple[int, int, int]] = {}

    def open(self, key: TaskKey) -> None:
        """Forget the verdicts on a question: it is open, perhaps once more."""
        self._past.pop(key, None)
        self._latest[key.kind] = key.order

    def remember(self, key: TaskKey, rulings: Mapping[ClientId, Ruling]) -> None:
        """Note the verdicts on replies to a closed question; all others are late."""
        self._past[key] = rulings
        while len(self._past) > _NUM_PAST and sum(map(len, self._past.values())) > _NUM_VERDICTS:
            self._past.popitem(last=False)

    def is_past(self, key: TaskKey) -> bool:
        """Whether the verdicts on a question stand."""
        return key in self._past

    def judge(self, key: TaskKey, client_id: ClientId) -> Judgement:
        """Return what is to be said of a client's reply to a question that is not open."""
        if key.run_id != self.run_id:
            return refusal("it belongs to another run", "other_run")
        if key in self._past:
            return self._past[key].get(client_id, LATE)
        latest = self._latest.get(key.kind)
        if latest is not None and key.order < latest:
            return LATE
        return Standing.UNKNOWN


@dataclass
class TokenBucket:
    """Bounds how often something happens: ``rate_per_s`` on average, two seconds' worth at once.

    Example:
        >>> bucket = TokenBucket(rate_per_s=10.0, now_s=0.0)
        >>> [bucket.take(now_s=0.0) for _ in range(20)][-1], bucket.take(now_s=0.0)
        (0.0, 0.1)
    """

    rate_per_s: float
    now_s: float
    _tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = 2.0 * self.rate_per_s

    def has(self, *, now_s: float) -> bool:
        """Take one if it is there; return whether it was."""
        if self.take(now_s=now_s) == 0.0:
            return True
        self._tokens += 1.0
        return False

    def take(self, *, now_s: float) -> float:
        """Take one and return the seconds to wait before going on; 0 within the bound."""
        grown = self._tokens + (now_s - self.now_s) * self.rate_per_s
        self._tokens = min(grown, 2.0 * self.rate_per_s) - 1.0
        self.now_s = now_s
        return max(0.0, -self._tokens / self.rate_per_s)
