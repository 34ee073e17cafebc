"""The registry of clients that may talk to the coordinator: invitations, enrolments, revocations.

A client enrols with the token of an invitation; after that, its certificate identifies it. Its id
never changes. It gets new keys with a new invitation for its name or, while its certificate is
valid, with a statement signed by its old identity key (:mod:`fedlearn.identity.lineage`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Protocol, TypeAlias

from fedlearn.core.clock import utc
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, EnrolmentRefused, ProtocolError
from fedlearn.identity.lineage import Lineage

ClientStatus: TypeAlias = Literal["active", "revoked"]

#: Issues a client's certificate. Returns its PEM, the SHA-256 of its DER (hexadecimal), and its
#: expiry (ISO 8601). Called inside the registry's transaction, at most once per redemption.
Certify: TypeAlias = Callable[[ClientId], tuple[bytes, str, str]]

#: At most 64 characters, the limit of a certificate's common name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class EnrolledClient:
    """A client with a certificate; times are ISO 8601.

    Attributes:
        client_id: 0, 1, 2, … in order of enrolment; unchanged when the client enrols again.
        name: Unique name, from the invitation.
        tags: ``key=value`` each, from the invitation.
        identity_key: Ed25519 public key that verifies its updates, 32 bytes.
        lineage: Serialized lineage that ends with this key; the key alone if it is the first, or
            if no earlier key signed for it.
        fingerprint: SHA-256 of its certificate's DER, hexadecimal.
        status: A revoked client is refused even while its certificate is valid.
        enrolled_utc: Time of the last enrolment.
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


@dataclass(frozen=True, kw_only=True)
class Contact:
    """The last known connection state of a client.

    Attributes:
        is_connected: Whether the client was connected when this was recorded.
        seen_utc: When it was last seen, to the minute while it is connected; ISO 8601.
        software: Software that the client reports to run.
        num_examples: Number of examples that the client reports; 0 if it does not report any.
    """

    client_id: ClientId
    is_connected: bool
    seen_utc: str
    software: str
    num_examples: int


class Registry(Protocol):
    """The clients of one deployment. All methods are thread-safe."""

    def invite(self, name: str, *, tags: Sequence[str], valid_s: float) -> bytes:
        """Create a token with which ``name`` may enrol once, within ``valid_s`` seconds.

        Only the token's SHA-256 is stored. An unused earlier invitation for the name is cancelled.

        Raises:
            DeploymentError: ``name`` is not a valid client name.
        """

    def redeem(
        self,
        name: str,
        token: bytes,
        *,
        identity_key: bytes,
        certify: Certify,
        lineage: bytes = b"",
        origin: str = "",
    ) -> EnrolledClient:
        """Enrol ``name`` and use up its token, in one transaction.

        The same identity key may redeem its token again and gets a new certificate, since the
        first reply may have been lost.

        Args:
            name: Name in the invitation.
            token: Token in the invitation.
            identity_key: The client's public key. The caller must have checked that the client
                has the private key.
            certify: Issues the certificate, once the client's id is known.
            lineage: Serialized lineage that leads from earlier keys to this one; empty if none
                does.
            origin: Address that the request came from, for the audit log; empty if unknown.

        Raises:
            EnrolmentRefused: The token is unknown, used, expired or belongs to another name, or
                another client has this identity key.
        """

    def rotate(
        self, name: str, lineage: bytes, *, certify: Certify, origin: str = ""
    ) -> EnrolledClient:
        """Replace an active client's identity key by the newest key of ``lineage``.

        A client may send the same lineage again and gets a new certificate, as in :meth:`redeem`.

        Args:
            name: Name of the client.
            lineage: Serialized lineage that extends the registered one. The caller must have
                checked that the client has the newest private key.
            certify: Issues the certificate.
            origin: As in :meth:`redeem`.

        Raises:
            EnrolmentRefused: There is no such client, it was revoked, its certificate has expired,
                the lineage does not extend the registered one, or another client has the key.
        """

    def clients(self) -> list[EnrolledClient]:
        """Return all clients, including revoked ones, by id."""

    def revoke(self, name: str) -> EnrolledClient | None:
        """Revoke the client called ``name`` and cancel its open invitation.

        Returns:
            The client; ``None`` if it was invited but never enrolled.

        Raises:
            DeploymentError: Neither a client nor an open invitation has this name.
        """

    def revision(self) -> int:
        """Return a counter that grows whenever a client is added or changed."""

    def open_invitations(self) -> "list[InvitationRecord]":
        """Return the unused invitations, by name; some may have expired."""

    def contacts(self) -> list[Contact]:
        """Return the contacts of all clients that have ever connected, by id."""

    def keep_contacts(self, contacts: Sequence[Contact], *, are_all: bool) -> None:
        """Store the current contacts of clients, replacing their earlier ones.

        Args:
            contacts: One for each client.
            are_all: Whether no other client is connected.
        """


