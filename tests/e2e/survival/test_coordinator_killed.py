"""A coordinator that is killed at every phase of a round: nothing is lost or counts twice."""

import pytest

from tests.e2e.survival.harness import (
    Crash,
    Miscounted,
    Process,
    Site,
    audit,
    until,
    until_said,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("survival")]

_CHUNK = "fedlearn.door.transfers:Transfers._write_chunk"
_STEP = "fedlearn.algorithms.server_optimizers:ServerSgd.step"
_EVALUATE = "fedlearn.simulation.evaluation:CentralEvaluator.evaluate"

PHASES = [
    Crash("before the journal", "fedlearn.store.journal:StoredJournal.open", "before"),
    Crash("journaled, nothing sent", "fedlearn.store.journal:StoredJournal.open", "after"),
    Crash("logs opened, nothing sent", "fedlearn.door.spool:ReplyLog.__init__", "after"),
    Crash("sent", "fedlearn.door.tasks:Desk.open", "after"),
    Crash("in the middle of a download", _CHUNK, "after", 3),
    Crash("clients train", "fedlearn.door.tasks:Desk.progressed", "after", 2),
    Crash("in the middle of an upload", "fedlearn.door.spool:PartialUpload.write", "after", 3),
    Crash("upload complete, not logged", "fedlearn.door.spool:PartialUpload.finish", "after", 2),
    Crash("before the log", "fedlearn.door.spool:ReplyLog.append", "before", 2),
    Crash("logged, no receipt", "fedlearn.door.spool:ReplyLog.append", "after"),
    Crash("read, not folded", "fedlearn.rounds.plain:validated", "after", 2),
    Crash("folded, no receipt", "fedlearn.door.tasks:Desk.consumed", "before"),
    Crash("a receipt is on its way", "fedlearn.door.tasks:Desk.consumed", "after"),
    Crash("between folds", "fedlearn.rounds.plain:_Fold.add", "after", 2),
    Crash("closing, not written down", "fedlearn.door.spool:ReplyLog.close", "before"),
    Crash("closed", "fedlearn.door.spool:ReplyLog.close", "after"),
    Crash("before the server step", _STEP, "before"),
    Crash(
        "before the evaluation",
        _EVALUATE,
        "before",
    ),
    Crash("clients evaluate", "fedlearn.door.tasks:Desk.result", "after", 2),
    Crash("before the commit", "fedlearn.store.runs:StoredRun.commit", "before", 2),
    Crash("half a checkpoint", "fedlearn.store.checkpoints:_serialize", "after"),
    Crash("checkpoint without a row", "fedlearn.store.runs:write_checkpoint", "after"),
    Crash(
        "rows that are not committed", "fedlearn.store.runs:StoredRun._replace_checkpoints", "after"
    ),
    Crash(
        "committed, journal not cleaned", "fedlearn.store.journal:StoredJournal.forget", "before"
    ),
    Crash("committed, spool not cleaned", "fedlearn.door.channel:forget_exchanges", "before"),
]

#: In the order of a round: what one kill has left is where the next one finds it.
ONE_ROUND = [
    Crash("before the journal", "fedlearn.store.journal:StoredJournal.open", "before"),
    Crash("journaled, nothing sent", "fedlearn.store.journal:StoredJournal.open", "after"),
    Crash("logs opened, nothing sent", "fedlearn.door.spool:ReplyLog.__init__", "after"),
    Crash("sent", "fedlearn.door.tasks:Desk.open", "after"),
    Crash("before the log", "fedlearn.door.spool:ReplyLog.append", "before"),
    Crash("logged, no receipt", "fedlearn.door.spool:ReplyLog.append", "after"),
    Crash("read again, not folded", "fedlearn.rounds.plain:validated", "after"),
    Crash("between folds", "fedlearn.rounds.plain:_Fold.add", "after", 2),
    Crash("closed", "fedlearn.door.spool:ReplyLog.close", "after"),
    Crash(
        "rows that are not committed", "fedlearn.store.runs:StoredRun._replace_checkpoints", "after"
    ),
    Crash("committed, spool not cleaned", "fedlearn.door.channel:forget_exchanges", "before"),
]


def test_the_books_of_a_run_that_nobody_disturbs_are_right(site: Site) -> None:
    """The control of all others: three clients, each round one third of each."""
    site.configure(num_rounds=2, evaluated=3)
    coordinator = site.serving()
    site.populate()
    assert coordinator.wait() == 0
    audit(site)
    assert all(site.told(number, "accepted") == {0, 1} for number in range(3))


@pytest.mark.parametrize("sabotage", ["forget replies", "count twice"])
def test_the_books_show_what_a_worse_coordinator_would_do(site: Site, sabotage: str) -> None:
    """The control of the audit: one that loses what it acknowledged, one that counts it again."""
    site.configure(num_rounds=1, min_reports=2, deadline_s=15.0, recovery_grace_s=12.0)
    first = site.serving()
    with site.holding(2):
        clients = site.populate()
        until(lambda: site.told(0, "accepted") == {0} and site.told(1, "accepted") == {0})
        first.kill()
    clients[0].kill()
    second = site.serving(sabotages=[sabotage])
    assert second.wait() == 0, second.tail()
    with pytest.raises(Miscounted):
        audit(site)


def walk(site: Site, *, is_armed: bool, phases: list[Crash]) -> None:
    """Kill one coordinator after the other, each at its phase; what is committed must stay."""
    committed, clients = site.rounds(), list[Process]()
    for phase in phases:
        process = site.coordinator(crash=phase, is_armed=is_armed)
        until_said(process, "serving")
        if not clients:
            clients = site.populate()
        assert process.wait() is None, f"{phase.phase}: it went on\n{process.tail()}"
        assert process.has_crashed_itself(), f"{phase.phase}: {process.tail()}"
        latest = site.rounds()
        assert latest[: len(committed)] == committed, phase.phase
        committed = latest


def finish(site: Site) -> Process:
    """Let the run go to its end, and check its books."""
    last = site.coordinator()
    assert last.wait() == 0, last.tail()
    audit(site)
    return last


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_kill_in_any_phase_loses_nothing(
    site: Site, database: str, request: pytest.FixtureRequest
) -> None:
    """Another round for each phase."""
    if database == "postgresql":
        site.store_url = request.getfixturevalue("postgresql_url")
    site.configure(num_rounds=len(PHASES) + 1, evaluated=3)
    walk(site, is_armed=False, phases=PHASES)
    finish(site)
    assert all(record.attempt == 0 for record in site.rounds())


def test_one_round_outlives_a_kill_in_each_of_its_phases(site: Site) -> None:
    """With replies that travel whole: a client trains once, whoever asks it again."""
    site.configure(num_rounds=2, ballast=0)
    walk(site, is_armed=True, phases=ONE_ROUND)
    finish(site)
    assert all(record.attempt == 0 for record in site.rounds())
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3
