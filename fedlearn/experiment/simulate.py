"""Runs and resumes federated simulations, from Python or from a configuration."""

import json
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import structlog
import torch
from torch import nn

from fedlearn.algorithms.asynchronous import Buffered
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.objectives import CrossEntropy, Objective
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.query import Query
from fedlearn.algorithms.round_settings import RoundSettings
from fedlearn.algorithms.sampling import DescribedSampler
from fedlearn.algorithms.strategy import Strategy
from fedlearn.algorithms.torch_losses import as_objective
from fedlearn.assembly import Components, Experiment, Simulation, build_experiment, build_simulation
from fedlearn.assembly.callbacks import end_callbacks, start_callbacks
from fedlearn.assembly.choices import choose_device, count_workers_used, resolve
from fedlearn.assembly.own_code import AfterRound
from fedlearn.assembly.server_jobs import FOLDER, TrainingHost
from fedlearn.assembly.simulated_plan import assemble
from fedlearn.config import Addresses, Config, config_hash, from_mapping, resolve_addresses
from fedlearn.config.cohort import DevicesSection
from fedlearn.config.components import build_component
from fedlearn.config.tables import PLAN_ALGORITHM, PYTHON_OBJECTS, Use, tables_with
from fedlearn.core.calls import explain_calls
from fedlearn.core.clock import Clock, SystemClock, utc_now
from fedlearn.core.cluster import Cluster
from fedlearn.core.json_values import iterate_leaves
from fedlearn.core.messages import ClientId, Scalar
from fedlearn.core.model_factory import require_factory
from fedlearn.core.params import NoModel
from fedlearn.core.tracing import run_context, tracing
from fedlearn.errors import ConfigError, FedlearnError, OutputClosed, StoreError
from fedlearn.experiment.arguments import (
    require_algorithm,
    require_callable,
    require_data,
    require_settings,
    split_query,
)
from fedlearn.experiment.data_names import keep_data_names
from fedlearn.experiment.privacy import choose_ledger, skip_lost_turns, start_accounting
from fedlearn.experiment.progress import (
    RunProgress,
    SilentProgress,
    choose_printer,
    raise_num_rounds,
)
from fedlearn.experiment.recorded import ARGUMENT_DATA, config_of
from fedlearn.experiment.run import Run, begin
from fedlearn.experiment.site import Site
from fedlearn.experiment.spending import load_spending
from fedlearn.experiment.summary import Summary, summarize
from fedlearn.privacy.ledger import Charging
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunRecord, RunStatus, RunStore
from fedlearn.rounds.run import RoundCallback, train
from fedlearn.simulation.attacks import ATTACK_KINDS, Attack
from fedlearn.simulation.behavior import ClientBehavior
from fedlearn.simulation.cluster import launch, limit_to_one_thread
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.population import client_names
from fedlearn.statistics.query import StatisticsQuery
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun
from fedlearn.training.data_names import DataNames
from fedlearn.training.keyed_dropout import preserve_generator

log = structlog.get_logger()

#: Held by the thread that is simulating.
_SIMULATING = threading.RLock()

AnswerT = TypeVar("AnswerT")

#: The address of an object in its default ``repr``, which differs in each process.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")

#: Recorded in place of a factory's name if the devices are an argument of :func:`simulate`.
_ARGUMENT_DEVICES = "argument:devices"

_WORKERS = "engine.num_workers"

#: Configuration tables that the arguments of :func:`simulate` replace.
_REPLACED_BY_ARGUMENTS = frozenset(tables_with(Use.ARGUMENT))


@contextmanager
def wait_for_turn() -> Iterator[None]:
    """Wait until no other thread of this process is simulating.

    Simulations share torch's random generators and number of threads. Those in several threads take
    turns, so that each gives the same result as alone. A nested simulation in the same thread may
    run.
    """
    if not _SIMULATING.acquire(blocking=False):
        log.info("waits for the simulation in another thread of this process")
        _SIMULATING.acquire()
    try:
        yield
    finally:
        _SIMULATING.release()


