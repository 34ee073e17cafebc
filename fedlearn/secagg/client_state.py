"""What a client keeps between two messages of a session, and its bytes.

Some transports answer each message in a fresh process, so a state is a value with a byte
form. The bytes hold secret keys: whoever stores them does so for their owner alone (mode
0600), before the reply is sent, and replaces them once the session is over.
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

#: Magic and version.
_HEADER = b"FLSS\x05"

_Secret: TypeAlias = Annotated[SecretBytes, octets.secret(keys.KEY_BYTES)]
_Held: TypeAlias = Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(PAIR_BYTES)]


@dataclass(frozen=True, eq=False)
class Advertised:
    """R0 is answered: terms are agreed to, and the private halves of both keys kept."""

    terms: OwnTerms
    advert: Advert
    packet_secret: _Secret
    mask_secret: _Secret


@dataclass(frozen=True, eq=False)
class Shared:
    """R1 is answered.

    Attributes:
        opening: Keys of the packets to this client, by their sender.
        mask_secret: Agrees on masks.
        seed: Of the client's own mask.
        own: Its own shares of its own secrets; None in a sparse graph.
    """

    session: Session
    opening: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(keys.KEY_BYTES)]
    mask_secret: _Secret
    seed: _Secret
    own: Annotated[
        SecretBytes | None,
        octets.sized(4, most=PAIR_BYTES).mapped(
            lambda own: own.reveal() if own else b"",
            lambda data: SecretBytes(data) if data else None,
        ),
    ]


@dataclass(frozen=True, eq=False)
class Masked:
    """R2 is answered; of its own secrets the client has only its shares, by owner, in ``held``."""

    session: Session
    held: _Held


@dataclass(frozen=True, eq=False)
class Confirmed:
    """R3 is answered: this set of survivors is signed, and no other will be."""

    session: Session
    held: _Held
    survivors: Bitmap


@dataclass(frozen=True, eq=False)
class Released:
    """R4 is answered: what has left may leave again, to the same survivors, and nothing else.

    So a coordinator that crashed with the sum still masked goes on with it, and needs no second
    one. The other half of each pair of shares is forgotten.
    """

    session: Session
    survivors: Bitmap
    shares: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(SHARE_BYTES)]


Step: TypeAlias = Advertised | Shared | Masked | Confirmed | Released


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientState:
    """A client's part in the sessions of one run.

    Attributes:
        run_id: Of the run, 16 bytes.
        releases: Which sums it has helped to open, of this run and of others.
        step: Where it is in the present session; None between sessions.

    Example:
        >>> state = ClientState.fresh(bytes(16))
        >>> ClientState.from_bytes(state.to_bytes()).releases
        PastReleases(last=())
    """

    run_id: Annotated[bytes, octets.fixed(RUN_BYTES)]
    releases: PastReleases
    step: Annotated[
        Step | None,
        octets.one_of(NoneType, Advertised, Shared, Masked, Confirmed, Released),
    ] = field(repr=False)

    @classmethod
    def fresh(cls, run_id: bytes) -> "ClientState":
        """Return the state of a client that has taken part in nothing."""
        return cls(run_id=run_id, releases=PastReleases(), step=None)

    def at(self, step: Step | None) -> "ClientState":
        """Return the state at ``step``; None ends the session and forgets its secrets."""
        return replace(self, step=step)

    def released(self, step: Released, *, most: int) -> "ClientState":
        """Return the state after shares were released.

        Args:
            step: What is released.
            most: Attempts at one round in which to help.

        Raises:
            PolicyViolation: As :meth:`~fedlearn.secagg.releases.PastReleases.after`.
        """
        session = step.session
        ranks = session.ranks_in(step.survivors, what="the survivors")
        # In a sparse graph it knows its neighbours alone, which tells nothing of a second sum.
        survivors = session.among(ranks) if session.is_whole else ()
        releases = self.releases.after(session.terms, survivors, session=session.id, most=most)
        return replace(self, releases=releases, step=step)

    @property
    def is_in_session(self) -> bool:
        """Whether a session is under way: secrets are kept that would be lost with it."""
        return self.step is not None and not isinstance(self.step, Released)

    def to_bytes(self) -> bytes:
        """Return the state with its secrets, for a store that its owner alone reads."""
        return _HEADER + _STATE.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClientState":
        """Return what :meth:`to_bytes` wrote; ProtocolError if ``data`` is of another version."""
        if data[: len(_HEADER)] != _HEADER:
            raise ProtocolError("this is no state of secure aggregation of this version")
        return _STATE.from_bytes(data[len(_HEADER) :], what="the state of a client")


_STATE = octets.record(ClientState)
