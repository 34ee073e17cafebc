"""Connect to the store's database, migrate its schema, and explain its errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from fedlearn.core.files import is_full, suggest_remedy
from fedlearn.core.locks import open_lock, wait_for_lock
from fedlearn.core.redaction import redact
from fedlearn.errors import NewerStore, NoSpace, StoreError, StoreUnavailable
from fedlearn.store import migrations
from fedlearn.store.schema import Base

_LOCK_WAIT_S = 30.0
_MIGRATION_LOCK = 7_306_087_429  # PostgreSQL's advisory locks are named by a number

#: Settings of the server's side: it ends within seconds a session that idles inside a transaction
#: or whose machine lost power, since that would block other coordinators. If something still holds
#: a lock, a write waits as long as on SQLite and then fails.
_SESSION = {
    "lock_timeout": f"{_LOCK_WAIT_S:.0f}s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
}

#: Settings of the client's side: it detects a dead server or network as fast.
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
    "SQLITE_BUSY": "another process has been writing for a long time: let it finish",
    "SQLITE_NOTADB": "the file is not a database: move it away, or choose another",
    "SQLITE_READONLY": "make the file and its folder writable, or choose another",
    "SQLITE_CANTOPEN": "its folder must exist and be writable",
    "SQLITE_FULL": "the disk is full: free some space",
    "SQLITE_IOERR": "the disk is full or failing: free some space, or check it",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, or move it away",
}


#: Further settings of an engine that only reads: the database itself refuses any write.
_POSTGRESQL_READS = "-c default_transaction_read_only=on"
_SQLITE_READS = "PRAGMA query_only = ON"


def open_engine(url: str, *, only_reads: bool = False) -> Engine:
    """Create the engine for the database at ``url``, without connecting yet.

    With ``only_reads``, the database refuses every write, and a missing file is not created.

    Raises:
        StoreError: The URL is not valid for a store, or its driver is not installed.
    """
    parsed = _require_url(url)
    if parsed.get_backend_name() == "postgresql":
        options = {k: v for k, v in _POSTGRESQL_OPTIONS.items() if k not in parsed.query}
        if only_reads:
            options["options"] = f"{options.get('options', '')} {_POSTGRESQL_READS}"
        try:
            # pool_pre_ping replaces stale connections: the server may restart during a run.
            return create_engine(parsed, pool_pre_ping=True, connect_args=options)
        except ImportError as error:
            raise StoreError(
                "PostgreSQL's driver is not installed; run `pip install 'fedlearn[postgresql]'`"
            ) from error
    patience = {} if "timeout" in parsed.query else {"timeout": _LOCK_WAIT_S}
    engine = create_engine(parsed, connect_args=patience)
    event.listen(engine, "connect", _configure_sqlite_reader if only_reads else _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def serialize_transactions(connection: Connection, lock: int) -> None:
    """Serialize transactions that call this with the same ``lock``.

    SQLite allows only one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({lock})"))


@contextmanager
def explain_errors(engine: Engine) -> Iterator[None]:
    """Convert errors of the database driver and the disk into StoreErrors with a remedy.

    Errors that may be temporary become :class:`~fedlearn.errors.StoreUnavailable`.
    """
    try:
        yield
    except DBAPIError as error:
        what = " ".join(str(error.orig).split())  # PostgreSQL's messages span several lines
        kind, advice = _classify_error(error)
        raise kind(f"{_redact_url(engine.url)}: {what}; {advice}") from error
    except PoolTimeout as error:  # the pool's own, not the driver's
        raise StoreUnavailable(
            f"{_redact_url(engine.url)}: all connections of this process are in use; end what uses "
            "the database"
        ) from error
    except OSError as error:
        kind = NoSpace if is_full(error) else StoreError
        raise kind(f"{error.filename}: {error.strerror}; {suggest_remedy(error)}") from error


def migrate(engine: Engine) -> None:
    """Create this version's schema, or upgrade to it; concurrent migrations wait for each other.

    Raises:
        NewerStore: A later version of fedlearn has migrated the database.
    """
    known = migrations.revisions()
    with _lock_sqlite_file(engine):
        with engine.connect() as connection:
            revision = _read_revision(connection)
        if revision == known[-1]:
            return
        if revision is not None and revision not in known:
            raise _describe_newer(engine, revision)
        with engine.execution_options(writes=True).begin() as connection:
            serialize_transactions(connection, _MIGRATION_LOCK)
            # Both read the revision again, under the lock: another process may have been faster.
            if _read_revision(connection) is None:
                # Revision by revision takes four times as long, without Alembic's own import.
                Base.metadata.create_all(connection, checkfirst=False)
                migrations.stamp(connection)
            else:
                migrations.upgrade(connection)