@wait_for_turn()
def run_config(config: Config, site: Site) -> Run:
    """Run the simulation that ``config`` describes, from its first round to its last.

    Raises:
        ConfigError: The configuration cannot be built.
        DataError: Data are missing or cannot be trained on.
        EngineError: The engine cannot do what is asked, or a worker died.
        RoundError: A round failed, and the straggler policy says that this fails the run.
        StoreError: The run cannot be recorded.
    """
    return _run_new(resolve_config(config, site), site, extra={})


def resolve_config(config: Config, site: Site) -> Simulation:
    """Build the simulation of ``config``, and resolve every ``auto`` in its engine settings."""
    return _resolve(build_simulation(config, data_dir=site.addresses.data_dir), site)


@wait_for_turn()
def resume(name: str, site: Site, *, from_previous: bool) -> Run:
    """Resume a run that was interrupted or failed, from its last commit.

    With ``from_previous`` the last checkpoint, which is damaged, is dropped first.

    Raises:
        ConfigError: The run is deployed, or it was started from Python, so that its record lacks
            its model and data.
        StoreError: There is no such run, or it cannot be read.
    """
    with site.database() as database:
        stored = database.run(name)
        record = stored.record
        if record.is_deployed:
            raise ConfigError(
                f"{name} is a deployed run, which its coordinator continues: start that again "
                "with `fedlearn coordinator FILE`, or on Flower with `flwr run` (overrides: "
                f"name={name}); `fedlearn resume` without a name cancels a pause"
            )
        if PYTHON_OBJECTS in record.config:
            raise ConfigError(
                f"{name} was started from Python, so only Python has its model and data: call "
                f"fl.simulate(..., resume={name!r}) with the same arguments"
            )
        if _is_rank_0(site):
            with stored.hold():
                pass  # fail before any data are read if another process holds the run
        config = config_of(record)
        components = build_simulation(config, data_dir=site.addresses.data_dir)
        return _resume(name, components, site, from_previous=from_previous, is_described=True)


