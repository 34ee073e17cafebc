"""The store keeps exactly what was committed, on SQLite and PostgreSQL, despite crashes."""

import json
import math
import os
import resource
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from traceback import format_exception
from uuid import uuid4

import pytest
import torch
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, create_engine, inspect, text

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.randomness import Seed
from fedlearn.errors import CorruptCheckpoint, NewerStore, StoreError, StoreUnavailable
from fedlearn.rounds.records import (
    Checkpoint,
    Outcome,
    RoundRecord,
    RunStatus,
    RunStore,
)
from fedlearn.store import migrations
from fedlearn.store.checkpoints import write_checkpoint
from fedlearn.store.lease import deploy
from fedlearn.store.names import memorable_names
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.store.schema import Base
from tests import records
from tests.processes import Launcher, until

RUN = replace(
    records.RUN,
    config={"seed": 1, "cohort": {"num_wanted": 10}, "floor": math.inf},
    config_hash="0" * 64,
    versions={"fedlearn": "0.1.0"},
)

# Continues a run, committing one round after the other, until it is killed.
COMMIT_FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
import torch
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.store.runs import Database
from fedlearn.core.participations import Participation, Status, Participations

url, runs_dir, name = sys.argv[1:]
run = Database.open(url, runs_dir=Path(runs_dir)).run(name)
last = run.load()
for k in count(last.round_num if last else 0):
    reports = tuple(Participation(c, Status.REPORTED, 1.0, 5, 0.5, "") for c in range(20))
    run.append(RoundRecord(
        round_num=k, attempt=0, outcome=Outcome.AGGREGATED,
        participations=Participations.of(reports),
        train_loss=0.5, duration_s=1.0, virtual_s=k + 1.0, seconds=0.1, metrics={"k": k},
    ))
    tensors = {"params/w": torch.full((1000,), k + 1.0)}
    run.commit(Checkpoint(round_num=k + 1, tensors=tensors, values={"k": k + 1}))
    print(k + 1, flush=True)
"""

# Opens the database, then creates runs named from one seed as fast as it can.
CREATE_MANY = """
import sys
from dataclasses import replace
from pathlib import Path
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.runs import Database
from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed

url, runs_dir, num_runs, go = sys.argv[1:]
record = RunRecord(
    name="", status=RunStatus.RUNNING, error="", created_utc="2026-01-02T03:04:05Z",
    num_rounds=1, config={}, config_hash="", versions={},
)
print("ready", flush=True)
while not Path(go).exists():
    SystemClock().sleep(0.001)
with Database.open(url, runs_dir=Path(runs_dir)) as database:
    for _ in range(int(num_runs)):
        print(database.create_named(record, seed=Seed(1)).name, flush=True)
