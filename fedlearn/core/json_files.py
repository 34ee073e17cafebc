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
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        found = f"{place} is {reprlib.repr(first['input'])}: " if place else ""
        raise raises(f"{path} does not hold {holds} ({found}{first['msg']}): {remedy}") from error
