"""An asynchronous coordinator is killed: no update is lost or counts twice.

Client k that trains the model of round r votes in ``votes[r, k]``. An update counts one half there,
no matter which round asked for it or takes it. So the final model shows which updates were counted,
and how often.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.client.home import Home
from fedlearn.client.task_folder import TaskFolder
from fedlearn.core.participations import Status
from fedlearn.gateway.exchanges import Exchanges
from fedlearn.gateway.upload_store import PartialUpload, ReplyLog, remove_exchanges
from fedlearn.rounds import updates
from fedlearn.rounds.records import RunStatus
from fedlearn.store import checkpoints
from fedlearn.store.journal import StoredJournal
from fedlearn.store.runs import StoredRun
from tests.e2e.deployed import until_said
from tests.e2e.survival.changes import COUNT_TWICE, FORGET_REPLIES
from tests.e2e.survival.harness import (
    RUN,
    Miscounted,
    VotingSite,
    check_durations,
    reporters,
)
from tests.processes import Change, Crash, Process, until

pytestmark = pytest.mark.slow

NUM_CLIENTS, BUFFER_SIZE = 3, 2

# ruff: noqa: SLF001 (a coordinator is killed within)
PHASES = [
    Crash("before the journal", StoredJournal.open, "before"),
    Crash("journaled, nothing sent", StoredJournal.open, "after"),
    Crash("logs opened, nothing sent", ReplyLog.__init__, "after"),
    Crash("sent", Exchanges.open, "after"),
    Crash("before a model is sent ahead", Exchanges.send_prefetch, "before"),
    Crash("a model is sent ahead", Exchanges.send_prefetch, "after"),
    Crash("in the middle of an upload", PartialUpload.write, "after", 3),
    Crash("before the log", ReplyLog.append, "before"),
    Crash("logged, no receipt", ReplyLog.append, "after"),
    Crash("folded, no receipt", Exchanges.deliver_verdict, "before"),
    Crash("a receipt is on its way", Exchanges.deliver_verdict, "after"),
    Crash("between folds", updates.Fold.add, "after"),
    Crash("folded", updates.Fold.add, "after", 2),
    Crash("closing, not written down", ReplyLog.close, "before"),
    Crash("closed", ReplyLog.close, "after"),
    Crash("before the server step", ServerSgd.step, "before"),
    Crash("before the commit", StoredRun.commit, "before", 2),
    Crash("half a checkpoint", checkpoints._serialize, "after"),
    Crash("rows that are not committed", StoredRun._replace_checkpoints, "after"),
    Crash("committed, journal not cleaned", StoredJournal.forget, "before"),
    Crash("committed, upload store not cleaned", remove_exchanges, "before"),
]
#: Phases of a client that works on a prefetched model, or is about to.
CLIENT_PHASES = [
    Crash("a model is about to come ahead", Home.prepare_prefetch, "after"),
    Crash("work ahead is opened", Home.open_task, "after", 3),
    Crash("in the middle of it", TaskFolder.begin_work, "after", 3),
    Crash("it is done", TaskFolder.end_work, "after", 3),
    Crash("nothing is held", Home.hold, "before", 3),
    Crash("it is held", Home.hold, "after", 3),
    Crash("it is settled", Home.drop, "before", 3),
]


def configure(
    site: VotingSite,
    *,
    num_rounds: int,
    num_clients: int = NUM_CLIENTS,
    buffer_size: int = BUFFER_SIZE,
) -> None:
    """Configure an asynchronous run in which all clients train at all times."""
    site.configure(
        num_rounds=num_rounds,
        num_clients=num_clients,
        sections={
            "algorithm": {"name": "fedbuff"},
            "asynchronous": {
                "buffer_size": buffer_size,
                "concurrency": num_clients,
            },
            "staleness": {"max_staleness": 30, "staleness_weight": "constant"},
            "cohort": {},
            "stragglers": {},
        },
    )


def populate(site: VotingSite) -> list[Process]:
    numbers = range(asynchrony_of(site).concurrency)
    for number in numbers:
        site.enrol(number)
    return [site.join(number) for number in numbers]


def asynchrony_of(site: VotingSite) -> Asynchrony:
    found = site.config.asynchrony()
    assert found is not None
    return found


def audit(site: VotingSite) -> None:
    """Check that the run is done, and that each recorded update is in the model exactly once.

    Raises:
        Miscounted: An update is there twice or not at all, was acknowledged but does not count, or
            has a negative duration.
    """
    asynchrony = asynchrony_of(site)
    with site.places.open_database() as database:
        run = database.run(RUN)
        status, records, checkpoint = run.record.status, run.rounds(), run.load()
    if status is not RunStatus.DONE:
        raise Miscounted(f"the run is {status}")
    if [record.round_num for record in records] != list(range(site.config.num_rounds)):
        raise Miscounted(f"rounds {[record.round_num for record in records]} are on record")
    check_durations(records)
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"] * asynchrony.buffer_size
    if not set(votes.unique().tolist()) <= {0.0, 1.0}:
        raise Miscounted(f"an update is there twice: {votes.nonzero().tolist()}")
    reported = Counter[int]()
    for record in records:
        if record.count(Status.REPORTED) != asynchrony.buffer_size:
            raise Miscounted(f"round {record.round_num}: {record.participations}")
        reported.update(
            each.client_id for each in record.participations if each.status is Status.REPORTED
        )
    for number in range(asynchrony.concurrency):
        if votes[:, number].sum() != reported[number]:
            raise Miscounted(f"client {number}: {votes[:, number]}, {reported[number]} on record")
        told, ahead = site.told(number, "accepted"), site.begun_ahead(number)
        models = {asked: {asked, ahead.get(asked, asked)} for asked in told}
        lost = {asked for asked in told if not votes[sorted(models[asked]), number].any()}
        if lost or len(told) > reported[number]:
            raise Miscounted(f"client {number} was told that those of {lost} count")


def test_the_books_of_an_asynchronous_run_are_right(site: VotingSite) -> None:
    """The control of the other tests: nothing is killed, and the slow client delays no other."""
    configure(site, num_rounds=6)
    coordinator = site.serving()
    with site.holding(2):
        populate(site)
        assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert site.told(2, "accepted") == set()
    records = site.rounds()
    assert [record.count(Status.REPORTED) for record in records] == [BUFFER_SIZE] * 6


def test_work_that_was_begun_ahead_counts_once_whenever_its_client_is_killed(
    site: VotingSite,
) -> None:
    """One process of a client after another is killed, each at its phase; others continue."""
    configure(site, num_rounds=60)
    coordinator = site.serving()
    for number in range(NUM_CLIENTS):
        site.enrol(number)
    join = partial(site.join, SURVIVAL_TRAINING_S="0.3")
    others = [join(number) for number in (1, 2)]
    for phase in CLIENT_PHASES:
        process = join(0, crash=phase)
        assert process.wait() is None, f"{phase.phase}: it went on\n{process.tail()}"
        assert process.has_crashed_itself(), f"{phase.phase}: {process.tail()}"
    join(0)
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert all(each.is_running for each in others)
    for number in range(NUM_CLIENTS):
        assert len(site.begun_ahead(number)) > 0, number


def restart_all(site: VotingSite, *changes: Change, revokes: bool = False) -> Process:
    """Kill a coordinator that has acknowledged one of two updates, and its client; start another.

    The client may be revoked in between.
    """
    configure(site, num_rounds=2)
    first = site.serving()
    with site.holding(1, 2):
        clients = populate(site)
        until(lambda: site.told(0, "accepted") == {0})
        first.kill()
    clients[0].kill()
    if revokes:
        site.revoke(0)
    return site.serving(changes=changes)


@pytest.mark.parametrize("revokes", [False, True])
def test_what_was_acknowledged_counts_although_its_client_is_gone(
    site: VotingSite, *, revokes: bool
) -> None:
    """Once, and in the first round, since it came before the others."""
    second = restart_all(site, revokes=revokes)
    assert second.wait() == 0, second.tail()
    audit(site)
    assert 0 in reporters(site.rounds()[0])


def test_a_client_that_is_revoked_at_work_is_asked_no_more_and_holds_up_nobody(
    site: VotingSite,
) -> None:
    """The next coordinator does not wait for it either; the others fill the buffers."""
    configure(site, num_rounds=6)
    first = site.serving()
    with site.holding(2):
        clients = populate(site)
        until(lambda: site.trained(2) == [0])
        site.revoke(2)
        until_said(first, "session_ended")
        first.kill()
        second = site.serving()
        assert second.wait() == 0, second.tail()
    audit(site)
    assert site.trained(2) == [0]
    assert all(2 not in reporters(record) for record in site.rounds())
    assert "this client was revoked" in clients[2].out()


def test_the_books_show_what_a_forgetful_coordinator_would_do(site: VotingSite) -> None:
    """The control of the audit."""
    second = restart_all(site, FORGET_REPLIES)
    assert second.wait() == 0, second.tail()
    with pytest.raises(Miscounted, match="was told that those of"):
        audit(site)


def test_a_buffer_takes_nothing_of_who_is_not_in_flight(site: VotingSite) -> None:
    """If an exchange returns a reply twice, that is an error, and the second does not count."""
    second = restart_all(site, COUNT_TWICE)
    assert second.wait() == 3, second.tail()
    assert "or has already answered" in second.out()


def test_a_kill_in_any_phase_loses_nothing(site: VotingSite) -> None:
    """One coordinator after another is killed, each at its phase; committed rounds stay."""
    configure(site, num_rounds=len(PHASES) + 4)
    committed, clients = site.rounds(), list[Process]()
    for phase in [replace(each, armed_by=StoredRun.commit) for each in PHASES]:
        process = site.serving(crash=phase)
        clients = clients or populate(site)
        assert process.wait() is None, f"{phase.phase}: it went on\n{process.tail()}"
        assert process.has_crashed_itself(), f"{phase.phase}: {process.tail()}"
        latest = site.rounds()
        assert latest[: len(committed)] == committed, phase.phase
        committed = latest
    last = site.coordinator()
    assert last.wait() == 0, last.tail()
    audit(site)
