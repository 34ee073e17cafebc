"""What all trackers share: which values are logged, buffering, retries, and resuming."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import structlog
from torch import nn

from fedlearn.core.clock import RealClock, SystemClock
from fedlearn.core.json_values import iterate_leaves
from fedlearn.core.locks import open_lock, wait_for_lock
from fedlearn.core.messages import Scalar
from fedlearn.core.own_lines import describe_error
from fedlearn.core.participations import Status
from fedlearn.core.redaction import redact, remove_password
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RoundRecord, RunRecord

ItemT = TypeVar("ItemT")

#: Seconds between two writes to a tracker, and the longest wait after writes that failed.
_WRITE_EVERY_S, _LONGEST_WAIT_S = 1.0, 600.0

#: Settings that change no result: their values are addresses and arguments of custom code.
_NOT_LOGGED = ("callbacks.", "trackers.", "store.", "python.callbacks")
_SECRET_KEY = re.compile(r"(?i)password|passwd|secret|token|credential|api_?key")


class Values(NamedTuple):
    """The values of one finished round.

    Attributes:
        round_num: Round index, from 0. It is the step.
        unix_s: When the round ended, in seconds since 1970.
        by_name: The values.
    """

    round_num: int
    unix_s: float
    by_name: Mapping[str, float]


class TrackedPoint(NamedTuple):
    """One value of a finished round; its fields are those of :class:`Values`."""

    name: str
    value: float
    round_num: int
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Describes a run that starts or resumes.

    Attributes:
        name: Name of the run.
        key: Identifies the run among all runs: its name and the time when it was created.
        folder: Folder of the run.
        settings: The configuration by dotted key, without secrets.
    """

    name: str
    key: str
    folder: Path
    settings: Mapping[str, Scalar]

    @classmethod
    def of(cls, run: RunRecord, folder: Path) -> "RunStart":
        """Describe a run by its record."""
        created = re.sub("[^0-9]", "", run.created_utc)
        settings = dict(_select_settings(run.config))
        return cls(name=run.name, key=f"{run.name}-{created}", folder=folder, settings=settings)


class TrackerRun(Protocol):
    """A run that is open in a tracker. If a method fails, it may raise any exception."""

    @property
    def first_round(self) -> int:
        """The first round that the tracker lacks."""

    def log(self, rounds: Sequence[Values]) -> None:
        """Write the values of one or more rounds. After an error it is called again with them."""

    def close(self, run: RunRecord, notes: Mapping[str, str]) -> None:
        """Record how the run ended; a deployed run with the status ``running`` will resume.

        ``notes`` are its ``status`` and, if there are any, its ``error`` and ``model_path``.
        """


@dataclass(eq=False, kw_only=True)
class Tracker(ABC):
    """A callback that logs a run to an experiment tracker.

    The step is the round number, from 0. The values are those of the
    :class:`~fedlearn.rounds.records.RoundRecord`: all metrics, ``train_loss`` and
    ``train/NAME``, the numbers of clients that reported, were late or failed, and seconds.

    A tracker that fails does not end the run. The first failure is logged as ``tracker_failed``.
    The values are kept, and written later. When a run resumes, its run in the tracker continues:
    rounds that are there are not logged again, and missing ones are logged from the record.

    Attributes:
        package: The package that it needs, and fedlearn's extra with it; ``None``: it needs none.
        login_remedy: Where to give a password, which is refused in every text of the tracker.
        log_model_path: Whether to log the path of the last checkpoint when the run ends.
        clock: Time between two writes, and of the values.

    Raises:
        ConfigError: The package is not installed, or a text has a password.
    """

    package: ClassVar[str | None] = None
    login_remedy: ClassVar[str] = "set it in the environment instead"
    log_model_path: bool = False
    clock: RealClock = field(default_factory=SystemClock, repr=False)
    _session: "_Session | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.package is not None:
            _require_package(self.package, tracker=type(self).__name__)
        for each in fields(self):
            _require_no_password(
                str(getattr(self, each.name)),
                what=f"{type(self).__name__}: {each.name}",
                remedy=self.login_remedy,
            )

    @abstractmethod
    def open(self, start: RunStart) -> TrackerRun:
        """Begin or continue a run in the tracker; may raise any exception."""

    def before_run(self, run: RunRecord, folder: Path, history: Sequence[RoundRecord]) -> None:
        """Open the run, and log the rounds of ``history`` that the tracker lacks."""
        self._session = _Session(tracker=self, start=RunStart.of(run, folder))
        ended_s = self.clock.unix_s() - sum(each.seconds for each in history)
        for each in history:
            ended_s += each.seconds
            self._session.waiting.append(_select_values(each, unix_s=ended_s))
        self._session.write()

    def after_round(self, record: RoundRecord, model: nn.Module) -> None:
        """Log a round; rounds that take less than a second are written together."""
        assert self._session is not None  # `before_run` comes first
        self._session.waiting.append(_select_values(record, unix_s=self.clock.unix_s()))
        if self.clock.now_s() >= self._session.next_s:
            self._session.write()

    def after_run(self, run: RunRecord) -> None:
        """Write what is left, and how the run ended."""
        if self._session is not None:  # else `before_run` of another callback raised
            self._session.end(run)
            self._session = None


