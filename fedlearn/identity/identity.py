"""Who a client is: its keys, what it signs, and the invitation it came with.

A client makes two key pairs itself and keeps the private halves. Its *identity key* (Ed25519)
signs every reply, whatever transport carries it; its *TLS key* (ECDSA P-256, which every TLS
library speaks) is the one its certificate is for.

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

from fedlearn.core.files import create_private, disk_errors, make_private_folder, write_private
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.documents import read_document

#: What the coordinator's certificate is always valid for, wherever it is reached.
SERVER_NAME = "fedlearn-coordinator"

#: The file of an :class:`Identity` in its folder: both keys, so that a crash keeps neither or both.
IDENTITY_FILE = "identity.pem"

#: Formats of an invitation. A client of an earlier version cannot use one of format 2, since it
#: enrols at a port that asks for no certificate, and there is none.
_WITH_ENROLMENT_PORT, _DOOR_ALONE = 1, 2
_PEM_END = b"-----END PRIVATE KEY-----\n"


@dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """A client's private keys.

    Guarantees:
        Neither printed nor pickled; on disk only in a file that its owner alone reads.
    """

    identity_key: Ed25519PrivateKey
    tls_key: ec.EllipticCurvePrivateKey

    def __repr__(self) -> str:
        return f"Identity(public_key={self.public_key.hex()[:12]}…)"

    @classmethod
    def create(cls) -> "Identity":
        """Return fresh keys from the operating system's randomness."""
        return cls(
            identity_key=Ed25519PrivateKey.generate(),
            tls_key=ec.generate_private_key(ec.SECP256R1()),
        )

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """Return the keys that :meth:`at` wrote.

        Raises:
            DeploymentError: The file is missing, unreadable or damaged.
        """
        path = folder / IDENTITY_FILE
        with disk_errors(path, raises=DeploymentError, doing="read"):
            pem = path.read_bytes()
        try:
            return cls.from_pem(pem)
        except ValueError as error:
            raise DeploymentError(
                f"{path} does not hold this client's two keys: it is damaged or another file; put "
                "a copy back, or remove it and enrol again with a new invitation (`fedlearn invite "
                "NAME`)"
            ) from error

    @classmethod
    def at(cls, folder: Path) -> "Identity":
        """Return the keys in ``folder``, made there first, durably, if there are none.

        Of several processes that do so at once, all get the same ones.

        Raises:
            DeploymentError: The folder or the file cannot be written, or is damaged.
        """
        if not (folder / IDENTITY_FILE).exists():
            make_private_folder(folder)
            create_private(folder / IDENTITY_FILE, cls.create().pem)
        return cls.load(folder)

    @classmethod
    def from_pem(cls, pem: bytes) -> "Identity":
        """Return the keys whose :attr:`pem` this is.

        Raises:
            ValueError: It is that of no identity.
        """
        first, end, second = pem.partition(_PEM_END)
        try:
            identity_key = serialization.load_pem_private_key(first + end, password=None)
            tls_key = serialization.load_pem_private_key(second, password=None)
        except (TypeError, UnsupportedAlgorithm) as error:
            raise ValueError("not two private keys without a password") from error
        if not isinstance(identity_key, Ed25519PrivateKey) or not is_p256(tls_key):
            raise ValueError("not an Ed25519 and a P-256 key")
        assert isinstance(tls_key, ec.EllipticCurvePrivateKey)
        return cls(identity_key=identity_key, tls_key=tls_key)

    @property
    def pem(self) -> bytes:
        """Both private keys, PKCS 8 in PEM, not encrypted: a secret, for whoever keeps it."""
        return private_pem(self.identity_key) + self.tls_key_pem

    @property
    def public_key(self) -> bytes:
        """The identity key's public half, raw, 32 bytes."""
        return self.identity_key.public_key().public_bytes_raw()

    @property
    def tls_key_pem(self) -> bytes:
        """The TLS key, PKCS 8 in PEM, for the TLS library."""
        return private_pem(self.tls_key)

    def sign(self, data: bytes) -> bytes:
        """Return the identity key's signature of ``data``, 64 bytes."""
        return self.identity_key.sign(data)

    def is_subject_of(self, certificate_pem: bytes) -> bool:
        """Return whether a certificate is for the TLS key; raises as :func:`load_certificate`."""
        return load_certificate(certificate_pem).public_key() == self.tls_key.public_key()

    def csr_pem(self, name: str) -> bytes:
        """Return a request for a certificate of the TLS key; raises as :func:`common_name`."""
        builder = x509.CertificateSigningRequestBuilder(common_name(name))
        return builder.sign(self.tls_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be a text")  # noqa: TRY004 - pydantic passes TypeErrors on
    return value


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, altchars=b"-_", validate=True)


