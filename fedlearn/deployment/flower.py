"""The coordinator as a Flower ServerApp: the run of a configuration over a federation's nodes.

What ``flwr run`` is given says which run: see :mod:`fedlearn.deployment.flower_config`.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import structlog

from fedlearn import build
from fedlearn.algorithms.flight import Draw
from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.config import resolve_addresses
from fedlearn.config.pieces import built
from fedlearn.deployment.flower_config import configuration, number
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.leading import leading
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.opening import DurableOpening, present_in
from fedlearn.deployment.record import (
    ForgettingStore,
    TellingStore,
    ensure_deployed,
    first_attempts,
)
from fedlearn.deployment.rounds import run_over
from fedlearn.errors import StoreError, TooFewNodes
from fedlearn.experiment.assemble import Identities, standing_of
from fedlearn.experiment.comparison import summarize
from fedlearn.experiment.privacy import gone_on, promise
from fedlearn.experiment.progress import Progress, progress_to
from fedlearn.experiment.run import Run, begin
from fedlearn.experiment.server_training import FOLDER, Place
from fedlearn.experiment.simulate import new_record, outcome_told
from fedlearn.experiment.site import Site
from fedlearn.identity.identity import Identity
from fedlearn.rounds.opening import ChargedDraw, ChargedOpening, Opening
from fedlearn.rounds.records import RunStatus
from fedlearn.simulation.cluster import Alone, one_thread
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease
from fedlearn.store.masked_sum import MaskedSumFile
from fedlearn.store.patience import Patience
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun
from fedlearn.transport import flower
from fedlearn.transport.flower import Federation, FlowerChannel, StockChannel, StockRecords

#: In the folder of runs: the coordinator's identity, the same for all of them, so that nodes may
#: be told of it beforehand.
_IDENTITY_FOLDER = "flower-coordinator"
#: How long the database may be away in the middle of a run.
_DATABASE_AWAY_S = 600.0


def server_app(folder: Path) -> flower.ServerApp:
    """Return the ServerApp that runs the configuration that the run names, in the app's folder."""

    def main(federation: Federation) -> None:
        progress = progress_to(sys.stdout, as_json=False)
        run(
            federation,
            folder,
            environ=os.environ,
            interruption=Interruption(),
            progress=progress,
        )

    return flower.server_app(main)


def run(
    federation: Federation,
    folder: Path,
    *,
    environ: Mapping[str, str],
    interruption: Interruption,
    progress: Progress,
) -> Run:
    """Run the configuration of ``folder`` that ``federation`` names, to its last round.

    A run of the configuration's name that was begun before goes on after its last commit.

    Args:
        federation: The nodes, and what ``flwr run`` was given.
        folder: Of the app.
        environ: The environment variables.
        interruption: Real time, and what ends the run in this process.
        progress: Told of the run.

    Raises:
        Aborted: The operator has ended the run.
        ConfigError: The run is not one that can be built, or was begun with another
            configuration.
        DataError: The coordinator's data are missing.
        DeploymentError: The SuperLink no longer serves this run, or the coordinator's keys are
            damaged.
        RoundError: A round failed and the policy says to fail the run, or too few clients came.
        RunHeld: Another process runs it.
        StoreError: The run cannot be recorded.
    """
    config = configuration(federation.run_config, folder)
    site = Site(resolve_addresses(config, environ=environ), environ, interruption, progress)
    pieces = build.deployment(config, data_dir=site.addresses.data_dir)
    with site.database() as database, one_thread():
        name = config.name or begin(new_record(pieces, extra={}), database, seed=config.seed).name
        ensure_deployed(database, pieces, name=name, clock=interruption)
        stored = database.run(name)
        # A coordinator that died starts again by itself, and its lease passes on when it is
        # silent. Nobody starts a ServerApp again: so the lock tells that it is gone.
        with stored.held():
            if stored.record.status is RunStatus.DONE:
                progress.start(stored.record, stored.path, ("it was done before",))
                progress.end(summarize(stored.record, stored.rounds()))
            else:
                served = _Served(federation, pieces, site, interruption)
                with served.leading(database, name) as lease:
                    stored = database.run(name, guard=lease.guard)
                    with outcome_told(stored, progress), _stop_recorded(stored):
                        served.run(database, stored, lease)
        return Run(stored, pieces.make_model)


