"""The registry of models: releases with their files, and tags that name them.

The files of a release are in the folder ``.releases/ID`` of the runs; no run can have that name.
They are written inside the transaction that adds the release's row, and removed after the one that
removes it. So every row has its files, and a crash leaves at most a folder without a row, which the
next removal deletes.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from fedlearn.core.clock import utc_now
from fedlearn.core.files import explain_disk_errors, sync_folder, write_durably
from fedlearn.core.words import did_you_mean
from fedlearn.errors import StoreError
from fedlearn.identity.audit import Action
from fedlearn.identity.releases import SHORT, SignedRelease, check_tag, is_id_prefix
from fedlearn.store.runs import Database
from fedlearn.store.schema import ReleaseRow, ReleaseTagRow, build_record, build_row

_RELEASES_LOCK = 7_306_087_435
_FOLDER = ".releases"

#: Name of the file with the weights, in the folder of a release.
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoredRelease:
    """A release in the registry.

    Attributes:
        run: Name of its run, which may have been deleted since.
        run_created_utc: When the run was created; another run may have had its name.
        study: The run's study; empty: none.
        num_rounds: Finished rounds of the model.
        sha256: Of the file with the weights.
        num_bytes: Size of that file.
        created_utc: When it was recorded.
        signed: The statement and its signature.
        tags: Names that point to it now, sorted.
        path: Folder with its files.
    """

    run: str
    run_created_utc: str
    study: str
    num_rounds: int
    sha256: str
    num_bytes: int
    created_utc: str
    signed: SignedRelease
    tags: tuple[str, ...]
    path: Path

    @property
    def short_id(self) -> str:
        """The beginning of its id, as lists show it."""
        return self.signed.id[:SHORT]


class ReleaseStore:
    """The releases in a database; each change is in the audit log.

    Every method raises :class:`~fedlearn.errors.StoreError` if the database cannot be read or
    written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._folder = database.runs_dir / _FOLDER

    def add(
        self, signed: SignedRelease, files: Mapping[str, bytes], *, study: str = ""
    ) -> StoredRelease:
        """Record a release with its files, unless the same weights of this run are recorded.

        Args:
            signed: Its facts have ``run``, ``run_created_utc``, ``num_rounds``, ``sha256`` and
                ``num_bytes``.
            files: Content by name, with the weights.
            study: The run's study; empty: none.
        """
        facts = signed.facts
        place = {name: facts[name] for name in ("run", "run_created_utc", "num_rounds", "sha256")}
        with self._database.writing(lock=_RELEASES_LOCK) as session:
            row = session.scalar(select(ReleaseRow).filter_by(**place))
            if row is None:
                more = {"num_bytes": facts["num_bytes"], "created_utc": utc_now()}
                row = build_row(ReleaseRow, signed, study=study, **place, **more)
                session.add(row)
                session.flush()
                self._database.check_act(session)
                self._write(signed.id, files)
            self._record(session, Action.RELEASE_EXPORTED, row.id, **place)
            return self._build(session, row)

    def list_all(self) -> list[StoredRelease]:
        """Return all releases, oldest first."""
        with self._database.reading() as session:
            rows = session.scalars(select(ReleaseRow).order_by(ReleaseRow.number))
            return [self._build(session, row) for row in rows]

    def find(self, reference: str) -> StoredRelease:
        """Return the release with this tag, or whose id begins like this.

        Raises:
            StoreError: There is none, or there are several.
        """
        with self._database.reading() as session:
            return self._build(session, _find_row(session, reference))

    def read(self, reference: str) -> StoredRelease:
        """Return a release as :meth:`find` does, and record that its weights are read."""
        with self._database.writing() as session:
            found = self._build(session, _find_row(session, reference))
            self._record(session, Action.RELEASE_READ, found.signed.id, reference=reference)
            return found

    def tag(self, reference: str, tag: str) -> StoredRelease:
        """Let ``tag`` name a release and no other, in one step."""
        check_tag(tag)
        with self._database.writing(lock=_RELEASES_LOCK) as session:
            row = _find_row(session, reference)
            before = session.get(ReleaseTagRow, tag)
            was = None if before is None else before.release_id
            session.merge(ReleaseTagRow(tag=tag, release_id=row.id))
            session.flush()
            self._record(session, Action.RELEASE_TAGGED, row.id, tag=tag, before=was)
            return self._build(session, row)

    def untag(self, tag: str) -> None:
        """Remove a tag; its release stays."""
        with self._database.writing(lock=_RELEASES_LOCK) as session:
            row = session.get(ReleaseTagRow, tag)
            if row is None:
                hint = did_you_mean(tag, session.scalars(select(ReleaseTagRow.tag)))
                raise StoreError(f"there is no tag {tag!r}; {hint}`fedlearn models` lists them")
            release_id = row.release_id
            session.delete(row)
            session.flush()
            self._record(session, Action.RELEASE_UNTAGGED, release_id, tag=tag)

    def remove(self, ids: Collection[str], *, even_tagged: bool) -> None:
        """Remove releases with their tags and files.

        Raises:
            StoreError: One has a tag, without ``even_tagged``; nothing is removed.
        """
        with self._database.writing(lock=_RELEASES_LOCK) as session:
            rows = session.scalars(select(ReleaseRow).where(ReleaseRow.id.in_(ids))).all()
            removed = [(row.id, row.run, row.sha256, _read_tags(session, row)) for row in rows]
            for release_id, _, _, tags in removed:
                if tags and not even_tagged:
                    raise StoreError(
                        f"release {release_id[:SHORT]} has the tag {tags[0]!r}; remove the tag "
                        f"first: `fedlearn models untag {tags[0]}`"
                    )
            session.execute(delete(ReleaseTagRow).where(ReleaseTagRow.release_id.in_(ids)))
            session.execute(delete(ReleaseRow).where(ReleaseRow.id.in_(ids)))
            for release_id, run, digest, tags in removed:
                self._record(
                    session, Action.RELEASE_REMOVED, release_id, run=run, sha256=digest, tags=tags
                )
        with self._database.writing(lock=_RELEASES_LOCK) as session:
            # Under the lock: the folder of a release that is being added has no row yet.
            self._remove_strays({*session.scalars(select(ReleaseRow.id))})

    def _remove_strays(self, known: Collection[str]) -> None:
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name not in known:
                    with explain_disk_errors(path, raises=StoreError, doing="remove"):
                        shutil.rmtree(path)

    def _write(self, release_id: str, files: Mapping[str, bytes]) -> None:
        folder = self._folder / release_id
        with explain_disk_errors(folder, raises=StoreError):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_durably(folder / name, content, raises=StoreError)
        with explain_disk_errors(folder, raises=StoreError):
            sync_folder(self._folder)

    def _build(self, session: Session, row: ReleaseRow) -> StoredRelease:
        return build_record(
            row,
            StoredRelease,
            signed=build_record(row, SignedRelease),
            tags=_read_tags(session, row),
            path=self._folder / row.id,
        )

    def _record(self, session: Session, action: Action, release_id: str, **details: object) -> None:
        self._database.record_act(session, action, subject=release_id, details=details)


