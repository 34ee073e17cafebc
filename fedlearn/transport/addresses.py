"""Where a coordinator is reached: ``host:port``."""

import ipaddress
import re
from collections.abc import Iterable

from fedlearn.errors import DeploymentError

#: What an address is; a host of IPv6 stands in brackets.
ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"
MAX_PORT = 65_535

#: Addresses of one coordinator that a client keeps.
MAX_ADDRESSES = 16
_MAX_CHARACTERS = 300


def is_address(text: str) -> bool:
    """Return whether ``text`` is the address of a coordinator.

    Example:
        >>> [is_address(each) for each in ("fl.example.org:443", "[::1]:9440", "10.0.0.1:9440")]
        [True, True, True]
        >>> [is_address(each) for each in ("fl.example.org", "https://a:443", "a:0", "a:70000")]
        [False, False, False, False]
    """
    if len(text) > _MAX_CHARACTERS or not re.fullmatch(ADDRESS_PATTERN, text):
        return False
    return 0 < int(text.rpartition(":")[2]) <= MAX_PORT


def require_addresses(texts: Iterable[str]) -> tuple[str, ...]:
    """Return addresses that a user has given.

    Raises:
        DeploymentError: One is none.
    """
    addresses = tuple(texts)
    for each in addresses:
        if not is_address(each):
            raise DeploymentError(
                f"{each!r} is no address; write host:port, such as coordinator.example.org:443"
            )
    return addresses


def join_addresses(first: Iterable[str], then: Iterable[str]) -> tuple[str, ...]:
    """Return both lists in order, each address once, as many as a client keeps.

    Example:
        >>> join_addresses(["new:443"], ["old:443", "new:443"])
        ('new:443', 'old:443')
    """
    return tuple(dict.fromkeys((*first, *then)))[:MAX_ADDRESSES]


def announced_addresses(announced: Iterable[str], *, here: str, is_secure: bool) -> tuple[str, ...]:
    """Return what a client keeps of the addresses that its coordinator announces.

    The address where it said so stays known as the last one: an announcement may be wrong.

    Args:
        announced: By the coordinator; what is none is left out.
        here: Where the client is connected.
        is_secure: Whether by TLS; without it, addresses of other machines are left out.

    Returns:
        At most :data:`MAX_ADDRESSES`; empty: nothing of use was announced.

    Example:
        >>> announced_addresses(["new:443", "nonsense"], here="old:443", is_secure=True)
        ('new:443', 'old:443')
        >>> announced_addresses(["new:443"], here="127.0.0.1:9440", is_secure=False)
        ()
    """
    found = [each for each in announced if is_address(each) and (is_secure or is_loopback(each))]
    if not found:
        return ()
    return tuple(dict.fromkeys((*found[: MAX_ADDRESSES - 1], here)))


def is_loopback(address: str) -> bool:
    """Return whether ``address`` never leaves the machine: plaintext is for such a one only.

    Example:
        >>> [is_loopback(each) for each in ("127.0.0.1:7000", "[::1]:7000", "localhost:7000")]
        [True, True, True]
        >>> [is_loopback(each) for each in ("10.0.0.1:7000", "localhost.example.org:7000")]
        [False, False]
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