@dataclass(eq=False, kw_only=True)
class _Session:
    """A run as one tracker sees it in this process.

    Attributes:
        tracker: The tracker.
        start: The run.
        waiting: Rounds that are not written yet.
        next_s: When to write next.
    """

    tracker: Tracker
    start: RunStart
    waiting: list[Values] = field(default_factory=list)
    next_s: float = -math.inf
    _run: TrackerRun | None = None
    _first_round: int = 0
    _wait_s: float = _WRITE_EVERY_S
    _has_warned: bool = False

    def write(self) -> bool:
        """Write the waiting rounds; return whether that succeeded."""
        try:
            if self._run is None:
                run = self.tracker.open(self.start)
                self._first_round, self._run = run.first_round, run
            self.waiting = [each for each in self.waiting if each.round_num >= self._first_round]
            if self.waiting:
                self._run.log(self.waiting)
        except Exception as error:  # noqa: BLE001 - each tracker raises exceptions of its own
            self._wait_s = min(2.0 * self._wait_s, _LONGEST_WAIT_S)
            self._warn(error)
        else:
            self.waiting, self._wait_s = [], _WRITE_EVERY_S
        self.next_s = self.tracker.clock.now_s() + self._wait_s
        return not self.waiting and self._run is not None

    def end(self, run: RunRecord) -> None:
        """Write the waiting rounds and how the run ended."""
        self.write()
        try:
            if self._run is not None:
                self._run.close(run, dict(self._list_notes(run)))
        except Exception as error:  # noqa: BLE001 - each tracker raises exceptions of its own
            self._warn(error)
        if self.waiting:
            self._log().warning("tracker_lacks_rounds", num_rounds=len(self.waiting))

    def _list_notes(self, run: RunRecord) -> Iterator[tuple[str, str]]:
        yield "status", run.status.value
        if run.error:
            yield "error", run.error
        found = sorted((self.start.folder / "checkpoints").glob("round-*.safetensors"))
        if found and self.tracker.log_model_path:
            yield "model_path", str(found[-1].resolve())

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._log().warning("tracker_failed", error=redact(describe_error(error)))

    def _log(self) -> structlog.typing.FilteringBoundLogger:
        name = type(self.tracker).__name__
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
        return log.bind(tracker=name, run=self.start.name)


def list_points(rounds: Sequence[Values]) -> Iterator[TrackedPoint]:
    """Yield the single values of rounds."""
    for each in rounds:
        for name, value in each.by_name.items():
            yield TrackedPoint(name, value, each.round_num, each.unix_s)


def split_batches(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    """Yield the items in lists of at most ``size``.

    Example:
        >>> list(split_batches("abcde", 2))
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


@contextmanager
def lock_files(uri: str, folder: Path) -> Iterator[None]:
    """Exclude processes with other runs in the same folder while a tracker opens its files.

    Such as those of a sweep: two that create one database together leave it damaged.

    Args:
        uri: Where the tracker writes; nothing is locked for a server.
        folder: Folder of the run.
    """
    with ExitStack() as stack:
        if not uri.startswith(("http:", "https:")):
            lock = stack.enter_context(open_lock(folder.parent / "tracker-lock"))
            wait_for_lock(lock)
        yield


def _require_package(name: str, *, tracker: str) -> None:
    if find_spec(name) is None:
        raise ConfigError(
            f'{tracker} needs the package {name}; run `pip install "fedlearn[{name}]"`'
        )


def _require_no_password(address: str, *, what: str, remedy: str) -> None:
    # The configuration is stored, printed and hashed.
    if remove_password(address) != address:
        raise ConfigError(f"{what} has a password, which would be stored with the run; {remedy}")


def _select_settings(config: Mapping[str, object]) -> Iterator[tuple[str, Scalar]]:
    for key, value in iterate_leaves(config):
        if f"{key}.".startswith(_NOT_LOGGED) or value is None:
            continue
        if isinstance(value, bool | int | float):
            yield key, value
        else:
            yield key, "***" if _SECRET_KEY.search(key) else redact(str(value))


def _select_values(record: RoundRecord, *, unix_s: float) -> Values:
    values = {
        **{f"train/{name}": value for name, value in record.train_metrics.items()},
        "train_loss": record.train_loss,
        **{status.value: float(record.count(status)) for status in Status},
        "retries": float(record.attempt),
        "seconds": record.seconds,
        "virtual_s": record.virtual_s,
        **record.metrics,
    }
    if record.staleness:
        num = sum(record.staleness.values())
        values["mean_staleness"] = sum(age * n for age, n in record.staleness.items()) / num
    if math.isnan(record.train_loss):  # no client reported one
        del values["train_loss"]
    return Values(record.round_num, unix_s, values)
