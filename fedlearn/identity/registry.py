"""Who may talk to the coordinator: invitations, enrolled clients, revocations.

A client is enrolled once, with the token of an invitation; after that its certificate says
who it is. Its number stays the same for good: a client that enrols again (new keys) does so
with a new invitation for its name, or, while its certificate is good, with a statement that its
old identity key signs (:mod:`fedlearn.identity.lineage`).
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import Lock
from typing import Literal, Protocol, TypeAlias

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import DeploymentError, EnrolmentRefused, ProtocolError
from fedlearn.identity.lineage import Lineage, newest_key

ClientStatus: TypeAlias = Literal["active", "revoked"]

#: Makes the certificate of a client: its PEM, the SHA-256 of its DER (hexadecimal), and when
#: it ends (ISO 8601). Called inside the registry's transaction, at most once a redemption.
Certify: TypeAlias = Callable[[ClientId], tuple[bytes, str, str]]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # also a certificate's common name
_TOKEN_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class EnrolledClient:
    """A client with a certificate.

    Attributes:
        client_id: 0, 1, 2, … in order of enrolment; kept when it enrols again.
        name: As the operator invited it; unique.
        tags: ``key=value`` each, from the invitation.
        identity_key: Ed25519 public key that signs its updates, 32 bytes.
        lineage: The identity keys before this one, and what leads to it, in bytes; the key alone
            if there was none, or if it did not follow from them.
        fingerprint: SHA-256 of its certificate's DER, hexadecimal.
        status: A revoked client is refused, whatever its certificate says.
        enrolled_utc: ISO 8601; of the last enrolment.
        certificate_expires_utc: ISO 8601.
    """

    client_id: ClientId
    name: str
    tags: tuple[str, ...]
    identity_key: bytes
    lineage: bytes
    fingerprint: str
    status: ClientStatus
    enrolled_utc: str
    certificate_expires_utc: str


class Registry(Protocol):
    """The clients of one deployment. Any thread may call it."""

    def invite(self, name: str, *, tags: Sequence[str], valid_s: float) -> bytes:
        """Return the token with which ``name`` may enrol, once, within ``valid_s``.

        Only its SHA-256 is kept. An invitation of the same name that was not used yet ends.

        Raises:
            DeploymentError: ``name`` cannot name a client.
        """

    def redeem(
        self,
        name: str,
        token: bytes,
        *,
        identity_key: bytes,
        certify: Certify,
        lineage: bytes = b"",
    ) -> EnrolledClient:
        """Enrol ``name`` and use up its token; both or neither.

        The same identity key may redeem its token again, and is certified anew: the answer
        to the first time may have been lost on the way.

        Args:
            name: Of the invitation.
            token: Of the invitation.
            identity_key: Ed25519 public key, 32 bytes; that the client has the private one
                is for the caller to check.
            certify: Makes the certificate, once the client's number is known.
            lineage: How its identity key follows from earlier ones, in bytes; empty: it does not.

        Raises:
            EnrolmentRefused: The token is unknown, used, expired or of another name, or
                another client has this identity key.
        """

    def rotate(self, name: str, lineage: bytes, *, certify: Certify) -> EnrolledClient:
        """Replace an active client's identity key by the last of ``lineage``.

        The same lineage may come again, and is certified anew: the answer to the first time may
        have been lost on the way.

        Args:
            name: The client's.
            lineage: Begins with the one that is registered; that the client has the newest
                private key is for the caller to check.
            certify: Makes its certificate.

        Raises:
            EnrolmentRefused: There is no such client, its certificate has expired, the lineage
                does not go on from the registered one, or another client has the key.
        """

    def clients(self) -> list[EnrolledClient]:
        """Return all clients, the revoked ones too, by number."""

    def by_fingerprint(self, fingerprint: str) -> EnrolledClient | None:
        """Return the client whose present certificate has this fingerprint."""

    def revoke(self, name: str) -> EnrolledClient | None:
        """Refuse the client called ``name`` from now on, and end its open invitation.

        Returns:
            The client; ``None`` if it was invited and never enrolled.

        Raises:
            DeploymentError: Neither a client nor an open invitation has this name.
        """

    def revision(self) -> int:
        """Return a number that grows whenever a client is added or changed."""


@dataclass(frozen=True, kw_only=True)
class InvitationRecord:
    """What is kept of an invitation.

    Attributes:
        name: Who is invited.
        tags: What the client will be tagged with.
        token_sha256: Of the token, hexadecimal.
        expires_unix_s: Seconds since 1970.
        redeemed_by: The identity key that has used it; empty while it is open.
    """

    name: str
    tags: tuple[str, ...]
    token_sha256: str
    expires_unix_s: float
    redeemed_by: bytes


def new_invitation(
    name: str, *, tags: Sequence[str], expires_unix_s: float
) -> tuple[bytes, InvitationRecord]:
    """Return a fresh token, and what is kept of it.

    Raises:
        DeploymentError: ``name`` cannot name a client.
    """
    if not _NAME.fullmatch(name):
        raise DeploymentError(
            f"a client cannot be called {name!r}: use up to 64 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit"
        )
    token = SecretBytes.generate(_TOKEN_BYTES).reveal()
    record = InvitationRecord(
        name=name,
        tags=tuple(tags),
        token_sha256=token_digest(token),
        expires_unix_s=expires_unix_s,
        redeemed_by=b"",
    )
    return token, record


def token_digest(token: bytes) -> str:
    """Return the SHA-256 of a token, hexadecimal: what is stored and looked up."""
    return sha256(token).hexdigest()


def check_redeemable(
    invitation: InvitationRecord | None, *, name: str, identity_key: bytes, now_unix_s: float
) -> InvitationRecord:
    """Return ``invitation``, found by its token, if ``name`` may use it now.

    Raises:
        EnrolmentRefused: It may not. The words tell a stranger nothing about other clients.
    """
    again = "ask the operator for a new one (`fedlearn invite`)"
    if invitation is None or invitation.name != name:
        raise EnrolmentRefused(f"{name!r} has no invitation with this token; {again}")
    if now_unix_s >= invitation.expires_unix_s:
        raise EnrolmentRefused(
            f"the invitation of {name!r} ended at {utc(invitation.expires_unix_s)}; {again}"
        )
    if invitation.redeemed_by not in {b"", identity_key}:
        raise EnrolmentRefused(f"the invitation of {name!r} has been used; {again}")
    return invitation


def check_rotatable(
    known: EnrolledClient | None, *, name: str, lineage: bytes, now_unix_s: float
) -> EnrolledClient:
    """Return ``known``, the client called ``name``, if it may go on with the keys of a lineage.

    Raises:
        EnrolmentRefused: It may not. The words tell a stranger nothing about other clients.
    """
    again = "ask the operator for a new invitation (`fedlearn invite`)"
    goes_on = known is not None and lineage.startswith(known.lineage)
    if known is None or not goes_on or not is_lineage(lineage, client_id=known.client_id):
        raise EnrolmentRefused(
            f"the new identity key of {name!r} does not follow from one that is known here; {again}"
        )
    if known.status != "active":
        raise EnrolmentRefused(f"{name!r} was revoked; {again}")
    if known.certificate_expires_utc <= utc(now_unix_s):  # both ISO 8601 in UTC
        raise EnrolmentRefused(
            f"the certificate of {name!r} ended at {known.certificate_expires_utc}; {again}"
        )
    return known


def kept_lineage(lineage: bytes, *, identity_key: bytes, client_id: ClientId) -> bytes:
    """Return what is kept of the lineage that came with a token: the key alone if it is false.

    A token is enough to enrol with; whether others believe the key is theirs to judge.
    """
    is_its_own = lineage.endswith(identity_key) and is_lineage(lineage, client_id=client_id)
    return lineage if is_its_own else identity_key


def is_lineage(lineage: bytes, *, client_id: ClientId) -> bool:
    """Return whether each key in a lineage was named by the one before as this client's."""
    try:
        Lineage.from_bytes(lineage).check(client_id)
    except ProtocolError:
        return False
    return True


