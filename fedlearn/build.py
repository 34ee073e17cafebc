"""From a configuration to objects: the only registry of names."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.asynchronous import Asynchrony, require_asynchronous
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.elastic_averaging import EASGD
from fedlearn.algorithms.extra_settings import ExtraSettings, WithExtra
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.metrics import Measures, Metric, require_name
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.sampling import (
    CohortSampler,
    CyclicSampler,
    PoissonSampler,
    UniformSampler,
)
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Bounded, Strategy, Wrapped
from fedlearn.config.data import NoData
from fedlearn.config.pieces import built
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.training import Loss, MetricSection, Model, PythonModel
from fedlearn.config.tree import Config, EarlyStoppingSection
from fedlearn.core.distribution import Direction, split
from fedlearn.core.features import named
from fedlearn.core.messages import Scalar
from fedlearn.core.randomness import Seed
from fedlearn.door.eligibility import Requirements
from fedlearn.errors import ConfigError
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.parallel.distillation import Distilling
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Task
from fedlearn.privacy.adaptive_clipping import AdaptiveClip
from fedlearn.privacy.banded_matrix import optimal
from fedlearn.privacy.events import CyclicCohorts, FixedCohorts, PoissonCohorts, UserCohorts
from fedlearn.privacy.plan import (
    BandedPlan,
    CentralPlan,
    DistributedPlan,
    ExampleLevelPlan,
    LocalPlan,
    PrivacyPlan,
)
from fedlearn.privacy.secret import ReproducibleStreams, SecretStreams
from fedlearn.rounds.run import EarlyStopping, RoundCallback
from fedlearn.secagg.draw import Draw
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation.behaviour import ClientBehaviour, Instant
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.pooled import PooledExamples, set_aside
from fedlearn.simulation.population import PooledPopulation, Population
from fedlearn.simulation.sources import Examples

PiecesT = TypeVar("PiecesT", bound="Pieces")

#: Of a model at the least: the global one, a client's, and the sum of what clients send.
_COPIES = 3
#: Centralised training: one client that holds all examples and always reports.
_ALONE = StragglerPolicy(
    num_wanted=1,
    over_selection=1.0,
    deadline_s=math.inf,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a run, before they are given workers or a channel, and a store.

    Attributes:
        make_model: Builds the network; called in every process.
        objective: Loss and metrics.
        metrics: Measures of whole sets, by name.
        test: What the model is measured on centrally; ``None``: the coordinator has no data, and
            the clients measure it.
        algorithm: What clients do, how it is combined, what becomes of the model.
        sampler: Who is asked.
        policy: When a round closes.
        config: Everything else: rounds, evaluation, engine, store.
        privacy: What hides each user's taking part; ``None``: nothing does.
        own: Whose examples the coordinator trains on by itself; ``None``: nobody's.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    metrics: Mapping[str, Metric]
    test: Examples | None
    algorithm: Strategy
    sampler: CohortSampler
    policy: StragglerPolicy
    config: Config
    privacy: PrivacyPlan | None = None
    own: Population | None = None

    @property
    def seed(self) -> Seed:
        """The seed of everything random in the run that need not be secret."""
        return Seed(self.config.seed)

    @property
    def directions(self) -> dict[str, Direction]:
        """All measures of the run by name, and which way is better: the clients' own as well."""
        reported = {name: each.direction for name, each in self.config.metrics.items()}
        return Measures(self.objective, self.metrics).directions | reported

    @property
    def num_needed(self) -> int:
        """How many clients a round would have there before it asks: those that it expects."""
        return self.policy.num_asked if self.privacy is None else self.privacy.num_needed

    @property
    def asynchrony(self) -> Asynchrony | None:
        """When the server steps in an asynchronous run; ``None``: when a cohort has reported."""
        return self.config.asynchronous.asynchrony()

    @property
    def late_updates(self) -> LateUpdates | None:
        """What becomes of updates that miss the close of their round; ``None``: dropped."""
        return self.config.late_updates.late_updates()

    @property
    def secure(self) -> SecurePlan | None:
        """What sessions of secure aggregation ask; ``None``: it is off."""
        return secure_plan(self.config, self.policy, self.algorithm)

    def early_stopping(self) -> EarlyStopping:
        """Return when the run stops before its last round, and which model is the best.

        What nothing central measures is watched as the clients' mean.

        Raises:
            ConfigError: Nobody measures what is watched, or it can never reach the target.
        """
        section, evaluated = self.config.early_stopping, self.config.evaluation.num_clients
        central = {} if self.test is None else Measures(self.objective, self.metrics).directions
        of_clients = self.directions if evaluated and not self.config.centralized else {}
        watched = section.metric
        if watched == "auto":
            watched = "accuracy" if "accuracy" in (central or of_clients) else "loss"
        name, part = split(watched)
        if part is None and name not in central:
            part = "mean"
        if self.config.privacy.is_on and part is not None:
            return self._watching_nobody(section)
        measured = central if part is None else of_clients
        if name not in measured:
            spread = [f"clients/{each}_mean" for each in of_clients]
            known = ", ".join(dict.fromkeys([*central, *(spread if central else of_clients)]))
            raise ConfigError(
                f'early_stopping.metric is "{section.metric}", which nobody measures; give one of: '
                f"{known or 'none is measured: raise evaluation.clients'}"
            )
        if name == "accuracy" and section.target is not None and section.target > 1.0:
            raise ConfigError(
                f"early_stopping.target is {section.target}, but an accuracy is at most 1; give a "
                "fraction such as 0.95"
            )
        return built(
            EarlyStopping,
            section,
            metric=name if part is None else f"clients/{name}_{part}",
            direction=measured[name],
        )

    def _watching_nobody(self, section: EarlyStoppingSection) -> EarlyStopping:
        """Return a rule by which no model is the best, where only clients measure models.

        Raises:
            ConfigError: The user asks for one.
        """
        if section.metric != "auto" or section.patience_rounds or section.target is not None:
            raise ConfigError(
                f'early_stopping.metric: "{section.metric}" is measured by the clients, without '
                "noise, and when the run ends, or which model is the best, would tell of them; "
                "leave early_stopping out, or watch what a central test set measures"
            )
        return built(EarlyStopping, section, metric="", direction="min")


