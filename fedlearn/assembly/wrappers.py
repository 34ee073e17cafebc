"""Wraps the algorithm and runs the checks that simulated and deployed runs have in common."""

from collections.abc import Mapping
from dataclasses import replace

from fedlearn.algorithms.aggregations import min_updates
from fedlearn.algorithms.asynchronous import require_asynchronous
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.compression import find_compressor
from fedlearn.algorithms.extra_settings import WithExtra
from fedlearn.algorithms.informed_sampling import InformedSampler, Sampler
from fedlearn.algorithms.sampling import DRAWN_AS_OTHERS_LAND, DescribedSampler, why_not_secure
from fedlearn.algorithms.settings import adds_own_noise
from fedlearn.algorithms.strategy import Bounded
from fedlearn.assembly.components import Components, ComponentsT
from fedlearn.assembly.server_training import build_server_task
from fedlearn.config.components import build_component
from fedlearn.core.messages import Scalar
from fedlearn.errors import ConfigError
from fedlearn.parallel.distillation import Distilling


def add_wrappers(components: ComponentsT, extra: Mapping[str, Scalar]) -> ComponentsT:
    """Add every wrapper around the algorithm that the configuration asks for.

    Raises:
        ConfigError: ``extra`` cannot be broadcast, the run allows updates of earlier models and
            the algorithm cannot aggregate them, or the sampler does not fit the run.
    """
    components = _add_extra_settings(components, extra)
    components = _add_distillation(components)
    components = _add_update_bounds(components)
    _require_asynchronous(components)
    _require_compatible_sampler(components)
    return components


def validate_components(components: ComponentsT) -> ComponentsT:
    """Check that the components of a run fit together, and return them.

    Raises:
        ConfigError: They do not fit together, or secure aggregation is not secure with them.
    """
    _ = (
        components.secure,
        components.early_stopping(),
    )  # both raise ConfigError if they cannot be built
    components.require_settings_of_rounds()
    find_compressor(components.algorithm.transforms)  # raises ConfigError unless it comes last
    _require_visible_metrics(components)
    most, num_wanted = components.algorithm.max_reports, components.policy.num_wanted
    if most is not None and num_wanted > most:
        raise ConfigError(
            f"algorithm.cohort_size is {most}, but a round takes {num_wanted} reports; raise it to "
            "that, or lower cohort.num_wanted"
        )
    return _require_enough_updates(components)


def _require_visible_metrics(components: Components) -> None:
    """Check that an algorithm that computes with clients' losses may and can do so."""
    algorithm = components.algorithm
    if not algorithm.needs_train_metrics:
        return
    what = f"the algorithm computes {algorithm.needs_train_metrics} from the clients' losses"
    if components.privacy is not None:
        raise ConfigError(
            f'privacy.mode is "{components.config.privacy.mode}", but {what}, which have no noise, '
            "so the models would reveal them; choose another algorithm, or switch privacy off"
        )
    if adds_own_noise(algorithm.local, algorithm.transforms):
        raise ConfigError(
            f"{what}, but clients that add noise send no losses; choose another algorithm, or "
            "leave out their noise"
        )


def _require_enough_updates(components: ComponentsT) -> ComponentsT:
    """Make a round whose aggregation lacks updates one with too few reports.

    Raises:
        ConfigError: A round is configured to take fewer updates than the aggregation needs.
    """
    rule, policy = components.algorithm.aggregation, components.policy
    needed = min_updates(rule)
    if policy.num_wanted < needed:
        raise ConfigError(
            f"cohort.num_wanted: a round takes {policy.num_wanted} reports, but {rule} needs "
            f"{needed}; raise it to that, or defend against fewer clients"
        )
    if policy.min_reports >= needed:
        return components
    if (minimum := components.config.stragglers.min_reports) != "half":
        raise ConfigError(
            f"stragglers.min_reports is {minimum}, but {rule} needs {needed}; raise it to that, or "
            "leave it out"
        )
    return replace(components, policy=replace(policy, min_reports=needed))


def _add_update_bounds(components: ComponentsT) -> ComponentsT:
    bounds = build_component(UpdateBounds, components.config.updates)
    if bounds == GENEROUS:
        return components
    return replace(components, algorithm=Bounded(components.algorithm, bounds))


def _require_asynchronous(components: Components) -> None:
    """Check that the algorithm accepts updates of earlier models, if the run allows them."""
    modes = {"asynchronous": components.asynchrony, "late_updates": components.late_updates}
    for table, rule in modes.items():
        if rule is not None:
            try:
                require_asynchronous(components.algorithm)
            except ValueError as error:
                raise ConfigError(f"{table}.mode is on, but {error}") from error


def _require_compatible_sampler(components: Components) -> None:
    """Check that the sampler can draw as the run needs.

    The configuration refuses the same for a sampler that it names; here come custom ones, and those
    that are arguments.
    """
    given = components.sampler
    name, sampler = type(given).__name__, _describe_sampler(given)
    if not isinstance(given, InformedSampler) and hasattr(given, "observe"):
        raise ConfigError(
            f"sampler: {name} has a method observe, which is never called; let its class inherit "
            "from fedlearn.InformedSampler"
        )
    modes = {"asynchronous": components.asynchrony, "late_updates": components.late_updates}
    for table, rule in modes.items():
        if rule is not None and sampler.draws_groups:
            raise ConfigError(f"sampler: is {name}, but {table}.mode is on, {DRAWN_AS_OTHERS_LAND}")
    if components.secure is not None and (reason := why_not_secure(sampler)) is not None:
        raise ConfigError(f"sampler: is {name}, {reason}")
    if sampler.counts_examples and getattr(components.algorithm.aggregation, "by_examples", False):
        raise ConfigError(
            f"sampler: {name} asks clients with more examples more often, and the algorithm "
            "weights their updates by examples, so that examples would count twice; set "
            "weight_by_examples to false"
        )


def _describe_sampler(sampler: Sampler) -> DescribedSampler | type[DescribedSampler]:
    """Return the declarations of a sampler; the defaults if it declares nothing."""
    return sampler if isinstance(sampler, DescribedSampler) else DescribedSampler


def _add_extra_settings(components: ComponentsT, extra: Mapping[str, Scalar]) -> ComponentsT:
    """Broadcast the free-form settings to the clients' trainers, if there are any.

    Raises:
        ConfigError: A name or a value cannot be sent.
    """
    if not extra:
        return components
    algorithm = WithExtra.around(components.algorithm, extra)
    try:
        _ = algorithm.local
    except ValueError as error:
        raise ConfigError(f"client.{error}") from error
    return replace(components, algorithm=algorithm)


def _add_distillation(components: ComponentsT) -> ComponentsT:
    num_steps = components.config.coordinator.training.distil_steps
    if not num_steps:
        return components
    algorithm = Distilling(components.algorithm, build_server_task(components), num_steps)
    return replace(components, algorithm=algorithm)
