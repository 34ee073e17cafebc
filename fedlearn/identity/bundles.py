r"""A bundle: the code that a researcher ships to be run on other people's data, in one signed file.

The file is an uncompressed tar archive (ustar) with fixed metadata, so the same content and key
always give the same bytes. The bundle's digest is the SHA-256 of the file, as ``sha256sum`` prints
it. The members, in this order, are::

    manifest.json   canonical JSON: name, version, entry point, files, requirements, public key
    signature       Ed25519, 64 bytes, over "fedlearn bundle v1" | 0x00 | manifest.json
    files/<path>    each file of the manifest, in the order of the paths

A file that differs from this in a single byte is refused, so nothing can hide in it: no other
members, links, permissions, padding or compressed content.

References:
    `RFC 8032 <https://www.rfc-editor.org/rfc/rfc8032>`_ (Ed25519),
    POSIX.1-1988 (ustar).
"""

import io
import json
import re
import tarfile
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar

from packaging.markers import InvalidMarker, Marker
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import ConfigDict, StringConstraints, TypeAdapter

from fedlearn.core.canonical_json import encode_canonical
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.json_files import parse_json
from fedlearn.errors import DeploymentError
from fedlearn.identity.signing import is_signed

#: Limits on a bundle, which hold before anything in it is looked at.
MAX_BYTES, MAX_FILES, MAX_MANIFEST_BYTES = 64 << 20, 1000, 1 << 20
LABEL = b"fedlearn bundle v1"
_FORMAT = 1
_SIGNATURE_BYTES = 64
_BLOCK = 512
_MAX_PATH = 90  # of "files/<path>" the name field of ustar holds 100 bytes
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_DATA_SUFFIXES = (".json", ".toml")
#: Names that Windows takes for devices, whatever follows the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

_Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,200}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """What the manifest says about a file: its SHA-256 and its size in bytes."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    sha256: _Hex64
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that the code imports, pinned.

    Attributes:
        name: Normalized name of the package.
        version: The one version.
        hashes: SHA-256 of the distributions that pip may install, in ascending order.
        marker: Environments that need it, as in PEP 508; empty: all.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: Name
    version: _Line
    hashes: tuple[_Hex64, ...]
    marker: Annotated[str, StringConstraints(pattern=r"^[ -~]{0,200}$")] = ""

    def is_needed_here(self) -> bool:
        """Whether this interpreter needs it."""
        return not self.marker or Marker(self.marker).evaluate()

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle says of itself; its signature covers all of it.

    Attributes:
        name, version: Chosen by the researcher.
        entry_point: ``"module:name"`` of the class or function that makes the trainer, as for
            ``fedlearn join --task``.
        files: By path, relative and with ``/``, what the file must be.
        parameters: Paths of JSON and TOML files that hold hyper-parameters and no code.
        requirements: Packages that must be installed, by name.
        signer: Public key of the researcher, Ed25519, hexadecimal.
        format: Number of the format.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: Name
    version: Name
    entry_point: _Line
    files: Mapping[str, PackedFile]
    parameters: tuple[str, ...]
    requirements: tuple[Requirement, ...]
    signer: _Hex64
    format: int = _FORMAT

    @property
    def code(self) -> dict[str, PackedFile]:
        """The files that are not parameters."""
        return {path: each for path, each in self.files.items() if path not in self.parameters}

    def values(self) -> dict[str, object]:
        """Return the manifest as JSON values."""
        found: dict[str, object] = _MANIFEST.dump_python(self, mode="json")
        return found

    def find_problem(self) -> str | None:
        """Describe what is wrong with the manifest; ``None`` if nothing is."""
        if self.format != _FORMAT:
            return f"it has format {self.format}, not {_FORMAT}; upgrade fedlearn to read it"
        if not 0 < len(self.files) <= MAX_FILES:
            return f"it has {len(self.files)} files; between 1 and {MAX_FILES} are allowed"
        if wrong := next(filter(None, map(find_path_problem, self.files)), None):
            return wrong
        if clash := _find_clash(self.files):
            return clash
        if any(each.num_bytes < 0 for each in self.files.values()):
            return "a file has a negative size"
        for path in self.parameters:
            if path not in self.files or not path.endswith(_DATA_SUFFIXES):
                return f"parameters names {path[:80]!r}, which is not a JSON or TOML file in it"
        return self._find_entry_problem() or _find_requirement_problem(self.requirements)

    def _find_entry_problem(self) -> str | None:
        if not _ENTRY_POINT.fullmatch(self.entry_point):
            return f'its entry point is {self.entry_point!r}; write "module:name"'
        place = self.entry_point.partition(":")[0].replace(".", "/")
        if not {f"{place}.py", f"{place}/__init__.py"} & self.files.keys():
            return f"its entry point is {self.entry_point!r}, but it has no file {place}.py"
        return None


_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle that was checked: it is complete, unchanged, and signed by ``manifest.signer``.

    Attributes:
        content: The bytes of the file.
        files: The content of each file, by path.
    """

    manifest: Manifest
    content: bytes = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return digest_of(self.content)

    @classmethod
    def parse(cls, content: bytes) -> "Bundle":
        """Check the bytes of a bundle.

        Raises:
            DeploymentError: They are not exactly those of a signed bundle.
        """
        if len(content) > MAX_BYTES:
            raise _refuse(f"it has {len(content)} bytes; at most {MAX_BYTES} are allowed")
        manifest = _read_manifest(content)
        members = list(_list_sizes(manifest))
        if len(content) != _length(members):
            raise _refuse(
                "its size is not that of the files in its manifest: it was cut or changed"
            )
        parts = [content[begin : begin + size] for begin, size in _place(members)]
        files = dict(zip(sorted(manifest.files), parts[2:], strict=True))
        for path, data in files.items():
            if sha256(data).hexdigest() != manifest.files[path].sha256:
                raise _refuse(f"{path} was changed after the bundle was signed")
            if wrong := _find_content_problem(path, data, is_data=path in manifest.parameters):
                raise _refuse(wrong)
        if pack(manifest, signature=parts[1], files=files) != content:
            raise _refuse("it has bytes that do not belong there: it was changed, or made by hand")
        if not is_signed(
            LABEL, manifest.values(), parts[1], public_key=bytes.fromhex(manifest.signer)
        ):
            raise _refuse(f"it was not signed by the key that it names ({manifest.signer[:12]}…)")
        return cls(manifest=manifest, content=content, files=files)

    @classmethod
    def load(cls, path: Path, *, digest: str | None = None) -> "Bundle":
        """Read and check a file; if ``digest`` is given, the file must have it.

        Raises:
            DeploymentError: The file cannot be read, is not a bundle, or has another digest.
        """
        with explain_disk_errors(path, raises=DeploymentError, doing="read"), path.open("rb") as f:
            content = f.read(MAX_BYTES + 1)
        if digest is not None and digest_of(content) != digest:
            raise DeploymentError(
                f"{path} does not have the digest {digest[:12]}…: it was changed or damaged; "
                "remove it, and get the bundle again"
            )
        try:
            return cls.parse(content)
        except DeploymentError as error:
            raise DeploymentError(f"{path}: {error}") from error


def digest_of(content: bytes) -> str:
    """Return the digest by which people name a bundle: SHA-256, hexadecimal."""
    return sha256(content).hexdigest()