#: Bytes as they stand in an invitation's file.
_Ascii = Annotated[bytes, PlainValidator(lambda value: _text(value).encode("ascii"))]
_Base64 = Annotated[bytes, PlainValidator(lambda value: _from_base64(_text(value)))]
_Hexadecimal = Annotated[bytes, PlainValidator(lambda value: bytes.fromhex(_text(value)))]


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What an operator hands to one client so that it can join, as one file.

    Attributes:
        name: The client's.
        addresses: The coordinator's door, ``host:port``; several of a highly available one.
        enrolment_addresses: Where clients of an earlier version redeem the token, ``host:port``;
            empty: they cannot.
        ca_pem: The deployment's own certificate authority: the client trusts no other.
        token: Redeemed once; empty in the copy that a client keeps. Never printed.
        expires_utc: When the token ends, ISO 8601.
        coordinator_key: Ed25519, what the coordinator signs the terms of secure aggregation with;
            empty (without TLS): this client takes part in none.
        certificate_pem: What the client shows at the door until it has a certificate of its own.
            It opens TLS and nothing else. Empty in the copy that a client keeps, without TLS, and
            in an invitation by an earlier version.
        tls_key_pem: The key of that certificate. Never printed.
    """

    name: str
    addresses: Annotated[tuple[str, ...], MinLen(1)]
    enrolment_addresses: tuple[str, ...]
    ca_pem: _Ascii = field(repr=False)
    token: _Base64 = field(repr=False)
    expires_utc: str
    coordinator_key: _Hexadecimal = b""
    certificate_pem: _Ascii = field(default=b"", repr=False)
    tls_key_pem: _Ascii = field(default=b"", repr=False)

    @property
    def token_addresses(self) -> tuple[str, ...]:
        """Where to enrol: at the door, unless the invitation is by an earlier version."""
        is_older = self.enrolment_addresses and not self.certificate_pem
        return self.enrolment_addresses if is_older else self.addresses

    def moved_to(self, addresses: tuple[str, ...]) -> "Invitation":
        """Return the invitation to a coordinator that is reached at other addresses.

        An enrolled client renews its certificate there, too.
        """
        return replace(
            self,
            addresses=addresses,
            enrolment_addresses=self.enrolment_addresses if self.token else (),
        )

    def without_secrets(self) -> "Invitation":
        """Return the copy that an enrolled client keeps, with the addresses that it will need."""
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
        """Return the invitation in the file ``path``.

        Raises:
            DeploymentError: The file is missing, unreadable, damaged, or of a later version.
        """
        return read_document(
            path,
            _INVITATION,
            key="fedlearn_invitation",
            versions=(_WITH_ENROLMENT_PORT, _DOOR_ALONE),
            noun="an invitation",
            command="fedlearn invite NAME",
            is_secret=True,
        )

    def save(self, path: Path) -> None:
        """Write the invitation to the file ``path``, mode 0600; its folder exists.

        Raises:
            DeploymentError: It cannot be written.
        """
        values = {
            "fedlearn_invitation": _WITH_ENROLMENT_PORT
            if self.enrolment_addresses
            else _DOOR_ALONE,
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
        write_private(path, (json.dumps(values, indent=2) + "\n").encode())


_INVITATION = TypeAdapter(Invitation)


def certificate_fingerprint(certificate_pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER, hex; raises as :func:`load_certificate`."""
    return load_certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def expires_unix_s(certificate_pem: bytes) -> float:
    """Return when a certificate ends, in seconds since 1970; raises as :func:`load_certificate`."""
    return load_certificate(certificate_pem).not_valid_after_utc.timestamp()


def validity_unix_s(certificate_pem: bytes) -> tuple[float, float]:
    """Return when a certificate begins and ends, as :func:`expires_unix_s` does."""
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
            f"a certificate cannot carry the name {name!r} ({error}); choose 1 to 64 characters"
        ) from error


def is_p256(key: object) -> bool:
    """Return whether ``key``, private or public, is of the curve that fedlearn's TLS uses."""
    return isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and isinstance(
        key.curve, ec.SECP256R1
    )


def private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key, PKCS 8 in PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
