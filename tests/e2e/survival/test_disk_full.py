"""A full disk: replies are put off, a commit waits for space, and nothing is lost."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedlearn.store.runs import sqlite_url
from tests.e2e.survival.harness import VotingSite, audit
from tests.processes import until

pytestmark = pytest.mark.slow

_DISK_BYTES = 64 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 64 MB, in memory."""
    libc, folder = ctypes.CDLL(None, use_errno=True), tmp_path / "disk"
    folder.mkdir()
    target = str(folder).encode()
    options = f"size={_DISK_BYTES}".encode()
    if libc.mount(b"none", target, b"tmpfs", 0, options) != 0:
        pytest.skip(f"mounting a tmpfs: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(target, 2)  # MNT_DETACH, in case a process still has a file open


@contextmanager
def fill_while_clients_train(site: VotingSite, disk: Path) -> Iterator[None]:
    """Fill ``disk`` to its last page before clients report; the end of the block frees it."""
    ballast = disk / "ballast"
    with site.holding():
        site.populate()
        until(lambda: all(site.trained(number) == [0] for number in range(3)))
        with ballast.open("wb", buffering=0) as stream:
            for piece_bytes in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while stream.write(bytes(piece_bytes)) == piece_bytes:
                        pass
    try:
        yield
    finally:
        ballast.unlink()


def test_uploads_are_put_off_while_the_disk_is_full(site: VotingSite, small_disk: Path) -> None:
    """The clients keep their replies and send them again, without training twice."""
    site.configure(num_rounds=2, runs_dir=small_disk / "runs", folder=str(small_disk / "gateway"))
    coordinator = site.serving()
    with fill_while_clients_train(site, small_disk):
        refused = ("upload_not_stored", "reply_not_stored")
        until(lambda: sum(map(coordinator.said, refused)) >= 3)
        assert coordinator.is_running
        assert not any(site.told(number, "accepted") for number in range(3))
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3


def test_a_commit_waits_for_space(site: VotingSite, small_disk: Path) -> None:
    """All replies were acknowledged, so the round must not be lost because the disk is full."""
    site.store_url = sqlite_url(site.folder / "database" / "runs.db")
    site.configure(num_rounds=2, runs_dir=small_disk / "runs", folder=str(site.folder / "gateway"))
    coordinator = site.serving()
    with fill_while_clients_train(site, small_disk):
        until(lambda: all(site.told(number, "accepted") == {0} for number in range(3)))
        until(lambda: coordinator.said("the disk is full") > 0, told=coordinator.tail)
        assert site.rounds() == []
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3


def test_a_coordinator_that_is_killed_while_it_waits_for_space_goes_on(
    site: VotingSite, small_disk: Path
) -> None:
    """The replies are in the upload store, where the next coordinator finds them."""
    site.store_url = sqlite_url(site.folder / "database" / "runs.db")
    site.configure(num_rounds=1, runs_dir=small_disk / "runs", folder=str(site.folder / "gateway"))
    coordinator = site.serving()
    with fill_while_clients_train(site, small_disk):
        until(lambda: all(site.told(number, "accepted") == {0} for number in range(3)))
        coordinator.kill()
    again = site.coordinator()
    assert again.wait() == 0, again.tail()
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0]] * 3