@dataclass(frozen=True, kw_only=True)
class Simulation(Pieces):
    """The pieces of a simulated run.

    Attributes:
        test: What the model is measured on centrally.
        population: The clients.
        behaviour: What the devices do.
        make_trainer: Makes clients' trainers where the user brings them; else ``None``.
        callbacks: Called after each round, in this order.
        notes: What was decided why, for the user to read.
    """

    test: Examples
    population: Population
    behaviour: ClientBehaviour
    make_trainer: MakeTrainer | None = None
    callbacks: tuple[RoundCallback, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Deployment(Pieces):
    """The pieces of a deployed run; its seconds are real.

    Attributes:
        requirements: Which clients may be asked.
        draw: Whom a roster lets be asked in a round; ``None``: there is none.
    """

    requirements: Requirements
    draw: Draw | None


def secure_plan(config: Config, policy: StragglerPolicy, strategy: Strategy) -> SecurePlan | None:
    """Return what sessions of secure aggregation ask; ``None``: it is off.

    Raises:
        ConfigError: Nothing satisfies the assumptions, a sum could overflow, or the algorithm needs
            more than the sum.
    """
    section, aggregator = config.secure_aggregation, strategy.aggregation
    if not section.is_on:
        return None
    if _tells_each(strategy):
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", whose terms name one training for all, '
            'but clients are told each what to do; leave local_of out, or set the mode to "off"'
        )
    if not isinstance(aggregator, WeightedMean):
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", but {type(aggregator).__name__} must '
            "see each update, and the coordinator learns their sum alone; aggregate by a weighted "
            'mean, or set the mode to "off"'
        )
    plan = section.plan(
        policy.num_asked,
        min_reports=policy.min_reports,
        by_examples=aggregator.by_examples,
        further=[lane for lane in strategy.lanes if lane is not DELTA],
        noise_multiplier=config.privacy.noise_multiplier if config.privacy.is_distributed else None,
    )
    plan.explain()  # raises where a sum could overflow
    return plan


def roster_draw(config: Config) -> Draw | None:
    """Return whom the roster of a deployment lets be asked; ``None``: it has none.

    Raises:
        DeploymentError: The file is missing, damaged or of a later version.
    """
    section = config.secure_aggregation
    if not section.draws:
        return None
    roster = IdentityRoster.load(Path(section.roster))
    client_ids = roster.clients.keys()
    return Draw(roster=roster.digest, client_ids=client_ids, factor=section.draw_factor)


