"""A door with its authority, for all who come to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.peers.harness import Site, site_in


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path) as site:
        yield site
