"""The bundles of submitted runs: each is stored once, by its digest, next to the runs.

A run that starts copies its bundle into its own folder. The copy here is for starts that are to
come: of a run that waits in the queue, and of all runs of a schedule. It stays while the queue or a
schedule names its digest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
from sqlalchemy import Text, exists, select, type_coerce
from sqlalchemy.orm import Session

from fedlearn.core.files import explain_disk_errors, sync_folder, write_durably
from fedlearn.errors import StoreError
from fedlearn.identity.bundles import Bundle
from fedlearn.store.queue_rows import NAMES_LOCK
from fedlearn.store.runs import Database
from fedlearn.store.schema import QueueRow, ScheduleRow

_SUFFIX = ".bundle"
_DIGEST = re.compile("[0-9a-f]{64}")


def bundle_path(runs_dir: Path, digest: str) -> Path:
    """Return where the submitted bundle with this digest is stored."""
    return _folder(runs_dir) / f"{digest}{_SUFFIX}"


def store_bundle(database: Database, session: Session, bundle: Bundle) -> None:
    """Store a bundle in a transaction that writes its digest.

    A row that has a digest then has its file, too. The transaction holds
    :data:`~fedlearn.store.queue_rows.NAMES_LOCK`.

    Raises:
        NotPermitted: The actor may not act any more.
        StoreError: The file cannot be written.
    """
    database.check_act(session)
    path = bundle_path(database.runs_dir, bundle.digest)
    with explain_disk_errors(path.parent, raises=StoreError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, bundle.content, raises=StoreError)
    with explain_disk_errors(path.parent, raises=StoreError):
        sync_folder(path.parent.parent)


def remove_bundle(database: Database, config: Mapping[str, object]) -> None:
    """Remove the bundle of a deleted run or schedule, unless another one needs it.

    Raises as :func:`remove_unneeded_bundles`.

    Args:
        database: The database of the queue.
        config: The configuration of what was deleted.
    """
    if (digest := _find_digest(config)) is not None:
        _remove_unneeded(database, lambda: [bundle_path(database.runs_dir, digest)])


def remove_unneeded_bundles(database: Database) -> None:
    """Remove each bundle that neither the queue nor a schedule names, and what crashes have left.

    Only the service of the folder does this. A file that cannot be removed is logged, and stays.

    Raises:
        StoreError: The database cannot be read.
    """
    folder = _folder(database.runs_dir)
    _remove_unneeded(database, lambda: list(folder.iterdir()) if folder.is_dir() else [])


def _remove_unneeded(database: Database, find: Callable[[], Sequence[Path]]) -> None:
    # The lock keeps others from submitting: a file whose digest is not committed yet stays.
    with database.writing(lock=NAMES_LOCK) as session:
        for path in find():
            digest = path.name.removesuffix(_SUFFIX)
            if _DIGEST.fullmatch(digest) and _is_needed(session, digest):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log = structlog.get_logger(__name__)
                log.warning("bundle_not_removed", path=str(path), reason=error.strerror)


def describe_bundle(config: Mapping[str, object], bundle: Bundle | None) -> dict[str, object]:
    """Return the audit log's entry about a run's bundle, which is empty without a bundle.

    Args:
        config: The run's configuration, which has the digest.
        bundle: The bundle, if it comes with the submission: then with its name and signer.
    """
    if (digest := _find_digest(config)) is None:
        return {}
    if bundle is None:
        return {"bundle": digest}
    about = bundle.manifest
    return {
        "bundle": digest,
        "bundle_name": f"{about.name} {about.version}",
        "bundle_signer": about.signer,
    }


def _folder(runs_dir: Path) -> Path:
    return runs_dir / ".bundles"  # no run can have a name that begins with a dot


def _find_digest(config: Mapping[str, object]) -> str | None:
    client = config.get("client")
    digest = client.get("bundle_digest") if isinstance(client, Mapping) else None
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None


def _is_needed(session: Session, digest: str) -> bool:
    # Configurations are text in the database, and nothing else of them looks like a digest.
    return any(
        session.scalar(select(exists().where(type_coerce(kind.config, Text).contains(digest))))
        for kind in (QueueRow, ScheduleRow)
    )
