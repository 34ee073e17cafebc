"""Divides a secure sum by the expected number of clients, in privacy mode "distributed".

The clients added the noise, in :func:`fedlearn.secagg.terms.encode_contribution`.

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
    """Converts sums of levels to means: divides by the expected number of clients.

    Attributes:
        plan: The plan of the sessions.
        expected: Expected number of clients. It is public, so that dividing by it reveals nothing.
        simulated: In a simulation without sessions, the source of the noise that the clients would
            have added together; ``None``: the clients have added it.
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
        """Return the means over the expected number of clients, and the unchanged state.

        Args:
            aggregate: Sums of levels, with each client's share of the noise; overwritten.
            strategy: The strategy of the round.
            layout: Layout of the model.
            state: The strategy's state.
            round_num: Round index, from 0.
            attempt: Retry number of the round, starting at 0.
        """
        means, labels = {}, (round_num, attempt)
        for name, lanes in self.plan.vector_lanes(layout).items():
            parts = aggregate.lanes[name].split([lane.size for lane in lanes])
            scaled = [
                self._add_simulated_noise(lane, part, aggregate.num_clients, labels).mul_(
                    lane.step / self.expected
                )
                for lane, part in zip(lanes, parts, strict=True)
            ]
            means[name] = torch.cat(scaled).to(layout.dtype)
        return Aggregate(lanes=means, num_clients=max(1, round(self.expected))), state

    def _add_simulated_noise(
        self, lane: Lane, levels: Tensor, num_clients: int, labels: tuple[int, int]
    ) -> Tensor:
        if self.simulated is None:
            return levels
        # Shares of independent noise add up in variance: n shares have sqrt(n) times their sigma.
        sigma = lane.noise * math.sqrt(num_clients)
        noise = self.simulated.draw(sigma, lane.size, labels=(lane.name, *labels))
        return levels.add_(noise.to(levels.device))
