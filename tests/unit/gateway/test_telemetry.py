"""Health checks and Prometheus metrics, over real HTTP."""

import socket
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedlearn.errors import DeploymentError
from fedlearn.gateway.counters import Histogram
from fedlearn.gateway.meanings import RUN_METRIC
from fedlearn.gateway.telemetry import Measurements, Snapshot, Telemetry


@dataclass
class Told:
    """A coordinator's state, set by the test."""

    now: Snapshot = field(default_factory=lambda: Snapshot(run="clinics"))
    find_stuck_part: str = ""

    def __call__(self) -> Snapshot:
        return self.now


def serving(told: Told, address: str = "127.0.0.1:0") -> Telemetry:
    return Telemetry(address, told, find_stuck_part=lambda: told.find_stuck_part)


def got(telemetry: Telemetry, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://{telemetry.address}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_coordinator_that_waits_for_its_turn_lives_but_is_not_ready() -> None:
    """It is ready once it serves; each answer reflects the current state."""
    told = Told(Snapshot(run="clinics", not_ready="another coordinator holds the lease"))
    with serving(told) as telemetry:
        assert got(telemetry, "/livez") == (200, "ok\n")
        assert got(telemetry, "/readyz") == (503, "another coordinator holds the lease\n")
        told.now = Snapshot(run="clinics")
        assert got(telemetry, "/readyz") == (200, "ok\n")


def test_a_coordinator_in_which_a_thread_is_stuck_does_not_live() -> None:
    """Ready or not, its supervisor should restart it."""
    told = Told()
    with serving(told) as telemetry:
        told.find_stuck_part = "the thread of the rounds has shown no sign of life for 700 s"
        assert got(telemetry, "/livez") == (503, f"{told.find_stuck_part}\n")
        assert got(telemetry, "/readyz") == (200, "ok\n")
        told.find_stuck_part = ""
        assert got(telemetry, "/livez") == (200, "ok\n")


def export(page: str) -> set[str]:
    """Return the lines about this coordinator, without comments."""
    return {line for line in page.splitlines() if line.startswith("fedlearn_")}


def test_metrics_are_what_prometheus_reads() -> None:
    """Counters end in _total, labels are in braces, and each metric has the run's label."""
    told = Told(
        Snapshot(
            run="clinics",
            counters={"messages": 7, "refused{reason=revoked}": 2, "refused{reason=expired}": 1},
            gauges={"round": 3, "clients/accuracy_mean": 0.9, "build_info{python=3,torch=2}": 1},
        )
    )
    with serving(told) as telemetry:
        status, page = got(telemetry, "/metrics")
    assert status == 200
    assert export(page) == {
        'fedlearn_messages_total{run="clinics"} 7.0',
        'fedlearn_refused_total{reason="revoked",run="clinics"} 2.0',
        'fedlearn_refused_total{reason="expired",run="clinics"} 1.0',
        'fedlearn_round{run="clinics"} 3.0',
        'fedlearn_clients_accuracy_mean{run="clinics"} 0.9',
        'fedlearn_build_info{python="3",run="clinics",torch="2"} 1.0',
        'fedlearn_ready{run="clinics"} 1.0',
    }
    assert "# HELP fedlearn_messages_total Messages received in sessions.\n" in page
    assert "# TYPE fedlearn_messages_total counter\n" in page
    assert "# HELP process_resident_memory_bytes Resident memory size in bytes.\n" in page


def test_a_histogram_is_what_prometheus_reads() -> None:
    """Buckets are cumulative, the last one is unbounded, and there are a count and a sum."""
    seconds = Histogram((0.5, 10.0))
    for value in (0.25, 0.5, 4.0, 100.0):
        seconds.observe(value)
    with serving(Told(Snapshot(run="a", histograms={"upload_seconds": seconds}))) as telemetry:
        _, page = got(telemetry, "/metrics")
    assert "# TYPE fedlearn_upload_seconds histogram\n" in page
    assert {line for line in export(page) if "upload" in line} == {
        'fedlearn_upload_seconds_bucket{le="0.5",run="a"} 2.0',
        'fedlearn_upload_seconds_bucket{le="10.0",run="a"} 3.0',
        'fedlearn_upload_seconds_bucket{le="+Inf",run="a"} 4.0',
        'fedlearn_upload_seconds_count{run="a"} 4.0',
        'fedlearn_upload_seconds_sum{run="a"} 104.75',
    }


def test_a_measure_of_the_runs_own_is_said_to_be_one() -> None:
    """Its help text says that the run defines it."""
    told = Told(Snapshot(run="a", gauges={"dose_error": 0.1}))
    with serving(told) as telemetry:
        _, page = got(telemetry, "/metrics")
    assert f"# HELP fedlearn_dose_error {RUN_METRIC.text}\n" in page


def test_two_coordinators_in_one_process_have_metrics_of_their_own() -> None:
    """Metrics are not shared within a process."""
    first, second = (
        Told(Snapshot(run="clinics", gauges={"round": 1})),
        Told(Snapshot(run="clinics", gauges={"round": 2})),
    )
    with serving(first) as a, serving(second) as b:
        assert 'fedlearn_round{run="clinics"} 1.0' in got(a, "/metrics")[1]
        assert 'fedlearn_round{run="clinics"} 2.0' in got(b, "/metrics")[1]


def test_a_service_has_the_metrics_of_each_run_under_its_name() -> None:
    """One family each; only the service itself is ready or not."""
    runs = [Measurements(run=name, gauges={"round": 2.0}) for name in ("one", "two")]
    told = Told(Snapshot(run="clinics", gauges={"runs_queued": 1.0}, runs=runs))
    with serving(told) as telemetry:
        _, page = got(telemetry, "/metrics")
    assert export(page) == {
        'fedlearn_ready{run="clinics"} 1.0',
        'fedlearn_runs_queued{run="clinics"} 1.0',
        'fedlearn_round{run="one"} 2.0',
        'fedlearn_round{run="two"} 2.0',
    }
    assert page.count("# TYPE fedlearn_round gauge") == 1


def test_nothing_else_is_served() -> None:
    """An unknown path gives 404."""
    with serving(Told()) as telemetry:
        assert got(telemetry, "/")[0] == 404


def test_an_address_in_use_is_an_error_with_the_key_to_change() -> None:
    """As with two coordinators with the same configuration on one machine."""
    with (
        serving(Told()) as first,
        pytest.raises(DeploymentError, match=r"coordinator\.http_address.*choose a free port"),
        serving(Told(), first.address),
    ):
        pass


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(4000),
        b"A" * 20_000,
        b"\x16\x03\x01 a TLS handshake",
        b"GET /" + b"%ff" * 5000 + b" HTTP/1.1",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000,
        b"GET http://[::bad HTTP/1.1\r\nHost: x",
    ],
)
def test_garbage_gets_a_short_answer_that_does_not_quote_it(garbage: bytes) -> None:
    with serving(Told()) as telemetry:
        host, _, port = telemetry.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60.0) as stream:
            stream.sendall(garbage + b"\r\n\r\n")
            answer = b"".join(iter(lambda: stream.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert len(answer) <= 1000
        assert got(telemetry, "/livez")[0] == 200
