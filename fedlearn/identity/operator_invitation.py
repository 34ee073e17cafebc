"""The file that lets one operator join."""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen
from pydantic import TypeAdapter

from fedlearn.identity.documents import read_document
from fedlearn.identity.identity import Ascii, Base64

_FORMAT = 1
_KEY = "fedlearn_operator_invitation"


@dataclass(frozen=True, kw_only=True)
class OperatorInvitation:
    """The file that an admin gives to one operator so that it can join.

    Attributes:
        name: Name of the operator.
        addresses: Addresses of the coordinator, ``host:port``; several if it is highly available.
        ca_pem: Certificate of the deployment's own authority, the only one that is trusted.
        token: One-time token. Never printed.
        expires_utc: When the token expires, ISO 8601.
        certificate_pem: Temporary certificate for the connection over which the operator joins; it
            authorizes nothing else.
        tls_key_pem: Private key of that certificate. Never printed.
    """

    name: str
    addresses: Annotated[tuple[str, ...], MinLen(1)]
    ca_pem: Ascii = field(repr=False)
    token: Base64 = field(repr=False)
    expires_utc: str
    certificate_pem: Ascii = field(repr=False)
    tls_key_pem: Ascii = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> "OperatorInvitation":
        """Load the invitation in the file ``path``.

        Raises:
            DeploymentError: The file is missing, unreadable, damaged, of a later version, or
                another file, such as a client's invitation.
        """
        return read_document(
            path,
            _INVITATION,
            key=_KEY,
            versions=(_FORMAT,),
            noun="an invitation of an operator",
            command="fedlearn operator invite NAME",
            is_secret=True,
        )

    def to_json(self) -> str:
        """Format it as the file that an admin hands out."""
        values = {
            _KEY: _FORMAT,
            "name": self.name,
            "addresses": self.addresses,
            "ca_pem": self.ca_pem.decode("ascii"),
            "token": base64.urlsafe_b64encode(self.token).decode("ascii"),
            "expires_utc": self.expires_utc,
            "certificate_pem": self.certificate_pem.decode("ascii"),
            "tls_key_pem": self.tls_key_pem.decode("ascii"),
        }
        return json.dumps(values, indent=2) + "\n"


_INVITATION = TypeAdapter(OperatorInvitation)
