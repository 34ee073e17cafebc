"""The keys that sign checkpoints of the audit log, releases of models, and bundles.

The coordinator's is an Ed25519 key in the file ``signing.key``, next to those of the certificate
authority. It is not the key that clients pin: what is signed here is for people, and outlives a
deployment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlearn.core.canonical_json import label_canonical
from fedlearn.core.files import (
    create_private,
    explain_disk_errors,
    make_private_folder,
    move_into_place,
    sync_folder,
)
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import encode_private_key
from fedlearn.identity.key_files import load_or_create_key
from fedlearn.secagg.keys import verify

_FILE, _NEXT_FILE = "signing.key", "signing.key.next"
_WITHOUT_COPY = "move it away; what it signed can then no longer be checked"


class SigningKey:
    """The key in a folder; several processes that open it first at once get the same one.

    Args:
        folder: Created with mode 0700; the key's file has mode 0600.
        name: Name of the file.

    Attributes:
        public_key: Verifies the signatures, 32 bytes.

    Raises:
        DeploymentError: The file is damaged or cannot be written.
    """

    def __init__(self, folder: Path, *, name: str = _FILE) -> None:
        make_private_folder(folder)
        self._key = load_or_create_key(
            folder / name, Ed25519PrivateKey.generate, without_copy=_WITHOUT_COPY
        )
        self.public_key = self._key.public_key().public_bytes_raw()

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the key in ``folder``; ``None`` if nothing was ever signed with one."""
        return cls(folder) if (folder / _FILE).exists() else None

    @classmethod
    def prepare_successor(cls, folder: Path) -> Self:
        """Return the key that will replace the one in ``folder``; it is the same until it does."""
        return cls(folder, name=_NEXT_FILE)

    @classmethod
    def install_successor(cls, folder: Path) -> None:
        """Replace the key in ``folder`` by its successor; the old private key is gone for good.

        Raises:
            DeploymentError: The files cannot be written.
        """
        with explain_disk_errors(folder, raises=DeploymentError):
            move_into_place(folder / _NEXT_FILE, folder / _FILE)
            sync_folder(folder)

    def sign(self, label: bytes, values: Mapping[str, object]) -> bytes:
        """Return the signature, 64 bytes, over the label and the values' canonical JSON."""
        return self._key.sign(label_canonical(label, values))


@dataclass(frozen=True, eq=False, repr=False)
class ResearcherKey:
    """The key of a researcher, Ed25519, which signs bundles; its file holds nothing else."""

    key: Ed25519PrivateKey

    @classmethod
    def create(cls, path: Path) -> Self:
        """Write a new key to ``path``.

        Raises:
            DeploymentError: The file exists already, or cannot be written.
        """
        key = Ed25519PrivateKey.generate()
        if not create_private(path, encode_private_key(key)):
            raise DeploymentError(f"{path} exists already; name another file, or move it away")
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the key that :meth:`create` wrote.

        Raises:
            DeploymentError: The file is missing or damaged, or holds another kind of key.
        """
        make = f"`fedlearn bundle key {path}` makes a new one"
        if not path.exists():
            raise DeploymentError(f"there is no key {path}; {make}")
        return cls(load_or_create_key(path, Ed25519PrivateKey.generate, without_copy=make))

    @property
    def public_key(self) -> bytes:
        """Verifies the signatures, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def sign(self, label: bytes, values: Mapping[str, object]) -> bytes:
        """Return the signature, 64 bytes, over the label and the values' canonical JSON."""
        return self.key.sign(label_canonical(label, values))


def is_signed(
    label: bytes, values: Mapping[str, object], signature: bytes, *, public_key: bytes
) -> bool:
    """Return whether ``signature`` is that of ``public_key`` over the label and the values."""
    return verify(public_key, signature, label_canonical(label, values))