"""

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
NATURAL = st.integers(min_value=0, max_value=2**63 - 1)
FLOATS = st.floats().map(lambda value: value + 0.0)  # SQLite has no -0.0
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
PARTICIPATIONS = st.builds(
    Participation,
    client_id=INT64.map(ClientId),
    status=st.sampled_from(Status),
    duration_s=FLOATS,
    num_examples=NATURAL,
    loss=FLOATS,
    reason=PLAIN_TEXT,
)
ROUNDS = st.builds(
    RoundRecord,
    round_num=st.just(0),
    attempt=st.integers(min_value=0, max_value=99),
    outcome=st.sampled_from(Outcome),
    participations=st.lists(PARTICIPATIONS, max_size=4).map(Participations.of),
    train_loss=FLOATS,
    duration_s=FLOATS,
    virtual_s=FLOATS,
    seconds=FLOATS,
    metrics=st.dictionaries(PLAIN_TEXT, FLOATS, max_size=4),
    train_metrics=st.dictionaries(PLAIN_TEXT, FLOATS, max_size=4),
)


@pytest.fixture
def run(database: Database) -> StoredRun:
    """A new run."""
    return database.create(RUN)


@pytest.fixture
def sqlite_run(tmp_path: Path) -> Iterator[StoredRun]:
    """A new run in SQLite, for tests that do not depend on the database."""
    url = sqlite_url(tmp_path / "runs.db")
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        yield database.create(RUN)


def a_round(round_num: int, *, num_clients: int = 3) -> RoundRecord:
    """Return the record of a round in which all clients reported."""
    return RoundRecord(
        round_num=round_num,
        attempt=0,
        outcome=Outcome.AGGREGATED,
        participations=Participations.of(
            Participation(ClientId(k), Status.REPORTED, 1.5 * k, 10, 0.5, "")
            for k in range(num_clients)
        ),
        train_loss=0.5,
        duration_s=3.0,
        virtual_s=3.0 * (round_num + 1),
        seconds=0.01,
        metrics={"accuracy": 0.5},
        train_metrics={"accuracy": 0.75},
    )


def a_checkpoint(round_num: int, *, size: int = 8) -> Checkpoint:
    """Return a checkpoint whose weights all equal its round number."""
    weights = torch.full((size,), float(round_num))
    return Checkpoint(round_num=round_num, tensors={"params/w": weights}, values={"k": round_num})


def advance(run: StoredRun, *, to: int, start: int = 0) -> None:
    """Append and commit rounds one by one."""
    for round_num in range(start, to):
        run.append(a_round(round_num))
        run.commit(a_checkpoint(round_num + 1))


def assert_consistent(run: StoredRun) -> int:
    """Check that rounds and checkpoint agree; return the number of finished rounds."""
    checkpoint = run.load()
    finished = 0 if checkpoint is None else checkpoint.round_num
    assert [record.round_num for record in run.rounds()] == list(range(finished))
    if checkpoint is not None:
        assert set(checkpoint.tensors["params/w"].tolist()) == {finished}
        assert checkpoint.values == {"k": finished}
    return finished


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- what goes in comes out ---------------------------------------------------------------


@given(records=st.lists(ROUNDS, max_size=3))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rounds_come_back_as_they_went_in(database: Database, records: list[RoundRecord]) -> None:
    """Including NaN, infinities, order of arrival, and text."""
    numbered = [replace(record, round_num=k) for k, record in enumerate(records)]
    run = database.create(replace(RUN, name=f"property-{uuid4().hex}"))
    for record in numbered:
        run.append(record)
    run.commit(a_checkpoint(len(numbered)))
    assert [comparable(record) for record in run.rounds()] == [comparable(r) for r in numbered]


def comparable(record: RoundRecord) -> str:
    """Return the record as text, so that NaN equals NaN; metrics are sorted."""
    metrics, in_training = (
        dict(sorted(each.items())) for each in (record.metrics, record.train_metrics)
    )
    return repr(replace(record, metrics=metrics, train_metrics=in_training))


def test_a_run_comes_back_as_it_went_in(database: Database, run: StoredRun) -> None:
    """Read directly, by name and from the list."""
    assert run.record == RUN
    assert database.run(RUN.name).record == RUN
    assert database.runs() == [RUN]


def test_runs_are_listed_oldest_first(database: Database) -> None:
    """They are not sorted by name."""
    for name in ("b", "c", "a"):
        database.create(replace(RUN, name=name))
    assert [record.name for record in database.runs()] == ["b", "c", "a"]


def test_the_folder_of_a_run_has_its_configuration(run: StoredRun) -> None:
    """It can be read without the database."""
    assert json.loads((run.path / "config.json").read_text()) == RUN.config


def test_the_status_of_a_run_is_recorded(run: StoredRun) -> None:
    """As failed with the reason, running again, and done."""
    run.finish(RunStatus.FAILED, error="3 reports, minimum 5")
    assert (run.record.status, run.record.error) == (RunStatus.FAILED, "3 reports, minimum 5")
    run.finish(RunStatus.RUNNING, error="")
    assert (run.record.status, run.record.error) == (RunStatus.RUNNING, "")
    run.finish(RunStatus.DONE, error="")
    assert run.record.status is RunStatus.DONE


def test_the_last_rounds_are_summed_up(run: StoredRun) -> None:
    """The summaries equal those of the full records, which need not be read."""
    for round_num in range(5):
        run.append(replace(a_round(round_num, num_clients=round_num), train_loss=math.nan))
    last = a_round(5)
    failed = Participation(ClientId(9), Status.FAILED, 1.0, 0, math.nan, "no data")
    run.append(replace(last, participations=Participations.of([*last.participations, failed])))
    run.commit(a_checkpoint(6))
    summaries = run.round_summaries(3)
    assert [each.round_num for each in summaries] == [3, 4, 5]
    for summary, record in zip(summaries, run.rounds()[3:], strict=True):
        assert summary.counts == {status: record.count(status) for status in Status}
        assert repr(summary.train_loss) == repr(record.train_loss)
        assert (summary.outcome, summary.metrics) == (record.outcome, record.metrics)
        assert summary.train_metrics == record.train_metrics
        assert (summary.duration_s, summary.seconds) == (record.duration_s, record.seconds)
    assert len(run.round_summaries(99)) == 6


def test_a_run_without_rounds_has_nothing_to_sum_up(run: StoredRun) -> None:
    """A round without participants has counts of zero."""
    assert run.round_summaries(3) == []
    run.append(a_round(0, num_clients=0))
    run.commit(a_checkpoint(1))
    assert run.round_summaries(3)[0].counts == dict.fromkeys(Status, 0)


def test_text_that_a_database_refuses_is_escaped(run: StoredRun) -> None:
    """A client's failure may contain any text; the round must be recorded anyway."""
    hostile = Participation(ClientId(1), Status.FAILED, 1.0, 0, math.nan, "a\0b\ud800c")
    run.append(replace(a_round(0), participations=Participations.of([hostile])))
    run.commit(a_checkpoint(1))
    assert run.rounds()[0].participations[0].reason == r"a\x00b\ud800c"


