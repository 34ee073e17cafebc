"""Clients that check in repeatedly and cost almost nothing, since their messages are prepared.

They share no code with the product. HTTP/2, gRPC and protobuf are written by hand, just enough to
send a hello, receive a welcome, and come back when told to. This makes them a second implementation
of ``docs/reference/wire.md``. As a module, they read a plan as a JSON line from standard input and
print their figures.
"""

import asyncio
import json
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

SERVER_NAME = "fedlearn-coordinator"
PROTOCOL = 2

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_COME_BACK_METADATA = b"fedlearn-come-back-s"
#: FromCoordinator.welcome and .come_back, and ComeBack.after_s: field number and wire type.
_WELCOME_TAG, _COME_BACK_TAG, _AFTER_S_TAG = 0x0A, 0x22, 0x09

#: Like the client's own: up to 1 s, 2 s, 4 s and so on.
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Encode a header field as a literal without indexing: HPACK, RFC 7541, section 6.2.2."""
    assert max(len(name), len(value)) < 127
    return b"".join((b"\0", bytes([len(name)]), name.encode(), bytes([len(value)]), value.encode()))


def call(method: str, message: bytes, *, stream: int, ends: bool) -> bytes:
    """Return the HTTP/2 frames of a call to the gateway with its first message.

    Args:
        method: The method of the gateway's gRPC service.
        message: The serialized message.
        stream: Id of the stream: odd, and higher than the connection's last one.
        ends: Whether no further message follows.
    """
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": f"/fedlearn.v1.Door/{method}",
        ":authority": SERVER_NAME,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(_literal(*each) for each in headers.items())
    data = b"\0" + struct.pack(">I", len(message)) + message
    return _frame(_HEADERS, _END_HEADERS, stream, block) + _frame(
        _DATA, _END_STREAM if ends else 0, stream, data
    )


def opening() -> bytes:
    """Return the bytes that every connection begins with: the preface and empty settings."""
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"")


#: FromClient with a Hello that has only the protocol.
HELLO = bytes((0x0A, 2, 0x08, PROTOCOL))
#: DownloadRequest for a digest that does not exist.
NO_DOWNLOAD = bytes((0x0A, 32)) + bytes(32)


class Connection(asyncio.Protocol):
    """One HTTP/2 connection, and what the coordinator answered.

    Attributes:
        come_back_s: Seconds after which the coordinator asked the client to come back, if it did.
        answered_s: Time of its first answer, a welcome or that request, by the monotonic clock.
        closed: Set when the connection has closed, or the client was asked to come back.
    """

    def __init__(self, first: bytes) -> None:
        self._first, self._buffer, self._messages = first, bytearray(), bytearray()
        self._asked = dict[int, asyncio.Event]()
        self.come_back_s: float | None = None
        self.answered_s: float | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the prepared messages."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._first)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection has closed."""
        self._close()

    def data_received(self, data: bytes) -> None:
        """Parse frames, acknowledge settings and pings, and note answers."""
        self._buffer += data
        for kind, flags, stream, payload in self._frames():
            if self.transport.is_closing():
                return
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                answer = payload if kind == _PING else b""
                self.transport.write(_frame(kind, _ACK, 0, answer))
            elif kind == _DATA and stream == 1:
                self._messages += payload
                self._hear()
            elif kind == _HEADERS and _COME_BACK_METADATA in payload:
                self._answer()
                self.come_back_s = _come_back_metadata(payload)
            is_end = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
            if is_end and (asked := self._asked.get(stream)) is not None:
                asked.set()
            if kind == _GOAWAY or (stream == 1 and is_end) or self.come_back_s is not None:
                self._close()

    async def ask(self, method: str, message: bytes, *, stream: int) -> None:
        """Make a call and wait until it ends, with or without an error."""
        ended = self._asked[stream] = asyncio.Event()
        self.transport.write(call(method, message, stream=stream, ends=True))
        await ended.wait()
        del self._asked[stream]

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        while len(self._buffer) >= 9:
            end = 9 + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                return
            kind, flags, stream = struct.unpack(">BBI", self._buffer[3:9])
            payload = bytes(self._buffer[9:end])
            del self._buffer[:end]
            yield kind, flags, stream, payload

    def _hear(self) -> None:
        """Parse the messages of the session, whose lengths fit in one byte."""
        while len(self._messages) >= 5:
            end = 5 + int.from_bytes(self._messages[1:5], "big")
            if len(self._messages) < end:
                return
            message = bytes(self._messages[5:end])
            del self._messages[:end]
            if message[0] == _WELCOME_TAG:
                self._answer()
            elif message[0] == _COME_BACK_TAG:
                assert message[2] == _AFTER_S_TAG, message
                self._answer()
                (self.come_back_s,) = struct.unpack("<d", message[3:11])

    def _answer(self) -> None:
        if self.answered_s is None:
            self.answered_s = asyncio.get_running_loop().time()

    def _close(self) -> None:
        self.transport.close()
        self.closed.set()