@explain_calls
@wait_for_turn()
def simulate(
    make_model: Callable[[], nn.Module] | None,
    data: FederatedData,
    algorithm: Strategy | Buffered | Query,
    *,
    objective: Objective | nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
    trainer: MakeTrainer | None = None,
    local_of: Callable[[ClientId], LocalUpdate] | None = None,
    extra: Mapping[str, Scalar] = MappingProxyType({}),
    by_round: RoundSettings | None = None,
    sampler: Sampler | None = None,
    devices: ClientBehavior | Mapping[str, object] | None = None,
    attack: Attack | Mapping[str, object] | None = None,
    num_attackers: int | None = None,
    callbacks: Sequence[RoundCallback] = (),
    progress: RunProgress | bool | None = None,
    resume: str | None = None,
    **settings: object,
) -> Run:
    """Run a federated simulation on a model, data and algorithm of your own.

    Args:
        make_model: Builds the network, always of the same layers. It is called several times in
            every process: to choose an executor, to train, to evaluate, once a round for
            ``callbacks``, and by ``Run.load_model``. A network that you keep, whole or in part, is
            copied each time, so training leaves yours unchanged. ``None`` for a query, which has
            no model.
        data: Clients and test set.
        algorithm: For example ``FedAvg(LocalSgd(epochs=2, batch_size=10, learning_rate=0.1))``, or
            an asynchronous one such as ``FedBuff(..., buffer_size=10, concurrency=20,
            max_staleness=20)``; or a :class:`~fedlearn.algorithms.query.Query`, which trains
            nothing.
        objective: Loss and metrics, or a loss module of torch such as ``nn.HuberLoss()``;
            ``None`` is softmax cross-entropy.
        metrics: Measures of whole sets by name, as ``{"r2": fl.Metric(fl.R2(), direction="max")}``.
        trainer: Makes a client's trainer from its features and labels; ``None``: fedlearn's own.
            With ``FedAvg(OwnTraining())`` it needs no optimizer.
        local_of: Maps a client's id to its local update, where clients differ in epochs or learning
            rate, for example; ``None``: all clients use that of ``algorithm``. An algorithm that
            wraps a local update, as FedProx does, needs ``replace(algorithm.local, inner=...)``.
        extra: Free-form settings that every ``trainer`` receives in ``context.extra``, as
            ``client.extra`` in a TOML file.
        by_round: Maps a round's number, from 0, to its settings, as ``client.by_round`` in a TOML
            file: ``lambda number: {"learning_rate": 0.1 * 0.9**number}``, and free-form ones as
            ``extra.NAME``. The same number must always give the same settings.
        sampler: Draws the clients of a round; ``None``: as ``cohort.sampling`` says. It receives
            the number of clients that the configuration asks, and may return any number. If the
            same arguments give the same cohort, the run can be repeated, and resumed to the same
            bits.
        devices: How long clients take and which of them fail: a table, as ``devices`` in a TOML
            file, or a :class:`~fedlearn.simulation.behavior.ClientBehavior` of your own;
            ``None``: ideal ones.
        attack: What some of the clients do to spoil the model: ``fl.SignFlip()``, or a table, as
            ``attack`` in a TOML file; ``None``: all are honest.
        num_attackers: Number of attackers, drawn by the seed; ``None`` is one, or as the table
            says. The record names them.
        callbacks: Called after each round, in order, with its record and the model, after
            ``progress``. One that returns ``True`` ends the run there, as done. When a run is
            resumed, they are called again for the rounds after the last commit.
        progress: Shows the progress of the run; ``None`` prints lines, in a notebook a table;
            ``False`` shows nothing.
        resume: Name of an earlier run with the same arguments, which is resumed.
        **settings: Keys and tables of the configuration, as in a TOML file:
            ``num_rounds=20, seed=1, cohort={"num_wanted": 10}, engine={"num_workers": 2}``.

    Returns:
        The finished run: ``.history``, ``.plot()``, ``.report()``, ``.load_model()``, and
        ``.state()``, which has the result of a query.

    Simulations in several threads of a process take turns, so code that a simulation calls must
    not wait for one in another thread.

    Only rank 0 calls the sampler, the devices and the callbacks, however many workers there are.
    Their exceptions are raised here unchanged, and the run can be resumed from its last commit.

    Raises:
        FedlearnError: As :func:`run_config`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> import fedlearn as fl
        >>> data = fl.from_arrays(
        ...     torch.eye(10), torch.arange(10) % 2, partition=fl.Iid(num_clients=3),
        ...     test_fraction=0.2, seed=0,
        ... )
        >>> local = fl.LocalSgd(epochs=1, batch_size=2, learning_rate=0.1)
        >>> with TemporaryDirectory() as folder:
        ...     run = fl.simulate(
        ...         lambda: torch.nn.Linear(10, 2), data, fl.FedAvg(local), num_rounds=2,
        ...         name="first", cohort={"num_wanted": 3}, store={"runs_dir": folder},
        ...     )
        ...     run.load_model().weight.shape
        run first: 2 rounds
        ...
        round 2/2 accuracy=...
        torch.Size([2, 10])
    """
    prepared = prepare(
        make_model,
        data,
        algorithm,
        objective=objective,
        metrics=metrics,
        trainer=trainer,
        local_of=local_of,
        extra=extra,
        by_round=by_round,
        sampler=sampler,
        devices=devices,
        attack=attack,
        num_attackers=num_attackers,
        callbacks=callbacks,
        progress=progress,
        resume=resume,
        settings=settings,
    )
    printer = _choose_progress(progress=progress)
    site = Site(prepared.addresses, os.environ, SystemClock(), printer)
    components = prepared.build(prepared.config)
    if resume is None:
        return run_simulation(components, site)
    recorded = _load_recorded_config(components, resume, site, prepared.settings)
    return _resume(resume, prepared.build(recorded), site, from_previous=False, is_described=False)


@dataclass(frozen=True, kw_only=True)
class PreparedSimulation:
    """The arguments of :func:`simulate`, checked, before anything is built from them.

    Attributes:
        experiment: Those that are Python objects.
        config: The configuration of the others.
        settings: The keys and tables that were given for it.
        addresses: Locations of the store, the runs and the data.
    """

    experiment: Experiment
    config: Config
    settings: Mapping[str, object]
    addresses: Addresses

    def build(self, config: Config) -> Simulation:
        """Build the components with this configuration; raises as :func:`build_experiment`."""
        return build_experiment(config, self.experiment, data_dir=self.addresses.data_dir)


