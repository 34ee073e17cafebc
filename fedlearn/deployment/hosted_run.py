"""One run in a coordinator process: its lease, its place at the gateway, and its rounds."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

import structlog

from fedlearn import assembly
from fedlearn.assembly.client_link import ClientLink, Identities
from fedlearn.config.components import build_component
from fedlearn.config.training import ClientSection
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import write_durably
from fedlearn.core.messages import ClientId
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.leader import Leader, ReachableClients, make_holder_name
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.opening import keep_waiting
from fedlearn.deployment.places import Places, upload_store_path
from fedlearn.deployment.record import ensure_deployed
from fedlearn.deployment.versions import explain_newest_protocol
from fedlearn.errors import ConfigError, DeploymentError, Parked, StoreError
from fedlearn.experiment.progress import RunProgress
from fedlearn.experiment.simulate import report_outcome
from fedlearn.experiment.summary import summarize
from fedlearn.gateway.exchanges import OfferedBundle
from fedlearn.gateway.questions import ClientPhase
from fedlearn.gateway.server import Gateway, GatewayChannel, RunTerms
from fedlearn.gateway.telemetry import Measurements
from fedlearn.identity.bundles import Bundle
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.records import RunStatus
from fedlearn.store.bundles import bundle_path
from fedlearn.store.lease import Lease, find_deployment, list_deployments
from fedlearn.store.patience import Patience
from fedlearn.store.queue import RunQueue
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun
from fedlearn.transport.wire_pb2 import Eligibility

#: How long the database may be unreachable during a run.
DATABASE_AWAY_S = 3600.0

#: Note shown when the run was already done at startup.
_ANOTHER_RUN = "this run is done; another run needs another `name`"


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


def load_identity_keys(registry: Registry, *, patiently: Patience) -> Mapping[ClientId, bytes]:
    """Return the identity keys of all active clients, each as an encoded lineage.

    The newest key of a lineage is the valid one; clients that have pinned an earlier one follow the
    chain from there.
    """
    clients = patiently(registry.clients)
    return {each.client_id: each.lineage for each in clients if each.status == "active"}


def restart_for_clients(
    stored: StoredRun, *, start: Start, folder: Path, patiently: Patience
) -> None:
    """Make a deployed run another one to clients, unless it is done.

    Drops their uploads and, if the last checkpoint is damaged, that checkpoint.

    Args:
        stored: The run, with the guard of a lease.
        start: Where it resumes: from the previous checkpoint, or restored.
        folder: The coordinator's folder.
        patiently: Retries while the database is unreachable.
    """
    if patiently(lambda: stored.record).status is RunStatus.DONE:
        return
    # Before the id changes: it names the folder to remove.
    dropped = patiently(lambda: find_deployment(stored.database, stored.name)).run_id
    patiently(stored.rewind if start is Start.FROM_PREVIOUS else stored.renew)
    remove_uploads(folder, dropped)
    structlog.get_logger(__name__).info("another_run_to_clients", run=stored.name, start=start)


def restart_all_for_clients(
    database: Database, service: Lease, *, folder: Path, patiently: Patience
) -> None:
    """Make each run of a restored queue that has begun and is not done another one to clients.

    Args:
        database: The database, in which the user acts who has restored it.
        service: The lease of its service, which nobody can run the queue without.
        folder: The coordinator's folder.
        patiently: Retries while the database is unreachable.
    """
    queued = {each.name for each in patiently(RunQueue(database, SystemClock()).list)}
    for each in patiently(lambda: list_deployments(database)):
        if each.name in queued:
            stored = database.run(each.name, guard=service.guard)
            restart_for_clients(stored, start=Start.RESTORED, folder=folder, patiently=patiently)


def remove_uploads(folder: Path, run_id: str) -> None:
    """Remove a run's files in transit to and from clients."""
    shutil.rmtree(upload_store_path(folder, run_id), ignore_errors=True)


def _count_asked(exchange: object) -> dict[str, float]:
    """Return the number of clients of the open exchange by phase, as gauges."""
    phases = exchange["phases"] if isinstance(exchange, Mapping) else {}
    return {f"asked{{phase={each}}}": float(phases.get(str(each), 0)) for each in ClientPhase}


