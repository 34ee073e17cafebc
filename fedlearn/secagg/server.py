"""The coordinator in secure aggregation: one object per stage, without I/O and without a clock.

``open_session`` -> :class:`Advertising` -> :class:`Sharing` -> :class:`Masking` ->
(:class:`Confirming` ->) :class:`Unmasking`. Each stage takes messages with ``receive`` until its
owner decides to ``close`` it; closing returns the messages to send, by client, and the next stage.
A message that arrives later finds no stage that accepts it: a late vector stays masked forever.

Every ``receive`` raises :class:`fedlearn.errors.ProtocolError` if the message is of another
session, comes from a client that is not in the stage, is a duplicate, or is false. That is the
client's failure and changes nothing. Every ``close`` raises
:class:`fedlearn.errors.AggregationAborted` if too few clients are left; nothing has been released
then.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeAlias, TypeVar

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import audit, keys, masking, messages, octets, shamir
from fedlearn.secagg.client import check_advert
from fedlearn.secagg.fixed_point import Words
from fedlearn.secagg.merkle import MerkleTree
from fedlearn.secagg.messages import (
    Advert,
    ClientIds,
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
from fedlearn.secagg.session import Session, Stage, build_terms_text, find_shortage
from fedlearn.secagg.terms import Terms, Total, decode_sum
from fedlearn.secagg.unmasking import RecoveredSecrets, ShareBox, find_leftover_masks

T = TypeVar("T")


#: The message that asks for shares: the survivors, or their signatures.
Final: TypeAlias = Survivors | Signatures

#: Magic and version of a masked sum. Raise the version if a field of it changes.
_HEADER = b"FLSM\x03"

_Commitments: TypeAlias = Annotated[Mapping[ClientId, bytes], octets.table(keys.KEY_BYTES)]


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedSum:
    """A masked sum that can outlive the coordinator's process; only shares of survivors open it.

    Attributes:
        session: Terms and roster.
        commitments: Commitments to the self-seeds of all clients that shared.
        survivors: Clients whose vectors are in the sum.
        asked: Clients that are asked for shares.
        final: The message that asks them, encoded.
        packed: The sum, lane after lane, as its words lie in memory.
    """

    session: Session
    commitments: _Commitments
    survivors: ClientIds
    asked: ClientIds
    final: Annotated[bytes, octets.byte_string(4)]
    packed: Annotated[bytes | memoryview, octets.REST]

    @classmethod
    def of(cls, unmasking: "Unmasking", *, asked: Sequence[ClientId], final: Final) -> "MaskedSum":
        """Capture the sum of a session whose last stage is about to begin."""
        return cls(
            session=unmasking.session,
            commitments=unmasking.commitments,
            survivors=unmasking.survivors,
            asked=tuple(asked),
            final=messages.encode(final),
            packed=b"".join(words.data for words in unmasking.sums),
        )

    def to_bytes(self) -> bytes:
        """Encode the sum; the bytes hold no secret that the coordinator does not have."""
        return _HEADER + _MASKED_SUM.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "MaskedSum":
        """Decode the output of :meth:`to_bytes`; ProtocolError if damaged or of another version."""
        if data[: len(_HEADER)] != _HEADER:
            raise ProtocolError("this is not a masked sum of this version")
        return _MASKED_SUM.from_bytes(data[len(_HEADER) :], what="a masked sum")

    @property
    def message(self) -> Final:
        """The message that asks survivors for shares; ProtocolError if it is damaged."""
        final = messages.decode(self.final)
        if not isinstance(final, Survivors | Signatures):
            raise ProtocolError(f"{type(final).__name__} does not ask for shares")
        return final

    def resume(self) -> "Unmasking":
        """Return the stage that asks for shares again; ProtocolError if the sum is damaged."""
        _ = self.message  # raises if it is damaged
        sums, begin = masking.zeros(self.session.terms.lanes), 0
        if sum(words.nbytes for words in sums) != len(self.packed):
            raise ProtocolError("a masked sum is not as long as its terms say")
        for words in sums:
            # Into words of its own: unmasking writes to them, and they are aligned.
            words[:] = np.frombuffer(self.packed, words.dtype, words.size, begin)
            begin += words.nbytes
        return Unmasking(self.session, self.commitments, self.survivors, sums)


_MASKED_SUM = octets.record(MaskedSum)


@dataclass(frozen=True, eq=False)
class SessionOutcome:
    """The result of a session.

    Attributes:
        total: The released sum.
        survivors: Clients whose values are in it, ascending.
        suspects: Those of :class:`~fedlearn.secagg.unmasking.RecoveredSecrets`.
    """

    total: Total
    survivors: tuple[ClientId, ...]
    suspects: frozenset[ClientId]


def open_session(
    terms: Terms, *, signer: keys.Signer, directory: Mapping[ClientId, bytes]
) -> tuple[SignedTerms, "Advertising"]:
    """Begin a session: return the message to send to the cohort, and the first stage.

    A retry has another attempt number in its terms, hence other keys. ``directory`` has the
    identity keys of all clients.
    """
    signed = SignedTerms(terms=terms, signature=signer.sign(build_terms_text(terms)))
    return signed, Advertising(terms, directory)


@dataclass(eq=False)
class _Stage(Generic[T]):
    """The messages that a stage has received, by client."""

    _received: dict[ClientId, T] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_received(self) -> int:
        return len(self._received)

    def _require_awaited(self, client_id: ClientId, members: Collection[ClientId]) -> None:
        if client_id not in members:
            raise ProtocolError(f"client {client_id} does not take part in this stage")
        if client_id in self._received:
            raise ProtocolError(f"client {client_id} has answered this stage already")


@dataclass(eq=False)
class Advertising(_Stage[Advert]):
    """R0: collects adverts."""

    terms: Terms
    directory: Mapping[ClientId, bytes]

    def receive(self, client_id: ClientId, advert: Advert) -> None:
        """Take the advert of the client that the channel authenticated as ``client_id``."""
        # Any client may advertise, so only a second advert is refused here.
        self._require_awaited(client_id, {client_id})
        if self.num_received == self.terms.num_clients:
            raise ProtocolError(f"client {client_id} is one more than were invited")
        if advert.client_id != client_id:
            raise ProtocolError(f"client {client_id} sent the advert of {advert.client_id}")
        check_advert(advert, self.terms, directory=self.directory)
        # Agree with a throwaway key: a key of low order fails here, as this client's own fault.
        probe = keys.KeyAgreement(SecretBytes.generate(keys.KEY_BYTES))
        for public_key in (advert.packet_key, advert.mask_key):
            probe.agree(public_key, owner=client_id)
        self._received[client_id] = advert

    def close(self) -> tuple[Mapping[ClientId, Roster], "Sharing"]:
        """Return each client's view of the roster, and the next stage."""
        adverts = [self._received[client_id] for client_id in sorted(self._received)]
        if short := find_shortage(self.terms, len(adverts)):
            raise AggregationAborted(stage=Stage.ADVERTISE, reason=short)
        session, tree = Session.of(self.terms, adverts, directory=self.directory)
        return _Rosters(session, tree), Sharing(session, tree, self.directory)


