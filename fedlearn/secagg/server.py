"""The coordinator in secure aggregation: one value a stage, no I/O and no clock.

``open_session`` -> :class:`Advertising` -> :class:`Sharing` -> :class:`Masking` ->
(:class:`Confirming` ->) :class:`Unmasking`. Each stage takes messages with ``receive`` until
its owner finds that it is time to ``close`` it; closing returns what to send to whom and the
next stage. What comes after that has no stage left that would take it: a late vector stays
masked for ever.

A message that cannot be used raises :class:`fedlearn.errors.ProtocolError`, which is that
client's failure and changes nothing; a stage with too little left raises
:class:`fedlearn.errors.AggregationAborted`, and nothing has been released.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import keys, masking
from fedlearn.secagg.client import check_advert
from fedlearn.secagg.fixed_point import Words
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
from fedlearn.secagg.session import Session, Stage, terms_text
from fedlearn.secagg.terms import Terms, Total, from_words
from fedlearn.secagg.unmasking import Recovered, ShareBox, leftover_masks


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What a session released.

    Attributes:
        total: The sum.
        survivors: Whose values are in it, ascending.
        dropped: The stage at which each of the others was lost; of the roster.
        suspects: Holders with a false share: they lied, or its owner dealt it.
    """

    total: Total
    survivors: tuple[ClientId, ...]
    dropped: Mapping[ClientId, Stage]
    suspects: frozenset[ClientId]


def open_session(
    terms: Terms, *, signer: keys.Signer, directory: Mapping[ClientId, bytes]
) -> tuple[SignedTerms, "Advertising"]:
    """Begin a session: what to send to the cohort, and the first stage.

    Args:
        terms: Of the session; a retry has its own attempt, hence its own keys.
        signer: The coordinator's identity.
        directory: The identity keys of all clients.
    """
    signed = SignedTerms(terms=terms, signature=signer.sign(terms_text(terms)))
    return signed, Advertising(terms, directory)


@dataclass(eq=False)
class Advertising:
    """R0: collects adverts."""

    terms: Terms
    directory: Mapping[ClientId, bytes]
    _adverts: dict[ClientId, Advert] = field(default_factory=dict, init=False)

    @property
    def num_received(self) -> int:
        """Usable messages so far."""
        return len(self._adverts)

    def receive(self, client_id: ClientId, advert: Advert) -> None:
        """Take the advert of the client that the channel authenticated as ``client_id``.

        Raises:
            ProtocolError: It is a second one, another client's, forged, or its key is weak.
        """
        _require_new(client_id, self._adverts)
        if len(self._adverts) == self.terms.num_clients:
            raise ProtocolError(f"client {client_id} is one more than were invited")
        if advert.client_id != client_id:
            raise ProtocolError(f"client {client_id} sent the advert of {advert.client_id}")
        try:
            check_advert(advert, self.terms, directory=self.directory)
        except AggregationAborted as error:
            raise ProtocolError(error.reason) from error
        probe = keys.KeyAgreement(SecretBytes.generate(keys.KEY_BYTES))
        for public_key in (advert.packet_key, advert.mask_key):
            probe.agree(public_key)
        self._adverts[client_id] = advert

    def close(self) -> tuple[Roster, "Sharing"]:
        """Return the roster, for all in it, and the next stage.

        Raises:
            AggregationAborted: Too few clients.
        """
        adverts = tuple(self._adverts[client_id] for client_id in sorted(self._adverts))
        session = Session(self.terms, adverts)
        if session.shortage:
            raise AggregationAborted(stage=Stage.ADVERTISE, reason=session.shortage)
        return Roster(adverts=adverts), Sharing(session, self.directory)


