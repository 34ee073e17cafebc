"""A deployed run over any channel: the plan of its rounds, and the loop that runs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedlearn.algorithms.aggregators import WeightedSum
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.build import Deployment, measures_accuracy
from fedlearn.core.clock import Clock
from fedlearn.core.collecting import Collector
from fedlearn.core.cores import num_cores
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.deployment.identities import DeployedIdentities
from fedlearn.errors import ConfigError
from fedlearn.experiment.assemble import initial_params
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator, Evaluators
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStore
from fedlearn.rounds.round import RoundPlan
from fedlearn.rounds.run import EarlyStopping, RunPlan, RunState, train
from fedlearn.rounds.secure import SecureCollector
from fedlearn.simulation.cluster import Alone
from fedlearn.simulation.evaluation import CentralEvaluator
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.base import Channel

_CPU = torch.device("cpu")


def run_over(
    channel: Channel,
    pieces: Deployment,
    *,
    sampler: CohortSampler,
    store: RunStore,
    checkpoint: Checkpoint | None,
    clock: Clock,
    progress: Callable[[RoundRecord], None],
    first_attempts: Mapping[int, int] | None = None,
    identities: DeployedIdentities | None = None,
) -> RunState:
    """Run the rounds of ``pieces`` over ``channel`` until none is due.

    Args:
        channel: How the clients are reached.
        pieces: The run.
        sampler: Who is asked: that of ``pieces``, or one around it that waits or remembers.
        store: Where the run lives; committed after every round.
        checkpoint: Where it goes on; ``None`` begins it.
        clock: Real time.
        progress: Told of each finished round.
        first_attempts: See :class:`~fedlearn.rounds.run.RunPlan`; ``None``: none.
        identities: For secure aggregation.

    Raises:
        ConfigError: Secure aggregation is on, and there are no identities.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run could not be made durable; its last commit still stands.
    """
    plan = replace(
        run_plan(channel, pieces, sampler=sampler, clock=clock, identities=identities),
        first_attempts=first_attempts or {},
    )
    params = initial_params(pieces.make_model, pieces.seed, _CPU)
    return train(plan, params, checkpoint=checkpoint, store=store, progress=progress)


def run_plan(
    channel: Channel,
    pieces: Deployment,
    *,
    sampler: CohortSampler,
    clock: Clock,
    identities: DeployedIdentities | None = None,
) -> RunPlan[WeightedSum]:
    """Return the plan of the run: the rounds of a simulation, with other clients."""
    config, algorithm, stopping = pieces.config, pieces.algorithm, pieces.config.early_stopping
    round_plan = RoundPlan(
        sampler=sampler,
        policy=pieces.policy,
        collector=_collector(channel, pieces, identities),
        local=algorithm.local,
        aggregator=algorithm.aggregator,
        server_optimizer=algorithm.server_optimizer,
        seed=pieces.seed,
    )
    return RunPlan(
        round=round_plan,
        evaluator=_evaluator(channel, pieces),
        evaluate_every=config.evaluation.every_rounds,
        early_stopping=EarlyStopping(
            metric=watched_metric(pieces),
            patience_rounds=stopping.patience_rounds,
            min_improvement=stopping.min_improvement,
            target=stopping.target,
        ),
        num_rounds=config.num_rounds,
        checkpoint_every_s=0.0,  # what clients have been told is done must stay done
        clock=clock,
    )


def _collector(
    channel: Channel, pieces: Deployment, identities: DeployedIdentities | None
) -> Collector[WeightedSum]:
    config, plan = pieces.config, pieces.secure
    if identities is None:
        require_plain(pieces)
    if plan is None or identities is None:
        return PlainCollector(
            channel=channel,
            aggregator=pieces.algorithm.aggregator,
            policy=pieces.policy,
            slab_bytes=config.engine.slab_bytes,
        )
    return SecureCollector(
        channel=channel,
        aggregator=pieces.algorithm.aggregator,
        policy=pieces.policy,
        plan=plan,
        run_id=identities.run_id,
        signer=identities.signer,
        directory=identities.directory,
        sends_directory=True,
        stage_deadline_s=config.secure_aggregation.stage_deadline_s,
        num_threads=num_cores(),
    )


def require_plain(pieces: Deployment) -> None:
    """Check that a run does without identities.

    Raises:
        ConfigError: Secure aggregation is on.
    """
    section = pieces.config.secure_aggregation
    if section.is_on:
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", which needs clients that enrolled with '
            'keys of their own: serve with certificates (no --insecure), or set it to "off"'
        )


def watched_metric(pieces: Deployment) -> str:
    """Return the metric that decides which model is the best: the clients' mean without data."""
    metric = pieces.config.early_stopping.metric
    if metric == "auto":
        metric = "accuracy" if measures_accuracy(pieces.objective) else "loss"
    return metric if pieces.test is not None else f"clients/{metric}_mean"


def _evaluator(channel: Channel, pieces: Deployment) -> Evaluator:
    evaluation, parts = pieces.config.evaluation, list[Evaluator]()
    if pieces.test is not None:
        model = ResidentModel(
            pieces.make_model, pieces.objective, device=_CPU, precision=Precision.FLOAT32
        )
        central = CentralEvaluator(
            model=model,
            features=pieces.test.features,
            labels=pieces.test.labels,
            batch_size=evaluation.batch_size,
            cluster=Alone(),
        )
        parts.append(central)
    if evaluation.clients:
        federated = AvailableEvaluator(
            channel=channel,
            num_clients=evaluation.clients,
            deadline_s=evaluation.deadline_s,
            seed=pieces.seed,
        )
        parts.append(federated)
    return Evaluators(parts)


@dataclass(frozen=True, kw_only=True)
class AvailableEvaluator:
    """Federated evaluation by some of the clients that are there at the time.

    Attributes:
        channel: How clients are reached.
        num_clients: At most so many are asked.
        deadline_s: Seconds to wait for them.
        seed: Of who is asked.
    """

    channel: Channel
    num_clients: int
    deadline_s: float
    seed: Seed

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return the distribution over the clients that answered in time."""
        available = list(self.channel.available())
        rng = self.seed.derive("evaluated clients", round_num).numpy()
        num_asked = min(self.num_clients, len(available))
        chosen = np.sort(rng.choice(len(available), num_asked, replace=False))
        asked = ChannelEvaluator(
            channel=self.channel,
            cohort=[available[place] for place in chosen.tolist()],
            deadline_s=self.deadline_s,
        )
        return asked.evaluate(params, round_num=round_num) if num_asked else {}
