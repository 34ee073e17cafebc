"""A round that was opened is opened once, whoever restarts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import CohortTooSmall, StoreError
from fedlearn.rounds.journal import JournaledSampler, MemoryJournal, OpenRound, RoundJournal
from fedlearn.rounds.records import RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.runs import Database, sqlite_url, unguarded
from tests.records import RUN

OPENED = OpenRound(
    round_num=3, attempt=1, cohort=(ClientId(7), ClientId(2)), opened_unix_s=1_800_000_000.25
)
ALL = [ClientId(number) for number in range(10)]


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """A store with one run, once of each kind."""
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        yield database


@pytest.fixture(
    params=["memory", "sqlite", pytest.param("pg", marks=pytest.mark.xdist_group("postgresql"))]
)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RoundJournal]:
    """An empty journal, once of each kind."""
    if request.param == "memory":
        yield MemoryJournal()
        return
    url = sqlite_url(tmp_path / "runs.db")
    if request.param == "pg":
        url = request.getfixturevalue("postgresql_url")
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        yield StoredJournal(database, RUN.name, guard=unguarded)


def journaled(journal: RoundJournal) -> JournaledSampler:
    return JournaledSampler(sampler=UniformSampler(), journal=journal, clock=VirtualClock(5.0))


def test_an_open_round_comes_back_as_it_was_opened(journal: RoundJournal) -> None:
    """By round and attempt, and as the last."""
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
    """The answer to the first time may have been lost; two cohorts would count two."""
    journal.open(OPENED)
    journal.open(OPENED)
    with pytest.raises(StoreError, match="round 3, attempt 1, is open with another cohort"):
        journal.open(replace(OPENED, cohort=(ClientId(7),)))
    assert journal.find(3, 1) == OPENED


def test_committed_rounds_are_forgotten(journal: RoundJournal) -> None:
    """Those before the one named, all their attempts."""
    for round_num, attempt in ((1, 0), (1, 1), (2, 0)):
        journal.open(replace(OPENED, round_num=round_num, attempt=attempt))
    journal.forget(before_round=2)
    assert journal.find(1, 0) is None
    assert journal.find(1, 1) is None
    assert journal.find(2, 0) is not None


def test_journals_of_two_runs_are_apart(database: Database) -> None:
    """In one database."""
    database.create(replace(RUN, name="quick-yak-42"))
    one, two = (
        StoredJournal(database, name, guard=unguarded) for name in (RUN.name, "quick-yak-42")
    )
    one.open(OPENED)
    two.open(replace(OPENED, cohort=()))
    two.forget(before_round=99)
    assert (one.last(), two.last()) == (OPENED, None)


def test_a_run_that_failed_runs_again_with_the_round_that_is_opened(database: Database) -> None:
    """Not before: a stop until then leaves no attempt that the next start would go on among."""
    run = database.run(RUN.name)
    run.finish(RunStatus.FAILED, error="3 reports, minimum 5")
    journal = StoredJournal(database, RUN.name, guard=unguarded)
    assert journal.last() is None
    assert run.record.status is RunStatus.FAILED
    journal.open(OPENED)
    assert (run.record.status, run.record.error) == (RunStatus.RUNNING, "")


def test_a_journal_of_no_run_is_an_error(database: Database) -> None:
    """Which suggests the nearest name."""
    with pytest.raises(StoreError, match="did you mean 'calm-otter-17'"):
        StoredJournal(database, "calm-otter", guard=unguarded)


def test_a_cohort_is_chosen_once(journal: RoundJournal) -> None:
    """A restart asks the same clients, though others are connected by then."""
    first = journaled(journal).sample(ALL, num_asked=4, round_num=0, attempt=0, seed=Seed(1))
    assert first == UniformSampler().sample(ALL, num_asked=4, round_num=0, attempt=0, seed=Seed(1))
    again = journaled(journal).sample([], num_asked=4, round_num=0, attempt=0, seed=Seed(1))
    assert again == first
    assert journal.find(0, 0) == OpenRound(round_num=0, attempt=0, cohort=first, opened_unix_s=5.0)


def test_another_attempt_is_another_cohort(journal: RoundJournal) -> None:
    """And so is another round."""
    sampler = journaled(journal)
    cohorts = {
        sampler.sample(ALL, num_asked=4, round_num=round_num, attempt=attempt, seed=Seed(1))
        for round_num, attempt in ((0, 0), (0, 1), (1, 0))
    }
    assert len(cohorts) == 3


def test_a_cohort_that_cannot_be_chosen_is_not_written_down() -> None:
    """The round is tried again when more clients are there."""
    journal = MemoryJournal()
    with pytest.raises(CohortTooSmall):
        journaled(journal).sample(ALL, num_asked=11, round_num=0, attempt=0, seed=Seed(1))
    assert journal.last() is None
