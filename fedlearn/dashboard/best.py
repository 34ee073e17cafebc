"""Finds the best value of each run in a list: as in reports, but by the database."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fedlearn.experiment.history import direction_of, metric_to_watch
from fedlearn.rounds.records import RunRecord
from fedlearn.store.run_list import read_extremes
from fedlearn.store.runs import Database


class BestValue(NamedTuple):
    """The best value of the metric by which a run is judged.

    Attributes:
        metric: Name of the metric.
        recorded_as: Name under which it was recorded: its own, or that of its mean over clients.
    """

    metric: str
    recorded_as: str
    value: float


def find_bests(database: Database, runs: Mapping[int, RunRecord]) -> dict[int, BestValue | None]:
    """Return the best value by run key; ``None`` for a run without an evaluation.

    It is that of the watched metric, else of accuracy, else of the loss, as in
    :class:`fedlearn.experiment.summary.Best`.
    """
    wanted = {
        key: [name for metric in _candidates(record) for name in _names(metric)]
        for key, record in runs.items()
    }
    extremes = read_extremes(database, wanted) if runs else {}
    return {key: _choose(key, record, extremes) for key, record in runs.items()}


def rank_by_best(database: Database, runs: Mapping[int, RunRecord]) -> list[int]:
    """Return the keys of runs, the best first.

    Runs that are judged by the same metric stand together, as only their values can be compared;
    the metric that most runs have comes first, and runs without an evaluation last.
    """
    bests = find_bests(database, runs)
    num_runs = Counter(best.metric for best in bests.values() if best is not None)

    def place(key: int) -> tuple[bool, int, str, float]:
        best = bests[key]
        if best is None:
            return True, 0, "", 0.0
        sign = 1.0 if direction_of(runs[key], best.metric) == "min" else -1.0
        return False, -num_runs[best.metric], best.metric, sign * best.value

    return sorted(runs, key=place)


def _choose(
    key: int, record: RunRecord, extremes: Mapping[tuple[int, str], tuple[float, float]]
) -> BestValue | None:
    for metric in _candidates(record):
        direction = direction_of(record, metric)
        for name in _names(metric):
            if direction and (found := extremes.get((key, name))):
                low, high = found
                return BestValue(metric, name, high if direction == "max" else low)
    return None


def _candidates(record: RunRecord) -> list[str]:
    watched = metric_to_watch(record)
    return [*([] if watched is None else [watched]), "accuracy", "loss"]


def _names(metric: str) -> tuple[str, str]:
    return metric, f"clients/{metric}_mean"
