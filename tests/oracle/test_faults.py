"""The walk detects deliberate faults: the control of ``test_walk.py``."""

import pytest

from tests.oracle.faults import FAULTS, Fault, find_disagreement

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_walk_catches_a_fault(fault: Fault) -> None:
    """``python -m tests.oracle --faults`` prints the configurations that detect faults."""
    assert find_disagreement(fault) is not None
