"""Fixtures for all parity tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Leave the other cores to the other processes: tiny models would only wait for them."""
    torch.set_num_threads(1)
