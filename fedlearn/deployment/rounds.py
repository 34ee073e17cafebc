"""Run the rounds of a deployed run over any channel: build their plan and start the loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fedlearn.algorithms.collecting import ChannelCollector
from fedlearn.algorithms.pending_tasks import Draw
from fedlearn.algorithms.sampling import without
from fedlearn.assembly import Deployment
from fedlearn.assembly.plan import central_evaluator, initial_params, release_of, run_plan
from fedlearn.assembly.reach import Reach, over_channel
from fedlearn.assembly.server_jobs import Place
from fedlearn.assembly.user_code import AfterRound, LoggedCallback
from fedlearn.core.clock import Clock
from fedlearn.core.cluster import Alone
from fedlearn.core.collecting import Participations
from fedlearn.core.messages import ClientId
from fedlearn.deployment.failing import ReportingCollector
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluator
from fedlearn.rounds.opening import Charges
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStore
from fedlearn.rounds.run import ResumedRound, RunState, train
from fedlearn.rounds.secure import MaskedSumStore, SecureCollector
from fedlearn.rounds.secure_evaluation import Invited, SecureEvaluator
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.base import Channel

_CPU = torch.device("cpu")
#: Seconds between two checks for clients that can be asked.
_LOOK_S = 0.2


def ignore(_: Participations) -> None:
    """Ignore the outcomes of clients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStorage:
    """Where a deployed run is stored, and where to resume it.

    Attributes:
        store: Stores its rounds and models.
        checkpoint: Where to resume; ``None`` begins the run.
        resumed: See :class:`~fedlearn.rounds.run.RunPlan`.
        masked_sum: Where a round's masked sum is kept until it is unmasked, for secure aggregation;
            ``None`` if it is not stored.
        extended: See :class:`~fedlearn.rounds.run.RunPlan`.
    """

    store: RunStore
    checkpoint: Checkpoint | None = None
    resumed: ResumedRound | None = None
    masked_sum: MaskedSumStore | None = None
    extended: Callable[[], int] = int


def run_rounds(
    reach: Reach,
    pieces: Deployment,
    storage: RunStorage,
    *,
    draw: Draw,
    clock: Clock,
    place: Place | None = None,
    on_outcomes: Callable[[Participations], None] = ignore,
    charging: Charges | None = None,
) -> RunState:
    """Run all remaining rounds of ``pieces`` and commit each one.

    Args:
        reach: How the clients are reached.
        pieces: The assembled run.
        storage: Where the run is stored and resumed.
        draw: Draws the clients to ask.
        clock: Real time.
        place: Where the coordinator's own training takes place.
        on_outcomes: Receives the outcomes of the clients in every attempt at a round.
        charging: Charges each round to the privacy budget before any client is asked; ``None`` if
            there is no budget.

    Raises:
        ConfigError: Secure aggregation is on without identities, or its noise does not fit the
            model.
        BudgetExhausted: The privacy budget does not cover the next round.
        RoundError: A round failed and the policy says to fail the run.
        StoreError: The run could not be made durable; its last commit still stands.
    """
    params = initial_params(pieces, _CPU)
    collector = over_channel(
        pieces, reach, masked_sum=storage.masked_sum, wait=partial(clock.sleep, _LOOK_S)
    )
    plan = run_plan(
        pieces,
        draw=draw,
        charging=charging,
        collector=ReportingCollector(inner=collector, on_outcomes=on_outcomes),
        evaluators=list(_evaluators(pieces, reach.channel, collector)),
        clock=clock,
        place=place,
        release=release_of(pieces, params, Alone(), has_sessions=True),
    )
    plan = replace(
        plan,
        checkpoint_every_s=0.0,  # commit every round, since clients learn its outcome
        resumed=storage.resumed,
        extended=storage.extended,
    )
    after_round = AfterRound(
        cluster=Alone(),
        progress=_ignore_round,  # the store reports each round, once it is durable
        callbacks=[LoggedCallback(each) for each in pieces.callbacks],
        make_model=pieces.make_model,
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
    pieces: Deployment,
    channel: Channel,
    collector: ChannelCollector,
) -> Iterator[Evaluator]:
    evaluation = pieces.config.evaluation
    if pieces.test is not None:
        model = ResidentModel(
            pieces.make_model,
            pieces.objective,
            device=_CPU,
            precision=Precision.FLOAT32,
            metrics=pieces.metrics,
        )
        yield central_evaluator(pieces.test, model, Alone(), batch_size=evaluation.batch_size)
    if not evaluation.num_clients:
        return
    invited = partial(_invite, pieces, channel, collector.busy)
    if isinstance(collector, SecureCollector):
        section, measures = pieces.config.secure_aggregation, tuple(pieces.directions)
        yield SecureEvaluator(
            sessions=collector,
            invited=invited,
            plan=partial(section.evaluation_plan, measures=measures),
            deadline_s=evaluation.deadline_s,
        )
    else:
        yield ChannelEvaluator(
            channel=channel,
            cohort=lambda round_num: invited(round_num).client_ids,
            directions=pieces.directions,
            deadline_s=evaluation.deadline_s,
            weighs=pieces.config.flower.is_foreign,  # Flower's own strategies weight by examples
        )


def _invite(
    pieces: Deployment,
    channel: Channel,
    busy: Callable[[], frozenset[ClientId]],
    round_num: int,
) -> Invited:
    """Draw the configured number of idle clients for an evaluation, or all if there are fewer.

    With a roster that draws, only clients that it draws are invited.
    """
    there: Sequence[ClientId] = without(list(channel.available()), busy())
    num_clients = min(pieces.config.evaluation.num_clients, len(there))
    if pieces.draw is not None:
        there = pieces.draw.select(there, round_num=round_num, num_asked=num_clients)
    rng = pieces.seed.derive("evaluated clients", round_num).numpy()
    chosen = np.sort(rng.choice(len(there), min(num_clients, len(there)), replace=False))
    return Invited(num_clients, [there[place] for place in chosen.tolist()])
