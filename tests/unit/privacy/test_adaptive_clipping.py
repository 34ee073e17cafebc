"""Adaptive clipping: where the norm settles, what it costs, and what clients report."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlearn.algorithms.cohorts import FixedCohorts
from fedlearn.algorithms.lanes import DELTA, Aggregate, Updates, stack_rows
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAdam, FedAvg
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.algorithms.transforms import BELOW, ClipIndicator, norms
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.privacy.adaptive_clipping import (
    AdaptiveClip,
    AdaptivelyBoundedUpdates,
    split_multiplier,
)
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.privacy.plan import CentralPlan
from fedlearn.privacy.secret import ReproducibleStreams

SGD = LocalSgd(epochs=1, batch_size=8, learning_rate=0.5)
ADAM = FedAdam(
    SGD, weight_by_examples=False, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3
)
NUM_CLIENTS = 100
MODEL = Params.of(nn.Linear(20, 4))


class Backwards(AdaptiveClip):
    """The update with the wrong sign, as one released framework has it."""

    def next_norm(self, clip_norm: float, *, share: float) -> float:
        """Move away from the quantile."""
        return super().next_norm(clip_norm, share=2.0 * self.quantile - share)


def updates(round_num: int) -> Tensor:
    """Return updates whose norms are log-normal with median 1: shape [clients, P]."""
    rng = Seed(round_num).numpy()
    directions = rng.standard_normal((NUM_CLIENTS, MODEL.layout.size))
    directions /= ((directions**2).sum(axis=1, keepdims=True)) ** 0.5
    lengths = rng.lognormal(0.0, 0.5, (NUM_CLIENTS, 1))
    return torch.from_numpy(directions * lengths).float()


def settle_clip_norm(
    adaptive: AdaptiveClip, *, first: float, inner: Strategy, num_rounds: int
) -> float:
    """Run rounds without training; return the clip norm after them."""
    plan = CentralPlan(
        cohorts=FixedCohorts(NUM_CLIENTS, NUM_CLIENTS),
        clip_norm=first,
        noise_multiplier=0.7,
        num_wanted=NUM_CLIENTS,
        streams=ReproducibleStreams(Seed(1)),
        adaptive=adaptive,
    )
    strategy = plan.wrap_strategy(inner)
    release = plan.build_release(strategy, MODEL.layout, plan.noise)
    params, state = MODEL, strategy.init(MODEL)
    for round_num in range(num_rounds):
        now = strategy.at(state)
        rows = updates(round_num)
        given = Updates(
            [ClientId(each) for each in range(NUM_CLIENTS)],
            torch.ones(NUM_CLIENTS),
            {DELTA.name: rows},
            [round_num] * NUM_CLIENTS,
        )
        for transform in now.transforms:
            given = transform(given)
        summed = now.aggregation
        assert isinstance(summed, BoundedSum)
        sums = summed.init(now.lanes, MODEL.layout, device=torch.device("cpu"))
        aggregate, state = release(
            summed.finalize(summed.accumulate(sums, given)),
            strategy=now,
            layout=MODEL.layout,
            state=state,
            round_num=round_num,
            attempt=0,
        )
        params, state, metrics = _step_once(now, params, aggregate, state)
        assert metrics["clip_norm"] == summed.bounds[DELTA.name]
    now = strategy.at(state)
    assert isinstance(now, AdaptivelyBoundedUpdates)
    return now.clip_norm


def _step_once(
    strategy: Strategy, params: Params, aggregate: Aggregate, state: State
) -> tuple[Params, State, Mapping[str, float]]:
    stepped = strategy.step(params, aggregate, state)
    return stepped.params, stepped.state, stepped.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [FedAvg(SGD, weight_by_examples=False), ADAM], ids=["avg", "adam"]
)
@pytest.mark.parametrize(("quantile", "norm"), [(0.5, 1.0), (0.8, 1.523)])
@pytest.mark.parametrize("first", [0.1, 10.0])
def test_the_norm_settles_at_the_quantile(
    first: float, quantile: float, norm: float, inner: Strategy
) -> None:
    """From far below and far above, within a tenth, in spite of the noise."""
    adaptive = AdaptiveClip(quantile=quantile)
    assert settle_clip_norm(adaptive, first=first, inner=inner, num_rounds=120) == pytest.approx(
        norm, rel=0.1
    )


def test_the_wrong_sign_would_be_noticed() -> None:
    """The control: the norm diverges in one direction or the other."""
    adaptive, inner = Backwards(quantile=0.5), FedAvg(SGD, weight_by_examples=False)
    assert settle_clip_norm(adaptive, first=0.1, inner=inner, num_rounds=60) < 0.01
    assert settle_clip_norm(adaptive, first=10.0, inner=inner, num_rounds=60) > 100.0


@given(noise_multiplier=st.floats(1e-3, 1e3), expected=st.integers(1, 100_000))
def test_both_together_cost_what_one_release_does(noise_multiplier: float, expected: int) -> None:
    """The count costs at most a twentieth of it."""
    of_updates, of_count = split_multiplier(noise_multiplier, expected=expected)
    assert of_updates**-2 + of_count**-2 == pytest.approx(noise_multiplier**-2, rel=1e-9)
    assert of_count**-2 <= noise_multiplier**-2 / 20 * (1 + 1e-9)
    assert of_count >= expected / 10 * (1 - 1e-9)  # the paper's noise, or more


def test_clients_tell_whether_they_were_below() -> None:
    """A norm at the clip counts as below; strided rows report the same; the rest is unchanged."""
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.inf, 0.0], [6.0, 8.0]])
    for each in (rows, list(rows)):
        told = ClipIndicator(asked_norm=5.0)(
            Updates([ClientId(n) for n in range(4)], torch.ones(4), {"delta": each}, [0] * 4)
        )
        assert stack_rows(told.lanes[BELOW.name]).tolist() == [[0.5], [0.5], [-0.5], [-0.5]]
        assert told.lanes["delta"] is each


@given(size=st.sampled_from([1, 1000, 1024, 5000]), scale=st.floats(-10, 10))
def test_norms_are_right_to_one_part_in_many_thousands(size: int, scale: float) -> None:
    rows = torch.from_numpy(Seed(size).numpy().standard_normal((3, size)) * 10.0**scale).float()
    expected = torch.linalg.vector_norm(rows.double(), dim=1)
    assert torch.allclose(norms(rows), expected, rtol=2.0**-15, atol=0.0)


def test_the_inner_strategy_sees_nothing_of_the_norm() -> None:
    """Neither its state nor its lanes hold it, since a strategy may iterate over both."""
    bounded = AdaptivelyBoundedUpdates(
        ADAM,
        BoundedSum(bounds={"delta": 1.0, BELOW.name: 0.5}, multipliers={}, largest=3),
        AdaptiveClip(quantile=0.5),
    )
    state = bounded.init(MODEL)
    zeros = MODEL.vector.new_zeros(MODEL.layout.size)
    aggregate = Aggregate({"delta": zeros, BELOW.name: torch.tensor([0.5])}, 3)
    alone = ADAM.step(MODEL, Aggregate({"delta": zeros}, 3), ADAM.init(MODEL))
    stepped = bounded.step(MODEL, aggregate, state)
    assert torch.equal(stepped.params.vector, alone.params.vector)
    assert stepped.state.keys() - alone.state.keys() == state.keys() - ADAM.init(MODEL).keys()


@pytest.mark.parametrize("quantile", [0.0, 1.0, math.nan])
def test_a_quantile_that_nobody_can_reach_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        AdaptiveClip(quantile=quantile)
