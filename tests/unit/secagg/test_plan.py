"""What a plan says of itself: against whom its sums hide an update."""

import pytest

from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan


@pytest.mark.parametrize(
    ("num_clients", "dropout", "told", "is_warned"),
    [
        (
            13,
            0.3,
            "behind those of 7 others, where the coordinator knows the parts of A = 2",
            False,
        ),
        (4, 0.0, "behind those of 2 others, where the coordinator knows the parts of A = 1", False),
        (3, 0.0, "behind those of 1 others, where the coordinator knows the parts of A = 1", True),
    ],
)
def test_a_plan_tells_behind_how_many_others_it_hides_an_update(
    num_clients: int, dropout: float, told: str, *, is_warned: bool
) -> None:
    """And that clients refuse, by default, sums of so few that two accomplices read one of them."""
    assumptions = Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )
    parameters = derive(num_clients, assumptions=assumptions)
    plan = SecurePlan(
        parameters=parameters,
        min_survivors=parameters.min_survivors,
        clip_norm=1.0,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=True,
        modulus_bits=32,
    )
    assert told in plan.explain()
    assert ("clients refuse sums of fewer than 4" in plan.explain()) == is_warned
