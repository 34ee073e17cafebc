"""From the pieces of a simulation to a plan that runs: device, workers, executor, evaluators."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedlearn.algorithms.aggregations import FullAggregation
from fedlearn.algorithms.collecting import ChannelCollector, Collector, further_bytes
from fedlearn.algorithms.flight import Draw
from fedlearn.algorithms.local import LocalWork
from fedlearn.algorithms.sampling import CohortSampler, SeededSampler
from fedlearn.algorithms.settings import own_classes, own_transforms, require_travels
from fedlearn.build import Pieces, Simulation, server_task
from fedlearn.core.clock import Clock
from fedlearn.core.cores import num_cores
from fedlearn.core.features import moved, tensors_of
from fedlearn.core.gpus import own_gpu
from fedlearn.core.messages import ClientId
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Layout, Params
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ConfigError, EngineError, SettingsRefused
from fedlearn.experiment.server_training import Place, with_server_steps
from fedlearn.experiment.user_code import SharedNoise, SharedSampler, UserDevices, UserSampler
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.distributed_noise import DistributedMean
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator, Evaluators
from fedlearn.rounds.opening import (
    ChargedDraw,
    Charges,
    SampledOpening,
)
from fedlearn.rounds.plain import Ahead, PlainCollector
from fedlearn.rounds.round import Release, RoundPlan
from fedlearn.rounds.run import RunPlan
from fedlearn.rounds.secure import MaskedSumStore, NotKept, SecureCollector
from fedlearn.secagg.keys import Signer
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.simulation.behaviour import Behaviour, ClientBehaviour, Instant
from fedlearn.simulation.choice import (
    Choice,
    ExecutorKind,
    Job,
    choose,
    make_executor,
    named,
)
from fedlearn.simulation.cluster import Alone, Cluster, can_fork, under_torchrun
from fedlearn.simulation.constant_buffers import HoldingBuffers, constant_buffers
from fedlearn.simulation.engine import Engine, by_client
from fedlearn.simulation.evaluation import (
    CentralEvaluator,
    ClientEvaluator,
    ReadOnce,
    evaluated_clients,
)
from fedlearn.simulation.partition import client_text
from fedlearn.simulation.population import CheckedExamples, client_names
from fedlearn.simulation.secure import ModularSum, SimulatedIdentities
from fedlearn.simulation.sessions import (
    SessionCollector,
    SessionsKept,
    SimulatedSessions,
    trainers_on,
)
from fedlearn.simulation.sources import Examples
from fedlearn.training.example_gradients import batch_statistics, require_separable
from fedlearn.training.keyed_dropout import untouched
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.base import Channel
from fedlearn.transport.memory import MemoryChannel

#: Clients that a note lists.
_LISTED = 20
#: A job of fewer floating-point operations is done before a second worker has started.
_SMALL_JOB_FLOP = 2e12


def resolve(
    simulation: Simulation, *, clock: Clock, environ: Mapping[str, str], cache_dir: Path
) -> Simulation:
    """Return the simulation with a decision for every ``auto`` of the engine's settings.

    Its notes say what was decided why, and which dtypes are not float32's or float64's alone.

    Args:
        simulation: The pieces.
        clock: Real time, for the probe.
        environ: Tells whether torchrun has started workers.
        cache_dir: Where probes are remembered.

    Raises:
        ConfigError: Noise does not fit the model, or the coordinator's own training does not, or
            there are fewer GPUs than processes.
        DataError: A feature is beyond the range of the model's floats.
        EngineError: The engine cannot do what the configuration asks.
    """
    engine = simulation.config.engine
    device = device_of(engine.device, environ)
    params = initial_params(simulation, device)
    if _has_noisy_updates(simulation) and params.layout.statistics:
        simulation = _holding_buffers(simulation, params)
        params = initial_params(simulation, device)
    release_of(simulation, params, Alone(), has_sessions=False)  # raises where noise does not fit
    if simulation.config.coordinator.training.is_on:
        server_task(simulation).require_fitting()
    num_workers, why_workers = _num_workers(simulation, params, environ)
    choice = _executor(simulation, params, num_workers, clock, cache_dir)
    settings = engine.model_copy(
        update={
            "device": device.type,
            "num_workers": num_workers,
            "executor": choice.kind.value,
            "block_size": choice.block_size,
        }
    )
    config = simulation.config.model_copy(update={"engine": settings})
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    notes = [
        *_asked(simulation),
        *_trained_centrally(simulation),
        f"device {device.type}, {workers}: {why_workers}",
        f"{_how(choice)} (engine.executor {choice.kind}): {choice.reason}",
    ]
    if isinstance(simulation.algorithm.aggregation, FullAggregation):
        wanted = simulation.policy.num_wanted
        kept_mib = wanted * params.vector.nbytes / (1 << 20)
        rule = type(simulation.algorithm.aggregation).__name__
        notes.append(f"{rule} needs all {wanted} updates of a round at once: {kept_mib:.0f} MiB")
    notes += [*_names(simulation), *_inputs(simulation, params, num_workers)]
    notes += _single_examples(simulation)
    if (dtypes := params.layout.dtypes()) is not None:
        notes.append(f"the model {dtypes}")
    return replace(simulation, config=config, notes=tuple(notes))


def _names(simulation: Simulation) -> tuple[str, ...]:
    """Return which client is which, where the data name the clients."""
    population = simulation.population
    names = client_names(population)
    if names is None:
        return ()
    first, last = (client_text(each, names) for each in (0, population.num_clients - 1))
    is_number = first.endswith(" 0") and last.endswith(f" {population.num_clients - 1}")
    return () if is_number else (f"clients have names, from {first} to {last}: data.names",)


def _inputs(simulation: Simulation, params: Params, num_workers: int) -> tuple[str, ...]:
    """Return which integers reach the model as floats.

    Raises:
        DataError: A feature is beyond the range of the model's floats.
    """
    test, population = simulation.test, simulation.population
    usual = all(each.dtype == torch.float32 for each in tensors_of(test.features))
    if usual or simulation.make_trainer is not None:
        return ()
    inputs = job_of(simulation, params, num_workers).resident_model().inputs
    inputs.require_range(test.features, what="the test set")
    if isinstance(population, CheckedExamples):
        inputs.require_range(population.features, what="the clients' data")
    note = inputs.note(test.features)
    return () if note is None else (note,)


def _has_noisy_updates(pieces: Pieces) -> bool:
    """Whether noise is added to whole updates, not to the gradients of examples."""
    return pieces.privacy is not None and not pieces.privacy.hides_examples


def _holding_buffers(simulation: Simulation, params: Params) -> Simulation:
    """Return the simulation with the buffers frozen that training does not change."""
    try:
        names = constant_buffers(
            simulation.make_model,
            simulation.objective,
            population=simulation.population,
            params=params,
        )
    except Exception:  # noqa: BLE001 - the user's code; what is wrong with it shows in training
        return simulation
    if not names:
        return simulation
    holding = HoldingBuffers(simulation.make_model, names)
    return replace(simulation, make_model=ModelFactory.of(holding))


def _require_no_statistics(pieces: Pieces, layout: Layout) -> None:
    """Refuse running statistics: a few numbers that noise would drown, and make negative.

    Raises:
        ConfigError: The model has some.
    """
    if layout.statistics:
        names = ", ".join(repr(spec.name) for spec in layout.statistics[:2])
        more = len(layout.statistics) - 2
        raise ConfigError(
            f'privacy.mode is "{pieces.config.privacy.mode}", but clients would send running '
            f"statistics with noise: {names}{f' and {more} more' if more > 0 else ''}; noise makes "
            "a variance negative. Use GroupNorm or LayerNorm, or freeze them: momentum=0, or a "
            "layer that stays in evaluation mode. A buffer that training does not change is frozen "
            "as nn.Parameter(value, requires_grad=False)"
        )


def _single_examples(simulation: Simulation) -> Iterator[str]:
    """Yield a warning if the last batch of some clients is one example of a layer's statistics."""
    with untouched(torch.default_generator):
        layer = batch_statistics(simulation.make_model().train())
    if layer is None or simulation.make_trainer is not None:
        return
    population = simulation.population
    client_ids = np.arange(population.num_clients)
    locals_ = simulation.algorithm.locals_for(cast("list[ClientId]", client_ids.tolist()))
    last = by_client(LocalWork.last_batch, locals_, population.num_examples(client_ids))
    found = np.flatnonzero(last == 1)
    if found.size:
        names = client_names(population)
        listed = ", ".join(client_text(each, names) for each in found[:_LISTED].tolist())
        more = f" and {found.size - _LISTED} more" if found.size > _LISTED else ""
        yield (
            f"{found.size} of {population.num_clients} clients have a last batch of one example, "
            f"which {layer} may not train on: {listed}{more}; set client.drop_last, or another "
            "client.batch_size"
        )


