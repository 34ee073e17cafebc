"""Who may talk to the coordinator: invitations, enrolled clients, revocations.

A client enrols with the token of an invitation; after that its certificate says who it is. Its
number stays: new keys come with a new invitation for its name, or, while its certificate is good,
with a statement that its old identity key signs (:mod:`fedlearn.identity.lineage`).
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

#: Makes the certificate of a client: its PEM, the SHA-256 of its DER (hexadecimal), and when
#: it ends (ISO 8601). Called inside the registry's transaction, at most once a redemption.
Certify: TypeAlias = Callable[[ClientId], tuple[bytes, str, str]]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class EnrolledClient:
    """A client with a certificate; times are ISO 8601.

    Attributes:
        client_id: 0, 1, 2, … in order of enrolment; kept when it enrols again.
        name: As the operator invited it; unique.
        tags: ``key=value`` each, from the invitation.
        identity_key: Ed25519 public key that signs its updates, 32 bytes.
        lineage: The identity keys before this one, and what leads to it, in bytes; the key alone
            if there was none, or if it did not follow from them.
        fingerprint: SHA-256 of its certificate's DER, hexadecimal.
        status: A revoked client is refused, whatever its certificate says.
        enrolled_utc: Of the last enrolment.
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
    """What is known of a client since it was last connected.

    Attributes:
        is_connected: Whether it was when this was written down.
        seen_utc: When it was last seen, to the minute while it is connected; ISO 8601.
        software: What it runs, as it says.
        num_examples: That it has, as it says; 0: it does not tell.
    """

    client_id: ClientId
    is_connected: bool
    seen_utc: str
    software: str
    num_examples: int


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
            identity_key: That the client has the private one is for the caller to check.
            certify: Makes the certificate, once the client's number is known.
            lineage: How its identity key follows from earlier ones, in bytes; empty: it does not.

        Raises:
            EnrolmentRefused: The token is unknown, used, expired or of another name, or
                another client has this identity key.
        """

    def rotate(self, name: str, lineage: bytes, *, certify: Certify) -> EnrolledClient:
        """Replace an active client's identity key by the last of ``lineage``.

        The same lineage may come again, and is certified anew, as in :meth:`redeem`.

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

    def revoke(self, name: str) -> EnrolledClient | None:
        """Refuse the client called ``name`` from now on, and end its open invitation.

        Returns:
            The client; ``None`` if it was invited and never enrolled.

        Raises:
            DeploymentError: Neither a client nor an open invitation has this name.
        """

    def revision(self) -> int:
        """Return a number that grows whenever a client is added or changed."""

    def open_invitations(self) -> "list[InvitationRecord]":
        """Return the invitations that nobody has used, by name; some may have expired."""

    def contacts(self) -> list[Contact]:
        """Return what is known of all clients that have ever connected, by number."""

    def keep_contacts(self, contacts: Sequence[Contact], *, are_all: bool) -> None:
        """Write down what is known of clients now; it replaces what was.

        Args:
            contacts: One a client.
            are_all: Whether no other client is connected.
        """


@dataclass(frozen=True, kw_only=True)
class InvitationRecord:
    """What is kept of an invitation.

    Attributes:
        token_sha256: Of the token, hexadecimal.
        redeemed_by: The identity key that has used it; empty while it is open.
    """

    name: str
    tags: tuple[str, ...]
    token_sha256: str
    expires_unix_s: float
    redeemed_by: bytes


def check_name(name: str) -> None:
    """Check that a client can be called ``name``, also in a certificate.

    Raises:
        DeploymentError: It cannot.
    """
    if not _NAME.fullmatch(name):
        raise DeploymentError(
            f"a client cannot be called {name!r}: use up to 64 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit"
        )


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

    Raises as :func:`check_redeemable`.
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


def is_lineage(lineage: bytes, *, client_id: ClientId) -> bool:
    """Return whether each key in a lineage was named by the one before as this client's."""
    try:
        Lineage.from_bytes(lineage).check(client_id)
    except ProtocolError:
        return False
    return True
