"""The registry of operators: who may give commands from another machine, and in which roles.

An operator joins as a client does: with the token of an invitation, once, and a key that is made on
the operator's own machine. After that, the certificate identifies the operator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from fedlearn.core.clock import utc
from fedlearn.errors import EnrolmentRefused
from fedlearn.identity.roles import Grant

OperatorStatus: TypeAlias = Literal["invited", "active", "revoked"]

#: Issues an operator's certificate. Returns its PEM, the SHA-256 of its DER (hexadecimal), and its
#: expiry (ISO 8601). Called inside the registry's transaction, at most once.
CertifyOperator: TypeAlias = Callable[[], tuple[bytes, str, str]]


@dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """An operator; times are ISO 8601.

    Attributes:
        name: Unique among operators.
        status: ``invited`` until the first invitation is redeemed; ``revoked``: refused even while
            the certificate is valid.
        grants: The operator's roles, sorted; none of a revoked operator.
        fingerprint: SHA-256 of the certificate's DER, hexadecimal; empty: none was issued.
        certificate_expires_utc: Empty if none was issued.
        added_by: Who wrote the first invitation: :attr:`fedlearn.identity.actors.Actor.label`.
        added_utc: When.
    """

    name: str
    status: OperatorStatus
    grants: tuple[Grant, ...]
    fingerprint: str
    certificate_expires_utc: str
    added_by: str
    added_utc: str

    def find_objection(self, fingerprint: str, *, now_unix_s: float) -> str:
        """Return why a certificate of the operator is not admitted now; empty: it is."""
        again = f"ask an admin for a new invitation (`fedlearn operator invite {self.name}`)"
        if self.status == "revoked":
            return f"the operator {self.name} was revoked"
        if self.status == "invited" or self.fingerprint != fingerprint:
            return (
                f"{self.name} has joined again or renewed, and this is an older certificate; if a "
                f"renewal broke off, repeat it (`fedlearn operator renew`), or {again}"
            )
        if self.certificate_expires_utc <= utc(now_unix_s):  # both ISO 8601 in UTC
            return (
                f"the certificate of {self.name} expired at {self.certificate_expires_utc}; {again}"
            )
        return ""


class OperatorRegistry(Protocol):
    """The part of the registry that a gateway needs. All methods are thread-safe."""

    def redeem(
        self, name: str, token: bytes, *, key: str, certify: CertifyOperator, origin: str
    ) -> OperatorRecord:
        """Enrol the operator ``name`` and use up its token, in one transaction.

        The same key may redeem its token again and gets a new certificate, since the first reply
        may have been lost.

        Args:
            name: Name in the invitation.
            token: Token in the invitation.
            key: Digest of the operator's public key, hexadecimal. The caller must have checked that
                the operator has the private key.
            certify: Issues the certificate.
            origin: Address that the request came from, for the audit log.

        Raises:
            EnrolmentRefused: The token is unknown, used, expired or belongs to another name.
        """

    def renew(
        self, name: str, *, shown: str, key: str, certify: CertifyOperator, origin: str
    ) -> OperatorRecord:
        """Give an operator a certificate for another key, in one transaction.

        The one before is worthless from then on. The same key may ask again and gets a new
        certificate, since the first reply may have been lost.

        Args:
            name: Name of the operator.
            shown: SHA-256 of the certificate that it shows, which must not have expired.
            key: Digest of its new public key; the caller must have checked that the operator has
                the private key.
            certify: Issues the certificate.
            origin: Address that the request came from, for the audit log.

        Raises:
            EnrolmentRefused: The operator was revoked, or the certificate is an older one.
        """

    def find(self, name: str) -> OperatorRecord | None:
        """Return the operator called ``name``, perhaps a revoked one."""

    def record_refusal(self, name: str, *, reason: str, origin: str) -> None:
        """Record that an operator was not admitted with the certificate that it has shown."""


class CommandAnswer(NamedTuple):
    """The answer to a command.

    Attributes:
        lines: What the operator's machine shows, in the form of the commands.
        file: A file for the operator; empty: none.
    """

    lines: bytes
    file: bytes = b""


class OrderHandler(Protocol):
    """Carries out the commands of operators. All methods are thread-safe."""

    def expect_file(self, who: OperatorRecord, order: bytes, origin: str) -> None:
        """Check that an operator may give a command, and that a file comes with it.

        Raises:
            FedlearnError: It may not, or none does.
        """

    def carry_out(
        self, who: OperatorRecord, order: bytes, origin: str, file: Path | None
    ) -> CommandAnswer:
        """Carry out the command of an operator, from an address, and return its answer.

        Args:
            who: The operator.
            order: The command.
            origin: Address that it came from.
            file: The file that has come with it; ``None``: none.

        Raises:
            FedlearnError: It is refused, or fails.
        """


@dataclass(frozen=True, kw_only=True)
class OperatorToken:
    """What the registry keeps of an operator's invitation.

    Attributes:
        expires_unix_s: When it ends.
        redeemed_by: Digest of the key that redeemed it; empty while it is open.
    """

    expires_unix_s: float
    redeemed_by: str

    def check(self, *, name: str, key: str, now_unix_s: float) -> None:
        """Check that the operator ``name`` may redeem it now with this key.

        Raises:
            EnrolmentRefused: Not so.
        """
        again = "ask an admin for a new one (`fedlearn operator invite`)"
        if now_unix_s >= self.expires_unix_s:
            raise EnrolmentRefused(
                f"the invitation of {name!r} expired at {utc(self.expires_unix_s)}; {again}"
            )
        if self.redeemed_by not in {"", key}:
            raise EnrolmentRefused(f"the invitation of {name!r} has been used; {again}")