def require_schema(engine: Engine) -> None:
    """Check that the database has this version's schema, and change nothing.

    Raises:
        NewerStore: A later version of fedlearn has migrated the database.
        StoreError: There is no database, no store in it, or one of an earlier version.
    """
    where, known = _redact_url(engine.url), migrations.revisions()
    if engine.dialect.name == "sqlite" and not Path(str(engine.url.database)).is_file():
        raise StoreError(f"{where}: there is no such file; `fedlearn simulate` makes a run")
    with engine.connect() as connection:
        revision = _read_revision(connection)
    if revision is None:
        raise StoreError(f"{where} holds no runs; name the database of a runs folder")
    if revision not in known:
        raise _describe_newer(engine, revision)
    if revision != known[-1]:
        raise StoreError(
            f"{where} has schema revision {revision!r}, and this version of fedlearn reads "
            f"{known[-1]!r}; `fedlearn runs` upgrades it"
        )


def _describe_newer(engine: Engine, revision: str) -> NewerStore:
    return NewerStore(
        f"{_redact_url(engine.url)} has schema revision {revision!r}, this version of fedlearn "
        f"knows up to {migrations.revisions()[-1]!r}; upgrade fedlearn "
        "(`pip install --upgrade fedlearn`)"
    )


def _read_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def _require_url(url: str) -> URL:
    """Parse and check ``url`` without revealing a password in errors.

    ``from None`` keeps a password out of the traceback, too.
    """
    usage = "write `sqlite:///FILE` or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError(f"the store's URL is invalid; {usage}") from None
    except ValueError:  # the port is no number, or part of a password was parsed as one
        raise StoreError(f"the port in the store's URL is not a number; {usage}") from None
    address, _, _ = url.partition("?")
    if parsed.drivername != "sqlite" and address.count("@") > 1:
        raise StoreError(
            f"the store's URL has more than one '@'; {usage}, with %40 for '@', %3A for ':' and "
            "%2F for '/' in the password"
        )
    if parsed.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise StoreError(f"{parsed.drivername!r} is not a supported database; {usage}")
    if parsed.drivername == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise StoreError(
            f"{_redact_url(parsed)} would be lost with the process, a store must not; {usage}"
        )
    return parsed


def _redact_url(url: URL) -> str:
    return redact(url.render_as_string())


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the transactions are ours: see _begin_sqlite
    connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for the writer
    # A checkpoint's file is deleted after its row. With NORMAL, a power loss could undo the commit
    # and bring back a row without a file.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _configure_sqlite_reader(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute(_SQLITE_READS)


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins as a reader and then writes fails at once, instead of waiting, if
    # another writer came first.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _classify_error(error: DBAPIError) -> tuple[type[StoreError], str]:
    if isinstance(error, IntegrityError):
        return StoreError, "another process writes to the same run: stop one of them"
    name = getattr(error.orig, "sqlite_errorname", None)
    if name is not None:  # only SQLite's errors have one
        # Extended names such as SQLITE_BUSY_SNAPSHOT belong to the same family.
        family = "_".join(name.split("_")[:2])
        kind = {"SQLITE_FULL": NoSpace, "SQLITE_BUSY": StoreUnavailable}.get(family, StoreError)
        return kind, _REMEDIES.get(family, f"SQLite calls this {family}")
    # An error without a statement came from connecting, beginning or committing.
    at_the_edge = isinstance(error, OperationalError) and error.statement is None
    kind = StoreUnavailable if error.connection_invalidated or at_the_edge else StoreError
    state = getattr(error.orig, "sqlstate", None)
    if state == _POSTGRESQL_LOCKED:
        return StoreUnavailable, (
            "another session has locked the rows to write: wait for its command or coordinator to "
            "end, or end the session (`SELECT * FROM pg_stat_activity` shows it)"
        )
    if state == _POSTGRESQL_DISK_FULL:
        kind = NoSpace
    return kind, "check that the server runs and that the URL names a database this user may write"


@contextmanager
def _lock_sqlite_file(engine: Engine) -> Iterator[None]:
    """Hold a lock file next to an SQLite file, whose first switch to WAL would fail, not wait."""
    if engine.dialect.name != "sqlite":
        yield
        return
    database = Path(str(engine.url.database).removeprefix("file:"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(database.with_name(f"{database.name}-lock")) as file:
        wait_for_lock(file)
        yield
