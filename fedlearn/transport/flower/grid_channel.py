"""A Flower grid as a channel, for any kind of app at its nodes."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import structlog
from flwr.app import Message, RecordDict

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId, Failure, Reply, Request
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.transport.base import Arrival, require_free
from fedlearn.transport.flower.postbox import (
    PUSH_AGAIN_S,
    ChannelCounts,
    MessageGrid,
    Postbox,
    SentMessage,
    Start,
    start_thread,
)
from fedlearn.transport.flower.records import asks_for_constants, num_bytes

#: Seconds between two polls for arrivals.
_TICK_S = 0.1
#: Flower's clock and ours are read at different times; with this margin Flower does not end a round
#: before we do.
_TTL_MARGIN_S = 1.0
#: Bytes by which a reply may exceed twice the size of its request.
_REPLY_ALLOWANCE_BYTES = 1 << 20


@dataclass(eq=False, kw_only=True)
class Question(SentMessage):
    """A request in flight to a client, and its reply.

    Attributes:
        read: Decodes the reply, or raises ProtocolError.
        whole: The content with the model's constants, for a node that lacks them; ``None``: the
            model has none.
    """

    read: Callable[[Message], Reply]
    whole: RecordDict | None = None

    @property
    def max_reply_bytes(self) -> int:
        """Size limit of the reply."""
        return 2 * num_bytes(self.content) + _REPLY_ALLOWANCE_BYTES


@dataclass(eq=False, kw_only=True)
class GridChannel(ABC):
    """Reaches clients through a Flower grid; subclasses identify them and build their messages.

    Attributes:
        patience_s: How long :meth:`available` waits for a SuperLink that does not answer, and how
            long a numbered question waits for a client that is not known yet.
        start: Runs a function in the background.
    """

    grid: MessageGrid
    clock: Clock
    patience_s: float
    start: Start = start_thread
    counts: ChannelCounts = field(default_factory=ChannelCounts)
    _postbox: Postbox = field(init=False, repr=False)
    _node_ids: dict[ClientId, int] = field(default_factory=dict, init=False)
    _connected: set[int] = field(default_factory=set, init=False)
    _late: list[SentMessage] = field(default_factory=list, init=False)
    #: Questions to clients that are not known yet, and until when to wait for them.
    _unsent: dict[Question, tuple[ClientId, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._postbox = Postbox(self.grid, self.clock, self.start, self.counts)

    @abstractmethod
    def _identify_nodes(self, nodes: set[int]) -> None:
        """Find the clients at the nodes that are connected now."""

    @abstractmethod
    def _build_questions(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, Question]:
        """Build the question for each client; questions to unknown clients are not sent."""

    def available(self) -> Sequence[ClientId]:
        """Return the clients whose nodes are connected now, in ascending order.

        Raises:
            DeploymentError: The SuperLink does not answer, or no longer serves this run.
        """
        self._connected = self._list_nodes(self.clock.now_s() + self.patience_s)
        self._identify_nodes(self._connected)
        nodes = self._connected
        return sorted(client for client, node_id in self._node_ids.items() if node_id in nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes connected at the last look."""
        return len(self._connected)

    @property
    def num_clients(self) -> int:
        """Number of those nodes that are clients."""
        return len(self._connected & set(self._node_ids.values()))

    def describe_attendance(self) -> str:
        """Describe how many nodes were last connected."""
        noun = "node is" if self.num_nodes == 1 else "nodes are"
        return f"{self.num_nodes} {noun} connected"

    def open(self, *, deadline_s: float) -> "FlowerExchange":
        """Open an exchange that does not survive a crash; late replies are counted and dropped."""
        return FlowerExchange(self, deadline_s)

    def send(
        self, requests: Mapping[ClientId, Request], *, expires_s: float, patience_s: float = 0.0
    ) -> dict[ClientId, Question]:
        """Send to each client, in the background; send to an unknown client once it joins.

        A client that has not joined after ``patience_s`` has failed.
        """
        sent = self._build_questions(requests, expires_s=expires_s)
        now_s = self.clock.now_s()
        for client, each in sent.items():
            if self._knows(client):
                continue
            if patience_s:
                self._unsent[each] = client, now_s + patience_s
            else:
                each.settle(_build_unknown_client_failure(), now_s)
        known = [each for client, each in sent.items() if self._knows(client)]
        self._postbox.send(known)
        return sent

    def _knows(self, client: ClientId) -> bool:
        return client in self._node_ids

    def _send_unsent(self) -> None:
        """Send to clients that have joined since; those that are too late have failed."""
        if not self._unsent:
            return
        self.available()
        now_s, unsent, self._unsent = self.clock.now_s(), self._unsent, {}
        for sent, (client, ends_s) in unsent.items():
            if self._knows(client):
                sent.node_id = self._node_ids[client]
                self._postbox.send([sent])
            elif now_s >= ends_s:
                sent.settle(_build_unknown_client_failure(), now_s)
            else:
                self._unsent[sent] = client, ends_s

    def poll_arrivals(
        self, waiting: Mapping[ClientId, Question], *, before_s: float
    ) -> list[ClientId]:
        """Return the clients whose outcome arrived by ``before_s``, earliest first."""
        self._clear_late()
        self._send_unsent()
        self._postbox.poll(waiting.values())
        arrived_s = {
            client: sent.arrived_s
            for client, sent in waiting.items()
            if sent.outcome is not None and sent.arrived_s <= before_s
        }
        return sorted(arrived_s, key=arrived_s.__getitem__)

    def drop(self, waiting: Iterable[Question]) -> None:
        """Stop waiting for these replies."""
        for sent in waiting:
            sent.is_dropped = True
            if self._unsent.pop(sent, None) is None:
                self._late.append(sent)

    def _clear_late(self) -> None:
        """Fetch and drop replies to exchanges that have ended, to free them in the SuperLink."""
        now_s = self.clock.now_s()
        self._postbox.poll(self._late)
        still_out = []
        for sent in self._late:
            outcome = self._postbox.take(sent)
            self.counts.late += isinstance(outcome, Message)
            if outcome is None and now_s <= sent.expires_s:
                still_out.append(sent)
        self._late = still_out

    def reply(self, client: ClientId, sent: Question) -> Reply | None:
        """Return a client's reply, after its checks.

        ``None``: its node lacks the constants of the model, and the question was sent again with
        them.
        """
        outcome = self._postbox.take(sent)
        if not isinstance(outcome, Message):
            assert outcome is not None  # it has arrived
            return outcome
        try:
            if sent.whole is not None and asks_for_constants(outcome):
                # Or a node could have the model sent to it again and again.
                if sent.content is sent.whole:
                    raise ProtocolError("the node asks for constants that it was sent")
                sent.send_again(sent.whole)
                self._postbox.send([sent])
                return None
            if (size := num_bytes(outcome.content)) > sent.max_reply_bytes:
                raise ProtocolError(
                    f"a reply of {size} bytes, at most {sent.max_reply_bytes} are allowed"
                )
            return sent.read(outcome)
        except ProtocolError as error:
            self.counts.refused += 1
            structlog.get_logger(__name__).warning(
                "reply_refused", client_id=client, error=str(error)
            )
            return Failure(str(error))

    def _list_nodes(self, end_s: float) -> set[int]:
        """Return the connected nodes; retry errors until ``end_s``."""
        while True:
            try:
                return set(self.grid.get_node_ids())
            except httpx.HTTPError as error:
                self.counts.grid_errors += 1
                if self.clock.now_s() >= end_s:
                    raise DeploymentError(
                        f"the SuperLink does not list its nodes ({error}); read its log, then "
                        "restart the run with `flwr run`"
                    ) from error
                self.clock.sleep(PUSH_AGAIN_S)


