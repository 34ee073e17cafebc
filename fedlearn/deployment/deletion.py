"""Delete a run with its files, and certify it in the audit log.

1. An entry of the audit log lists the files with their digests.
2. The files are removed.
3. One transaction removes the run's rows, adds the entry that certifies all this, and signs it.

A process that is killed in between leaves a run without some of its files, and so does an operator
elsewhere who loses the role; the same command then finishes, and the first entry still has all
digests.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlearn.core.clock import Clock
from fedlearn.core.files import explain_disk_errors
from fedlearn.deployment.idle_run import lease_idle_run
from fedlearn.deployment.places import upload_store_path
from fedlearn.errors import StoreError
from fedlearn.experiment.site import folder_of_run, keys_folder_of
from fedlearn.identity.audit import AuditEntry
from fedlearn.identity.audit_checks import LogCheckpoint
from fedlearn.identity.signing import SigningKey
from fedlearn.store.bundles import remove_bundle
from fedlearn.store.lease import find_deployment
from fedlearn.store.queue import weights_folder
from fedlearn.store.releases import ReleaseStore, StoredRelease
from fedlearn.store.runs import Database, StoredRun

#: The lock that a process holds while it runs or deletes a run; see fedlearn.store.holding.
_LOCK_FILE = "lock"


@dataclass(frozen=True, kw_only=True)
class DeletionCertificate:
    """The entry that certifies a deletion, and the signed checkpoint at it."""

    entry: AuditEntry
    checkpoint: LogCheckpoint

    def values(self) -> dict[str, Any]:  # Any: JSON values
        """Return it as JSON values."""
        return {
            "certificate": 1,
            "entry": self.entry.values(),
            "checkpoint": asdict(self.checkpoint),
        }


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
    """What a deletion would remove, and what it would leave.

    Attributes:
        files: Files of the run and uploads of its clients.
        releases: Models of the run in the registry.
    """

    files: tuple[Path, ...]
    releases: tuple[StoredRelease, ...]

    def values(self) -> dict[str, Any]:  # Any: JSON values
        """Return it as JSON values."""
        return {
            "files": list(map(str, self.files)),
            "num_bytes": sum(path.lstat().st_size for path in self.files),
            "num_releases": len(self.releases),
        }


def format_certificate(values: Mapping[str, object]) -> str:
    """Format the values of a :class:`DeletionCertificate` as a file to hand out."""
    return json.dumps(values, indent=2) + "\n"


def plan_deletion(database: Database, name: str) -> DeletionPlan:
    """List what :func:`delete_run` would remove; nothing is changed.

    Raises:
        StoreError: There is no such run.
    """
    stored = database.run(name)
    return DeletionPlan(
        files=tuple(path for folder in _folders_of(stored) for path in _files_in(folder)),
        releases=tuple(_releases_of(stored)),
    )


def delete_run(
    database: Database, name: str, *, with_releases: bool, clock: Clock
) -> DeletionCertificate:
    """Delete a run's files, the uploads of its clients, and its records.

    Privacy that was charged stays charged. With ``with_releases``, its models are removed from the
    registry, tagged ones, too.

    Raises:
        DeploymentError: A coordinator is running the run, or the signing key is damaged.
        RunHeld: A process is running it.
        StoreError: There is no such run, or something of it cannot be removed.
    """
    stored = database.run(name)
    config = stored.record.config
    key = SigningKey(keys_folder_of(folder_of_run(stored)))
    with _hold_idle(database, stored, clock=clock) as held:
        folders = _folders_of(held)
        releases = _releases_of(held)
        removed = [each.signed.id for each in releases] if with_releases else []
        kept = [each.signed.id for each in releases if each.signed.id not in removed]
        if removed:
            ReleaseStore(database).remove(removed, even_tagged=True)
        files = [
            _describe_file(path, base=folder.parent)
            for folder in folders
            for path in _files_in(folder)
        ]
        held.begin_deletion(files)
        for folder in folders:
            _remove_files(folder)
        details = {"files": files, "releases_removed": removed, "releases_kept": kept}
        entry, checkpoint = held.delete(key, details)
    for folder in folders:  # with the lock file, which nobody needs any more
        shutil.rmtree(folder, ignore_errors=True)
    remove_bundle(database, config)
    return DeletionCertificate(entry=entry, checkpoint=checkpoint)


@contextmanager
def _hold_idle(database: Database, stored: StoredRun, *, clock: Clock) -> Iterator[StoredRun]:
    """Keep other processes from running the run, and yield it with the right to write."""
    if stored.record.is_deployed:
        with lease_idle_run(database, stored.name, command="delete", clock=clock) as lease:
            yield database.run(stored.name, guard=lease.guard)
    elif stored.path.is_dir():
        with stored.hold():
            yield stored
    else:  # somebody has removed the folder by hand
        yield stored


def _folders_of(stored: StoredRun) -> list[Path]:
    folders = [stored.path]
    if stored.record.start_from:
        folders.append(weights_folder(stored.database.runs_dir, stored.name))
    if stored.record.is_deployed:
        run_id = find_deployment(stored.database, stored.name).run_id
        folders.append(upload_store_path(folder_of_run(stored), run_id))
    return folders


def _releases_of(stored: StoredRun) -> list[StoredRelease]:
    mine = stored.name, stored.record.created_utc
    releases = ReleaseStore(stored.database).list_all()
    return [each for each in releases if (each.run, each.run_created_utc) == mine]


def _files_in(folder: Path) -> list[Path]:
    """List the files in a folder, without the lock that this process may hold."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(path for path in found if path != folder / _LOCK_FILE)


def _describe_file(path: Path, *, base: Path) -> dict[str, object]:
    place = {"path": path.relative_to(base).as_posix()}
    if path.is_symlink():  # the link is removed, not what it points to
        return {**place, "link": str(path.readlink())}
    with explain_disk_errors(path, raises=StoreError, doing="read"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {**place, "bytes": path.stat().st_size, "sha256": digest}


def _remove_files(folder: Path) -> None:
    for path in _files_in(folder):
        with explain_disk_errors(path, raises=StoreError, doing="remove"):
            path.unlink()
