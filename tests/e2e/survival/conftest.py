"""The processes of this folder come from one launcher."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.survival.harness import Launcher, Site


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts processes; those that are left end with the session."""
    with Launcher.start() as started:
        yield started


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment on SQLite, not configured yet."""
    with Site(launcher, tmp_path, store_url=None) as site:
        yield site
