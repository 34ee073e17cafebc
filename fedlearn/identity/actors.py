"""Who acts on a deployment, and from where."""

import getpass
import os
import socket
import sys
from dataclasses import dataclass
from typing import Literal

if sys.platform != "win32":
    import pwd


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who did something, and from where, as the audit log records it.

    Attributes:
        kind: An operator, a client, the coordinator by itself, or a visitor of its page who is no
            operator.
        name: The operator's account or name, the client's name, or who the page's provider says
            that a visitor is; empty for the coordinator, and for a visitor that nobody knows.
        origin: Host of the process, or the address that a request came from; empty if unknown.

    Example:
        >>> Actor(kind="operator", name="alice", origin="it-7").label
        'operator:alice'
    """

    kind: Literal["operator", "client", "coordinator", "visitor"]
    name: str
    origin: str

    @property
    def label(self) -> str:
        """The kind and the name in one word."""
        return f"{self.kind}:{self.name}" if self.name else self.kind


def local_operator() -> Actor:
    """Return the user of this process, on this host.

    The operating system says who the user is; variables such as ``USER`` are not believed.
    """
    return Actor(kind="operator", name=_find_account(), origin=socket.gethostname())


def local_coordinator() -> Actor:
    """Return the coordinator that runs in this process, on this host."""
    return Actor(kind="coordinator", name="", origin=socket.gethostname())


def remote_client(name: str, *, origin: str) -> Actor:
    """Return the client called ``name``, whose request came from the address ``origin``."""
    return Actor(kind="client", name=name, origin=origin)


def remote_operator(name: str, *, origin: str) -> Actor:
    """Return the operator with a certificate for ``name``, whose request came from ``origin``.

    Its label looks like that of a local account. Its origin does not: a gRPC peer's address has a
    colon, as in ``ipv4:10.0.0.7:4711``, which no host name has.
    """
    return Actor(kind="operator", name=name, origin=origin)


def page_visitor(identity: str, *, origin: str) -> Actor:
    """Return somebody who tried to sign in to the page; ``identity`` may be empty."""
    return Actor(kind="visitor", name=identity, origin=origin)


def _find_account() -> str:
    if sys.platform == "win32":
        return getpass.getuser()
    else:
        number = os.geteuid()
        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:  # a container may run under a number without a name
            return f"uid-{number}"
