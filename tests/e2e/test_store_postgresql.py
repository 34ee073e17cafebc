"""Stores on a database server, which may be down, restart, or serve two machines at once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import torch

from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Participations
from fedlearn.errors import NotPermitted, StoreError
from fedlearn.identity.roles import Grant, Role
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.store.operators import StoredOperators
from fedlearn.store.runs import Database
from tests.records import RUN

pytestmark = pytest.mark.slow  # they need a PostgreSQL server

ROUND = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.SKIPPED,
    participations=Participations.of(()),
    train_loss=float("nan"),
    duration_s=1.0,
    virtual_s=1.0,
    seconds=0.1,
    metrics={},
)


@pytest.fixture
def database(postgresql_url: str, tmp_path: Path) -> Iterator[Database]:
    """An empty store."""
    with Database.open(postgresql_url, runs_dir=tmp_path) as database:
        yield database


@pytest.fixture
def admin(postgresql_url: str) -> Iterator[psycopg.Connection]:
    """A separate connection to the same database."""
    url = postgresql_url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def disconnect_others(admin: psycopg.Connection) -> None:
    """End all other connections to the database, like a restart of the server."""
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def checkpoint_after(round_num: int) -> Checkpoint:
    """Make a small checkpoint."""
    return Checkpoint(round_num=round_num, tensors={"params/w": torch.ones(1)}, values={})


def test_a_server_that_is_away_is_named_without_the_password(tmp_path: Path) -> None:
    """Nothing listens on port 1."""
    url = "postgresql+psycopg://me:hunter2@127.0.0.1:1/runs"
    with pytest.raises(StoreError, match=r"me:\*\*\*@127.*check that the server runs") as error:
        Database.open(url, runs_dir=tmp_path)
    assert "hunter2" not in str(error.value)


def test_a_run_survives_a_restart_of_the_server(
    database: Database, admin: psycopg.Connection
) -> None:
    """Between two commits: the second finds its connection closed and opens a new one."""
    run = database.create(RUN)
    run.commit(checkpoint_after(0))
    disconnect_others(admin)
    run.append(ROUND)
    run.commit(checkpoint_after(1))
    assert [record.round_num for record in run.rounds()] == [0]


def test_a_commit_that_the_server_refuses_says_where_the_run_stands(
    database: Database, admin: psycopg.Connection
) -> None:
    """The commit succeeds once the server accepts it again."""
    run = database.create(RUN)
    run.commit(checkpoint_after(0))
    run.append(ROUND)
    admin.execute("ALTER TABLE rounds RENAME TO elsewhere")
    with pytest.raises(StoreError, match=r"after round 0, is not affected.*resume calm-otter-17"):
        run.commit(checkpoint_after(1))
    admin.execute("ALTER TABLE elsewhere RENAME TO rounds")
    run.commit(checkpoint_after(1))
    assert len(run.rounds()) == 1


def test_two_machines_share_a_database_with_folders_of_their_own(
    database: Database, postgresql_url: str, tmp_path: Path
) -> None:
    """The database decides who gets a name; the other machine's folder is removed again."""
    database.create(RUN)
    with Database.open(postgresql_url, runs_dir=tmp_path / "other") as other:
        with pytest.raises(StoreError, match="there is a run called 'calm-otter-17' already"):
            other.create(RUN)
        assert list((tmp_path / "other").iterdir()) == []
        other.create(replace(RUN, name="quick-yak-42"))
    assert [record.name for record in database.runs()] == ["calm-otter-17", "quick-yak-42"]


def test_a_database_that_does_not_exist_is_an_error_with_a_remedy(
    postgresql_server: str, tmp_path: Path
) -> None:
    """Creating databases is left to the administrator."""
    with pytest.raises(StoreError, match=r"does not exist.*names a database this user may write"):
        Database.open(postgresql_server.format(database="nowhere"), runs_dir=tmp_path)


def test_an_operator_keeps_its_roles_until_the_transaction_of_its_act_ends(
    database: Database, postgresql_url: str, tmp_path: Path
) -> None:
    """A revocation, also of a role, waits for the act. Control: it does not wait afterwards."""
    role = Grant(Role.ADMIN, "*")
    operators = StoredOperators(database, SystemClock())
    token = operators.invite("ann", grants=[role], valid_s=60.0)
    certificate = (b"", "f", "2999-01-01T00:00:00Z")
    who = operators.redeem("ann", token, key="k", certify=lambda: certificate, origin="")
    check = operators.check_acts(who, authorise=lambda _: None)
    url = f"{postgresql_url}&options=-c%20lock_timeout%3D100"
    with Database.open(url, runs_dir=tmp_path) as impatient:
        others = StoredOperators(impatient, SystemClock())
        with database.writing() as session:
            check(session)
            with pytest.raises(StoreError):
                others.revoke("ann")
            with pytest.raises(StoreError):
                others.revoke_grant("ann", role)
        others.revoke_grant("ann", role)
        others.revoke("ann")
    with database.writing() as session, pytest.raises(NotPermitted, match="was revoked"):
        check(session)
