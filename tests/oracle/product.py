"""Run a configuration through fedlearn, and return what is observable from outside."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.client_state import from_tensors
from fedlearn.algorithms.local import shuffle_positions
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.randomness import Seed
from fedlearn.errors import FedlearnError, NoUpdates
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.training.keyed_dropout import step_keys, step_seed
from fedlearn.training.torch_trainer import TorchTrainer
from tests.oracle.configuration import DEPLOYED, NUM_CLIENTS, NUM_ROUNDS, SESSIONS, Configuration
from tests.oracle.observation import Refusal, Round, Row, Run
from tests.oracle.own_components import (
    Halved,
    InTurn,
    LayerWise,
    Nova,
    OneStep,
    PerStep,
    RootWeighted,
    TrimmedMean,
)
from tests.oracle.recording import Recording
from tests.oracle.reference import client, privacy, server
from tests.oracle.reference.policies import GROUP, POLICIES, num_wanted
from tests.oracle.reference.run import MAX_EXAMPLES, Streams, max_norm
from tests.oracle.workloads import (
    CLASS_WEIGHTS,
    SMOOTHING,
    Examples,
    augment,
    coupled,
    duration_s,
    fails,
    largest_error,
    make_examples,
    make_model,
    smoothed,
    take,
)

BUFFER: Mapping[str, Any] = {"buffer_size": 2, "concurrency": 4}
STALENESS: Mapping[str, Any] = {
    "max_staleness": server.MAX_STALENESS,
    "staleness_weight": "polynomial",
    "staleness_exponent": server.STALENESS_EXPONENT,
    "staleness_hinge": 0,
}
#: Errors with which fedlearn, or Python, refuses arguments.
REFUSALS = (FedlearnError, ValueError, TypeError)


class Interruption(Exception):
    """Raised to stop the simulation, as if its process had been stopped."""


@dataclass
class Silent:
    """A progress display that shows nothing."""

    num_rounds: int = 0

    def start(self, *_: object) -> None:
        """Show nothing."""

    def round(self, *_: object) -> None:
        """Count the rounds."""
        self.num_rounds += 1

    def end(self, *_: object) -> None:
        """Show nothing."""


@dataclass
class ProgressRecorder:
    """A callback that stores the model after each round, and stops the process after some."""

    stops_at: list[int] = field(default_factory=list)
    models: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        """Store the weights, or stop."""
        if self.stops_at and self.stops_at[0] == record.round_num:
            self.stops_at.pop(0)
            raise Interruption
        self.models[record.round_num] = {k: v.clone() for k, v in model.state_dict().items()}


@dataclass(frozen=True)
class Devices:
    """Devices that behave as :mod:`tests.oracle.workloads` defines."""

    configuration: Configuration

    def durations_s(self, work: DeviceRound) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the seconds that each client takes."""
        return np.asarray([self._of(duration_s, each, work) for each in work.client_ids])

    def failures(self, work: DeviceRound) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which clients fail."""
        return np.asarray([self._of(fails, each, work) for each in work.client_ids], np.bool_)

    def _of(self, function: Any, client_id: int, work: DeviceRound) -> Any:
        return function(self.configuration, int(client_id), work.round_num, work.attempt)


def run(c: Configuration) -> Run | Refusal:
    """Run a configuration in the working directory.

    Raises:
        Exception: Any error that is raised after the first round began.
    """
    name = f"run-{os.urandom(6).hex()}"
    silent, watch, recording = Silent(), ProgressRecorder(), Recording(Path(f"noise-of-{name}"))
    structlog.configure(logger_factory=lambda *_: structlog.testing.CapturingLogger())
    if c.interrupted != "no":
        watch.stops_at = [1] if c.interrupted == "after_first" else [0, 2]
    try:
        simulate = partial(_simulation(c), progress=silent, callbacks=[watch])
        with recording.watch(), _clients(c, Path(f"clients-of-{name}")):
            finished = _finish(simulate, watch, name=name)
    except NoUpdates:  # raised after its last round
        finished = _load_record(name)
    except REFUSALS as error:
        began = str(error).startswith("round ") and "no client can be trained" not in str(error)
        if silent.num_rounds or began:
            raise
        return Refusal(type(error).__name__, str(error))
    return replace(_observe(finished, watch), noise=recording.draws())


def streams(c: Configuration) -> Streams:
    """Return the random numbers of a run, derived from its seed as fedlearn does."""
    seed = Seed(c.seed)

    def order(round_num: int, client_id: int, epoch: int, num_examples: int) -> Sequence[int]:
        found = shuffle_positions(
            seed, round_num=round_num, client_id=client_id, epoch=epoch, num_examples=num_examples
        )
        return [int(each) for each in found]

    def key(round_num: int, client_id: int, step: int) -> int:
        of_client = step_seed(seed, round_num=round_num, client_id=client_id)
        if c.own == "trainer":
            of_client = seed.derive("own reads", round_num, client_id)
        return int(step_keys([of_client], step + 1)[0, step])

    return Streams(order, key)


def _finish(simulate: Any, watch: ProgressRecorder, *, name: str) -> fl.Run:
    try:
        finished: fl.Run = simulate(name=name)
    except Interruption:
        while True:
            try:
                return simulate(resume=name)  # type: ignore[no-any-return]
            except Interruption:
                continue
    return finished


def _load_record(name: str) -> fl.Run:
    runs_dir = Path("runs")
    database = Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir)
    return fl.Run(database.run(name))


def _simulation(c: Configuration) -> Any:
    examples = make_examples(c)
    policy, is_usual = POLICIES[c.stragglers], c.stragglers == "wait"
    is_buffered = c.algorithm in ("fedbuff", "fedasync") or c.rounds == "buffered"
    settings: dict[str, Any] = {
        "num_rounds": NUM_ROUNDS,
        "seed": c.seed,
        "cohort": {} if is_buffered else {"num_wanted": num_wanted(c)},
        "evaluation": {
            "every_rounds": c.evaluate_every,
            "clients": {"all": NUM_CLIENTS, "some": 3, "none": 0}[c.evaluated_clients],
            "batch_size": 5,
        },
        "store": {
            "keep_last": NUM_ROUNDS + 1,
            "checkpoint_every_s": 0.0 if c.checkpoints == "every_round" else 1e6,
        },
        "engine": _engine(c),
    }
    if is_buffered:
        settings["stragglers"] = {"max_retries": policy.max_retries}
    else:
        settings["stragglers"] = {
            "over_selection": policy.cohort_size / policy.num_wanted,
            "deadline_s": "none" if math.isinf(policy.deadline_s) else policy.deadline_s,
            # Secure aggregation has its own minimum, which decides what "half" means.
            "min_reports": "half" if is_usual and c.secure != "off" else policy.min_reports,
            "below_minimum": policy.below_minimum,
            "max_retries": policy.max_retries,
        }
    if c.privacy == "banded":
        settings["cohort"] |= {"sampling": "cyclic"}
    if c.rounds == "late":
        settings |= {"late_updates": {"mode": "keep"}, "staleness": dict(STALENESS)}
    settings |= _add_privacy(c)
    return partial(
        fl.simulate,
        partial(make_model, c),
        _data(c, examples),
        _algorithm(c),
        objective=_objective(c),
        **_own_components(c),
        **settings,
    )


def _add_privacy(c: Configuration) -> dict[str, Any]:
    """Return the tables for secure aggregation, privacy and bounds."""
    settings: dict[str, Any] = {}
    if c.secure != "off":
        settings["secure_aggregation"] = {
            "mode": "complete",
            "statistics_norm": client.STATISTICS_NORM,
            "simulate_as": c.secure,
        }
        if c.privacy != "distributed":  # "distributed" has its own clip norm
            settings["secure_aggregation"]["clip_norm"] = client.SECURE_NORM
    if c.privacy != "off":
        settings["privacy"] = {
            "mode": "central" if c.privacy in privacy.CENTRAL else c.privacy,
            "clip_norm": privacy.PRIVATE_NORM,
            "noise_multiplier": privacy.NOISE_MULTIPLIER,
            "target_delta": 0.01,
            "population": f"population-{os.urandom(6).hex()}",
        }
        if c.privacy == "adaptive":
            settings["privacy"] |= {"clip_quantile": privacy.QUANTILE}
        if c.privacy == "banded":
            settings["privacy"]["bands"] = NUM_CLIENTS // GROUP
    if c.bound != "none":
        settings["updates"] = (
            {"max_norm": max_norm(c)} if c.bound == "norm" else {"max_examples": MAX_EXAMPLES}
        )
    return settings


def _own_components(c: Configuration) -> dict[str, Any]:
    """Return the arguments that are user components."""
    extra: dict[str, Any] = {}
    if c.own == "trainer":
        extra["trainer"] = partial(OneStep, make_model(c), c.objective)
    if c.own == "locals":
        extra["local_of"] = partial(_local_of, c)
    if c.sampling == "own":
        extra["sampler"] = InTurn()
    if c.devices != "ideal":
        extra["devices"] = Devices(c)
    if c.metric:
        extra["metrics"] = _measures(c)
    return extra


def _engine(c: Configuration) -> dict[str, Any]:
    if c.place in SESSIONS:
        return {"transport": "memory", "slab_bytes": 1 << 20 if c.slab else 0}
    return {"executor": c.place, "num_workers": c.workers, "block_size": c.block_size}


def _clients(c: Configuration, folder: Path) -> AbstractContextManager[None]:
    """Return a context in which the deployed clients run, if there are any."""
    if c.place not in DEPLOYED:
        return nullcontext()
    from tests.oracle.places import reach_clients  # noqa: PLC0415 (Flower takes seconds)

    return reach_clients(c, partial(_trainer, c), folder)


def _trainer(c: Configuration, client_id: int) -> Any:
    """Return the trainer of a deployed client, as its owner would build it."""
    features, labels = make_examples(c).of(client_id)
    if c.own == "trainer":
        return OneStep(make_model(c), c.objective, features, labels)
    has_dataset = c.source == "dataset"
    dataset = Rows(features, labels, is_augmented=c.augmented)
    return TorchTrainer.of(
        partial(make_model, c),
        *((dataset,) if has_dataset else (features, labels)),
        objective=_objective(c),
        metrics=_measures(c),
        device="cpu",
        local_updates=(LayerWise, PerStep),
        transforms=(Halved,),
    )


def _measures(c: Configuration) -> dict[str, fl.Metric]:
    return {"largest": fl.Metric(largest_error, direction="max")} if c.metric else {}


def _objective(c: Configuration) -> Any:
    return {
        "cross_entropy": fl.CrossEntropy(),
        "ignored": fl.CrossEntropy(),
        "label_smoothing": fl.CrossEntropy(label_smoothing=SMOOTHING),
        "weighted": fl.CrossEntropy(class_weights=CLASS_WEIGHTS, label_smoothing=SMOOTHING),
        "squared_error": fl.MeanSquaredError(),
        "binary": fl.BinaryCrossEntropy(),
        "smoothed": fl.CustomLoss(smoothed),
        "coupled": fl.CustomLoss(coupled, per_example=False),
    }[c.objective]


def _data(c: Configuration, examples: Examples) -> fl.FederatedData:
    def plain(features: Any) -> Any:
        if isinstance(features, dict):
            return {name: value.numpy() for name, value in features.items()}
        return features.numpy()

    x, y = plain(examples.features), examples.labels.numpy()
    x_test, y_test = plain(examples.test_features), examples.test_labels.numpy()
    if c.source == "arrays":
        return fl.from_arrays(
            x, y, groups=examples.owners, partition=fl.Natural(), test=(x_test, y_test), seed=0
        )
    if c.source == "npz":
        return _from_npz(x, y, x_test, y_test, examples.owners)
    train = Rows(examples.features, examples.labels, is_augmented=c.augmented)
    return fl.from_dataset(
        train,
        labels=y,
        partition=ByOwner(tuple(examples.owners.tolist())),
        test=Rows(examples.test_features, examples.test_labels, is_augmented=c.augmented),
        seed=0,
    )


def _from_npz(x: Any, y: Any, x_test: Any, y_test: Any, owners: Any) -> fl.FederatedData:
    path = Path(f"examples-{os.urandom(6).hex()}.npz")
    if isinstance(x, dict):
        arrays = {**x, **{f"test_{name}": value for name, value in x_test.items()}}
        names: Any = {name: name for name in x}
        test_names: Any = {name: f"test_{name}" for name in x}
    else:
        arrays, names, test_names = {"x": x, "test_x": x_test}, "x", "test_x"
    np.savez(path, **arrays, labels=y, test_labels=y_test, owners=owners)
    return fl.from_npz(
        path,
        features=names,
        labels="labels",
        groups="owners",
        test=(test_names, "test_labels"),
        partition=fl.Natural(),
        seed=0,
    )


@dataclass(frozen=True)
class Rows:
    """A torch ``Dataset``."""

    features: Any
    labels: Tensor
    is_augmented: bool

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        row = take(self.features, index)
        return augment(row) if self.is_augmented else row, self.labels[index]


@dataclass(frozen=True)
class ByOwner:
    """A partition given by a list of owners."""

    owners: tuple[int, ...]

    def split(self, labels: Any, *, seed: Seed) -> Any:
        """Return each client's rows, which are contiguous."""
        from fedlearn.simulation.partition import Partition  # noqa: PLC0415

        sizes = np.bincount(self.owners, minlength=NUM_CLIENTS)
        return Partition(np.arange(len(self.owners)), np.cumsum([0, *sizes]))


