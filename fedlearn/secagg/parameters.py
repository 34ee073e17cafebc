r"""How many neighbours, and how many shares give a secret away: k and t from what is assumed.

====== ====================== =========================================================
paper  here                   meaning
====== ====================== =========================================================
n      num_clients            clients invited to the session
gamma  corruption             largest fraction of them that the adversary controls
delta  dropout                largest fraction of them that may drop out
A, D   num_corrupted, …       max(1, ⌈gamma n⌉), ⌊delta n⌋
k      num_neighbours         n - 1 in the complete graph
h      num_holders            who keeps shares of a client's secrets
t      threshold              shares that give a client's secret
q      quorum                 signatures over the survivors before a client releases
sigma  sigma_bits             privacy fails with at most 2^-sigma
eta    eta_bits               a round fails with at most 2^-eta
====== ====================== =========================================================

A client's secrets are held by its k neighbours, and in the complete graph by itself as well
(one more dropout for small cohorts): h = k in a sparse graph, h = m in the complete one. Let a
be the most of its neighbours that are corrupted: A in the complete graph; in a sparse one the
tail of the hypergeometric distribution, P[more than a] <= 2^-r / n, where r bits are what each of
the ways in which it may fail has to hold with (:func:`risk_bits`).

* *Honest but curious*: corrupted holders alone must not suffice: t > a.
* *Active server*: it may tell each holder another story, and get one share from every honest
  holder and two from a corrupted one; both secrets of a client cost it 2t of those h + a:
  2t > h + a.
* One set of survivors: every honest client signs one, so two sets with q signatures each
  need 2q <= n + A: 2q > n + A.
* Recovery: t <= survivors among the holders: n - D in the complete graph, in a sparse one
  P[fewer] <= 2^-eta / n.
* A sparse graph stays connected without corrupted and dropped clients, except with
  P <= 2^-r: the ring falls apart only if two runs of k/2 neighbours are all gone.

The lowest t that is safe is taken: it tolerates the most dropouts.

An *active server* has more ways where the graph is sparse, and the numbers allow for all:

* *A shrunk roster.* It shows m of the n clients, all of the corrupted among them, so that a is that
  of A among m. Clients take no roster of fewer than q, and judge t again by the m that they see;
  ``derive`` finds k and t that hold for each m down to n - D.
* *Chosen dropouts.* Knowing the ring, it chooses whose vectors and signatures it will have had, so
  that the survivors fall into parts that share no mask. Let a *releasing* client be an honest one
  that releases shares. It has the packet of each survivor that neighbours it, so two of them
  within k/2 places share a mask; and each honest survivor neighbours some of them, since t > a.
  So where there are two parts, the ring has two disjoint runs of k/2 places without a releasing
  client, each after a releasing client of the one part and before the next of the other. Of that
  client t shares are released only if, beside the k/2 holders on its other side, c = t - k/2
  corrupted ones are in the run. Counts in disjoint runs are negatively associated, so
  P[two runs with c or more] <= n²/2 P[c or more in one]², and where 2c > A there are no two.
* *Leaves of nobody.* A client sees the root of a tree over m positions, and itself and k others.
  Of the m at most A open to corrupted clients, since no id opens at two
  (:mod:`fedlearn.secagg.merkle`), and which do is fixed before the ring is. One that opens to
  nobody holds no share, signs nothing, and ends the session of each honest neighbour before it
  shares; counted among the honest above, it is of no help. So nothing above changes, for the m that
  is claimed.
* *Signatures of nobody.* Of q' that are claimed s are opened (:mod:`fedlearn.secagg.audit`).
* *Grinding.* The ring follows from the hash of the roster, and each roster that it tries is another
  ring; each root of signatures is another sample: sigma must be left of 2^64 tries at each
  (:data:`GRINDING_BITS`). So r is sigma + 2 + 64.

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

from fedlearn.core.ranges import BelowOne, Count, out_of_range
from fedlearn.errors import ConfigError
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.shamir import MAX_THRESHOLD

#: Largest n. What grows with n is little at a client: 8 n bytes of SHAKE-256 and a sort for the
#: ring, twice n / 8 bytes of bitmaps. A coordinator keeps the packets of all clients in memory, of
#: each 20 kB with k = 222: that is what ends first.
MAX_CLIENTS = 1 << 17

#: Rings that an active server may try for one that suits it, as a power of two. A try costs it a
#: hash of the roster, 8 n bytes of SHAKE-256 and a sort, before it knows whether the ring is one.
GRINDING_BITS = 64

#: Digits after the point of a probability, beyond those that are compared.
_GUARD_BITS = 64

#: One share must never be a secret.
_MIN_THRESHOLD = 2

#: Fractions such as 0.1 * 30 must not lose a client to rounding.
_TINY = 1e-9


class Adversary(IntEnum):
    """Whom the protocol holds against; a higher one includes the lower."""

    HONEST_BUT_CURIOUS = 0
    ACTIVE_SERVER = 1


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a choice of k and t rests on."""

    adversary: Annotated[Adversary, doc("Whom it must hold against.")]
    topology: Annotated[Topology, doc("Complete, or sparse.")]
    corruption: Annotated[
        BelowOne,
        doc("Largest fraction of the clients asked that the adversary controls, gamma in [0, 1)."),
    ]
    dropout: Annotated[
        BelowOne,
        doc(
            "Largest fraction of the clients asked that drop out, those that over-selection asks "
            "too many included, delta in [0, 1)."
        ),
    ]
    sigma_bits: Annotated[
        Count,
        doc(
            "In a sparse graph privacy fails with at most 2^-sigma, sigma >= 1; against an active"
            " server, for all the rosters together that it can try."
        ),
    ]
    eta_bits: Annotated[
        Count, doc("In a sparse graph a round fails with at most 2^-eta, eta >= 1.")
    ]

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"secure aggregation: {wrong}")

    @property
    def log2_risk(self) -> float:
        """How likely privacy may fail in one way and one try, as a logarithm."""
        return -float(risk_bits(self.sigma_bits, adversary=self.adversary))


