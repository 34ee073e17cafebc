"""The table [telemetry] of coordinators, services and clients."""

from pathlib import Path

import pytest

from fedlearn.config import for_service, load, load_client, load_service
from fedlearn.config.telemetry import TelemetrySection
from fedlearn.core.trace_settings import TraceSettings
from fedlearn.errors import ConfigError

TABLE = """
[telemetry]
log_format = "json"
traces = "on"
traces_endpoint = "http://collector:4318"
"""


def test_every_process_has_the_table(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(TABLE)
    coordinator, client = load(file, overrides=()).telemetry, load_client(file).telemetry
    file.write_text(f"{TABLE}\n[service]\n")
    assert coordinator == client == load_service(file).telemetry
    assert client.log_format == "json"
    wanted = TraceSettings(mode="on", endpoint="http://collector:4318")
    assert client.build_trace_settings() == wanted
    assert TelemetrySection().build_trace_settings() == TraceSettings()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('traces = "on"\ntraces_endpoint = "http://me:secret@there"', "OTEL_EXPORTER_OTLP_HEADERS"),
        ('traces_endpoint = "http://there:4318"', 'set traces to "on"'),
        ('traces = "on"\ntraces_endpoint = "there:4318"', "a URL"),
        ('log_format = "xml"', "log_format"),
    ],
)
def test_what_has_no_effect_or_holds_a_password_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(f"[telemetry]\n{text}")
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(file, overrides=())
    assert "secret" not in str(raised.value)


def test_the_service_decides_for_its_runs(tmp_path: Path) -> None:
    """Its process has one log; a run that asks for another is refused."""
    service, experiment = tmp_path / "service.toml", tmp_path / "experiment.toml"
    service.write_text(f"{TABLE}\n[service]\n")
    experiment.write_text("")
    served = for_service(load(experiment, overrides=()), load_service(service))
    assert served.telemetry.log_format == "json"
    experiment.write_text('[telemetry]\nlog_format = "text"')
    with pytest.raises(ConfigError, match=r'telemetry\.log_format is "text", not "json"'):
        for_service(load(experiment, overrides=()), load_service(service))
