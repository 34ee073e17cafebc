"""Pace steering: at which rate clients may check in, by what that costs, and when others come back.

A check-in is a client that connects and says hello, whether it may stay or not. What one costs in
processor time is measured, and so is how late the event loop is: from the first follows a rate at
which all together take a share of a core, and the second slows it down where something else (open
transfers, a database) keeps the loop. Whoever is told to come back gets a time of its own, so that
as many come a second as may: a few clients soon, many over as long as it takes, and never together.

References:
    K. Bonawitz et al., 2019, `Towards Federated Learning at Scale: System Design
    <https://arxiv.org/abs/1902.01046>`_, section 2.3.
"""

import math
from collections import Counter, deque
from dataclasses import KW_ONLY, dataclass, field
from statistics import median

from numpy.random import Generator

from fedlearn.core.clock import Clock
from fedlearn.core.randomness import Seed
from fedlearn.door.exchange import TokenBucket

#: Until a check-in's cost is known.
_FIRST_PER_S = 100.0
#: Below this nobody would ever come.
_LEAST_PER_S = 1.0
#: Fewer check-ins between two looks say little of what one costs: something else is in it.
_FEWEST = 10
#: Looks whose median cost counts, for the same reason.
_NUM_COSTS = 9
#: An event loop that is later than this is slowed down, and then given its rate back slowly.
_LATE_S = 0.1
_LESS, _MORE, _LEAST_PART = 0.5, 1.25, 1 / 64
#: A client stays away no longer than this, as it is told by default.
_LONGEST_S = 3600


@dataclass(eq=False)
class Pace:
    """How many may check in a second, and who comes when.

    Attributes:
        share: Of one core that check-ins may take.
        late_s: By how much the event loop was late at the last look.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> pace = Pace(VirtualClock(), share=0.5)
        >>> pace.look(cpu_s=0.4, num_check_ins=100, late_s=0.0)  # 4 ms each: 125 take half a core
        >>> pace.rate_per_s
        125.0
        >>> after_s = sorted(pace.after_s(1.0) for _ in range(1000))
        >>> 1.0 <= after_s[0] <= after_s[-1] < 10.0
        True
    """

    clock: Clock
    _: KW_ONLY
    share: float
    jitter: Generator = field(default_factory=Seed(0).derive("come back").numpy)
    late_s: float = 0.0
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_COSTS))
    _part: float = 1.0  # of the rate, where the loop is late
    _booked: Counter[int] = field(default_factory=Counter)  # by second of the clock
    _bucket: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(_FIRST_PER_S, self.clock.now_s())

    @property
    def rate_per_s(self) -> float:
        """Check-ins a second that the coordinator can take."""
        return self._bucket.rate_per_s

    @property
    def cost_s(self) -> float:
        """Processor time of one check-in; NaN before it is known."""
        return median(self._costs_s) if self._costs_s else math.nan

    def values(self) -> dict[str, float]:
        """Return what is known, by name."""
        cost = {} if math.isnan(self.cost_s) else {"check_in_seconds": round(self.cost_s, 6)}
        rate = {"check_in_rate": round(self.rate_per_s, 1)}
        return {**rate, "loop_late_seconds": round(self.late_s, 3), **cost}

    def look(self, *, cpu_s: float, num_check_ins: int, late_s: float) -> None:
        """Take what was measured since the last look.

        Args:
            cpu_s: Processor time of this process.
            num_check_ins: How many there were.
            late_s: By how much the event loop was late.
        """
        if num_check_ins >= _FEWEST:
            self._costs_s.append(cpu_s / num_check_ins)
        self.late_s = late_s
        self._part *= _LESS if late_s > _LATE_S else _MORE
        self._part = min(1.0, max(_LEAST_PART, self._part))
        whole = self.share / self.cost_s if self._costs_s else _FIRST_PER_S
        self._bucket.rate_per_s = max(_LEAST_PER_S, whole * self._part)
        begun = int(self.clock.now_s())
        self._booked = Counter({s: n for s, n in self._booked.items() if s >= begun})

    def admits(self) -> bool:
        """Return whether one more may check in now, and count it if so."""
        return self._bucket.has(now_s=self.clock.now_s())

    def after_s(self, least_s: float) -> float:
        """Return after how many seconds a client shall come back, ``least_s`` at least.

        As many are told a second as may come in it; whoever finds none free within an hour comes at
        any time of that.
        """
        now_s, most = self.clock.now_s(), max(1, int(self.rate_per_s))
        first = int(now_s + least_s) + 1
        last = max(first, int(now_s) + _LONGEST_S)
        second = next((s for s in range(first, last) if self._booked[s] < most), None)
        if second is None:
            second = int(self.jitter.integers(first, last + 1))
        self._booked[second] += 1
        return second + self.jitter.random() - now_s
