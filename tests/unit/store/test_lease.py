"""The coordinator's lease: a coordinator that was replaced can no longer write."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import event
from sqlalchemy.orm import Session

from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participations
from fedlearn.errors import DeploymentError, Fenced, StoreError
from fedlearn.rounds.journal import OpenRound
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease, deploy, find_deployment, list_deployments, set_control
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
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """A store with one deployed run, in each kind of database in turn."""
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        deploy(database, RUN.name)
        yield database


def a_lease(database: Database, holder: str, clock: VirtualClock | None = None) -> Lease:
    """Return a coordinator's lease; each has its own clock, unless one is given."""
    clock = VirtualClock() if clock is None else clock
    return Lease(database, RUN.name, holder=holder, ttl_s=TTL_S, clock=clock)


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


def test_a_free_lease_is_taken_at_once_and_by_one(database: Database) -> None:
    """The second coordinator has to wait."""
    one, two = a_lease(database, "one"), a_lease(database, "two")
    assert one.try_acquire()
    assert not two.try_acquire()
    assert (one.is_held(), two.is_held()) == (True, False)


def test_a_silent_holder_is_taken_over_after_the_time_to_live(database: Database) -> None:
    """Measured by the waiting coordinator's own clock, from its first look."""
    clock = VirtualClock(1e6)
    one, two = a_lease(database, "one"), a_lease(database, "two", clock)
    assert one.try_acquire()
    assert not two.try_acquire()
    clock.sleep(TTL_S - 0.01)
    assert not two.try_acquire()
    clock.sleep(0.01)
    assert two.try_acquire()
    assert find_deployment(database, RUN.name).epoch == 2


def test_a_holder_that_renews_is_never_taken_over(database: Database) -> None:
    """However long another one waits."""
    clock = VirtualClock()
    one, two = a_lease(database, "one"), a_lease(database, "two", clock)
    assert one.try_acquire()
    for _ in range(20):
        assert not two.try_acquire()
        clock.sleep(two.renew_every_s)
        one.renew({})


def test_one_of_several_waiters_takes_over(database: Database) -> None:
    """The others then wait for the new holder."""
    assert a_lease(database, "dead").try_acquire()
    clock = VirtualClock()
    waiting = [a_lease(database, f"waiter-{number}", clock) for number in range(3)]
    assert [lease.try_acquire() for lease in waiting] == [False] * 3
    clock.sleep(TTL_S)
    assert [lease.try_acquire() for lease in waiting] == [True, False, False]
    assert find_deployment(database, RUN.name).holder == "waiter-0"


class Interrupted(VirtualClock):
    """A clock whose third reading lets another coordinator acquire the lease first."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.other = a_lease(database, "other")
        self.reads = 0

    def now_s(self) -> float:
        self.reads += 1
        if self.reads == 3:  # after reading the row, before updating it
            assert self.other.try_acquire()
        return super().now_s()


def test_a_change_between_looking_and_taking_is_noticed(database: Database) -> None:
    """Two coordinators that saw the same free lease cannot both acquire it."""
    clock = Interrupted(database)
    lease = a_lease(database, "one", clock)
    assert not lease.try_acquire()
    assert not lease.is_held()
    assert clock.other.is_held()
    assert find_deployment(database, RUN.name).holder == "other"


def test_a_released_lease_is_taken_at_once(database: Database) -> None:
    """After an orderly exit, the next coordinator need not wait."""
    one, two = a_lease(database, "one"), a_lease(database, "two")
    assert one.try_acquire()
    one.release()
    assert not one.is_held()
    assert two.try_acquire()
    with pytest.raises(Fenced):
        one.renew({})
    one.release()
    assert find_deployment(database, RUN.name).holder == "two"


def test_an_acquisition_of_which_no_answer_came_is_repeated(database: Database) -> None:
    """The holder in the row is itself, so it does not wait for it to expire."""
    lease = a_lease(database, "one")
    assert a_lease(database, "one").try_acquire()
    assert lease.try_acquire()


def test_a_holder_doubts_before_others_take_over(database: Database) -> None:
    """By its own clock, without a query; a renewal restores its confidence."""
    clock = VirtualClock()
    lease = a_lease(database, "one", clock)
    assert not lease.is_held()
    assert lease.try_acquire()
    clock.sleep(TTL_S * 0.7)
    assert lease.is_held()
    clock.sleep(TTL_S * 0.1)
    assert not lease.is_held()
    lease.renew({})
    assert lease.is_held()


def test_waiting_ends_when_it_is_told_to(database: Database) -> None:
    """Otherwise it ends when the holder's lease expires."""
    assert a_lease(database, "dead").try_acquire()
    clock = VirtualClock()
    waiter = a_lease(database, "waiter", clock)
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
