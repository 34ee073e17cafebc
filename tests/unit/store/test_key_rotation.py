"""The signing key is replaced, the chain of keys is followed, and forged chains are not."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, update

from fedlearn.deployment.audit_log import (
    rotate_signing_key,
    take_checkpoint,
    verify_export,
    verify_log,
)
from fedlearn.deployment.log_signer import LogSigner
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.experiment.releases import verify_release
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.audit_checks import LogCheckpoint
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.identity.succession import KeySuccession
from fedlearn.store.audit import read_entries
from fedlearn.store.engine import open_engine
from fedlearn.store.releases import ReleaseStore, StoredRelease
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import AuditCheckpointRow, AuditRow, Base


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    engine = open_engine(sqlite_url(tmp_path / "runs.db"))
    Base.metadata.create_all(engine)  # ten times faster than running the migrations
    with Database(engine, runs_dir=tmp_path / "runs") as database:
        yield database


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    SigningKey(tmp_path / "keys")
    return tmp_path / "keys"


def act(database: Database, *subjects: str) -> None:
    for subject in subjects:
        with database.writing() as session:
            database.record_act(session, Action.CLIENT_INVITED, subject=subject)


def entries(database: Database) -> list[AuditEntry]:
    with database.reading() as session:
        return list(read_entries(session))


def export(database: Database, path: Path) -> Path:
    path.write_text("".join(f"{json.dumps(each.values())}\n" for each in entries(database)))
    return path


def keep(database: Database, keys: Path, path: Path) -> Path:
    take_checkpoint(database, keys).save(path)
    return path


def problems(database: Database, keys: Path, *kept: Path) -> list[str]:
    return verify_log(database, keys, kept).problems


def test_checkpoints_of_every_key_vouch_for_their_part_of_the_log(
    database: Database, keys: Path, tmp_path: Path
) -> None:
    """On the coordinator, and at a site with a checkpoint of any of the keys."""
    act(database, "a", "b")
    kept = [keep(database, keys, tmp_path / "0.json")]
    for number in (1, 2):
        new = rotate_signing_key(database, keys)
        assert SigningKey(keys).public_key.hex() == new
        act(database, f"c{number}")
        kept.append(keep(database, keys, tmp_path / f"{number}.json"))
    assert len({LogCheckpoint.load(each).public_key for each in kept}) == 3
    assert problems(database, keys, *kept) == []
    log = export(database, tmp_path / "log.jsonl")
    for each in ([kept[0]], [kept[2]], kept, kept[::-1]):
        assert verify_export(log, each).problems == []
    assert not (keys / "signing.key.next").exists()


def test_a_coordinator_that_runs_takes_the_new_key(database: Database, keys: Path) -> None:
    act(database, "a")
    with LogSigner(database, keys):
        rotate_signing_key(database, keys)
        act(database, "b")
    assert problems(database, keys) == []


def test_what_the_old_key_signs_afterwards_does_not_count(
    database: Database, keys: Path, tmp_path: Path
) -> None:
    """A thief of the old key, or a coordinator with a copy of the folder. Control: before."""
    act(database, "a")
    thief = SigningKey(keys)
    rotate_signing_key(database, keys)
    act(database, "b")
    forged = LogCheckpoint.sign(entries(database)[-1], thief, at_utc="")
    forged.save(tmp_path / "forged.json")
    LogCheckpoint.sign(entries(database)[1], thief, at_utc="").save(tmp_path / "early.json")
    assert problems(database, keys, tmp_path / "early.json") == []
    assert problems(database, keys, tmp_path / "forged.json") == [
        f"{tmp_path / 'forged.json'}: it is not signed by this log's key"
    ]


def forge(database: Database, change: Callable[[KeySuccession, AuditEntry], KeySuccession]) -> None:
    """Rewrite the log from the succession on, whose details a forger changes."""
    found = entries(database)
    place = next(each for each in found if each.action == Action.SIGNING_KEY_ROTATED)
    old = KeySuccession.of(place)
    assert old is not None
    details = json.dumps(change(old, place).details(), sort_keys=True, separators=(",", ":"))
    forged = [replace(place, details=details).link(found[place.position - 1])]
    for each in found[place.position + 1 :]:
        forged.append(each.link(forged[-1]))
    with database.writing() as session:
        session.execute(delete(AuditRow).where(AuditRow.position >= place.position))
        session.execute(delete(AuditCheckpointRow))
        for each in forged:
            session.execute(insert(AuditRow).values(**vars(each)))


def other_key(tmp_path: Path) -> SigningKey:
    return SigningKey(tmp_path / "others")


FORGERIES: dict[str, Callable[[KeySuccession, Path], KeySuccession]] = {
    "another new key": lambda found, path: replace(found, new=other_key(path).public_key.hex()),
    "signed by the thief alone": lambda found, path: replace(
        found,
        old=other_key(path).public_key.hex(),
    ),
    "another position": lambda found, _: replace(found, position=found.position - 1),
    "another log": lambda found, _: replace(found, hash="0" * 64),
    "without the old signature": lambda found, _: replace(found, signed_by_old="00" * 64),
    "without the new signature": lambda found, _: replace(found, signed_by_new=""),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_succession_shows(
    database: Database, keys: Path, tmp_path: Path, name: str
) -> None:
    """Control: the same rewriting without a change."""
    act(database, "a")
    rotate_signing_key(database, keys)
    act(database, "b")
    forge(database, lambda found, _: found)
    kept = keep(database, keys, tmp_path / "kept.json")
    assert problems(database, keys, kept) == []
    forge(database, lambda found, _: FORGERIES[name](found, tmp_path))
    assert any("succession" in each for each in problems(database, keys))
    log = export(database, tmp_path / "log.jsonl")
    assert any("succession" in each for each in verify_export(log, [kept]).problems)


def test_a_thief_of_a_replaced_key_cannot_branch_off(
    database: Database, keys: Path, tmp_path: Path
) -> None:
    """A second, well signed succession from the old key does not follow the newest one."""
    act(database, "a")
    thief = SigningKey(keys)
    rotate_signing_key(database, keys)
    newest = entries(database)[-1]
    branch = KeySuccession.sign(thief, other_key(tmp_path), newest=newest)
    with database.writing() as session:
        database.record_act(
            session, Action.SIGNING_KEY_ROTATED, subject="x", details=branch.details()
        )
    assert any("not the newest one" in each for each in problems(database, keys))


def test_a_rotation_that_was_removed_shows(database: Database, keys: Path, tmp_path: Path) -> None:
    act(database, "a")
    rotate_signing_key(database, keys)
    kept = keep(database, keys, tmp_path / "kept.json")
    with database.writing() as session:
        session.execute(
            update(AuditRow).where(AuditRow.action == "signing_key.rotated").values(action="x")
        )
    assert problems(database, keys, kept)


@pytest.mark.parametrize("line", ["before the log", "after the log"])
def test_a_crash_in_the_middle_is_finished_by_the_same_command(
    database: Database, keys: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Meanwhile the old key signs nothing that would not count."""
    act(database, "a")
    before = SigningKey(keys).public_key
    next_key = SigningKey.prepare_successor(keys).public_key
    if line == "after the log":
        with monkeypatch.context() as patch:
            patch.setattr(SigningKey, "install_successor", lambda _: None)
            rotate_signing_key(database, keys)
        assert SigningKey(keys).public_key == before
        with pytest.raises(DeploymentError, match="finish the replacement"):
            take_checkpoint(database, keys)
        assert any("newer signing key" in each for each in problems(database, keys))
        with LogSigner(database, keys):
            act(database, "b")
    rotate_signing_key(database, keys)
    assert SigningKey(keys).public_key == next_key
    rotations = [each for each in entries(database) if each.action == "signing_key.rotated"]
    assert len(rotations) == 1
    assert problems(database, keys) == []


