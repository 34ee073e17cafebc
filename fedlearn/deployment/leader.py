"""Lead a deployed run: take its lease and assemble its rounds, over gRPC or Flower.

:class:`ReachableClients` holds the differences between gRPC and Flower; the rest is shared.
"""

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from fedlearn.algorithms.collector import CollectedRound
from fedlearn.algorithms.informed_sampling import ClientProperties
from fedlearn.assembly import Deployment
from fedlearn.assembly.callbacks import start_callbacks
from fedlearn.assembly.client_link import ClientLink
from fedlearn.assembly.own_code import check_own_sampler
from fedlearn.assembly.server_jobs import FOLDER, TrainingHost
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.core.tracing import run_context
from fedlearn.deployment.failing import FailingClients
from fedlearn.deployment.heartbeat import Heartbeat
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.opening import DurableOpening, list_available
from fedlearn.deployment.record import (
    CleanupStore,
    ReportingStore,
    SumAfterTrainers,
    resume_round,
)
from fedlearn.deployment.rounds import RunStorage, run_rounds
from fedlearn.errors import StoreError
from fedlearn.experiment.privacy import skip_lost_turns, start_accounting
from fedlearn.experiment.progress import RunProgress, raise_num_rounds
from fedlearn.rounds.opening import CohortSource
from fedlearn.rounds.records import RunRecord
from fedlearn.secagg.session import Stage
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.masked_sum import MaskedSumFile
from fedlearn.store.patience import Patience, PatientCharges, PatientJournal
from fedlearn.store.runs import Database, StoredRun

_HOLDER_BYTES = 4


def make_holder_name() -> str:
    """Return a name for this process that no other holder of a lease has had."""
    # Process ids are used again; a lease must not be mistaken for that of an earlier process.
    drawn = SecretBytes.generate(_HOLDER_BYTES).reveal().hex()
    return f"{socket.gethostname()}:{os.getpid()}:{drawn}"


@dataclass(frozen=True, kw_only=True)
class ReachableClients:
    """How the clients of a deployed run are reached, and the settings that depend on it.

    Attributes:
        reach: The channel and the keys.
        run_id: Id of the run that clients see. They keep no state from a run with another id.
        notes: Notes for the user, shown when the run starts.
        restarts_open_round: Whether a round that another process has opened starts a new attempt,
            because replies to that process are lost.
        num_needed: Connected clients that a round waits for before it asks any.
        patience_s: Seconds that a round waits for them.
        too_few: See :class:`~fedlearn.deployment.opening.DurableOpening`.
        names: Returns the names of those given clients that have one.
        set_aside: Stops asking a client that keeps failing.
        num_set_aside: Returns how many connected clients are set aside.
        num_elsewhere: Returns how many clients could be asked, but for other runs.
        take_trainers: Returns what clients ran since the last call, by round and client.
        forget: Called with a round number; replies to earlier rounds are no longer needed.
        properties: What the clients and their tags say about them.
    """

    reach: ClientLink
    run_id: str
    notes: Sequence[str]
    restarts_open_round: bool
    num_needed: int
    patience_s: float
    too_few: Callable[[int, int], None]
    names: Callable[[Collection[ClientId]], Mapping[ClientId, str]]
    set_aside: Callable[[ClientId], None]
    num_set_aside: Callable[[], int]
    num_elsewhere: Callable[[], int]
    take_trainers: Callable[[], Mapping[tuple[int, ClientId], str]]
    forget: Callable[[int], None]
    properties: ClientProperties


