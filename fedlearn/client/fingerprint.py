"""The fingerprint of a site's own trainer: which code and which packages it is made of."""

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

from fedlearn.core.canonical_json import encode_canonical


def fingerprint_of(trainer: object) -> str:
    """Return what a client says it ran: ``site:`` and a SHA-256, in hexadecimal.

    It covers the source of the module that defines the trainer's class, and the versions of all
    installed packages and of Python.

    Example:
        >>> fingerprint_of(object()) == fingerprint_of(object())
        True
    """
    return f"site:{sha256(encode_canonical(describe_trainer(trainer))).hexdigest()}"


def describe_trainer(trainer: object) -> Mapping[str, object]:
    """Return what the fingerprint is computed from, as JSON values."""
    kind = type(trainer)
    source = b""
    with suppress(TypeError, OSError):  # built in, or without a file
        source = Path(inspect.getfile(kind)).read_bytes()
    return {
        # Without its module, whose name may be the file's place on this machine.
        "trainer": kind.__qualname__,
        "source": sha256(source).hexdigest(),
        "python": sys.version.split()[0],
        "packages": _list_packages(),
    }


@cache
def _list_packages() -> dict[str, str]:
    found = {each.metadata["Name"] or "": each.version for each in distributions()}
    return dict(sorted(found.items()))
