"""The coordinator process: it serves clients and runs rounds until the run is done.

The main thread runs the rounds, as a simulation does. Other threads run the gRPC server with its
event loop, the heartbeat (lease, status, the operator's commands), the HTTP server, and the signal
watcher. Anything that ends the run reaches the main thread through an :class:`Interruption`.

A coordinator may be killed at any line without losing an update that a client was told is accepted:
the next start resumes inside the same round.
"""

import os
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial

import structlog

from fedlearn import assembly
from fedlearn.assembly.client_link import require_plain
from fedlearn.config import Config
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.front import Front
from fedlearn.deployment.hosted_run import DATABASE_AWAY_S, HostedRun, Start
from fedlearn.deployment.interruption import Interruption, stop_signals
from fedlearn.deployment.live_status import Phase
from fedlearn.deployment.liveness import SignsOfLife
from fedlearn.deployment.log_signer import LogSigner
from fedlearn.deployment.page import PageProcess, require_page_packages
from fedlearn.deployment.places import (
    Places,
    host_of,
    require_coordinator_system,
)
from fedlearn.errors import ConfigError, Parked
from fedlearn.experiment.progress import RunProgress
from fedlearn.gateway.open_files import raise_max_open_files
from fedlearn.gateway.telemetry import Snapshot, Telemetry
from fedlearn.identity.actors import local_coordinator
from fedlearn.simulation.cluster import limit_to_one_thread
from fedlearn.store.runs import Database, StoredRun

#: Threads watched for signs of life, by the name that operators see.
_ROUNDS, _DATABASE = "rounds", "database"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def coordinate(
    config: Config,
    places: Places,
    *,
    insecure: bool,
    serve_on: bool,
    start: Start,
    progress: RunProgress,
) -> None:
    """Serve the deployment until its run is done or a signal stops it.

    SIGTERM or Ctrl-C parks the round: the function returns, and the next start resumes the round.

    Args:
        config: The run's configuration.
        places: Paths and addresses of the deployment's parts.
        insecure: Use plaintext on loopback and let clients choose their own names, to try things
            out.
        serve_on: Whether to keep serving when the run is done, telling clients to come back later.
        start: Where the run resumes.
        progress: Receives the progress of the run.

    Raises:
        Aborted: The operator has ended the run.
        ConfigError: The configuration cannot be built, or is not that of the run.
        DataError: Data are missing or cannot be trained on.
        DeploymentError: The system is neither Linux nor macOS, an address cannot be listened on, or
            keys are damaged.
        Fenced: Another coordinator has taken over.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run cannot be recorded.
    """
    require_coordinator_system()
    require_page_packages(config.coordinator.dashboard)
    if insecure:
        _require_loopback(config)
    if config.flower.is_foreign:
        raise ConfigError(
            f'flower.client_apps is "{config.flower.client_apps}", but this coordinator serves '
            "fedlearn's clients over gRPC; leave it out, or run the app with `flwr run`"
        )
    components = assembly.build_deployment(config, data_dir=places.addresses.data_dir)
    if insecure:
        require_plain(components)
    coordinator = Coordinator(
        places, components, insecure=insecure, serve_on=serve_on, start=start, progress=progress
    )
    raise_max_open_files()  # the gRPC server uses half of them for connections
    # One thread, as in a simulation: the order of a floating-point sum depends on their number.
    with stop_signals(coordinator.interruption), limit_to_one_thread():
        try:
            coordinator.serve()
        except Parked as parked:
            structlog.get_logger(__name__).info("parked", reason=str(parked))


def _require_loopback(config: Config) -> None:
    for name in ("address", "enrolment_address"):
        address = getattr(config.coordinator, name)
        if address is not None and host_of(address) not in _LOOPBACK:
            raise ConfigError(
                f"coordinator.{name} is {address!r}, but --insecure serves this machine only; "
                "use 127.0.0.1, or leave --insecure out"
            )


@dataclass(eq=False)
class Coordinator:
    """One coordinator process; see :func:`coordinate` for the other attributes.

    Attributes:
        interruption: Ends the process's run.
        live_status: The status that operators and monitors see.
    """

    places: Places
    components: assembly.Deployment
    _: KW_ONLY
    insecure: bool
    serve_on: bool
    start: Start
    progress: RunProgress

    def __post_init__(self) -> None:
        """Create the objects that the threads share."""
        self._signs = SignsOfLife(
            stuck_after_s=self.places.config.coordinator.stuck_after_s, clock=SystemClock()
        )
        self.interruption = Interruption(
            lambda seconds: self._signs.show(_ROUNDS, sleeps_s=seconds),
        )
        self._run = HostedRun(
            self.places,
            self.components,
            self.interruption,
            insecure=self.insecure,
            start=self.start,
            progress=self.progress,
        )
        self.live_status = self._run.live_status
        self._front = Front(places=self.places, insecure=self.insecure)
        self._log = structlog.get_logger(__name__)

    # ---- The process ----------------------------------------------------------------------

    def serve(self) -> None:
        """Wait for the lease, then serve and run; see :func:`coordinate`."""
        with ExitStack() as stack:
            # First of all: a supervisor also asks while this process waits for the database or the
            # lease.
            telemetry = stack.enter_context(
                Telemetry(
                    self.places.config.coordinator.http_address,
                    self.snapshot,
                    find_stuck_part=self._signs.describe_stuck,
                )
            )
            self._signs.show(_ROUNDS)
            self._log.info("http", address=telemetry.address)
            database = stack.enter_context(self._run.patiently(self.places.open_database))
            stack.enter_context(PageProcess(self.places))  # which reads the database
            self._run.deploy(database)
            # From here on the coordinator acts by itself, not the user who has started it.
            own = database.acting_as(local_coordinator())
            alive = partial(self._signs.show, _DATABASE)
            with (
                self._run.hold_lease(own, status=self.status, alive=alive),
                LogSigner(own, self.places.keys_folder),
            ):
                self._lead(own, self._run.prepare(own, restarted_by=database))

    def _lead(self, database: Database, stored: StoredRun) -> None:
        with self._front.serve(
            database,
            [self._run.terms()],
            operators=None,
            is_leader=self._run.is_leader,
            on_failure=self.interruption.give,
            say_goodbye=self._say_goodbye,
        ) as gateway:
            self._run.run(stored, gateway)
            if self.serve_on:
                self._log.info("serving_on", run=stored.name)
                while True:
                    self.interruption.sleep(DATABASE_AWAY_S)

    def _say_goodbye(self) -> str:
        if self.live_status.phase is Phase.DONE:
            return "the run is done"
        self.live_status.phase = Phase.STOPPING
        return "the coordinator is stopping"

    # ---- Status and metrics ---------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the status for operators, as JSON values."""
        own = self.live_status.to_json_values() | {"process": os.getpid()}
        return own | self._front.status(self._run.run_id)

    def snapshot(self) -> Snapshot:
        """Return the metrics for monitors."""
        own = self._run.measure(self._front.status(self._run.run_id))
        return Snapshot(
            run=own.run,
            not_ready=self._explain_not_ready(),
            counters={**own.counters, **self._front.counters()},
            gauges={**own.gauges, **self._front.measure_environment()},
            histograms={**own.histograms, **self._front.histograms()},
        )

    def _explain_not_ready(self) -> str:
        if self._run.lease is None:
            return f"this coordinator does not hold the lease: it is {self.live_status.phase}"
        if not self._run.is_leader():
            return "the lease could not be renewed in time"
        return "" if self._front.is_open else "the gateway is not open"
