"""Addresses of coordinators: ``host:port``."""

import ipaddress
import re
from collections.abc import Iterable

from fedlearn.errors import DeploymentError

#: The form of an address; an IPv6 host stands in brackets.
ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"
MAX_PORT = 65_535

#: Most addresses of one coordinator that a client keeps.
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
    """Check addresses that a user has given, and return them.

    Raises:
        DeploymentError: One of them is not an address.
    """
    addresses = tuple(texts)
    for each in addresses:
        if not is_address(each):
            raise DeploymentError(
                f"{each!r} is not an address; write host:port, such as coordinator.example.org:443"
            )
    return addresses


def join_addresses(first: Iterable[str], then: Iterable[str]) -> tuple[str, ...]:
    """Join two lists in order, each address once, limited to as many as a client keeps.

    Example:
        >>> join_addresses(["new:443"], ["old:443", "new:443"])
        ('new:443', 'old:443')
    """
    return tuple(dict.fromkeys((*first, *then)))[:MAX_ADDRESSES]


def select_addresses(announced: Iterable[str], *, here: str, is_secure: bool) -> tuple[str, ...]:
    """Return the addresses that a client keeps after its coordinator announced new ones.

    The present address is kept as the last one, in case the announcement is wrong.

    Args:
        announced: By the coordinator; invalid ones are left out.
        here: The address to which the client is connected.
        is_secure: Whether it is connected by TLS; without TLS, addresses of other machines are left
            out.

    Returns:
        At most :data:`MAX_ADDRESSES`; empty: no usable address was announced.

    Example:
        >>> select_addresses(["new:443", "nonsense"], here="old:443", is_secure=True)
        ('new:443', 'old:443')
        >>> select_addresses(["new:443"], here="127.0.0.1:9440", is_secure=False)
        ()
    """
    found = [each for each in announced if is_address(each) and (is_secure or is_loopback(each))]
    if not found:
        return ()
    # One fewer, to leave room for the present address.
    return tuple(dict.fromkeys((*found[: MAX_ADDRESSES - 1], here)))


def is_loopback(address: str) -> bool:
    """Return whether ``address`` never leaves the machine, as required for plaintext.

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
        # Any other name could resolve to another machine.
        return host == "localhost"
