"""A server with its authority, for the tests of hostile peers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.peers.harness import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as site:
        yield site
