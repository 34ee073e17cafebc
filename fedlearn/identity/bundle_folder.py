"""Make a signed bundle of a researcher's folder.

The folder has a file ``bundle.toml``::

    name = "tumours"
    version = "1.2"
    entry_point = "trainer:make_trainer"
    parameters = ["parameters.toml"]     # optional: hyper-parameters, JSON or TOML
    requirements = "requirements.lock"   # optional: as `pip-compile --generate-hashes` writes

Everything else in the folder is packed, except hidden files, caches and ``bundle.toml`` itself.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from annotated_types import MaxLen
from packaging import requirements as pep508
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, ValidationError

from fedlearn.core.files import explain_disk_errors
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.identity.bundles import (
    LABEL,
    MAX_BYTES,
    MAX_FILES,
    Bundle,
    Manifest,
    Name,
    PackedFile,
    Requirement,
    find_path_problem,
    pack,
)
from fedlearn.identity.signing import ResearcherKey

DESCRIPTION = "bundle.toml"
_CACHES = {"__pycache__", "node_modules"}
_COMPILED = (".pyc", ".pyo", ".bundle")
_HASH = re.compile(r"--hash[= ]sha256:([0-9a-f]{64})")


class Description(BaseModel):
    """The content of ``bundle.toml``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    version: Name
    entry_point: str
    parameters: Annotated[list[str], MaxLen(MAX_FILES)] = []
    requirements: str | None = None


def make_bundle(folder: Path, key: ResearcherKey) -> Bundle:
    """Pack and sign a folder; the same folder and key always give the same bytes.

    Raises:
        ConfigError: ``bundle.toml`` or the file of requirements is wrong.
        DeploymentError: A file cannot be read or packed.
    """
    described = read_description(folder / DESCRIPTION)
    files = {path: _read(folder / path) for path in _list_files(folder)}
    requirements = tuple[Requirement, ...]()
    if described.requirements is not None:
        requirements = read_requirements(folder / described.requirements)
    manifest = Manifest(
        name=described.name,
        version=described.version,
        entry_point=described.entry_point,
        files={
            path: PackedFile(sha256=sha256(data).hexdigest(), num_bytes=len(data))
            for path, data in files.items()
        },
        parameters=tuple(sorted(set(described.parameters))),
        requirements=requirements,
        signer=key.public_key.hex(),
    )
    if wrong := manifest.find_problem():
        raise ConfigError(f"{folder / DESCRIPTION}: {wrong}")
    signature = key.sign(LABEL, manifest.values())
    return Bundle.parse(pack(manifest, signature=signature, files=files))


def read_requirements(path: Path) -> tuple[Requirement, ...]:
    """Read pinned requirements with hashes, as ``pip-compile --generate-hashes`` writes them.

    Raises:
        ConfigError: A line is not ``name==version`` with at least one SHA-256.
        DeploymentError: The file cannot be read.
    """
    text = _read(path).decode().replace("\\\n", " ")
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    found = [_parse_requirement(each, path) for each in lines if each and each[0] != "#"]
    return tuple(sorted(found, key=lambda each: (each.name, each.marker)))


def read_description(path: Path) -> Description:
    """Read a ``bundle.toml``.

    Raises:
        ConfigError: It is missing, or a key is unknown, missing or malformed.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such file; write one with name, version and entry_point, such as "
            'entry_point = "trainer:make_trainer"'
        )
    try:
        return Description.model_validate(tomllib.loads(_read(path).decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {place}: {first['msg']}") from error


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the paths of the files to pack."""
    found, num_bytes = 0, 0
    for here, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each[0] != "." and each not in _CACHES]
        for each in [*folders, *names]:
            if (Path(here) / each).is_symlink():
                raise DeploymentError(
                    f"{Path(here) / each} is a link, which a bundle cannot hold; copy its target"
                )
        for name in names:
            path = (Path(here) / name).relative_to(folder).as_posix()
            if name[0] == "." or name.endswith(_COMPILED) or path == DESCRIPTION:
                continue
            if wrong := find_path_problem(path):
                raise DeploymentError(f"{folder}: {wrong}")
            found, num_bytes = found + 1, num_bytes + (folder / path).stat().st_size
            if found > MAX_FILES or num_bytes > MAX_BYTES:
                raise DeploymentError(
                    f"{folder} has more than {MAX_FILES} files or {MAX_BYTES} bytes, the limits of "
                    "a bundle; leave out data and weights"
                )
            yield path


def _read(path: Path) -> bytes:
    with explain_disk_errors(path, raises=DeploymentError, doing="read"):
        return path.read_bytes()


def _parse_requirement(line: str, path: Path) -> Requirement:
    words, _, _ = line.partition("--hash")
    try:
        found = pep508.Requirement(words.strip())
        (pin,) = found.specifier
        version = str(Version(pin.version))
    except (pep508.InvalidRequirement, InvalidVersion, ValueError) as error:
        raise _build_pin_error(path, words) from error
    hashes = tuple(sorted(set(_HASH.findall(line))))
    if pin.operator != "==" or not hashes or found.url is not None or found.extras:
        raise _build_pin_error(path, words)
    return Requirement(
        name=canonicalize_name(found.name),
        version=version,
        hashes=hashes,
        marker=str(found.marker or ""),
    )


def _build_pin_error(path: Path, words: str) -> ConfigError:
    return ConfigError(
        f"{path}: {words.strip()[:80]!r} is not `name==version --hash=sha256:…`; write the file "
        "with `pip-compile --generate-hashes`"
    )
