"""Files that an operator hands to people: JSON that names its format."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, create_model

from fedlearn.core.files import disk_errors
from fedlearn.core.json_files import parse_json
from fedlearn.errors import DeploymentError

T = TypeVar("T")


def read_document(
    path: Path,
    kind: TypeAdapter[T],
    *,
    key: str,
    versions: Collection[int],
    noun: str,
    command: str,
    is_secret: bool,
) -> T:
    """Return what is in the file ``path``, which the operator's ``command`` makes.

    Args:
        path: The file.
        kind: What it must hold in each of the ``versions``.
        key: Under which the file has the number of its format.
        versions: The formats that this version of fedlearn reads.
        noun: What the file is, in words.
        command: What makes another one.
        is_secret: Whether messages leave the values out.

    Raises:
        DeploymentError: The file is missing, unreadable, damaged, or of a later version.
    """
    with disk_errors(path, raises=DeploymentError, doing="read"):
        content = path.read_bytes()
    parse = partial(
        parse_json,
        content,
        source=path,
        raises=DeploymentError,
        holds=noun,
        remedy=f"ask the coordinator's operator for one (`{command}`)",
        is_secret=is_secret,
    )
    # The format first: what a later version writes may be of another shape.
    fields: dict[str, Any] = {key: (int, ...)}  # Any: or mypy takes it for other arguments
    version: int = getattr(parse(TypeAdapter(create_model("Document", **fields))), key)
    if version in versions:
        return parse(kind)
    raise DeploymentError(
        f"{path} is {noun} of format {version}, this version of fedlearn reads "
        f"{' and '.join(map(str, versions))}; upgrade fedlearn (`pip install --upgrade fedlearn`)"
    )
