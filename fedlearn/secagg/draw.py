r"""Drawing the cohort from a roster, by a hash that no party can choose alone.

A coordinator that is free to invite any clients can invite its accomplices: the fraction gamma that
is corrupted in the cohort is then unrelated to the fraction among all clients. If clients hold the
same roster, a round may invite only clients that the roster itself draws::

    u = SHA-256(SHA-256(label, digest of the roster, round), client) as a fraction in [0, 1)
    drawn: u < p = min(1, f n / N)

with N clients in the roster, n invited, and a factor f >= 1, since some of the drawn clients are
offline. Every client computes by itself which clients are drawn, from n and the round in the signed
terms. The clients drawn with a smaller f are among those drawn with a larger one, so a coordinator
may draw fewer than its clients would allow.

Guarantees:
    Of r accomplices in a roster, Bin(r, p) are drawn: a coordinator can leave out honest clients,
    but cannot bring in an accomplice that is not drawn. This assumes that SHA-256 is a random
    function. The digest covers each client's identity key, so it cannot be known before the last
    client has joined. The client that joins last, or the party that exports the roster, may try
    several keys and rosters, and a coordinator may choose which round it runs. All these tries are
    covered by :data:`~fedlearn.secagg.parameters.GRINDING_BITS`.
    Not guaranteed: that the cohort is unknown before its round.

References:
    Jiang et al., 2024, `Lotto: Secure Participant Selection against Adversarial Servers in
    Federated Learning <https://arxiv.org/abs/2401.02880>`_, where each client draws itself by a
    verifiable random function. An Ed25519 signature is not such a function: the holder of the key
    can make many signatures of one text.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.secagg import keys
from fedlearn.secagg.parameters import Parameters

_TICKET_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class RosterDraw:
    """A roster that draws clients.

    Attributes:
        roster: Digest of the roster, as text: the same for all parties that hold it.
        client_ids: Ids of all clients in the roster.
        factor: f: clients drawn for each client that is invited, >= 1.

    Example:
        >>> draw = RosterDraw(roster="9f…", client_ids=range(1000), factor=2.0)
        >>> draw.chance(50), len(draw.select(draw.client_ids, round_num=3, cohort_size=50))
        (0.1, 103)
    """

    roster: str
    client_ids: Collection[ClientId]
    factor: float

    def chance(self, cohort_size: int) -> float:
        """Return p, the probability that a client is drawn if ``cohort_size`` are invited."""
        return min(1.0, self.factor * cohort_size / max(1, len(self.client_ids)))

    def select(
        self, client_ids: Iterable[ClientId], *, round_num: int, cohort_size: int
    ) -> list[ClientId]:
        """Keep the clients that are in the roster and drawn for the round, in their order."""
        place = round_num.to_bytes(8, "little")
        seed = keys.digest(b"draw", self.roster.encode(), place)
        # u < p, with both sides multiplied by 2**64.
        below = self.chance(cohort_size) * 2.0 ** (8 * _TICKET_BYTES)
        # A client outside the roster is never drawn, whatever its ticket.
        listed = (each for each in client_ids if each in self.client_ids)
        return [each for each in listed if _hash_ticket(seed, each) < below]

    def explain(self, parameters: Parameters) -> tuple[str, str]:
        """Describe what the draw protects against, as a label and a text."""
        n, size, a = parameters.num_clients, len(self.client_ids), parameters.num_corrupted
        most = find_max_accomplices(
            size,
            chance=self.chance(n),
            num_corrupted=a,
            log2_risk=parameters.assumptions.log2_risk,
        )
        text = (
            f"of {size} in the roster each with p = {self.chance(n):.3g}; with up to {most} "
            f"accomplices among them, more than A = {a} are drawn with "
            f"P <= 2^{parameters.assumptions.log2_risk:.0f} a try"
        )
        return "drawn", text


def _hash_ticket(seed: bytes, client_id: ClientId) -> int:
    hashed = hashlib.sha256(seed + client_id.to_bytes(8, "little")).digest()
    return int.from_bytes(hashed[:_TICKET_BYTES], "little")


def find_max_accomplices(
    num_listed: int, *, chance: float, num_corrupted: int, log2_risk: float
) -> int:
    """Find the most accomplices that a roster may hold so that rarely more than A are drawn.

    Args:
        num_listed: N, clients in the roster.
        chance: p.
        num_corrupted: A, the most accomplices that a cohort withstands.
        log2_risk: log2 of the largest P[more than A are drawn] in one try.

    Example:
        >>> find_max_accomplices(100, chance=1.0, num_corrupted=3, log2_risk=-40.0)
        3
    """
    # Of A accomplices never more than A are drawn, and N is the size of the roster.
    low, high = num_corrupted, num_listed
    while low < high:
        # Bisection works because more accomplices in the roster never lower the risk.
        middle = (low + high + 1) // 2
        if _log2_tail(middle, chance, num_corrupted) <= log2_risk:
            low = middle
        else:
            high = middle - 1
    return low


def _log2_tail(trials: int, chance: float, most: int) -> float:
    """Return log2 P[Bin(trials, chance) > most]."""
    if trials <= most:
        return -math.inf
    if chance >= 1.0:
        return 0.0
    # In logarithms: the binomials of thousands of clients overflow float64.
    x = np.arange(most + 1, trials + 1)
    factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    logs = factorial[trials] - factorial[x] - factorial[trials - x]
    logs += x * math.log(chance) + (trials - x) * math.log1p(-chance)
    return float(np.logaddexp.reduce(logs)) / math.log(2.0)
