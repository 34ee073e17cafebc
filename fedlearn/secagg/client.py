"""A client in secure aggregation: takes a message and a state, returns a reply and the next state.

Guarantees:
    Against an honest-but-curious server with at most gamma n colluding clients, all that the
    coordinator learns about this client's values is the sum over all survivors. Against an
    active server the same holds, for a sum of at least ``Terms.num_assured`` clients of the pinned
    directory. This assumes the primitives of :mod:`fedlearn.secagg.keys`, and the policy's gamma.
    In a sparse graph the guarantee fails with probability at most 2^-sigma, whichever clients drop
    out, and even if the server tries 2^64 rosters to find a ring that suits it, and as many samples
    of signatures.
    If the client holds a roster, the cohort was drawn from it (:mod:`fedlearn.secagg.draw`).
    Not guaranteed: integrity (a client may send any vector); protection from sums over cohorts that
    differ in one client; without a roster, protection from a coordinator that invites accomplices.

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
    AdvertisedStep,
    ClientState,
    ConfirmedStep,
    MaskedStep,
    ReleasedStep,
    SharedStep,
)
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.fixed_point import Words
from fedlearn.secagg.merkle import compute_root
from fedlearn.secagg.messages import (
    Advert,
    MaskedVector,
    Packets,
    Roster,
    ShareRelease,
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
    build_advert_text,
    build_leaf,
    build_terms_text,
    to_member,
)
from fedlearn.secagg.terms import Contribution, Terms, encode_contribution

#: Masks that are expanded between two calls of ``check``; smaller batches take longer in total.
_MASKS_PER_CHECK = 32

#: Returns the masks that were computed in advance for a step; ``None``: compute them now.
FindMasks: TypeAlias = Callable[[SharedStep], tuple[Words, ...] | None]


def find_no_masks(_step: SharedStep) -> None:
    """Return ``None``: no masks were computed in advance."""


@contextmanager
def _abort_at(stage: Stage) -> Iterator[None]:
    """Turn a breach of the protocol into an abort of the session at ``stage``."""
    try:
        yield
    except ProtocolError as error:
        raise AggregationAborted(stage=stage, reason=str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureClient:
    """A client's side of every session.

    The method of each stage raises :class:`fedlearn.errors.AggregationAborted` if the coordinator
    or a peer breaks the protocol: the session is then over.

    Attributes:
        client_id: This client's id.
        signer: Its identity key.
        coordinator_key: The coordinator's Ed25519 key, pinned at enrolment.
        directory: Pinned identity keys of all clients; a client that is not in it is refused.
        policy: The terms that this client accepts.
        num_threads: Number of threads that expand masks.
        draw: The roster that this client holds, which draws the clients that may be invited;
            ``None``: it holds none, and any client in the directory may be invited.
    """

    client_id: ClientId
    signer: keys.Signer
    coordinator_key: bytes
    directory: Mapping[ClientId, bytes]
    policy: TermsPolicy
    num_threads: int
    draw: RosterDraw | None = None

    def handle(
        self,
        message: messages.Message,
        state: ClientState,
        *,
        contribute: Callable[[Terms], Contribution],
        find_masks: FindMasks = find_no_masks,
    ) -> tuple[messages.Up, ClientState]:
        """Answer one message of the coordinator.

        Make the returned state durable before the reply is sent, and never answer twice from the
        same state: two replies from one state use the same keys, so their difference reveals the
        difference of the updates, and a second set of survivors could be signed. After an exception
        the session is over for this client; continue with ``state.with_step(None)``.

        Args:
            message: The coordinator's message.
            state: The state after the previous message, or between sessions.
            contribute: Called once, at R2, to train under these terms; returns what to add to the
                sum.
            find_masks: Called once after ``contribute``; returns the masks that :meth:`expand`
                computed for this step, if any.

        Raises:
            ProtocolError: The message does not follow the previous one.
            PolicyViolation: The terms break this client's policy.
        """
        match message, state.step:
            case SignedTerms(), _:  # starts a new session; an unfinished one is dropped
                return self.advertise(message, state)
            case Roster(), AdvertisedStep() as step:
                return self.share(message, state, step)
            case Packets(), SharedStep() as step:
                # Train first: masks are expanded in the background meanwhile, and are taken only
                # when ready.
                trained = contribute(step.session.terms)
                # After training: an expansion in the background has had time to finish by then.
                masks = find_masks(step)
                return self.mask(message, state, step, contribution=trained, precomputed=masks)
            case Survivors(), MaskedStep() as step:
                if step.session.terms.adversary is Adversary.ACTIVE_SERVER:
                    return self.confirm(message, state, step)
                return self._release(step, self._check_survivors(message, step, state), state)
            case Signatures(), ConfirmedStep() as step:
                return self.release(message, state, step)
            # A coordinator that was restarted asks again.
            case ((Signatures() | Survivors()), ReleasedStep() as step):
                return self.repeat(message, state, step)
        at = (
            type(state.step).__name__.removesuffix("Step").lower()
            if state.step
            else "between sessions"
        )
        raise ProtocolError(
            f"{type(message).__name__} is out of order: this client is {at}; each message of a "
            "session is answered once"
        )

    @_abort_at(Stage.ADVERTISE)
    def advertise(self, message: SignedTerms, state: ClientState) -> tuple[Advert, ClientState]:
        """R0: accept the coordinator's terms for this run, and publish fresh keys.

        Raises:
            PolicyViolation: The terms break the policy, or ask for a second release.
        """
        terms = message.terms
        if not keys.verify(self.coordinator_key, message.signature, build_terms_text(terms)):
            raise ProtocolError("the terms are not signed by the pinned coordinator")
        if terms.run_id != state.run_id:
            raise ProtocolError("the terms belong to another run")
        self.policy.judge(terms)
        if self.draw is not None:
            self.policy.judge_drawn(terms, [self.client_id], draw=self.draw)
        state.releases.require_open(terms, most=self.policy.max_releases_per_round)
        # Two keys: if this client drops out, its mask key is recovered, which must not open its
        # packets.
        packet_secret, mask_secret = (SecretBytes.generate(keys.KEY_BYTES) for _ in range(2))
        unsigned = Advert(
            client_id=self.client_id,
            packet_key=keys.KeyAgreement(packet_secret).public_key,
            mask_key=keys.KeyAgreement(mask_secret).public_key,
            nonce=SecretBytes.generate(messages.NONCE_BYTES).reveal(),
            signature=b"",
        )
        signature = self.signer.sign(build_advert_text(terms, unsigned.encode_signed_part()))
        advert = replace(unsigned, signature=signature)
        return advert, state.with_step(AdvertisedStep(terms, advert, packet_secret, mask_secret))

    @_abort_at(Stage.SHARE)
    def share(
        self, message: Roster, state: ClientState, step: AdvertisedStep
    ) -> tuple[Shares, ClientState]:
        """R1: check the roster, then share the self-seed and the mask key among the holders.

        Raises:
            PolicyViolation: So few of the invited clients are in the roster that the terms are not
                safe, one of them was not drawn, or a client of this round's last sum is missing.
        """
        own = self.client_id
        # 1. Check what the server shows.
        session = Session.from_roster(step.terms, message, directory=self.directory)
        self._check_roster(session, message, step)
        state.releases.require_all_invited(step.terms, session.points)
        seed = SecretBytes.generate(shamir.SECRET_BYTES)
        holders = session.holders(own)
        # 2. Share both secrets. If this client survives, its seed is recovered; if it drops out,
        # its mask key. Never both.
        shares = shamir.share(
            [seed, step.mask_secret],
            threshold=step.terms.threshold,
            points=[session.points[holder] for holder in holders],
        )
        pairs = {
            holder: SecretBytes(shamir.to_bytes(pair))
            for holder, pair in zip(holders, shares, strict=True)
        }
        # 3. Seal each holder's shares for it alone: the server forwards them.
        agreement, packets, opening = keys.KeyAgreement(step.packet_secret), [], {}
        for peer in session.neighbors(own):
            agreed = agreement.agree(session.by_id[peer].packet_key, owner=peer)
            sealing = keys.derive_packet_key(agreed, session=session.id, way=(own, peer))
            plain = messages.build_packet(session.points[peer], pairs[peer])
            packets.append(keys.seal(sealing, plain, session=session.id, way=(own, peer)))
            # Derived now, so that the private packet key can be forgotten after this step.
            opening[peer] = keys.derive_packet_key(agreed, session=session.id, way=(peer, own))
        reply = Shares(
            session=session.id,
            commitment=keys.commit_to_seed(seed, session=session.id, client_id=own),
            packets=tuple(packets),
        )
        return reply, state.with_step(
            SharedStep(session, opening, step.mask_secret, seed, pairs.get(own))
        )

    def _check_roster(self, session: Session, message: Roster, step: AdvertisedStep) -> None:
        self.policy.judge_roster(step.terms, size=session.size)
        if self.draw is not None:
            self.policy.judge_drawn(step.terms, session.points, draw=self.draw)
        own = session.by_id.get(self.client_id)
        # In this order: a client that is missing from the roster has no point.
        if own != step.advert or session.points[self.client_id] != message.rank + 1:
            raise ProtocolError("this client's own advert is missing or altered")
        for advert in session.adverts:
            check_advert(advert, step.terms, directory=session.identity_keys)
        leaves = {
            rank: build_leaf(to_member(advert), session.identity_keys[advert.client_id])
            for rank, advert in zip(session.ranks, session.adverts, strict=True)
        }
        ids = [advert.client_id for advert in session.adverts]
        if compute_root(session.size, leaves, keys=ids, proof=message.proof) != session.root:
            raise ProtocolError("the adverts are not those of the roster")

    @_abort_at(Stage.MASK)
    def expand(self, step: SharedStep, *, check: Callable[[], None]) -> tuple[Words, ...]:
        """Expand all masks of this step in advance, while the client waits for the network.

        These are its own mask and those with all neighbors. ``check`` is called every few masks;
        an exception from it stops the work.
        """
        words = masking.zeros(step.session.terms.lanes)
        every = self._derive_mask_keys(step, step.session.neighbors(self.client_id))
        for some in every.split(-(-len(every) // _MASKS_PER_CHECK)):
            check()
            masking.fold(words, some, num_threads=self.num_threads)
        return words

    @_abort_at(Stage.MASK)
    def mask(
        self,
        message: Packets,
        state: ClientState,
        step: SharedStep,
        *,
        contribution: Contribution,
        precomputed: tuple[Words, ...] | None = None,
    ) -> tuple[MaskedVector, ClientState]:
        """R2: store the packets, mask the contribution, forget this client's own secrets.

        ``precomputed`` has the masks that :meth:`expand` returned for this step, if it was called.
        """
        session, terms = step.session, step.session.terms
        # All vectors of a sum answer one request, which the terms name.
        if contribution.request_hash != terms.request_hash:
            raise ProtocolError("this client trained on another request than the one in the terms")
        held = self._open_packets(message, step)
        partners = [owner for owner in held if owner != self.client_id]
        fresh = SecretBytes.generate(keys.KEY_BYTES).reveal()
        # With privacy, this adds the client's share of the noise, before the masks.
        words = encode_contribution(terms, contribution, rounding_key=fresh)
        if precomputed is None:
            folded = self._derive_mask_keys(step, partners)
        else:
            for total, mask in zip(words, precomputed, strict=True):
                np.add(total, mask, out=total)
            # Masks with neighbors that sent no packet were expanded too: take them out again.
            absent = sorted(set(session.neighbors(self.client_id)) - set(partners))
            agreement = keys.KeyAgreement(step.mask_secret)
            folded = derive_pair_keys(agreement, self.client_id, absent, session=session).inverse()
        masking.fold(words, folded, num_threads=self.num_threads)
        # MaskedStep has neither seed nor mask key: from here on, only the holders can unmask.
        reply = MaskedVector(session=session.id, packed=masking.pack(terms.lanes, words))
        return reply, state.with_step(MaskedStep(session, held))

    def _open_packets(self, message: Packets, step: SharedStep) -> dict[ClientId, SecretBytes]:
        session = step.session
        strangers = message.packets.keys() - set(session.neighbors(self.client_id))
        if strangers:
            raise ProtocolError(f"client {min(strangers)} sent a packet but is not a neighbor")
        held = {} if step.own is None else {self.client_id: step.own}
        if len(message.packets) + len(held) < session.terms.threshold:
            raise ProtocolError(
                f"{len(message.packets)} neighbors shared, too few for the threshold "
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

    def _derive_mask_keys(self, step: SharedStep, partners: Iterable[ClientId]) -> masking.MaskKeys:
        own = keys.derive_self_mask_key(
            step.seed, session=step.session.id, client_id=self.client_id
        )
        agreement = keys.KeyAgreement(step.mask_secret)
        pairs = derive_pair_keys(agreement, self.client_id, partners, session=step.session)
        return masking.MaskKeys(plus=[own, *pairs.plus], minus=pairs.minus)

    def confirm(
        self, message: Survivors, state: ClientState, step: MaskedStep
    ) -> tuple[SurvivorSignature, ClientState]:
        """R3: sign this set of survivors, and never another one in this session."""
        survivors = self._check_survivors(message, step, state)
        text = step.session.build_survivors_text(survivors, self.client_id)
        # A second set of survivors finds no MaskedStep, and so is never signed.
        after = ConfirmedStep(step.session, step.held, survivors)
        return SurvivorSignature(signature=self.signer.sign(text)), state.with_step(after)

    @_abort_at(Stage.CONFIRM)
    def _check_survivors(self, message: Survivors, step: MaskedStep, state: ClientState) -> bytes:
        """Return the received bitmap of survivors, if an honest server could have sent it.

        A neighbor whose packet never arrived cannot have survived: this client does not mask with
        it, so the mask of the two would not cancel. And at least t of this client's own holders
        must survive, since it takes t shares to recover its self-seed. These checks alone do not
        keep the graph of masks connected; together with the choice of k and t they do
        (:mod:`fedlearn.secagg.parameters`).
        """
        session, terms = step.session, step.session.terms
        ranks = session.unpack_ranks(message.ranks, what="the survivors")
        alive = session.find_clients(ranks.tolist())
        if self.client_id not in alive:
            raise ProtocolError("this client sent its vector but is not among the survivors")
        if len(ranks) < terms.min_survivors:
            raise ProtocolError(f"{len(ranks)} survivors, min_survivors is {terms.min_survivors}")
        holders = set(alive) & set(session.holders(self.client_id))
        if holders - step.held.keys() - {self.client_id}:
            raise ProtocolError("a survivor's packet was withheld from this client")
        if len(holders) < terms.threshold:
            raise ProtocolError(
                f"{len(holders)} of this client's holders survive, the threshold is "
                f"{terms.threshold}"
            )
        # In a sparse graph `require_open` has refused a second sum of this round already.
        if session.is_whole:
            state.releases.require_same(terms, alive)
        return message.ranks

    @_abort_at(Stage.UNMASK)
    def release(
        self, message: Signatures, state: ClientState, step: ConfirmedStep
    ) -> tuple[ShareRelease, ClientState]:
        """R4: release one share of every owner, if a quorum signed the same survivors.

        Raises:
            PolicyViolation: A sum that was opened in the meantime forbids this one.
        """
        self._audit(message, step)
        return self._release(step, step.survivors, state)

    def _release(
        self, step: MaskedStep | ConfirmedStep, survivors: bytes, state: ClientState
    ) -> tuple[ShareRelease, ClientState]:
        """Release the self-seed share of each survivor, and the mask-key share of each dropout."""
        session, half, shares = step.session, shamir.SHARE_BYTES, dict[ClientId, SecretBytes]()
        alive = set(
            session.find_clients(session.unpack_ranks(survivors, what="the survivors").tolist())
        )
        for owner, pair in step.held.items():
            data = pair.reveal()
            # Never both halves: with both secrets of a client its vector could be unmasked.
            shares[owner] = SecretBytes(data[:half] if owner in alive else data[half:])
        most = self.policy.max_releases_per_round
        # Recorded before the reply goes out: a crash must not allow another sum of this round.
        after = state.record_release(ReleasedStep(session, survivors, shares), most=most)
        return ShareRelease(session=session.id, shares=shares), after

    @_abort_at(Stage.UNMASK)
    def repeat(
        self, message: Signatures | Survivors, state: ClientState, step: ReleasedStep
    ) -> tuple[ShareRelease, ClientState]:
        """R4 again: release the same shares if the same is asked; the state does not change."""
        if step.session.terms.adversary is Adversary.ACTIVE_SERVER:
            if not isinstance(message, Signatures):
                raise ProtocolError("this client has released its shares")
            self._audit(message, step)
        elif not isinstance(message, Survivors) or message.ranks != step.survivors:
            raise ProtocolError("this client has released its shares to other survivors")
        return ShareRelease(session=step.session.id, shares=step.shares), state

    def _audit(self, message: Signatures, step: ConfirmedStep | ReleasedStep) -> None:
        session, signers = step.session, [signer.client_id for signer in message.signers]
        if self.draw is not None:
            self.policy.judge_drawn(session.terms, signers, draw=self.draw)
        known = {each: self.directory[each] for each in signers if each in self.directory}
        # Keys of the session come last: a client may have replaced its key since it began.
        directory = {**known, **session.identity_keys}
        audit.check(message, session, survivors=step.survivors, directory=directory)


def check_advert(advert: Advert, terms: Terms, *, directory: Mapping[ClientId, bytes]) -> None:
    """Check that a client of the directory signed an advert for these terms.

    Raises:
        ProtocolError: The client is not in the directory, or did not sign the advert.
    """
    known = directory.get(advert.client_id)
    if known is None:
        raise ProtocolError(f"client {advert.client_id} is not in the pinned directory")
    if not keys.verify(
        known, advert.signature, build_advert_text(terms, advert.encode_signed_part())
    ):
        raise ProtocolError(
            f"the advert of client {advert.client_id} is not signed by it for this session"
        )


def derive_pair_keys(
    agreement: keys.KeyAgreement,
    client_id: ClientId,
    partners: Iterable[ClientId],
    *,
    session: Session,
) -> masking.MaskKeys:
    """Return the keys of the masks that ``client_id`` shares with ``partners``.

    The client with the lower id adds the mask and the other subtracts it, so they cancel in a sum.

    Raises:
        ProtocolError: A partner's key is of low order.
    """
    plus: list[SecretBytes] = []
    minus: list[SecretBytes] = []
    for partner in partners:
        theirs, pair = session.by_id[partner].mask_key, (client_id, partner)
        key = keys.derive_pair_mask_key(agreement, theirs, session=session.id, pair=pair)
        (plus if client_id < partner else minus).append(key)
    return masking.MaskKeys(plus=plus, minus=minus)
