"""The coordinator as a Flower ServerApp: it runs a configuration over a federation's nodes.

The run configuration of ``flwr run`` selects the run: see
:mod:`fedlearn.deployment.flower_config`.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from fedlearn import assembly
from fedlearn.algorithms.informed_sampling import NO_PROPERTIES
from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.assembly.client_link import ClientLink, Identities
from fedlearn.config import Config, resolve_addresses
from fedlearn.config.components import build_component
from fedlearn.core.tracing import tracing
from fedlearn.deployment.flower_config import load_configuration, read_whole_number
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.leader import Leader, ReachableClients
from fedlearn.deployment.live_status import Phase
from fedlearn.deployment.log_signer import LogSigner
from fedlearn.deployment.record import (
    ensure_deployed,
)
from fedlearn.errors import ConfigError, StoreError, TooFewNodes
from fedlearn.experiment.progress import RunProgress, choose_printer
from fedlearn.experiment.run import Run, begin
from fedlearn.experiment.simulate import new_record, report_outcome
from fedlearn.experiment.site import Site, folder_of_run, keys_folder_of
from fedlearn.experiment.summary import summarize
from fedlearn.identity.actors import local_coordinator
from fedlearn.identity.identity import Identity
from fedlearn.rounds.records import RunStatus
from fedlearn.simulation.cluster import limit_to_one_thread
from fedlearn.store.lease import Lease
from fedlearn.store.retention import Retention
from fedlearn.store.runs import StoredRun
from fedlearn.transport import flower
from fedlearn.transport.flower import (
    Federation,
    FlowerChannel,
    LegacyRecords,
    StockChannel,
    StockRecords,
)

#: Subfolder of the runs folder with the coordinator's identity. All runs share it, so that nodes
#: can pin it in advance.
_IDENTITY_FOLDER = "flower-coordinator"
#: How long the database may be unreachable during a run.
_DATABASE_AWAY_S = 600.0


def server_app(folder: Path) -> flower.ServerApp:
    """Build the ServerApp, which runs the configuration in the app's folder that the run names."""

    def main(federation: Federation) -> None:
        progress = choose_printer(sys.stdout, as_json=False)
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
    progress: RunProgress,
) -> Run:
    """Run the configuration in ``folder`` that ``federation`` names, to its last round.

    If a run with the configuration's name exists already, it resumes after its last commit.

    Args:
        federation: The nodes, and the run configuration of ``flwr run``.
        folder: The app's folder.
        environ: The environment variables.
        interruption: Real time, and the reason to end the run in this process.
        progress: Receives the progress of the run.

    Raises:
        Aborted: The operator has ended the run.
        ConfigError: The run cannot be built, was begun with another configuration, or cannot send
            traces as it asks.
        DataError: The coordinator's data are missing.
        DeploymentError: The SuperLink no longer serves this run, or the coordinator's keys are
            damaged.
        RoundError: A round failed and the policy says to fail the run, or too few clients came.
        RunHeld: Another process runs it.
        StoreError: The run cannot be recorded.
    """
    config = load_configuration(federation.run_config, folder)
    site = Site(resolve_addresses(config, environ=environ), environ, interruption, progress)
    _require_no_eligibility(config)
    _require_no_bundle(config)
    components = assembly.build_deployment(config, data_dir=site.addresses.data_dir)
    traces = tracing(config.telemetry.build_trace_settings(), role="coordinator", environ=environ)
    with traces, site.database() as database, limit_to_one_thread():
        name = (
            config.name or begin(new_record(components, extra={}), database, seed=config.seed).name
        )
        ensure_deployed(database, components, name=name, clock=interruption)
        stored = database.run(name)
        # Nothing restarts a ServerApp that died, and waiting for its lease to expire would delay
        # the next `flwr run`. The lock shows at once that the process is gone.
        with stored.hold():
            if stored.record.status is RunStatus.DONE:
                progress.start(stored.record, stored.path, ("this run is already done",))
                progress.end(summarize(stored.record, stored.rounds()))
            else:
                leader = Leader(
                    components=components,
                    data_dir=site.addresses.data_dir,
                    interruption=interruption,
                    progress=progress,
                    database_away_s=_DATABASE_AWAY_S,
                )
                server = _RunServer(federation, site, leader)
                own = database.acting_as(local_coordinator())
                with leader.hold_lease(
                    own,
                    name,
                    status=server.status,
                    alive=lambda: None,  # a ServerApp has no liveness endpoint
                ) as lease:
                    # From here on, every write checks the lease.
                    stored = own.run(name, guard=lease.guard)
                    outcome = report_outcome(stored, progress, callbacks=components.callbacks)
                    keys_folder = keys_folder_of(folder_of_run(stored))
                    with LogSigner(own, keys_folder), outcome, _record_stop(stored):
                        server.run(stored, lease)
        return Run(stored, components.make_model)


def _require_no_eligibility(config: Config) -> None:
    """Refuse eligibility rules: a Flower node has no tags and does not describe itself."""
    section = config.coordinator.eligibility
    given = [name for name, value in section if value != type(section).model_fields[name].default]
    if given:
        raise ConfigError(
            f"coordinator.eligibility.{given[0]} is set, but the nodes of a Flower federation "
            "have no tags and do not describe themselves; leave it out, and admit only the nodes "
            "that should take part"
        )


