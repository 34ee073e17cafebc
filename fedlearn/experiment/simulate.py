"""Run a federated simulation, from Python or from a configuration; resume one."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedlearn.algorithms.objectives import CrossEntropy, Objective
from fedlearn.algorithms.recipes import Algorithm
from fedlearn.build import Deployment, Simulation, around, simulation
from fedlearn.config import Addresses, Config, config_hash, from_mapping, resolve_addresses
from fedlearn.core.clock import Clock, SystemClock, utc_now
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, FedlearnError, StoreError
from fedlearn.experiment.assemble import Resolved, assemble, resolve, worker_device
from fedlearn.experiment.comparison import summarize
from fedlearn.experiment.progress import Progress, progress_to
from fedlearn.experiment.run import Run
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunRecord, RunStatus, RunStore
from fedlearn.rounds.run import train
from fedlearn.simulation.cluster import Cluster, launch, one_thread
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.store.runs import Database, StoredRun, sqlite_url

#: The key under which a run that was started from Python records what it was made of.
PYTHON_PIECES = "python"

#: Tables of the configuration that the arguments of :func:`simulate` take the place of.
_REPLACED_BY_ARGUMENTS = {"data", "model", "loss", "algorithm", "client"}


@dataclass(frozen=True)
class Site:
    """What surrounds a run on this machine.

    Attributes:
        addresses: Where the store, the runs and the data are.
        environ: The environment variables.
        clock: Real time.
        progress: Who is told.
    """

    addresses: Addresses
    environ: Mapping[str, str]
    clock: Clock
    progress: Progress

    @property
    def cache_dir(self) -> Path:
        """Where this user's caches are, by the XDG convention."""
        base = self.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "fedlearn"

    def database(self) -> Database:
        """Open the store."""
        runs_dir = self.addresses.runs_dir
        url = self.addresses.store_url or sqlite_url(runs_dir / "fedlearn.db")
        return Database.open(url, runs_dir=runs_dir)


def run_config(config: Config, site: Site) -> Run:
    """Run the simulation that ``config`` describes, from its first round to its last.

    Raises:
        ConfigError: The configuration cannot be built.
        DataError: Data are missing or cannot be trained on.
        EngineError: The engine cannot do what is asked, or a worker died.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run cannot be recorded.
    """
    return _run_new(resolve_config(config, site), site, extra={})


def resolve_config(config: Config, site: Site) -> Resolved:
    """Return the simulation of ``config`` with every automatic choice made."""
    return _resolved(simulation(config, data_dir=site.addresses.data_dir), site)


def resume(name: str, site: Site, *, from_previous: bool) -> Run:
    """Go on with a run that was interrupted or failed, from its last commit.

    Args:
        name: The run.
        site: What surrounds it.
        from_previous: Drop the last checkpoint first: it is damaged.

    Raises:
        ConfigError: The run was started from Python, and its pieces are not in its record, or
            it is deployed.
        StoreError: There is no such run, or it cannot be read.
    """
    with site.database() as database:
        record = database.run(name).record
        if record.is_deployed:
            raise ConfigError(
                f"{name} is a deployed run, which its coordinator goes on with: start it again "
                "with `fedlearn coordinator FILE`; `fedlearn resume` without a name takes back a "
                "pause"
            )
        if PYTHON_PIECES in record.config:
            raise ConfigError(
                f"{name} was started from Python, so only Python has its model and data: call "
                f"fl.simulate(..., resume={name!r}) with the same arguments"
            )
        config = Config.from_json(json.dumps(record.config))
        pieces = simulation(config, data_dir=site.addresses.data_dir)
        return _resume(name, Resolved(simulation=pieces, notes=()), site, from_previous)


