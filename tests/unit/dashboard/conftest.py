"""A dashboard over a small store, whose names and reasons try to break out of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import (
    AuditRow,
    ChargeRow,
    ClientRow,
    ContactRow,
    MetricRow,
    ParticipationRow,
    QueueRow,
    ReleaseRow,
    RunRow,
)
from tests.asgi import Browser
from tests.large_store import LARGE, write_large_store

#: Text that a browser would run if a page did not escape it.
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a deployed run of 1,000 rounds and three small ones."""
    folder = tmp_path_factory.mktemp("runs")
    write_large_store(folder, num_clients=60, num_rounds=1000, cohort_size=6, num_small=3)
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        key = database.run(LARGE).key
        with database.writing() as session:
            of_run = update(RunRow).where(RunRow.id == key)
            session.execute(of_run.values(error=HOSTILE, versions={HOSTILE: HOSTILE}))
            session.execute(
                of_run.values(
                    config={"num_rounds": 1000, "cohort": {"num_wanted": 6, "x": HOSTILE}}
                )
            )
            session.execute(update(ParticipationRow).values(reason=HOSTILE))
            first = ClientRow.client_id == 0
            session.execute(
                update(ClientRow).where(first).values(name=HOSTILE[:64], tags=[HOSTILE])
            )
            session.execute(update(ContactRow).values(software=HOSTILE))
            latest = MetricRow.run_id == key, MetricRow.name == "clients/loss_mean"
            session.execute(update(MetricRow).where(*latest).values(name=HOSTILE))
            session.execute(update(QueueRow).values(submitted_by=HOSTILE, reason=HOSTILE))
            session.execute(update(ReleaseRow).values(run=HOSTILE[:64]))
            hostile = update(ChargeRow).where(ChargeRow.population == "patients")
            session.execute(hostile.values(population=HOSTILE))
            session.execute(update(AuditRow).values(actor=HOSTILE, subject=HOSTILE))
    return folder


@pytest.fixture(scope="session")
def database(runs_dir: Path) -> Iterator[Database]:
    """Its database, opened once to read: each connection pool compiles its queries anew."""
    with Database.open_to_read(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        yield database


@pytest.fixture
def browser(database: Database) -> Browser:
    """A client of its dashboard."""
    return Browser(build_app(Dashboard(database, VirtualClock(), place="runs")))
