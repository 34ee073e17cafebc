"""Each process of a machine gets its own GPU, or an error that there are too few."""

import pytest
import torch

from fedlearn.assembly.choices import choose_device
from fedlearn.core.gpus import find_own_gpu
from fedlearn.errors import ConfigError


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def of_torchrun(local_rank: int, started: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(started)}


@pytest.mark.usefixtures("three_gpus")
def test_a_gpu_is_that_of_the_rank_on_its_machine() -> None:
    assert find_own_gpu({}) == torch.device("cuda", 0)
    assert find_own_gpu(of_torchrun(2, 3)) == torch.device("cuda", 2)


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_own_gpu(of_torchrun(3, 4)) is None


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("local_rank", [0, 3])
def test_too_few_are_told_to_every_process(local_rank: int) -> None:
    """Even the first process, which alone prints, and would otherwise wait for the others."""
    environ = of_torchrun(local_rank, 4)
    with pytest.raises(
        ConfigError, match=r"has started 4 processes .*, but there are 3; start at most 3"
    ):
        find_own_gpu(environ)
    with pytest.raises(ConfigError, match="there are 3"):
        choose_device("auto", environ)
    assert choose_device("cpu", environ) == torch.device("cpu")
