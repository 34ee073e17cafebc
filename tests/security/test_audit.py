"""A coordinator that claims signatures which it does not have, hoping that no client checks them.

Of two hundred clients, each sees its neighbors and a sample of the signatures. The liar has fewer
real signatures than a quorum, and may commit to new ones as often as it likes. The bound is tested
with odds at which lies do pass: clients that allow for no tries, and few bits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.errors import PolicyViolation, ProtocolError
from fedlearn.secagg import audit, keys, messages, parameters
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import ClientState, ConfirmedStep
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.merkle import MerkleTree, Proof, hash_leaf
from fedlearn.secagg.messages import Advert, Member, Signatures
from fedlearn.secagg.parameters import Adversary, num_audited, risk_bits
from fedlearn.secagg.session import Session, to_member
from fedlearn.secagg.terms import Terms
from tests.rosters import NO_PROOF
from tests.security.test_sparse_graph import POLICY, terms_for

N, QUORUM, VICTIM = 200, 111, 77
GARBAGE = np.random.default_rng(0)
IDS = [ClientId(3 * each + 5) for each in range(N)]


def terms_with(sigma_bits: int) -> Terms:
    return replace(
        terms_for(1000),
        num_clients=N,
        num_neighbors=6,
        threshold=4,
        quorum=QUORUM,
        min_survivors=QUORUM,
        sigma_bits=sigma_bits,
    )


@dataclass(frozen=True)
class Vote:
    """A session at the end of R3.

    Attributes:
        terms: Terms of the session.
        signers: The clients' identities.
        directory: The clients' identity keys.
    """

    terms: Terms
    signers: Mapping[ClientId, keys.Signer]
    directory: Mapping[ClientId, bytes]

    @classmethod
    def of(cls, *, sigma_bits: int) -> "Vote":
        made = {each: keys.create_signer() for each in IDS}
        return cls(
            terms_with(sigma_bits),
            {each: signer for each, (signer, _) in made.items()},
            {each: public for each, (_, public) in made.items()},
        )

    @cached_property
    def _whole(self) -> tuple[Session, MerkleTree]:
        adverts = [
            Advert(
                client_id=each,
                packet_key=each.to_bytes(32, "big"),
                mask_key=bytes(32),
                nonce=bytes(16),
                signature=bytes(64),
            )
            for each in IDS
        ]
        return Session.of(self.terms, adverts, directory=self.directory)

    @property
    def session(self) -> Session:
        return self._whole[0]

    @property
    def tree(self) -> MerkleTree:
        return self._whole[1]

    @cached_property
    def view(self) -> Session:
        """The session as a client sees it."""
        roster = self.session.roster_for(IDS[VICTIM], tree=self.tree)
        return Session.from_roster(self.terms, roster, directory=self.directory)

    def sign(self, ids: Iterable[ClientId], survivors: bytes) -> dict[ClientId, bytes]:
        """Return the real signatures of these clients."""
        return {
            each: self.signers[each].sign(self.session.build_survivors_text(survivors, each))
            for each in ids
        }

    def show(self, signatures: Mapping[ClientId, bytes], survivors: bytes) -> Signatures:
        return audit.show(signatures, self.session, survivors=survivors, tree=self.tree)

    def reason(self, shown: Signatures, survivors: bytes) -> str:
        """Return the reason of the client's refusal, or an empty string if it releases."""
        told = messages.decode(messages.encode(shown))
        assert isinstance(told, Signatures)
        try:
            audit.check(told, self.view, survivors=survivors, directory=self.directory)
        except ProtocolError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def vote() -> Vote:
    return Vote.of(sigma_bits=40)


@pytest.fixture(scope="module")
def everyone(vote: Vote) -> bytes:
    return vote.session.pack_ranks(IDS)


def pad_signatures(
    true: Mapping[ClientId, bytes], claimed: Sequence[ClientId]
) -> dict[ClientId, bytes]:
    """Return signatures of all claimed clients, with random bytes for those that did not sign."""
    return {each: true.get(each, GARBAGE.bytes(64)) for each in claimed}


