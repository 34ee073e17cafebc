"""The beat of a coordinator: it keeps the lease, publishes the status, and hears the operator."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Self

import structlog

from fedlearn.core.clock import Clock
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import Aborted, StoreError, StoreUnavailable
from fedlearn.store.lease import Lease

_LONGEST_BEAT_S = 1.0


@dataclass(eq=False)
class Heartbeat:
    """A thread that renews a lease while it is entered.

    Attributes:
        lease: Held.
        status: Returns what operators are told, JSON values only.
        paused: Set and cleared as the operator says.
        interruption: Given the reason when the operator aborts the run, another coordinator
            has taken over, or the thread dies.
        alive: Told after every beat, however it went: the thread goes on.
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
        """Make the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._log = structlog.get_logger(__name__)
        self._away_since_s: float | None = None

    def __enter__(self) -> Self:
        """Begin to beat; the first beat is heard before this returns."""
        self._beat()
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop beating, with a last word."""
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
            if not self._stopped.is_set():  # whatever the thread dies of
                self.interruption.give(
                    StoreError(
                        f"nothing renews the lease of run {self.lease.name!r} any more: its "
                        "thread has died, and stderr says of what; start the coordinator again"
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
        except StoreError as error:  # fenced, too
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
                    Aborted("aborted by the operator; `fedlearn resume` takes that back")
                )
