"""Which executor trains the clients: what fits, what is fastest, and why.

A model that is a plain chain of layers takes the fused executor. For any other model a short
probe times the stacked executor against the sequential one on real clients; a long run pays
for compiling. What the probe found is cached, so that the same job on the same machine
chooses alike, and the choice is recorded with the run, so that a resumed run keeps it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.clock import Clock
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.executors import sequential, stacked
from fedlearn.simulation.executors.base import Executor, Work
from fedlearn.simulation.executors.fused import executor as fused
from fedlearn.simulation.executors.fused.chain import Chain, NotAChain, as_chain
from fedlearn.simulation.executors.fused.executor import FusedExecutor, misfit
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked import (
    StackedExecutor,
    why_not_compiled,
    why_not_stacked,
)
from fedlearn.simulation.population import Population
from fedlearn.simulation.work import work_of
from fedlearn.training.resident import Precision, ResidentModel

#: A run that takes longer than this without compiling is worth compiling for, in seconds.
_WORTH_COMPILING_S = 60.0
#: Clients that are trained by way of trial.
_PROBE_CLIENTS = 16


class ExecutorKind(StrEnum):
    """The executors by name."""

    FUSED = "fused"
    COMPILED = "compiled"
    VMAP = "vmap"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the choice depends on.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics.
        local: The update rule.
        population: The clients.
        params: The initial model, on the device where training happens.
        precision: Of forward and backward passes.
        num_clients: Clients trained in the whole run by each worker: cohort x rounds / workers.
        seed: The run's.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    local: LocalSgd
    population: Population
    params: Params
    precision: Precision
    num_clients: int
    seed: Seed

    @property
    def device(self) -> torch.device:
        """Where training happens."""
        return self.params.vector.device

    def resident_model(self) -> ResidentModel:
        """Return a new resident model."""
        return ResidentModel(
            self.make_model, self.objective, device=self.device, precision=self.precision
        )

    def work(self, num_clients: int) -> Work:
        """Return a block of the population's first clients, to try an executor on."""
        client_ids = np.arange(min(num_clients, self.population.num_clients))
        steps = self.local.num_steps(self.population.num_examples(client_ids))
        client_ids = client_ids[np.argsort(-steps, kind="stable")]
        velocity = None
        if self.local.keep_momentum:
            zeros = (len(client_ids), self.params.layout.num_trainable)
            velocity = self.params.vector.new_zeros(zeros)
        return work_of(
            self.population,
            client_ids,
            params=self.params,
            local=self.local,
            round_num=0,
            seed=self.seed,
            velocity_KQ=velocity,
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An executor and why it was chosen.

    Attributes:
        kind: Which.
        block_size: Clients in a block at the most.
        reason: For the user to read.
    """

    kind: ExecutorKind
    block_size: int
    reason: str


def make_executor(job: Job, kind: ExecutorKind) -> Executor:
    """Return the executor called ``kind``.

    Raises:
        EngineError: It cannot train this job's model; the message says why.
    """
    if kind is ExecutorKind.SEQUENTIAL:
        return SequentialExecutor(job.resident_model())
    if kind is ExecutorKind.FUSED:
        return FusedExecutor(_chain(job))
    reason = why_not_compiled() if kind is ExecutorKind.COMPILED else None
    if reason is not None:
        raise EngineError(f'engine.executor "compiled": {reason}; use "vmap"')
    return StackedExecutor(
        job.make_model,
        job.objective,
        device=job.device,
        precision=job.precision,
        is_compiled=kind is ExecutorKind.COMPILED,
    )


def choose(job: Job, *, clock: Clock, cache: "ProbeCache") -> Choice:
    """Return the fastest executor that can train this job."""
    try:
        _chain(job)
    except EngineError as error:
        not_fused = str(error)
    else:
        reason = "the model is a plain chain of layers"
        return _choice(job, ExecutorKind.FUSED, reason)
    not_stacked = _why_not_stacked(job)
    if not_stacked is not None:
        return _choice(job, ExecutorKind.SEQUENTIAL, not_stacked)
    speed = cache.get(_fingerprint(job)) or cache.put(_fingerprint(job), _probe(job, clock))
    return _fastest(job, speed, not_fused)


def named(job: Job, kind: ExecutorKind) -> Choice:
    """Return the executor that the user named.

    Raises:
        EngineError: It cannot train this job's model; the message says why.
    """
    if kind in (ExecutorKind.VMAP, ExecutorKind.COMPILED):
        reason = _why_not_stacked(job)
        if reason is not None:
            raise EngineError(f'engine.executor "{kind}": {reason}; use "auto" or "sequential"')
    make_executor(job, kind)
    return _choice(job, kind, "as configured")


def _choice(job: Job, kind: ExecutorKind, reason: str) -> Choice:
    layout = job.params.layout
    match kind:
        case ExecutorKind.SEQUENTIAL:
            block_size = sequential.preferred_block(layout)
        case ExecutorKind.FUSED:
            block_size = fused.preferred_block(layout)
        case _:
            block_size = stacked.preferred_block(layout)
    return Choice(kind=kind, block_size=block_size, reason=reason)


def _fastest(job: Job, speed: "Speed", not_fused: str) -> Choice:
    ratio = speed.sequential_s / speed.stacked_s
    best_s = min(speed.sequential_s, speed.stacked_s) * job.num_clients
    measured = f"stacked training is {ratio:.1f} x sequential; not fused: {not_fused}"
    if best_s > _WORTH_COMPILING_S and why_not_compiled() is None:
        reason = f"a run of about {best_s:.0f} s is worth compiling for ({measured})"
        return _choice(job, ExecutorKind.COMPILED, reason)
    kind = ExecutorKind.VMAP if ratio > 1.0 else ExecutorKind.SEQUENTIAL
    return _choice(job, kind, measured)


def _chain(job: Job) -> Chain:
    model = job.resident_model()
    chain = as_chain(model.module, model.layout)
    if isinstance(chain, NotAChain):
        raise EngineError(chain.reason)
    if job.precision is not Precision.FLOAT32:
        raise EngineError(f"precision {job.precision} needs automatic mixed precision")
    work = job.work(1)
    reason = misfit(chain, objective=job.objective, features=work.features, labels=work.labels)
    if reason is not None:
        raise EngineError(reason)
    return chain


def _why_not_stacked(job: Job) -> str | None:
    work = job.work(1)
    return why_not_stacked(
        job.make_model,
        job.objective,
        features=work.features,
        labels=work.labels,
        local=job.local,
        params=job.params,
        precision=job.precision,
    )


@dataclass(frozen=True)
class Speed:
    """What a probe measured.

    Attributes:
        sequential_s: Seconds a client, one after another.
        stacked_s: Seconds a client, in a block.
    """

    sequential_s: float
    stacked_s: float


def _probe(job: Job, clock: Clock) -> Speed:
    work = job.work(min(_PROBE_CLIENTS, stacked.preferred_block(job.params.layout)))
    sequential = make_executor(job, ExecutorKind.SEQUENTIAL)
    in_a_block = make_executor(job, ExecutorKind.VMAP)
    return Speed(_seconds(sequential, work, clock), _seconds(in_a_block, work, clock))


def _seconds(executor: Executor, work: Work, clock: Clock) -> float:
    """Return the seconds a client takes: the better of two, after one to warm up."""
    times = []
    for _ in range(3):
        started_s = clock.now_s()
        executor.train(work)
        times.append(clock.now_s() - started_s)
    return min(times[1:]) / len(work.client_ids)


def _fingerprint(job: Job) -> str:
    """Return what a probe's result depends on, hashed."""
    parts = (
        torch.__version__,
        str(job.device),
        torch.get_num_threads(),
        job.precision,
        repr(job.make_model()),
        job.params.layout,
        job.local,
        job.objective,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class ProbeCache:
    """What earlier probes measured, one small file each.

    Attributes:
        folder: Where they lie; created when something is put.
    """

    folder: Path

    def get(self, fingerprint: str) -> Speed | None:
        """Return what was measured, or ``None``; a damaged entry counts as none."""
        try:
            entry = json.loads((self.folder / f"{fingerprint}.json").read_text())
            return Speed(float(entry["sequential_s"]), float(entry["stacked_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, fingerprint: str, speed: Speed) -> Speed:
        """Keep what was measured if that is possible, and return it."""
        entry = {"sequential_s": speed.sequential_s, "stacked_s": speed.stacked_s}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{fingerprint}.json").write_text(json.dumps(entry))
        except OSError:
            pass  # a read-only home: the next run measures again
        return speed