def _tells_each(strategy: Strategy) -> bool:
    """Return whether clients are told each what to do, whatever is around that."""
    if isinstance(strategy, PerClient):
        return True
    return isinstance(strategy, Wrapped) and _tells_each(strategy.inner)


def deployment(config: Config, *, data_dir: Path) -> Deployment:
    """Return the pieces that ``config`` names for a coordinator.

    Args:
        config: The resolved tree; its devices and engine describe a simulation and count for
            nothing here, but for ``engine.slab_bytes``: replies wait for each other in a
            coordinator as well.
        data_dir: Where data sets lie that the configuration names without a path.

    Raises:
        ConfigError: A factory cannot be imported, or pieces do not fit together.
        DataError: Data are missing.
    """
    if config.centralized:
        raise ConfigError(
            "centralized is true, but a coordinator has no pooled examples; remove it, or run "
            "`fedlearn simulate`"
        )
    config = config.resolved(num_clients=None)
    has_data = not isinstance(config.data, NoData)
    data = config.data.federated(seed=config.seed, data_dir=data_dir) if has_data else None
    pieces = _complete(
        Deployment(
            **_trained(config, data),
            own=_own(config, data),
            test=None if data is None else data.test,
            sampler=config.cohort.build(),
            policy=config.straggler_policy(),
            requirements=built(Requirements, config.coordinator.eligibility),
            draw=roster_draw(config),
            config=config,
        )
    )
    pieces = _asynchronous(_bounded(_distilling(_told(pieces, config.client.extra))))
    for name in config.metrics:
        require_name(name, taken=("loss", *pieces.objective.directions))
    pieces = _deployed_privately(pieces) if config.privacy.is_on else pieces
    if config.secure_aggregation.is_on:
        _require_evaluable(pieces)
    if config.flower.is_foreign:
        _require_nothing_of_clients(pieces.algorithm)
    return pieces


def _require_nothing_of_clients(algorithm: Strategy) -> None:
    """Refuse an algorithm whose clients do more than to train and to return their model."""
    local, own = algorithm.local, OwnTraining()
    if isinstance(local, ExtraSettings):  # which they read in their `config`
        local = local.inner
    asked = {
        "gives clients things of their own to do": isinstance(algorithm, PerClient),
        f"needs the lane {algorithm.lanes[-1].name!r} of clients": len(algorithm.lanes) > 1,
        "changes updates before they leave their clients": bool(algorithm.transforms),
        "says how clients train": local != own,
    }
    problem = next((text for text, is_asked in asked.items() if is_asked), None)
    if problem is not None:
        raise ConfigError(
            f"algorithm.name: {type(algorithm).__name__} {problem}, but flower.client_apps is "
            '"flower", whose ClientApps train as they are written and return their model; take '
            'another algorithm (fedavg, fedadam, ...), or set flower.client_apps to "fedlearn"'
        )


def _require_evaluable(pieces: Deployment) -> None:
    """Check that what clients measure can be had by a sum: one of each measure, over enough.

    Raises:
        ConfigError: It cannot.
    """
    config = pieces.config
    mode, num_clients = config.secure_aggregation.mode, config.evaluation.num_clients
    if num_clients:
        try:
            config.secure_aggregation.evaluation_plan(
                num_clients, measures=tuple(pieces.directions)
            )
        except ConfigError as error:
            raise ConfigError(
                f"evaluation.clients: {num_clients} clients evaluate, and with "
                f'secure_aggregation.mode "{mode}" in a sum, which cannot hold: {error}; raise it, '
                "or set it to 0"
            ) from error
    watched, part = split(pieces.early_stopping().metric)
    if part not in (None, "mean"):
        raise ConfigError(
            f'early_stopping.metric is "{config.early_stopping.metric}", but with '
            f'secure_aggregation.mode "{mode}" the coordinator learns the mean over the clients '
            f'alone; watch "clients/{watched}_mean"'
        )