def test_there_is_nothing_to_replace_without_a_key_or_a_log(
    database: Database, keys: Path, tmp_path: Path
) -> None:
    with pytest.raises(DeploymentError, match=r"no signing\.key"):
        rotate_signing_key(database, tmp_path / "nowhere")
    with pytest.raises(DeploymentError, match="log is empty"):
        rotate_signing_key(database, keys)


def add_release(database: Database, key: SigningKey, content: bytes) -> StoredRelease:
    facts = {"run": "r", "run_created_utc": "t", "num_rounds": 1, "num_bytes": len(content)}
    signed = SignedRelease.sign(facts | {"sha256": sha256(content).hexdigest()}, key)
    return ReleaseStore(database).add(signed, {"model.safetensors": content})


def test_releases_of_earlier_keys_are_checked_through_the_log(
    database: Database, keys: Path
) -> None:
    """One that the old key signs after its replacement is refused."""
    thief = SigningKey(keys)
    old = thief.public_key.hex()
    first = add_release(database, thief, b"first")
    new = rotate_signing_key(database, keys)
    second = add_release(database, SigningKey(keys), b"second")
    forged = add_release(database, thief, b"forged")
    for trusted in (old, new):
        for release in (first, second):
            assert verify_release(release, database, public_key=trusted).content
        with pytest.raises(StoreError, match="another key"):
            verify_release(forged, database, public_key=trusted)
    with pytest.raises(StoreError, match="another key"):
        verify_release(first, database, public_key="0" * 64)