def test_a_client_sees_a_part_of_the_signatures_and_releases(vote: Vote, everyone: bytes) -> None:
    """The control of all lies below, both if all clients signed and if just a quorum did."""
    for num_signed, num_opened in ((N, 83), (QUORUM + 1, 111), (QUORUM, 111)):
        shown = vote.show(vote.sign(IDS[:num_signed], everyone), everyone)
        assert len(shown.signatures) == num_opened
        assert vote.reason(shown, everyone) == ""


def test_the_number_of_signatures_is_the_least_that_keeps_the_odds() -> None:
    """Compared with exact binomial coefficients; one signature fewer is not enough."""
    for signed, quorum, bits in ((200, 111, 106), (10_000, 5_501, 106), (40, 21, 3), (9, 9, 50)):
        found = num_audited(signed, quorum=quorum, risk_bits=bits)
        lies, every = (
            [math.comb(number, opened) for opened in (found - 1, found)]
            for number in (quorum - 1, signed)
        )
        assert lies[1] << bits <= every[1]
        assert lies[0] << bits > every[0]
        assert found <= quorum


@pytest.mark.slow
def test_half_of_the_signatures_pass_as_often_as_the_formula_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With q - 1 real ones of 200, each try passes with odds C(q - 1, s) / C(q', s)."""
    monkeypatch.setattr(parameters, "GRINDING_BITS", 0)  # clients that allow for no tries
    weak = Vote.of(sigma_bits=1)
    survivors = weak.session.pack_ranks(IDS)
    true = weak.sign(IDS[: QUORUM - 1], survivors)
    opened = num_audited(N, quorum=QUORUM, risk_bits=3)
    assert opened == risk_bits(1, adversary=Adversary.ACTIVE_SERVER) + 1 == 4
    chance = math.comb(QUORUM - 1, opened) / math.comb(N, opened)
    assert 0.05 < chance <= 1 / 8
    tries = 500
    passed = sum(
        not weak.reason(weak.show(pad_signatures(true, IDS), survivors), survivors)
        for _ in range(tries)
    )
    spread = math.sqrt(tries * chance * (1.0 - chance))
    assert abs(passed - tries * chance) < 4.5 * spread
    assert passed > 0, "a coordinator that may try finds one: hence sigma + 66 bits"


@pytest.mark.slow
def test_no_number_of_garbage_signatures_gets_two_sets_opened(vote: Vote) -> None:
    """Half of the clients are told that OTHER dropped, the other half that it did not.

    All clients are claimed to have signed each set, with fifty commitments each. What passed once
    in nine tries above does not pass here.
    """
    other = IDS[150]
    sets = [vote.session.pack_ranks(IDS), vote.session.pack_ranks(i for i in IDS if i != other)]
    halves = [IDS[:100], IDS[100:150] + IDS[151:]]
    for survivors, signed in zip(sets, halves, strict=True):
        true = vote.sign(signed, survivors)
        alive = vote.session.find_clients(vote.session.unpack_ranks(survivors, what="").tolist())
        for _ in range(50):
            shown = vote.show(pad_signatures(true, alive), survivors)
            assert "did not sign these survivors" in vote.reason(shown, survivors)
        others = [each for each in alive if each not in signed]
        few = vote.show(pad_signatures(true, [*signed, *others[: QUORUM - len(signed)]]), survivors)
        assert "did not sign" in vote.reason(few, survivors), "none of a quorum goes unseen"
        too_few = replace(few, signed=vote.session.pack_ranks(signed))
        assert "the quorum is 111" in vote.reason(too_few, survivors)


def test_names_alone_would_not_fix_the_sample(
    monkeypatch: pytest.MonkeyPatch, vote: Vote, everyone: bytes
) -> None:
    """Why there is a root: with a sample that is known in advance, only its clients need to sign.

    The control draws the sample without the root. A liar then claims all names, and gets signatures
    only from the sampled clients, which are fewer than a quorum.
    """

    def blind(
        session: Session, survivors: bytes, signed: bytes, *, root: bytes, num_signed: int
    ) -> NDArray[np.int64]:
        opened = num_audited(num_signed, quorum=QUORUM, risk_bits=106)
        seed = keys.digest(b"audit", session.id, survivors, signed)
        return audit.sample(num_signed, num_audited=opened, seed=seed)

    def show_after_the_sample() -> Signatures:
        signed = vote.session.pack_ranks(IDS)
        places = blind(vote.session, everyone, signed, root=b"", num_signed=N)
        asked = [IDS[place] for place in places]
        assert len(asked) < QUORUM
        return vote.show(pad_signatures(vote.sign(asked, everyone), IDS), everyone)

    assert "did not sign" in vote.reason(show_after_the_sample(), everyone)
    monkeypatch.setattr(audit, "_select_places", blind)
    assert vote.reason(show_after_the_sample(), everyone) == "", "fewer than a quorum are enough"


def test_what_is_opened_follows_from_all_that_is_claimed(vote: Vote) -> None:
    """Any change of signatures, names, survivors or session gives another sample.

    Otherwise the liar could choose the names once it knows which signatures are opened.
    """
    claimed = [GARBAGE.bytes(64) for _ in range(150)]
    sets = [vote.session.pack_ranks(IDS), vote.session.pack_ranks(IDS[:-1])]
    later = Vote(replace(vote.terms, attempt=1), vote.signers, vote.directory)

    def open_audit(
        signed: Sequence[bytes] = claimed,
        *,
        told: Vote = vote,
        names: Sequence[ClientId] = IDS[:150],
        survivors: bytes = sets[0],
    ) -> set[int]:
        shown = told.show(dict(zip(names, signed, strict=True)), survivors)
        return {signed.index(each) for each in shown.signatures}

    assert open_audit() == open_audit(), "the control"
    assert open_audit([*claimed[:-1], bytes(64)]) != open_audit()
    assert open_audit(names=IDS[1:151]) != open_audit()
    assert open_audit(survivors=sets[1]) != open_audit()
    assert open_audit(told=later) != open_audit()


def test_in_the_complete_graph_nobody_is_told_who_signed(vote: Vote, everyone: bytes) -> None:
    """Clients know the signers there, and would not check any others sent with the signatures."""
    complete = replace(vote.terms, topology=Topology.COMPLETE, num_neighbors=N - 1)
    whole = Vote(complete, vote.signers, vote.directory)
    shown = whole.show(whole.sign(IDS, everyone), everyone)
    assert whole.reason(shown, everyone) == "", "the control"
    signer = to_member(whole.session.by_id[IDS[0]])
    for lie in (
        replace(shown, signers=(signer,)),
        replace(shown, of_signers=Proof(hashes=bytes(32), splits=b"")),
    ):
        assert "signers are named in the complete graph" in whole.reason(lie, everyone)


Change = Callable[[Vote, Signatures], Signatures]


def without_last(vote: Vote, shown: Signatures) -> Signatures:
    return replace(shown, signatures=shown.signatures[:-1], signers=shown.signers[:-1])


def another_sample(vote: Vote, shown: Signatures) -> Signatures:
    """Open the first signatures with valid proofs, instead of the sampled ones."""
    survivors = vote.session.pack_ranks(IDS)
    true = vote.sign(IDS, survivors)
    committed = MerkleTree.of([hash_leaf(true[each]) for each in IDS], keys=None)
    chosen = list(range(len(shown.signatures)))
    return replace(
        shown,
        signatures=tuple(true[IDS[at]] for at in chosen),
        signers=tuple(to_member(vote.session.by_id[IDS[at]]) for at in chosen),
        of_signatures=committed.prove(chosen),
        of_signers=vote.tree.prove(chosen),
    )


def first_signer(change: Callable[[Member], Member]) -> Change:
    return lambda _, shown: replace(shown, signers=(change(shown.signers[0]), *shown.signers[1:]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_last, "82 signatures are opened of 200, not 83"),
        (lambda _, s: replace(s, signatures=s.signatures[:-1]), "82 signatures are opened"),
        (lambda _, s: replace(s, signers=s.signers[:-1]), "82 signers of 83 signatures"),
        (lambda _, s: replace(s, signers=()), "0 signers of 83 signatures"),
        (another_sample, ""),
        (lambda _, s: replace(s, root=bytes(32)), ""),
        (lambda _, s: replace(s, signed=s.signed[:-1]), "24 bytes, not the 25 of 200 bits"),
        (lambda _, s: replace(s, signed=s.signed + bytes(1)), "26 bytes, not the 25"),
        (lambda _, s: replace(s, signed=bytes(25)), "0 survivors confirmed"),
        (lambda _, s: replace(s, of_signatures=NO_PROOF), "early"),
        (lambda _, s: replace(s, of_signers=NO_PROOF), "early"),
        (
            lambda _, s: replace(s, of_signatures=replace(s.of_signatures, splits=bytes(8))),
            "too many",
        ),
        (lambda _, s: replace(s, signatures=s.signatures[::-1]), "did not sign these survivors"),
        (
            first_signer(lambda m: replace(m, client_id=ClientId(0))),
            "signer 0 is not in the pinned directory",
        ),
        (
            first_signer(lambda m: replace(m, advert_hash=bytes(32))),
            "the signers are not those in the roster",
        ),
    ],
)
def test_what_is_shown_otherwise_is_refused(
    vote: Vote, everyone: bytes, change: Change, reason: str
) -> None:
    shown = vote.show(vote.sign(IDS, everyone), everyone)
    found = vote.reason(change(vote, shown), everyone)
    assert found
    assert reason in found


