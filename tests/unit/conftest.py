"""Fixtures for unit tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one thread, as all of fedlearn's processes do."""
    torch.set_num_threads(1)
