"""Traces of real processes, by OTLP, to a receiver on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedlearn.rounds.updates import validate_or_refuse
from tests.e2e.deployed import SECURE, Site, site_in, until_said
from tests.processes import Crash, Launcher, Process, until

pytest.importorskip("opentelemetry.proto")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
#: Names that attributes may have: none of them is for data.
ATTRIBUTES = {
    f"fedlearn.{name}" for name in ("run", "round_num", "client_id", "attempt", "kind", "num_bytes")
}


@dataclass
class Receiver:
    """Receives spans by OTLP over HTTP.

    Attributes:
        spans: The spans of each service, by its name.
    """

    address: str = ""
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            )
            found = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans.setdefault(service, []).extend(found)

    def all(self) -> list[Span]:
        return [span for each in list(self.spans.values()) for span in list(each)]

    def find(self, service: str, name: str) -> list[Span]:
        return [each for each in list(self.spans.get(service, ())) if each.name == name]


@contextmanager
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    overrides = (
        "num_rounds=1000",
        f"data.partition.num_clients={NUM_CLIENTS}",
        f"cohort.num_wanted={NUM_CLIENTS}",
        "stragglers.over_selection=1.0",
        "evaluation.clients=0",
    )
    with site_in(launcher, tmp_path, *overrides) as site:
        yield site


def coordinate(site: Site, traces: Receiver, *, crash: Crash | None = None) -> Process:
    """Start a coordinator whose file names the receiver."""
    site.change("telemetry.traces=on", f"telemetry.traces_endpoint=http://{traces.address}")
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    command = ("coordinator", str(site.file), "--json")
    process = site.start("coordinator", *command, crash=crash, variables=soon)
    until_said(process, "serving")
    return process


def join(site: Site, traces: Receiver) -> list[Process]:
    """Start clients."""
    return [join_one(site, traces, number) for number in range(NUM_CLIENTS)]


def join_one(site: Site, traces: Receiver, number: int) -> Process:
    """Start a client that sends its spans, soon, to the address in its environment."""
    url = f"http://{traces.address}"
    return site.join(number, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_BSP_SCHEDULE_DELAY="100")


def require_whole(traces: Receiver, *, stages: set[str]) -> None:
    """Wait for a round whose clients' spans are below its own, with a span for each stage."""

    def is_there() -> bool:
        by_trace = dict[bytes, list[Span]]()
        for each in traces.all():
            by_trace.setdefault(each.trace_id, []).append(each)
        return any(is_whole(spans, stages) for spans in by_trace.values())

    until(is_there, told=lambda: str({(each.name) for each in traces.all()}))


def is_whole(spans: list[Span], stages: set[str]) -> bool:
    by_id = {each.span_id: each for each in spans}
    roots = [each for each in spans if not each.parent_span_id]
    if [each.name for each in roots] != ["round"]:
        return False
    for each in spans:
        above = each
        while above.parent_span_id:
            if above.parent_span_id not in by_id:
                return False
            above = by_id[above.parent_span_id]
    names = [each.name for each in spans]
    is_done = all(names.count(f"client.{each}") >= NUM_CLIENTS for each in stages)
    return is_done and {"round.collect", "round.validate", "round.step", "round.commit"} <= set(
        names
    )


def test_clients_spans_are_below_the_coordinators_round(site: Site) -> None:
    """No attribute holds anything but names and numbers of the work."""
    site.change("model.hidden=[1200]")  # too large to travel inside messages: it is downloaded
    with receiver() as traces:
        coordinate(site, traces)
        join(site, traces)
        require_whole(traces, stages={"task", "check_request", "download", "train", "upload"})
        keys = {attribute.key for span in traces.all() for attribute in span.attributes}
        assert keys == ATTRIBUTES
        assert set(traces.spans) == {"fedlearn-coordinator", "fedlearn-client"}
        assert not any(span.events for span in traces.all())


def test_each_stage_of_secure_aggregation_has_its_spans(site: Site) -> None:
    site.change(*SECURE)
    with receiver() as traces:
        coordinate(site, traces)
        join(site, traces)
        require_whole(traces, stages={"task", "secure_stage", "train", "upload"})
        names = {each.name for each in traces.all()}
        stages = {"advertise", "share", "mask", "unmask", "sum"}
        assert {f"secure_aggregation.{each}" for each in stages} <= names


def test_a_round_whose_coordinator_was_killed_stays_one_trace(site: Site) -> None:
    """The spans that were open are lost; those of clients are in the trace that goes on."""
    second_round = NUM_CLIENTS + 2
    crash = Crash("replies", validate_or_refuse, when="before", nth=second_round)
    with receiver() as traces:
        coordinator = coordinate(site, traces, crash=crash)
        clients = join(site, traces)
        coordinator.wait()
        assert coordinator.has_crashed_itself()
        coordinate(site, traces)

        def goes_on() -> bool:
            roots = {each.trace_id for each in traces.find("fedlearn-coordinator", "round")}
            known = {each.span_id for each in traces.all()}
            lost = [each for each in traces.all() if each.parent_span_id not in {b"", *known}]
            return any(each.name.startswith("client.") and each.trace_id in roots for each in lost)

        until(goes_on, told=coordinator.tail)
        # A client that is killed only lacks the spans that it had open.
        clients[0].kill()
        traces.spans.clear()
        join_one(site, traces, 0)
        require_whole(traces, stages={"train", "upload"})
