"""The control of a running task: cancellation, checkpoints and progress reports."""

from pathlib import Path

import pytest
import torch

from fedlearn.client.control import WorkControl
from fedlearn.client.task_folder import TaskFolder
from fedlearn.core.clock import VirtualClock
from fedlearn.errors import Cancelled


class SlowDisk(TaskFolder):
    """Takes one second to write a checkpoint."""

    clock = VirtualClock()

    def save_checkpoint(self, content: bytes) -> None:
        """Let one second pass."""
        self.clock.sleep(1.0)
        super().save_checkpoint(content)


@pytest.fixture
def folder(tmp_path: Path) -> TaskFolder:
    return TaskFolder(tmp_path)


def silent(folder: TaskFolder, clock: VirtualClock) -> WorkControl:
    return WorkControl(folder, clock, on_report=lambda _fraction, _loss: None)


def test_a_task_ends_at_its_next_check(folder: TaskFolder) -> None:
    """Checks before it was called off pass."""
    control = silent(folder, VirtualClock())
    control.check()
    control.cancel()
    with pytest.raises(Cancelled):
        control.check()


def test_what_is_saved_is_found_by_the_next_attempt(folder: TaskFolder) -> None:
    """Tensors may share memory, like views of one vector."""
    vector = torch.arange(6.0)
    silent(folder, VirtualClock()).save({"a": vector[:3], "b": vector[3:], "c": vector})
    found = silent(folder, VirtualClock()).load()
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [0.0, 1.0, 2.0],
        "b": [3.0, 4.0, 5.0],
        "c": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    }


def test_tensors_of_any_format_are_saved(folder: TaskFolder) -> None:
    """Channels-last and transposed tensors keep their values."""
    images, matrix = torch.arange(16.0).view(1, 4, 2, 2), torch.arange(6.0).view(2, 3)
    given = {"images": images.to(memory_format=torch.channels_last), "matrix": matrix.t()}
    silent(folder, VirtualClock()).save(given)
    found = silent(folder, VirtualClock()).load()
    assert torch.equal(found["images"], images)
    assert torch.equal(found["matrix"], matrix.t())


def test_nothing_or_nonsense_saved_is_nothing(folder: TaskFolder) -> None:
    """The task then starts from the beginning."""
    control = silent(folder, VirtualClock())
    assert control.load() == {}
    folder.save_checkpoint(b"nonsense")
    assert control.load() == {}


def test_checkpoints_take_a_small_share_of_the_time(folder: TaskFolder) -> None:
    """On a slow disk, checkpoints are less frequent."""
    clock = SlowDisk.clock
    control = silent(SlowDisk(folder.folder), clock)
    for step in range(200):
        control.save({"step": torch.tensor(step)})
        clock.sleep(1.0)
    assert clock.now_s() <= 200 * 1.06
    assert int(control.load()["step"]) > 170


def test_reports_are_few_and_the_last_one_comes(folder: TaskFolder) -> None:
    """However fast batches are, reports are limited, but the last one is always sent."""
    heard: list[float] = []
    clock = VirtualClock()
    control = WorkControl(folder, clock, on_report=lambda fraction, _loss: heard.append(fraction))
    for step in range(1, 1001):
        control.report(fraction=step / 1000, loss=0.0)
        clock.sleep(0.001)
    assert len(heard) <= 12
    assert heard[-1] == 1.0
