"""Whether a coordinator lives, is ready, and what it counts: ``/livez``, ``/readyz``, ``/metrics``.

HTTP without TLS and without a secret in it, for supervisors and Prometheus. It runs in a
thread and event loop of its own: a coordinator that waits for its turn has no door yet, and
must say so. Whoever else reaches the port cannot keep a supervisor from its answer.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from fedlearn.errors import DeploymentError

ResultT = TypeVar("ResultT")

_STEP_S = 30.0  # to start or to stop; a bound, not a wait
_STOP_S = 2.0

#: Connections at once; there is one supervisor, and one Prometheus.
_MAX_CONNECTIONS = 128

#: Seconds that a connection may keep without a whole request.
_IDLE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is told of a coordinator at one moment.

    Attributes:
        not_ready: Why it serves no clients now; empty: it does.
        not_alive: Why it should be restarted; empty: it should not.
        counters: What only grows, by name without prefix and ``_total``; a name such as
            ``refused{reason=revoked}`` has one label.
        gauges: What goes up and down, named the same way.
    """

    not_ready: str = ""
    not_alive: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class Telemetry:
    """The HTTP server; a context manager that serves while it is entered.

    Args:
        address: ``host:port``; port 0 takes any free one.
        snapshot: Asked at each request, in this server's thread.

    Example:
        >>> from urllib.request import urlopen
        >>> with Telemetry("127.0.0.1:0", lambda: Snapshot(gauges={"round": 3})) as telemetry:
        ...     page = urlopen(f"http://{telemetry.address}/metrics").read().decode()
        >>> "fedlearn_round 3.0" in page
        True
    """

    def __init__(self, address: str, snapshot: Callable[[], Snapshot]) -> None:
        self.address = address
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(_Families(snapshot))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        """Serve.

        Raises:
            DeploymentError: The address cannot be listened on.
        """
        self._thread.start()
        try:
            self.address = self._wait_for(self._serve())
        except OSError as error:
            self.__exit__()
            raise DeploymentError(
                f"coordinator.http_address: cannot listen on {self.address}: {error.strerror}; "
                "name a free port of this machine"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._wait_for(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _wait_for(self, step: Coroutine[object, object, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(timeout=_STEP_S)

    async def _serve(self) -> str:
        host, _, port = self.address.rpartition(":")
        self._runner = web.ServerRunner(_Server(self._answer), shutdown_timeout=_STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        return f"{host}:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.method not in {"GET", "HEAD"}:
            return web.Response(status=web.HTTPMethodNotAllowed.status_code)
        match request.path:
            case "/livez":
                return _verdict(self._snapshot().not_alive)
            case "/readyz":
                return _verdict(self._snapshot().not_ready)
            case "/metrics":
                return self._metrics()
        return web.Response(status=web.HTTPNotFound.status_code)

    def _metrics(self) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Server(web.Server):
    """Serves so many connections: the oldest makes room for the newest."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.Response]]) -> None:
        logger = logging.getLogger(__name__)
        logger.addFilter(_is_worth_a_line)
        super().__init__(answer, access_log=None, keepalive_timeout=_IDLE_S, logger=logger)
        self._kept: deque[web.RequestHandler] = deque()

    def __call__(self) -> web.RequestHandler:
        """Return what speaks on a new connection."""
        handler = super().__call__()
        self._kept.append(handler)
        if len(self._kept) > _MAX_CONNECTIONS:
            self._kept.popleft().force_close()
        return handler


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether something is more than a peer that does not speak HTTP."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _verdict(problem: str) -> web.Response:
    if problem:
        return web.Response(text=f"{problem}\n", status=web.HTTPServiceUnavailable.status_code)
    return web.Response(text="ok\n")


@dataclass(frozen=True, eq=False)
class _Families(Collector):
    """Turns a snapshot into what Prometheus reads; nothing is kept between two requests."""

    snapshot: Callable[[], Snapshot]

    def describe(self) -> list[Metric]:
        """Return nothing: what there is depends on the moment."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every counter and gauge."""
        taken = self.snapshot()
        gauges = {**taken.gauges, "ready": float(not taken.not_ready)}
        for kind, values in ((CounterMetricFamily, taken.counters), (GaugeMetricFamily, gauges)):
            families: dict[str, Metric] = {}
            for text, value in values.items():
                name, label, labelled = _parts(text)
                if name not in families:
                    words = name.replace("_", " ")
                    labels = [label] if label else []
                    families[name] = kind(f"fedlearn_{name}", f"{words}.", labels=labels)
                family = families[name]
                assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
                family.add_metric([labelled] if label else [], value)
            yield from families.values()


def _parts(text: str) -> tuple[str, str, str]:
    """Return name, label and the label's value of ``name{label=value}``.

    Example:
        >>> _parts("refused{reason=revoked}"), _parts("messages")
        (('refused', 'reason', 'revoked'), ('messages', '', ''))
    """
    name, brace, rest = text.rstrip("}").partition("{")
    label, _, value = rest.partition("=") if brace else ("", "", "")
    return name, label, value
