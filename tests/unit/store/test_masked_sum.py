"""The masked sum of a round on disk: complete or absent, private, and never silently lost."""

import errno
import stat
from pathlib import Path

import pytest
import structlog

from fedlearn.core.clock import VirtualClock
from fedlearn.errors import NoSpace, StoreError
from fedlearn.store.masked_sum import MaskedSumFile
from fedlearn.store.patience import Patience


def file_in(folder: Path, *, clock: VirtualClock | None = None) -> MaskedSumFile:
    patiently = Patience(
        clock=clock or VirtualClock(), give_up_s=30.0, log=structlog.get_logger(__name__)
    )
    return MaskedSumFile(path=folder / "masked-sum", patiently=patiently)


def test_a_sum_is_kept_in_place_of_the_last_and_forgotten(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    assert file.read() == b""
    file.clear()  # clearing a missing file is fine
    for data in (b"first", b"second"):
        file.save(data)
        assert file_in(tmp_path).read() == data
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.clear()
    assert file.read() == b""
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_waited_for_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum must be stored before it is unmasked: after a crash it would be needed again."""
    clock = VirtualClock()
    file = file_in(tmp_path, clock=clock)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(NoSpace):
        file.save(b"sum")
    assert clock.now_s() >= 30.0
    monkeypatch.undo()
    file.save(b"sum")
    assert file.read() == b"sum"


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="masked-sum"):
        file_in(tmp_path / "nowhere").save(b"sum")