def simulate(
    make_model: Callable[[], nn.Module],
    data: FederatedData,
    algorithm: Algorithm,
    *,
    objective: Objective | None = None,
    progress: Progress | None = None,
    resume: str | None = None,
    **settings: object,
) -> Run:
    """Run a federated simulation on a model, data and algorithm of your own.

    Args:
        make_model: Builds the network; called once in every process.
        data: Clients and test set.
        algorithm: For example ``FedAvg(LocalSgd(epochs=2, batch_size=10, learning_rate=0.1))``.
        objective: Loss and metrics; ``None`` is softmax cross-entropy.
        progress: Who is told of each round; ``None`` prints lines.
        resume: Name of an earlier run of the same arguments to go on with.
        **settings: Keys and tables of the configuration, as in a TOML file:
            ``num_rounds=20, seed=1, cohort={"num_wanted": 10}, engine={"num_workers": 2}``.

    Returns:
        The finished run: ``.history``, ``.plot()``, ``.report()``, ``.load_model()``.

    Raises:
        FedlearnError: As :func:`run_config`.
    """
    config = config_around(settings, source="simulate()")
    addresses = resolve_addresses(config, environ=os.environ)
    site = Site(
        addresses, os.environ, SystemClock(), progress or progress_to(sys.stdout, as_json=False)
    )
    pieces = around(
        config,
        make_model=make_model,
        objective=objective or CrossEntropy(),
        data=data,
        algorithm=algorithm,
        data_dir=addresses.data_dir,
    )
    if resume is not None:
        return _resume(resume, _as_recorded(pieces, resume, site), site, from_previous=False)
    return run_pieces(pieces, site)


def config_around(settings: Mapping[str, object], *, source: str) -> Config:
    """Return the configuration of a run whose model, data and algorithm are Python objects.

    Args:
        settings: Keys and tables of the configuration.
        source: What errors call the place where they stand.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or a table describes what is an object.
    """
    replaced = settings.keys() & _REPLACED_BY_ARGUMENTS
    if replaced:
        raise ConfigError(
            f"{source}: {min(replaced)}: the model, the data and the algorithm are arguments "
            "here, not tables of the configuration"
        )
    data = {"source": "python", "factory": "argument:data"}
    return from_mapping({**settings, "data": data}, source=source)


def run_pieces(pieces: Simulation, site: Site) -> Run:
    """Run a simulation that was put together in Python.

    Raises:
        FedlearnError: As :func:`run_config`.
    """
    described = {
        "model": repr(pieces.make_model()),
        "data": f"{pieces.data.population.num_clients} clients, "
        f"{len(pieces.data.test.labels)} test examples",
        "algorithm": repr(pieces.algorithm),
        "objective": repr(pieces.objective),
    }
    return _run_new(_resolved(pieces, site), site, extra={PYTHON_PIECES: described})


def _resolved(pieces: Simulation, site: Site) -> Resolved:
    with one_thread():  # as the workers will compute, so that a probe measures that
        return resolve(
            pieces, clock=site.clock, environ=site.environ, cache_dir=site.cache_dir / "executors"
        )


def _as_recorded(pieces: Simulation, name: str, site: Site) -> Resolved:
    """Return the simulation with the engine settings that the run was started with."""
    with site.database() as database:
        recorded = dict(database.run(name).record.config)
    recorded.pop(PYTHON_PIECES, None)
    skeleton = {key: value for key, value in recorded.items() if key in Config.model_fields}
    config = from_mapping(skeleton, source=f"the record of {name}")
    return Resolved(simulation=replace(pieces, config=config), notes=())


def new_record(pieces: Simulation | Deployment, *, extra: Mapping[str, object]) -> RunRecord:
    """Return the record of a run that is about to begin, without a name if none is configured.

    Args:
        pieces: The run; the engine settings of a simulation resolved.
        extra: What to record in place of the tables that Python's arguments replace.
    """
    config = pieces.config
    tree: dict[str, object] = json.loads(config.canonical_json())
    if extra:
        kept = tree.keys() - _REPLACED_BY_ARGUMENTS
        tree = {key: tree[key] for key in sorted(kept)} | dict(extra)
    return RunRecord(
        name=config.name or "",
        status=RunStatus.RUNNING,
        error="",
        created_utc=utc_now(),
        num_rounds=config.num_rounds,
        config=tree,
        config_hash=config_hash(config),
        versions=_versions(),
    )


