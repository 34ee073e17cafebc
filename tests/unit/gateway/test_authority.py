"""The certificate authority of a deployment."""

import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from structlog.testing import capture_logs

from fedlearn.errors import DeploymentError, EnrolmentRefused
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import Identity, common_name, load_certificate
from fedlearn.identity.profiles import Profile, read_subject
from fedlearn.secagg.keys import verify

START = datetime.fromisoformat("2030-01-01T00:00:00Z")


def at(days: float) -> Callable[[], str]:
    return (START + timedelta(days=days)).isoformat


def open_authority(folder: Path, *host_names: str, days: float = 0) -> Authority:
    return Authority(folder, host_names=host_names, now=at(days))


def serve(authority: Authority) -> x509.Certificate:
    return load_certificate(authority.server_certificate()[1])


def test_the_folder_and_its_keys_are_their_owners_alone(tmp_path: Path) -> None:
    open_authority(tmp_path / "ca")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ca").iterdir()}
    names = ("ca.key", "ca.pem", "server.key", "server.pem", "coordinator.key", "signing.key")
    assert modes == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700


def test_opening_again_gives_the_same_authority_and_certificate(tmp_path: Path) -> None:
    first, second = open_authority(tmp_path), open_authority(tmp_path, days=300)
    assert first.ca_pem == second.ca_pem
    assert first.server_certificate() == second.server_certificate()
    assert "PRIVATE" not in repr(first)


def test_coordinators_that_start_at_once_share_one_authority(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def start(_: int) -> Authority:
        barrier.wait(timeout=60)
        return open_authority(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        authorities = list(pool.map(start, range(8)))
    assert len({authority.ca_pem for authority in authorities}) == 1
    assert len({authority.server_certificate()[0] for authority in authorities}) == 1
    assert len({authority.coordinator_key for authority in authorities}) == 1
    assert len(list(tmp_path.iterdir())) == 6  # no temporary files are left
    for authority in authorities:
        key, chain = authority.server_certificate()
        certificate = load_certificate(chain)
        private = serialization.load_pem_private_key(key, password=None)
        assert certificate.public_key() == private.public_key()
        certificate.verify_directly_issued_by(load_certificate(authority.ca_pem))


def test_the_coordinators_own_key_signs_what_clients_have_pinned(tmp_path: Path) -> None:
    """The key is the same after a restart. A file with another kind of key is refused."""
    authority = open_authority(tmp_path)
    signature = authority.signer.sign(b"terms")
    assert open_authority(tmp_path).coordinator_key == authority.coordinator_key
    assert verify(authority.coordinator_key, signature, b"terms")
    for content in (b"damaged", (tmp_path / "ca.key").read_bytes()):
        (tmp_path / "coordinator.key").write_bytes(content)
        with pytest.raises(DeploymentError, match=r"coordinator\.key is damaged"):
            open_authority(tmp_path)


def test_a_start_that_was_killed_half_way_is_finished_by_the_next(tmp_path: Path) -> None:
    key, _ = open_authority(tmp_path).server_certificate()
    for name in ("ca.pem", "server.pem"):
        (tmp_path / name).unlink()
        assert open_authority(tmp_path).server_certificate()[0] == key


def test_the_server_is_valid_for_every_name_it_is_reached_by(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, "fl.example.org", "10.1.2.3")
    store = Store([load_certificate(authority.ca_pem)])
    names = [x509.DNSName(n) for n in ("fedlearn-coordinator", "localhost", "fl.example.org")]
    found = serve(authority).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names) <= set(found)
    assert {str(ip) for ip in found.get_values_for_type(x509.IPAddress)} == {
        "127.0.0.1",
        "::1",
        "10.1.2.3",
    }
    for name in names:
        verifier = PolicyBuilder().store(store).time(START).build_server_verifier(name)
        verifier.verify(serve(authority), [])


@pytest.mark.parametrize(
    "name", ["", "https://fl.example.org", "host:7000", "[::1]", "hôtel", "a b"]
)
def test_what_is_no_host_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DeploymentError, match="neither a DNS name nor an IP address"):
        open_authority(tmp_path, name)


def test_the_server_certificate_lasts_a_year_and_is_renewed_in_its_last_month(
    tmp_path: Path,
) -> None:
    first = serve(open_authority(tmp_path))
    assert first.not_valid_after_utc == START + timedelta(days=365)
    assert serve(open_authority(tmp_path, days=334.9)) == first
    second = serve(open_authority(tmp_path, days=335.1))
    assert second.not_valid_after_utc == START + timedelta(days=335.1 + 365)
    assert second.public_key() == first.public_key()


def test_a_coordinator_that_runs_on_renews_without_a_restart(tmp_path: Path) -> None:
    days = [0.0]
    authority = Authority(tmp_path, host_names=(), now=lambda: str(START + timedelta(days=days[0])))
    first = serve(authority)
    days[0] = 334
    assert serve(authority) == first
    days[0] = 336
    second = serve(authority)
    assert second != first
    assert serve(authority) == second
    assert load_certificate((tmp_path / "server.pem").read_bytes()) == second


def test_the_last_certificate_of_an_authority_is_not_made_again_and_again(tmp_path: Path) -> None:
    """A new one would also end with the authority. The operator is warned in time."""
    open_authority(tmp_path)
    days = [3640.0]  # 12 days before the end
    with capture_logs() as logs:
        authority = Authority(
            tmp_path, host_names=(), now=lambda: str(START + timedelta(days=days[0]))
        )
        last = serve(authority)
        for later in (3641.0, 3651.9):
            days[0] = later
            assert serve(authority) == serve(open_authority(tmp_path, days=later)) == last
    ends = [each["at"] for each in logs if each["event"] == "authority_ends"]
    assert ends == [(START + timedelta(days=3652)).isoformat()] * 3  # once per authority opened
    days[0] = 3652.0
    with pytest.raises(DeploymentError, match="authority expired"):
        authority.server_certificate()
    with capture_logs() as logs:
        open_authority(tmp_path / "new")
    assert logs == []


