"""Opening a round: which clients it waits for, how the wait ends, and what it records."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import RealClock, VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.opening import DurableOpening, keep_waiting
from fedlearn.errors import Aborted, CohortTooSmall, Fenced
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.opening import SampledOpening
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease, deploy
from fedlearn.store.runs import Database, allow_writes, sqlite_url
from tests.records import RUN, journals_in

ALL = [ClientId(number) for number in range(10)]
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.0,
    deadline_s=10.0,
    min_reports=2,
    below_minimum=BelowMinimum.RETRY,
    max_retries=3,
)


def ignore() -> None:
    """A check that never interrupts the run."""


def never() -> bool:
    return False


@dataclass
class Hour(VirtualClock):
    """A virtual clock that fails the test after one hour."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        assert self.elapsed_s < 3600.0


@dataclass
class Arriving:
    """One more client is connected at each look, up to ``most``."""

    most: int
    looks: int = 0
    phases: list[Phase] = field(default_factory=list)
    live_status: LiveStatus = field(default_factory=LiveStatus)

    def available(self) -> Sequence[ClientId]:
        self.looks += 1
        self.phases.append(self.live_status.phase)
        return ALL[: min(self.looks, self.most)]


NewJournal = Callable[[], RoundJournal]


@pytest.fixture
def new_journal(tmp_path: Path) -> Iterator[NewJournal]:
    """A factory of empty journals."""
    with journals_in(tmp_path) as empty:
        yield empty


@pytest.fixture
def any_journal(database: Database) -> RoundJournal:
    """An empty journal, in each kind of database in turn."""
    database.create(RUN)
    return StoredJournal(database, RUN.name, guard=allow_writes)


def durable(
    clients: Arriving,
    journal: RoundJournal,
    *,
    cohort_size: int = 4,
    patience_s: float = 600.0,
    is_paused: Callable[[], bool] = never,
    check: Callable[[], None] = ignore,
    num_set_aside: int = 0,
    too_few: Callable[[int, int], None] = keep_waiting,
    clock: RealClock | None = None,
) -> DurableOpening:
    return DurableOpening(
        sampler=UniformSampler(),
        available=lambda _: clients.available(),
        policy=replace(POLICY, num_wanted=cohort_size),
        seed=Seed(1),
        num_needed=cohort_size,
        num_set_aside=lambda: num_set_aside,
        patience_s=patience_s,
        too_few=too_few,
        is_paused=is_paused,
        check=check,
        journal=journal,
        live_status=clients.live_status,
        clock=clock or Hour(5.0),
    )


def cohort_of(
    opening: SampledOpening | DurableOpening, round_num: int, *, attempt: int
) -> Sequence[ClientId]:
    """Draw a cohort of four; no client is busy."""
    return opening.draw_cohort(4, round_num=round_num, attempt=attempt, busy=())


def there(num_clients: int) -> Arriving:
    return Arriving(most=num_clients, looks=num_clients)


# ---- Simulations -------------------------------------------------------------------------


def test_a_simulation_samples_and_no_more() -> None:
    """The cohort is a function of seed, round and attempt."""
    opening = SampledOpening(sampler=UniformSampler(), available=lambda: ALL, seed=Seed(1))
    expected = UniformSampler().sample(ALL, cohort_size=4, round_num=3, attempt=1, seed=Seed(1))
    assert cohort_of(opening, 3, attempt=1) == expected
    assert cohort_of(opening, 3, attempt=0) != expected


def test_a_simulation_waits_for_nobody() -> None:
    """No more clients would come, so it raises an error."""
    opening = SampledOpening(sampler=UniformSampler(), available=lambda: ALL[:3], seed=Seed(1))
    with pytest.raises(CohortTooSmall):
        cohort_of(opening, 0, attempt=0)


# ---- Waiting ------------------------------------------------------------------------------


def test_a_round_waits_until_enough_clients_are_there(new_journal: NewJournal) -> None:
    """The status shows that it waits, and for how many clients."""
    clients = Arriving(most=4)
    assert sorted(cohort_of(durable(clients, new_journal()), 0, attempt=0)) == ALL[:4]
    assert Phase.WAITING in clients.phases
    assert clients.live_status.num_needed == 4


