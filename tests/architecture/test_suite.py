"""What the tests themselves rely on."""

from pathlib import Path

import pytest

from tests.gpus import lack_of_gpus


@pytest.mark.xdist_group("together")
def test_a_group_of_tests_is_known_to_the_workers(request: pytest.FixtureRequest) -> None:
    """By the end of its tests' names; where it cannot be written, fixtures are made twice."""
    is_grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@together") == is_grouped


def test_tests_in_the_folder_of_gpus_are_marked(request: pytest.FixtureRequest) -> None:
    """So that one command runs them, ``pytest -m gpu``; the others are not."""
    folder = Path(__file__).parents[1] / "gpu"
    for item in request.session.items:
        is_marked = item.get_closest_marker("gpu") is not None
        assert is_marked == item.path.is_relative_to(folder), item.nodeid


@pytest.mark.parametrize(
    ("found", "needed", "lack"),
    [
        (0, 1, "no GPU: torch sees no CUDA device"),
        (0, 2, "no GPU: torch sees no CUDA device"),
        (1, 2, "needs 2 GPUs, 1 found"),
        (1, 1, None),
        (3, 2, None),
    ],
)
def test_a_test_that_lacks_gpus_says_so(found: int, needed: int, lack: str | None) -> None:
    assert lack_of_gpus(found=found, needed=needed) == lack
