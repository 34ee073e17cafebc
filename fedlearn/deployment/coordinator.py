"""The coordinator process: it serves clients and runs rounds until the run is done.

The main thread runs the rounds, as a simulation does. Other threads run the gRPC server with its
event loop, the heartbeat (lease, status, the operator's commands), the HTTP server, and the signal
watcher. Anything that ends the run reaches the main thread through an :class:`Interruption`.

A coordinator may be killed at any line without losing an update that a client was told is accepted:
the next start resumes inside the same round.
"""

import os
import platform
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version

import structlog
import torch

from fedlearn import assembly
from fedlearn.assembly.client_link import ClientLink, Identities, require_plain
from fedlearn.config import Config
from fedlearn.config.components import build_component
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment.interruption import Interruption, stop_signals
from fedlearn.deployment.leader import Leader, ReachableClients
from fedlearn.deployment.live_status import Phase
from fedlearn.deployment.liveness import SignsOfLife
from fedlearn.deployment.log_signer import LogSigner
from fedlearn.deployment.opening import keep_waiting
from fedlearn.deployment.places import (
    Places,
    host_of,
    require_coordinator_system,
    upload_store_path,
)
from fedlearn.deployment.record import ensure_deployed
from fedlearn.deployment.versions import explain_newest_protocol
from fedlearn.errors import ConfigError, Parked, StoreError
from fedlearn.experiment.progress import RunProgress
from fedlearn.experiment.simulate import report_outcome
from fedlearn.experiment.summary import summarize
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.open_files import raise_max_open_files
from fedlearn.gateway.server import Gateway, GatewayChannel, GatewaySettings
from fedlearn.gateway.telemetry import Snapshot, Telemetry
from fedlearn.identity.actors import local_coordinator
from fedlearn.identity.registry import Registry
from fedlearn.identity.signing import SigningKey
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.records import RunStatus
from fedlearn.simulation.cluster import limit_to_one_thread
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.patience import Patience
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database
from fedlearn.transport import wire

#: How long the database may be unreachable during a run.
_DATABASE_AWAY_S = 3600.0

#: Note shown when the run was already done at startup.
_ANOTHER_RUN = "this run is done; another run needs another `name`"

_DAY_S = 86400.0

#: Threads watched for signs of life, by the name that operators see.
_ROUNDS, _DATABASE = "rounds", "database"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Start(StrEnum):
    """Where a deployed run resumes.

    Attributes:
        WHERE_IT_IS: Inside its open round, with the replies that have arrived.
        FROM_PREVIOUS: At the checkpoint before the last one, which is damaged.
        RESTORED: At the last checkpoint of a backup. Clients may have answered later rounds, which
            are now repeated with another model, so they see it as another run.
    """

    WHERE_IT_IS = "where it is"
    FROM_PREVIOUS = "from previous"
    RESTORED = "restored"


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


def load_identity_keys(registry: Registry, *, patiently: Patience) -> Mapping[ClientId, bytes]:
    """Return the identity keys of all active clients, each as an encoded lineage.

    The newest key of a lineage is the valid one; clients that have pinned an earlier one follow the
    chain from there.
    """
    clients = patiently(registry.clients)
    return {each.client_id: each.lineage for each in clients if each.status == "active"}


