"""Clients that cheat an honest coordinator cost themselves or the session, never a wrong sum.

One of six clients cheats, over the collector and real sessions. Either it is named and the sum is
exactly that of the others, or the session ends and nothing is released. As a control, the same
cohort first runs a round in which the cheat is honest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from fedlearn.core.messages import ClientId, Failure, Reply, SecureReply
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import AdvertisedStep, ClientState
from fedlearn.secagg.messages import (
    Advert,
    MaskedVector,
    Roster,
    ShareRelease,
    Shares,
    SurvivorSignature,
)
from fedlearn.secagg.session import Stage, build_advert_text
from fedlearn.secagg.terms import Terms
from fedlearn.transport.base import Arrival, Channel, Exchange
from tests.security.liars.harness import (
    Overheard,
    Sabotage,
    Stand,
    no_sabotage,
    plan_for,
    require_nothing,
    row_of,
    spoiled,
)

#: Six clients, of which at least four must survive: t = q = 4.
PLAN = plan_for(6, corruption=0.1, dropout=0.34)
CHEAT, OTHER, STRANGER = ClientId(1), ClientId(4), ClientId(999)
EVERYONE = [ClientId(each) for each in range(6)]
OTHERS = [each for each in EVERYONE if each != CHEAT]
HONEST, CHEATED = 3, 4  # rounds

#: Takes an honest message and returns the one to send instead.
Change = Callable[[messages.Message], messages.Message | bytes]


def cheating(stage: Stage, change: Change) -> Stand:
    """Return a cohort with one cheat that has completed an honest round."""

    def sabotage(client_id: ClientId, at: Stage, reply: SecureReply) -> Reply | None:
        if (client_id, at, reply.round_num) != (CHEAT, stage, CHEATED):
            return None
        said = change(messages.decode(reply.message))
        data = said if isinstance(said, bytes) else messages.encode(said)
        return SecureReply(round_num=reply.round_num, message=data)

    return honest_before(Stand.in_memory(victim=CHEAT, plan=PLAN, sabotage=sabotage))


def honest_before(stand: Stand) -> Stand:
    assert stand.require_exact(stand.collect(round_num=HONEST)) == EVERYONE
    return stand


def advert(**changes: Any) -> Change:
    """Return a change of an advert that keeps its old signature."""

    def change(message: messages.Message) -> Advert:
        assert isinstance(message, Advert)
        return replace(message, **changes)

    return change


def shares(change: Callable[[Shares], Shares]) -> Change:
    def changed(message: messages.Message) -> Shares:
        assert isinstance(message, Shares)
        return change(message)

    return changed


def vector(change: Callable[[bytes], bytes]) -> Change:
    def changed(message: messages.Message) -> MaskedVector:
        assert isinstance(message, MaskedVector)
        return replace(message, packed=change(bytes(message.packed)))

    return changed


def release(change: Callable[[dict[ClientId, SecretBytes]], object]) -> Change:
    def changed(message: messages.Message) -> ShareRelease:
        assert isinstance(message, ShareRelease)
        rows = dict(message.shares)
        change(rows)
        return replace(message, shares=rows)

    return changed


def of_session(session: bytes) -> Change:
    def changed(message: messages.Message) -> messages.Message:
        assert isinstance(message, Shares | MaskedVector | ShareRelease)
        return replace(message, session=session)

    return changed


USELESS: list[tuple[str, Stage, Change, str]] = [
    ("the advert of another", Stage.ADVERTISE, advert(client_id=OTHER), "sent the advert of 4"),
    ("an advert of a stranger", Stage.ADVERTISE, advert(client_id=STRANGER), "the advert of 999"),
    ("another nonce", Stage.ADVERTISE, advert(nonce=bytes(16)), "is not signed by it"),
    ("a key without a secret", Stage.ADVERTISE, advert(mask_key=bytes(32)), "is not signed by it"),
    ("no signature", Stage.ADVERTISE, advert(signature=bytes(64)), "is not signed by it"),
    (
        "a packet too few",
        Stage.SHARE,
        shares(lambda s: replace(s, packets=s.packets[1:])),
        "sent 4 packets to 5 neighbors",
    ),
    (
        "a packet too many",
        Stage.SHARE,
        shares(lambda s: replace(s, packets=(*s.packets, s.packets[0]))),
        "sent 6 packets to 5 neighbors",
    ),
    ("shares of another session", Stage.SHARE, of_session(bytes(32)), "another session"),
    ("a vector of another session", Stage.MASK, of_session(bytes(32)), "another session"),
    ("a short vector", Stage.MASK, vector(lambda data: data[:-1]), "that the terms require"),
    ("a long vector", Stage.MASK, vector(lambda data: data + b"\x00"), "that the terms require"),
    ("an empty vector", Stage.MASK, vector(lambda _: b""), "0 bytes"),
    ("a huge vector", Stage.MASK, vector(lambda data: 1000 * data), "that the terms require"),
    (
        "no true signature of the survivors",
        Stage.CONFIRM,
        lambda _: SurvivorSignature(signature=bytes(64)),
        "did not sign these survivors",
    ),
    ("a release of another session", Stage.UNMASK, of_session(bytes(32)), "another session"),
    (
        "a share of a stranger",
        Stage.UNMASK,
        release(lambda rows: rows.update({STRANGER: rows[OTHER]})),
        "shares of 7 clients, not of the 6",
    ),
    (
        "no share of one client",
        Stage.UNMASK,
        release(lambda rows: rows.pop(OTHER)),
        "shares of 5 clients, not of the 6",
    ),
    ("no share at all", Stage.UNMASK, release(dict.clear), "shares of 0 clients"),
]


@pytest.mark.parametrize(
    ("stage", "change", "reason"),
    [
        pytest.param(*row[1:], id=row[0], marks=() if row in USELESS[::3] else pytest.mark.slow)
        for row in USELESS
    ],
)
def test_a_reply_that_cannot_be_used_names_its_sender(
    stage: Stage, change: Change, reason: str
) -> None:
    """The others' sum is exact; it includes the cheat if its vector was sent honestly."""
    stand = cheating(stage, change)
    collected = stand.collect(round_num=CHEATED)
    has_sent = stage in (Stage.CONFIRM, Stage.UNMASK)
    assert stand.require_exact(collected) == (EVERYONE if has_sent else OTHERS)
    row = row_of(collected, CHEAT)
    assert row.reason.startswith(f"at the stage `{stage}`: ")
    assert reason in row.reason
    assert not any(row_of(collected, each).reason for each in OTHERS)


