"""Evaluates the global model on held-out examples and on each client's own data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.fine_tuning import FineTuning
from fedlearn.algorithms.personal_models import has_personal_models, has_personal_update
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.distribution import Direction, average_by_examples, summarize_metrics
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest, Failure
from fedlearn.core.reported_metrics import list_majority_names, select_recordable
from fedlearn.rounds.updates import MAX_EXAMPLES
from fedlearn.transport.base import Arrival, Channel, ask_once


class Evaluator(Protocol):
    """Evaluates a model; the metrics go into the record of the round."""

    def evaluate(self, model: GlobalModel) -> Mapping[str, float]:
        """Return the metrics by name."""


@dataclass(frozen=True)
class Evaluators:
    """Runs several evaluators and merges their metrics.

    Attributes:
        parts: The evaluators, in order; no two have a metric of the same name.
    """

    parts: Sequence[Evaluator]

    def evaluate(self, model: GlobalModel) -> Mapping[str, float]:
        """Return the metrics of all parts."""
        metrics: dict[str, float] = {}
        for part in self.parts:
            metrics |= part.evaluate(model)
        return metrics


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

    def evaluate(self, model: GlobalModel) -> Mapping[str, float]:
        """Return statistics of each metric over the clients that answered in time."""
        round_num = model.round_num
        cohort = self.cohort(round_num)
        if not cohort:
            return {}
        # One object for all clients, so that a channel encodes the model only once.
        request = build_evaluate_request(model, self.strategy, cohort, fine_tuning=self.fine_tuning)
        requests = dict.fromkeys(cohort, request)
        replies = list[EvaluateReply]()
        for arrival in ask_once(self.channel, requests, deadline_s=self.deadline_s):
            reply = check_evaluation(arrival, round_num=round_num)
            if isinstance(reply, EvaluateReply):
                if self.weighs and not 1 <= reply.num_examples <= MAX_EXAMPLES:
                    arrival.refuse(f"num_examples {reply.num_examples} is not in 1..{MAX_EXAMPLES}")
                    continue
                replies.append(reply)
        by_name: dict[str, list[float]] = {}
        examples: dict[str, list[int]] = {}
        for reply in replies:
            for name, value in select_recordable(reply.metrics).items():
                by_name.setdefault(name, []).append(value)
                examples.setdefault(name, []).append(reply.num_examples)
        counts = {name: len(values) for name, values in by_name.items()}
        # A name that only few clients report is a mistake or an attack.
        known = list_majority_names(counts, num_replies=len(replies))
        per_client = {name: np.asarray(by_name[name]) for name in known}
        spread = summarize_metrics(per_client, directions=self.directions)
        if self.weighs:
            spread |= average_by_examples(
                per_client, {name: np.asarray(examples[name]) for name in known}
            )
        return spread
