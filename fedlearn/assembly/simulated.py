"""Builds the components of a simulation from its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import nn

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.local_parts import find_local_names
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.query import QueryStrategy
from fedlearn.algorithms.round_settings import RoundSettings
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.strategy import Strategy
from fedlearn.assembly.components import ALONE, Simulation
from fedlearn.assembly.private import add_privacy
from fedlearn.assembly.root_training import add_root_training
from fedlearn.assembly.server_training import split_data
from fedlearn.assembly.training import build_training, give_bounds
from fedlearn.assembly.wrappers import add_wrappers, validate_components
from fedlearn.client.policy import SecureAggregationPolicy
from fedlearn.config.tree import Config
from fedlearn.core.messages import Scalar
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, DataError
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.attacked import Attacked, draw_attackers, poison_population
from fedlearn.simulation.behavior import ClientBehavior, Instant
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.held_out import hold_out
from fedlearn.simulation.population import PooledPopulation, Population
from fedlearn.training.query_trainer import QueryTrainer


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of an experiment that are Python objects; the configuration has the rest.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics.
        data: Clients and test set.
        algorithm: Local training, aggregation and the server step.
        metrics: Metrics that are computed over whole sets, by name.
        make_trainer: Makes a client's trainer; ``None``: fedlearn's own.
        extra: Free-form settings that are broadcast to every trainer.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
        sampler: Draws the clients of a round; ``None``: as the configuration says.
        devices: How long devices take and which of them fail; ``None``: as the configuration says.
        callbacks: Called after each round, in this order.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    data: FederatedData
    algorithm: Strategy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    make_trainer: MakeTrainer | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    by_round: RoundSettings | None = None
    sampler: Sampler | None = None
    devices: ClientBehavior | None = None
    callbacks: tuple[RoundCallback, ...] = ()


def build_simulation(
    config: Config,
    *,
    data_dir: Path,
    of_clients: Callable[[Population], Population] | None = None,
    of_algorithm: Callable[[Strategy], Strategy] | None = None,
) -> Simulation:
    """Build the components of a simulation from its configuration.

    Args:
        config: The resolved configuration.
        data_dir: Directory of data sets that the configuration names without a path.
        of_clients: Receives the configured clients, and returns those to simulate instead.
        of_algorithm: The same for the algorithm.

    Raises:
        ConfigError: A factory cannot be imported, or the components do not fit together.
        DataError: Data are missing or cannot be trained on.
    """
    data = config.data.load_clients(seed=config.seed, data_dir=data_dir)
    if of_clients is not None:
        # Tests of each client are of the configured clients.
        data = replace(
            data,
            test=data.stored_test,
            population=of_clients(data.population),
            client_tests=None,
        )
    for name, section in config.metrics.items():
        if section.factory is None:
            raise ConfigError(
                f"metrics.{name}: there is no factory, and simulated clients measure nothing of "
                f"their own; set metrics.{name}.factory"
            )
    experiment = Experiment(
        **build_training(config, data),
        data=data,
        make_trainer=config.client.make_trainer(),
        extra=config.client.extra,
        by_round=config.client.settings_by_round(),
        callbacks=config.round_callbacks(),
    )
    if of_algorithm is not None:
        experiment = replace(experiment, algorithm=of_algorithm(experiment.algorithm))
    return build_experiment(config, experiment, data_dir=data_dir)


def build_experiment(config: Config, experiment: Experiment, *, data_dir: Path) -> Simulation:
    """Build the components of a simulation from Python objects and ``config``.

    Raises:
        ConfigError: A round asks more clients than there are, values contradict each other once
            "auto" is resolved, the watched metric is not measured, the objective does not declare
            its metrics, secure aggregation cannot hold, or no trainer acts on ``extra``.
        DataError: Bandwidth traces are missing, or a training has no test set.
    """
    secure = config.secure_aggregation
    needs_sessions = secure.is_on and secure.simulate_as == "protocol"
    if needs_sessions and config.engine.transport == "engine":
        raise ConfigError(
            f'secure_aggregation.mode is "{secure.mode}", but engine.transport is "engine", which '
            'has no client sessions; set engine.transport to "memory" to run the protocol itself, '
            'or secure_aggregation.simulate_as to "modular_sum" to round alike without masks'
        )
    data, own = experiment.data, None
    _require_test(config, data)
    _require_known_examples(config, data)
    if config.coordinator.training.is_on and not config.coordinator.training.files:
        data, own = split_data(config, data)
    population = data.population.num_clients
    # After the coordinator's clients are set aside: "auto" depends on how many are left.
    config = config.resolve(num_clients=population)
    data = _hold_out_tests(config, data)
    _require_trainers_without_tests(config, experiment, data)
    config, clients = _place_attackers(config, data.population)
    pooled = config.centralized
    _require_no_local_parts(experiment.algorithm, pooled=pooled)
    policy = ALONE if pooled else config.straggler_policy()
    if (asynchrony := config.asynchrony()) is not None:
        _require_enough_clients(population, asynchrony)
    if policy.cohort_size > population:
        raise ConfigError(
            f"cohort.num_wanted: {policy.cohort_size} clients are asked in a round, but the data "
            f"have {population}; lower cohort.num_wanted or stragglers.over_selection"
        )
    if (evaluated := config.evaluation.num_clients) > population:
        raise ConfigError(
            f"evaluation.clients: {evaluated} clients evaluate, but the data have {population}; "
            "lower it, or leave it out"
        )
    devices = experiment.devices
    if devices is None and not pooled:
        devices = config.devices.build_behavior(data.population, data_dir=data_dir)
    components = Simulation(
        make_model=ModelFactory.of(experiment.make_model),
        objective=experiment.objective,
        metrics=experiment.metrics,
        test=data.stored_test,
        population=PooledPopulation(clients) if pooled else clients,
        client_tests=data.client_tests,
        algorithm=(algorithm := give_bounds(experiment.algorithm, config)),
        sampler=experiment.sampler or (UniformSampler() if pooled else config.cohort.build()),
        policy=policy,
        behavior=Instant() if devices is None else devices,
        config=config,
        make_trainer=_query_trainers(algorithm) or experiment.make_trainer,
        own=own,
        by_round=experiment.by_round,
        callbacks=experiment.callbacks,
    )
    components = add_root_training(
        add_wrappers(components, experiment.extra),
        data.population,  # the clean one
        make_trainer=experiment.make_trainer,
    )
    components = _add_attack(components)
    by_round = experiment.by_round
    # The first round's names stand for those of all rounds.
    names = {*experiment.extra, *({} if by_round is None else split_settings(by_round(0))[1])}
    if names and experiment.make_trainer is None:
        raise ConfigError(
            f"client.extra has {', '.join(sorted(names))}, but the clients of this simulation "
            "have fedlearn's own trainer, which acts on none of it; give them yours "
            "(client.trainer, fl.simulate(trainer=...)), or leave it out"
        )
    if not config.privacy.is_on:
        return _require_accepted_clip(validate_components(components))
    if config.privacy.num_users not in (None, population):
        raise ConfigError(
            f"privacy.num_users is {config.privacy.num_users}, but the data have {population} "
            "clients; leave it out"
        )
    return _require_accepted_clip(validate_components(add_privacy(components, population)))


def _query_trainers(algorithm: Strategy) -> MakeTrainer | None:
    """Return the factory of the clients' trainers if the algorithm is a query; else ``None``."""
    if not isinstance(algorithm, QueryStrategy):
        return None
    return partial(QueryTrainer, queries=(type(algorithm.query),))


