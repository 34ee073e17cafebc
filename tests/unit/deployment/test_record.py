"""Where a coordinator continues a round that its predecessor left open."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from fedlearn.algorithms.pending_tasks import PendingTask
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment.record import SumAfterTrainers, resume_round
from fedlearn.rounds.journal import OpenRound
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.run import ResumedRound
from fedlearn.store.masked_sum import MaskedSumFile
from fedlearn.store.patience import Patience

RETRIED = StragglerPolicy(
    num_wanted=3,
    over_selection=1.0,
    deadline_s=60.0,
    min_reports=2,
    below_minimum=BelowMinimum.RETRY,
    max_retries=3,
)
NOW_S = 1_000.0


@dataclass(frozen=True)
class Journal:
    """A journal with the attempts of round 7, opened ten seconds apart."""

    cohorts: Sequence[Sequence[int]]

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        if round_num != 7 or not self.cohorts[attempt:]:
            return None
        cohort = tuple(map(ClientId, self.cohorts[attempt]))
        opened_s = NOW_S - 100.0 + 10.0 * attempt
        return OpenRound(round_num=7, attempt=attempt, cohort=cohort, opened_unix_s=opened_s)

    def open(self, opened: OpenRound) -> None:
        raise NotImplementedError

    def last(self) -> OpenRound | None:
        return self.find(7, len(self.cohorts) - 1) if self.cohorts else None

    def forget(self, before_round: int) -> None:
        raise NotImplementedError


def resume_run(
    *cohorts: Sequence[int], status: RunStatus = RunStatus.RUNNING, late: bool = True
) -> ResumedRound:
    found = resume_round(
        Journal(cohorts),
        status,
        RETRIED,
        restarts=False,
        takes_late_updates=late,
        now_unix_s=NOW_S,
    )
    assert found is not None
    return found


def in_flight(found: ResumedRound) -> list[tuple[int, int, int, float]]:
    assert {each.based_on for each in found.pending} <= {7}
    return [(each.client_id, each.attempt, each.place, each.sent_s) for each in found.pending]


def test_a_semi_synchronous_round_continues_with_its_last_attempt() -> None:
    """Clients of its earlier attempts are still in flight."""
    found = resume_run((4, 2, 9), (5, 6))
    assert (found.attempt, found.cohort) == (1, (5, 6))
    assert in_flight(found) == [(4, 0, 0, -100.0), (2, 0, 1, -100.0), (9, 0, 2, -100.0)]


def test_a_client_is_in_flight_once_for_its_latest_task() -> None:
    """A client may have failed in an attempt, and a later one asked it again."""
    found = resume_run((4, 2, 9), (5, 2), (9,))
    assert (found.attempt, found.cohort) == (2, (9,))
    assert in_flight(found) == [(4, 0, 0, -100.0), (5, 1, 0, -90.0), (2, 1, 1, -90.0)]


def test_a_run_that_failed_gets_new_attempts_and_keeps_what_was_accepted() -> None:
    """It gets as many attempts as at first."""
    found = resume_run((4, 2, 9), (5,), status=RunStatus.FAILED)
    assert (found.attempt, found.cohort) == (4, ())
    assert [client_id for client_id, *_ in in_flight(found)] == [4, 2, 9, 5]


@pytest.mark.parametrize(("status", "attempt"), [(RunStatus.RUNNING, 0), (RunStatus.FAILED, 4)])
def test_a_synchronous_round_begins_with_the_first_attempt_of_its_group(
    status: RunStatus, attempt: int
) -> None:
    found = resume_run((4, 2, 9), (5, 6), status=status, late=False)
    assert (found.attempt, found.pending) == (attempt, ())


def test_an_earlier_task_of_a_client_that_was_asked_again_is_over() -> None:
    """Other tasks that were in flight when the round began are kept."""
    before = tuple(
        PendingTask(client_id=ClientId(number), based_on=6, attempt=0, place=number, sent_s=-200.0)
        for number in (1, 4, 5)
    )
    found = resume_run((4, 2), (5,)).rejoin(before)
    assert [(each.client_id, each.based_on) for each in found] == [(1, 6), (4, 7), (2, 7)]


def test_a_client_that_is_too_stale_is_still_recorded_when_its_first_attempt_is_resumed() -> None:
    """The round may ask it again; only a later attempt shows that its earlier task is over."""
    stale = PendingTask(client_id=ClientId(4), based_on=1, attempt=0, place=0, sent_s=-900.0)
    assert resume_run((4, 2)).rejoin((stale,)) == (stale,)
    assert [each.based_on for each in resume_run((2,), (4,)).rejoin((stale,))] == [7]


def test_what_clients_ran_is_recorded_before_their_sum(tmp_path: Path) -> None:
    """A process that dies in between reads their replies again; later ones have only the sum."""
    patiently = Patience(clock=VirtualClock(), give_up_s=1.0, log=structlog.get_logger())
    inner = MaskedSumFile(path=tmp_path / "sum", patiently=patiently)
    found = list[bytes]()
    store = SumAfterTrainers(store=inner, save_trainers=lambda: found.append(inner.read()))
    store.save(b"first")
    store.save(b"second")
    assert (found, store.read()) == ([b"", b"first"], b"second")
    store.clear()
    assert inner.read() == b""