def _local(c: Configuration) -> fl.LocalUpdate:
    work: dict[str, Any] = {
        "epochs": c.epochs,
        "batch_size": c.batch_size or None,
        "shuffle": c.shuffle,
        "drop_last": c.drop_last,
    }
    optimizer, is_kept = c.optimizer.removesuffix("_kept"), c.optimizer.endswith("_kept")
    local: fl.LocalUpdate
    if c.own == "trainer" and not c.gradient_clip and c.schedule == "none":
        return fl.OwnTraining()
    if c.own in ("update", "strategy"):
        kind = PerStep if c.own == "strategy" else LayerWise
        local = kind(**work, learning_rate=client.ETA)
    elif optimizer in ("sgd", "momentum"):
        local = fl.LocalSgd(
            **work,
            learning_rate=client.ETA,
            momentum=client.BETA if optimizer == "momentum" else 0.0,
            weight_decay=c.weight_decay,
            keep_momentum=is_kept,
        )
    else:
        local = LocalAdam(
            **work,
            learning_rate=client.ADAM_ETA,
            beta_1=client.BETA_1,
            beta_2=client.BETA_2,
            epsilon=client.EPSILON,
            weight_decay=c.weight_decay,
            decoupled=optimizer == "adamw",
            keep_moments=is_kept,
        )
    if c.gradient_clip:
        local = fl.ClippedGradients(inner=local, gradient_clip_norm=c.gradient_clip)
    schedule: dict[str, dict[str, Any]] = {
        "decay": {"rate_decay": client.DECAY},
        "cosine": {"cosine_rounds": client.COSINE_ROUNDS},
        "warmup": {"warmup_steps": client.WARMUP_STEPS},
    }
    if c.schedule != "none":
        local = fl.ScheduledRate(inner=local, **schedule[c.schedule])
    return local


