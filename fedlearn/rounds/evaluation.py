"""How good the global model is: on held-out examples, and client by client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedlearn.core.distribution import Direction, by_examples, distribution
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest, Failure
from fedlearn.core.params import Params
from fedlearn.core.reported import named, usual
from fedlearn.rounds.updates import MAX_EXAMPLES
from fedlearn.transport.base import Arrival, Channel, ask_once


class Evaluator(Protocol):
    """Measures a model; what it returns goes into the record of the round."""

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return metrics by name after ``round_num`` finished rounds."""


@dataclass(frozen=True)
class Evaluators:
    """Several evaluators as one.

    Attributes:
        parts: Asked in turn; their metrics have different names.
    """

    parts: Sequence[Evaluator]

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return the metrics of all parts."""
        metrics: dict[str, float] = {}
        for part in self.parts:
            metrics |= part.evaluate(params, round_num=round_num)
        return metrics


def measured(arrival: Arrival, *, round_num: int) -> EvaluateReply | Failure:
    """Return a client's measurement of a round; one that sent something else is told."""
    reply = arrival.reply
    if isinstance(reply, Failure) or (
        isinstance(reply, EvaluateReply) and reply.round_num == round_num
    ):
        return reply
    reason = f"{type(reply).__name__} does not measure round {round_num}"
    arrival.refuse(reason)
    return Failure(reason)


@dataclass(frozen=True, kw_only=True)
class ChannelEvaluator:
    """Federated evaluation over a channel: each client measures the model on its own data.

    Attributes:
        channel: How clients are reached.
        cohort: Returns who is asked, after how many finished rounds.
        directions: Of the metrics that the run knows, which way is better. Clients may measure
            others: of those the spread is recorded without a worst decile.
        deadline_s: Seconds to wait for them.
        weighs: Whether the means by examples are recorded as well.
    """

    channel: Channel
    cohort: Callable[[int], Sequence[ClientId]]
    directions: Mapping[str, Direction]
    deadline_s: float
    weighs: bool = False

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return the distribution over the clients that answered in time."""
        cohort = self.cohort(round_num)
        if not cohort:
            return {}
        request = EvaluateRequest(
            round_num=round_num, tensors=params.named(), order=tuple(params.layout.by_name)
        )
        requests = dict.fromkeys(cohort, request)
        replies = list[EvaluateReply]()
        for arrival in ask_once(self.channel, requests, deadline_s=self.deadline_s):
            reply = measured(arrival, round_num=round_num)
            if isinstance(reply, EvaluateReply):
                if self.weighs and not 1 <= reply.num_examples <= MAX_EXAMPLES:
                    arrival.refuse(f"num_examples {reply.num_examples} is not in 1..{MAX_EXAMPLES}")
                    continue
                replies.append(reply)
        by_name: dict[str, list[float]] = {}
        examples: dict[str, list[int]] = {}
        for reply in replies:
            for name, value in named(reply.metrics).items():
                by_name.setdefault(name, []).append(value)
                examples.setdefault(name, []).append(reply.num_examples)
        counts = {name: len(values) for name, values in by_name.items()}
        known = usual(counts, num_replies=len(replies))
        per_client = {name: np.asarray(by_name[name]) for name in known}
        spread = distribution(per_client, directions=self.directions)
        if self.weighs:
            spread |= by_examples(per_client, {name: np.asarray(examples[name]) for name in known})
        return spread
