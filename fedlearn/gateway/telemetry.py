"""HTTP endpoints for supervisors and Prometheus: ``/livez``, ``/readyz``, ``/metrics``.

They are served without TLS, and contain no secret, on a separate thread, since a standby
coordinator has no gRPC server yet. Other peers that reach the port cannot keep a supervisor from
its answer.

:mod:`fedlearn.gateway.meanings` describes each metric.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from fedlearn.errors import DeploymentError
from fedlearn.gateway.counters import Histogram
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.meanings import MEANINGS, RUN_METRIC

_STEP_S = 30.0  # limit for starting or stopping, which usually takes far less
_STOP_S = 2.0
_MAX_CONNECTIONS = 128  # at once; there is one supervisor, and one Prometheus
_IDLE_S = 15.0  # for which a connection may be open without a complete request


#: The access log, which is disabled: routine requests are not worth a line.
_SILENT = logging.getLogger(f"{__name__}.requests")
_SILENT.disabled = True


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The metrics of a run, or of a service of many runs, at one moment.

    Attributes:
        run: Name of the run or service: a label of all metrics.
        counters: By name without prefix and ``_total``, or with labels:
            ``refused{reason=rate}``, ``build_info{version=1.0,python=3.11}``.
        gauges: By name in the same way.
        histograms: By name in the same way.
    """

    run: str
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Snapshot(Measurements):
    """The state of a coordinator process at one moment, for telemetry.

    Attributes:
        not_ready: Why it serves no clients now; empty if it does.
        runs: The runs that a service of many runs has at work, each by another name.
    """

    not_ready: str = ""
    runs: Sequence[Measurements] = ()


class Telemetry:
    """The HTTP server; a context manager that serves while it is entered.

    Args:
        address: ``host:port``; port 0 takes any free one.
        snapshot: Called at each request, in this server's thread.
        find_stuck_part: Called likewise; returns which part of this process hangs, empty if none
            does. It must not block.
    """

    def __init__(
        self, address: str, snapshot: Callable[[], Snapshot], *, find_stuck_part: Callable[[], str]
    ) -> None:
        self.address = address
        self._snapshot = snapshot
        self._find_stuck_part = find_stuck_part
        self._process = ProcessCollector(registry=None)

    def __enter__(self) -> Self:
        """Start serving.

        Raises:
            DeploymentError: The address cannot be opened.
        """
        self._loop = LoopThread("telemetry")
        try:
            self.address = self._loop.call(self._serve()).result(_STEP_S)
        except OSError as error:
            self.__exit__()
            raise DeploymentError(
                f"coordinator.http_address: cannot listen on {self.address}: {error.strerror}; "
                "choose a free port of this machine"
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
                return _build_response(self._find_stuck_part())
            case "/readyz":
                return _build_response(self._snapshot().not_ready)
            case "/metrics":
                body = generate_latest(_Families(self._snapshot(), self._process))
                return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
        return web.Response(status=web.HTTPNotFound.status_code)


class _Handler(web.RequestHandler):
    """Handles one connection; a peer that does not speak HTTP only gets a status."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it quotes what the peer has sent
    ) -> web.StreamResponse:
        """Answer a bad request without quoting it."""
        return super().handle_error(request, status, exc, web.HTTPBadRequest().reason)


class _Server(web.Server):
    """Serves a limited number of connections: a new one replaces the oldest."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.Response]]) -> None:
        logger = logging.getLogger(__name__)
        logger.addFilter(_is_worth_a_line)
        super().__init__(answer)
        self._logger = logger
        self._handlers: deque[web.RequestHandler] = deque()

    def __call__(self) -> web.RequestHandler:
        """Create the handler of a new connection."""
        handler = _Handler(
            self,
            loop=asyncio.get_running_loop(),
            access_log=_SILENT,
            keepalive_timeout=_IDLE_S,
            logger=self._logger,
        )
        # Replace the oldest instead of refusing the new one: peers that connect and stay silent
        # must not keep the supervisor out.
        self._handlers.append(handler)
        if len(self._handlers) > _MAX_CONNECTIONS:
            self._handlers.popleft().force_close()
        return handler


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Filter out errors that only mean that a peer does not speak HTTP."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _build_response(problem: str) -> web.Response:
    if problem:
        return web.Response(text=f"{problem}\n", status=web.HTTPServiceUnavailable.status_code)
    return web.Response(text="ok\n")


@dataclass(frozen=True)
class _Families:
    """The metric families that Prometheus reads from a snapshot and the process."""

    snapshot: Snapshot
    process: ProcessCollector

    def collect(self) -> Iterator[Metric]:
        """Yield every counter, gauge and histogram."""
        families = dict[str, Metric]()
        ready = float(not self.snapshot.not_ready)
        labels = {"run": self.snapshot.run}
        _get_family(families, "ready").add_sample("fedlearn_ready", labels, ready)
        for each in (self.snapshot, *self.snapshot.runs):
            _add_samples(families, each)
        yield from families.values()
        yield from self.process.collect()


def _add_samples(families: dict[str, Metric], measured: Measurements) -> None:
    for suffix, values in (("_total", measured.counters), ("", measured.gauges)):
        for text, value in values.items():
            name, labels = _parse_name(text, measured.run)
            _get_family(families, name).add_sample(f"fedlearn_{name}{suffix}", labels, value)
    for text, histogram in measured.histograms.items():
        name, labels = _parse_name(text, measured.run)
        family, counts = _get_family(families, name), histogram.cumulate()
        for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
            ends = labels | {"le": _format_bound(bound)}
            family.add_sample(f"fedlearn_{name}_bucket", ends, count)
        family.add_sample(f"fedlearn_{name}_count", labels, counts[-1])
        family.add_sample(f"fedlearn_{name}_sum", labels, histogram.total)


def _parse_name(text: str, run: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.rstrip("}").partition("{")
    pairs = (each.partition("=") for each in rest.split(",") if each)
    return name.replace("/", "_"), {"run": run} | {key: value for key, _, value in pairs}


def _format_bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else repr(value)


def _get_family(families: dict[str, Metric], name: str) -> Metric:
    meaning = MEANINGS.get(name, RUN_METRIC)
    return families.setdefault(name, Metric(f"fedlearn_{name}", meaning.text, meaning.kind))
