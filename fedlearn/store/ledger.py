"""The privacy ledger, which records what was released about users' data, in the database."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts
from fedlearn.core.clock import utc_now
from fedlearn.privacy.events import Cohorts, Event, ExampleCohorts, Spent
from fedlearn.privacy.ledger import Charge
from fedlearn.store.paging import Page
from fedlearn.store.runs import Database
from fedlearn.store.schema import ChargeRow

_POISSON, _FIXED, _CYCLIC, _EXAMPLE = "poisson", "fixed", "cyclic", "example"
#: Serializes transactions that charge, so that each sees the charges of the others.
_LOCK = 4_113_302_127


class StoredLedger:
    """A :class:`fedlearn.privacy.ledger.Ledger` in the database, charged for one run.

    Attributes:
        database: The database with the ledger.
        population: Name of the clients whose ledger it is; charges of all runs with the same
            population add up.
        run: Name of the run that charges.

    Every method that accesses the database raises :class:`~fedlearn.errors.StoreError` if it cannot
    be read or written.
    """

    def __init__(self, database: Database, *, population: str, run: str) -> None:
        self.database, self.population, self.run = database, population, run
        self._last = -1

    def load_spent(self) -> dict[Event, int]:
        """Return how often each event was charged, over all runs."""
        with self.database.reading() as session:
            return self._count_events(session, of_run=False)

    def load_spent_by_run(self) -> dict[Event, int]:
        """Return how often this run has charged each event."""
        with self.database.reading() as session:
            return self._count_events(session, of_run=True)

    def charge(self, charge: Charge, *, known: Spent) -> bool:
        """Record a charge, unless another process has charged since ``known`` was read."""
        sampling, users, expected, largest = _encode_cohorts(charge.event.cohorts)
        mine = ChargeRow.population == self.population
        with self.database.writing(lock=_LOCK) as session:
            # By event: a run may have taken back what another one has charged since, so equal sums
            # do not mean that the ledger is as the caller knows it.
            found = self._count_events(session, of_run=False)
            if found != {event: count for event, count in known.items() if count}:
                return False
            position = session.scalar(select(func.count()).where(mine)) or 0
            row = ChargeRow(
                population=self.population,
                position=position,
                run=self.run,
                round_num=charge.round_num,
                attempt=charge.attempt,
                count=charge.count,
                sampling=sampling,
                num_users=users,
                expected=expected,
                largest=largest,
                noise_multiplier=charge.event.noise_multiplier,
                clip_norm=charge.clip_norm,
                charged_utc=utc_now(),
            )
            session.add(row)
        self._last = position
        return True

    def take_back(self, count: int) -> None:
        """Take back ``count`` releases of the last charge."""
        mine = ChargeRow.population == self.population, ChargeRow.position == self._last
        with self.database.writing(lock=_LOCK) as session:
            session.execute(update(ChargeRow).where(*mine).values(count=ChargeRow.count - count))

    def _count_events(self, session: Session, *, of_run: bool) -> dict[Event, int]:
        what = (
            ChargeRow.sampling,
            ChargeRow.num_users,
            ChargeRow.expected,
            ChargeRow.largest,
            ChargeRow.noise_multiplier,
            ChargeRow.run,
        )
        query = select(*what, func.sum(ChargeRow.count)).where(
            ChargeRow.population == self.population
        )
        if of_run:
            query = query.where(ChargeRow.run == self.run)
        counted = dict[Event, int]()
        for sampling, users, expected, largest, noise, run, count in session.execute(
            query.group_by(*what)
        ):
            event = Event(_decode_cohorts(sampling, users, expected, largest), noise).for_run(run)
            # `int`: PostgreSQL sums integers to a Decimal. Add up: events of different runs may be
            # equal.
            counted[event] = counted.get(event, 0) + int(count)
        return {event: count for event, count in counted.items() if count}


def find_ledgers(database: Database, prefix: str) -> list[str]:
    """Return the names of the ledgers that begin with ``prefix``, in ascending order."""
    with database.reading() as session:
        names = select(ChargeRow.population).distinct().order_by(ChargeRow.population)
        return [each for each in session.scalars(names) if each.startswith(prefix)]


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """What one run has charged to a ledger.

    Attributes:
        population: Name of the ledger.
        run: Name of the run, which may have been deleted since.
        num_charged: Releases charged.
        charged_utc: When it charged last.
    """

    population: str
    run: str
    num_charged: int
    charged_utc: str


def list_ledgers(
    database: Database, *, prefix: str, page: int, size: int
) -> Page[Sequence[LedgerLine]]:
    """Return a page of the ledgers whose names begin with ``prefix``, by name.

    Each is what its runs have charged, last charged first.

    Raises:
        StoreError: The database cannot be read.
    """
    row, last = ChargeRow, func.max(ChargeRow.charged_utc)
    # Not LIKE, which ignores case on SQLite.
    mine = func.substr(row.population, 1, len(prefix)) == prefix
    names = select(row.population).where(mine).distinct().order_by(row.population)
    with database.reading() as session:
        total = session.scalar(select(func.count(row.population.distinct())).where(mine)) or 0
        shown = session.scalars(names.offset((page - 1) * size).limit(size)).all()
        charged = (
            select(row.population, row.run, func.sum(row.count), last)
            .where(row.population.in_(shown))
            .group_by(row.population, row.run)
            .order_by(last.desc(), row.run)
        )
        lines = dict[str, list[LedgerLine]]({name: [] for name in shown})
        for population, run, num, charged_utc in session.execute(charged):
            line = LedgerLine(
                population=population, run=run, num_charged=int(num), charged_utc=charged_utc
            )
            lines[population].append(line)
    return Page(rows=list(lines.values()), number=page, size=size, total=total)


def _encode_cohorts(cohorts: Cohorts) -> tuple[str, int, int, int]:
    match cohorts:
        case PoissonCohorts(population, expected, largest):
            return _POISSON, population, expected, largest
        case FixedCohorts(population, size):
            return _FIXED, population, size, size
        case CyclicCohorts(population, expected, largest):
            return _CYCLIC, population, expected, largest
        case ExampleCohorts(population, expected):
            return _EXAMPLE, population, expected, population


def _decode_cohorts(sampling: str, users: int, expected: int, largest: int) -> Cohorts:
    match sampling:
        case "poisson":
            return PoissonCohorts(users, expected, largest)
        case "cyclic":
            return CyclicCohorts(users, expected, largest)
        case "example":
            return ExampleCohorts(users, expected)
        case _:
            return FixedCohorts(users, largest)
