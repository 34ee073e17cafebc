"""Makes the automatic choices of a simulation (device, workers, executor) and explains them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedlearn.algorithms.aggregations import combines_all
from fedlearn.algorithms.informed_sampling import as_informed
from fedlearn.algorithms.local import LocalWork
from fedlearn.algorithms.sampling import SeededSampler
from fedlearn.assembly.components import Components, Simulation
from fedlearn.assembly.plan import build_initial_params, choose_release
from fedlearn.assembly.server_training import build_server_task
from fedlearn.core.clock import Clock
from fedlearn.core.cluster import Alone
from fedlearn.core.cores import count_cores
from fedlearn.core.features import list_tensors
from fedlearn.core.gpus import find_own_gpu
from fedlearn.core.messages import ClientId
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Params
from fedlearn.errors import DataError, EngineError
from fedlearn.simulation.choice import (
    Choice,
    ExecutorKind,
    TrainingJob,
    choose,
    use_configured,
)
from fedlearn.simulation.cluster import can_fork, read_torchrun_size
from fedlearn.simulation.constant_buffers import HoldingBuffers, constant_buffers
from fedlearn.simulation.engine import by_client
from fedlearn.simulation.partition import client_text
from fedlearn.simulation.population import CheckedExamples, client_names, unread_rows
from fedlearn.statistics.query import StatisticsQuery
from fedlearn.training.example_gradients import batch_statistics
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import Precision

#: Most clients that a note lists.
_LISTED = 20


#: A job with fewer floating-point operations finishes before a second worker has started.
_SMALL_JOB_FLOP = 2e12

#: Memory for the examples that a dataset reads for a block; reading takes it twice for a moment.
_READ_BYTES = 1 << 30


def resolve(
    simulation: Simulation, *, clock: Clock, environ: Mapping[str, str], cache_dir: Path
) -> Simulation:
    """Resolve every ``auto`` among the engine's settings.

    The notes of the returned simulation explain each choice, and list the dtypes of a model that
    mixes several.

    Args:
        simulation: The components of the run.
        clock: Real time, for the probe that measures executors.
        environ: Environment variables, which show whether torchrun started the workers.
        cache_dir: Where probe results are cached.

    Raises:
        ConfigError: Noise or the coordinator's own training does not fit the model, or there are
            fewer GPUs than processes.
        DataError: A feature is beyond the range of the model's floats.
        EngineError: The engine cannot do what the configuration asks.
    """
    engine, has_model = simulation.config.engine, simulation.config.has_model
    device = choose_device(engine.device if has_model else "cpu", environ)
    params = build_initial_params(simulation, device)
    if _has_noisy_updates(simulation) and params.layout.statistics:
        # Before the release is chosen below, which refuses buffers that clients would send.
        simulation = _freeze_constant_buffers(simulation, params)
        params = build_initial_params(simulation, device)
    choose_release(
        simulation, params, Alone(), has_sessions=False
    )  # raises where noise does not fit
    if simulation.config.coordinator.training.is_on:
        build_server_task(simulation).require_fitting()
    num_workers, why_workers = _choose_num_workers(simulation, params, environ)
    choice = _choose_executor(simulation, params, num_workers, clock, cache_dir)
    settings = engine.model_copy(
        update={
            "device": device.type,
            "num_workers": num_workers,
            "executor": choice.kind.value,
            "block_size": choice.block_size,
        }
    )
    config = simulation.config.model_copy(update={"engine": settings})
    if isinstance(simulation.algorithm.local, StatisticsQuery):
        # All clients take part, whatever the device: who counts rows need not know more.
        return replace(simulation, config=config)
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    notes = [
        *_note_cohort(simulation),
        *_note_server_training(simulation),
        *_note_attack(simulation),
        f"device {device.type}, {workers}: {why_workers}",
    ]
    if has_model:
        block = _describe_block(choice)
        notes.append(f"{block} (engine.executor {choice.kind}): {choice.reason}")
    if combines_all(simulation.algorithm.aggregation):
        wanted = simulation.policy.num_wanted
        kept_mib = wanted * params.vector.nbytes / (1 << 20)
        rule = type(simulation.algorithm.aggregation).__name__
        notes.append(f"{rule} needs all {wanted} updates of a round at once: {kept_mib:.0f} MiB")
    notes += [*_note_names(simulation), *_note_inputs(simulation, params, num_workers)]
    notes += _warn_of_single_examples(simulation)
    if (dtypes := params.layout.dtypes()) is not None:
        notes.append(f"the model {dtypes}")
    return replace(simulation, config=config, notes=tuple(notes))


def _note_names(simulation: Simulation) -> tuple[str, ...]:
    """Return a note on the clients' names, if the data give them names beyond a number."""
    population = simulation.population
    names = client_names(population)
    if names is None:
        return ()
    first, last = (client_text(each, names) for each in (0, population.num_clients - 1))
    is_number = first.endswith(" 0") and last.endswith(f" {population.num_clients - 1}")
    return () if is_number else (f"clients have names, from {first} to {last}: data.names",)