def keep_bundle(section: ClientSection, folder: Path, *, runs_dir: Path) -> OfferedBundle | None:
    """Copy a run's bundle into its folder when it first starts; later starts use the copy.

    Args:
        section: The run's settings of clients.
        folder: The run's folder.
        runs_dir: The folder of all runs, with the bundles that were submitted.

    Returns:
        The copy; ``None`` if the run has no bundle.

    Raises:
        ConfigError: The file is missing, not a valid bundle, or has another digest.
        DeploymentError: The copy was changed, or cannot be written.
    """
    if section.bundle is None:
        return None
    copy = folder / "trainer.bundle"
    if not copy.exists():
        source, digest = Path(section.bundle), section.bundle_digest
        # The folder may have been moved since the submission.
        if digest is not None and (stored := bundle_path(runs_dir, digest)).exists():
            source = stored
        try:
            content = Bundle.load(source, digest=digest).content
        except DeploymentError as error:
            raise ConfigError(f"client.bundle: {error}") from error
        write_durably(copy, content, raises=DeploymentError)
    Bundle.load(copy)
    return OfferedBundle.of(copy)


@dataclass(eq=False)
class HostedRun:
    """One run in this process.

    Attributes:
        places: Paths and addresses of the run's parts.
        components: The assembled run.
        interruption: Ends the run in this process.
        insecure: Whether clients connect without certificates.
        start: Where the run resumes.
        progress: Receives the progress of the run.
        priority: See :class:`~fedlearn.gateway.served_runs.RunTerms`.
        holder: Name of this process as holder of the lease.
        heir_of: See :class:`~fedlearn.store.lease.Lease`.
        notes: Notes for the user, shown when the run starts.
        study: Name of the run's study; empty: none.
        is_member: Whether the client of a given name is in that study.
        live_status: The status that operators and monitors see.
        lease: The lease while this process holds it.
        run_id: Id of the run that clients see, once it is prepared.
    """

    places: Places
    components: assembly.Deployment
    interruption: Interruption
    _: KW_ONLY
    insecure: bool
    start: Start
    progress: RunProgress
    priority: int = 0
    holder: str = field(default_factory=make_holder_name)
    heir_of: str = ""
    notes: tuple[str, ...] = ()
    study: str = ""
    is_member: Callable[[str], bool] = lambda _: True

    def __post_init__(self) -> None:
        """Create what the threads share."""
        self._leader = Leader(
            components=self.components,
            data_dir=self.places.addresses.data_dir,
            interruption=self.interruption,
            progress=self.progress,
            database_away_s=DATABASE_AWAY_S,
            holder=self.holder,
            heir_of=self.heir_of,
        )
        self.live_status: LiveStatus = self._leader.live_status
        self.patiently: Patience = self._leader.patiently
        self.lease: Lease | None = None
        self.run_id = ""
        self._bundle: OfferedBundle | None = None

    def deploy(self, database: Database, *, from_queue: bool = False) -> None:
        """Create the run's record, unless it is there: see :func:`ensure_deployed`."""
        self.patiently(
            lambda: ensure_deployed(
                database,
                self.components,
                name=self.places.run_name,
                clock=self.interruption,
                from_queue=from_queue,
            )
        )

    @contextmanager
    def hold_lease(
        self,
        database: Database,
        *,
        status: Callable[[], Mapping[str, object]],
        alive: Callable[[], None],
    ) -> Iterator[None]:
        """Hold the run's lease in the block; see :meth:`Leader.hold_lease`."""
        held = self._leader.hold_lease(database, self.places.run_name, status=status, alive=alive)
        try:
            with held as self.lease:
                yield
        finally:
            self.lease = None

    def prepare(self, database: Database, *, restarted_by: Database) -> StoredRun:
        """Bring the run to where it starts, under the lease, and return it.

        Args:
            database: The database, in which the coordinator acts by itself.
            restarted_by: The same, acting for the user who asked for another start.
        """
        assert self.lease is not None
        if self.start is not Start.WHERE_IT_IS:
            restart_for_clients(
                restarted_by.run(self.places.run_name, guard=self.lease.guard),
                start=self.start,
                folder=self.places.folder,
                patiently=self.patiently,
            )
        stored = database.run(self.places.run_name, guard=self.lease.guard)
        stored.retention = build_component(Retention, self.places.config.store)
        section = self.components.config.client
        self._bundle = keep_bundle(section, stored.path, runs_dir=database.runs_dir)
        record = self.patiently(lambda: stored.record)
        self.run_id = self.patiently(lambda: find_deployment(database, record.name).run_id)
        if record.status is RunStatus.DONE:
            structlog.get_logger(__name__).info("done_before", run=record.name)
            self.live_status.num_finished = record.num_rounds
            self.live_status.phase = Phase.DONE
            # The process that finished it may have died before.
            remove_uploads(self.places.folder, self.run_id)
        return stored

    def is_leader(self) -> bool:
        """Whether this process holds the run's lease now; answered from memory."""
        return self.lease is not None and self.lease.is_held()

    def measure(self, status: Mapping[str, object]) -> Measurements:
        """Return the run's metrics for monitors.

        Args:
            status: What :meth:`fedlearn.deployment.front.Front.status` says of the run.
        """
        numbers = {name: float(v) for name, v in status.items() if isinstance(v, int | float)}
        return Measurements(
            run=self.places.run_name,
            counters=self.live_status.counters(),
            gauges={
                **self.live_status.gauges(),
                **numbers,
                **_count_asked(status.get("exchange")),
                "lease_held": float(self.is_leader()),
            },
            histograms=self.live_status.histograms(),
        )

    def terms(self) -> RunTerms:
        """Return what the gateway needs to know to serve the run, once it is prepared."""
        return RunTerms(
            run_id=self.run_id,
            uploads_dir=upload_store_path(self.places.folder, self.run_id),
            eligible=self._admits,
            is_leader=self.is_leader,
            needs_newest=explain_newest_protocol(self.components),
            fewest=self.components.policy.min_reports,
            priority=self.priority,
            study=self.study,
            concerns=lambda client: not self.study or self.is_member(client),
            bundle=self._bundle,
        )

    def _admits(self, client: EnrolledClient, report: Eligibility) -> bool:
        """Whether a client may be asked; for a study, it must be in it and its owner consent."""
        consents = not self.study or (self.study in report.studies and self.is_member(client.name))
        return consents and self.components.requirements.admits(client, report)

    def run(self, stored: StoredRun, gateway: Gateway) -> None:
        """Run the rounds that are due with the gateway's clients; a run that is done only says so.

        Raises:
            FedlearnError: See :meth:`Leader.run`.
        """
        assert self.lease is not None
        record = self.patiently(lambda: stored.record)
        if record.status is RunStatus.DONE:
            self.progress.start(record, stored.path, (_ANOTHER_RUN,))
            self.progress.end(summarize(record, stored.rounds()))
        else:
            # After these errors the run is not recorded as failed: its round can resume with the
            # updates it has, later or once the model's file is put back.
            resumable = (Parked, StoreError, ConfigError)
            with report_outcome(
                stored, self.progress, callbacks=self.components.callbacks, resumable=resumable
            ):
                clients = self._reach_clients(stored.database, gateway)
                self._leader.run(clients, stored, record, self.lease)
        self.live_status.phase = Phase.DONE
        # All uploads are part of a commit, and the gRPC server still knows in memory whose replies
        # counted.
        remove_uploads(self.places.folder, self.run_id)

    def _reach_clients(self, database: Database, gateway: Gateway) -> ReachableClients:
        channel = gateway.channel(
            self.run_id,
            check=self.interruption.check,
            waiting=self.live_status.round_times.waiting,
        )
        gateway.set_num_wanted(self._num_in_work, run_id=self.run_id)
        return ReachableClients(
            reach=ClientLink(
                channel=channel,
                identities=self._load_identities(database),
                prefetcher=channel if self._announces_models else None,
                congestion=self._limit_in_flight(channel),
            ),
            run_id=self.run_id,
            notes=(f"clients are served at {gateway.address}", *self.notes),
            restarts_open_round=False,  # the upload store has the replies to the earlier process
            num_needed=self.components.num_needed,
            patience_s=self.places.config.coordinator.patience_s,
            too_few=keep_waiting,
            names=gateway.find_names,
            set_aside=channel.set_aside,
            num_set_aside=channel.num_set_aside,
            num_elsewhere=channel.num_elsewhere,
            take_trainers=channel.take_trainers,
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
        registry = StoredRegistry(database, SystemClock())
        return Identities.of(
            self.run_id,
            signer=self.places.open_authority().signer,
            directory=partial(load_identity_keys, registry, patiently=self.patiently),
        )
