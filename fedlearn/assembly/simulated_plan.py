"""Builds the plan of a simulation in one of its processes: engine or sessions, and evaluators."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.algorithms.collector import Collector, further_bytes
from fedlearn.algorithms.informed_sampling import Sampler, as_informed
from fedlearn.algorithms.local_parts import LocalParts
from fedlearn.algorithms.sampling import SeededSampler
from fedlearn.algorithms.settings import own_classes, own_transforms, require_travels
from fedlearn.assembly.choices import build_job
from fedlearn.assembly.client_link import ClientLink, Identities, build_collector
from fedlearn.assembly.components import Simulation
from fedlearn.assembly.own_code import OwnDevices, SharedSampler, check_own_sampler
from fedlearn.assembly.plan import (
    build_central_evaluator,
    build_initial_params,
    build_run_plan,
    choose_release,
)
from fedlearn.assembly.server_jobs import TrainingHost
from fedlearn.core.clock import Clock
from fedlearn.core.cluster import Cluster
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ConfigError
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator
from fedlearn.rounds.opening import Charges, CohortSource, SampledOpening
from fedlearn.rounds.run import RunPlan
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.simulation.behavior import Behavior, ClientBehavior, Instant
from fedlearn.simulation.choice import (
    ExecutorKind,
    TrainingJob,
    make_executor,
)
from fedlearn.simulation.client_properties import PopulationProperties
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.evaluation import (
    ClientEvaluator,
    ReadOnce,
    sample_clients,
)
from fedlearn.simulation.fine_tuning import SimulatedFineTuning
from fedlearn.simulation.population import client_names
from fedlearn.simulation.secure import ModularSum, SimulatedIdentities
from fedlearn.simulation.sessions import (
    SessionCollector,
    SessionStates,
    SimulatedSessions,
    trainers_on,
)
from fedlearn.training.resident import ResidentModel
from fedlearn.transport.base import Channel
from fedlearn.transport.memory import MemoryChannel


def assemble(
    simulation: Simulation,
    cluster: Cluster,
    *,
    device: torch.device,
    clock: Clock,
    charging: Charges | None = None,
    host: TrainingHost | None = None,
) -> tuple[RunPlan, Params]:
    """Build the plan of a resolved run in this process of ``cluster``, and the initial model.

    With ``charging``, each round is charged before its clients are asked. ``host`` says where the
    coordinator's own training runs.
    """
    params = build_initial_params(simulation, device)
    job = build_job(simulation, params, cluster.world_size)
    model = job.resident_model()
    channel: MemoryChannel | None = None
    if simulation.config.engine.transport == "memory":
        channel, collector = _build_sessions(
            simulation, model, _build_behavior(simulation, cluster)
        )
    else:
        collector = _build_engine(simulation, params, job, cluster)
    sampled = SampledOpening(
        sampler=_build_sampler(simulation, cluster),
        available=collector.available,
        seed=simulation.seed,
        properties=PopulationProperties(simulation.population),
    )
    has_pending = simulation.round_mode is not None
    plan = build_run_plan(
        simulation,
        source=CohortSource(
            draw=sampled.draw if has_pending else sampled.draw_cohort,
            sampler=sampled.sampler,
            charging=charging,
        ),
        collector=collector,
        host=host,
        release=choose_release(simulation, params, cluster, has_sessions=channel is not None),
        evaluators=_build_evaluators(simulation, model, cluster, channel),
        clock=clock,
        names=_list_names(simulation),
    )
    return plan, params


def _list_names(simulation: Simulation) -> dict[int, str]:
    """Return the names in the data of the clients that are evaluated, by id."""
    names = client_names(simulation.clients)
    if names is None or not simulation.config.evaluation.num_clients:
        return {}
    return {each: _name_text(names[each]) for each in _sample_evaluated(simulation).tolist()}


def _name_text(name: object) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _sample_evaluated(simulation: Simulation) -> NDArray[np.int64]:
    num_clients = simulation.config.evaluation.num_clients
    return sample_clients(simulation.clients.num_clients, num_clients, simulation.seed)


def _build_sampler(simulation: Simulation, cluster: Cluster) -> Sampler:
    """Return a sampler that draws the same cohort in every process.

    The seeded samplers do so by themselves. Informed and custom samplers, and those of private
    runs, draw on rank 0, which shares the cohort.
    """
    given = simulation.sampler
    if simulation.privacy is None and isinstance(given, SeededSampler):
        return given
    checked = check_own_sampler(given, is_private=simulation.privacy is not None)
    return SharedSampler(as_informed(checked), cluster)


def _build_behavior(simulation: Simulation, cluster: Cluster) -> ClientBehavior:
    """Return a device model that gives the same answers in every process.

    The built-in ones do so by themselves, from the seed. A custom one is called on rank 0 only.
    """
    given = simulation.behavior
    return given if isinstance(given, Behavior | Instant) else OwnDevices(given, cluster)


def _build_sessions(
    simulation: Simulation, model: ResidentModel, behavior: ClientBehavior
) -> tuple[MemoryChannel, Collector]:
    population, strategy, plan = simulation.population, simulation.algorithm, simulation.secure
    simulated = None if plan is None else SimulatedIdentities(population.num_clients, plan)
    locals_ = strategy.locals_for([ClientId(each) for each in range(population.num_clients)])
    require_travels(locals_, strategy.transforms)
    own = [strategy.download] if strategy.download is not None else []
    sessions = SimulatedSessions(
        population,
        behavior,
        simulation.make_trainer or trainers_on(model, local_updates=own_classes(locals_)),
        work=strategy.local.work,
        further_bytes=further_bytes(strategy, model.layout),
        masked_bytes=None if plan is None else plan.upload_bytes(model.layout),
        identities=simulated,
        transforms=own_transforms([*strategy.transforms, *own]),
        dtype=model.layout.dtype,
        client_tests=simulation.client_tests,
    )
    channel = sessions.channel()
    identities = None
    if simulated is not None:
        identities = Identities(
            run_id=SecretBytes.generate(RUN_BYTES).reveal(),  # a resumed run starts new sessions
            signer=simulated.coordinator[0],
            directory=lambda: simulated,
            sends_directory=False,
        )
    collector = build_collector(simulation, ClientLink(channel=channel, identities=identities))
    is_exact_sum = plan is not None and plan.noise_multiplier is None
    return channel, SessionCollector(
        inner=collector,
        sessions=SessionStates(channel),
        bounded=sessions.bounded if is_exact_sum else None,
    )


def _build_engine(
    simulation: Simulation, params: Params, job: TrainingJob, cluster: Cluster
) -> Collector:
    config, plan, summing = simulation.config, simulation.secure, None
    if plan is not None:  # the same sum without masks: the protocol itself needs sessions
        seed = simulation.seed.derive("rounding")
        summing = ModularSum(plan=plan, layout=params.layout, seed=seed)
    assert isinstance(config.engine.block_size, int)  # resolved
    return Engine(
        population=simulation.population,
        behavior=_build_behavior(simulation, cluster),
        executor=make_executor(job, ExecutorKind(config.engine.executor)),
        policy=simulation.policy,
        cluster=cluster,
        block_size=config.engine.block_size,
        summing=summing,
        round_mode=simulation.round_mode,
        local_parts=LocalParts.of(params),
    )


def _build_evaluators(
    simulation: Simulation, model: ResidentModel, cluster: Cluster, channel: Channel | None
) -> list[Evaluator]:
    config, clients = simulation.config, simulation.clients
    if not config.has_model:
        return []
    batch_size = config.evaluation.batch_size
    central = build_central_evaluator(simulation.test, model, cluster, batch_size=batch_size)
    if not config.evaluation.num_clients:
        return [central]
    sample = _sample_evaluated(simulation)
    # In a centralized run, no session is that of a client in the data.
    if channel is None or config.centralized:
        of_clients: Evaluator = ClientEvaluator(
            model=model,
            population=ReadOnce(simulation.client_tests or clients),
            client_ids=sample,
            batch_size=batch_size,
            cluster=cluster,
            strategy=None if config.centralized else simulation.algorithm,
            fine_tuning=_build_fine_tuning(simulation, model),
            training=None if simulation.client_tests is None else ReadOnce(clients),
        )
    else:
        cohort = [ClientId(client_id) for client_id in sample.tolist()]
        of_clients = ChannelEvaluator(
            channel=channel,
            cohort=lambda _: cohort,
            directions=simulation.directions,
            strategy=simulation.algorithm,
            deadline_s=math.inf,
            fine_tuning=simulation.fine_tuning,
        )
    return [central, of_clients]


def _build_fine_tuning(simulation: Simulation, model: ResidentModel) -> SimulatedFineTuning | None:
    """Return how clients are fine-tuned in this process, if they are.

    Raises:
        ConfigError: The clients have their own trainers.
    """
    tuning = simulation.fine_tuning
    if tuning is None:
        return None
    if simulation.make_trainer is not None:
        sessions = "" if simulation.config.centralized else 'set engine.transport to "memory", or '
        raise ConfigError(
            "evaluation.fine_tune_epochs is on, but the clients have their own trainers, which the "
            f"engine does not fine-tune with; {sessions}give 0 epochs"
        )
    return SimulatedFineTuning(model=model, population=simulation.clients, tuning=tuning)