def _note_inputs(simulation: Simulation, params: Params, num_workers: int) -> tuple[str, ...]:
    """Return a note on integer features that reach the model as floats.

    Raises:
        DataError: A feature is beyond the range of the model's floats.
    """
    test, population = simulation.test, simulation.population
    usual = all(each.dtype == torch.float32 for each in list_tensors(test.features))
    if usual or simulation.make_trainer is not None:
        return ()
    inputs = build_job(simulation, params, num_workers).resident_model().inputs
    inputs.require_range(test.features, what="the test set")
    if isinstance(population, CheckedExamples):
        inputs.require_range(population.features, what="the clients' data")
    note = inputs.note(test.features)
    return () if note is None else (note,)


def _has_noisy_updates(components: Components) -> bool:
    """Whether noise is added to whole updates rather than to the gradients of examples."""
    return components.privacy is not None and not components.privacy.hides_examples


def _freeze_constant_buffers(simulation: Simulation, params: Params) -> Simulation:
    """Freeze the buffers that training does not change.

    A release with noise refuses buffers that clients would send; frozen ones are not sent.
    """
    try:
        names = constant_buffers(
            simulation.make_model,
            simulation.objective,
            population=simulation.population,
            params=params,
        )
    except Exception:  # noqa: BLE001 - custom code; what is wrong with it shows in training
        return simulation
    if not names:
        return simulation
    holding = HoldingBuffers(simulation.make_model, names)
    return replace(simulation, make_model=ModelFactory.of(holding))


def _warn_of_single_examples(simulation: Simulation) -> Iterator[str]:
    """Warn if a layer uses batch statistics and some clients' last batch has one example."""
    with preserve_generator(torch.default_generator):
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
            f"which {layer} may fail to train on: {listed}{more}; set client.drop_last, or "
            "another client.batch_size"
        )


def _describe_block(choice: Choice) -> str:
    if choice.kind is ExecutorKind.SEQUENTIAL:
        return "clients train one at a time"
    return f"clients train {choice.block_size} at once"


def _note_server_training(simulation: Simulation) -> tuple[str, ...]:
    """Return a note on the data of the coordinator's own training, if it is on."""
    section, own = simulation.config.coordinator.training, simulation.own
    if not section.is_on:
        return ()
    if own is None:
        return (f"the coordinator trains on its own files: {', '.join(section.files)}",)
    num_examples = int(own.num_examples(np.arange(own.num_clients)).sum())
    left = simulation.population.num_clients
    whose = f"{own.num_clients} clients, which are set aside: {left} clients are left"
    return (f"the coordinator trains on {num_examples} examples of {whose}",)


def _note_attack(simulation: Simulation) -> tuple[str, ...]:
    """Return a note that names the attackers, if there are any."""
    section = simulation.config.attack
    if not section.is_on:
        return ()
    names = client_names(simulation.population)
    listed = ", ".join(client_text(each, names) for each in section.clients[:_LISTED])
    more = f" and {len(section.clients) - _LISTED} more" if len(section.clients) > _LISTED else ""
    return (f"attack {section.kind} by {listed}{more}",)


def _note_cohort(simulation: Simulation) -> tuple[str, ...]:
    """Return a note on how many clients train in a round and how long the server waits.

    The main job (the digits) and a centralized run need no such note.
    """
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
    cohort = f"cohort {policy.cohort_size} of {population} clients"
    why = "stragglers and drop-outs occur only if you configure them"
    return (f"{cohort}, {deadline}, {config.devices.kind} devices: {why}",)


def choose_device(name: str, environ: Mapping[str, str]) -> torch.device:
    """Return the device ``name`` for this process; under torchrun each process has its own GPU.

    Raises:
        EngineError: There is no such device.
        ConfigError: There are fewer GPUs than processes.
    """
    gpu = None if name == "cpu" else find_own_gpu(environ)
    if name == "cuda" and gpu is None:
        raise EngineError(
            'engine.device is "cuda", but torch sees no CUDA device; use "auto" or "cpu"'
        )
    return gpu or torch.device("cpu")


