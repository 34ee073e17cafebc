"""Take the lease of a deployed run without a coordinator, for a command that changes the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fedlearn.core.clock import Clock
from fedlearn.errors import DeploymentError
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.runs import Database

#: Lease time of the command; a live coordinator renews its lease every second.
_SILENCE_S = 5.0


@contextmanager
def lease_idle_run(database: Database, name: str, *, command: str, clock: Clock) -> Iterator[Lease]:
    """Hold the lease of the deployed run called ``name`` while the block runs.

    Raises:
        DeploymentError: A coordinator is running the run.
        StoreError: The database cannot be read or written.
    """
    holder = f"fedlearn {command}:{os.getpid()}"
    lease = Lease(database, name, holder=holder, ttl_s=_SILENCE_S, clock=clock)
    # Long enough to see that a coordinator is silent, if it has died without releasing the lease.
    ends_s = clock.now_s() + 2 * _SILENCE_S
    if not lease.acquire(is_stopped=lambda: clock.now_s() > ends_s):
        raise DeploymentError(
            f"{name} is coordinated by {find_deployment(database, name).holder}; stop that "
            "coordinator first, and start it again afterwards"
        )
    try:
        yield lease
    finally:
        lease.release()
