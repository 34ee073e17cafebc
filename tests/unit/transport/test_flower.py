"""The Flower channel over an in-process grid: real messages and ClientApps, virtual time."""

import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp

from fedlearn.client.flower import Node
from fedlearn.client.flower import client_app as trainer_app
from fedlearn.client.policy import Policy
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Request,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.errors import DataError, DeploymentError, ProtocolError
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport.base import Arrival, ask_once
from fedlearn.transport.flower import FlowerChannel, Mod, client_app, start_thread
from tests.grid import RUN, LocalGrid, joined

KEY = bytes(32)
REQUEST = EvaluateRequest(round_num=3, tensors={"w": torch.ones(2)})
#: Node ids are unsigned 64-bit numbers.
NODES = {2**64 - 1: 0, 12: 1, 13: 2}
CLIENTS = [ClientId(0), ClientId(1), ClientId(2)]

Tamper = Callable[[Message, Message], Message]


def counting(
    data: bytes, state: bytes, *, personal: bytes, constants: bytes
) -> tuple[bytes, bytes]:
    """A handler that replies with the number of requests it has seen, including this one."""
    request = decode(data)
    assert isinstance(request, EvaluateRequest | TrainRequest)
    reply = EvaluateReply(round_num=request.round_num, num_examples=len(state) + 1, metrics={})
    return encode(reply), state + b"x"


COUNTING = client_app(lambda *_: counting, settings_of=dict)


@dataclass
class HinderedGrid(LocalGrid):
    """A grid of slow nodes behind a SuperLink that fails and lies.

    Attributes:
        latency_s: Latency of each partition in seconds; introductions take no time.
        broken: How many of the next calls of each method raise an error.
        tamper: Returns what a hostile SuperLink makes of a reply to a message.
        folder: Contains an identity folder for each client; ``None``: clients have none.
        spoilt: What a hostile SuperLink sends in place of a model's constants.
    """

    app: Callable[[Message, Context], Message] = COUNTING
    nodes: dict[int, int] = field(default_factory=lambda: dict(NODES))
    latency_s: dict[int, float] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    tamper: Tamper = lambda _, reply: reply
    folder: Path | None = None
    spoilt: ArrayRecord | None = None

    def config_of(self, client: int) -> UserConfig:
        config = super().config_of(client)
        return config if self.folder is None else {**config, "identity": f"{self.folder}/{client}"}

    def get_node_ids(self) -> Iterable[int]:
        self._break("get_node_ids")
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        self._break("push_messages")
        found = list(messages)
        for message in found:
            if self.spoilt is not None:
                message.content["fedlearn.constants"] = self.spoilt
        return super().push_messages(found)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._break("pull_messages")
        return super().pull_messages(message_ids)

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        _, reply = super().answered(client, message)
        is_query = message.metadata.message_type == "query"
        latency_s = 0.0 if is_query else self.latency_s.get(client, 0.0)
        return latency_s, self.tamper(message, reply)

    def _break(self, method: str) -> None:
        if self.broken.get(method, 0) > 0:
            self.broken[method] -= 1
            request = httpx.Request("POST", "http://superlink")
            response = httpx.Response(500, text="database is locked", request=request)
            raise httpx.HTTPStatusError("500", request=request, response=response)


def at_once(work: Callable[[], None]) -> None:
    work()


def fresh(grid: HinderedGrid) -> FlowerChannel:
    """Return a channel to which no client has introduced itself."""
    return FlowerChannel(
        grid=grid,
        run_id=f"flower-{RUN}",
        clock=grid.clock,
        patience_s=30.0,
        coordinator_key=KEY,
        start=at_once,
    )


def channel(grid: HinderedGrid, *, min_clients: int = 3) -> FlowerChannel:
    return joined(fresh(grid), min_clients)


def ask(
    made: FlowerChannel, request: Request = REQUEST, *, deadline_s: float = 100.0
) -> dict[int, Arrival]:
    """Ask all three clients and return the arrivals in order."""
    arrivals = ask_once(made, dict.fromkeys(CLIENTS, request), deadline_s=deadline_s)
    return {arrival.client_id: arrival for arrival in arrivals}


