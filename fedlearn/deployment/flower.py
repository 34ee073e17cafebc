"""The coordinator as a Flower ServerApp: the run of a configuration over a federation's nodes.

What ``flwr run`` is given says which run: see :mod:`fedlearn.deployment.flower_config`.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path

import structlog

from fedlearn import build
from fedlearn.config import resolve_addresses
from fedlearn.config.pieces import built
from fedlearn.core.clock import Clock, SystemClock
from fedlearn.deployment.flower_config import configuration, number
from fedlearn.deployment.record import TellingStore
from fedlearn.deployment.rounds import run_over
from fedlearn.experiment.assemble import Identities, standing_of
from fedlearn.experiment.privacy import promise
from fedlearn.experiment.progress import Progress, progress_to
from fedlearn.experiment.run import Run, begin
from fedlearn.experiment.server_training import FOLDER, Place
from fedlearn.experiment.simulate import Site, new_record, outcome_told
from fedlearn.identity.identity import Identity
from fedlearn.rounds.opening import ChargedOpening, Opening, SampledOpening
from fedlearn.simulation.cluster import Alone, one_thread
from fedlearn.store.retention import Retention
from fedlearn.transport import flower
from fedlearn.transport.flower import Federation, FlowerChannel

#: In the folder of runs: the coordinator's identity, the same for all of them, so that nodes may
#: be told of it beforehand.
_IDENTITY_FOLDER = "flower-coordinator"


def server_app(folder: Path) -> flower.ServerApp:
    """Return the ServerApp that runs the configuration that the run names, in the app's folder."""

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
    """Run the configuration of ``folder`` that ``federation`` names, from first to last round.

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
    key = b"" if identity is None else identity.public_key
    channel = FlowerChannel(
        grid=federation.grid,
        run_id=federation.run_id,
        clock=clock,
        min_clients=number(federation.run_config, "min-clients") or pieces.num_needed,
        patience_s=float(number(federation.run_config, "patience-s")),
        coordinator_key=key,
    )
    notes, identities = [f"Flower run {federation.run_id}"], None
    if identity is not None:
        pin = f'coordinator-key="{key.hex()}"'
        notes.append(f"nodes may pin this coordinator: --node-config '{pin}'")
        identities = Identities.of(
            federation.run_id, signer=identity, directory=lambda: channel.identity_keys
        )
    record = new_record(pieces, extra={})
    with site.database() as database, one_thread():
        stored = begin(record, database, seed=config.seed)
        stored.retention = built(Retention, config.store)
        with stored.held(), outcome_told(stored, progress):
            promised, charging, _ = promise(pieces, stored, num_finished=0, clock=clock)
            progress.start(stored.record, stored.path, [*notes, *promised])
            opening: Opening = SampledOpening(
                sampler=pieces.sampler,
                available=channel.available,
                policy=pieces.policy,
                seed=pieces.seed,
            )
            if charging is not None:
                opening = ChargedOpening(inner=opening, charge=charging.charge)
            with nullcontext() if charging is None else closing(charging):
                run_over(
                    channel,
                    pieces,
                    opening=opening,
                    store=TellingStore(store=stored, tell=progress.round),
                    checkpoint=None,
                    clock=clock,
                    place=Place(
                        kind="deployment",
                        folder=stored.path / FOLDER,
                        data_dir=site.addresses.data_dir,
                        is_described=True,
                        cluster=Alone(),
                    ),
                    identities=identities,
                    standing=standing_of(charging),
                )
        structlog.get_logger(__name__).info("federation_left", **asdict(channel.counts))
        return Run(stored, pieces.make_model)


def coordinator_identity(runs_dir: Path) -> Identity:
    """Return what a coordinator with these runs signs terms with, made when it is first asked for.

    Raises:
        DeploymentError: It cannot be written, or is damaged.
    """
    return Identity.at(runs_dir / _IDENTITY_FOLDER)
