"""Which descriptors a forked child inherits."""

import os
import select
import signal
import socket

import pytest

from fedlearn.processes.forks import ForkedProcess, Link, keep_from_forks, run_forks
from tests.processes import LONG_S


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
    """The parent keeps both open."""
    kept, other = socket.socketpair()
    with kept, other:
        assert is_open_in_a_child(kept)  # the control
        keep_from_forks(kept)
        assert not is_open_in_a_child(kept)
        assert is_open_in_a_child(other)
        other.sendall(b"x")
        assert kept.recv(1) == b"x"


def hear_twice(link: Link) -> None:
    """Echo two messages; exit with 3 if the link is closed before."""
    for _ in range(2):
        try:
            link.send(link.recv())
        except EOFError:
            os._exit(3)


def wait_for_ever(_: Link) -> None:
    while True:
        signal.pause()


def raise_an_error(_: Link) -> None:
    raise SystemExit(0)  # would exit with status 0, a success


@pytest.mark.linux
def test_a_link_of_one_fork_is_in_no_other() -> None:
    """Each end closes when its owner exits, whichever child was forked later."""
    with run_forks([hear_twice, wait_for_ever, wait_for_ever]) as (first, killed, last):
        first.link.send("here")
        assert first.link.recv() == "here"
        descriptor = os.pidfd_open(first.pid)
        first.link.close()
        assert select.select([descriptor], [], [], LONG_S)[0]
        os.close(descriptor)
        assert first.wait() == 3
        killed.kill()
        assert killed.link.poll(LONG_S)
        with pytest.raises((EOFError, OSError)):
            killed.link.recv()
        assert killed.wait() == -signal.SIGKILL
        assert not last.link.poll(0.0)  # the control
    assert last.wait() == -signal.SIGKILL


@pytest.mark.linux
def test_no_fork_is_left_whatever_ends_the_context() -> None:
    """A child that exits by itself exits with 0 only if its body has returned."""
    seen = list[ForkedProcess]()

    def fail() -> None:
        with run_forks([wait_for_ever, raise_an_error, lambda _: None]) as forks:
            seen.extend(forks)
            assert [each.wait() for each in forks[1:]] == [1, 0]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for each in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(each.pid, 0)
