"""A client in secure aggregation: a message and a state in, a reply and the next state out.

Guarantees:
    Against an honest-but-curious server with at most gamma n colluding clients, what the
    coordinator learns of this client's values is in the sum of all survivors. Against an
    active server the same, for a sum of at least ``Terms.num_assured`` clients of the pinned
    directory. Assumed: the primitives of :mod:`fedlearn.secagg.keys`, and the policy's gamma.
    In a sparse graph this fails with at most 2^-sigma, whoever drops out and though the server
    tries 2^64 rosters for one whose ring suits it, and as many samples of signatures.
    Where it holds a roster, who is in the cohort was drawn (:mod:`fedlearn.secagg.draw`).
    Not given: integrity (a client may send what it likes); protection from sums over cohorts that
    differ in one client, or, without a roster, from a coordinator that invites its accomplices.

References:
    Bonawitz et al., 2017, figure 4; Bell et al., 2020.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import audit, keys, masking, messages, shamir
from fedlearn.secagg.client_state import (
    Advertised,
    ClientState,
    Confirmed,
    Masked,
    Released,
    Shared,
)
from fedlearn.secagg.draw import Draw
from fedlearn.secagg.fixed_point import Words
from fedlearn.secagg.merkle import root_of
from fedlearn.secagg.messages import (
    Advert,
    MaskedVector,
    Packets,
    Release,
    Roster,
    Shares,
    Signatures,
    SignedTerms,
    Survivors,
    SurvivorSignature,
)
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.session import (
    Session,
    Stage,
    advert_text,
    leaf,
    member_of,
    terms_text,
)
from fedlearn.secagg.terms import Contribution, Terms, to_words

#: Masks that are expanded between two looks at whether to go on; fewer take longer in sum.
_FOLDED_TOGETHER = 32

#: Masks of a step that were expanded ahead; ``None``: there are none, and they are expanded now.
Expanded: TypeAlias = Callable[[Shared], tuple[Words, ...] | None]


def nothing_expanded(_step: Shared) -> None:
    """Return no masks: none were expanded ahead."""


@contextmanager
def _ending_at(stage: Stage) -> Iterator[None]:
    """Let a breach of the protocol end the session at ``stage``."""
    try:
        yield
    except ProtocolError as error:
        raise AggregationAborted(stage=stage, reason=str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureClient:
    """A client's side of every session.

    Every method raises :class:`fedlearn.errors.AggregationAborted` where the coordinator, or a
    peer, does not keep to the protocol: the session is over.

    Attributes:
        client_id: Its own id.
        signer: Its identity key.
        coordinator_key: The coordinator's Ed25519 key, pinned at enrolment.
        directory: Identity keys of all clients, pinned; whoever is not in it does not exist.
        policy: What it accepts.
        num_threads: Threads to expand masks on.
        draw: Who may be asked by the roster that it holds; ``None``: it holds none, and whoever
            has a key in the directory may.
    """

    client_id: ClientId
    signer: keys.Signer
    coordinator_key: bytes
    directory: Mapping[ClientId, bytes]
    policy: TermsPolicy
    num_threads: int
    draw: Draw | None = None

    def handle(
        self,
        message: messages.Message,
        state: ClientState,
        *,
        contribute: Callable[[Terms], Contribution],
        expanded: Expanded = nothing_expanded,
    ) -> tuple[messages.Up, ClientState]:
        """Answer one message of the coordinator.

        The returned state must be durable before the reply is sent, and no state may be answered
        from twice: two replies from one state share their keys, so their difference shows the
        difference of the updates, and another set of survivors could be signed. After an exception
        the session is over for this client; go on with ``state.at(None)``.

        Args:
            message: What it sent.
            state: After the previous message, or between sessions.
            contribute: Called once, at R2: what to add to the sum, trained under these terms.
            expanded: Called once after that: what :meth:`expand` returned for this step, if it was
                called.

        Raises:
            ProtocolError: The message does not follow on the last one.
            PolicyViolation: The terms break this client's policy.
        """
        match message, state.step:
            case SignedTerms(), _:  # a new session; an unfinished one is forgotten
                return self.advertise(message, state)
            case Roster(), Advertised() as step:
                return self.share(message, state, step)
            case Packets(), Shared() as step:
                trained = contribute(step.session.terms)
                masks = expanded(step)
                return self.mask(message, state, step, contribution=trained, expanded=masks)
            case Survivors(), Masked() as step:
                if step.session.terms.adversary is Adversary.ACTIVE_SERVER:
                    return self.confirm(message, state, step)
                return self._release(step, self._checked(message, step, state), state)
            case Signatures(), Confirmed() as step:
                return self.release(message, state, step)
            case ((Signatures() | Survivors()), Released() as step):
                return self.repeat(message, state, step)
        at = type(state.step).__name__.lower() if state.step else "between sessions"
        raise ProtocolError(
            f"{type(message).__name__} does not follow: this client is {at}; each message of a "
            "session is answered once"
        )

    @_ending_at(Stage.ADVERTISE)
    def advertise(self, message: SignedTerms, state: ClientState) -> tuple[Advert, ClientState]:
        """R0: agree to terms of the coordinator's and of this run, and publish fresh keys.

        Raises:
            PolicyViolation: They break the policy, or ask for a second release.
        """
        terms = message.terms
        if not keys.verify(self.coordinator_key, message.signature, terms_text(terms)):
            raise ProtocolError("the terms are not signed by the pinned coordinator")
        if terms.run_id != state.run_id:
            raise ProtocolError("the terms are of another run")
        self.policy.judge(terms)
        if self.draw is not None:
            self.policy.judge_drawn(terms, [self.client_id], draw=self.draw)
        state.releases.require_open(terms, most=self.policy.max_releases_per_round)
        packet_secret, mask_secret = (SecretBytes.generate(keys.KEY_BYTES) for _ in range(2))
        unsigned = Advert(
            client_id=self.client_id,
            packet_key=keys.KeyAgreement(packet_secret).public_key,
            mask_key=keys.KeyAgreement(mask_secret).public_key,
            nonce=SecretBytes.generate(messages.NONCE_BYTES).reveal(),
            signature=b"",
        )
        signature = self.signer.sign(advert_text(terms, unsigned.unsigned()))
        advert = replace(unsigned, signature=signature)
        return advert, state.at(Advertised(terms, advert, packet_secret, mask_secret))

    @_ending_at(Stage.SHARE)
    def share(
        self, message: Roster, state: ClientState, step: Advertised
    ) -> tuple[Shares, ClientState]:
        """R1: check the roster, share the self-seed and the mask key among the holders.

        Raises:
            PolicyViolation: Of those invited so few are in the roster that the terms are not safe,
                or one of them is not drawn.
        """
        own = self.client_id
        session = Session.opened(step.terms, message, directory=self.directory)
        self._check_roster(session, message, step)
        state.releases.require_all_invited(step.terms, session.points)
        seed = SecretBytes.generate(shamir.SECRET_BYTES)
        holders = session.holders(own)
        shares = shamir.share(
            [seed, step.mask_secret],
            threshold=step.terms.threshold,
            points=[session.points[holder] for holder in holders],
        )
        pairs = {
            holder: SecretBytes(shamir.to_bytes(pair))
            for holder, pair in zip(holders, shares, strict=True)
        }
        agreement, packets, opening = keys.KeyAgreement(step.packet_secret), [], {}
        for peer in session.neighbours(own):
            agreed = agreement.agree(session.by_id[peer].packet_key, owner=peer)
            sealing = keys.packet_key(agreed, session=session.id, way=(own, peer))
            plain = messages.packet_of(session.points[peer], pairs[peer])
            packets.append(keys.seal(sealing, plain, session=session.id, way=(own, peer)))
            opening[peer] = keys.packet_key(agreed, session=session.id, way=(peer, own))
        reply = Shares(
            session=session.id,
            commitment=keys.commitment(seed, session=session.id, client_id=own),
            packets=tuple(packets),
        )
        return reply, state.at(Shared(session, opening, step.mask_secret, seed, pairs.get(own)))

    def _check_roster(self, session: Session, message: Roster, step: Advertised) -> None:
        self.policy.judge_roster(step.terms, size=session.size)
        if self.draw is not None:
            self.policy.judge_drawn(step.terms, session.points, draw=self.draw)
        own = session.by_id.get(self.client_id)
        if own != step.advert or session.points[self.client_id] != message.rank + 1:
            raise ProtocolError("this client's own advert is missing or altered")
        for advert in session.adverts:
            check_advert(advert, step.terms, directory=session.identity_keys)
        leaves = {
            rank: leaf(member_of(advert), session.identity_keys[advert.client_id])
            for rank, advert in zip(session.ranks, session.adverts, strict=True)
        }
        ids = [advert.client_id for advert in session.adverts]
        if root_of(session.size, leaves, keys=ids, proof=message.proof) != session.root:
            raise ProtocolError("the adverts are not those of the roster")

    @_ending_at(Stage.MASK)
    def expand(self, step: Shared, *, check: Callable[[], None]) -> tuple[Words, ...]:
        """Return the masks with all neighbours: to be computed while the network waits.

        ``check`` is called every few masks; what it raises ends the work.
        """
        words = masking.zeros(step.session.terms.lanes)
        every = self._mask_keys(step, step.session.neighbours(self.client_id))
        for some in every.split(-(-len(every) // _FOLDED_TOGETHER)):
            check()
            masking.fold(words, some, num_threads=self.num_threads)
        return words

    @_ending_at(Stage.MASK)
    def mask(
        self,
        message: Packets,
        state: ClientState,
        step: Shared,
        *,
        contribution: Contribution,
        expanded: tuple[Words, ...] | None = None,
    ) -> tuple[MaskedVector, ClientState]:
        """R2: keep the packets, mask the contribution, forget the own secrets.

        ``expanded`` is what :meth:`expand` returned for this step, if it was called; it is used up.
        """
        session, terms = step.session, step.session.terms
        if contribution.request_hash != terms.request_hash:
            raise ProtocolError("trained on another request than the terms name")
        held = self._open(message, step)
        partners = [owner for owner in held if owner != self.client_id]
        fresh = SecretBytes.generate(keys.KEY_BYTES).reveal()
        words = to_words(terms, contribution, rounding_key=fresh)
        if expanded is None:
            folded = self._mask_keys(step, partners)
        else:
            for total, mask in zip(words, expanded, strict=True):
                np.add(total, mask, out=total)
            absent = sorted(set(session.neighbours(self.client_id)) - set(partners))
            agreement = keys.KeyAgreement(step.mask_secret)
            folded = pair_keys(agreement, self.client_id, absent, session=session).inverse()
        masking.fold(words, folded, num_threads=self.num_threads)
        reply = MaskedVector(session=session.id, packed=masking.pack(terms.lanes, words))
        return reply, state.at(Masked(session, held))

    def _open(self, message: Packets, step: Shared) -> dict[ClientId, SecretBytes]:
        session = step.session
        strangers = message.packets.keys() - set(session.neighbours(self.client_id))
        if strangers:
            raise ProtocolError(f"packets of clients that are no neighbours: {min(strangers)}")
        held = {} if step.own is None else {self.client_id: step.own}
        if len(message.packets) + len(held) < session.terms.threshold:
            raise ProtocolError(
                f"{len(message.packets)} neighbours shared, too few for the threshold "
                f"{session.terms.threshold}"
            )
        point = session.points[self.client_id]
        for sender, packet in message.packets.items():
            way = (sender, self.client_id)
            try:
                plain = keys.unseal(step.opening[sender], packet, session=session.id, way=way)
                held[sender] = messages.open_packet(plain, point=point, sender=sender)
            except ProtocolError as error:
                raise AggregationAborted(
                    stage=Stage.MASK, reason=str(error), culprits=(sender,)
                ) from error
        return held

    def _mask_keys(self, step: Shared, partners: Iterable[ClientId]) -> masking.MaskKeys:
        own = keys.self_mask_key(step.seed, session=step.session.id, client_id=self.client_id)
        agreement = keys.KeyAgreement(step.mask_secret)
        pairs = pair_keys(agreement, self.client_id, partners, session=step.session)
        return masking.MaskKeys(plus=[own, *pairs.plus], minus=pairs.minus)

    def confirm(
        self, message: Survivors, state: ClientState, step: Masked
    ) -> tuple[SurvivorSignature, ClientState]:
        """R3: sign one set of survivors, and no other."""
        survivors = self._checked(message, step, state)
        text = step.session.survivors_text(survivors, self.client_id)
        after = Confirmed(step.session, step.held, survivors)
        return SurvivorSignature(signature=self.signer.sign(text)), state.at(after)

    @_ending_at(Stage.CONFIRM)
    def _checked(self, message: Survivors, step: Masked, state: ClientState) -> bytes:
        """Return the survivors, as they were told, if they can be the honest ones.

        A neighbour whose packet never came cannot have survived: it would be masked with us. And at
        least t of our own holders survive, as our self-seed takes so many shares. That the graph
        does not fall into parts does not follow from this alone, but from k and t as well
        (:mod:`fedlearn.secagg.parameters`).
        """
        session, terms = step.session, step.session.terms
        ranks = session.ranks_in(message.ranks, what="the survivors")
        alive = session.among(ranks.tolist())
        if self.client_id not in alive:
            raise ProtocolError("this client sent its vector but is not among the survivors")
        if len(ranks) < terms.min_survivors:
            raise ProtocolError(f"{len(ranks)} survivors, the least is {terms.min_survivors}")
        holders = set(alive) & set(session.holders(self.client_id))
        if holders - step.held.keys() - {self.client_id}:
            raise ProtocolError("a survivor's packet was kept from this client")
        if len(holders) < terms.threshold:
            raise ProtocolError(
                f"{len(holders)} of this client's holders survive, the threshold is "
                f"{terms.threshold}"
            )
        if session.is_whole:
            state.releases.require_same(terms, alive)
        return message.ranks

    @_ending_at(Stage.UNMASK)
    def release(
        self, message: Signatures, state: ClientState, step: Confirmed
    ) -> tuple[Release, ClientState]:
        """R4: release one share of every owner, if a quorum signed the same survivors.

        Raises:
            PolicyViolation: Another sum was opened since that forbids this one.
        """
        self._audit(message, step)
        return self._release(step, step.survivors, state)

    def _release(
        self, step: Masked | Confirmed, survivors: bytes, state: ClientState
    ) -> tuple[Release, ClientState]:
        """Release the self-seed's share of each survivor, the mask key's of each that dropped."""
        session, half, shares = step.session, shamir.SHARE_BYTES, dict[ClientId, SecretBytes]()
        alive = set(session.among(session.ranks_in(survivors, what="the survivors").tolist()))
        for owner, pair in step.held.items():
            data = pair.reveal()
            shares[owner] = SecretBytes(data[:half] if owner in alive else data[half:])
        most = self.policy.max_releases_per_round
        after = state.released(Released(session, survivors, shares), most=most)
        return Release(session=session.id, shares=shares), after

    @_ending_at(Stage.UNMASK)
    def repeat(
        self, message: Signatures | Survivors, state: ClientState, step: Released
    ) -> tuple[Release, ClientState]:
        """R4 once more: the shares that were released, if the same is asked; nothing changes."""
        if step.session.terms.adversary is Adversary.ACTIVE_SERVER:
            if not isinstance(message, Signatures):
                raise ProtocolError("this client has released its shares")
            self._audit(message, step)
        elif not isinstance(message, Survivors) or message.ranks != step.survivors:
            raise ProtocolError("this client has released its shares to other survivors")
        return Release(session=step.session.id, shares=step.shares), state

    def _audit(self, message: Signatures, step: Confirmed | Released) -> None:
        session, signers = step.session, [signer.client_id for signer in message.signers]
        if self.draw is not None:
            self.policy.judge_drawn(session.terms, signers, draw=self.draw)
        known = {each: self.directory[each] for each in signers if each in self.directory}
        directory = {**known, **session.identity_keys}  # of old keys, where they were replaced
        audit.check(message, session, survivors=step.survivors, directory=directory)


def check_advert(advert: Advert, terms: Terms, *, directory: Mapping[ClientId, bytes]) -> None:
    """Check that a client of the directory signed an advert for these terms.

    Raises:
        ProtocolError: It did not.
    """
    known = directory.get(advert.client_id)
    if known is None:
        raise ProtocolError(f"client {advert.client_id} is not in the pinned directory")
    if not keys.verify(known, advert.signature, advert_text(terms, advert.unsigned())):
        raise ProtocolError(
            f"the advert of client {advert.client_id} is not signed by it for this session"
        )


def pair_keys(
    agreement: keys.KeyAgreement,
    client_id: ClientId,
    partners: Iterable[ClientId],
    *,
    session: Session,
) -> masking.MaskKeys:
    """Return the keys of the masks that ``client_id`` shares with ``partners``.

    Of two clients the one with the lower id adds their mask and the other subtracts it.

    Raises:
        ProtocolError: A partner's key is of low order.
    """
    plus: list[SecretBytes] = []
    minus: list[SecretBytes] = []
    for partner in partners:
        theirs, pair = session.by_id[partner].mask_key, (client_id, partner)
        key = keys.pair_mask_key(agreement, theirs, session=session.id, pair=pair)
        (plus if client_id < partner else minus).append(key)
    return masking.MaskKeys(plus=plus, minus=minus)
