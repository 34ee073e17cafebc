"""A coordinator that lies in each message in turn, to real client sessions.

Each lie must end the session for the client that receives it, before anything useful to the liar
has left that client, and leave the others an exact sum. Control: the same cohort, channel and
coordinator without the lie, before and after it.
"""

from collections import defaultdict
from dataclasses import replace

import pytest

from fedlearn.core.messages import ClientId, Failure
from fedlearn.secagg import messages
from fedlearn.secagg.messages import ShareRelease
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.session import Stage
from tests.rosters import signatures_of, survivors_of
from tests.security.liars.harness import (
    Lie,
    Stand,
    answer_of,
    plan_for,
    require_nothing,
    row_of,
)
from tests.security.liars.lies import LIES, SURVIVORS, changed, survivors

#: Six clients, of which at least four must survive: t = q = 4.
PLAN = plan_for(6, corruption=0.1, dropout=0.34)
VICTIM, OTHER = ClientId(2), ClientId(4)
EVERYONE = list(range(6))
EVERYBODY = [ClientId(each) for each in EVERYONE]
WITHOUT_IT = [0, 1, 3, 4, 5]
ORDER = list(Stage)
#: Every fifth of the more than a hundred lies.
EXAMPLES = LIES[::5]


def stand() -> Stand:
    """Return a cohort after an honest session: the control, and a source of messages to replay."""
    made = Stand.in_memory(victim=VICTIM, plan=PLAN)
    assert made.require_exact(made.collect(round_num=3)) == EVERYONE
    return made


def test_a_coordinator_that_does_not_lie_gets_its_sums() -> None:
    """The control of every lie, over several rounds."""
    made = stand()
    for round_num in (4, 5):
        collected = made.collect(round_num=round_num)
        assert made.require_exact(collected) == EVERYONE
        assert not any(isinstance(reply, Failure) for reply in made.liar.replies.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lie, id=lie.name, marks=() if lie in EXAMPLES else pytest.mark.slow)
        for lie in LIES
    ],
)
def test_a_lie_ends_the_session_for_whom_it_is_told_to(lie: Lie) -> None:
    """The victim refuses and says nothing more; even the honest message comes too late for it.

    The others' sum is exact. It includes the victim if its vector had been sent before.
    """
    made = stand()
    made.liar.lie = lie
    collected = made.collect(round_num=4)
    assert made.liar.num_told == 1
    refusal = made.liar.replies[VICTIM, lie.stage]
    assert isinstance(refusal, Failure), f"it answered with {answer_of(refusal)}"
    assert lie.reason in refusal.reason
    assert lie.reason in row_of(collected, VICTIM).reason
    has_sent = ORDER.index(lie.stage) > ORDER.index(Stage.MASK)
    assert made.require_exact(collected) == (EVERYONE if has_sent else WITHOUT_IT)
    for stage in ORDER[ORDER.index(lie.stage) :]:
        answered = made.liar.replies.get((VICTIM, stage), refusal)
        assert isinstance(answered, Failure), f"it went on at the stage `{stage}`"
    if lie.stage is not Stage.ADVERTISE:  # new terms may always begin a session
        honest = made.liar.requests[lie.stage]
        assert isinstance(made.liar.ask(VICTIM, honest, deadline_s=60.0), Failure)
    assert made.require_exact(made.collect(round_num=5)) == EVERYONE, "and the next round is whole"


@pytest.mark.parametrize("lie", SURVIVORS, ids=lambda lie: lie.name)
def test_without_signatures_impossible_survivors_are_refused_all_the_same(lie: Lie) -> None:
    """With an honest-but-curious server, the list of survivors is answered with shares at once."""
    curious = Adversary.HONEST_BUT_CURIOUS
    plan = plan_for(6, corruption=0.1, dropout=0.34, adversary=curious)
    made = Stand.in_memory(victim=VICTIM, plan=plan)
    assert made.require_exact(made.collect(round_num=3)) == EVERYONE
    assert isinstance(answer_of(made.liar.replies[VICTIM, Stage.CONFIRM]), ShareRelease)
    made.liar.lie = lie
    collected = made.collect(round_num=4)
    refusal = made.liar.replies[VICTIM, Stage.CONFIRM]
    assert isinstance(refusal, Failure)
    assert lie.reason in refusal.reason
    assert made.require_exact(collected) == EVERYONE
    honest = made.liar.requests[Stage.CONFIRM]
    assert isinstance(made.liar.ask(VICTIM, honest, deadline_s=60.0), Failure)


