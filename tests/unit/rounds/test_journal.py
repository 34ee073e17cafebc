"""A round is opened only once, even if another coordinator takes over."""

from dataclasses import replace

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import StoreError
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.records import RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.runs import Database, allow_writes
from tests.records import RUN

OPENED = OpenRound(
    round_num=3, attempt=1, cohort=(ClientId(7), ClientId(2)), opened_unix_s=1_800_000_000.25
)


@pytest.fixture
def database(database: Database) -> Database:
    """A store with one run, for each kind of database."""
    database.create(RUN)
    return database


@pytest.fixture
def journal(database: Database) -> RoundJournal:
    """The run's journal, which is empty."""
    return StoredJournal(database, RUN.name, guard=allow_writes)


def test_an_open_round_comes_back_as_it_was_opened(journal: RoundJournal) -> None:
    """By round and attempt, and as the last one."""
    assert (journal.find(3, 1), journal.last()) == (None, None)
    journal.open(OPENED)
    assert (journal.find(3, 1), journal.last()) == (OPENED, OPENED)
    assert journal.find(3, 0) is None


def test_the_last_is_the_latest_attempt_of_the_latest_round(journal: RoundJournal) -> None:
    """In whatever order they were opened."""
    for round_num, attempt in ((4, 0), (10, 1), (10, 0), (9, 5)):
        journal.open(replace(OPENED, round_num=round_num, attempt=attempt))
    last = journal.last()
    assert last is not None
    assert (last.round_num, last.attempt) == (10, 1)


def test_a_round_may_be_opened_again_with_the_same_cohort_only(journal: RoundJournal) -> None:
    """The response to the first call may have been lost, but a second cohort would count twice."""
    journal.open(OPENED)
    journal.open(OPENED)
    with pytest.raises(StoreError, match="round 3, attempt 1, is open with another cohort"):
        journal.open(replace(OPENED, cohort=(ClientId(7),)))
    assert journal.find(3, 1) == OPENED


def test_committed_rounds_are_forgotten(journal: RoundJournal) -> None:
    """All attempts of the rounds before the given one."""
    for round_num, attempt in ((1, 0), (1, 1), (2, 0)):
        journal.open(replace(OPENED, round_num=round_num, attempt=attempt))
    journal.forget(before_round=2)
    assert journal.find(1, 0) is None
    assert journal.find(1, 1) is None
    assert journal.find(2, 0) is not None


def test_journals_of_two_runs_are_apart(database: Database) -> None:
    """Both are in one database."""
    database.create(replace(RUN, name="quick-yak-42"))
    one, two = (
        StoredJournal(database, name, guard=allow_writes) for name in (RUN.name, "quick-yak-42")
    )
    one.open(OPENED)
    two.open(replace(OPENED, cohort=()))
    two.forget(before_round=99)
    assert (one.last(), two.last()) == (OPENED, None)


def test_a_run_that_failed_runs_again_with_the_round_that_is_opened(database: Database) -> None:
    """Not before: if it stops before that, the next start finds no attempt to continue."""
    run = database.run(RUN.name)
    run.finish(RunStatus.FAILED, error="3 reports, minimum 5")
    journal = StoredJournal(database, RUN.name, guard=allow_writes)
    assert journal.last() is None
    assert run.record.status is RunStatus.FAILED
    journal.open(OPENED)
    assert (run.record.status, run.record.error) == (RunStatus.RUNNING, "")


def test_a_journal_of_no_run_is_an_error(database: Database) -> None:
    """The error suggests the nearest name."""
    with pytest.raises(StoreError, match="did you mean 'calm-otter-17'"):
        StoredJournal(database, "calm-otter", guard=allow_writes)
