"""A client that is restarted between messages, and masks that are expanded ahead of time."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import AggregationAborted, PolicyViolation
from fedlearn.secagg import messages
from fedlearn.secagg.bitmaps import pack_bitmap
from fedlearn.secagg.client import FindMasks, SecureClient, find_no_masks
from fedlearn.secagg.client_state import ClientState, ReleasedStep, SharedStep
from fedlearn.secagg.fixed_point import build_vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.masking import add_packed, zeros
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import Masking, open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms
from tests.rehearsal import Cast, Way, deliver, rehearse
from tests.rosters import NO_PROOF

IDS = [ClientId(i) for i in range(4)]
RUN = bytes(16)
LANE = build_vector_lane(
    "delta",
    size=9,
    bound=1.0,
    modulus_bits=24,
    num_clients=4,
    weighted=False,
)
TERMS = Terms(
    run_id=RUN,
    round_num=0,
    attempt=0,
    request_hash=bytes(32),
    adversary=Adversary.HONEST_BUT_CURIOUS,
    topology=Topology.COMPLETE,
    num_clients=4,
    num_neighbors=3,
    threshold=2,
    quorum=3,
    min_survivors=2,
    sigma_bits=40,
    max_weight=0,
    lanes=(LANE,),
)
POLICY = TermsPolicy(
    adversary=Adversary.HONEST_BUT_CURIOUS,
    allow_sparse=False,
    corruption=0.25,
    sigma_bits=40,
    min_cohort=2,
    max_cohort=10,
    max_clip=1.0,
    max_weight=0,
    max_upload_bytes=100,
    max_releases_per_round=2,
    max_draw_factor=2.0,
)
CAST = Cast.of(IDS, policy=POLICY, num_threads=1)
ZERO = Contribution(values={"delta": np.zeros(9)}, weight=1, request_hash=bytes(32))


class Restarting(SecureClient):
    """A client that answers every message in a fresh process."""

    def handle(
        self,
        message: messages.Message,
        state: ClientState,
        *,
        contribute: Callable[[Terms], Contribution],
        find_masks: FindMasks = find_no_masks,
    ) -> tuple[messages.Up, ClientState]:
        before = ClientState.from_bytes(state.to_bytes())
        reply, after = super().handle(message, before, contribute=contribute, find_masks=find_masks)
        return reply, ClientState.from_bytes(after.to_bytes())


def shared() -> tuple[dict[ClientId, ClientState], dict[ClientId, messages.Packets], Masking]:
    """Run a session up to R2; the last client's shares are lost."""
    signed, advertising = open_session(
        TERMS, signer=CAST.signer, directory=CAST.clients[IDS[0]].directory
    )
    states = {}
    for i in IDS:
        advert, states[i] = CAST.clients[i].advertise(signed, ClientState.fresh(RUN))
        advertising.receive(i, advert)
    rosters, sharing = advertising.close()
    for i in IDS:
        answer, states[i] = CAST.clients[i].handle(rosters[i], states[i], contribute=lambda _: ZERO)
        assert isinstance(answer, messages.Shares)
        if i != IDS[3]:
            sharing.receive(i, answer)
    packets, masking = sharing.close()
    return states, packets, masking


def test_masks_expanded_ahead_are_those_that_are_sent() -> None:
    """One neighbor did not share in the meantime, so its mask is taken out again."""
    states, packets, _ = shared()
    client, state = CAST.clients[IDS[1]], states[IDS[1]]
    step = state.step
    assert isinstance(step, SharedStep)
    plain, _ = client.mask(packets[IDS[1]], state, step, contribution=ZERO)
    expanded = client.expand(step, check=lambda: None)
    ahead, _ = client.mask(packets[IDS[1]], state, step, contribution=ZERO, precomputed=expanded)
    assert ahead == plain
    words = zeros([LANE])
    add_packed(words, plain.packed, lanes=[LANE])
    assert not np.array_equal(words[0], expanded[0].astype(words[0].dtype)), "one did not share"


@pytest.mark.parametrize("adversary", Adversary)
def test_a_client_may_be_a_fresh_process_for_every_message(adversary: Adversary) -> None:
    cast = Cast.of(IDS, policy=POLICY, num_threads=1)
    clients = {i: Restarting(**vars(client)) for i, client in cast.clients.items()}
    terms = replace(TERMS, adversary=adversary, threshold=3)
    result = rehearse(
        terms,
        cast=Cast(clients, cast.signer),
        contributions=dict.fromkeys(IDS, ZERO),
        states=dict.fromkeys(IDS, ClientState.fresh(RUN)),
        post=deliver,
        num_threads=1,
    )
    assert list(result.outcome.survivors) == IDS
    assert result.refusals == {}


def test_a_policy_may_allow_a_second_release_in_a_round() -> None:
    """A crash after a release then costs no round. Control: a third release is refused."""
    states = dict.fromkeys(IDS, ClientState.fresh(RUN))
    for attempt in range(2):
        result = rehearse(
            replace(TERMS, attempt=attempt),
            cast=CAST,
            contributions=dict.fromkeys(IDS, ZERO),
            states=states,
            post=deliver,
            num_threads=1,
        )
        states = dict(result.states)
        assert {state.releases.last[0].num_releases for state in states.values()} == {attempt + 1}
    signed, _ = open_session(
        replace(TERMS, attempt=2), signer=CAST.signer, directory=CAST.clients[IDS[0]].directory
    )
    with pytest.raises(PolicyViolation, match="max_releases_per_round"):
        CAST.clients[IDS[0]].advertise(signed, states[IDS[0]])


def test_a_lost_reply_to_the_last_message_does_not_open_the_session_again() -> None:
    """The state is durable before the reply is sent, so the release counts even if it is lost."""

    def lose(stage: Stage, way: Way, client_id: ClientId, data: bytes) -> bytes | None:
        lost = (stage, way, client_id) == (Stage.UNMASK, Way.UP, IDS[0])
        return None if lost else data

    result = rehearse(
        TERMS,
        cast=CAST,
        contributions=dict.fromkeys(IDS, ZERO),
        states=dict.fromkeys(IDS, ClientState.fresh(RUN)),
        post=lose,
        num_threads=1,
    )
    assert result.states[IDS[0]].releases.last[0].num_releases == 1
    assert IDS[0] in result.outcome.survivors


def test_what_was_released_is_released_again_for_the_same_survivors_alone() -> None:
    """Against a curious server, where nothing is signed. Control: the same request again."""
    result = rehearse(
        TERMS,
        cast=CAST,
        contributions=dict.fromkeys(IDS, ZERO),
        states=dict.fromkeys(IDS, ClientState.fresh(RUN)),
        post=deliver,
        num_threads=1,
    )
    client, state = CAST.clients[IDS[1]], result.states[IDS[1]]
    step = state.step
    assert isinstance(step, ReleasedStep)
    told = messages.Survivors(ranks=step.survivors)
    again, after = client.handle(told, state, contribute=lambda _: ZERO)
    assert isinstance(again, messages.ShareRelease)
    assert again.shares == step.shares
    assert after is state
    fewer = messages.Survivors(ranks=pack_bitmap([0, 1, 2], size=4))
    signed = messages.Signatures(
        signed=step.survivors,
        root=bytes(32),
        signatures=(),
        signers=(),
        of_signatures=NO_PROOF,
        of_signers=NO_PROOF,
    )
    for other in (fewer, signed):
        with pytest.raises(AggregationAborted, match="released its shares to other survivors"):
            client.handle(other, state, contribute=lambda _: ZERO)
