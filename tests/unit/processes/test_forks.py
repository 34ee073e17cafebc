"""What a forked child holds of its parent."""

import os
import socket

import pytest

from fedlearn.processes.forks import keep_from_forks


def is_open_in_a_child(link: socket.socket) -> bool:
    descriptor = link.fileno()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 1


@pytest.mark.linux
def test_a_child_holds_what_is_not_kept_from_it_and_nothing_else() -> None:
    """The parent goes on with both."""
    kept, other = socket.socketpair()
    with kept, other:
        assert is_open_in_a_child(kept)  # the control
        keep_from_forks(kept)
        assert not is_open_in_a_child(kept)
        assert is_open_in_a_child(other)
        other.sendall(b"x")
        assert kept.recv(1) == b"x"