@dataclass
class Replayer:
    """A cheat that repeats an earlier reply, relabeled for the current round.

    Attributes:
        stage: The stage at which it does so.
        is_lost: Whether the session should end without a release: three others sign nothing.
    """

    stage: Stage
    is_lost: bool = False
    kept: bytes = b""

    def __call__(self, client_id: ClientId, at: Stage, reply: SecureReply) -> Reply | None:
        if self.is_lost and at is Stage.CONFIRM and client_id in (0, 2, 3):
            return Failure("the battery is low")
        if client_id != CHEAT or at is not self.stage:
            return None
        replayed, self.kept = self.kept, self.kept or reply.message
        return SecureReply(round_num=reply.round_num, message=replayed) if replayed else None


@pytest.mark.parametrize("stage", list(Stage))
def test_a_reply_of_another_round_is_of_no_use(stage: Stage) -> None:
    """Session ids and signatures cover the round."""
    stand = honest_before(Stand.in_memory(victim=CHEAT, plan=PLAN, sabotage=Replayer(stage)))
    require_left_out(stand, stage, round_num=CHEATED, attempt=0)


@pytest.mark.parametrize("stage", [each for each in Stage if each is not Stage.UNMASK])
def test_a_reply_of_another_attempt_is_of_no_use(stage: Stage) -> None:
    """The previous attempt released nothing; this one uses other keys."""
    replayer = Replayer(stage, is_lost=True)
    stand = Stand.in_memory(victim=CHEAT, plan=PLAN, sabotage=replayer)
    require_nothing(stand.collect(round_num=HONEST))
    replayer.is_lost = False
    require_left_out(stand, stage, round_num=HONEST, attempt=1)


def require_left_out(stand: Stand, stage: Stage, *, round_num: int, attempt: int) -> None:
    collected = stand.collect(round_num=round_num, attempt=attempt)
    assert row_of(collected, CHEAT).reason.startswith(f"at the stage `{stage}`: ")
    has_sent = stage in (Stage.CONFIRM, Stage.UNMASK)
    assert stand.require_exact(collected) == (EVERYONE if has_sent else OTHERS)


@dataclass
class Twice:
    """A channel on which one client's answers arrive twice."""

    channel: Channel

    def available(self) -> Sequence[ClientId]:
        return self.channel.available()

    def open(self, *, deadline_s: float) -> Exchange:
        return Repeating(self.channel.open(deadline_s=deadline_s))


@dataclass
class Repeating(Overheard):
    """An exchange in which one client's answers arrive twice."""

    again: Arrival | None = None

    def next(self, *, until_s: float) -> Arrival | None:
        again, self.again = self.again, None
        arrival = again or self.exchange.next(until_s=until_s)
        if again is None and arrival is not None and arrival.client_id == CHEAT:
            self.again = arrival
        return arrival


