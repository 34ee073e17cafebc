"""Whether a coordinator lives, is ready, and what it counts: ``/livez``, ``/readyz``, ``/metrics``.

HTTP without TLS and without a secret in it, in a thread of its own: a coordinator that waits for
its turn has no door yet. Whoever reaches the port cannot keep a supervisor from its answer.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from fedlearn.door.loop import LoopThread
from fedlearn.errors import DeploymentError

_STEP_S = 30.0  # to start or to stop; a bound, not a wait
_STOP_S = 2.0
_MAX_CONNECTIONS = 128  # at once; there is one supervisor, and one Prometheus
_IDLE_S = 15.0  # that a connection may keep without a whole request


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is told of a coordinator at one moment.

    Attributes:
        not_ready: Why it serves no clients now; empty: it does.
        counters: By name without prefix and ``_total``, or with a label: ``refused{reason=rate}``.
        gauges: By name in the same way.
    """

    not_ready: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class Telemetry:
    """The HTTP server; a context manager that serves while it is entered.

    Args:
        address: ``host:port``; port 0 takes any free one.
        snapshot: Asked at each request, in this server's thread.
    """

    def __init__(self, address: str, snapshot: Callable[[], Snapshot]) -> None:
        self.address = address
        self._snapshot = snapshot

    def __enter__(self) -> Self:
        """Serve.

        Raises:
            DeploymentError: The address cannot be listened on.
        """
        self._loop = LoopThread("telemetry")
        try:
            self.address = self._loop.call(self._serve()).result(_STEP_S)
        except OSError as error:
            self.__exit__()
            raise DeploymentError(
                f"coordinator.http_address: cannot listen on {self.address}: {error.strerror}; "
                "name a free port of this machine"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._loop.call(self._runner.cleanup()).result(_STEP_S)
        self._loop.stop()

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
                return _verdict("")
            case "/readyz":
                return _verdict(self._snapshot().not_ready)
            case "/metrics":
                body = generate_latest(_Families(self._snapshot()))
                return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
        return web.Response(status=web.HTTPNotFound.status_code)


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


@dataclass(frozen=True)
class _Families:
    """What Prometheus reads of a snapshot."""

    taken: Snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every counter and gauge."""
        gauges = {**self.taken.gauges, "ready": float(not self.taken.not_ready)}
        counters = ("counter", "_total", self.taken.counters)
        for kind, suffix, values in (counters, ("gauge", "", gauges)):
            families: dict[str, Metric] = {}
            for text, value in values.items():
                name, _, rest = text.rstrip("}").partition("{")
                label, _, labelled = rest.partition("=")
                family = Metric(f"fedlearn_{name}", f"{name.replace('_', ' ')}.", kind)
                families.setdefault(name, family).add_sample(
                    f"fedlearn_{name}{suffix}", {label: labelled} if label else {}, value
                )
            yield from families.values()