def _deployed_privately(pieces: Deployment) -> Deployment:
    """Return the pieces with what hides those clients that may enrol."""
    section = pieces.config.privacy
    num_users = section.num_users
    if num_users is None:
        raise ConfigError(
            "privacy.num_users is missing: how many clients may enrol; ε rests on it, so it is "
            "fixed before anybody does"
        )
    if section.is_distributed and section.reproducible:
        raise ConfigError(
            'privacy.reproducible is true, but privacy.mode is "distributed", and the clients of a '
            "deployment draw secret noise; leave it out"
        )
    drawn_alone = isinstance(pieces.sampler, PoissonSampler | CyclicSampler)
    if section.mode == "central" and not drawn_alone:
        raise ConfigError(
            f'cohort.sampling is "{pieces.config.cohort.sampling}", but clients come and go, and '
            "of few that are there each would be asked more often than is accounted for; set it to "
            '"poisson", by whose coins who else is there does not matter, or to "cyclic", with '
            "privacy.bands"
        )
    if section.population == "auto":
        section = section.model_copy(update={"population": "enrolled"})
    config = pieces.config.model_copy(update={"privacy": section})
    return _complete(_private(replace(pieces, config=config), num_users))


def simulation(
    config: Config,
    *,
    data_dir: Path,
    of_clients: Callable[[Population], Population] | None = None,
    of_algorithm: Callable[[Strategy], Strategy] | None = None,
) -> Simulation:
    """Return the pieces that ``config`` names for a simulation.

    Args:
        config: The resolved tree.
        data_dir: Where data sets lie that the configuration names without a path.
        of_clients: Returns other clients in the place of those that the configuration names.
        of_algorithm: Likewise the algorithm.

    Raises:
        ConfigError: A factory cannot be imported, or pieces do not fit together.
        DataError: Data are missing or cannot be trained on.
    """
    data = config.data.federated(seed=config.seed, data_dir=data_dir)
    if of_clients is not None:
        data = replace(data, population=of_clients(data.population))
    for name, section in config.metrics.items():
        if section.factory is None:
            raise ConfigError(
                f"metrics.{name}: there is no factory, and simulated clients measure nothing of "
                f"their own; set metrics.{name}.factory"
            )
    trained = _trained(config, data)
    if of_algorithm is not None:
        trained["algorithm"] = of_algorithm(trained["algorithm"])
    return around(
        config,
        **trained,
        data=data,
        data_dir=data_dir,
        make_trainer=config.client.make_trainer(),
        extra=config.client.extra,
    )


class _Trained(TypedDict):
    make_model: Callable[[], nn.Module]
    objective: Objective
    metrics: Mapping[str, Metric]
    algorithm: Strategy


def _trained(config: Config, data: FederatedData | None) -> _Trained:
    """Return what is trained, and how, as arguments of :class:`Pieces`."""
    if data is not None:
        _require_fitting(config.loss, data.test)
    return {
        "make_model": model_factory(config, data),
        "objective": config.loss.build(),
        "metrics": metrics(config.metrics),
        "algorithm": algorithm(config),
    }


def _complete(pieces: PiecesT) -> PiecesT:
    """Return ``pieces`` if secure aggregation holds with them, and they fit together."""
    _ = pieces.secure, pieces.early_stopping()  # each raises otherwise
    _require_small_cohorts(pieces.algorithm, pieces.policy)
    return pieces


def _require_small_cohorts(strategy: Strategy, policy: StragglerPolicy) -> None:
    """Refuse rounds of more reports than an elastic force is stable with."""
    while isinstance(strategy, Wrapped):
        strategy = strategy.inner
    if isinstance(strategy, EASGD) and policy.num_wanted > strategy.cohort_size:
        raise ConfigError(
            f"algorithm.cohort_size is {strategy.cohort_size}, but a round takes "
            f"{policy.num_wanted} reports; raise it to that, or lower cohort.num_wanted"
        )


