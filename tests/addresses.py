"""Where tests let coordinators listen."""

import socket
from contextlib import ExitStack, closing


def free_addresses(num: int) -> list[str]:
    """Return addresses on the loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
