"""Fixtures for pytest: ``pytest_plugins = ["fedlearn.testing.fixtures"]`` in a ``conftest.py``."""

from collections.abc import Iterator

import pytest

from fedlearn.testing import FakeCoordinator


@pytest.fixture
def fake_coordinator() -> Iterator[FakeCoordinator]:
    """A coordinator that runs while the test does."""
    with FakeCoordinator() as coordinator:
        yield coordinator
