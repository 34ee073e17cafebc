"""Free addresses on which tests let coordinators listen."""

import os
import socket
from collections.abc import Iterator
from itertools import cycle

#: Below the system's range of ephemeral ports, so that a port stays free while a coordinator
#: restarts.
_PORTS = range(20_000, 32_000)


def free_addresses(num: int) -> list[str]:
    """Return addresses on the loopback that are free now, none of which was returned before."""
    addresses: list[str] = []
    for port in _OWN_PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # the port is in use
        addresses.append(f"127.0.0.1:{port}")
        if len(addresses) == num:
            break
    return addresses


def _own_ports() -> Iterator[int]:
    """Yield this process's ports, which no other test worker uses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = _PORTS[worker::num_workers]
    start = os.getpid() * 97 % len(ports)  # other test runs may be active
    return cycle([*ports[start:], *ports[:start]])


_OWN_PORTS = _own_ports()