def test_who_is_no_survivor_signs_nothing(vote: Vote) -> None:
    """If all clients sign a smaller set, only signatures of its members count."""
    survivors = vote.session.pack_ranks(IDS[10:])
    shown = vote.show(vote.sign(IDS, survivors), survivors)
    assert "position 0 in the roster signed, but is not among the survivors" in vote.reason(
        shown, survivors
    )
    honest = vote.show(vote.sign(IDS[10:], survivors), survivors)
    assert vote.reason(honest, survivors) == "", "the control"


def test_a_signature_counts_for_one_client(vote: Vote, everyone: bytes) -> None:
    """The id is signed as well; otherwise one key under two ids would count twice.

    Without a pinned roster of identities, a coordinator may claim any keys for its clients.
    """
    twin = dict(vote.directory)
    twin[IDS[1]] = twin[IDS[0]]
    signers = {**vote.signers, IDS[1]: vote.signers[IDS[0]]}
    told = Vote(vote.terms, vote.signers, twin)
    true = told.sign(IDS[:QUORUM], everyone)
    copied = {**true, IDS[1]: true[IDS[0]]}
    assert "did not sign" in told.reason(told.show(copied, everyone), everyone)
    owner = Vote(vote.terms, signers, twin)  # control: the holder of the key may sign for both
    assert owner.reason(owner.show(owner.sign(IDS[:QUORUM], everyone), everyone), everyone) == ""


