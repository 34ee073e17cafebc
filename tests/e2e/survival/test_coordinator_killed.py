"""A coordinator is killed at every phase of a round: no update is lost or counts twice."""

from dataclasses import replace

import pytest

from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.gateway.exchanges import Exchanges
from fedlearn.gateway.transfers import Transfers
from fedlearn.gateway.upload_store import PartialUpload, ReplyLog, remove_exchanges
from fedlearn.rounds import updates
from fedlearn.simulation.evaluation import CentralEvaluator
from fedlearn.store import checkpoints
from fedlearn.store.journal import StoredJournal
from fedlearn.store.runs import StoredRun
from tests.e2e.survival.changes import ADD_TWICE, COUNT_TWICE, FORGET_REPLIES
from tests.e2e.survival.harness import Miscounted, VotingSite, audit
from tests.processes import Change, Crash, Process, until

pytestmark = pytest.mark.slow

# ruff: noqa: SLF001 (a coordinator is killed within)
PHASES = [
    Crash("before the journal", StoredJournal.open, "before"),
    Crash("journaled, nothing sent", StoredJournal.open, "after"),
    Crash("logs opened, nothing sent", ReplyLog.__init__, "after"),
    Crash("sent", Exchanges.open, "after"),
    Crash("in the middle of a download", Transfers._write_chunks, "after", 3),
    Crash("clients train", Exchanges.record_progress, "after", 2),
    Crash("in the middle of an upload", PartialUpload.write, "after", 3),
    Crash("upload complete, not logged", PartialUpload.finish, "after", 2),
    Crash("before the log", ReplyLog.append, "before", 2),
    Crash("logged, no receipt", ReplyLog.append, "after"),
    Crash("read, not folded", updates.validate, "after", 2),
    Crash("folded, no receipt", Exchanges.deliver_verdict, "before"),
    Crash("a receipt is on its way", Exchanges.deliver_verdict, "after"),
    Crash("between folds", updates.Fold.add, "after", 2),
    Crash("closing, not written down", ReplyLog.close, "before"),
    Crash("closed", ReplyLog.close, "after"),
    Crash("before the server step", ServerSgd.step, "before"),
    Crash("before the evaluation", CentralEvaluator.evaluate, "before"),
    Crash("clients evaluate", Exchanges.receive_result, "after", 2),
    Crash("before the commit", StoredRun.commit, "before", 2),
    Crash("half a checkpoint", checkpoints._serialize, "after"),
    Crash("checkpoint without a row", checkpoints.write_checkpoint, "after"),
    Crash("rows that are not committed", StoredRun._replace_checkpoints, "after"),
    Crash("committed, journal not cleaned", StoredJournal.forget, "before"),
    Crash("committed, upload store not cleaned", remove_exchanges, "before"),
]
#: Phases in or right after a call to the database.
STORE_PHASES = [
    phase
    for phase in PHASES
    if phase.function.__module__.startswith("fedlearn.store.") or phase.function is remove_exchanges
]

#: In the order of a round, so that each kill starts from what the one before has left.
ONE_ROUND = [
    Crash("before the journal", StoredJournal.open, "before"),
    Crash("journaled, nothing sent", StoredJournal.open, "after"),
    Crash("logs opened, nothing sent", ReplyLog.__init__, "after"),
    Crash("sent", Exchanges.open, "after"),
    Crash("before the log", ReplyLog.append, "before"),
    Crash("logged, no receipt", ReplyLog.append, "after"),
    Crash("read again, not folded", updates.validate, "after"),
    Crash("between folds", updates.Fold.add, "after", 2),
    Crash("closed", ReplyLog.close, "after"),
    Crash("rows that are not committed", StoredRun._replace_checkpoints, "after"),
    Crash("committed, upload store not cleaned", remove_exchanges, "before"),
]


def test_the_books_of_a_run_that_nobody_disturbs_are_right(site: VotingSite) -> None:
    """The control of all other tests: three clients, each with a third of every round."""
    site.configure(num_rounds=2, evaluated=3)
    coordinator = site.serving()
    site.populate()
    assert coordinator.wait() == 0
    audit(site)
    assert all(site.told(number, "accepted") == {0, 1} for number in range(3))


@pytest.mark.parametrize("change", [FORGET_REPLIES, ADD_TWICE], ids=["forget replies", "add twice"])
def test_the_books_show_what_a_worse_coordinator_would_do(site: VotingSite, change: Change) -> None:
    """The control of the audit: coordinators that lose or repeat acknowledged replies."""
    site.configure(num_rounds=1, min_reports=2, deadline_s=15.0, recovery_grace_s=12.0)
    first = site.serving()
    with site.holding(2):
        clients = site.populate()
        until(lambda: site.told(0, "accepted") == {0} and site.told(1, "accepted") == {0})
        first.kill()
    clients[0].kill()
    second = site.serving(changes=[change])
    assert second.wait() == 0, second.tail()
    with pytest.raises(Miscounted):
        audit(site)


def test_a_round_takes_nothing_of_a_client_that_has_answered(site: VotingSite) -> None:
    """If an exchange returns a reply twice, that is an error, and the round is not committed."""
    site.configure(num_rounds=1, min_reports=2, deadline_s=15.0, recovery_grace_s=12.0)
    first = site.serving()
    with site.holding(2):
        site.populate()
        until(lambda: site.told(0, "accepted") == {0} and site.told(1, "accepted") == {0})
        first.kill()
    second = site.serving(changes=[COUNT_TWICE])
    assert second.wait() == 3, second.tail()
    assert "or has already answered" in second.out()
    assert not site.rounds()


def walk(site: VotingSite, phases: list[Crash]) -> None:
    """Kill one coordinator after another, each at its phase; committed rounds must stay."""
    committed, clients = site.rounds(), list[Process]()
    for phase in phases:
        process = site.serving(crash=phase)
        clients = clients or site.populate()
        assert process.wait() is None, f"{phase.phase}: it went on\n{process.tail()}"
        assert process.has_crashed_itself(), f"{phase.phase}: {process.tail()}"
        latest = site.rounds()
        assert latest[: len(committed)] == committed, phase.phase
        committed = latest


def finish(site: VotingSite) -> Process:
    """Let the run finish, and audit it."""
    last = site.coordinator()
    assert last.wait() == 0, last.tail()
    audit(site)
    return last


@pytest.mark.parametrize(
    ("database", "phases"),
    [("sqlite", PHASES), ("postgresql", STORE_PHASES)],
    ids=["sqlite", "postgresql"],
)
def test_a_kill_in_any_phase_loses_nothing(
    site: VotingSite, database: str, phases: list[Crash], request: pytest.FixtureRequest
) -> None:
    """Each phase has its own round; calls are counted after the coordinator has recovered."""
    if database == "postgresql":
        site.store_url = request.getfixturevalue("postgresql_url")
    site.configure(num_rounds=len(phases) + 1, evaluated=3)
    walk(site, [replace(phase, armed_by=StoredRun.commit) for phase in phases])
    finish(site)
    assert all(record.attempt == 0 for record in site.rounds())


def test_one_round_outlives_a_kill_in_each_of_its_phases(site: VotingSite) -> None:
    """With replies that fit into a message. A client trains once, even if it is asked again."""
    site.configure(num_rounds=2, ballast=0)
    walk(site, ONE_ROUND)
    finish(site)
    assert all(record.attempt == 0 for record in site.rounds())
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3
