"""Local files of JSON, read as a type or refused with a way out."""

import reprlib
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedlearn.core.files import disk_errors
from fedlearn.errors import FedlearnError

#: Of types whose bytes are hexadecimal in JSON.
HEXADECIMAL = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

T = TypeVar("T")


def read_json(
    path: Path, kind: TypeAdapter[T], *, raises: type[FedlearnError], holds: str, remedy: str
) -> T | None:
    """Return what is in the file ``path``, which ``holds`` it; ``None``: there is no file.

    Raises:
        FedlearnError: As ``raises``: the file cannot be read, or has something else in it. The
            message ends with the ``remedy``.
    """
    with disk_errors(path, raises=raises, doing="read"):
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return parse_json(content, kind, source=path, raises=raises, holds=holds, remedy=remedy)


def require_json(
    path: Path, kind: TypeAdapter[T], *, raises: type[FedlearnError], holds: str, remedy: str
) -> T:
    """Return what :func:`read_json` does, of a file that must be there.

    Raises:
        FedlearnError: As :func:`read_json`, or there is no such file.
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
    """Return what JSON that was read from ``source`` holds.

    Args:
        content: The JSON.
        kind: What it must be.
        source: Where it comes from, as a message calls it: the path of a file.
        raises: The class of the error.
        holds: What the source should hold, in words.
        remedy: What to do if it does not; the message ends with it.
        is_secret: Whether messages leave the values out.

    Raises:
        FedlearnError: As ``raises``: it is no JSON, or of another type.
    """
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        found = _first_fault(error, is_secret=is_secret)
        cause = None if is_secret else error  # a traceback would show the values
        raise raises(f"{source} does not hold {holds} ({found}): {remedy}") from cause


def _first_fault(error: ValidationError, *, is_secret: bool) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] in {"missing", "missing_argument"}:
        return f"{place} is missing"
    if not place:
        return first["msg"]
    return f"{place} is {'wrong' if is_secret else reprlib.repr(first['input'])}: {first['msg']}"