def reasons(arrivals: dict[int, Arrival]) -> dict[int, str]:
    return {c: a.reply.reason for c, a in arrivals.items() if isinstance(a.reply, Failure)}


def with_content(reply: Message, header: dict[str, bytes | int], data: bytes) -> Message:
    """Replace a reply's header and payload."""
    array = Array(dtype="uint8", shape=(len(data),), stype="fedlearn.message", data=data)
    payload = ArrayRecord({"message": array})
    reply.content = RecordDict({"fedlearn": ConfigRecord({**header}), "fedlearn.payload": payload})
    return reply


def header_of(message: Message) -> dict[str, bytes | int]:
    record = message.content.config_records["fedlearn"]
    return {name: value for name, value in record.items() if isinstance(value, bytes | int)}


def build_payload(message: Message) -> bytes:
    return message.content.array_records["fedlearn.payload"]["message"].data


def of_client(client: int, change: Tamper) -> Tamper:
    """Apply ``change`` only to one client's replies, introductions excepted."""
    node = next(node_id for node_id, partition in NODES.items() if partition == client)

    def tamper(message: Message, reply: Message) -> Message:
        is_task = message.metadata.message_type != "query"
        return change(message, reply) if is_task and message.metadata.dst_node_id == node else reply

    return tamper


# ---- Exchanges ----------------------------------------------------------------------------


def test_clients_are_known_by_their_partition() -> None:
    """Their node ids do not matter."""
    assert list(channel(HinderedGrid(VirtualClock())).available()) == [0, 1, 2]


def test_replies_come_in_order_of_arrival() -> None:
    """Each has its arrival time, up to the polling interval."""
    grid = HinderedGrid(VirtualClock(), latency_s={0: 3.0, 1: 1.0, 2: 2.0})
    arrivals = ask(channel(grid))
    assert list(arrivals) == [1, 2, 0]
    assert not reasons(arrivals)
    for client, latency_s in grid.latency_s.items():
        assert latency_s <= arrivals[client].elapsed_s <= latency_s + 0.5


@pytest.mark.parametrize("deadline_s", [0.05, 1.0, 7.77])
def test_an_exchange_ends_at_its_deadline(deadline_s: float) -> None:
    """Within one tick of the clock; replies that arrived before it count."""
    grid = HinderedGrid(VirtualClock(), latency_s={0: math.inf, 1: 0.0, 2: math.inf})
    made = channel(grid)
    start_s = grid.clock.now_s()
    assert list(ask(made, deadline_s=deadline_s)) == [1]
    assert grid.clock.now_s() - start_s == pytest.approx(deadline_s)


def test_messages_live_as_long_as_their_exchange() -> None:
    """So that a straggler stops working in vain; without a deadline it is Flower's default."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    ask(made, deadline_s=50.0)
    ask(made, deadline_s=math.inf)
    ttls = [message.metadata.ttl for message in grid.pushed[3:]]
    assert ttls == [51.0] * 3 + [43200] * 3


def test_late_replies_are_dropped_and_counted() -> None:
    """They do not answer the next exchange."""
    grid = HinderedGrid(VirtualClock(), latency_s={2: 5.0})
    made = channel(grid)
    assert list(ask(made, deadline_s=2.0)) == [0, 1]
    grid.clock.sleep(4.0)
    assert list(ask(made, deadline_s=20.0)) == [0, 1, 2]
    assert made.counts.late == 1


def test_a_round_that_is_closed_early_leaves_late_replies() -> None:
    """The caller stops iterating; the others' replies count as late."""
    grid = HinderedGrid(VirtualClock(), latency_s={1: 1.0, 2: 1.0})
    made = channel(grid)
    arrivals = ask_once(made, dict.fromkeys(CLIENTS, REQUEST), deadline_s=9.0)
    assert isinstance(arrivals, Generator)
    assert next(arrivals).client_id == 0
    arrivals.close()
    grid.clock.sleep(2.0)
    ask(made)
    assert made.counts.late == 2


