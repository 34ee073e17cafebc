"""What one run came to, as numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from fedlearn.core.collecting import NUM_CAPPED, NUM_CLIPPED, Participation, Status
from fedlearn.core.distribution import NUM_CLIENTS, split
from fedlearn.core.messages import ClientId
from fedlearn.core.quantities import duration_text
from fedlearn.experiment.history import (
    Point,
    best_point,
    configured_metric,
    direction_of,
    directions_of,
    headline,
    series,
)
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus


class Counts(NamedTuple):
    """How many of the clients asked ended how."""

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
        """Return them in words; who was stale is told where somebody was."""
        names = [name for name, num in self._asdict().items() if num or name != "stale"]
        return ", ".join(f"{getattr(self, name)} {name}" for name in names)


class Best(NamedTuple):
    """The best value of the metric a run is judged by."""

    metric: str
    point: Point

    @classmethod
    def of(cls, record: RunRecord, rounds: Sequence[RoundRecord]) -> "Best | None":
        """Return that of the first measured of what the run watches, accuracy and loss."""
        for name in (configured_metric(record), "accuracy", "loss"):
            direction = None if name is None else direction_of(record, name)
            if name and direction and (best := best_point(series(rounds, name), direction)):
                return cls(name, best)
        return None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to.

    Attributes:
        record: The run.
        num_finished: Rounds it has.
        best: Its best evaluation; ``None`` without any.
        metrics: Of the last evaluation; empty without any.
        measured_after: Rounds finished at the last evaluation; 0 without any.
        virtual_s: Virtual seconds in all.
        seconds: Real seconds in all.
        num_clients: Different clients asked.
        counts: Participations of all rounds.
        again: Those of them of clients that were counted as late before, where late updates are
            kept: each was asked once, and has two.
        num_skipped: Rounds that left the model as it was.
        num_retries: Further attempts, all rounds together.
        num_clipped: Reports that a clip scaled down; 0 also where the count is not known.
        num_capped: Reports whose loss or number of examples a secure sum cut off; likewise.
        reasons: Failure reasons and how often, the most frequent first.
        privacy: What was spent of its clients, where the reader is told; else ``None``.
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
    def num_asked(self) -> int:
        """How many times clients were asked whose rounds are over."""
        return sum(self.counts) - sum(self.again)

    @property
    def num_in_time(self) -> int:
        """How many of these times they reported in the round that asked them."""
        return self.counts.reported - self.again.reported

    @property
    def is_resumable(self) -> bool:
        """Whether `fedlearn resume NAME` is what to type next.

        A coordinator continues by itself, and so does a run that is alive. A run that failed before
        its first round was committed, or without a single report of its clients, is fixed and
        started again: its model is still the initial one.
        """
        match self.record.status:
            case RunStatus.DONE | RunStatus.RUNNING:
                return False
            case RunStatus.FAILED if self.num_finished == 0:
                return False
            case RunStatus.FAILED if self.num_asked > 0 and self.counts.reported == 0:
                return False
            case _:
                return not self.record.is_deployed

    def times(self) -> str:
        """Return what it took, in words; a deployed run has no virtual time."""
        real = duration_text(self.seconds)
        if self.record.is_deployed:
            return real
        return f"{duration_text(self.virtual_s)} virtual, {real} real"

    @property
    def accuracy(self) -> float | None:
        """The last accuracy; ``None`` if it was not measured."""
        return headline(self.metrics, "accuracy")

    @property
    def loss(self) -> float | None:
        """The last evaluation loss; ``None`` if it was not measured."""
        return headline(self.metrics, "loss")

    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Return how each metric spread over clients at the last evaluation: by name, by part."""
        spread: dict[str, dict[str, float]] = {}
        for key, value in self.metrics.items():
            name, part = split(key)
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
    """Return how many updates had which staleness, in words.

    Example:
        >>> staleness_text({0: 6, 1: 3, 4: 1})
        '6 x 0, 3 x 1, 1 x 4 (mean 0.7)'
    """
    total = sum(rounds * number for rounds, number in staleness.items())
    mean = total / max(1, sum(staleness.values()))
    each = ", ".join(f"{number} x {rounds}" for rounds, number in staleness.items())
    return f"{each} (mean {mean:.1f})"


def summarize(record: RunRecord, rounds: Sequence[RoundRecord]) -> Summary:
    """Return what a run came to; ``None`` and zeros where it has no rounds."""
    measures = directions_of(record)  # what a strategy says of its step is no evaluation
    evaluated = next(
        (
            one
            for one in reversed(rounds)
            if any(split(each)[0] in measures for each in one.metrics)
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
        again=Counts.of_all(_again(record, participations)),
        num_skipped=sum(one.outcome is Outcome.SKIPPED for one in rounds),
        num_retries=sum(one.attempt for one in rounds),
        num_clipped=round(sum(one.metrics.get(NUM_CLIPPED, 0.0) for one in rounds)),
        num_capped=round(sum(one.metrics.get(NUM_CAPPED, 0.0) for one in rounds)),
        reasons=tuple(reasons.most_common()),
    )


def _again(record: RunRecord, participations: Iterable[Participation]) -> Iterator[Participation]:
    """Yield what became of clients that were late in an earlier round, and not asked again."""
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
