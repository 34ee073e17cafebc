"""The certificate authority of one deployment.

It certifies the coordinator to its clients and the clients to the coordinator. It consists of
five files in a folder: ``ca.key`` and ``ca.pem``, created on the first start and valid for ten
years; ``server.key`` and ``server.pem``, whose certificate is valid for a year and is renewed
automatically; ``coordinator.key`` (Ed25519), created on the first start, which signs the terms of
secure aggregation and is pinned by every client at its enrolment. Next to them is the key of
:mod:`fedlearn.identity.signing`. Coordinators of one deployment share the folder (or copies of it).

``docs/how-to/certificates-and-keys.md`` explains how to replace the authority, or only the
server's key.
"""

import ipaddress
import math
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509 import ExtensionNotFound, SubjectAlternativeName
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedlearn.core.clock import utc_now
from fedlearn.core.files import (
    create_private,
    make_private_folder,
    write_private,
)
from fedlearn.errors import DeploymentError, EnrolmentRefused, ProtocolError
from fedlearn.identity.identity import (
    SERVER_NAME,
    common_name,
    encode_private_key,
    is_p256,
    load_certificate,
)
from fedlearn.identity.key_files import build_damage_error, load_or_create_key, read_key_file
from fedlearn.identity.profiles import Profile
from fedlearn.identity.signing import SigningKey

_log = structlog.get_logger(__name__)

_CA_DAYS = 3652
_SERVER_DAYS = 365
_RENEW_BEFORE = timedelta(days=30)
_BACKDATED = timedelta(days=1)  # so that a client whose clock is slow accepts a fresh certificate
_ALWAYS = ("localhost", "127.0.0.1", "::1")
_DAY_S, _DAYS_LATE = 86_400.0, 30
_REPLACE_AUTHORITY = "move its folder away, start the coordinator, and invite every client again"
_load_key = partial(load_or_create_key, without_copy=_REPLACE_AUTHORITY)


