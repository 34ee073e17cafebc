"""What the tests themselves rely on."""

import pytest


@pytest.mark.xdist_group("together")
def test_a_group_of_tests_is_known_to_the_workers(request: pytest.FixtureRequest) -> None:
    """By the end of its tests' names; where it cannot be written, fixtures are made twice."""
    is_grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@together") == is_grouped
