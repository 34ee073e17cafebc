"""Cases of the shelf: strategies that broadcast one number, one per tensor, and a vector once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import Aggregate, Lanes, Over
from fedlearn.algorithms.local import (
    Broadcasts,
    BroadcastSpec,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
)
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.params import Params
from tests.parity.shelf import COHORTS, SGD, Case, make_model, shares, train, weighted

STRENGTH, WEIGHTS, ANCHOR = "strength", "weights", "anchor"


@dataclass(frozen=True, kw_only=True)
class Anchored(LocalUpdateWrapper):
    """Pulls each client towards the initial model, for all tensors alike."""

    takes_flat: ClassVar[bool] = True

    @property
    def broadcasts(self) -> Broadcasts:
        return {
            STRENGTH: BroadcastSpec(over=1),
            ANCHOR: BroadcastSpec(over=Over.TRAINABLE, is_sent_once=True),
        }

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        strength = broadcast[STRENGTH][0]
        triples = zip(x, grads, broadcast[ANCHOR], strict=True)
        directions = [grad + strength * (value - anchor) for value, grad, anchor in triples]
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class AnchoredByTensor(LocalUpdateWrapper):
    """The same with a weight for each tensor, which the server computes from its last change."""

    @property
    def broadcasts(self) -> Broadcasts:
        return {
            STRENGTH: BroadcastSpec(over=1),
            WEIGHTS: BroadcastSpec(over=Over.TENSORS),
            ANCHOR: BroadcastSpec(over=Over.TRAINABLE, is_sent_once=True),
        }

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        strength, weights = broadcast[STRENGTH][0], broadcast[WEIGHTS]
        directions = [
            grad + strength * weight * (value - anchor)
            for value, grad, weight, anchor in zip(
                x, grads, weights, broadcast[ANCHOR], strict=True
            )
        ]
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True)
class AnchoredAveraging(Strategy):
    """FedAvg that halves the pull in each round."""

    local: Anchored | AnchoredByTensor
    aggregation: WeightedMean

    def init(self, params: Params) -> State:
        trainable = params.layout.trainable
        return {
            STRENGTH: torch.ones(1, dtype=torch.float64),
            WEIGHTS: torch.ones(len(trainable), dtype=torch.float64),
            ANCHOR: params.vector[: params.layout.num_trainable].clone(),
        }

    def broadcast(self, state: State) -> Lanes:
        return {name: state[name] for name in self.broadcasts}

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        delta = aggregate.lanes["delta"]
        norms = [
            float(delta[spec.offset : spec.offset + spec.size].norm())
            for spec in params.layout.trainable
        ]
        weights = 1.0 / (1.0 + torch.tensor(norms, dtype=torch.float64))
        changed = {STRENGTH: state[STRENGTH] / 2, WEIGHTS: weights}
        return StepResult(params.with_vector(params.vector + delta), {**state, **changed})


def anchored(x: Tensor) -> Iterator[Tensor]:
    """SGD along the gradient plus a pull that halves in each round."""
    yield from _pulled(x, by_tensor=False)


def anchored_by_tensor(x: Tensor) -> Iterator[Tensor]:
    """The same, weaker for tensors that moved far in the last round."""
    yield from _pulled(x, by_tensor=True)


def _pulled(x: Tensor, *, by_tensor: bool) -> Iterator[Tensor]:
    sizes = torch.tensor([each.numel() for each in make_model().parameters()])
    anchor, strength, weights = x, 1.0, torch.ones(len(sizes)).double()
    for round_num, cohort in enumerate(COHORTS):
        factor = strength * weights.repeat_interleave(sizes)

        def direction(g: Tensor, y: Tensor, factor: Tensor = factor) -> Tensor:
            return g + factor * (y - anchor)

        models = [train(x, client, round_num, direction=direction)[0] for client in cohort]
        mean = weighted(shares(cohort), models)
        strength /= 2
        if by_tensor:
            moved = (mean - x).split(sizes.tolist())
            weights = torch.stack([1 / (1 + part.norm()) for part in moved])
        x = mean
        yield x


_BY_EXAMPLES, _ALIKE = WeightedMean(by_examples=True), WeightedMean(by_examples=False)
_FLAT, _BY_TENSOR = Anchored(inner=SGD), AnchoredByTensor(inner=SGD)

CASES: Mapping[str, Case] = {
    "anchored": Case(
        AnchoredAveraging(_FLAT, _BY_EXAMPLES),
        anchored,
        control=FedAvg(SGD),
        protected=AnchoredAveraging(_FLAT, _ALIKE),
    ),
    "anchored by tensor": Case(
        AnchoredAveraging(_BY_TENSOR, _BY_EXAMPLES),
        anchored_by_tensor,
        control=AnchoredAveraging(_FLAT, _BY_EXAMPLES),
        protected=AnchoredAveraging(_BY_TENSOR, _ALIKE),
    ),
}
