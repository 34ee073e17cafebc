"""A coordinator's heartbeat: renew the lease, publish the status, read the operator's commands."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Self

import structlog

from fedlearn.core.clock import Clock
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import Aborted, StoreError, StoreUnavailable
from fedlearn.store.lease import Lease

# Also the longest time until an operator's command is noticed.
_LONGEST_BEAT_S = 1.0


@dataclass(eq=False)
class Heartbeat:
    """A thread that renews a lease for the duration of a ``with`` block.

    Attributes:
        lease: The lease, which this process holds.
        status: Returns the status for operators, as JSON values.
        paused: Set when the operator pauses the run, cleared when the operator resumes it.
        interruption: Receives the reason when the operator aborts the run, another coordinator has
            taken over, or the thread dies.
        alive: Called after every beat, even a failed one, as a sign of life.
        clock: Real time.
    """

    lease: Lease
    _: KW_ONLY
    status: Callable[[], Mapping[str, object]]
    paused: threading.Event
    interruption: Interruption
    alive: Callable[[], None]
    clock: Clock

    def __post_init__(self) -> None:
        """Create the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._log = structlog.get_logger(__name__)
        self._away_since_s: float | None = None

    def __enter__(self) -> Self:
        """Start the thread, after a first beat in the caller's thread."""
        self._beat()
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread after a last beat, which publishes the final status."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        every_s = min(self.lease.renew_every_s, _LONGEST_BEAT_S)
        try:
            while not self._stopped.wait(every_s):
                self._beat()
                self.alive()
            self._beat()
        finally:
            if not self._stopped.is_set():  # the thread died of an unexpected error
                self.interruption.give(
                    StoreError(
                        f"the lease of {self.lease.name!r} is no longer renewed, because the "
                        "heartbeat thread has died; see stderr, and start the coordinator again"
                    )
                )

    def _beat(self) -> None:
        try:
            wanted = self.lease.renew(self.status())
        except StoreUnavailable as error:
            if self._away_since_s is None:
                self._away_since_s = self.clock.now_s()
                self._log.warning("database_away", error=str(error))
            return
        except StoreError as error:  # including Fenced: another coordinator has taken over
            self.interruption.give(error)
            return
        if self._away_since_s is not None:
            away_s = round(self.clock.now_s() - self._away_since_s, 1)
            self._log.info("database_back", away_s=away_s)
            self._away_since_s = None
        match wanted:
            case "pause":
                self.paused.set()
            case "run":
                self.paused.clear()
            case "abort":
                self.interruption.give(
                    Aborted(
                        "aborted by the operator; `fedlearn resume` undoes that, or for a run of a "
                        "service `fedlearn retry`"
                    )
                )