class Authority:
    """The certificate authority in a folder, created on first use; thread-safe.

    Guarantees:
        Private keys are stored in files that only their owner can read, and are never printed.
        Coordinators that open one folder at the same time get the same authority.

    Args:
        folder: Created with mode 0700.
        host_names: DNS names and IP addresses by which clients reach the coordinator, in addition
            to ``fedlearn-coordinator`` and the loopback names.
        now: The wall clock, ISO 8601 in UTC.

    Attributes:
        ca_pem: The authority's own certificate, which goes into invitations.
        signer: The coordinator's identity key, which signs the terms of secure aggregation.
        coordinator_key: The public key that verifies those signatures, 32 bytes; it goes into
            invitations, too.

    Raises:
        DeploymentError: A file is damaged or cannot be written, the authority has expired, or a
            host name is invalid.
    """

    def __init__(
        self, folder: Path, *, host_names: Sequence[str], now: Callable[[], str] = utc_now
    ) -> None:
        make_private_folder(folder)
        self._path = folder / "server.pem"
        self._now = now
        names = dict.fromkeys((SERVER_NAME, *_ALWAYS, *host_names))
        self._alternatives = SubjectAlternativeName([_parse_host_name(name) for name in names])
        self._ca_key = _load_key(folder / "ca.key", _new_p256)
        self._ca = _load_or_create_ca(folder / "ca.pem", self._ca_key, now=self._time())
        self._server_key = _load_key(folder / "server.key", _new_p256)
        self._certificate_pem, self._renew_after = self._load_server_certificate()
        self._lock = threading.Lock()
        self.ca_pem = self._ca.public_bytes(serialization.Encoding.PEM)
        self.signer = _load_key(folder / "coordinator.key", Ed25519PrivateKey.generate)
        # Made with the others, so that copies of the folder on other machines have it, too.
        SigningKey(folder)
        self.coordinator_key = self.signer.public_key().public_bytes_raw()
        self.server_certificate()

    def server_certificate(self) -> tuple[bytes, bytes]:
        """Return the server's private key and its certificate chain, both PEM.

        Call it before each handshake: the certificate is renewed 30 days before it expires. The
        last one expires together with the authority.

        Raises:
            DeploymentError: The certificate must be renewed, but the authority has expired.
        """
        with self._lock:
            if self._time() >= self._renew_after:
                self._certificate_pem, self._renew_after = self._renew()
            return encode_private_key(self._server_key), self._certificate_pem + self.ca_pem

    def find_expiries(self) -> dict[str, datetime]:
        """Return the expiry times of the authority's own certificate and of the server's."""
        server_end = load_certificate(self._certificate_pem).not_valid_after_utc
        return {"authority": self._ca.not_valid_after_utc, "server": server_end}

    def sign(self, csr_pem: bytes, *, name: str, client_id: int, valid_days: int) -> bytes:
        """Return a certificate, PEM, for the key of a client's signing request.

        Everything else in the request is ignored. The certificate does not outlive the authority.

        Raises:
            EnrolmentRefused: The request is not valid, or its key is not ECDSA P-256.
            DeploymentError: The authority has expired, or ``name`` is longer than 64 characters.
        """
        return self._issue_to_peer(
            name,
            _load_requested_key(csr_pem),
            uri=Profile.CLIENT.build_uri(str(client_id)),
            valid_days=valid_days,
        )

    def sign_operator(self, csr_pem: bytes, *, name: str, valid_days: int) -> bytes:
        """Return a certificate, PEM, for the key of an operator's signing request.

        Raises the same errors as :meth:`sign`.
        """
        key, uri = _load_requested_key(csr_pem), Profile.OPERATOR.build_uri(name)
        return self._issue_to_peer(name, key, uri=uri, valid_days=valid_days)

    @staticmethod
    def hash_requested_key(csr_pem: bytes) -> str:
        """Return the SHA-256 of the public key in a signing request, hexadecimal.

        Raises:
            EnrolmentRefused: As for :meth:`sign`.
        """
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        key = _load_requested_key(csr_pem).public_bytes(serialization.Encoding.DER, form)
        return sha256(key).hexdigest()

    def certify_invitation(
        self, name: str, *, valid_s: float, profile: Profile = Profile.CLIENT_INVITATION
    ) -> tuple[bytes, bytes]:
        """Return a certificate and its private key, both PEM, for an invited peer to enrol with.

        The certificate only grants access to the enrolment service; every other call requires an
        enrolled client or operator. It outlives the invitation's token, so that a peer that comes
        too late receives the reason.

        Args:
            name: Name of the client or operator.
            valid_s: Seconds for which the token is valid.
            profile: Which of the two it is for.

        Raises the same errors as :meth:`sign`.
        """
        key, valid_days = _new_p256(), math.ceil(valid_s / _DAY_S) + _DAYS_LATE
        pem = self._issue_to_peer(
            name, key.public_key(), uri=profile.build_uri(), valid_days=valid_days
        )
        return pem, encode_private_key(key)

    def _issue_to_peer(
        self, name: str, key: ec.EllipticCurvePublicKey, *, uri: str, valid_days: int
    ) -> bytes:
        return self._issue(
            name,
            key,
            alternatives=SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]),
            usage=ExtendedKeyUsageOID.CLIENT_AUTH,
            valid_days=valid_days,
        )

    def _load_server_certificate(self) -> tuple[bytes, datetime]:
        """Return the saved server certificate and its renewal time.

        If there is none for this key and these names, the renewal time is in the past.
        """
        if self._path.exists():
            content = read_key_file(self._path)
            with suppress(
                ProtocolError, ValueError, TypeError, InvalidSignature, ExtensionNotFound
            ):
                certificate = load_certificate(content)
                # Files restored from different backups must not be served together.
                certificate.verify_directly_issued_by(self._ca)
                names = certificate.extensions.get_extension_for_class(SubjectAlternativeName)
                is_ours = certificate.public_key() == self._server_key.public_key()
                # A changed list of host names needs a new certificate, too.
                if is_ours and names.value == self._alternatives:
                    return self._with_renewal_time(content, certificate)
        return b"", datetime.min.replace(tzinfo=UTC)

    def _renew(self) -> tuple[bytes, datetime]:
        content = self._issue(
            SERVER_NAME,
            self._server_key.public_key(),
            alternatives=self._alternatives,
            usage=ExtendedKeyUsageOID.SERVER_AUTH,
            valid_days=_SERVER_DAYS,
        )
        try:
            write_private(self._path, content)
        except DeploymentError as error:  # it works from memory, too, and can be renewed again
            _log.warning("server_certificate_not_saved", reason=str(error))
        return self._with_renewal_time(content, load_certificate(content))

    def _with_renewal_time(
        self, content: bytes, certificate: x509.Certificate
    ) -> tuple[bytes, datetime]:
        end = certificate.not_valid_after_utc
        if end < self._ca.not_valid_after_utc:
            return content, end - _RENEW_BEFORE
        # A certificate cannot outlive its authority, so renewing this one would change nothing.
        remedy = f"before that, stop every coordinator, then {_REPLACE_AUTHORITY}"
        _log.warning("authority_ends", at=end.isoformat(), remedy=remedy)
        return content, end

    def _issue(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        *,
        alternatives: SubjectAlternativeName,
        usage: x509.ObjectIdentifier,
        valid_days: int,
    ) -> bytes:
        """Issue a certificate for one use, PEM; it does not outlive the authority."""
        now, latest = self._time(), self._ca.not_valid_after_utc
        if now >= latest:
            raise DeploymentError(
                f"the deployment's certificate authority expired at {latest}; {_REPLACE_AUTHORITY}"
            )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca_key.public_key())
        builder = (
            x509.CertificateBuilder(self._ca.subject, common_name(name), key)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(alternatives, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer, critical=False)
        )
        end = min(now + timedelta(days=valid_days), latest)
        return _sign_certificate(builder, self._ca_key, now=now, end=end, ca=False)

    def _time(self) -> datetime:
        return datetime.fromisoformat(self._now())


