"""The table of the shelf finds its algorithms."""

import pytest

import fedlearn as fl
from tests.parity import shelf_table
from tests.parity.test_shelf import CASES

#: Cases that test a seam, not an algorithm that ships.
RULES_OF_TESTS = {
    "weighted by loss",
    "download",
    "fedprox with a personal head",
    "anchored",
    "anchored by tensor",
}


def test_each_case_is_named_as_what_it_tests() -> None:
    """So the table counts its lines."""
    nameless = {name for name in CASES if shelf_table.find_export(name) is None}
    assert nameless <= RULES_OF_TESTS


def test_an_algorithm_counts_with_its_file_or_with_its_part_of_one() -> None:
    """FedPer shares a file with two others."""
    assert 2 < shelf_table.size_of(fl.FedPer) < 10 < shelf_table.size_of(fl.Ditto)


@pytest.mark.slow
def test_the_cost_is_that_of_rounds_with_the_executor_that_was_chosen() -> None:
    cost, executor = shelf_table.compare_cost(CASES["feddyn"], turns=1, num_rounds=1)
    assert cost > 0.0
    assert executor == "fused"