def test_an_exchange_is_asked_again_while_it_is_open() -> None:
    """Others, and clients that have answered; each message is new, and client state continues."""
    grid = HinderedGrid(VirtualClock(), latency_s={0: 1.0, 1: 8.0, 2: 2.0})
    made = channel(grid)
    exchange = made.open(deadline_s=100.0)
    exchange.ask(dict.fromkeys([ClientId(0), ClientId(1)], REQUEST))
    first = exchange.next(until_s=math.inf)
    assert first is not None
    assert first.client_id == 0
    assert exchange.next(until_s=2.0) is None
    assert grid.clock.now_s() == pytest.approx(2.0)
    later = replace(REQUEST, round_num=4)
    with pytest.raises(ValueError, match="client 1 is asked again before its reply"):
        exchange.ask(dict.fromkeys([ClientId(1), ClientId(2)], later))
    exchange.ask(dict.fromkeys([ClientId(0), ClientId(2), ClientId(9)], later))
    arrivals = {a.client_id: a for a in iter(partial(exchange.next, until_s=math.inf), None)}
    assert list(arrivals) == [9, 0, 2, 1]
    counts = {
        client: arrival.reply.num_examples
        for client, arrival in arrivals.items()
        if isinstance(arrival.reply, EvaluateReply)
    }
    assert counts == {0: 2, 2: 1, 1: 1}
    assert arrivals[ClientId(9)].elapsed_s == pytest.approx(2.0)
    assert 3.0 <= arrivals[ClientId(0)].elapsed_s <= 3.5
    ttls = [message.metadata.ttl for message in grid.pushed[3:]]
    assert ttls == pytest.approx([101.0, 101.0, 99.0, 99.0])


def test_closing_an_exchange_drops_the_replies_to_all_that_it_has_asked() -> None:
    """To its first request and to all later ones; and it sends no further requests."""
    grid = HinderedGrid(VirtualClock(), latency_s={1: 1.0, 2: 1.0})
    made = channel(grid)
    exchange = made.open(deadline_s=9.0)
    exchange.ask(dict.fromkeys([ClientId(0), ClientId(1)], REQUEST))
    assert exchange.next(until_s=math.inf) is not None
    exchange.ask({ClientId(2): REQUEST})
    exchange.close()
    assert exchange.next(until_s=math.inf) is None
    with pytest.raises(ValueError, match="closed; open another one"):
        exchange.ask({ClientId(0): REQUEST})
    grid.clock.sleep(2.0)
    ask(made)
    assert made.counts.late == 2


def test_equal_requests_are_encoded_once() -> None:
    """All messages share one payload."""
    grid = HinderedGrid(VirtualClock())
    ask(channel(grid))
    asked = grid.pushed[3:]
    assert len(asked) == len(grid.nodes)
    assert len(payloads_of(asked)) == 1


def payloads_of(messages: Sequence[Message]) -> set[int]:
    """Return the identities of the arrays that messages hold."""
    records = [message.content.array_records["fedlearn.payload"] for message in messages]
    return {id(record["message"]) for record in records}


def test_what_is_for_one_client_travels_beside_a_model_that_is_encoded_once() -> None:
    """As in a secure-aggregation session's training stage: each client gets its own part."""
    heard: list[bytes] = []

    def listening(
        data: bytes, state: bytes, *, personal: bytes, constants: bytes
    ) -> tuple[bytes, bytes]:
        heard.append(personal)
        return encode(EvaluateReply(round_num=3, num_examples=1, metrics={})), state

    grid = HinderedGrid(VirtualClock(), app=client_app(lambda *_: listening, settings_of=dict))
    made = channel(grid)
    model = TrainRequest(round_num=3, attempt=0, tensors={}, order=(), settings={}, seed=0)
    shared = SecureTrainRequest(message=b"", train=model)
    requests = {ClientId(client): replace(shared, message=bytes([client])) for client in range(3)}
    arrivals = {int(a.client_id): a for a in ask_once(made, requests, deadline_s=5.0)}
    assert arrivals.keys() == {0, 1, 2}
    assert not reasons(arrivals)
    assert sorted(heard) == [b"\x00", b"\x01", b"\x02"]
    assert len(payloads_of(grid.pushed[3:])) == 1


