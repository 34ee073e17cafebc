"""Going back to an earlier checkpoint of a run that is not wanted any more as it is."""

import os

from fedlearn.core.clock import Clock
from fedlearn.errors import DeploymentError
from fedlearn.rounds.records import Checkpoint
from fedlearn.store.lease import Lease, deployment
from fedlearn.store.runs import Database

#: A coordinator that lives is heard of every second.
_SILENCE_S = 5.0


def roll_back(database: Database, name: str, *, to: int, clock: Clock) -> Checkpoint:
    """Go back to the checkpoint after ``to`` rounds, and forget what came after; return it.

    To the clients of a deployed run it is another one from then on. What was charged for privacy
    stays charged: it was released.

    Raises:
        DeploymentError: A coordinator runs it.
        StoreError: There is no such run or checkpoint, or it is damaged; nothing is forgotten.
    """
    if not database.run(name).record.is_deployed:
        return database.run(name).rewind(to=to)
    holder = f"fedlearn rollback:{os.getpid()}"
    lease = Lease(database, name, holder=holder, ttl_s=_SILENCE_S, clock=clock)
    ends_s = clock.now_s() + 2 * _SILENCE_S
    if not lease.acquire(is_stopped=lambda: clock.now_s() > ends_s):
        raise DeploymentError(
            f"{name} is coordinated by {deployment(database, name).holder}; stop that coordinator "
            "first, and start it again afterwards"
        )
    try:
        return database.run(name, guard=lease.guard).rewind(to=to)
    finally:
        lease.release()
