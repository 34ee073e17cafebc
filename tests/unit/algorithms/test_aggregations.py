"""Edge cases of the weighted mean; the property tests check that it is a monoid."""

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import DELTA, LaneSpec, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout

CPU = torch.device("cpu")
LAYOUT = Layout.of(nn.Linear(2, 1, bias=False))


def block(deltas: Tensor, weights: Tensor, **further: Tensor) -> Updates:
    clients = [ClientId(client) for client in range(len(deltas))]
    return Updates(clients, weights, {"delta": deltas, **further}, [0] * len(deltas))


def empty(mean: WeightedMean, *further: LaneSpec) -> LaneSums:
    return mean.init([DELTA, *further], LAYOUT, device=CPU)


def test_an_empty_mean_is_an_error() -> None:
    """Without clients there is no model to release. Control: one client has a mean."""
    mean = WeightedMean(by_examples=True)
    with pytest.raises(ValueError, match="no client"):
        mean.finalize(empty(mean))
    state = mean.accumulate(empty(mean), block(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])))
    aggregate = mean.finalize(state)
    assert aggregate.lanes["delta"].tolist() == [1.0, 2.0]
    assert aggregate.num_clients == 1


@pytest.mark.parametrize(("by_examples", "expected"), [(True, [2.0, 3.0]), (False, [3.0, 4.0])])
def test_weights_are_examples_or_ones(*, by_examples: bool, expected: list[float]) -> None:
    """FedAvg weights clients by examples; otherwise each client counts the same."""
    mean = WeightedMean(by_examples=by_examples)
    deltas, num_examples = torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([3.0, 1.0])
    state = mean.accumulate(empty(mean), block(deltas, mean.weigh(num_examples)))
    assert mean.finalize(state).lanes["delta"].tolist() == expected


def test_a_lane_says_whether_clients_count_by_their_weight() -> None:
    """Next to the weighted delta, one lane weights all clients equally and one does not."""
    alike = LaneSpec(name="alike", over=1, weighted=False, bound=None)
    weighted = LaneSpec(name="weighted", over=1, weighted=True, bound=None)
    mean, ones = WeightedMean(by_examples=True), torch.ones(2, 2)
    values = torch.tensor([[1.0], [5.0]])
    updates = block(ones, torch.tensor([3.0, 1.0]), alike=values, weighted=values)
    for rows in (
        updates,
        Updates(
            updates.client_ids,
            updates.weights_B,
            {name: list(each) for name, each in updates.lanes.items()},
            updates.based_on,
        ),
    ):
        aggregate = mean.finalize(mean.accumulate(empty(mean, alike, weighted), rows))
        assert aggregate.lanes["alike"].tolist() == [3.0]
        assert aggregate.lanes["weighted"].tolist() == [2.0]


def test_the_sum_of_weights_is_exact_for_millions_of_clients() -> None:
    """The sum is float64: in float32, 2**24 + 1 equals 2**24."""
    mean = WeightedMean(by_examples=True)
    state = empty(mean)
    for weight in (2.0**24, 1.0, 1.0, 1.0):
        state = mean.accumulate(state, block(torch.zeros(1, 2), torch.tensor([weight])))
    assert float(state.weight) == 2.0**24 + 3


def test_a_state_is_its_tensors() -> None:
    """An all-reduce adds in place, so ``tensors`` must return the state itself, not a copy."""
    mean = WeightedMean(by_examples=True)
    state = mean.accumulate(empty(mean), block(torch.ones(1, 2), torch.tensor([2.0])))
    for tensor in state.tensors():
        tensor.mul_(2)
    assert state.sums["delta"].tolist() == [4.0, 4.0]
    assert float(state.weight) == 4.0