#: A model whose head is averaged, on a constant base.
BASE = torch.arange(1 << 15, dtype=torch.float32)
WITH_BASE = EvaluateRequest(
    round_num=3, tensors={"head": torch.ones(2), "base": BASE}, order=["head"]
)


def summing(data: bytes, state: bytes, *, personal: bytes, constants: bytes) -> tuple[bytes, bytes]:
    """A handler that replies with the sums of its model's tensors."""
    request = decode(data, constants=constants)
    assert isinstance(request, EvaluateRequest)
    sums = {name: float(value.sum()) for name, value in request.tensors.items()}
    reply = EvaluateReply(round_num=request.round_num, num_examples=1, metrics=sums)
    return encode(reply), state


SUMMING = client_app(lambda *_: summing, settings_of=dict)


def sums(arrivals: dict[int, Arrival]) -> list[Mapping[str, float]]:
    return [a.reply.metrics for a in arrivals.values() if isinstance(a.reply, EvaluateReply)]


def arrays_sent(messages: Sequence[Message]) -> list[int]:
    """Return the number of array bytes in each message."""
    return [
        sum(
            len(array.data)
            for record in m.content.array_records.values()
            for array in record.values()
        )
        for m in messages
    ]


@pytest.mark.parametrize("has_folder", [False, True])
def test_what_stays_the_same_in_a_run_is_sent_to_a_node_once(
    tmp_path: Path, *, has_folder: bool
) -> None:
    """A node that lost the constants asks for them, and gets them again within the exchange."""
    grid = HinderedGrid(VirtualClock(), app=SUMMING)
    if has_folder:
        grid.folder = tmp_path
    made = channel(grid)
    expected = [{"head": 2.0, "base": float(BASE.sum())}] * 3
    for round_num in (3, 4):
        assert sums(ask(made, replace(WITH_BASE, round_num=round_num))) == expected
    first, second = arrays_sent(grid.pushed[3:6]), arrays_sent(grid.pushed[6:])
    assert min(first) > BASE.nbytes
    assert max(second) < 1000
    for context in grid.contexts.values():
        for record in context.state.config_records.values():
            record.pop("constants", None)
    for kept in tmp_path.glob("*/constants"):
        kept.write_bytes(b"spoilt")
    assert sums(ask(made, replace(WITH_BASE, round_num=5))) == expected
    assert [size > BASE.nbytes for size in arrays_sent(grid.pushed[9:])] == [False] * 3 + [True] * 3


def test_a_node_that_asks_for_what_it_was_sent_has_failed() -> None:
    """Such a lie costs one extra message, not an endless exchange."""
    grid = HinderedGrid(VirtualClock(), app=SUMMING)

    def insatiable(message: Message, reply: Message) -> Message:
        return Message(RecordDict({"fedlearn.constants": ConfigRecord()}), reply_to=message)

    grid.tamper = of_client(1, insatiable)
    arrivals = ask(channel(grid), WITH_BASE)
    assert reasons(arrivals) == {1: "the node asks for constants that it was sent"}


def test_constants_are_held_against_their_digest() -> None:
    """The node detects that a relay has changed them."""
    grid = HinderedGrid(VirtualClock(), app=SUMMING)
    made = channel(grid)
    data = bytes(BASE.nbytes)
    array = Array(dtype="uint8", shape=(len(data),), stype="fedlearn.message", data=data)
    grid.spoilt = ArrayRecord({"message": array})
    assert set(reasons(ask(made, WITH_BASE))) == {0, 1, 2}


