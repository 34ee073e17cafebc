"""k and t: the published choices, the formulas behind them, and the combinations refused."""

import math
import resource
from dataclasses import replace
from fractions import Fraction

import pytest

from fedlearn.errors import ConfigError
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import (
    Adversary,
    Assumptions,
    derive,
    is_connected,
    lowest_quorum,
    lowest_threshold,
    max_corrupted_neighbors,
    num_corrupted,
    num_holders,
)

CURIOUS, ACTIVE = Adversary.HONEST_BUT_CURIOUS, Adversary.ACTIVE_SERVER


def assume(
    adversary: Adversary,
    topology: Topology,
    *,
    corruption: float = 0.1,
    dropout: float = 0.1,
) -> Assumptions:
    return Assumptions(
        adversary=adversary,
        topology=topology,
        corruption=corruption,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )


@pytest.mark.parametrize(
    ("adversary", "n", "k", "t"),
    [
        (CURIOUS, 100, 22, 11),
        (CURIOUS, 300, 42, 22),
        (CURIOUS, 1000, 52, 28),
        (CURIOUS, 10_000, 60, 32),
        (ACTIVE, 100, 32, 22),
        (ACTIVE, 300, 82, 57),
        (ACTIVE, 1000, 172, 127),
        (ACTIVE, 10_000, 222, 162),
    ],
)
def test_sparse_graphs_have_the_published_sizes(
    adversary: Adversary, n: int, k: int, t: int
) -> None:
    """With a tenth corrupted, a tenth dropped, sigma = 40 and eta = 30."""
    found = derive(n, assumptions=assume(adversary, Topology.SPARSE))
    assert (found.num_neighbors, found.threshold) == (k, t)


@pytest.mark.parametrize("n", [3, 10, 30, 100, 101])
@pytest.mark.parametrize("corruption", [0.0, 0.1, 0.3])
def test_in_a_complete_graph_t_is_the_least_that_is_safe(n: int, corruption: float) -> None:
    """With one share less, an active server could get both secrets of a client."""
    given = assume(ACTIVE, Topology.COMPLETE, corruption=corruption, dropout=0.0)
    found, corrupted = derive(n, assumptions=given), max(1, math.ceil(corruption * n - 1e-9))
    assert 2 * found.threshold > n + corrupted >= 2 * (found.threshold - 1)
    assert found.quorum == lowest_quorum(n, assumptions=given) == found.threshold


def test_a_third_corrupted_needs_more_than_two_thirds() -> None:
    given = assume(ACTIVE, Topology.COMPLETE, corruption=1 / 3)
    assert derive(100, assumptions=given).threshold == 68
    assert derive(99, assumptions=given).threshold == 67


def test_somebody_is_corrupted_in_any_cohort() -> None:
    """With a corruption of 0.1: one client of three, and two of eleven."""
    given = assume(ACTIVE, Topology.COMPLETE)
    found = {n: derive(n, assumptions=given).num_corrupted for n in (3, 9, 10, 11, 30)}
    assert found == {3: 1, 9: 1, 10: 1, 11: 2, 30: 3}
    assert num_corrupted(3, corruption=0.0) == 1, "whatever is assumed"


def test_the_tail_is_that_of_the_exact_distribution() -> None:
    """In rational numbers, P[more than a] is within the bound, and P[more than a - 1] is not."""
    for n, k, corrupted in ((100, 22, 10), (300, 76, 30)):
        given = assume(CURIOUS, Topology.SPARSE)
        a = max_corrupted_neighbors(n, k, roster_size=n, assumptions=given)
        others, ways = n - 1, math.comb(n - 1, k)

        def above(
            x: int, k: int = k, c: int = corrupted, o: int = others, w: int = ways
        ) -> Fraction:
            cases = (math.comb(c, y) * math.comb(o - c, k - y) for y in range(x + 1, k + 1))
            return Fraction(sum(cases), w)

        allowed = Fraction(1, n * 2**41)
        assert above(a) <= allowed < above(a - 1)


def test_a_ring_is_connected_unless_two_gaps_open() -> None:
    """If fewer clients are gone than two gaps take, the ring is never cut."""
    given = assume(CURIOUS, Topology.SPARSE)
    assert is_connected(100, 22, assumptions=given)
    assert not is_connected(100, 4, assumptions=given)
    assert is_connected(10, 4, assumptions=given), "two of ten are gone, a cut needs four"


