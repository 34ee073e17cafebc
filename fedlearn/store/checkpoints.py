"""Checkpoint files: complete and durable under their final name, or absent.

The format is safetensors: any tool can read the tensors, and loading a file executes no code. The
database row has the file's SHA-256, which ties the file to its run.
"""

import errno
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, TensorSpec, serialize_file

from fedlearn.core.files import explain_disk_errors, sync_file, sync_folder
from fedlearn.core.json_files import parse_json
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import CorruptCheckpoint, NewerStore, StoreError
from fedlearn.rounds.records import Checkpoint

_FORMAT = 1
_SUFFIX_BYTES = 8
_NAME = re.compile(r"round-(?P<round>\d{6,})-(?P<digest>[0-9a-f]{12})\.safetensors")
_METADATA_KEY = "fedlearn"  # a single key: safetensors does not keep the order of several


@dataclass(frozen=True)
class _Format:
    """The part of the header that every version has."""

    format: int


@dataclass(frozen=True)
class _Head:
    """The header that is stored as safetensors metadata, next to the tensors."""

    round_num: int
    values: dict[str, Any]  # Any: what JSON has
    names: list[str] | None = None  # order of the tensors, which safetensors does not keep


@dataclass(frozen=True)
class _Metadata:
    fedlearn: str  # a header, as JSON


@dataclass(frozen=True)
class _SafetensorsFile:
    """The start of a safetensors file."""

    metadata: Annotated[_Metadata, Field(alias="__metadata__")]


_FILE_ADAPTER, _FORMATS, _HEADS = (
    TypeAdapter(_SafetensorsFile),
    TypeAdapter(_Format),
    TypeAdapter(_Head),
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A checkpoint on disk: its number of finished rounds, and its SHA-256 in hexadecimal."""

    round_num: int
    path: Path
    sha256: str
    num_bytes: int


def write_checkpoint(checkpoint: Checkpoint, *, folder: Path) -> CheckpointFile:
    """Write ``checkpoint`` into the existing ``folder``, and return once it is durable.

    The name carries the round and the first digits of the hash, so a file that the store
    refers to is never replaced by another.

    Raises:
        NoSpace: The disk is full; no partial file is left.
        StoreError: The file cannot be written; no partial file is left.
    """
    # A unique name: a coordinator that was replaced without noticing may write the same round.
    suffix = SecretBytes.generate(_SUFFIX_BYTES).reveal().hex()
    temporary = folder / f".round-{checkpoint.round_num:06d}.{suffix}.tmp"
    with explain_disk_errors(temporary, raises=StoreError):
        try:
            _serialize(checkpoint, temporary)
            # "rb+" although it is only read: Windows syncs no file that is open for reading alone.
            # The hash is that of the bytes on disk, so it covers what the serializer wrote.
            with temporary.open("rb+") as stream:
                digest = file_digest(stream, "sha256").hexdigest()
                num_bytes = stream.tell()
                sync_file(stream)
            path = folder / f"round-{checkpoint.round_num:06d}-{digest[:12]}.safetensors"
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        # The rename itself is durable only once the folder is.
        sync_folder(folder)
    return CheckpointFile(
        round_num=checkpoint.round_num, path=path, sha256=digest, num_bytes=num_bytes
    )


def read_checkpoint(file: CheckpointFile, *, remedy: str) -> Checkpoint:
    """Read the checkpoint in ``file``; its hash is verified before its bytes are parsed.

    ``remedy`` ends the error message and says what to do if the file is damaged.

    Raises:
        CorruptCheckpoint: The file is missing, or its SHA-256 is not the one on record.
        NewerStore: A later version of fedlearn wrote it.
        StoreError: The file cannot be read.
    """
    committed = f"expected sha256 {file.sha256} ({file.num_bytes} bytes)"
    with explain_disk_errors(file.path, raises=StoreError, doing="read"):
        try:
            content = file.path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptCheckpoint(
                f"{file.path} is missing: {committed}, found no file; {remedy}"
            ) from error
    found = sha256(content).hexdigest()
    if found != file.sha256:
        raise CorruptCheckpoint(
            f"{file.path} is not the checkpoint that was committed: {committed}, found {found} "
            f"({len(content)} bytes); {remedy}"
        )
    # The bytes that were verified, not the file, which may have changed since.
    return _decode(content, path=file.path, remedy=remedy)


def find_complete_checkpoints(folder: Path) -> list[CheckpointFile]:
    """Find the checkpoints in ``folder`` whose bytes match the hash in their names.

    They are in the order of their rounds. Used where no database record lists them.

    Raises:
        StoreError: A file cannot be read.
    """
    found = []
    for path in sorted(folder.glob("round-*.safetensors")):
        with explain_disk_errors(path, raises=StoreError, doing="read"), path.open("rb") as stream:
            digest = file_digest(stream, "sha256").hexdigest()
            num_bytes = stream.tell()
        named = _NAME.fullmatch(path.name)
        if named is not None and digest.startswith(named["digest"]):
            found.append(
                CheckpointFile(
                    round_num=int(named["round"]), path=path, sha256=digest, num_bytes=num_bytes
                )
            )
    return found


def _serialize(checkpoint: Checkpoint, path: Path) -> None:
    """Write a safetensors file directly from the tensors' memory, without copying the model.

    Parameters are usually views of one flat vector, and the best model may share memory with the
    last one; in the file, each tensor has its own bytes.

    Raises:
        OSError: The file cannot be written.
    """
    head = {
        "format": _FORMAT,
        "round_num": checkpoint.round_num,
        "values": dict(checkpoint.values),
        "names": list(checkpoint.tensors),  # safetensors does not keep their order
    }
    kept = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    # These hold raw addresses: `kept` must outlive the call that writes them.
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in kept.items()
    }
    try:
        serialize_file(specs, path, {_METADATA_KEY: json.dumps(head)})
    except SafetensorError as error:
        # The errno is only in the text, and callers must be able to tell a full disk.
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code)) from error


def _decode(content: bytes, *, path: Path, remedy: str) -> Checkpoint:
    parse = partial(
        parse_json, source=path, raises=CorruptCheckpoint, holds="a checkpoint", remedy=remedy
    )
    # A safetensors file starts with the length of its JSON header, in 8 bytes.
    length = int.from_bytes(content[:8], "little")
    text = parse(content[8 : 8 + length], _FILE_ADAPTER).metadata.fedlearn
    # Parse only the format first: a later version's header may have other fields.
    number = parse(text, _FORMATS).format
    if number > _FORMAT:
        raise NewerStore(
            f"{path} has checkpoint format {number}, this version of fedlearn reads "
            f"up to {_FORMAT}; upgrade fedlearn (`pip install --upgrade fedlearn`)"
        )
    from safetensors.torch import load  # noqa: PLC0415 (who lists runs does not wait for torch)

    head, found = parse(text, _HEADS), load(content)
    # Files of earlier versions have no list of names.
    tensors = {name: found[name] for name in head.names or found}
    return Checkpoint(round_num=head.round_num, tensors=tensors, values=head.values)
