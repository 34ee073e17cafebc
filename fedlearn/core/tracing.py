"""Traces of rounds, by OpenTelemetry (``fedlearn[otel]``); off until :func:`tracing` is entered.

A round is one trace. Its spans come from the coordinator and, through their own exporters, from the
clients: a task carries the trace context in the format of W3C (``traceparent``). Attributes are the
names and numbers of the work, never data, parameters, losses, or words of an error.

References:
    W3C, Trace Context, 2021. https://www.w3.org/TR/trace-context-1/
"""

import hashlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import structlog

from fedlearn.core.trace_settings import TraceSettings
from fedlearn.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import SpanContext

#: The value of an attribute.
Value: TypeAlias = str | int | float | bool
_NOTHING: Final = nullcontext()

#: Names of a context variable of the log that spans have as attributes, too.
_SHARED: Final = ("run", "round_num", "client_id")
#: What a traceparent must look like; anything else that a peer sends is ignored.
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
#: Seconds for which the end of a process waits for its last spans to be sent.
_LAST_S: Final = 3.0
_TRACE_ID_BYTES: Final = 16

#: The run whose rounds are traced: by its id, each round has the same trace in every process.
_run_id: ContextVar[str] = ContextVar("fedlearn_run_id", default="")
_wanted_trace: ContextVar[int | None] = ContextVar("fedlearn_wanted_trace", default=None)


@contextmanager
def tracing(settings: TraceSettings, *, role: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Send traces of this process in the block, if they are wanted.

    Args:
        settings: Whether and where to send them.
        role: What this process is; its service is called ``fedlearn-ROLE`` unless OpenTelemetry's
            variables name it.
        environ: The environment.

    Raises:
        ConfigError: The mode is ``"on"``, and the extra is not installed, or the environment asks
            for another protocol. With ``"auto"``, the log says so instead.
    """
    if _Process.recorder is not None:  # an outer block has started it
        yield
        return
    try:
        exporter = _open_exporter(settings) if settings.is_on(environ) else None
    except ConfigError as error:
        if settings.mode == "on":
            raise
        structlog.get_logger(__name__).warning("traces_off", reason=str(error))
        exporter = None
    if exporter is None:
        yield
        return
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 (an extra)

    with record_spans(BatchSpanProcessor(exporter), role=role, environ=environ):
        yield


def _open_exporter(settings: TraceSettings) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry: pip install 'fedlearn[otel]'") from error
    # Like its own variable, our endpoint is a base address, to which OTLP's path is added.
    base = settings.endpoint.rstrip("/")
    return OTLPSpanExporter(endpoint=f"{base}/v1/traces" if base else None)


@contextmanager
def record_spans(
    processor: "SpanProcessor", *, role: str, environ: Mapping[str, str]
) -> Iterator[None]:
    """Pass the spans of this process to ``processor`` in the block; needs the extra."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 (an extra)
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

    is_named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if is_named else {"service.name": f"fedlearn-{role}"})
    provider = TracerProvider(
        resource=resource, id_generator=_build_id_generator(), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    _Process.recorder = _Recorder(provider)
    try:
        yield
    finally:
        _Process.recorder = None
        # In a thread: without a receiver it would try for half a minute.
        last = threading.Thread(target=provider.shutdown, name="last-traces", daemon=True)
        last.start()
        last.join(_LAST_S)


class _Process:
    """What this process records spans with; ``None`` costs one comparison a span."""

    recorder: "_Recorder | None" = None


def _stop_in_child() -> None:
    """Record nothing in a fork, such as a worker of a simulation: its parent has the round."""
    _Process.recorder = None


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_stop_in_child)


class _Recorder:
    """Opens spans with OpenTelemetry."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._tracer = provider.get_tracer("fedlearn", version("fedlearn"))

    @contextmanager
    def open(
        self, name: str, context: "Context | None", attributes: Mapping[str, Value]
    ) -> Iterator[None]:
        """Open a span in ``context``; ``None``: within the present span."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 (an extra)

        known = structlog.contextvars.get_contextvars()
        shared: dict[str, Value] = {each: known[each] for each in _SHARED if each in known}
        with self._tracer.start_as_current_span(
            name,
            context=context,
            attributes={f"fedlearn.{key}": it for key, it in (shared | {**attributes}).items()},
            # The words of an error may quote data, so only its type is told.
            record_exception=False,
            set_status_on_exception=False,
        ) as opened:
            try:
                yield
            except BaseException as error:
                opened.set_status(StatusCode.ERROR, type(error).__name__)
                raise


