"""For pairs of options, fedlearn agrees with the reference, or refuses for a valid reason."""

import itertools
from collections import Counter

import pytest

from tests.oracle.configuration import QUICK_OPTIONS, Configuration
from tests.oracle.covering import build_covering, settle
from tests.oracle.walk import judge, shrink

#: The short walk: the first configurations, which cover most pairs of values.
NUM_CONFIGURATIONS = 24
#: It is split into this many tests; a default run has one of them.
NUM_PARTS = 6

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="session")
def configurations() -> list[Configuration]:
    """Return the configurations of the short walk."""
    return list(itertools.islice(build_covering(0, QUICK_OPTIONS), NUM_CONFIGURATIONS))


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))]
)
def test_pairs_of_options_equal_the_reference(
    part: int, configurations: list[Configuration]
) -> None:
    """``python -m tests.oracle`` runs the longer walk."""
    counts = Counter[str]()
    for c in configurations[part::NUM_PARTS]:
        verdict = judge(c)
        counts[verdict.kind] += 1
        if verdict.kind == "disagrees":
            command = f"python -m tests.oracle --only '{shrink(c).to_json()}'"
            pytest.fail("\n".join([*verdict.problems, command]))
    assert counts["agrees"] > counts["refused"]


def test_a_configuration_is_read_back_from_its_text() -> None:
    """So that a command can repeat it."""
    c = settle(Configuration(algorithm="scaffold", weight_decay=0.1, seed=1))
    assert Configuration.from_json(c.to_json()) == c
    assert Configuration.from_json("{}") == Configuration()