def test_replies_are_pulled_as_they_are_taken() -> None:
    """However many are ready: memory does not grow with the cohort."""
    grid = HinderedGrid(VirtualClock(), nodes={100 + number: number for number in range(40)})
    made = channel(grid, min_clients=40)
    requests = {ClientId(number): REQUEST for number in range(40)}
    for num_taken, _ in enumerate(ask_once(made, requests, deadline_s=5.0), start=1):
        num_pulled = 40 - len(grid.replies)
        assert num_pulled - num_taken <= 8
    assert num_taken == 40


def test_state_is_kept_between_the_exchanges_of_a_round() -> None:
    """The exchange sends several messages to each client, as in secure aggregation."""
    made = channel(HinderedGrid(VirtualClock()))
    for count in (1, 2, 3):
        replies = [arrival.reply for arrival in ask(made).values()]
        assert [r.num_examples for r in replies if isinstance(r, EvaluateReply)] == [count] * 3


def test_a_client_that_is_not_there_is_a_failure() -> None:
    """Either it never joined, or its node has left."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    del grid.nodes[12]
    requests = dict.fromkeys([ClientId(0), ClientId(1), ClientId(9)], REQUEST)
    arrivals = {int(a.client_id): a for a in ask_once(made, requests, deadline_s=5.0)}
    assert reasons(arrivals).keys() == {1, 9}
    assert list(made.available()) == [0, 2]


def test_whoever_was_asked_by_an_earlier_process_is_asked_once_it_is_known() -> None:
    """Its request has a number; a client that does not appear in time has failed."""
    grid = HinderedGrid(VirtualClock(), latency_s={1: 3.0})
    made = fresh(grid)
    exchange = made.open(deadline_s=math.inf)
    for number in (0, 1, 9):
        exchange.ask({ClientId(number): REQUEST}, number=number)
    exchange.ask({ClientId(8): REQUEST}, number=8)
    exchange.give_up([ClientId(8)])
    arrivals = {int(a.client_id): a for a in iter(partial(exchange.next, until_s=math.inf), None)}
    assert list(arrivals) == [0, 1, 9]
    assert reasons(arrivals) == {9: "the client is not in this federation"}
    assert arrivals[9].elapsed_s == pytest.approx(made.patience_s, abs=1.0)
    exchange.close()
    assert made.counts.late == 0


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        (2, "<class 'KeyError'>:<''img''>", "the ClientApp raised KeyError: 'img'"),
        (
            2,
            "<class 'app.task.NoData'>:<'two\n lines'>",
            "the ClientApp raised NoData: two lines",
        ),
        (2, "out of memory", "the ClientApp raised out of memory"),
        (2, "lost\x1b[2J", "the ClientApp raised lost\ufffd[2J"),
        (2, "", "Flower error 2: unknown"),
        (8, "signal 9", "Flower error 8: the ClientApp's process died"),
        (99, "odd", "Flower error 99: unknown"),
    ],
)
def test_an_error_of_flower_is_a_failure_with_the_nodes_reason(
    code: int, reason: str, words: str
) -> None:
    """A node reports exceptions itself; other error codes get our own text."""

    def fail(message: Message, _: Message) -> Message:
        return Message(Error(code, reason), reply_to=message)

    arrivals = ask(channel(HinderedGrid(VirtualClock(), tamper=of_client(1, fail))))
    assert reasons(arrivals)[1] == words


# ---- A SuperLink in trouble ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["get_node_ids", "push_messages", "pull_messages"])
def test_errors_of_the_superlink_that_pass_are_waited_out(method: str) -> None:
    """Its database is locked at times."""
    grid = HinderedGrid(VirtualClock(), broken={method: 3})
    made = channel(grid)
    grid.broken[method] = 3
    made.available()
    assert not reasons(ask(made))
    assert made.counts.grid_errors == 6


def test_a_superlink_that_takes_no_message_is_a_failure_of_the_exchange() -> None:
    """For the clients concerned, after a few attempts."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    grid.broken["push_messages"] = 5
    arrivals = ask(made)
    assert list(reasons(arrivals)) == [0]
    assert "HTTPStatusError" in reasons(arrivals)[0]


