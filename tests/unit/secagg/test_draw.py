"""The draw: as many clients as intended, the same ones everywhere, accomplices only by chance."""

import math
from fractions import Fraction

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.secagg.draw import RosterDraw, find_max_accomplices
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive

ALL = [ClientId(3 * each) for each in range(1000)]


def draw(
    roster: str = "a roster", *, factor: float = 2.0, num_clients: int = len(ALL)
) -> RosterDraw:
    return RosterDraw(roster=roster, client_ids=frozenset(ALL[:num_clients]), factor=factor)


@pytest.mark.slow
def test_each_client_is_drawn_as_often_as_another() -> None:
    """With p = 0.1 over 400 rounds, each of 1,000 clients is within five standard deviations."""
    counts = dict.fromkeys(ALL, 0)
    for round_num in range(400):
        for each in draw().select(ALL, round_num=round_num, cohort_size=50):
            counts[each] += 1
    deviation = math.sqrt(400 * 0.1 * 0.9)
    assert abs(sum(counts.values()) - 40_000) < 5 * deviation * math.sqrt(1000)
    assert max(abs(count - 40) for count in counts.values()) < 5 * deviation


def test_a_larger_factor_draws_those_of_a_smaller_one() -> None:
    few = draw(factor=1.0).select(ALL, round_num=7, cohort_size=50)
    many = draw(factor=3.0).select(ALL, round_num=7, cohort_size=50)
    assert set(few) < set(many)
    assert many == sorted(many), "in the order in which they were given"


def test_rounds_and_rosters_draw_others() -> None:
    first = draw().select(ALL, round_num=0, cohort_size=50)
    assert draw().select(ALL, round_num=0, cohort_size=50) == first
    assert draw().select(ALL, round_num=1, cohort_size=50) != first
    assert draw("another").select(ALL, round_num=0, cohort_size=50) != first


def test_where_all_are_needed_all_are_drawn_and_strangers_never() -> None:
    """With twelve in the roster and six invited, the factor of 2 draws the whole roster."""
    small = draw(num_clients=12)
    assert small.chance(6) == 1.0
    assert small.select([*ALL[:12], ClientId(1), ALL[12]], round_num=5, cohort_size=6) == ALL[:12]
    assert draw(num_clients=13).chance(6) < 1.0


@pytest.mark.parametrize(
    ("listed", "chance", "corrupted", "bits"),
    [(60, 0.2, 3, 10), (200, 0.1, 10, 20), (300, 0.5, 30, 41), (30, 1.0, 4, 5)],
)
def test_the_accomplices_that_are_tolerated_are_those_of_the_exact_distribution(
    listed: int, chance: float, corrupted: int, bits: int
) -> None:
    most = find_max_accomplices(
        listed, chance=chance, num_corrupted=corrupted, log2_risk=-float(bits)
    )
    p = Fraction(chance)

    def risk(accomplices: int) -> Fraction:
        return sum(
            (
                math.comb(accomplices, x) * p**x * (1 - p) ** (accomplices - x)
                for x in range(corrupted + 1, accomplices + 1)
            ),
            start=Fraction(0),
        )

    assert risk(most) <= Fraction(1, 2**bits) < risk(most + 1)


def test_what_a_draw_protects_from_is_printed() -> None:
    assumptions = Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=0.1,
        sigma_bits=40,
        eta_bits=30,
    )
    listed = frozenset(map(ClientId, range(100_000)))
    large = RosterDraw(roster="r", client_ids=listed, factor=2.0)
    label, text = large.explain(derive(1000, assumptions=assumptions))
    assert label == "drawn"
    assert text.startswith("of 100000 in the roster each with p = 0.02; ")
    assert "up to 1202 accomplices" in text
    assert text.endswith("more than A = 100 are drawn with P <= 2^-106 a try")
