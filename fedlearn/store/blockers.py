"""Sessions of PostgreSQL that stand still inside a transaction and keep another one waiting.

The server ends a session that idles inside a transaction, but not one whose client stopped
between the messages of a pipeline, as psycopg's ``executemany`` sends them: to the server that
one is active.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy import Engine, TextClause, text
from sqlalchemy.orm import Session

from fedlearn.errors import StoreError
from fedlearn.store.engine import explained

#: Seconds between two looks at who keeps the session waiting.
_LOOK_S = 0.1
#: Seconds without a word of its client after which a session stands still: the messages of a
#: transaction come faster, however large it is.
_STILL_S = 0.5

#: Those that a session waits for, those that these wait for, and so on: whoever of them waits for
#: nothing but a word of its client.
_END = text("""
    WITH RECURSIVE blocking (pid) AS (
        SELECT unnest(pg_blocking_pids(:waiting))
        UNION SELECT unnest(pg_blocking_pids(pid)) FROM blocking
    )
    SELECT pid, pg_terminate_backend(pid) FROM blocking JOIN pg_stat_activity USING (pid)
    WHERE usename = current_user AND wait_event_type = 'Client'
    AND state_change < clock_timestamp() - make_interval(secs => :still_s)
""")

#: Those in the middle of a pipeline, whoever waits for them.
_END_ALL = text("""
    SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user
    AND backend_type = 'client backend' AND state = 'active' AND wait_event_type = 'Client'
    AND state_change < clock_timestamp() - make_interval(secs => :still_s)
""")

_log = structlog.get_logger(__name__)


@contextmanager
def ending_blockers(engine: Engine, session: Session) -> Iterator[None]:
    """End sessions that stand still, of the same role, while the block waits for their locks.

    One that works, however long, is waited for. SQLite has no sessions to end.
    """
    if engine.dialect.name != "postgresql":
        yield
        return
    waiting = session.scalar(text("SELECT pg_backend_pid()"))
    is_over = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(engine, waiting, is_over), name="blockers", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def end_stalled_sessions(engine: Engine, *, still_s: float) -> None:
    """End the sessions, of the same role, whose client stopped in a pipeline ``still_s`` ago.

    What they have locked, nobody waits for yet. SQLite has no sessions to end.

    Raises:
        StoreError: The database cannot be read.
    """
    if engine.dialect.name == "postgresql":
        _end(engine, _END_ALL, still_s=still_s)


def _watch(engine: Engine, waiting: int, is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_S):
        try:
            _end(engine, _END, waiting=waiting, still_s=_STILL_S)
        except StoreError as error:  # the block hears of it by itself
            _log.warning("blockers_unknown", error=str(error))


def _end(engine: Engine, statement: TextClause, **values: float) -> None:
    with explained(engine), engine.begin() as connection:
        ended = [pid for pid, is_ended in connection.execute(statement, values) if is_ended]
    if ended:
        _log.warning("standing_session_ended", pids=ended)
