"""Deletion of runs: what goes, what stays, and the certificate."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from sqlalchemy import func, select

from fedlearn.core.clock import SystemClock
from fedlearn.deployment import deletion
from fedlearn.deployment.audit_log import verify_log
from fedlearn.deployment.deletion import delete_run, plan_deletion
from fedlearn.errors import DeploymentError, RunHeld, StoreError
from fedlearn.experiment.releases import release_model
from fedlearn.rounds.records import Checkpoint, RunRecord, RunStatus
from fedlearn.rounds.scheduling import QueueState, Submission, explain_waits
from fedlearn.store.audit import read_entries
from fedlearn.store.lease import Lease, deploy
from fedlearn.store.queue import RunQueue
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.runs import Database, StoredRun
from fedlearn.store.schema import CheckpointRow, DeploymentRow, RunRow

RUN = RunRecord(
    name="calm-otter-17",
    status=RunStatus.DONE,
    error="",
    created_utc="2026-01-01T00:00:00Z",
    num_rounds=1,
    config={},
    config_hash="0" * 64,
    versions={},
)


@pytest.fixture
def run(database: Database) -> StoredRun:
    """A run with a checkpoint, next to another one."""
    database.create(RunRecord(**{**vars(RUN), "name": "other"}))
    run = database.create(RUN)
    run.commit(Checkpoint(round_num=1, tensors={"params/w": torch.ones(2)}, values={}))
    return run


def actions(database: Database) -> list[str]:
    with database.reading() as session:
        return [each.action for each in read_entries(session)]


def test_a_run_goes_with_its_files_and_rows(
    database: Database, run: StoredRun, tmp_path: Path
) -> None:
    """Control: another run stays."""
    [file] = run.checkpoints()
    certificate = delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert not run.path.exists()
    assert [each.name for each in database.runs()] == ["other"]
    with database.reading() as session:
        for kind in (CheckpointRow, DeploymentRow):
            assert session.scalar(select(func.count()).select_from(kind)) == 0
        assert session.scalar(select(func.count()).select_from(RunRow)) == 1
    assert file.sha256 in certificate.entry.details
    assert certificate.checkpoint.hash == certificate.entry.hash
    assert certificate.checkpoint.is_signed_by(certificate.checkpoint.public_key)
    keys = tmp_path / "coordinator" / "authority"
    assert verify_log(database, keys, ()).problems == []


def test_releases_stay_unless_they_are_to_go(database: Database, run: StoredRun) -> None:
    """Tagged ones go, too, if it is asked for."""
    release = release_model(run, best=False).stored
    ReleaseStore(database).tag(release.short_id, "champion")
    assert plan_deletion(database, run.name).releases[0].signed.id == release.signed.id
    delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert [each.tags for each in ReleaseStore(database).list_all()] == [("champion",)]
    # A later run of the same name has other releases.
    again = database.create(RunRecord(**{**vars(RUN), "created_utc": "2026-02-02T00:00:00Z"}))
    again.commit(Checkpoint(round_num=1, tensors={"params/w": torch.ones(2)}, values={}))
    release_model(again, best=False)
    delete_run(database, run.name, with_releases=True, clock=SystemClock())
    assert [each.signed.id for each in ReleaseStore(database).list_all()] == [release.signed.id]


def test_a_run_that_a_process_runs_is_not_deleted(database: Database, run: StoredRun) -> None:
    """Nothing of it changes. Control: it is, once the process has ended."""
    before = actions(database)
    with run.hold(), pytest.raises(RunHeld):
        delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert actions(database) == before
    assert run.load() is not None
    delete_run(database, run.name, with_releases=False, clock=SystemClock())


def test_a_deployed_run_goes_with_the_updates_of_its_clients(
    database: Database, run: StoredRun, tmp_path: Path
) -> None:
    uploads = tmp_path / "coordinator" / "spool" / deploy(database, run.name).run_id
    uploads.mkdir(parents=True)
    (uploads / "update").write_bytes(b"update")
    certificate = delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert not uploads.exists()
    assert "/update" in certificate.entry.details


@pytest.mark.slow
def test_a_run_with_a_coordinator_is_not_deleted(database: Database, run: StoredRun) -> None:
    """Its lease is renewed while the command waits."""
    deploy(database, run.name)
    clock = _RenewingClock(database, run.name)
    with pytest.raises(DeploymentError, match="stop that coordinator first"):
        delete_run(database, run.name, with_releases=False, clock=clock)
    assert run.load() is not None


class _RenewingClock(SystemClock):
    """A clock under which another coordinator renews its lease at each sleep."""

    def __init__(self, database: Database, name: str) -> None:
        self._lease = Lease(database, name, holder="other", ttl_s=5.0, clock=SystemClock())
        assert self._lease.try_acquire()

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._lease.renew({})


def _delete_and_die(url: str, runs_dir: Path, name: str) -> None:
    """Delete a run, and die by SIGKILL when the first file is gone."""

    def die(folder: Path) -> None:
        next(folder.rglob("*.safetensors")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched, Database.open(url, runs_dir=runs_dir) as database:
        patched.setattr(deletion, "_remove_files", die)
        delete_run(database, name, with_releases=False, clock=SystemClock())


@pytest.mark.slow
def test_a_deletion_that_was_killed_is_finished_by_the_next(
    database: Database, database_url: str, run: StoredRun, tmp_path: Path
) -> None:
    """The digest of the file that was gone is in the first entry."""
    [file] = run.checkpoints()
    arguments = (database_url, tmp_path / "runs", run.name)
    process = multiprocessing.get_context("spawn").Process(target=_delete_and_die, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not file.path.exists()
    assert actions(database)[-1] == "run.deletion_began"
    delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert not run.path.exists()
    assert actions(database)[-3:] == ["run.deletion_began", "run.deletion_began", "run.deleted"]
    with database.reading() as session:
        began = [each for each in read_entries(session) if each.action == "run.deletion_began"]
    assert file.sha256 in began[0].details


def test_a_file_that_cannot_be_removed_leaves_the_rows(
    database: Database, run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry says that the run is gone. Control: the next attempt deletes it."""

    def refuse(folder: Path) -> None:
        raise StoreError(f"cannot remove {folder}")

    with monkeypatch.context() as patched:
        patched.setattr(deletion, "_remove_files", refuse)
        with pytest.raises(StoreError, match="cannot remove"):
            delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert "run.deleted" not in actions(database)
    delete_run(database, run.name, with_releases=False, clock=SystemClock())
    assert actions(database)[-1] == "run.deleted"


