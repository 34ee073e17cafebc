"""What a coordinator process shows to the network: its gateway, and its metrics for monitors."""

import platform
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import structlog
import torch

from fedlearn.config.components import build_component
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.places import Places
from fedlearn.errors import FedlearnError
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.counters import Histogram
from fedlearn.gateway.operations import OperatorAccess
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database
from fedlearn.transport import wire

_DAY_S = 86400.0


def _beat_s(lease_ttl_s: float) -> float:
    """Return the seconds between two beats to clients, if another coordinator can take over.

    Clients leave after :data:`~fedlearn.transport.wire.MISSED_BEATS` missed beats. The interval
    makes this about as long as a successor takes to lead, so that the next round begins within 10 s
    after the lease expires.
    """
    return (lease_ttl_s + 4.0) / wire.MISSED_BEATS


@dataclass(eq=False, kw_only=True)
class Front:
    """The gateway of a coordinator process, while it is open.

    Attributes:
        places: Paths and addresses of the coordinator's parts.
        insecure: Whether clients connect without certificates.
    """

    places: Places
    insecure: bool

    def __post_init__(self) -> None:
        """Start without a gateway."""
        self._gateway: Gateway | None = None
        self._authority: Authority | None = None
        self._lock = threading.Lock()  # no thread may query a gRPC server that is closing
        self._log = structlog.get_logger(__name__)

    @property
    def is_open(self) -> bool:
        """Whether clients are served."""
        return self._gateway is not None

    @contextmanager
    def serve(
        self,
        database: Database,
        runs: Sequence[RunTerms],
        *,
        operators: OperatorAccess | None,
        is_leader: Callable[[], bool],
        on_failure: Callable[[FedlearnError], None],
        say_goodbye: Callable[[], str],
    ) -> Iterator[Gateway]:
        """Serve clients in the block.

        Args:
            database: The database with the clients.
            runs: The runs that are served from the start.
            operators: Who may give commands from other machines; ``None``: nobody.
            is_leader: Whether this process may serve clients now; answered from memory.
            on_failure: Called with an error that ends the service.
            say_goodbye: Returns what clients are told at the end.
        """
        section = self.places.config.coordinator
        if not self.insecure:
            self._authority = self.places.open_authority()
        gateway = Gateway(
            build_component(GatewaySettings, section),
            registry=StoredRegistry(database, SystemClock()),
            runs=runs,
            authority=self._authority,
            operators=operators,
            is_leader=is_leader,
            clock=SystemClock(),
            # With SQLite no other machine can take over, so clients need no beats.
            beat_s=_beat_s(section.lease_ttl_s) if database.is_shared else 0.0,
            public_addresses=section.public_addresses,
        )
        gateway.start()
        gateway.on_polling_failure(on_failure)
        self._gateway = gateway
        addresses = {"address": gateway.address, "enrolment": gateway.enrolment_address}
        self._log.info("serving", insecure=self.insecure, **addresses)
        try:
            yield gateway
        finally:
            reason = say_goodbye()
            with self._lock:
                # Before the server stops: a query would wait for an event loop that has ended.
                self._gateway = None
            gateway.stop(grace_s=section.shutdown_grace_s, reason=reason)

    def status(self, run_id: str) -> dict[str, object]:
        """Return a run's clients and open exchange, as JSON values; empty if it is not served."""
        with self._lock:
            return {} if self._gateway is None else self._gateway.status(run_id)

    def num_connected(self) -> int:
        """Return the number of connected clients."""
        with self._lock:
            return 0 if self._gateway is None else self._gateway.num_connected()

    # Counters, unlike queries, may be read while the gateway closes, so these need no lock.

    def counters(self) -> dict[str, float]:
        """Return the gateway's counters, by name; none while it is closed."""
        gateway = self._gateway
        return {} if gateway is None else gateway.counters.values()

    def histograms(self) -> dict[str, Histogram]:
        """Return the gateway's histograms, by name; none while it is closed."""
        gateway = self._gateway
        return {} if gateway is None else gateway.counters.histograms()

    def measure_environment(self) -> dict[str, float]:
        """Return gauges of free disk space, certificate lifetimes, and software versions."""
        runs = {"version": version("fedlearn"), "python": platform.python_version()}
        labels = ",".join(f"{k}={v}" for k, v in {**runs, "torch": torch.__version__}.items())
        folders = {"coordinator": self.places.folder, "runs": self.places.addresses.runs_dir}
        free = {
            f"disk_free_bytes{{folder={name}}}": float(shutil.disk_usage(folder).free)
            for name, folder in folders.items()
            if folder.is_dir()
        }
        ends = {} if self._authority is None else self._authority.find_expiries()
        with self._lock:
            first = None if self._gateway is None or not ends else self._gateway.find_first_expiry()
        ends |= {} if first is None else {"client": first}
        now_s = SystemClock().unix_s()
        days = {
            f"certificate_days{{of={who}}}": (end.timestamp() - now_s) / _DAY_S
            for who, end in ends.items()
        }
        return {f"build_info{{{labels}}}": 1.0} | free | days
