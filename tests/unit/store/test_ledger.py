"""The privacy ledger in a database: charges add up per population over runs."""

from pathlib import Path

import pytest

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts
from fedlearn.core.clock import VirtualClock
from fedlearn.core.randomness import Seed
from fedlearn.errors import BudgetExhausted
from fedlearn.privacy.events import Event, ExampleCohorts
from fedlearn.privacy.ledger import Budget, Charge, Charging
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import Database

POISSON = Event(PoissonCohorts(10_000_000_000, 100, 200), 0.75)
FIXED = Event(FixedCohorts(50, 5), 1.5)
TURNS = Event(CyclicCohorts(50, 5, 7), 1.5)
EXAMPLE = Event(ExampleCohorts(50, 5), 1.5)


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


def test_a_charge_on_an_equal_sum_of_other_charges_is_not_written(database: Database) -> None:
    """A run took some back, and another charged as many that cost more."""
    mine, theirs, third = (
        StoredLedger(database, population="study/wards", run=run) for run in ("a", "b", "c")
    )
    assert theirs.charge(charge(POISSON, count=5), known={})
    known = mine.load_spent()
    theirs.take_back(2)
    assert third.charge(charge(FIXED, count=2), known=third.load_spent())
    assert sum(mine.load_spent().values()) == sum(known.values())
    assert not mine.charge(charge(POISSON), known=known)
    theirs.take_back(3)
    assert mine.charge(charge(POISSON), known={FIXED: 2})


def test_runs_of_a_study_never_overspend_together(tmp_path: Path) -> None:
    """Whatever the order of their rounds, and whichever is killed right after a charge."""
    prices = {POISSON: 1.0, FIXED: 3.0}
    draws, clock = Seed(4).numpy(), VirtualClock()
    with Database.open(f"sqlite:///{tmp_path / 'x.sqlite'}", runs_dir=tmp_path) as database:

        def begin(run: str) -> Charging:
            return Charging(
                StoredLedger(database, population="study/wards", run=run),
                POISSON if run == "a" else FIXED,
                clip_norm=1.0,
                budget=Budget(epsilon=80.0, target_delta=1e-5, study="tumours"),
                epsilon_of=lambda spent: sum(prices[e] * n for e, n in spent.items()),
                clock=clock,
            )

        ledger = StoredLedger(database, population="study/wards", run="reader")
        runs, released, num_refused = {run: begin(run) for run in "ab"}, 0.0, 0
        for _ in range(80):
            run = str(draws.choice(["a", "b"]))
            match draws.choice(["round", "round", "round", "killed", "closed"]):
                case "round":
                    try:
                        runs[run].charge(round_num=0, attempt=0)
                    except BudgetExhausted:
                        num_refused += 1
                        continue
                    released += prices[POISSON if run == "a" else FIXED]
                    clock.sleep(float(draws.choice([0.01, 10.0])))
                case "killed":
                    runs[run] = begin(run)
                case _:
                    runs[run].close()
                    runs[run] = begin(run)
            charged = sum(prices[e] * n for e, n in ledger.load_spent().items())
            assert released <= charged <= 80.0
        assert num_refused, "the budget was enough for all"
        with pytest.raises(BudgetExhausted, match="budget of the study tumours is spent"):
            begin("b").charge(round_num=0, attempt=0)


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
