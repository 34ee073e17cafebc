r"""Derives k, t and q from assumptions: how many neighbors, shares and signatures are needed.

====== ====================== =========================================================
paper  here                   meaning
====== ====================== =========================================================
n      num_clients            clients invited to the session
gamma  corruption             largest fraction of them that the adversary controls
delta  dropout                largest fraction of them that may drop out
A, D   num_corrupted, …       max(1, ⌈gamma n⌉), ⌊delta n⌋
k      num_neighbors          n - 1 in the complete graph
h      num_holders            clients that keep shares of one client's secrets
t      threshold              shares needed to recover a client's secret
q      quorum                 signatures over the survivors before a client releases
n - D  min_survivors          fewest clients in a released sum
sigma  sigma_bits             privacy fails with probability at most 2^-sigma
eta    eta_bits               a round fails with probability at most 2^-eta
====== ====================== =========================================================

The k neighbors of a client hold shares of its secrets; in the complete graph the client holds one
as well (so that small cohorts survive one more dropout). So h = k in a sparse graph, and h = m in
the complete graph of m clients. Let a be the largest number of corrupted neighbors of one client:
A in the complete graph; in a sparse one it follows from the tail of the hypergeometric
distribution, P[more than a] <= 2^-r / n, where r is the number of bits with which each single way
to fail must be ruled out (:func:`risk_bits`).

* *Honest but curious*: the corrupted holders alone must not be enough: t > a.
* *Active server*: it may show different survivors to different holders, and so get one share from
  every honest holder and two from a corrupted one. Both secrets of a client cost it 2t of these
  h + a shares: 2t > h + a.
* One set of survivors: every honest client signs only one set, so two sets with q signatures each
  need 2q <= n + A. This is ruled out by 2q > n + A.
* Recovery: t holders must survive. In the complete graph n - D do; in a sparse one
  P[fewer than t] <= 2^-eta / n.
* A sparse graph stays connected without the corrupted and dropped clients, except with
  P <= 2^-r: the ring only falls apart if two runs of k/2 neighbors are gone completely.

The lowest safe t is used, since it tolerates the most dropouts.

In a sparse graph an *active server* has more ways to attack, and the numbers allow for all of them:

* *A smaller roster.* The server shows only m of the n clients, with all corrupted ones among them,
  so a is computed for A of m. Clients refuse a roster of fewer than q, and check t again for the m
  that they see; ``derive`` finds k and t that hold for each m down to n - D.
* *Chosen dropouts.* The server knows the ring, and chooses whose vectors and signatures it claims
  to have received, so that the survivors fall into parts that share no mask. Call an honest client
  that releases shares *releasing*. It has the packet of each survivor next to it, so two releasing
  clients within k/2 places share a mask; and each honest survivor has a releasing neighbor, since
  t > a. So if there are two parts, the ring has two disjoint runs of k/2 places without a releasing
  client, each after a releasing client of one part and before the next one of the other. For that
  client t shares are released only if, in addition to the k/2 holders on its other side, at least
  c = t - k/2 corrupted ones are in the run. Counts in disjoint runs are negatively associated, so
  P[two runs with c or more] <= n²/2 P[c or more in one]², and if 2c > A there are no two.
* *Made-up members.* A client sees the root of a tree over m positions, but only its own entry and
  k others. At most A of the m positions open to corrupted clients, since no id opens at two
  (:mod:`fedlearn.secagg.merkle`), and they are fixed before the ring is. A position that opens to
  no client holds no share, signs nothing, and ends the session of each honest neighbor before that
  shares anything. The analysis above counts it as honest, and it does not help the server. So
  nothing above changes, for the claimed m.
* *Made-up signatures.* Of q' claimed signatures s are opened (:mod:`fedlearn.secagg.audit`).
* *Grinding.* The ring follows from the hash of the roster, so each roster that the server tries
  gives another ring, and each root of signatures another sample. Privacy must hold with sigma bits
  after 2^64 tries at each (:data:`GRINDING_BITS`). So r is sigma + 2 + 64.

References:
    Bonawitz et al., 2017, `Practical Secure Aggregation for Privacy-Preserving Machine
    Learning <https://doi.org/10.1145/3133956.3133982>`_, section 6; Bell et al., 2020, `Secure
    Single-Server Aggregation with (Poly)Logarithmic Overhead
    <https://doi.org/10.1145/3372297.3417885>`_; Joag-Dev and Proschan, 1983, `Negative Association
    of Random Variables with Applications <https://doi.org/10.1214/aos/1176346079>`_.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Annotated

import numpy as np
from annotated_types import doc
from numpy.typing import NDArray

from fedlearn.core.ranges import BelowOne, Count, describe_out_of_range
from fedlearn.errors import ConfigError
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.shamir import MAX_THRESHOLD

#: Largest n. Little grows with n at a client: 8 n bytes of SHAKE-256 and a sort for the ring, and
#: two bitmaps of n / 8 bytes. A coordinator keeps the packets of all clients in memory, 20 kB per
#: client with k = 222: that is the limit reached first.
MAX_CLIENTS = 1 << 17

#: log2 of how many rings an active server may try until one suits it. Each try costs it a hash of
#: the roster, 8 n bytes of SHAKE-256 and a sort, before it knows whether the ring does.
GRINDING_BITS = 64

#: Fractional bits of a fixed-point probability, in addition to those that are compared.
_GUARD_BITS = 64

#: One share alone must never reveal a secret.
_MIN_THRESHOLD = 2

#: Fractions such as 0.1 * 30 must not lose a client to rounding.
_TINY = 1e-9


class Adversary(IntEnum):
    """The adversary that the protocol withstands; a higher value includes the lower ones."""

    HONEST_BUT_CURIOUS = 0
    ACTIVE_SERVER = 1


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The assumptions from which k, t and q are derived."""

    adversary: Annotated[Adversary, doc("The adversary that the protocol must withstand.")]
    topology: Annotated[Topology, doc("The mask graph: complete or sparse.")]
    corruption: Annotated[
        BelowOne,
        doc(
            "Largest fraction of the invited clients that the adversary controls, gamma in [0, 1)."
        ),
    ]
    dropout: Annotated[
        BelowOne,
        doc(
            "Largest fraction of the invited clients that drop out, including those that "
            "over-selection invites in excess, delta in [0, 1)."
        ),
    ]
    sigma_bits: Annotated[
        Count,
        doc(
            "In a sparse graph privacy fails with probability at most 2^-sigma, sigma >= 1; "
            "against an active server, over all rosters that it can try."
        ),
    ]
    eta_bits: Annotated[
        Count, doc("In a sparse graph a round fails with probability at most 2^-eta, eta >= 1.")
    ]

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"secure aggregation: {wrong}")

    @property
    def log2_risk(self) -> float:
        """log2 of the largest probability that privacy fails in one way, in one try."""
        return -float(risk_bits(self.sigma_bits, adversary=self.adversary))