def test_an_answer_counts_once() -> None:
    """Answers arrive twice at every stage: the sum has them once, and the record says so."""
    stand = Stand.in_memory(victim=CHEAT, plan=PLAN)
    stand.liar.channel = Twice(stand.liar.channel)
    collected = stand.collect(round_num=CHEATED)
    assert stand.require_exact(collected) == EVERYONE
    assert "has answered this stage already" in row_of(collected, CHEAT).reason


# --- Cheats whose messages are well-formed --------------------------------------------------


def resign(signer: keys.Signer, terms: Terms, unsigned: Advert) -> Advert:
    return replace(
        unsigned, signature=signer.sign(build_advert_text(terms, unsigned.encode_signed_part()))
    )


class Signer(SecureClient):
    """Advertises under another client's id, signed with the cheat's own key."""

    def advertise(
        self, message: messages.SignedTerms, state: ClientState
    ) -> tuple[Advert, ClientState]:
        advert, after = super().advertise(message, state)
        false = resign(self.signer, message.terms, replace(advert, client_id=OTHER))
        return false, after


class Borrower(SecureClient):
    """Advertises another party's mask key as its own, validly signed, but lacks the secret."""

    def advertise(
        self, message: messages.SignedTerms, state: ClientState
    ) -> tuple[Advert, ClientState]:
        advert, after = super().advertise(message, state)
        if message.terms.round_num != CHEATED:
            return advert, after
        stolen = keys.KeyAgreement(SecretBytes.generate(32)).public_key
        false = resign(self.signer, message.terms, replace(advert, mask_key=stolen))
        assert isinstance(after.step, AdvertisedStep)
        return false, after.with_step(replace(after.step, advert=false))


class Weak(SecureClient):
    """Advertises a key of low order: every party can compute the mask agreed with it."""

    def advertise(
        self, message: messages.SignedTerms, state: ClientState
    ) -> tuple[Advert, ClientState]:
        advert, after = super().advertise(message, state)
        return resign(self.signer, message.terms, replace(advert, mask_key=bytes(32))), after


class Dealer(SecureClient):
    """Deals shares of another mask key than its own, properly sealed."""

    def share(
        self, message: Roster, state: ClientState, step: AdvertisedStep
    ) -> tuple[Shares, ClientState]:
        if step.terms.round_num != CHEATED:
            return super().share(message, state, step)
        other = replace(step, mask_secret=SecretBytes.generate(32))
        return super().share(message, state, other)


class Uncommitted(SecureClient):
    """Commits to another self-seed than the one whose shares it deals."""

    def share(
        self, message: Roster, state: ClientState, step: AdvertisedStep
    ) -> tuple[Shares, ClientState]:
        shares, after = super().share(message, state, step)
        if step.terms.round_num != CHEATED:
            return shares, after
        return replace(shares, commitment=bytes(32)), after


def play_cheat(kind: type[SecureClient], *, then: Sabotage = no_sabotage) -> Stand:
    """Return a cohort whose cheat is of this kind."""

    def character(client: SecureClient) -> SecureClient:
        if client.client_id != CHEAT:
            return client
        return kind(**{each.name: getattr(client, each.name) for each in fields(client)})

    return Stand.in_memory(victim=CHEAT, plan=PLAN, character=character, sabotage=then)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Signer, "sent the advert of 4"), (Weak, "low order")]
)
def test_an_advert_that_is_not_ones_own_names_its_sender(
    kind: type[SecureClient], reason: str
) -> None:
    """Even if it is validly signed."""
    stand = play_cheat(kind)
    collected = stand.collect(round_num=CHEATED)
    assert reason in row_of(collected, CHEAT).reason
    assert stand.require_exact(collected) == OTHERS


def test_a_commitment_to_another_seed_releases_nothing() -> None:
    """Its self-mask could not be verified. The client is named, and the next round is complete."""
    stand = honest_before(play_cheat(Uncommitted))
    collected = stand.collect(round_num=CHEATED)
    require_nothing(collected)
    assert f"the shares of client {CHEAT} do not give the secret" in row_of(collected, 0).reason
    assert collected.culprits == {CHEAT}
    assert "caused the abort" in row_of(collected, CHEAT).reason
    assert "caused the abort" not in row_of(collected, OTHER).reason
    assert stand.require_exact(stand.collect(round_num=CHEATED + 1)) == EVERYONE


def lose_in_training(client_id: ClientId, stage: Stage, reply: SecureReply) -> Reply | None:
    is_lost = (client_id, stage, reply.round_num) == (CHEAT, Stage.MASK, CHEATED)
    return Failure("the battery is low") if is_lost else None


