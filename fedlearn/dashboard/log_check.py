"""Checks the chain of the audit log against the checkpoints in the same database."""

from dataclasses import dataclass

from fedlearn.core.clock import WallClock, utc
from fedlearn.identity.audit_checks import ChainReport, LogCheckpoint, verify_chain
from fedlearn.store.audit import read_entries
from fedlearn.store.audit_checkpoints import read_checkpoints
from fedlearn.store.runs import Database


@dataclass(frozen=True, kw_only=True)
class CheckedLog:
    """What a check of the log found, and when.

    Attributes:
        newest: The newest stored checkpoint, whose key must have signed all others; ``None`` if
            there is none, so that only the hashes were compared.
    """

    report: ChainReport
    newest: LogCheckpoint | None
    at_utc: str


def check_log(database: Database, clock: WallClock) -> CheckedLog:
    """Check the log.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        checkpoints = read_checkpoints(session)
        newest = checkpoints[-1] if checkpoints else None
        report = verify_chain(
            read_entries(session),
            [(f"stored checkpoint at entry {each.position}", each) for each in checkpoints],
            public_key=None if newest is None else newest.public_key,
        )
    return CheckedLog(report=report, newest=newest, at_utc=utc(clock.unix_s()))
