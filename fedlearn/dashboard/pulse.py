"""Tells whether the coordinator of a deployed run is alive, from its heartbeat in the database."""

from dataclasses import dataclass, field
from threading import Lock

from fedlearn.core.clock import Clock
from fedlearn.rounds.journal import DeployedRun

#: A holder is given up after this many times the silence after which another one takes over.
_PATIENCE = 3.0


@dataclass
class Pulse:
    """Remembers when each run's heartbeat changed last, on this machine's clock.

    Clocks of two machines may differ, so a heartbeat that was never seen before counts as fresh.
    """

    clock: Clock
    _seen: dict[str, tuple[tuple[int, int], float]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def is_alive(self, found: DeployedRun, *, lease_ttl_s: float) -> bool:
        """Whether the run has a holder whose heartbeat has changed lately."""
        if not found.holder:
            return False
        mark, now_s = (found.epoch, found.beat), self.clock.now_s()
        with self._lock:
            before, since_s = self._seen.get(found.name, (None, now_s))
            if before != mark:
                self._seen[found.name] = mark, now_s
                return True
        return now_s - since_s < _PATIENCE * lease_ttl_s
