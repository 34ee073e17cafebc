"""The audit log: each kind of tampering shows, and concurrent writers keep one chain."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, text

from fedlearn.core.clock import SystemClock
from fedlearn.deployment.audit_log import verify_export, verify_log
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.identity.actors import Actor, local_operator, remote_client
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.audit_checks import ChainReport, LogCheckpoint, parse_entry
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import read_entries
from fedlearn.store.audit_checkpoints import sign_checkpoint
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database
from fedlearn.store.schema import AuditCheckpointRow, AuditRow, InvitationRow
from tests.processes import Launcher

ALICE = Actor(kind="operator", name="alice", origin="it-7")


@pytest.fixture
def database(database: Database) -> Database:
    """An empty store in which alice acts, in each kind of database in turn."""
    return database.acting_as(ALICE)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey(tmp_path)


def act(database: Database, *subjects: str) -> None:
    for subject in subjects:
        with database.writing() as session:
            database.record_act(
                session, Action.CLIENT_INVITED, subject=subject, details={"tags": ["a=é"]}
            )


def entries(database: Database) -> list[AuditEntry]:
    with database.reading() as session:
        return list(read_entries(session))


def verify(database: Database, tmp_path: Path, *kept: Path) -> ChainReport:
    return verify_log(database, tmp_path, kept)


def sign(database: Database, key: SigningKey) -> LogCheckpoint:
    with database.writing() as session:
        found = sign_checkpoint(session, key)
    assert found is not None
    return found


def rewrite_after(database: Database, position: int, *, subject: str) -> None:
    """Change an entry, and compute all hashes from there on again, as a forger would."""
    forged = [replace(entries(database)[position], subject=subject)]
    forged[0] = forged[0].link(entries(database)[position - 1])
    for entry in entries(database)[position + 1 :]:
        forged.append(entry.link(forged[-1]))
    with database.writing() as session:
        session.execute(delete(AuditRow).where(AuditRow.position >= position))
        for each in forged:
            session.execute(insert(AuditRow).values(**vars(each)))


def run_sql(*statements: str) -> Callable[[Database], None]:
    def tamper(database: Database) -> None:
        with database.writing() as session:
            for each in statements:
                session.execute(text(each))

    return tamper


TAMPERINGS = {
    "edit": run_sql("UPDATE audit_log SET actor = 'operator:bob' WHERE position = 2"),
    "edit the details": run_sql("UPDATE audit_log SET details = '{}' WHERE position = 2"),
    "spread the details": run_sql(
        """UPDATE audit_log SET details = '{"tags": ["a=\\u00e9"]}' WHERE position = 2"""
    ),
    "break the details": run_sql("UPDATE audit_log SET details = 'x' WHERE position = 2"),
    "remove the first": run_sql("DELETE FROM audit_log WHERE position = 0"),
    "remove one": run_sql("DELETE FROM audit_log WHERE position = 2"),
    "remove one and close the gap": run_sql(
        "DELETE FROM audit_log WHERE position = 3",
        "UPDATE audit_log SET position = 3 WHERE position = 4",
    ),
    "swap two": run_sql(
        "UPDATE audit_log SET position = 99 WHERE position = 2",
        "UPDATE audit_log SET position = 2 WHERE position = 3",
        "UPDATE audit_log SET position = 3 WHERE position = 99",
    ),
    "insert one": run_sql(
        "INSERT INTO audit_log SELECT position + 3, at_utc, actor, origin, action, subject, "
        "details, 'new', hash FROM audit_log WHERE position = 2"
    ),
    "forge a checkpoint": run_sql("UPDATE audit_checkpoints SET hash = 'other'"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_with_the_rows_shows(
    database: Database, key: SigningKey, tmp_path: Path, name: str
) -> None:
    """Control: the untouched log has no problem."""
    act(database, "a", "b", "c", "d")
    sign(database, key)
    assert verify(database, tmp_path).problems == []
    TAMPERINGS[name](database)
    assert verify(database, tmp_path).problems


def test_only_a_kept_checkpoint_shows_that_the_newest_entries_are_gone(
    database: Database, key: SigningKey, tmp_path: Path
) -> None:
    """Control: without it, a shorter log is a valid log."""
    act(database, "a", "b", "c")
    sign(database, key).save(tmp_path / "kept.json")
    act(database, "d")
    assert verify(database, tmp_path, tmp_path / "kept.json").problems == []
    with database.writing() as session:
        session.execute(delete(AuditRow).where(AuditRow.position >= 3))
        session.execute(delete(AuditCheckpointRow))
    assert verify(database, tmp_path).problems == []
    found = verify(database, tmp_path, tmp_path / "kept.json").problems
    assert found == [f"{tmp_path / 'kept.json'}: entry 3 is missing"]


def test_a_chain_that_was_computed_again_does_not_fit_a_checkpoint(
    database: Database, key: SigningKey, tmp_path: Path
) -> None:
    """Hashes need no key. Controls: no checkpoint, one from before, and another key's."""
    act(database, "a")
    sign(database, key).save(tmp_path / "before.json")
    act(database, "b", "c")
    sign(database, key).save(tmp_path / "after.json")
    with database.writing() as session:
        session.execute(delete(AuditCheckpointRow))
    rewrite_after(database, 2, subject="z")
    assert verify(database, tmp_path).problems == []
    assert verify(database, tmp_path, tmp_path / "before.json").problems == []
    [problem] = verify(database, tmp_path, tmp_path / "after.json").problems
    assert "were rewritten" in problem
    forger = SigningKey(tmp_path / "forger")
    LogCheckpoint.sign(entries(database)[-1], forger, at_utc="2026-01-01T00:00:00Z").save(
        tmp_path / "forged.json"
    )
    [problem] = verify(database, tmp_path, tmp_path / "forged.json").problems
    assert "not signed by this log's key" in problem