def _build_id_generator() -> "RandomIdGenerator":
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415 (an extra)

    class RoundIds(RandomIdGenerator):
        """Draws ids, except for a trace that has one."""

        def generate_trace_id(self) -> int:
            return _wanted_trace.get() or super().generate_trace_id()

    return RoundIds()


# ---- Spans --------------------------------------------------------------------------------


def span(name: str, **attributes: Value) -> AbstractContextManager[None]:
    """Record a span of this thread or task within its present one; the context manager ends it.

    Example:
        >>> with span("round.step"):
        ...     pass
    """
    recorder = _Process.recorder
    return _NOTHING if recorder is None else recorder.open(name, None, attributes)


def span_within(parent: str, name: str, **attributes: Value) -> AbstractContextManager[None]:
    """Record a span whose parent is of another process; an invalid ``parent`` counts as none.

    Args:
        parent: The parent's :func:`traceparent`, from a peer.
        name: Name of the span.
        attributes: Its attributes.
    """
    recorder = _Process.recorder
    if recorder is None:
        return _NOTHING
    return recorder.open(name, _read_traceparent(parent), attributes)


@contextmanager
def round_span(round_num: int) -> Iterator[None]:
    """Record a round as one trace, which is the same in each process of a deployed run."""
    with structlog.contextvars.bound_contextvars(round_num=round_num):
        recorder, run_id = _Process.recorder, _run_id.get()
        if recorder is None:
            yield
            return
        from opentelemetry.context import Context  # noqa: PLC0415 (an extra)

        key = f"{run_id}/{round_num}".encode()
        digest = hashlib.blake2b(key, digest_size=_TRACE_ID_BYTES).digest()
        token = _wanted_trace.set(int.from_bytes(digest) if run_id else None)
        try:
            with recorder.open("round", Context(), {}):
                yield
        finally:
            _wanted_trace.reset(token)


@contextmanager
def run_context(name: str, *, run_id: str = "") -> Iterator[None]:
    """Let this thread's log lines and spans name a run.

    Args:
        name: Name of the run.
        run_id: Its unique id, if several processes work on it.
    """
    token = _run_id.set(run_id)
    try:
        with structlog.contextvars.bound_contextvars(run=name):
            yield
    finally:
        _run_id.reset(token)


class TraceIds(NamedTuple):
    """The ids of a span, in hexadecimal."""

    trace_id: str
    span_id: str


def find_ids() -> TraceIds | None:
    """Return the ids of this thread's present span; ``None`` without one."""
    context = _find_context()
    if context is None:
        return None
    return TraceIds(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def traceparent() -> str:
    """Return this thread's present span, for a peer; empty without one."""
    context = _find_context()
    if context is None:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def check_traceparent(parent: str) -> str:
    """Return a peer's :func:`traceparent` if it is valid; otherwise the empty string.

    Example:
        >>> check_traceparent(f"00-{7:032x}-{5:016x}-01")
        '00-00000000000000000000000000000007-0000000000000005-01'
        >>> check_traceparent("00-7-5-01" * 1000)
        ''
    """
    return parent if _TRACEPARENT.fullmatch(parent) else ""


def _find_context() -> "SpanContext | None":
    if _Process.recorder is None:
        return None
    from opentelemetry.trace import get_current_span  # noqa: PLC0415 (an extra)

    context = get_current_span().get_span_context()
    return context if context.is_valid else None


def _read_traceparent(parent: str) -> "Context":
    """Return the context of a remote span; an empty one unless ``parent`` is valid."""
    from opentelemetry import trace  # noqa: PLC0415 (an extra)
    from opentelemetry.context import Context  # noqa: PLC0415

    found = _TRACEPARENT.fullmatch(parent)
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(each, 16) for each in found.groups())
    known = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags & 1)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(known), Context())
