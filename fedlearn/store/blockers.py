"""End PostgreSQL sessions that stall inside a transaction and block another session.

The server itself ends a session that idles inside a transaction. It does not end one whose client
stopped between the messages of a pipeline, as sent by psycopg's ``executemany``, because it counts
that session as active.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy import Engine, TextClause, text
from sqlalchemy.orm import Session

from fedlearn.errors import StoreError
from fedlearn.store.engine import explain_errors

#: Seconds between two checks for sessions that block the waiting one.
_LOOK_S = 0.1
#: Seconds without a message from its client after which a session counts as stalled. The messages
#: of a transaction arrive faster than this, however large it is.
_STILL_S = 0.5

#: Ends, among the sessions that a session waits for directly or indirectly, those that are waiting
#: only for their own client.
_END = text("""
    WITH RECURSIVE blocking (pid) AS (
        SELECT unnest(pg_blocking_pids(:waiting))
        UNION SELECT unnest(pg_blocking_pids(pid)) FROM blocking
    )
    SELECT pid, pg_terminate_backend(pid) FROM blocking JOIN pg_stat_activity USING (pid)
    WHERE usename = current_user AND wait_event_type = 'Client'
    AND state_change < clock_timestamp() - make_interval(secs => :still_s)
""")

#: Ends all sessions stalled in the middle of a pipeline, even if no session waits for them.
_END_ALL = text("""
    SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user
    AND backend_type = 'client backend' AND state = 'active' AND wait_event_type = 'Client'
    AND state_change < clock_timestamp() - make_interval(secs => :still_s)
""")

_log = structlog.get_logger(__name__)


@contextmanager
def end_blockers(engine: Engine, session: Session) -> Iterator[None]:
    """End stalled sessions of the same role while the block waits for their locks.

    A session that is working is left alone, however long it takes. SQLite has no sessions to end.
    """
    if engine.dialect.name != "postgresql":
        yield
        return
    # The blocked session cannot run a query while it waits, so a thread looks from another
    # connection.
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
    """End sessions of the same role whose client stopped in a pipeline ``still_s`` ago.

    This frees their locks before another session waits for them. SQLite has no sessions to end.

    Raises:
        StoreError: The database cannot be read.
    """
    if engine.dialect.name == "postgresql":
        _end(engine, _END_ALL, still_s=still_s)


def _watch(engine: Engine, waiting: int, is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_S):
        try:
            _end(engine, _END, waiting=waiting, still_s=_STILL_S)
        except StoreError as error:  # the block runs into the same error by itself
            _log.warning("blockers_unknown", error=str(error))


def _end(engine: Engine, statement: TextClause, **values: float) -> None:
    with explain_errors(engine), engine.begin() as connection:
        ended = [pid for pid, is_ended in connection.execute(statement, values) if is_ended]
    if ended:
        _log.warning("standing_session_ended", pids=ended)
