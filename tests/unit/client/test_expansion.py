"""Masks that are expanded ahead of time: which session may use them, and when they are dropped."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch

from fedlearn.client import expansion
from fedlearn.client.expansion import MaskExpander, count_mask_bytes
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.errors import Cancelled
from fedlearn.secagg import messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import ClientState, SharedStep
from fedlearn.secagg.fixed_point import LaneRole, Words
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.secagg.server import open_session
from fedlearn.secagg.terms import Contribution, Terms
from fedlearn.session.secure import SessionState
from fedlearn.simulation.secure import SimulatedIdentities

CLIENTS = [ClientId(i) for i in range(4)]
LAYOUT = Params.of(torch.nn.Linear(3, 2)).layout
ASSUMED = Assumptions(
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    corruption=0.0,
    dropout=0.25,
    sigma_bits=40,
    eta_bits=30,
)
PLAN = SecurePlan(
    parameters=derive(4, assumptions=ASSUMED),
    min_survivors=3,
    clip_norm=1.0,
    statistics_norm=1.0,
    max_loss=1.0,
    max_examples=10,
    by_examples=True,
    modulus_bits=32,
)
IDENTITIES = SimulatedIdentities(4, PLAN)


class Counting(SecureClient):
    """A client that counts how often it expands masks."""

    num_expansions = 0

    def expand(self, step: SharedStep, *, check: Callable[[], None]) -> tuple[Words, ...]:
        type(self).num_expansions += 1
        return super().expand(step, check=check)


def refuse_to_train(_terms: Terms) -> Contribution:
    raise AssertionError("nothing is trained before the stage of masks")


def share_secrets(
    *, attempt: int = 0
) -> tuple[dict[ClientId, ClientState], Mapping[ClientId, object]]:
    """Return clients that have shared secrets, all but the last, and the packets for each."""
    terms = PLAN.terms(
        LAYOUT, run_id=bytes(16), round_num=0, attempt=attempt, request_hash=bytes(32)
    )
    signer = IDENTITIES.coordinator[0]
    signed, advertising = open_session(terms, signer=signer, directory=IDENTITIES)
    states = {i: ClientState.fresh(bytes(16)) for i in CLIENTS}

    def ask(client_id: ClientId, message: messages.Message) -> messages.Message:
        reply, states[client_id] = IDENTITIES.client(client_id).handle(
            message, states[client_id], contribute=refuse_to_train
        )
        return reply

    for client_id in CLIENTS:
        advert = ask(client_id, signed)
        assert isinstance(advert, messages.Advert)
        advertising.receive(client_id, advert)
    rosters, sharing = advertising.close()
    for client_id in CLIENTS[:-1]:
        shares = ask(client_id, rosters[client_id])
        assert isinstance(shares, messages.Shares)
        sharing.receive(client_id, shares)
    return states, sharing.close()[0]


def client() -> SecureClient:
    return Counting(**vars(IDENTITIES.client(CLIENTS[0])))


def encode_state(state: ClientState) -> bytes:
    return SessionState(trainer={}, session=state).to_bytes()


def step_of(state: ClientState) -> SharedStep:
    assert isinstance(state.step, SharedStep)
    return state.step


@pytest.fixture
def ahead() -> Iterator[MaskExpander]:
    Counting.num_expansions = 0
    found = MaskExpander()
    yield found
    found.close()


def zero(terms: Terms) -> Contribution:
    summed = (lane for lane in terms.lanes if lane.role is not LaneRole.WEIGHT)
    values = {lane.name: np.zeros(lane.size) for lane in summed}
    return Contribution(values=values, weight=1, request_hash=terms.request_hash)


def test_a_vector_is_the_same_with_masks_expanded_ahead(ahead: MaskExpander) -> None:
    """One neighbor never shared its secrets, so its mask is removed. Masks are used only once."""
    states, packets = share_secrets()
    state, message = states[CLIENTS[0]], packets[CLIENTS[0]]
    assert isinstance(message, messages.Packets)
    assert CLIENTS[3] not in message.packets
    plain, _ = client().handle(message, state, contribute=zero)
    ahead.follow(client(), encode_state(state))
    restored = ClientState.from_bytes(state.to_bytes())  # as loaded for the next message
    used, _ = client().handle(message, restored, contribute=zero, find_masks=ahead.take)
    assert used == plain
    assert Counting.num_expansions == 1
    assert ahead.take(step_of(state)) is None


def test_after_a_restart_masks_are_expanded_when_they_are_needed(ahead: MaskExpander) -> None:
    """A new process has none ready, but its vector is the same. Control: the old one had them."""
    states, packets = share_secrets()
    state, message = states[CLIENTS[0]], packets[CLIENTS[0]]
    assert isinstance(message, messages.Packets)
    ahead.follow(client(), encode_state(state))
    restarted = MaskExpander()
    assert restarted.take(step_of(state)) is None
    plain, _ = client().handle(message, state, contribute=zero, find_masks=restarted.take)
    restarted.close()
    used, _ = client().handle(message, state, contribute=zero, find_masks=ahead.take)
    assert used == plain
    assert Counting.num_expansions == 1


def test_masks_of_another_session_are_never_used(ahead: MaskExpander) -> None:
    """They are kept for their own session. Control: that session gets them."""
    mine, other = share_secrets()[0][CLIENTS[0]], share_secrets(attempt=1)[0][CLIENTS[0]]
    ahead.follow(client(), encode_state(mine))
    assert ahead.take(step_of(other)) is None
    assert ahead.take(step_of(mine)) is not None


def test_masks_of_secrets_that_were_not_kept_are_never_used(ahead: MaskExpander) -> None:
    """The same session with another self-mask, as if the first answer could not be stored."""
    states, _ = share_secrets()
    step = step_of(states[CLIENTS[0]])
    again = SharedStep(
        step.session,
        step.opening,
        step.mask_secret,
        type(step.seed).generate(len(step.seed.reveal())),
        step.own,
    )
    ahead.follow(client(), encode_state(states[CLIENTS[0]]))
    assert ahead.take(again) is None
    assert ahead.take(step) is not None


def test_what_was_dropped_is_gone_and_what_follows_takes_its_place(ahead: MaskExpander) -> None:
    """Masks of at most one step are held."""
    first, second = share_secrets()[0][CLIENTS[0]], share_secrets(attempt=1)[0][CLIENTS[0]]
    ahead.follow(client(), encode_state(first))
    ahead.drop()
    assert ahead.take(step_of(first)) is None
    ahead.follow(client(), encode_state(first))
    ahead.follow(client(), encode_state(second))
    assert ahead.take(step_of(first)) is None
    assert ahead.take(step_of(second)) is not None


@pytest.mark.parametrize("state", [ClientState.fresh(bytes(16)), None])
def test_there_is_nothing_to_expand_before_secrets_are_shared(
    ahead: MaskExpander, state: ClientState | None
) -> None:
    data = b"" if state is None else encode_state(state)
    ahead.follow(client(), data)
    assert ahead.take(step_of(share_secrets()[0][CLIENTS[0]])) is None
    assert Counting.num_expansions == 0


def test_masks_above_the_bound_are_not_expanded_ahead(
    ahead: MaskExpander, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: masks exactly at the bound are expanded."""
    state = share_secrets()[0][CLIENTS[0]]
    num_bytes = count_mask_bytes(step_of(state).session.terms.lanes)
    monkeypatch.setattr(expansion, "MAX_EXPANDED_BYTES", num_bytes - 1)
    ahead.follow(client(), encode_state(state))
    assert ahead.take(step_of(state)) is None
    monkeypatch.setattr(expansion, "MAX_EXPANDED_BYTES", num_bytes)
    ahead.follow(client(), encode_state(state))
    assert ahead.take(step_of(state)) is not None


def test_an_expansion_that_is_called_off_ends(ahead: MaskExpander) -> None:
    """An exception raised by the check is passed on."""

    def check() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        client().expand(step_of(share_secrets()[0][CLIENTS[0]]), check=check)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_masks_are_the_same_on_any_number_of_threads(num_threads: int) -> None:
    step = step_of(share_secrets()[0][CLIENTS[0]])
    values = vars(IDENTITIES.client(CLIENTS[0]))
    one, many = (SecureClient(**{**values, "num_threads": n}) for n in (1, num_threads))
    alone, found = (each.expand(step, check=lambda: None) for each in (one, many))
    assert all(np.array_equal(a, b) for a, b in zip(alone, found, strict=True))
    assert any(words.any() for words in alone)
