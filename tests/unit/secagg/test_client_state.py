"""A client's state can be restored in another process at every step of a session."""

from dataclasses import replace

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.client_state import (
    AdvertisedStep,
    ClientState,
    ConfirmedStep,
    MaskedStep,
    ReleasedStep,
    SharedStep,
    Step,
)
from fedlearn.secagg.fixed_point import build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Advert
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Terms

TERMS = Terms(
    run_id=b"r" * 16,
    round_num=2,
    attempt=1,
    request_hash=bytes(32),
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    num_clients=3,
    num_neighbors=2,
    threshold=2,
    quorum=2,
    min_survivors=2,
    sigma_bits=40,
    max_weight=9,
    lanes=(build_weight_lane(max_weight=9, num_clients=3),),
)
ADVERTS = tuple(
    Advert(
        client_id=ClientId(i),
        packet_key=bytes([i] * 32),
        mask_key=bytes(32),
        nonce=bytes(16),
        signature=bytes(64),
    )
    for i in (1, 5)
)
IDS = tuple(advert.client_id for advert in ADVERTS)
DIRECTORY = dict.fromkeys(IDS, bytes(32))
SESSION, _ = Session.of(TERMS, ADVERTS, directory=DIRECTORY)
SECRETS = [SecretBytes.generate(32) for _ in range(3)]
HELD = {ClientId(1): SecretBytes.generate(72), ClientId(5): SecretBytes.generate(72)}
OPENING = {ClientId(5): SECRETS[0]}
SURVIVORS = SESSION.pack_ranks(IDS)
STEPS: list[Step] = [
    AdvertisedStep(TERMS, ADVERTS[0], SECRETS[0], SECRETS[1]),
    SharedStep(SESSION, OPENING, SECRETS[1], SECRETS[2], None),
    SharedStep(SESSION, OPENING, SECRETS[1], SECRETS[2], HELD[ClientId(1)]),
    MaskedStep(SESSION, HELD),
    ConfirmedStep(SESSION, HELD, SURVIVORS),
    ReleasedStep(SESSION, SURVIVORS, {ClientId(1): SecretBytes.generate(36)}),
]
FRESH = ClientState.fresh(b"r" * 16)


@pytest.mark.parametrize("step", STEPS)
def test_a_state_comes_back_from_its_bytes(step: Step) -> None:
    """Compared as bytes, since sessions and secrets define no equality."""
    state = replace(FRESH.record_release(release_step(TERMS), most=9), step=step)
    data = state.to_bytes()
    again = ClientState.from_bytes(data)
    assert again.to_bytes() == data
    assert type(again.step) is type(step)
    assert again.releases == state.releases
    if isinstance(step, MaskedStep | ConfirmedStep) and isinstance(
        again.step, MaskedStep | ConfirmedStep
    ):
        assert again.step.session.id == SESSION.id
        assert again.step.held == HELD
    if isinstance(step, SharedStep) and isinstance(again.step, SharedStep):
        assert again.step.opening == OPENING


@pytest.mark.parametrize("step", STEPS)
def test_a_damaged_state_is_refused(step: Step) -> None:
    data = FRESH.with_step(step).to_bytes()
    for bad in (data[:-1], data + b"\x00", b"XXXX" + data[4:], data[:4] + b"\x02" + data[5:]):
        with pytest.raises(ProtocolError):
            ClientState.from_bytes(bad)


def release_step(terms: Terms) -> ReleasedStep:
    return ReleasedStep(Session.of(terms, ADVERTS, directory=DIRECTORY)[0], SURVIVORS, {})


def last_of(state: ClientState) -> tuple[int, int, int]:
    (last,) = state.releases.last
    assert last.survivors == IDS
    return last.round_num, last.attempt, last.num_releases


def test_releases_are_counted_by_round_and_end_the_session() -> None:
    first = FRESH.with_step(STEPS[0]).record_release(release_step(TERMS), most=9)
    assert not first.is_in_session
    assert FRESH.with_step(STEPS[0]).is_in_session, "the control"
    assert last_of(first) == (2, 1, 1)
    assert last_of(first.record_release(release_step(replace(TERMS, attempt=2)), most=9)) == (
        2,
        2,
        2,
    )
    assert last_of(first.record_release(release_step(replace(TERMS, round_num=3)), most=9)) == (
        3,
        1,
        1,
    )


def test_a_release_that_is_worked_on_again_after_a_crash_counts_once() -> None:
    """The history outlives the run's state, so after a crash it may be one answer ahead of it."""
    first = FRESH.record_release(release_step(TERMS), most=9)
    behind = replace(FRESH.with_step(STEPS[4]), releases=first.releases)
    assert last_of(behind.record_release(release_step(TERMS), most=9)) == (2, 1, 1)


def test_ending_a_session_forgets_its_secrets_but_not_the_releases() -> None:
    state = FRESH.record_release(release_step(TERMS), most=9).with_step(STEPS[1])
    assert SECRETS[2].reveal() in state.to_bytes()
    ended = state.with_step(None)
    assert SECRETS[2].reveal() not in ended.to_bytes()
    assert last_of(ended) == (2, 1, 1)
