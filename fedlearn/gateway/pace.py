"""Pace steering: limits the rate of check-ins, and spreads out when clients come back.

A check-in is a client that connects and says hello, whether it may stay or not: most of its cost is
spent by then. The processor time of a check-in is measured, and gives the rate at which all
check-ins together take a fixed share of a core. The lateness of the event loop is measured, too,
and slows this rate down while something else (open transfers, a database) keeps the loop busy.
Every client that is sent away gets its own time to come back, such that the rate is met: a few
clients come back soon, many are spread over as long as it takes, and they never come together.

References:
    K. Bonawitz et al., 2019, `Towards Federated Learning at Scale: System Design
    <https://arxiv.org/abs/1902.01046>`_, section 2.3.
"""

import math
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field

from numpy.random import Generator

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.gateway.token_bucket import TokenBucket

#: The rate until the cost of a check-in is known.
_FIRST_PER_S = 100.0
#: The lowest rate, so that some clients always get in.
_LEAST_PER_S = 1.0
#: Share of the rate for clients that were given a time to come back. The rest is for clients that
#: come unannounced, and a reserve: a check-in then costs more than in a rush, when the coordinator
#: does nothing else.
_SCHEDULED_SHARE = 2 / 3
#: The cost is not computed from fewer check-ins: other work would dominate it.
_FEWEST = 10
#: The half-life of measurements. Long enough to cover a whole rush, whose connections are all made
#: before the first client says hello.
_HALF_LIFE_S = 10.0
#: If the event loop is later than this, the rate is cut at once, and then restored slowly.
_LATE_S = 0.1
_LESS, _MORE, _LEAST_PART = 0.5, 1.25, 1 / 64
#: The longest time that a client is asked to stay away.
_LONGEST_S = 3600


@dataclass(eq=False)
class Pace:
    """The rate of check-ins, and the times at which clients come back.

    Attributes:
        share: The share of one core that check-ins may take.
        cost_s: Processor time of one check-in; NaN before it is known.
        late_s: How late the event loop was when last measured.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> pace = Pace(VirtualClock(), share=0.5)
        >>> pace.record_cost(cpu_s=0.4, num_check_ins=100)  # 4 ms each: 125 take half a core
        >>> pace.rate_per_s
        125.0
        >>> after_s = sorted(pace.book_return_s(1.0) for _ in range(1000))
        >>> 1.0 <= after_s[0] <= after_s[-1] < 15.0
        True
    """

    clock: Clock
    _: KW_ONLY
    share: float
    jitter: Generator = field(default_factory=Seed(0).derive("come back").numpy)
    cost_s: float = math.nan
    late_s: float = 0.0
    _cpu_s: float = 0.0  # this and the next: decayed sums, whose quotient is the cost
    _num_check_ins: float = 0.0
    _part: float = 1.0  # factor on the rate; below 1 after the loop was late
    _booked: Counter[int] = field(default_factory=Counter)  # by second of the clock
    _seconds: dict[ClientId, int] = field(default_factory=dict)  # the place of each client
    _measured_s: float = field(init=False)
    _bucket: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._measured_s = self.clock.now_s()
        self._bucket = TokenBucket(_FIRST_PER_S, self._measured_s)

    @property
    def rate_per_s(self) -> float:
        """Check-ins a second that the coordinator can take."""
        return self._bucket.rate_per_s

    def values(self) -> dict[str, float]:
        """Return the current measurements by metric name."""
        cost = {} if math.isnan(self.cost_s) else {"check_in_seconds": round(self.cost_s, 6)}
        rate = {"check_in_rate": round(self.rate_per_s, 1)}
        return {**rate, "loop_late_seconds": round(self.late_s, 3), **cost}

    def record_cost(self, *, cpu_s: float, num_check_ins: int) -> None:
        """Update the cost of a check-in with what happened since the last call.

        Args:
            cpu_s: Processor time that the server has taken.
            num_check_ins: Number of check-ins.
        """
        before_s, self._measured_s = self._measured_s, self.clock.now_s()
        decay = 0.5 ** ((self._measured_s - before_s) / _HALF_LIFE_S)
        # Decay both sums, not their quotient: a quiet period then weighs as little as it has
        # check-ins.
        self._cpu_s = decay * self._cpu_s + cpu_s
        self._num_check_ins = decay * self._num_check_ins + num_check_ins
        if self._num_check_ins >= _FEWEST:
            self.cost_s = self._cpu_s / self._num_check_ins
        self._set_rate()

    def record_lateness(self, *, late_s: float) -> None:
        """Adjust the rate to how late the event loop is, in seconds."""
        self.late_s = late_s
        # Fast down, slow up: one late poll halves the rate, four good ones restore it.
        self._part *= _LESS if late_s > _LATE_S else _MORE
        self._part = min(1.0, max(_LEAST_PART, self._part))
        self._set_rate()
        begun = int(self.clock.now_s())
        self._booked = Counter({s: n for s, n in self._booked.items() if s >= begun})

    def _set_rate(self) -> None:
        # An unknown cost is NaN, which is not above 0.
        whole = self.share / self.cost_s if self.cost_s > 0.0 else _FIRST_PER_S
        self._bucket.rate_per_s = max(_LEAST_PER_S, whole * self._part)

    def admits(self) -> bool:
        """Return whether one more may check in now, and count it if so."""
        return self._bucket.has(now_s=self.clock.now_s())

    def book_return_s(self, least_s: float, *, client_id: ClientId | None = None) -> float:
        """Return the seconds after which a client should come back, at least ``least_s``.

        A client that comes before its time does not take a second place: it gets a new one, and
        its old one becomes free.

        Each second of the schedule takes two thirds of the rate. If no place is free within an
        hour, the client gets a random time within that hour.
        """
        if client_id is not None:
            self._release(client_id)
        now_s, most = self.clock.now_s(), max(1, round(_SCHEDULED_SHARE * self.rate_per_s))
        # Seconds of the schedule are whole: the next full one is the first that honors `least_s`.
        first = int(now_s + least_s) + 1
        last = max(first, int(now_s) + _LONGEST_S)
        # Looking up a missing key of a Counter gives 0 and does not insert it.
        second = next((s for s in range(first, last) if self._booked[s] < most), None)
        if second is None:
            second = int(self.jitter.integers(first, last + 1))
        self._booked[second] += 1
        if client_id is not None:
            self._seconds[client_id] = second
        # Spread within the second, or all of its clients would come at its start.
        return second + self.jitter.random() - now_s

    def _release(self, client_id: ClientId) -> None:
        second = self._seconds.pop(client_id, -1)
        if second in self._booked:  # otherwise that second is over
            self._booked[second] -= 1