def key_taken(name: str) -> EnrolmentRefused:
    """Return the error for an identity key that another client has."""
    return EnrolmentRefused(
        f"the identity key of {name!r} is another client's; remove the `identity` folder of "
        "this client, a copy, and enrol again"
    )


def unknown_client(name: str, *, known: Iterable[str]) -> DeploymentError:
    """Return the error for a name that no client has; suggests the nearest of ``known``."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return DeploymentError(
        f"there is no client called {name!r}; {hint}`fedlearn clients` lists them all"
    )


class MemoryRegistry:
    """A :class:`Registry` that ends with its process.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> registry = MemoryRegistry(VirtualClock())
        >>> token = registry.invite("clinic-a", tags=["country=ch"], valid_s=3600.0)
        >>> client = registry.redeem(
        ...     "clinic-a",
        ...     token,
        ...     identity_key=bytes(32),
        ...     certify=lambda client_id: (b"PEM", "ab12", "2030-01-01T00:00:00Z"),
        ... )
        >>> client.client_id, client.tags
        (0, ('country=ch',))
    """

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._invitations: dict[str, InvitationRecord] = {}  # by the token's digest
        self._clients: dict[str, EnrolledClient] = {}  # by name, in order of enrolment
        self._revision = 0

    def invite(self, name: str, *, tags: Sequence[str], valid_s: float) -> bytes:
        """Return the token with which ``name`` may enrol."""
        expires = self._clock.unix_s() + valid_s
        token, record = new_invitation(name, tags=tags, expires_unix_s=expires)
        with self._lock:
            self._end_invitation(name)
            self._invitations[record.token_sha256] = record
        return token

    def redeem(
        self,
        name: str,
        token: bytes,
        *,
        identity_key: bytes,
        certify: Certify,
        lineage: bytes = b"",
    ) -> EnrolledClient:
        """Enrol ``name`` and use up its token."""
        now = self._clock.unix_s()
        with self._lock:
            invitation = check_redeemable(
                self._invitations.get(token_digest(token)),
                name=name,
                identity_key=identity_key,
                now_unix_s=now,
            )
            self._require_own(identity_key, name)
            known = self._clients.get(name)
            client_id = ClientId(len(self._clients)) if known is None else known.client_id
            _, fingerprint, expires_utc = certify(client_id)
            client = EnrolledClient(
                client_id=client_id,
                name=name,
                tags=invitation.tags,
                identity_key=identity_key,
                lineage=kept_lineage(lineage, identity_key=identity_key, client_id=client_id),
                fingerprint=fingerprint,
                status="active",
                enrolled_utc=utc(now),
                certificate_expires_utc=expires_utc,
            )
            self._invitations[invitation.token_sha256] = replace(
                invitation, redeemed_by=identity_key
            )
            self._put(client)
        return client

    def rotate(self, name: str, lineage: bytes, *, certify: Certify) -> EnrolledClient:
        """Replace an active client's identity key by the last of ``lineage``."""
        with self._lock:
            known = check_rotatable(
                self._clients.get(name),
                name=name,
                lineage=lineage,
                now_unix_s=self._clock.unix_s(),
            )
            identity_key = newest_key(lineage)
            self._require_own(identity_key, name)
            _, fingerprint, expires_utc = certify(known.client_id)
            client = replace(
                known,
                identity_key=identity_key,
                lineage=lineage,
                fingerprint=fingerprint,
                certificate_expires_utc=expires_utc,
            )
            self._put(client)
            self._invitations = {
                digest: each
                for digest, each in self._invitations.items()
                if each.name != name or not each.redeemed_by
            }
        return client

    def clients(self) -> list[EnrolledClient]:
        """Return all clients by number."""
        with self._lock:
            return list(self._clients.values())

    def by_fingerprint(self, fingerprint: str) -> EnrolledClient | None:
        """Return the client whose present certificate has this fingerprint."""
        return next((each for each in self.clients() if each.fingerprint == fingerprint), None)

    def revoke(self, name: str) -> EnrolledClient | None:
        """Refuse the client called ``name`` from now on."""
        with self._lock:
            was_invited = self._end_invitation(name)
            known = self._clients.get(name)
            if known is None:
                if not was_invited:
                    raise unknown_client(name, known=self._clients)
                return None
            client = replace(known, status="revoked")
            self._put(client)
        return client

    def revision(self) -> int:
        """Return how often a client was added or changed."""
        return self._revision

    def _require_own(self, identity_key: bytes, name: str) -> None:
        for other in self._clients.values():
            if other.identity_key == identity_key and other.name != name:
                raise key_taken(name)

    def _end_invitation(self, name: str) -> bool:
        """Forget the invitations of ``name``; return whether one was open."""
        mine = [each for each in self._invitations.values() if each.name == name]
        for each in mine:
            del self._invitations[each.token_sha256]
        return any(not each.redeemed_by for each in mine)

    def _put(self, client: EnrolledClient) -> None:
        self._clients[client.name] = client
        self._revision += 1
