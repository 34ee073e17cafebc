"""An operator's own file, ``operator.toml``: where the coordinator is, and the operator's keys.

The private key is made on the operator's machine and stays in this file.
"""

from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import Field

from fedlearn.config.problems import Sources, validate
from fedlearn.config.reading import read
from fedlearn.config.section import Section
from fedlearn.config.service import AddressList
from fedlearn.config.toml import toml_lines
from fedlearn.core.clock import utc
from fedlearn.core.files import make_private_folder, write_private
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Identity, validity_unix_s
from fedlearn.identity.operator_invitation import OperatorInvitation

_log = structlog.get_logger(__name__)

#: Environment variable that names an operator's file.
VARIABLE = "FEDLEARN_OPERATOR"


class OperatorFile(Section):
    """What an operator needs to give commands; all but the addresses is written by ``join``."""

    name: str = Field(description="Name of the operator.")
    coordinator: AddressList = Field(
        min_length=1, description="Addresses of the coordinator, tried in turn."
    )
    authority: str = Field(description="Certificate of the deployment's authority, PEM.")
    certificate: str = Field("", description="The operator's certificate, PEM.")
    identity: str = Field(repr=False, description="The operator's private keys, PEM.")

    @classmethod
    def begin(cls, invitation: OperatorInvitation) -> "OperatorFile":
        """Make the keys of an operator that has not joined yet."""
        return cls(
            name=invitation.name,
            coordinator=invitation.addresses,
            authority=invitation.ca_pem.decode("ascii"),
            identity=Identity.create().pem.decode("ascii"),
        )

    def with_new_keys(self) -> "OperatorFile":
        """Make other keys for the operator, which have no certificate yet."""
        identity = Identity.create().pem.decode("ascii")
        return self.model_copy(update={"identity": identity, "certificate": ""})

    @classmethod
    def load(cls, path: Path) -> "OperatorFile":
        """Load the file.

        Raises:
            ConfigError: It is missing, unreadable or invalid.
        """
        raw, toml = read(path)
        return validate(cls, raw, sources=Sources(str(path), toml))

    def save(self, path: Path) -> None:
        """Write the file, mode 0600, in a folder that is created with mode 0700.

        Raises:
            DeploymentError: It cannot be written.
        """
        make_private_folder(path.parent)
        warning = (
            "# Anyone with this file can give commands in your name. If it was copied, have an\n"
            f"# admin revoke it: fedlearn operator revoke {self.name}\n"
        )
        text = warning + "\n".join(toml_lines(self.model_dump(mode="json"), ())) + "\n"
        write_private(path, text.encode())

    def require_valid(self, path: Path, *, now_unix_s: float) -> None:
        """Check that the certificate has not expired; warn in the last third of its time.

        Args:
            path: Where the file is, for the message.
            now_unix_s: The time, in seconds since 1970.

        Raises:
            DeploymentError: It has expired.
            ProtocolError: It is damaged.
        """
        begin_unix_s, end_unix_s = validity_unix_s(self.certificate.encode("ascii"))
        if now_unix_s >= end_unix_s:
            raise DeploymentError(
                f"{path}: the certificate of {self.name} expired at {utc(end_unix_s)}, so it "
                "cannot be renewed; ask an admin for another invitation (`fedlearn operator invite "
                f"{self.name}`), and join with it: `fedlearn operator join FILE --output {path}`"
            )
        if end_unix_s - now_unix_s < (end_unix_s - begin_unix_s) / 3:
            remedy = f"fedlearn operator renew --as {path}"
            _log.warning("certificate_ends", until=utc(end_unix_s), remedy=remedy)

    def load_identity(self, path: Path) -> Identity:
        """Return the private keys; ``path`` is for the error message.

        Raises:
            DeploymentError: They are damaged.
        """
        try:
            return Identity.from_pem(self.identity.encode("ascii"))
        except ValueError as error:
            raise DeploymentError(
                f"{path}: identity is damaged; restore a copy, or join with a new invitation"
            ) from error


def default_path(environ: Mapping[str, str]) -> Path:
    """Return where an operator's file is by default, by the XDG convention.

    Example:
        >>> default_path({"XDG_CONFIG_HOME": "/home/ann/.config"})
        PosixPath('/home/ann/.config/fedlearn/operator.toml')
    """
    base = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "fedlearn" / "operator.toml"
