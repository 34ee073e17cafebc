"""Pushes messages to a Flower grid and pulls the replies, in background threads."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import httpx
from flwr.app import Message, RecordDict

from fedlearn.core.clock import Clock
from fedlearn.core.messages import Failure
from fedlearn.errors import DeploymentError
from fedlearn.transport.flower.records import describe_error_reply

#: Runs a function in the background; by default in a thread that does not keep the process alive.
Start = Callable[[Callable[[], None]], None]

#: Seconds between two pulls for one reply, and for a late one, which is only pulled to free it.
_PULL_EVERY_S = 0.25
_PULL_LATE_EVERY_S = 3.0
#: Seconds. A longer pull is waiting for a client's upload, so another sweeper may start.
_STALLED_S = 2.0
_MAX_SWEEPERS = 4
#: Most replies that are pulled before the aggregation takes them, whatever the size of the cohort.
_MAX_HELD = 8
#: Attempts to push a message to a SuperLink that returns errors, and seconds between them.
_MAX_PUSHES = 5
PUSH_AGAIN_S = 1.0
#: Shortest lifetime of a message, in seconds.
_LEAST_TTL_S = 0.1


def start_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that ends with the process: a pull may hang for hours."""
    threading.Thread(target=work, name="flower", daemon=True).start()


class MessageGrid(Protocol):
    """The part of Flower's :class:`flwr.serverapp.Grid` that is used."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages and return their ids, empty if a node is unknown."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""


@dataclass
class ChannelCounts:
    """Event counts of a channel, for telemetry."""

    late: int = 0  # replies after their exchange had ended
    refused: int = 0  # replies and introductions whose signature, form or size is wrong
    grid_errors: int = 0  # failed requests to the SuperLink; most are retried


@dataclass(eq=False, kw_only=True)
class SentMessage:
    """A message in flight to a node, and its outcome, which a background thread sets.

    Attributes:
        content: The content, shared by all messages with the same one.
        expires_s: When the message expires, on our clock; infinite for Flower's default.
        message_id: Identifies the message when its reply is pulled; empty until the SuperLink has
            it.
        outcome: The reply, or why there is none.
        next_pull_s: When to pull the reply again; infinite while a pull is queued or running.
        is_dropped: Whether its reply is no longer needed.
    """

    node_id: int
    content: RecordDict
    message_type: str
    expires_s: float
    message_id: str = ""
    outcome: Message | Failure | None = None
    arrived_s: float = math.nan
    next_pull_s: float = -math.inf
    is_dropped: bool = False

    def settle(self, outcome: Message | Failure, now_s: float) -> None:
        """Set the outcome."""
        self.arrived_s = now_s  # before the outcome: another thread that sees that reads this
        self.outcome = outcome

    def send_again(self, content: RecordDict) -> None:
        """Reset the message so that other content can be sent."""
        self.content, self.message_id, self.outcome = content, "", None
        self.arrived_s, self.next_pull_s = math.nan, -math.inf

    def message(self, now_s: float) -> Message:
        """Create a new Flower message; each retry is a different message to Flower."""
        ttl_s = None if math.isinf(self.expires_s) else max(_LEAST_TTL_S, self.expires_s - now_s)
        return Message(self.content, self.node_id, self.message_type, ttl=ttl_s)


@dataclass(eq=False)
class Postbox:
    """Pushes messages and pulls replies in the background, so that no peer can block the caller.

    Replies are pulled one at a time, since a pull blocks until the reply that it finds is uploaded.
    """

    grid: MessageGrid
    clock: Clock
    start: Start
    counts: ChannelCounts
    _due: deque[SentMessage] = field(default_factory=deque)
    _pulling_since_s: dict[int, float] = field(default_factory=dict)
    _held: set[SentMessage] = field(default_factory=set)
    _num_sweepers: int = 0
    _is_broken: bool = False

    def send(self, messages: Sequence[SentMessage]) -> None:
        """Push the messages in order, in the background."""
        self.start(partial(self._run_watched, partial(self._push_all, messages)))

    def poll(self, waiting: Iterable[SentMessage]) -> None:
        """Pull the replies to ``waiting`` that are due, in the background.

        Raises:
            DeploymentError: The SuperLink no longer serves this run.
        """
        if self._is_broken:
            raise DeploymentError(
                "the SuperLink no longer serves this run: it was stopped, or there is an error in "
                "the log above; restart it with `flwr run`"
            )
        now_s = self.clock.now_s()
        for sent in waiting:
            if sent.message_id and sent.outcome is None and sent.next_pull_s <= now_s:
                sent.next_pull_s = math.inf
                self._due.append(sent)
        while self._may_pull() and self._num_awake(now_s) < _MAX_SWEEPERS:
            self._num_sweepers += 1
            self._pulling_since_s[self._num_sweepers] = now_s
            sweep = partial(self._sweep, self._num_sweepers)
            self.start(partial(self._run_watched, sweep))

    def take(self, sent: SentMessage) -> Message | Failure | None:
        """Return the outcome if there is one, and free its slot for another reply."""
        outcome = sent.outcome
        if outcome is not None:
            self._held.discard(sent)
        return outcome

    def _num_awake(self, now_s: float) -> int:
        # A copy: sweepers remove their entries from their own threads.
        since_s = list(self._pulling_since_s.values())
        return sum(now_s - began_s < _STALLED_S for began_s in since_s)

    def _may_pull(self) -> bool:
        return bool(self._due) and len(self._held) < _MAX_HELD

    def _run_watched(self, work: Callable[[], None]) -> None:
        """Run ``work``; an exception ends the run instead of being lost in a thread."""
        try:
            work()
        except BaseException:
            self._is_broken = True
            raise

    def _push_all(self, messages: Sequence[SentMessage]) -> None:
        for sent in messages:
            problem = self._push(sent)
            if problem:
                sent.settle(Failure(problem), self.clock.now_s())

    def _push(self, sent: SentMessage) -> str:
        problem = ""
        for tried in range(_MAX_PUSHES):
            if tried:
                self.clock.sleep(PUSH_AGAIN_S)
            if sent.is_dropped:
                return "the exchange ended before the message was sent"
            try:
                message_ids = list(self.grid.push_messages([sent.message(self.clock.now_s())]))
            except httpx.HTTPError as error:
                self.counts.grid_errors += 1
                problem = f"the SuperLink did not accept the message: {type(error).__name__}"
                continue
            # Flower returns an empty id, or none, for a message that it does not take.
            sent.message_id = (message_ids or [""])[0] or ""
            return "" if sent.message_id else "the SuperLink has no such node, or refused its size"
        return problem

    def _sweep(self, number: int) -> None:
        """Pull replies until none is due, or too many wait to be taken."""
        try:
            while self._may_pull():
                try:
                    sent = self._due.popleft()
                except IndexError:  # another sweeper was faster
                    return
                self._pulling_since_s[number] = self.clock.now_s()
                self._pull(sent)
                every_s = _PULL_LATE_EVERY_S if sent.is_dropped else _PULL_EVERY_S
                sent.next_pull_s = self.clock.now_s() + every_s
        finally:
            del self._pulling_since_s[number]

    def _pull(self, sent: SentMessage) -> None:
        try:
            replies = list(self.grid.pull_messages([sent.message_id]))
        except httpx.HTTPError:
            self.counts.grid_errors += 1
            return
        if replies:
            if not sent.is_dropped:  # a dropped one is never taken, so it must not hold a slot
                self._held.add(sent)
            reply = replies[0]
            outcome = reply if reply.has_content() else Failure(describe_error_reply(reply))
            sent.settle(outcome, self.clock.now_s())
