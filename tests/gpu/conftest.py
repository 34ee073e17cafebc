"""Tests that need GPUs, and are skipped without them: ``pytest -m gpu``."""

from pathlib import Path

import pytest
import torch

from tests.gpus import lack_of_gpus

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, before pytest selects tests by their marks."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("gpu")


def _require(needed: int) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (lack := lack_of_gpus(found=found, needed=needed)) is not None:
        pytest.skip(lack)


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """Return the first GPU."""
    _require(1)
    return torch.device("cuda", 0)


@pytest.fixture
def two_gpus(gpu: torch.device) -> tuple[torch.device, torch.device]:
    """Return two GPUs."""
    _require(2)
    return gpu, torch.device("cuda", 1)
