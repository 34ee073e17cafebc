"""The OpenID Connect provider: where users sign in, and whom its tokens name.

The flow is the authorization code flow with PKCE. Only a token of this issuer, for this client, of
this sign-in, signed by a key that the issuer publishes, and not expired, is believed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.requests_client import OAuth2Session
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from requests import RequestException

from fedlearn.config.dashboard import DashboardSection
from fedlearn.core.clock import RealClock
from fedlearn.core.files import explain_disk_errors
from fedlearn.dashboard.remembered import Remembered
from fedlearn.dashboard.sessions import BegunSignIn
from fedlearn.errors import ConfigError, FedlearnError

#: Signatures with public keys only: ``none``, and a shared secret, are refused.
_ALGORITHMS: Final = (
    "RS256",
    "PS256",
    "ES256",
    "ES384",
    "RS384",
    "RS512",
    "PS384",
    "PS512",
    "EdDSA",
)
_SCOPE: Final = "openid email"
_TIMEOUT_S: Final = 10.0
_METADATA_S, _KEYS_S = 600.0, 60.0
#: By which clocks may differ.
_LEEWAY_S: Final = 60
_PATH = "/.well-known/openid-configuration"


class SignInRefused(FedlearnError):
    """A sign-in failed; the message may be shown to the user."""


class Provider:
    """The provider of a section with sign-in.

    Raises:
        ConfigError: The client secret cannot be read.
    """

    def __init__(self, section: DashboardSection, clock: RealClock) -> None:
        assert section.issuer is not None
        self._issuer, self._section, self._clock = section.issuer, section, clock
        self._secret = _read_secret(section)
        self._metadata = Remembered(self._load_metadata, clock=clock, for_s=_METADATA_S)
        self._keys = Remembered(self._load_keys, clock=clock, for_s=_KEYS_S)

    def build_url(self, begun: BegunSignIn) -> str:
        """Return the address at the provider where a sign-in continues.

        Raises:
            SignInRefused: The provider cannot be reached or is not the one that was configured.
        """
        url, _ = self._session().create_authorization_url(
            self._metadata()["authorization_endpoint"],
            state=begun.state,
            nonce=begun.nonce,
            code_verifier=begun.verifier,
        )
        return str(url)

    def read_claims(self, code: str, begun: BegunSignIn) -> Mapping[str, Any]:  # Any: JSON
        """Exchange the code of a sign-in for a token, check it, and return its claims.

        Raises:
            SignInRefused: The provider refuses the code, or the token is not valid.
        """
        try:
            token = self._session().fetch_token(
                self._metadata()["token_endpoint"],
                grant_type="authorization_code",
                code=code,
                code_verifier=begun.verifier,
                timeout=_TIMEOUT_S,
                allow_redirects=False,
            )
        except (OAuthError, RequestException, ValueError) as error:
            raise SignInRefused("the provider did not accept the sign-in; try again") from error
        return self._check(str(token.get("id_token", "")), nonce=begun.nonce)

    def _check(self, token: str, *, nonce: str) -> Mapping[str, Any]:  # Any: JSON
        client_id = self._section.client_id
        required = jwt.JWTClaimsRegistry(
            now=lambda: int(self._clock.unix_s()),
            leeway=_LEEWAY_S,
            iss={"essential": True, "value": self._issuer},
            aud={"essential": True, "value": client_id},
            nonce={"essential": True, "value": nonce},
            azp={"essential": False, "value": client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
        )
        try:
            claims = jwt.decode(token, self._keys(), algorithms=list(_ALGORITHMS)).claims
            required.validate(claims)
        except (JoseError, ValueError) as error:
            raise SignInRefused("the provider's token is not valid; try again") from error
        return claims

    def _session(self) -> OAuth2Session:
        public_url = self._section.public_url
        assert public_url is not None  # the configuration makes sure
        return OAuth2Session(
            self._section.client_id,
            self._secret,
            scope=_SCOPE,
            redirect_uri=f"{public_url.rstrip('/')}/sign-in/callback",
            code_challenge_method="S256",
        )

    def _load_metadata(self) -> Mapping[str, str]:
        found = self._get(f"{self._issuer.rstrip('/')}{_PATH}")
        if found.get("issuer") != self._issuer:
            raise SignInRefused(f"the provider says that it is {found.get('issuer')!r}")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            url = found.get(name)
            # Over plain HTTP, anyone on the way could give other keys.
            if not isinstance(url, str) or urlsplit(url).scheme != urlsplit(self._issuer).scheme:
                raise SignInRefused(f"the provider's {name} is not usable: {url!r}")
        return found

    def _load_keys(self) -> KeySet:
        keys: Any = self._get(self._metadata()["jwks_uri"])  # Any: it is checked as it is imported
        try:
            return KeySet.import_key_set(keys)
        except (JoseError, ValueError, KeyError) as error:
            raise SignInRefused("the provider's keys cannot be read") from error

    def _get(self, url: str) -> Mapping[str, Any]:  # Any: JSON
        try:
            with OAuth2Session() as session:
                answer = session.request(
                    "GET", url, withhold_token=True, timeout=_TIMEOUT_S, allow_redirects=False
                )
                answer.raise_for_status()
                found = answer.json()
        except (RequestException, ValueError) as error:
            raise SignInRefused("the provider cannot be reached; try again later") from error
        if not isinstance(found, Mapping):
            raise SignInRefused("the provider's answer is not JSON")
        return found


def find_operator(claims: Mapping[str, Any], people: Mapping[str, str]) -> str | None:  # Any: JSON
    """Return the operator that a token's claims name; ``None`` if nobody knows them.

    An email counts only if the provider has verified it: otherwise anyone could claim it.

    Example:
        >>> people = {"ann@example.org": "ann", "sub:7": "bob"}
        >>> find_operator({"sub": "1", "email": "Ann@example.org", "email_verified": True}, people)
        'ann'
        >>> find_operator({"sub": "1", "email": "ann@example.org"}, people) is None
        True
        >>> find_operator({"sub": "7"}, people)
        'bob'
    """
    by_subject = people.get(f"sub:{claims['sub']}")
    if by_subject is not None:
        return by_subject
    email = claims.get("email")
    if claims.get("email_verified") is not True or not isinstance(email, str):
        return None
    return {key.casefold(): name for key, name in people.items()}.get(email.casefold())


def _read_secret(section: DashboardSection) -> str | None:
    if section.client_secret_file is None:
        return None
    path = Path(section.client_secret_file)
    with explain_disk_errors(path, raises=ConfigError, doing="read"):
        return path.read_text().strip()
