"""The registry of models: tags that move in one step, retention, and what is never lost."""

import os
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import select

from fedlearn.errors import StoreError
from fedlearn.identity.actors import Actor
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import read_entries
from fedlearn.store.releases import WEIGHTS_FILE, ReleaseStore, StoredRelease, select_removable
from fedlearn.store.runs import Database
from fedlearn.store.schema import ReleaseTagRow
from tests.processes import Launcher, Process

ALICE = Actor(kind="operator", name="alice", origin="it-7")


@pytest.fixture
def database(database: Database) -> Database:
    """An empty store in which alice acts, in each kind of database in turn."""
    return database.acting_as(ALICE)


@pytest.fixture
def store(database: Database) -> ReleaseStore:
    return ReleaseStore(database)


def add(store: ReleaseStore, key: SigningKey, *, run: str = "a", rounds: int = 1) -> StoredRelease:
    facts = {
        "run": run,
        "run_created_utc": "2026-01-01T00:00:00Z",
        "num_rounds": rounds,
        "sha256": f"{rounds:064x}",
        "num_bytes": 7,
    }
    return store.add(SignedRelease.sign(facts, key), {WEIGHTS_FILE: b"weights"})


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey(tmp_path / "keys")


def actions(database: Database) -> list[str]:
    with database.reading() as session:
        return [each.action for each in read_entries(session)][1:]


def test_a_model_of_a_run_is_recorded_once(
    store: ReleaseStore, key: SigningKey, database: Database
) -> None:
    """Each export is in the audit log. Control: another round's model is another release."""
    first = add(store, key)
    assert add(store, key) == first
    assert (first.path / WEIGHTS_FILE).read_bytes() == b"weights"
    assert add(store, key, rounds=2).signed.id != first.signed.id
    assert len(store.list_all()) == 2
    assert actions(database) == ["release.exported"] * 3


def test_a_release_is_found_by_tag_and_by_the_beginning_of_its_id(
    store: ReleaseStore, key: SigningKey
) -> None:
    release = add(store, key)
    store.tag(release.short_id, "champion")
    assert store.find("champion") == store.find(release.signed.id) == store.find(release.short_id)
    with pytest.raises(StoreError, match="did you mean 'champion'"):
        store.find("champoin")
    with pytest.raises(StoreError, match="6 characters"):
        store.find(release.signed.id[:5])


@pytest.mark.parametrize("tag", ["", "Champion", "a b", "../x", "1st", "decade", "é", "a" * 65])
def test_a_tag_is_a_plain_word_that_is_no_id(
    store: ReleaseStore, key: SigningKey, tag: str
) -> None:
    """Control: a plain word."""
    release = add(store, key)
    with pytest.raises(StoreError, match="cannot be a tag"):
        store.tag(release.short_id, tag)
    assert store.tag(release.short_id, "v1.0-beta").tags == ("v1.0-beta",)


def test_a_tag_moves_and_the_log_says_from_where(
    store: ReleaseStore, key: SigningKey, database: Database
) -> None:
    old, new = add(store, key), add(store, key, rounds=2)
    store.tag(old.short_id, "champion")
    assert store.tag(new.short_id, "champion").tags == ("champion",)
    assert store.find(old.short_id).tags == ()
    with database.reading() as session:
        assert old.signed.id in list(read_entries(session))[-1].details
    store.untag("champion")
    with pytest.raises(StoreError, match="no tag 'champion'"):
        store.untag("champion")


#: Give a release a tag, five times.
MOVE_TAG = """
import sys
from pathlib import Path
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.runs import Database

url, runs_dir, release_id = sys.argv[1:]
with Database.open(url, runs_dir=Path(runs_dir)) as database:
    for _ in range(5):
        ReleaseStore(database).tag(release_id, "champion")
"""


@pytest.fixture
def two_releases(store: ReleaseStore, key: SigningKey) -> list[str]:
    """The ids of two releases."""
    return [add(store, key, rounds=number).signed.id for number in (1, 2)]


@pytest.mark.slow
def test_a_tag_that_two_processes_move_names_one_release(
    launcher: Launcher,
    two_releases: list[str],
    database: Database,
    database_url: str,
    tmp_path: Path,
) -> None:
    script = tmp_path / "move.py"
    script.write_text(MOVE_TAG)
    with ExitStack() as stack:
        movers = list[Process]()
        for release_id in two_releases:
            arguments = (database_url, str(tmp_path / "runs"), release_id)
            stem = tmp_path / f"moving-{release_id}"
            mover = launcher.launch(stem, *arguments, script=script, environ=os.environ)
            movers.append(stack.enter_context(closing(mover)))
        assert [each.wait() for each in movers] == [0, 0]
    with database.reading() as session:
        assert len(session.scalars(select(ReleaseTagRow)).all()) == 1
    assert actions(database).count("release.tagged") == 10


def test_retention_keeps_the_last_of_each_run_and_what_has_a_tag(
    store: ReleaseStore, key: SigningKey
) -> None:
    """Control: with a larger number nothing is removed."""
    for run in "ab":
        for rounds in (1, 2, 3):
            add(store, key, run=run, rounds=rounds)
    store.tag(store.list_all()[0].short_id, "champion")
    found = select_removable(store.list_all(), keep_last=1)
    assert [(each.run, each.num_rounds) for each in found] == [("a", 2), ("b", 1), ("b", 2)]
    assert select_removable(store.list_all(), keep_last=3) == []
    store.remove([each.signed.id for each in found], even_tagged=False)
    assert [(each.run, each.num_rounds) for each in store.list_all()] == [
        ("a", 1),
        ("a", 3),
        ("b", 3),
    ]
    assert all(not each.path.exists() for each in found)


def test_what_has_a_tag_is_not_removed(store: ReleaseStore, key: SigningKey) -> None:
    """Nor is anything else of the same call. Control: ``even_tagged``."""
    ids = [add(store, key, rounds=number).signed.id for number in (1, 2)]
    store.tag(ids[1], "champion")
    with pytest.raises(StoreError, match="fedlearn models untag champion"):
        store.remove(ids, even_tagged=False)
    assert all((each.path / WEIGHTS_FILE).exists() for each in store.list_all())
    store.remove(ids, even_tagged=True)
    assert store.list_all() == []


def test_folders_that_a_crash_has_left_are_removed(store: ReleaseStore, key: SigningKey) -> None:
    """With the next removal. Control: a recorded release stays."""
    kept, removed = add(store, key), add(store, key, rounds=2)
    stray = kept.path.with_name("f" * 64)
    shutil.copytree(kept.path, stray)
    store.remove([removed.signed.id], even_tagged=False)
    assert not stray.exists()
    assert (kept.path / WEIGHTS_FILE).exists()
