"""A policy accepts terms that were derived under its own assumptions, for any cohort size."""

import math
from dataclasses import replace

import pytest

from fedlearn.errors import PolicyViolation
from fedlearn.privacy.gaussian import gaussian_epsilon
from fedlearn.secagg.fixed_point import build_noisy_lane, build_vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import NoiseFloor, TermsPolicy, squared_distance
from fedlearn.secagg.terms import Terms, propose


def policy(corruption: float, noise: NoiseFloor | None = None) -> TermsPolicy:
    return TermsPolicy(
        noise=noise,
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
        max_draw_factor=2.0,
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
    lane = build_vector_lane(
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
    """A policy that assumes twice the corruption refuses them."""
    made = terms(n, adversary, topology, corruption=0.1)
    policy(0.1).judge(made)
    if n > 3:
        with pytest.raises(PolicyViolation, match="threshold"):
            policy(0.2).judge(made)


def test_in_a_sparse_graph_a_lying_server_assures_of_a_quorum_and_no_more() -> None:
    """A client cannot count survivors there, so its ``min_cohort`` is compared with q."""
    active, curious = (
        terms(300, adversary, Topology.SPARSE, corruption=0.1) for adversary in reversed(Adversary)
    )
    assert (active.num_assured, active.min_survivors) == (166, 270)
    assert curious.num_assured == 270
    wants = replace(policy(0.1), min_cohort=200)
    wants.judge(curious)
    with pytest.raises(PolicyViolation, match=r"min_cohort.*asked 166.*at least 200"):
        wants.judge(active)
    wants.judge(replace(active, quorum=200))
    complete = terms(30, Adversary.ACTIVE_SERVER, Topology.COMPLETE, corruption=0.1)
    assert complete.num_assured == complete.min_survivors == 27


def test_a_client_bounds_what_its_sample_of_signatures_holds_with() -> None:
    """With a smaller sigma, a coordinator would show the client fewer signatures."""
    made = terms(300, Adversary.ACTIVE_SERVER, Topology.SPARSE, corruption=0.1)
    with pytest.raises(PolicyViolation, match=r"sigma_bits.*asked 39.*at least 40"):
        policy(0.1).judge(replace(made, sigma_bits=39))
    policy(0.1).judge(made)
    complete = terms(30, Adversary.ACTIVE_SERVER, Topology.COMPLETE, corruption=0.1)
    policy(0.1).judge(replace(complete, sigma_bits=1))  # there a client sees the whole quorum


def test_a_threshold_above_the_holders_is_refused() -> None:
    """No secret of this client could ever be recovered. Control: a threshold of all holders."""
    given = terms(300, Adversary.HONEST_BUT_CURIOUS, Topology.SPARSE, corruption=0.1)
    k = given.num_neighbors
    policy(0.1).judge(replace(given, threshold=k))
    with pytest.raises(PolicyViolation, match=f"threshold.*{k + 1}.*at most {k}"):
        policy(0.1).judge(replace(given, threshold=k + 1))


def noisy(n: int, *, noise_shares: tuple[float, ...]) -> Terms:
    """Return terms with one noisy lane per share."""
    made = terms(n, Adversary.HONEST_BUT_CURIOUS, Topology.COMPLETE, corruption=0.1)
    lanes = tuple(
        build_noisy_lane(
            f"lane {number}",
            size=2,
            bound=1.0,
            modulus_bits=40,
            num_clients=n,
            noise_share=share,
        )
        for number, share in enumerate(noise_shares)
    )
    return replace(made, lanes=lanes)


def test_the_distance_is_that_of_all_lanes_by_honest_noise_alone() -> None:
    """Of 30 invited clients at least 27 are in a sum, of which this client distrusts 3."""
    made = noisy(30, noise_shares=(0.5, 2.0))
    assert made.min_survivors == 27
    assert squared_distance(made, corruption=0.1) == pytest.approx((4**2 + 1**2) / 24)
    assert squared_distance(made, corruption=0.0) == pytest.approx((4**2 + 1**2) / 26)
    assert squared_distance(made, corruption=0.99) == pytest.approx(4**2 + 1**2)  # its own noise
    sparse = replace(
        terms(300, Adversary.ACTIVE_SERVER, Topology.SPARSE, corruption=0.1),
        lanes=noisy(300, noise_shares=(0.5,)).lanes,
    )
    assert squared_distance(sparse, corruption=0.1) == pytest.approx(4**2 / (166 - 30))
    bare = terms(30, Adversary.HONEST_BUT_CURIOUS, Topology.COMPLETE, corruption=0.1)
    assert math.isinf(squared_distance(bare, corruption=0.0))


def test_the_days_epsilon_counts_what_was_spent() -> None:
    """Past releases add to ε as squared distances; a day's budget, once spent, allows no more."""
    made = noisy(30, noise_shares=(0.5,))
    squared = squared_distance(made, corruption=0.1)
    floor = NoiseFloor(min_share=0.4, max_epsilon=None, target_delta=1e-6)
    policy(0.1, floor).judge(made)
    with pytest.raises(PolicyViolation, match=r"privacy\.min_noise_share.*asked 0.5.*at least 0.6"):
        policy(0.1, replace(floor, min_share=0.6)).judge(made)
    twice = gaussian_epsilon(math.sqrt(2 * squared), 1e-6)
    tight = replace(floor, max_epsilon=twice * 1.001)
    policy(0.1, replace(tight, spent=squared)).judge(made)
    with pytest.raises(PolicyViolation, match=r"privacy\.max_epsilon_per_day"):
        policy(0.1, replace(tight, spent=2 * squared)).judge(made)
    with pytest.raises(PolicyViolation, match=r"privacy\.mode.*a sum without noise"):
        policy(0.1, floor).judge(
            terms(30, Adversary.HONEST_BUT_CURIOUS, Topology.COMPLETE, corruption=0.1)
        )
