"""A client's keys, its certificate, and the invitation that it enrols with.

A client generates two key pairs and never shares the private halves. Its *identity key* (Ed25519)
signs every reply, on every transport. Its *TLS key* (ECDSA P-256, which every TLS library
supports) belongs to its certificate.

References:
    `RFC 8032 <https://www.rfc-editor.org/rfc/rfc8032>`_ (Ed25519),
    `RFC 2986 <https://www.rfc-editor.org/rfc/rfc2986>`_ (certificate signing requests).
"""

import base64
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from pydantic import PlainValidator, TypeAdapter

from fedlearn.core.files import (
    create_private,
    explain_disk_errors,
    make_private_folder,
    write_private,
)
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.documents import read_document

#: Host name in every coordinator certificate, so that clients can check it at any address.
SERVER_NAME = "fedlearn-coordinator"

#: File of an :class:`Identity`. It holds both keys, so that a crash leaves both or neither.
IDENTITY_FILE = "identity.pem"

#: Invitation formats. Format 2 has no separate enrolment port. Earlier clients cannot use it: they
#: enrol only at a port that asks for no client certificate.
_WITH_ENROLMENT_PORT, _WITHOUT_ENROLMENT_PORT = 1, 2
_PEM_END = b"-----END PRIVATE KEY-----\n"


@dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """A client's private keys.

    Guarantees:
        Never printed or pickled; on disk only in a file that only its owner can read.
    """

    identity_key: Ed25519PrivateKey
    tls_key: ec.EllipticCurvePrivateKey

    def __repr__(self) -> str:
        return f"Identity(public_key={self.public_key.hex()[:12]}…)"

    @classmethod
    def create(cls) -> "Identity":
        """Generate a new identity from the operating system's randomness."""
        return cls(
            identity_key=Ed25519PrivateKey.generate(),
            tls_key=ec.generate_private_key(ec.SECP256R1()),
        )

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """Load the identity that :meth:`load_or_create` wrote.

        Raises:
            DeploymentError: The file is missing, unreadable or damaged.
        """
        path = folder / IDENTITY_FILE
        with explain_disk_errors(path, raises=DeploymentError, doing="read"):
            pem = path.read_bytes()
        try:
            return cls.from_pem(pem)
        except ValueError as error:
            raise DeploymentError(
                f"{path} does not have this client's two keys: it is damaged or another file; "
                "restore a copy, or remove it and enrol again with a new invitation (`fedlearn "
                "invite NAME`)"
            ) from error

    @classmethod
    def load_or_create(cls, folder: Path) -> "Identity":
        """Load the identity in ``folder``; if there is none, create it and write it durably first.

        Several processes may call this at once: all get the same keys.

        Raises:
            DeploymentError: The folder or the file cannot be written, or is damaged.
        """
        if not (folder / IDENTITY_FILE).exists():
            make_private_folder(folder)
            create_private(folder / IDENTITY_FILE, cls.create().pem)
        # Load even after creating: if another process was faster, its keys are the ones on disk.
        return cls.load(folder)

    @classmethod
    def from_pem(cls, pem: bytes) -> "Identity":
        """Parse an identity from its :attr:`pem`.

        Raises:
            ValueError: The PEM does not hold an Ed25519 key followed by a P-256 key.
        """
        # Two keys in one file: the first ends at the first END line.
        first, end, second = pem.partition(_PEM_END)
        try:
            identity_key = serialization.load_pem_private_key(first + end, password=None)
            tls_key = serialization.load_pem_private_key(second, password=None)
        # TypeError: the key is encrypted.
        except (TypeError, UnsupportedAlgorithm) as error:
            raise ValueError("not two private keys without a password") from error
        if not isinstance(identity_key, Ed25519PrivateKey) or not is_p256(tls_key):
            raise ValueError("not an Ed25519 and a P-256 key")
        assert isinstance(tls_key, ec.EllipticCurvePrivateKey)
        return cls(identity_key=identity_key, tls_key=tls_key)

    @property
    def pem(self) -> bytes:
        """Both private keys, unencrypted PKCS 8 in PEM. Store it as a secret."""
        return encode_private_key(self.identity_key) + self.tls_key_pem

    @property
    def public_key(self) -> bytes:
        """The public identity key: 32 raw bytes."""
        return self.identity_key.public_key().public_bytes_raw()

    @property
    def tls_key_pem(self) -> bytes:
        """The private TLS key, unencrypted PKCS 8 in PEM, as TLS libraries read it."""
        return encode_private_key(self.tls_key)

    def sign(self, data: bytes) -> bytes:
        """Sign ``data`` with the identity key; the signature is 64 bytes."""
        return self.identity_key.sign(data)

    def is_subject_of(self, certificate_pem: bytes) -> bool:
        """Return whether a certificate is for the TLS key; raises as :func:`load_certificate`."""
        return load_certificate(certificate_pem).public_key() == self.tls_key.public_key()

    def csr_pem(self, name: str) -> bytes:
        """Build a signing request for the TLS key, in PEM; raises as :func:`common_name`."""
        builder = x509.CertificateSigningRequestBuilder(common_name(name))
        return builder.sign(self.tls_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be a text")  # noqa: TRY004 - pydantic passes TypeErrors on
    return value


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text, altchars=b"-_", validate=True)


