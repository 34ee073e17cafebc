"""Roll a run back to an earlier checkpoint and discard the rounds after it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fedlearn.core.clock import Clock
from fedlearn.deployment.places import folder_of, upload_store_path
from fedlearn.errors import DeploymentError
from fedlearn.rounds.records import Checkpoint
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.runs import Database, StoredRun

#: Lease time while rolling back; a live coordinator renews its lease every second.
_SILENCE_S = 5.0


def roll_back(database: Database, name: str, *, to: int, clock: Clock) -> Checkpoint:
    """Roll back to the checkpoint after ``to`` rounds, discard later rounds, and return it.

    Clients of a deployed run see a new run from then on, and their uploads are removed. The privacy
    cost of the discarded rounds stays charged, since their models were released.

    Raises:
        DeploymentError: A coordinator is running the run.
        StoreError: There is no such run or checkpoint, or it is damaged; nothing is discarded.
    """
    if not database.run(name).record.is_deployed:
        return database.run(name).rewind(to=to)
    holder = f"fedlearn rollback:{os.getpid()}"
    lease = Lease(database, name, holder=holder, ttl_s=_SILENCE_S, clock=clock)
    # Long enough to see that a coordinator is silent, if it has died without releasing the lease.
    ends_s = clock.now_s() + 2 * _SILENCE_S
    if not lease.acquire(is_stopped=lambda: clock.now_s() > ends_s):
        raise DeploymentError(
            f"{name} is coordinated by {find_deployment(database, name).holder}; stop that "
            "coordinator first, and start it again afterwards"
        )
    try:
        dropped = find_deployment(database, name).run_id
        run = database.run(name, guard=lease.guard)
        checkpoint = run.rewind(to=to)
        shutil.rmtree(upload_store_path(_folder(run), dropped), ignore_errors=True)
    finally:
        lease.release()
    return checkpoint


def _folder(run: StoredRun) -> Path:
    section = run.record.config.get("coordinator")
    given = section.get("folder") if isinstance(section, Mapping) else None
    return folder_of(given, runs_dir=run.database.runs_dir)
