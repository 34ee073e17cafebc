"""Pace steering: at which rate clients may check in, by what that costs, and when others come back.

A check-in is a client that connects and says hello, whether it may stay or not: most of what it
costs is spent by then. What one costs in processor time is measured, and so is how late the event
loop is: from the first follows a rate at which all together take a share of a core, and the second
slows it down where something else (open transfers, a database) keeps the loop. Whoever is told to
come back gets a time of its own, so that as many come a second as may: a few clients soon, many
over as long as it takes, and never together.

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
from fedlearn.door.exchange import TokenBucket

#: Until a check-in's cost is known.
_FIRST_PER_S = 100.0
#: Below this nobody would ever come.
_LEAST_PER_S = 1.0
#: Of the rate, what is told when to come. The rest is for whoever comes untold, and for what a
#: check-in costs then: of a rush, which keeps the coordinator at it, each costs it less.
_TOLD = 2 / 3
#: Fewer check-ins say little of what one costs: something else is in it.
_FEWEST = 10
#: In which what was measured comes to count half. Long enough that all of a rush is in it, whose
#: connections are made before the first of them says hello.
_HALF_LIFE_S = 10.0
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
        cost_s: Processor time of one check-in; NaN before it is known.
        late_s: By how much the event loop was late at the last look.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> pace = Pace(VirtualClock(), share=0.5)
        >>> pace.measured(cpu_s=0.4, num_check_ins=100)  # 4 ms each: 125 take half a core
        >>> pace.rate_per_s
        125.0
        >>> after_s = sorted(pace.after_s(1.0) for _ in range(1000))
        >>> 1.0 <= after_s[0] <= after_s[-1] < 15.0
        True
    """

    clock: Clock
    _: KW_ONLY
    share: float
    jitter: Generator = field(default_factory=Seed(0).derive("come back").numpy)
    cost_s: float = math.nan
    late_s: float = 0.0
    _cpu_s: float = 0.0  # of the check-ins that count, and how many they are
    _num_check_ins: float = 0.0
    _part: float = 1.0  # of the rate, where the loop is late
    _booked: Counter[int] = field(default_factory=Counter)  # by second of the clock
    _seconds: dict[ClientId, int] = field(default_factory=dict)  # when each was last told to come
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
        """Return what is known, by name."""
        cost = {} if math.isnan(self.cost_s) else {"check_in_seconds": round(self.cost_s, 6)}
        rate = {"check_in_rate": round(self.rate_per_s, 1)}
        return {**rate, "loop_late_seconds": round(self.late_s, 3), **cost}

    def measured(self, *, cpu_s: float, num_check_ins: int) -> None:
        """Take what check-ins have cost since the last time.

        Args:
            cpu_s: Processor time of the door.
            num_check_ins: How many there were.
        """
        before_s, self._measured_s = self._measured_s, self.clock.now_s()
        kept = 0.5 ** ((self._measured_s - before_s) / _HALF_LIFE_S)
        self._cpu_s = kept * self._cpu_s + cpu_s
        self._num_check_ins = kept * self._num_check_ins + num_check_ins
        if self._num_check_ins >= _FEWEST:
            self.cost_s = self._cpu_s / self._num_check_ins
        self._set_rate()

    def look(self, *, late_s: float) -> None:
        """Take by how much the event loop is late."""
        self.late_s = late_s
        self._part *= _LESS if late_s > _LATE_S else _MORE
        self._part = min(1.0, max(_LEAST_PART, self._part))
        self._set_rate()
        begun = int(self.clock.now_s())
        self._booked = Counter({s: n for s, n in self._booked.items() if s >= begun})

    def _set_rate(self) -> None:
        whole = self.share / self.cost_s if self.cost_s > 0.0 else _FIRST_PER_S
        self._bucket.rate_per_s = max(_LEAST_PER_S, whole * self._part)

    def admits(self) -> bool:
        """Return whether one more may check in now, and count it if so."""
        return self._bucket.has(now_s=self.clock.now_s())

    def after_s(self, least_s: float, *, client_id: ClientId | None = None) -> float:
        """Return after how many seconds a client shall come back, ``least_s`` at least.

        A client that comes before its time takes no second place: it is told another one, and
        somebody else has the place.

        Of as many as may come in a second, two thirds are told it; whoever finds none free within
        an hour comes at any time of that.
        """
        if client_id is not None:
            self._release(client_id)
        now_s, most = self.clock.now_s(), max(1, round(_TOLD * self.rate_per_s))
        first = int(now_s + least_s) + 1
        last = max(first, int(now_s) + _LONGEST_S)
        second = next((s for s in range(first, last) if self._booked[s] < most), None)
        if second is None:
            second = int(self.jitter.integers(first, last + 1))
        self._booked[second] += 1
        if client_id is not None:
            self._seconds[client_id] = second
        return second + self.jitter.random() - now_s

    def _release(self, client_id: ClientId) -> None:
        second = self._seconds.pop(client_id, -1)
        if second in self._booked:  # else it is past
            self._booked[second] -= 1
