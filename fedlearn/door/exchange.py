"""What the door knows of an exchange, without a network: who was asked, who counts, who is late.

Pure bookkeeping on one thread; the service around it moves bytes and tells the clients.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple, TypeAlias

from fedlearn.core.messages import ClientId

#: Exchanges whose receipts are still known after they have closed.
_NUM_PAST = 32


class Key(NamedTuple):
    """Which exchange of which round; every reply is bound to one.

    Attributes:
        run_id: Unique to the run.
        kind: Class of the request.
        round_num: Of the request.
        attempt: Of the round.
        exchange: Exchanges of this kind before it in the attempt.
    """

    run_id: str
    kind: str
    round_num: int
    attempt: int
    exchange: int

    @property
    def order(self) -> tuple[int, int, int]:
        """What grows from one exchange of a kind to the next."""
        return self.round_num, self.attempt, self.exchange

    @property
    def folder(self) -> str:
        """Name of the folder for what clients send. Only for a key of our own making."""
        return f"{self.kind}-{self.round_num:06d}-{self.attempt}-{self.exchange}"

    @classmethod
    def of_folder(cls, run_id: str, name: str) -> "Key":
        """Return the key whose folder has this name."""
        kind, *numbers = name.split("-")
        round_num, attempt, exchange = map(int, numbers)
        return cls(run_id, kind, round_num, attempt, exchange)


class Phase(StrEnum):
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
    """A verdict and, for a person, why.

    Attributes:
        verdict: Final.
        reason: Short; empty where it speaks for itself.
        cause: One word to count by; only of a refusal.
    """

    verdict: Verdict
    reason: str = ""
    cause: str = ""


class Standing(Enum):
    """A reply without a verdict so far."""

    OPEN = auto()  # it may come now
    TAKEN = auto()  # it is here, and waits for its verdict
    UNKNOWN = auto()  # of an exchange that this process has not opened (again) yet


ACCEPTED = Ruling(Verdict.ACCEPTED)
LATE = Ruling(Verdict.LATE, "the exchange has closed without it")

Judgement: TypeAlias = Ruling | Standing


@dataclass
class Participant:
    """One client in an exchange.

    Attributes:
        offer: Which of the exchange's requests it is sent.
        phase: How far it is.
        since_s: When it got there, on the door's clock.
        is_taken: Whether its reply is here.
        is_accepted: Whether it counts, for good.
    """

    offer: int
    phase: Phase
    since_s: float
    is_taken: bool = False
    is_accepted: bool = False


@dataclass(kw_only=True)
class ExchangeState:
    """One exchange from the first request to its close.

    Attributes:
        key: Which.
        participants: All that are asked.
        logged: Those whose reply counts unless it is late, in order.
        num_consumed: The first so many of them are accepted.
        is_open: Whether replies are taken.
    """

    key: Key
    participants: dict[ClientId, Participant]
    logged: list[ClientId] = field(default_factory=list)
    num_consumed: int = 0
    is_open: bool = True

    @classmethod
    def of(
        cls, key: Key, offers: Iterable[tuple[ClientId, int]], *, now_s: float
    ) -> "ExchangeState":
        """Return an exchange in which nobody has answered."""
        asked = {client_id: Participant(offer, Phase.ASKED, now_s) for client_id, offer in offers}
        return cls(key=key, participants=asked)

    def move(self, client_id: ClientId, phase: Phase, *, now_s: float) -> None:
        """Note how far a client is; nothing changes once its reply is here."""
        participant = self.participants.get(client_id)
        if participant is not None and not participant.is_taken and participant.phase != phase:
            participant.phase, participant.since_s = phase, now_s

    def is_awaited(self, client_id: ClientId) -> bool:
        """Whether the exchange waits for this client's reply."""
        participant = self.participants.get(client_id)
        return self.is_open and participant is not None and not participant.is_taken

    def take(self, client_id: ClientId) -> None:
        """Note that the reply of an awaited client is on its way into the log."""
        self.participants[client_id].is_taken = True

    def put_back(self, client_id: ClientId) -> None:
        """Note that it could not be logged: the client is awaited again."""
        self.participants[client_id].is_taken = False

    def log(self, client_id: ClientId, *, now_s: float) -> None:
        """Note that the reply of a client is durable."""
        participant = self.participants[client_id]
        participant.is_taken, participant.phase = True, Phase.REPORTED
        participant.since_s = now_s
        self.logged.append(client_id)

    def consume(self, num_consumed: int, *, failed: bool) -> list[ClientId]:
        """Accept the first ``num_consumed`` replies; return whose are accepted by this.

        Args:
            num_consumed: At least as many as before.
            failed: Whether the last of them says that its client failed.
        """
        accepted = self.logged[self.num_consumed : num_consumed]
        self.num_consumed = num_consumed
        for client_id in accepted:
            self.participants[client_id].is_accepted = True
        if failed and accepted:
            self.participants[accepted[-1]].phase = Phase.FAILED
        return accepted

    def close(self) -> tuple[list[ClientId], list[ClientId]]:
        """Take no more replies; return whose came too late, and who has not answered."""
        self.is_open = False
        silent = [each for each, found in self.participants.items() if not found.is_taken]
        return self.logged[self.num_consumed :], silent

    def judge(self, client_id: ClientId) -> Judgement:
        """Return what is to be said of a reply of ``client_id`` to this exchange."""
        participant = self.participants.get(client_id)
        if participant is None:
            return Ruling(Verdict.REFUSED, "this client was not asked", "not_asked")
        if not participant.is_taken:
            return Standing.OPEN
        return ACCEPTED if participant.is_accepted else Standing.TAKEN


class Docket:
    """The exchange that is open, and the verdicts of those before it.

    Args:
        run_id: Of the run; replies to another are refused.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.current: ExchangeState | None = None
        self._past: OrderedDict[Key, frozenset[ClientId]] = OrderedDict()
        self._latest: dict[str, tuple[int, int, int]] = {}

    def open(self, exchange: ExchangeState) -> None:
        """Make ``exchange`` the current one; it may be one that was closed, once more."""
        self._past.pop(exchange.key, None)
        self._latest[exchange.key.kind] = exchange.key.order
        self.current = exchange

    def leave(self) -> None:
        """Put the current exchange aside without a verdict: it will be opened again."""
        self.current = None

    def remember(self, key: Key, accepted: Collection[ClientId]) -> None:
        """Note whose replies to a closed exchange were accepted; all others are late."""
        if self.current is not None and self.current.key == key:
            self.current = None
        self._past[key] = frozenset(accepted)
        while len(self._past) > _NUM_PAST:
            self._past.popitem(last=False)

    def is_past(self, key: Key) -> bool:
        """Whether the verdicts on an exchange stand."""
        return key in self._past

    def judge(self, key: Key, client_id: ClientId) -> Judgement:
        """Return what is to be said of a client's reply to ``key``."""
        if key.run_id != self.run_id:
            return Ruling(Verdict.REFUSED, "it belongs to another run", "other_run")
        if self.current is not None and self.current.key == key:
            return self.current.judge(client_id)
        if key in self._past:
            return ACCEPTED if client_id in self._past[key] else LATE
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
