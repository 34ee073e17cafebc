"""Show a bundle, and the difference between two, as text for the owner of the data to read.

Characters that could control a terminal, or show code in another order than it runs in, are
replaced by U+FFFD, and counted.
"""

import difflib
from collections.abc import Iterable, Iterator

from fedlearn.core.words import replace_unprintable
from fedlearn.identity.bundles import Bundle, Manifest


def describe_bundle(bundle: Bundle) -> Iterator[str]:
    """Yield the lines that describe a bundle: what it is, what it needs, and its files."""
    manifest = bundle.manifest
    yield f"{manifest.name} {manifest.version}"
    yield f"digest       {bundle.digest}"
    yield f"signed by    {manifest.signer}"
    yield f"entry point  {manifest.entry_point}"
    yield f"size         {len(bundle.content)} bytes, {len(manifest.files)} files"
    yield f"requirements {'' if manifest.requirements else 'none'}".rstrip()
    yield from (f"  {each}" for each in manifest.requirements)
    yield "files"
    for path in sorted(manifest.files):
        packed = manifest.files[path]
        kind = "parameters" if path in manifest.parameters else _kind(bundle.files[path])
        yield f"  {packed.sha256[:12]}  {packed.num_bytes:>9}  {kind:<10}  {path}"


def list_requirements(bundle: Bundle) -> Iterator[str]:
    """Yield the requirements as the lines of a file for ``pip install --require-hashes -r``."""
    for each in bundle.manifest.requirements:
        yield " ".join([str(each), *(f"--hash=sha256:{digest}" for digest in each.hashes)])


def show_files(bundle: Bundle) -> Iterator[str]:
    """Yield the lines of all files, each after a line with its path."""
    for path in sorted(bundle.files):
        lines, num_replaced = _lines(bundle.files[path])
        yield f"===== {path}"
        if num_replaced:
            yield f"===== {num_replaced} characters that do not print are shown as \ufffd"
        yield from lines


def diff_bundles(old: Bundle, new: Bundle) -> Iterator[str]:
    """Yield the unified difference: of the manifest, the parameters, and then the code."""
    yield from _diff("manifest", _describe(old.manifest), _describe(new.manifest))
    declared = {*old.manifest.parameters, *new.manifest.parameters}
    paths = {*old.files, *new.files}
    for path in sorted(paths, key=lambda each: (each not in declared, each)):
        before, after = old.files.get(path), new.files.get(path)
        if before != after:
            yield from _diff(path, _side(before), _side(after))


def _describe(manifest: Manifest) -> list[str]:
    return [
        f"name {manifest.name}",
        f"version {manifest.version}",
        f"entry point {manifest.entry_point}",
        f"signed by {manifest.signer}",
        *(f"parameters {each}" for each in manifest.parameters),
        *(f"requires {each} {' '.join(each.hashes)}" for each in manifest.requirements),
    ]


def _diff(path: str, before: Iterable[str], after: Iterable[str]) -> Iterator[str]:
    return difflib.unified_diff(list(before), list(after), f"a/{path}", f"b/{path}", lineterm="")


def _side(data: bytes | None) -> list[str]:
    return [] if data is None else _lines(data)[0]


def _kind(data: bytes) -> str:
    return "binary" if _decode(data) is None else "text"


def _decode(data: bytes) -> str | None:
    try:
        return None if b"\x00" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _lines(data: bytes) -> tuple[list[str], int]:
    """Return the printable lines of a file, and how many characters in it do not print."""
    text = _decode(data)
    if text is None:
        return [f"(binary, {len(data)} bytes; it cannot be read here)"], 0
    # Only \n ends a line: Python does not take form feeds and such for the end of one.
    raw = text.replace("\r\n", "\n").split("\n")
    lines = ["\t".join(map(replace_unprintable, each.split("\t"))) for each in raw]
    num_replaced = "\n".join(lines).count("\ufffd") - text.count("\ufffd")
    return lines, num_replaced
