"""The coordinator's lease: a coordinator that was replaced can no longer write."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sqlalchemy import event
from sqlalchemy.orm import Session

from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participations
from fedlearn.errors import DeploymentError, Fenced, StoreError
from fedlearn.rounds.journal import LeaseState, OpenRound
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import (
    RUN_LEASE,
    SERVICE_LEASE,
    Lease,
    LeaseKind,
    deploy,
    ensure_service,
    find_deployment,
    find_service,
    list_deployments,
    set_control,
)
from fedlearn.store.runs import Database, StoredRun
from tests.records import RUN

ROUND = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.SKIPPED,
    participations=Participations.of(()),
    train_loss=math.nan,
    duration_s=1.0,
    virtual_s=1.0,
    seconds=0.1,
    metrics={},
)
OPENED = OpenRound(round_num=0, attempt=0, cohort=(), opened_unix_s=0.0)
TTL_S = 4.0


@pytest.fixture
def database(database: Database) -> Database:
    """A store with one deployed run, in each kind of database in turn."""
    database.create(RUN)
    deploy(database, RUN.name)
    return database


def a_lease(database: Database, holder: str, clock: VirtualClock | None = None) -> Lease:
    """Return a coordinator's lease; each has its own clock, unless one is given."""
    clock = VirtualClock() if clock is None else clock
    return Lease(database, RUN.name, holder=holder, ttl_s=TTL_S, clock=clock)


class Leases:
    """Leases of one kind on one row, each with its own clock unless one is given."""

    def __init__(self, database: Database, kind: LeaseKind) -> None:
        self.database = database
        self.kind = kind
        self.name = RUN.name if kind is RUN_LEASE else "clinics"

    def __call__(
        self, holder: str, clock: VirtualClock | None = None, *, heir_of: str = ""
    ) -> Lease:
        clock = VirtualClock() if clock is None else clock
        named = {"holder": holder, "heir_of": heir_of}
        return Lease(self.database, self.name, ttl_s=TTL_S, clock=clock, kind=self.kind, **named)

    def find(self) -> LeaseState:
        return self.kind.find(self.database, self.name)


@pytest.fixture(params=[RUN_LEASE, SERVICE_LEASE], ids=["run", "service"])
def leases(request: pytest.FixtureRequest, database: Database) -> Leases:
    """Leases of a run and of a service, in turn."""
    ensure_service(database, "clinics")
    return Leases(database, request.param)


def take_over(database: Database) -> tuple[Lease, Lease]:
    """Return a holder that does not know that it was replaced, and the new holder."""
    old, clock = a_lease(database, "old"), VirtualClock()
    new = a_lease(database, "new", clock)
    assert old.try_acquire()
    assert not new.try_acquire()
    clock.sleep(TTL_S)
    assert new.try_acquire()
    return old, new


def checkpoint_after(round_num: int) -> Checkpoint:
    return Checkpoint(round_num=round_num, tensors={"params/w": torch.ones(1)}, values={})


# -- deployed runs ------------------------------------------------------------------------


def test_a_run_is_deployed_once(database: Database) -> None:
    """It gets one id, and no coordinator yet."""
    first = find_deployment(database, RUN.name)
    assert deploy(database, RUN.name) == first
    assert len(first.run_id) == 32
    assert (first.control, first.holder, first.epoch, first.beat) == ("run", "", 0, 0)
    assert first.status == {}
    database.create(replace(RUN, name="quick-yak-42"))
    second = deploy(database, "quick-yak-42")
    assert second.run_id != first.run_id
    assert list_deployments(database) == [first, second]


def test_what_is_not_deployed_is_named(database: Database) -> None:
    """A simulation cannot be paused, and a missing run cannot be deployed."""
    database.create(replace(RUN, name="calm-otter-18"))
    with pytest.raises(DeploymentError, match="'calm-otter-18' is deployed; did you mean 'calm-ot"):
        find_deployment(database, "calm-otter-18")
    with pytest.raises(DeploymentError, match="'calm-otter-18' is deployed; did you mean 'calm-ot"):
        set_control(database, "calm-otter-18", "pause")
    with pytest.raises(StoreError, match="no run called 'nobody'"):
        deploy(database, "nobody")


def test_the_holder_hears_what_the_operator_wants(database: Database) -> None:
    """The operator can also read the holder's status."""
    lease = a_lease(database, "one")
    assert lease.try_acquire()
    assert lease.renew({"round_num": 3, "waits_for": ["clinic-a"]}) == "run"
    set_control(database, RUN.name, "pause")
    assert lease.renew({"round_num": 3}) == "pause"
    assert find_deployment(database, RUN.name).status == {"round_num": 3}


# -- the lease ----------------------------------------------------------------------------


def test_a_free_lease_is_taken_at_once_and_by_one(leases: Leases) -> None:
    """The second coordinator has to wait."""
    one, two = leases("one"), leases("two")
    assert one.try_acquire()
    assert not two.try_acquire()
    assert (one.is_held(), two.is_held()) == (True, False)


