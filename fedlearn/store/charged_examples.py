"""The examples that each privacy ledger was charged for, as sketches."""

from typing import NamedTuple

from sqlalchemy import select

from fedlearn.store.runs import Database
from fedlearn.store.schema import ExamplesRow

#: Of transactions that remember examples.
_LOCK = 4_113_302_128


class ChargedExamples(NamedTuple):
    """Examples that a ledger was charged for.

    Attributes:
        population: Name of the ledger.
        users: Digest of their division among clients.
        digest: Name of the sketch.
        sketch: Their smallest hashes, little-endian.
    """

    population: str
    users: str
    digest: str
    sketch: bytes


def charged_examples(database: Database) -> list[ChargedExamples]:
    """Return the examples of all ledgers.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        rows = session.scalars(select(ExamplesRow)).all()
        return [ChargedExamples(r.population, r.users, r.digest, r.sketch) for r in rows]


def remember_examples(database: Database, charged: ChargedExamples) -> None:
    """Remember the examples of a ledger, once.

    Raises:
        StoreError: The database cannot be written.
    """
    with database.writing(lock=_LOCK) as session:
        if session.get(ExamplesRow, charged[:3]) is None:
            session.add(ExamplesRow(**charged._asdict()))
