"""What a forked child must not keep open: it may outlive the process that it was forked from."""

import os
import sys
from io import FileIO
from multiprocessing.connection import Connection
from socket import socket
from weakref import WeakSet

# A file with a buffer would be written once more by a child.
_own = WeakSet[socket | FileIO | Connection]()


def keep_from_forks(resource: socket | FileIO | Connection) -> None:
    """Have ``resource`` closed in every child that is forked from now on, while it is in use."""
    _own.add(resource)


def _let_go() -> None:
    for resource in list(_own):
        resource.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)
