"""What a forked child must not keep open: it may outlive the process that it was forked from."""

import os
from typing import Protocol
from weakref import WeakSet


class Closable(Protocol):
    """A socket or a file without a buffer, which a child would write once more."""

    def close(self) -> None:
        """Let go of it in this process."""


_own = WeakSet[Closable]()


def keep_from_forks(resource: Closable) -> None:
    """Have ``resource`` closed in every child that is forked from now on, while it is in use."""
    _own.add(resource)


def _let_go() -> None:
    for resource in list(_own):
        resource.close()


os.register_at_fork(after_in_child=_let_go)
