"""Where a coordinator is reached: ``host:port``."""

import ipaddress


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
