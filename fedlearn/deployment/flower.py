"""The coordinator as a Flower ServerApp: the run of a configuration over a federation's nodes.

What ``flwr run`` is given says which run: see :mod:`fedlearn.deployment.flower_config`.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import structlog

from fedlearn import build
from fedlearn.config import Config, resolve_addresses
from fedlearn.core.clock import Clock, SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.deployment.flower_config import configuration, number
from fedlearn.deployment.identities import DeployedIdentities
from fedlearn.deployment.rounds import run_over
from fedlearn.experiment.progress import Progress, progress_to
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import Site, new_record, outcome_told
from fedlearn.rounds.records import RunRecord
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.simulation.cluster import one_thread
from fedlearn.store.runs import Database, StoredRun
from fedlearn.transport import flower
from fedlearn.transport.flower import Federation, FlowerChannel
from fedlearn.transport.identity import Identity

#: In the folder of runs: the coordinator's identity, the same for all of them, so that nodes may
#: be told of it beforehand.
_IDENTITY_FOLDER = "flower-coordinator"


def server_app(folder: Path) -> flower.ServerApp:
    """Return the ServerApp that runs the configuration that the run names.

    Args:
        folder: The app's, where the configuration lies.
    """

    def main(federation: Federation) -> None:
        progress = progress_to(sys.stdout, as_json=False)
        run(federation, folder, environ=os.environ, clock=SystemClock(), progress=progress)

    return flower.server_app(main)


def run(
    federation: Federation,
    folder: Path,
    *,
    environ: Mapping[str, str],
    clock: Clock,
    progress: Progress,
) -> Run:
    """Run the configuration that ``federation`` names, from its first round to its last.

    Args:
        federation: The nodes, and the run's settings.
        folder: Where the configuration lies.
        environ: Environment variables: ``FEDLEARN_RUNS_DIR`` and its kin.
        clock: Real time.
        progress: Told of each finished round.

    Raises:
        ConfigError: The run is not one that can be built.
        DataError: The coordinator's data are missing.
        DeploymentError: The SuperLink no longer serves this run, or the coordinator's keys are
            damaged.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run cannot be recorded.
    """
    config = configuration(federation.run_config, folder)
    site = Site(resolve_addresses(config, environ=environ), environ, clock, progress)
    pieces = build.deployment(config, data_dir=site.addresses.data_dir)
    identity = None if pieces.secure is None else coordinator_identity(site.addresses.runs_dir)
    channel = federation.channel(
        clock=clock,
        min_clients=number(federation.run_config, "min-clients") or pieces.policy.num_asked,
        patience_s=float(number(federation.run_config, "patience-s")),
        coordinator_key=b"" if identity is None else identity.public_key,
    )
    record = new_record(pieces, extra={})
    with site.database() as database, one_thread():
        stored = _created(database, record, config)
        with outcome_told(stored, progress):
            progress.start(stored.record, stored.path, _notes(federation, identity))
            run_over(
                channel,
                pieces,
                sampler=pieces.sampler,
                store=stored,
                checkpoint=None,
                clock=clock,
                progress=progress.round,
                identities=_identities(federation, channel, identity),
            )
        counts = channel.counts
        structlog.get_logger(__name__).info(
            "federation_left",
            late=counts.late,
            refused=counts.refused,
            grid_errors=counts.grid_errors,
        )
        return Run(stored, pieces.make_model)


def coordinator_identity(runs_dir: Path) -> Identity:
    """Return what a coordinator with these runs signs terms with, made when it is first asked for.

    Raises:
        DeploymentError: It cannot be written, or is damaged.
    """
    return Identity.at(runs_dir / _IDENTITY_FOLDER)


def _notes(federation: Federation, identity: Identity | None) -> tuple[str, ...]:
    """Return what is said of the run at its start."""
    run = f"Flower run {federation.run_id}"
    if identity is None:
        return (run,)
    key = identity.public_key.hex()
    return (run, f"nodes may pin this coordinator: --node-config 'coordinator-key=\"{key}\"'")


def _identities(
    federation: Federation, channel: FlowerChannel, identity: Identity | None
) -> DeployedIdentities | None:
    """Return what secure aggregation signs and verifies with; ``None``: it is off."""
    if identity is None:
        return None
    return DeployedIdentities(
        run_id=hashlib.sha256(federation.run_id.encode()).digest()[:RUN_BYTES],
        signer=identity,
        directory=lambda: channel.identity_keys,
    )


def _created(database: Database, record: RunRecord, config: Config) -> StoredRun:
    if config.name is not None:
        return database.create(record)
    return database.create_named(record, seed=Seed(config.seed).derive(record.created_utc))