def prepare(
    make_model: Callable[[], nn.Module] | None,
    data: FederatedData,
    algorithm: Strategy | Buffered | Query,
    *,
    objective: Objective | nn.Module | None,
    metrics: Mapping[str, Metric] | None,
    trainer: MakeTrainer | None,
    local_of: Callable[[ClientId], LocalUpdate] | None,
    extra: Mapping[str, Scalar],
    by_round: RoundSettings | None,
    sampler: Sampler | None,
    devices: ClientBehavior | Mapping[str, object] | None,
    attack: Attack | Mapping[str, object] | None,
    num_attackers: int | None,
    callbacks: Sequence[RoundCallback],
    progress: RunProgress | bool | None,
    resume: str | None,
    settings: Mapping[str, object],
) -> PreparedSimulation:
    """Check the arguments of :func:`simulate`, and run nothing.

    Raises:
        ConfigError: An argument is wrong, or two contradict each other.
    """
    make_model, algorithm = split_query(
        make_model,
        algorithm,
        others={
            "objective": objective,
            "metrics": metrics,
            "trainer": trainer,
            "local_of": local_of,
            "extra": extra or None,
            "by_round": by_round,
        },
    )
    require_factory(make_model)
    require_data(data)
    require_algorithm(algorithm)
    require_callable(
        sampler=sampler,
        callbacks=callbacks,
        trainer=trainer,
        by_round=by_round,
        progress=progress,
    )
    require_settings(extra=extra, resume=resume)
    algorithm, settings = _split_buffered(algorithm, settings)
    own_devices = None if devices is None or isinstance(devices, Mapping) else devices
    if devices is not None:
        settings["devices"] = (
            devices if own_devices is None else _devices_table(own_devices, settings)
        )
    if attack is not None:
        settings["attack"] = _attack_table(attack, num_attackers)
    config = build_config(settings, source="simulate()", has_model=make_model is not NoModel)
    if sampler is not None:
        _require_compatible_sampler(sampler, config, settings)
    experiment = Experiment(
        make_model=make_model,
        objective=CrossEntropy() if objective is None else as_objective(objective),
        data=data,
        algorithm=algorithm if local_of is None else PerClient(algorithm, local_of),
        metrics=metrics or {},
        make_trainer=trainer,
        extra=extra,
        by_round=by_round,
        sampler=sampler,
        devices=own_devices,
        callbacks=(*config.trackers.build(), *callbacks),
    )
    addresses = resolve_addresses(config, environ=os.environ)
    return PreparedSimulation(
        experiment=experiment, config=config, settings=settings, addresses=addresses
    )


def _choose_progress(*, progress: RunProgress | bool | None) -> RunProgress:
    if progress is False:
        return SilentProgress()
    if progress is None or progress is True:
        return choose_printer(sys.stdout, as_json=False)
    return progress


