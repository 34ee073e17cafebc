"""Files are written completely or not at all, and disk errors become our own errors."""

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlearn.core.files import (
    create_private,
    explain_disk_errors,
    make_private_folder,
    sync_folder,
    write_durably,
    write_private,
)
from fedlearn.errors import DeploymentError, FedlearnError, StoreError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Have the kernel refuse files larger than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_written_for_all_that_the_umask_lets(tmp_path: Path) -> None:
    """Others may read a report, unless its owner's umask forbids it."""
    for mask, expected in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            write_durably(tmp_path / "report", b"content", raises=StoreError)
        finally:
            os.umask(before)
        assert (mode(tmp_path / "report"), names(tmp_path)) == (expected, ["report"])


def test_a_private_file_is_created_once_and_replaced_whole(tmp_path: Path) -> None:
    """Whatever its mode was before."""
    path = tmp_path / "file"
    assert create_private(path, b"first")
    assert not create_private(path, b"second")
    assert path.read_bytes() == b"first"
    path.chmod(0o644)
    write_private(path, b"third")
    assert (path.read_bytes(), mode(path)) == (b"third", 0o600)
    assert names(tmp_path) == ["file"]


def test_a_private_folder_is_closed_even_if_it_was_open(tmp_path: Path) -> None:
    """So are its parents."""
    folder = tmp_path / "a" / "b"
    make_private_folder(folder)
    folder.chmod(0o755)
    make_private_folder(folder)
    assert mode(folder) == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DeploymentError, match="cannot write"):
        make_private_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (write_private, DeploymentError),
        (create_private, DeploymentError),
        (lambda path, content: write_durably(path, content, raises=StoreError), StoreError),
    ],
    ids=["private", "created", "for all"],
)
def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, write: Callable[[Path, bytes], object], error: type[FedlearnError]
) -> None:
    """The folder is missing, or the disk refuses the second half."""
    with pytest.raises(error, match=r"cannot write .*: No such file or directory; check the path"):
        write(tmp_path / "missing" / "file", b"content")
    with (
        files_of_at_most(4096),
        pytest.raises(error, match=r"cannot write .*: File too large; free some space"),
    ):
        write(tmp_path / "file", bytes(10_000))
    assert names(tmp_path) == []


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """The final rename may fail as well."""
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(DeploymentError, match="cannot write"):
        write_private(tmp_path / "taken", b"content")
    assert names(tmp_path) == ["taken"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The old content is still complete."""
    path = tmp_path / "file"
    write_private(path, b"before")
    with files_of_at_most(4096), pytest.raises(DeploymentError):
        write_private(path, bytes(10_000))
    assert path.read_bytes() == b"before"


@pytest.mark.linux
def test_names_are_synchronized_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the content, then the rename, then the folder: any other order can lose the file."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synchronize(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("folder" if is_folder else "content")
        fsync(descriptor)

    def replace_file(path: Path, target: Path) -> Path:
        steps.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(Path, "replace", replace_file)
    write_private(tmp_path / "file", b"content")
    assert steps == ["content", "name", "folder"]


def test_other_errors_pass(tmp_path: Path) -> None:
    """Only disk errors are converted."""
    with pytest.raises(ValueError, match="ours"), explain_disk_errors(tmp_path, raises=StoreError):
        raise ValueError("ours")
    with (
        pytest.raises(StoreError, match=r"cannot read .*: No space left on device"),
        explain_disk_errors(tmp_path, raises=StoreError, doing="read"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.linux
def test_a_folder_that_is_missing_is_not_made_durable(tmp_path: Path) -> None:
    """The caller converts the error. Windows raises none, since the call does nothing there."""
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