def test_a_superlink_that_is_gone_ends_the_run() -> None:
    """The error comes after the configured patience."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    grid.broken["get_node_ids"] = 10**9
    with pytest.raises(DeploymentError, match="500"):
        made.available()
    assert grid.clock.now_s() == pytest.approx(30.0, abs=1.0)


def test_nobody_is_waited_for_by_a_look() -> None:
    """Connected nodes are asked to introduce themselves; later nodes are seen by the next call."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    grid.nodes[14] = 3
    looked_s = grid.clock.now_s()
    assert list(made.available()) == [0, 1, 2, 3]
    assert grid.clock.now_s() == looked_s
    assert made.describe_attendance() == "4 nodes are connected"


def test_nodes_that_did_not_introduce_themselves_are_counted_with_the_reason() -> None:
    """Nodes of another app do not; control: one of four introduces itself."""
    foreign = ClientApp()
    own = HinderedGrid(VirtualClock()).app

    def app(message: Message, context: Context) -> Message:
        return (own if context.node_config["partition-id"] == 0 else foreign)(message, context)

    made = channel(HinderedGrid(VirtualClock(), app=app), min_clients=1)
    told = made.describe_attendance()
    assert told.startswith(
        "3 nodes are connected, 2 did not introduce themselves (the ClientApp raised ValueError: "
    )
    assert (made.num_nodes, made.num_clients) == (3, 1)


@dataclass
class StallingGrid(HinderedGrid):
    """A grid on which one node's reply uploads for ever."""

    gate: threading.Event = field(default_factory=threading.Event)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if reply.metadata.src_node_id == 13 and reply.metadata.message_type != "query":
                self.gate.wait(timeout=60.0)
        return replies


class FastClock(VirtualClock):
    """A clock whose polls take a real millisecond, so that threads can run."""

    def sleep(self, seconds: float) -> None:
        SystemClock().sleep(0.001)
        super().sleep(seconds)


def test_a_stalled_upload_delays_nobody() -> None:
    """With real threads: other replies arrive meanwhile, and the deadline holds."""
    clock, deadline_s = FastClock(), 10_000.0
    grid = StallingGrid(clock, latency_s={1: 30.0})
    made = channel(grid)
    made._postbox.start = start_thread  # noqa: SLF001 - introductions were at once
    arrivals = ask_once(made, dict.fromkeys(CLIENTS, REQUEST), deadline_s=deadline_s)
    assert {next(arrivals).client_id for _ in range(2)} == {0, 1}
    assert clock.now_s() < deadline_s
    clock.elapsed_s = deadline_s
    assert list(arrivals) == []
    grid.gate.set()


def test_a_thread_that_dies_ends_the_run() -> None:
    """An unexpected error in the thread is raised at once, not at the deadline."""

    def broken(message: Message, _: Message) -> Message:
        raise KeyError(message.metadata.message_id)

    def start(work: Callable[[], None]) -> None:
        with pytest.raises(KeyError):
            work()

    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    grid.tamper, made._postbox.start = broken, start  # noqa: SLF001
    with pytest.raises(DeploymentError, match="no longer serves"):
        ask(made)


# ---- Authenticity -------------------------------------------------------------------------


def forge(message: Message, reply: Message) -> Message:
    """Return another model under the client's signature."""
    lie = encode(EvaluateReply(round_num=3, num_examples=10**6, metrics={}))
    return with_content(reply, header_of(reply), lie)


def remove_signature(message: Message, reply: Message) -> Message:
    return with_content(reply, {"client_id": 1}, build_payload(reply))


def garbage(message: Message, reply: Message) -> Message:
    reply.content = RecordDict({"weights": ConfigRecord({"w": 1.0})})
    return reply


def send_oversized(message: Message, reply: Message) -> Message:
    return with_content(reply, header_of(reply), b"x" * (1 << 21))


@pytest.mark.parametrize("change", [forge, remove_signature, garbage, send_oversized])
def test_a_reply_that_is_not_the_clients_is_refused(change: Tamper) -> None:
    """It is counted, and the round continues without it."""
    made = channel(HinderedGrid(VirtualClock(), tamper=of_client(1, change)))
    arrivals = ask(made)
    assert reasons(arrivals).keys() == {1}
    assert made.counts.refused == 1


