"""Chooses the executor that trains the clients: the fastest one that can train the model.

A plain chain of layers uses the fused executor. For any other model, a short probe on real clients
times the stacked executor against the sequential one; in a long run, compiling pays off. If the run
is long enough, blocks of several sizes are timed as well, for at most a hundredth of its time.
Timings are cached, so that the same job on the same machine makes the same choice. The choice is
recorded with the run, so that a resumed run keeps it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from torch import Tensor, nn

from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.local import (
    LocalUpdate,
    find_client_loss,
    iter_updates,
)
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.settings import UPDATES
from fedlearn.core.clock import Clock
from fedlearn.core.features import list_tensors
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, DataError, EngineError
from fedlearn.simulation.executors import sequential, stacked
from fedlearn.simulation.executors.attempts import attempts
from fedlearn.simulation.executors.base import Executor, LocalTask, Work
from fedlearn.simulation.executors.fused import executor as fused
from fedlearn.simulation.executors.fused.chain import Chain, NotAChain, as_chain
from fedlearn.simulation.executors.fused.executor import FusedExecutor, describe_misfit
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked import StackedExecutor, explain_not_compiled
from fedlearn.simulation.executors.stacked_gradient import BlockGradient
from fedlearn.simulation.executors.trainers import MakeTrainer, TrainerExecutor
from fedlearn.simulation.executors.trial import Trial, describe_first_line, trial_of
from fedlearn.simulation.population import Population, find_readable_client, pick_spread_clients
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import Precision, ResidentModel

# A damaged cache file may hold NaN, which every comparison of speeds would let pass.
_SECONDS = TypeAdapter(dict[str, FiniteFloat])
#: Compiling pays off in a run that takes longer than this without it, in seconds.
_WORTH_COMPILING_S = 60.0
#: Why executors that compile or fuse the loss refuse an update.
_OWN_LOSS = "the local update has its own loss (client_loss)"
#: Clients that a probe trains.
_PROBE_CLIENTS = 16
#: Largest part of a run's time for timing block sizes.
_MEASURING = 0.01
#: Multiples of the usual block size to time.
_SIZES = (1.0, 0.5, 0.25, 2.0)
#: How often a block is trained to time it, including one warm-up.
_TIMES = 3
#: Assumed slowdown of another executor than the usual one, to limit the time for measuring it.
_SLOWER = 4.0
#: Another executor or block size replaces the usual one if it is faster by this factor.
_CLEARLY = 1.1


class ExecutorKind(StrEnum):
    """The executors by name."""

    FUSED = "fused"
    COMPILED = "compiled"
    VMAP = "vmap"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The training job for which an executor is chosen.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics.
        metrics: Metrics that need a whole set of examples at once, by name.
        local: The clients' local update.
        broadcast: The strategy's broadcast in the first round: one vector per name.
        population: The clients.
        params: The initial model, on the device where training happens.
        precision: Precision of forward and backward passes.
        num_clients: Clients that each worker trains in the whole run: cohort x rounds / workers.
        num_together: Clients that a worker trains in a round; no block is larger.
        seed: The run's seed.
        make_trainer: Makes the clients' trainers if the run has custom ones; else ``None``.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    metrics: Mapping[str, Metric]
    local: LocalUpdate
    broadcast: Lanes
    population: Population
    params: Params
    precision: Precision
    num_clients: int
    num_together: int
    seed: Seed
    make_trainer: MakeTrainer | None = None
    _frozen: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def resident_model(self) -> ResidentModel:
        """Build a new resident model, which shares the memory of frozen parameters with others."""
        model = ResidentModel(
            self.make_model,
            self.objective,
            device=self.params.vector.device,
            precision=self.precision,
            metrics=self.metrics,
            memory=self._frozen,
        )
        self._frozen.update({name: value.data for name, value in model.frozen.items()})
        return model

    def work(self, client_ids: NDArray[np.int64]) -> Work:
        """Build the first round's work of a block of clients, to try an executor on.

        Raises:
            DataError: Their examples cannot be read.
        """
        steps = self.local.work.num_steps(self.population.num_examples(client_ids))
        # Executors rely on this order: step t runs on the prefix of clients that still have a
        # batch.
        client_ids = client_ids[np.argsort(-steps, kind="stable")]
        task = LocalTask(
            params=self.params,
            local=self.local,
            broadcast=self.broadcast,
            round_num=0,
            seed=self.seed,
        )
        return Work.of(task, self.population.load(client_ids), client_ids, client_state={})


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen executor, with the reason for the choice.

    Attributes:
        kind: The executor.
        block_size: Most clients in a block.
        reason: The reason, as text for the user.
    """

    kind: ExecutorKind
    block_size: int
    reason: str


