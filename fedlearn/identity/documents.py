"""Files that an operator hands to people: JSON that names its format."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from fedlearn.core.files import disk_errors
from fedlearn.errors import DeploymentError

T = TypeVar("T")


def read_document(
    path: Path,
    parse: Callable[[Any], T],
    *,
    key: str,
    versions: Collection[int],
    noun: str,
    command: str,
) -> T:
    """Return what ``parse`` makes of the JSON in the file ``path``.

    It raises ValueError, KeyError or TypeError where that is not ``noun``, which the operator's
    ``command`` makes. The file has the number of its format under ``key``.

    Raises:
        DeploymentError: The file is missing, unreadable, damaged, or of a later version.
    """
    with disk_errors(path, raises=DeploymentError, doing="read"):
        content = path.read_bytes()
    try:
        values = json.loads(content)
        found = values[key]
        if found in versions:
            return parse(values)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DeploymentError(
            f"{path} is not {noun} ({type(error).__name__}: {error}); ask the coordinator's "
            f"operator for one (`{command}`)"
        ) from error
    raise DeploymentError(
        f"{path} is {noun} of format {found!r}, this version of fedlearn reads "
        f"{' and '.join(map(str, versions))}; upgrade fedlearn (`pip install --upgrade fedlearn`)"
    )
