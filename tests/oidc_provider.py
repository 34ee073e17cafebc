"""A small OpenID Connect provider, which can be told to misbehave.

    python tests/oidc_provider.py FOLDER ADDRESS

It consents at once. Before each token it reads ``FOLDER/behavior.json``: ``claims`` that it changes
(``null`` leaves one out), and ``sign``, the way it signs: ``RS256``, ``none``, ``HS256`` with the
client secret, or ``stranger`` with a key that it does not publish.
"""

import base64
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import uvicorn
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from fedlearn.core.clock import SystemClock
from fedlearn.core.secret_bytes import SecretBytes

CLIENT_ID, CLIENT_SECRET = "page", "a secret of the client, which is long enough"
EMAIL = "ann@example.org"


class Provider:
    """The provider; ``codes`` are authorization requests that were consented to, by code."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.issuer = folder, f"http://{address}"
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.stranger = RSAKey.generate_key(2048, {"kid": "one"})
        self.codes: dict[str, dict[str, str]] = {}

    def metadata(self, _: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            }
        )

    def keys(self, _: Request) -> Response:
        return JSONResponse({"keys": [self.key.as_dict(private=False)]})

    def authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        code = SecretBytes.generate(16).reveal().hex()
        self.codes[code] = asked
        back = urlencode({"code": code, "state": asked["state"], "iss": self.issuer})
        return RedirectResponse(f"{asked['redirect_uri']}?{back}", 302)

    async def token(self, request: Request) -> Response:
        form = dict(await _form(request))
        asked = self.codes.pop(form.get("code", ""), None)
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if request.headers.get("authorization") != f"Basic {basic}" or asked is None:
            return JSONResponse({"error": "invalid_grant"}, 400)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        is_same = form.get("redirect_uri") == asked["redirect_uri"]
        if asked.get("code_challenge") != challenge or not is_same:
            return JSONResponse({"error": "invalid_grant"}, 400)
        body = {"access_token": "x", "token_type": "Bearer", "id_token": self._sign(asked)}
        return JSONResponse(body)

    def _sign(self, asked: dict[str, str]) -> str:
        behavior = json.loads((self.folder / "behavior.json").read_text())
        now = int(SystemClock().unix_s())
        claims: dict[str, Any] = {  # Any: JSON
            "iss": self.issuer,
            "aud": CLIENT_ID,
            "sub": "7",
            "iat": now,
            "exp": now + 60,
            "nonce": asked["nonce"],
            "email": EMAIL,
            "email_verified": True,
            **behavior.get("claims", {}),
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        match behavior.get("sign", "RS256"):
            case "none":
                parts = [{"alg": "none", "typ": "JWT"}, claims]
                coded = [base64.urlsafe_b64encode(json.dumps(each).encode()) for each in parts]
                return ".".join(each.decode().rstrip("=") for each in coded) + "."
            case "HS256":
                header = {"alg": "HS256", "kid": "one"}
                return jwt.encode(header, claims, OctKey.import_key(CLIENT_SECRET))
            case "stranger":
                return jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.stranger)
        return jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.key)


async def _form(request: Request) -> list[tuple[str, str]]:
    return parse_qsl((await request.body()).decode())


def main(folder: str, address: str) -> None:
    """Serve until the process is ended."""
    logging.disable()
    provider = Provider(Path(folder), address)
    routes = [
        Route("/.well-known/openid-configuration", provider.metadata),
        Route("/keys", provider.keys),
        Route("/authorize", provider.authorize),
        Route("/token", provider.token, methods=["POST"]),
    ]
    host, _, port = address.rpartition(":")
    uvicorn.run(Starlette(routes=routes), host=host, port=int(port), log_level="critical")


if __name__ == "__main__":
    main(*sys.argv[1:])