def _require_test(config: Config, data: FederatedData) -> None:
    """Check that there is a test set to measure a model on.

    Raises:
        DataError: There is a model, but no test set.
    """
    if config.has_model and not data.has_test:
        raise DataError(
            "the data have no test set, on which the model is measured; give test= or the share to "
            "hold out, such as test_fraction=0.2, where the data are made (fl.from_arrays and so "
            "on): only queries and statistics need none"
        )


def _hold_out_tests(config: Config, data: FederatedData) -> FederatedData:
    """Let each client hold out a share of its examples, if the configuration says so.

    Raises:
        ConfigError: The clients have tests already.
        DataError: A client cannot hold any out.
    """
    fraction = config.evaluation.client_test_fraction
    if fraction is None:
        return data
    if data.client_tests is not None:
        raise ConfigError(
            f"evaluation.client_test_fraction is {fraction}, but the data have tests of each "
            "client; remove one of the two"
        )
    seed = Seed(config.seed).derive("client tests")
    train, tests = hold_out(data.population, fraction=fraction, seed=seed)
    return replace(data, test=data.stored_test, population=train, client_tests=tests)


def _require_trainers_without_tests(
    config: Config, experiment: Experiment, data: FederatedData
) -> None:
    """Refuse tests of each client where trainers of the user's own evaluate, which have none."""
    secure = config.secure_aggregation
    has_sessions = config.engine.transport == "memory" or (
        secure.is_on and secure.simulate_as == "protocol"
    )
    if config.centralized:
        return  # all clients train as one, and are evaluated outside sessions
    if has_sessions and experiment.make_trainer is not None and data.client_tests is not None:
        raise ConfigError(
            "clients evaluate by their own trainers in sessions, but the data have tests of each "
            'client; let the trainers hold out examples, or set engine.transport to "engine"'
        )