def _devices_table(devices: ClientBehavior, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration table that records that the devices are an argument.

    Raises:
        ConfigError: They are not devices, or the run is centralized and uses none.
    """
    if settings.get("centralized"):
        raise ConfigError(
            "simulate(): centralized uses no devices, but devices= is given; remove one"
        )
    if not all(hasattr(devices, name) for name in ("durations_s", "failures")):
        raise ConfigError(
            f"simulate(): devices is {devices!r}; give a table, as {{'kind': 'lognormal'}}, or a "
            "ClientBehavior, which has durations_s(asked) and failures(asked)"
        )
    return {"kind": "python", "factory": _ARGUMENT_DEVICES}


def _attack_table(
    attack: Attack | Mapping[str, object], num_attackers: int | None
) -> dict[str, object]:
    """Return the configuration table of an attack.

    Raises:
        ConfigError: It is not one of fedlearn's.
    """
    table: dict[str, object] = {} if num_attackers is None else {"num_attackers": num_attackers}
    if isinstance(attack, Mapping):
        return {**attack, **table}
    for kind, make in ATTACK_KINDS.items():
        if type(attack) is make:
            given = {key: value for key, value in vars(attack).items() if value is not None}
            return {"kind": kind, **given, **table}
    raise ConfigError(
        f"simulate(): attack is {attack!r}; give one of fedlearn's, such as fl.SignFlip(), or for "
        'one of yours a table: {"kind": "python", "factory": "file.py:MyAttack"}'
    )


def _is_argument(devices: DevicesSection) -> bool:
    return getattr(devices, "factory", None) == _ARGUMENT_DEVICES


def _split_buffered(
    algorithm: Strategy | Buffered, settings: Mapping[str, object]
) -> tuple[Strategy, dict[str, object]]:
    if not isinstance(algorithm, Buffered):
        return algorithm, dict(settings)
    if given := sorted({"asynchronous", "staleness"} & settings.keys()):
        raise ConfigError(
            f"simulate(): {given[0]} is given, but the algorithm already decides when it steps; "
            "remove one of the two"
        )
    staleness = asdict(algorithm.asynchrony)
    buffers = {name: staleness.pop(name) for name in ("buffer_size", "concurrency")}
    tables = {"asynchronous": {"mode": "buffered", **buffers}, "staleness": staleness}
    return algorithm.strategy, {**settings, **tables}


def _require_compatible_sampler(
    sampler: Sampler, config: Config, settings: Mapping[str, object]
) -> None:
    """Refuse settings that conflict with a custom sampler.

    These are another sampling rule, and guarantees that rest on how many clients are drawn and how.
    """
    cohort = settings.get("cohort")
    if isinstance(cohort, Mapping) and "sampling" in cohort:
        raise ConfigError(
            f"simulate(): cohort.sampling is {cohort['sampling']!r}, but sampler= chooses the "
            "clients; remove one of the two"
        )
    if config.centralized:
        raise ConfigError(
            "simulate(): centralized asks no clients, but sampler= is given; remove one"
        )
    if config.privacy.is_on:
        raise ConfigError(
            f"simulate(): privacy.mode is {config.privacy.mode!r}, whose ε depends on how clients "
            'are drawn, but sampler= draws them; leave sampler= out, or set the mode to "off"'
        )
    if config.secure_aggregation.is_on and not isinstance(sampler, DescribedSampler):
        raise ConfigError(
            f"simulate(): secure_aggregation.mode is {config.secure_aggregation.mode!r}, whose "
            "threshold is derived from the number of clients asked, but sampler= may ask any "
            'number; leave sampler= out, or set the mode to "off"'
        )


def build_config(settings: Mapping[str, object], *, source: str, has_model: bool = True) -> Config:
    """Build the configuration of a run whose model, data and algorithm are Python objects.

    ``settings`` are its other keys and tables; error messages call their place ``source``. A run
    without a model says so in its configuration, which then refuses what would need one.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or a table describes what is an object.
    """
    if replaced := settings.keys() & _REPLACED_BY_ARGUMENTS:
        raise ConfigError(
            f"{source}: {min(replaced)}: the model, the data and the algorithm are arguments "
            "here, not tables of the configuration"
        )
    model = {} if has_model else {"model": {"kind": "none"}}
    return from_mapping({**settings, **model, "data": ARGUMENT_DATA}, source=source)


@wait_for_turn()
def run_simulation(components: Simulation, site: Site) -> Run:
    """Run a simulation that was assembled in Python.

    Raises:
        FedlearnError: As :func:`run_config`.
    """
    further = {"callbacks": repr(components.callbacks), "directions": components.directions}
    described = describe_arguments(components) | further
    extra = {PYTHON_OBJECTS: described, **_describe_plan(components)}
    return _run_new(_resolve(components, site), site, extra=extra)


def _describe_plan(components: Simulation) -> dict[str, object]:
    """Return the algorithm's table of a plan of statistics, as a plan file has it; else nothing."""
    query = components.algorithm.local
    if not isinstance(query, StatisticsQuery):
        return {}
    return {"algorithm": {"name": "python", "factory": PLAN_ALGORITHM, "args": asdict(query)}}


def describe_arguments(components: Simulation) -> dict[str, object]:
    """Describe the arguments that must be the same when the run is resumed, by name."""
    is_own = _is_argument(components.config.devices)
    # The model is only described here: building it must not change the run's random numbers.
    with preserve_generator(torch.default_generator):
        model = components.make_model()
    return {
        **({"devices": repr(components.behavior)} if is_own else {}),
        **({} if components.by_round is None else {"by_round": repr(components.by_round)}),
        "model": repr(model),
        "data": f"{components.population.num_clients} clients, "
        f"{len(components.test.labels)} test examples",
        "algorithm": repr(components.algorithm),
        "objective": repr(components.objective),
        "metrics": ", ".join(sorted(components.directions)),
        "sampler": repr(components.sampler),
    }


def _resolve(components: Simulation, site: Site) -> Simulation:
    with (
        limit_to_one_thread()
    ):  # a probe must measure what workers will do, and they use one thread
        return resolve(
            components,
            clock=site.clock,
            environ=site.environ,
            cache_dir=site.cache_dir / "executors",
        )


def _load_recorded_config(
    components: Simulation, name: str, site: Site, settings: Mapping[str, object]
) -> Config:
    """Return the configuration of an earlier run that is to be resumed with these arguments.

    Raises:
        ConfigError: A setting or an argument differs from the run's.
    """
    with site.database() as database:
        record = database.run(name).record
    started = record.config.get(PYTHON_OBJECTS)
    if not isinstance(started, Mapping):
        raise ConfigError(
            f"simulate(): {name} was started from a configuration, which is in its record; resume "
            f"it with `fedlearn resume {name}`"
        )
    config = config_of(record)
    # The record has the resolved values, so an "auto" that is given again cannot be compared.
    given = {key for key, value in iterate_leaves(settings) if value != "auto" and key != "name"}
    before, now = (
        {
            key: value
            for key, value in iterate_leaves(json.loads(each.canonical_json()))
            if key in given
        }
        for each in (config, components.config)
    )
    kinds = [
        "a ClientBehavior" if _is_argument(each) else each.kind
        for each in (config.devices, components.config.devices)
    ]
    if "a ClientBehavior" in kinds:
        _require_same({"devices": kinds[0]}, {"devices": kinds[1]}, name)
    # The record has the number of workers used, which may be fewer than were requested.
    if isinstance(requested := now.get(_WORKERS), int):
        now[_WORKERS] = count_workers_used(components, requested)
    _require_same(before, now, name)
    _require_same(started, describe_arguments(components), name)
    return config


def _require_same(before: Mapping[str, object], now: Mapping[str, object], name: str) -> None:
    for key, value in now.items():
        if ADDRESS.sub("", str(before.get(key))) != ADDRESS.sub("", str(value)):
            raise ConfigError(
                f"simulate(): {key} is {value}, but {name} was started with {before.get(key)}; a "
                "run resumes with the arguments that it was started with: give the same, or leave "
                "resume= out to start another"
            )


def new_record(components: Components, *, extra: Mapping[str, object]) -> RunRecord:
    """Build the record of a run that is about to start, with its resolved configuration.

    ``extra`` is recorded in place of the tables that the arguments of :func:`simulate` replace.
    """
    config = components.config
    tree: dict[str, object] = json.loads(config.canonical_json())
    if extra:
        kept = tree.keys() - _REPLACED_BY_ARGUMENTS
        if not config.has_model:  # a resumed run must know it, too
            kept |= {"model"}
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


def _run_new(components: Simulation, site: Site, *, extra: Mapping[str, object]) -> Run:
    if components.config.privacy.is_on and _is_rank_0(site):
        with site.database() as database:
            components = choose_ledger(components, database, writes=True)
    record = new_record(components, extra=extra)
    begun = partial(begin, record, seed=components.config.seed)
    return _execute(components, site, begun, is_described=not extra)


def _resume(
    name: str, components: Simulation, site: Site, *, from_previous: bool, is_described: bool
) -> Run:
    with site.database() as database:
        stored = database.run(name)
        if stored.record.status is RunStatus.DONE and not from_previous:
            return _show_finished(stored, components, site)

    def open_run(database: Database) -> StoredRun:
        return database.run(name)

    return _execute(
        components, site, open_run, from_previous=from_previous, is_described=is_described
    )


def _is_rank_0(site: Site) -> bool:
    return site.environ.get("RANK", "0") == "0"


def _show_finished(stored: StoredRun, components: Simulation, site: Site) -> Run:
    """Show the result of a run that was already done when it was resumed, and change nothing.

    Raises:
        StoreError: Its last checkpoint is damaged.
    """
    if not _is_rank_0(site):
        raise SystemExit(0)  # another worker of torchrun: rank 0 has the run
    stored.load()
    site.progress.start(stored.record, stored.path, ("it was done before",))
    site.progress.end(_summary(stored))
    return Run(stored, components.make_model)


def _execute(
    components: Simulation,
    site: Site,
    open_run: Callable[[Database], StoredRun],
    *,
    is_described: bool,
    from_previous: bool = False,
) -> Run:
    """Execute a run in all workers; only rank 0 uses the store and the terminal.

    ``is_described`` says whether the configuration describes the components. Processes of the
    coordinator's own training then rebuild them from it.
    """
    num_workers = components.config.engine.num_workers
    assert isinstance(num_workers, int)  # resolved
    part = _RunPart(
        components,
        environ=dict(site.environ),
        clock=site.clock,
        data_dir=site.addresses.data_dir,
        is_described=is_described,
    )

    def lead(cluster: Cluster) -> Run:
        with ExitStack() as stack:
            stored = open_run(site.database())
            traces = components.config.telemetry.build_trace_settings()
            stack.enter_context(tracing(traces, role="simulation", environ=site.environ))
            stack.enter_context(run_context(stored.name))
            stack.enter_context(stored.hold())
            stored.retention = build_component(Retention, components.config.store)
            # Load before anything is written: an unreadable checkpoint leaves the run unchanged.
            checkpoint = stored.rewind() if from_previous else stored.load()
            keep_data_names(_describe_data(components), folder=stored.path)
            stored.finish(RunStatus.RUNNING, error="")
            callbacks = components.callbacks
            stack.enter_context(report_outcome(stored, site.progress, callbacks=callbacks))
            num_finished = 0 if checkpoint is None else checkpoint.round_num
            notes, charging, num_lost = start_accounting(
                components, stored, num_finished=num_finished, clock=site.clock
            )
            site.progress.start(stored.record, stored.path, (*components.notes, *notes))
            if callbacks:
                start_callbacks(callbacks, stored.record, stored.path, stored.rounds())
            if charging is not None:
                stack.enter_context(closing(charging))

            def num_rounds() -> int:
                found = stored.record.num_rounds
                raise_num_rounds(site.progress, found)
                return found

            part.train(
                cluster,
                # Received in `_RunPart.__call__`: every rank must make the same collective calls
                # in order.
                cluster.broadcast((checkpoint, num_lost)),
                store=stored,
                num_rounds=num_rounds,
                folder=stored.path / FOLDER,
                progress=site.progress.round,
                charging=charging,
            )
        return Run(stored, components.make_model)

    def body(cluster: Cluster) -> Run | None:
        if cluster.rank == 0:
            return lead(cluster)
        part(cluster)  # a worker of torchrun
        return None

    run = launch(body, num_workers=num_workers, environment=site.environ, others=part)
    if run is None:
        raise SystemExit(0)  # a worker of torchrun: rank 0 has the run
    return run


@dataclass(frozen=True)
class _RunPart:
    """The part of a run that each process executes; workers that are not forked are sent it."""

    components: Simulation
    _: KW_ONLY
    environ: Mapping[str, str]
    clock: Clock
    data_dir: Path
    is_described: bool

    def __call__(self, cluster: Cluster) -> None:
        """Execute the part of a worker other than rank 0."""
        begin: tuple[Checkpoint | None, int] = cluster.broadcast(None)
        self.train(
            cluster,
            begin,
            store=_Follower(),
            num_rounds=lambda: 0,
            folder=Path(),
            progress=_show_nothing,
        )

    def train(
        self,
        cluster: Cluster,
        begin: tuple[Checkpoint | None, int],
        *,
        store: RunStore,
        num_rounds: Callable[[], int],
        folder: Path,
        progress: Callable[[RoundRecord], None],
        charging: Charging | None = None,
    ) -> None:
        """Train from ``begin``: a checkpoint, if there is one, and the number of lost charges.

        On rank 0 ``num_rounds`` returns the current total of rounds, which a user may have raised.
        """
        components, (checkpoint, num_lost) = self.components, begin
        plan, params = assemble(
            skip_lost_turns(components, num_lost=num_lost),
            cluster,
            device=choose_device(components.config.engine.device, self.environ),
            clock=self.clock,
            host=TrainingHost(
                kind="simulation",
                folder=folder,
                data_dir=self.data_dir,
                is_described=self.is_described,
                cluster=cluster,
            ),
            charging=charging,
        )
        plan = replace(plan, read_num_rounds=partial(_share, num_rounds, cluster))
        if components.privacy is not None:
            # Rank 0 has the ledger, but an evaluation takes all ranks.
            can_afford_round = partial(_share, plan.can_afford_round, cluster)
            plan = replace(plan, can_afford_round=can_afford_round)
        after_round = AfterRound(cluster, progress, components.callbacks, components.make_model)
        train(plan, params, checkpoint=checkpoint, store=store, after_round=after_round)


def _describe_data(components: Simulation) -> DataNames:
    test, names = components.test, client_names(components.population)
    scaling, local = test.feature_scaling, components.algorithm.local
    shows_clients = isinstance(local, Query) and local.per_client
    return DataNames(
        class_names=test.class_names,
        feature_names=test.feature_names,
        feature_means=None if scaling is None else scaling.means,
        feature_stds=None if scaling is None else scaling.stds,
        encoding=test.encoding,
        client_names=tuple(map(str, names)) if shows_clients and names is not None else None,
    )


def _share(find: Callable[[], AnswerT], cluster: Cluster) -> AnswerT:
    # One answer for all ranks: an operator may raise the number of rounds between two of their
    # reads.
    return cluster.broadcast(find())


def _show_nothing(_: RoundRecord) -> None:
    """Show nothing: only rank 0 shows a round."""


class _Follower:
    """The store of a worker other than rank 0: writes nothing, since rank 0 keeps the record."""

    def append(self, record: RoundRecord) -> None: ...

    def commit(self, checkpoint: Checkpoint) -> None: ...

    def finish(self, status: RunStatus, *, error: str) -> None: ...


@contextmanager
def report_outcome(
    stored: StoredRun,
    progress: RunProgress,
    *,
    callbacks: Sequence[RoundCallback] = (),
    resumable: tuple[type[FedlearnError], ...] = (),
) -> Iterator[None]:
    """Record a run's failure or interruption, show how the run ended, and tell the callbacks.

    If that cannot be written or read back, the original error is raised all the same. After a
    ``resumable`` error no failure is recorded and nothing is shown: the run will resume, and
    reading the whole record of a long run would delay the shutdown for too long.

    A deployed run is recorded as failed only for one of fedlearn's own errors. After any other it
    waits for its next coordinator.
    """
    is_over = True
    try:
        yield
    except resumable:
        is_over = False
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        status, text = _status_after(error)
        is_failure = isinstance(error, FedlearnError) and status is RunStatus.FAILED
        with suppress(StoreError):
            if is_failure or not stored.record.is_deployed:
                stored.finish(status, error=text)
        raise
    finally:
        if is_over:
            with suppress(StoreError):
                progress.end(_summary(stored))
        if callbacks:
            with suppress(StoreError):
                end_callbacks(callbacks, stored.record)


def _status_after(error: BaseException) -> tuple[RunStatus, str]:
    match error:
        case KeyboardInterrupt() | SystemExit():
            return RunStatus.INTERRUPTED, ""
        case OutputClosed():
            return RunStatus.INTERRUPTED, str(error)
        case FedlearnError():
            return RunStatus.FAILED, str(error)
        case _:
            return RunStatus.FAILED, f"{type(error).__name__}: {error}"


def _summary(stored: StoredRun) -> Summary:
    return replace(summarize(stored.record, stored.rounds()), privacy=load_spending(stored))


def _versions() -> dict[str, str]:
    return {
        "fedlearn": version("fedlearn"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cryptography": version("cryptography"),  # the source of secret noise
        "dp-accounting": version("dp-accounting"),
        "python": platform.python_version(),
    }