def _local_of(c: Configuration, client_id: int) -> fl.LocalUpdate:
    """Let clients with even numbers train for one epoch."""
    algorithm = _algorithm(replace(c, own="none"))
    strategy = getattr(algorithm, "strategy", algorithm)
    if client_id % 2:
        return strategy.local  # type: ignore[no-any-return]
    once = _algorithm(replace(c, own="none", epochs=1))
    return getattr(once, "strategy", once).local  # type: ignore[no-any-return]


def _algorithm(c: Configuration) -> Any:
    local, by_examples = _local(c), c.by_examples
    adaptive: dict[str, Any] = {
        "server_learning_rate": server.ADAPTIVE_ETA,
        "beta_1": server.BETA_1,
        "tau": server.TAU,
        "weight_by_examples": by_examples,
    }
    make: Mapping[str, Any] = {
        "fedavg": lambda: fl.FedAvg(local, weight_by_examples=by_examples),
        "fedsgd": lambda: fl.FedSGD(learning_rate=client.ETA, weight_by_examples=by_examples),
        "fedprox": lambda: fl.FedProx(local, proximal=client.MU, weight_by_examples=by_examples),
        "scaffold": lambda: fl.Scaffold(
            local, num_clients=NUM_CLIENTS, server_learning_rate=server.SERVER_ETA
        ),
        "easgd": lambda: fl.EASGD(local, elasticity=client.RHO, cohort_size=NUM_CLIENTS),
        "fedavgm": lambda: fl.FedAvgM(
            local,
            server_learning_rate=server.SERVER_ETA,
            server_momentum=server.SERVER_BETA,
            weight_by_examples=by_examples,
        ),
        "fedadagrad": lambda: fl.FedAdagrad(local, **adaptive),
        "fedadam": lambda: fl.FedAdam(local, beta_2=server.BETA_2, **adaptive),
        "fedyogi": lambda: fl.FedYogi(local, beta_2=server.BETA_2, **adaptive),
        "median": lambda: fl.FedMedian(local),
        "fedbuff": lambda: fl.FedBuff(local, **BUFFER, **STALENESS, weight_by_examples=by_examples),
        "fedasync": lambda: fl.FedAsync(local, mixing=server.MIXING, concurrency=4, **STALENESS),
    }
    made = make[c.algorithm]()
    strategy = getattr(made, "strategy", made)
    if c.own == "strategy":
        strategy = Nova(local, fl.WeightedMean(by_examples=by_examples))
    if c.own == "aggregation":
        strategy = replace(strategy, aggregation=TrimmedMean())
    if c.own == "weigh":
        strategy = replace(strategy, aggregation=RootWeighted(by_examples=by_examples))
    transforms: list[Any] = []
    if c.update_clip:
        transforms.append(ClippedUpdates(update_clip_norm=c.update_clip))
    if c.own == "transform":
        transforms.append(Halved())
    if transforms:
        strategy = replace(strategy, transforms=tuple(transforms))
    if strategy is not made and strategy is not getattr(made, "strategy", made):
        made = replace(made, strategy=strategy) if isinstance(made, fl.Buffered) else strategy
    if c.rounds == "buffered" and not isinstance(made, fl.Buffered):
        made = fl.Buffered(made, fl.Asynchrony(**BUFFER, **STALENESS))
    return made


def _observe(finished: fl.Run, watch: ProgressRecorder) -> Run:
    saved = {each.round_num: load_file(each.path) for each in finished.stored.checkpoints()}
    rounds = []
    for record in finished.history:
        before, after = saved.get(record.round_num, {}), saved.get(record.round_num + 1, {})
        pending = _select(before, "flight/")
        clients = zip(
            pending.get("client_id", torch.zeros(0)).tolist(),
            pending.get("based_on", torch.zeros(0)).tolist(),
            strict=True,
        )
        rounds.append(
            Round(
                attempt=record.attempt,
                is_aggregated=record.outcome.value == "aggregated",
                rows=[
                    Row(
                        each.client_id, each.status.value, each.num_examples, each.loss, each.reason
                    )
                    for each in record.participations
                ],
                train_loss=record.train_loss,
                # The accountant's figures are not compared.
                metrics={k: v for k, v in record.metrics.items() if k != "epsilon"},
                staleness=dict(record.staleness),
                in_flight={int(each): int(based_on) for each, based_on in clients},
                tensors=watch.models[record.round_num],
                kept=from_tensors(_select(after, "clients/")) if after else {},
                server=_select(after, "server/"),
            )
        )
    return Run(_select(saved[0], "params/"), rounds)


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