def _require_no_bundle(config: Config) -> None:
    """Refuse a bundle: Flower has its own way to ship code, and its nodes approve nothing."""
    if config.client.bundle is not None:
        raise ConfigError(
            f"client.bundle is {config.client.bundle!r}, but the nodes of a Flower federation run "
            "the trainer of their own app; leave it out"
        )


@contextmanager
def _record_stop(stored: StoredRun) -> Iterator[None]:
    """Record that a run was stopped: `flwr stop` ends the ServerApp by SystemExit."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with suppress(StoreError):
            stored.finish(RunStatus.INTERRUPTED, error="")
        raise


@dataclass(eq=False)
class _RunServer:
    """A run that a ServerApp serves: its channel, its identity, and its status."""

    federation: Federation
    site: Site
    leader: Leader
    channel: FlowerChannel | StockChannel = field(init=False)
    identity: Identity | None = field(init=False)

    def __post_init__(self) -> None:
        components = self.leader.components
        self.identity = (
            None
            if components.secure is None
            else coordinator_identity(self.site.addresses.runs_dir)
        )
        self.channel = (
            self._stock_channel() if components.config.flower.is_foreign else self._channel()
        )

    def _channel(self) -> FlowerChannel:
        return FlowerChannel(
            grid=self.federation.grid,
            run_id=self.federation.run_id,
            clock=self.leader.interruption,
            patience_s=self.patience_s,
            coordinator_key=b"" if self.identity is None else self.identity.public_key,
        )

    def _stock_channel(self) -> StockChannel:
        section = self.leader.components.config.flower
        records = LegacyRecords if section.is_legacy else StockRecords
        return StockChannel(
            grid=self.federation.grid,
            clock=self.leader.interruption,
            patience_s=self.patience_s,
            records=records.of(
                self.leader.components.make_model(), evaluate_config=section.evaluate_config
            ),
        )

    @property
    def patience_s(self) -> float:
        return float(read_whole_number(self.federation.run_config, "patience-s"))

    def status(self) -> dict[str, object]:
        """Return the status for operators, as JSON values."""
        connected = {"connected": self.channel.num_nodes, "eligible": self.channel.num_clients}
        return self.leader.live_status.to_json_values() | {"process": os.getpid(), **connected}

    def run(self, stored: StoredRun, lease: Lease) -> None:
        """Run the remaining rounds."""
        stored.retention = build_component(Retention, self.leader.components.config.store)
        stored.finish(RunStatus.RUNNING, error="")
        self.leader.run(self._reach_clients(stored.name), stored, stored.record, lease)
        self.leader.live_status.phase = Phase.DONE
        counts = asdict(self.channel.counts)
        structlog.get_logger(__name__).info("federation_left", **counts)

    def _reach_clients(self, name: str) -> ReachableClients:
        min_clients = read_whole_number(self.federation.run_config, "min-clients")
        return ReachableClients(
            reach=ClientLink(channel=self.channel, identities=self._load_identities()),
            run_id=str(self.federation.run_id),
            notes=self._describe_run(name),
            restarts_open_round=True,  # a node replies only to the Flower run that asked it
            num_needed=min_clients or self.leader.components.num_needed,
            patience_s=self.patience_s,
            too_few=self._require_enough,
            names=lambda _: {},
            set_aside=_ignore,  # a node never reconnects, so it would stay set aside
            num_set_aside=lambda: 0,
            num_elsewhere=lambda: 0,
            take_trainers=dict,  # nodes do not say what they ran
            forget=_ignore,  # replies end with their exchange
            properties=NO_PROPERTIES,
        )

    def _require_enough(self, num_present: int, num_waits: int) -> None:
        """Allow as many waits as a round has retries, then raise TooFewNodes."""
        policy, attendance = self.leader.components.policy, self.channel.describe_attendance()
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

    def _describe_run(self, name: str) -> list[str]:
        notes = [f"Flower run {self.federation.run_id}"]
        if not self.leader.components.config.name:
            notes.append(f'if it is stopped, `flwr run` with overrides="name={name}" resumes it')
        if isinstance(self.channel, StockChannel):
            notes.append("the nodes' own ClientApps train; a client's id is its node's id")
        if self.identity is not None:
            pin = f'coordinator-key="{self.identity.public_key.hex()}"'
            notes.append(f"nodes may pin this coordinator: --node-config '{pin}'")
        return notes

    def _load_identities(self) -> Identities | None:
        if self.identity is None or not isinstance(channel := self.channel, FlowerChannel):
            return None
        return Identities.of(
            self.federation.run_id,
            signer=self.identity,
            directory=lambda: channel.identity_keys,
        )


def _ignore(_: int) -> None:
    """Do nothing: Flower has no counterpart."""


def coordinator_identity(runs_dir: Path) -> Identity:
    """Load the identity that signs terms for the runs in a folder, and create it on first use.

    Raises:
        DeploymentError: The identity cannot be written or is damaged.
    """
    return Identity.load_or_create(runs_dir / _IDENTITY_FOLDER)