@dataclass(eq=False)
class Sharing:
    """R1: collects packets of shares."""

    session: Session
    directory: Mapping[ClientId, bytes]
    _shares: dict[ClientId, Shares] = field(default_factory=dict, init=False)

    @property
    def num_received(self) -> int:
        """Usable messages so far."""
        return len(self._shares)

    def receive(self, client_id: ClientId, shares: Shares) -> None:
        """Take a client's packets.

        Raises:
            ProtocolError: It is not in the roster, has sent some, or not one a neighbour; or
                they are of another session.
        """
        _require_member(client_id, self.session.points)
        _require_new(client_id, self._shares)
        _require_session(shares.session, self.session)
        expected = len(self.session.neighbours(client_id))
        if len(shares.packets) != expected:
            raise ProtocolError(
                f"client {client_id} sent {len(shares.packets)} packets to {expected} neighbours"
            )
        self._shares[client_id] = shares

    def close(self) -> tuple[dict[ClientId, Packets], "Masking"]:
        """Return each client's packets and the next stage.

        Raises:
            AggregationAborted: Too few clients shared.
        """
        _require_enough(Stage.SHARE, len(self._shares), self.session.terms)
        inbox: dict[ClientId, dict[ClientId, bytes]] = {client: {} for client in self._shares}
        for sender in sorted(self._shares):
            recipients = self.session.neighbours(sender)
            for recipient, packet in zip(recipients, self._shares[sender].packets, strict=True):
                if recipient in inbox:
                    inbox[recipient][sender] = packet
        packets = {client_id: Packets(packets=rows) for client_id, rows in inbox.items()}
        commitments = {client_id: s.commitment for client_id, s in self._shares.items()}
        return packets, Masking(self.session, self.directory, commitments)


@dataclass(eq=False)
class Masking:
    """R2: adds up masked vectors as they come; none is kept."""

    session: Session
    directory: Mapping[ClientId, bytes]
    commitments: Mapping[ClientId, bytes]
    _sums: tuple[Words, ...] = field(init=False)
    _survivors: set[ClientId] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._sums = masking.zeros(self.session.terms.lanes)

    @property
    def num_received(self) -> int:
        """Usable messages so far."""
        return len(self._survivors)

    def receive(self, client_id: ClientId, vector: MaskedVector) -> None:
        """Add a client's masked vector to the sum.

        Raises:
            ProtocolError: It did not share, has sent one, or it is of another session or size.
        """
        _require_member(client_id, self.commitments)
        _require_new(client_id, self._survivors)
        _require_session(vector.session, self.session)
        masking.add_packed(self._sums, vector.packed, lanes=self.session.terms.lanes)
        self._survivors.add(client_id)

    def close(self) -> tuple[Survivors, "Confirming | Unmasking"]:
        """Return the survivors, for each of them, and the next stage.

        Raises:
            AggregationAborted: Too few survive, or too few holders of one client's shares.
        """
        terms = self.session.terms
        _require_enough(Stage.MASK, len(self._survivors), terms)
        for owner in self.commitments:
            left = sum(holder in self._survivors for holder in self.session.holders(owner))
            if left < terms.threshold:
                raise AggregationAborted(
                    stage=Stage.MASK,
                    reason=f"{left} holders of the shares of client {owner} survive, the "
                    f"threshold is {terms.threshold}",
                )
        survivors = tuple(sorted(self._survivors))
        unmasking = Unmasking(self.session, self.commitments, survivors, self._sums)
        message = Survivors(client_ids=survivors)
        if terms.adversary is Adversary.ACTIVE_SERVER:
            return message, Confirming(unmasking, self.directory)
        return message, unmasking


@dataclass(eq=False)
class Confirming:
    """R3: collects signatures over the survivors; only against an active server."""

    unmasking: "Unmasking"
    directory: Mapping[ClientId, bytes]
    _signatures: dict[ClientId, bytes] = field(default_factory=dict, init=False)
    _text: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text = self.unmasking.session.survivors_text(self.unmasking.survivors)

    @property
    def num_received(self) -> int:
        """Usable messages so far."""
        return len(self._signatures)

    def receive(self, client_id: ClientId, message: SurvivorSignature) -> None:
        """Take a survivor's signature.

        Raises:
            ProtocolError: It is no survivor's, a second one, or false.
        """
        unmasking = self.unmasking
        _require_member(client_id, set(unmasking.survivors))
        _require_new(client_id, self._signatures)
        if not keys.verify(self.directory[client_id], message.signature, self._text):
            raise ProtocolError(f"client {client_id} did not sign these survivors")
        self._signatures[client_id] = message.signature

    @property
    def confirmed(self) -> tuple[ClientId, ...]:
        """Who signed, ascending: whom to ask for shares."""
        return tuple(sorted(self._signatures))

    def close(self) -> tuple[Signatures, "Unmasking"]:
        """Return a quorum of signatures, for all that confirmed, and the next stage.

        Raises:
            AggregationAborted: Fewer than a quorum signed.
        """
        quorum = self.unmasking.session.terms.quorum
        if len(self._signatures) < quorum:
            raise AggregationAborted(
                stage=Stage.CONFIRM,
                reason=f"{len(self._signatures)} survivors confirmed, the quorum is {quorum}",
            )
        signatures = {signer: self._signatures[signer] for signer in self.confirmed[:quorum]}
        return Signatures(signatures=signatures), self.unmasking


