"""Evaluates the global model on held-out examples and on each client's own data."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.fine_tuning import FineTuning
from fedlearn.algorithms.personal_models import has_personal_models, has_personal_update
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.client_metrics import ClientMetrics, EvaluationOutcome
from fedlearn.core.distribution import Direction, average_by_examples, summarize_metrics
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest, Failure
from fedlearn.core.reported_metrics import list_majority_names, select_recordable
from fedlearn.rounds.updates import MAX_EXAMPLES
from fedlearn.transport.base import Arrival, Channel, ask_once


class Evaluator(Protocol):
    """Evaluates a model; the result goes into the record of the round."""

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Evaluate the model."""


@dataclass(frozen=True, kw_only=True)
class Evaluators:
    """Runs several evaluators and merges their results.

    Attributes:
        parts: The evaluators, in order; no two have a metric of the same name, and at most one
            evaluates clients.
        reveals_clients: Whether the record of the run may have what single clients measured.
        names: The names of clients, by id.
    """

    parts: Sequence[Evaluator]
    reveals_clients: bool
    names: Mapping[int, str] = field(default_factory=dict)

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Return the metrics of all parts, and what single clients measured."""
        found = [part.evaluate(model) for part in self.parts]
        metrics = {name: value for each in found for name, value in each.metrics.items()}
        clients = next((each.clients for each in found if each.clients is not None), None)
        if clients is None or not self.reveals_clients:
            return EvaluationOutcome(metrics=metrics)
        return EvaluationOutcome(metrics=metrics, clients=clients.with_names(self.names))


def build_evaluate_request(
    model: GlobalModel,
    strategy: Strategy,
    cohort: Sequence[ClientId],
    *,
    fine_tuning: FineTuning | None = None,
) -> EvaluateRequest:
    """Build the request to evaluate the global model and clients' personal models."""
    params = model.params
    request = EvaluateRequest(
        round_num=model.round_num,
        tensors=params.to_tensors(),
        order=tuple(params.layout.by_name),
        local=params.local,
        sent_once=model.sent_once,
    )
    if fine_tuning is not None:
        request = replace(
            request, fine_tuning=settings_of(fine_tuning.local), seed=fine_tuning.seed.value
        )
    if not has_personal_models(strategy):
        return request
    counted = {each: model.counted[each] for each in cohort if each in model.counted}
    if has_personal_update(strategy.local):
        layout = params.whole or params.layout
        request = replace(
            request,
            settings=settings_of(strategy.local),
            trained=tuple(spec.name for spec in layout.trainable),
        )
    return replace(request, counted=counted)


def check_evaluation(arrival: Arrival, *, round_num: int) -> EvaluateReply | Failure:
    """Check that a reply evaluates the given round, and refuse it otherwise."""
    reply = arrival.reply
    if isinstance(reply, Failure) or (
        isinstance(reply, EvaluateReply) and reply.round_num == round_num
    ):
        return reply
    reason = f"{type(reply).__name__} does not evaluate round {round_num}"
    arrival.refuse(reason)
    return Failure(reason)


@dataclass(frozen=True, kw_only=True)
class ChannelEvaluator:
    """Federated evaluation over a channel: each client measures the model on its own data.

    Attributes:
        channel: How clients are reached.
        cohort: Returns the clients to ask after a given number of finished rounds.
        directions: Whether higher or lower is better, for each metric that the run knows. Clients
            may report other metrics, whose distribution is recorded without a worst decile.
        deadline_s: Seconds to wait for the clients.
        strategy: The algorithm, which says whether clients have personal models.
        fine_tuning: How clients fine-tune before they measure their models, if they do.
        weighs: Whether to record means weighted by examples as well.
    """

    channel: Channel
    cohort: Callable[[int], Sequence[ClientId]]
    directions: Mapping[str, Direction]
    deadline_s: float
    strategy: Strategy
    fine_tuning: FineTuning | None = None
    weighs: bool = False

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Return each metric of the clients that answered in time, and its distribution."""
        round_num = model.round_num
        cohort = self.cohort(round_num)
        if not cohort:
            return EvaluationOutcome(metrics={})
        # One object for all clients, so that a channel encodes the model only once.
        request = build_evaluate_request(model, self.strategy, cohort, fine_tuning=self.fine_tuning)
        requests = dict.fromkeys(cohort, request)
        replies = dict[ClientId, EvaluateReply]()
        for arrival in ask_once(self.channel, requests, deadline_s=self.deadline_s):
            reply = check_evaluation(arrival, round_num=round_num)
            if isinstance(reply, EvaluateReply):
                if self.weighs and not 1 <= reply.num_examples <= MAX_EXAMPLES:
                    arrival.refuse(f"num_examples {reply.num_examples} is not in 1..{MAX_EXAMPLES}")
                    continue
                replies[arrival.client_id] = reply
        clients = _tabulate(replies, round_num=round_num, directions=self.directions)
        if clients is None:
            return EvaluationOutcome(metrics={})
        spread = summarize_metrics(clients.metrics, directions=self.directions)
        if self.weighs:
            num_examples = np.asarray(clients.num_examples)
            spread |= average_by_examples(
                clients.metrics, dict.fromkeys(clients.metrics, num_examples)
            )
        return EvaluationOutcome(metrics=spread, clients=clients)


def _tabulate(
    replies: Mapping[ClientId, EvaluateReply],
    *,
    round_num: int,
    directions: Mapping[str, Direction],
) -> ClientMetrics | None:
    """Return the metrics of the replies as a table; ``None`` if there is nothing in it."""
    measured = {each: select_recordable(replies[each].metrics) for each in sorted(replies)}
    counts = Counter(name for metrics in measured.values() for name in metrics)
    # A name that only few clients report is a mistake or an attack.
    known = list_majority_names(counts, num_replies=len(replies))
    if not known:
        return None
    return ClientMetrics(
        measured_after=round_num,
        client_ids=list(measured),
        num_examples=[replies[each].num_examples for each in measured],
        metrics={
            name: np.asarray(
                [metrics.get(name, math.nan) for metrics in measured.values()], np.float64
            )
            for name in known
        },
        directions={name: directions[name] for name in known if name in directions},
    )
