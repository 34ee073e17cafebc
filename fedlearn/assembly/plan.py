"""Builds the plan of a run, simulated or deployed, from its components."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedlearn.algorithms.collector import Collector
from fedlearn.algorithms.informed_sampling import InformedSampler
from fedlearn.algorithms.local_parts import (
    find_local_names,
    name_patterns,
    require_local_parts_allowed,
)
from fedlearn.assembly.components import Components
from fedlearn.assembly.own_code import SharedNoise
from fedlearn.assembly.server_jobs import TrainingHost, add_server_steps
from fedlearn.core.clock import Clock
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.features import move_to_device
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import lock_global_generators
from fedlearn.errors import ConfigError, SettingsRefused
from fedlearn.rounds.distributed_mean import DistributedMean
from fedlearn.rounds.evaluation import Evaluator, Evaluators
from fedlearn.rounds.opening import ChargedDraw, CohortSource
from fedlearn.rounds.round import Release, RoundPlan
from fedlearn.rounds.run import RunPlan
from fedlearn.simulation.evaluation import (
    CentralEvaluator,
)
from fedlearn.simulation.sources import Examples
from fedlearn.training.example_gradients import require_separable
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import ResidentModel


def build_initial_params(components: Components, device: torch.device) -> Params:
    """Return the global model before the first round, which depends on the seed alone."""
    generator_devices = [device] if device.type == "cuda" else []
    # Forked, so that the caller's random generators are left unchanged.
    with lock_global_generators(), torch.random.fork_rng(devices=generator_devices):
        torch.manual_seed(components.seed.derive("model").value)
        model = components.make_model()
        params = Params.of(model)
    algorithm = components.algorithm
    named_by = name_patterns(algorithm)
    params = params.keep_local(find_local_names(model, algorithm.keep_local, named_by=named_by))
    require_local_parts_allowed(algorithm, params)
    constants = {name: value.to(device) for name, value in params.constants.items()}
    return replace(params, vector=params.vector.to(device), constants=constants)


def require_fitting_model(components: Components) -> None:
    """Refuse a deployed run that does not fit its model, before it is recorded or queued.

    A recorded run keeps its configuration, so a mistake that shows later could not be corrected.

    Raises:
        ConfigError: The model cannot be built, or the algorithm or the privacy does not fit it.
    """
    params = build_initial_params(components, torch.device("cpu"))
    choose_release(components, params, Alone(), has_sessions=True)


def build_run_plan(
    components: Components,
    *,
    source: CohortSource,
    collector: Collector,
    evaluators: Sequence[Evaluator],
    clock: Clock,
    host: TrainingHost | None = None,
    release: Release | None = None,
    names: Mapping[int, str] | None = None,
) -> RunPlan:
    """Build the plan of a run, simulated or deployed.

    The evaluators must use different metric names. ``names`` are those of simulated clients, by id.
    """
    draw, sampler, charging = source.draw, source.sampler, source.charging
    if charging is not None:
        # Other rounds draw clients many times, but release one sum, so they are charged once.
        each_attempt = components.round_mode is None
        draw = ChargedDraw(inner=draw, charges=charging, each_attempt=each_attempt)
    plan = RunPlan(
        round=RoundPlan(
            draw=draw,
            policy=components.policy,
            collector=collector,
            strategy=add_server_steps(components, components.algorithm, host),
            seed=components.seed,
            release=release,
            by_round=components.by_round,
            # The state of a sampler that has none would be empty.
            sampler=sampler if isinstance(sampler, InformedSampler) else None,
            is_summed_compressed=_is_summed_compressed(components),
            is_retried=components.asynchrony is None,
        ),
        evaluator=Evaluators(
            parts=evaluators,
            # What single clients measure carries no noise.
            reveals_clients=not components.config.privacy.is_on,
            names=names or {},
        ),
        evaluate_every=components.config.evaluation.every_rounds,
        early_stopping=components.early_stopping(),
        num_rounds=components.config.num_rounds,
        checkpoint_every_s=components.config.store.checkpoint_every_s,
        clock=clock,
    )
    if charging is None:
        return plan
    return replace(
        plan,
        extra_metrics=charging.report_spending,
        can_afford_round=charging.can_afford_round,
    )


def _is_summed_compressed(components: Components) -> bool:
    plan = components.secure
    return plan is not None and plan.compressor is not None


def choose_release(
    components: Components, params: Params, cluster: Cluster, *, has_sessions: bool
) -> Release | None:
    """Build the mechanism that makes each aggregate fit for release.

    In mode "central" it adds noise; in mode "distributed" the clients have added it, and the sum is
    only divided.

    Args:
        components: The components of the run.
        params: The model.
        cluster: The processes that share the work.
        has_sessions: Whether clients run real sessions, in which they add their noise themselves.

    Returns:
        The mechanism; ``None`` for a run without privacy.

    Raises:
        ConfigError: Noise does not fit the model, privacy is by example and the model couples the
            examples of a batch, or updates get noise and the model has running statistics.
    """
    plan = components.privacy
    if plan is None:
        return None
    if plan.hides_examples:
        _require_separable(components)
    else:
        _require_no_statistics(components, params.layout)
    noise = SharedNoise(plan.noise, cluster)
    try:
        if not components.config.privacy.is_distributed:
            return plan.build_release(components.algorithm, params.layout, noise)
        secure = components.secure
        assert secure is not None  # building it would have failed
        secure.lanes(params.layout)  # raises
        return DistributedMean(secure, plan.num_wanted, None if has_sessions else noise)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f'privacy.mode is "{components.config.privacy.mode}": {error}') from error


def _require_separable(components: Components) -> None:
    """Refuse a model that couples the examples of a batch, before a client would.

    Raises:
        ConfigError: It does.
    """
    with preserve_generator(torch.default_generator):
        model = components.make_model().train()  # a layer may stay in evaluation mode
    try:
        require_separable(model, components.objective)
    except SettingsRefused as error:
        raise ConfigError(f'privacy.mode is "example": {error}') from error


def _require_no_statistics(components: Components, layout: Layout) -> None:
    """Refuse running statistics: noise would drown them, and can make a variance negative.

    Raises:
        ConfigError: The model has some.
    """
    if layout.statistics:
        names = ", ".join(repr(spec.name) for spec in layout.statistics[:2])
        more = len(layout.statistics) - 2
        raise ConfigError(
            f'privacy.mode is "{components.config.privacy.mode}", but clients would send running '
            f"statistics with noise: {names}{f' and {more} more' if more > 0 else ''}; noise makes "
            "a variance negative. Use GroupNorm or LayerNorm, or freeze them: momentum=0, or a "
            "layer that stays in evaluation mode. A buffer that training does not change is frozen "
            "as nn.Parameter(value, requires_grad=False)"
        )


def build_central_evaluator(
    test: Examples, model: ResidentModel, cluster: Cluster, *, batch_size: int
) -> CentralEvaluator:
    """Build the evaluator that measures the model on a test set held by no client."""
    device = model.vector_P.device
    return CentralEvaluator(
        model=model,
        features=move_to_device(test.features, device),
        labels=test.labels.to(device),
        batch_size=batch_size,
        cluster=cluster,
    )
