"""A mean is released from a sum that contains its clients' noise."""

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError
from fedlearn.rounds.distributed_mean import DistributedMean
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan

ASSUMED = Assumptions(
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    corruption=0.1,
    dropout=0.3,
    sigma_bits=40,
    eta_bits=30,
)
LAYOUT = Params.of(nn.Linear(3, 2)).layout
STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=8, learning_rate=0.1), weight_by_examples=False)


def plan(*, by_examples: bool = False) -> SecurePlan:
    return SecurePlan(
        parameters=derive(10, assumptions=ASSUMED),
        min_survivors=7,
        clip_norm=0.5,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=by_examples,
        modulus_bits=32,
        noise_multiplier=2.0,
    )


class Ones:
    """A noise source that returns the standard deviation itself."""

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        assert labels == ("parameters", 3, 1)
        return torch.full((size,), sigma, dtype=torch.float64)


@pytest.mark.parametrize("simulated", [None, Ones()])
def test_the_sum_is_divided_by_who_was_expected_and_not_by_who_came(simulated: Ones | None) -> None:
    """Seven of ten expected clients reported; simulated noise is that of seven shares."""
    mean = DistributedMean(plan(), expected=10, simulated=simulated)
    (lane,) = plan().vector_lanes(LAYOUT)[DELTA.name]
    levels = torch.full((LAYOUT.size,), 1e6, dtype=torch.float64)
    released, _ = mean(
        Aggregate(lanes={DELTA.name: levels}, num_clients=7),
        strategy=STRATEGY,
        layout=LAYOUT,
        state={},
        round_num=3,
        attempt=1,
    )
    found = released.lanes[DELTA.name]
    noise = lane.noise * 7**0.5 if simulated is not None else 0.0
    expected = torch.full_like(found, (1e6 + noise) * lane.step / 10)
    torch.testing.assert_close(found, expected)
    assert released.num_clients == 10, "what multiplies the mean, as EASGD does, gets the sum"


def test_the_fewest_honest_shares_are_the_noise_that_was_asked() -> None:
    """Of ten clients, three may drop out and one be corrupt: six shares make z times the norm."""
    (lane,) = plan().vector_lanes(LAYOUT)[DELTA.name]
    assert lane.noise * 6**0.5 == pytest.approx(2.0 * lane.norm)
    assert plan().lanes(LAYOUT) == (lane,)  # clients send no other lane


def test_weights_have_no_noise_and_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight all clients equally"):
        plan(by_examples=True)