def test_a_stored_run_is_what_the_run_loop_asks_for(run: StoredRun) -> None:
    """It implements the protocol, checked by mypy. Before the first commit it is empty."""
    store: RunStore = run
    assert store is run
    assert run.load() is None


# -- commits ------------------------------------------------------------------------------


def test_appended_rounds_become_durable_with_the_next_commit(
    database: Database, run: StoredRun
) -> None:
    """Not earlier, or they would be ahead of the checkpoint."""
    run.append(a_round(0))
    run.append(a_round(1))
    assert database.run(RUN.name).rounds() == []
    run.commit(a_checkpoint(2))
    assert assert_consistent(database.run(RUN.name)) == 2


def test_two_checkpoints_are_kept_and_older_files_removed(run: StoredRun) -> None:
    """Files left by a crash are removed too."""
    (run.path / "checkpoints" / ".round-000009-0123.safetensors.tmp").touch()
    write_checkpoint(a_checkpoint(99), folder=run.path / "checkpoints")
    advance(run, to=4)
    assert [file.round_num for file in run.checkpoints()] == [3, 4]
    assert set((run.path / "checkpoints").iterdir()) == {file.path for file in run.checkpoints()}


def test_a_second_commit_of_a_round_takes_the_place_of_the_first(run: StoredRun) -> None:
    """The first file is never overwritten, only removed once the second is committed."""
    advance(run, to=2)
    first = run.checkpoints()[-1]
    run.commit(replace(a_checkpoint(2), values={"k": 2, "stopped": True}))
    assert [file.round_num for file in run.checkpoints()] == [1, 2]
    assert run.checkpoints()[-1].path != first.path
    assert not first.path.exists()
    loaded = run.load()
    assert loaded is not None
    assert loaded.values == {"k": 2, "stopped": True}


def test_a_round_beyond_the_checkpoint_is_refused(sqlite_run: StoredRun) -> None:
    """After a resume it would be run and recorded twice."""
    sqlite_run.append(a_round(1))
    with pytest.raises(ValueError, match="round 1 is not finished by a checkpoint of 1 rounds"):
        sqlite_run.commit(a_checkpoint(1))
    assert sqlite_run.load() is None


def test_a_second_process_with_the_same_run_is_told(database: Database, run: StoredRun) -> None:
    """The second process to commit a round gets an error; the first commit is kept."""
    other = database.run(RUN.name)
    advance(run, to=1)
    other.append(a_round(0, num_clients=1))
    with pytest.raises(StoreError, match=r"another process writes to the same run.*after round 1"):
        other.commit(a_checkpoint(1))
    assert len(run.rounds()[0].participations) == 3
    assert assert_consistent(run) == 1


