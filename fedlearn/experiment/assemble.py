"""From the pieces of a simulation to a plan that runs: device, workers, executor, evaluators."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedlearn.algorithms.aggregators import Aggregator, WeightedSum
from fedlearn.build import Simulation, measures_accuracy
from fedlearn.core.clock import Clock
from fedlearn.core.collecting import Collector
from fedlearn.core.cores import num_cores
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import SecretBytes, Seed
from fedlearn.errors import EngineError
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator, Evaluators
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan
from fedlearn.rounds.run import EarlyStopping, RunPlan
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.simulation.choice import (
    Choice,
    ExecutorKind,
    Job,
    ProbeCache,
    choose,
    make_executor,
    named,
)
from fedlearn.simulation.cluster import Cluster, local_rank, under_torchrun
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.evaluation import (
    CentralEvaluator,
    ClientEvaluator,
    evaluated_clients,
)
from fedlearn.simulation.secure import ModularSum, SimulatedIdentities
from fedlearn.simulation.sessions import session_channel
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.memory import MemoryChannel

#: A job of fewer floating-point operations is done before a second worker has started.
_SMALL_JOB_FLOP = 2e12


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A simulation whose engine settings are all concrete, and what was decided why.

    Attributes:
        simulation: With the settings in its configuration.
        notes: For the user to read: device, workers, executor.
    """

    simulation: Simulation
    notes: tuple[str, ...]


def resolve(
    simulation: Simulation, *, clock: Clock, environ: Mapping[str, str], cache_dir: Path
) -> Resolved:
    """Replace every ``auto`` of the engine's settings by a decision.

    Args:
        simulation: The pieces.
        clock: Real time, for the probe.
        environ: Tells whether torchrun has started workers.
        cache_dir: Where probes are remembered.

    Raises:
        EngineError: The engine cannot do what the configuration asks.
    """
    engine = simulation.config.engine
    device = _device(engine.device, environ)
    num_workers, why_workers = _num_workers(simulation, device, environ)
    choice = _executor(simulation, device, num_workers, clock, ProbeCache(cache_dir))
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
    notes = (
        f"device {device.type}, {workers}: {why_workers}",
        f"executor {choice.kind}, blocks of {choice.block_size}: {choice.reason}",
    )
    return Resolved(simulation=replace(simulation, config=config), notes=notes)


def _device(name: str, environ: Mapping[str, str]) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            'engine.device is "cuda", but torch sees no CUDA device; use "auto" or "cpu"'
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank(environ))


def _num_workers(
    simulation: Simulation, device: torch.device, environ: Mapping[str, str]
) -> tuple[int, str]:
    config = simulation.config
    asked, started = config.engine.num_workers, under_torchrun(environ)
    if started is not None:
        if asked not in ("auto", started):
            raise EngineError(
                f"engine.num_workers is {asked}, but torchrun has started {started} processes; "
                "leave it out"
            )
        return started, "started by torchrun"
    if asked not in ("auto", 1) and device.type == "cuda":
        raise EngineError(
            f"engine.num_workers is {asked}, but forked workers cannot share a GPU; start the run "
            f"with `torchrun --nproc-per-node {asked} -m fedlearn simulate`, one process a GPU"
        )
    if asked != "auto":
        return asked, "as configured"
    if config.engine.transport == "memory":
        return 1, "sessions in this process"
    if device.type == "cuda":
        return 1, "one GPU; torchrun spreads a run over several"
    num_cores = os.cpu_count() or 1
    if _job_flop(simulation) < _SMALL_JOB_FLOP:
        return 1, "the job is small"
    return min(num_cores, simulation.policy.num_wanted), "one a core"


def _job_flop(simulation: Simulation) -> float:
    """Return the floating-point operations of all local training, for dense layers."""
    config, population = simulation.config, simulation.data.population
    sample = torch.arange(min(64, population.num_clients)).numpy()
    examples = float(population.num_examples(sample).mean()) * simulation.algorithm.local.epochs
    size = Params.of(simulation.make_model()).layout.size
    return 6.0 * size * examples * simulation.policy.num_wanted * config.num_rounds


