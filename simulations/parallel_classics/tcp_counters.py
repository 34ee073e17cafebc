"""Bytes that this process's TCP connections have sent, as the kernel counts them.

It sees what a library does not tell: gloo's messages, with their headers. Linux only.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

#: Where struct tcp_info of linux/tcp.h has tcpi_bytes_sent and, after it, tcpi_bytes_retrans.
_BYTES_SENT = 200
_NUMBERS = struct.Struct("=QQ")


def open_sockets() -> frozenset[int]:
    """Return the sockets of this process, by number: a fork has them, too."""
    return frozenset(number for number, _ in _sockets())


def sent_bytes(*, without: AbstractSet[int]) -> int | None:
    """Return how many bytes have been sent over TCP connections that are open, repeats not counted.

    Args:
        without: Sockets to leave out: those that were there before.

    Returns:
        ``None`` where the kernel does not tell, and as long as it tells of no byte.
    """
    counts = [_sent(descriptor) for number, descriptor in _sockets() if number not in without]
    return sum(counts) or None


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield the number and the descriptor of each socket."""
    descriptors = Path("/proc/self/fd")
    for each in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            target = each.readlink().name
        except FileNotFoundError:  # the directory that is being listed
            continue
        if target.startswith("socket:["):
            yield int(target.removeprefix("socket:[").removesuffix("]")), int(each.name)


def _sent(descriptor: int) -> int:
    """Return what a socket has sent; 0 of what is no TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as each:
        internet = each.family in (socket.AF_INET, socket.AF_INET6)
        if not internet or each.type != socket.SOCK_STREAM:
            return 0
        told = b""
        if sys.platform == "linux":
            size = _BYTES_SENT + _NUMBERS.size
            told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(told) < _BYTES_SENT + _NUMBERS.size:  # a kernel of before 4.19
        return 0
    sent, repeated = _NUMBERS.unpack_from(told, _BYTES_SENT)
    return int(sent - repeated)
