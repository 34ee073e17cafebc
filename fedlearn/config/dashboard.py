"""Configuration of the web page that a coordinator serves, and of who may open it."""

from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints

from fedlearn.config.section import PathText, Problem, Section, describe_as
from fedlearn.config.toml import quote
from fedlearn.core.ranges import Positive
from fedlearn.transport.addresses import ADDRESS_PATTERN, MAX_PORT, is_loopback

_URL = StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
_Url = Annotated[str, _URL, describe_as('"https://host[:port]"')]
_Identity = Annotated[
    str,
    StringConstraints(pattern=r"^(sub:\S+|[^\s@]+@[^\s@]+)$", max_length=255),
    describe_as('"name@example.org" or "sub:SUBJECT"'),
]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

#: Keys without which nobody can sign in.
_FOR_SIGN_IN: Final = ("public_url", "client_id", "people")


class DashboardSection(Section):
    """The page of the coordinator. Anonymous visitors see it on loopback only."""

    address: (
        Annotated[str, StringConstraints(pattern=ADDRESS_PATTERN), describe_as('"host:port"')]
        | None
    ) = Field(
        None,
        description="Address at which a separate process serves the dashboard; not set: none. "
        "Other hosts than loopback need dashboard.issuer.",
    )
    certificate: PathText | None = Field(
        None,
        description="File of the page's certificate chain, PEM; without it, plain HTTP on "
        "loopback, and the coordinator's own certificate elsewhere.",
    )
    key: PathText | None = Field(None, description="File of that certificate's private key, PEM.")
    public_url: _Url | None = Field(
        None,
        description="Address of the page in the browsers of its users; the sign-in returns there, "
        "and no other Host is answered.",
    )
    issuer: _Url | None = Field(
        None,
        description="Issuer of the OpenID Connect provider that users sign in with; not set: no "
        "sign-in, on loopback only.",
    )
    client_id: str = Field("", description="Client id of the page at the provider.")
    client_secret_file: PathText | None = Field(
        None, description="File of the client secret; without it, the page is a public client."
    )
    session_h: Positive = Field(
        8.0, description="Hours after which a user must sign in again, > 0."
    )
    people: dict[_Identity, _Name] = Field(
        {},
        description='Operator by verified email, or by subject as "sub:SUBJECT"; others are '
        "refused. What an operator may see follows from its roles.",
    )

    @property
    def has_sign_in(self) -> bool:
        """Whether users must sign in."""
        return self.issuer is not None

    def problems(self) -> Iterator[Problem]:
        """Refuse a page that others could open without sign-in or encryption."""
        if self.address is None:
            for name in self._find_given():
                yield Problem((name,), "has no effect without dashboard.address; set both")
            return
        if int(self.address.rpartition(":")[2]) > MAX_PORT:
            text = f"is {quote(self.address)}, but ports end at {MAX_PORT}; take a smaller one"
            yield Problem(("address",), text)
        if not is_loopback(self.address) and not self.has_sign_in:
            text = (
                f"is {quote(self.address)}, which other machines can reach, and there is no "
                "sign-in; set dashboard.issuer, or take 127.0.0.1"
            )
            yield Problem(("address", "issuer"), text)
        if (self.certificate is None) != (self.key is None):
            yield Problem(("certificate", "key"), "must be given together, or neither")
        yield from self._find_sign_in_problems()

    def _find_given(self) -> list[str]:
        """Return the keys with another value than their default, which a stored tree repeats."""
        fields = type(self).model_fields.items()
        return [name for name, info in fields if getattr(self, name) != info.default]

    def _find_sign_in_problems(self) -> Iterator[Problem]:
        if not self.has_sign_in:
            for name in self._find_given():
                if name in ("client_id", "client_secret_file", "people"):
                    yield Problem((name, "issuer"), "has no effect without dashboard.issuer")
            return
        for name in _FOR_SIGN_IN:
            if not getattr(self, name):
                yield Problem((name, "issuer"), "is needed to sign in; set it")
        for name in ("issuer", "public_url"):
            url = urlsplit(getattr(self, name) or "https://")
            if url.scheme != "https" and not is_loopback(
                f"{url.netloc}:0" if url.port is None else url.netloc
            ):
                text = f"is {quote(url.geturl())}; it must begin with https:// except on loopback"
                yield Problem((name,), text)
        if self.public_url and urlsplit(self.public_url).path not in ("", "/"):
            yield Problem(("public_url",), "has a path; give a host name only for this page")
