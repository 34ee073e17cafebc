"""Roll a run back to an earlier checkpoint and discard the rounds after it."""

import shutil

from fedlearn.core.clock import Clock
from fedlearn.deployment.idle_run import lease_idle_run
from fedlearn.deployment.places import upload_store_path
from fedlearn.experiment.site import folder_of_run
from fedlearn.rounds.records import Checkpoint
from fedlearn.store.lease import find_deployment
from fedlearn.store.runs import Database


def roll_back(database: Database, name: str, *, to: int, clock: Clock) -> Checkpoint:
    """Roll back to the checkpoint after ``to`` rounds, discard later rounds, and return it.

    Clients of a deployed run see a new run from then on, and their uploads are removed. The privacy
    cost of the discarded rounds stays charged, since their models were released.

    Raises:
        DeploymentError: A coordinator is running the run.
        RunHeld: A process is simulating the run.
        StoreError: There is no such run or checkpoint, or it is damaged; nothing is discarded.
    """
    if not database.run(name).record.is_deployed:
        simulated = database.run(name)
        with simulated.hold():
            return simulated.rewind(to=to)
    with lease_idle_run(database, name, command="rollback", clock=clock) as lease:
        dropped = find_deployment(database, name).run_id
        run = database.run(name, guard=lease.guard)
        checkpoint = run.rewind(to=to)
        shutil.rmtree(upload_store_path(folder_of_run(run), dropped), ignore_errors=True)
    return checkpoint