def around(
    config: Config,
    *,
    make_model: Callable[[], nn.Module],
    objective: Objective,
    data: FederatedData,
    algorithm: Strategy,
    data_dir: Path,
    make_trainer: MakeTrainer | None = None,
    metrics: Mapping[str, Metric] | None = None,
    extra: Mapping[str, Scalar] = MappingProxyType({}),
) -> Simulation:
    """Return a simulation of a given model, data and algorithm; ``config`` says the rest.

    Trainers are told ``extra``.

    Raises:
        ConfigError: More clients are asked in a round than there are, values contradict each other
            once "auto" is a number, nothing of the name of what is watched is measured, the
            objective does not declare its measures, secure aggregation cannot hold, or nobody would
            act on ``extra``.
        DataError: Bandwidth traces are missing.
    """
    secure = config.secure_aggregation
    needs_sessions = secure.is_on and secure.simulate_as == "protocol"
    if needs_sessions and config.engine.transport == "engine":
        raise ConfigError(
            f'secure_aggregation.mode is "{secure.mode}", but engine.transport is "engine", which '
            'has no client sessions; set engine.transport to "memory" to run the protocol itself, '
            'or secure_aggregation.simulate_as to "modular_sum" to round alike without masks'
        )
    own = None
    if config.coordinator.training.is_on and not config.coordinator.training.files:
        data, own = _apart(config, data)
    population = data.population.num_clients
    config = config.resolved(num_clients=population)
    pooled = config.centralized
    policy = _ALONE if pooled else config.straggler_policy()
    if policy.num_asked > population:
        raise ConfigError(
            f"cohort.num_wanted: {policy.num_asked} clients are asked in a round, but the data "
            f"have {population}; lower cohort.num_wanted or stragglers.over_selection"
        )
    if (evaluated := config.evaluation.num_clients) > population and not pooled:
        raise ConfigError(
            f"evaluation.clients: {evaluated} clients evaluate, but the data have {population}; "
            "lower it, or leave it out: then as many do as there are, 50 at most"
        )
    asynchrony = config.asynchronous.asynchrony()
    if asynchrony is not None and asynchrony.concurrency > population:
        raise ConfigError(
            f"asynchronous.concurrency: {asynchrony.concurrency} clients are in flight at a time, "
            f"but the data have {population}; lower it"
        )
    pieces = Simulation(
        make_model=make_model,
        objective=objective,
        metrics={} if metrics is None else metrics,
        test=data.test,
        population=PooledPopulation(data.population) if pooled else data.population,
        algorithm=algorithm,
        sampler=UniformSampler() if pooled else config.cohort.build(),
        policy=policy,
        behaviour=Instant() if pooled else config.devices.modelled(data_dir),
        config=config,
        make_trainer=make_trainer,
        own=own,
    )
    pieces = _asynchronous(_bounded(_distilling(_told(pieces, extra))))
    if extra and make_trainer is None:
        raise ConfigError(
            f"client.extra tells {', '.join(sorted(extra))}, but the clients of this simulation "
            "have fedlearn's own trainer, which acts on none of it; give them yours "
            "(client.trainer, fl.simulate(trainer=...)), or leave it out"
        )
    if not config.privacy.is_on:
        return _complete(pieces)
    if config.privacy.num_users not in (None, population):
        raise ConfigError(
            f"privacy.num_users is {config.privacy.num_users}, but the data have {population} "
            "clients; leave it out"
        )
    return _complete(_private(pieces, population))


def alone(config: Config, *, data_dir: Path) -> Pieces:
    """Return the pieces of the coordinator's own training without a run: nobody is asked.

    Args:
        config: The resolved tree; what is of rounds and clients counts for nothing.
        data_dir: Where data sets lie that the configuration names without a path.

    Raises:
        ConfigError: There are no data, or pieces do not fit together.
        DataError: Data are missing or cannot be trained on.
    """
    has_data = not isinstance(config.data, NoData)
    data = config.data.federated(seed=config.seed, data_dir=data_dir) if has_data else None
    return Pieces(
        **_trained(config, data),
        test=None if data is None else data.test,
        sampler=UniformSampler(),
        policy=_ALONE,
        config=config,
        own=_own(config, data, is_needed=True),
    )


def _bounded(pieces: PiecesT) -> PiecesT:
    """Return the pieces with the bounds of updates that the configuration asks for, if any."""
    bounds = built(UpdateBounds, pieces.config.updates)
    if bounds == GENEROUS:
        return pieces
    return replace(pieces, algorithm=Bounded(pieces.algorithm, bounds))


def _asynchronous(pieces: PiecesT) -> PiecesT:
    """Return ``pieces`` if updates of earlier models may be in their rounds, or are not."""
    modes = {"asynchronous": pieces.asynchrony, "late_updates": pieces.late_updates}
    for table, rule in modes.items():
        if rule is not None:
            try:
                require_asynchronous(pieces.algorithm)
            except ValueError as error:
                raise ConfigError(f"{table}.mode is on, but {error}") from error
    return pieces