def _how(choice: Choice) -> str:
    """Return how clients train, as a user thinks of it."""
    if choice.kind is ExecutorKind.SEQUENTIAL:
        return "clients train one at a time"
    return f"clients train {choice.block_size} at once"


def _trained_centrally(simulation: Simulation) -> tuple[str, ...]:
    """Return on whose examples the coordinator trains by itself, if it does."""
    section, own = simulation.config.coordinator.training, simulation.own
    if not section.is_on:
        return ()
    if own is None:
        return (f"the coordinator trains on files of its own: {', '.join(section.files)}",)
    num_examples = int(own.num_examples(np.arange(own.num_clients)).sum())
    left = simulation.population.num_clients
    whose = f"{own.num_clients} clients, which are set aside: {left} clients are left"
    return (f"the coordinator trains on {num_examples} examples of {whose}",)


def _asked(simulation: Simulation) -> tuple[str, ...]:
    """Return who is asked and waited for, where that is not the main job's to say."""
    config, policy = simulation.config, simulation.policy
    if (asynchrony := simulation.asynchrony) is not None:
        text = (
            f"asynchronous: {asynchrony.concurrency} of {simulation.population.num_clients} "
            f"clients train at a time, {asynchrony.buffer_size} updates make a round"
        )
        return (text,)
    if config.data.source == "digits" or config.centralized:
        return ()
    population = simulation.population.num_clients
    has_deadline = math.isfinite(policy.deadline_s)
    deadline = f"deadline {policy.deadline_s:g} s" if has_deadline else "no deadline"
    cohort = f"cohort {policy.num_asked} of {population} clients"
    why = "stragglers and drop-outs are asked for, not given"
    return (f"{cohort}, {deadline}, {config.devices.kind} devices: {why}",)