@dataclass(frozen=True, eq=False)
class _Rosters(Mapping[ClientId, Roster]):
    """Each client's view of the roster, built only when it is read: proofs are large."""

    session: Session
    tree: MerkleTree

    def __getitem__(self, client_id: ClientId) -> Roster:
        return self.session.roster_for(client_id, tree=self.tree)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.session.points)

    def __len__(self) -> int:
        return self.session.size


@dataclass(eq=False)
class Sharing(_Stage[Shares]):
    """R1: collects packets of shares."""

    session: Session
    tree: MerkleTree
    directory: Mapping[ClientId, bytes]

    def receive(self, client_id: ClientId, shares: Shares) -> None:
        """Take a client's packets, one per neighbor."""
        self._require_awaited(client_id, self.session.points)
        _require_session(shares.session, self.session)
        expected = len(self.session.neighbors(client_id))
        if len(shares.packets) != expected:
            raise ProtocolError(
                f"client {client_id} sent {len(shares.packets)} packets to {expected} neighbors"
            )
        self._received[client_id] = shares

    def close(self) -> tuple[dict[ClientId, Packets], "Masking"]:
        """Return each client's packets and the next stage."""
        _require_enough(Stage.SHARE, len(self._received), self.session.terms)
        inbox: dict[ClientId, dict[ClientId, bytes]] = {client: {} for client in self._received}
        for sender in sorted(self._received):
            recipients = self.session.neighbors(sender)
            for recipient, packet in zip(recipients, self._received[sender].packets, strict=True):
                # Clients that have dropped out get no packets.
                if recipient in inbox:
                    inbox[recipient][sender] = packet
        packets = {client_id: Packets(packets=rows) for client_id, rows in inbox.items()}
        commitments = {client_id: s.commitment for client_id, s in self._received.items()}
        return packets, Masking(self.session, self.tree, self.directory, commitments)