def test_a_silent_holder_is_taken_over_after_the_time_to_live(leases: Leases) -> None:
    """Measured by the waiting coordinator's own clock, from its first look."""
    clock = VirtualClock(1e6)
    one, two = leases("one"), leases("two", clock)
    assert one.try_acquire()
    assert not two.try_acquire()
    clock.sleep(TTL_S - 0.01)
    assert not two.try_acquire()
    clock.sleep(0.01)
    assert two.try_acquire()
    assert leases.find().epoch == 2


def test_a_holder_that_renews_is_never_taken_over(leases: Leases) -> None:
    """However long another one waits."""
    clock = VirtualClock()
    one, two = leases("one"), leases("two", clock)
    assert one.try_acquire()
    for _ in range(20):
        assert not two.try_acquire()
        clock.sleep(two.renew_every_s)
        one.renew({})


def test_one_of_several_waiters_takes_over(leases: Leases) -> None:
    """The others then wait for the new holder."""
    assert leases("dead").try_acquire()
    clock = VirtualClock()
    waiting = [leases(f"waiter-{number}", clock) for number in range(3)]
    assert [lease.try_acquire() for lease in waiting] == [False] * 3
    clock.sleep(TTL_S)
    assert [lease.try_acquire() for lease in waiting] == [True, False, False]
    assert leases.find().holder == "waiter-0"


class Interrupted(VirtualClock):
    """A clock whose third reading lets another coordinator acquire the lease first."""

    def __init__(self, leases: Leases) -> None:
        super().__init__()
        self.other = leases("other")
        self.reads = 0

    def now_s(self) -> float:
        self.reads += 1
        if self.reads == 3:  # after reading the row, before updating it
            assert self.other.try_acquire()
        return super().now_s()


def test_a_change_between_looking_and_taking_is_noticed(leases: Leases) -> None:
    """Two coordinators that saw the same free lease cannot both acquire it."""
    clock = Interrupted(leases)
    lease = leases("one", clock)
    assert not lease.try_acquire()
    assert not lease.is_held()
    assert clock.other.is_held()
    assert leases.find().holder == "other"


def test_a_released_lease_is_taken_at_once(leases: Leases) -> None:
    """After an orderly exit, the next coordinator need not wait."""
    one, two = leases("one"), leases("two")
    assert one.try_acquire()
    one.release()
    assert not one.is_held()
    assert two.try_acquire()
    with pytest.raises(Fenced):
        one.renew({})
    one.release()
    assert leases.find().holder == "two"


def test_an_acquisition_of_which_no_answer_came_is_repeated(leases: Leases) -> None:
    """The holder in the row is itself, so it does not wait for it to expire."""
    lease = leases("one")
    assert leases("one").try_acquire()
    assert lease.try_acquire()


def test_a_holder_doubts_before_others_take_over(leases: Leases) -> None:
    """By its own clock, without a query; a renewal restores its confidence."""
    clock = VirtualClock()
    lease = leases("one", clock)
    assert not lease.is_held()
    assert lease.try_acquire()
    clock.sleep(TTL_S * 0.7)
    assert lease.is_held()
    clock.sleep(TTL_S * 0.1)
    assert not lease.is_held()
    lease.renew({})
    assert lease.is_held()


def test_waiting_ends_when_it_is_told_to(leases: Leases) -> None:
    """Otherwise it ends when the holder's lease expires."""
    assert leases("dead").try_acquire()
    clock = VirtualClock()
    waiter = leases("waiter", clock)
    assert not waiter.acquire(is_stopped=lambda: clock.now_s() > 2.0)
    assert waiter.acquire(is_stopped=lambda: False)
    assert TTL_S <= clock.now_s() <= TTL_S + waiter.renew_every_s


# -- fencing ------------------------------------------------------------------------------


def test_a_holder_that_was_taken_over_writes_nothing(database: Database) -> None:
    """Neither rounds nor the run's status nor the journal. It gets an error."""
    old, new = take_over(database)
    run_id = find_deployment(database, RUN.name).run_id
    run = database.run(RUN.name, guard=old.guard)
    journal = StoredJournal(database, RUN.name, guard=old.guard)
    run.append(ROUND)
    assert old.is_held()
    with pytest.raises(
        Fenced, match=r"'calm-otter-17' is coordinated by new \(epoch 2\), not by o"
    ):
        run.commit(checkpoint_after(1))
    assert not old.is_held()
    with pytest.raises(Fenced):
        run.finish(RunStatus.DONE, error="")
    with pytest.raises(Fenced):
        run.finish(RunStatus.RUNNING, error="")
    with pytest.raises(Fenced):
        run.renew()
    with pytest.raises(Fenced):
        journal.open(OPENED)
    with pytest.raises(Fenced):
        journal.forget(before_round=1)
    with pytest.raises(Fenced):
        old.renew({"round_num": 1})
    assert run.rounds() == []
    assert run.checkpoints() == []
    assert run.record.status is RunStatus.RUNNING
    assert journal.last() is None
    found = find_deployment(database, RUN.name)
    assert (found.run_id, found.status) == (run_id, {})
    assert new.renew({}) == "run"