def device_of(name: str, environ: Mapping[str, str]) -> torch.device:
    """Return the device ``name`` for this process: under torchrun each has a GPU of its own.

    Raises:
        EngineError: There is no such device.
        ConfigError: There are fewer GPUs than processes.
    """
    gpu = None if name == "cpu" else own_gpu(environ)
    if name == "cuda" and gpu is None:
        raise EngineError(
            'engine.device is "cuda", but torch sees no CUDA device; use "auto" or "cpu"'
        )
    return gpu or torch.device("cpu")


def _num_workers(
    simulation: Simulation, params: Params, environ: Mapping[str, str]
) -> tuple[int, str]:
    config, on_gpu = simulation.config, params.vector.is_cuda
    asked, started = config.engine.num_workers, under_torchrun(environ)
    if started is not None:
        if asked not in ("auto", started):
            raise EngineError(
                f"engine.num_workers is {asked}, but torchrun has started {started} processes; "
                "leave it out"
            )
        return started, "started by torchrun"
    if asked not in ("auto", 1) and on_gpu:
        raise EngineError(
            f"engine.num_workers is {asked}, but workers cannot share a GPU; start the run "
            f"with `torchrun --nproc-per-node {asked} -m fedlearn simulate`, one process a GPU"
        )
    if asked != "auto":
        used = workers_used(simulation, asked)
        if used < asked:
            return used, f"{asked} were asked for, but a round has {used} clients to train"
        return asked, "as configured"
    if config.engine.transport == "memory":
        return 1, "sessions in this process"
    if on_gpu:
        return 1, "one GPU; torchrun spreads a run over several"
    if _job_flop(simulation, params) < _SMALL_JOB_FLOP:
        return 1, "the job is small"
    if not can_fork():
        return 1, "workers do not share data on this system; ask for them: engine.num_workers"
    return min(os.cpu_count() or 1, simulation.policy.num_wanted), "one a core"


def workers_used(simulation: Simulation, asked: int) -> int:
    """Return how many of the workers that were asked for have a client to train."""
    if isinstance(simulation.sampler, SeededSampler):
        return min(asked, simulation.policy.num_asked)
    return min(asked, simulation.population.num_clients)  # a sampler of the user's may ask them all


def _job_flop(simulation: Simulation, params: Params) -> float:
    """Return the floating-point operations of all local training, for dense layers."""
    config, population = simulation.config, simulation.population
    sample = torch.arange(min(64, population.num_clients)).numpy()
    mean_examples = float(population.num_examples(sample).mean())
    examples = mean_examples * simulation.algorithm.local.work.epochs
    return 6.0 * params.num_elements * examples * simulation.policy.num_wanted * config.num_rounds