def test_a_client_that_never_comes_does_not_hold_up_the_others(new_journal: NewJournal) -> None:
    """When its patience ends, the round asks the clients that are connected."""
    assert (
        sorted(cohort_of(durable(there(3), new_journal(), patience_s=0.0), 0, attempt=0)) == ALL[:3]
    )
    clients = there(3)
    clock = Hour()
    opening = durable(clients, new_journal(), patience_s=60.0, clock=clock)
    assert sorted(cohort_of(opening, 0, attempt=0)) == ALL[:3]
    assert clock.now_s() >= 60.0


@pytest.mark.parametrize(("num_set_aside", "waited_s"), [(0, 600.0), (1, 0.0), (4, 0.0)])
def test_nobody_waits_for_clients_that_are_set_aside(
    new_journal: NewJournal, num_set_aside: int, waited_s: float
) -> None:
    """Three of four are connected. Control: without one set aside, it waits for the fourth."""
    clock = Hour(5.0)
    made = durable(there(3), new_journal(), num_set_aside=num_set_aside, clock=clock)
    assert len(cohort_of(made, 0, attempt=0)) == 3
    assert clock.elapsed_s == pytest.approx(5.0 + waited_s, abs=1.0)


def test_fewer_clients_than_make_a_round_are_waited_for_beyond_patience(
    new_journal: NewJournal,
) -> None:
    """A round that cannot succeed would only be retried."""
    clients = Arriving(most=2)
    assert (
        sorted(cohort_of(durable(clients, new_journal(), patience_s=0.0), 0, attempt=0)) == ALL[:2]
    )
    assert Phase.WAITING in clients.phases
    assert clients.live_status.num_needed == 2


def test_who_waits_hears_each_time_that_patience_ends_in_vain(new_journal: NewJournal) -> None:
    """The callback may end the run. Control: with enough clients for a round it is not called."""
    heard: list[tuple[int, int, float]] = []
    clock = Hour()

    def too_few(num_present: int, num_waits: int) -> None:
        heard.append((num_present, num_waits, round(clock.now_s())))
        if num_waits == 3:
            raise Aborted("nobody comes")

    enough = durable(there(2), new_journal(), patience_s=60.0, too_few=too_few, clock=clock)
    cohort_of(enough, 0, attempt=0)
    assert not heard
    clock.elapsed_s = 0.0
    alone = durable(there(1), new_journal(), patience_s=60.0, too_few=too_few, clock=clock)
    with pytest.raises(Aborted, match="nobody comes"):
        cohort_of(alone, 0, attempt=0)
    assert heard == [(1, 1, 60), (1, 2, 120), (1, 3, 180)]


@dataclass
class Pausing(Hour):
    """The operator pauses the run for some time."""

    live_status: LiveStatus = field(default_factory=LiveStatus)
    until_s: float = 3.0
    began_s: float = 0.0
    phases: list[Phase] = field(default_factory=list)

    def is_paused(self) -> bool:
        return self.began_s <= self.now_s() < self.until_s

    def sleep(self, seconds: float) -> None:
        self.phases.append(self.live_status.phase)
        super().sleep(seconds)


def test_a_paused_run_asks_nobody(new_journal: NewJournal) -> None:
    """Even with enough clients; it continues when the operator resumes it."""
    clients, journal = there(4), new_journal()
    clock = Pausing(live_status=clients.live_status)
    opening = durable(clients, journal, is_paused=clock.is_paused, clock=clock)
    cohort_of(opening, 0, attempt=0)
    assert set(clock.phases) == {Phase.PAUSED}
    opened = journal.last()
    assert opened is not None
    assert opened.opened_unix_s >= clock.until_s


