"""The queue of runs: which run starts next, and what each of the others waits for.

Runs start by priority, higher ones first, then in the order of submission. A run whose ``after``
is not done does not hold up those behind it. Priorities do not age: while runs of a higher
priority keep coming, one of a lower priority waits. Its operator sees this in the number of runs
ahead of it, and can give it another priority.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

#: How the name of a file of weights ends.
WEIGHTS_SUFFIX: Final = ".safetensors"
_AT_ROUND: Final = re.compile(r"(?P<run>[^@]+)@(?P<round>\d+)")


class QueueState(StrEnum):
    """Where a run of the queue stands.

    ``failed`` and ``cancelled`` runs keep their rounds: a retry queues them again.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, in order or not."""
        return self not in (QueueState.QUEUED, QueueState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run that an operator wants to queue.

    Attributes:
        name: Name of the run, which no other run of the database has.
        config: The resolved configuration tree, JSON values only, as in the run's record.
        priority: Higher ones start first.
        after: Name of the run that must be done before this one starts; empty: none.
        start_from: Where the initial weights come from, JSON values only: ``{"run": NAME}``,
            ``{"run": NAME, "round": ROUNDS}`` or ``{"file": PATH}``; empty: the model's own. Once
            they are copied beside the queue, it has their ``sha256``, too.
        study: Name of the study that the run belongs to; empty: none.
    """

    name: str
    config: Mapping[str, object]
    priority: int = 0
    after: str = ""
    start_from: Mapping[str, str]
    study: str = ""


@dataclass(frozen=True, kw_only=True)
class QueuedRun(Submission):
    """A run of the queue, whatever its state.

    Attributes:
        id: Place in the order of submission.
        state: Where it stands.
        reason: Why it failed or was cancelled; empty otherwise.
        submitted_by: Who submitted it: :attr:`fedlearn.identity.actors.Actor.label`.
        submitted_utc: When it was submitted, ISO 8601.
        started_utc: When it last started; empty if it never has.
        ended_utc: When it ended; empty if it has not.
    """

    id: int
    state: QueueState
    reason: str
    submitted_by: str
    submitted_utc: str
    started_utc: str
    ended_utc: str


def parse_start(text: str) -> Mapping[str, str]:
    """Parse the value of ``--from``: ``RUN``, ``RUN@ROUND`` or a path to a safetensors file.

    It is empty if ``text`` is.
    """
    if not text:
        return {}
    if text.endswith(WEIGHTS_SUFFIX):
        return {"file": str(Path(text).absolute())}
    if (found := _AT_ROUND.fullmatch(text)) is not None:
        return {"run": found["run"], "round": str(int(found["round"]))}
    return {"run": text}


def choose_next(queue: Sequence[QueuedRun], *, max_concurrent_runs: int) -> list[str]:
    """Return the names of the runs to start now, in this order."""
    num_running = sum(each.state is QueueState.RUNNING for each in queue)
    states = {each.name: each.state for each in queue}
    ready = [each.name for each in _in_order(queue) if _is_ready(each, states)]
    return ready[: max(0, max_concurrent_runs - num_running)]


def explain_waits(queue: Sequence[QueuedRun], *, hidden: Collection[str] = ()) -> dict[str, str]:
    """Say for each queued run what it waits for, by name.

    Args:
        queue: The whole queue.
        hidden: Runs whose names must not be told.

    Example:
        >>> from fedlearn.rounds.scheduling import QueuedRun, QueueState, explain_waits
        >>> never = {"reason": "", "submitted_utc": "", "started_utc": "", "ended_utc": ""}
        >>> rest = {"config": {}, "start_from": {}, "submitted_by": "ann", **never}
        >>> first = QueuedRun(id=1, name="first", state=QueueState.RUNNING, **rest)
        >>> second = QueuedRun(id=2, name="second", state=QueueState.QUEUED, after="first", **rest)
        >>> third = QueuedRun(id=3, name="third", state=QueueState.QUEUED, **rest)
        >>> explain_waits([first, second, third])
        {'third': 'next', 'second': 'after first, which is running'}
    """
    states = {each.name: each.state for each in queue}
    waits, num_ahead = dict[str, str](), 0
    for run in _in_order(queue):
        if _is_ready(run, states):
            waits[run.name] = _describe_place(num_ahead)
            num_ahead += 1
    blocked = [each for each in _in_order(queue) if each.name not in waits]
    return waits | {
        each.name: f"after a run of another study, which is {states[each.after]}"
        if each.after in hidden
        else _explain_block(each, states[each.after])
        for each in blocked
    }


def restrict_queue(
    queue: Sequence[QueuedRun], *, covers: Callable[[str], bool]
) -> tuple[list[QueuedRun], Mapping[str, str]]:
    """Return the runs of some studies, and what each of them waits for by name.

    Neither names a run of another study.

    Args:
        queue: The whole queue.
        covers: Whether the runs of a study may be shown; an empty name: those of no study.
    """
    hidden = {each.name for each in queue if not covers(each.study)}
    shown = [each for each in queue if each.name not in hidden]
    known = [replace(each, after="") if each.after in hidden else each for each in shown]
    waits = explain_waits(queue, hidden=hidden)
    return known, {name: wait for name, wait in waits.items() if name not in hidden}


def _in_order(queue: Sequence[QueuedRun]) -> list[QueuedRun]:
    queued = [each for each in queue if each.state is QueueState.QUEUED]
    return sorted(queued, key=lambda run: (-run.priority, run.id))


def _is_ready(run: QueuedRun, states: Mapping[str, QueueState]) -> bool:
    return not run.after or states[run.after] is QueueState.DONE


def _describe_place(num_ahead: int) -> str:
    if num_ahead == 0:
        return "next"
    return f"{num_ahead} run{'s' if num_ahead > 1 else ''} ahead"


def _explain_block(run: QueuedRun, state: QueueState) -> str:
    match state:
        case QueueState.FAILED:
            remedy = f": retry {run.after}, or cancel {run.name}"
            return f"after {run.after}, which failed{remedy}"
        case QueueState.CANCELLED:
            remedy = f": retry {run.after}, or cancel {run.name}"
            return f"after {run.after}, which was cancelled{remedy}"
        case _:
            return f"after {run.after}, which is {state}"
