"""Run the rounds of a deployed run over any channel: build their plan and start the loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fedlearn.algorithms.collector import ChannelCollector, CollectedRound
from fedlearn.algorithms.sampling import without
from fedlearn.assembly import Deployment
from fedlearn.assembly.client_link import ClientLink, build_collector
from fedlearn.assembly.own_code import AfterRound
from fedlearn.assembly.plan import (
    build_central_evaluator,
    build_initial_params,
    build_run_plan,
    choose_release,
)
from fedlearn.assembly.server_jobs import TrainingHost
from fedlearn.core.clock import Clock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.deployment.failing import ReportingCollector
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator
from fedlearn.rounds.opening import CohortSource
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStore
from fedlearn.rounds.run import ResumedRound, RunState, train
from fedlearn.rounds.secure import MaskedSumStore, SecureCollector
from fedlearn.rounds.secure_evaluation import EvaluationCohort, SecureEvaluator
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.base import Channel

_CPU = torch.device("cpu")
#: Seconds between two checks for clients that can be asked.
_LOOK_S = 0.2


def ignore(_: CollectedRound) -> None:
    """Ignore the outcome of an attempt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStorage:
    """Where a deployed run is stored, and where to resume it.

    Attributes:
        store: Stores its rounds and models.
        checkpoint: Where to resume; ``None`` begins the run.
        resumed: See :class:`~fedlearn.rounds.run.RunPlan`.
        masked_sum: Where a round's masked sum is kept until it is unmasked, for secure aggregation;
            ``None`` if it is not stored.
        read_num_rounds: See :class:`~fedlearn.rounds.run.RunPlan`.
    """

    store: RunStore
    checkpoint: Checkpoint | None = None
    resumed: ResumedRound | None = None
    masked_sum: MaskedSumStore | None = None
    read_num_rounds: Callable[[], int] = int


def run_rounds(
    reach: ClientLink,
    components: Deployment,
    storage: RunStorage,
    *,
    source: CohortSource,
    clock: Clock,
    host: TrainingHost | None = None,
    on_collected: Callable[[CollectedRound], None] = ignore,
    num_elsewhere: Callable[[], int] = int,
) -> RunState:
    """Run all remaining rounds of ``components`` and commit each one.

    Args:
        reach: How the clients are reached.
        components: The assembled run.
        storage: Where the run is stored and resumed.
        source: Where the rounds get their clients from.
        clock: Real time.
        host: Where the coordinator's own training takes place.
        on_collected: Receives the outcome of every attempt at a round.
        num_elsewhere: Returns how many clients could be asked, but for other runs. An evaluation
            waits for them as a round does.

    Raises:
        ConfigError: Secure aggregation is on without identities, or its noise does not fit the
            model.
        BudgetExhausted: The privacy budget does not cover the next round.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run could not be made durable; its last commit still stands.
    """
    params = build_initial_params(components, _CPU)
    collector = build_collector(
        components, reach, masked_sum=storage.masked_sum, wait=partial(clock.sleep, _LOOK_S)
    )
    draw = EvaluationDraw(
        components=components,
        channel=reach.channel,
        busy=collector.busy,
        num_elsewhere=num_elsewhere,
        clock=clock,
    )
    plan = build_run_plan(
        components,
        source=source,
        collector=ReportingCollector(inner=collector, on_collected=on_collected),
        evaluators=list(_evaluators(components, collector, draw)),
        clock=clock,
        host=host,
        release=choose_release(components, params, Alone(), has_sessions=True),
    )
    plan = replace(
        plan,
        checkpoint_every_s=0.0,  # commit every round, since clients learn its outcome
        resumed=storage.resumed,
        read_num_rounds=storage.read_num_rounds,
    )
    after_round = AfterRound(
        cluster=Alone(),
        progress=_ignore_round,  # the store reports each round, once it is durable
        callbacks=components.callbacks,
        make_model=components.make_model,
    )
    state = train(
        plan, params, checkpoint=storage.checkpoint, store=storage.store, after_round=after_round
    )
    collector.close()
    if storage.masked_sum is not None:
        storage.masked_sum.clear()  # the last round's sum has been unmasked and committed
    return state


def _ignore_round(_: RoundRecord) -> None:
    """Ignore the round."""


def _evaluators(
    components: Deployment,
    collector: ChannelCollector,
    draw: "EvaluationDraw",
) -> Iterator[Evaluator]:
    evaluation = components.config.evaluation
    if not components.config.has_model:
        return
    if components.test is not None:
        model = ResidentModel(
            components.make_model,
            components.objective,
            device=_CPU,
            precision=Precision.FLOAT32,
            metrics=components.metrics,
        )
        yield build_central_evaluator(
            components.test, model, Alone(), batch_size=evaluation.batch_size
        )
    if not evaluation.num_clients:
        return
    if isinstance(collector, SecureCollector):
        section, measures = components.config.secure_aggregation, tuple(components.directions)
        yield SecureEvaluator(
            sessions=collector,
            invite=draw,
            plan=partial(section.evaluation_plan, measures=measures),
            deadline_s=evaluation.deadline_s,
            strategy=components.algorithm,
            fine_tuning=components.fine_tuning,
        )
    else:
        yield ChannelEvaluator(
            channel=draw.channel,
            cohort=lambda round_num: draw(round_num).client_ids,
            directions=components.directions,
            deadline_s=evaluation.deadline_s,
            strategy=components.algorithm,
            fine_tuning=components.fine_tuning,
            # Flower's own strategies weight by examples.
            weighs=components.config.flower.is_foreign,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationDraw:
    """Draws the clients of an evaluation.

    Attributes:
        busy: Returns the clients that still work for an earlier round.
        num_elsewhere: See :func:`run_rounds`.
    """

    components: Deployment
    channel: Channel
    busy: Callable[[], frozenset[ClientId]]
    num_elsewhere: Callable[[], int]
    clock: Clock

    def __call__(self, round_num: int) -> EvaluationCohort:
        """Draw the configured number of idle clients, or all if there are fewer.

        With a roster that draws, only clients that it draws are invited.
        """
        there: Sequence[ClientId] = self._wait_for_clients()
        num_clients = min(self._num_wanted, len(there))
        if (draw := self.components.draw) is not None:
            there = draw.select(there, round_num=round_num, cohort_size=num_clients)
        rng = self.components.seed.derive("evaluated clients", round_num).numpy()
        chosen = np.sort(rng.choice(len(there), min(num_clients, len(there)), replace=False))
        return EvaluationCohort(num_clients, [there[index] for index in chosen.tolist()])

    @property
    def _num_wanted(self) -> int:
        return self.components.config.evaluation.num_clients

    def _wait_for_clients(self) -> Sequence[ClientId]:
        """Return the idle clients, after other runs have had their turn if they are too few."""
        ends_s = self.clock.now_s() + self.components.config.coordinator.patience_s
        while True:
            may_come = self.num_elsewhere() > 0  # asked first: they may come back meanwhile
            there = without(list(self.channel.available()), self.busy())
            if len(there) >= self._num_wanted or not may_come or self.clock.now_s() >= ends_s:
                return there
            self.clock.sleep(_LOOK_S)
