"""Writes a store as large as a deployment's after a year, for tests of what must stay fast.

    python -m tests.large_store FOLDER

makes a folder of runs that ``fedlearn dashboard FOLDER`` shows: one deployed run of 10,000 rounds
with 10,000 enrolled clients, a hundred of them asked in each round, and 200 smaller runs.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from sqlalchemy import insert

from fedlearn.algorithms.cohorts import PoissonCohorts
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.participations import Participations
from fedlearn.identity.actors import Actor
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.privacy.events import Event
from fedlearn.privacy.ledger import Charge
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.audit_checkpoints import sign_checkpoint
from fedlearn.store.lease import deploy
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.queue import RunQueue
from fedlearn.store.releases import WEIGHTS_FILE, ReleaseStore
from fedlearn.store.rounds import insert_rounds
from fedlearn.store.runs import Database, find_run_id, sqlite_url
from fedlearn.store.schema import ClientRow, ContactRow, DeploymentRow
from fedlearn.store.studies import NewStudy, StudyStore
from tests.records import RUN

#: Name of the large run.
LARGE = "hospitals"
_NUM_STATUSES = 4
_FAILED = 2
_REASONS = ("out of memory", "the loss is not finite", "connection lost while uploading")
_ANN = Actor(kind="operator", name="ann", origin="it-7")
#: Runs of the queue, with the run that each comes after.
_QUEUED = {"lungs-1": "", "liver-1": "", "liver-2": "liver-1", "kidney-1": "", "lungs-2": "lungs-1"}
#: A statement about a release; the other values are its own.
RELEASE_FACTS: Mapping[str, object] = {
    "run_created_utc": "2026-01-01T00:00:00Z",
    "released_utc": "2026-01-02T00:00:00Z",
    "is_deployed": True,
    "num_rounds": 20,
    "planned_rounds": 20,
    "num_clients_asked": 50,
    "num_clients_reported": 48,
    "num_bytes": 7,
    "metrics": {"accuracy": 0.93, "loss": 0.21},
    "privacy": {
        "epsilon": 2.5,
        "epsilon_with_cohorts": 9.0,
        "delta": 1e-5,
        "hidden": "one user added or removed",
    },
    "config": {"algorithm": {"name": "fedavg"}, "client": {"epochs": 2}},
    "config_hash": "ab",
    "versions": {"fedlearn": "0.1.0"},
}
_BEGAN_S, _DAY_S, _WAVE = 1_780_000_000.0, 86_400.0, 400.0
_SPIKE_AT = 4321


def write_large_store(
    folder: Path,
    *,
    num_clients: int,
    num_rounds: int,
    cohort_size: int,
    num_small: int,
    url: str | None = None,
) -> None:
    """Write a folder of runs with one large deployed run and ``num_small`` small ones."""
    with Database.open(url or sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        for number in range(num_small):
            status = RunStatus.FAILED if number % 7 == 0 else RunStatus.DONE
            small = replace(
                RUN,
                name=f"digits-{number:03}",
                status=status,
                error="the loss is not finite" if status is RunStatus.FAILED else "",
                created_utc=utc(_BEGAN_S + number * _DAY_S / 4),
                config={"seed": number, "client": {"epochs": number % 5 + 1}},
                config_hash=sha256(str(number).encode()).hexdigest(),
                versions={"fedlearn": "0.1.0"},
            )
            _write_run(database, small, num_rounds=20, num_clients=50, cohort_size=10)
        config: dict[str, object] = {
            "num_rounds": num_rounds,
            "cohort": {"num_wanted": cohort_size},
            "privacy": {"mode": "off"},
        }
        large = replace(
            RUN,
            name=LARGE,
            created_utc=utc(_BEGAN_S),
            num_rounds=num_rounds + 1,
            config=config,
            config_hash=sha256(b"").hexdigest(),
            versions={"fedlearn": "0.1.0", "torch": "2.13.0"},
        )
        _write_run(
            database, large, num_rounds=num_rounds, num_clients=num_clients, cohort_size=cohort_size
        )
        _deploy(database, num_clients=num_clients, num_rounds=num_rounds)
        _serve(database.acting_as(_ANN), SigningKey(folder / "keys"))


def _write_run(
    database: Database, record: RunRecord, *, num_rounds: int, num_clients: int, cohort_size: int
) -> None:
    database.create(record)
    draw = np.random.default_rng(list(record.name.encode()))
    with database.writing() as session:
        run_id = find_run_id(session, record.name)
        rounds = make_rounds(draw, num_rounds, num_clients=num_clients, cohort_size=cohort_size)
        insert_rounds(session.connection(), run_id, list(rounds))


def make_rounds(
    draw: np.random.Generator, num_rounds: int, *, num_clients: int, cohort_size: int
) -> Iterator[RoundRecord]:
    """Yield the rounds of a run whose accuracy rises and whose loss has one spike."""
    best = draw.uniform(0.85, 0.97)
    for number in range(num_rounds):
        codes = draw.choice(_NUM_STATUSES, cohort_size, p=(0.9, 0.05, 0.04, 0.01)).astype(np.int64)
        accuracy = best - 0.8 * math.exp(-4 * number / num_rounds) + draw.normal(0, 0.01)
        loss = 0.1 + 2.2 * math.exp(-5 * number / num_rounds) + abs(draw.normal(0, 0.02))
        if number == _SPIKE_AT:
            loss = 9.0
        yield RoundRecord(
            round_num=number,
            attempt=0,
            outcome=Outcome.SKIPPED if number % 97 == 5 else Outcome.AGGREGATED,
            participations=Participations(
                client_ids=draw.integers(num_clients, size=cohort_size),
                codes=codes,
                durations_s=draw.lognormal(2, 0.6, cohort_size),
                num_examples=draw.integers(50, 500, size=cohort_size),
                losses=draw.normal(loss, 0.05, cohort_size),
                reasons={
                    int(place): _REASONS[int(place) % len(_REASONS)]
                    for place in np.flatnonzero(codes >= _FAILED)
                },
            ),
            train_loss=loss * 0.9,
            duration_s=40.0,
            virtual_s=60.0 * number,
            seconds=45.0 + 10 * math.sin(number / _WAVE),
            metrics={
                "accuracy": accuracy,
                "loss": loss,
                "clients/accuracy_mean": accuracy - 0.02,
                "clients/accuracy_p10": accuracy - 0.12,
                "clients/accuracy_p50": accuracy - 0.01,
                "clients/accuracy_p90": min(1.0, accuracy + 0.05),
                "clients/loss_mean": loss * 1.1,
            },
        )


def _deploy(database: Database, *, num_clients: int, num_rounds: int) -> None:
    deploy(database, LARGE)
    ids = range(num_clients)
    digests = [sha256(str(number).encode()) for number in ids]
    clients = [
        {
            "client_id": number,
            "name": f"site-{number:05}",
            "tags": [f"country={('ch', 'de', 'fr', 'it')[number % 4]}"],
            "identity_key": digest.digest(),
            "lineage": digest.digest(),
            "fingerprint": digest.hexdigest(),
            "status": "revoked" if number % 500 == 7 else "active",
            "enrolled_utc": utc(_BEGAN_S - number),
            "certificate_expires_utc": utc(_BEGAN_S + 365 * _DAY_S + number),
            "revision": number + 1,
        }
        for number, digest in zip(ids, digests, strict=True)
    ]
    contacts = [
        {
            "client_id": number,
            "is_connected": number % 3 != 0,
            "seen_utc": utc(_BEGAN_S + 100 * _DAY_S - 60 * (number % 5000)),
            "software": f"fedlearn 0.{number % 3}.0",
            "num_examples": 100 + number % 900,
        }
        for number in ids
    ]
    asked = {
        str(number): {"phase": ("training", "reported", "uploading")[number % 3], "since_s": 12.0}
        for number in range(40)
    }
    status = {
        "phase": "round",
        "round": num_rounds,
        "rounds": num_rounds + 1,
        "attempt": 0,
        "wanted": 100,
        "min_reports": 60,
        "needed": 60,
        "connected": 6667,
        "eligible": 6500,
        "exchange": {"kind": "train", "remaining_s": 42.0},
        "clients": asked,
    }
    with database.writing() as session:
        for table, rows in ((ClientRow, clients), (ContactRow, contacts)):
            session.execute(insert(table), rows)
        [row] = session.query(DeploymentRow)
        row.status, row.holder, row.epoch, row.beat = status, "coordinator-1", 1, 7


def _serve(database: Database, key: SigningKey) -> None:
    """Add what a service of many runs has: a queue, releases, privacy charges, an audit log."""
    queue = RunQueue(database, SystemClock())
    for name, after in _QUEUED.items():
        config = {"num_rounds": 50}
        queue.submit(Submission(name=name, config=config, after=after, start_from={}))
    queue.start("lungs-1")
    queue.finish("lungs-1", QueueState.FAILED, reason="round 7 failed: too few reports")
    queue.start("liver-1")
    queue.cancel("kidney-1")
    study = NewStudy(name="lungs", epsilon=8.0, target_delta=1e-5)
    StudyStore(database, SystemClock()).create(study)
    event = Event(PoissonCohorts(1000, 100, 200), 1.1)
    charge = Charge(event=event, clip_norm=1.0, round_num=0, attempt=0, count=20)
    for population in ("lungs/scans", "patients"):
        ledger = StoredLedger(database, population=population, run="digits-001")
        assert ledger.charge(charge, known={})
    releases = ReleaseStore(database)
    for number in (1, 2):
        facts = {**RELEASE_FACTS, "run": f"digits-{number:03}", "sha256": f"{number:064x}"}
        found = releases.add(SignedRelease.sign(facts, key), {WEIGHTS_FILE: b"weights"})
    releases.tag(found.signed.id, "champion")
    with database.writing() as session:
        sign_checkpoint(session, key)


if __name__ == "__main__":
    write_large_store(
        Path(sys.argv[1]), num_clients=10_000, num_rounds=10_000, cohort_size=100, num_small=200
    )
