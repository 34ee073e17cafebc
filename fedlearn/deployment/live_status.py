"""A coordinator's live status: the run loop writes it, operators and monitors read it."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from fedlearn.core.clock import SystemClock
from fedlearn.core.json_values import to_json_values
from fedlearn.core.participations import Status
from fedlearn.deployment.round_times import RoundTimes
from fedlearn.gateway.counters import Histogram
from fedlearn.rounds.records import RoundRecord

if TYPE_CHECKING:  # `fedlearn why` reads this module and must not wait for torch to import
    from fedlearn.parallel.task import Progress


class Phase(StrEnum):
    """What a coordinator is currently doing."""

    STARTING = "starting"
    STANDBY = "standby"
    WAITING = "waiting"
    ROUND = "round"
    COMMITTING = "committing"
    PAUSED = "paused"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(kw_only=True)
class LiveStatus:
    """The state of a run, for display and monitoring; each attribute may be read at any time.

    Attributes:
        num_wanted: Reports that close a round; ``min_reports`` is the fewest that make one.
        measures: Names of the metrics that the run declares.
        attempt: Attempt number of the current or next round, from 0.
        num_needed: Clients that the run last waited for; valid in the waiting phase.
        round_s: Seconds that the last round took; NaN before the first.
        metrics: Latest value of each metric, by name.
        epsilon: Privacy spent, as last computed; NaN before that.
        epsilon_budget: Privacy that may be spent; ``None``: there is no such limit.
        training: Progress of the coordinator's own training, current or last, by kind.
        counts: Number of clients by final status, over all rounds of this process.
        secure_dropouts: Number of clients lost by stage of secure aggregation, over all attempts
            of this process; empty without it.
        round_times: Duration of rounds, not counting waits.
        in_flight_limit: Clients of an asynchronous run that may be in flight; ``None`` in others.
        staleness: Number of updates by staleness, over all rounds of this process that accept
            updates of older models.
        failing: Returns the clients that keep failing, by number, as JSON values.
    """

    num_rounds: int = 0
    num_wanted: int = 0
    min_reports: int = 0
    deadline_s: float = math.inf
    measures: Collection[str] = ("accuracy", "loss")
    phase: Phase = Phase.STARTING
    num_finished: int = 0
    attempt: int = 0
    num_needed: int = 0
    round_s: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    epsilon: float = math.nan
    epsilon_budget: float | None = None
    training: "dict[str, Progress]" = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    secure_dropouts: dict[str, int] = field(default_factory=dict)
    round_times: RoundTimes = field(default_factory=lambda: RoundTimes(clock=SystemClock()))
    in_flight_limit: int | None = None
    staleness: Mapping[int, int] = field(default_factory=dict)
    failing: Callable[[], Mapping[str, object]] = dict

    def record_round(self, record: RoundRecord) -> None:
        """Record a finished round, which is committed next."""
        self.num_finished = record.round_num + 1
        self.attempt = 0
        self.round_s = record.seconds
        self.epsilon = record.metrics.get("epsilon", self.epsilon)
        self.metrics = {**self.metrics, **record.metrics}  # not every round measures every metric
        for status in Status:
            self.counts[status] += record.count(status)
        for age, number in record.staleness.items():
            self.staleness = {**self.staleness, age: self.staleness.get(age, 0) + number}
        self.phase = Phase.COMMITTING

    def record_dropouts(self, lost: Mapping[str, int]) -> None:
        """Record the clients that a session of secure aggregation has lost, by stage."""
        for stage, number in lost.items():
            self.secure_dropouts[stage] += number

    def record_training(self, kind: str, progress: "Progress") -> None:
        """Record the progress of the coordinator's own training."""
        # Replaced, not mutated: another thread may be iterating over it.
        self.training = {**self.training, kind: progress}

    def record_in_flight_limit(self, most: int) -> None:
        """Record how many clients may be in flight."""
        self.in_flight_limit = most

    def to_json_values(self) -> dict[str, object]:
        """Return everything as JSON values, for operators."""
        values = {
            "phase": self.phase.value,
            "round": self.num_finished,
            "rounds": self.num_rounds,
            "attempt": self.attempt,
            "wanted": self.num_wanted,
            "min_reports": self.min_reports,
            "deadline_s": self.deadline_s,
            "needed": self.num_needed,
            "round_s": self.round_s,
            "in_flight_limit": self.in_flight_limit,
            "metrics": self.metrics,
            "training": {kind: asdict(progress) for kind, progress in self.training.items()},
            "failing": self.failing(),
        }
        return to_json_values(values)

    def gauges(self) -> dict[str, float]:
        """Return the values to plot in a monitor, by name."""
        phases = {f"phase{{phase={each}}}": float(each is self.phase) for each in Phase}
        names = [each for name in self.measures for each in (name, f"clients/{name}_mean")]
        measured = {name: self.metrics[name] for name in names if name in self.metrics}
        limits = {
            "privacy_epsilon_budget": self.epsilon_budget,
            "in_flight_limit": self.in_flight_limit,
        }
        return {
            "round": float(self.num_finished),
            "rounds": float(self.num_rounds),
            "round_seconds": self.round_s,
            **measured,
            **({} if math.isnan(self.epsilon) else {"privacy_epsilon": self.epsilon}),
            **{name: float(value) for name, value in limits.items() if value is not None},
            **self._training_gauges(),
            **phases,
        }

    def _training_gauges(self) -> dict[str, float]:
        return {
            f"server_training_{name}{{kind={kind}}}": float(value)
            for kind, progress in self.training.items()
            for name, value in (
                ("step", progress.step_num),
                ("steps", progress.num_steps),
                ("loss", progress.loss),
                ("examples_per_second", progress.examples_per_s),
                ("loss_scale", progress.loss_scale),
                ("skipped_steps", progress.num_skipped),
            )
        }

    def histograms(self) -> dict[str, Histogram]:
        """Return the distributions measured over rounds, by name."""
        return {"round_work_seconds": self.round_times.histogram}

    def counters(self) -> dict[str, float]:
        """Return the number of clients by final status and of updates by staleness, by name."""
        ended = {f"participations{{status={name}}}": n for name, n in self.counts.items()}
        stale = {f"updates{{staleness={age}}}": n for age, n in self.staleness.items()}
        lost = {f"secure_dropouts{{stage={name}}}": n for name, n in self.secure_dropouts.items()}
        return {**ended, **lost, **stale}
