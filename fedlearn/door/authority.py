"""The certificate authority of one deployment: whom the door believes, and who the door is.

The authority is five files in a folder: ``ca.key`` and ``ca.pem``, made on the first start and
good for ten years; ``server.key`` and ``server.pem``, whose certificate lasts a year and renews
itself; ``coordinator.key`` (Ed25519), made on the first start, which signs the terms of secure
aggregation and is pinned by every client at its enrolment. Coordinators of one deployment share
the folder (or copies of it).

Replacing the authority, because its key was lost or ``ca.pem`` nears its end: stop every
coordinator, move the folder away, start one, and invite every client anew. A client trusts
exactly the authority of its invitation, so none can be carried over; their names keep their
client ids. Replacing the server's key alone: remove ``server.key`` and restart; no client notices.
"""

import ipaddress
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedlearn.core.clock import utc_now
from fedlearn.core.files import create_private, make_private_folder, write_private
from fedlearn.errors import DeploymentError, EnrolmentRefused, ProtocolError
from fedlearn.transport.identity import (
    SERVER_NAME,
    common_name,
    is_p256,
    load_certificate,
    private_pem,
)

_log = structlog.get_logger(__name__)

_CA_DAYS = 3652
_SERVER_DAYS = 365
_RENEW_BEFORE = timedelta(days=30)
_BACKDATED = timedelta(days=1)  # a client whose clock is slow must not refuse a fresh certificate
_ALWAYS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class _Server:
    """The server's certificate as it is served, and when it is due for another."""

    certificate_pem: bytes
    renew_after: datetime