def test_an_earlier_reply_is_refused_when_it_is_replayed() -> None:
    """From the previous exchange, another round, or another attempt."""
    kept: list[tuple[dict[str, bytes | int], bytes]] = []

    def replay(message: Message, reply: Message) -> Message:
        kept.append((header_of(reply), build_payload(reply)))
        return with_content(reply, *kept[0])

    made = channel(HinderedGrid(VirtualClock(), tamper=of_client(1, replay)))
    assert not reasons(ask(made))
    train = TrainRequest(round_num=3, attempt=0, tensors={}, order=(), settings={}, seed=0)
    for request in (REQUEST, replace(REQUEST, round_num=4), train, replace(train, attempt=1)):
        assert reasons(ask(made, request)).keys() == {1}


def test_a_reply_of_another_client_is_refused() -> None:
    """A SuperLink or node might swap the replies of two clients."""
    seen: dict[int, Message] = {}

    def swap(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query":
            return reply
        seen[message.metadata.dst_node_id] = reply
        return seen.get(12, reply) if message.metadata.dst_node_id == 13 else reply

    made = channel(HinderedGrid(VirtualClock(), tamper=swap))
    assert reasons(ask(made)).keys() == {2}


def test_the_first_key_of_a_run_stays() -> None:
    """Neither another node nor the same one without its key can take a client's place."""
    grid = HinderedGrid(VirtualClock())
    made = channel(grid)
    grid.nodes[99] = 1
    assert list(made.available()) == [0, 1, 2]
    del grid.nodes[12]  # client 1's node restarts as 99 without its state
    assert list(made.available()) == [0, 2]
    assert made.counts.refused == 1


def test_a_client_with_an_identity_folder_survives_its_node(tmp_path: Path) -> None:
    """Its key is the same under another node id."""
    grid = HinderedGrid(
        VirtualClock(), nodes={5: 1}, node_config={"identity": str(tmp_path / "id")}
    )
    made = channel(grid, min_clients=1)
    grid.nodes = {6: 1}
    assert list(made.available()) == [1]
    arrivals = list(ask_once(made, {ClientId(1): REQUEST}, deadline_s=5.0))
    assert isinstance(arrivals[0].reply, EvaluateReply)
    assert (tmp_path / "id").stat().st_mode & 0o777 == 0o700
    assert not grid.context(6).state  # Flower stores none of it


def test_an_introduction_at_another_node_is_refused() -> None:
    """Such a card was recorded elsewhere."""
    cards: list[tuple[dict[str, bytes | int], bytes]] = []

    def copy(message: Message, reply: Message) -> Message:
        cards.append((header_of(reply), build_payload(reply)))
        return with_content(reply, *cards[0])

    made = channel(HinderedGrid(VirtualClock(), tamper=copy))
    assert list(made.available()) == [1]
    assert made.counts.refused == 2


def test_a_node_that_fails_to_introduce_itself_is_asked_again() -> None:
    """Its app may still have been starting."""
    failing = True

    def fail(message: Message, reply: Message) -> Message:
        return Message(Error(1, ""), reply_to=message) if failing else reply

    grid = HinderedGrid(VirtualClock(), tamper=fail)
    made = channel(grid, min_clients=1)
    assert list(made.available()) == []
    assert "could not be loaded" in made.describe_attendance()
    failing = False
    assert list(made.available()) == [0, 1, 2]


# ---- The client ---------------------------------------------------------------------------


def test_a_node_without_a_partition_has_a_client_id_of_its_own() -> None:
    """It is derived from the node id, and fits in 63 bits."""
    grid = HinderedGrid(VirtualClock(), nodes={2**64 - 2: 0})
    grid.contexts[2**64 - 2] = Context(RUN, 2**64 - 2, {}, RecordDict(), {})
    assert list(channel(grid, min_clients=1).available()) == [2**63 - 2]


def test_an_error_in_making_the_trainer_tells_nothing_of_the_data() -> None:
    """The coordinator receives only the name of the error's type."""

    def make_trainer(node: Node) -> LocalTrainer:
        raise DataError("patient Alice has value 42")

    grid = HinderedGrid(VirtualClock(), app=trainer_app(make_trainer, policy_of=lambda _: Policy()))
    assert set(reasons(ask(channel(grid))).values()) == {"DataError"}


def test_mods_of_flower_are_around_the_client() -> None:
    """They run in order for each message; a reply that one changes after signing is refused."""
    heard: list[str] = []

    def import_by_name(name: str) -> Mod:
        def mod(
            message: Message, context: Context, call_next: Callable[[Message, Context], Message]
        ) -> Message:
            heard.append(f"{name} {message.metadata.message_type}")
            return call_next(message, context)

        return mod

    def lying(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        reply = call_next(message, context)
        return forge(message, reply) if message.metadata.message_type != "query" else reply

    app = client_app(
        lambda *_: counting,
        settings_of=dict,
        mods=[import_by_name("first"), import_by_name("second")],
    )
    assert not reasons(ask(channel(HinderedGrid(VirtualClock(), app=app))))
    assert heard == ["first query", "second query"] * 3 + ["first evaluate", "second evaluate"] * 3
    app = client_app(lambda *_: counting, settings_of=dict, mods=[lying])
    assert reasons(ask(channel(HinderedGrid(VirtualClock(), app=app)))).keys() == {0, 1, 2}


def test_a_client_does_not_sign_an_introduction_as_a_reply() -> None:
    """Otherwise a coordinator could have any bytes signed as a card."""
    grid = HinderedGrid(VirtualClock())
    query = Message(RecordDict(), 12, "train")
    message = with_content(query, {}, encode(REQUEST))
    message.content.config_records["fedlearn"] = ConfigRecord({"kind": "Hello"})
    with pytest.raises(ProtocolError, match="kind 'Hello'"):
        COUNTING(message, grid.context(12))


@pytest.mark.parametrize("partition", [-1, "zero", 1.5])
def test_a_partition_that_is_no_client_id_is_refused(partition: float | str) -> None:
    """The error says what to write instead."""
    grid = HinderedGrid(VirtualClock())
    context = Context(RUN, 12, {"partition-id": partition}, RecordDict(), {})
    with pytest.raises(DeploymentError, match="partition-id"):
        COUNTING(Message(RecordDict(), 12, "query"), context)
    assert grid.nodes


def asked(grid: HinderedGrid, context: Context) -> Message:
    """Return the client's reply to an evaluation in a context."""
    header: dict[str, bytes | int] = {"round_num": 3, "attempt": 0, "exchange": 0}
    message = with_content(Message(RecordDict(), 12, "evaluate"), header, encode(REQUEST))
    message.content.config_records["fedlearn"]["kind"] = "EvaluateRequest"
    message.metadata.__dict__["_message_id"] = "1"
    return grid.app(message, context)


def times_asked(reply: Message) -> int:
    found = decode(build_payload(reply))
    assert isinstance(found, EvaluateReply)
    return found.num_examples


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_state_of_one_run_is_not_that_of_the_next(tmp_path: Path, *, in_folder: bool) -> None:
    """Runs of a series share their context, and all runs share the folder; only keys persist."""
    grid = HinderedGrid(VirtualClock())
    config: UserConfig = {"partition-id": 1}
    if in_folder:
        config["identity"] = str(tmp_path / "id")
    first = Context(RUN, 12, config, RecordDict(), {})
    assert [times_asked(asked(grid, first)) for _ in range(2)] == [1, 2]
    second = Context(RUN + 1, 12, config, first.state, {})
    assert [times_asked(asked(grid, second)) for _ in range(2)] == [1, 2]
    if not in_folder:
        assert isinstance(first.state.config_records["fedlearn.state"]["identity"], bytes)
        return
    restarted = Context(RUN, 99, config, RecordDict(), {})
    assert times_asked(asked(grid, restarted)) == 3