def _executor(
    simulation: Simulation,
    device: torch.device,
    num_workers: int,
    clock: Clock,
    cache: ProbeCache,
) -> Choice:
    engine = simulation.config.engine
    if engine.transport == "memory":
        reason = "real client sessions train one at a time"
        return Choice(kind=ExecutorKind.SEQUENTIAL, block_size=1, reason=reason)
    job = job_of(simulation, _initial_params(simulation, device), num_workers)
    if engine.executor == "auto":
        choice = choose(job, clock=clock, cache=cache)
    else:
        choice = named(job, ExecutorKind(engine.executor))
    if engine.block_size != "auto":
        return replace(choice, block_size=engine.block_size)
    # Blocks of one size: a worker's share in as few as fit the cache.
    share = -(-simulation.policy.num_wanted // num_workers)
    num_blocks = -(-share // choice.block_size)
    return replace(choice, block_size=-(-share // num_blocks))


def _initial_params(simulation: Simulation, device: torch.device) -> Params:
    return initial_params(simulation.make_model, simulation.seed, device)


def initial_params(make_model: Callable[[], nn.Module], seed: Seed, device: torch.device) -> Params:
    """Return the global model before the first round: a function of the seed alone."""
    generator_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generator_devices):
        torch.manual_seed(seed.derive("model").value)
        params = Params.of(make_model())
    constants = {name: value.to(device) for name, value in params.constants.items()}
    return Params(params.layout, params.vector.to(device), constants)


def job_of(simulation: Simulation, params: Params, num_workers: int) -> Job:
    """Return what the executor is chosen by and made for."""
    config = simulation.config
    return Job(
        make_model=simulation.make_model,
        objective=simulation.objective,
        local=simulation.algorithm.local,
        population=simulation.data.population,
        params=params,
        precision=Precision(config.engine.precision),
        num_clients=simulation.policy.num_wanted * config.num_rounds // num_workers,
        seed=simulation.seed,
    )


def worker_device(simulation: Simulation, environ: Mapping[str, str]) -> torch.device:
    """Return the device of this process: under torchrun each has a GPU of its own."""
    name = simulation.config.engine.device
    return torch.device(name, local_rank(environ)) if name == "cuda" else torch.device(name)


def assemble(
    simulation: Simulation, cluster: Cluster, *, device: torch.device, clock: Clock
) -> tuple[RunPlan[WeightedSum], Params]:
    """Return the plan of a run in this process, and the initial model.

    Args:
        simulation: Resolved: no setting of the engine is ``auto``.
        cluster: The processes that share the work.
        device: This process's.
        clock: Real time.
    """
    config, params = simulation.config, _initial_params(simulation, device)
    job = job_of(simulation, params, cluster.world_size)
    model = job.resident_model()
    identities = _identities(simulation)
    channel = _channel(simulation, model, identities)
    aggregator = _aggregator(simulation, params)
    stopping = config.early_stopping
    round_plan = RoundPlan(
        sampler=simulation.sampler,
        policy=simulation.policy,
        collector=(
            _engine(simulation, job, cluster, aggregator)
            if channel is None
            else _over_sessions(simulation, channel, identities)
        ),
        local=simulation.algorithm.local,
        aggregator=aggregator,
        server_optimizer=simulation.algorithm.server_optimizer,
        seed=simulation.seed,
    )
    plan = RunPlan(
        round=round_plan,
        evaluator=_evaluator(simulation, model, cluster, channel),
        evaluate_every=config.evaluation.every_rounds,
        early_stopping=EarlyStopping(
            metric=_watched(simulation),
            patience_rounds=stopping.patience_rounds,
            min_improvement=stopping.min_improvement,
            target=stopping.target,
        ),
        num_rounds=config.num_rounds,
        checkpoint_every_s=config.store.checkpoint_every_s,
        clock=clock,
    )
    return plan, params


def _watched(simulation: Simulation) -> str:
    """Return the metric that decides which model is the best."""
    metric = simulation.config.early_stopping.metric
    if metric != "auto":
        return metric
    return "accuracy" if measures_accuracy(simulation.objective) else "loss"


def _identities(simulation: Simulation) -> SimulatedIdentities | None:
    """Return who signs what in secure aggregation, where that is on."""
    plan = simulation.secure
    if plan is None:
        return None
    return SimulatedIdentities(simulation.data.population.num_clients, plan)


def _channel(
    simulation: Simulation, model: ResidentModel, identities: SimulatedIdentities | None
) -> MemoryChannel | None:
    """Return the channel to real client sessions, where the configuration asks for them."""
    if simulation.config.engine.transport != "memory":
        return None
    population, behaviour = simulation.data.population, simulation.behaviour
    return session_channel(population, behaviour, model, identities=identities)


def _aggregator(simulation: Simulation, params: Params) -> Aggregator[WeightedSum]:
    """Return the algorithm's own, or the one that rounds as secure aggregation does."""
    plan, section = simulation.secure, simulation.config.secure_aggregation
    if plan is None or section.simulate_as == "protocol":
        return simulation.algorithm.aggregator
    seed = simulation.seed.derive("rounding")
    return ModularSum(plan=plan, layout=params.layout, seed=seed)


def _over_sessions(
    simulation: Simulation, channel: MemoryChannel, identities: SimulatedIdentities | None
) -> Collector[WeightedSum]:
    config, aggregator = simulation.config, simulation.algorithm.aggregator
    if identities is None:
        return PlainCollector(
            channel=channel,
            aggregator=aggregator,
            policy=simulation.policy,
            slab_bytes=config.engine.slab_bytes,
        )
    return SecureCollector(
        channel=channel,
        aggregator=aggregator,
        policy=simulation.policy,
        plan=identities.plan,
        run_id=SecretBytes.generate(RUN_BYTES).reveal(),  # sessions of a resumed run are new
        signer=identities.coordinator[0],
        directory=lambda: identities,
        sends_directory=False,
        stage_deadline_s=config.secure_aggregation.stage_deadline_s,
        num_threads=num_cores(),
    )


def _engine(
    simulation: Simulation, job: Job, cluster: Cluster, aggregator: Aggregator[WeightedSum]
) -> Collector[WeightedSum]:
    block_size = simulation.config.engine.block_size
    assert isinstance(block_size, int)  # resolved
    return Engine(
        population=simulation.data.population,
        behaviour=simulation.behaviour,
        executor=make_executor(job, ExecutorKind(simulation.config.engine.executor)),
        aggregator=aggregator,
        policy=simulation.policy,
        cluster=cluster,
        block_size=block_size,
    )


def _evaluator(
    simulation: Simulation, model: ResidentModel, cluster: Cluster, channel: MemoryChannel | None
) -> Evaluator:
    config, data, device = simulation.config, simulation.data, model.vector_P.device
    parts: list[Evaluator] = [
        CentralEvaluator(
            model=model,
            features=data.test.features.to(device),
            labels=data.test.labels.to(device),
            batch_size=config.evaluation.batch_size,
            cluster=cluster,
        )
    ]
    num_clients = min(config.evaluation.clients, data.population.num_clients)
    if num_clients and not config.centralized:
        sample = evaluated_clients(data.population.num_clients, num_clients, simulation.seed)
        if channel is not None:
            cohort = [ClientId(client_id) for client_id in sample.tolist()]
            parts.append(ChannelEvaluator(channel=channel, cohort=cohort, deadline_s=math.inf))
        else:
            parts.append(
                ClientEvaluator(
                    model=model,
                    population=data.population,
                    client_ids=sample,
                    batch_size=config.evaluation.batch_size,
                    cluster=cluster,
                )
            )
    return Evaluators(parts)