def _require_known_examples(config: Config, data: FederatedData) -> None:
    """Refuse privacy where examples are changed in a way that its ledger cannot know.

    Raises:
        ConfigError: Features are scaled by statistics without noise, or the ledger is found by
            their values, which are shifted.
    """
    privacy = config.privacy
    if privacy.is_on and data.feature_scaling is not None:
        raise ConfigError(
            f'privacy.mode is "{privacy.mode}", but the features are standardized by the mean and '
            "standard deviation of all clients, which have no noise; leave standardize out, and "
            "scale the columns by bounds that are known without the data"
        )
    is_found = privacy.population == "auto" and privacy.other_data_because is None
    if privacy.is_on and not privacy.reproducible and is_found and data.shift is not None:
        raise ConfigError(
            'privacy.population is "auto", which recognizes examples by their values, but the '
            "clients' features are shifted, so that other runs on the same people would not be "
            'found; name the population, as in privacy.population = "ward 5", and use the same '
            "name in each run on these examples"
        )


def _place_attackers(config: Config, population: Population) -> tuple[Config, Population]:
    """Return the configuration with the attackers' ids, and the clients with poisoned examples.

    Raises:
        ConfigError: There are fewer clients than attackers, or the attack does not fit the data.
    """
    section, count = config.attack, population.num_clients
    if not section.is_on:
        return config, population
    if section.num_attackers > count or max(section.clients, default=0) >= count:
        raise ConfigError(
            f"attack.num_attackers is {section.num_attackers} and attack.clients "
            f"{list(section.clients)}, but the data have {count} clients; lower them"
        )
    seed = Seed(config.seed)
    attackers = section.clients or draw_attackers(
        section.num_attackers, num_clients=count, seed=seed
    )
    poisoned = poison_population(population, section.make_attack(), attackers, seed=seed)
    section = section.model_copy(update={"clients": attackers})
    return config.model_copy(update={"attack": section}), poisoned


def _add_attack(components: Simulation) -> Simulation:
    """Let the attackers of the configuration forge their updates."""
    section = components.config.attack
    if not section.is_on:
        return components
    model = components.make_model()
    local = find_local_names(model, components.algorithm.keep_local)
    attacked = Attacked(
        components.algorithm,
        attack=section.make_attack(),
        attackers=frozenset(section.clients),
        layout=Layout.of(model).exclude(local),
        seed=components.seed,
    )
    return replace(components, algorithm=attacked)


def _require_accepted_clip(components: Simulation) -> Simulation:
    """Refuse secure sums that deployed clients would reject by default; return the components."""
    plan, limit = components.secure, SecureAggregationPolicy().max_clip
    if plan is None:
        return components
    clips = {"clip_norm": plan.clip_norm, "statistics_norm": plan.statistics_norm}
    if plan.has_model:  # the sums of a query are bounded by the range of what it asks
        clips |= {f"the bound of {name!r}": each for name, each in plan.further_bounds.items()}
    name, clip = max(clips.items(), key=lambda item: item[1])
    if clip > limit:
        raise ConfigError(
            f"secure_aggregation: {name} is {clip:g}, and deployed clients refuse one above "
            f"{limit:g} unless their policy says otherwise (max_clip); lower it"
        )
    return components


def _require_no_local_parts(algorithm: Strategy, *, pooled: bool) -> None:
    """Refuse parts that stay local in a pooled run.

    Raises:
        ConfigError: The single client would keep them, and the model be measured without them.
    """
    if pooled and algorithm.keep_local:
        raise ConfigError(
            f"centralized is true, but keep_local is {list(algorithm.keep_local)}: the pooled "
            "client would keep these parts for itself, and the model would be measured without "
            "them; remove one of the two"
        )


def _require_enough_clients(population: int, asynchrony: Asynchrony) -> None:
    if asynchrony.buffer_size > population:
        raise ConfigError(
            f"asynchronous.buffer_size: is {asynchrony.buffer_size}, and no buffer has two updates "
            f"of one client, but the data have {population}; lower it"
        )
    if asynchrony.concurrency > population:
        raise ConfigError(
            f"asynchronous.concurrency: {asynchrony.concurrency} clients are in flight at a time, "
            f"but the data have {population}; lower it"
        )
