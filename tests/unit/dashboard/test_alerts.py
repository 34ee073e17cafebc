"""Each kind of trouble raises an alert, and the same facts without the trouble raise none."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlearn.core.clock import VirtualClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.dashboard import alerts
from fedlearn.dashboard.alerts import (
    find_alerts,
    find_certificate_alerts,
    find_disk_alerts,
    find_failing_clients,
    find_run_alerts,
    find_slow_round,
    find_spent_budget,
)
from fedlearn.identity.registry import EnrolledClient
from fedlearn.rounds.journal import DeployedRun, OpenRound
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.lease import deploy
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database, sqlite_url
from tests.records import RUN

NOW_S, DAY_S = 1_780_000_000.0, 86_400.0


def deployed(**status: object) -> DeployedRun:
    """Return a deployed run in a round, with this status."""
    return DeployedRun(
        name=RUN.name,
        run_id="",
        control="run",
        holder="a",
        epoch=1,
        beat=1,
        status={"phase": "round", "round": 4, **status},
    )


def titles(found: Iterator[alerts.Alert]) -> list[str]:
    return [each.title for each in found]


def test_a_run_that_waits_for_clients_has_too_few() -> None:
    """Control: one client more."""
    few = deployed(phase="waiting", needed=3, eligible=2, connected=9)
    [alert] = find_run_alerts(few, RUN, is_alive=True)
    assert "too few clients" in alert.title
    assert "3 eligible clients; 9 are connected, 2 of them eligible" in alert.detail
    enough = deployed(phase="waiting", needed=3, eligible=3, connected=9)
    assert not list(find_run_alerts(enough, RUN, is_alive=True))


def test_a_run_without_a_coordinator_is_told_unless_it_is_paused() -> None:
    assert titles(find_run_alerts(deployed(), RUN, is_alive=False)) == [
        f"{RUN.name} has no coordinator"
    ]
    paused = replace(deployed(), control="pause")
    assert not list(find_run_alerts(paused, RUN, is_alive=False))
    assert not list(find_run_alerts(deployed(), RUN, is_alive=True))


def test_a_failed_run_is_told_with_its_reason() -> None:
    failed = replace(RUN, status=RunStatus.FAILED, error="too few reports")
    [alert] = find_run_alerts(deployed(), failed, is_alive=False)
    assert (alert.level, alert.detail) == ("failed", "too few reports")


def test_clients_of_another_version_are_named() -> None:
    refused = deployed(other_version=[{"name": "b", "reason": "too old"}])
    [alert] = find_run_alerts(refused, RUN, is_alive=True)
    assert alert.detail == "b; upgrade their fedlearn"


@pytest.mark.parametrize(
    ("open_s", "attempt", "status", "is_slow"),
    [
        (590.0, 0, {}, False),
        (610.0, 0, {}, True),
        (610.0, 0, {"deadline_s": 400.0}, False),
        (810.0, 0, {"deadline_s": 400.0}, True),
        (610.0, 0, {"phase": "paused"}, False),
        (610.0, 0, {"round": 5}, False),  # it is finished
        (1.0, 2, {}, False),
        (1.0, 3, {}, True),
    ],
)
def test_a_round_that_is_open_far_too_long_is_no_progress(
    *, open_s: float, attempt: int, status: dict[str, object], is_slow: bool
) -> None:
    opened = OpenRound(round_num=4, attempt=attempt, cohort=(), opened_unix_s=NOW_S - open_s)
    found = find_slow_round(deployed(**status), opened, mean_s=60.0, now_unix_s=NOW_S)
    assert bool(list(found)) is is_slow


def test_a_round_is_compared_with_the_other_rounds() -> None:
    opened = OpenRound(round_num=4, attempt=0, cohort=(), opened_unix_s=NOW_S - 4000.0)
    assert not list(find_slow_round(deployed(), opened, mean_s=900.0, now_unix_s=NOW_S))
    [alert] = find_slow_round(deployed(), opened, mean_s=700.0, now_unix_s=NOW_S)
    assert alert.title == f"{RUN.name} makes no progress"
    assert not list(find_slow_round(deployed(), None, mean_s=0.0, now_unix_s=NOW_S))


def test_clients_that_keep_failing_are_named_once() -> None:
    """Control: two failures in a row are no alert."""
    often = {"1": {"in_a_row": 3, "reason": "out of memory"}, "2": {"in_a_row": 2, "reason": ""}}
    [alert] = find_failing_clients(deployed(failing=often), {1: "b"})
    assert alert.detail == "b; b 3 times in a row: out of memory"
    assert not list(find_failing_clients(deployed(failing={"2": often["2"]}), {}))


@pytest.mark.parametrize(("spent", "is_near"), [(7.1, False), (7.2, True), (None, False)])
def test_a_budget_is_nearly_spent_from_nine_tenths(*, spent: float | None, is_near: bool) -> None:
    record = replace(RUN, config={"privacy": {"epsilon": 8.0}})
    assert bool(list(find_spent_budget(record, spent=spent))) is is_near
    assert not list(find_spent_budget(RUN, spent=spent))


def test_certificates_that_ended_are_apart_from_those_that_soon_will() -> None:
    def client(name: str, days: float) -> EnrolledClient:
        return EnrolledClient(
            client_id=ClientId(0),
            name=name,
            tags=(),
            identity_key=b"",
            lineage=b"",
            fingerprint="",
            status="active",
            enrolled_utc="",
            certificate_expires_utc=utc(NOW_S + days * DAY_S),
        )

    found = list(find_certificate_alerts([client("a", -1), client("b", 3)], now_unix_s=NOW_S))
    assert [each.level for each in found] == ["failed", "late"]
    assert [each.detail.split(";")[0] for each in found] == ["a", "b"]
    assert not list(find_certificate_alerts([], now_unix_s=NOW_S))


@pytest.mark.parametrize(("free", "is_full"), [(1.9e9, True), (2.1e9, False)])
def test_a_disk_is_full_before_nothing_is_left(
    *, free: float, is_full: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = SimpleNamespace(total=1e12, free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert bool(list(find_disk_alerts(tmp_path))) is is_full


def test_a_store_without_trouble_has_no_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the same store after a run of its queue failed and another lost its coordinator."""
    monkeypatch.setattr("fedlearn.dashboard.alerts.find_disk_alerts", lambda _: iter(()))
    clock = VirtualClock()
    with Database.open(sqlite_url(tmp_path / "a.db"), runs_dir=tmp_path) as database:
        queue = RunQueue(database, clock)
        for name in ("a", "b"):
            queue.submit(Submission(name=name, config={}, start_from={}))
            queue.start(name)
        database.create(replace(RUN, name="a"), from_queue=True)
        deploy(database, "a")
        assert find_alerts(database, clock, is_alive={"a": True}) == []
        queue.finish("b", QueueState.FAILED, reason="out of memory")
        found = find_alerts(database, clock, is_alive={"a": False})
    assert [each.title for each in found] == ["b failed", "a has no coordinator"]
    assert found[0].detail.startswith("out of memory; `fedlearn retry b`")
