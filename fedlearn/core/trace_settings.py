"""Whether and where a process sends traces; an application can say so without torch or logging."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fedlearn.errors import ConfigError

_PROTOCOL: Final = "http/protobuf"


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Whether and where a process sends traces.

    Attributes:
        mode: ``"auto"`` sends them if one of OpenTelemetry's variables names a receiver.
        endpoint: URL of a receiver of OTLP over HTTP; empty: as OpenTelemetry's variables say.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    endpoint: str = ""

    def is_on(self, environ: Mapping[str, str]) -> bool:
        """Whether traces are wanted, given OpenTelemetry's environment variables.

        Raises:
            ConfigError: They ask for another exporter or protocol than OTLP over HTTP.
        """
        exporter = environ.get("OTEL_TRACES_EXPORTER", "")
        if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
            return False
        receivers = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        is_named = bool(exporter) or any(environ.get(each) for each in receivers)
        if not (self.mode == "on" or (self.mode == "auto" and is_named)):
            return False
        if exporter not in ("", "otlp"):
            raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}; set it to otlp, or to none")
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if protocol := environ.get(name):
                if protocol != _PROTOCOL:
                    raise ConfigError(f"{name} is {protocol!r}; set it to {_PROTOCOL}")
                break
        return True
