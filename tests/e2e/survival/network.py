"""A TCP proxy that counts bytes, with which a test slows down, freezes or cuts a network."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from fedlearn.core.clock import SystemClock

_PIECE_BYTES = 32 << 10
_BUFFER_BYTES = 64 << 10


@dataclass
class Way:
    """One direction of the proxy.

    Attributes:
        num_bytes: Bytes passed so far, over all connections.
        trips_at: Number of bytes after which the proxy trips; ``None`` for never.
    """

    num_bytes: int = 0
    trips_at: int | None = None


@dataclass
class Proxy:
    """A proxy between clients and a coordinator.

    Attributes:
        target: ``host:port`` of the coordinator; set it before the first connection.
        bytes_per_s: Bandwidth of each connection and direction.
        freezes: Whether a trip stops all data; otherwise it cuts all connections and refuses new
            ones.
        up: Direction from the client.
        down: Direction to the client.
        tripped: Set by a trip.
    """

    target: str
    bytes_per_s: float
    freezes: bool = False
    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)
    tripped: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _sockets: list[socket.socket] = field(default_factory=list)
    _thaw: Event = field(default_factory=Event)

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        """Accept connections until the block ends."""
        self._thaw.set()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._listener = listener
            Thread(target=self._accept, daemon=True).start()
            try:
                yield self
            finally:
                self._thaw.set()
                self._trip(forever=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def restore(self) -> None:
        """Let data and connections pass again."""
        self.up.trips_at = self.down.trips_at = None
        self.tripped.clear()
        self._thaw.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                if self.tripped.is_set():
                    client.close()
                    continue
                try:
                    server = socket.create_connection((host, int(port)))
                except ConnectionError:
                    client.close()
                    continue
                for each in (client, server):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                with self._lock:
                    self._sockets += [client, server]
                for way, ends in ((self.up, (client, server)), (self.down, (server, client))):
                    Thread(target=self._pump, args=(way, *ends), daemon=True).start()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        clock = SystemClock()
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._thaw.wait()
                sink.sendall(data)
                with self._lock:
                    way.num_bytes += len(data)
                    trips = way.trips_at is not None and way.num_bytes >= way.trips_at
                if trips and not self.tripped.is_set():
                    self._trip(forever=False)
                clock.sleep(len(data) / self.bytes_per_s)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _trip(self, *, forever: bool) -> None:
        self.tripped.set()
        if self.freezes and not forever:
            self._thaw.clear()
            return
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
