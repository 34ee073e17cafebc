"""A certificate is spoken of before it ends."""

from pathlib import Path

import pytest

from fedlearn.client.keyring import Enrolment
from fedlearn.core.messages import ClientId
from fedlearn.door.authority import Authority
from fedlearn.identity.identity import Identity, Invitation, expires_unix_s
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
    """A client with a certificate of a year."""
    folder: Path = tmp_path_factory.mktemp("authority")
    authority, identity = Authority(folder, host_names=()), Identity.create()
    csr_pem = identity.csr_pem("clinic-a")
    return enrolment(
        authority.sign(csr_pem, name="clinic-a", client_id=3, valid_days=365), identity
    )


@pytest.mark.parametrize(
    ("days_left", "words"), [(31.0, None), (30.0, "ends at 20"), (0.0, "ended at 20")]
)
def test_the_advice_comes_a_month_before_the_end_and_stays(
    certified: Enrolment, days_left: float, words: str | None
) -> None:
    """It names the client, the time, and both commands."""
    end_unix_s = expires_unix_s(certified.certificate_pem)
    advice = certified.renewal_advice(now_unix_s=end_unix_s - days_left * DAY_S)
    if words is None:
        assert advice is None
    else:
        assert advice is not None
        for each in (words, "fedlearn invite clinic-a", "fedlearn join"):
            assert each in advice


def test_a_damaged_certificate_has_the_same_remedy() -> None:
    """And a client without TLS has none to renew."""
    advice = enrolment(b"certificate").renewal_advice(now_unix_s=0.0)
    assert advice is not None
    assert advice.startswith("the certificate of clinic-a is damaged; ask")
    assert enrolment(b"").renewal_advice(now_unix_s=1e12) is None