#: Bytes in the JSON of an invitation, by their text encoding.
Ascii = Annotated[bytes, PlainValidator(lambda value: _require_text(value).encode("ascii"))]
Base64 = Annotated[bytes, PlainValidator(lambda value: _decode_base64(_require_text(value)))]
Hexadecimal = Annotated[bytes, PlainValidator(lambda value: bytes.fromhex(_require_text(value)))]


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The file that an operator gives to one client so that it can join.

    Attributes:
        name: Name of the client.
        addresses: Addresses of the coordinator, ``host:port``; several if it is highly available.
        enrolment_addresses: Where clients of an earlier version redeem the token, ``host:port``;
            empty if they cannot enrol.
        ca_pem: Certificate of the deployment's own authority, the only one that the client trusts.
        token: One-time enrolment token; empty in the copy that an enrolled client keeps. Never
            printed.
        expires_utc: When the token expires, ISO 8601.
        coordinator_key: Ed25519 public key with which the coordinator signs the terms of secure
            aggregation. Empty without TLS: the client then takes no part in secure aggregation.
        certificate_pem: Temporary certificate for the TLS connection over which the client enrols;
            it authorizes nothing else. Empty in the copy that an enrolled client keeps, without
            TLS, and in an invitation of an earlier version.
        tls_key_pem: Private key of that certificate. Never printed.
    """

    name: str
    addresses: Annotated[tuple[str, ...], MinLen(1)]
    enrolment_addresses: tuple[str, ...]
    ca_pem: Ascii = field(repr=False)
    token: Base64 = field(repr=False)
    expires_utc: str
    coordinator_key: Hexadecimal = b""
    certificate_pem: Ascii = field(default=b"", repr=False)
    tls_key_pem: Ascii = field(default=b"", repr=False)

    @property
    def token_addresses(self) -> tuple[str, ...]:
        """Where to enrol: at ``addresses``, unless an earlier version wrote the invitation."""
        is_older = self.enrolment_addresses and not self.certificate_pem
        return self.enrolment_addresses if is_older else self.addresses

    def with_addresses(self, addresses: tuple[str, ...]) -> "Invitation":
        """Return a copy for a coordinator that has moved to other addresses.

        An enrolled client renews its certificate there, too, so the copy of one drops the old
        enrolment addresses.
        """
        return replace(
            self,
            addresses=addresses,
            enrolment_addresses=self.enrolment_addresses if self.token else (),
        )

    def strip_secrets(self) -> "Invitation":
        """Return the copy that an enrolled client keeps: its addresses, but no token and no key."""
        # `token_addresses` returns one of the two tuples itself, hence `is`.
        is_older = self.token_addresses is self.enrolment_addresses
        return replace(
            self,
            token=b"",
            certificate_pem=b"",
            tls_key_pem=b"",
            enrolment_addresses=self.enrolment_addresses if is_older else (),
        )

    @classmethod
    def load(cls, path: Path) -> "Invitation":
        """Load the invitation in the file ``path``.

        Raises:
            DeploymentError: The file is missing, unreadable, damaged, or of a later version.
        """
        return read_document(
            path,
            _INVITATION,
            key="fedlearn_invitation",
            versions=(_WITH_ENROLMENT_PORT, _WITHOUT_ENROLMENT_PORT),
            noun="an invitation",
            command="fedlearn invite NAME",
            is_secret=True,
        )

    def save(self, path: Path) -> None:
        """Write the invitation to the file ``path``, mode 0600; its folder must exist.

        Raises:
            DeploymentError: It cannot be written.
        """
        write_private(path, self.to_json().encode())

    def to_json(self) -> str:
        """Format it as the file that an operator hands out."""
        values = {
            "fedlearn_invitation": _WITH_ENROLMENT_PORT
            if self.enrolment_addresses
            else _WITHOUT_ENROLMENT_PORT,
            "name": self.name,
            "addresses": self.addresses,
            "enrolment_addresses": self.enrolment_addresses,
            "ca_pem": self.ca_pem.decode("ascii"),
            "token": base64.urlsafe_b64encode(self.token).decode("ascii"),
            "expires_utc": self.expires_utc,
            "coordinator_key": self.coordinator_key.hex(),
            "certificate_pem": self.certificate_pem.decode("ascii"),
            "tls_key_pem": self.tls_key_pem.decode("ascii"),
        }
        return json.dumps(values, indent=2) + "\n"


_INVITATION = TypeAdapter(Invitation)


def certificate_fingerprint(certificate_pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER, hex; raises as :func:`load_certificate`."""
    return load_certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def expires_unix_s(certificate_pem: bytes) -> float:
    """Return a certificate's expiry in seconds since 1970; raises as :func:`load_certificate`."""
    return load_certificate(certificate_pem).not_valid_after_utc.timestamp()


def validity_unix_s(certificate_pem: bytes) -> tuple[float, float]:
    """Return a certificate's start and expiry in seconds since 1970.

    Raises as :func:`load_certificate`.
    """
    certificate = load_certificate(certificate_pem)
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def load_certificate(certificate_pem: bytes) -> x509.Certificate:
    """Return the first certificate in PEM.

    Raises:
        ProtocolError: There is none.
    """
    try:
        return x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise ProtocolError(f"{len(certificate_pem)} bytes are not a PEM certificate") from error


def common_name(name: str) -> x509.Name:
    """Return the distinguished name ``CN=name``.

    Raises:
        DeploymentError: ``name`` is not of 1 to 64 characters.
    """
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise DeploymentError(
            f"the name {name!r} is not valid in a certificate ({error}); use 1 to 64 characters"
        ) from error


def is_p256(key: object) -> bool:
    """Return whether ``key``, private or public, is on P-256, the curve of all TLS keys here."""
    return isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and isinstance(
        key.curve, ec.SECP256R1
    )


def encode_private_key(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as unencrypted PKCS 8 in PEM."""
    # Without a password: permissions of the file protect the key.
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