def _build_unknown_client_failure() -> Failure:
    return Failure("the client is not in this federation")


class FlowerExchange:
    """An :class:`fedlearn.transport.base.Exchange` through a Flower grid.

    Each question lives in the SuperLink until the deadline; replies are pulled in the background.
    """

    def __init__(self, channel: GridChannel, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._start_s = math.nan
        self._waiting: dict[ClientId, Question] = {}
        self._arrived: deque[ClientId] = deque()
        self._is_open = True

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        *,
        number: int | None = None,
    ) -> None:
        """Push every request; raises as the protocol says.

        A numbered question may have been asked by an earlier process, of clients that have not
        introduced themselves to this one yet: it waits for them.
        """
        require_free(self._waiting, requests, is_open=self._is_open)
        if math.isnan(self._start_s):
            self._start_s = self._channel.clock.now_s()
        expires_s = self._start_s + self._deadline_s + _TTL_MARGIN_S
        patience_s = 0.0 if number is None else self._channel.patience_s
        sent = self._channel.send(requests, expires_s=expires_s, patience_s=patience_s)
        self._waiting |= sent

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply; a client that is not connected fails at once.

        Raises:
            DeploymentError: The SuperLink no longer serves this run.
        """
        clock, before_s = self._channel.clock, self._start_s + min(until_s, self._deadline_s)
        while self._waiting:
            if not self._arrived:
                self._arrived.extend(self._channel.poll_arrivals(self._waiting, before_s=before_s))
            if self._arrived:
                client = self._arrived.popleft()
                sent = self._waiting.pop(client)
                elapsed_s = sent.arrived_s - self._start_s
                reply = self._channel.reply(client, sent)
                if reply is not None:
                    return Arrival(client, reply, elapsed_s)
                # It was sent again, with the constants, and is awaited as before.
                self._waiting[client] = sent
            remaining_s = before_s - clock.now_s()
            if remaining_s <= 0:
                return None
            clock.sleep(min(_TICK_S, remaining_s))
        return None

    def elapsed_s(self) -> float:
        """Return the seconds since the first question; 0 before it."""
        start_s = self._start_s
        return 0.0 if math.isnan(start_s) else self._channel.clock.now_s() - start_s

    def grace_until_s(self) -> float:
        """Return 0: a restart begins another attempt, and nodes stay connected to the SuperLink."""
        return 0.0

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Drop the replies of these clients."""
        gone = [self._waiting.pop(each) for each in client_ids if each in self._waiting]
        self._channel.drop(gone)
        self._arrived = deque(each for each in self._arrived if each in self._waiting)

    def close(self) -> None:
        """Drop all replies that have not been read."""
        self._is_open = False
        self._channel.drop(self._waiting.values())
        self._waiting.clear()
        self._arrived.clear()
