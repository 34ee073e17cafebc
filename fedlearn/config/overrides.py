"""Parse ``--set``, and find a file that it or a TOML file names, without the tree's classes."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlearn.config.keys import get_value
from fedlearn.config.problems import Override
from fedlearn.config.reading import make_absolute, with_value
from fedlearn.config.toml import Key, keys_in


def parse_override(text: str) -> Override:
    """Parse one ``a.b=value``; a value that is not valid TOML is a string.

    Raises:
        ValueError: It is malformed.
    """
    for sign in re.finditer("=", text):  # a quoted key may contain "="
        with suppress(ValueError):
            found = list(keys_in(tomllib.loads(f"{text[: sign.start()]}= 0")))
            # Parents come first, so the last path is the whole key.
            if found:
                return Override(found[-1], _parse_toml_or_text(text[sign.end() :].strip()), text)
    raise ValueError("not of the form section.key=value, as client.epochs=3")


def find_file(
    key: Key,
    raw: Mapping[str, Any],  # Any: not validated yet
    overrides: Sequence[str],
    *,
    folder: Path,
) -> Path | None:
    """Return the file that a key names, as :func:`~fedlearn.config.files.load` would read it.

    Args:
        key: The key.
        raw: The values of a TOML file.
        overrides: Those of the command; malformed ones are left out.
        folder: The folder of the TOML file, which relative paths in it are relative to. Those in
            overrides are relative to the working directory.

    Returns:
        The path; ``None`` if the key is not set.

    Example:
        >>> raw = {"client": {"bundle": "a.bundle"}}
        >>> find_file(("client", "bundle"), raw, (), folder=Path("/mine")).as_posix()
        '/mine/a.bundle'
    """
    values, base = dict(raw), folder
    for text in overrides:
        with suppress(ValueError):
            override = parse_override(text)
            values = with_value(values, override.path, override.value)
            if override.path == key[: len(override.path)]:
                base = Path.cwd()
    named = get_value(values, key)
    return Path(make_absolute(named, "path", base)) if named and isinstance(named, str) else None


def _parse_toml_or_text(text: str) -> Any:  # Any: what TOML can hold
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A text with a line break could add further keys.
    return document["value"] if document.keys() == {"value"} else text