def test_a_model_is_loaded_by_its_own_names(sqlite_run: StoredRun) -> None:
    """Without a best model it is the last one; without any checkpoint it is an error."""
    for is_best in (True, False):
        with pytest.raises(StoreError, match=r"no checkpoint yet.*fedlearn resume calm-otter-17"):
            sqlite_run.weights(best=is_best)
    last = {"params/w": torch.tensor([1.0]), "server/momentum": torch.tensor([7.0])}
    sqlite_run.commit(Checkpoint(round_num=1, tensors=last, values={}))
    assert sqlite_run.weights(best=True) == {"w": torch.tensor([1.0])}
    best = last | {"best/w": torch.tensor([2.0])}
    sqlite_run.commit(Checkpoint(round_num=2, tensors=best, values={}))
    assert sqlite_run.weights(best=True) == {"w": torch.tensor([2.0])}
    assert sqlite_run.weights(best=False) == {"w": torch.tensor([1.0])}


def test_connections_that_are_all_in_use_pass(database_url: str, tmp_path: Path) -> None:
    """The pool's error, unlike the driver's, must also count as a temporary outage."""
    Database.open(database_url, runs_dir=tmp_path / "runs").close()
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.01)
    with Database(engine, runs_dir=tmp_path / "runs") as database:
        with engine.connect(), pytest.raises(StoreUnavailable, match="connections of this process"):
            database.runs()
        assert database.runs() == []


# -- damage -------------------------------------------------------------------------------


def test_a_run_goes_back_from_a_damaged_checkpoint(run: StoredRun) -> None:
    """The error names the command; the rounds since are dropped and run again."""
    advance(run, to=2)
    for round_num in (2, 3):
        run.append(a_round(round_num))
    run.commit(a_checkpoint(4))
    damage(run.checkpoints()[-1].path)
    with pytest.raises(CorruptCheckpoint, match="fedlearn resume calm-otter-17 --from-previous"):
        run.load()
    assert run.rewind().round_num == 2
    assert assert_consistent(run) == 2
    advance(run, start=2, to=4)
    assert assert_consistent(run) == 4


def test_checkpoints_are_kept_by_a_rule_and_the_run_goes_back_to_any_of_them(
    run: StoredRun,
) -> None:
    """The last two, every third, and the best are kept; rounds after a rollback are dropped."""
    run.retention = Retention(keep_last=2, keep_every=3, keep_best=True)
    for round_num in range(1, 9):
        run.append(a_round(round_num - 1))
        best = {"best_round": min(round_num, 4)}
        run.commit(replace(a_checkpoint(round_num), values=best))
    kept = [3, 4, 6, 7, 8]
    assert [file.round_num for file in run.checkpoints()] == kept
    assert len(list((run.path / "checkpoints").iterdir())) == len(kept)
    run.finish(RunStatus.DONE, error="")
    with pytest.raises(
        StoreError, match=r"no earlier checkpoint after 5; .*earlier ones after 3, 4, 6, 7"
    ):
        run.rewind(to=5)
    with pytest.raises(StoreError, match=r"has 8 rounds and no earlier checkpoint after 8"):
        run.rewind(to=8)
    assert (len(run.rounds()), run.record.status) == (8, RunStatus.DONE), "nothing is forgotten"
    assert run.rewind(to=4).round_num == 4
    assert [file.round_num for file in run.checkpoints()] == [3, 4]
    assert (len(run.rounds()), run.record.status) == (4, RunStatus.RUNNING)
    run.append(a_round(4))
    run.commit(a_checkpoint(5))
    assert [file.round_num for file in run.checkpoints()] == [3, 4, 5]
    assert len(list((run.path / "checkpoints").iterdir())) == 3


def test_without_an_earlier_checkpoint_there_is_no_way_back(sqlite_run: StoredRun) -> None:
    """The suggested fixes must not mention a checkpoint that does not exist."""
    advance(sqlite_run, to=1)
    damage(sqlite_run.checkpoints()[-1].path)
    with pytest.raises(CorruptCheckpoint, match="there is no earlier one: start the run again"):
        sqlite_run.load()
    with pytest.raises(StoreError, match="no earlier checkpoint to go back to"):
        sqlite_run.rewind()