def _told(pieces: PiecesT, extra: Mapping[str, Scalar]) -> PiecesT:
    """Return the pieces with free-form settings for the clients' trainers, if there are any.

    Raises:
        ConfigError: A name or a value cannot be told.
    """
    if not extra:
        return pieces
    algorithm = WithExtra.around(pieces.algorithm, extra)
    try:
        _ = algorithm.local
    except ValueError as error:
        raise ConfigError(f"client.{error}") from error
    return replace(pieces, algorithm=algorithm)


def _distilling(pieces: PiecesT) -> PiecesT:
    """Return the pieces with rounds that end in distillation, if they shall."""
    num_steps = pieces.config.coordinator.training.distil_steps
    if not num_steps:
        return pieces
    algorithm = Distilling(pieces.algorithm, server_task(pieces), num_steps)
    return replace(pieces, algorithm=algorithm)


def server_task(pieces: Pieces) -> Task:
    """Return what the coordinator trains by itself.

    Raises:
        ConfigError: It does not, or batches cannot be cut as they shall.
    """
    section, seed = pieces.config.coordinator.training, pieces.seed.derive("server training")
    order = seed.derive("order")
    if section.files:
        stream = section.stream(order)
    else:
        assert pieces.own is not None  # only where it trains
        stream = Shuffled(PooledExamples(pieces.own, torch.device("cpu")), seed=order)
    return Task(
        make_model=pieces.make_model,
        objective=pieces.objective,
        stream=stream,
        plan=section.plan(seed),
        num_readers=section.num_readers,
    )


def _own(
    config: Config, data: FederatedData | None, *, is_needed: bool = False
) -> Population | None:
    """Return whose examples the coordinator has, where it simulates no clients."""
    section = config.coordinator.training
    if section.files or not (section.is_on or is_needed):
        return None
    if data is None:
        raise ConfigError(
            'the coordinator trains by itself (coordinator.training), but data.source is "none"; '
            "name its data in the table data, or in coordinator.training.files"
        )
    own, _ = set_aside(data.population, share=section.share, seed=_aside(config))
    return own


def _apart(config: Config, data: FederatedData) -> tuple[FederatedData, Population]:
    """Return the data of the clients that are simulated, and whose the coordinator has."""
    section = config.coordinator.training
    aside, others = set_aside(data.population, share=section.share, seed=_aside(config))
    if not others.num_clients:
        raise ConfigError(
            f"coordinator.training.share is {section.share}, which leaves none of "
            f"{data.population.num_clients} clients to simulate; lower it (0.02, say), or name "
            "the coordinator's own data in coordinator.training.files"
        )
    return replace(data, population=others), aside


def _aside(config: Config) -> Seed:
    return Seed(config.seed).derive("set aside")


def _private(pieces: PiecesT, num_users: int) -> PiecesT:
    """Return the pieces with a bounded part of each of so many users, and a noise multiplier.

    Raises:
        ConfigError: Something in it would make the guarantee false.
    """
    section, policy = pieces.config.privacy, pieces.policy
    pieces.early_stopping()  # raises where it would tell of clients
    assert section.clip_norm is not None  # the configuration makes sure
    assert section.target_delta is not None
    if section.target_delta * num_users >= 1.0:
        raise ConfigError(
            f"privacy.target_delta is {section.target_delta:g}, which would allow to publish all "
            f"about one of the {num_users} users; give a number well below {1 / num_users:.2g}"
        )
    try:
        plan = _privacy_plan(pieces, num_users)
        policy, _ = plan.policy(policy), plan.strategy(pieces.algorithm)
    except ValueError as error:
        raise ConfigError(f'privacy.mode is "{section.mode}": {error}') from error
    section = _calibrated(pieces.config, plan)  # takes seconds: what is wrong is told first
    assert section.noise_multiplier is not None
    plan = replace(plan, noise_multiplier=section.noise_multiplier)
    made = replace(
        pieces,
        config=pieces.config.model_copy(update={"privacy": section}),
        privacy=plan,
        policy=policy,
        sampler=plan.sampler,
        algorithm=plan.strategy(pieces.algorithm),
    )
    _ = made.secure  # raises where there is no room for the noise
    return made