def _new_p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _load_or_create_ca(
    path: Path, key: ec.EllipticCurvePrivateKey, *, now: datetime
) -> x509.Certificate:
    if not path.exists():
        name, public = common_name("fedlearn authority"), key.public_key()
        builder = x509.CertificateBuilder(name, name, public).add_extension(
            x509.SubjectKeyIdentifier.from_public_key(public), critical=False
        )
        end = now + timedelta(days=_CA_DAYS)
        create_private(path, _sign_certificate(builder, key, now=now, end=end, ca=True))
    try:
        certificate = load_certificate(read_key_file(path))
    except ProtocolError as error:
        raise build_damage_error(path, without_copy=_REPLACE_AUTHORITY) from error
    if certificate.public_key() != key.public_key():
        raise DeploymentError(
            f"{path} is not the certificate for {path.with_name('ca.key').name} next to it; "
            "restore both files from one copy"
        )
    return certificate


def _sign_certificate(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime,
    end: datetime,
    ca: bool,
) -> bytes:
    """Return a signed certificate, PEM, whose key may sign certificates (``ca``) or handshakes."""
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    complete = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end)
        # Path length 0: the authority certifies peers, never another authority.
        .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    return complete.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _load_requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a signing request, after a check that the requester holds it."""
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise EnrolmentRefused(f"the signing request cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not is_p256(key):
        raise EnrolmentRefused("the signing request's key is not ECDSA P-256")
    if not is_signed:
        raise EnrolmentRefused("the signing request is not signed by its own key")
    return key


def _parse_host_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass  # then it is a DNS name
    if re.fullmatch(r"[A-Za-z0-9._*-]+", name) is None:
        raise DeploymentError(
            f"{name!r} is neither a DNS name nor an IP address; give the coordinator's host "
            "names without scheme and port"
        )
    return x509.DNSName(name)
