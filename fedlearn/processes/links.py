"""Pass a socket to a process that is being started."""

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
    """Passes one end of a socket to a process that is being started.

    On Linux and macOS the process inherits the file descriptor. On Windows the socket is duplicated
    for the running process, which reads the duplication data from its standard input first.

    Attributes:
        link: The end to pass; the caller closes its copy once the process has it.
    """

    link: socket.socket

    @property
    def argument(self) -> str:
        """The last command-line argument of the process: a descriptor, or ``-`` on Windows."""
        return "-" if sys.platform == "win32" else str(self.link.fileno())

    @property
    def inherited(self) -> _Inherited:
        """Keyword arguments for :class:`subprocess.Popen`."""
        return {} if sys.platform == "win32" else {"pass_fds": [self.link.fileno()]}

    def complete(self, process: "subprocess.Popen[bytes]") -> None:
        """Send the socket to the started process on Windows; do nothing elsewhere.

        Args:
            process: The process, whose standard input is a pipe.

        Raises:
            OSError: The process has exited.
        """
        if sys.platform == "win32":
            assert process.stdin is not None  # a pipe
            process.stdin.write(base64.b64encode(self.link.share(process.pid)) + b"\n")
            process.stdin.flush()


def take_link(argument: str) -> socket.socket:
    """Open the socket that the parent passed to this process; children do not inherit it.

    Args:
        argument: The last argument of this process.
    """
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(sys.stdin.buffer.readline()))
    else:
        link = socket.socket(fileno=int(argument))
        os.set_inheritable(link.fileno(), False)
        return link
