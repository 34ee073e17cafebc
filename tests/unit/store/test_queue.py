"""The queue of runs in the database: every transition, each repeated and out of turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fedlearn.core.clock import VirtualClock, WallClock
from fedlearn.errors import DeploymentError, Fenced, StoreError
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueuedRun, QueueState, Submission
from fedlearn.store.lease import (
    SERVICE_LEASE,
    Lease,
    deploy,
    ensure_service,
    find_deployment,
    set_control,
)
from fedlearn.store.queue import CANCELLED_BY_OPERATOR, RunQueue
from fedlearn.store.runs import Database
from tests.records import RUN


class Noon(WallClock):
    """A wall clock that stands still."""

    def unix_s(self) -> float:
        return 43200.0


NOON = "1970-01-01T12:00:00Z"


@pytest.fixture
def queue(database: Database) -> RunQueue:
    return RunQueue(database, Noon())


def submit(queue: RunQueue, name: str, *, after: str = "", source: str = "") -> QueuedRun:
    start_from = {"run": source} if source else {}
    config = {"num_rounds": RUN.num_rounds, "name": name}
    return queue.submit(Submission(name=name, config=config, after=after, start_from=start_from))


def begin(database: Database, queue: RunQueue, name: str) -> None:
    """Start a run as the service does."""
    queue.start(name)
    database.create(replace(RUN, name=name), from_queue=True)
    deploy(database, name)


def set_status(database: Database, name: str, status: RunStatus) -> None:
    database.run(name).finish(status, error="")


def test_a_run_is_queued_starts_and_ends(database: Database, queue: RunQueue) -> None:
    """Starting and ending may be repeated, since the service may die before it knows."""
    one = submit(queue, "one")
    assert (one.state, one.submitted_utc, one.started_utc) == (QueueState.QUEUED, NOON, "")
    two = submit(queue, "two", after="one")
    assert queue.list() == [one, two]
    started = queue.start("one")
    assert started == queue.start("one") == queue.find("one")
    assert (started.state, started.started_utc) == (QueueState.RUNNING, NOON)
    ended = queue.finish("one", QueueState.FAILED, reason="lost power")
    assert queue.finish("one", QueueState.DONE, reason="") == ended
    assert (ended.state, ended.reason, ended.ended_utc) == (QueueState.FAILED, "lost power", NOON)
    assert queue.finish("two", QueueState.DONE, reason="") == two
    assert queue.start("one") == ended


def test_a_queued_name_is_reserved(database: Database, queue: RunQueue) -> None:
    """Neither a simulation nor a coordinator takes it, and no run's name is queued."""
    submit(queue, "one")
    database.create(replace(RUN, name="simulated"))
    with pytest.raises(StoreError, match="there is a run called 'simulated' already"):
        submit(queue, "simulated")
    with pytest.raises(StoreError, match="called 'one', which is queued; `fedlearn cancel`"):
        submit(queue, "one")
    with pytest.raises(StoreError, match="cannot be called 'a/b'"):
        submit(queue, "a/b")
    with pytest.raises(StoreError, match="the queue has a run called 'one'"):
        database.create(replace(RUN, name="one"))
    with pytest.raises(StoreError, match="'one' is queued in the queue, so it does not start"):
        database.create(replace(RUN, name="one"), from_queue=True)
    with pytest.raises(StoreError, match="'else' is not in the queue"):
        database.create(replace(RUN, name="else"), from_queue=True)
    begin(database, queue, "one")
    assert database.run("one").record.is_deployed


def test_a_run_waits_for_runs_that_are_there(queue: RunQueue) -> None:
    """So there are no cycles: a run waits for one that was submitted before it."""
    submit(queue, "one")
    for after in ("tow", "two"):
        with pytest.raises(DeploymentError, match=f"--after {after}: there is no such run in"):
            submit(queue, "two", after=after)
    with pytest.raises(DeploymentError, match=r"--from on: .* did you mean 'one'"):
        submit(queue, "two", source="on")
    submit(queue, "two", after="one", source="one")


def test_what_is_not_queued_is_named(queue: RunQueue) -> None:
    submit(queue, "clinics")
    for act in (queue.find, queue.cancel, queue.retry, queue.start):
        with pytest.raises(DeploymentError, match="no run called 'clinic'; did you mean 'clinics'"):
            act("clinic")