@dataclass(eq=False)
class Masking(_Stage[None]):
    """R2: adds up masked vectors as they arrive, and stores none of them."""

    session: Session
    tree: MerkleTree
    directory: Mapping[ClientId, bytes]
    commitments: Mapping[ClientId, bytes]
    _sums: tuple[Words, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._sums = masking.zeros(self.session.terms.lanes)

    def receive(self, client_id: ClientId, vector: MaskedVector) -> None:
        """Add a client's masked vector to the sum."""
        self._require_awaited(client_id, self.commitments)
        _require_session(vector.session, self.session)
        # Checks the length before it adds anything: a refused vector leaves the sum intact.
        masking.add_packed(self._sums, vector.packed, lanes=self.session.terms.lanes)
        self._received[client_id] = None

    def close(self) -> tuple[Survivors, "Confirming | Unmasking"]:
        """Return the survivors, to send to each of them, and the next stage.

        This also aborts if too few holders of any one client's shares survive.
        """
        terms = self.session.terms
        _require_enough(Stage.MASK, len(self._received), terms)
        # Stop before any share is released: the masks of this owner could never be removed.
        for owner in self.commitments:
            left = sum(holder in self._received for holder in self.session.holders(owner))
            if left < terms.threshold:
                raise AggregationAborted(
                    stage=Stage.MASK,
                    reason=f"{left} holders of the shares of client {owner} survive, the "
                    f"threshold is {terms.threshold}",
                )
        survivors = tuple(sorted(self._received))
        unmasking = Unmasking(self.session, self.commitments, survivors, self._sums)
        message = Survivors(ranks=self.session.pack_ranks(survivors))
        if terms.adversary is Adversary.ACTIVE_SERVER:
            return message, Confirming(unmasking, self.tree, self.directory, message)
        return message, unmasking


@dataclass(eq=False)
class Confirming(_Stage[bytes]):
    """R3: collects signatures over the survivors; used only against an active server."""

    unmasking: "Unmasking"
    tree: MerkleTree
    directory: Mapping[ClientId, bytes]
    message: Survivors

    def receive(self, client_id: ClientId, message: SurvivorSignature) -> None:
        """Take a survivor's signature."""
        self._require_awaited(client_id, self.unmasking.survivors)
        text = self.unmasking.session.build_survivors_text(self.message.ranks, client_id)
        if not keys.verify(self.directory[client_id], message.signature, text):
            raise ProtocolError(f"client {client_id} did not sign these survivors")
        self._received[client_id] = message.signature

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Clients whose vectors are in the sum, and that are asked for signatures."""
        return self.unmasking.survivors

    @property
    def confirmed(self) -> tuple[ClientId, ...]:
        """Clients that signed, ascending, and that are asked for shares."""
        return tuple(sorted(self._received))

    def close(self) -> tuple[Signatures, "Unmasking"]:
        """Return the evidence that a quorum signed, for all that signed, and the next stage."""
        session = self.unmasking.session
        if len(self._received) < (quorum := session.terms.quorum):
            raise AggregationAborted(
                stage=Stage.CONFIRM,
                reason=f"{len(self._received)} survivors confirmed, the quorum is {quorum}",
            )
        evidence = audit.show(
            {signer: self._received[signer] for signer in self.confirmed},
            session,
            survivors=self.message.ranks,
            tree=self.tree,
        )
        return evidence, self.unmasking


@dataclass(eq=False)
class Unmasking(_Stage[None]):
    """R4: collects shares, until there are t for each client that shared its secrets."""

    session: Session
    commitments: Mapping[ClientId, bytes]
    survivors: tuple[ClientId, ...]
    sums: tuple[Words, ...] = field(repr=False)
    _box: ShareBox = field(init=False, repr=False)
    _recovered: RecoveredSecrets | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._box = ShareBox(self.session, self.commitments, set(self.survivors))

    @property
    def is_enough(self) -> bool:
        """Whether the stage can close without waiting for more clients.

        If a share is false, there may be t of every client and still no secret: one more holder
        shows which share it is.
        """
        if self._recovered is None and self._box.fewest_shares >= self.session.terms.threshold:
            with suppress(AggregationAborted):
                self._recovered = self._box.recover()
        return self._recovered is not None

    def receive(self, client_id: ClientId, release: ShareRelease) -> None:
        """Take the shares that a survivor releases: one per client that it holds shares of."""
        self._require_awaited(client_id, self.survivors)
        _require_session(release.session, self.session)
        # Holding is mutual: a client holds shares of the same clients that hold shares of it.
        expected = {o for o in self.session.holders(client_id) if o in self.commitments}
        if release.shares.keys() != expected:
            raise ProtocolError(
                f"client {client_id} released shares of {len(release.shares)} clients, not of the "
                f"{len(expected)} that it holds shares of"
            )
        if not all(shamir.is_canonical(share.reveal()) for share in release.shares.values()):
            raise ProtocolError(f"client {client_id} released shares that are not below p")
        self._box.put(client_id, release.shares)
        self._received[client_id] = None

    def close(self, *, num_threads: int) -> SessionOutcome:
        """Remove the masks from the sum, in place, on ``num_threads`` threads; call this once."""
        recovered = self._recovered or self._box.recover()
        leftover = find_leftover_masks(recovered, session=self.session)
        masking.fold(self.sums, leftover, num_threads=num_threads)
        try:
            # A level that n clients cannot reach means that some vector was not masked as agreed.
            total = decode_sum(self.session.terms, self.sums, num_clients=len(self.survivors))
        except ValueError as error:
            raise AggregationAborted(stage=Stage.UNMASK, reason=str(error)) from error
        return SessionOutcome(total, self.survivors, recovered.suspects)


def _require_session(session: bytes, expected: Session) -> None:
    if session != expected.id:
        raise ProtocolError("the message is of another session")


def _require_enough(stage: Stage, left: int, terms: Terms) -> None:
    if left < terms.min_survivors:
        raise AggregationAborted(
            stage=stage, reason=f"{left} clients are left, min_survivors is {terms.min_survivors}"
        )
