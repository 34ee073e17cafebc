"""The page of a coordinator is never open to others without sign-in and encryption."""

import pytest

from fedlearn.config import from_mapping
from fedlearn.config.dashboard import DashboardSection
from fedlearn.errors import ConfigError

SIGN_IN: dict[str, object] = {
    "address": "0.0.0.0:8443",
    "public_url": "https://fl.example.org:8443",
    "issuer": "https://login.example.org",
    "client_id": "page",
    "people": {"ann@example.org": "ann", "sub:7": "bob"},
}


def read(values: dict[str, object]) -> DashboardSection:
    config = from_mapping({"coordinator": {"dashboard": values}}, source="test")
    return config.coordinator.dashboard


def test_there_is_no_page_unless_one_is_configured() -> None:
    assert read({}).address is None


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "[::1]:8080", "localhost:0"])
def test_on_loopback_no_sign_in_is_needed(address: str) -> None:
    assert not read({"address": address}).has_sign_in


def test_elsewhere_users_sign_in() -> None:
    """Control of the refusals below."""
    assert read(SIGN_IN).has_sign_in


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"issuer": None}, "no sign-in; set dashboard.issuer"),
        ({"issuer": "http://login.example.org"}, "must begin with https"),
        ({"public_url": "http://fl.example.org"}, "must begin with https"),
        ({"public_url": "https://fl.example.org/page"}, "give a host name only for this page"),
        ({"public_url": None}, "needed to sign in"),
        ({"client_id": ""}, "needed to sign in"),
        ({"people": {}}, "needed to sign in"),
        ({"people": {"ann": "ann"}}, "people"),
        ({"people": {"ann@example.org": "a b"}}, "people"),
        ({"certificate": "page.pem"}, "must be given together"),
        ({"address": "0.0.0.0:99999"}, "ports end at 65535"),
        ({"address": None}, "no effect without dashboard.address"),
        ({"session_h": 0.0}, "session_h"),
    ],
    ids=str,
)
def test_what_would_be_open_or_has_no_effect_is_refused(
    change: dict[str, object], told: str
) -> None:
    values = {key: value for key, value in {**SIGN_IN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=told):
        read(values)


def test_people_without_an_issuer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no effect without dashboard\.issuer"):
        read({"address": "127.0.0.1:8080", "people": {"ann@example.org": "ann"}})


def test_a_page_has_an_address_of_its_own() -> None:
    with pytest.raises(ConfigError, match="another service listens"):
        from_mapping({"coordinator": {"dashboard": {"address": "127.0.0.1:9442"}}}, source="test")
