"""Reads local JSON files, checks them against a type, and says how to fix a bad one."""

import reprlib
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedlearn.core.files import explain_disk_errors
from fedlearn.errors import FedlearnError

#: Pydantic configuration of types whose bytes are hexadecimal in JSON.
HEXADECIMAL = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

T = TypeVar("T")


def read_json(
    path: Path, kind: TypeAdapter[T], *, raises: type[FedlearnError], holds: str, remedy: str
) -> T | None:
    """Read and check a JSON file; ``None`` if it does not exist.

    Arguments are those of :func:`parse_json`.

    Raises:
        FedlearnError: Of the class ``raises``: the file cannot be read, or does not match
            ``kind``. In the latter case, the message ends with ``remedy``.
    """
    with explain_disk_errors(path, raises=raises, doing="read"):
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return parse_json(content, kind, source=path, raises=raises, holds=holds, remedy=remedy)


def require_json(
    path: Path, kind: TypeAdapter[T], *, raises: type[FedlearnError], holds: str, remedy: str
) -> T:
    """Read and check a JSON file that must exist.

    Raises:
        FedlearnError: As in :func:`read_json`, or the file does not exist.
    """
    found = read_json(path, kind, raises=raises, holds=holds, remedy=remedy)
    if found is None:
        raise raises(f"{path}, which holds {holds}, is missing: {remedy}")
    return found


def parse_json(
    content: bytes | str,
    kind: TypeAdapter[T],
    *,
    source: object,
    raises: type[FedlearnError],
    holds: str,
    remedy: str,
    is_secret: bool = False,
) -> T:
    """Parse JSON and check it against a type.

    Args:
        content: The JSON text.
        kind: The expected type.
        source: The origin to name in messages, such as a path.
        raises: The class of the error.
        holds: What the source should contain, as a noun phrase for messages.
        remedy: How to fix a wrong source; the message ends with it.
        is_secret: Whether to leave the values out of messages.

    Raises:
        FedlearnError: Of the class ``raises``: the content is not JSON, or of another type.
    """
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        found = _describe_first_fault(error, is_secret=is_secret)
        cause = None if is_secret else error  # a traceback would show the values
        raise raises(f"{source} does not hold {holds} ({found}): {remedy}") from cause


def _describe_first_fault(error: ValidationError, *, is_secret: bool) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] in {"missing", "missing_argument"}:
        return f"{place} is missing"
    if not place:
        return first["msg"]
    return f"{place} is {'wrong' if is_secret else reprlib.repr(first['input'])}: {first['msg']}"