def test_a_site_checks_an_exported_log(database: Database, key: SigningKey, tmp_path: Path) -> None:
    """It needs the file and a checkpoint. Control: a changed line."""
    act(database, "a", "b")
    sign(database, key).save(tmp_path / "kept.json")
    lines = [json.dumps(each.values()) for each in entries(database)]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines) + "\n")
    report = verify_export(log, [tmp_path / "kept.json"])
    assert (report.num_entries, report.problems) == (3, [])
    log.write_text("\n".join(lines).replace('"subject": "a"', '"subject": "z"'))
    assert verify_export(log, [tmp_path / "kept.json"]).problems
    with pytest.raises(DeploymentError, match="alone proves nothing"):
        verify_export(log, [])
    with pytest.raises(DeploymentError, match="does not hold an entry"):
        parse_entry(b'{"position": 1}', source="log.jsonl, line 1")


def test_an_act_that_fails_leaves_no_entry_and_an_entry_that_fails_no_act(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in one transaction. Control: an act that succeeds leaves both."""
    registry = StoredRegistry(database, SystemClock())
    registry.invite("a", tags=[], valid_s=60.0)
    with pytest.raises(DeploymentError, match="no client called 'zzz'"):
        registry.revoke("zzz")
    assert [each.action for each in entries(database)] == ["log.started", "client.invited"]

    def fail(*_: object, **__: object) -> None:
        raise StoreError("no entry can be written")

    monkeypatch.setattr("fedlearn.store.runs.append_entry", fail)
    with pytest.raises(StoreError, match="no entry"):
        registry.invite("b", tags=[], valid_s=60.0)
    assert [each.name for each in registry.open_invitations()] == ["a"]


def test_acts_on_clients_name_who_and_whence(database: Database) -> None:
    """The operator invites and revokes; the client itself enrols."""
    registry = StoredRegistry(database, SystemClock())
    token = registry.invite("a", tags=["k=v"], valid_s=60.0)
    registry.redeem(
        "a",
        token,
        identity_key=b"k" * 32,
        certify=lambda _: (b"", "f" * 64, "9999-12-31T23:59:59Z"),
        origin="ipv4:10.0.0.7:5",
    )
    registry.revoke("a")
    found = [(e.action, e.actor, e.origin, e.subject) for e in entries(database)[1:]]
    assert found == [
        ("client.invited", "operator:alice", "it-7", "a"),
        ("client.enrolled", "client:a", "ipv4:10.0.0.7:5", "a"),
        ("client.revoked", "operator:alice", "it-7", "a"),
    ]
    assert token.hex() not in "".join(each.details for each in entries(database))


def test_the_operator_is_whom_the_system_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the environment do not change it."""
    before = local_operator()
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")
    assert local_operator() == before
    assert remote_client("a", origin="x").label == "client:a"


#: Record eight acts, whose subjects begin with the last argument.
WRITE_ACTS = """
import sys
from pathlib import Path
from fedlearn.identity.audit import Action
from fedlearn.store.runs import Database

url, runs_dir, name = sys.argv[1:]
with Database.open(url, runs_dir=Path(runs_dir)) as database:
    for number in range(8):
        with database.writing() as session:
            database.record_act(
                session, Action.CLIENT_INVITED, subject=f"{name}-{number}", details={}
            )
"""


def test_writers_in_several_processes_keep_one_chain(
    launcher: Launcher, database: Database, database_url: str, key: SigningKey, tmp_path: Path
) -> None:
    """Even the first entry, which starts the log, is written once."""
    script = tmp_path / "write.py"
    script.write_text(WRITE_ACTS)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                closing(
                    launcher.launch(
                        tmp_path / f"writer-{name}",
                        *(database_url, str(tmp_path / "runs"), name),
                        script=script,
                        environ=os.environ,
                    )
                )
            )
            for name in "ab"
        ]
        assert [each.wait() for each in writers] == [0, 0]
    report = verify(database, tmp_path)
    assert (report.num_entries, report.problems) == (17, [])


def test_the_database_refuses_a_fork(database: Database) -> None:
    """Also to a process that ignores the lock: two entries after one hash."""
    act(database, "a")
    twin = replace(entries(database)[1], position=2, hash="f" * 64)
    with pytest.raises(StoreError), database.writing() as session:
        session.execute(insert(AuditRow).values(**vars(twin)))


#: Invite clients without end, and print a line for each.
INVITE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from fedlearn.core.clock import SystemClock
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database

url, runs_dir, begin = sys.argv[1:]
with Database.open(url, runs_dir=Path(runs_dir)) as database:
    registry = StoredRegistry(database, SystemClock())
    for number in count():
        registry.invite(f"client-{begin}-{number}", tags=[], valid_s=60.0)
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_an_act_and_its_entry_or_neither(
    launcher: Launcher, database: Database, database_url: str, tmp_path: Path
) -> None:
    """Kill -9 while it invites, again and again."""
    script = tmp_path / "invite.py"
    script.write_text(INVITE_FOREVER)
    for begin in range(5):
        arguments = (database_url, str(tmp_path / "runs"), str(begin))
        stem = tmp_path / f"inviting-{begin}"
        with closing(
            launcher.launch(stem, *arguments, script=script, environ=os.environ)
        ) as writer:
            writer.wait_for_lines(5)
            writer.kill()
        assert verify(database, tmp_path).problems == []
        invited = [each.subject for each in entries(database)[1:]]
        with database.reading() as session:
            stored = set(session.scalars(select(InvitationRow.name)))
        assert stored == set(invited)