@contextmanager
def _stop_recorded(stored: StoredRun) -> Iterator[None]:
    """Record that a run was stopped: `flwr stop` ends the ServerApp by SystemExit."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with suppress(StoreError):
            stored.finish(RunStatus.INTERRUPTED, error="")
        raise


@dataclass(eq=False)
class _Served:
    """A run that a ServerApp serves, and what it says of itself."""

    federation: Federation
    pieces: build.Deployment
    site: Site
    interruption: Interruption
    paused: threading.Event = field(default_factory=threading.Event)
    channel: FlowerChannel | StockChannel = field(init=False)
    identity: Identity | None = field(init=False)
    live_status: LiveStatus = field(init=False)
    patiently: Patience = field(init=False)

    def __post_init__(self) -> None:
        pieces, policy, log = self.pieces, self.pieces.policy, structlog.get_logger(__name__)
        self.identity = (
            None if pieces.secure is None else coordinator_identity(self.site.addresses.runs_dir)
        )
        self.channel = self._stock_channel() if pieces.config.flower.is_foreign else self._channel()
        self.live_status = LiveStatus(
            num_rounds=pieces.config.num_rounds,
            num_wanted=policy.num_wanted,
            min_reports=policy.min_reports,
            deadline_s=policy.deadline_s,
            measures=tuple(pieces.directions),
        )
        self.patiently = Patience(clock=self.interruption, give_up_s=_DATABASE_AWAY_S, log=log)

    def _channel(self) -> FlowerChannel:
        return FlowerChannel(
            grid=self.federation.grid,
            run_id=self.federation.run_id,
            clock=self.interruption,
            patience_s=self.patience_s,
            coordinator_key=b"" if self.identity is None else self.identity.public_key,
        )

    def _stock_channel(self) -> StockChannel:
        told = self.pieces.config.flower
        return StockChannel(
            grid=self.federation.grid,
            clock=self.interruption,
            patience_s=self.patience_s,
            records=StockRecords.of(
                self.pieces.make_model(),
                train_config=told.train_config,
                evaluate_config=told.evaluate_config,
            ),
        )

    @property
    def patience_s(self) -> float:
        return float(number(self.federation.run_config, "patience-s"))

    @contextmanager
    def leading(self, database: Database, name: str) -> Iterator[Lease]:
        """Hold the run's lease."""
        with leading(
            database,
            name,
            ttl_s=self.pieces.config.coordinator.lease_ttl_s,
            status=self.status,
            paused=self.paused,
            interruption=self.interruption,
            alive=lambda: None,  # nobody asks the app
            patiently=self.patiently,
            stand_by=self._stand_by,
        ) as lease:
            yield lease

    def _stand_by(self) -> None:
        self.live_status.phase = Phase.STANDBY

    def status(self) -> dict[str, object]:
        """Return what operators are told, as JSON values."""
        connected = {"connected": self.channel.num_nodes, "eligible": self.channel.num_clients}
        return self.live_status.values() | {"process": os.getpid(), **connected}

    def run(self, database: Database, stored: StoredRun, lease: Lease) -> None:
        """Run the rounds that are due."""
        stored.retention = built(Retention, self.pieces.config.store)
        checkpoint, status = stored.load(), stored.record.status
        journal = StoredJournal(database, stored.name, guard=lease.guard)
        self.live_status.num_finished = 0 if checkpoint is None else checkpoint.round_num
        promised, charging, num_lost = promise(
            self.pieces,
            stored,
            num_finished=self.live_status.num_finished,
            clock=self.interruption,
        )
        pieces = gone_on(self.pieces, num_lost=num_lost)
        # Nobody answers what another Flower run has asked: its attempt is over.
        first = first_attempts(journal.last(), status, pieces.policy, begins_anew=True)
        stored.finish(RunStatus.RUNNING, error="")
        identities, notes = self._identities(), self._notes(stored.name)
        self.site.progress.start(stored.record, stored.path, [*notes, *promised])
        durable = self._opening(journal)
        opening: Opening = durable
        is_late_kept = self.pieces.late_updates is not None
        draw: Draw = durable.draw_cohort if is_late_kept else durable.draw
        if charging is not None:
            opening = ChargedOpening(inner=opening, charge=charging.charge)
            draw = ChargedDraw(inner=draw, charge=charging.charge)
        with nullcontext() if charging is None else closing(charging):
            run_over(
                self.channel,
                pieces,
                opening=opening,
                store=ForgettingStore(
                    store=TellingStore(store=stored, tell=self.site.progress.round),
                    patiently=self.patiently,
                    journal=journal,
                    forget=_forget_nothing,
                    live_status=self.live_status,
                ),
                checkpoint=checkpoint,
                masked_sum=MaskedSumFile(path=stored.path / "masked-sum", patiently=self.patiently),
                clock=self.interruption,
                place=Place(
                    kind="deployment",
                    folder=stored.path / FOLDER,
                    data_dir=self.site.addresses.data_dir,
                    is_described=True,
                    cluster=Alone(),
                    control=self.interruption,
                    told=self.live_status.trained,
                ),
                first_attempts=first,
                identities=identities,
                standing=standing_of(charging),
                draw=draw,
            )
        self.live_status.phase = Phase.DONE
        counts = asdict(self.channel.counts)
        structlog.get_logger(__name__).info("federation_left", **counts)

    def _opening(self, journal: StoredJournal) -> DurableOpening:
        min_clients = number(self.federation.run_config, "min-clients")
        return DurableOpening(
            sampler=self.pieces.sampler,
            available=partial(present_in, self.pieces, self.channel),
            policy=self.pieces.policy,
            seed=self.pieces.seed,
            num_needed=min_clients or self.pieces.num_needed,
            num_set_aside=lambda: 0,
            patience_s=self.patience_s,
            too_few=self._too_few,
            is_paused=self.paused.is_set,
            check=self.interruption.check,
            journal=journal,
            live_status=self.live_status,
            clock=self.interruption,
        )

    def _too_few(self, num_present: int, num_waits: int) -> None:
        """Wait as often as a round is tried; raise TooFewNodes after that."""
        policy, attendance = self.pieces.policy, self.channel.attendance()
        retries = policy.max_retries if policy.below_minimum is BelowMinimum.RETRY else 0
        if num_waits > retries:
            raise TooFewNodes(
                present=num_present,
                minimum=policy.min_reports,
                waited_s=num_waits * self.patience_s,
                attendance=attendance,
                num_strangers=self.channel.num_nodes - self.channel.num_clients,
            )
        structlog.get_logger(__name__).warning(
            "too_few_clients",
            present=num_present,
            min_reports=policy.min_reports,
            attendance=attendance,
        )

    def _notes(self, name: str) -> list[str]:
        notes = [f"Flower run {self.federation.run_id}"]
        if not self.pieces.config.name:
            notes.append(f'if it is stopped, `flwr run` with overrides="name={name}" goes on')
        if isinstance(self.channel, StockChannel):
            notes.append("the nodes' own ClientApps train, each known by its node's id")
        if self.identity is not None:
            pin = f'coordinator-key="{self.identity.public_key.hex()}"'
            notes.append(f"nodes may pin this coordinator: --node-config '{pin}'")
        return notes

    def _identities(self) -> Identities | None:
        if self.identity is None or not isinstance(channel := self.channel, FlowerChannel):
            return None
        return Identities.of(
            self.federation.run_id,
            signer=self.identity,
            directory=lambda: channel.identity_keys,
        )


def _forget_nothing(_: int) -> None:
    """Keep no replies: Flower's end with their exchange."""


def coordinator_identity(runs_dir: Path) -> Identity:
    """Return what a coordinator with these runs signs terms with, made when it is first asked for.

    Raises:
        DeploymentError: It cannot be written, or is damaged.
    """
    return Identity.at(runs_dir / _IDENTITY_FOLDER)
