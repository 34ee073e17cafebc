"""The service of many runs: one process that serves clients and has the queue's runs at work.

The main thread starts and ends runs. Each run has its own thread, which runs the rounds as the main
thread of a coordinator of one run does. A service may be killed at any line: the next one finds in
the queue which runs were at work, and each continues inside its open round.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, NamedTuple

import structlog

from fedlearn import assembly
from fedlearn.assembly.client_link import require_plain
from fedlearn.config.serving import ServiceConfig
from fedlearn.config.submitted import follow_service
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.front import Front
from fedlearn.deployment.heartbeat import Heartbeat
from fedlearn.deployment.hosted_run import (
    DATABASE_AWAY_S,
    HostedRun,
    Start,
    restart_all_for_clients,
)
from fedlearn.deployment.interruption import Interruption, stop_signals
from fedlearn.deployment.leader import make_holder_name
from fedlearn.deployment.live_status import Phase
from fedlearn.deployment.liveness import SignsOfLife
from fedlearn.deployment.log_signer import LogSigner
from fedlearn.deployment.orders import RemoteOrders
from fedlearn.deployment.page import PageProcess, require_page_packages
from fedlearn.deployment.places import Places, require_coordinator_system, upload_store_path
from fedlearn.deployment.starting_weights import pin_weights
from fedlearn.deployment.submission import load_config
from fedlearn.errors import Aborted, FedlearnError, Fenced, Parked, StoreUnavailable
from fedlearn.experiment.progress import RunProgress
from fedlearn.gateway.open_files import raise_max_open_files
from fedlearn.gateway.operations import OperatorAccess
from fedlearn.gateway.server import Gateway, RunTerms
from fedlearn.gateway.telemetry import Snapshot, Telemetry
from fedlearn.identity.actors import local_coordinator
from fedlearn.rounds.scheduling import QueuedRun, QueueState, choose_next
from fedlearn.simulation.cluster import limit_to_one_thread
from fedlearn.store.bundles import remove_unneeded_bundles
from fedlearn.store.lease import SERVICE_LEASE, Lease, ensure_service, list_deployments
from fedlearn.store.operators import StoredOperators
from fedlearn.store.patience import Patience
from fedlearn.store.queue import CANCELLED_BY_OPERATOR, RunQueue
from fedlearn.store.runs import Database
from fedlearn.store.schedules import ScheduleStore
from fedlearn.store.studies import StudyStore

#: Seconds between two looks at the queue.
_LOOK_S: Final = 0.5

#: Threads watched for signs of life, by the name that operators see.
_QUEUE, _DATABASE = "queue", "database"


def serve(
    places: Places,
    config: ServiceConfig,
    *,
    insecure: bool,
    is_restored: bool = False,
    progress_of: Callable[[str], RunProgress],
) -> None:
    """Serve clients and have the runs of the queue at work until a signal stops the process.

    SIGTERM or Ctrl-C parks the rounds of all runs: the next start resumes them.

    Args:
        places: Paths and addresses of the service's parts.
        config: The service's configuration.
        insecure: Use plaintext on loopback and let clients choose their own names.
        is_restored: The database is an earlier one, from a backup: runs that are not done are
            other ones to clients, which may have answered later rounds.
        progress_of: Returns what receives the progress of the run with a given name.

    Raises:
        DeploymentError: The system is neither Linux nor macOS, an address cannot be listened on,
            keys are damaged, or the database belongs to another service.
        Fenced: Another process has taken over.
        StoreError: The database cannot be read or written.
    """
    require_coordinator_system()
    require_page_packages(config.coordinator.dashboard)
    service = ServiceProcess(
        places, config, insecure=insecure, is_restored=is_restored, progress_of=progress_of
    )
    raise_max_open_files()
    with stop_signals(service.interruption), limit_to_one_thread():
        try:
            service.serve()
        except Parked as parked:
            structlog.get_logger(__name__).info("parked", reason=str(parked))


class _Work(NamedTuple):
    """A run at work: what ends it, and its thread."""

    interruption: Interruption
    thread: threading.Thread


@dataclass(eq=False)
class ServiceProcess:
    """One process of a service of many runs; see :func:`serve` for the other attributes.

    Attributes:
        interruption: Ends the process.
    """

    places: Places
    config: ServiceConfig
    _: KW_ONLY
    insecure: bool
    is_restored: bool
    progress_of: Callable[[str], RunProgress]
    _works: dict[str, _Work] = field(default_factory=dict)
    _served: dict[str, HostedRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create what the threads share."""
        self._signs = SignsOfLife(
            stuck_after_s=self.config.coordinator.stuck_after_s, clock=SystemClock()
        )
        self.interruption = Interruption(lambda s: self._signs.show(_QUEUE, sleeps_s=s))
        self._log = structlog.get_logger(__name__)
        self._patiently = Patience(
            clock=self.interruption, give_up_s=DATABASE_AWAY_S, log=self._log
        )
        self._front = Front(places=self.places, insecure=self.insecure)
        self._lease: Lease | None = None
        self._holder = make_holder_name()
        self._num_queued = 0
        self._members: Mapping[str, frozenset[str]] = {}  # by study; replaced as a whole

    def serve(self) -> None:
        """Wait for the lease, then serve clients and run the queue; see :func:`serve`."""
        name, section = self.places.run_name, self.config.coordinator
        with ExitStack() as stack:
            telemetry = stack.enter_context(
                Telemetry(
                    section.http_address, self.snapshot, find_stuck_part=self._signs.describe_stuck
                )
            )
            self._log.info("http", address=telemetry.address)
            opened = stack.enter_context(self._patiently(self.places.open_database))
            stack.enter_context(PageProcess(self.places))  # which reads the database
            database = opened.acting_as(local_coordinator())
            self._patiently(lambda: ensure_service(database, name))
            lease = Lease(
                database,
                name,
                holder=self._holder,
                ttl_s=section.lease_ttl_s,
                clock=self.interruption,
                kind=SERVICE_LEASE,
            )
            try:
                self._await_lease(lease)
                self._lease = lease
                if self.is_restored:
                    restart_all_for_clients(
                        opened, lease, folder=self.places.folder, patiently=self._patiently
                    )
                stack.enter_context(self._beat(lease))
                stack.enter_context(LogSigner(database, self.places.keys_folder))
                self._lead(database, lease)
            finally:
                self._lease = None
                lease.release()

    def _await_lease(self, lease: Lease) -> None:
        if not self._patiently(lease.try_acquire):
            self._log.info("standby", service=lease.name)
            lease.acquire(is_stopped=self.interruption.is_given)
            self.interruption.check()
        self._log.info("leading", service=lease.name)

    def _beat(self, lease: Lease) -> Heartbeat:
        return Heartbeat(
            lease,
            status=self.status,
            paused=threading.Event(),
            interruption=self.interruption,
            alive=partial(self._signs.show, _DATABASE),
            clock=SystemClock(),
        )

    def _lead(self, database: Database, lease: Lease) -> None:
        queue = RunQueue(database, SystemClock(), guard=lease.guard)
        schedules = ScheduleStore(queue, SystemClock())
        studies = StudyStore(database, SystemClock(), guard=lease.guard)
        self._patiently(lambda: remove_unneeded_bundles(database))
        kept = self._patiently(lambda: self._find_kept(database, queue))
        with self._front.serve(
            database,
            kept,
            operators=OperatorAccess(
                registry=StoredOperators(database, SystemClock()),
                orders=RemoteOrders(places=self.places, database=database, clock=SystemClock()),
                incoming=self.places.folder / "incoming",
            ),
            is_leader=lease.is_held,
            on_failure=self.interruption.give,
            say_goodbye=lambda: "the coordinator is stopping",
        ) as gateway:
            try:
                while True:
                    self._look_at_studies(studies, gateway)
                    self._look_at_schedules(schedules)
                    self._look(queue, partial(self._work, database, gateway, queue))
                    self.interruption.sleep(_LOOK_S)
            finally:
                self._stop_all()

    def _find_kept(self, database: Database, queue: RunQueue) -> list[RunTerms]:
        """Return the runs that have begun and may go on: clients keep their state and replies."""
        over = {each.name for each in queue.list() if each.state is QueueState.DONE}
        names = {each.name for each in queue.list()} - over
        return [
            RunTerms(
                run_id=each.run_id,
                uploads_dir=upload_store_path(self.places.folder, each.run_id),
                eligible=lambda *_: False,
                is_leader=lambda: False,
            )
            for each in list_deployments(database)
            if each.name in names
        ]

    def _look_at_studies(self, studies: StudyStore, gateway: Gateway) -> None:
        """Read which clients are in which study, and record the consent that they tell."""
        try:
            members = studies.list_members()
            if members:
                studies.record_consents(gateway.list_consents())
        except StoreUnavailable as error:
            self._log.warning("studies_not_read", reason=str(error))
            return
        if members != self._members:
            self._members = members
            gateway.reconsider_clients()

    def _look_at_schedules(self, schedules: ScheduleStore) -> None:
        """Queue the recurring runs that are due."""
        try:
            for what in schedules.queue_due():
                self._log.info("schedule", what=what)
        except StoreUnavailable as error:
            self._log.warning("schedules_not_read", reason=str(error))

    # ---- The queue ------------------------------------------------------------------------

    def _look(self, queue: RunQueue, work: Callable[[QueuedRun, Interruption], None]) -> None:
        """Start the runs that are due, and those that another process had at work."""
        for name in [name for name, each in self._works.items() if not each.thread.is_alive()]:
            del self._works[name]
        try:
            runs = queue.list()
            due = choose_next(runs, max_concurrent_runs=self.config.service.max_concurrent_runs)
            started = [queue.start(name) for name in due]
        except StoreUnavailable as error:
            self._log.warning("queue_not_read", reason=str(error))
            return
        self._num_queued = sum(each.state is QueueState.QUEUED for each in runs) - len(started)
        for run in (*runs, *started):
            # One that was to start may have been cancelled meanwhile.
            if run.state is QueueState.RUNNING and run.name not in self._works:
                self._start(run, work)

    def _start(self, run: QueuedRun, work: Callable[[QueuedRun, Interruption], None]) -> None:
        interruption = Interruption(partial(self._show_alive, f"rounds of {run.name}"))
        thread = threading.Thread(target=work, args=(run, interruption), name=f"run {run.name}")
        self._works[run.name] = _Work(interruption, thread)
        self._log.info("run_starts", run=run.name)
        thread.start()

    def _show_alive(self, thread: str, seconds: float) -> None:
        self._signs.show(thread, sleeps_s=seconds)

    def _stop_all(self) -> None:
        """Park all runs, and wait until they have ended."""
        for each in self._works.values():
            each.interruption.give(
                Parked("the service stops; the round is parked, and the next start resumes it")
            )
        for each in self._works.values():
            each.thread.join()

    # ---- One run, in its thread -----------------------------------------------------------

    def _work(
        self,
        database: Database,
        gateway: Gateway,
        queue: RunQueue,
        run: QueuedRun,
        interruption: Interruption,
    ) -> None:
        """Have a run at work until it ends, and record in the queue how it ended."""
        state, reason = QueueState.DONE, ""
        structlog.contextvars.bind_contextvars(run=run.name)  # in this thread, which ends with it
        try:
            with limit_to_one_thread():
                self._run(database, gateway, queue, run, interruption)
        except Parked:
            return  # it stays at work for the next process
        except Fenced as error:  # another process has it at work
            self.interruption.give(error)
            return
        except Aborted:
            state, reason = QueueState.CANCELLED, CANCELLED_BY_OPERATOR
        except FedlearnError as error:
            state, reason = QueueState.FAILED, str(error)
        except BaseException as error:  # noqa: BLE001 - a run's own code must not end the service
            self._log.exception("run_failed", run=run.name)
            state, reason = QueueState.FAILED, f"{type(error).__name__}: {error}"
        finally:
            self._signs.forget(f"rounds of {run.name}")
        self._log.info("run_ends", run=run.name, state=state, reason=reason)
        try:
            self._patiently(lambda: queue.finish(run.name, state, reason=reason))
        except FedlearnError as error:  # another process has taken over, or this one stops
            self._log.warning("run_end_not_recorded", run=run.name, reason=str(error))
            self.interruption.give(error)

    def _run(
        self,
        database: Database,
        gateway: Gateway,
        queue: RunQueue,
        run: QueuedRun,
        interruption: Interruption,
    ) -> None:
        assert self._lease is not None
        config = follow_service(load_config(run), self.config)
        places = Places(config=config, addresses=self.places.addresses)
        components = assembly.build_deployment(config, data_dir=places.addresses.data_dir)
        if self.insecure:
            require_plain(components)
        components, notes = self._patiently(lambda: pin_weights(run, components, queue))
        hosted = HostedRun(
            places,
            components,
            interruption,
            insecure=self.insecure,
            start=Start.WHERE_IT_IS,
            progress=self.progress_of(run.name),
            priority=run.priority,
            holder=self._holder,
            heir_of=self._lease.predecessor,
            notes=notes,
            study=run.study,
            is_member=lambda client: client in self._members.get(run.study, ()),
        )
        hosted.deploy(database, from_queue=True)
        with hosted.hold_lease(
            database, status=partial(self._status_of, hosted), alive=lambda: None
        ):
            stored = hosted.prepare(database, restarted_by=database)
            gateway.open_run(hosted.terms())
            self._served[run.name] = hosted
            try:
                hosted.run(stored, gateway)
            finally:
                del self._served[run.name]
                is_over = hosted.live_status.phase is Phase.DONE
                gateway.retire_run(hosted.run_id, is_over=is_over)

    # ---- Status and metrics ---------------------------------------------------------------

    def _status_of(self, hosted: HostedRun) -> dict[str, object]:
        own = hosted.live_status.to_json_values() | {"process": os.getpid()}
        return own | self._front.status(hosted.run_id)

    def status(self) -> Mapping[str, object]:
        """Return the service's status for operators, as JSON values."""
        return {"at_work": sorted(self._works), "queued": self._num_queued, "process": os.getpid()}

    def snapshot(self) -> Snapshot:
        """Return the service's metrics for monitors."""
        gauges = self._front.measure_environment()
        gauges["lease_held"] = float(self._lease is not None and self._lease.is_held())
        gauges |= {"runs_at_work": float(len(self._works)), "runs_queued": float(self._num_queued)}
        gauges["connected"] = float(self._front.num_connected())
        served = list(self._served.values())  # a copy: runs end in other threads
        return Snapshot(
            run=self.places.run_name,
            not_ready=self._explain_not_ready(),
            counters=self._front.counters(),
            gauges=gauges,
            histograms=self._front.histograms(),
            runs=[each.measure(self._front.status(each.run_id)) for each in served],
        )

    def _explain_not_ready(self) -> str:
        if self._lease is None:
            return "this process does not hold the lease of the service"
        if not self._lease.is_held():
            return "the lease could not be renewed in time"
        return "" if self._front.is_open else "the gateway is not open"
