"""Fetching the model that comes next, while the one before is still trained on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from fedlearn.client.conversation import Event, Fetched
from fedlearn.client.home import Home
from fedlearn.client.live_session import LiveSession, cancel
from fedlearn.client.tasks import OpenTask
from fedlearn.core.clock import Clock
from fedlearn.errors import ConnectionRefused, DeploymentError, PolicyViolation, ProtocolError

#: How much earlier than the last one took a fetch begins: the link has an upload to carry, too.
_MARGIN = 2.0

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class TrainingTimes:
    """When the training in work will end, by how far it is and by how long the last one took.

    Attributes:
        begun_s: When the training in work began; ``None``: nothing is trained.
        fraction: How much of it is done, as the trainer says.
        last_s: How long the last one took; ``None``: nobody knows.
    """

    begun_s: float | None = None
    fraction: float = 0.0
    last_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Note that a training begins."""
        self.begun_s, self.fraction = now_s, 0.0

    def end(self, now_s: float, *, is_whole: bool) -> None:
        """Note that it has ended; ``is_whole``: it was not called off."""
        if self.begun_s is not None and is_whole:
            self.last_s = now_s - self.begun_s
        self.begun_s = None

    def left_s(self, now_s: float) -> float:
        """Return how long the training in work will go on; 0: nothing is, or nobody knows.

        Example:
            >>> times = TrainingTimes()
            >>> times.begin(10.0)
            >>> times.fraction = 0.25
            >>> times.left_s(12.0)
            6.0
        """
        if self.begun_s is None:
            return 0.0
        elapsed_s = now_s - self.begun_s
        if self.fraction > 0.0:
            return elapsed_s * (1.0 - self.fraction) / self.fraction
        return 0.0 if self.last_s is None else max(0.0, self.last_s - elapsed_s)


@dataclass(kw_only=True, eq=False)
class FetchingAhead:
    """Fetches a model so that it is here when the training in work ends, and not much earlier.

    The later it begins, the newer the model. Of what it is told to want it fetches one at a time;
    one that cannot be had is let go. All in the event loop.

    Attributes:
        post: Told that a model is here.
        require_allowed: Raises :class:`~fedlearn.errors.PolicyViolation` where this client would
            not train on it anyway.
        times: Of the training in work.
    """

    home: Home
    clock: Clock
    post: Callable[[Event], None]
    require_allowed: Callable[[OpenTask], None]
    times: TrainingTimes = field(default_factory=TrainingTimes)
    _wanted: OpenTask | None = None
    _live: LiveSession | None = None
    _tried: OpenTask | None = None
    _last_s: float | None = None  # that the last fetch took
    _job: "asyncio.Task[None] | None" = None

    def follow(self, wanted: OpenTask | None, live: LiveSession | None) -> None:
        """Have a model here in time, over a session; ``None``: none is wanted any more."""
        self._wanted, self._live = wanted, live
        if wanted is None and self._job is not None:
            self._job.cancel()
        self._begin_if_due()

    def progressed(self, fraction: float) -> None:
        """Note how far the training in work is."""
        self.times.fraction = fraction
        self._begin_if_due()

    async def stop(self) -> None:
        """Fetch nothing for now; what is here in part stays."""
        if self._job is not None:
            await cancel([self._job])
            self._job = self._tried = None

    def _begin_if_due(self) -> None:
        wanted, live = self._wanted, self._live
        is_busy = self._job is not None and not self._job.done()
        if wanted is None or live is None or wanted is self._tried or is_busy:
            return
        left_s = self.times.left_s(self.clock.now_s())
        if self._last_s is None or left_s <= _MARGIN * self._last_s:
            self._tried = wanted
            self._job = live.spawn(self._fetch(wanted, live))

    async def _fetch(self, task: OpenTask, live: LiveSession) -> None:
        begin_s, message = self.clock.now_s(), task.message
        try:
            self.require_allowed(task)
            self.home.require_space(message.num_bytes)
            path = self.home.ahead(message.digest)
            await live.connection.download(message.digest, num_bytes=message.num_bytes, path=path)
        except (
            ConnectionError,
            ConnectionRefused,
            DeploymentError,
            PolicyViolation,
            ProtocolError,
        ) as error:  # nobody waits for it: it is asked for in its turn, and judged then
            _log.debug("not_fetched_ahead", round_num=task.key.round_num, error=str(error))
            return
        self._last_s = self.clock.now_s() - begin_s
        self.post(Fetched(task))
