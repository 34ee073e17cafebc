"""The release of a sum whose noise its clients have added: distributed differential privacy.

References:
    Kairouz, Liu and Steinke, 2021, `The Distributed Discrete Gaussian Mechanism for Federated
    Learning with Secure Aggregation <https://arxiv.org/abs/2102.06387>`_.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.core.params import Layout
from fedlearn.privacy.bounded_sum import Noise
from fedlearn.secagg.fixed_point import Lane
from fedlearn.secagg.plan import SecurePlan


@dataclass(frozen=True)
class DistributedMean:
    """Divides sums of levels by the number of clients that is expected.

    Attributes:
        plan: What sessions ask.
        expected: The public denominator.
        simulated: Where the noise comes from that clients would have added, all of it at once, in
            a simulation without sessions; ``None``: they have added it.
    """

    plan: SecurePlan
    expected: float
    simulated: Noise | None

    def __call__(
        self,
        aggregate: Aggregate,
        *,
        strategy: Strategy,  # noqa: ARG002 - its lanes are in the plan
        layout: Layout,
        state: State,
        round_num: int,
        attempt: int,
    ) -> tuple[Aggregate, State]:
        """Return the means, of as many clients as are expected, and the state.

        Args:
            aggregate: Sums of levels, of clients that each have a share of noise; overwritten.
            strategy: Of the round.
            layout: Of the model.
            state: The strategy's, which stays.
            round_num: Index, from 0.
            attempt: 0, or how often the round was retried.
        """
        means, labels = {}, (round_num, attempt)
        for name, lanes in self.plan.vector_lanes(layout).items():
            parts = aggregate.lanes[name].split([lane.size for lane in lanes])
            scaled = [
                self._noised(lane, part, aggregate.num_clients, labels).mul_(
                    lane.step / self.expected
                )
                for lane, part in zip(lanes, parts, strict=True)
            ]
            means[name] = torch.cat(scaled).to(layout.dtype)
        return Aggregate(lanes=means, num_clients=max(1, round(self.expected))), state

    def _noised(
        self, lane: Lane, levels: Tensor, num_clients: int, labels: tuple[int, int]
    ) -> Tensor:
        if self.simulated is None:
            return levels
        sigma = lane.noise * math.sqrt(num_clients)
        noise = self.simulated.draw(sigma, lane.size, labels=(lane.name, *labels))
        return levels.add_(noise.to(levels.device))