@pytest.mark.parametrize(
    ("n", "given", "message"),
    [
        (1, assume(CURIOUS, Topology.COMPLETE), "2 to"),
        (10, assume(ACTIVE, Topology.COMPLETE, corruption=0.5, dropout=0.4), "needs q = 8"),
        (10, assume(CURIOUS, Topology.COMPLETE, corruption=0.6, dropout=0.5), "needs t = 7"),
        (
            10,
            assume(ACTIVE, Topology.SPARSE, corruption=0.3, dropout=0.3),
            "use the complete graph",
        ),
    ],
)
def test_assumptions_that_nothing_satisfies_are_refused(
    n: int, given: Assumptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        derive(n, assumptions=given)


def first_that_holds(n: int, given: Assumptions) -> tuple[int, int] | None:
    """Find k and t by trying every k; n * dropout must be a whole number, 1 or more."""
    is_active = given.adversary is ACTIVE
    fewest = n - round(given.dropout * n) if is_active else n
    dropping = replace(
        given, adversary=CURIOUS, corruption=given.dropout, sigma_bits=given.eta_bits - 1
    )
    for k in range(2, fewest - 1, 2):
        if not is_active and not is_connected(n, k, assumptions=given):
            continue
        answering = k - max_corrupted_neighbors(n, k, roster_size=n, assumptions=dropping)
        t = lowest_threshold(n, k, roster_size=fewest, assumptions=given)
        if t <= answering:
            return k, t
    return None


@pytest.mark.parametrize("adversary", [CURIOUS, ACTIVE])
@pytest.mark.parametrize("n", [20, 60, 100, 300])
@pytest.mark.parametrize("corruption", [0.05, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.2, 0.4, 0.55])
def test_the_least_k_that_holds_is_found_without_a_look_at_each(
    adversary: Adversary, n: int, corruption: float, dropout: float
) -> None:
    given = assume(adversary, Topology.SPARSE, corruption=corruption, dropout=dropout)
    expected = first_that_holds(n, given)
    too_many = adversary is ACTIVE and lowest_quorum(n, assumptions=given) > n - round(dropout * n)
    if expected is None or too_many:
        with pytest.raises(ConfigError, match="signatures" if too_many else "no sparse graph"):
            derive(n, assumptions=given)
    else:
        chosen = derive(n, assumptions=given)
        assert (chosen.num_neighbors, chosen.threshold) == expected


def test_what_holds_in_no_sparse_graph_is_refused_promptly() -> None:
    """Trying each k takes longer for larger k: a full search took 16 s here."""
    given = assume(ACTIVE, Topology.SPARSE, corruption=0.33, dropout=0.33)
    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(ConfigError, match="no sparse graph on 50000 clients"):
        derive(50_000, assumptions=given)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before_s < 3.0


@pytest.mark.parametrize(("name", "value"), [("corruption", 1.0), ("dropout", -0.1)])
def test_impossible_fractions_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        assume(ACTIVE, Topology.COMPLETE, **{name: value})


def test_the_choice_is_printed_with_its_formulas() -> None:
    told = dict(derive(1000, assumptions=assume(ACTIVE, Topology.SPARSE)).explain())
    assert told["neighbors"] == "k = 172, of them corrupted a = 71, more with P <= 2^-106"
    assert "t = 127, the least with 2t > h + a = 243 and t >= k/2 + c = 127" in told["threshold"]
    assert "c = 41 corrupted each with P <= 2^-106, whichever clients drop out" in told["cut"]
    assert "of 1000 signatures 114 are opened, of 900 135; with fewer than q real" in told["audit"]
    assert told["in all"] == "with 2^64 tries at each of these it fails with P <= 2^-40"
    assert "2q > n + A = 1100" in told["quorum"]
    curious = dict(derive(1000, assumptions=assume(CURIOUS, Topology.COMPLETE)).explain())
    assert "t > a = 100" in curious["threshold"]
    assert "quorum" not in curious


def test_a_client_keeps_its_own_shares_in_the_complete_graph_only() -> None:
    assert num_holders(10, 9) == 10
    assert num_holders(10, 4) == 4
