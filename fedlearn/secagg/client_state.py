"""What a client keeps between two messages of a session, and its bytes.

Some transports answer each message in a fresh process, so a state is a value with a byte
form. The bytes hold secret keys: whoever stores them does so for their owner alone (mode
0600), before the reply is sent, and replaces them once the session is over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.messages import PAIR_BYTES, Advert, ClientIds
from fedlearn.secagg.session import OwnTerms, Session
from fedlearn.secagg.terms import RUN_BYTES, Terms

#: Magic and version.
_HEADER = b"FLSS\x01"

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
    survivors: ClientIds


Step: TypeAlias = Advertised | Shared | Masked | Confirmed


def _release_parts(release: tuple[int, int] | None) -> Iterable[octets.Buffer]:
    round_num, attempt = release or (0, 0)
    yield bytes([release is not None])
    yield round_num.to_bytes(8, "little")
    yield attempt.to_bytes(4, "little")


def _read_release(reader: octets.Reader) -> tuple[int, int] | None:
    is_any, release = octets.FLAG.read(reader), (reader.integer(8), reader.integer(4))
    return release if is_any else None


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientState:
    """A client's part in the sessions of one run.

    Attributes:
        run_id: Of the run, 16 bytes.
        last_release: Round and attempt of the last session in which it released shares.
        num_releases: How often it released shares in that round.
        step: Where it is in the present session; None between sessions.

    Example:
        >>> state = ClientState.fresh(bytes(16))
        >>> ClientState.from_bytes(state.to_bytes()).last_release is None
        True
    """

    run_id: Annotated[bytes, octets.fixed(RUN_BYTES)]
    last_release: Annotated[tuple[int, int] | None, octets.Form(_release_parts, _read_release)]
    num_releases: int
    step: Annotated[Step | None, octets.one_of(NoneType, Advertised, Shared, Masked, Confirmed)] = (
        field(repr=False)
    )

    @classmethod
    def fresh(cls, run_id: bytes) -> "ClientState":
        """Return the state of a client that has taken part in nothing."""
        return cls(run_id=run_id, last_release=None, num_releases=0, step=None)

    def at(self, step: Step | None) -> "ClientState":
        """Return the state at ``step``; None ends the session and forgets its secrets."""
        return replace(self, step=step)

    def released(self, terms: Terms) -> "ClientState":
        """Return the state after shares were released: the session is over."""
        last = self.last_release
        again = last is not None and last[0] == terms.round_num
        return replace(
            self,
            last_release=(terms.round_num, terms.attempt),
            num_releases=self.num_releases + 1 if again else 1,
            step=None,
        )

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
