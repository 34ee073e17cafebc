"""The one text of JSON values, to hash and to sign."""

import json
from collections.abc import Mapping


def encode_canonical(values: Mapping[str, object]) -> bytes:
    r"""Encode JSON values as the one text to hash and to sign.

    Keys are sorted, there is no white space, and every character outside ASCII is escaped.

    Raises:
        ValueError: A number is not finite.

    Example:
        >>> encode_canonical({"b": [1, 0.5], "a": "é"})
        b'{"a":"\\u00e9","b":[1,0.5]}'
    """
    text = json.dumps(dict(values), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def label_canonical(label: bytes, values: Mapping[str, object]) -> bytes:
    """Return the label, a zero byte, and :func:`encode_canonical` of ``values``.

    The label keeps a hash or a signature from serving two purposes.
    """
    return label + b"\x00" + encode_canonical(values)