def test_nothing_is_forgotten_for_a_checkpoint_that_is_damaged_too(sqlite_run: StoredRun) -> None:
    """The rounds are kept, since they are at least a record."""
    advance(sqlite_run, to=3)
    damage(sqlite_run.checkpoints()[0].path)
    with pytest.raises(CorruptCheckpoint, match="there is no earlier one"):
        sqlite_run.rewind()
    assert assert_consistent(sqlite_run) == 3


def test_a_full_disk_fails_the_commit_and_nothing_else(run: StoredRun) -> None:
    """The kernel refuses the file; once there is space, the same commit succeeds."""
    advance(run, to=2)
    run.append(a_round(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError) as error:
            run.commit(a_checkpoint(3, size=50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for part in ("cannot write", "round-000003", "after round 2", "resume calm-otter-17"):
        assert part in str(error.value)
    assert len(list((run.path / "checkpoints").iterdir())) == 2
    assert assert_consistent(run) == 2
    run.commit(a_checkpoint(3))
    assert assert_consistent(run) == 3


def test_a_full_disk_under_the_database_rolls_the_commit_back(sqlite_run: StoredRun) -> None:
    """The checkpoint file fits but the rows do not, so neither is committed."""
    advance(sqlite_run, to=2)
    sqlite_run.append(a_round(2, num_clients=10_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StoreError, match=r"runs\.db.*free some space.*after round 2"):
            sqlite_run.commit(a_checkpoint(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert assert_consistent(sqlite_run) == 2
    sqlite_run.commit(a_checkpoint(3))
    assert assert_consistent(sqlite_run) == 3


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 600 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system is not permitted here; RLIMIT_FSIZE tests the same")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_run_fills_a_real_disk_and_goes_on_when_there_is_space(tiny_disk: Path) -> None:
    """Both the database and the files are on the full disk."""
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(100_000))
    with Database.open(sqlite_url(tiny_disk / "runs.db"), runs_dir=tiny_disk) as database:
        run = database.create(RUN)
        with pytest.raises(StoreError, match=r"(full|No space).*is not affected"):
            advance(run, to=10_000)
        finished = assert_consistent(run)
        assert finished > 1
        ballast.unlink()
        run.commit(a_checkpoint(finished + 1))
        assert assert_consistent(run) == finished + 1


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_goes_on(
    launcher: Launcher, database_url: str, database: Database, run: StoredRun, tmp_path: Path
) -> None:
    """Kill -9 during a loop of commits, three times: no committed round is lost."""
    arguments = [database_url, str(database.runs_dir), RUN.name]
    script = tmp_path / "commit.py"
    script.write_text(COMMIT_FOR_EVER)
    finished = 0
    for num_commits in (1, 8, 15):
        stem = tmp_path / f"committing-{num_commits}"
        with closing(launcher.launch(stem, *arguments, script=script, environ=os.environ)) as child:
            child.wait_for_lines(num_commits)
            child.kill()
            said = [int(line) for line in child.out().split()]
        assert said == list(range(finished + 1, finished + 1 + len(said)))
        finished = assert_consistent(run)
        assert finished - said[-1] in {0, 1}
    advance(run, start=finished, to=finished + 1)
    assert set((run.path / "checkpoints").iterdir()) == {file.path for file in run.checkpoints()}


# -- names --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_create_runs_at_once(
    launcher: Launcher, database_url: str, tmp_path: Path
) -> None:
    """They also create the database at the same time; every run gets a unique name."""
    script = tmp_path / "create.py"
    script.write_text(CREATE_MANY)
    arguments = (database_url, str(tmp_path / "runs"), "20", str(tmp_path / "go"))
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                closing(
                    launcher.launch(
                        tmp_path / f"creating-{number}",
                        *arguments,
                        script=script,
                        environ=os.environ,
                    )
                )
            )
            for number in range(2)
        ]
        until(lambda: all(child.out() == "ready\n" for child in children))
        (tmp_path / "go").touch()
        assert [child.wait() for child in children] == [0, 0]
        names = [name for child in children for name in child.out().split()[1:]]
    assert set(names) == set(islice(memorable_names(Seed(1)), 40))
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        assert {record.name for record in database.runs()} == set(names)


def test_memorable_names_differ_from_seed_to_seed() -> None:
    """A name is two words and a number."""
    names = [next(memorable_names(Seed(k))) for k in range(200)]
    assert len(set(names)) > 195
    assert all(name.count("-") == 2 and name.isascii() for name in names)


def test_a_name_is_taken_once(database: Database, run: StoredRun) -> None:
    """Either a row or a folder of this name is enough to refuse it."""
    advance(run, to=1)
    run.path.rename(run.path.with_name("moved"))
    with pytest.raises(StoreError, match="there is a run called 'calm-otter-17' already"):
        database.create(RUN)
    assert not run.path.exists()
    with pytest.raises(StoreError, match="moved exists already"):
        database.create(replace(RUN, name="moved"))
    assert database.runs() == [RUN]
    assert len(list((database.runs_dir / "moved" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("left", ["", "checkpoints/", "checkpoints/ .config.json.01.tmp"])
def test_what_a_killed_creation_has_left_takes_no_name(database: Database, left: str) -> None:
    """A deployed run has a fixed name, so otherwise every later start would fail."""
    folder = database.runs_dir / RUN.name
    folder.mkdir()
    for name in left.split():
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
    advance(database.create(RUN), to=1)
    assert json.loads((folder / "config.json").read_text()) == RUN.config
    assert assert_consistent(database.run(RUN.name)) == 1


def test_a_run_that_cannot_be_made_leaves_nothing(database: Database) -> None:
    """Once there is space, creating it succeeds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*config.json"):
            database.create(replace(RUN, config={"large": "x" * 150_000}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (database.runs(), list(database.runs_dir.iterdir())) == ([], [])
    database.create(RUN)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a b", "a\n", "x" * 65])
def test_a_name_that_cannot_name_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Especially a name that leads out of the folder."""
    runs_dir = tmp_path / "runs"
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=runs_dir) as database:
        with pytest.raises(StoreError, match="a run cannot be called"):
            database.create(replace(RUN, name=name))
        assert database.runs() == []
    assert list(runs_dir.iterdir()) == []


def test_an_unknown_run_suggests_the_nearest(database: Database, run: StoredRun) -> None:
    """The message also says how to list runs."""
    with pytest.raises(StoreError, match=r"did you mean 'calm-otter-17'\? `fedlearn runs`"):
        database.run("calm-oter-17")
    with pytest.raises(StoreError, match="no run called 'zzz'; `fedlearn runs`"):
        database.run("zzz")


# -- the schema ---------------------------------------------------------------------------


def differences(url: str, metadata: MetaData) -> list[object]:
    """Return the changes that Alembic would make for the database to match ``metadata``."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
    engine.dispose()
    return list(found)


def alembic_config(**attributes: object) -> Config:
    config = Config(attributes=attributes)
    config.set_main_option("script_location", "fedlearn.store:migrations")
    config.set_main_option("path_separator", "os")
    return config


def describe(url: str) -> dict[str, dict[str, list[str]]]:
    """Return the columns, keys and indexes of each table, in no particular order.

    Without defaults: revisions need them for existing rows, and the product writes all columns.
    """
    engine = create_engine(url)
    found = inspect(engine)
    tables = {
        table: {
            "columns": sorted(
                f"{each['name']} {each['type']} {each['nullable']}"
                for each in found.get_columns(table)
            ),
            "primary key": [str(found.get_pk_constraint(table))],
            "foreign keys": sorted(str(each) for each in found.get_foreign_keys(table)),
            "unique": sorted(str(each) for each in found.get_unique_constraints(table)),
            "indexes": sorted(str(each) for each in found.get_indexes(table)),
            "checks": sorted(str(each) for each in found.get_check_constraints(table)),
        }
        for table in found.get_table_names()
    }
    engine.dispose()
    return tables


def test_the_revisions_lead_to_the_tables_of_this_version(database_url: str) -> None:
    """Columns, types, nullability and keys agree. Control: the comparison sees an added column."""
    engine = create_engine(database_url)
    with engine.begin() as connection:
        migrations.upgrade(connection)
    engine.dispose()
    assert differences(database_url, Base.metadata) == []
    other = MetaData()
    for table in Base.metadata.tables.values():
        table.to_metadata(other)
    other.tables["rounds"].append_column(Column("more", Integer))
    assert len(differences(database_url, other)) == 1


def test_a_new_database_is_as_the_revisions_would_make_it(
    database_url: str, database: Database
) -> None:
    """It is made without them, so they insert no rows, which it would lack."""
    made = describe(database_url)
    engine = create_engine(database_url)
    with engine.begin() as connection:
        version = connection.scalar(text("SELECT version_num FROM alembic_version"))
        Base.metadata.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
        migrations.upgrade(connection)
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == version
        for table in Base.metadata.tables.values():
            assert connection.execute(table.select()).first() is None, table.name
    engine.dispose()
    assert describe(database_url) == made


def test_the_revisions_are_those_that_lead_to_one_another() -> None:
    """The order by file name agrees with the order that the revisions declare."""
    scripts = ScriptDirectory.from_config(alembic_config())
    assert migrations.revisions()[::-1] == [each.revision for each in scripts.walk_revisions()]


def test_opening_twice_changes_nothing(database_url: str, run: StoredRun, tmp_path: Path) -> None:
    advance(run, to=2)
    with Database.open(database_url, runs_dir=tmp_path / "runs") as again:
        assert assert_consistent(again.run(RUN.name)) == 2


def test_a_database_of_the_version_before_is_migrated(
    database_url: str, run: StoredRun, tmp_path: Path
) -> None:
    """With its data; from revision 0001, which had no deployments."""
    advance(run, to=2)
    engine = create_engine(database_url)
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection=connection), "0001")
        assert "deployments" not in inspect(connection).get_table_names()
    engine.dispose()
    with Database.open(database_url, runs_dir=tmp_path / "runs") as again:
        assert assert_consistent(again.run(RUN.name)) == 2
        assert deploy(again, RUN.name).epoch == 0
    assert differences(database_url, Base.metadata) == []


def test_a_database_of_a_later_version_is_refused(
    database_url: str, database: Database, tmp_path: Path
) -> None:
    """Before anything is changed."""
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(NewerStore, match=r"revision '9999'.*upgrade fedlearn"):
        Database.open(database_url, runs_dir=tmp_path / "runs")


# -- opening ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs.db", "the store's URL is invalid"),
        ("mysql+pymysql://root@localhost/runs", r"'mysql\+pymysql' is not a supported database"),
        ("sqlite://", "lost with the process"),
        ("sqlite:///:memory:", "lost with the process"),
    ],
)
def test_a_url_that_is_no_store_is_refused(tmp_path: Path, url: str, message: str) -> None:
    """The message lists the supported URLs."""
    with pytest.raises(StoreError, match=message + r".*sqlite:///FILE.*postgresql\+psycopg"):
        Database.open(url, runs_dir=tmp_path)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("me:hunter2@127.0.0.1:1/runs", r"me:\*\*\*@127.*check that the server runs"),
        ("me:hunter%402@127.0.0.1:1/runs", r"me:\*\*\*@127.*check that the server runs"),
        ("me@127.0.0.1:1/runs?password=hunter2", r"password=\*\*\*.*check that the server runs"),
        ("me@127.0.0.1:1/runs?sslpassword=hunter2", r"sslpassword=\*\*\*"),
        ("me:pass@hunter2@127.0.0.1:1/runs", "more than one '@'.*%40"),
        ("me:pass@hunter2:1/runs@127.0.0.1:1/runs", "more than one '@'.*%40"),
        ("me:pass@word@hunter2@127.0.0.1:1/runs", "more than one '@'.*%40"),
        ("me:hunter2@127.0.0.1:notaport/runs", "the port in the store's URL is not a number"),
        ("me:hunter2", "the port in the store's URL is not a number"),
    ],
)
def test_no_error_says_the_password(tmp_path: Path, rest: str, message: str) -> None:
    """Nor do its causes, which a traceback shows. Nothing listens on port 1."""
    with pytest.raises(StoreError, match=message) as error:
        Database.open(f"postgresql+psycopg://{rest}", runs_dir=tmp_path)
    assert "hunter" not in "".join(format_exception(error.value, chain=True)).replace(__file__, "")


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    """The file may belong to the user."""
    path = tmp_path / "thesis.db"
    path.write_text("Chapter one. " * 1000)
    with pytest.raises(StoreError, match=r"thesis\.db.*not a database.*move it away"):
        Database.open(sqlite_url(path), runs_dir=tmp_path)
    assert path.read_text().startswith("Chapter one. ")


def test_a_locked_database_says_who_to_wait_for(tmp_path: Path) -> None:
    """As when another process writes for longer than the timeout."""
    path = tmp_path / "runs.db"
    with Database.open(sqlite_url(path) + "?timeout=0", runs_dir=tmp_path) as database:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert database.runs() == []
            with pytest.raises(StoreError, match=r"database is locked.*let it finish"):
                database.create(RUN)
        assert list(tmp_path.glob("calm*")) == []
        database.create(RUN)


def test_a_read_only_database_can_be_read(tmp_path: Path) -> None:
    """Only writes fail."""
    path = tmp_path / "runs.db"
    with Database.open(sqlite_url(path), runs_dir=tmp_path) as database:
        database.create(RUN)
    url = f"sqlite:///file:{path}?mode=ro&uri=true"
    with Database.open(url, runs_dir=tmp_path) as database:
        assert database.runs() == [RUN]
        with pytest.raises(StoreError, match=r"readonly database.*writable"):
            database.run(RUN.name).finish(RunStatus.DONE, error="")


def test_a_runs_folder_that_is_a_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    """Nothing is created next to it."""
    (tmp_path / "runs").touch()
    with pytest.raises(StoreError, match=r"/runs: File exists"):
        Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_who_fails_several_times_in_a_buffer_has_failed_in_one_round(run: StoredRun) -> None:
    """The same count as by a live coordinator. Control: it fails in another round."""
    failed = Participation(ClientId(1), Status.FAILED, 1.0, reason="RuntimeError")
    reported = Participation(ClientId(0), Status.REPORTED, 1.0)
    for round_num in range(2):
        rows = Participations.of([failed, failed, reported, failed])
        run.append(replace(a_round(round_num), participations=rows))
        run.commit(a_checkpoint(round_num + 1))
        assert run.load_failing() == {1: (round_num + 1, "RuntimeError")}


def test_who_fails_in_a_row_is_on_record(database: Database, run: StoredRun) -> None:
    """Failures since its last report count; rounds in which no client reported do not."""
    other = database.create(replace(RUN, name="other"))
    letters = {"r": Status.REPORTED, "f": Status.FAILED, "l": Status.LATE}
    by_client = {0: "rrrr-rr", 1: "frffflf", 2: "ff-ff-r", 3: "--f-f-l"}
    for each in (run, other):
        for round_num in range(7 if each is run else 1):
            ended = [
                Participation(ClientId(k), letters[row[round_num]], 1.0, reason=f"in {round_num}")
                for k, row in by_client.items()
                if row[round_num] != "-"
            ]
            asked = Participations.of(ended)
            each.append(replace(a_round(round_num), participations=asked))
        each.commit(a_checkpoint(7))
    assert run.load_failing() == {1: (3, "in 6"), 3: (1, "in 2")}
    assert other.load_failing() == {1: (1, "in 0"), 2: (1, "in 0")}


def test_what_clients_ran_is_recorded_once_a_round(run: StoredRun) -> None:
    """A round that is collected again replaces what was recorded of it, and of no other."""
    run.save_trainers({})
    assert run.load_trainers() == {}
    run.save_trainers({(0, ClientId(1)): "site:a", (0, ClientId(2)): "site:b"})
    run.save_trainers({(0, ClientId(2)): "bundle:c", (1, ClientId(1)): "bundle:c"})
    assert run.load_trainers() == {
        (0, ClientId(1)): "site:a",
        (0, ClientId(2)): "bundle:c",
        (1, ClientId(1)): "bundle:c",
    }