def _choose_num_workers(
    simulation: Simulation, params: Params, environ: Mapping[str, str]
) -> tuple[int, str]:
    config, on_gpu = simulation.config, params.vector.is_cuda
    requested, started = config.engine.num_workers, read_torchrun_size(environ)
    if started is not None:
        if requested not in ("auto", started):
            raise EngineError(
                f"engine.num_workers is {requested}, but torchrun has started {started} processes; "
                "leave it out"
            )
        return started, "started by torchrun"
    if requested not in ("auto", 1) and on_gpu:
        raise EngineError(
            f"engine.num_workers is {requested}, but workers cannot share a GPU; start the run "
            f"with `torchrun --nproc-per-node {requested} -m fedlearn simulate`, one process a GPU"
        )
    if requested != "auto":
        used = count_workers_used(simulation, requested)
        if used < requested:
            return used, f"{requested} were requested, but a round has {used} clients to train"
        return requested, "as configured"
    if config.engine.transport == "memory":
        return 1, "sessions in this process"
    if on_gpu:
        return 1, "one GPU; torchrun spreads a run over several"
    if _estimate_flop(simulation, params) < _SMALL_JOB_FLOP:
        return 1, "the job is small"
    if not can_fork():
        return 1, "workers do not share data on this system; request them with engine.num_workers"
    return min(count_cores(), simulation.policy.num_wanted), "one per core"


def count_workers_used(simulation: Simulation, requested: int) -> int:
    """Return how many of the requested workers have a client to train."""
    sampler = simulation.sampler
    if isinstance(sampler, SeededSampler) or as_informed(sampler).draws_exactly:
        return min(requested, simulation.policy.cohort_size)
    # A custom sampler may select all clients.
    return min(requested, simulation.population.num_clients)


def _estimate_flop(simulation: Simulation, params: Params) -> float:
    """Estimate the floating-point operations of all local training, assuming dense layers."""
    config, population = simulation.config, simulation.population
    sample = torch.arange(min(64, population.num_clients)).numpy()
    work = simulation.algorithm.local.work
    examples = float(work.num_processed(population.num_examples(sample)).mean())
    # 6 per parameter and example: 2 in the forward pass and 4 in the backward pass.
    return 6.0 * params.num_elements * examples * simulation.policy.num_wanted * config.num_rounds


def _choose_executor(
    simulation: Simulation, params: Params, num_workers: int, clock: Clock, cache_dir: Path
) -> Choice:
    engine = simulation.config.engine
    if engine.transport == "memory":
        reason = "real client sessions train one at a time"
        return Choice(kind=ExecutorKind.SEQUENTIAL, block_size=1, reason=reason)
    job = build_job(simulation, params, num_workers)
    if engine.executor == "auto":
        choice = choose(job, clock=clock, cache_dir=cache_dir)
    else:
        choice = use_configured(job, ExecutorKind(engine.executor))
    if engine.block_size != "auto":
        if job.make_trainer is not None and engine.block_size > 1:
            raise EngineError(
                f"engine.block_size is {engine.block_size}, but the clients have their own "
                "trainers, which train one at a time; leave it out"
            )
        return replace(choice, block_size=engine.block_size)
    # Split a worker's share into as few blocks of equal size as fit the cache, and memory.
    # -(-a // b) is a / b, rounded up.
    share = -(-simulation.policy.num_wanted // num_workers)
    num_blocks = -(-share // min(choice.block_size, _count_readable(simulation)))
    return replace(choice, block_size=-(-share // num_blocks))


def _count_readable(simulation: Simulation) -> int:
    """Return how many clients' examples may be in memory at once, at least 1.

    It matters where a dataset reads them for each block; those that it augments at random are read
    again for each epoch.
    """
    population, work = simulation.population, simulation.algorithm.local.work
    unread = unread_rows(population, np.arange(1))
    if unread is None:
        return population.num_clients
    largest = int(population.num_examples(np.arange(population.num_clients)).max())
    num_epochs = max(1, -(-int(work.num_processed(np.array([largest]))[0]) // largest))
    try:
        num_bytes = largest * unread.bytes_per_example(num_epochs)
    except DataError:  # its client fails when it trains, and only that
        return 1
    return max(1, _READ_BYTES // num_bytes)


def build_job(simulation: Simulation, params: Params, num_workers: int) -> TrainingJob:
    """Describe the training job for which an executor is chosen and built."""
    config = simulation.config
    return TrainingJob(
        make_model=simulation.make_model,
        objective=simulation.objective,
        metrics=simulation.metrics,
        local=simulation.algorithm.local,
        broadcast=simulation.algorithm.broadcast(simulation.algorithm.init(params)),
        population=simulation.population,
        params=params.complete(),
        precision=Precision(config.engine.precision),
        num_clients=simulation.policy.num_wanted * config.num_rounds // num_workers,
        num_together=-(-simulation.policy.num_wanted // num_workers),
        seed=simulation.seed,
        make_trainer=simulation.make_trainer,
    )
