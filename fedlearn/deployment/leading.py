"""Leading a deployed run: its lease is taken, kept by a heartbeat, and let go of."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import structlog

from fedlearn.core.clock import SystemClock
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.deployment.heartbeat import Heartbeat
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import StoreError
from fedlearn.store.lease import Lease, deployment
from fedlearn.store.patience import Patience
from fedlearn.store.runs import Database

_HOLDER_BYTES = 4


@contextmanager
def leading(
    database: Database,
    name: str,
    *,
    ttl_s: float,
    status: Callable[[], Mapping[str, object]],
    paused: threading.Event,
    interruption: Interruption,
    alive: Callable[[], None],
    patiently: Patience,
    stand_by: Callable[[], None],
) -> Iterator[Lease]:
    """Wait for the lease of the deployed run called ``name``, and hold it while the block runs.

    Args:
        database: Where the run is.
        name: Of the run.
        ttl_s: How long a holder may be silent.
        status: Returns what operators are told, JSON values only.
        paused: Set and cleared as the operator says.
        interruption: Ends the waiting; given what shall end the run.
        alive: Told by the thread that renews the lease that it goes on.
        patiently: Waits for a database that is away.
        stand_by: Called before another coordinator is waited for.

    Raises:
        FedlearnError: The reason of ``interruption``, given while the lease was waited for.
        StoreError: The database cannot be read or written.
    """
    log = structlog.get_logger(__name__)
    lease = Lease(database, name, holder=_holder(), ttl_s=ttl_s, clock=interruption)
    heartbeat = Heartbeat(
        lease,
        status=status,
        paused=paused,
        interruption=interruption,
        alive=alive,
        clock=SystemClock(),
    )
    try:
        if not patiently(lease.try_acquire):
            stand_by()
            log.info("standby", run=name, holder=deployment(database, name).holder)
            lease.acquire(is_stopped=interruption.is_given)
            interruption.check()
        log.info("leading", run=name)
        with heartbeat:
            yield lease
    finally:
        with suppress(StoreError):  # then others wait for the beat to stand still
            lease.release()


def _holder() -> str:
    """Return a name for this process that no other one has or had."""
    drawn = SecretBytes.generate(_HOLDER_BYTES).reveal().hex()
    return f"{socket.gethostname()}:{os.getpid()}:{drawn}"
