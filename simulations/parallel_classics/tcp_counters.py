"""Count the bytes that this process's TCP connections have sent, by asking the kernel.

This counts what a library does not report: gloo's messages, with their headers. Linux only.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

#: Offset in struct tcp_info (linux/tcp.h) of tcpi_bytes_sent, which tcpi_bytes_retrans follows.
_BYTES_SENT = 200
_NUMBERS = struct.Struct("=QQ")


def open_sockets() -> frozenset[int]:
    """Return the inode numbers of this process's sockets; a forked child inherits them."""
    return frozenset(number for number, _ in _sockets())


def sent_bytes(*, without: AbstractSet[int]) -> int | None:
    """Return the bytes sent over the open TCP connections, without retransmissions.

    Args:
        without: Sockets to leave out, such as inherited ones.

    Returns:
        ``None`` if the kernel does not count them, or counts none.
    """
    counts = [_count_sent(descriptor) for number, descriptor in _sockets() if number not in without]
    return sum(counts) or None


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield the inode number and the descriptor of each socket."""
    descriptors = Path("/proc/self/fd")
    for each in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            target = each.readlink().name
        except FileNotFoundError:  # the directory that is being listed
            continue
        if target.startswith("socket:["):
            yield int(target.removeprefix("socket:[").removesuffix("]")), int(each.name)


def _count_sent(descriptor: int) -> int:
    """Return the bytes that a socket has sent; 0 if it is not a TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as each:
        internet = each.family in (socket.AF_INET, socket.AF_INET6)
        if not internet or each.type != socket.SOCK_STREAM:
            return 0
        told = b""
        if sys.platform == "linux":
            size = _BYTES_SENT + _NUMBERS.size
            told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(told) < _BYTES_SENT + _NUMBERS.size:  # kernels before 4.19
        return 0
    sent, repeated = _NUMBERS.unpack_from(told, _BYTES_SENT)
    return int(sent - repeated)
