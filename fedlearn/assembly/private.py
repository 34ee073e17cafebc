"""Adds differential privacy to a run: noise, sampling and accounting, built together."""

import math
from dataclasses import replace
from typing import Any

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, UserCohorts
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.objectives import why_not_by_example
from fedlearn.algorithms.sampling import SeededSampler, Users, draws_each_alone
from fedlearn.assembly.components import Components, ComponentsT, Deployment
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.tree import Config
from fedlearn.errors import ConfigError
from fedlearn.privacy.adaptive_clipping import AdaptiveClip
from fedlearn.privacy.banded_matrix import find_optimal
from fedlearn.privacy.plan import (
    BandedPlan,
    CentralPlan,
    DistributedPlan,
    ExampleLevelPlan,
    LocalPlan,
    PrivacyPlan,
)
from fedlearn.privacy.secret import ReproducibleStreams, SecretStreams

#: Step size of the adaptive clip norm, on a log scale; the value of Andrew et al., 2021.
_CLIP_RATE = 0.2


def add_privacy(components: ComponentsT, num_users: int) -> ComponentsT:
    """Bound the contribution of each of ``num_users`` users, and calibrate the noise.

    Raises:
        ConfigError: A setting would make the guarantee false.
    """
    section, policy = components.config.privacy, components.policy
    components.early_stopping()  # raises if stopping early would leak client metrics
    assert section.clip_norm is not None  # the configuration makes sure
    assert section.target_delta is not None
    if section.target_delta * num_users >= 1.0:
        raise ConfigError(
            f"privacy.target_delta is {section.target_delta:g}, which would allow to publish all "
            f"about one of the {num_users} users; give a number well below {1 / num_users:.2g}"
        )
    try:
        plan = _build_privacy_plan(components, num_users)
        # Wrapped only for the checks: the noise of this plan is not calibrated yet.
        policy, _ = plan.adapt_policy(policy), plan.wrap_strategy(components.algorithm)
    except ValueError as error:
        raise ConfigError(f'privacy.mode is "{section.mode}": {error}') from error
    section = _calibrate(components.config, plan)  # takes seconds, so the cheap checks come first
    assert section.noise_multiplier is not None
    plan = replace(plan, noise_multiplier=section.noise_multiplier)
    made = replace(
        components,
        config=components.config.model_copy(update={"privacy": section}),
        privacy=plan,
        policy=policy,
        sampler=plan.sampler,
        algorithm=plan.wrap_strategy(components.algorithm),
    )
    _ = made.secure  # raises if the secure sum has no room for the noise
    return made


def _build_privacy_plan(components: Components, num_users: int) -> PrivacyPlan:
    """Build the privacy plan, with a noise multiplier of 1 if it is yet to be calibrated.

    Raises:
        ValueError: A setting would make the guarantee false.
    """
    section, policy, cohorts = (
        components.config.privacy,
        components.policy,
        _choose_cohorts(components, num_users),
    )
    assert section.clip_norm is not None  # the configuration makes sure
    common: dict[str, Any] = {  # Any: of several types
        "cohorts": cohorts,
        "clip_norm": section.clip_norm,
        "noise_multiplier": section.noise_multiplier or 1.0,
        "num_wanted": policy.num_wanted,
        "streams": ReproducibleStreams(components.seed)
        if section.reproducible
        else SecretStreams(),
        "sums_examples": section.unit == "example",
    }
    if section.is_distributed:
        parameters = components.config.secure_aggregation.parameters(policy.cohort_size)
        min_survivors = max(policy.min_reports, parameters.min_survivors)
        return DistributedPlan(**common, min_survivors=min_survivors)
    if section.mode == "local":
        return LocalPlan(**common)
    if section.bands is not None:
        assert isinstance(cohorts, CyclicCohorts)  # the configuration makes sure of this, too
        matrix = find_optimal(bands=section.bands, num_rounds=components.config.num_rounds)
        mean_size = round(num_users / cohorts.num_groups)
        return BandedPlan(**common | {"num_wanted": mean_size}, matrix=matrix)
    if section.mode == "example":
        if (reason := why_not_by_example(components.objective)) is not None:
            raise ValueError(reason)
        return ExampleLevelPlan(**common, epochs=components.algorithm.local.work.epochs)
    if section.clip_quantile is None:
        return CentralPlan(**common)
    adaptive = AdaptiveClip(quantile=section.clip_quantile, learning_rate=_CLIP_RATE)
    return CentralPlan(**common, adaptive=adaptive)


def _choose_cohorts(components: Components, num_users: int) -> UserCohorts:
    """Return the sampling of users that the privacy accounting may assume.

    Subsampling among only the clients that happen to be available does not make it less likely that
    a given client is asked. Nor does it hide a client from an observer of single updates. In both
    cases the accounting assumes that all users take part.

    Raises:
        ValueError: There are too few users, or the cost of a custom sampler is not known.
    """
    policy, mode, sampler = components.policy, components.config.privacy.mode, components.sampler
    is_deployed, alone = isinstance(components, Deployment), draws_each_alone(sampler)
    # First: accounting for all users in every round is enough only if data do not decide which of
    # them a round asks.
    seeded = _require_known_cost(sampler)
    everybody = FixedCohorts(num_users, num_users)
    if components.asynchrony is not None:  # a fast client takes part in every round
        return everybody
    if mode == "local" or (is_deployed and (mode == "distributed" or not alone)):
        if policy.cohort_size > num_users:
            raise ValueError(
                f"privacy.num_users is {num_users}, but {policy.cohort_size} clients are asked in "
                "a round; raise it, or lower cohort.num_wanted or stragglers.over_selection"
            )
        return everybody
    users = Users(
        population=num_users,
        num_wanted=policy.num_wanted,
        cohort_size=policy.cohort_size,
        has_gaps=is_deployed,
    )
    return seeded.cohorts(users)


def _require_known_cost(sampler: Sampler) -> SeededSampler:
    """Return the sampler; raises ValueError if it has no scheme for privacy accounting."""
    if isinstance(sampler, SeededSampler):
        return sampler
    raise ValueError(
        f"what cohorts of {type(sampler).__name__} cost is not known; set cohort.sampling to "
        '"poisson", "uniform" or "cyclic"'
    )


def _calibrate(config: Config, plan: PrivacyPlan) -> PrivacySection:
    """Return the privacy section with the least noise multiplier that keeps the budget.

    A noise multiplier that is configured is kept.

    Raises:
        ConfigError: No noise multiplier keeps the budget.
    """
    section = config.privacy
    if section.noise_multiplier is not None:
        return section
    from fedlearn.privacy.accounting import calibrate  # noqa: PLC0415 (takes a second)

    assert section.epsilon is not None  # the configuration makes sure that one of them is given
    assert section.target_delta is not None
    multiplier = calibrate(
        plan.accounted,
        epsilon=section.epsilon,
        target_delta=section.target_delta,
        num_rounds=config.num_rounds,
    )
    # k Gaussians with noise z cost as much as one with z / √k.
    each = multiplier * math.sqrt(plan.num_releases)
    return section.model_copy(update={"noise_multiplier": each})
