"""Rosters that are too small for their terms, one reason at a time."""

from dataclasses import replace

import pytest

from fedlearn.secagg.fixed_point import build_vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.session import find_shortage
from fedlearn.secagg.terms import Terms

SPARSE = Terms(
    run_id=bytes(16),
    round_num=0,
    attempt=0,
    request_hash=bytes(32),
    adversary=Adversary.HONEST_BUT_CURIOUS,
    topology=Topology.SPARSE,
    num_clients=12,
    num_neighbors=4,
    threshold=3,
    quorum=7,
    min_survivors=2,
    sigma_bits=40,
    max_weight=0,
    lanes=(
        build_vector_lane(
            "delta", size=3, bound=1.0, modulus_bits=24, num_clients=12, weighted=False
        ),
    ),
)
ACTIVE = replace(SPARSE, adversary=Adversary.ACTIVE_SERVER)
COMPLETE = replace(SPARSE, topology=Topology.COMPLETE, num_neighbors=11, threshold=5)


@pytest.mark.parametrize(
    ("terms", "least", "reason"),
    [
        (replace(SPARSE, min_survivors=9), 9, "8 clients in the roster, min_survivors is 9"),
        (ACTIVE, 7, "6 clients in the roster, the quorum is 7"),
        (SPARSE, 6, "5 clients are too few for a sparse graph with 4 neighbors"),
        (COMPLETE, 5, "4 holders, the threshold is 5"),
    ],
)
def test_a_roster_has_a_least_size_and_below_it_a_reason(
    terms: Terms, least: int, reason: str
) -> None:
    assert find_shortage(terms, least) is None, "the control"
    assert find_shortage(terms, least - 1) == reason
