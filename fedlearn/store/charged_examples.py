"""Sketches of the examples that each privacy ledger was charged for."""

from typing import NamedTuple

from sqlalchemy import select

from fedlearn.store.runs import Database
from fedlearn.store.schema import ExamplesRow

#: Serializes transactions that store examples.
_LOCK = 4_113_302_128


class ChargedExamples(NamedTuple):
    """A sketch of the examples that a ledger was charged for.

    Attributes:
        population: Name of the ledger.
        users: Digest of how the examples were divided among clients.
        digest: Digest that identifies the sketch.
        sketch: The smallest hashes of the examples, little-endian.
    """

    population: str
    users: str
    digest: str
    sketch: bytes


def load_charged_examples(database: Database) -> list[ChargedExamples]:
    """Return the sketches of all ledgers.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        rows = session.scalars(select(ExamplesRow)).all()
        return [ChargedExamples(r.population, r.users, r.digest, r.sketch) for r in rows]


def remember_examples(database: Database, charged: ChargedExamples) -> None:
    """Store a sketch of a ledger's examples, unless it is stored already.

    Raises:
        StoreError: The database cannot be written.
    """
    with database.writing(lock=_LOCK) as session:
        # The primary key: population, users, digest.
        if session.get(ExamplesRow, charged[:3]) is None:
            session.add(ExamplesRow(**charged._asdict()))