def risk_bits(sigma_bits: int, *, adversary: Adversary) -> int:
    """Return r: privacy may fail in each single way, in one try, with probability at most 2^-r.

    A curious server sees one ring, which may fail in two ways: too many corrupted neighbors, or a
    disconnected graph. An active server has four ways, with 2^64 tries at each: corrupted
    neighbors, gaps in the ring, made-up signatures that no client checks
    (:mod:`fedlearn.secagg.audit`), and accomplices that a roster draws
    (:mod:`fedlearn.secagg.draw`).
    """
    # A union bound: 2 bits for the four ways (1 for two), GRINDING_BITS for the tries.
    if adversary is Adversary.ACTIVE_SERVER:
        return sigma_bits + 2 + GRINDING_BITS
    return sigma_bits + 1


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The numbers of a session, with the assumptions that they were derived from.

    Attributes:
        assumptions: gamma, delta and the rest.
        num_clients: n.
        num_neighbors: k.
        threshold: t.
        quorum: q.
        min_survivors: Fewest clients in a released sum: n - D.
    """

    assumptions: Assumptions
    num_clients: int
    num_neighbors: int
    threshold: int
    quorum: int
    min_survivors: int

    @property
    def num_corrupted(self) -> int:
        """A, the largest number of clients that the adversary controls."""
        return num_corrupted(self.num_clients, corruption=self.assumptions.corruption)

    def num_audited(self, num_signed: int) -> int:
        """Return the number of signatures, out of ``num_signed``, to open in a sparse graph."""
        given = self.assumptions
        risk = risk_bits(given.sigma_bits, adversary=given.adversary)
        return num_audited(num_signed, quorum=self.quorum, risk_bits=risk)

    def explain(self) -> list[tuple[str, str]]:
        """Explain the choices with their formulas, as pairs of a label and a text.

        Example:
            >>> for label, text in derive(100, assumptions=Assumptions(
            ...     adversary=Adversary.ACTIVE_SERVER, topology=Topology.COMPLETE,
            ...     corruption=1 / 3, dropout=0.1, sigma_bits=40, eta_bits=30)).explain():
            ...     print(label, text)
            graph complete, against an active server
            clients n = 100, of them corrupted A = ⌈0.333 n⌉ = 34, dropped D = ⌊0.1 n⌋ = 10
            neighbors k = n - 1 = 99, of them corrupted a = A = 34
            threshold t = 68, the least with 2t > h + a = 134; recovery needs t <= 90
            quorum q = 68, the least with 2q > n + A = 134
            survivors at least n - D = 90, else the round is aborted
        """
        given, n, k = self.assumptions, self.num_clients, self.num_neighbors
        active = given.adversary is Adversary.ACTIVE_SERVER
        complete = given.topology is Topology.COMPLETE
        corrupted, dropped = self.num_corrupted, floor_fraction(given.dropout, n)
        fewest = _smallest_roster(n, assumptions=given)
        a = max_corrupted_neighbors(n, k, roster_size=fewest, assumptions=given)
        server = "an active" if active else "an honest-but-curious"
        risk = f"P <= 2^{given.log2_risk:.0f}"
        if complete:
            neighbors = f"n - 1 = {k}, of them corrupted a = A = {a}"
            shares = f"t <= {n - dropped}"
        else:
            neighbors = f"{k}, of them corrupted a = {a}, more with {risk}"
            shares = f"t neighbors, fewer with P <= 2^-{given.eta_bits}"
        rule, more = f"t > a = {a} and t >= {_MIN_THRESHOLD}", list[tuple[str, str]]()
        if active:
            rule = f"2t > h + a = {num_holders(n, k) + a}"
            if not complete:
                c = _gap_bound(n, k, roster_size=fewest, assumptions=given)
                rule = f"{rule} and t >= k/2 + c = {k // 2 + c}"
                gaps = f"two gaps of k/2 with c = {c} corrupted each with {risk}"
                more += [("cut", f"{gaps}, whichever clients drop out")]
            both = f"2q > n + A = {n + corrupted}"
            more += [("quorum", f"q = {self.quorum}, the least with {both}")]
            if not complete:
                fewest_signed = max(n - dropped, self.quorum)
                audited = [self.num_audited(signed) for signed in (n, fewest_signed)]
                opened = f"{audited[0]} are opened, of {fewest_signed} {audited[1]}"
                real = f"with fewer than q real ones all of them are real with {risk}"
                tries = f"with 2^{GRINDING_BITS} tries at each of these it fails with"
                more += [
                    ("audit", f"of {n} signatures {opened}; {real}"),
                    ("in all", f"{tries} P <= 2^-{given.sigma_bits}"),
                ]
        largest = f"of them corrupted A = ⌈{given.corruption:.3g} n⌉ = {corrupted}"
        least = f"t = {self.threshold}, the least with {rule}"
        return [
            ("graph", f"{given.topology.name.lower()}, against {server} server"),
            ("clients", f"n = {n}, {largest}, dropped D = ⌊{given.dropout:.3g} n⌋ = {dropped}"),
            ("neighbors", f"k = {neighbors}"),
            ("threshold", f"{least}; recovery needs {shares}"),
            *more,
            ("survivors", f"at least n - D = {self.min_survivors}, else the round is aborted"),
        ]


def derive(num_clients: int, *, assumptions: Assumptions) -> Parameters:
    """Derive k, t and q for ``num_clients`` under ``assumptions``.

    Raises:
        ConfigError: No choice satisfies them.

    Example:
        >>> curious = Assumptions(
        ...     adversary=Adversary.HONEST_BUT_CURIOUS, topology=Topology.SPARSE,
        ...     corruption=0.1, dropout=0.1, sigma_bits=40, eta_bits=30)
        >>> (found := derive(1000, assumptions=curious)).num_neighbors, found.threshold
        (52, 28)
    """
    if not 2 <= num_clients <= MAX_CLIENTS:  # noqa: PLR2004 - a sum of one is no sum
        raise ConfigError(f"secure aggregation takes 2 to {MAX_CLIENTS} clients, not {num_clients}")
    min_survivors = num_clients - floor_fraction(assumptions.dropout, num_clients)
    quorum = lowest_quorum(num_clients, assumptions=assumptions)
    if assumptions.adversary is Adversary.ACTIVE_SERVER and quorum > min_survivors:
        raise _build_error(num_clients, assumptions, f"q = {quorum} signatures")
    k, threshold = _choose(num_clients, assumptions)
    return Parameters(
        assumptions=assumptions,
        num_clients=num_clients,
        num_neighbors=k,
        threshold=threshold,
        quorum=quorum,
        min_survivors=min_survivors,
    )


def lowest_threshold(
    num_clients: int, num_neighbors: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return the least safe t, which a client compares with the t that the coordinator chose.

    It may exceed the number of holders: then no t is safe with so few neighbors.

    Args:
        num_clients: n, the number of invited clients.
        num_neighbors: k, chosen for a roster of all n clients.
        roster_size: m, the number of clients in the roster; all corrupted ones may be among them.
        assumptions: The adversary to withstand; dropout and eta are not used.
    """
    corrupted = max_corrupted_neighbors(
        num_clients, num_neighbors, roster_size=roster_size, assumptions=assumptions
    )
    if assumptions.adversary is Adversary.HONEST_BUT_CURIOUS:
        return max(corrupted + 1, _MIN_THRESHOLD)
    # 2t > h + a: otherwise a server that shows different survivors to different holders collects t
    # shares of both secrets.
    lowest = max((num_holders(roster_size, num_neighbors) + corrupted) // 2 + 1, _MIN_THRESHOLD)
    if num_neighbors >= roster_size - 1:
        return lowest
    in_gap = _gap_bound(
        num_clients, num_neighbors, roster_size=roster_size, assumptions=assumptions
    )
    # t >= k/2 + c closes the attack "chosen dropouts" (see the module docstring).
    return max(lowest, num_neighbors // 2 + in_gap)


def num_holders(num_clients: int, num_neighbors: int) -> int:
    """Return h, the number of clients that keep shares of one client's secrets."""
    return num_clients if num_neighbors >= num_clients - 1 else num_neighbors


def num_assured(
    adversary: Adversary, topology: Topology, *, quorum: int, min_survivors: int
) -> int:
    """Return the least number of clients in a released sum, even if the server lies.

    In a sparse graph a client knows only few of the claimed survivors. An active server can make up
    the others, but not q signatures, and all signers are in the sum.
    """
    is_feigned = adversary is Adversary.ACTIVE_SERVER and topology is Topology.SPARSE
    return quorum if is_feigned else min_survivors


def lowest_quorum(num_clients: int, *, assumptions: Assumptions) -> int:
    """Return the least q for which two sets of survivors cannot both be signed."""
    return (num_clients + num_corrupted(num_clients, corruption=assumptions.corruption)) // 2 + 1


def max_corrupted_neighbors(
    num_clients: int, num_neighbors: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return a, the largest number of corrupted neighbors of any honest client.

    In a sparse graph more are possible with P <= 2^-r. For the arguments see
    :func:`lowest_threshold`.
    """
    corrupted = num_corrupted(num_clients, corruption=assumptions.corruption)
    if num_neighbors >= roster_size - 1:
        return corrupted
    # A union bound: P[more than a] <= 2^-r / n for each of the n clients.
    allowed = assumptions.log2_risk - math.log2(num_clients)
    # Of size - 1: an honest client is neither its own neighbor nor one of the corrupted.
    return _upper_quantile(roster_size - 1, corrupted, num_neighbors, log2_tail=allowed)


def _gap_bound(
    num_clients: int, num_neighbors: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return c such that no two disjoint runs of k/2 places hold c corrupted clients each."""
    corrupted = num_corrupted(num_clients, corruption=assumptions.corruption)
    # n²/2 P² <= 2^-r, solved for log2 P.
    allowed = (assumptions.log2_risk + 1.0) / 2.0 - math.log2(num_clients)
    most = _upper_quantile(roster_size, corrupted, num_neighbors // 2, log2_tail=allowed)
    # If 2c > A, the corrupted clients are too few for two such runs.
    return min(most, corrupted // 2) + 1


def num_audited(num_signed: int, *, quorum: int, risk_bits: int) -> int:
    """Return s, the number of signatures to open to show that ``quorum`` of them are real.

    Computed in whole numbers, each step rounded up, so that both sides get the same result.

    Args:
        num_signed: q', at least ``quorum``.
        quorum: q.
        risk_bits: r: with fewer real ones, all opened ones are real with P <= 2^-r.

    Example:
        >>> [num_audited(signed, quorum=5501, risk_bits=106) for signed in (10_000, 9_000, 5_501)]
        [122, 148, 5501]
    """
    one, audited = 1 << (risk_bits + _GUARD_BITS), 0
    chance = one
    while chance > 1 << _GUARD_BITS and audited < quorum:
        # C(q - 1, s) / C(q', s) gains the factor (q - 1 - s) / (q' - s). Integers, because both
        # sides must agree on s; rounded up, so that the risk is never underestimated.
        chance = -(-chance * (quorum - 1 - audited) // (num_signed - audited))
        audited += 1
    return audited


def _smallest_roster(num_clients: int, *, assumptions: Assumptions) -> int:
    """Return the smallest roster size that k and t must allow: n - D against an active server."""
    is_active = assumptions.adversary is Adversary.ACTIVE_SERVER
    return num_clients - (floor_fraction(assumptions.dropout, num_clients) if is_active else 0)


def is_connected(num_clients: int, num_neighbors: int, *, assumptions: Assumptions) -> bool:
    """Return whether random dropouts cut the ring with probability at most 2^-(sigma+1)."""
    n, k = num_clients, num_neighbors
    gone = num_corrupted(n, corruption=assumptions.corruption) + floor_fraction(
        assumptions.dropout, n
    )
    if k >= n - 1 or k > gone:
        return True
    # A union bound over the n (n - k - 1) / 2 pairs of runs with k clients in total: all of them
    # are gone with probability C(gone, k) / C(n, k).
    places = math.log(n * (n - k - 1) / 2)
    chance = places + math.lgamma(gone + 1) + math.lgamma(n - k + 1)
    chance -= math.lgamma(n + 1) + math.lgamma(gone - k + 1)
    return chance / math.log(2) <= -(assumptions.sigma_bits + 1)


def _choose(n: int, assumptions: Assumptions) -> tuple[int, int]:
    dropped = floor_fraction(assumptions.dropout, n)
    fewest = _smallest_roster(n, assumptions=assumptions)
    if assumptions.topology is Topology.COMPLETE:
        threshold = lowest_threshold(n, n - 1, roster_size=n, assumptions=assumptions)
        if threshold > min(n - dropped, MAX_THRESHOLD):
            raise _build_error(n, assumptions, f"t = {threshold} shares")
        return n - 1, threshold
    allowed, k = -assumptions.eta_bits - math.log2(n), 2
    while k < fewest - 1:
        # The dropouts that an active server chooses are covered by the threshold below.
        is_curious = assumptions.adversary is Adversary.HONEST_BUT_CURIOUS
        if is_curious and not is_connected(n, k, assumptions=assumptions):
            k += 2
            continue
        # Neighbors that answer; fewer do with P <= 2^-eta / n.
        answering = k - _upper_quantile(n - 1, dropped, k, log2_tail=allowed)
        threshold = lowest_threshold(n, k, roster_size=fewest, assumptions=assumptions)
        missing = threshold - min(answering, MAX_THRESHOLD)
        if missing <= 0:
            return k, threshold
        # One more neighbor adds at most one answer, and t never falls with k.
        k += missing + missing % 2
    raise ConfigError(
        f"secure aggregation: no sparse graph on {n} clients holds with corruption "
        f"{assumptions.corruption:g} and dropout {assumptions.dropout:g}; use the complete graph"
    )


def _build_error(n: int, assumptions: Assumptions, need: str) -> ConfigError:
    left = n - floor_fraction(assumptions.dropout, n)
    return ConfigError(
        f"secure aggregation among {n} clients needs {need}, but with dropout "
        f"{assumptions.dropout:g} only {left} clients may be left; assume less dropout or less "
        f"corruption (now {assumptions.corruption:g}), or invite more clients"
    )


def num_corrupted(num_clients: int, *, corruption: float) -> int:
    """Return A = max(1, ⌈gamma n⌉): even in a small cohort at least one client is assumed corrupt.

    Example:
        >>> [num_corrupted(n, corruption=0.1) for n in (3, 10, 11)]
        [1, 1, 2]
    """
    return max(1, math.ceil(corruption * num_clients - _TINY))


def floor_fraction(fraction: float, n: int) -> int:
    """Return ⌊fraction n⌋."""
    return math.floor(fraction * n + _TINY)


def _upper_quantile(population: int, marked: int, drawn: int, *, log2_tail: float) -> int:
    """Return the least x with P[X > x] <= 2**log2_tail.

    X counts the marked items among ``drawn`` from a population.
    """
    pmf = _hypergeometric(population, min(marked, population), drawn)
    # Add the small terms first: 1 - cdf would lose all tails below 2^-53, and the allowed ones are
    # near 2^-106.
    tails = np.cumsum(pmf[::-1])[::-1]  # tails[x] = P[X >= x]
    above = np.append(tails[1:], 0.0)
    return int(np.argmax(above <= 2.0**log2_tail))


@cache
def _log_factorials() -> NDArray[np.float64]:
    # log x! for x = 0 … MAX_CLIENTS. The array is shared by all callers: do not write to it.
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, MAX_CLIENTS + 1)))])


def _hypergeometric(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """Return P[X = x] for x = 0 … drawn."""
    log_factorial = _log_factorials()

    def log_choose(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
        inside = (k >= 0) & (k <= n)
        # Impossible counts get a valid index here and probability 0 below.
        k = np.where(inside, k, 0)
        value = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
        return np.where(inside, value, -np.inf)

    x = np.arange(drawn + 1)
    log_all = log_choose(population, np.array([drawn]))
    pmf: NDArray[np.float64] = np.exp(
        log_choose(marked, x) + log_choose(population - marked, drawn - x) - log_all
    )
    return pmf