def risk_bits(sigma_bits: int, *, adversary: Adversary) -> int:
    """Return r: in each way by itself privacy fails in one try with at most 2^-r.

    A curious server sees one ring, which may be bad in two ways: corrupted neighbours, and that it
    falls apart. Of an active one there are four, with 2^64 tries at each: corrupted neighbours,
    gaps in the ring, signatures that nobody looks at (:mod:`fedlearn.secagg.audit`), and
    accomplices that a roster draws (:mod:`fedlearn.secagg.draw`).
    """
    if adversary is Adversary.ACTIVE_SERVER:
        return sigma_bits + 2 + GRINDING_BITS
    return sigma_bits + 1


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The numbers of a session, and what they were derived from.

    Attributes:
        assumptions: gamma, delta and the rest.
        num_clients: n.
        num_neighbours: k.
        threshold: t.
        quorum: q.
        min_survivors: Fewest clients in a released sum: n - D.
    """

    assumptions: Assumptions
    num_clients: int
    num_neighbours: int
    threshold: int
    quorum: int
    min_survivors: int

    @property
    def num_corrupted(self) -> int:
        """A: how many of the clients the adversary controls at the most."""
        return num_corrupted(self.num_clients, corruption=self.assumptions.corruption)

    def num_audited(self, num_signed: int) -> int:
        """Return how many of so many signatures are opened in a sparse graph."""
        given = self.assumptions
        risk = risk_bits(given.sigma_bits, adversary=given.adversary)
        return num_audited(num_signed, quorum=self.quorum, risk_bits=risk)

    def explain(self) -> list[tuple[str, str]]:
        """Return the choices with their formulas: what each is called, and its text.

        Example:
            >>> for label, text in derive(100, assumptions=Assumptions(
            ...     adversary=Adversary.ACTIVE_SERVER, topology=Topology.COMPLETE,
            ...     corruption=1 / 3, dropout=0.1, sigma_bits=40, eta_bits=30)).explain():
            ...     print(label, text)
            graph complete, against an active server
            clients n = 100, of them corrupted A = ⌈0.333 n⌉ = 34, dropped D = ⌊0.1 n⌋ = 10
            neighbours k = n - 1 = 99, of them corrupted a = A = 34
            threshold t = 68, the least with 2t > h + a = 134; recovery needs t <= 90
            quorum q = 68, the least with 2q > n + A = 134
            survivors at least n - D = 90, else the round is aborted
        """
        given, n, k = self.assumptions, self.num_clients, self.num_neighbours
        active = given.adversary is Adversary.ACTIVE_SERVER
        complete = given.topology is Topology.COMPLETE
        corrupted, dropped = self.num_corrupted, part_of(given.dropout, n)
        fewest = _fewest_listed(n, assumptions=given)
        a = corrupted_neighbours(n, k, roster_size=fewest, assumptions=given)
        server = "an active" if active else "an honest-but-curious"
        risk = f"P <= 2^{given.log2_risk:.0f}"
        if complete:
            neighbours = f"n - 1 = {k}, of them corrupted a = A = {a}"
            shares = f"t <= {n - dropped}"
        else:
            neighbours = f"{k}, of them corrupted a = {a}, more with {risk}"
            shares = f"t neighbours, fewer with P <= 2^-{given.eta_bits}"
        rule, more = f"t > a = {a} and t >= {_MIN_THRESHOLD}", list[tuple[str, str]]()
        if active:
            rule = f"2t > h + a = {num_holders(n, k) + a}"
            if not complete:
                c = _uncut(n, k, roster_size=fewest, assumptions=given)
                rule = f"{rule} and t >= k/2 + c = {k // 2 + c}"
                gaps = f"two gaps of k/2 with c = {c} corrupted each with {risk}"
                more += [("cut", f"{gaps}, whoever drops out")]
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
            ("neighbours", f"k = {neighbours}"),
            ("threshold", f"{least}; recovery needs {shares}"),
            *more,
            ("survivors", f"at least n - D = {self.min_survivors}, else the round is aborted"),
        ]


def derive(num_clients: int, *, assumptions: Assumptions) -> Parameters:
    """Return k, t and q for ``num_clients`` under ``assumptions``.

    Raises:
        ConfigError: Nothing satisfies them.

    Example:
        >>> curious = Assumptions(
        ...     adversary=Adversary.HONEST_BUT_CURIOUS, topology=Topology.SPARSE,
        ...     corruption=0.1, dropout=0.1, sigma_bits=40, eta_bits=30)
        >>> (found := derive(1000, assumptions=curious)).num_neighbours, found.threshold
        (52, 28)
    """
    if not 2 <= num_clients <= MAX_CLIENTS:  # noqa: PLR2004 - a sum of one is no sum
        raise ConfigError(f"secure aggregation takes 2 to {MAX_CLIENTS} clients, not {num_clients}")
    min_survivors = num_clients - part_of(assumptions.dropout, num_clients)
    quorum = lowest_quorum(num_clients, assumptions=assumptions)
    if assumptions.adversary is Adversary.ACTIVE_SERVER and quorum > min_survivors:
        raise _impossible(num_clients, assumptions, f"q = {quorum} signatures")
    k, threshold = _choose(num_clients, assumptions)
    return Parameters(
        assumptions=assumptions,
        num_clients=num_clients,
        num_neighbours=k,
        threshold=threshold,
        quorum=quorum,
        min_survivors=min_survivors,
    )


def lowest_threshold(
    num_clients: int, num_neighbours: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return the least t that is safe: what a client checks, whoever chose it.

    It may be more than there are holders: then so few neighbours are not safe with any t.

    Args:
        num_clients: n, how many were invited.
        num_neighbours: k, with n of them in the roster.
        roster_size: m, how many are in the roster, all of the corrupted among them.
        assumptions: What is feared; of those dropout and eta do not matter here.
    """
    corrupted = corrupted_neighbours(
        num_clients, num_neighbours, roster_size=roster_size, assumptions=assumptions
    )
    if assumptions.adversary is Adversary.HONEST_BUT_CURIOUS:
        return max(corrupted + 1, _MIN_THRESHOLD)
    lowest = max((num_holders(roster_size, num_neighbours) + corrupted) // 2 + 1, _MIN_THRESHOLD)
    if num_neighbours >= roster_size - 1:
        return lowest
    in_gap = _uncut(num_clients, num_neighbours, roster_size=roster_size, assumptions=assumptions)
    return max(lowest, num_neighbours // 2 + in_gap)


def num_holders(num_clients: int, num_neighbours: int) -> int:
    """Return h: how many clients keep shares of one client's secrets."""
    return num_clients if num_neighbours >= num_clients - 1 else num_neighbours


def num_assured(
    adversary: Adversary, topology: Topology, *, quorum: int, min_survivors: int
) -> int:
    """Return how many clients are in a released sum at the least, whatever the server says.

    In a sparse graph a client knows few of those that are said to have survived. What an active
    server cannot feign are q signatures, of clients that are in the sum.
    """
    is_feigned = adversary is Adversary.ACTIVE_SERVER and topology is Topology.SPARSE
    return quorum if is_feigned else min_survivors


def lowest_quorum(num_clients: int, *, assumptions: Assumptions) -> int:
    """Return the least q for which two sets of survivors cannot both be signed."""
    return (num_clients + num_corrupted(num_clients, corruption=assumptions.corruption)) // 2 + 1


def corrupted_neighbours(
    num_clients: int, num_neighbours: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return a: the most neighbours of any honest client that are corrupted.

    Arguments are those of :func:`lowest_threshold`.
    """
    corrupted = num_corrupted(num_clients, corruption=assumptions.corruption)
    if num_neighbours >= roster_size - 1:
        return corrupted
    allowed = assumptions.log2_risk - math.log2(num_clients)
    # A client does not neighbour itself, and is honest.
    return _upper_quantile(roster_size - 1, corrupted, num_neighbours, log2_tail=allowed)


def _uncut(
    num_clients: int, num_neighbours: int, *, roster_size: int, assumptions: Assumptions
) -> int:
    """Return c: so many corrupted are not in each of two disjoint runs of k/2 on the ring."""
    corrupted = num_corrupted(num_clients, corruption=assumptions.corruption)
    allowed = (assumptions.log2_risk + 1.0) / 2.0 - math.log2(num_clients)
    most = _upper_quantile(roster_size, corrupted, num_neighbours // 2, log2_tail=allowed)
    return min(most, corrupted // 2) + 1


def num_audited(num_signed: int, *, quorum: int, risk_bits: int) -> int:
    """Return s: how many of ``num_signed`` signatures show that ``quorum`` of them are real.

    In whole numbers, each step rounded up, so that both sides find the same.

    Args:
        num_signed: q', at least ``quorum``.
        quorum: q.
        risk_bits: r: with fewer real ones all that are looked at are real with P <= 2^-r.

    Example:
        >>> [num_audited(signed, quorum=5501, risk_bits=106) for signed in (10_000, 9_000, 5_501)]
        [122, 148, 5501]
    """
    one, audited = 1 << (risk_bits + _GUARD_BITS), 0
    chance = one
    while chance > 1 << _GUARD_BITS and audited < quorum:
        chance = -(-chance * (quorum - 1 - audited) // (num_signed - audited))
        audited += 1
    return audited


def _fewest_listed(num_clients: int, *, assumptions: Assumptions) -> int:
    """Return how few clients of a roster k and t must hold for: n - D against an active server."""
    is_active = assumptions.adversary is Adversary.ACTIVE_SERVER
    return num_clients - (part_of(assumptions.dropout, num_clients) if is_active else 0)


def is_connected(num_clients: int, num_neighbours: int, *, assumptions: Assumptions) -> bool:
    """Return whether random dropouts cut the ring with at most 2^-(sigma+1)."""
    n, k = num_clients, num_neighbours
    gone = num_corrupted(n, corruption=assumptions.corruption) + part_of(assumptions.dropout, n)
    if k >= n - 1 or k > gone:
        return True
    places = math.log(n * (n - k - 1) / 2)
    chance = places + math.lgamma(gone + 1) + math.lgamma(n - k + 1)
    chance -= math.lgamma(n + 1) + math.lgamma(gone - k + 1)
    return chance / math.log(2) <= -(assumptions.sigma_bits + 1)


def _choose(n: int, assumptions: Assumptions) -> tuple[int, int]:
    dropped = part_of(assumptions.dropout, n)
    fewest = _fewest_listed(n, assumptions=assumptions)
    if assumptions.topology is Topology.COMPLETE:
        threshold = lowest_threshold(n, n - 1, roster_size=n, assumptions=assumptions)
        if threshold > min(n - dropped, MAX_THRESHOLD):
            raise _impossible(n, assumptions, f"t = {threshold} shares")
        return n - 1, threshold
    allowed, k = -assumptions.eta_bits - math.log2(n), 2
    while k < fewest - 1:
        # Whom an active server calls dropped is in the threshold below.
        is_curious = assumptions.adversary is Adversary.HONEST_BUT_CURIOUS
        if is_curious and not is_connected(n, k, assumptions=assumptions):
            k += 2
            continue
        # As many neighbours drop as in the tail of P; the others answer.
        answering = k - _upper_quantile(n - 1, dropped, k, log2_tail=allowed)
        threshold = lowest_threshold(n, k, roster_size=fewest, assumptions=assumptions)
        missing = threshold - min(answering, MAX_THRESHOLD)
        if missing <= 0:
            return k, threshold
        # A neighbour more is one that answers more at the most, and t never falls with k.
        k += missing + missing % 2
    raise ConfigError(
        f"secure aggregation: no sparse graph on {n} clients holds with corruption "
        f"{assumptions.corruption:g} and dropout {assumptions.dropout:g}; use the complete graph"
    )


def _impossible(n: int, assumptions: Assumptions, need: str) -> ConfigError:
    left = n - part_of(assumptions.dropout, n)
    return ConfigError(
        f"secure aggregation among {n} clients needs {need}, but with dropout "
        f"{assumptions.dropout:g} only {left} clients may be left; assume less dropout or less "
        f"corruption (now {assumptions.corruption:g}), or invite more clients"
    )


def num_corrupted(num_clients: int, *, corruption: float) -> int:
    """Return A = max(1, ⌈gamma n⌉): a fraction of a small cohort is still somebody.

    Example:
        >>> [num_corrupted(n, corruption=0.1) for n in (3, 10, 11)]
        [1, 1, 2]
    """
    return max(1, math.ceil(corruption * num_clients - _TINY))


def part_of(fraction: float, n: int) -> int:
    """Return ⌊fraction n⌋."""
    return math.floor(fraction * n + _TINY)


def _upper_quantile(population: int, marked: int, drawn: int, *, log2_tail: float) -> int:
    """Return the least x with P[X > x] <= 2**log2_tail.

    X counts the marked among ``drawn`` of a population.
    """
    pmf = _hypergeometric(population, min(marked, population), drawn)
    tails = np.cumsum(pmf[::-1])[::-1]  # tails[x] = P[X >= x]
    above = np.append(tails[1:], 0.0)
    return int(np.argmax(above <= 2.0**log2_tail))


@cache
def _log_factorials() -> NDArray[np.float64]:
    """Return log x! for x = 0 … MAX_CLIENTS; not to be written to."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, MAX_CLIENTS + 1)))])


def _hypergeometric(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """Return P[X = x] for x = 0 … drawn."""
    log_factorial = _log_factorials()

    def log_choose(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
        inside = (k >= 0) & (k <= n)
        k = np.where(inside, k, 0)
        value = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
        return np.where(inside, value, -np.inf)

    x = np.arange(drawn + 1)
    log_all = log_choose(population, np.array([drawn]))
    pmf: NDArray[np.float64] = np.exp(
        log_choose(marked, x) + log_choose(population - marked, drawn - x) - log_all
    )
    return pmf