def make_executor(job: TrainingJob, kind: ExecutorKind) -> Executor:
    """Build the executor of a kind.

    Raises:
        EngineError: It cannot train this job's model; the message says why.
    """
    if job.make_trainer is not None:
        return TrainerExecutor(job.make_trainer)
    if kind is ExecutorKind.SEQUENTIAL:
        return SequentialExecutor(job.resident_model())
    if kind is ExecutorKind.FUSED:
        return FusedExecutor(_chain(job), objective=job.objective)
    reason = None
    if kind is ExecutorKind.COMPILED:
        reason = _OWN_LOSS if find_client_loss(job.local) is not None else explain_not_compiled()
    if reason is not None:
        raise EngineError(f'engine.executor "compiled": {reason}; use "vmap"')
    gradient = BlockGradient(
        job.make_model,
        job.objective,
        device=job.params.vector.device,
        precision=job.precision,
        by_example=isinstance(job.local, NoisedGradients),
        constants=job.params.constants,
    )
    return StackedExecutor(gradient, is_compiled=kind is ExecutorKind.COMPILED)


def choose(job: TrainingJob, *, clock: Clock, cache_dir: Path) -> Choice:
    """Choose the fastest executor that can train this job.

    Args:
        job: The job.
        clock: A clock of real time, for probes.
        cache_dir: Folder for cached timings, one small file each.

    Raises:
        ConfigError: The local update does not fit the model.
        EngineError: Not even the sequential executor can train the job.
    """
    if job.make_trainer is not None:
        return _use_trainers(job)
    trial = _trial(job)
    if isinstance(trial, str):
        return _make_choice(job, ExecutorKind.SEQUENTIAL, trial)
    not_fused = _find_objection(job, ExecutorKind.FUSED, trial)
    path = cache_dir / f"{_fingerprint(job)}.json"
    blocks = path.with_suffix(".blocks.json")
    if not_fused is None:
        usual = _make_choice(
            job, ExecutorKind.FUSED, "the model calls its layers one after another"
        )
        return _tune_block_size(job, usual, clock, blocks)
    if (not_stacked := _find_objection(job, ExecutorKind.VMAP, trial)) is not None:
        return _make_choice(job, ExecutorKind.SEQUENTIAL, not_stacked)
    try:
        speed = _load_or_probe(job, clock, path)
    except EngineError as error:
        # If not even one client at a time can be trained, the user gets that error, not a choice.
        _require_trainable(job)
        return _make_choice(job, ExecutorKind.SEQUENTIAL, str(error))
    fastest = _choose_fastest(job, speed, trial, not_fused)
    if fastest.kind is not ExecutorKind.VMAP:
        return fastest
    return _tune_block_size(job, fastest, clock, blocks)


def use_configured(job: TrainingJob, kind: ExecutorKind) -> Choice:
    """Use the configured executor, after checking that it works.

    Raises:
        EngineError: It cannot train this job's model; the message says why.
    """
    if job.make_trainer is not None:
        if kind is not ExecutorKind.SEQUENTIAL:
            raise EngineError(
                f'engine.executor is "{kind}", but the clients have their own trainers, which '
                'train one at a time; use "auto" or "sequential"'
            )
        return _use_trainers(job)
    if kind is not ExecutorKind.SEQUENTIAL:
        try:
            make_executor(job, kind)
        except EngineError as error:
            raise _build_refusal(kind, str(error)) from error
        tried = kind if kind is ExecutorKind.FUSED else ExecutorKind.VMAP  # compiling takes seconds
        trial = _trial(job)
        reason = trial if isinstance(trial, str) else _find_objection(job, tried, trial)
        if reason is not None:
            raise _build_refusal(kind, reason)
    return _make_choice(job, kind, "as configured")


def _build_refusal(kind: ExecutorKind, reason: str) -> EngineError:
    return EngineError(f'engine.executor "{kind}": {reason}; use "auto" or "sequential"')


def _trial(job: TrainingJob) -> Trial | str:
    """Run the job's trial; if it fails, return why the model must train one client at a time.

    Raises:
        ConfigError: The local update does not fit the model.
        EngineError: The model cannot train one client at a time either.
    """
    if job.params.layout.others:
        _require_trainable(job)
    reason = ""
    for shift, client in enumerate(_sample_clients(job)):
        try:
            work = job.work(client)
            return trial_of(
                job.make_model, job.objective, work, precision=job.precision, shift=shift
            )
        except (ConfigError, EngineError):
            raise
        except Exception as error:  # noqa: BLE001 - custom code; another client's data may work
            reason = reason or describe_first_line(error)
    _require_trainable(job)
    return reason


