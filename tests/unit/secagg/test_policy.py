"""A policy accepts what was derived under its own assumptions, for any cohort."""

import pytest

from fedlearn.errors import PolicyViolation
from fedlearn.secagg.fixed_point import vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.terms import Terms, propose


def policy(corruption: float) -> TermsPolicy:
    return TermsPolicy(
        adversary=Adversary.HONEST_BUT_CURIOUS,
        allow_sparse=True,
        corruption=corruption,
        sigma_bits=40,
        min_cohort=2,
        max_cohort=1000,
        max_clip=1.0,
        max_weight=0,
        max_upload_bytes=100,
        max_releases_per_round=1,
    )


def terms(n: int, adversary: Adversary, topology: Topology, *, corruption: float) -> Terms:
    assumptions = Assumptions(
        adversary=adversary,
        topology=topology,
        corruption=corruption,
        dropout=0.1,
        sigma_bits=40,
        eta_bits=30,
    )
    lane = vector_lane(
        "delta",
        size=1,
        bound=1.0,
        modulus_bits=16,
        num_clients=n,
        weighted=False,
    )
    return propose(
        derive(n, assumptions=assumptions),
        run_id=bytes(16),
        round_num=0,
        attempt=0,
        request_hash=bytes(32),
        max_weight=0,
        lanes=(lane,),
    )


@pytest.mark.parametrize("adversary", Adversary)
@pytest.mark.parametrize(
    ("n", "topology"),
    [
        (3, Topology.COMPLETE),
        (50, Topology.COMPLETE),
        (100, Topology.SPARSE),
        (300, Topology.SPARSE),
    ],
)
def test_derived_terms_are_accepted_under_the_same_assumptions(
    n: int, topology: Topology, adversary: Adversary
) -> None:
    """And refused by whoever fears a fifth corrupted where a tenth was assumed."""
    made = terms(n, adversary, topology, corruption=0.1)
    policy(0.1).judge(made)
    if n > 3:
        with pytest.raises(PolicyViolation, match="threshold"):
            policy(0.2).judge(made)
