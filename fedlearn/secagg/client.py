"""A client in secure aggregation: a message and a state in, a reply and the next state out.

Guarantees:
    Against an honest-but-curious server with at most gamma n colluding clients, what the
    coordinator learns of this client's values is in the sum of all survivors. Against an
    active server the same, for a sum of at least ``min_survivors`` clients of the pinned
    directory. Assumed: the primitives of :mod:`fedlearn.secagg.keys`, and the policy's gamma.
    Not given: integrity (a client may send what it likes); protection from sums over cohorts
    that differ in one client, or from a coordinator that invites its accomplices; and in a
    sparse graph, against a server that tries many rosters for one whose ring suits it, sigma
    bits less the logarithm of its tries.

References:
    Bonawitz et al., 2017, figure 4; Bell et al., 2020.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import AggregationAborted, PolicyViolation, ProtocolError
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.client_state import (
    Advertised,
    ClientState,
    Confirmed,
    Masked,
    Shared,
)
from fedlearn.secagg.fixed_point import Words
from fedlearn.secagg.messages import (
    NONCE_BYTES,
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
    Up,
)
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import Policy
from fedlearn.secagg.session import Session, Stage, advert_text, terms_text
from fedlearn.secagg.terms import Contribution, Terms, to_words

#: Masks that are expanded between two looks at whether to go on; fewer take longer in sum.
_FOLDED_TOGETHER = 32

#: Masks of a step that were expanded ahead; ``None``: there are none, and they are expanded now.
Expanded: TypeAlias = Callable[[Shared], tuple[Words, ...] | None]


def nothing_expanded(_step: Shared) -> None:
    """Return no masks: none were expanded ahead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureClient:
    """A client's side of every session.

    Attributes:
        client_id: Its own id.
        signer: Its identity key.
        coordinator_key: The coordinator's Ed25519 key, pinned at enrolment.
        directory: Identity keys of all clients, pinned; whoever is not in it does not exist.
        policy: What it accepts.
        num_threads: Threads to expand masks on.
    """

    client_id: ClientId
    signer: keys.Signer
    coordinator_key: bytes
    directory: Mapping[ClientId, bytes]
    policy: Policy
    num_threads: int

    def handle(
        self,
        data: bytes,
        state: ClientState,
        *,
        contribute: Callable[[Terms], Contribution],
        expanded: Expanded = nothing_expanded,
    ) -> tuple[bytes, ClientState]:
        """Answer one message of the coordinator.

        The returned state must be durable before the reply is sent, and no state may be answered
        from twice: two replies from one state share their keys, so their difference shows the
        difference of the updates, and a release could be repeated. After an exception the session
        is over for this client; go on with ``state.at(None)``.

        Args:
            data: The message.
            state: After the previous message, or between sessions.
            contribute: Called once, at R2: what to add to the sum, trained under these terms.
            expanded: Called once after that: what :meth:`expand` returned for this step, if it was
                called.

        Raises:
            ProtocolError: ``data`` is no message, or an altered one.
            PolicyViolation: The terms break this client's policy.
            AggregationAborted: The coordinator, or a peer, does not keep to the protocol.
        """
        reply, after = self._answer(messages.decode(data), state, contribute, expanded)
        return messages.encode(reply), after

    def _answer(
        self,
        message: messages.Message,
        state: ClientState,
        contribute: Callable[[Terms], Contribution],
        expanded: Expanded,
    ) -> tuple[Up, ClientState]:
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
                return self._release(step, _checked(self.client_id, message, step), state)
            case Signatures(), Confirmed() as step:
                return self.release(message, state, step)
        at = type(state.step).__name__.lower() if state.step else "between sessions"
        raise ProtocolError(
            f"{type(message).__name__} does not follow: this client is {at}; each message of a "
            "session is answered once"
        )

    def advertise(self, message: SignedTerms, state: ClientState) -> tuple[Advert, ClientState]:
        """R0: agree to terms and publish fresh keys.

        Raises:
            AggregationAborted: The terms are not the coordinator's, or of another run.
            PolicyViolation: They break the policy, or ask for a second release.
        """
        terms = message.terms
        if not keys.verify(self.coordinator_key, message.signature, terms_text(terms)):
            raise _abort(Stage.ADVERTISE, "the terms are not signed by the pinned coordinator")
        if terms.run_id != state.run_id:
            raise _abort(Stage.ADVERTISE, "the terms are of another run")
        self.policy.judge(terms)
        self._require_unreleased(terms, state)
        packet_secret, mask_secret = (SecretBytes.generate(keys.KEY_BYTES) for _ in range(2))
        unsigned = Advert(
            client_id=self.client_id,
            packet_key=keys.KeyAgreement(packet_secret).public_key,
            mask_key=keys.KeyAgreement(mask_secret).public_key,
            nonce=SecretBytes.generate(NONCE_BYTES).reveal(),
            signature=b"",
        )
        signature = self.signer.sign(advert_text(terms, unsigned.unsigned()))
        advert = Advert(
            client_id=unsigned.client_id,
            packet_key=unsigned.packet_key,
            mask_key=unsigned.mask_key,
            nonce=unsigned.nonce,
            signature=signature,
        )
        return advert, state.at(Advertised(terms, advert, packet_secret, mask_secret))

    def _require_unreleased(self, terms: Terms, state: ClientState) -> None:
        if state.last_release is None:
            return
        if (terms.round_num, terms.attempt) <= state.last_release:
            last_round, last_attempt = state.last_release
            raise PolicyViolation(
                rule="one release a session",
                asked=f"round {terms.round_num}, attempt {terms.attempt}",
                limit=f"after round {last_round}, attempt {last_attempt}",
            )
        same_round = terms.round_num == state.last_release[0]
        if same_round and state.num_releases >= self.policy.max_releases_per_round:
            raise PolicyViolation(
                rule="max_releases_per_round",
                asked=f"release {state.num_releases + 1} in round {terms.round_num}",
                limit=f"at most {self.policy.max_releases_per_round}",
            )

    def share(
        self, message: Roster, state: ClientState, step: Advertised
    ) -> tuple[Shares, ClientState]:
        """R1: check the roster, share the self-seed and the mask key among the holders.

        Raises:
            AggregationAborted: An advert is not of the pinned directory, or is forged; this
                client's own is missing; the roster is too small or too large.
        """
        session = Session(step.terms, message.adverts)
        self._check_roster(session, step)
        seed = SecretBytes.generate(shamir.SECRET_BYTES)
        holders = session.holders(self.client_id)
        shares = shamir.share(
            [seed, step.mask_secret],
            threshold=step.terms.threshold,
            points=[session.points[holder] for holder in holders],
        )
        pairs = {
            holder: SecretBytes(shamir.to_bytes(pair))
            for holder, pair in zip(holders, shares, strict=True)
        }
        neighbours = session.neighbours(self.client_id)
        agreed = self._agreed(session, step, neighbours)
        reply = Shares(
            session=session.id,
            commitment=keys.commitment(seed, session=session.id, client_id=self.client_id),
            packets=tuple(
                self._seal(agreed[neighbour], session, to=neighbour, pair=pairs[neighbour])
                for neighbour in neighbours
            ),
        )
        opening = {
            neighbour: keys.packet_key(
                agreed[neighbour], session=session.id, way=(neighbour, self.client_id)
            )
            for neighbour in neighbours
        }
        own = pairs.get(self.client_id)
        return reply, state.at(Shared(session, opening, step.mask_secret, seed, own))

    def _check_roster(self, session: Session, step: Advertised) -> None:
        if len(session.adverts) > step.terms.num_clients:
            raise _abort(Stage.SHARE, f"{len(session.adverts)} clients in the roster, more than n")
        if session.shortage:
            raise _abort(Stage.SHARE, session.shortage)
        if session.by_id.get(self.client_id) != step.advert:
            raise _abort(Stage.SHARE, "this client's own advert is missing or altered")
        for advert in session.adverts:
            check_advert(advert, step.terms, directory=self.directory)

    def _agreed(
        self, session: Session, step: Advertised, neighbours: Iterable[ClientId]
    ) -> dict[ClientId, SecretBytes]:
        """Return what the packet keys of this client and each neighbour agree on."""
        agreement, found = keys.KeyAgreement(step.packet_secret), dict[ClientId, SecretBytes]()
        for neighbour in neighbours:
            try:
                found[neighbour] = agreement.agree(session.by_id[neighbour].packet_key)
            except ProtocolError as error:
                raise _abort(Stage.SHARE, f"client {neighbour}: {error}") from error
        return found

    def _seal(
        self, agreed: SecretBytes, session: Session, *, to: ClientId, pair: SecretBytes
    ) -> bytes:
        way = (self.client_id, to)
        key = keys.packet_key(agreed, session=session.id, way=way)
        plain = messages.packet_of(session.points[to], pair)
        return keys.seal(key, plain, session=session.id, way=way)

    def expand(self, step: Shared, *, check: Callable[[], None]) -> tuple[Words, ...]:
        """Return the masks with all neighbours: to be computed while the network waits.

        Args:
            step: Where the client's state is.
            check: Called every few masks; what it raises ends the work.

        Raises:
            AggregationAborted: A neighbour's key is of low order.
        """
        words = masking.zeros(step.session.terms.lanes)
        every = self._mask_keys(step, step.session.neighbours(self.client_id))
        num_masks = len(every.plus) + len(every.minus)
        for some in every.split(-(-num_masks // _FOLDED_TOGETHER)):
            check()
            masking.fold(words, some, num_threads=self.num_threads)
        return words

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

        Args:
            message: The packets addressed to this client.
            state: Of the client.
            step: Its place in the session.
            contribution: Trained on the request that the terms name.
            expanded: What :meth:`expand` returned for this step, if it was called; used up.

        Raises:
            AggregationAborted: Too few packets, one of a stranger, or one that was altered;
                or the contribution answers another request.
        """
        session, terms = step.session, step.session.terms
        if contribution.request_hash != terms.request_hash:
            raise _abort(Stage.MASK, "trained on another request than the terms name")
        held = self._open(message, step)
        partners = [owner for owner in held if owner != self.client_id]
        fresh = SecretBytes.generate(keys.KEY_BYTES).reveal()
        words = to_words(terms, contribution, rounding_key=fresh)
        if expanded is None:
            folded = self._mask_keys(step, partners)
        else:
            for total, mask in zip(words, expanded, strict=True):
                np.add(total, mask, out=total)
            absent = set(session.neighbours(self.client_id)) - set(partners)
            folded = self._pair_keys(step, sorted(absent)).inverse()
        masking.fold(words, folded, num_threads=self.num_threads)
        reply = MaskedVector(session=session.id, packed=masking.pack(terms.lanes, words))
        return reply, state.at(Masked(session, held))

    def _open(self, message: Packets, step: Shared) -> dict[ClientId, SecretBytes]:
        session = step.session
        strangers = message.packets.keys() - set(session.neighbours(self.client_id))
        if strangers:
            raise _abort(Stage.MASK, f"packets of clients that are no neighbours: {min(strangers)}")
        held = {} if step.own is None else {self.client_id: step.own}
        if len(message.packets) + len(held) < session.terms.threshold:
            raise _abort(
                Stage.MASK,
                f"{len(message.packets)} neighbours shared, too few for the threshold "
                f"{session.terms.threshold}",
            )
        point = session.points[self.client_id]
        for sender, packet in message.packets.items():
            way = (sender, self.client_id)
            try:
                plain = keys.unseal(step.opening[sender], packet, session=session.id, way=way)
                held[sender] = messages.open_packet(plain, point=point, sender=sender)
            except ProtocolError as error:
                raise _abort(Stage.MASK, str(error)) from error
        return held

    def _mask_keys(self, step: Shared, partners: Iterable[ClientId]) -> masking.MaskKeys:
        own = keys.self_mask_key(step.seed, session=step.session.id, client_id=self.client_id)
        pairs = self._pair_keys(step, partners)
        return masking.MaskKeys(plus=[own, *pairs.plus], minus=pairs.minus)

    def _pair_keys(self, step: Shared, partners: Iterable[ClientId]) -> masking.MaskKeys:
        agreement, session = keys.KeyAgreement(step.mask_secret), step.session
        try:
            return pair_keys(agreement, self.client_id, partners, session=session)
        except ProtocolError as error:
            raise _abort(Stage.MASK, str(error)) from error

    def confirm(
        self, message: Survivors, state: ClientState, step: Masked
    ) -> tuple[SurvivorSignature, ClientState]:
        """R3: sign one set of survivors, and no other.

        Raises:
            AggregationAborted: The set cannot be the honest one, or is too small.
        """
        survivors = _checked(self.client_id, message, step)
        signature = self.signer.sign(step.session.survivors_text(survivors))
        after = Confirmed(step.session, step.held, survivors)
        return SurvivorSignature(signature=signature), state.at(after)

    def release(
        self, message: Signatures, state: ClientState, step: Confirmed
    ) -> tuple[Release, ClientState]:
        """R4: release one share of every owner, if a quorum signed the same survivors.

        Raises:
            AggregationAborted: A signature is false or of no survivor, or too few are there.
        """
        survivors, text = set(step.survivors), step.session.survivors_text(step.survivors)
        for signer, signature in message.signatures.items():
            if signer not in survivors:
                raise _abort(Stage.UNMASK, f"a signature of client {signer}, no survivor")
            if not keys.verify(self.directory[signer], signature, text):
                raise _abort(Stage.UNMASK, f"client {signer} did not sign these survivors")
        signed = len(message.signatures.keys() | {self.client_id})
        if signed < step.session.terms.quorum:
            raise _abort(
                Stage.UNMASK,
                f"{signed} survivors confirmed the survivors, the quorum is "
                f"{step.session.terms.quorum}",
            )
        return self._release(step, step.survivors, state)

    def _release(
        self, step: Masked | Confirmed, survivors: tuple[ClientId, ...], state: ClientState
    ) -> tuple[Release, ClientState]:
        alive = set(survivors)
        shares = {owner: _half(pair, owner in alive) for owner, pair in step.held.items()}
        reply = Release(session=step.session.id, shares=shares)
        return reply, state.released(step.session.terms)


def check_advert(advert: Advert, terms: Terms, *, directory: Mapping[ClientId, bytes]) -> None:
    """Check that a client of the directory signed an advert for these terms.

    Raises:
        AggregationAborted: It did not.
    """
    known = directory.get(advert.client_id)
    if known is None:
        raise _abort(Stage.SHARE, f"client {advert.client_id} is not in the pinned directory")
    if not keys.verify(known, advert.signature, advert_text(terms, advert.unsigned())):
        raise _abort(
            Stage.SHARE,
            f"the advert of client {advert.client_id} is not signed by it for this session",
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
        key = keys.pair_mask_key(
            agreement,
            session.by_id[partner].mask_key,
            session=session.id,
            pair=(client_id, partner),
        )
        (plus if client_id < partner else minus).append(key)
    return masking.MaskKeys(plus=plus, minus=minus)


def _checked(client_id: ClientId, message: Survivors, step: Masked) -> tuple[ClientId, ...]:
    """Return the survivors if they can be the honest ones.

    A neighbour whose packet never came cannot have survived: it would be masked with us. And
    at least t of our own holders survive: with 2t > h + a no two sets of survivors fall apart.
    """
    session, survivors = step.session, message.client_ids
    alive = set(survivors)
    if alive - session.points.keys():
        raise _abort(Stage.CONFIRM, f"survivor {min(alive - session.points.keys())} is a stranger")
    if client_id not in alive:
        raise _abort(Stage.CONFIRM, "this client sent its vector but is not among the survivors")
    if len(survivors) < session.terms.min_survivors:
        raise _abort(
            Stage.CONFIRM,
            f"{len(survivors)} survivors, the least is {session.terms.min_survivors}",
        )
    holders = alive & set(session.holders(client_id))
    if holders - step.held.keys() - {client_id}:
        raise _abort(Stage.CONFIRM, "a survivor's packet was kept from this client")
    if len(holders) < session.terms.threshold:
        raise _abort(
            Stage.CONFIRM,
            f"{len(holders)} of this client's holders survive, the threshold is "
            f"{session.terms.threshold}",
        )
    return survivors


def _half(pair: SecretBytes, is_survivor: bool) -> SecretBytes:  # noqa: FBT001 - which of two
    """Return the share of the self-seed of a survivor, or of the mask key of a dropped client."""
    data = pair.reveal()
    return SecretBytes(data[: shamir.SHARE_BYTES] if is_survivor else data[shamir.SHARE_BYTES :])


def _abort(stage: Stage, reason: str) -> AggregationAborted:
    return AggregationAborted(stage=stage, reason=reason)
