"""Writes a store with two studies, each of which has what a page can show of it."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
from sqlalchemy import insert

from fedlearn.algorithms.cohorts import PoissonCohorts
from fedlearn.core.clock import VirtualClock
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.privacy.events import Event
from fedlearn.privacy.ledger import Charge
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.engine import open_engine
from fedlearn.store.lease import deploy
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.queue import RunQueue
from fedlearn.store.releases import WEIGHTS_FILE, ReleaseStore
from fedlearn.store.rounds import insert_rounds
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import Base, ClientRow, ContactRow, DeploymentRow
from fedlearn.store.studies import NewStudy, StudyStore
from tests.large_store import RELEASE_FACTS, make_rounds
from tests.records import RUN

#: Clients by number: one is in both studies, one in none.
_CLIENTS = {1: "site-lungs", 2: "site-liver", 3: "site-shared", 4: "site-other"}


def open_store(folder: Path) -> Database:
    """Open a database with all tables, ten times faster than by running the migrations."""
    engine = open_engine(sqlite_url(folder / "fedlearn.db"))
    Base.metadata.create_all(engine)
    return Database(engine, runs_dir=folder)


def write_studies(database: Database, studies: Collection[str], *, key: SigningKey) -> None:
    """Write ``studies``, of ``lungs`` and ``liver``, to an empty database.

    A study has a run that failed, one that waits for it, a release, a ledger and two clients.
    """
    clock = VirtualClock()
    with database.writing() as session:
        for number, name in _CLIENTS.items():
            session.execute(insert(ClientRow), _describe_client(number, name))
            session.execute(insert(ContactRow), _describe_contact(number, name))
    for study in studies:
        _write_study(database, study, clock)
        _release(database, study, key)


def _write_study(database: Database, study: str, clock: VirtualClock) -> None:
    members = [f"site-{study}", "site-shared"]
    store, queue = StudyStore(database, clock), RunQueue(database, clock)
    store.create(NewStudy(name=study, epsilon=8.0, target_delta=1e-5, data=(f"{study}-scans",)))
    store.invite(study, members)
    store.record_consents({"site-shared": ["lungs", "liver"]})
    for name, after in ((f"{study}-1", ""), (f"{study}-2", f"{study}-1")):
        config = {"num_rounds": 20}
        queue.submit(Submission(name=name, config=config, after=after, start_from={}, study=study))
    name = f"{study}-1"
    queue.start(name)
    database.create(replace(RUN, name=name, config={"of": study}), from_queue=True)
    deploy(database, name)
    numbers = [number for number, client in _CLIENTS.items() if client in members]
    with database.writing() as session:
        run_id = database.run(name).key
        draw = np.random.default_rng(7)
        rounds = list(make_rounds(draw, 3, num_clients=2, cohort_size=2))
        for each in rounds:
            each.participations.client_ids[:] = numbers
        insert_rounds(session.connection(), run_id, rounds)
        status = {"phase": "waiting", "round": 3, "rounds": 20, "needed": 2}
        session.get_one(DeploymentRow, run_id).status = status
    queue.finish(name, QueueState.FAILED, reason=f"too few reports in {study}")
    event = Event(PoissonCohorts(1000, 100, 200), 1.1)
    charge = Charge(event=event, clip_norm=1.0, round_num=0, attempt=0, count=20)
    ledger = StoredLedger(database, population=f"{study}/{study}-scans", run=name)
    assert ledger.charge(charge, known={})


def _release(database: Database, study: str, key: SigningKey) -> None:
    facts = {
        **RELEASE_FACTS,
        "run": f"{study}-1",
        "run_created_utc": RUN.created_utc,
        "sha256": study.encode().hex().zfill(64),
    }
    store = ReleaseStore(database)
    signed = SignedRelease.sign(facts, key)
    store.tag(store.add(signed, {WEIGHTS_FILE: b"x"}, study=study).signed.id, study)


def _describe_client(number: int, name: str) -> dict[str, object]:
    return {
        "client_id": number,
        "name": name,
        "tags": [f"of={name}"],
        "identity_key": name.encode(),
        "lineage": name.encode(),
        "fingerprint": name,
        "status": "active",
        "enrolled_utc": "2026-01-01T00:00:00Z",
        # All of them end soon, so there is an alert about each.
        "certificate_expires_utc": "1970-01-02T00:00:00Z",
        "revision": number,
    }


def _describe_contact(number: int, name: str) -> dict[str, object]:
    return {
        "client_id": number,
        "is_connected": number % 2 == 0,
        "seen_utc": "2026-01-01T00:00:00Z",
        "software": f"software of {name}",
        "num_examples": 100 * number,
    }