def test_a_renewal_that_cannot_be_written_is_served_all_the_same(tmp_path: Path) -> None:
    open_authority(tmp_path)
    (tmp_path / "server.pem").unlink()
    days = [0.0]
    authority = Authority(tmp_path, host_names=(), now=lambda: str(START + timedelta(days=days[0])))
    (tmp_path / "server.pem").unlink()
    (tmp_path / "server.pem" / "in the way").mkdir(parents=True)
    days[0] = 340
    assert serve(authority).not_valid_after_utc == START + timedelta(days=340 + 365)


def test_new_host_names_or_a_damaged_certificate_make_another(tmp_path: Path) -> None:
    first = serve(open_authority(tmp_path))
    second = serve(open_authority(tmp_path, "fl.example.org"))
    assert second != first
    (tmp_path / "server.pem").write_bytes(b"damaged")
    assert serve(open_authority(tmp_path, "fl.example.org")) not in (first, second)


def test_a_new_server_key_gets_a_certificate_of_its_own(tmp_path: Path) -> None:
    first = serve(open_authority(tmp_path))
    (tmp_path / "server.key").unlink()
    second = serve(open_authority(tmp_path))
    assert second.public_key() != first.public_key()
    assert load_certificate((tmp_path / "server.pem").read_bytes()) == second


@pytest.mark.parametrize("name", ["ca.key", "ca.pem", "server.key"])
@pytest.mark.parametrize("length", [0, 50])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, length: int) -> None:
    open_authority(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DeploymentError, match=str(path)):
        open_authority(tmp_path)


def test_a_key_and_a_certificate_of_two_authorities_are_refused(tmp_path: Path) -> None:
    open_authority(tmp_path / "a")
    open_authority(tmp_path / "b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(DeploymentError, match=r"ca\.pem is not the certificate for ca\.key"):
        open_authority(tmp_path / "a")


def test_a_client_certificate_is_for_its_key_name_and_use_alone(tmp_path: Path) -> None:
    authority, identity = open_authority(tmp_path), Identity.create()
    request = identity.csr_pem("the name it would like")
    pem = authority.sign(request, name="hospital-a", client_id=7, valid_days=90)
    certificate = load_certificate(pem)
    assert identity.is_subject_of(pem)
    assert not Identity.create().is_subject_of(pem)
    assert certificate.subject.rfc4514_string() == "CN=hospital-a"
    assert certificate.not_valid_after_utc == START + timedelta(days=90)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    store = Store([load_certificate(authority.ca_pem)])
    verified = (
        PolicyBuilder().store(store).time(START).build_client_verifier().verify(certificate, [])
    )
    assert verified.subjects == [x509.UniformResourceIdentifier("urn:fedlearn:client:7")]
    again = authority.sign(request, name="hospital-a", client_id=7, valid_days=90)
    assert load_certificate(again).serial_number != certificate.serial_number


def test_an_extension_that_a_request_asks_for_is_not_granted(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder(common_name("a"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    pem = open_authority(tmp_path).sign(request, name="a", client_id=0, valid_days=1)
    extensions = load_certificate(pem).extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("urn:fedlearn:client:0")]


def test_a_request_of_another_curve_or_damaged_is_refused(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    builder = x509.CertificateSigningRequestBuilder(common_name("a"))
    good = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    der = bytearray(good.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # the end of the signature
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    keys = (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048))
    others = [
        builder.sign(k, hashes.SHA256()).public_bytes(serialization.Encoding.PEM) for k in keys
    ]
    for request, words in (
        (b"", "cannot be read"),
        (b"x" * 1000, "cannot be read"),
        (forged, "not signed by its own key"),
        *((other, "not ECDSA P-256") for other in others),
    ):
        with pytest.raises(EnrolmentRefused, match=words):
            authority.sign(request, name="a", client_id=0, valid_days=1)


def test_no_certificate_outlives_the_authority_and_an_ended_one_signs_nothing(
    tmp_path: Path,
) -> None:
    end = load_certificate(open_authority(tmp_path).ca_pem).not_valid_after_utc
    assert end == START + timedelta(days=3652)
    late = open_authority(tmp_path, days=3600)
    pem = late.sign(Identity.create().csr_pem("a"), name="a", client_id=0, valid_days=365)
    assert load_certificate(pem).not_valid_after_utc == end
    with pytest.raises(DeploymentError, match="authority expired"):
        open_authority(tmp_path, days=3653)


def test_each_certificate_says_what_its_peer_is(tmp_path: Path) -> None:
    """No name makes an operator look like a client."""
    authority = open_authority(tmp_path)
    csr_pem = Identity.create().csr_pem("7")
    client = authority.sign(csr_pem, name="7", client_id=7, valid_days=1)
    operator = authority.sign_operator(csr_pem, name="7", valid_days=1)
    assert read_subject(client) == (Profile.CLIENT, "7")
    assert read_subject(operator) == (Profile.OPERATOR, "7")
    for profile in (Profile.CLIENT_INVITATION, Profile.OPERATOR_INVITATION):
        invited, _ = authority.certify_invitation("ann", valid_s=60.0, profile=profile)
        assert read_subject(invited) == (profile, "")
    assert read_subject(authority.server_certificate()[1]) == (Profile.OTHER, "")
    assert read_subject(authority.ca_pem) == (Profile.OTHER, "")
    with pytest.raises(EnrolmentRefused):
        authority.sign_operator(b"no request", name="ann", valid_days=1)