def test_a_pause_while_clients_are_waited_for_starts_no_smaller_round(
    new_journal: NewJournal,
) -> None:
    """Two clients are enough for a round, but after the pause it asks all four."""
    clients = Arriving(most=4)
    clock = Pausing(live_status=clients.live_status, began_s=0.3, until_s=30.0)
    opening = durable(
        clients, new_journal(), is_paused=clock.is_paused, clock=clock, patience_s=10.0
    )  # shorter than the pause
    assert sorted(cohort_of(opening, 0, attempt=0)) == ALL[:4]
    assert Phase.PAUSED in clock.phases


def test_an_interruption_ends_the_waiting(new_journal: NewJournal) -> None:
    """The wait for clients that never come ends; no round is recorded."""
    interruption, journal = Interruption(), new_journal()
    opening = durable(there(1), journal, check=interruption.check, clock=interruption)
    threading.Timer(0.05, interruption.give, [Aborted("by the operator")]).start()
    with pytest.raises(Aborted):
        cohort_of(opening, 0, attempt=0)
    assert journal.last() is None


def test_what_ends_the_run_opens_no_round(new_journal: NewJournal) -> None:
    """Even with enough clients. Control: without a reason to stop, the round opens."""
    interruption, journal = Interruption(), new_journal()
    cohort_of(durable(there(4), journal, check=interruption.check), 0, attempt=0)
    interruption.give(Aborted("by the operator"))
    with pytest.raises(Aborted):
        cohort_of(durable(there(4), journal, check=interruption.check), 1, attempt=0)
    assert journal.find(1, 0) is None


def test_the_board_says_when_a_round_is_under_way(new_journal: NewJournal) -> None:
    """It also shows the attempt, and also for a round that is resumed."""
    clients, journal = there(4), new_journal()
    cohort_of(durable(clients, journal), 3, attempt=1)
    assert (clients.live_status.phase, clients.live_status.attempt) == (Phase.ROUND, 1)
    later = there(0)
    cohort_of(durable(later, journal), 3, attempt=1)
    assert (later.live_status.phase, later.live_status.attempt) == (Phase.ROUND, 1)


# ---- Recording ---------------------------------------------------------------------------


def test_a_cohort_is_chosen_once(any_journal: RoundJournal) -> None:
    """A restart asks the same clients, even if others or none are connected by then."""
    first = cohort_of(durable(there(10), any_journal), 0, attempt=0)
    assert first == UniformSampler().sample(
        ALL, cohort_size=4, round_num=0, attempt=0, seed=Seed(1)
    )
    paused = Pausing(until_s=1e9)
    restarted = durable(there(0), any_journal, is_paused=paused.is_paused, clock=paused)
    assert cohort_of(restarted, 0, attempt=0) == first
    assert any_journal.find(0, 0) == OpenRound(
        round_num=0, attempt=0, cohort=first, opened_unix_s=5.0
    )


def test_another_attempt_is_another_cohort(any_journal: RoundJournal) -> None:
    """The same holds for another round."""
    opening = durable(there(10), any_journal)
    cohorts = {
        cohort_of(opening, round_num, attempt=attempt)
        for round_num, attempt in ((0, 0), (0, 1), (1, 0))
    }
    assert len(cohorts) == 3


def test_a_coordinator_that_was_taken_over_opens_no_round(tmp_path: Path) -> None:
    """Even if it does not know yet. Control: it did before, and the new coordinator does."""
    clock = VirtualClock()
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        deploy(database, RUN.name)
        old, new = (
            Lease(database, RUN.name, holder=name, ttl_s=60.0, clock=clock)
            for name in ("old", "new")
        )
        journal, theirs = (
            StoredJournal(database, RUN.name, guard=lease.guard) for lease in (old, new)
        )
        assert old.try_acquire()
        cohort_of(durable(there(4), journal), 0, attempt=0)
        assert not new.try_acquire()
        clock.sleep(61.0)
        assert new.try_acquire()
        clients = there(4)
        with pytest.raises(Fenced):
            cohort_of(durable(clients, journal), 1, attempt=0)
        assert clients.live_status.phase is not Phase.ROUND
        assert journal.find(1, 0) is None
        cohort_of(durable(there(4), journal=theirs), 1, attempt=0)
