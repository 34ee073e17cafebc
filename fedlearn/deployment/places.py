"""Locate a deployment's parts from its configuration and this machine's environment."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlearn.config.addresses import Addresses, resolve_addresses
from fedlearn.config.serving import HasService, ServiceConfig
from fedlearn.errors import DeploymentError
from fedlearn.experiment.site import folder_of, keys_folder_of, open_database
from fedlearn.gateway.authority import Authority
from fedlearn.store.runs import Database

#: Name of a deployed run if the configuration does not set one.
DEFAULT_NAME = "federation"


def require_coordinator_system() -> None:
    """Refuse to coordinate on an operating system that is not supported.

    Raises:
        DeploymentError: The system is neither Linux nor macOS.
    """
    if sys.platform not in ("linux", "darwin"):
        raise DeploymentError(
            f"a coordinator runs only on Linux and macOS, but this is {sys.platform}; start it "
            "there, or on Windows in WSL 2 or a container (clients and simulations run here)"
        )


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths and addresses of a deployment's parts."""

    config: HasService
    addresses: Addresses

    @classmethod
    def of(
        cls, config: HasService, *, environ: Mapping[str, str], data_dir: Path | None = None
    ) -> "Places":
        """Resolve the places of ``config``: see :func:`~fedlearn.config.resolve_addresses`."""
        addresses = resolve_addresses(config, environ=environ, data_dir=data_dir)
        return cls(config=config, addresses=addresses)

    @property
    def has_many_runs(self) -> bool:
        """Whether it is a service of many runs, and not one run."""
        return isinstance(self.config, ServiceConfig)

    @property
    def start_command(self) -> str:
        """The command that starts its coordinator."""
        return "fedlearn serve" if self.has_many_runs else "fedlearn coordinator"

    @property
    def run_name(self) -> str:
        """Name of the deployed run, or of the service of many runs."""
        return self.config.name or DEFAULT_NAME

    @property
    def folder(self) -> Path:
        """Folder of the coordinator's keys and of the upload store."""
        return folder_of(self.config.coordinator.folder, runs_dir=self.addresses.runs_dir)

    @property
    def keys_folder(self) -> Path:
        """Folder of the certificate authority and of the signing key."""
        return keys_folder_of(self.folder)

    def open_database(self) -> Database:
        """Open the database: see :func:`~fedlearn.experiment.site.open_database`."""
        return open_database(self.addresses)

    def open_authority(self) -> Authority:
        """Open the deployment's certificate authority, and create it if there is none.

        Raises:
            DeploymentError: Its files are damaged or cannot be written.
        """
        section = self.config.coordinator
        named = (*section.public_addresses, *section.public_enrolment_addresses)
        listening = (section.address, section.enrolment_address or section.address)
        hosts = dict.fromkeys(host_of(address) for address in (*named, *listening))
        return Authority(self.keys_folder, host_names=tuple(hosts))


def upload_store_path(folder: Path, run_id: str) -> Path:
    """Return the folder of a run's files in transit to and from clients."""
    # The folder's name is older than the word in the code: deployments have such folders on disk.
    return folder / "spool" / run_id


def host_of(address: str) -> str:
    """Return the host of ``host:port``.

    Example:
        >>> host_of("fl.example.org:9440"), host_of("[::1]:9440")
        ('fl.example.org', '::1')
    """
    return address.rpartition(":")[0].strip("[]")