def select_removable(releases: Sequence[StoredRelease], *, keep_last: int) -> list[StoredRelease]:
    """Select the releases without a tag that are not among the last ``keep_last`` of their run.

    Args:
        releases: Oldest first.
        keep_last: Number to keep of each run, tagged ones included.
    """
    removable = list[StoredRelease]()
    num_newer = dict[str, int]()
    for each in reversed(releases):
        num_newer[each.run] = num_newer.get(each.run, 0) + 1
        if not each.tags and num_newer[each.run] > keep_last:
            removable.append(each)
    return removable[::-1]


def _find_row(session: Session, reference: str) -> ReleaseRow:
    tagged = session.get(ReleaseTagRow, reference)
    if tagged is not None:
        return session.scalars(select(ReleaseRow).where(ReleaseRow.id == tagged.release_id)).one()
    found: Sequence[ReleaseRow] = ()
    if is_id_prefix(reference):
        found = session.scalars(select(ReleaseRow).where(ReleaseRow.id.startswith(reference))).all()
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"{len(found)} releases begin with {reference!r}; give more of the id")
    hint = did_you_mean(reference, session.scalars(select(ReleaseTagRow.tag)))
    raise StoreError(
        f"there is no release with the tag or id {reference!r}; {hint}`fedlearn models` lists them "
        "(ids need 6 characters), `fedlearn export` makes one"
    )


def _read_tags(session: Session, row: ReleaseRow) -> tuple[str, ...]:
    mine = select(ReleaseTagRow.tag).where(ReleaseTagRow.release_id == row.id)
    return tuple(session.scalars(mine.order_by(ReleaseTagRow.tag)))
