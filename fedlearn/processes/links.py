"""A socket that a process gets from the one that starts it."""

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class _Inherited(TypedDict, total=False):
    pass_fds: Sequence[int]


@dataclass(frozen=True)
class Handover:
    """One end of a socket on its way to a process that is being started.

    A process inherits it on Linux and macOS. On Windows it is duplicated for a process that runs,
    which reads how on its standard input, before everything else.

    Attributes:
        link: That end; its owner closes it here once the process has it.
    """

    link: socket.socket

    @property
    def argument(self) -> str:
        """What the process is given as its last argument."""
        return "-" if sys.platform == "win32" else str(self.link.fileno())

    @property
    def inherited(self) -> _Inherited:
        """What :class:`subprocess.Popen` is given."""
        return {} if sys.platform == "win32" else {"pass_fds": [self.link.fileno()]}

    def complete(self, process: "subprocess.Popen[bytes]") -> None:
        """Hand the socket over to a process that has started, with a pipe as its input.

        Raises:
            OSError: The process has ended.
        """
        if sys.platform == "win32":
            assert process.stdin is not None  # a pipe
            process.stdin.write(base64.b64encode(self.link.share(process.pid)) + b"\n")
            process.stdin.flush()


def take_link(argument: str) -> socket.socket:
    """Return the socket that this process was started with; its own children do not get it.

    Args:
        argument: The last argument of this process.
    """
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(sys.stdin.buffer.readline()))
    else:
        link = socket.socket(fileno=int(argument))
        os.set_inheritable(link.fileno(), False)
        return link