def pack(manifest: Manifest, *, signature: bytes, files: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a bundle with this content."""
    contents = [
        encode_canonical(manifest.values()),
        signature,
        *(files[p] for p in sorted(manifest.files)),
    ]
    packed = bytearray()
    for (name, size), data in zip(_list_sizes(manifest), contents, strict=True):
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        packed += info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
        packed += data + bytes(-len(data) % _BLOCK)
    return bytes(packed + bytes(2 * _BLOCK))


def find_path_problem(path: str) -> str | None:
    """Describe why a path cannot be in a bundle; ``None`` if it can."""
    parts = path.split("/")
    if len(path) > _MAX_PATH or not all(_PART.fullmatch(each) for each in parts):
        return (
            f"the path {path[:120]!r} is not allowed: use up to {_MAX_PATH} letters, digits, '.', "
            "'_', '-', and '/' between parts that begin with a letter, digit or '_'"
        )
    if any(_DEVICES.fullmatch(each) or each.endswith(".") for each in parts):
        return f"the path {path!r} is not allowed: Windows cannot store it"
    return None


def _find_content_problem(path: str, data: bytes, *, is_data: bool) -> str | None:
    """Describe why a file is not what it seems to a reader; ``None`` if nothing is found."""
    try:
        if is_data:
            text = data.decode()
            (json.loads if path.endswith(".json") else tomllib.loads)(text)
        elif path.endswith(".py"):
            # Python decodes by such a line: code could be shown as a comment, and run all the same.
            if tokenize.detect_encoding(io.BytesIO(data).readline)[0] != "utf-8":
                return f"{path} does not declare UTF-8 as its encoding"
            data.decode()
    except (ValueError, SyntaxError, RecursionError) as error:
        return f"{path} cannot be read: {type(error).__name__}"
    return None


def _find_clash(paths: Mapping[str, PackedFile]) -> str | None:
    """Describe two paths that are one file on some disk, or a file and a folder of one name."""
    taken = dict[str, str]()
    for path in sorted(paths):
        if (other := taken.setdefault(path.lower(), path)) != path:
            return f"{other} and {path} are the same file where case does not count"
    for path in sorted(paths):
        folders = (path[:at].lower() for at, each in enumerate(path) if each == "/")
        if folder := next((each for each in folders if each in taken), None):
            return f"{taken[folder]} is both a file and a folder"
    return None


def _find_requirement_problem(requirements: tuple[Requirement, ...]) -> str | None:
    for each in requirements:
        try:
            is_exact = str(Version(each.version)) == each.version
            Marker(each.marker or "python_version > '3'").evaluate()
        except (InvalidVersion, InvalidMarker, ValueError) as error:
            return f"the requirement {each} is not valid: {error}"
        if not is_exact or canonicalize_name(each.name) != each.name:
            return f"the requirement {each} is not written in its normal form"
        if not each.hashes or list(each.hashes) != sorted(set(each.hashes)):
            return f"the requirement {each} has no hashes in ascending order"
    order = [(each.name, each.marker) for each in requirements]
    return None if order == sorted(set(order)) else "its requirements are not in order"


def _list_sizes(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Yield the name and the size of each member of the archive, in order."""
    yield "manifest.json", len(encode_canonical(manifest.values()))
    yield "signature", _SIGNATURE_BYTES
    for path in sorted(manifest.files):
        yield f"files/{path}", manifest.files[path].num_bytes


def _place(members: list[tuple[str, int]]) -> Iterator[tuple[int, int]]:
    """Yield where the content of each member begins, and its size."""
    begin = 0
    for _, size in members:
        yield begin + _BLOCK, size
        begin += _BLOCK + size + -size % _BLOCK


def _length(members: list[tuple[str, int]]) -> int:
    return sum(_BLOCK + size + -size % _BLOCK for _, size in members) + 2 * _BLOCK


def _read_manifest(content: bytes) -> Manifest:
    try:
        info = tarfile.TarInfo.frombuf(content[:_BLOCK], "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise _refuse("it does not begin with a tar header") from error
    if info.name != "manifest.json" or not 0 < info.size <= MAX_MANIFEST_BYTES:
        raise _refuse("it does not begin with a manifest")
    data = content[_BLOCK : _BLOCK + info.size]
    manifest = parse_json(
        data,
        _MANIFEST,
        source="its manifest",
        raises=DeploymentError,
        holds="what this version of fedlearn expects",
        remedy="ask the researcher for the file that `fedlearn bundle make` wrote",
    )
    if wrong := manifest.find_problem():
        raise _refuse(wrong)
    if encode_canonical(manifest.values()) != data:
        raise _refuse("its manifest is not in the canonical form")
    return manifest


def _refuse(why: str) -> DeploymentError:
    return DeploymentError(f"not a valid bundle: {why}")
