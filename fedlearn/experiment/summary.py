"""Summarizes one run in numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from fedlearn.core.distribution import NUM_CLIENTS, split_statistic
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import NUM_CAPPED, NUM_CLIPPED, Participation, Status
from fedlearn.core.quantities import format_duration
from fedlearn.experiment.history import (
    Point,
    best_point,
    direction_of,
    directions_of,
    headline,
    metric_to_watch,
    series,
)
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus


class Counts(NamedTuple):
    """Numbers of clients by status."""

    reported: int
    late: int
    failed: int
    stale: int

    @classmethod
    def of(cls, record: RoundRecord) -> Self:
        """Count one round."""
        return cls(*(record.count(Status(name)) for name in cls._fields))

    @classmethod
    def of_all(cls, participations: Iterable[Participation]) -> Self:
        """Count participations of any rounds."""
        found = Counter(each.status for each in participations)
        return cls(*(found[Status(name)] for name in cls._fields))

    def text(self) -> str:
        """Describe the counts in words; stale clients are mentioned only if there are any."""
        names = [name for name, num in self._asdict().items() if num or name != "stale"]
        return ", ".join(f"{getattr(self, name)} {name}" for name in names)


class Best(NamedTuple):
    """The best value of the metric by which a run is judged."""

    metric: str
    point: Point

    @classmethod
    def of(cls, record: RunRecord, rounds: Sequence[RoundRecord]) -> "Best | None":
        """Find the best value of the watched metric, else of accuracy, else of the loss."""
        for name in (metric_to_watch(record), "accuracy", "loss"):
            direction = None if name is None else direction_of(record, name)
            if name and direction and (best := best_point(series(rounds, name), direction)):
                return cls(name, best)
        return None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a run.

    Attributes:
        record: The run.
        num_finished: Finished rounds.
        best: The best evaluation; ``None`` without any.
        metrics: Metrics of the last evaluation; empty without any.
        measured_after: Rounds finished at the last evaluation; 0 without any.
        virtual_s: Virtual seconds in all.
        seconds: Real seconds in all.
        num_clients: Distinct clients asked.
        counts: Participations of all rounds, by status.
        again: Second participations, by status: if late updates are kept, a client that was asked
            once counts first as late and then again when its update arrives.
        num_skipped: Rounds that left the model unchanged.
        num_retries: Retries of all rounds together.
        num_clipped: Reports that were scaled down to a clip; 0 also if the count is not known.
        num_capped: Reports whose loss or number of examples a secure sum cut off; 0 likewise.
        reasons: Failure reasons with their counts, the most frequent first.
        privacy: Privacy spent on the run's clients, if the caller added it; else ``None``.
    """

    record: RunRecord
    num_finished: int
    best: Best | None
    metrics: Mapping[str, float]
    measured_after: int
    virtual_s: float
    seconds: float
    num_clients: int
    counts: Counts
    again: Counts
    num_skipped: int
    num_retries: int
    num_clipped: int
    num_capped: int
    reasons: tuple[tuple[str, int], ...]
    privacy: Spending | None = None

    @property
    def num_tasks(self) -> int:
        """How many times clients were asked in rounds that are over."""
        return sum(self.counts) - sum(self.again)

    @property
    def num_in_time(self) -> int:
        """How many of these times the client reported in the round that asked it."""
        return self.counts.reported - self.again.reported

    @property
    def is_resumable(self) -> bool:
        """Whether `fedlearn resume NAME` is the command to type next.

        It is not for a deployed run, which its coordinator resumes, nor for a run that is still
        alive. A run that failed before its first round was committed, or without a single report,
        is better fixed and started again: its model is still the initial one.
        """
        match self.record.status:
            case RunStatus.DONE | RunStatus.RUNNING:
                return False
            case RunStatus.FAILED if self.num_finished == 0:
                return False
            case RunStatus.FAILED if self.num_tasks > 0 and self.counts.reported == 0:
                return False
            case _:
                return not self.record.is_deployed

    def times(self) -> str:
        """Describe the time that the run took; a deployed run has no virtual time."""
        real = format_duration(self.seconds)
        if self.record.is_deployed:
            return real
        return f"{format_duration(self.virtual_s)} virtual, {real} real"

    @property
    def accuracy(self) -> float | None:
        """The last accuracy; ``None`` if it was not measured."""
        return headline(self.metrics, "accuracy")

    @property
    def loss(self) -> float | None:
        """The last evaluation loss; ``None`` if it was not measured."""
        return headline(self.metrics, "loss")

    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Return each metric's statistics over clients at the last evaluation, by metric name."""
        spread: dict[str, dict[str, float]] = {}
        for key, value in self.metrics.items():
            name, part = split_statistic(key)
            if part is not None:
                spread.setdefault(name, {})[part] = int(value) if part == NUM_CLIENTS else value
        return spread

    def central_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation that are not per client."""
        return {
            name: value
            for name, value in self.metrics.items()
            if not name.startswith("clients/") and name not in (NUM_CLIPPED, NUM_CAPPED)
        }


def staleness_text(staleness: Mapping[int, int]) -> str:
    """Format the number of updates by their staleness.

    Example:
        >>> staleness_text({0: 6, 1: 3, 4: 1})
        '6 x 0, 3 x 1, 1 x 4 (mean 0.7)'
    """
    total = sum(rounds * number for rounds, number in staleness.items())
    mean = total / max(1, sum(staleness.values()))
    each = ", ".join(f"{number} x {rounds}" for rounds, number in staleness.items())
    return f"{each} (mean {mean:.1f})"


def summarize(record: RunRecord, rounds: Sequence[RoundRecord]) -> Summary:
    """Summarize a run; values are ``None`` or zero if it has no rounds."""
    # Metrics also contain what a strategy reports about its step, which is no evaluation.
    measures = directions_of(record)
    evaluated = next(
        (
            one
            for one in reversed(rounds)
            if any(split_statistic(each)[0] in measures for each in one.metrics)
        ),
        None,
    )
    participations = [each for one in rounds for each in one.participations]
    reasons = Counter(each.reason for each in participations if each.status is Status.FAILED)
    return Summary(
        record=record,
        num_finished=len(rounds),
        best=Best.of(record, rounds),
        metrics=evaluated.metrics if evaluated else {},
        measured_after=evaluated.round_num + 1 if evaluated else 0,
        virtual_s=rounds[-1].virtual_s if rounds else 0.0,
        seconds=sum(one.seconds for one in rounds),
        num_clients=len({each.client_id for each in participations}),
        counts=Counts.of_all(participations),
        again=Counts.of_all(_find_repeats(record, participations)),
        num_skipped=sum(one.outcome is Outcome.SKIPPED for one in rounds),
        num_retries=sum(one.attempt for one in rounds),
        num_clipped=round(sum(one.metrics.get(NUM_CLIPPED, 0.0) for one in rounds)),
        num_capped=round(sum(one.metrics.get(NUM_CAPPED, 0.0) for one in rounds)),
        reasons=tuple(reasons.most_common()),
    )


def _find_repeats(
    record: RunRecord, participations: Iterable[Participation]
) -> Iterator[Participation]:
    """Yield the second participation of clients that were late in an earlier round.

    These clients were not asked again: their late update arrived, or failed to.
    """
    table = record.config.get("late_updates")
    if not isinstance(table, Mapping) or table.get("mode") != "keep":
        return
    awaited = set[ClientId]()
    for each in participations:
        if each.client_id in awaited:
            awaited.remove(each.client_id)
            yield each
        elif each.status is Status.LATE:
            awaited.add(each.client_id)
