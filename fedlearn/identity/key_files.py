"""Private keys in files that only their owner can read, created on first use."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlearn.core.files import create_private, explain_disk_errors
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import encode_private_key, is_p256

KeyT = TypeVar("KeyT", ec.EllipticCurvePrivateKey, Ed25519PrivateKey)


def load_or_create_key(path: Path, make: Callable[[], KeyT], *, without_copy: str) -> KeyT:
    """Load the key in ``path``, which is created first if it is missing.

    Args:
        path: The file, in a folder that exists.
        make: Makes a new key.
        without_copy: What to do if the file is damaged and there is no copy of it.

    Raises:
        DeploymentError: The file is damaged, holds another kind of key, or cannot be written.
    """
    # Made in any case: its type is what the file is checked against.
    fresh = make()
    # Another process may create the file first: both then load the same key from it.
    if not path.exists():
        create_private(path, encode_private_key(fresh))
    try:
        key = serialization.load_pem_private_key(read_key_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise build_damage_error(path, without_copy=without_copy) from error
    if not isinstance(key, type(fresh)) or is_p256(key) != is_p256(fresh):
        raise build_damage_error(path, without_copy=without_copy)
    return key


def read_key_file(path: Path) -> bytes:
    """Return the content of a file; raises DeploymentError if it cannot be read."""
    with explain_disk_errors(path, raises=DeploymentError, doing="read"):
        return path.read_bytes()


def build_damage_error(path: Path, *, without_copy: str) -> DeploymentError:
    """Build the error for a file that holds something else than it should."""
    return DeploymentError(
        f"{path} is damaged or another file; restore a copy (without one: {without_copy})"
    )