def test_signatures_of_another_session_or_other_survivors_are_refused(
    vote: Vote, everyone: bytes
) -> None:
    fewer = vote.session.pack_ranks(IDS[:-1])
    shown = vote.show(vote.sign(IDS[:-1], fewer), everyone)
    assert "did not sign" in vote.reason(shown, everyone)
    later = Vote(replace(vote.terms, attempt=1), vote.signers, vote.directory)
    shown = later.show(later.sign(IDS, everyone), everyone)
    assert vote.reason(shown, everyone)
    assert later.reason(shown, everyone) == ""


def test_an_accomplice_that_no_roster_drew_signs_nothing(vote: Vote, everyone: bytes) -> None:
    """Its neighbors refuse the roster, so other clients could only see it as a signer."""
    signer, _ = keys.create_signer()
    shown = vote.show(vote.sign(IDS, everyone), everyone)
    step = ConfirmedStep(vote.view, {}, everyone)
    state = ClientState.fresh(vote.terms.run_id).with_step(step)

    def client(listed: Iterable[ClientId]) -> SecureClient:
        return SecureClient(
            client_id=IDS[VICTIM],
            signer=signer,
            coordinator_key=bytes(32),
            directory=vote.directory,
            policy=POLICY,
            num_threads=1,
            draw=RosterDraw(roster="r", client_ids=frozenset(listed), factor=2.0),
        )

    undrawn = shown.signers[20].client_id
    with pytest.raises(PolicyViolation, match=f"max_draw_factor.*client {undrawn} in round"):
        client(each for each in IDS if each != undrawn).release(shown, state, step)
    reply, _ = client(IDS).release(shown, state, step)
    assert isinstance(reply, messages.ShareRelease)
