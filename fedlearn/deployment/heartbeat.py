"""The beat of a coordinator: it keeps the lease, publishes the status, and hears the operator."""

import threading
from collections.abc import Callable, Mapping
from typing import Self

import structlog

from fedlearn.core.clock import Clock
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import Aborted, StoreError, StoreUnavailable
from fedlearn.store.lease import Lease

_LONGEST_BEAT_S = 1.0


class Heart:
    """A thread that renews a lease while it is entered.

    Args:
        lease: Held.
        status: Returns what operators are told, JSON values only.
        paused: Set and cleared as the operator says.
        interruption: Given the reason when the operator aborts the run, another coordinator
            has taken over, or the thread dies.
        clock: Real time, to say for how long the database was away.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        status: Callable[[], Mapping[str, object]],
        paused: threading.Event,
        interruption: Interruption,
        clock: Clock,
    ) -> None:
        self._lease = lease
        self._status = status
        self._paused = paused
        self._interruption = interruption
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._log = structlog.get_logger(__name__)
        self._away_since_s: float | None = None

    def __enter__(self) -> Self:
        """Begin to beat; the first beat is heard before this returns."""
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop beating, with a last word."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        every_s = min(self._lease.renew_every_s, _LONGEST_BEAT_S)
        try:
            while not self._stopped.wait(every_s):
                self._beat()
            self._beat()
        finally:
            if not self._stopped.is_set():  # whatever the thread dies of
                self._interruption.give(
                    StoreError(
                        f"nothing renews the lease of run {self._lease.name!r} any more: its "
                        "thread has died, and stderr says of what; start the coordinator again"
                    )
                )

    def _beat(self) -> None:
        try:
            wanted = self._lease.renew(self._status())
        except StoreUnavailable as error:
            if self._away_since_s is None:
                self._away_since_s = self._clock.now_s()
                self._log.warning("database_away", error=str(error))
            return
        except StoreError as error:  # fenced, too
            self._interruption.give(error)
            return
        if self._away_since_s is not None:
            away_s = round(self._clock.now_s() - self._away_since_s, 1)
            self._log.info("database_back", away_s=away_s)
            self._away_since_s = None
        match wanted:
            case "pause":
                self._paused.set()
            case "run":
                self._paused.clear()
            case "abort":
                self._interruption.give(
                    Aborted("aborted by the operator; `fedlearn resume` takes that back")
                )