def _come_back_metadata(block: bytes) -> float:
    """Return the value of the come-back field, which must not be Huffman-coded."""
    _, _, rest = block.partition(_COME_BACK_METADATA)
    assert rest[0] < 128, "coded by Huffman"
    return float(rest[1 : 1 + rest[0]])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Instructions for a process of clients.

    Attributes:
        address: Address of the coordinator.
        clients: Number of clients.
        seconds: Duration of the run.
        keys: Folder of their certificates and keys.
    """

    address: str
    clients: int
    seconds: float
    keys: str


def tls(keys: str, number: int) -> ssl.SSLContext:
    """Build the TLS context of a client: its certificate and key, and the trusted authority."""
    context = ssl.create_default_context(cafile=f"{keys}/ca.pem")
    context.load_cert_chain(f"{keys}/client-{number}.pem", f"{keys}/client-{number}.key")
    context.set_alpn_protocols(["h2"])
    return context


async def connect(address: str, first: bytes, context: ssl.SSLContext) -> Connection:
    """Connect and send the opening and ``first``."""
    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(opening() + first),
        host,
        int(port),
        ssl=context,
        server_hostname=SERVER_NAME,
    )
    return connection


@dataclass
class Found:
    """Figures of a run; times are by the monotonic clock.

    Attributes:
        begin_s: Start of the first connections.
        came: Number of connections started, by second since then.
        in_vain: Number of those that got no answer, by second of their start.
        answer_s: Seconds that each waited until it was welcomed or sent away.
    """

    begin_s: float = 0.0
    came: Counter[int] = field(default_factory=Counter)
    in_vain: Counter[int] = field(default_factory=Counter)
    answer_s: list[float] = field(default_factory=list)


class Crowd:
    """All clients of this process."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.found = plan, Found()
        self._jitter = np.random.default_rng(0)

    async def run(self) -> None:
        """Connect all clients at once, and then whenever each is told to come back."""
        contexts = [tls(self._plan.keys, number) for number in range(self._plan.clients)]
        self.found.begin_s = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(self._keep_coming(context)) for context in contexts]
        await asyncio.wait(tasks, timeout=self._plan.seconds)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [each for each in done if not isinstance(each, asyncio.CancelledError)]
        assert not failures, failures[0]

    async def _keep_coming(self, context: ssl.SSLContext) -> None:
        loop, hello = asyncio.get_running_loop(), call("Session", HELLO, stream=1, ends=False)
        bound_s = 0.0
        while True:
            begin_s = loop.time()
            second = int(begin_s - self.found.begin_s)
            self.found.came[second] += 1
            connection = None
            try:
                connection = await connect(self._plan.address, hello, context)
                await connection.closed.wait()
            except OSError:
                pass
            finally:
                if connection is not None:
                    connection.transport.abort()
                    if connection.answered_s is not None:
                        self.found.answer_s.append(connection.answered_s - begin_s)
            if connection is not None and connection.come_back_s is not None:
                bound_s = 0.0
                await asyncio.sleep(connection.come_back_s)
                continue
            self.found.in_vain[second] += 1
            bound_s = min(_MAX_BACKOFF_S, 2.0 * bound_s or _FIRST_BACKOFF_S)
            await asyncio.sleep(bound_s * self._jitter.random())


def main() -> None:
    """Read a plan from standard input, run it, and print the figures."""
    words = json.loads(sys.stdin.readline())
    assert words.pop("do") == "come"
    crowd = Crowd(Plan(**words))
    asyncio.run(crowd.run())
    print(json.dumps(vars(crowd.found)), flush=True)


if __name__ == "__main__":
    main()