class Authority:
    """The certificate authority in a folder; several threads may use it at once.

    Guarantees:
        Private keys lie in files that their owner alone reads, and are never printed.
        Coordinators that open one folder at the same time get the same authority.

    Attributes:
        ca_pem: The authority's own certificate, which goes into invitations.
        coordinator_key: What verifies what :attr:`signer` signed, 32 bytes; likewise.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ca_key: ec.EllipticCurvePrivateKey,
        ca: x509.Certificate,
        server_key: ec.EllipticCurvePrivateKey,
        signer: Ed25519PrivateKey,
        host_names: Sequence[str],
        now: Callable[[], str],
    ) -> None:
        """Take what :meth:`open` has loaded."""
        self._path = folder / "server.pem"
        self._ca_key, self._ca, self._server_key = ca_key, ca, server_key
        self._alternatives = _alternatives(host_names)
        self._now = now
        self._lock = threading.Lock()
        self._signer = signer
        self.coordinator_key = signer.public_key().public_bytes_raw()
        self._server: _Server | None = None
        self.ca_pem = ca.public_bytes(serialization.Encoding.PEM)

    def __repr__(self) -> str:
        return f"Authority({self._path.parent})"

    @classmethod
    def open(
        cls, folder: Path, *, host_names: Sequence[str], now: Callable[[], str] = utc_now
    ) -> "Authority":
        """Return the authority in ``folder``, made there if it is not.

        Args:
            folder: Made with mode 0700.
            host_names: DNS names and IP addresses that clients reach the coordinator by,
                besides ``fedlearn-coordinator`` and those of the loopback.
            now: The wall clock, ISO 8601 in UTC.

        Raises:
            DeploymentError: A file is damaged or cannot be written, the authority has
                expired, or a host name is not one.
        """
        make_private_folder(folder)
        ca_key = _key(folder / "ca.key")
        ca = _ca(folder / "ca.pem", ca_key, now=_time(now))
        authority = cls(
            folder,
            ca_key=ca_key,
            ca=ca,
            server_key=_key(folder / "server.key"),
            signer=_signer(folder / "coordinator.key"),
            host_names=host_names,
            now=now,
        )
        authority.server_certificate()
        return authority

    def server_certificate(self) -> tuple[bytes, bytes]:
        """Return the server's private key and its certificate chain, both PEM.

        The certificate is renewed 30 days before its end: ask before each handshake, and a
        coordinator that runs for years needs no restart. The last one ends with the authority.

        Raises:
            DeploymentError: It must be renewed, and the authority has expired.
        """
        with self._lock:
            if self._server is None:
                self._server = self._stored()
            if self._server is None or _time(self._now) >= self._server.renew_after:
                self._server = self._renewed()
            return private_pem(self._server_key), self._server.certificate_pem + self.ca_pem

    @property
    def signer(self) -> Ed25519PrivateKey:
        """The coordinator's identity: what signs the terms of secure aggregation."""
        return self._signer

    def sign(self, csr_pem: bytes, *, name: str, client_id: int, valid_days: int) -> bytes:
        """Return a certificate, PEM, for the key of a client's signing request.

        Of the request only the key counts: what else it asks for is ignored.

        Args:
            csr_pem: As the client sent it.
            name: The client's, of its invitation.
            client_id: Its number.
            valid_days: How long the certificate is good for; never beyond the authority's end.

        Raises:
            EnrolmentRefused: The request is not valid, or its key is not ECDSA P-256.
            DeploymentError: The authority has expired, or ``name`` is longer than 64 characters.
        """
        subject_key = _requested_key(csr_pem)
        number = x509.UniformResourceIdentifier(f"urn:fedlearn:client:{client_id}")
        return _certificate(
            issuer=self._ca,
            issuer_key=self._ca_key,
            subject=common_name(name),
            subject_key=subject_key,
            alternatives=x509.SubjectAlternativeName([number]),
            usage=ExtendedKeyUsageOID.CLIENT_AUTH,
            now=_time(self._now),
            valid_days=valid_days,
        )

    def _stored(self) -> _Server | None:
        """Return the certificate in the folder if it is for this key and these names."""
        try:
            content = self._path.read_bytes()
            certificate = load_certificate(content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(self._path, error) from error
        except ProtocolError:
            return None  # nothing is lost: another is made
        if certificate.public_key() != self._server_key.public_key():
            return None
        if not _is_issued_by(certificate, self._ca) or _names(certificate) != self._alternatives:
            return None
        return self._in_use(content, certificate)

    def _renewed(self) -> _Server:
        content = _certificate(
            issuer=self._ca,
            issuer_key=self._ca_key,
            subject=common_name(SERVER_NAME),
            subject_key=self._server_key.public_key(),
            alternatives=self._alternatives,
            usage=ExtendedKeyUsageOID.SERVER_AUTH,
            now=_time(self._now),
            valid_days=_SERVER_DAYS,
        )
        try:
            write_private(self._path, content)
        except DeploymentError as error:  # it serves from memory as well, and can be made again
            _log.warning("server_certificate_not_saved", reason=str(error))
        return self._in_use(content, load_certificate(content))

    def _in_use(self, content: bytes, certificate: x509.Certificate) -> _Server:
        """Return a certificate with its renewal; one that ends with the authority has none."""
        end = certificate.not_valid_after_utc
        if end < self._ca.not_valid_after_utc:
            return _Server(content, end - _RENEW_BEFORE)
        _log.warning(
            "authority_ends",
            at=end.isoformat(),
            remedy="before that, stop every coordinator, move the authority's folder away, start "
            "one, and invite every client anew",
        )
        return _Server(content, end)


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key in ``path``, made there if it is not; whoever comes second loads."""
    if not path.exists():
        create_private(path, private_pem(ec.generate_private_key(ec.SECP256R1())))
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_p256(key):
        raise _damaged(path)
    return key


def _signer(path: Path) -> Ed25519PrivateKey:
    """Return the key in ``path``, made there if it is not; whoever comes second loads."""
    if not path.exists():
        create_private(path, private_pem(Ed25519PrivateKey.generate()))
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _damaged(path)
    return key


def _ca(path: Path, key: ec.EllipticCurvePrivateKey, *, now: datetime) -> x509.Certificate:
    """Return the authority's certificate in ``path``, made there if it is not."""
    if not path.exists():
        create_private(path, _self_signed(key, now=now))
    try:
        certificate = load_certificate(_read(path))
    except ProtocolError as error:
        raise _damaged(path) from error
    if certificate.public_key() != key.public_key():
        raise DeploymentError(
            f"{path} is not the certificate of {path.with_name('ca.key').name} beside it; put "
            "both files of one copy back"
        )
    return certificate


def _self_signed(key: ec.EllipticCurvePrivateKey, *, now: datetime) -> bytes:
    name = common_name("fedlearn authority")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _certificate(
    *,
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    subject_key: ec.EllipticCurvePublicKey,
    alternatives: x509.SubjectAlternativeName,
    usage: x509.ObjectIdentifier,
    now: datetime,
    valid_days: int,
) -> bytes:
    """Return a certificate for one use, PEM; it does not outlive its issuer."""
    if now >= issuer.not_valid_after_utc:
        raise DeploymentError(
            f"the deployment's certificate authority ended at {issuer.not_valid_after_utc}; move "
            "its folder away, start the coordinator, and invite every client anew"
        )
    end = min(now + timedelta(days=valid_days), issuer.not_valid_after_utc)
    issuer_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder(
            issuer_name=issuer.subject, subject_name=subject, public_key=subject_key
        )
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(subject_key), critical=False)
        .add_extension(issuer_identifier, critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    """Return what a key may do: an authority's signs certificates, another's handshakes."""
    return x509.KeyUsage(
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


def _requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request that its owner holds."""
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


def _alternatives(host_names: Sequence[str]) -> x509.SubjectAlternativeName:
    names = dict.fromkeys((SERVER_NAME, *_ALWAYS, *host_names))
    return x509.SubjectAlternativeName([_general_name(name) for name in names])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass  # then it is a DNS name
    if not name or any(not (c.isascii() and (c.isalnum() or c in "-._*")) for c in name):
        raise DeploymentError(
            f"{name!r} is neither a DNS name nor an IP address; give the coordinator's host "
            "names without scheme and port"
        )
    return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None


def _is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Return whether ``ca``'s key signed ``certificate``, whatever their dates."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _time(now: Callable[[], str]) -> datetime:
    return datetime.fromisoformat(now())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DeploymentError:
    return DeploymentError(f"cannot read {path}: {error.strerror}; check its permissions")


def _damaged(path: Path) -> DeploymentError:
    return DeploymentError(
        f"{path} is damaged, or another file; put a copy back (without one: move the folder "
        "away, start the coordinator, and invite every client anew)"
    )
