"""Connections, transactions and the schema of the store's database; its errors in words."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from fedlearn.core.files import is_full, remedy
from fedlearn.core.locks import open_lock, wait_for_lock
from fedlearn.core.redaction import redacted
from fedlearn.errors import NewerStore, NoSpace, StoreError, StoreUnavailable
from fedlearn.store import migrations

_LOCK_WAIT_S = 30.0
_MIGRATION_LOCK = 7_306_087_429  # PostgreSQL's advisory locks are named by a number

#: What the server shall do: notice, in seconds, that a coordinator stands still inside a
#: transaction, or that its machine has no power, for it must not keep others waiting. Whatever
#: holds a lock all the same, a write waits as long as on SQLite and then fails.
_SESSION = {
    "lock_timeout": f"{_LOCK_WAIT_S:.0f}s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
}

#: A server or a network that dies without a word is noticed as fast.
_POSTGRESQL_OPTIONS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "options": " ".join(f"-c {name}={value}" for name, value in _SESSION.items()),
}

_POSTGRESQL_DISK_FULL, _POSTGRESQL_LOCKED = "53100", "55P03"

_REMEDIES = {
    "SQLITE_BUSY": "another process is writing for long: let it finish",
    "SQLITE_NOTADB": "the file is something else: move it away, or name another",
    "SQLITE_READONLY": "make the file and its folder writable, or name another",
    "SQLITE_CANTOPEN": "its folder must exist and be writable",
    "SQLITE_FULL": "the disk is full: free some space",
    "SQLITE_IOERR": "the disk is full or failing: free some space, or check it",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, or move it away",
}


def open_engine(url: str) -> Engine:
    """Return the connections to the database at ``url``, none of them open yet.

    Raises:
        StoreError: The URL is not one of a store, or its driver is not installed.
    """
    parsed = _checked_url(url)
    if parsed.get_backend_name() == "postgresql":
        options = {k: v for k, v in _POSTGRESQL_OPTIONS.items() if k not in parsed.query}
        try:
            # the server may restart in a run
            return create_engine(parsed, pool_pre_ping=True, connect_args=options)
        except ImportError as error:
            raise StoreError(
                "PostgreSQL's driver is not installed; run `pip install 'fedlearn[postgresql]'`"
            ) from error
    patience = {} if "timeout" in parsed.query else {"timeout": _LOCK_WAIT_S}
    engine = create_engine(parsed, connect_args=patience)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def one_at_a_time(connection: Connection, lock: int) -> None:
    """Let transactions that call this with the same ``lock`` wait for each other.

    SQLite has a single writer as it is.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({lock})"))


@contextmanager
def explained(engine: Engine) -> Iterator[None]:
    """Turn errors of the database's driver and of the disk into StoreErrors with a remedy.

    Those that may pass by themselves are :class:`~fedlearn.errors.StoreUnavailable`.
    """
    try:
        yield
    except DBAPIError as error:
        what = " ".join(str(error.orig).split())  # PostgreSQL's take several lines
        kind, advice = _said(error)
        raise kind(f"{_shown(engine.url)}: {what}; {advice}") from error
    except PoolTimeout as error:  # the pool's own, not the driver's
        raise StoreUnavailable(
            f"{_shown(engine.url)}: all connections of this process are in use; let what holds the "
            "database end"
        ) from error
    except OSError as error:
        kind = NoSpace if is_full(error) else StoreError
        raise kind(f"{error.filename}: {error.strerror}; {remedy(error)}") from error


def migrate(engine: Engine) -> None:
    """Bring the schema to this version's; processes that do so at once wait for each other.

    Raises:
        NewerStore: A later version of fedlearn has migrated it.
    """
    known = migrations.revisions()
    with _only_process(engine):
        revision = _revision(engine)
        if revision == known[-1]:
            return
        if revision is not None and revision not in known:
            raise NewerStore(
                f"{_shown(engine.url)} has schema revision {revision!r}, this version of fedlearn "
                f"knows up to {known[-1]!r}; upgrade fedlearn "
                "(`pip install --upgrade fedlearn`)"
            )
        with engine.execution_options(writes=True).begin() as connection:
            one_at_a_time(connection, _MIGRATION_LOCK)
            migrations.upgrade(connection)


def _revision(engine: Engine) -> str | None:
    """Return the revision of the schema; ``None``: there is none yet."""
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return found


def _checked_url(url: str) -> URL:
    """Parse ``url``; what is wrong with it is said without a password that may be in it.

    Nor may such a password stand in the traceback: hence ``from None``.
    """
    usage = "write `sqlite:///FILE` or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError(f"the store's URL is not one; {usage}") from None
    except ValueError:  # of the port, or of a password that stands where a port would
        raise StoreError(f"the port in the store's URL is no number; {usage}") from None
    address, _, _ = url.partition("?")
    if parsed.drivername != "sqlite" and address.count("@") > 1:
        raise StoreError(
            f"the store's URL has an '@' too many; {usage}, and in the password %40 for '@', %3A "
            "for ':', %2F for '/'"
        )
    if parsed.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise StoreError(f"no store is kept by {parsed.drivername!r}; {usage}")
    if parsed.drivername == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise StoreError(f"a store outlives the process, {_shown(parsed)} would not; {usage}")
    return parsed


def _shown(url: URL) -> str:
    """Return a URL without its password, wherever that is."""
    return redacted(url.render_as_string())


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the transactions are ours: see _begin_sqlite
    connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for the writer
    # A checkpoint's file is deleted once its row is: NORMAL could bring the row back.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # A writer that begins as a reader fails, instead of waiting, if another was faster.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _said(error: DBAPIError) -> tuple[type[StoreError], str]:
    """Return what an error of the driver is to its caller, and what to do about it."""
    if isinstance(error, IntegrityError):
        return StoreError, "another process writes the same run: stop one of them"
    name = getattr(error.orig, "sqlite_errorname", None)
    if name is not None:  # only SQLite's errors have one
        family = "_".join(name.split("_")[:2])
        kind = {"SQLITE_FULL": NoSpace, "SQLITE_BUSY": StoreUnavailable}.get(family, StoreError)
        return kind, _REMEDIES.get(family, f"SQLite calls this {family}")
    # No statement: what failed was to connect, to begin or to commit.
    at_the_edge = isinstance(error, OperationalError) and error.statement is None
    kind = StoreUnavailable if error.connection_invalidated or at_the_edge else StoreError
    state = getattr(error.orig, "sqlstate", None)
    if state == _POSTGRESQL_LOCKED:
        return StoreUnavailable, (
            "another session holds what this one writes: let the command or coordinator that it "
            "belongs to end, or end it (`SELECT * FROM pg_stat_activity` names it)"
        )
    if state == _POSTGRESQL_DISK_FULL:
        kind = NoSpace
    return kind, "check that the server runs and that the URL names a database this user may write"


@contextmanager
def _only_process(engine: Engine) -> Iterator[None]:
    """Hold a lock beside an SQLite file: its first switch to WAL does not wait."""
    if engine.dialect.name != "sqlite":
        yield
        return
    database = Path(str(engine.url.database).removeprefix("file:"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(database.with_name(f"{database.name}-lock")) as file:
        wait_for_lock(file)
        yield
