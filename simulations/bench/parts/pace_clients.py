"""Clients that check in again and again and cost next to nothing: their words are made beforehand.

They share no code with the product: HTTP/2, gRPC and protobuf are written here by hand, as far as a
client needs them that says hello, hears a welcome, and comes back when it is told. So they are also
a second reading of ``docs/reference/wire.md``. Run as a module, they take what to do as a JSON line
on standard input and print what came of it.
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
    """Return a header field that no table knows and none is to keep; HPACK, RFC 7541, 6.2.2."""
    assert max(len(name), len(value)) < 127
    return b"".join((b"\0", bytes([len(name)]), name.encode(), bytes([len(value)]), value.encode()))


def call(method: str, message: bytes, *, stream: int, ends: bool) -> bytes:
    """Return the frames of a call of the door with its first message.

    Args:
        method: Of the door.
        message: Serialised.
        stream: Odd, higher than the last one of the connection.
        ends: Whether no further message comes.
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
    """Return what every connection begins with."""
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"")


#: FromClient with a Hello that says nothing but its protocol.
HELLO = bytes((0x0A, 2, 0x08, PROTOCOL))
#: DownloadRequest of a digest that nobody is asked.
NO_DOWNLOAD = bytes((0x0A, 32)) + bytes(32)


class Connection(asyncio.Protocol):
    """One connection, and what came on it.

    Attributes:
        come_back_s: What the coordinator has asked.
        answered_s: When it first was heard: a welcome, or that; of the monotonic clock.
        closed: Set when it is, or has asked to come back.
    """

    def __init__(self, first: bytes) -> None:
        self._first, self._buffer, self._messages = first, bytearray(), bytearray()
        self._asked = dict[int, asyncio.Event]()
        self.come_back_s: float | None = None
        self.answered_s: float | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say all that there is to say."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._first)

    def connection_lost(self, error: Exception | None) -> None:
        """Note it."""
        self._close()

    def data_received(self, data: bytes) -> None:
        """Take frames."""
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
        """Make a call and wait until it has ended, however it ends."""
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
        """Take the messages of the session; they are short."""
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
    """Return the value of the field, which is as long as its length says, in plain characters."""
    _, _, rest = block.partition(_COME_BACK_METADATA)
    assert rest[0] < 128, "coded by Huffman"
    return float(rest[1 : 1 + rest[0]])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a process of clients does.

    Attributes:
        address: Of the coordinator.
        clients: How many they are.
        seconds: For so long.
        keys: The folder of their certificates and keys.
    """

    address: str
    clients: int
    seconds: float
    keys: str


def tls(keys: str, number: int) -> ssl.SSLContext:
    """Return what a client shows, and whom it believes."""
    context = ssl.create_default_context(cafile=f"{keys}/ca.pem")
    context.load_cert_chain(f"{keys}/client-{number}.pem", f"{keys}/client-{number}.key")
    context.set_alpn_protocols(["h2"])
    return context


async def connect(address: str, first: bytes, context: ssl.SSLContext) -> Connection:
    """Connect and send what is said first."""
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
    """What came of it; times are of the monotonic clock.

    Attributes:
        begin_s: When the first came.
        came: How many began to connect, by second since then.
        in_vain: Of them, who heard nothing, likewise.
        answer_s: How long each waited for a welcome or for being sent away.
    """

    begin_s: float = 0.0
    came: Counter[int] = field(default_factory=Counter)
    in_vain: Counter[int] = field(default_factory=Counter)
    answer_s: list[float] = field(default_factory=list)


class Crowd:
    """The clients of a process."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.found = plan, Found()
        self._jitter = np.random.default_rng(0)

    async def run(self) -> None:
        """Have all of them come at once, and then as they are told."""
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
    """Do what standard input says."""
    words = json.loads(sys.stdin.readline())
    assert words.pop("do") == "come"
    crowd = Crowd(Plan(**words))
    asyncio.run(crowd.run())
    print(json.dumps(vars(crowd.found)), flush=True)


if __name__ == "__main__":
    main()