def test_a_queued_run_is_cancelled_at_once_and_retried(queue: RunQueue) -> None:
    """At its old place."""
    submit(queue, "one")
    submit(queue, "two")
    cancelled = queue.cancel("one")
    assert (cancelled.state, cancelled.reason) == (QueueState.CANCELLED, CANCELLED_BY_OPERATOR)
    with pytest.raises(DeploymentError, match="one is cancelled, so there is nothing"):
        queue.cancel("one")
    with pytest.raises(DeploymentError, match="two is queued, neither failed nor cancelled"):
        queue.retry("two")
    assert queue.retry("one").state is QueueState.QUEUED
    assert [each.name for each in queue.list()] == ["one", "two"]


def test_a_running_run_is_aborted_when_it_is_cancelled(database: Database, queue: RunQueue) -> None:
    """It is running until the service has ended it. A retry lets it run again."""
    submit(queue, "one")
    begin(database, queue, "one")
    assert queue.cancel("one").state is QueueState.RUNNING
    assert find_deployment(database, "one").control == "abort"
    queue.start("one")  # a service that takes over does not undo it
    assert find_deployment(database, "one").control == "abort"
    queue.finish("one", QueueState.CANCELLED, reason=CANCELLED_BY_OPERATOR)
    queue.retry("one")
    queue.start("one")
    assert find_deployment(database, "one").control == "run"


def test_a_pause_outlasts_a_retry(database: Database, queue: RunQueue) -> None:
    """Only the command that ended the run is undone."""
    submit(queue, "one")
    begin(database, queue, "one")
    set_control(database, "one", "pause")
    queue.finish("one", QueueState.FAILED, reason="lost power")
    queue.retry("one")
    queue.start("one")
    assert find_deployment(database, "one").control == "pause"


def test_a_run_that_is_cancelled_while_it_starts_does_not_run(
    database: Database, queue: RunQueue
) -> None:
    """Whether or not it was created by then."""
    for name in ("one", "two"):
        submit(queue, name)
        queue.start(name)
    assert queue.cancel("one").state is QueueState.CANCELLED
    with pytest.raises(StoreError, match="'one' is cancelled in the queue"):
        database.create(replace(RUN, name="one"), from_queue=True)
    database.create(replace(RUN, name="two"), from_queue=True)
    assert queue.cancel("two").state is QueueState.CANCELLED
    assert deploy(database, "two").control == "abort"
    assert queue.finish("two", QueueState.FAILED, reason="").state is QueueState.CANCELLED


def test_an_extended_run_is_queued_again_if_it_was_done(
    database: Database, queue: RunQueue
) -> None:
    """Also if it is extended between its last round and its record in the queue."""
    submit(queue, "one")
    assert queue.extend("one", 30).config["num_rounds"] == 30
    with pytest.raises(DeploymentError, match="one has 30 rounds already; give more"):
        queue.extend("one", 30)
    queue.start("one")
    with pytest.raises(DeploymentError, match="one is just starting"):
        queue.extend("one", 31)
    begin(database, queue, "one")
    set_status(database, "one", RunStatus.DONE)
    assert queue.extend("one", 40).state is QueueState.RUNNING
    assert queue.finish("one", QueueState.DONE, reason="").state is QueueState.QUEUED
    queue.start("one")
    set_status(database, "one", RunStatus.DONE)
    assert queue.finish("one", QueueState.DONE, reason="").state is QueueState.DONE
    database.run("one").extend(50)
    found = queue.find("one")
    assert (found.state, found.ended_utc) == (QueueState.QUEUED, "")
    assert found.config["num_rounds"] == 30  # that of its beginning, as in its record
    assert database.run("one").record.num_rounds == 50
    assert database.run("one").record.status is RunStatus.RUNNING


@pytest.mark.parametrize(
    "act",
    [
        lambda queue: queue.start("one"),
        lambda queue: queue.finish("one", QueueState.DONE, reason=""),
    ],
    ids=["start", "finish"],
)
def test_a_service_that_was_replaced_changes_nothing(
    database: Database, queue: RunQueue, act: Callable[[RunQueue], QueuedRun]
) -> None:
    """Control: the new holder of the service's lease does."""
    ensure_service(database, "clinics")
    submit(queue, "one")
    old, new = (
        Lease(
            database,
            "clinics",
            holder=holder,
            ttl_s=4.0,
            clock=VirtualClock(),
            kind=SERVICE_LEASE,
            heir_of="old",
        )
        for holder in ("old", "new")
    )
    assert old.try_acquire()
    assert new.try_acquire()
    with pytest.raises(Fenced, match="service 'clinics' is coordinated by new"):
        act(RunQueue(database, Noon(), guard=old.guard))
    assert queue.find("one").state is QueueState.QUEUED
    act(RunQueue(database, Noon(), guard=new.guard))