@pytest.mark.parametrize("kind", [Dealer, Borrower])
def test_shares_that_do_not_give_the_key_of_a_dropped_client_release_nothing(
    kind: type[SecureClient],
) -> None:
    """Since it drops out, its mask key is needed, but its shares give another key."""
    stand = honest_before(play_cheat(kind, then=lose_in_training))
    collected = stand.collect(round_num=CHEATED)
    require_nothing(collected)
    assert f"the shares of client {CHEAT} do not give the secret" in row_of(collected, 0).reason
    assert collected.culprits == {CHEAT}
    assert stand.require_exact(stand.collect(round_num=CHEATED + 1)) == EVERYONE


def test_a_key_without_its_secret_leaves_a_mask_in_the_sum() -> None:
    """It stays in the session, so its masks do not cancel: the sum is noise and is not released."""
    stand = honest_before(play_cheat(Borrower))
    collected = stand.collect(round_num=CHEATED)
    require_nothing(collected)
    assert "a mask is left in it" in row_of(collected, 0).reason


def test_packets_that_do_not_open_are_found_by_whom_they_were_sent_to() -> None:
    """With one false packet its recipient leaves and names the sender; with all, nothing opens."""
    garbage = bytes(messages.PACKET_BYTES)
    one = cheating(Stage.SHARE, shares(lambda s: replace(s, packets=(garbage, *s.packets[1:]))))
    collected = one.collect(round_num=CHEATED)
    assert f"the packet of client {CHEAT} cannot be decrypted" in row_of(collected, 0).reason
    assert one.require_exact(collected) == EVERYONE[1:]
    assert not collected.culprits, "one client may say what it likes of another"
    every = cheating(Stage.SHARE, shares(lambda s: replace(s, packets=(garbage,) * 5)))
    collected = every.collect(round_num=CHEATED)
    require_nothing(collected)
    for each in OTHERS:
        assert f"the packet of client {CHEAT} cannot be decrypted" in row_of(collected, each).reason
    assert collected.culprits == {CHEAT}
    assert "5 clients report its packets as unusable" in row_of(collected, CHEAT).reason


def spoiling(owners: Sequence[ClientId], *, limb: int = 0) -> Change:
    def spoil(rows: dict[ClientId, SecretBytes]) -> None:
        rows.update({owner: spoiled(rows[owner], limb=limb) for owner in owners})

    return release(spoil)


@pytest.mark.parametrize("owners", [EVERYONE, [OTHER]], ids=["of all", "of one"])
def test_whoever_releases_false_shares_is_found_by_one_holder_more(owners: list[ClientId]) -> None:
    """Four shares would be enough; if one is false, a fifth shows which."""
    stand = cheating(Stage.UNMASK, spoiling(owners))
    collected = stand.collect(round_num=CHEATED)
    assert stand.require_exact(collected) == EVERYONE
    assert "a false share" in row_of(collected, CHEAT).reason
    assert not any(row_of(collected, each).reason for each in OTHERS)
    released = [reply for (_, at), reply in stand.liar.replies.items() if at is Stage.UNMASK]
    assert len(released) == PLAN.parameters.threshold + 1
    assert stand.require_exact(stand.collect(round_num=CHEATED + 1)) == EVERYONE
    released = [reply for (_, at), reply in stand.liar.replies.items() if at is Stage.UNMASK]
    assert len(released) == PLAN.parameters.threshold, "the control: nobody more is waited for"


def test_more_false_shares_than_can_be_told_from_true_ones_release_nothing() -> None:
    """Three of six holders lie, and leaving out any single one does not help."""

    def sabotage(client_id: ClientId, at: Stage, reply: SecureReply) -> Reply | None:
        if at is not Stage.UNMASK or client_id > 2 or reply.round_num != CHEATED:
            return None
        message = spoiling(EVERYONE, limb=client_id)(messages.decode(reply.message))
        assert isinstance(message, ShareRelease)
        return SecureReply(round_num=reply.round_num, message=messages.encode(message))

    stand = honest_before(Stand.in_memory(victim=CHEAT, plan=PLAN, sabotage=sabotage))
    collected = stand.collect(round_num=CHEATED)
    require_nothing(collected)
    assert "or more than 1 of 6 holders did" in row_of(collected, 5).reason
    assert not collected.culprits, "whose fault it is cannot be told"
    assert stand.require_exact(stand.collect(round_num=CHEATED + 1)) == EVERYONE


def test_a_vector_of_noise_is_not_released() -> None:
    """Noise within the bounds would pass: masking gives no integrity."""
    noise = cheating(Stage.MASK, vector(lambda data: bytes(each ^ 0x55 for each in data)))
    require_nothing(noise.collect(round_num=CHEATED))
