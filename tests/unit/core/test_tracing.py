"""Traces: one a round, across processes, without data, and nothing while they are off."""

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from fedlearn.core import tracing
from fedlearn.core.trace_settings import TraceSettings
from fedlearn.core.tracing import (
    check_traceparent,
    find_ids,
    record_spans,
    round_span,
    run_context,
    span,
    span_within,
    traceparent,
)
from fedlearn.errors import ConfigError
from fedlearn.transport import wire_pb2

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    with record_spans(SimpleSpanProcessor(exporter), role="test", environ={}):
        yield exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {each.name: each for each in exporter.get_finished_spans()}


def id_of(one: ReadableSpan) -> int:
    assert one.context is not None
    return int(one.context.span_id)


def trace_of(one: ReadableSpan) -> int:
    assert one.context is not None
    return int(one.context.trace_id)


def parent_of(one: ReadableSpan) -> int:
    assert one.parent is not None
    return one.parent.span_id


def test_a_round_is_one_trace_with_the_spans_of_clients(spans: InMemorySpanExporter) -> None:
    """The client's process knows the coordinator's span from the task alone."""
    with run_context("clinics", run_id="r1"), round_span(3), span("round.collect", attempt=1):
        task = traceparent()
    with span_within(task, "client.task", kind="TrainRequest"), span("client.train"):
        pass
    found = by_name(spans)
    assert found["round"].parent is None
    assert parent_of(found["round.collect"]) == id_of(found["round"])
    assert parent_of(found["client.task"]) == id_of(found["round.collect"])
    assert parent_of(found["client.train"]) == id_of(found["client.task"])
    assert len({trace_of(each) for each in found.values()}) == 1
    assert dict(found["round.collect"].attributes or {}) == {
        "fedlearn.run": "clinics",
        "fedlearn.round_num": 3,
        "fedlearn.attempt": 1,
    }


def test_a_coordinator_that_resumes_a_round_continues_its_trace(
    spans: InMemorySpanExporter,
) -> None:
    """By the run's id and the round's number; another run or round has another trace."""
    for run_id, round_num in (("r1", 3), ("r1", 3), ("r1", 4), ("r2", 3), ("", 3), ("", 3)):
        with run_context("clinics", run_id=run_id), round_span(round_num):
            pass
    first, again, *others = (trace_of(each) for each in spans.get_finished_spans())
    assert first == again
    assert len({first, *others}) == 5


def test_an_error_is_told_by_its_type_alone(spans: InMemorySpanExporter) -> None:
    """Its words may quote data."""
    with pytest.raises(ValueError, match="patient 7"), span("client.train"):
        raise ValueError("patient 7 has no label")
    (found,) = spans.get_finished_spans()
    assert found.status.description == "ValueError"
    assert "patient" not in found.to_json()


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00-" + "0" * 32 + "-" + "1" * 16,
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "01-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01" * 100_000,
        "\x00" * 55,
        "٣" * 55,
    ],
)
def test_a_forged_or_oversized_parent_is_ignored(spans: InMemorySpanExporter, parent: str) -> None:
    """The client's spans are then a trace of their own, and nothing of it is stored."""
    assert check_traceparent(parent) == ""
    with span_within(parent, "client.task"):
        pass
    (found,) = spans.get_finished_spans()
    assert found.parent is None


def test_no_message_of_a_client_carries_a_trace() -> None:
    """So a client can neither forge ids of the coordinator's traces nor make it keep any."""
    found = {
        f"{message.name}.{each.name}"
        for message in wire_pb2.DESCRIPTOR.message_types_by_name.values()
        for each in message.fields
        if "trace" in each.name
    }
    assert found == {"Task.traceparent"}


def test_ids_that_no_span_may_have_begin_a_trace(spans: InMemorySpanExporter) -> None:
    """W3C forbids zeros; they have the right form."""
    with span_within(f"00-{0:032x}-{0:016x}-01", "client.task"):
        pass
    (found,) = spans.get_finished_spans()
    assert found.parent is None
    assert trace_of(found) != 0


def test_what_is_not_sampled_stays_so_at_clients(
    spans: InMemorySpanExporter,
) -> None:
    """The flag travels with the task."""
    with span_within(f"00-{7:032x}-{5:016x}-00", "client.task"):
        assert traceparent().endswith("-00")
    assert spans.get_finished_spans() == ()


def test_without_traces_there_is_nothing() -> None:
    """No object a span, no ids, and OpenTelemetry is not imported."""
    assert span("round.step") is span("round.collect")
    with run_context("clinics"), round_span(0), span_within("x", "client.task"):
        assert (traceparent(), find_ids()) == ("", None)
    script = (
        "import sys; from fedlearn.core import logs, tracing\n"
        "with tracing.tracing(tracing.TraceSettings(), role='x', environ={}):\n"
        "  with tracing.span('a'): print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("settings", "environ", "is_on"),
    [
        (TraceSettings(), {}, False),
        (TraceSettings(), ENDPOINT, True),
        (TraceSettings(), {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (TraceSettings(), ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (TraceSettings(mode="off"), ENDPOINT, False),
        (TraceSettings(mode="on"), {}, True),
        (TraceSettings(mode="on"), {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_configuration_and_the_standard_variables_turn_traces_on(
    settings: TraceSettings, environ: Mapping[str, str], *, is_on: bool
) -> None:
    assert settings.is_on(environ) is is_on


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "set it to http/protobuf"),
    ],
)
def test_what_cannot_be_sent_is_an_error(environ: Mapping[str, str], complaint: str) -> None:
    with (
        pytest.raises(ConfigError, match=complaint),
        tracing.tracing(TraceSettings(mode="on"), role="test", environ=environ),
    ):
        pass


def test_without_the_extra_traces_that_are_on_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If only a variable of the machine asks for them, the process starts without."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'fedlearn\[otel\]'"),
        tracing.tracing(TraceSettings(mode="on"), role="test", environ={}),
    ):
        pass
    with tracing.tracing(TraceSettings(), role="test", environ=ENDPOINT):
        assert traceparent() == ""