@dataclass(eq=False, kw_only=True)
class Leader:
    """Takes the lease of a deployed run, and runs its rounds.

    Attributes:
        components: The assembled run.
        data_dir: Folder of the data for the coordinator's own training.
        interruption: Real time, and the reason to end the run in this process.
        progress: Receives the progress of the run.
        database_away_s: Seconds that the database may be unreachable during the run.
        holder: Name of this process as holder of the lease.
        heir_of: See :class:`~fedlearn.store.lease.Lease`.
        live_status: The status that operators and monitors see.
        paused: Set while the operator has paused the run.
        patiently: Retries calls while the database is unreachable.
    """

    components: Deployment
    data_dir: Path
    interruption: Interruption
    progress: RunProgress
    database_away_s: float
    holder: str = field(default_factory=make_holder_name)
    heir_of: str = ""
    live_status: LiveStatus = field(init=False)
    paused: threading.Event = field(default_factory=threading.Event, init=False)
    patiently: Patience = field(init=False)

    def __post_init__(self) -> None:
        policy = self.components.policy
        self.live_status = LiveStatus(
            num_rounds=self.components.config.num_rounds,
            num_wanted=policy.num_wanted,
            min_reports=policy.min_reports,
            deadline_s=policy.deadline_s,
            measures=tuple(self.components.directions),
            epsilon_budget=self.components.config.privacy.epsilon,
            secure_dropouts={} if self.components.secure is None else dict.fromkeys(Stage, 0),
        )
        self.patiently = Patience(
            clock=self.interruption,
            give_up_s=self.database_away_s,
            log=structlog.get_logger(__name__),
        )

    @contextmanager
    def hold_lease(
        self,
        database: Database,
        name: str,
        *,
        status: Callable[[], Mapping[str, object]],
        alive: Callable[[], None],
    ) -> Iterator[Lease]:
        """Wait for the lease of the deployed run called ``name``, and hold it in the block.

        Args:
            database: The database with the run.
            name: Name of the run.
            status: Returns the status for operators, as JSON values.
            alive: Called by the thread that renews the lease, as a sign of life.

        Raises:
            FedlearnError: The reason given to ``interruption`` while waiting for the lease.
            StoreError: The database cannot be read or written.
        """
        log = structlog.get_logger(__name__)
        ttl_s = self.components.config.coordinator.lease_ttl_s
        lease = Lease(
            database,
            name,
            holder=self.holder,
            ttl_s=ttl_s,
            clock=self.interruption,
            heir_of=self.heir_of,
        )
        heartbeat = Heartbeat(
            lease,
            status=status,
            paused=self.paused,
            interruption=self.interruption,
            alive=alive,
            clock=SystemClock(),
        )
        try:
            if not self.patiently(lease.try_acquire):
                self.live_status.phase = Phase.STANDBY
                log.info("standby", run=name, holder=find_deployment(database, name).holder)
                lease.acquire(is_stopped=self.interruption.is_given)
                self.interruption.check()
            log.info("leading", run=name)
            with heartbeat:
                yield lease
        finally:
            # After the heartbeat has ended: a beat after the release would look like a takeover.
            with suppress(StoreError):  # the next coordinator then waits for the lease to expire
                lease.release()

    def run(
        self, clients: ReachableClients, stored: StoredRun, record: RunRecord, lease: Lease
    ) -> None:
        """Run the rounds of ``stored`` that are due, each committed under the lease.

        Args:
            clients: How the clients are reached.
            stored: The run.
            record: The run's record at the start of this process.
            lease: The lease, which this process holds.

        Raises:
            BudgetExhausted: The privacy budget does not cover the next round.
            ConfigError: Parts of the configuration do not fit together.
            FedlearnError: Raised by ``interruption`` or ``clients.too_few``.
            RoundError: A round failed and the policy says to fail the run.
            StoreError: The run could not be made durable; its last commit still stands.
        """
        patiently, live_status = self.patiently, self.live_status
        # 1. Where the run stands: its journal, its checkpoint, and the round that was left open.
        found = partial(StoredJournal, stored.database, stored.name, guard=lease.guard)
        journal = PatientJournal(journal=patiently(found), patiently=patiently)
        checkpoint = patiently(stored.load)
        if checkpoint is not None:
            checkpoint = checkpoint.with_client_run(clients.run_id)
        live_status.num_rounds = record.num_rounds
        live_status.num_finished = 0 if checkpoint is None else checkpoint.round_num
        resumed = resume_round(
            journal,
            record.status,
            self.components.policy,
            restarts=clients.restarts_open_round or _is_bound_to_process(self.components),
            takes_late_updates=self.components.late_updates is not None,
            now_unix_s=self.interruption.unix_s(),
        )
        # 2. What it has spent of its privacy budget.
        promised, charging, num_lost = patiently(
            lambda: start_accounting(
                self.components,
                stored,
                num_finished=live_status.num_finished,
                clock=self.interruption,
            )
        )
        self.progress.start(record, stored.path, (*clients.notes, *promised))
        if self.components.callbacks:
            history = patiently(stored.rounds)
            start_callbacks(self.components.callbacks, record, stored.path, history)
        components = skip_lost_turns(self.components, num_lost=num_lost)
        # 3. Which clients keep failing.
        failing = FailingClients(
            names=clients.names,
            set_aside=clients.set_aside,
            set_aside_after=components.config.coordinator.set_aside_after,
            streaks=patiently(stored.load_failing),
        )
        live_status.failing = failing.status
        # 4. The rounds that are due.
        opening = self._build_opening(clients, components, journal)
        is_synchronous = components.asynchrony is None
        save_trainers = partial(self._save_trainers, clients, stored)
        masked_sum = MaskedSumFile(path=stored.path / "masked-sum", patiently=patiently)
        with (
            run_context(stored.name, run_id=clients.run_id),
            nullcontext() if charging is None else closing(charging),
        ):
            run_rounds(
                clients.reach,
                components,
                RunStorage(
                    store=CleanupStore(
                        store=ReportingStore(store=stored, report=self.progress.round),
                        patiently=patiently,
                        journal=journal,
                        save_trainers=save_trainers,
                        forget=clients.forget,
                        live_status=live_status,
                        run_id=clients.run_id,
                    ),
                    checkpoint=checkpoint,
                    resumed=resumed,
                    masked_sum=SumAfterTrainers(store=masked_sum, save_trainers=save_trainers),
                    read_num_rounds=partial(self._refresh_num_rounds, stored),
                ),
                source=CohortSource(
                    draw=opening.draw_cohort if is_synchronous else opening.draw,
                    sampler=opening.sampler,
                    # A resumed round is charged again, because its noise is drawn again.
                    charging=None
                    if charging is None
                    else PatientCharges(charges=charging, patiently=patiently),
                ),
                clock=self.interruption,
                host=TrainingHost(
                    kind="deployment",
                    folder=stored.path / FOLDER,
                    data_dir=self.data_dir,
                    is_described=True,
                    cluster=Alone(),
                    control=self.interruption,
                    report=live_status.record_training,
                ),
                on_collected=partial(self._record_attempt, failing),
                num_elsewhere=clients.num_elsewhere,
            )

    def _record_attempt(self, failing: FailingClients, collected: CollectedRound) -> None:
        failing.record(collected.participations)
        self.live_status.record_dropouts(collected.dropouts)

    def _save_trainers(self, clients: ReachableClients, stored: StoredRun) -> None:
        trainers = clients.take_trainers()
        self.patiently(lambda: stored.save_trainers(trainers))

    def _refresh_num_rounds(self, stored: StoredRun) -> int:
        num_rounds = self.patiently(lambda: stored.record.num_rounds)
        self.live_status.num_rounds = num_rounds
        raise_num_rounds(self.progress, num_rounds)
        return num_rounds

    def _build_opening(
        self, clients: ReachableClients, components: Deployment, journal: PatientJournal
    ) -> DurableOpening:
        return DurableOpening(
            sampler=check_own_sampler(
                components.sampler, is_private=components.privacy is not None
            ),
            available=partial(list_available, components, clients.reach.channel),
            policy=components.policy,
            seed=components.seed,
            num_needed=clients.num_needed,
            num_set_aside=clients.num_set_aside,
            patience_s=clients.patience_s,
            too_few=clients.too_few,
            is_paused=self.paused.is_set,
            check=self.interruption.check,
            journal=journal,
            live_status=self.live_status,
            clock=self.interruption,
            properties=clients.properties,
        )


def _is_bound_to_process(components: Deployment) -> bool:
    """Check whether a round can be finished only by the process that opened it."""
    takes_turns = components.privacy is not None and components.privacy.takes_turns
    return components.secure is not None or takes_turns
