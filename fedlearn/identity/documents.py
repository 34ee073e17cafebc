"""JSON files that an operator hands out, each with a format number."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, create_model

from fedlearn.core.files import explain_disk_errors
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
    """Read and validate a JSON document, such as an invitation or a roster.

    Args:
        path: The file.
        kind: Schema of the content, the same for all ``versions``.
        key: JSON key that holds the format number.
        versions: Format numbers that this version of fedlearn reads.
        noun: Name of the document in error messages, such as "an invitation".
        command: The operator's command that writes a new one, named in error messages.
        is_secret: Whether error messages leave out the values.

    Raises:
        DeploymentError: The file is missing, unreadable, damaged, or of a later version.
    """
    with explain_disk_errors(path, raises=DeploymentError, doing="read"):
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
    # Check the format number first: a later version may write other fields, and the user should
    # read "upgrade fedlearn", not a list of schema errors.
    fields: dict[str, Any] = {key: (int, ...)}  # Any: or mypy takes it for other arguments
    version: int = getattr(parse(TypeAdapter(create_model("Document", **fields))), key)
    if version in versions:
        return parse(kind)
    raise DeploymentError(
        f"{path} is {noun} of format {version}, this version of fedlearn reads "
        f"{' and '.join(map(str, versions))}; upgrade fedlearn (`pip install --upgrade fedlearn`)"
    )
