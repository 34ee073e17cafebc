"""One run in a coordinator process: its lease, its place at the gateway, and its rounds."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial

import structlog

from fedlearn import assembly
from fedlearn.assembly.client_link import ClientLink, Identities
from fedlearn.config.components import build_component
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.leader import Leader, ReachableClients, make_holder_name
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.opening import keep_waiting
from fedlearn.deployment.places import Places, upload_store_path
from fedlearn.deployment.record import ensure_deployed
from fedlearn.deployment.versions import explain_newest_protocol
from fedlearn.errors import ConfigError, Parked, StoreError
from fedlearn.experiment.progress import RunProgress
from fedlearn.experiment.simulate import report_outcome
from fedlearn.experiment.summary import summarize
from fedlearn.gateway.server import Gateway, GatewayChannel, RunTerms
from fedlearn.identity.registry import Registry
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.patience import Patience
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun

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
            self._restart_for_clients(
                restarted_by.run(self.places.run_name, guard=self.lease.guard)
            )
        stored = database.run(self.places.run_name, guard=self.lease.guard)
        stored.retention = build_component(Retention, self.places.config.store)
        record = self.patiently(lambda: stored.record)
        self.run_id = self.patiently(lambda: find_deployment(database, record.name).run_id)
        if record.status is RunStatus.DONE:
            structlog.get_logger(__name__).info("done_before", run=record.name)
            self.live_status.num_finished = record.num_rounds
            self.live_status.phase = Phase.DONE
            self._remove_uploads(self.run_id)  # the process that finished it may have died before
        return stored

    def is_leader(self) -> bool:
        """Whether this process holds the run's lease now; answered from memory."""
        return self.lease is not None and self.lease.is_held()

    def terms(self) -> RunTerms:
        """Return what the gateway needs to know to serve the run, once it is prepared."""
        return RunTerms(
            run_id=self.run_id,
            uploads_dir=upload_store_path(self.places.folder, self.run_id),
            eligible=self.components.requirements.admits,
            is_leader=self.is_leader,
            needs_newest=explain_newest_protocol(self.components),
            fewest=self.components.policy.min_reports,
            priority=self.priority,
        )

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
        self._remove_uploads(self.run_id)

    def _restart_for_clients(self, stored: StoredRun) -> None:
        """Drop the uploads of clients and, if the last checkpoint is damaged, that checkpoint.

        Does nothing to a run that is done.
        """
        if self.patiently(lambda: stored.record).status is RunStatus.DONE:
            return
        # Before the id changes: it names the folder to remove.
        dropped = find_deployment(stored.database, stored.name).run_id
        is_damaged = self.start is Start.FROM_PREVIOUS
        self.patiently(stored.rewind if is_damaged else stored.renew)
        self._remove_uploads(dropped)
        structlog.get_logger(__name__).info(
            "another_run_to_clients", run=stored.name, start=self.start
        )

    def _remove_uploads(self, run_id: str) -> None:
        shutil.rmtree(upload_store_path(self.places.folder, run_id), ignore_errors=True)

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
        registry = StoredRegistry(database, SystemClock())
        return Identities.of(
            self.run_id,
            signer=self.places.open_authority().signer,
            directory=partial(load_identity_keys, registry, patiently=self.patiently),
        )