def test_a_holder_that_stood_still_removes_no_checkpoint_of_its_successor(
    database: Database,
) -> None:
    """It paused between commit and cleanup; by then the checkpoints are its successor's."""
    lease = a_lease(database, "old")
    assert lease.try_acquire()
    run = database.run(RUN.name, guard=lease.guard)
    for round_num in (1, 2):
        run.commit(checkpoint_after(round_num))

    def stand_still(_: Session) -> None:
        lease.release()
        successor = a_lease(database, "new")
        assert successor.try_acquire()
        taken_on = database.run(RUN.name, guard=successor.guard)
        for round_num in (4, 5):
            taken_on.commit(checkpoint_after(round_num))

    event.listen(Session, "after_commit", stand_still, once=True)
    run.commit(checkpoint_after(3))
    kept = [file.path for file in run.checkpoints()]
    assert [path.name[:12] for path in kept] == ["round-000004", "round-000005"]
    assert sorted((run.path / "checkpoints").iterdir()) == kept


@pytest.mark.parametrize("begin_anew", [StoredRun.rewind, StoredRun.renew])
def test_a_run_that_begins_anew_is_another_one_to_its_clients(
    database: Database, begin_anew: Callable[[StoredRun], Checkpoint | None]
) -> None:
    """Clients' replies belong to the dropped model, and the dropped cohort is not asked again."""
    lease = a_lease(database, "holder")
    assert lease.try_acquire()
    run = database.run(RUN.name, guard=lease.guard)
    journal = StoredJournal(database, RUN.name, guard=lease.guard)
    other = deploy(database, database.create(replace(RUN, name="other")).name)
    dropped = find_deployment(database, RUN.name).run_id
    for round_num in (1, 2):
        run.commit(checkpoint_after(round_num))
    journal.open(replace(OPENED, round_num=2, cohort=(ClientId(0),)))
    assert find_deployment(database, RUN.name).run_id == dropped
    begin_anew(run)
    assert len(run.checkpoints()) == (1 if begin_anew is StoredRun.rewind else 2)
    assert journal.last() is None
    assert find_deployment(database, RUN.name).run_id != dropped
    assert find_deployment(database, "other") == other
    assert lease.renew({}) == "run"


def test_the_new_holder_writes(database: Database) -> None:
    """Control: the guard of the lease that is held."""
    _, new = take_over(database)
    run = database.run(RUN.name, guard=new.guard)
    journal = StoredJournal(database, RUN.name, guard=new.guard)
    journal.open(OPENED)
    run.append(ROUND)
    run.commit(checkpoint_after(1))
    journal.forget(before_round=0)
    run.finish(RunStatus.DONE, error="")
    assert len(run.rounds()) == 1
    assert journal.last() == OPENED


def test_a_lease_that_was_never_held_guards_too(database: Database) -> None:
    """A standby cannot write by mistake."""
    run = database.run(RUN.name, guard=a_lease(database, "standby").guard)
    with pytest.raises(Fenced, match=r"coordinated by no process \(epoch 0\), not by standby"):
        run.commit(checkpoint_after(0))


# -- services -----------------------------------------------------------------------------


def test_a_database_has_one_service(database: Database) -> None:
    """Its queue and its clients are the database's, so a second one would share them."""
    first = ensure_service(database, "clinics")
    assert ensure_service(database, "clinics") == find_service(database, "clinics") == first
    assert (len(first.uuid), first.control, first.holder, first.epoch) == (32, "run", "", 0)
    with pytest.raises(DeploymentError, match="belongs to the service 'clinics', not to 'wards'"):
        ensure_service(database, "wards")
    with pytest.raises(DeploymentError, match="called 'clinic'; did you mean 'clinics'"):
        find_service(database, "clinic")
    with pytest.raises(StoreError, match=r"a service cannot be called '\.\./x'"):
        ensure_service(database, "../x")


def test_a_holder_of_either_kind_that_was_taken_over_is_fenced(leases: Leases) -> None:
    """Its guard raises, and the new holder's does not."""
    clock = VirtualClock()
    old, new = leases("old"), leases("new", clock)
    assert old.try_acquire()
    assert not new.try_acquire()
    with leases.database.writing() as session:
        old.guard(session)
    clock.sleep(TTL_S)
    assert new.try_acquire()
    with (
        pytest.raises(Fenced, match=rf"^{leases.kind.noun} .* by new \(epoch 2\), not by old"),
        leases.database.writing() as session,
    ):
        old.guard(session)
    with leases.database.writing() as session:
        new.guard(session)


def test_an_heir_takes_the_lease_of_its_predecessor_at_once(leases: Leases) -> None:
    """Control: another process waits, and so does the heir of another holder."""
    dead = leases("dead")
    assert dead.try_acquire()
    assert not leases("stranger").try_acquire()
    assert not leases("other", heir_of="somebody").try_acquire()
    heir = leases("heir", heir_of="dead")
    assert heir.try_acquire()
    assert heir.predecessor == "dead"
    with pytest.raises(Fenced):
        dead.renew({})
    heir.release()
    next_one = leases("next", heir_of="heir")
    assert next_one.try_acquire()
    assert next_one.predecessor == ""