@dataclass(frozen=True, kw_only=True)
class InvitationRecord:
    """The registry's record of an invitation.

    Attributes:
        token_sha256: SHA-256 of the token, hexadecimal; the token itself is not stored.
        redeemed_by: Identity key of the client that redeemed it; empty while it is open.
    """

    name: str
    tags: tuple[str, ...]
    token_sha256: str
    expires_unix_s: float
    redeemed_by: bytes


def check_name(name: str, *, kind: Literal["client", "operator"]) -> None:
    """Check that ``name`` is valid for a client or an operator: a certificate can carry it.

    Raises:
        DeploymentError: It is not.
    """
    if not _NAME.fullmatch(name):
        raise DeploymentError(
            f"{kind}s cannot be called {name!r}: use up to 64 letters, digits, '-', '_' and '.', "
            "beginning with a letter or a digit"
        )


def token_digest(token: bytes) -> str:
    """Return the SHA-256 of a token, hexadecimal, by which the registry stores and finds it."""
    return sha256(token).hexdigest()


def check_redeemable(
    invitation: InvitationRecord | None, *, name: str, identity_key: bytes, now_unix_s: float
) -> InvitationRecord:
    """Return ``invitation``, found by its token, if ``name`` may redeem it now.

    Raises:
        EnrolmentRefused: It may not. The message reveals nothing about other clients.
    """
    again = "ask the operator for a new one (`fedlearn invite`)"
    # One message for both: a guessed token does not show that it belongs to another client.
    if invitation is None or invitation.name != name:
        raise EnrolmentRefused(f"{name!r} has no invitation with this token; {again}")
    if now_unix_s >= invitation.expires_unix_s:
        raise EnrolmentRefused(
            f"the invitation of {name!r} expired at {utc(invitation.expires_unix_s)}; {again}"
        )
    # The same key may redeem again, since the first reply may have been lost.
    if invitation.redeemed_by not in {b"", identity_key}:
        raise EnrolmentRefused(f"the invitation of {name!r} has been used; {again}")
    return invitation


def check_rotatable(
    known: EnrolledClient | None, *, name: str, lineage: bytes, now_unix_s: float
) -> EnrolledClient:
    """Return ``known``, the client called ``name``, if ``lineage`` may replace its keys.

    Raises:
        EnrolmentRefused: It may not: see :meth:`Registry.rotate`.
    """
    again = "ask the operator for a new invitation (`fedlearn invite`)"
    # Lineages only grow, so a newer one begins with the older one.
    extends = known is not None and lineage.startswith(known.lineage)
    if known is None or not extends or not is_lineage(lineage, client_id=known.client_id):
        raise EnrolmentRefused(
            f"the new identity key of {name!r} is not signed by the registered one; {again}"
        )
    if known.status != "active":
        raise EnrolmentRefused(f"{name!r} was revoked; {again}")
    if known.certificate_expires_utc <= utc(now_unix_s):  # both ISO 8601 in UTC
        raise EnrolmentRefused(
            f"the certificate of {name!r} expired at {known.certificate_expires_utc}; {again}"
        )
    return known


def is_lineage(lineage: bytes, *, client_id: ClientId) -> bool:
    """Return whether every statement in a serialized lineage is valid for this client."""
    try:
        Lineage.from_bytes(lineage).check(client_id)
    except ProtocolError:
        return False
    return True