def _privacy_plan(pieces: Pieces, num_users: int) -> PrivacyPlan:
    """Return what hides one of so many users, with noise of 1 where it is to be found yet.

    Raises:
        ValueError: Something in it would make the guarantee false.
    """
    section, policy, cohorts = pieces.config.privacy, pieces.policy, _cohorts(pieces, num_users)
    assert section.clip_norm is not None  # the configuration makes sure
    common: dict[str, Any] = {  # Any: of several types
        "cohorts": cohorts,
        "clip_norm": section.clip_norm,
        "noise_multiplier": section.noise_multiplier or 1.0,
        "num_wanted": policy.num_wanted,
        "streams": ReproducibleStreams(pieces.seed) if section.reproducible else SecretStreams(),
    }
    if section.is_distributed:
        parameters = pieces.config.secure_aggregation.parameters(policy.num_asked)
        return DistributedPlan(**common, least=max(policy.min_reports, parameters.min_survivors))
    if section.mode == "local":
        return LocalPlan(**common)
    if section.bands is not None:
        assert isinstance(cohorts, CyclicCohorts)  # likewise
        matrix = optimal(bands=section.bands, num_rounds=pieces.config.num_rounds)
        mean_size = round(num_users / cohorts.num_groups)
        return BandedPlan(**common | {"num_wanted": mean_size}, matrix=matrix)
    if section.mode == "example":
        if not pieces.objective.per_example:
            raise ValueError(
                "the loss couples the examples of a batch, so that none has a gradient of its own "
                "to clip; take a loss that is a mean over examples"
            )
        return ExampleLevelPlan(**common, epochs=pieces.algorithm.local.work.epochs)
    if section.clip_quantile is None:
        return CentralPlan(**common)
    rate = section.clip_learning_rate
    adaptive = AdaptiveClip(quantile=section.clip_quantile, learning_rate=rate)
    return CentralPlan(**common, adaptive=adaptive)


