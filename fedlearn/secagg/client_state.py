"""The state that a client keeps between two messages of a session, and its encoding.

Some transports answer each message in a fresh process, so the state is a value that can be encoded
as bytes. These hold secret keys. A store must keep them readable by their owner only (mode 0600),
write them before the reply is sent, and replace them once the session is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.messages import PAIR_BYTES, Advert, Bitmap
from fedlearn.secagg.releases import PastReleases
from fedlearn.secagg.session import OwnTerms, Session
from fedlearn.secagg.shamir import SHARE_BYTES
from fedlearn.secagg.terms import RUN_BYTES

#: Magic and version. Raise the version if a field of a class below changes: fields are encoded in
#: order, without names.
_HEADER = b"FLSS\x05"

_Secret: TypeAlias = Annotated[SecretBytes, octets.secret(keys.KEY_BYTES)]
_Held: TypeAlias = Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(PAIR_BYTES)]


@dataclass(frozen=True, eq=False)
class AdvertisedStep:
    """R0 is answered: the terms are accepted, and the private halves of both keys are kept."""

    terms: OwnTerms
    advert: Advert
    packet_secret: _Secret
    mask_secret: _Secret


@dataclass(frozen=True, eq=False)
class SharedStep:
    """R1 is answered: the client has shared its secrets.

    Attributes:
        opening: Keys that open the packets to this client, by sender.
        mask_secret: Private key of the client's pairwise masks.
        seed: Seed of the client's own mask.
        own: The client's share of each of its secrets; ``None`` in a sparse graph.
    """

    session: Session
    opening: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(keys.KEY_BYTES)]
    mask_secret: _Secret
    seed: _Secret
    own: Annotated[
        SecretBytes | None,
        # Empty stands for None: a pair of shares is never empty.
        octets.byte_string(4, most=PAIR_BYTES).map(
            lambda own: own.reveal() if own else b"",
            lambda data: SecretBytes(data) if data else None,
        ),
    ]


@dataclass(frozen=True, eq=False)
class MaskedStep:
    """R2 is answered: the client's secrets are forgotten; ``held`` has the shares, by owner."""

    session: Session
    held: _Held


@dataclass(frozen=True, eq=False)
class ConfirmedStep:
    """R3 is answered: this set of survivors is signed, and no other will be."""

    session: Session
    held: _Held
    survivors: Bitmap


@dataclass(frozen=True, eq=False)
class ReleasedStep:
    """R4 is answered: the same shares may be released again, for the same survivors, and no others.

    So a coordinator that crashed before it unmasked the sum can resume, and needs no second sum.
    The other half of each pair of shares is forgotten.
    """

    session: Session
    survivors: Bitmap
    shares: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(SHARE_BYTES)]


Step: TypeAlias = AdvertisedStep | SharedStep | MaskedStep | ConfirmedStep | ReleasedStep


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientState:
    """A client's state in the sessions of one run.

    Attributes:
        run_id: The run's id, 16 bytes.
        releases: The sums that the client has helped to open, in this run and in others.
        step: The client's step in the current session; ``None`` between sessions.

    Example:
        >>> state = ClientState.fresh(bytes(16))
        >>> ClientState.from_bytes(state.to_bytes()).releases
        PastReleases(last=())
    """

    run_id: Annotated[bytes, octets.raw_bytes(RUN_BYTES)]
    releases: PastReleases
    step: Annotated[
        Step | None,
        octets.one_of(
            NoneType, AdvertisedStep, SharedStep, MaskedStep, ConfirmedStep, ReleasedStep
        ),
    ] = field(repr=False)

    @classmethod
    def fresh(cls, run_id: bytes) -> "ClientState":
        """Return the state of a client that has not taken part in any session."""
        return cls(run_id=run_id, releases=PastReleases(), step=None)

    def with_step(self, step: Step | None) -> "ClientState":
        """Return the state at ``step``; ``None`` ends the session and forgets its secrets."""
        return replace(self, step=step)

    def record_release(self, step: ReleasedStep, *, most: int) -> "ClientState":
        """Return the state after shares were released.

        Args:
            step: The release.
            most: Most attempts at one round in which the client helps.

        Raises:
            PolicyViolation: See :meth:`~fedlearn.secagg.releases.PastReleases.record`.
        """
        session = step.session
        ranks = session.unpack_ranks(step.survivors, what="the survivors")
        # In a sparse graph the client sees only its neighbors, too few to compare two sums.
        survivors = session.find_clients(ranks) if session.is_whole else ()
        releases = self.releases.record(session.terms, survivors, session=session.id, most=most)
        return replace(self, releases=releases, step=step)

    @property
    def is_in_session(self) -> bool:
        """Whether a session is under way, so that the state holds secrets that are still needed."""
        return self.step is not None and not isinstance(self.step, ReleasedStep)

    def to_bytes(self) -> bytes:
        """Encode the state with its secrets, for a store that only its owner can read."""
        return _HEADER + _STATE.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClientState":
        """Decode the output of :meth:`to_bytes`; ProtocolError if damaged or of another version."""
        if data[: len(_HEADER)] != _HEADER:
            raise ProtocolError("this is not a state of secure aggregation of this version")
        return _STATE.from_bytes(data[len(_HEADER) :], what="the state of a client")


_STATE = octets.record(ClientState)