def _run_new(resolved: Resolved, site: Site, *, extra: Mapping[str, object]) -> Run:
    config, record = resolved.simulation.config, new_record(resolved.simulation, extra=extra)

    def opened(database: Database) -> StoredRun:
        if config.name is not None:
            return database.create(record)
        return database.create_named(record, seed=Seed(config.seed).derive(record.created_utc))

    return _execute(resolved, site, opened, checkpoint_of=lambda _: None)


def _resume(name: str, resolved: Resolved, site: Site, from_previous: bool) -> Run:  # noqa: FBT001
    def opened(database: Database) -> StoredRun:
        stored = database.run(name)
        stored.set_running()
        return stored

    def checkpoint_of(stored: StoredRun) -> Checkpoint | None:
        return stored.rewind() if from_previous else stored.load()

    return _execute(resolved, site, opened, checkpoint_of=checkpoint_of)


def _execute(
    resolved: Resolved,
    site: Site,
    opened: Callable[[Database], StoredRun],
    *,
    checkpoint_of: Callable[[StoredRun], Checkpoint | None],
) -> Run:
    """Run in every worker; rank 0 alone has the store and the terminal."""
    pieces = resolved.simulation
    num_workers = pieces.config.engine.num_workers
    assert isinstance(num_workers, int)  # resolved

    def body(cluster: Cluster) -> Run | None:
        if cluster.rank:
            _train(
                pieces,
                site,
                cluster,
                store=_Follower(),
                checkpoint=cluster.broadcast(None),
                progress=lambda _: None,
            )
            return None
        stored = opened(site.database())
        with outcome_told(stored, site.progress):
            site.progress.start(stored.record, stored.path, resolved.notes)
            checkpoint = cluster.broadcast((checkpoint_of(stored),))
            _train(
                pieces,
                site,
                cluster,
                store=stored,
                checkpoint=checkpoint,
                progress=site.progress.round,
            )
        return Run(stored, pieces.make_model)

    run = launch(body, num_workers=num_workers, environment=site.environ)
    if run is None:
        raise SystemExit(0)  # a worker of torchrun: rank 0 has the run
    return run


def _train(
    pieces: Simulation,
    site: Site,
    cluster: Cluster,
    *,
    store: RunStore,
    checkpoint: tuple[Checkpoint | None],
    progress: Callable[[RoundRecord], None],
) -> None:
    device = worker_device(pieces, site.environ)
    plan, params = assemble(pieces, cluster, device=device, clock=site.clock)
    train(plan, params, checkpoint=checkpoint[0], store=store, progress=progress)


class _Follower:
    """The store of a worker that is not rank 0: rank 0 keeps the record for all."""

    def append(self, record: RoundRecord) -> None:
        """Keep nothing."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Keep nothing."""

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Keep nothing."""


@contextmanager
def outcome_told(
    stored: StoredRun, progress: Progress, *, resumable: tuple[type[FedlearnError], ...] = ()
) -> Iterator[None]:
    """Record a failure of the run, and tell how it ended, be it done, failed or interrupted.

    If not even that can be written or read back, the cause is what is raised.

    Args:
        stored: The run.
        progress: Told how it ended.
        resumable: Errors after which the run goes on where it is: no failure is recorded, and
            nothing told. To read all that a long run has recorded would take longer than whoever
            stops the process waits.
    """
    has_ended = True
    try:
        yield
    except resumable:
        has_ended = False
        raise
    except FedlearnError as error:
        with suppress(StoreError):
            stored.finish(RunStatus.FAILED, error=str(error))
        raise
    finally:
        if has_ended:
            with suppress(StoreError):
                progress.end(summarize(stored.record, stored.rounds()))


def _versions() -> dict[str, str]:
    return {
        "fedlearn": version("fedlearn"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
