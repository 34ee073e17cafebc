"""The messages between the training process and a process that runs a bundle.

A message is a JSON object and tensors: 4 bytes with the length of the JSON, the JSON, and a
safetensors file. Nothing is unpickled, so a bundle cannot run code in the training process.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlearn.errors import ProtocolError

_LENGTH = struct.Struct(">I")


def encode_message(values: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
    """Encode JSON values and tensors, which are copied to the CPU."""
    header = json.dumps(dict(values)).encode()
    # Copies: safetensors refuses tensors that share memory or are not contiguous.
    own = {
        name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }
    return _LENGTH.pack(len(header)) + header + safetensors.torch.save(own)


def decode_message(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:  # Any: JSON
    """Decode a message.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        values = json.loads(data[4 : 4 + length])
        tensors = safetensors.torch.load(data[4 + length :])
    except (struct.error, ValueError, RecursionError, SafetensorError, KeyError) as error:
        raise ProtocolError(f"malformed message ({type(error).__name__})") from error
    if not isinstance(values, dict):
        raise ProtocolError("malformed message (no object)")
    return values, tensors


def join_groups(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put several mappings into one, each name after that of its group and a slash."""
    return {f"{group}/{name}": each for group, of in groups.items() for name, each in of.items()}


def select_group(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take one mapping out of those that :func:`join_groups` has joined."""
    prefix = f"{group}/"
    return {name[len(prefix) :]: each for name, each in tensors.items() if name.startswith(prefix)}
