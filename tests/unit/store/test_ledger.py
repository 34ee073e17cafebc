"""The privacy ledger in a database: charges add up per population over runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts
from fedlearn.privacy.events import Event, ExampleCohorts
from fedlearn.privacy.ledger import Charge
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import Database

POISSON = Event(PoissonCohorts(10_000_000_000, 100, 200), 0.75)
FIXED = Event(FixedCohorts(50, 5), 1.5)
TURNS = Event(CyclicCohorts(50, 5, 7), 1.5)
EXAMPLE = Event(ExampleCohorts(50, 5), 1.5)


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """An empty store, in each kind of database in turn."""
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        yield database


def charge(event: Event, *, count: int = 1) -> Charge:
    return Charge(event=event, count=count, clip_norm=0.5, round_num=3, attempt=1)


def test_charges_add_up_over_runs_by_population(database: Database) -> None:
    """Equal events are added together; each run can also read its own charges."""
    first = StoredLedger(database, population="wards", run="a")
    second = StoredLedger(database, population="wards", run="b")
    other = StoredLedger(database, population="banks", run="c")
    assert first.load_spent() == {}
    assert first.charge(charge(POISSON, count=3), known={})
    assert second.charge(charge(POISSON), known={POISSON: 3})
    assert second.charge(charge(FIXED, count=2), known={POISSON: 4})
    assert other.charge(charge(FIXED), known={})
    assert other.charge(charge(EXAMPLE, count=3), known={FIXED: 1})
    assert first.load_spent() == second.load_spent() == {POISSON: 4, FIXED: 2}
    assert first.load_spent_by_run() == {POISSON: 3}
    assert second.load_spent_by_run() == {POISSON: 1, FIXED: 2}
    assert other.load_spent() == {FIXED: 1, EXAMPLE: 3}


def test_turns_of_two_runs_stay_apart(database: Database) -> None:
    """Each run rounds its own turns up; charges of one run from several processes are added."""
    first = StoredLedger(database, population="wards", run="a")
    second = StoredLedger(database, population="wards", run="b")
    of_first, of_second = TURNS.for_run("a"), TURNS.for_run("b")
    assert first.charge(charge(of_first, count=3), known={})
    assert second.charge(charge(of_second, count=2), known={of_first: 3})
    again = StoredLedger(database, population="wards", run="a")
    assert again.charge(charge(of_first, count=4), known=again.load_spent())
    assert first.charge(charge(POISSON), known=first.load_spent())
    assert second.charge(charge(POISSON), known=second.load_spent())
    assert first.load_spent() == second.load_spent() == {of_first: 7, of_second: 2, POISSON: 2}
    assert first.load_spent_by_run() == {of_first: 7, POISSON: 1}


def test_a_charge_on_an_old_state_is_not_written(database: Database) -> None:
    """Another run has charged since, so the charge may exceed the budget."""
    mine = StoredLedger(database, population="wards", run="a")
    theirs = StoredLedger(database, population="wards", run="b")
    assert theirs.charge(charge(POISSON), known={})
    assert not mine.charge(charge(POISSON), known={})
    assert mine.load_spent() == {POISSON: 1}
    assert mine.charge(charge(POISSON), known=mine.load_spent())


def test_what_never_began_is_taken_back_from_ones_own_charge(database: Database) -> None:
    """Other runs' charges are not changed."""
    mine = StoredLedger(database, population="wards", run="a")
    theirs = StoredLedger(database, population="wards", run="b")
    assert mine.charge(charge(POISSON, count=8), known={})
    assert theirs.charge(charge(POISSON, count=5), known={POISSON: 8})
    mine.take_back(6)
    assert mine.load_spent_by_run() == {POISSON: 2}
    assert theirs.load_spent_by_run() == {POISSON: 5}


def test_a_charge_outlives_the_connection(database_url: str, tmp_path: Path) -> None:
    """It is there when the store is opened again."""
    with Database.open(database_url, runs_dir=tmp_path) as database:
        assert StoredLedger(database, population="wards", run="a").charge(charge(FIXED), known={})
    with Database.open(database_url, runs_dir=tmp_path) as database:
        assert StoredLedger(database, population="wards", run="z").load_spent() == {FIXED: 1}