def _executor(
    simulation: Simulation, params: Params, num_workers: int, clock: Clock, cache_dir: Path
) -> Choice:
    engine = simulation.config.engine
    if engine.transport == "memory":
        reason = "real client sessions train one at a time"
        return Choice(kind=ExecutorKind.SEQUENTIAL, block_size=1, reason=reason)
    job = job_of(simulation, params, num_workers)
    if engine.executor == "auto":
        choice = choose(job, clock=clock, cache_dir=cache_dir)
    else:
        choice = named(job, ExecutorKind(engine.executor))
    if engine.block_size != "auto":
        if job.make_trainer is not None and engine.block_size > 1:
            raise EngineError(
                f"engine.block_size is {engine.block_size}, but the clients have trainers of their "
                "own, which train one at a time; leave it out"
            )
        return replace(choice, block_size=engine.block_size)
    # Blocks of one size: a worker's share in as few as fit the cache.
    share = -(-simulation.policy.num_wanted // num_workers)
    num_blocks = -(-share // choice.block_size)
    return replace(choice, block_size=-(-share // num_blocks))


def initial_params(pieces: Pieces, device: torch.device) -> Params:
    """Return the global model before the first round: a function of the seed alone."""
    generator_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generator_devices):
        torch.manual_seed(pieces.seed.derive("model").value)
        params = Params.of(pieces.make_model())
    constants = {name: value.to(device) for name, value in params.constants.items()}
    return Params(params.layout, params.vector.to(device), constants)


def job_of(simulation: Simulation, params: Params, num_workers: int) -> Job:
    """Return what the executor is chosen by and made for."""
    config = simulation.config
    return Job(
        make_model=simulation.make_model,
        objective=simulation.objective,
        metrics=simulation.metrics,
        local=simulation.algorithm.local,
        told=simulation.algorithm.tell(simulation.algorithm.init(params)),
        population=simulation.population,
        params=params,
        precision=Precision(config.engine.precision),
        num_clients=simulation.policy.num_wanted * config.num_rounds // num_workers,
        seed=simulation.seed,
        make_trainer=simulation.make_trainer,
    )


def assemble(
    simulation: Simulation,
    cluster: Cluster,
    *,
    device: torch.device,
    clock: Clock,
    charging: Charges | None = None,
    place: Place | None = None,
) -> tuple[RunPlan, Params]:
    """Return the plan of a resolved run in this process of ``cluster``, and the initial model.

    With ``charging``, each round is charged before it is opened. ``place`` is where the
    coordinator's own training takes place.
    """
    params = initial_params(simulation, device)
    job = job_of(simulation, params, cluster.world_size)
    model = job.resident_model()
    channel: MemoryChannel | None = None
    if simulation.config.engine.transport == "memory":
        channel, collector = _sessions(simulation, model, _behaviour(simulation, cluster))
    else:
        collector = _engine(simulation, job, cluster)
    sampled = SampledOpening(
        sampler=_sampler(simulation, cluster),
        available=collector.available,
        seed=simulation.seed,
    )
    has_flight = simulation.staleness is not None
    plan = run_plan(
        simulation,
        draw=sampled.draw if has_flight else sampled.draw_cohort,
        charging=charging,
        collector=collector,
        place=place,
        release=release_of(simulation, params, cluster, has_sessions=channel is not None),
        evaluators=_evaluators(simulation, model, cluster, channel),
        clock=clock,
    )
    return plan, params


def run_plan(
    pieces: Pieces,
    *,
    draw: Draw,
    collector: Collector,
    evaluators: Sequence[Evaluator],
    clock: Clock,
    place: Place | None = None,
    release: Release | None = None,
    charging: Charges | None = None,
) -> RunPlan:
    """Return the plan of a run, simulated or deployed; the evaluators' metrics differ in name.

    With ``charging``, each round is charged before anybody is asked.
    """
    if charging is not None:
        each_attempt = pieces.staleness is None
        draw = ChargedDraw(inner=draw, charges=charging, each_attempt=each_attempt)
    return RunPlan(
        round=RoundPlan(
            draw=draw,
            policy=pieces.policy,
            collector=collector,
            strategy=with_server_steps(pieces, pieces.algorithm, place),
            seed=pieces.seed,
            release=release,
            by_round=pieces.by_round,
            is_retried=pieces.asynchrony is None,
        ),
        evaluator=Evaluators(evaluators),
        evaluate_every=pieces.config.evaluation.every_rounds,
        early_stopping=pieces.early_stopping(),
        num_rounds=pieces.config.num_rounds,
        checkpoint_every_s=pieces.config.store.checkpoint_every_s,
        clock=clock,
        standing=dict if charging is None else charging.standing,
    )


def release_of(
    pieces: Pieces, params: Params, cluster: Cluster, *, has_sessions: bool
) -> Release | None:
    """Return what becomes of the aggregates of a run before anybody looks at them.

    Args:
        pieces: Of the run.
        params: Of the model.
        cluster: The processes that share the work.
        has_sessions: Whether there are clients that add their noise themselves.

    Raises:
        ConfigError: Noise does not fit the model, the model couples examples that it is to hide,
            or it has running statistics.
    """
    plan = pieces.privacy
    if plan is None:
        return None
    if plan.hides_examples:
        _require_separable(pieces)
    else:
        _require_no_statistics(pieces, params.layout)
    noise = SharedNoise(plan.noise, cluster)
    try:
        if not pieces.config.privacy.is_distributed:
            return plan.release(pieces.algorithm, params.layout, noise)
        secure = pieces.secure
        assert secure is not None  # building it would have failed
        secure.lanes(params.layout)  # raises
        return DistributedMean(secure, plan.num_wanted, None if has_sessions else noise)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f'privacy.mode is "{pieces.config.privacy.mode}": {error}') from error


def _require_separable(pieces: Pieces) -> None:
    """Raise ConfigError if the model couples the examples of a batch, before a client refuses."""
    with untouched(torch.default_generator):
        model = pieces.make_model().train()  # a layer may stay in evaluation mode
    try:
        require_separable(model, pieces.objective)
    except SettingsRefused as error:
        raise ConfigError(f'privacy.mode is "example": {error}') from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Identities:
    """What a run with secure aggregation signs and verifies with.

    Attributes:
        run_id: Of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: Returns the clients' keys as they are now, each as a lineage in bytes
            (:mod:`fedlearn.identity.lineage`).
        sends_directory: Whether clients are sent it, or have it.
    """

    run_id: bytes
    signer: Signer
    directory: Callable[[], Mapping[ClientId, bytes]]
    sends_directory: bool = True

    @classmethod
    def of(
        cls, run_id: str, *, signer: Signer, directory: Callable[[], Mapping[ClientId, bytes]]
    ) -> "Identities":
        """Return those of a run that is identified by a text of any length."""
        digest = hashlib.sha256(run_id.encode()).digest()
        return cls(run_id=digest[:RUN_BYTES], signer=signer, directory=directory)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """How the clients of a run are reached.

    Attributes:
        channel: To them.
        identities: What secure aggregation signs and verifies with; ``None``: there are no keys.
        ahead: Where models of an asynchronous run are sent ahead; ``None``: nowhere.
        congestion: How many of its clients may be in flight; ``None``: its concurrency.
    """

    channel: Channel
    identities: Identities | None = None
    ahead: Ahead | None = None
    congestion: InFlightLimit | None = None


def over_channel(
    pieces: Pieces,
    reach: Reach,
    *,
    masked_sum: MaskedSumStore | None = None,
    wait: Callable[[], None] | None = None,
) -> ChannelCollector:
    """Return what collects the updates of clients that are reached by a channel.

    Args:
        pieces: Of the run.
        reach: To the clients.
        masked_sum: Where the sum of a round is kept until it is open; ``None``: nowhere.
        wait: Waits a moment for clients to come; ``None``: no more will come.

    Raises:
        ConfigError: Secure aggregation is on, and there are no identities.
    """
    identities = reach.identities
    plan, policy, slab_bytes = pieces.secure, pieces.policy, pieces.config.engine.slab_bytes
    if identities is None:
        require_plain(pieces)
    if plan is None or identities is None or pieces.asynchrony is not None:
        return PlainCollector(
            channel=reach.channel,
            policy=policy,
            slab_bytes=slab_bytes,
            staleness=pieces.staleness,
            wait=wait,
            ahead=reach.ahead,
            congestion=reach.congestion,
        )
    return SecureCollector(
        channel=reach.channel,
        policy=policy,
        plan=plan,
        run_id=identities.run_id,
        signer=identities.signer,
        directory=identities.directory,
        sends_directory=identities.sends_directory,
        stage_deadline_s=pieces.config.secure_aggregation.stage_deadline_s,
        num_threads=num_cores(),
        masked_sum=masked_sum or NotKept(),
    )


def require_plain(pieces: Pieces) -> None:
    """Check that a run does without identities.

    Raises:
        ConfigError: Secure aggregation is on.
    """
    section = pieces.config.secure_aggregation
    if section.is_on:
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", which needs clients that enrolled with '
            'keys of their own: serve with certificates (no --insecure), or set it to "off"'
        )


def central_evaluator(
    test: Examples, model: ResidentModel, cluster: Cluster, *, batch_size: int
) -> CentralEvaluator:
    """Return what measures the model on a test set that no client holds."""
    device = model.vector_P.device
    return CentralEvaluator(
        model=model,
        features=moved(test.features, device),
        labels=test.labels.to(device),
        batch_size=batch_size,
        cluster=cluster,
    )


def _sampler(simulation: Simulation, cluster: Cluster) -> CohortSampler:
    """Return who is asked; our own samplers are the same in every process by the seed alone."""
    given = simulation.sampler
    if simulation.privacy is not None:
        return SharedSampler(given, cluster)
    if isinstance(given, SeededSampler):
        return given
    return SharedSampler(UserSampler(given), cluster)


def _behaviour(simulation: Simulation, cluster: Cluster) -> ClientBehaviour:
    """Return what the devices do; ours are the same in every process by the seed alone."""
    given = simulation.behaviour
    return given if isinstance(given, Behaviour | Instant) else UserDevices(given, cluster)


def _sessions(
    simulation: Simulation, model: ResidentModel, behaviour: ClientBehaviour
) -> tuple[MemoryChannel, Collector]:
    """Return the channel to real client sessions, and what collects their updates."""
    population, strategy, plan = simulation.population, simulation.algorithm, simulation.secure
    simulated = None if plan is None else SimulatedIdentities(population.num_clients, plan)
    locals_ = strategy.locals_for([ClientId(each) for each in range(population.num_clients)])
    require_travels(locals_, strategy.transforms)
    sessions = SimulatedSessions(
        population,
        behaviour,
        simulation.make_trainer or trainers_on(model, local_updates=own_classes(locals_)),
        work=strategy.local.work,
        further_bytes=further_bytes(strategy, model.layout),
        identities=simulated,
        transforms=own_transforms(strategy.transforms),
        dtype=model.layout.dtype,
    )
    channel = sessions.channel()
    identities = None
    if simulated is not None:
        identities = Identities(
            run_id=SecretBytes.generate(RUN_BYTES).reveal(),  # sessions of a resumed run are new
            signer=simulated.coordinator[0],
            directory=lambda: simulated,
            sends_directory=False,
        )
    collector = over_channel(simulation, Reach(channel=channel, identities=identities))
    is_told = plan is not None and plan.noise_multiplier is None
    return channel, SessionCollector(
        inner=collector,
        sessions=SessionsKept(channel),
        bounded=sessions.bounded if is_told else None,
    )


def _engine(simulation: Simulation, job: Job, cluster: Cluster) -> Collector:
    config, plan, summing = simulation.config, simulation.secure, None
    if plan is not None:  # to be simulated as a sum, or building it would have failed
        seed = simulation.seed.derive("rounding")
        summing = ModularSum(plan=plan, layout=job.params.layout, seed=seed)
    assert isinstance(config.engine.block_size, int)  # resolved
    return Engine(
        population=simulation.population,
        behaviour=_behaviour(simulation, cluster),
        executor=make_executor(job, ExecutorKind(config.engine.executor)),
        policy=simulation.policy,
        cluster=cluster,
        block_size=config.engine.block_size,
        summing=summing,
        staleness=simulation.staleness,
    )


def _evaluators(
    simulation: Simulation, model: ResidentModel, cluster: Cluster, channel: Channel | None
) -> list[Evaluator]:
    config, population = simulation.config, simulation.population
    batch_size = config.evaluation.batch_size
    central = central_evaluator(simulation.test, model, cluster, batch_size=batch_size)
    num_clients = config.evaluation.num_clients
    if not num_clients or config.centralized:
        return [central]
    sample = evaluated_clients(population.num_clients, num_clients, simulation.seed)
    if channel is None:
        of_clients: Evaluator = ClientEvaluator(
            model=model,
            population=ReadOnce(population),
            client_ids=sample,
            batch_size=batch_size,
            cluster=cluster,
        )
    else:
        cohort = [ClientId(client_id) for client_id in sample.tolist()]
        of_clients = ChannelEvaluator(
            channel=channel,
            cohort=lambda _: cohort,
            directions=simulation.directions,
            deadline_s=math.inf,
        )
    return [central, of_clients]
