"""The wire reference is enough to join: a client that follows only its rules joins a real server.

The client here uses nothing of fedlearn but the protobuf definition.
"""

import base64
import json
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from fedlearn.testing.local_gateway import LocalGateway
from fedlearn.transport import wire_pb2

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "wire.md"
TLS_NAME = "fedlearn-coordinator"


@dataclass(frozen=True)
class Read:
    """An invitation as the reference page describes it."""

    name: str
    addresses: list[str]
    ca_pem: str
    token: bytes
    expires: datetime
    coordinator_key: Ed25519PublicKey | None
    certificate_pem: str
    tls_key_pem: str


def read(content: bytes) -> Read:
    """Parse an invitation file according to the page's table."""
    values = json.loads(content)
    assert values["fedlearn_invitation"] == 2
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", values["name"])
    assert values["addresses"]
    assert values["enrolment_addresses"] == []
    address = r"(\[[0-9a-f:.]+\]|[^:]+):\d+"
    assert all(re.fullmatch(address, each) for each in values["addresses"])
    key = values["coordinator_key"]
    assert re.fullmatch(r"([0-9a-f]{64})?", key)
    return Read(
        name=values["name"],
        addresses=values["addresses"],
        ca_pem=values["ca_pem"],
        token=base64.b64decode(values["token"], altchars=b"-_", validate=True),
        expires=datetime.strptime(values["expires_utc"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC),
        coordinator_key=Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) if key else None,
        certificate_pem=values["certificate_pem"],
        tls_key_pem=values["tls_key_pem"],
    )


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[LocalGateway]:
    with LocalGateway(tmp_path / "gateway") as gateway:
        yield gateway


@pytest.fixture
def content(gateway: LocalGateway, tmp_path: Path) -> bytes:
    """The invitation file that an operator hands over."""
    path = tmp_path / "clinic-a.invitation"
    gateway.create_invitation("clinic-a").save(path)
    return path.read_bytes()


def test_the_page_has_the_keys_of_an_invitation_and_no_others(content: bytes) -> None:
    """The keys are listed in the table of the page's section."""
    section = PAGE.read_text().partition("## Invitation\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(json.loads(content))
    assert f"`{TLS_NAME}`" in section


def test_a_client_joins_by_the_page_alone(content: bytes) -> None:
    """It gets a certificate for its own key, signed by the invitation's authority."""
    given = read(content)
    assert given.expires > datetime.now(UTC)
    assert given.coordinator_key is not None
    key, identity = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, given.name)])
    builder = x509.CertificateSigningRequestBuilder(subject)
    csr_pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    parts = (b"fedlearn.v1 enrolment", given.token, csr_pem)
    signed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    request = wire_pb2.EnrolRequest(
        name=given.name,
        token=given.token,
        csr_pem=csr_pem,
        identity_key=identity.public_key().public_bytes_raw(),
        identity_signature=identity.sign(signed),
    )
    tls = grpc.ssl_channel_credentials(
        given.ca_pem.encode(), given.tls_key_pem.encode(), given.certificate_pem.encode()
    )
    options = (("grpc.ssl_target_name_override", TLS_NAME),)
    with grpc.secure_channel(given.addresses[0], tls, options) as channel:
        enrol: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/fedlearn.v1.Enrolment/Enrol"
        )
        reply = wire_pb2.EnrolReply.FromString(enrol(request.SerializeToString(), timeout=60.0))
    certificate = x509.load_pem_x509_certificate(reply.certificate_pem)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(given.ca_pem.encode()))


@pytest.mark.parametrize(("name", "is_trusted"), [(TLS_NAME, True), ("example.org", False)])
def test_the_gateway_shows_a_certificate_for_the_name_of_the_page(
    content: bytes, name: str, *, is_trusted: bool
) -> None:
    """Checked by Python's ssl module. Control: another name is refused."""
    given = read(content)
    context = ssl.create_default_context(cadata=given.ca_pem)
    context.set_alpn_protocols(["h2"])
    for address in given.addresses:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60.0) as stream:
            if is_trusted:
                with context.wrap_socket(stream, server_hostname=name) as secure:
                    assert secure.selected_alpn_protocol() == "h2"
            else:
                with pytest.raises(ssl.SSLCertVerificationError, match=r"example\.org"):
                    context.wrap_socket(stream, server_hostname=name)
