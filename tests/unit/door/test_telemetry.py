"""What supervisors and Prometheus are told, over real HTTP."""

from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedlearn.door.telemetry import Snapshot, Telemetry
from fedlearn.errors import DeploymentError


@dataclass
class Told:
    """A coordinator whose state the test sets."""

    now: Snapshot = field(default_factory=Snapshot)

    def __call__(self) -> Snapshot:
        return self.now


def got(telemetry: Telemetry, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://{telemetry.address}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_coordinator_that_waits_for_its_turn_lives_but_is_not_ready() -> None:
    """And is once it serves: the verdict is of the moment."""
    told = Told(Snapshot(not_ready="another coordinator holds the lease"))
    with Telemetry("127.0.0.1:0", told) as telemetry:
        assert got(telemetry, "/livez") == (200, "ok\n")
        assert got(telemetry, "/readyz") == (503, "another coordinator holds the lease\n")
        told.now = Snapshot()
        assert got(telemetry, "/readyz") == (200, "ok\n")


def test_metrics_are_what_prometheus_reads() -> None:
    """Counters end in _total, a label stands in braces, and nothing else is exported."""
    told = Told(
        Snapshot(
            counters={"messages": 7, "refused{reason=revoked}": 2, "refused{reason=expired}": 1},
            gauges={"round": 3, "accuracy": 0.9},
        )
    )
    with Telemetry("127.0.0.1:0", told) as telemetry:
        status, page = got(telemetry, "/metrics")
    lines = {line for line in page.splitlines() if not line.startswith("#")}
    assert status == 200
    assert lines == {
        "fedlearn_messages_total 7.0",
        'fedlearn_refused_total{reason="revoked"} 2.0',
        'fedlearn_refused_total{reason="expired"} 1.0',
        "fedlearn_round 3.0",
        "fedlearn_accuracy 0.9",
        "fedlearn_ready 1.0",
    }


def test_two_coordinators_in_one_process_have_metrics_of_their_own() -> None:
    """There is no registry of the process."""
    first, second = Told(Snapshot(gauges={"round": 1})), Told(Snapshot(gauges={"round": 2}))
    with Telemetry("127.0.0.1:0", first) as a, Telemetry("127.0.0.1:0", second) as b:
        assert "fedlearn_round 1.0" in got(a, "/metrics")[1]
        assert "fedlearn_round 2.0" in got(b, "/metrics")[1]


def test_nothing_else_is_served() -> None:
    """An unknown path is not found."""
    with Telemetry("127.0.0.1:0", Told()) as telemetry:
        assert got(telemetry, "/")[0] == 404


def test_an_address_in_use_is_an_error_with_the_key_to_change() -> None:
    """Two coordinators with one configuration on one machine."""
    with (
        Telemetry("127.0.0.1:0", Told()) as first,
        pytest.raises(DeploymentError, match=r"coordinator\.http_address.*name a free port"),
        Telemetry(first.address, Told()),
    ):
        pass