@pytest.mark.parametrize(
    "lie",
    [
        Lie("another attempt", Stage.ADVERTISE, changed(attempt=1)),
        Lie("another round", Stage.ADVERTISE, changed(round_num=1)),
        Lie("one more client", Stage.ADVERTISE, changed(min_survivors=1)),
    ],
    ids=lambda lie: lie.name,
)
def test_terms_that_only_one_client_was_told_make_its_advert_useless(lie: Lie) -> None:
    """The victim may accept them, but adverts are signed under the terms, so its own is useless."""
    made = stand()
    made.liar.lie = lie
    collected = made.collect(round_num=4)
    assert isinstance(answer_of(made.liar.replies[VICTIM, Stage.ADVERTISE]), messages.Advert)
    assert "not signed by it for this session" in row_of(collected, VICTIM).reason
    assert made.require_exact(collected) == WITHOUT_IT


def test_survivors_that_only_one_client_was_told_are_signed_in_vain() -> None:
    """A list of five of six is possible, but its signature fits no other's; all are in the sum.

    Before it is asked for shares, the victim needs a quorum for the same five.
    """
    made = stand()
    made.liar.lie = Lie(
        "one has dropped", Stage.CONFIRM, survivors(lambda told: [told.victim, *told.others[1:]])
    )
    collected = made.collect(round_num=4)
    signed = answer_of(made.liar.replies[VICTIM, Stage.CONFIRM])
    assert isinstance(signed, messages.SurvivorSignature)
    assert "did not sign these survivors" in row_of(collected, VICTIM).reason
    assert made.require_exact(collected) == EVERYONE
    others = [
        answer_of(reply)
        for (client_id, stage), reply in made.liar.replies.items()
        if stage is Stage.CONFIRM and client_id != VICTIM
    ]
    ids = [each for each in EVERYONE if each != VICTIM]
    rows = {
        ClientId(each): reply.signature
        for each, reply in zip(ids, others, strict=True)
        if isinstance(reply, messages.SurvivorSignature)
    }
    honest = made.liar.requests[Stage.CONFIRM]
    request = replace(honest, message=messages.encode(signatures_of(rows, EVERYBODY)))
    assert isinstance(made.liar.ask(VICTIM, request, deadline_s=60.0), Failure)


@pytest.mark.parametrize("adversary", Adversary)
def test_no_order_of_questions_gets_both_secrets_of_a_client(adversary: Adversary) -> None:
    """After an honest session the liar asks all clients again, now as if one had dropped out.

    No holder gives two different shares of a client; it only repeats its share for the same
    question. A client that assumes an active server gives no share of the other secret at all. If
    it assumes an honest-but-curious server, clients that were not asked before may give one.
    """
    made = Stand.in_memory(
        victim=VICTIM,
        plan=plan_for(6, corruption=0.1, dropout=0.34, adversary=adversary),
    )
    assert made.require_exact(made.collect(round_num=3)) == EVERYONE
    is_active = adversary is Adversary.ACTIVE_SERVER
    last = Stage.UNMASK if is_active else Stage.CONFIRM
    shares: dict[tuple[int, int], set[bytes]] = defaultdict(set)

    def note(holder: ClientId, reply: object) -> bool:
        if not isinstance(reply, ShareRelease):
            return False
        for owner, share in reply.shares.items():
            shares[holder, owner].add(share.reveal())
        return True

    asked = {
        holder: note(holder, answer_of(reply))
        for (holder, stage), reply in made.liar.replies.items()
        if stage is last
    }
    assert len(asked) == (PLAN.parameters.threshold if is_active else 2)
    assert all(asked.values())
    honest = made.liar.requests[Stage.CONFIRM]
    dropped = survivors_of([i for i in EVERYBODY if i != OTHER], EVERYBODY)
    for message in (messages.encode(dropped), made.liar.requests[last].message):
        request = replace(honest, message=message)
        for holder in (ClientId(each) for each in EVERYONE):
            gives = note(holder, answer_of(made.liar.ask(holder, request, deadline_s=60.0)))
            is_the_same = message == made.liar.requests[last].message
            assert not gives or holder not in asked or is_the_same
    assert {len(found) for found in shares.values()} == {1}
    assert len({holder for holder, _ in shares}) >= len(asked)


def test_a_lie_to_more_than_may_drop_out_releases_nothing() -> None:
    """Three of six receive no model, so too few are left. A retry without the lie has all."""
    made = stand()
    made.liar.lie = next(lie for lie in LIES if lie.name == "no model")
    made.liar.also = {ClientId(0), ClientId(1)}
    collected = made.collect(round_num=4)
    require_nothing(collected)
    reasons = {int(row.client_id): row.reason for row in collected.participations}
    assert all("ProtocolError" in reasons[each] for each in (0, 1, 2))
    assert all("3 clients are left, min_survivors is 4" in reasons[each] for each in (3, 4, 5))
    made.liar.lie = None
    assert made.require_exact(made.collect(round_num=4, attempt=1)) == EVERYONE
