"""What unit tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Compute as every process of ours does."""
    torch.set_num_threads(1)