@dataclass(eq=False)
class Unmasking:
    """R4: collects shares, until every client that shared has t of them."""

    session: Session
    commitments: Mapping[ClientId, bytes]
    survivors: tuple[ClientId, ...]
    sums: tuple[Words, ...] = field(repr=False)
    _box: ShareBox = field(init=False, repr=False)
    _released: set[ClientId] = field(default_factory=set, init=False)
    _recovered: Recovered | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._box = ShareBox(self.session, sorted(self.commitments))

    @property
    def num_received(self) -> int:
        """Usable messages so far."""
        return len(self._released)

    @property
    def is_enough(self) -> bool:
        """Whether the stage can close: nobody else need be waited for.

        Where a share is false there may be t of every client and still no secret: one more holder
        tells which it is.
        """
        if self._recovered is None and self._box.shortest >= self.session.terms.threshold:
            try:
                self._recovered = self._recover()
            except AggregationAborted:
                return False
        return self._recovered is not None

    def receive(self, client_id: ClientId, release: Release) -> None:
        """Take the shares that a survivor releases.

        Raises:
            ProtocolError: It is no survivor's, a second one, of another session, or not
                one share of each client that it holds shares of.
        """
        _require_member(client_id, set(self.survivors))
        _require_new(client_id, self._released)
        _require_session(release.session, self.session)
        # Neighbours hold each other's shares, so who holds ours is whose we hold.
        expected = {o for o in self.session.holders(client_id) if o in self.commitments}
        if release.shares.keys() != expected:
            raise ProtocolError(
                f"client {client_id} released shares of {len(release.shares)} clients, not of the "
                f"{len(expected)} that it holds shares of"
            )
        self._box.put(client_id, release.shares)
        self._released.add(client_id)

    def close(self, *, num_threads: int) -> Outcome:
        """Take the masks out of the sum; the stage is used up.

        Args:
            num_threads: Threads to expand masks on.

        Raises:
            AggregationAborted: Too few shares, or false ones; nothing is released.
        """
        alive = set(self.survivors)
        recovered = self._recovered or self._recover()
        leftover = leftover_masks(recovered, session=self.session)
        masking.fold(self.sums, leftover, num_threads=num_threads)
        try:
            total = from_words(self.session.terms, self.sums, num_clients=len(alive))
        except ValueError as error:
            raise AggregationAborted(stage=Stage.UNMASK, reason=str(error)) from error
        dropped = {
            client_id: Stage.MASK if client_id in self.commitments else Stage.SHARE
            for client_id in self.session.points
            if client_id not in alive
        }
        return Outcome(
            total=total, survivors=self.survivors, dropped=dropped, suspects=recovered.suspects
        )

    def _recover(self) -> Recovered:
        return self._box.recover(set(self.survivors), self.commitments)


def _require_new(client_id: ClientId, seen: set[ClientId] | Mapping[ClientId, object]) -> None:
    if client_id in seen:
        raise ProtocolError(f"client {client_id} has answered this stage already")


def _require_member(
    client_id: ClientId, members: set[ClientId] | Mapping[ClientId, object]
) -> None:
    if client_id not in members:
        raise ProtocolError(f"client {client_id} does not take part in this stage")


def _require_session(session: bytes, expected: Session) -> None:
    if session != expected.id:
        raise ProtocolError("the message is of another session")


def _require_enough(stage: Stage, left: int, terms: Terms) -> None:
    if left < (least := terms.min_survivors):
        raise AggregationAborted(
            stage=stage, reason=f"{left} clients are left, the least is {least}"
        )
