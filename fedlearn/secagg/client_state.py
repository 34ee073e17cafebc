"""What a client keeps between two messages of a session, and its bytes.

Some transports answer each message in a fresh process, so a state is a value with a byte
form. The bytes hold secret keys: whoever stores them does so for their owner alone (mode
0600), before the reply is sent, and replaces them once the session is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.messages import (
    ADVERT_BYTES,
    PAIR_BYTES,
    Advert,
)
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Terms

_MAGIC = b"FLSS"
_VERSION = 1
_RUN_BYTES = 16
_SECRET_BYTES = keys.KEY_BYTES


@dataclass(frozen=True, eq=False)
class Advertised:
    """R0 is answered.

    Attributes:
        terms: That the client agreed to.
        advert: That it sent.
        packet_secret: Private half of its packet key.
        mask_secret: Private half of its mask key.
    """

    terms: Terms
    advert: Advert
    packet_secret: SecretBytes
    mask_secret: SecretBytes


@dataclass(frozen=True, eq=False)
class Shared:
    """R1 is answered.

    Attributes:
        session: Terms and roster.
        opening: Keys of the packets to this client, by their sender.
        mask_secret: Agrees on masks.
        seed: Of the client's own mask.
        own: Its own shares of its own secrets; None in a sparse graph.
    """

    session: Session
    opening: Mapping[ClientId, SecretBytes]
    mask_secret: SecretBytes
    seed: SecretBytes
    own: SecretBytes | None


@dataclass(frozen=True, eq=False)
class Masked:
    """R2 is answered; the client's own secrets are forgotten.

    Attributes:
        session: Terms and roster.
        held: By owner, its two shares.
    """

    session: Session
    held: Mapping[ClientId, SecretBytes]


@dataclass(frozen=True, eq=False)
class Confirmed:
    """R3 is answered: this set of survivors is signed, and no other will be.

    Attributes:
        session: Terms and roster.
        held: By owner, its two shares.
        survivors: Ascending.
    """

    session: Session
    held: Mapping[ClientId, SecretBytes]
    survivors: tuple[ClientId, ...]


Step: TypeAlias = Advertised | Shared | Masked | Confirmed


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

    run_id: bytes
    last_release: tuple[int, int] | None
    num_releases: int
    step: Step | None = field(repr=False)

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
        release = self.last_release
        head = _MAGIC + octets.integer(_VERSION, 1) + self.run_id
        head += octets.integer(release is not None, 1)
        for value, width in zip((*(release or (0, 0)), self.num_releases), (8, 4, 4), strict=True):
            head += octets.integer(value, width)
        return head + _step_bytes(self.step)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClientState":
        """Return the state that :meth:`to_bytes` returned.

        Raises:
            ProtocolError: ``data`` is no state, or one of another version.
        """
        reader = octets.Reader(data, what="the state of a client")
        if reader.take(4) != _MAGIC or reader.integer(1) != _VERSION:
            raise ProtocolError("this is no state of secure aggregation of this version")
        run_id, any_release = reader.take(_RUN_BYTES), reader.integer(1, largest=1)
        release = (reader.integer(8), reader.integer(4))
        num_releases = reader.integer(4)
        step = _read_step(reader)
        reader.finish()
        return cls(
            run_id=run_id,
            last_release=release if any_release else None,
            num_releases=num_releases,
            step=step,
        )


def _step_bytes(step: Step | None) -> bytes:
    match step:
        case None:
            return b"\x00"
        case Advertised():
            secrets = step.packet_secret.reveal() + step.mask_secret.reveal()
            return b"\x01" + _blob(step.terms.to_bytes()) + step.advert.body() + secrets
        case Shared():
            secrets = step.mask_secret.reveal() + step.seed.reveal()
            own = step.own.reveal() if step.own else b""
            head = _session_bytes(step.session) + _table_bytes(step.opening)
            return b"\x02" + head + secrets + _blob(own)
        case Masked():
            return b"\x03" + _session_bytes(step.session) + _table_bytes(step.held)
        case Confirmed():
            ids = b"".join(octets.integer(i, 8) for i in step.survivors)
            head = _session_bytes(step.session) + _table_bytes(step.held)
            return b"\x04" + head + _blob(ids)


def _read_step(reader: octets.Reader) -> Step | None:
    kind = reader.integer(1, largest=4)
    if kind == 0:
        return None
    if kind == 1:
        terms = Terms.from_bytes(_read_blob(reader))
        advert = Advert.read(reader)
        return Advertised(terms, advert, _read_secret(reader), _read_secret(reader))
    session = _read_session(reader)
    if kind == 2:  # noqa: PLR2004 - the tags of _step_bytes
        opening = _read_table(reader, _SECRET_BYTES)
        mask_secret, seed, own = _read_secret(reader), _read_secret(reader), _read_blob(reader)
        return Shared(session, opening, mask_secret, seed, SecretBytes(own) if own else None)
    held = _read_table(reader, PAIR_BYTES)
    if kind == 3:  # noqa: PLR2004 - as above
        return Masked(session, held)
    ids = octets.Reader(_read_blob(reader), what="the survivors of a client's state")
    survivors = tuple(ClientId(ids.integer(8)) for _ in range(ids.left // 8))
    ids.finish()
    return Confirmed(session, held, survivors)


def _blob(data: bytes) -> bytes:
    return octets.integer(len(data), 4) + data


def _read_blob(reader: octets.Reader) -> bytes:
    return reader.take(reader.integer(4))


def _read_secret(reader: octets.Reader) -> SecretBytes:
    return SecretBytes(reader.take(_SECRET_BYTES))


def _session_bytes(session: Session) -> bytes:
    adverts = b"".join(advert.body() for advert in session.adverts)
    return _blob(session.terms.to_bytes()) + _blob(adverts)


def _read_session(reader: octets.Reader) -> Session:
    terms = Terms.from_bytes(_read_blob(reader))
    adverts = octets.Reader(_read_blob(reader), what="the roster of a client's state")
    found = tuple(Advert.read(adverts) for _ in range(adverts.left // ADVERT_BYTES))
    adverts.finish()
    return Session(terms, found)


def _table_bytes(table: Mapping[ClientId, SecretBytes]) -> bytes:
    rows = b"".join(octets.integer(each, 8) + secret.reveal() for each, secret in table.items())
    return octets.integer(len(table), 4) + rows


def _read_table(reader: octets.Reader, secret_bytes: int) -> dict[ClientId, SecretBytes]:
    size = reader.integer(4, largest=MAX_CLIENTS)
    rows = ((ClientId(reader.integer(8)), reader.take(secret_bytes)) for _ in range(size))
    return {each: SecretBytes(secret) for each, secret in rows}
