"""Prefetch the next model while the client still trains on the current one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from fedlearn.client.conversation import Event, ModelFetched
from fedlearn.client.home import Home
from fedlearn.client.live_session import LiveSession, cancel
from fedlearn.client.tasks import OpenTask
from fedlearn.core.clock import Clock
from fedlearn.errors import ConnectionRefused, DeploymentError, PolicyViolation, ProtocolError

#: A fetch starts this many times its expected duration early: an upload may share the link.
_MARGIN = 2.0

_log = structlog.get_logger(__name__)


@dataclass
class _TimedTraining:
    begun_s: float
    fraction: float = 0.0


@dataclass(kw_only=True)
class TrainingTimes:
    """Estimates when the first of the current trainings will end.

    The estimate uses the trainer's reported progress, or else the duration of the last training.

    Attributes:
        last_s: Duration of the last complete training, in seconds; ``None`` before the first.
    """

    last_s: float | None = None
    _current: dict[str, _TimedTraining] = field(default_factory=dict)  # by run

    def begin(self, run_id: str, now_s: float) -> None:
        """Record the start of a training."""
        self._current[run_id] = _TimedTraining(now_s)

    def update(self, run_id: str, fraction: float) -> None:
        """Record the share of a training that is done, [0, 1], as the trainer reports."""
        if run_id in self._current:
            self._current[run_id].fraction = fraction

    def end(self, run_id: str, now_s: float, *, is_whole: bool) -> None:
        """Record the end of a training; ``is_whole`` is false if it was cancelled."""
        training = self._current.pop(run_id, None)
        if training is not None and is_whole:
            self.last_s = now_s - training.begun_s

    def left_s(self, now_s: float) -> float:
        """Estimate the seconds until a training ends; 0 if there is none, or if unknown.

        Example:
            >>> times = TrainingTimes()
            >>> times.begin("run", 10.0)
            >>> times.update("run", 0.25)
            >>> times.left_s(12.0)
            6.0
        """
        return min(
            (self._estimate_left_s(each, now_s) for each in self._current.values()), default=0.0
        )

    def _estimate_left_s(self, training: _TimedTraining, now_s: float) -> float:
        elapsed_s = now_s - training.begun_s
        if training.fraction > 0.0:
            return elapsed_s * (1.0 - training.fraction) / training.fraction
        return 0.0 if self.last_s is None else max(0.0, self.last_s - elapsed_s)


@dataclass(kw_only=True, eq=False)
class ModelPrefetcher:
    """Prefetches a model so that it arrives shortly before the current training ends.

    Starting as late as possible gets the newest model. One model is fetched at a time; a fetch that
    fails is not retried. Use it from the event loop only.

    Attributes:
        post: Called with :class:`ModelFetched` when a model has arrived.
        require_allowed: Raises :class:`~fedlearn.errors.PolicyViolation` for a model that this
            client would refuse to train on.
        times: Timing of the current trainings.
    """

    home: Home
    clock: Clock
    post: Callable[[Event], None]
    require_allowed: Callable[[OpenTask], None]
    times: TrainingTimes = field(default_factory=TrainingTimes)
    _wanted: OpenTask | None = None
    _live: LiveSession | None = None
    _tried: OpenTask | None = None
    _last_s: float | None = None  # duration of the last fetch
    _job: "asyncio.Task[None] | None" = None

    def follow(self, wanted: OpenTask | None, live: LiveSession | None) -> None:
        """Set the model to prefetch and the session to use; ``None`` cancels the prefetch."""
        self._wanted, self._live = wanted, live
        if wanted is None and self._job is not None:
            self._job.cancel()
        self._start_if_due()

    def update_progress(self, run_id: str, fraction: float) -> None:
        """Update the progress of a run's training, and start the fetch if it is due."""
        self.times.update(run_id, fraction)
        self._start_if_due()

    async def stop(self) -> None:
        """Cancel the fetch; a partial download stays on disk."""
        if self._job is not None:
            await cancel([self._job])
            self._job = self._tried = None

    def _start_if_due(self) -> None:
        wanted, live = self._wanted, self._live
        is_busy = self._job is not None and not self._job.done()
        if wanted is None or live is None or wanted is self._tried or is_busy:
            return
        left_s = self.times.left_s(self.clock.now_s())
        # The first fetch starts at once, to learn how long one takes.
        if self._last_s is None or left_s <= _MARGIN * self._last_s:
            self._tried = wanted
            self._job = live.spawn(self._fetch(wanted, live))

    async def _fetch(self, task: OpenTask, live: LiveSession) -> None:
        begin_s, message = self.clock.now_s(), task.message
        try:
            self.require_allowed(task)
            self.home.require_space(message.num_bytes)
            path = self.home.prepare_prefetch(message.digest)
            await live.connection.download(message.digest, num_bytes=message.num_bytes, path=path)
        except (
            ConnectionError,
            ConnectionRefused,
            DeploymentError,
            PolicyViolation,
            ProtocolError,
        ) as error:  # harmless: the task itself fetches the model again, and reports errors then
            _log.debug("not_fetched_ahead", round_num=task.key.round_num, error=str(error))
            return
        self._last_s = self.clock.now_s() - begin_s
        self.post(ModelFetched(task))