def _require_trainable(job: TrainingJob) -> None:
    """Check that at least one of a few clients can be trained.

    Raises:
        ConfigError: The local update does not fit the model.
        EngineError: No client can; the message has the first client's error.
    """
    executor, first = make_executor(job, ExecutorKind.SEQUENTIAL), None
    for client in _sample_clients(job):
        try:
            executor.train(job.work(client))
        except ConfigError:
            raise  # no client's data can help
        except Exception as error:  # noqa: BLE001 - custom code raises anything
            first = first or error
        else:
            return
    assert first is not None  # there is a client
    dtypes = job.params.layout.dtypes()
    raise EngineError(
        "the model cannot be trained, not even one client at a time: "
        f"{describe_first_line(first)}{f' (it {dtypes})' if dtypes else ''}; train it on one "
        "batch in your own loop to see where it fails"
    ) from first


def _sample_clients(job: TrainingJob) -> Iterator[NDArray[np.int64]]:
    """Yield single clients spread over the population, since one client's data may be bad."""
    yield from pick_spread_clients(job.population, _PROBE_CLIENTS)[:, None]


def _find_objection(job: TrainingJob, kind: ExecutorKind, trial: Trial) -> str | None:
    return trial.objection(lambda: make_executor(job, kind))


def _use_trainers(job: TrainingJob) -> Choice:
    seen = set[str]()
    for update in iter_updates(job.local):
        new = [lane.name for lane in update.lanes if lane.name not in seen]
        if new and type(update) in UPDATES.values():
            raise EngineError(
                f"the algorithm needs {new} from each client, which only fedlearn's own trainer "
                "computes; leave the trainer out"
            )
        seen.update(new)
    reason = "the clients' own trainers train one at a time"
    return Choice(kind=ExecutorKind.SEQUENTIAL, block_size=1, reason=reason)


def _make_choice(job: TrainingJob, kind: ExecutorKind, reason: str) -> Choice:
    layout = job.params.layout
    match kind:
        case ExecutorKind.SEQUENTIAL:
            block_size = sequential.choose_block_size(layout)
        case ExecutorKind.FUSED:
            block_size = fused.choose_block_size(layout)
        case _:
            block_size = stacked.choose_block_size(layout, job.local)
    return Choice(kind=kind, block_size=block_size, reason=reason)


def _choose_fastest(job: TrainingJob, speed: "_Speed", trial: Trial, not_fused: str) -> Choice:
    ratio = speed.sequential_s / speed.stacked_s
    best_s = min(speed.sequential_s, speed.stacked_s) * job.num_clients
    much = f"{ratio:.1f} times as fast" if ratio > 1.0 else f"{1 / ratio:.1f} times as slow"
    measured = f"stacked clients are {much} as one at a time, and not fused: {not_fused}"
    compiled = ExecutorKind.COMPILED
    if best_s > _WORTH_COMPILING_S and _find_objection(job, compiled, trial) is None:
        reason = f"compiling pays off in a run of about {best_s:.0f} s; {measured}"
        return _make_choice(job, compiled, reason)
    kind = ExecutorKind.VMAP if ratio > 1.0 else ExecutorKind.SEQUENTIAL
    return _make_choice(job, kind, measured)


def _tune_block_size(job: TrainingJob, usual: Choice, clock: Clock, path: Path) -> Choice:
    """Choose the fastest of several block sizes, if the run is long enough to time them.

    The block size may change rounding. Another size than the usual one, or training one client at a
    time, is chosen only if it is clearly faster: timings vary, and each block costs time outside of
    the executor, too.
    """
    seconds = _load_timings(path)
    if not seconds:
        seconds = _time_block_sizes(job, usual, clock)
        if seconds:
            _save_timings(path, seconds)
    own = [name for name in seconds if name.startswith(usual.kind.value)]
    if not own:
        return usual
    best = min(seconds, key=seconds.__getitem__)
    if _CLEARLY * seconds[best] >= seconds[own[0]]:
        best = own[0]
    kind, size = best.split()
    listed = ", ".join(f"{name}: {1e6 * each:.3g}" for name, each in seconds.items())
    reason = f"{usual.reason}; microseconds per example on this machine, by block size: {listed}"
    return Choice(kind=ExecutorKind(kind), block_size=int(size), reason=reason)


