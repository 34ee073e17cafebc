"""The check that a service of many runs, whose processes a test killed, lost nothing by it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select
from torch import Tensor

from fedlearn.identity.bundles import Bundle
from fedlearn.rounds.records import RoundRecord
from fedlearn.rounds.scheduling import QueuedRun, QueueState
from fedlearn.store.runs import Database, StoredRun
from fedlearn.store.schema import ChargeRow
from tests.e2e.survival import springs
from tests.e2e.survival.harness import Miscounted, reporters
from tests.e2e.survival.many_runs import NUM_CLIENTS, PLAIN, PRIVATE, SECURE, ServiceSite
from tests.processes import json_lines

#: Rounding to float32, once per round.
TOLERANCE = 1e-6


def audit_all(site: ServiceSite) -> dict[str, int]:
    """Check the queue, every run, the ledger and the folders of a service that has stopped.

    Returns:
        Counts of what was checked: ``runs``, ``rounds``, ``charges``.

    Raises:
        Miscounted: Something was lost, or counted twice.
    """
    with site.queue() as queue:
        listed = [each.name for each in queue.list()]
        open_runs = {each.name: each.state for each in queue.list() if not _is_done(each)}
    if sorted(listed) != sorted(site.submitted):
        raise Miscounted(f"the queue has {listed}, submitted were {sorted(site.submitted)}")
    if open_runs:
        raise Miscounted(f"not done: {open_runs}")
    totals = Counter(runs=len(listed))
    starts = Counter(line["run"] for line in _events(site, "leading") if "run" in line)
    with site.database() as database:
        charges = _list_charges(database)
        for name in listed:
            run = database.run(name)
            if site.submitted[name] in site.bundled:
                totals["bundled"] += _audit_trainers(run, site.pack(name))
            totals["rounds"] += _audit_run(run, site.submitted[name])
            if site.submitted[name] == PRIVATE:
                totals["charges"] += _audit_charges(run, charges, num_starts=starts[name])
    left = [each.name for each in (site.places.folder / "spool").glob("*")]
    if left:
        raise Miscounted(f"uploads are left: {left}")
    return dict(totals)


def _audit_trainers(run: StoredRun, bundle: Path) -> int:
    """Check that each report was made with the run's bundle, and return their number."""
    reports = {
        (record.round_num, number) for record in run.rounds() for number in reporters(record)
    }
    ran = {key: each for key, each in run.load_trainers().items() if key in reports}
    if set(ran) != reports or set(ran.values()) != {f"bundle:{Bundle.load(bundle).digest}"}:
        raise Miscounted(f"{run.name}: of {len(reports)} reports, {ran}")
    return len(reports)


def _is_done(run: QueuedRun) -> bool:
    return run.state is QueueState.DONE


def _audit_run(run: StoredRun, kind: str) -> int:
    records = list(run.rounds())
    if [record.round_num for record in records] != list(range(run.record.num_rounds)):
        raise Miscounted(f"{run.name}: rounds {[record.round_num for record in records]}")
    for record in records:
        _audit_clients(record, run.name, is_whole=kind != SECURE)
    checkpoint = run.load()
    assert checkpoint is not None
    if kind == PLAIN:
        _audit_votes(records, checkpoint.tensors["params/votes"], run.name)
    elif kind == SECURE:
        _audit_point(records, checkpoint.tensors["params/place"], run.name)
    return len(records)


def _audit_clients(record: RoundRecord, name: str, *, is_whole: bool) -> None:
    asked = sorted(each.client_id for each in record.participations)
    if len(set(asked)) != len(asked):
        raise Miscounted(f"{name}, round {record.round_num}: clients {asked}")
    if is_whole and reporters(record) != list(range(NUM_CLIENTS)):
        raise Miscounted(f"{name}, round {record.round_num}: {record.participations}")


def _audit_votes(records: Sequence[RoundRecord], votes: Tensor, name: str) -> None:
    expected = torch.zeros_like(votes)
    for record in records:
        reported = reporters(record)
        expected[record.round_num, reported] = 1.0 / len(reported)
    if not torch.equal(votes, expected):
        raise Miscounted(f"{name}: the model has {votes[: len(records), :NUM_CLIENTS]}")


def _audit_point(records: Sequence[RoundRecord], place: Tensor, name: str) -> None:
    """Compare a secure run's model with the plain mean over the recorded clients."""
    point = torch.zeros_like(place, dtype=torch.float64)
    for record in records:
        reported = reporters(record)
        weights = [float(springs.examples(each)) for each in reported]
        pulls = [
            w * (springs.place_of(each) - point) for w, each in zip(weights, reported, strict=True)
        ]
        point += springs.RATE * sum(pulls, torch.zeros_like(point)) / sum(weights)
    if float((place - point).abs().max()) > TOLERANCE:
        raise Miscounted(f"{name}: the model is off by {float((place - point).abs().max()):g}")


def _list_charges(database: Database) -> Counter[tuple[str, int]]:
    """Return how often each round of each run was charged; fast rounds are charged together."""
    with database.reading() as session:
        rows = session.execute(select(ChargeRow.run, ChargeRow.round_num, ChargeRow.count))
        charged = Counter[tuple[str, int]]()
        for run, round_num, number in rows:
            charged.update((run, round_num + later) for later in range(number))
        return charged


def _audit_charges(
    run: StoredRun, charges: Mapping[tuple[str, int], int], *, num_starts: int
) -> int:
    """Check that each round is charged, and again only by a process that took the run over."""
    own = {round_num: number for (name, round_num), number in charges.items() if name == run.name}
    missing = [each.round_num for each in run.rounds() if own.get(each.round_num, 0) < 1]
    if missing or max(own.values()) > num_starts:
        raise Miscounted(f"{run.name}: charges {own} in {num_starts} starts")
    return sum(own.values())


def _events(site: ServiceSite, event: str) -> list[dict[str, Any]]:
    """Return the lines of this event in the logs of all services."""
    return [line for line in json_lines(site.log("service")) if line["message"] == event]
