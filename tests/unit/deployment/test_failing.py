"""Clients that keep failing are reported, and set aside after several failures in a row."""

from collections.abc import Collection, Mapping

import pytest
from structlog.testing import capture_logs

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.deployment.failing import FailingClients

BAD, GOOD = ClientId(3), ClientId(4)
NAN = "the delta is not finite"


def names(client_ids: Collection[ClientId]) -> Mapping[ClientId, str]:
    return {each: f"clinic-{each}" for each in client_ids}


def attempt(**statuses: Status) -> Participations:
    """Return the participations of an attempt; the keyword ``c3`` is client 3."""
    return Participations.of(
        Participation(
            ClientId(int(name[1:])), status, 1.0, reason=NAN if status == "failed" else ""
        )
        for name, status in statuses.items()
    )


def watched(
    aside: list[ClientId],
    *,
    after: int = 3,
    found: Mapping[ClientId, tuple[int, str]] | None = None,
) -> FailingClients:
    return FailingClients(
        names=names, set_aside=aside.append, set_aside_after=after, streaks=dict(found or {})
    )


def test_a_client_that_keeps_failing_is_named_and_set_aside() -> None:
    """It is set aside again with each further failure, since it may have reconnected."""
    aside = list[ClientId]()
    failing = watched(aside)
    for times in (1, 2, 3, 4):
        with capture_logs() as logs:
            failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
        (line,) = logs
        assert (line["event"], line["name"], line["reason"]) == ("client_failed", "clinic-3", NAN)
        assert line["in_a_row"] == times
        assert len(aside) == max(0, times - 2)
        assert failing.status() == ({"3": {"in_a_row": times, "reason": NAN}} if times > 1 else {})
    assert set(aside) == {BAD}


def test_a_report_ends_the_row_and_being_late_does_not() -> None:
    aside = list[ClientId]()
    failing = watched(aside)
    for status in (Status.FAILED, Status.FAILED, Status.REPORTED, Status.FAILED, Status.LATE):
        failing.record(attempt(c3=status, c4=Status.REPORTED))
    failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
    assert not aside
    failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
    assert aside == [BAD]


def test_who_failed_and_reported_when_a_buffer_asked_again_has_reported() -> None:
    """It counts as one attempt, however often it failed. Control: a client that only failed."""
    rows = [
        Participation(BAD, Status.FAILED, 1.0, reason=NAN),
        Participation(GOOD, Status.REPORTED, 1.0),
        Participation(BAD, Status.FAILED, 1.0, reason=NAN),
    ]
    failing = watched([], after=0, found={BAD: (2, NAN)})
    failing.record(Participations.of(rows))
    assert failing.streaks == {BAD: (3, NAN)}
    failing.record(Participations.of([*rows, Participation(BAD, Status.REPORTED, 1.0)]))
    assert failing.streaks == {}


def test_what_all_fail_of_is_nobodys_fault() -> None:
    """For example an aborted secure aggregation, or a request that no client can fulfill."""
    aside = list[ClientId]()
    failing = watched(aside, after=1)
    failing.record(attempt(c3=Status.FAILED, c4=Status.FAILED))
    assert not aside
    failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
    assert aside == [BAD], "the control"


@pytest.mark.parametrize(("after", "num_aside"), [(0, 0), (1, 9)])
def test_nobody_is_set_aside_after_zero_failures(after: int, num_aside: int) -> None:
    aside = list[ClientId]()
    failing = watched(aside, after=after)
    for _ in range(9):
        failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
    assert len(aside) == num_aside


def test_of_thousands_that_fail_a_few_are_logged() -> None:
    rows = [Participation(ClientId(k), Status.FAILED, 1.0, reason=NAN) for k in range(1000)]
    rows.append(Participation(ClientId(1000), Status.REPORTED, 1.0))
    failing = watched([])
    with capture_logs() as logs:
        failing.record(Participations.of(rows))
        failing.record(Participations.of(rows))
    assert len(logs) == 42
    assert logs[-1] == {"event": "clients_failed", "log_level": "warning", "num_more": 980}
    assert len(failing.status()) == 20


def test_a_row_that_an_earlier_process_has_seen_goes_on() -> None:
    """A coordinator that takes over continues the count."""
    aside = list[ClientId]()
    failing = watched(aside, found={BAD: (2, "no data"), GOOD: (7, "no power")})
    assert failing.status()["3"] == {"in_a_row": 2, "reason": "no data"}
    failing.record(attempt(c3=Status.FAILED, c4=Status.REPORTED))
    assert aside == [BAD]
    assert failing.status() == {"3": {"in_a_row": 3, "reason": NAN}}