def _time_block_sizes(job: TrainingJob, usual: Choice, clock: Clock) -> dict[str, float]:
    """Time several block sizes: seconds per example, by "executor size", the usual one first.

    Empty if the run is too short, or if an executor or client fails; the usual size is used then.
    """
    most = min(job.num_together, job.population.num_clients)
    usual_size = min(usual.block_size, most)
    # An ordered set: sizes may become equal when they are cut to the cohort.
    sizes = dict.fromkeys(min(max(1, round(usual_size * each)), most) for each in _SIZES)
    candidates = [(usual.kind, size) for size in sizes]
    # Second, because the budget is spent in this order: even a short run compares the executors.
    candidates.insert(1, (ExecutorKind.SEQUENTIAL, 1))
    # The time left for measuring, in clients trained at the usual speed.
    left, found = _MEASURING * job.num_clients, dict[str, float]()
    executors = dict[ExecutorKind, Executor]()
    for kind, size in candidates:
        cost = _TIMES * size * (1.0 if kind is usual.kind else _SLOWER)
        if cost > left:
            if not found:
                break  # there is nothing to compare with
            continue
        left -= cost
        client_ids = pick_spread_clients(job.population, size)
        num_examples = job.local.work.num_processed(job.population.num_examples(client_ids)).sum()
        try:
            if kind not in executors:
                executors[kind] = make_executor(job, kind)
            seconds = _time_executor(executors[kind], job.work(client_ids), clock)
        except (DataError, EngineError):
            return {}
        found[f"{kind.value} {size}"] = seconds * size / int(num_examples)
    return found if len(found) > 1 else {}


def _chain(job: TrainingJob) -> Chain:
    if isinstance(job.local, NoisedGradients):
        raise EngineError(
            "each example's gradient is clipped, but it computes only those of batches"
        )
    if find_client_loss(job.local) is not None:
        raise EngineError(_OWN_LOSS)
    model = job.resident_model()
    chain = as_chain(model.module, model.layout)
    if isinstance(chain, NotAChain):
        raise EngineError(chain.reason)
    if job.precision is not Precision.FLOAT32:
        raise EngineError(f"precision {job.precision} needs automatic mixed precision")
    work = job.work(np.asarray([find_readable_client(job.population)]))
    reason = describe_misfit(
        chain, objective=job.objective, features=work.features, labels=work.labels
    )
    if reason is not None:
        raise EngineError(reason)
    return chain


class _Speed(NamedTuple):
    """Result of a probe: seconds per client, one at a time and in a block."""

    sequential_s: float
    stacked_s: float


def _load_or_probe(job: TrainingJob, clock: Clock, path: Path) -> _Speed:
    """Load the cached result of an earlier probe from ``path``, or run a probe and cache it.

    Raises:
        EngineError: An executor cannot train the clients.
    """
    found = _load_timings(path)
    if found.keys() == set(_Speed._fields):
        return _Speed(**found)
    speed = _probe(job, clock)
    _save_timings(path, speed._asdict())
    return speed


def _load_timings(path: Path) -> dict[str, float]:
    try:
        # A missing or damaged cache only costs another probe.
        return _SECONDS.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}


def _save_timings(path: Path, seconds: Mapping[str, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(seconds))
    except OSError:
        pass  # a read-only home: the next run measures again


def _probe(job: TrainingJob, clock: Clock) -> _Speed:
    size = min(_PROBE_CLIENTS, stacked.choose_block_size(job.params.layout, job.local))
    sequential = make_executor(job, ExecutorKind.SEQUENTIAL)
    in_a_block = make_executor(job, ExecutorKind.VMAP)

    def time_block(client_ids: NDArray[np.int64]) -> _Speed:
        work = job.work(client_ids)
        return _Speed(
            _time_executor(sequential, work, clock), _time_executor(in_a_block, work, clock)
        )

    client_ids, errors = (
        np.arange(min(size, job.population.num_clients)),
        dict[int, BaseException](),
    )
    try:
        return time_block(client_ids)
    except (DataError, EngineError) as error:
        trained = attempts(lambda some: sequential.train(job.work(some)), client_ids, errors)
        # Some clients' data may be bad. The others are enough to compare the executors.
        sound = [places for places, _ in trained]
        if not (sound and errors):  # the failure is not specific to some clients
            raise EngineError(describe_first_line(error)) from error
    return time_block(np.sort(np.concatenate(sound)))


def _time_executor(executor: Executor, work: Work, clock: Clock) -> float:
    """Time an executor: seconds per client, the better of two runs after a warm-up.

    Raises:
        EngineError: The executor cannot train the clients.
    """
    times = []
    for _ in range(_TIMES):
        started_s = clock.now_s()
        try:
            executor.train(work)
        except Exception as error:
            raise EngineError(describe_first_line(error)) from error
        times.append(clock.now_s() - started_s)
    # The minimum, since other processes can only slow a run down.
    return min(times[1:]) / len(work.client_ids)


def _fingerprint(job: TrainingJob) -> str:
    """Hash everything that a probe's result depends on, as a key for cached timings."""
    # Building a model draws its initial weights; the run's own draws must not move.
    with preserve_generator(torch.default_generator):
        model = job.make_model()
    clients = job.population.load(np.asarray([find_readable_client(job.population)]))
    parts = (
        torch.__version__,
        str(job.params.vector.device),
        torch.get_num_threads(),
        job.precision,
        repr(model),
        [each.shape[1:] for each in list_tensors(clients.features)],
        job.params.layout,
        job.local,
        job.objective,
        job.num_together,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