def _beat_s(lease_ttl_s: float) -> float:
    """Return the seconds between two beats to clients, if another coordinator can take over.

    Clients leave after :data:`~fedlearn.transport.wire.MISSED_BEATS` missed beats. The interval
    makes this about as long as a successor takes to lead, so that the next round begins within 10 s
    after the lease expires.
    """
    return (lease_ttl_s + 4.0) / wire.MISSED_BEATS


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
        self._leader = Leader(
            components=self.components,
            data_dir=self.places.addresses.data_dir,
            interruption=self.interruption,
            progress=self.progress,
            database_away_s=_DATABASE_AWAY_S,
        )
        self.live_status, self._patiently = self._leader.live_status, self._leader.patiently
        self._lease: Lease | None = None
        self._gateway: Gateway | None = None
        self._authority: Authority | None = None
        self._gateway_lock = threading.Lock()  # no thread may query a gRPC server that is closing
        self._log = structlog.get_logger(__name__)

    # ---- The process ----------------------------------------------------------------------

    def serve(self) -> None:
        """Wait for the lease, then serve and run; see :func:`coordinate`."""
        section, name = self.places.config.coordinator, self.places.run_name
        with ExitStack() as stack:
            # First of all: a supervisor also asks while this process waits for the database or the
            # lease.
            telemetry = stack.enter_context(
                Telemetry(
                    section.http_address, self.snapshot, find_stuck_part=self._signs.describe_stuck
                )
            )
            self._signs.show(_ROUNDS)
            self._log.info("http", address=telemetry.address)
            database = stack.enter_context(self._patiently(self.places.open_database))
            self._patiently(
                lambda: ensure_deployed(
                    database, self.components, name=name, clock=self.interruption
                )
            )
            # From here on the coordinator acts by itself, not the user who has started it.
            own = database.acting_as(local_coordinator())
            key = SigningKey(self.places.keys_folder)
            with self._hold_lease(own) as lease, LogSigner(own, key):
                if self.start is not Start.WHERE_IT_IS:
                    self._restart_for_clients(database, lease)
                self._lead(own, lease)

    @contextmanager
    def _hold_lease(self, database: Database) -> Iterator[Lease]:
        held = self._leader.hold_lease(
            database,
            self.places.run_name,
            status=self.status,
            alive=partial(self._signs.show, _DATABASE),
        )
        try:
            with held as self._lease:
                yield self._lease
        finally:
            self._lease = None

    def _lead(self, database: Database, lease: Lease) -> None:
        stored = database.run(self.places.run_name, guard=lease.guard)
        stored.retention = build_component(Retention, self.places.config.store)
        record = self._patiently(lambda: stored.record)
        run_id = self._patiently(lambda: find_deployment(database, record.name).run_id)
        if record.status is RunStatus.DONE:
            self._log.info("done_before", run=record.name)
            self.live_status.num_finished = record.num_rounds
            self.live_status.phase = Phase.DONE
            self._remove_uploads(run_id)  # the process that finished the run may have died before
        with self._serve_clients(database, lease, run_id) as gateway:
            if record.status is not RunStatus.DONE:
                # After these errors the run is not recorded as failed: its round can resume with
                # the updates it has, later or once the model's file is put back.
                resumable = (Parked, StoreError, ConfigError)
                with report_outcome(
                    stored,
                    self.progress,
                    callbacks=self.components.callbacks,
                    resumable=resumable,
                ):
                    self._leader.run(self._reach_clients(database, gateway), stored, record, lease)
            else:
                self.progress.start(record, stored.path, (_ANOTHER_RUN,))
                self.progress.end(summarize(record, stored.rounds()))
            self.live_status.phase = Phase.DONE
            # All uploads are part of a commit, and the gRPC server still knows in memory whose
            # replies counted.
            self._remove_uploads(run_id)
            if self.serve_on:
                self._log.info("serving_on", run=record.name)
                while True:
                    self.interruption.sleep(_DATABASE_AWAY_S)

    def _restart_for_clients(self, database: Database, lease: Lease) -> None:
        """Drop the uploads of clients and, if the last checkpoint is damaged, that checkpoint.

        Does nothing to a run that is done. ``database`` acts for the user who asked for this.
        """
        stored = database.run(self.places.run_name, guard=lease.guard)
        if self._patiently(lambda: stored.record).status is RunStatus.DONE:
            return
        # Before the id changes: it names the folder to remove.
        dropped = find_deployment(database, stored.name).run_id
        is_damaged = self.start is Start.FROM_PREVIOUS
        self._patiently(stored.rewind if is_damaged else stored.renew)
        self._remove_uploads(dropped)
        self._log.info("another_run_to_clients", run=stored.name, start=self.start)

    def _remove_uploads(self, run_id: str) -> None:
        shutil.rmtree(upload_store_path(self.places.folder, run_id), ignore_errors=True)

    @contextmanager
    def _serve_clients(self, database: Database, lease: Lease, run_id: str) -> Iterator[Gateway]:
        section = self.places.config.coordinator
        if not self.insecure:
            self._authority = self.places.open_authority()
        gateway = Gateway(
            build_component(GatewaySettings, section),
            registry=StoredRegistry(database, SystemClock()),
            run_id=run_id,
            uploads_dir=upload_store_path(self.places.folder, run_id),
            authority=self._authority,
            eligible=self.components.requirements.admits,
            # Answered from memory: the gateway asks for every session and verdict.
            is_leader=lease.is_held,
            clock=SystemClock(),
            # With SQLite no other machine can take over, so clients need no beats.
            beat_s=_beat_s(section.lease_ttl_s) if database.is_shared else 0.0,
            needs_newest=explain_newest_protocol(self.components),
            public_addresses=section.public_addresses,
        )
        gateway.start()
        gateway.on_polling_failure(self.interruption.give)
        self._gateway = gateway
        addresses = {"address": gateway.address, "enrolment": gateway.enrolment_address}
        self._log.info("serving", insecure=self.insecure, **addresses)
        try:
            yield gateway
        finally:
            is_done = self.live_status.phase is Phase.DONE
            if not is_done:
                self.live_status.phase = Phase.STOPPING
            with self._gateway_lock:
                # Before the server stops: a query would wait for an event loop that has ended.
                self._gateway = None
            reason = "the run is done" if is_done else "the coordinator is stopping"
            gateway.stop(grace_s=section.shutdown_grace_s, reason=reason)

    # ---- The run --------------------------------------------------------------------------

    def _reach_clients(self, database: Database, gateway: Gateway) -> ReachableClients:
        channel = gateway.channel(
            check=self.interruption.check, waiting=self.live_status.round_times.waiting
        )
        gateway.set_num_wanted(self._num_in_work)
        return ReachableClients(
            reach=ClientLink(
                channel=channel,
                identities=self._load_identities(database),
                prefetcher=channel if self._announces_models else None,
                congestion=self._limit_in_flight(channel),
            ),
            run_id=find_deployment(database, self.places.run_name).run_id,
            notes=(f"clients are served at {gateway.address}",),
            restarts_open_round=False,  # the upload store has the replies to the earlier process
            num_needed=self.components.num_needed,
            patience_s=self.places.config.coordinator.patience_s,
            too_few=keep_waiting,
            names=gateway.find_names,
            set_aside=channel.set_aside,
            num_set_aside=channel.num_set_aside,
            forget=channel.forget,
            properties=gateway,
        )

    def _limit_in_flight(self, channel: GatewayChannel) -> InFlightLimit | None:
        """Build the limit on clients in flight of an asynchronous run; ``None`` for others."""
        if (asynchrony := self.components.asynchrony) is None:
            return None
        return InFlightLimit(
            asynchrony.concurrency,
            asynchrony.buffer_size,
            num_waiting=channel.num_waiting,
            on_change=self.live_status.record_in_flight_limit,
        )

    @property
    def _num_in_work(self) -> int:
        asynchrony = self.components.asynchrony
        return self.components.policy.cohort_size if asynchrony is None else asynchrony.concurrency

    @property
    def _announces_models(self) -> bool:
        config = self.components.config
        return config.coordinator.send_ahead and not config.evaluation.num_clients

    def _load_identities(self, database: Database) -> Identities | None:
        """Return the keys that secure aggregation signs and verifies with, if it is on."""
        if self.insecure or self.components.secure is None:
            return None
        run_id = find_deployment(database, self.places.run_name).run_id
        registry = StoredRegistry(database, SystemClock())
        return Identities.of(
            run_id,
            signer=self.places.open_authority().signer,
            directory=partial(load_identity_keys, registry, patiently=self._patiently),
        )

    # ---- Status and metrics ---------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the status for operators, as JSON values."""
        own = self.live_status.to_json_values() | {"process": os.getpid()}
        return own | self._gateway_status()

    def snapshot(self) -> Snapshot:
        """Return the metrics for monitors."""
        lease, gateway = self._lease, self._gateway
        counters, gauges = self.live_status.counters(), self.live_status.gauges()
        gauges |= self._measure_environment()
        gauges["lease_held"] = float(lease is not None and lease.is_held())
        histograms = self.live_status.histograms()
        # Counters, unlike queries, may be read while the gateway closes, so this needs no lock.
        if gateway is not None:
            counters |= gateway.counters.values()
            histograms |= gateway.counters.histograms()
        for name, value in self._gateway_status().items():
            if isinstance(value, int | float):
                gauges[name] = float(value)
        return Snapshot(
            run=self.places.run_name,
            not_ready=self._explain_not_ready(),
            counters=counters,
            gauges=gauges,
            histograms=histograms,
        )

    def _measure_environment(self) -> dict[str, float]:
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
        with self._gateway_lock:
            first = None if self._gateway is None or not ends else self._gateway.find_first_expiry()
        ends |= {} if first is None else {"client": first}
        now_s = SystemClock().unix_s()
        days = {
            f"certificate_days{{of={who}}}": (end.timestamp() - now_s) / _DAY_S
            for who, end in ends.items()
        }
        return {f"build_info{{{labels}}}": 1.0} | free | days

    def _gateway_status(self) -> dict[str, object]:
        with self._gateway_lock:
            return {} if self._gateway is None else self._gateway.status()

    def _explain_not_ready(self) -> str:
        lease = self._lease
        if lease is None:
            return f"this coordinator does not hold the lease: it is {self.live_status.phase}"
        if not lease.is_held():
            return "the lease could not be renewed in time"
        return "" if self._gateway is not None else "the gateway is not open"
