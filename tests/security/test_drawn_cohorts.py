"""A coordinator that fills the cohort with its accomplices, while clients hold a roster."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlearn import assembly
from fedlearn.config import load
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, SecureReply, SecureTermsRequest, TrainRequest
from fedlearn.deployment.opening import list_available
from fedlearn.errors import AggregationAborted, DeploymentError, PolicyViolation
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.fixed_point import build_vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan, build_notice, hash_request
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms, propose
from fedlearn.session.pins import PinFile
from fedlearn.session.session import ClientSession
from fedlearn.transport.base import Exchange
from tests.rehearsal import Cast, Rehearsal, rehearse
from tests.unit.session.test_secure import PARAMS, TRAIN, Trainer

NUM_LISTED, NUM_ASKED, ROUND = 40, 6, 3
LISTED = [ClientId(each) for each in range(NUM_LISTED)]
DRAW = RosterDraw(roster="the roster", client_ids=frozenset(LISTED), factor=2.0)
DRAWN = DRAW.select(LISTED, round_num=ROUND, cohort_size=NUM_ASKED)
UNDRAWN = [each for each in LISTED if each not in DRAWN]

POLICY = TermsPolicy(
    adversary=Adversary.ACTIVE_SERVER,
    allow_sparse=False,
    corruption=0.1,
    sigma_bits=40,
    min_cohort=3,
    max_cohort=100,
    max_clip=1.0,
    max_weight=0,
    max_upload_bytes=1 << 20,
    max_releases_per_round=1,
    max_draw_factor=2.0,
)
CAST = Cast.of(LISTED, policy=POLICY, num_threads=1)


def terms_for(adversary: Adversary = Adversary.ACTIVE_SERVER) -> Terms:
    lane = build_vector_lane(
        "delta", size=4, bound=1.0, modulus_bits=32, num_clients=NUM_ASKED, weighted=False
    )
    return propose(
        derive(NUM_ASKED, assumptions=make_assumptions(adversary)),
        run_id=bytes(16),
        round_num=ROUND,
        attempt=0,
        request_hash=bytes(32),
        max_weight=0,
        lanes=(lane,),
    )


def make_assumptions(adversary: Adversary = Adversary.ACTIVE_SERVER) -> Assumptions:
    return Assumptions(
        adversary=adversary,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=0.2,
        sigma_bits=40,
        eta_bits=30,
    )


def run(
    cohort: Sequence[ClientId],
    *,
    accomplices: Iterable[ClientId] = (),
    draw: RosterDraw | None = DRAW,
    terms: Terms | None = None,
) -> Rehearsal:
    """Run a session in which accomplices do not check the draw."""
    own = set(accomplices)
    clients = {
        each: replace(
            CAST.clients[each],
            draw=None if each in own else draw,
            policy=replace(POLICY, adversary=Adversary.HONEST_BUT_CURIOUS),
        )
        for each in cohort
    }
    zero = Contribution(values={"delta": np.zeros(4)}, weight=1, request_hash=bytes(32))
    return rehearse(
        terms or terms_for(),
        cast=replace(CAST, clients=clients),
        contributions=dict.fromkeys(cohort, zero),
        states=dict.fromkeys(cohort, ClientState.fresh(bytes(16))),
        post=lambda _stage, _way, _client_id, data: data,
        num_threads=1,
    )


def test_a_cohort_that_was_drawn_goes_through() -> None:
    assert NUM_ASKED <= len(DRAWN) < NUM_LISTED
    result = run(DRAWN[:NUM_ASKED])
    assert not result.refusals
    assert len(result.outcome.survivors) == NUM_ASKED


def test_among_accomplices_that_were_not_drawn_a_client_shares_nothing() -> None:
    """The victim was drawn, five others were not. Control: without a roster it takes part."""
    victim, own = DRAWN[0], UNDRAWN[: NUM_ASKED - 1]
    cohort = sorted([victim, *own])
    result = run(cohort, accomplices=own)
    assert list(result.refusals) == [victim]
    assert list(result.outcome.survivors) == own, "they have the sum of nobody else"
    without = run(cohort, accomplices=own, draw=None)
    assert not without.refusals
    assert victim in without.outcome.survivors


def test_one_accomplice_that_was_not_drawn_ends_the_session_for_all() -> None:
    cohort = sorted([*DRAWN[: NUM_ASKED - 1], UNDRAWN[0]])
    with pytest.raises(AggregationAborted, match="1 clients are left") as caught:
        run(cohort, accomplices=UNDRAWN[:1])
    assert caught.value.stage == Stage.SHARE
    result = run(cohort)
    assert list(result.refusals) == UNDRAWN[:1], "the control: an honest one stays away"
    assert len(result.outcome.survivors) == NUM_ASKED - 1


def test_a_coordinator_that_keeps_to_the_protocol_may_ask_whom_it_likes() -> None:
    curious = terms_for(Adversary.HONEST_BUT_CURIOUS)
    assert not run(UNDRAWN[:NUM_ASKED], terms=curious).refusals


def test_a_client_that_was_not_drawn_says_so_and_why() -> None:
    with pytest.raises(PolicyViolation) as caught:
        POLICY.judge_drawn(terms_for(), [*DRAWN, UNDRAWN[0]], draw=DRAW)
    assert "`max_draw_factor`" in str(caught.value)
    assert f"client {UNDRAWN[0]} in round 3" in str(caught.value)
    assert "2 for each of the 6 invited, of 40" in str(caught.value)
    assert "secure_aggregation.roster" in str(caught.value)
    lax = replace(DRAW, factor=1e9)
    POLICY.judge_drawn(terms_for(), LISTED, draw=lax)


# ---- The roster in a file: both sides draw the same clients --------------------------------------


def roster_at(path: Path, *, coordinator_key: bytes = bytes(32)) -> IdentityRoster:
    """Save a roster of forty clients to a file."""
    entries = {
        each: KnownKey(key=CAST.clients[each].directory[each], num_rotations=0, name=f"c-{each}")
        for each in LISTED
    }
    roster = IdentityRoster(coordinator_key=coordinator_key, clients=entries)
    roster.save(path)
    return roster


class Hall:
    """A channel on which all clients are connected."""

    def available(self) -> list[ClientId]:
        return LISTED

    def open(self, *, deadline_s: float) -> Exchange:
        raise AssertionError("nobody is asked here")


def test_a_deployment_asks_whom_its_roster_draws_and_its_clients_agree(tmp_path: Path) -> None:
    path = tmp_path / "all.roster"
    signer, coordinator_key = keys.create_signer()
    given = roster_at(path, coordinator_key=coordinator_key)
    components = deployed(path)
    assert components.draw is not None
    there = [list_available(components, Hall(), round_num) for round_num in range(40)]
    assert 9 < np.mean([len(each) for each in there]) < 15, "twelve of forty"
    assert len({tuple(each) for each in there}) == len(there)
    plan = SecurePlan(
        parameters=derive(NUM_ASKED, assumptions=make_assumptions()),
        min_survivors=5,
        clip_norm=1.0,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=True,
        modulus_bits=32,
    )
    file = PinFile(path=tmp_path / "pins.json", coordinator_key=coordinator_key)
    for round_num in range(6):
        for client_id in LISTED[:8]:
            client = replace(CAST.clients[client_id], coordinator_key=coordinator_key)
            client = replace(client, policy=replace(POLICY, max_weight=10))
            file.write(file.read().of(given))
            session = ClientSession(client_id, Trainer(), client, pin_file=file)
            train = replace(TRAIN, round_num=round_num)
            answer = asked(session, plan, train, signer)
            assert isinstance(answer, SecureReply) == (client_id in there[round_num])
            if isinstance(answer, Failure):
                assert "max_draw_factor" in answer.reason


def asked(
    session: ClientSession, plan: SecurePlan, train: TrainRequest, signer: keys.Signer
) -> object:
    terms = plan.terms(
        PARAMS.layout,
        run_id=bytes(16),
        round_num=train.round_num,
        attempt=0,
        request_hash=hash_request(train),
    )
    signed, _ = open_session(terms, signer=signer, directory={})
    request = SecureTermsRequest(
        round_num=train.round_num,
        attempt=0,
        message=messages.encode(signed),
        notice=build_notice(train),
    )
    reply, _ = session.handle(encode(request), b"")
    return decode(reply)


def deployed(path: Path, *more: str) -> assembly.Deployment:
    overrides = [
        "secure_aggregation.mode=complete",
        f"secure_aggregation.roster={path}",
        f"cohort.num_wanted={NUM_ASKED}",
        "stragglers.over_selection=1",
        *more,
    ]
    return assembly.build_deployment(load(None, overrides=overrides), data_dir=path.parent)


def test_without_a_roster_nobody_is_drawn_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "all.roster"
    roster_at(path)
    assert deployed(path).draw is not None
    other = deployed(path, "secure_aggregation.roster=")
    assert other.draw is None
    assert list_available(other, Hall(), 0) == LISTED
    with pytest.raises(DeploymentError, match=r"missing\.roster"):
        deployed(tmp_path / "missing.roster")
