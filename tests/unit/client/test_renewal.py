"""When a certificate is renewed, and when the user is warned that it was not."""

from pathlib import Path

import pytest

from fedlearn.client.keyring import Enrolment
from fedlearn.core.messages import ClientId
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import Identity, Invitation, expires_unix_s, validity_unix_s
from fedlearn.identity.lineage import Lineage

DAY_S = 86_400.0


def enrolment(certificate_pem: bytes, identity: Identity | None = None) -> Enrolment:
    identity = identity or Identity.create()
    return Enrolment(
        identity=identity,
        client_id=ClientId(3),
        certificate_pem=certificate_pem,
        invitation=Invitation(
            name="clinic-a",
            addresses=("127.0.0.1:1",),
            enrolment_addresses=("127.0.0.1:2",),
            ca_pem=b"authority",
            token=b"",
            expires_utc="2030-01-01T00:00:00Z",
        ),
        redeemed=(),
        lineage=Lineage(identity.public_key),
    )


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Enrolment:
    """A client with a certificate valid for one year."""
    folder: Path = tmp_path_factory.mktemp("authority")
    authority, identity = Authority(folder, host_names=()), Identity.create()
    csr_pem = identity.csr_pem("clinic-a")
    return enrolment(
        authority.sign(csr_pem, name="clinic-a", client_id=3, valid_days=365), identity
    )


@pytest.mark.parametrize("valid_days", [1, 30, 365])
def test_a_certificate_is_renewed_in_the_last_third_of_its_time(
    tmp_path: Path, valid_days: int
) -> None:
    """For any validity. An expired certificate cannot be used to renew it."""
    authority, identity = Authority(tmp_path, host_names=()), Identity.create()
    csr_pem = identity.csr_pem("clinic-a")
    found = enrolment(
        authority.sign(csr_pem, name="clinic-a", client_id=3, valid_days=valid_days), identity
    )
    begin_unix_s, end_unix_s = validity_unix_s(found.certificate_pem)
    span_s = end_unix_s - begin_unix_s
    at = {share: end_unix_s - share * span_s for share in (0.9, 0.34, 0.33, 0.01, 0.0)}
    due = {share: found.should_renew(now_unix_s=now) for share, now in at.items()}
    assert due == {0.9: False, 0.34: False, 0.33: True, 0.01: True, 0.0: False}
    advised = {
        share: found.describe_renewal(now_unix_s=now) is not None for share, now in at.items()
    }
    assert advised == {0.9: False, 0.34: False, 0.33: False, 0.01: True, 0.0: True}
    assert not enrolment(b"damaged").should_renew(now_unix_s=0.0)


@pytest.mark.parametrize(
    ("days_left", "words"), [(31.0, None), (30.0, "ends at 20"), (0.0, "ended at 20")]
)
def test_the_advice_comes_a_month_before_the_end_and_stays(
    certified: Enrolment, days_left: float, words: str | None
) -> None:
    """The advice names the client, the time, and both commands."""
    end_unix_s = expires_unix_s(certified.certificate_pem)
    advice = certified.describe_renewal(now_unix_s=end_unix_s - days_left * DAY_S)
    if words is None:
        assert advice is None
    else:
        assert advice is not None
        for each in (words, "fedlearn invite clinic-a", "fedlearn join"):
            assert each in advice


def test_a_damaged_certificate_has_the_same_remedy() -> None:
    """A client without TLS has no certificate to renew."""
    advice = enrolment(b"certificate").describe_renewal(now_unix_s=0.0)
    assert advice is not None
    assert advice.startswith("the certificate of clinic-a is damaged; ask")
    assert enrolment(b"").describe_renewal(now_unix_s=1e12) is None
