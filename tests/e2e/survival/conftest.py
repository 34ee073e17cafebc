"""Fixture with a deployment whose coordinators and clients are disturbed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.survival.harness import VotingSite
from tests.processes import Launcher


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[VotingSite]:
    """A deployment on SQLite, not configured yet."""
    with VotingSite(launcher, tmp_path) as site:
        yield site
