"""The coordinator's stages: when they may close, and whose values are in the sum."""

import numpy as np
import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import AggregationAborted
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.fixed_point import build_vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms
from tests.rehearsal import Cast, Rehearsal, Way, rehearse

IDS = [ClientId(i) for i in range(9)]
RUN = bytes(16)
LANE = build_vector_lane(
    "delta",
    size=3,
    bound=1.0,
    modulus_bits=24,
    num_clients=9,
    weighted=False,
)
POLICY = TermsPolicy(
    adversary=Adversary.HONEST_BUT_CURIOUS,
    allow_sparse=True,
    corruption=0.0,
    sigma_bits=1,
    min_cohort=2,
    max_cohort=10,
    max_clip=1.0,
    max_weight=0,
    max_upload_bytes=100,
    max_releases_per_round=1,
    max_draw_factor=2.0,
)
CAST = Cast.of(IDS, policy=POLICY, num_threads=1)


def terms(*, topology: Topology, min_survivors: int, threshold: int) -> Terms:
    return Terms(
        run_id=RUN,
        round_num=0,
        attempt=0,
        request_hash=bytes(32),
        adversary=Adversary.HONEST_BUT_CURIOUS,
        topology=topology,
        num_clients=9,
        num_neighbors=8 if topology is Topology.COMPLETE else 4,
        threshold=threshold,
        quorum=5,
        min_survivors=min_survivors,
        sigma_bits=40,
        max_weight=0,
        lanes=(LANE,),
    )


def run(given: Terms, drops: dict[ClientId, Stage]) -> Rehearsal:
    def post(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        return None if way is Way.UP and drops.get(client_id) is stage else data

    one = Contribution(values={"delta": np.ones(3)}, weight=1, request_hash=bytes(32))
    return rehearse(
        given,
        cast=CAST,
        contributions=dict.fromkeys(IDS, one),
        states=dict.fromkeys(IDS, ClientState.fresh(RUN)),
        post=post,
        num_threads=2,
    )


def test_whoever_is_lost_after_its_vector_came_is_in_the_sum() -> None:
    given = terms(topology=Topology.COMPLETE, min_survivors=5, threshold=3)
    drops = {IDS[0]: Stage.ADVERTISE, IDS[1]: Stage.SHARE, IDS[2]: Stage.MASK}
    outcome = run(given, {**drops, IDS[3]: Stage.UNMASK}).outcome
    assert outcome.survivors == tuple(IDS[3:])
    assert np.abs(outcome.total.weighted_sum(LANE) / 6 - 1.0).max() < 2 * LANE.step


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK])
def test_a_stage_with_too_few_left_aborts(stage: Stage) -> None:
    given = terms(topology=Topology.COMPLETE, min_survivors=7, threshold=3)
    run(given, dict.fromkeys(IDS[:2], stage))
    with pytest.raises(AggregationAborted) as caught:
        run(given, dict.fromkeys(IDS[:3], stage))
    assert caught.value.stage == stage
    assert "min_survivors is 7" in caught.value.reason


def test_a_client_without_enough_holders_aborts_before_anything_is_released() -> None:
    """In a sparse graph, one dropout can leave a client with fewer than t of its holders."""
    given = terms(topology=Topology.SPARSE, min_survivors=5, threshold=4)
    run(given, {})
    with pytest.raises(AggregationAborted, match="the threshold is 4") as caught:
        run(given, {IDS[4]: Stage.MASK})
    assert caught.value.stage == Stage.MASK


def test_a_roster_too_small_for_its_sparse_graph_aborts() -> None:
    given = terms(topology=Topology.SPARSE, min_survivors=5, threshold=3)
    run(given, dict.fromkeys(IDS[:3], Stage.ADVERTISE))
    with pytest.raises(AggregationAborted, match="too few for a sparse graph"):
        run(given, dict.fromkeys(IDS[:4], Stage.ADVERTISE))


def test_shares_of_too_few_abort() -> None:
    given = terms(topology=Topology.COMPLETE, min_survivors=5, threshold=3)
    run(given, dict.fromkeys(IDS[:6], Stage.UNMASK))
    with pytest.raises(AggregationAborted) as caught:
        run(given, dict.fromkeys(IDS[:7], Stage.UNMASK))
    assert caught.value.stage == Stage.UNMASK
    assert "2 shares of client 0, the threshold is 3" in caught.value.reason
