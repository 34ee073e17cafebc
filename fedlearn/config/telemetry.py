"""Configuration of a process's log and traces, for coordinators, services, clients, simulations."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from fedlearn.config.section import Problem, Section, describe_as
from fedlearn.core.redaction import remove_password
from fedlearn.core.trace_settings import TraceSettings

_Url = Annotated[
    str, StringConstraints(pattern=r"^https?://[^\s/]+"), describe_as("a URL, http:// or https://")
]


class TelemetrySection(Section):
    """How a process reports what it does: its log and traces; see also coordinator.http_address."""

    log_format: Literal["auto", "text", "json"] = Field(
        "auto",
        description='How a command writes its log: "text", "json" (an object a line), or "auto": '
        "as text in a terminal, as JSON elsewhere. --log-format and FEDLEARN_LOG_FORMAT take its "
        "place.",
    )
    traces: Literal["auto", "on", "off"] = Field(
        "auto",
        description='Whether traces of rounds are sent by OpenTelemetry (fedlearn[otel]): "auto" '
        "sends them if an OTEL_ variable names a receiver.",
    )
    traces_endpoint: _Url | None = Field(
        None,
        description="URL of a receiver of OTLP over HTTP, such as http://localhost:4318, without "
        "a password; not set: as the OTEL_ variables say.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a password, which would be stored, and an endpoint without effect."""
        if (url := self.traces_endpoint) is None:
            return
        if remove_password(url) != url:
            text = "has a password, which would be stored with the run; set "
            yield Problem(("traces_endpoint",), f"{text}OTEL_EXPORTER_OTLP_HEADERS instead")
        if self.traces != "on":
            yield Problem(("traces_endpoint", "traces"), 'is without effect; set traces to "on"')

    def build_trace_settings(self) -> TraceSettings:
        """Build the settings of traces."""
        return TraceSettings(mode=self.traces, endpoint=self.traces_endpoint or "")