def _cohorts(pieces: Pieces, num_users: int) -> UserCohorts:
    """Return how users are drawn, as is accounted for; raises ValueError if there are too few.

    Of the clients that are there, asking some does not make it less likely that one is asked; nor
    is anybody hidden by it from who sees single updates.
    """
    policy, mode = pieces.policy, pieces.config.privacy.mode
    if pieces.asynchrony is not None:  # who is fast takes part in every round
        return FixedCohorts(num_users, num_users)
    is_poisson = isinstance(pieces.sampler, PoissonSampler)
    is_fixed = mode == "distributed" or (mode == "example" and not is_poisson)
    if mode == "local" or (isinstance(pieces, Deployment) and is_fixed):
        if policy.num_asked > num_users:
            raise ValueError(
                f"privacy.num_users is {num_users}, but {policy.num_asked} clients are asked in a "
                "round; raise it, or lower cohort.num_wanted or stragglers.over_selection"
            )
        return FixedCohorts(num_users, num_users)
    if isinstance(pieces.sampler, CyclicSampler):
        num_groups = max(1, num_users // policy.num_wanted)
        # The ids of clients that may enrol have gaps where others were revoked.
        even = -(-num_users // num_groups)
        largest = num_users if isinstance(pieces, Deployment) else even
        return CyclicCohorts(num_users, policy.num_wanted, largest)
    if not isinstance(pieces.sampler, PoissonSampler):
        return FixedCohorts(num_users, policy.num_asked)
    largest = math.ceil(pieces.sampler.cap * policy.num_wanted)
    return PoissonCohorts(num_users, policy.num_wanted, min(largest, num_users))


def _calibrated(config: Config, plan: PrivacyPlan) -> PrivacySection:
    """Return the section with a noise multiplier; without a given one, the least that is enough.

    Raises:
        ConfigError: No noise is.
    """
    section = config.privacy
    if section.noise_multiplier is not None:
        return section
    from fedlearn.privacy.accounting import calibrated  # noqa: PLC0415 (takes a second)

    assert section.epsilon is not None  # the configuration makes sure that one of them is given
    assert section.target_delta is not None
    multiplier = calibrated(
        plan.accounted,
        epsilon=section.epsilon,
        target_delta=section.target_delta,
        num_rounds=config.num_rounds,
    )
    each = multiplier * math.sqrt(plan.num_releases)
    return section.model_copy(update={"noise_multiplier": each})


def model_factory(config: Config, data: FederatedData | None) -> Callable[[], nn.Module]:
    """Return a function that builds the network, shaped for ``data``, if there are any.

    Raises:
        ConfigError: It cannot take the data, or a factory cannot be imported or called.
    """
    model, shaped = config.model, dict[str, object]()
    if not isinstance(model, PythonModel):
        assert data is not None  # the configuration requires a model of the user's without data
        _require_float_features(model, data.test)
        outputs = _num_outputs(config.loss, data.test)
        shaped = {"feature_shape": data.feature_shape, "num_outputs": outputs}
    made: Callable[[], nn.Module] = model.build(**shaped)
    if shaped:
        _require_memory(made, model)
    return made


def _require_memory(make_model: Callable[[], nn.Module], model: Model) -> None:
    """Refuse a model that this machine cannot hold, before it is told so by the kernel."""
    with torch.device("meta"):  # shapes without memory
        parameters = list(make_model().parameters())
    needed = _COPIES * sum(each.nbytes for each in parameters)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        largest = max(parameters, key=torch.Tensor.numel)
        size = sum(each.numel() for each in parameters)
        raise ConfigError(
            f"model: it would have {size:.3g} parameters, {list(largest.shape)} in the largest "
            f"layer, and {_COPIES} copies of them take {needed / 2**30:.3g} GiB, but this machine "
            f"has {there / 2**30:.3g}; make it smaller (model.kind is {model.kind!r}), or correct "
            "the labels: it has an output for each class up to the largest"
        )


def _require_float_features(model: Model, test: Examples) -> None:
    inputs, remedy = named(test.features), '(model.kind = "python")'
    if not isinstance(test.features, Tensor):
        raise ConfigError(
            f'model.kind: "{model.kind}" takes one tensor, but the features are '
            f"{', '.join(inputs)}; bring a model whose forward takes them {remedy}"
        )
    if not test.features.is_floating_point():
        raise ConfigError(
            f'model.kind: "{model.kind}" computes with floats, but the features are '
            f"{test.features.dtype}; make them floats, or bring a model that takes integers "
            f"{remedy}"
        )


def _num_outputs(loss: Loss, test: Examples) -> int:
    """Return how many outputs a network has an example."""
    values = test.labels.shape[1:].numel()
    if loss.kind in ("bce_with_logits", "mse") or test.num_classes is None:
        return values
    if values > 1:
        raise ConfigError(
            f"model.kind: the networks that come with fedlearn classify an example as a whole, "
            f"but its labels have shape {list(test.labels.shape[1:])}; bring a model of your own "
            '(model.kind = "python")'
        )
    return test.num_classes


def _require_fitting(loss: Loss, test: Examples) -> None:
    """Refuse a loss that these labels have no meaning for."""
    if loss.kind == "cross_entropy" and test.num_classes is None:
        raise ConfigError(
            f'loss.kind: "cross_entropy" needs classes, but the labels are {test.labels.dtype}; '
            'make them integers, or use "mse"'
        )
    if loss.kind == "bce_with_logits":
        _require_binary(test)


def _require_binary(test: Examples) -> None:
    low, high = (float(extreme) for extreme in test.labels.aminmax())
    largest = high if test.num_classes is None else test.num_classes - 1  # in training too
    if test.labels.shape[1:].numel() != 1 or low < 0 or largest > 1:
        raise ConfigError(
            'loss.kind: "bce_with_logits" needs one label an example in 0..1, but labels have '
            f"shape {list(test.labels.shape[1:])} and lie in {low:g}..{largest:g}; "
            'use "cross_entropy" for classes or "mse" for numbers'
        )


def metrics(sections: Mapping[str, MetricSection]) -> dict[str, Metric]:
    """Return the measures of whole sets that have a factory, by name.

    Raises:
        ConfigError: A factory cannot be imported or called, or does not return a metric.
    """
    return {name: each.metric(name) for name, each in sections.items() if each.factory is not None}


def algorithm(config: Config) -> Strategy:
    """Return the algorithm with its local update.

    Raises:
        ConfigError: The pieces do not fit together, or a strategy of the user's own cannot be
            imported or lacks something.
    """
    try:
        return config.algorithm.strategy(config.client.local_update())
    except ValueError as error:
        raise ConfigError(f'algorithm.name is "{config.algorithm.name}": {error}') from error
