"""The weighted mean's edges; that it is a monoid stands in the properties."""

import pytest
import torch
from torch import nn

from fedlearn.algorithms.aggregators import WeightedMean
from fedlearn.core.collecting import Block
from fedlearn.core.params import Layout

CPU = torch.device("cpu")
LAYOUT = Layout.of(nn.Linear(2, 1, bias=False))


def test_an_empty_mean_is_an_error() -> None:
    """There is no neutral model: nothing may be released. One client is the control."""
    mean = WeightedMean(by_examples=True)
    with pytest.raises(ValueError, match="no client"):
        mean.finalize(mean.init(LAYOUT, device=CPU))
    block = Block(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]))
    state = mean.accumulate(mean.init(LAYOUT, device=CPU), block)
    assert mean.finalize(state).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("by_examples", "expected"), [(True, [2.0, 3.0]), (False, [3.0, 4.0])])
def test_weights_are_examples_or_ones(*, by_examples: bool, expected: list[float]) -> None:
    """FedAvg weights by examples; without, each client counts the same."""
    mean = WeightedMean(by_examples=by_examples)
    deltas, num_examples = torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([3.0, 1.0])
    block = Block(deltas, mean.weigh(num_examples))
    state = mean.accumulate(mean.init(LAYOUT, device=CPU), block)
    assert mean.finalize(state).tolist() == expected


def test_the_sum_of_weights_is_exact_for_millions_of_clients() -> None:
    """It is kept in float64: in float32, 2**24 + 1 is 2**24."""
    mean = WeightedMean(by_examples=True)
    state = mean.init(LAYOUT, device=CPU)
    for weight in (2.0**24, 1.0, 1.0, 1.0):
        state = mean.accumulate(state, Block(torch.zeros(1, 2), torch.tensor([weight])))
    assert float(state.weight) == 2.0**24 + 3


def test_a_state_is_its_tensors() -> None:
    """What an all-reduce adds up in place is the state itself, not a copy of it."""
    mean = WeightedMean(by_examples=True)
    state = mean.accumulate(
        mean.init(LAYOUT, device=CPU), Block(torch.ones(1, 2), torch.tensor([2.0]))
    )
    for tensor in state.tensors():
        tensor.mul_(2)
    assert state.total_P.tolist() == [4.0, 4.0]
    assert float(state.weight) == 4.0
