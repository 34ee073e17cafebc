"""How good the global model is: on held-out examples, and client by client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedlearn.core.distribution import distribution
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest
from fedlearn.core.params import Params
from fedlearn.transport.base import Channel


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


@dataclass(frozen=True, kw_only=True)
class ChannelEvaluator:
    """Federated evaluation over a channel: each client measures the model on its own data.

    Attributes:
        channel: How clients are reached.
        cohort: Who is asked.
        deadline_s: Seconds to wait for them.
    """

    channel: Channel
    cohort: Sequence[ClientId]
    deadline_s: float

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return the distribution over the clients that answered in time."""
        request = EvaluateRequest(round_num=round_num, tensors=params.named())
        arrivals = self.channel.exchange(
            dict.fromkeys(self.cohort, request), deadline_s=self.deadline_s
        )
        replies = [
            arrival.reply
            for arrival in arrivals
            if isinstance(arrival.reply, EvaluateReply) and arrival.reply.round_num == round_num
        ]
        by_name: dict[str, list[float]] = {}
        for reply in replies:
            for name, value in reply.metrics.items():
                by_name.setdefault(name, []).append(value)
        # A metric that few clients name is a mistake or a nuisance, not a measurement.
        usual = {name: values for name, values in by_name.items() if 2 * len(values) > len(replies)}
        return distribution({name: np.asarray(values) for name, values in usual.items()})