def test_the_queue_lets_go_of_a_deleted_run(database: Database) -> None:
    """But not while it is to run, or another run needs it: then its files stay."""
    queue = RunQueue(database, SystemClock())
    queue.submit(Submission(name="first", config={"num_rounds": 1}, start_from={}))
    queue.submit(Submission(name="second", config={"num_rounds": 1}, start_from={}, after="first"))
    queue.start("first")
    run = database.create(RunRecord(**{**vars(RUN), "name": "first"}), from_queue=True)
    run.commit(Checkpoint(round_num=1, tensors={"params/w": torch.ones(2)}, values={}))
    with pytest.raises(StoreError, match="cancel it first"):
        delete_run(database, "first", with_releases=False, clock=SystemClock())
    queue.finish("first", QueueState.FAILED, reason="x")
    with pytest.raises(StoreError, match="second, which is queued"):
        delete_run(database, "first", with_releases=False, clock=SystemClock())
    assert run.load() is not None
    queue.retry("first")
    queue.start("first")
    queue.finish("first", QueueState.DONE, reason="")
    delete_run(database, "first", with_releases=False, clock=SystemClock())
    [second] = queue.list()
    assert explain_waits([second]) == {"second": "next"}
    queue.submit(Submission(name="first", config={"num_rounds": 1}, start_from={}))
