"""The key that signs checkpoints of the audit log and releases of models.

It is an Ed25519 key in the file ``signing.key``, next to those of the certificate authority. It is
not the key that clients pin: what is signed here is for people, and outlives a deployment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlearn.core.canonical_json import label_canonical
from fedlearn.core.files import make_private_folder
from fedlearn.identity.key_files import load_or_create_key
from fedlearn.secagg.keys import verify

_WITHOUT_COPY = "move it away; what it signed can then no longer be checked"


class SigningKey:
    """The key in a folder; several processes that open it first at once get the same one.

    Args:
        folder: Created with mode 0700; the key's file has mode 0600.

    Attributes:
        public_key: Verifies the signatures, 32 bytes.

    Raises:
        DeploymentError: The file is damaged or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        self._key = load_or_create_key(
            folder / "signing.key", Ed25519PrivateKey.generate, without_copy=_WITHOUT_COPY
        )
        self.public_key = self._key.public_key().public_bytes_raw()

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the key in ``folder``; ``None`` if nothing was ever signed with one."""
        return cls(folder) if (folder / "signing.key").exists() else None

    def sign(self, label: bytes, values: Mapping[str, object]) -> bytes:
        """Return the signature, 64 bytes, over the label and the values' canonical JSON."""
        return self._key.sign(label_canonical(label, values))


def is_signed(
    label: bytes, values: Mapping[str, object], signature: bytes, *, public_key: bytes
) -> bool:
    """Return whether ``signature`` is that of ``public_key`` over the label and the values."""
    return verify(public_key, signature, label_canonical(label, values))
